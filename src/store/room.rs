//! Room for names on demand: how many there are in all and for each connection, and who waits for room.
//!
//! A connection may cause as many entries as there is room left for others. A name for which there is no room waits:
//! connections take turns, and the names of one connection are served in the order in which they came.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::cache::{Cache, Filed};
use super::demand::NotServed;
use super::entry::Key;
use super::subscription::{Subscriber, Subscription};

/// Distinguishes connections. The default is none in particular.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Connection(u64);

impl Connection {
    /// A connection that is none of the others.
    pub fn distinct() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// Who has room, and who waits for it.
#[derive(Debug)]
pub(super) struct Room {
    limit: usize,
    /// Entries, and places that were offered to those who waited.
    taken: usize,
    connections: BTreeMap<Connection, Occupant>,
    /// The connection that was offered a place last.
    last: Connection,
    next_ticket: u64,
}

/// One connection that has room or waits for it.
#[derive(Debug, Default)]
struct Occupant {
    taken: usize,
    waiting: VecDeque<Waiter>,
}

#[derive(Debug)]
struct Waiter {
    ticket: u64,
    subscriber: Subscriber,
    number: u32,
}

impl Room {
    pub(super) fn new(limit: usize) -> Self {
        Self { limit, taken: 0, connections: BTreeMap::new(), last: Connection::default(), next_ticket: 0 }
    }

    /// Whether a connection that has `taken` places may have another one. The default connection has no bound of its own.
    fn has_room(&self, connection: Connection, taken: usize) -> bool {
        let free = self.limit.saturating_sub(self.taken);
        free > 0 && (taken < free || connection == Connection::default())
    }

    /// Takes a place; false if there is none.
    pub(super) fn take(&mut self, connection: Connection) -> bool {
        let taken = self.connections.get(&connection).map_or(0, |occupant| occupant.taken);
        let has_room = self.has_room(connection, taken);
        if has_room {
            self.take_anyway(connection);
        }
        has_room
    }

    /// Takes a place, whether or not there is one.
    pub(super) fn take_anyway(&mut self, connection: Connection) {
        self.taken += 1;
        self.connections.entry(connection).or_default().taken += 1;
    }

    /// Gives a place back, and offers it to the next one who waits.
    pub(super) fn give_back(&mut self, connection: Connection) {
        self.taken -= 1;
        if let Some(occupant) = self.connections.get_mut(&connection) {
            occupant.taken -= 1;
        }
        self.forget(connection);
        self.offer();
    }

    fn forget(&mut self, connection: Connection) {
        let is_gone =
            self.connections.get(&connection).is_some_and(|it| it.taken == 0 && it.waiting.is_empty());
        if is_gone {
            self.connections.remove(&connection);
        }
    }

    /// Offers what is free to those who wait. An offered place is taken until its [`Waiting`] is dropped.
    fn offer(&mut self) {
        while let Some(next) = self.next_in_turn() {
            let Some(occupant) = self.connections.get_mut(&next) else { return };
            let Some(waiter) = occupant.waiting.pop_front() else { return };
            occupant.taken += 1;
            self.taken += 1;
            self.last = next;
            waiter.subscriber.notify(waiter.number);
        }
    }

    /// The next connection after the last one that waits and may have a place.
    fn next_in_turn(&self) -> Option<Connection> {
        if self.taken >= self.limit {
            return None;
        }
        let may = |(connection, occupant): &(&Connection, &Occupant)| {
            !occupant.waiting.is_empty() && self.has_room(**connection, occupant.taken)
        };
        let after = (std::ops::Bound::Excluded(self.last), std::ops::Bound::Unbounded);
        let mut in_turn = self.connections.range(after).chain(self.connections.range(..=self.last));
        in_turn.find(may).map(|(connection, _)| *connection)
    }

    /// Waits for a place, which is taken when it is offered. Returns the ticket to [leave](Self::leave) with.
    fn wait(&mut self, subscriber: &Subscriber, number: u32) -> u64 {
        let (connection, ticket) = (subscriber.connection(), self.next_ticket);
        self.next_ticket += 1;
        let waiter = Waiter { ticket, subscriber: subscriber.clone(), number };
        self.connections.entry(connection).or_default().waiting.push_back(waiter);
        self.offer();
        ticket
    }

    /// Stops waiting, or gives the offered place back.
    fn leave(&mut self, connection: Connection, ticket: u64) {
        match self.position(connection, ticket) {
            None => self.give_back(connection),
            Some(at) => {
                if let Some(occupant) = self.connections.get_mut(&connection) {
                    occupant.waiting.remove(at);
                }
                self.forget(connection);
            }
        }
    }

    /// Where the one with `ticket` is in line; none if it was offered a place.
    fn position(&self, connection: Connection, ticket: u64) -> Option<usize> {
        let waiting = &self.connections.get(&connection)?.waiting;
        // Tickets only grow.
        waiting.binary_search_by_key(&ticket, |waiter| waiter.ticket).ok()
    }
}

impl Cache {
    /// Waits for room for the entry of `key`. `subscriber` is notified with `number` when it is its turn.
    pub fn wait_for_room(&self, key: Key, subscriber: &Subscriber, number: u32) -> Waiting {
        let ticket = self.lock().room.wait(subscriber, number);
        self.want_room();
        Waiting { cache: self.clone(), key, connection: subscriber.connection(), ticket }
    }
}

/// A name that waits for room. Dropping it ends the wait.
#[derive(Debug)]
pub struct Waiting {
    cache: Cache,
    key: Key,
    connection: Connection,
    ticket: u64,
}

impl Waiting {
    /// Subscribes `subscriber` if it is this name's turn, or another stream caused the entry meanwhile. It stays in the
    /// line if not.
    pub fn subscribe(self, subscriber: &Subscriber, number: u32) -> Result<Subscription, Unserved> {
        let mut slots = self.cache.lock();
        if let Some(Filed(slot)) = slots.by_key.get(&self.key) {
            slot.desertion.as_ref().inspect(|source| source.ask(&self.key));
            let slot = Arc::clone(slot);
            drop(slots);
            return Ok(Subscription::new(slot, subscriber, number));
        }
        if slots.room.position(self.connection, self.ticket).is_some() {
            drop(slots);
            return Err(Unserved::Waits(self));
        }
        // The place that was offered to this name is given back when `self` is dropped: after the entry has taken one.
        let slot = slots.demand_in_turn(&self.key, self.connection);
        drop(slots);
        slot.map(|slot| Subscription::new(slot, subscriber, number)).map_err(Unserved::Never)
    }
}

/// A name that has waited and is still not served.
#[derive(Debug)]
pub enum Unserved {
    Waits(Waiting),
    /// It has no source any longer.
    Never(NotServed),
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.cache.lock().room.leave(self.connection, self.ticket);
    }
}

#[cfg(test)]
mod tests {
    use std::task::{Context, Poll, Waker};

    use super::*;

    /// A stream of a connection of its own.
    fn stream() -> Subscriber {
        Subscriber::new(Connection::distinct())
    }

    /// The numbers of the names whose turn it is.
    fn offered(stream: &Subscriber) -> Vec<u32> {
        match stream.poll_changes(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(numbers) => numbers,
            Poll::Pending => Vec::new(),
        }
    }

    #[test]
    fn a_connection_takes_no_more_than_it_leaves_for_others() {
        let mut room = Room::new(12);
        let mut taken = Vec::new();
        for _ in 0..5 {
            let connection = Connection::distinct();
            taken.push(std::iter::repeat_with(|| room.take(connection)).take_while(|taken| *taken).count());
        }
        assert_eq!(taken, [6, 3, 2, 1, 0]);
        assert_eq!(room.taken, 12);
    }

    #[test]
    fn connections_take_turns_and_each_is_served_in_its_order() {
        let mut room = Room::new(4);
        let first = [(); 4].map(|()| Connection::distinct());
        assert!(first.iter().all(|connection| room.take(*connection)));
        let [greedy, modest] = [stream(), stream()];
        for number in 0..3 {
            room.wait(&greedy, number);
        }
        room.wait(&modest, 7);
        assert_eq!((offered(&greedy), offered(&modest)), (vec![], vec![]));
        room.give_back(first[0]);
        room.give_back(first[1]);
        assert_eq!((offered(&greedy), offered(&modest)), (vec![0], vec![7]));
        room.give_back(first[2]);
        assert_eq!(offered(&greedy), [0; 0], "no more than it leaves for others");
        room.give_back(first[3]);
        assert_eq!((offered(&greedy), room.taken), (vec![1], 3));
    }

    #[test]
    fn whoever_leaves_gives_its_place_to_the_next() {
        let mut room = Room::new(2);
        let [holder, other] = [(); 2].map(|()| Connection::distinct());
        assert!(room.take(holder) && room.take(other));
        let [a, b, c] = [stream(), stream(), stream()];
        let [of_a, of_b, of_c] = [&a, &b, &c].map(|stream| room.wait(stream, 1));
        room.leave(b.connection(), of_b);
        room.give_back(holder);
        assert_eq!((offered(&a), offered(&b), offered(&c)), (vec![1], vec![], vec![]));
        room.leave(a.connection(), of_a);
        assert_eq!(offered(&c), [1], "an offered place that is not taken is offered to the next");
        room.leave(c.connection(), of_c);
        room.give_back(other);
        assert_eq!((room.taken, room.connections.len()), (0, 0));
    }
}
