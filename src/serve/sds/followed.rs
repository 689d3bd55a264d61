//! What a name on a stream follows: an entry of the store, or entries that a name of SPIFFE means.
//!
//! A name of SPIFFE has no entry of its own: the workload's identity may be unknown until the first certificate. Its value is
//! made of the workload's key pair and trust bundle, so verdicts on it count for these.

use std::collections::VecDeque;
use std::sync::Arc;

use super::Service;
use super::naming::Naming;
use crate::base::spiffe_id::SpiffeId;
use crate::secret::{BadName, Payload, Resource, Secret, SecretName, SpiffeName, TrustBundle, Version};
use crate::store::{Entry, Key, NotServed, Subscriber, Subscription};

/// How many versions of a name's own are known by those of its entry: as many as wait for verdicts, and more.
const VERSIONS: usize = 64;

/// What a client says of itself.
#[derive(Clone, Debug, Default)]
pub(super) struct Node {
    /// Where it runs.
    cluster: Option<Arc<str>>,
    /// It wants the bundles of SPIFFE's names in their plain form.
    is_validator_disabled: bool,
}

impl Node {
    /// Reads a node's encoded metadata.
    pub(super) fn of(naming: Naming, metadata: Option<&[u8]>) -> Self {
        let is_validator_disabled = Naming::is_spiffe_validator_disabled(metadata);
        Self { cluster: naming.cluster(metadata), is_validator_disabled }
    }
}

/// What a name follows.
pub(super) enum Followed {
    Entry {
        subscription: Subscription,
        is_on_demand: bool,
    },
    /// Boxed: few names are of this kind.
    Spiffe(Box<FollowedSpiffe>),
}

/// Why a name follows nothing.
pub(super) enum NotFollowed {
    Unknown(BadName),
    NotServed(Key, NotServed),
}

/// What there is to send for a name.
pub(super) enum Look {
    Found(Resource),
    /// Nothing now; with the reason if its source has failed, or knows that there is nothing.
    Missing {
        reason: Option<String>,
        is_withdrawn: bool,
    },
    Unknown(BadName),
}

/// A name of SPIFFE.
pub(super) struct FollowedSpiffe {
    text: Arc<str>,
    name: SpiffeName,
    is_validator_disabled: bool,
    key_pair: Subscription,
    /// None where the name is that of a key pair.
    roots: Option<Subscription>,
    /// The newest versions of the name, each with that of the entry that it was made of.
    versions: VecDeque<(Version, Version)>,
}

impl Followed {
    pub(super) fn new(
        service: &Service,
        text: &Arc<str>,
        node: &Node,
        subscriber: &Subscriber,
        number: u32,
    ) -> Result<Self, NotFollowed> {
        let subscribe = |key: Key| {
            let subscription = service.cache.subscribe_as(&key, subscriber, number);
            subscription.map_err(|reason| NotFollowed::NotServed(key, reason))
        };
        let Some(name) = SpiffeName::parse(text) else {
            let key = service.key(text, node.cluster.as_ref()).map_err(NotFollowed::Unknown)?;
            let is_on_demand = key.name.is_on_demand();
            return Ok(Self::Entry { subscription: subscribe(key)?, is_on_demand });
        };
        let own = |name| Key { workload: service.workload, name };
        let roots = match name {
            // The plain form can't say which roots are whose.
            SpiffeName::AllBundles if node.is_validator_disabled => {
                return Err(NotFollowed::Unknown(BadName::Unknown(text.to_string())));
            }
            SpiffeName::Identity(_) => None,
            SpiffeName::Bundle(_) | SpiffeName::AllBundles => Some(subscribe(own(SecretName::Roots))?),
        };
        Ok(Self::Spiffe(Box::new(FollowedSpiffe {
            text: Arc::clone(text),
            name,
            is_validator_disabled: node.is_validator_disabled,
            key_pair: subscribe(own(SecretName::Workload))?,
            roots,
            versions: VecDeque::new(),
        })))
    }

    /// A name on demand, which had to wait for room.
    pub(super) fn on_demand(subscription: Subscription) -> Self {
        Self::Entry { subscription, is_on_demand: true }
    }

    pub(super) fn is_on_demand(&self) -> bool {
        matches!(self, Self::Entry { is_on_demand: true, .. })
    }

    pub(super) fn look(&mut self, service: &Service) -> Look {
        match self {
            Self::Entry { subscription, .. } => subscription.entry(|entry| look_at(service, entry)),
            Self::Spiffe(followed) => followed.look(service),
        }
    }

    fn subscription(&self) -> &Subscription {
        match self {
            Self::Entry { subscription, .. } => subscription,
            Self::Spiffe(followed) => followed.roots.as_ref().unwrap_or(&followed.key_pair),
        }
    }

    fn subscription_mut(&mut self) -> &mut Subscription {
        match self {
            Self::Entry { subscription, .. } => subscription,
            Self::Spiffe(followed) => followed.roots.as_mut().unwrap_or(&mut followed.key_pair),
        }
    }

    /// The version of the entry that `version` of the name was made of.
    fn version_of_entry(&self, version: Version) -> Version {
        let Self::Spiffe(followed) = self else { return version };
        let known = followed.versions.iter().find(|(own, _)| *own == version);
        known.map_or(version, |(_, of_entry)| of_entry.clone())
    }

    pub(super) fn pushed(&self) {
        self.subscription().pushed();
    }

    pub(super) fn accepted(&mut self, version: Version) {
        let version = self.version_of_entry(version);
        self.subscription_mut().accepted(version);
    }

    pub(super) fn holds(&mut self, version: Version) {
        let version = self.version_of_entry(version);
        self.subscription_mut().holds(version);
    }

    /// True if no other stream rejected this version before.
    pub(super) fn rejected(&self, version: Version, reason: &str) -> bool {
        self.subscription().rejected(self.version_of_entry(version), reason)
    }
}

fn look_at(service: &Service, entry: &Entry) -> Look {
    match service.sendable(entry) {
        Ok(resource) => Look::Found(resource.clone()),
        Err(reason) => {
            let is_open = entry.good.is_none() && entry.failure().is_none();
            Look::Missing { reason: (!is_open).then_some(reason), is_withdrawn: entry.is_withdrawn }
        }
    }
}

impl FollowedSpiffe {
    fn look(&mut self, service: &Service) -> Look {
        // Files change both at once.
        let together = service.cache.together();
        let (own, key_pair) = self.key_pair.entry(|entry| (identity(entry), look_at(service, entry)));
        let roots = self.roots.as_ref().map(|roots| {
            roots.entry(|entry| {
                let bundle = entry.good.as_ref().and_then(|good| bundle(&good.secret));
                (look_at(service, entry), bundle)
            })
        });
        drop(together);
        let own = match own {
            Some(Some(own)) => own,
            Some(None) => return self.unknown(),
            None => return key_pair,
        };
        let is_own = match &self.name {
            SpiffeName::Identity(id) => *id == own,
            SpiffeName::Bundle(id) => id.trust_domain() == own.trust_domain(),
            SpiffeName::AllBundles => true,
        };
        match (is_own, roots) {
            (false, _) => self.unknown(),
            (true, None) => self.found(key_pair, |resource| resource.payload.clone()),
            (true, Some((roots, Some(bundle)))) if !self.is_validator_disabled => {
                self.found(roots, |_| Payload::of_validator(own.trust_domain(), &bundle))
            }
            (true, Some((roots, _))) => self.found(roots, |resource| resource.payload.clone()),
        }
    }

    /// What was found under the name of the entry, under this name.
    fn found(&mut self, look: Look, payload: impl FnOnce(&Resource) -> Payload) -> Look {
        let Look::Found(of_entry) = look else { return look };
        let resource = Resource::of(&self.text, payload(&of_entry));
        let version = &resource.version;
        if self.versions.back().is_none_or(|(known, _)| known != version) {
            self.versions.retain(|(known, _)| known != version);
            if self.versions.len() == VERSIONS {
                self.versions.pop_front();
            }
            self.versions.push_back((version.clone(), of_entry.version.clone()));
        }
        Look::Found(resource)
    }

    fn unknown(&self) -> Look {
        Look::Unknown(BadName::Unknown(self.text.chars().take(200).collect()))
    }
}

/// The identity that the entry of a key pair names; none before the first certificate.
fn identity(entry: &Entry) -> Option<Option<SpiffeId>> {
    match &entry.good.as_ref()?.secret {
        Secret::KeyPair(pair) => Some(pair.spiffe_id()),
        Secret::TrustBundle(_) => Some(None),
    }
}

fn bundle(secret: &Secret) -> Option<TrustBundle> {
    match secret {
        Secret::TrustBundle(bundle) => Some(bundle.clone()),
        Secret::KeyPair(_) => None,
    }
}

#[cfg(test)]
mod tests;
