//! Trust bundles of other trust domains: those of a workload, and those that all workloads share.
//!
//! Each is an entry of its own, [`SecretName::Federated`], which any source may publish. Who serves all bundles together follows
//! the workload's own entries: their readers are woken when a federated bundle changes, so that a workload without any pays nothing.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::SystemTime;

use super::cache::{Cache, Slot, lock};
use super::entry::{Good, Key};
use super::workload::Workload;
use crate::secret::{FederatedName, Secret, SecretName, TrustBundle};

/// The trust bundle of another trust domain.
#[derive(Clone, Debug)]
pub struct Federated {
    pub name: FederatedName,
    pub good: Arc<Good>,
}

impl Federated {
    /// None if the entry holds something else, which no source publishes.
    pub fn bundle(&self) -> Option<&TrustBundle> {
        match &self.good.secret {
            Secret::TrustBundle(bundle) => Some(bundle),
            Secret::KeyPair(_) => None,
        }
    }
}

impl Cache {
    /// The bundles of other trust domains that `workload` has, without those that have expired at `now`; in the order of their
    /// names. The workload's own go before those of [`Workload::EVERY`].
    pub fn federated(&self, workload: Workload, now: SystemTime) -> Vec<Federated> {
        let slots = self.federated_slots(workload);
        let mut found = BTreeMap::new();
        for slot in slots {
            let SecretName::Federated(name) = &slot.key.name else { continue };
            let good = slot.entry().good.clone().filter(|good| good.secret.not_after() > now);
            if let Some(good) = good {
                found.entry(name.clone()).or_insert(good);
            }
        }
        found.into_iter().map(|(name, good)| Federated { name, good }).collect()
    }

    /// The entry of the bundle of the trust domain `domain`, if a source publishes it for `workload`.
    pub fn federated_key(&self, workload: Workload, domain: &str) -> Option<Key> {
        let is_its = |slot: &&Arc<Slot>| matches!(&slot.key.name, SecretName::Federated(name) if name.domain() == domain);
        self.federated_slots(workload).iter().find(is_its).map(|slot| slot.key.clone())
    }

    /// The workload's own first.
    fn federated_slots(&self, workload: Workload) -> Vec<Arc<Slot>> {
        let slots = self.lock();
        let of = |owner| slots.federated.iter().filter(move |slot| slot.key.workload == owner);
        of(workload).chain(of(Workload::EVERY)).cloned().collect()
    }

    /// Wakes the readers of the identities with which a federated bundle of `owner` is served.
    pub(super) fn federation_changed(&self, owner: Workload) {
        let slots = self.lock();
        let all = slots.by_key.iter().map(|filed| &filed.0).filter(|slot| slot.key.name.is_own());
        let is_its = |slot: &&Arc<Slot>| owner == Workload::EVERY || slot.key.workload == owner;
        let own: Vec<_> = all.filter(is_its).cloned().collect();
        drop(slots);
        for slot in own {
            lock(&slot.subscribers).notify();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use super::*;
    use crate::base::clock::Clock;
    use crate::pki::crl::testing::Authority;
    use crate::store::{Connection, Origin, Published, Subscriber};

    fn bundle() -> Secret {
        Secret::TrustBundle(TrustBundle::new(vec![Authority::root("foreign").certificate]).unwrap())
    }

    fn key(workload: Workload, domain: &str) -> Key {
        Key { workload, name: SecretName::Federated(FederatedName::new(domain).unwrap()) }
    }

    fn domains(cache: &Cache, workload: Workload) -> Vec<String> {
        let all = cache.federated(workload, Clock::system().now());
        all.iter().map(|one| one.name.domain().to_owned()).collect()
    }

    #[test]
    fn a_workload_has_its_own_federated_bundles_and_those_of_every_workload() {
        let (cache, first) = Cache::with_workload("first");
        let second = cache.add_workload("second");
        let (now, shared) = (Clock::system().now(), bundle());
        let publish = |workload, domain, secret: &Secret| {
            cache.publisher(key(workload, domain), Origin::FILES).publish(secret.clone(), now, None)
        };
        assert_eq!(publish(Workload::EVERY, "two.example", &shared), Published::Changed);
        let own = bundle();
        assert_eq!(publish(first, "one.example", &own), Published::Changed);
        assert_eq!(publish(first, "two.example", &own), Published::Changed);
        assert_eq!(domains(&cache, first), ["one.example", "two.example"]);
        assert_eq!(domains(&cache, second), ["two.example"]);
        let roots = |workload| cache.federated(workload, now).pop().unwrap().bundle().unwrap().joined();
        assert_ne!(roots(first), roots(second), "a workload's own goes before that of all");
        assert_eq!(cache.federated_key(second, "two.example"), Some(key(Workload::EVERY, "two.example")));
        assert_eq!(cache.federated_key(second, "one.example"), None);
        assert!(cache.health_of(second, now).missing.iter().all(|one| one.name != "spiffe://two.example"));
        let names = |workload| cache.snapshot_of(workload).into_iter().map(|one| one.key.name.to_string());
        assert!(names(second).any(|name| name == "spiffe://two.example"));
        cache.remove_workload(first);
        assert!(cache.federated(first, now).iter().all(|one| one.name.domain() == "two.example"));
    }

    #[tokio::test]
    async fn readers_of_the_own_bundle_learn_of_a_federated_one() {
        let (cache, workload) = Cache::with_workload("");
        let subscriber = Subscriber::new(Connection::distinct());
        let roots = Key { workload, name: SecretName::Roots };
        let _publisher = cache.publisher(roots.clone(), Origin::CA);
        let subscription = cache.subscribe_as(&roots, &subscriber, 7).unwrap();
        for owner in [workload, Workload::EVERY] {
            let publisher = cache.publisher(key(owner, "two.example"), Origin::FILES);
            subscription.entry(|_| ());
            publisher.publish(bundle(), Clock::system().now(), None);
            assert_eq!(poll_fn(|cx| subscriber.poll_changes(cx)).await, [7]);
            subscription.entry(|_| ());
            publisher.withdraw("no longer federated".to_owned());
            assert_eq!(poll_fn(|cx| subscriber.poll_changes(cx)).await, [7]);
            assert_eq!(domains(&cache, workload), [""; 0]);
        }
    }
}
