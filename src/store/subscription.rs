//! A stream's view of one entry, and what Envoy makes of its values: the verdicts.

use std::collections::HashMap;
use std::sync::Arc;

use tokio_stream::wrappers::WatchStream;

use super::cache::{Cache, Slot, lock};
use super::demand::NotServed;
use super::entry::{Entry, Key};
use crate::secret::Version;

/// The streams of an entry.
#[derive(Clone, Debug, Default)]
pub struct Observed {
    /// Streams that are subscribed.
    pub streams: usize,
    /// Streams that ever were.
    pub(super) arrivals: u64,
    /// How many streams acknowledged which version last, by the node id of their clients.
    pub acked_by: HashMap<(Version, Arc<str>), usize>,
    /// The last rejection, until a later version is acknowledged.
    pub rejection: Option<Rejection>,
}

impl Observed {
    /// How many streams acknowledged which version last.
    pub fn acknowledged(&self) -> HashMap<Version, usize> {
        let mut acknowledged = HashMap::new();
        for ((version, _), streams) in &self.acked_by {
            *acknowledged.entry(version.clone()).or_default() += streams;
        }
        acknowledged
    }

    /// Whether every stream has acknowledged `version`, or one has rejected it.
    pub(super) fn is_settled(&self, version: &Version) -> bool {
        // This runs at each verdict, so it collects nothing.
        let acknowledged = self.acked_by.iter().filter(|((held, _), _)| held == version);
        acknowledged.map(|(_, streams)| streams).sum::<usize>() == self.streams
            || self.rejection.as_ref().is_some_and(|rejection| rejection.version == *version)
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

impl Cache {
    /// Subscribes a client's stream to the entry of `key`. A name on demand that has no entry yet goes to the source of
    /// its kind.
    pub fn subscribe(&self, key: &Key) -> Result<Subscription, NotServed> {
        let mut slots = self.lock();
        let slot = match slots.by_key.get(key) {
            Some(slot) => Arc::clone(slot),
            None => slots.demand(key)?,
        };
        let mut observed = lock(&slot.observed);
        observed.streams += 1;
        observed.arrivals += 1;
        drop(observed);
        Ok(Subscription { slot, node: "".into(), acknowledged: None })
    }
}

/// One stream's view of one entry, and its verdicts on it.
#[derive(Debug)]
pub struct Subscription {
    slot: Arc<Slot>,
    node: Arc<str>,
    acknowledged: Option<Version>,
}

impl Subscription {
    /// Sets the client's node id.
    pub fn named(mut self, node: Arc<str>) -> Self {
        self.node = node;
        self
    }

    /// The entry now and at each change. A slow reader sees the newest state, not every one.
    pub fn changes(&self) -> WatchStream<Entry> {
        WatchStream::new(self.slot.entry.subscribe())
    }

    /// The client acknowledged `version`.
    pub fn accepted(&mut self, version: Version) {
        let mut observed = lock(&self.slot.observed);
        Self::release(&mut observed, self.acknowledged.take(), &self.node);
        *observed.acked_by.entry((version.clone(), Arc::clone(&self.node))).or_default() += 1;
        if observed.rejection.as_ref().is_some_and(|rejection| rejection.version != version) {
            observed.rejection = None;
        }
        self.acknowledged = Some(version);
        self.slot.verdict.notify_waiters();
    }

    /// The client rejected `version`. True if no other stream rejected this version before.
    pub fn rejected(&self, version: Version, reason: &str) -> bool {
        let mut observed = lock(&self.slot.observed);
        let is_new = observed.rejection.as_ref().is_none_or(|rejection| rejection.version != version);
        let node = Arc::clone(&self.node);
        observed.rejection = Some(Rejection { version, node, reason: reason.to_owned() });
        self.slot.verdict.notify_waiters();
        is_new
    }

    fn release(observed: &mut Observed, version: Option<Version>, node: &Arc<str>) {
        let Some(version) = version else { return };
        let held = (version, Arc::clone(node));
        if let Some(count) = observed.acked_by.get_mut(&held) {
            *count -= 1;
            if *count == 0 {
                observed.acked_by.remove(&held);
            }
        }
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        let mut observed = lock(&self.slot.observed);
        observed.streams -= 1;
        Self::release(&mut observed, self.acknowledged.take(), &self.node);
        if observed.streams == 0 {
            self.slot.deserted.notify_one();
            if let Some(desertion) = &self.slot.desertion {
                desertion.report();
            }
        }
        self.slot.verdict.notify_waiters();
    }
}
