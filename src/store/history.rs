//! The last changes of the workloads' own secrets, for people.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use tokio::sync::watch;

use super::cache::Cache;
use super::entry::{Entry, Key, Origin};
use super::workload::Workload;
use crate::base::clock::Clock;
use crate::base::failure_log::FailureLog;
use crate::base::limits;
use crate::secret::{Secret, SecretName, Version};

/// The last changes of each workload, the oldest first. Clones are the same history.
#[derive(Clone, Debug, Default)]
pub struct History(Arc<Mutex<HashMap<Workload, VecDeque<Event>>>>);

/// One change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    pub at: SystemTime,
    pub name: SecretName,
    pub change: Change,
}

/// What can happen to a secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// Another value is served.
    Served {
        version: Version,
        origin: Origin,
        /// A description of the value, for people.
        text: String,
        not_before: Option<SystemTime>,
        not_after: SystemTime,
    },
    /// Its source can't deliver a newer value, for this reason.
    Failing(String),
    /// Its source can deliver newer values again.
    Recovered,
}

impl History {
    /// The changes of `workload`, the oldest first.
    pub fn events(&self, workload: Workload) -> Vec<Event> {
        self.lock().get(&workload).map(|events| events.iter().cloned().collect()).unwrap_or_default()
    }

    /// Drops the changes of a workload that was removed.
    pub fn forget(&self, workload: Workload) {
        self.lock().remove(&workload);
    }

    /// Follows the own secrets of `workload` for ever.
    pub async fn follow(self, cache: Cache, workload: Workload, clock: Clock) {
        let follow = |name: SecretName| {
            let entry = cache.follow(Key { workload, name: name.clone() });
            self.clone().follow_one(workload, name, entry, clock.clone())
        };
        tokio::join!(follow(SecretName::Workload), follow(SecretName::Roots));
    }

    async fn follow_one(
        self,
        workload: Workload,
        name: SecretName,
        mut entry: watch::Receiver<Entry>,
        clock: Clock,
    ) {
        let (mut served, mut failures) = (None, FailureLog::default());
        let note = |change| self.note(workload, Event { at: clock.now(), name: name.clone(), change });
        loop {
            let now = entry.borrow_and_update().clone();
            let good = now.good.as_ref();
            if let Some(good) = good.filter(|good| served.as_ref() != Some(&good.resource.version)) {
                let version = good.resource.version.clone();
                served = Some(version.clone());
                note(Change::Served {
                    version,
                    origin: good.origin,
                    text: good.secret.to_string(),
                    not_before: match &good.secret {
                        Secret::KeyPair(pair) => Some(pair.leaf().not_before),
                        Secret::TrustBundle(_) => None,
                    },
                    not_after: good.secret.not_after(),
                });
            }
            match now.failure() {
                Some(reason) if failures.is_new(&reason) => note(Change::Failing(reason)),
                None if failures.recovered() => note(Change::Recovered),
                _ => {}
            }
            if entry.changed().await.is_err() {
                return;
            }
        }
    }

    fn note(&self, workload: Workload, event: Event) {
        let mut all = self.lock();
        let events = all.entry(workload).or_default();
        if events.len() == limits::EVENTS {
            events.pop_front();
        }
        events.push_back(event);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Workload, VecDeque<Event>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::time::UNIX_EPOCH;

    use super::*;
    use crate::pki::key::{KeyType, SigningKey};
    use crate::secret::TrustBundle;

    #[tokio::test(start_paused = true)]
    async fn changes_are_noted_once_and_the_oldest_go() {
        let (cache, workload) = Cache::with_workload("");
        let key = Key { workload, name: SecretName::Roots };
        let publisher = cache.publisher(key, Origin::CA);
        let history = History::default();
        tokio::spawn(history.clone().follow(cache, workload, Clock::starting_at(UNIX_EPOCH)));
        let publish = || {
            let key = SigningKey::generate(KeyType::EcdsaP256).unwrap();
            let root = rcgen::CertificateParams::default().self_signed(&key).unwrap();
            let bundle = TrustBundle::new(vec![root.der().clone()]).unwrap();
            publisher.publish(Secret::TrustBundle(bundle), UNIX_EPOCH, None);
        };
        let seen = async || {
            tokio::time::sleep(std::time::Duration::from_secs(1)).await;
            history.events(workload).into_iter().map(|event| event.change).collect::<Vec<_>>()
        };
        publisher.fail("down, request 1".to_owned());
        assert_eq!(seen().await, [Change::Failing("down, request 1".to_owned())]);
        publisher.fail("down, request 2".to_owned());
        assert_eq!(seen().await.len(), 1, "the same failure");
        publish();
        let all = seen().await;
        assert!(matches!(&all[1..], [Change::Served { .. }, Change::Recovered]), "{all:?}");
        assert!(seen().await.len() == 3);
        for _ in 0..limits::EVENTS {
            publish();
            seen().await;
        }
        let all = seen().await;
        assert!(
            all.len() == limits::EVENTS && all.iter().all(|change| matches!(change, Change::Served { .. }))
        );
    }
}
