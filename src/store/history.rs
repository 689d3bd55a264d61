//! What happened to the workload's own secrets: the last changes of their entries, for people.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use tokio::sync::watch;

use crate::base::clock::Clock;
use crate::base::failure_log::FailureLog;
use crate::base::limits;
use crate::secret::{Secret, SecretName, Version};
use crate::store::{Cache, Entry, Key, Origin, Workload};

/// The last changes, the oldest first. Clones are the same history.
#[derive(Clone, Debug, Default)]
pub struct History(Arc<Mutex<VecDeque<Event>>>);

/// One change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// When it was seen.
    pub at: SystemTime,
    /// Which secret.
    pub name: SecretName,
    /// What happened to it.
    pub what: What,
}

/// What can happen to a secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum What {
    /// Another value is served.
    Served {
        /// Its version.
        version: Version,
        /// Where it comes from.
        origin: Origin,
        /// What it is, for people.
        text: String,
        /// From when it is valid.
        not_before: Option<SystemTime>,
        /// Until when.
        not_after: SystemTime,
    },
    /// No newer value can be had, for this reason.
    Failing(String),
    /// Newer values can be had again.
    Recovered,
}

impl History {
    /// The changes, the oldest first.
    pub fn events(&self) -> Vec<Event> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
    }

    /// Follows the entries of `workload`'s own secrets for ever.
    pub async fn follow(self, cache: Cache, workload: Workload, clock: Clock) {
        let follow = |name: SecretName| {
            let entry = cache.follow(Key { workload, name: name.clone() });
            self.clone().follow_one(name, entry, clock.clone())
        };
        tokio::join!(follow(SecretName::Workload), follow(SecretName::Roots));
    }

    async fn follow_one(self, name: SecretName, mut entry: watch::Receiver<Entry>, clock: Clock) {
        let (mut served, mut failures) = (None, FailureLog::default());
        loop {
            let now = entry.borrow_and_update().clone();
            let good = now.good.as_ref();
            if let Some(good) = good.filter(|good| served.as_ref() != Some(&good.resource.version)) {
                let not_before = match &good.secret {
                    Secret::KeyPair(pair) => Some(pair.leaf().not_before),
                    Secret::TrustBundle(_) => None,
                };
                let version = good.resource.version.clone();
                served = Some(version.clone());
                let (origin, text, not_after) =
                    (good.origin, good.secret.to_string(), good.secret.not_after());
                self.note(&clock, &name, What::Served { version, origin, text, not_before, not_after });
            }
            match now.failure() {
                Some(reason) if failures.is_new(&reason) => self.note(&clock, &name, What::Failing(reason)),
                None if failures.recovered() => self.note(&clock, &name, What::Recovered),
                _ => {}
            }
            if entry.changed().await.is_err() {
                return;
            }
        }
    }

    fn note(&self, clock: &Clock, name: &SecretName, what: What) {
        let mut events = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if events.len() == limits::EVENTS {
            events.pop_front();
        }
        events.push_back(Event { at: clock.now(), name: name.clone(), what });
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
        let cache = Cache::default();
        let key = Key { workload: Workload(0), name: SecretName::Roots };
        let publisher = cache.publisher(key, Origin::Ca);
        let history = History::default();
        tokio::spawn(history.clone().follow(cache, Workload(0), Clock::starting_at(UNIX_EPOCH)));
        let publish = || {
            let key = SigningKey::generate(KeyType::EcdsaP256).unwrap();
            let root = rcgen::CertificateParams::default().self_signed(&key).unwrap();
            let bundle = TrustBundle::new(vec![root.der().clone()]).unwrap();
            publisher.publish(Secret::TrustBundle(bundle), UNIX_EPOCH, None);
        };
        let seen = async || {
            tokio::time::sleep(std::time::Duration::from_secs(1)).await;
            history.events().into_iter().map(|event| event.what).collect::<Vec<_>>()
        };
        publisher.fail("down, request 1".to_owned());
        assert_eq!(seen().await, [What::Failing("down, request 1".to_owned())]);
        publisher.fail("down, request 2".to_owned());
        assert_eq!(seen().await.len(), 1, "the same failure");
        publish();
        let all = seen().await;
        assert!(matches!(&all[1..], [What::Served { .. }, What::Recovered]), "{all:?}");
        assert!(seen().await.len() == 3);
        for _ in 0..limits::EVENTS {
            publish();
            seen().await;
        }
        let all = seen().await;
        assert!(all.len() == limits::EVENTS && all.iter().all(|what| matches!(what, What::Served { .. })));
    }
}
