//! Every secret that is served: one entry for each (workload, name), one watch channel for each entry.
//!
//! A source writes through its [`Publisher`]; everyone else reads through a [`Subscription`] or a
//! [`Cache::snapshot`]. What Envoy makes of a secret comes back as a verdict on the subscription.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use tokio::sync::watch;
use tokio_stream::wrappers::WatchStream;

use crate::secret::{Resource, Secret, SecretName, Version};

/// The agent's handle on one identity that it serves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Workload(pub u16);

/// What an entry is found by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key {
    /// Whose secret.
    pub workload: Workload,
    /// Which secret.
    pub name: SecretName,
}

/// Where a value comes from. Files outrank a CA.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Origin {
    /// Signed by a CA for a key made here.
    Ca,
    /// Read from mounted files.
    Files,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ca => "ca",
            Self::Files => "files",
        })
    }
}

/// The state of one secret: the last good value and the current error, independent of each other.
#[derive(Clone, Debug, Default)]
pub struct Entry {
    /// The newest value that passed every check.
    pub good: Option<Arc<Good>>,
    /// What keeps a source from giving a newer value.
    pub failure: Option<Arc<Failure>>,
    /// The source that holds the entry: lower ones can't publish, and need not try.
    pub holder: Option<Origin>,
}

impl Entry {
    /// The good value if it is valid at `now`, else why there is none, for people.
    pub fn valid_at(&self, now: SystemTime) -> Result<&Good, String> {
        let failure = self.failure.as_ref().map(|failure| failure.reason.as_str());
        match &self.good {
            Some(good) if good.secret.not_after() > now => Ok(good),
            Some(good) => {
                let at = humantime::format_rfc3339_seconds(good.secret.not_after());
                Err(format!("expired at {at}; {}", failure.unwrap_or("no newer one came")))
            }
            None => Err(failure.unwrap_or("not there yet").to_owned()),
        }
    }
}

/// A value that passed every check.
#[derive(Debug)]
pub struct Good {
    /// The value.
    pub secret: Secret,
    /// The value on the wire.
    pub resource: Resource,
    /// Where it comes from.
    pub origin: Origin,
    /// When it came.
    pub received: SystemTime,
    /// When its source means to replace it; none where the source can't tell.
    pub renews: Option<SystemTime>,
}

/// Why a source can't give a value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The source that failed.
    pub origin: Origin,
    /// The reason, for people.
    pub reason: String,
}

/// What came of [`Publisher::publish`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Published {
    /// Subscribers see a new value.
    Changed,
    /// The bytes are those that are served already.
    Same,
    /// A source of higher rank holds the entry.
    Outranked,
}

/// How streams stand to an entry.
#[derive(Clone, Debug, Default)]
pub struct Observed {
    /// Streams that are subscribed.
    pub streams: usize,
    /// How many of them accepted which version last.
    pub holding: HashMap<Version, usize>,
    /// The last rejection, until a later version is accepted.
    pub rejection: Option<Rejection>,
}

/// A version that a client refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rejection {
    /// The version.
    pub version: Version,
    /// The client's words.
    pub reason: String,
}

/// One entry as [`Cache::snapshot`] saw it.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// Which entry.
    pub key: Key,
    /// Its state.
    pub entry: Entry,
    /// Its streams.
    pub observed: Observed,
}

/// All entries. Clones are the same cache.
#[derive(Clone, Debug, Default)]
pub struct Cache(Arc<Mutex<BTreeMap<Key, Arc<Slot>>>>);

#[derive(Debug)]
struct Slot {
    entry: watch::Sender<Entry>,
    observed: Mutex<Observed>,
}

/// No code panics while it holds one of these locks, and their data is whole between any two statements.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Cache {
    /// The right to write the entry of `key` as `origin`. Makes the entry.
    pub fn publisher(&self, key: Key, origin: Origin) -> Publisher {
        let new_slot = || Arc::new(Slot { entry: watch::Sender::default(), observed: Mutex::default() });
        let slot = Arc::clone(lock(&self.0).entry(key).or_insert_with(new_slot));
        Publisher { slot, key, origin }
    }

    /// Reads the entry of `key`, as a client's stream. None where no source ever publishes it.
    pub fn subscribe(&self, key: Key) -> Option<Subscription> {
        let slot = Arc::clone(lock(&self.0).get(&key)?);
        lock(&slot.observed).streams += 1;
        Some(Subscription { slot, accepted: None })
    }

    /// Follows the entry of `key` without counting as a stream.
    pub fn watch(&self, key: Key) -> Option<watch::Receiver<Entry>> {
        Some(lock(&self.0).get(&key)?.entry.subscribe())
    }

    /// Every entry as it is now.
    pub fn snapshot(&self) -> Vec<Snapshot> {
        let slots = lock(&self.0);
        let view = |(key, slot): (&Key, &Arc<Slot>)| Snapshot {
            key: *key,
            entry: slot.entry.borrow().clone(),
            observed: lock(&slot.observed).clone(),
        };
        slots.iter().map(view).collect()
    }
}

/// The right of one source to write one entry.
#[derive(Debug)]
pub struct Publisher {
    slot: Arc<Slot>,
    key: Key,
    origin: Origin,
}

impl Publisher {
    /// Makes `secret` the value that is served, and ends this source's failure.
    pub fn publish(&self, secret: Secret, received: SystemTime, renews: Option<SystemTime>) -> Published {
        let resource = Resource::encode(self.key.name, &secret);
        let mut outcome = Published::Outranked;
        self.slot.entry.send_if_modified(|entry| {
            if entry.holder > Some(self.origin) {
                return false;
            }
            let same = entry.good.as_ref().is_some_and(|good| good.resource.version == resource.version);
            outcome = if same { Published::Same } else { Published::Changed };
            let recovered = self.clear_failure(entry);
            let taken_over = entry.holder != Some(self.origin);
            entry.holder = Some(self.origin);
            // The same bytes keep their time of arrival, and wake nobody.
            let arrived = entry.good.as_ref().filter(|_| same).map(|good| good.received);
            let (origin, received) = (self.origin, arrived.unwrap_or(received));
            entry.good = Some(Arc::new(Good { secret, resource, origin, received, renews }));
            !same || taken_over || recovered
        });
        outcome
    }

    /// Notes why there is no newer value. The good one stays. Where a source of higher rank holds the entry, it
    /// does not matter.
    pub fn fail(&self, reason: String) {
        let failure = Arc::new(Failure { origin: self.origin, reason });
        self.slot.entry.send_if_modified(|entry| {
            if entry.holder > Some(self.origin) {
                return false;
            }
            let is_new = entry.failure.as_ref() != Some(&failure);
            entry.failure = Some(failure);
            is_new
        });
    }

    /// Lets sources of lower rank publish again. The value stays until one does.
    pub fn release(&self) {
        self.slot.entry.send_if_modified(|entry| {
            let held = entry.holder == Some(self.origin);
            if held {
                entry.holder = None;
            }
            self.clear_failure(entry) || held
        });
    }

    /// The entry as it is now.
    pub fn entry(&self) -> Entry {
        self.slot.entry.borrow().clone()
    }

    /// Follows the entry: also what other sources write.
    pub fn watch(&self) -> watch::Receiver<Entry> {
        self.slot.entry.subscribe()
    }

    /// Ends this source's failure, and those of lower ones: while this one holds the entry they don't matter.
    fn clear_failure(&self, entry: &mut Entry) -> bool {
        let ended = entry.failure.as_ref().is_some_and(|failure| failure.origin <= self.origin);
        if ended {
            entry.failure = None;
        }
        ended
    }
}

/// One stream's view of one entry, and its verdicts on it.
#[derive(Debug)]
pub struct Subscription {
    slot: Arc<Slot>,
    accepted: Option<Version>,
}

impl Subscription {
    /// The entry now and at each change. A slow reader sees the newest state, not every one.
    pub fn changes(&self) -> WatchStream<Entry> {
        WatchStream::new(self.slot.entry.subscribe())
    }

    /// The client accepted `version`.
    pub fn accepted(&mut self, version: Version) {
        let mut observed = lock(&self.slot.observed);
        Self::let_go(&mut observed, self.accepted.take());
        *observed.holding.entry(version.clone()).or_default() += 1;
        if observed.rejection.as_ref().is_some_and(|rejection| rejection.version != version) {
            observed.rejection = None;
        }
        self.accepted = Some(version);
    }

    /// The client refused `version`. True if that is news: no other stream said it of this version before.
    pub fn rejected(&self, version: Version, reason: &str) -> bool {
        let mut observed = lock(&self.slot.observed);
        let is_news = observed.rejection.as_ref().is_none_or(|rejection| rejection.version != version);
        observed.rejection = Some(Rejection { version, reason: reason.to_owned() });
        is_news
    }

    fn let_go(observed: &mut Observed, version: Option<Version>) {
        let Some(version) = version else { return };
        if let Some(count) = observed.holding.get_mut(&version) {
            *count -= 1;
            if *count == 0 {
                observed.holding.remove(&version);
            }
        }
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        let mut observed = lock(&self.slot.observed);
        observed.streams -= 1;
        Self::let_go(&mut observed, self.accepted.take());
    }
}

#[cfg(test)]
mod tests {
    use std::time::UNIX_EPOCH;

    use super::*;
    use crate::pki::key::{KeyType, SigningKey};
    use crate::secret::TrustBundle;

    const ROOTS: Key = Key { workload: Workload(0), name: SecretName::Roots };

    fn bundle() -> Secret {
        let key = SigningKey::generate(KeyType::EcdsaP256).unwrap();
        let root = rcgen::CertificateParams::default().self_signed(&key).unwrap();
        Secret::TrustBundle(TrustBundle::new(vec![root.der().clone()]).unwrap())
    }

    fn same_bundle(secret: &Secret) -> Secret {
        let Secret::TrustBundle(bundle) = secret else { panic!("not a bundle") };
        Secret::TrustBundle(TrustBundle::new(bundle.roots().to_vec()).unwrap())
    }

    #[test]
    fn a_failure_keeps_the_good_value() {
        let cache = Cache::default();
        let ca = cache.publisher(ROOTS, Origin::Ca);
        assert_eq!(ca.publish(bundle(), UNIX_EPOCH, None), Published::Changed);
        ca.fail("the CA is down".to_owned());
        let entry = ca.entry();
        assert!(entry.good.is_some());
        assert_eq!(entry.failure.unwrap().reason, "the CA is down");
        ca.publish(bundle(), UNIX_EPOCH, None);
        assert!(ca.entry().failure.is_none());
    }

    #[test]
    fn equal_bytes_wake_nobody() {
        let cache = Cache::default();
        let ca = cache.publisher(ROOTS, Origin::Ca);
        let first = bundle();
        let again = same_bundle(&first);
        ca.publish(first, UNIX_EPOCH, None);
        let mut reader = cache.watch(ROOTS).unwrap();
        reader.mark_unchanged();
        assert_eq!(ca.publish(again, UNIX_EPOCH, None), Published::Same);
        assert!(!reader.has_changed().unwrap());
    }

    #[test]
    fn files_outrank_the_ca_until_they_let_go() {
        let cache = Cache::default();
        let ca = cache.publisher(ROOTS, Origin::Ca);
        let files = cache.publisher(ROOTS, Origin::Files);
        ca.publish(bundle(), UNIX_EPOCH, None);
        assert_eq!(files.publish(bundle(), UNIX_EPOCH, None), Published::Changed);
        assert_eq!(ca.publish(bundle(), UNIX_EPOCH, None), Published::Outranked);
        assert_eq!(ca.entry().good.unwrap().origin, Origin::Files);
        files.release();
        assert_eq!(ca.entry().good.unwrap().origin, Origin::Files, "the last good value stays");
        assert_eq!(ca.publish(bundle(), UNIX_EPOCH, None), Published::Changed);
    }

    #[test]
    fn a_failure_of_the_ca_does_not_matter_while_files_hold_the_entry() {
        let cache = Cache::default();
        let ca = cache.publisher(ROOTS, Origin::Ca);
        let files = cache.publisher(ROOTS, Origin::Files);
        files.publish(bundle(), UNIX_EPOCH, None);
        ca.fail("the CA is down".to_owned());
        assert_eq!(ca.entry().failure, None);
        files.fail("half of it is gone".to_owned());
        assert_eq!(ca.entry().failure.unwrap().origin, Origin::Files);
        files.release();
        ca.fail("the CA is down".to_owned());
        assert_eq!(ca.entry().failure.unwrap().origin, Origin::Ca);
    }

    #[test]
    fn verdicts_count_streams_by_the_version_they_hold() {
        let cache = Cache::default();
        let _ca = cache.publisher(ROOTS, Origin::Ca);
        let (one, two) = (Version::of(b"1"), Version::of(b"2"));
        let mut a = cache.subscribe(ROOTS).unwrap();
        let mut b = cache.subscribe(ROOTS).unwrap();
        a.accepted(one.clone());
        b.accepted(one.clone());
        b.accepted(two.clone());
        assert!(a.rejected(two.clone(), "bad root"));
        assert!(!b.rejected(two.clone(), "bad root"), "the second stream says nothing new");
        let observed = &cache.snapshot()[0].observed;
        assert_eq!(observed.holding, HashMap::from([(one.clone(), 1), (two, 1)]));
        assert_eq!(observed.rejection.as_ref().unwrap().reason, "bad root");
        drop(b);
        let observed = &cache.snapshot()[0].observed;
        assert_eq!((observed.streams, &observed.holding), (1, &HashMap::from([(one, 1)])));
    }

    #[test]
    fn a_name_that_nobody_publishes_has_no_entry() {
        assert!(Cache::default().subscribe(ROOTS).is_none());
    }
}
