//! The cache: its entries, its workloads.

use std::borrow::Borrow;
use std::collections::{BTreeMap, HashSet};
use std::hash::{Hash, Hasher};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use tokio::sync::{Notify, watch};

use super::demand::{Desertion, NotServed, Routes};
use super::entry::{Entry, Good, Key, Origin, Snapshot};
use super::health::Components;
use super::publisher::Publisher;
use super::renewal::RenewalDesk;
use super::room::{Connection, Room};
use super::subscription::{Observed, Subscribers};
use super::values::{Value, Values};
use super::workload::{Totals, Workload};
use crate::base::limits;
use crate::base::spiffe_id::SpiffeId;
use crate::secret::{Revocation, SecretName};

/// All entries of all workloads. Clones are the same cache.
#[derive(Clone, Debug, Default)]
pub struct Cache(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    slots: Mutex<Slots>,
    /// Wakes those who follow what readiness depends on: the workloads' own entries, the components' health, and which
    /// workloads there are.
    changes: watch::Sender<()>,
    /// Notified when a name on demand waits for room.
    room_wanted: Notify,
    /// See [`Cache::together`].
    together: Mutex<()>,
}

#[derive(Debug, Default)]
pub(super) struct Slots {
    pub(super) by_key: HashSet<Filed>,
    workloads: BTreeMap<Workload, Member>,
    next_workload: u32,
    /// Of the workloads that were removed.
    removed: Totals,
    /// Room for entries that exist because a stream asked for them.
    pub(super) room: Room,
    pub(super) values: Values,
    pub(super) routes: Routes,
    /// Those of trust bundles of other trust domains.
    pub(super) federated: Vec<Arc<Slot>>,
}

/// What the cache knows of a workload beside its entries.
#[derive(Debug)]
struct Member {
    name: Arc<str>,
    health: Components,
    /// The one that is requested, where that is known.
    identity: Option<SpiffeId>,
}

/// A slot that is found by its key.
#[derive(Debug)]
pub(super) struct Filed(pub(super) Arc<Slot>);

impl Borrow<Key> for Filed {
    fn borrow(&self) -> &Key {
        &self.0.key
    }
}

impl PartialEq for Filed {
    fn eq(&self, other: &Self) -> bool {
        self.0.key == other.0.key
    }
}

impl Eq for Filed {}

impl Hash for Filed {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.key.hash(state);
    }
}

#[derive(Debug)]
pub(super) struct Slot {
    pub(super) key: Key,
    entry: Mutex<Entry>,
    pub(super) subscribers: Mutex<Subscribers>,
    pub(super) observed: Mutex<Observed>,
    /// The connection that caused the entry, if it is on demand.
    pub(super) owner: Connection,
    /// Tells the source of a name on demand that the last stream has left.
    pub(super) desertion: Option<Desertion>,
    extras: OnceLock<Box<Extras>>,
}

/// What an entry needs once it is served or followed. Most names that streams make up never are.
#[derive(Debug, Default)]
pub(super) struct Extras {
    /// Of [`Inner`], where readiness depends on the entry.
    changes: Option<watch::Sender<()>>,
    /// The entry, for readers that are no streams.
    watched: OnceLock<watch::Sender<Entry>>,
    /// What the value of a name on demand takes.
    pub(super) value: Mutex<Value>,
    /// The CRLs that go into trust bundles, whichever source publishes the roots. Locked while the entry is written.
    pub(super) revocation: Mutex<Revocation>,
    /// Notified when the last stream leaves.
    pub(super) deserted: Notify,
    /// Notified when a stream gives a verdict or leaves.
    pub(super) verdict: Notify,
    /// Set by the source that can renew on request.
    pub(super) renewal: OnceLock<RenewalDesk>,
}

/// No code panics while it holds one of these locks, and their data is consistent between any two statements.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Cache {
    /// A cache with one workload, and its handle.
    pub fn with_workload(name: &str) -> (Self, Workload) {
        let cache = Self::default();
        let workload = cache.add_workload(name);
        (cache, workload)
    }

    /// Held while a source on another thread publishes a key pair and its roots, and by readers that must not see one without
    /// the other.
    pub fn together(&self) -> MutexGuard<'_, ()> {
        lock(&self.0.together)
    }

    /// Adds a workload. `name` is for people and metrics; empty for a sidecar's only one.
    pub fn add_workload(&self, name: &str) -> Workload {
        let mut slots = self.lock();
        let workload = Workload(slots.next_workload);
        slots.next_workload += 1;
        let health = Components::new(self.0.changes.clone());
        slots.workloads.insert(workload, Member { name: name.into(), health, identity: None });
        drop(slots);
        self.0.changes.send_replace(());
        workload
    }

    /// Removes a workload with its entries and the sources registered for it alone. Its secrets are dropped at once,
    /// although publishers and subscriptions may still exist; what these do from now on has no effect.
    pub fn remove_workload(&self, workload: Workload) {
        let mut slots = self.lock();
        slots.workloads.remove(&workload);
        slots.routes.forget(workload);
        slots.federated.retain(|slot| slot.key.workload != workload);
        let removed: Vec<_> = slots.by_key.extract_if(|filed| filed.0.key.workload == workload).collect();
        for Filed(slot) in removed {
            slot.remove();
            if slot.key.name.is_on_demand() {
                slots.forget_value(&slot);
                slots.room.give_back(slot.owner);
            } else {
                slots.removed.add(&slot.key.name, lock(&slot.observed).verdicts());
            }
        }
        drop(slots);
        self.0.changes.send_replace(());
    }

    /// The workloads and their names.
    pub fn workloads(&self) -> Vec<(Workload, Arc<str>)> {
        let slots = self.lock();
        slots.workloads.iter().map(|(workload, member)| (*workload, Arc::clone(&member.name))).collect()
    }

    /// The identity that is requested for `workload`, which is known before its first certificate.
    pub fn set_identity(&self, workload: Workload, identity: SpiffeId) {
        if let Some(member) = self.lock().workloads.get_mut(&workload) {
            member.identity = Some(identity);
        }
    }

    /// The identity that is requested for `workload`, where that is known.
    pub fn identity_of(&self, workload: Workload) -> Option<SpiffeId> {
        self.lock().workloads.get(&workload)?.identity.clone()
    }

    /// What the clients of workloads that were removed have been sent.
    pub fn removed_totals(&self) -> Totals {
        self.lock().removed
    }

    /// Whether `workload` has been added and not removed.
    pub fn has(&self, workload: Workload) -> bool {
        self.lock().workloads.contains_key(&workload)
    }

    /// The name of `workload`; empty for a sidecar's only one, and for one that was removed.
    pub fn name_of(&self, workload: Workload) -> Arc<str> {
        self.lock().workloads.get(&workload).map_or_else(|| "".into(), |member| Arc::clone(&member.name))
    }

    /// What the components report of `workload`.
    pub fn components(&self, workload: Workload) -> Components {
        let member = self.lock().workloads.get(&workload).map(|member| member.health.clone());
        member.unwrap_or_else(|| Components::new(watch::Sender::default()))
    }

    /// The right to write the entry of `key` as `origin`. Makes the entry.
    pub fn publisher(&self, key: Key, origin: Origin) -> Publisher {
        Publisher::new(self.clone(), self.slot_of(&key), key, origin)
    }

    /// Drops the entry of a name on demand, unless a stream has come back. True if the entry is gone.
    pub fn retire(&self, key: &Key) -> bool {
        let mut slots = self.lock();
        let is_deserted = slots.by_key.get(key).is_none_or(|Filed(slot)| lock(&slot.observed).streams == 0);
        if is_deserted
            && key.name.is_on_demand()
            && let Some(Filed(slot)) = slots.by_key.take(key)
        {
            slots.forget_value(&slot);
            slots.room.give_back(slot.owner);
        }
        is_deserted
    }

    /// Whether there is a good value for `key`.
    pub fn has_value(&self, key: &Key) -> bool {
        self.slot(key).is_some_and(|slot| slot.entry().good.is_some())
    }

    /// The good value for `key`.
    pub fn good(&self, key: &Key) -> Option<Arc<Good>> {
        self.slot(key)?.entry().good.clone()
    }

    /// Something waits for room.
    pub(super) fn want_room(&self) {
        self.0.room_wanted.notify_one();
    }

    /// Returns when a name on demand waits for room.
    pub async fn room_wanted(&self) {
        self.0.room_wanted.notified().await;
    }

    /// Follows the entry of `key` without counting as a stream.
    pub fn watch(&self, key: &Key) -> Option<watch::Receiver<Entry>> {
        Some(self.slot(key)?.watch())
    }

    /// Follows the entry of `key`, and makes it if there is none: readers and sources may start in any order.
    pub fn follow(&self, key: Key) -> watch::Receiver<Entry> {
        self.slot_of(&key).watch()
    }

    /// Every entry as it is now.
    pub fn snapshot(&self) -> Vec<Snapshot> {
        self.snapshot_if(|_| true)
    }

    /// The entries of `workload` as they are now.
    pub fn snapshot_of(&self, workload: Workload) -> Vec<Snapshot> {
        self.snapshot_if(|key| key.workload == workload || key.workload == Workload::EVERY)
    }

    /// The entries that `wanted` selects, as they are now.
    pub(super) fn snapshot_if(&self, wanted: impl Fn(&Key) -> bool) -> Vec<Snapshot> {
        let slots = self.lock();
        let mut wanted: Vec<_> =
            slots.by_key.iter().map(|Filed(slot)| slot).filter(|slot| wanted(&slot.key)).collect();
        wanted.sort_unstable_by(|one, other| one.key.cmp(&other.key));
        let workload = |key: &Key| slots.workloads.get(&key.workload).map(|member| Arc::clone(&member.name));
        let view = |slot: &Arc<Slot>| Snapshot {
            key: slot.key.clone(),
            workload: workload(&slot.key).unwrap_or_else(|| "".into()),
            entry: slot.entry().clone(),
            observed: lock(&slot.observed).clone(),
        };
        wanted.into_iter().map(view).collect()
    }

    /// Wakes at each change that readiness may depend on.
    pub(super) fn changes(&self) -> watch::Receiver<()> {
        self.0.changes.subscribe()
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Slots> {
        lock(&self.0.slots)
    }

    /// The slot of `key`, made if there is none. For a workload that was removed, a slot that takes no value.
    pub(super) fn slot_of(&self, key: &Key) -> Arc<Slot> {
        let mut slots = self.lock();
        if !slots.workloads.contains_key(&key.workload) && key.workload != Workload::EVERY {
            let slot = Slot::new(key.clone());
            slot.remove();
            return Arc::new(slot);
        }
        if let Some(Filed(slot)) = slots.by_key.get(key) {
            return Arc::clone(slot);
        }
        let slot = Slot::new(key.clone());
        if key.name.is_on_demand() {
            slots.room.take_anyway(Connection::default());
        } else {
            let changes = Some(self.0.changes.clone());
            let _ = slot.extras.set(Box::new(Extras { changes, ..Extras::default() }));
        }
        let slot = Arc::new(slot);
        slots.by_key.insert(Filed(Arc::clone(&slot)));
        if matches!(key.name, SecretName::Federated(_)) {
            slots.federated.push(Arc::clone(&slot));
        }
        slot
    }

    pub(super) fn slot(&self, key: &Key) -> Option<Arc<Slot>> {
        self.lock().by_key.get(key).map(|Filed(slot)| Arc::clone(slot))
    }
}

impl Default for Room {
    fn default() -> Self {
        Self::new(limits::NAMES_ON_DEMAND)
    }
}

impl Slots {
    /// Makes the entry of a name on demand, and passes the demand on to its source.
    pub(super) fn demand(&mut self, key: &Key, owner: Connection) -> Result<Arc<Slot>, NotServed> {
        self.admit(key)?;
        if !self.room.take(owner) {
            return Err(NotServed::TooMany);
        }
        self.make_on_demand(key, owner)
    }

    /// The same for a name that has waited for room until its turn.
    pub(super) fn demand_in_turn(&mut self, key: &Key, owner: Connection) -> Result<Arc<Slot>, NotServed> {
        self.admit(key)?;
        self.room.take_anyway(owner);
        self.make_on_demand(key, owner)
    }

    fn admit(&self, key: &Key) -> Result<(), NotServed> {
        if !self.workloads.contains_key(&key.workload) {
            return Err(NotServed::NoSource);
        }
        self.routes.admit(key)
    }

    fn make_on_demand(&mut self, key: &Key, owner: Connection) -> Result<Arc<Slot>, NotServed> {
        let desertion = Some(self.routes.send(key).inspect_err(|_| self.room.give_back(owner))?);
        let slot = Arc::new(Slot { owner, desertion, ..Slot::new(key.clone()) });
        self.by_key.insert(Filed(Arc::clone(&slot)));
        Ok(slot)
    }
}

impl Slot {
    fn new(key: Key) -> Self {
        let (entry, subscribers, observed, owner) = Default::default();
        Self { key, entry, subscribers, observed, owner, desertion: None, extras: OnceLock::new() }
    }

    /// Made if there are none.
    pub(super) fn extras(&self) -> &Extras {
        self.extras.get_or_init(Box::default)
    }

    /// What the value takes, if there ever was one.
    pub(super) fn value(&self) -> Option<&Mutex<Value>> {
        self.extras.get().map(|extras| &extras.value)
    }

    pub(super) fn renewal(&self) -> Option<&RenewalDesk> {
        self.extras.get()?.renewal.get()
    }

    /// A stream has given a verdict, or left; true if it was the last one.
    pub(super) fn stream_reported(&self, is_last: bool) {
        if let Some(extras) = self.extras.get() {
            extras.verdict.notify_waiters();
            if is_last {
                extras.deserted.notify_one();
            }
        }
        if let (true, Some(desertion)) = (is_last, &self.desertion) {
            desertion.report(&self.key);
        }
    }

    /// The entry as it is now, locked.
    pub(super) fn entry(&self) -> MutexGuard<'_, Entry> {
        lock(&self.entry)
    }

    /// Follows the entry without counting as a stream.
    pub(super) fn watch(&self) -> watch::Receiver<Entry> {
        let entry = self.entry();
        self.extras().watched.get_or_init(|| watch::Sender::new(entry.clone())).subscribe()
    }

    /// Changes the entry, and wakes its readers if `change` returns true. An entry of a removed workload stays empty.
    pub(super) fn modify(&self, change: impl FnOnce(&mut Entry) -> bool) {
        let mut entry = self.entry();
        if entry.is_removed {
            return;
        }
        let is_changed = change(&mut entry);
        if let Some(watched) = self.extras.get().and_then(|extras| extras.watched.get()) {
            watched.send_if_modified(|seen| {
                seen.clone_from(&entry);
                is_changed
            });
        }
        drop(entry);
        if is_changed {
            lock(&self.subscribers).notify();
            if let Some(changes) = self.extras.get().and_then(|extras| extras.changes.as_ref()) {
                changes.send_replace(());
            }
        }
    }

    /// Drops the value. The entry stays empty.
    fn remove(&self) {
        self.modify(|entry| {
            *entry = Entry { is_removed: true, ..Entry::default() };
            true
        });
    }
}

#[cfg(test)]
mod tests;
