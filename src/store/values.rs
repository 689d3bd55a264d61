//! Bytes of values on demand: how many there are in all and for each connection. Names that share a payload share its bytes.
//!
//! A value for which there is no room is not published; its source is asked for the name again when there is room.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Arc, MutexGuard};

use super::cache::{Cache, Filed, Slot, lock};
use super::entry::Key;
use super::room::Connection;
use crate::base::limits;
use crate::secret::Payload;

/// The payloads of names on demand.
#[derive(Debug)]
pub(super) struct Values {
    limit: usize,
    taken: usize,
    /// By address.
    payloads: HashMap<usize, Held>,
    connections: HashMap<Connection, usize>,
    /// Names whose value waits for room, by the connection that caused them, in the order in which they came. May hold names
    /// that no longer wait.
    waiting: HashMap<Connection, VecDeque<Key>>,
}

/// What the value of one name takes.
#[derive(Debug, Default)]
pub(super) struct Value {
    payload: Option<Payload>,
    /// The bytes of the value that waits, if one does: the name is in [`Values::waiting`].
    waits: Option<usize>,
}

#[derive(Debug)]
struct Held {
    names: usize,
    bytes: usize,
    /// The connection that caused it to be loaded.
    owner: Connection,
}

/// There is no room for a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "no room for its {bytes} bytes: the files that this connection asked for may have as many bytes as are left for others of {limit}; \
     it is served when there is room"
)]
pub(super) struct NoRoom {
    bytes: usize,
    limit: usize,
}

impl Default for Values {
    fn default() -> Self {
        Self::new(limits::VALUE_BYTES_ON_DEMAND)
    }
}

impl Values {
    pub(super) fn new(limit: usize) -> Self {
        let (payloads, connections, waiting) = Default::default();
        Self { limit, taken: 0, payloads, connections, waiting }
    }

    #[cfg(test)]
    pub(super) fn taken(&self) -> usize {
        self.taken
    }

    /// How many names wait at most.
    pub(super) fn waiting(&self) -> usize {
        self.waiting.values().map(VecDeque::len).sum()
    }

    /// Whether a connection may have `bytes` for a name that gives up `old`. That needs no room if `old` had as many. The
    /// default connection has no bound of its own.
    fn fits(&self, owner: Connection, old: Option<&Payload>, bytes: usize) -> bool {
        let old = old.and_then(|old| self.payloads.get(&address(old))).filter(|held| held.names == 1);
        let (mut taken, mut own) = (self.taken, self.connections.get(&owner).copied().unwrap_or_default());
        if let Some(old) = old {
            taken -= old.bytes;
            if old.owner == owner {
                own -= old.bytes;
                if bytes <= old.bytes {
                    return true;
                }
            }
        }
        let free = self.limit.saturating_sub(taken).checked_sub(bytes);
        free.is_some_and(|free| own + bytes <= free || owner == Connection::default())
    }

    /// Notes that a name has `new` instead of `old`. On failure it still has `old`.
    fn replace(&mut self, owner: Connection, old: Option<&Payload>, new: &Payload) -> Result<(), NoRoom> {
        let bytes = new.bytes().len();
        let is_shared = self.payloads.contains_key(&address(new));
        if !is_shared && !self.fits(owner, old, bytes) {
            return Err(NoRoom { bytes, limit: self.limit });
        }
        let held = self.payloads.entry(address(new)).or_insert(Held { names: 0, bytes, owner });
        held.names += 1;
        if !is_shared {
            self.taken += bytes;
            *self.connections.entry(owner).or_default() += bytes;
        }
        if let Some(old) = old {
            self.drop_one(old);
        }
        Ok(())
    }

    fn drop_one(&mut self, payload: &Payload) {
        let Some(held) = self.payloads.get_mut(&address(payload)) else { return };
        held.names -= 1;
        if held.names > 0 {
            return;
        }
        if let Some(Held { bytes, owner, .. }) = self.payloads.remove(&address(payload)) {
            self.taken -= bytes;
            if let Some(own) = self.connections.get_mut(&owner) {
                *own -= bytes;
                if *own == 0 {
                    self.connections.remove(&owner);
                }
            }
        }
    }
}

/// Clones of a payload have one address, and no other payload has it as long as one of them exists.
fn address(payload: &Payload) -> usize {
    payload.bytes().as_ptr().addr()
}

impl Cache {
    /// Makes room for the value of a name on demand. The name's source is asked for it again if there is none.
    pub(super) fn make_room(&self, key: &Key, slot: &Arc<Slot>, new: &Payload) -> Result<(), NoRoom> {
        let mut slots = self.lock();
        if slots.by_key.get(key).is_none_or(|known| !Arc::ptr_eq(&known.0, slot)) {
            // It was retired: nothing is published.
            return Ok(());
        }
        let mut value = lock(&slot.extras().value);
        let made = slots.values.replace(slot.owner, value.payload.as_ref(), new);
        match made {
            Ok(()) => (value.payload, value.waits) = (Some(new.clone()), None),
            Err(NoRoom { bytes, .. }) => {
                if value.waits.replace(bytes).is_none() {
                    slots.values.waiting.entry(slot.owner).or_default().push_back(key.clone());
                }
            }
        }
        drop(value);
        match made {
            Ok(()) => slots.ask_again(),
            Err(_) => slots.forget_those_gone(),
        }
        made
    }
}

impl super::cache::Slots {
    /// Gives back what the value of a name on demand takes.
    pub(super) fn forget_value(&mut self, slot: &Slot) {
        let payload = slot.value().and_then(|value| lock(value).payload.take());
        payload.inspect(|payload| self.values.drop_one(payload));
        self.ask_again();
    }

    /// Asks for the names again whose value waits and has room now. A connection whose value has none keeps no other
    /// connection waiting.
    fn ask_again(&mut self) {
        let Self { values, by_key, routes, .. } = self;
        let mut waiting = std::mem::take(&mut values.waiting);
        waiting.retain(|owner, keys| {
            while let Some(key) = keys.front() {
                if let Some(mut value) = waiting_value(by_key, key, *owner) {
                    if value.waits.is_none_or(|bytes| !values.fits(*owner, value.payload.as_ref(), bytes)) {
                        return true;
                    }
                    value.waits = None;
                    // Without a source there is nothing to ask.
                    let _ = routes.send(key);
                }
                keys.pop_front();
            }
            false
        });
        values.waiting = waiting;
    }

    /// A peer can have any number of names wait and give them up. Those that wait are entries, so there are never more
    /// than fit twice.
    fn forget_those_gone(&mut self) {
        let Self { values, by_key, .. } = self;
        if values.waiting() > 2 * limits::NAMES_ON_DEMAND {
            values.waiting.retain(|owner, keys| {
                let mut seen = HashSet::new();
                keys.retain(|key| waiting_value(by_key, key, *owner).is_some() && seen.insert(key.clone()));
                !keys.is_empty()
            });
        }
    }
}

/// What the name takes that `owner` caused, if its value waits for room.
#[expect(clippy::mutable_key_type, reason = "a slot's key doesn't change")]
fn waiting_value<'a>(
    by_key: &'a HashSet<Filed>,
    key: &Key,
    owner: Connection,
) -> Option<MutexGuard<'a, Value>> {
    let slot = by_key.get(key).map(|filed| &filed.0).filter(|slot| slot.owner == owner)?;
    Some(lock(slot.value()?)).filter(|value| value.waits.is_some())
}

#[cfg(test)]
mod tests {
    use super::super::{Demand, Scope, Subscriber, Subscription};
    use super::*;
    use crate::secret::NameKind;
    use crate::store::Workload;

    /// Names on demand, and their source, with room for 100 bytes of values.
    struct Names {
        cache: Cache,
        workload: Workload,
        demand: Demand,
        streams: Vec<Option<Subscription>>,
    }

    impl Names {
        /// A name for each of `connections`.
        fn new(connections: &[Connection]) -> Self {
            let (cache, workload) = Cache::with_workload("");
            cache.lock().values = Values::new(100);
            let demand = cache.demand(NameKind::File, Scope::Every, |_: &_| Ok(())).unwrap();
            let mut names = Self { cache, workload, demand, streams: Vec::new() };
            for (name, connection) in connections.iter().enumerate() {
                let key = names.key(name);
                let stream = names.cache.subscribe_as(&key, &Subscriber::new(*connection), 0).unwrap();
                names.streams.push(Some(stream));
                assert_eq!(names.asked(), [name]);
            }
            names
        }

        fn key(&self, name: usize) -> Key {
            Key { workload: self.workload, name: format!("file-root:{name}").parse().unwrap() }
        }

        /// Whether there is room for a value of `bytes`.
        fn publish(&self, name: usize, bytes: usize) -> bool {
            let key = self.key(name);
            let slot = self.cache.slot(&key).unwrap();
            self.cache.make_room(&key, &slot, &payload(bytes)).is_ok()
        }

        /// The stream of a name leaves, and its source gives it up.
        fn leave(&mut self, name: usize) {
            self.streams[name] = None;
            assert!(self.cache.retire(&self.key(name)));
        }

        /// The names that the source was asked for since the last call.
        fn asked(&mut self) -> Vec<usize> {
            let keys: Vec<_> = std::iter::from_fn(|| self.demand.try_next()).collect();
            let names = 0..self.streams.len();
            keys.iter().filter_map(|key| names.clone().find(|name| self.key(*name) == *key)).collect()
        }
    }

    #[test]
    fn a_name_that_is_gone_keeps_no_other_one_waiting() {
        let [first, second, waiting] = std::array::from_fn(|_| Connection::distinct());
        let mut names = Names::new(&[first, second, waiting, waiting]);
        assert!(names.publish(0, 40) && names.publish(1, 25));
        assert!(!names.publish(2, 45) && !names.publish(3, 20));
        names.leave(2);
        names.leave(1);
        assert_eq!(names.asked(), [3]);
        assert!(names.publish(3, 20));
    }

    #[test]
    fn a_name_is_not_asked_for_again_before_its_connection_has_room() {
        let mut names = Names::new(&[Connection::distinct(); 2]);
        assert!(names.publish(0, 45));
        for _ in 0..3 {
            assert!(!names.publish(1, 10));
            assert_eq!(names.asked(), [0; 0]);
        }
        names.leave(0);
        assert_eq!(names.asked(), [1]);
        assert!(names.publish(1, 10));
        assert_eq!(names.asked(), [0; 0]);
    }

    #[test]
    fn a_value_takes_the_room_of_the_one_that_it_replaces() {
        let mut names = Names::new(&std::array::from_fn::<_, 3, _>(|_| Connection::distinct()));
        assert!(names.publish(0, 45));
        assert!(names.publish(0, 45) && names.publish(0, 50));
        assert!(!names.publish(0, 51), "a connection leaves as much for others");
        assert!(names.publish(0, 45) && names.publish(1, 25));
        assert!(names.publish(0, 45), "others have less room now, and this takes none of it");
        assert!(!names.publish(0, 46));
        assert_eq!((names.asked(), names.cache.lock().values.taken()), (vec![], 70));
        names.leave(1);
        assert_eq!(names.asked(), [0], "it has room together with what it replaces");
        assert!(names.publish(0, 46));
    }

    #[test]
    fn a_value_that_another_name_shares_gives_no_room_back() {
        let mut values = Values::new(100);
        let connection = Connection::distinct();
        let shared = payload(45);
        for _ in 0..2 {
            values.replace(connection, None, &shared).unwrap();
        }
        assert!(values.replace(connection, Some(&shared), &payload(45)).is_err());
        values.drop_one(&shared);
        assert!(values.replace(connection, Some(&shared), &payload(45)).is_ok());
        assert_eq!((values.taken, values.payloads.len()), (45, 1));
    }

    #[test]
    fn a_connection_without_room_keeps_no_other_one_waiting() {
        let [greedy, second, third] = std::array::from_fn(|_| Connection::distinct());
        let mut names = Names::new(&[greedy, greedy, second, third]);
        assert!(names.publish(0, 45) && names.publish(2, 25));
        assert!(!names.publish(1, 10) && !names.publish(3, 20));
        names.leave(2);
        assert_eq!(names.asked(), [3]);
    }

    #[test]
    fn a_value_that_no_longer_needs_room_keeps_no_other_one_waiting() {
        let [first, second, waiting] = std::array::from_fn(|_| Connection::distinct());
        let mut names = Names::new(&[first, second, waiting, waiting]);
        assert!(names.publish(0, 40) && names.publish(1, 25));
        assert!(!names.publish(2, 45) && !names.publish(3, 20));
        assert!(names.publish(2, 1));
        names.leave(1);
        assert_eq!(names.asked(), [3]);
    }

    fn payload(bytes: usize) -> Payload {
        Payload::from_bytes(vec![0; bytes].into())
    }

    #[test]
    fn names_of_one_content_share_its_bytes() {
        let mut values = Values::new(100);
        let connection = Connection::distinct();
        let (shared, other) = (payload(40), payload(40));
        for _ in 0..1_000 {
            values.replace(connection, None, &shared.clone()).unwrap();
        }
        assert_eq!(values.taken, 40);
        assert!(values.replace(connection, None, &other).is_err(), "a connection leaves as much for others");
        values.replace(Connection::distinct(), None, &payload(30)).unwrap();
        for _ in 0..1_000 {
            values.drop_one(&shared);
        }
        assert_eq!((values.taken, values.connections.len()), (30, 1));
    }

    #[test]
    fn a_value_is_replaced_by_the_next_one() {
        let mut values = Values::new(100);
        let connection = Connection::distinct();
        let (mut now, mut taken) = (payload(1), 0);
        values.replace(connection, None, &now).unwrap();
        for bytes in 2..20 {
            let next = payload(bytes);
            values.replace(connection, Some(&now), &next).unwrap();
            (now, taken) = (next, bytes);
        }
        assert_eq!(values.taken, taken);
        values.drop_one(&now);
        assert_eq!((values.taken, values.payloads.len(), values.connections.len()), (0, 0, 0));
    }
}
