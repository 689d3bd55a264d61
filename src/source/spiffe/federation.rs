//! The trust bundles of other trust domains that an endpoint delivers beside the own one.

use std::collections::{BTreeMap, HashMap};
use std::time::SystemTime;

use bytes::Bytes;

use crate::base::failure_log::FailureLog;
use crate::base::limits;
use crate::base::text;
use crate::pki::certificate::split;
use crate::secret::{FederatedName, Secret, SecretName, TrustBundle};
use crate::store::{Cache, Key, Origin, Published, Publisher, Workload};

/// Why a domain has no bundle any longer.
const DROPPED: &str = "the SPIFFE endpoint no longer delivers this bundle";

/// The bundles of one answer. A bad one costs itself alone.
#[derive(Debug, Default)]
pub(super) struct Foreign {
    bundles: BTreeMap<FederatedName, Result<TrustBundle, String>>,
    /// What can't be attributed to a trust domain, for people.
    problems: Vec<String>,
}

impl Foreign {
    /// Reads what an answer for an identity in the trust domain `own` has.
    pub(super) fn read(bundles: &HashMap<String, Bytes>, own: &str) -> Self {
        let mut read = Self::default();
        for (domain, der) in bundles {
            match FederatedName::new(domain) {
                Ok(name) if name.domain() == own => {
                    let problem = format!(
                        "{} is the own trust domain, whose bundle comes with the SVID",
                        name.as_str()
                    );
                    read.problems.push(problem);
                }
                Ok(name) => drop(read.bundles.insert(name, bundle(der))),
                Err(error) => read.problems.push(text::sanitize_for_log(&error.to_string())),
            }
        }
        read.problems.sort_unstable();
        read.problems.truncate(limits::NODES_SHOWN);
        read
    }

    /// For people.
    #[cfg(any(test, fuzzing))]
    pub(super) fn problems(&self) -> impl Iterator<Item = &String> {
        self.bundles.values().filter_map(|bundle| bundle.as_ref().err()).chain(&self.problems)
    }
}

fn bundle(der: &[u8]) -> Result<TrustBundle, String> {
    let roots = split(der, limits::CERTIFICATES).map_err(|error| error.to_string())?;
    TrustBundle::new(roots).map_err(|error| error.to_string())
}

/// Keeps the bundles of other trust domains as an endpoint delivers them.
#[derive(Debug)]
pub(super) struct Federation {
    cache: Cache,
    workload: Workload,
    /// Those that were ever delivered.
    publishers: BTreeMap<FederatedName, Publisher>,
    failures: FailureLog,
}

impl Federation {
    pub(super) fn new(cache: &Cache, workload: Workload) -> Self {
        let (publishers, failures) = Default::default();
        Self { cache: cache.clone(), workload, publishers, failures }
    }

    /// Publishes the bundles of an answer, and takes back those that it no longer has.
    pub(super) fn take(&mut self, foreign: Foreign, now: SystemTime) {
        let Foreign { bundles, mut problems } = foreign;
        for (name, publisher) in &self.publishers {
            if !bundles.contains_key(name) && serves(publisher) {
                tracing::info!(name = name.as_str(), "federated trust bundle withdrawn");
                publisher.withdraw(DROPPED.to_owned());
            }
        }
        for (name, bundle) in bundles {
            let Some(publisher) = self.publisher(&name) else {
                problems.push(format!("there are more than {} trust domains", limits::FEDERATED_BUNDLES));
                break;
            };
            match bundle {
                Ok(bundle) => {
                    let roots = bundle.roots().len();
                    let published = publisher.publish(Secret::TrustBundle(bundle), now, None);
                    if published == Published::Changed {
                        tracing::info!(name = name.as_str(), roots, "federated trust bundle received");
                    }
                }
                Err(reason) => {
                    problems.push(format!("{}: {reason}", name.as_str()));
                    publisher.fail(format!("the SPIFFE endpoint's bundle can't be used: {reason}"));
                }
            }
        }
        let reason = problems.join("; ");
        if problems.is_empty() {
            self.failures.recovered();
        } else if self.failures.is_new(&reason) {
            tracing::warn!(reason, "federated trust bundles of the SPIFFE endpoint not used");
        }
    }

    /// Notes why no newer bundles come.
    pub(super) fn fail(&self, reason: &str) {
        for publisher in self.publishers.values().filter(|publisher| serves(publisher)) {
            publisher.fail(reason.to_owned());
        }
    }

    /// None where there are too many.
    fn publisher(&mut self, name: &FederatedName) -> Option<&Publisher> {
        if !self.publishers.contains_key(name) {
            if self.publishers.len() >= limits::FEDERATED_BUNDLES {
                return None;
            }
            let key = Key { workload: self.workload, name: SecretName::Federated(name.clone()) };
            let publisher = self.cache.publisher(key, Origin::WORKLOAD_API);
            self.publishers.insert(name.clone(), publisher);
        }
        self.publishers.get(name)
    }
}

fn serves(publisher: &Publisher) -> bool {
    publisher.entry().good.is_some_and(|good| good.origin == Origin::WORKLOAD_API)
}
