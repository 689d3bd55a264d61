//! A source's right to write one entry.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::sync::watch;

use super::cache::{Cache, Slot, lock};
use super::entry::{Entry, Failure, Good, Key, Origin};
use super::renewal::{RenewalDesk, Renewals};
use super::subscription::Observed;
use crate::secret::{KeyPair, Resource, Secret, SecretName};

/// How long an entry on demand that has a good value outlives its last stream: an Envoy that restarts gets the value
/// even if the files have become bad meanwhile.
pub const LINGER: Duration = Duration::from_secs(300);

/// Outcome of [`Publisher::publish`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Published {
    /// Subscribers see a new value.
    Changed,
    /// These bytes are served already.
    Same,
    /// A source of higher rank holds the entry, or its workload was removed.
    Outranked,
    /// Files that peers asked for take too many bytes. The source is asked for this one again when there is room.
    NoRoom,
}

/// The right of one source to write one entry.
#[derive(Debug)]
pub struct Publisher {
    cache: Cache,
    slot: Arc<Slot>,
    key: Key,
    origin: Origin,
}

impl Publisher {
    pub(super) fn new(cache: Cache, slot: Arc<Slot>, key: Key, origin: Origin) -> Self {
        Self { cache, slot, key, origin }
    }

    pub fn cache(&self) -> &Cache {
        &self.cache
    }

    pub fn key(&self) -> &Key {
        &self.key
    }

    /// Announces the key pair that is published next: roots that are published before it are served with CRLs only if
    /// the CRLs cover its chain. A pair that is outranked changes nothing.
    pub fn announce(&self, pair: &KeyPair, now: SystemTime) {
        let is_outranked = self.slot.entry().holder > Some(self.origin);
        if self.key.name != SecretName::Workload || is_outranked {
            return;
        }
        let roots = Key { workload: self.key.workload, name: SecretName::Roots };
        if let Some(slot) = self.cache.slot(&roots) {
            slot.set_revocation(&roots.name, now, |revocation| revocation.set_chain(pair));
        }
    }

    /// Serves `secret`, and ends this source's failure.
    pub fn publish(&self, secret: Secret, received: SystemTime, renews: Option<SystemTime>) -> Published {
        if let Secret::KeyPair(pair) = &secret {
            self.announce(pair, received);
        }
        let revocation = lock(&self.slot.extras().revocation);
        let secret = secret.with_revocation(&revocation, received);
        let resource = Resource::encode(&self.key.name, &secret);
        if self.key.name.is_on_demand()
            && let Err(no_room) = self.cache.make_room(&self.key, &self.slot, &resource.payload)
        {
            self.fail(no_room.to_string());
            return Published::NoRoom;
        }
        let mut outcome = Published::Outranked;
        self.slot.modify(|entry| {
            if entry.holder > Some(self.origin) {
                return false;
            }
            let same = entry.good.as_ref().is_some_and(|good| good.resource.version == resource.version);
            outcome = if same { Published::Same } else { Published::Changed };
            let recovered = entry.clear_failures(self.origin);
            let taken_over = entry.holder != Some(self.origin);
            entry.holder = Some(self.origin);
            // The same bytes keep the time they were received at, and wake no reader.
            let arrived = entry.good.as_ref().filter(|_| same).map(|good| good.received);
            let (origin, received) = (self.origin, arrived.unwrap_or(received));
            entry.good = Some(Arc::new(Good { secret, resource, origin, received, renews }));
            entry.is_withdrawn = false;
            !same || taken_over || recovered
        });
        if outcome == Published::Changed {
            self.report_federated();
        }
        outcome
    }

    /// Notes why there is no newer value. The good one stays. Where a source of higher rank holds the entry, the
    /// failure does not matter.
    pub fn fail(&self, reason: String) {
        self.note(Some(Failure::new(self.origin, reason, false)), false);
    }

    /// Takes back what this source serves, for `reason`: there is nothing to serve, and streams tell their clients.
    pub fn withdraw(&self, reason: String) {
        self.slot.modify(|entry| {
            if entry.holder > Some(self.origin) {
                return false;
            }
            let is_news = entry.good.take().is_some() | !std::mem::replace(&mut entry.is_withdrawn, true);
            entry.failures.set(self.origin, Some(Failure::new(self.origin, reason, false))) || is_news
        });
        if self.key.name.is_on_demand() {
            self.cache.lock().forget_value(&self.slot);
        }
        self.report_federated();
    }

    /// Those who serve all trust bundles together follow the workload's own.
    fn report_federated(&self) {
        if matches!(self.key.name, SecretName::Federated(_)) {
            self.cache.federation_changed(self.key.workload);
        }
    }

    /// Lets sources of lower rank publish again: this one has nothing more to deliver. The value stays until one of them
    /// publishes, and so does the reason, if there is one.
    pub fn release(&self, reason: Option<String>) {
        self.note(reason.map(|reason| Failure::new(self.origin, reason, true)), true);
    }

    fn note(&self, failure: Option<Failure>, lets_go: bool) {
        self.slot.modify(|entry| {
            if entry.holder > Some(self.origin) {
                return false;
            }
            let released = lets_go && entry.holder == Some(self.origin);
            if released {
                entry.holder = None;
            }
            entry.failures.set(self.origin, failure) || released
        });
    }

    /// Returns once no stream has been subscribed for a while: five minutes where there is a good value.
    pub async fn deserted(&self) {
        // Made before the look, so that no stream leaves unnoticed in between.
        let deserted = &self.slot.extras().deserted;
        let streams = || {
            let observed = lock(&self.slot.observed);
            (observed.streams, observed.arrivals)
        };
        loop {
            let before = streams();
            if before.0 > 0 {
                deserted.notified().await;
                continue;
            }
            let is_good = self.slot.entry().good.is_some();
            if is_good {
                tokio::select! {
                    () = tokio::time::sleep(LINGER) => {}
                    // A name that a stream waits for goes before a value that no stream has.
                    () = self.cache.room_wanted() => {}
                }
            }
            if streams() == before {
                return;
            }
        }
    }

    /// The renewals that are requested of this source.
    pub fn renewals(&self) -> Renewals {
        self.slot.extras().renewal.get_or_init(|| RenewalDesk::new(self.origin));
        Renewals(Arc::clone(&self.slot))
    }

    /// Returns once every open stream has acknowledged the value that is served, or one has rejected it: waiting longer
    /// would change nothing. At once where there is no stream.
    pub async fn settled(&self) {
        let mut entry = self.watch();
        loop {
            // Before the look, so that no verdict is lost in between.
            let verdict = self.slot.extras().verdict.notified();
            let served = entry.borrow_and_update().good.as_ref().map(|good| good.resource.version.clone());
            let Some(version) = served else { return };
            if lock(&self.slot.observed).is_settled(&version) {
                return;
            }
            tokio::select! {
                () = verdict => {}
                _ = entry.changed() => {}
            }
        }
    }

    /// The entry's streams and their verdicts.
    pub fn observed(&self) -> Observed {
        lock(&self.slot.observed).clone()
    }

    /// The entry as it is now.
    pub fn entry(&self) -> Entry {
        self.slot.entry().clone()
    }

    /// Follows the entry, whichever source writes it.
    pub fn watch(&self) -> watch::Receiver<Entry> {
        self.slot.watch()
    }
}
