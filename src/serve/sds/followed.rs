//! What a name on a stream follows: an entry of the store, or entries that a name of SPIFFE means.
//!
//! A name of SPIFFE has no entry of its own: the workload's identity may be unknown until the first certificate. Its value is
//! made of the workload's key pair, its trust bundle and those of other trust domains. Verdicts count for one of these: that of
//! the trust domain that is named, else the workload's own.

use std::collections::VecDeque;
use std::sync::Arc;

use super::Service;
use super::naming::{Naming, SpiffeValidator};
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
    validator: SpiffeValidator,
}

impl Node {
    /// Reads a node's encoded metadata.
    pub(super) fn of(naming: Naming, metadata: Option<&[u8]>) -> Self {
        let validator = match Naming::is_spiffe_validator_disabled(metadata) {
            true => SpiffeValidator::Off,
            false => naming.validator,
        };
        Self { cluster: naming.cluster(metadata), validator }
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
    has_validator: bool,
    key_pair: Subscription,
    /// The workload's own trust bundle; none where the name is that of a key pair. Readers of it learn of those of other trust
    /// domains too.
    roots: Option<Subscription>,
    /// The trust bundle of the other trust domain that is named.
    foreign: Option<Subscription>,
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
        let has_validator = node.validator != SpiffeValidator::Off;
        let is_renamed = node.validator == SpiffeValidator::All && **text == *SecretName::Roots.as_str();
        let name = if is_renamed { Some(SpiffeName::AllBundles) } else { SpiffeName::parse(text) };
        let Some(name) = name else {
            let key = service.key(text, node.cluster.as_ref()).map_err(NotFollowed::Unknown)?;
            let is_on_demand = key.name.is_on_demand();
            return Ok(Self::Entry { subscription: subscribe(key)?, is_on_demand });
        };
        let own = |name| Key { workload: service.workload, name };
        let roots = match name {
            // The plain form can't say which roots are whose.
            SpiffeName::AllBundles if !has_validator => {
                return Err(NotFollowed::Unknown(BadName::Malformed {
                    name: text.to_string(),
                    reason: "trust bundles of several trust domains need Envoy's SPIFFE validator, and \
                             disable_spiffe_cert_validation in the node's metadata or --spiffe-validator off turns it off",
                }));
            }
            SpiffeName::Identity(_) => None,
            SpiffeName::Bundle(_) | SpiffeName::AllBundles => Some(subscribe(own(SecretName::Roots))?),
        };
        let foreign = match &name {
            SpiffeName::Bundle(id) => service.cache.federated_key(service.workload, id.trust_domain()),
            SpiffeName::Identity(_) | SpiffeName::AllBundles => None,
        };
        Ok(Self::Spiffe(Box::new(FollowedSpiffe {
            text: Arc::clone(text),
            name,
            has_validator,
            key_pair: subscribe(own(SecretName::Workload))?,
            roots,
            foreign: foreign.map(subscribe).transpose()?,
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
            Self::Spiffe(followed) => {
                followed.foreign.as_ref().or(followed.roots.as_ref()).unwrap_or(&followed.key_pair)
            }
        }
    }

    fn subscription_mut(&mut self) -> &mut Subscription {
        match self {
            Self::Entry { subscription, .. } => subscription,
            Self::Spiffe(followed) => {
                followed.foreign.as_mut().or(followed.roots.as_mut()).unwrap_or(&mut followed.key_pair)
            }
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
        let look = |subscription: &Subscription| subscription.entry(|entry| look_at_bundle(service, entry));
        let roots = self.roots.as_ref().map(look);
        let foreign = self.foreign.as_ref().map(look);
        drop(together);
        let own = match own {
            Some(Some(own)) => own,
            Some(None) => return self.unknown(),
            None => return key_pair,
        };
        let domain = own.trust_domain();
        match (&self.name.clone(), roots) {
            (SpiffeName::Identity(id), _) if *id == own => {
                self.found(key_pair, |resource| resource.payload.clone())
            }
            (SpiffeName::Bundle(id), Some(roots)) if id.trust_domain() == domain => {
                self.foreign = None;
                self.found_bundle(id.trust_domain().to_owned(), roots)
            }
            (SpiffeName::Bundle(id), _) => match foreign {
                Some(foreign) => self.found_bundle(id.trust_domain().to_owned(), foreign),
                None => self.unknown(),
            },
            (SpiffeName::AllBundles, Some((roots, bundle))) => {
                let others = service.cache.federated(service.workload, service.clock.now());
                let others = others.iter().filter(|one| one.name.domain() != domain);
                let others = others.filter_map(|one| Some((one.name.domain(), one.bundle()?)));
                let own = bundle.iter().map(|bundle| (domain, bundle));
                self.found(roots, |_| Payload::of_validator(own.chain(others)))
            }
            _ => self.unknown(),
        }
    }

    /// The trust bundle of `domain`, in the form that the client wants.
    fn found_bundle(&mut self, domain: String, (look, bundle): (Look, Option<TrustBundle>)) -> Look {
        let has_validator = self.has_validator;
        self.found(look, |resource| match bundle {
            Some(bundle) if has_validator => Payload::of_validator([(&*domain, &bundle)]),
            _ => resource.payload.clone(),
        })
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

fn look_at_bundle(service: &Service, entry: &Entry) -> (Look, Option<TrustBundle>) {
    let bundle = entry.good.as_ref().and_then(|good| match &good.secret {
        Secret::TrustBundle(bundle) => Some(bundle.clone()),
        Secret::KeyPair(_) => None,
    });
    (look_at(service, entry), bundle)
}

#[cfg(test)]
mod tests;
