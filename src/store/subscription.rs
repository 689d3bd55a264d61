//! A stream's view of one entry, and what Envoy makes of its values: the verdicts.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, OnceLock};
use std::task::{Context, Poll, Waker};

use smallvec::SmallVec;

use super::cache::{Cache, Filed, Slot, lock};
use super::demand::NotServed;
use super::entry::{Entry, Key};
use super::room::Connection;
use crate::secret::Version;

/// The streams of an entry.
#[derive(Clone, Debug, Default)]
pub struct Observed {
    /// Streams that are subscribed.
    pub streams: usize,
    /// Streams that ever were.
    pub(super) arrivals: u64,
    /// None before the first value was sent.
    verdicts: Option<Box<Verdicts>>,
}

/// What the clients of an entry were sent, and what they made of it.
#[derive(Clone, Debug, Default)]
pub struct Verdicts {
    /// How many streams acknowledged which version last, by the node id of their clients.
    pub acked_by: BTreeMap<(Version, Arc<str>), usize>,
    /// How many streams acknowledged which version last.
    acknowledged: Vec<(Version, usize)>,
    /// The last rejection, until a later version is acknowledged.
    pub rejection: Option<Rejection>,
    /// How often a value was sent.
    pub pushes: u64,
    /// How often a client acknowledged a value.
    pub acks: u64,
    /// How often a client rejected a value.
    pub nacks: u64,
}

impl Observed {
    pub fn verdicts(&self) -> &Verdicts {
        static NONE: Verdicts = Verdicts::none();
        self.verdicts.as_deref().unwrap_or(&NONE)
    }

    fn verdicts_mut(&mut self) -> &mut Verdicts {
        self.verdicts.get_or_insert_default()
    }

    /// Whether every stream has acknowledged `version`, or one has rejected it.
    pub(super) fn is_settled(&self, version: &Version) -> bool {
        let verdicts = self.verdicts();
        // This runs at each verdict, so it counts nothing.
        let acknowledged = verdicts.acknowledged.iter().find(|(held, _)| held == version);
        acknowledged.map_or(0, |(_, streams)| *streams) == self.streams
            || verdicts.rejection.as_ref().is_some_and(|rejection| rejection.version == *version)
    }
}

impl Verdicts {
    const fn none() -> Self {
        Self {
            acked_by: BTreeMap::new(),
            acknowledged: Vec::new(),
            rejection: None,
            pushes: 0,
            acks: 0,
            nacks: 0,
        }
    }

    /// How many streams acknowledged which version last.
    pub fn acknowledged(&self) -> HashMap<Version, usize> {
        self.acknowledged.iter().cloned().collect()
    }

    fn hold(&mut self, version: Version, node: Arc<str>) {
        match self.acknowledged.iter_mut().find(|(held, _)| *held == version) {
            Some((_, streams)) => *streams += 1,
            None => self.acknowledged.push((version.clone(), 1)),
        }
        *self.acked_by.entry((version, node)).or_default() += 1;
    }

    fn release(&mut self, version: Version, node: Arc<str>) {
        if let Some((_, streams)) = self.acknowledged.iter_mut().find(|(held, _)| *held == version) {
            *streams -= 1;
            self.acknowledged.retain(|(_, streams)| *streams > 0);
        }
        let held = (version, node);
        if let Some(count) = self.acked_by.get_mut(&held) {
            *count -= 1;
            if *count == 0 {
                self.acked_by.remove(&held);
            }
        }
    }
}

/// A version that a client rejected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rejection {
    pub version: Version,
    /// The client's node id.
    pub node: Arc<str>,
    /// The client's error message.
    pub reason: String,
}

/// One stream, which follows several entries and is woken with the numbers of those that changed. Clones are the same
/// stream.
#[derive(Clone, Debug, Default)]
pub struct Subscriber(Arc<Stream>);

#[derive(Debug, Default)]
struct Stream {
    connection: Connection,
    /// The client's node id.
    node: OnceLock<Arc<str>>,
    changes: Mutex<Changes>,
}

#[derive(Debug, Default)]
struct Changes {
    /// The numbers of the entries that changed since the last look, each once.
    numbers: Vec<u32>,
    waker: Option<Waker>,
}

impl Subscriber {
    /// A stream of `connection`.
    pub fn new(connection: Connection) -> Self {
        Self(Arc::new(Stream { connection, ..Stream::default() }))
    }

    /// Sets the client's node id, once it is known.
    pub fn set_node(&self, node: Arc<str>) {
        let _ = self.0.node.set(node);
    }

    pub(super) fn connection(&self) -> Connection {
        self.0.connection
    }

    fn node(&self) -> Arc<str> {
        self.0.node.get().cloned().unwrap_or_default()
    }

    /// The numbers of the entries that changed since the last call. [`Subscription::entry`] has their new state.
    pub fn poll_changes(&self, cx: &mut Context<'_>) -> Poll<Vec<u32>> {
        let mut changes = lock(&self.0.changes);
        if !changes.numbers.is_empty() {
            return Poll::Ready(std::mem::take(&mut changes.numbers));
        }
        match &mut changes.waker {
            Some(waker) => waker.clone_from(cx.waker()),
            none => *none = Some(cx.waker().clone()),
        }
        Poll::Pending
    }

    pub(super) fn notify(&self, number: u32) {
        let mut changes = lock(&self.0.changes);
        changes.numbers.push(number);
        if let Some(waker) = changes.waker.take() {
            drop(changes);
            waker.wake();
        }
    }
}

/// The subscribers of one entry, by place.
#[derive(Debug, Default)]
pub(super) struct Subscribers {
    /// Most names have one stream.
    places: SmallVec<[Place; 1]>,
    /// The first free place.
    free: Option<u32>,
    taken: u32,
}

#[derive(Debug)]
enum Place {
    Taken {
        subscriber: Subscriber,
        /// The subscriber's number of the entry.
        number: u32,
        /// The subscriber was notified and has not looked since.
        is_notified: bool,
    },
    Free {
        next: Option<u32>,
    },
}

impl Subscribers {
    fn add(&mut self, subscriber: Subscriber, number: u32) -> u32 {
        let place = Place::Taken { subscriber, number, is_notified: true };
        self.taken += 1;
        if let Some(free) = self.free
            && let Some(at) = self.places.get_mut(free as usize)
        {
            if let Place::Free { next } = std::mem::replace(at, place) {
                self.free = next;
            }
            return free;
        }
        self.places.push(place);
        u32::try_from(self.places.len() - 1).unwrap_or(u32::MAX)
    }

    fn remove(&mut self, place: u32) {
        if let Some(at) = self.places.get_mut(place as usize) {
            *at = Place::Free { next: self.free.replace(place) };
            self.taken -= 1;
        }
        if self.taken == 0 {
            *self = Self::default();
        }
    }

    fn seen(&mut self, place: u32) {
        if let Some(Place::Taken { is_notified, .. }) = self.places.get_mut(place as usize) {
            *is_notified = false;
        }
    }

    /// Wakes every subscriber that has looked since it was notified last.
    pub(super) fn notify(&mut self) {
        for place in &mut self.places {
            if let Place::Taken { subscriber, number, is_notified } = place
                && !std::mem::replace(is_notified, true)
            {
                subscriber.notify(*number);
            }
        }
    }
}

impl Cache {
    /// Subscribes a client's stream to the entry of `key`. A name on demand that has no entry yet goes to the source of
    /// its kind.
    pub fn subscribe(&self, key: &Key) -> Result<Subscription, NotServed> {
        self.subscribe_as(key, &Subscriber::default(), 0)
    }

    /// Subscribes `subscriber`, which calls the entry `number`. It is notified at each change from now on.
    pub fn subscribe_as(
        &self,
        key: &Key,
        subscriber: &Subscriber,
        number: u32,
    ) -> Result<Subscription, NotServed> {
        let mut slots = self.lock();
        let slot = match slots.by_key.get(key) {
            Some(Filed(slot)) => {
                slot.desertion.as_ref().inspect(|source| source.ask(key));
                Arc::clone(slot)
            }
            None => slots.demand(key, subscriber.connection())?,
        };
        Ok(Subscription::new(slot, subscriber, number))
    }
}

/// One stream's view of one entry, and its verdicts on it.
#[derive(Debug)]
pub struct Subscription {
    slot: Arc<Slot>,
    subscriber: Subscriber,
    place: u32,
    acknowledged: Option<Version>,
}

impl Subscription {
    pub(super) fn new(slot: Arc<Slot>, subscriber: &Subscriber, number: u32) -> Self {
        let place = lock(&slot.subscribers).add(subscriber.clone(), number);
        let mut observed = lock(&slot.observed);
        observed.streams += 1;
        observed.arrivals += 1;
        drop(observed);
        Self { slot, subscriber: subscriber.clone(), place, acknowledged: None }
    }

    /// Looks at the entry. The stream is notified when the entry changes afterwards; a slow reader sees the newest state,
    /// not every one.
    pub fn entry<T>(&self, look: impl FnOnce(&Entry) -> T) -> T {
        // Marked before the look, so that no change is missed in between.
        lock(&self.slot.subscribers).seen(self.place);
        look(&self.slot.entry())
    }

    /// How many streams the entry has, this one included.
    pub fn streams(&self) -> usize {
        lock(&self.slot.observed).streams
    }

    /// A value was sent.
    pub fn pushed(&self) {
        lock(&self.slot.observed).verdicts_mut().pushes += 1;
    }

    /// The client acknowledged `version`.
    pub fn accepted(&mut self, version: Version) {
        lock(&self.slot.observed).verdicts_mut().acks += 1;
        self.holds(version);
    }

    /// The client holds `version`: it acknowledged it on this stream, or on an earlier one.
    pub fn holds(&mut self, version: Version) {
        let mut observed = lock(&self.slot.observed);
        let verdicts = observed.verdicts_mut();
        if self.acknowledged.as_ref() != Some(&version) {
            let node = self.subscriber.node();
            if let Some(before) = self.acknowledged.replace(version.clone()) {
                verdicts.release(before, Arc::clone(&node));
            }
            verdicts.hold(version.clone(), node);
        }
        if verdicts.rejection.as_ref().is_some_and(|rejection| rejection.version != version) {
            verdicts.rejection = None;
        }
        self.slot.stream_reported(false);
    }

    /// The client rejected `version`. True if no other stream rejected this version before.
    pub fn rejected(&self, version: Version, reason: &str) -> bool {
        let mut observed = lock(&self.slot.observed);
        let verdicts = observed.verdicts_mut();
        verdicts.nacks += 1;
        let is_new = verdicts.rejection.as_ref().is_none_or(|rejection| rejection.version != version);
        let node = self.subscriber.node();
        verdicts.rejection = Some(Rejection { version, node, reason: reason.to_owned() });
        self.slot.stream_reported(false);
        is_new
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        lock(&self.slot.subscribers).remove(self.place);
        let mut observed = lock(&self.slot.observed);
        observed.streams -= 1;
        if let Some(version) = self.acknowledged.take() {
            observed.verdicts_mut().release(version, self.subscriber.node());
        }
        self.slot.stream_reported(observed.streams == 0);
    }
}
