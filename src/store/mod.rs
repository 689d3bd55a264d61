//! Every secret that is served: one entry for each (workload, name), one watch channel for each entry.
//!
//! A source writes through its [`Publisher`]; everyone else reads through a [`Subscription`] or a
//! [`Cache::snapshot`]. What Envoy makes of a secret comes back as a verdict on the subscription.

pub mod health;
pub mod history;

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, SystemTime};

use tokio::sync::{Notify, mpsc, watch};
use tokio_stream::wrappers::WatchStream;

use crate::base::clock::rfc3339;
use crate::base::limits;
use crate::pki::crl::Crl;
use crate::secret::{KeyPair, Resource, Revocation, Secret, SecretName, Uncovered, Version};

/// How long a value that was asked for is kept fresh after the last stream has left: an Envoy that starts anew gets it
/// even if its files have become bad meanwhile.
const LINGER: Duration = Duration::from_secs(300);

/// The agent's handle on one identity that it serves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Workload(pub u16);

/// What an entry is found by.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
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

/// The state of one secret: the last good value and the current errors, independent of each other.
#[derive(Clone, Debug, Default)]
pub struct Entry {
    /// The newest value that passed every check.
    pub good: Option<Arc<Good>>,
    /// What keeps each source from giving a newer value.
    failures: BTreeMap<Origin, Arc<Failure>>,
    /// The source that holds the entry: lower ones can't publish, and need not try.
    pub holder: Option<Origin>,
}

impl Entry {
    /// The good value if it is valid at `now`, else why there is none, for people.
    pub fn valid_at(&self, now: SystemTime) -> Result<&Good, String> {
        match &self.good {
            Some(good) if good.secret.not_after() > now => Ok(good),
            Some(good) => {
                let at = rfc3339(good.secret.not_after());
                Err(format!("expired at {at}; {}", self.failure().as_deref().unwrap_or("no newer one came")))
            }
            None => Err(self.failure().unwrap_or_else(|| "not there yet".to_owned())),
        }
    }

    /// What keeps its sources from giving a newer value, for people: that of the highest rank first.
    pub fn failure(&self) -> Option<String> {
        let reasons: Vec<_> = self.failures.values().rev().map(|failure| failure.reason.as_str()).collect();
        (!reasons.is_empty()).then(|| reasons.join("; "))
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
#[derive(Debug, PartialEq, Eq)]
struct Failure {
    /// The reason, for people.
    reason: String,
    /// It is over as soon as any source has a value.
    is_absence: bool,
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

/// What became of CRLs in a trust bundle.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Amended {
    /// How many it is served with, or what keeps them out.
    pub covered: Result<usize, Uncovered>,
    /// When that may be otherwise.
    pub next_change: Option<SystemTime>,
}

/// How streams stand to an entry.
#[derive(Clone, Debug, Default)]
pub struct Observed {
    /// Streams that are subscribed.
    pub streams: usize,
    /// Streams that ever were.
    arrivals: u64,
    /// How many of them accepted which version last, by what their clients say that they are called.
    pub holders: HashMap<(Version, Arc<str>), usize>,
    /// The last rejection, until a later version is accepted.
    pub rejection: Option<Rejection>,
}

impl Observed {
    /// How many streams accepted which version last.
    pub fn holding(&self) -> HashMap<Version, usize> {
        let mut holding = HashMap::new();
        for ((version, _), streams) in &self.holders {
            *holding.entry(version.clone()).or_default() += streams;
        }
        holding
    }

    fn is_settled(&self, version: &Version) -> bool {
        // At each verdict: nothing is gathered for it.
        let holders = self.holders.iter().filter(|((held, _), _)| held == version);
        holders.map(|(_, streams)| streams).sum::<usize>() == self.streams
            || self.rejection.as_ref().is_some_and(|rejection| rejection.version == *version)
    }
}

/// A version that a client refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rejection {
    /// The version.
    pub version: Version,
    /// What the client says that it is called.
    pub node: Arc<str>,
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

/// Why a name is not served.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotServed {
    /// No source ever publishes it.
    #[error("this agent has no source for it")]
    NoSource,
    /// There are too many names that somebody asked for.
    #[error("{max} names of files are asked for already; no more are served", max = limits::NAMES_ON_DEMAND)]
    TooMany,
}

impl NotServed {
    /// The one word for it in metrics.
    pub fn label(self) -> &'static str {
        match self {
            Self::NoSource => "no_source",
            Self::TooMany => "too_many_names",
        }
    }
}

/// Why a secret was not renewed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotRenewed {
    /// Nobody renews it.
    #[error("no CA is asked for it: mounted files are all there is (--ca none)")]
    NoSource,
    /// The files decide.
    #[error("it comes from mounted files, which are read as soon as they change")]
    Files,
    /// The source has tried.
    #[error("{0}")]
    Failed(String),
}

/// All entries. Clones are the same cache.
#[derive(Clone, Debug, Default)]
pub struct Cache(Arc<Mutex<Slots>>);

#[derive(Debug, Default)]
struct Slots {
    by_key: BTreeMap<Key, Arc<Slot>>,
    /// How many of them are there because somebody asked.
    on_demand: usize,
    /// Where names go that nobody publishes yet.
    demand: Option<mpsc::UnboundedSender<Key>>,
}

#[derive(Debug, Default)]
struct Slot {
    entry: watch::Sender<Entry>,
    observed: Mutex<Observed>,
    /// What goes into trust bundles beside the roots, whoever publishes them. Locked while the entry is written.
    revocation: Mutex<Revocation>,
    /// The last stream has left.
    deserted: Notify,
    /// A stream has given a verdict, or has left.
    verdict: Notify,
    /// Where a source can be asked to renew.
    renewal: OnceLock<watch::Sender<Renewal>>,
}

/// How often somebody has asked for a renewal, and up to which of these the source has tried.
#[derive(Clone, Copy, Debug, Default)]
struct Renewal {
    asked: u64,
    settled: u64,
}

/// No code panics while it holds one of these locks, and their data is whole between any two statements.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Cache {
    /// The right to write the entry of `key` as `origin`. Makes the entry.
    pub fn publisher(&self, key: Key, origin: Origin) -> Publisher {
        let slot = self.slot_of(key.clone());
        Publisher { cache: self.clone(), slot, key, origin }
    }

    /// The names that somebody asks for and nobody publishes, from now on. Whoever takes one makes its publisher, and
    /// gives it up with [`Cache::retire`] when it is [`Publisher::deserted`].
    pub fn demand(&self) -> mpsc::UnboundedReceiver<Key> {
        // Each name is sent once while its entry lives, and the number of these is bounded.
        let (sender, receiver) = mpsc::unbounded_channel();
        lock(&self.0).demand = Some(sender);
        receiver
    }

    /// Reads the entry of `key`, as a client's stream.
    pub fn subscribe(&self, key: &Key) -> Result<Subscription, NotServed> {
        let mut slots = lock(&self.0);
        let slot = match slots.by_key.get(key) {
            Some(slot) => Arc::clone(slot),
            None => slots.demand(key)?,
        };
        let mut observed = lock(&slot.observed);
        observed.streams += 1;
        observed.arrivals += 1;
        drop(observed);
        Ok(Subscription { slot, node: "".into(), accepted: None })
    }

    /// Drops the entry of a name that was asked for, unless a stream has come back. True if it is gone.
    pub fn retire(&self, key: &Key) -> bool {
        let mut slots = lock(&self.0);
        let is_deserted = slots.by_key.get(key).is_some_and(|slot| lock(&slot.observed).streams == 0);
        if is_deserted && key.name.is_on_demand() {
            slots.by_key.remove(key);
            slots.on_demand -= 1;
        }
        is_deserted
    }

    /// Follows the entry of `key` without counting as a stream.
    pub fn watch(&self, key: &Key) -> Option<watch::Receiver<Entry>> {
        Some(self.slot(key)?.entry.subscribe())
    }

    /// The same of an entry that is there in any case, whether or not its source has come yet.
    pub fn follow(&self, key: Key) -> watch::Receiver<Entry> {
        self.slot_of(key).entry.subscribe()
    }

    /// Asks the source of `key` to renew it now, and returns when it has tried.
    pub async fn renew(&self, key: &Key) -> Result<(), NotRenewed> {
        let slot = self.slot(key).ok_or(NotRenewed::NoSource)?;
        if slot.entry.borrow().holder > Some(Origin::Ca) {
            return Err(NotRenewed::Files);
        }
        let renewal = slot.renewal.get().ok_or(NotRenewed::NoSource)?;
        let mut mine = 0;
        renewal.send_modify(|renewal| {
            renewal.asked += 1;
            mine = renewal.asked;
        });
        let settled = renewal.subscribe().wait_for(|renewal| renewal.settled >= mine).await.map(drop);
        settled.map_err(|_| NotRenewed::NoSource)?;
        let failure = slot.entry.borrow().failure();
        failure.map_or(Ok(()), |reason| Err(NotRenewed::Failed(reason)))
    }

    /// Puts `crls` into the trust bundle of `key` and into those that come after it, as long as they are enough: new
    /// roots are never served with CRLs that are not enough for them. None where there is no trust bundle yet.
    pub fn amend(&self, key: &Key, crls: &[Arc<Crl>], now: SystemTime) -> Option<Amended> {
        self.slot_of(key.clone()).amend(&key.name, now, |revocation| {
            revocation.set_crls(crls);
            true
        })
    }

    /// Every entry as it is now.
    pub fn snapshot(&self) -> Vec<Snapshot> {
        let slots = lock(&self.0);
        let view = |(key, slot): (&Key, &Arc<Slot>)| Snapshot {
            key: key.clone(),
            entry: slot.entry.borrow().clone(),
            observed: lock(&slot.observed).clone(),
        };
        slots.by_key.iter().map(view).collect()
    }

    /// The slot of `key`, made if there is none: sources and their readers may come in any order.
    fn slot_of(&self, key: Key) -> Arc<Slot> {
        Arc::clone(lock(&self.0).by_key.entry(key).or_default())
    }

    fn slot(&self, key: &Key) -> Option<Arc<Slot>> {
        lock(&self.0).by_key.get(key).cloned()
    }
}

impl Slot {
    /// Changes what there is beside the roots, and has the trust bundle follow if `change` says so.
    fn amend(
        &self,
        name: &SecretName,
        now: SystemTime,
        change: impl FnOnce(&mut Revocation) -> bool,
    ) -> Option<Amended> {
        let mut revocation = lock(&self.revocation);
        if !change(&mut revocation) {
            return None;
        }
        let mut amended = None;
        self.entry.send_if_modified(|entry| {
            let Some(good) = &entry.good else { return false };
            let Secret::TrustBundle(before) = &good.secret else { return false };
            let (bundle, covered) = before.with_revocation(&revocation, now);
            amended = Some(Amended { covered, next_change: revocation.next_change(before.facts(), now) });
            let is_new = bundle.crls() != before.crls();
            if is_new {
                let secret = Secret::TrustBundle(bundle);
                let resource = Resource::encode(name, &secret);
                let Good { origin, received, renews, .. } = **good;
                entry.good = Some(Arc::new(Good { secret, resource, origin, received, renews }));
            }
            is_new
        });
        amended
    }
}

impl Slots {
    fn demand(&mut self, key: &Key) -> Result<Arc<Slot>, NotServed> {
        let demand = self.demand.as_ref().filter(|_| key.name.is_on_demand()).ok_or(NotServed::NoSource)?;
        if self.on_demand == limits::NAMES_ON_DEMAND {
            return Err(NotServed::TooMany);
        }
        demand.send(key.clone()).map_err(|_| NotServed::NoSource)?;
        self.on_demand += 1;
        Ok(Arc::clone(self.by_key.entry(key.clone()).or_default()))
    }
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
    /// Says which key pair is published next: roots that go out before it are served with CRLs only if these are
    /// enough for its chain. A pair that is outranked changes nothing.
    pub fn announce(&self, pair: &KeyPair, now: SystemTime) {
        let is_outranked = self.slot.entry.borrow().holder > Some(self.origin);
        if self.key.name != SecretName::Workload || is_outranked {
            return;
        }
        let roots = Key { workload: self.key.workload, name: SecretName::Roots };
        if let Some(slot) = self.cache.slot(&roots) {
            slot.amend(&roots.name, now, |revocation| revocation.set_chain(pair));
        }
    }

    /// Makes `secret` the value that is served, and ends this source's failure.
    pub fn publish(&self, secret: Secret, received: SystemTime, renews: Option<SystemTime>) -> Published {
        if let Secret::KeyPair(pair) = &secret {
            self.announce(pair, received);
        }
        let revocation = lock(&self.slot.revocation);
        let secret = secret.with_revocation(&revocation, received);
        let resource = Resource::encode(&self.key.name, &secret);
        let mut outcome = Published::Outranked;
        self.slot.entry.send_if_modified(|entry| {
            if entry.holder > Some(self.origin) {
                return false;
            }
            let same = entry.good.as_ref().is_some_and(|good| good.resource.version == resource.version);
            outcome = if same { Published::Same } else { Published::Changed };
            let recovered = self.clear_failures(entry);
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
        self.note(Some(Failure { reason, is_absence: false }), false);
    }

    /// Lets sources of lower rank publish again: this one has nothing any more. The value stays until one does, and so
    /// does the reason, if there is one.
    pub fn release(&self, reason: Option<String>) {
        self.note(reason.map(|reason| Failure { reason, is_absence: true }), true);
    }

    fn note(&self, failure: Option<Failure>, lets_go: bool) {
        self.slot.entry.send_if_modified(|entry| {
            if entry.holder > Some(self.origin) {
                return false;
            }
            let released = lets_go && entry.holder == Some(self.origin);
            if released {
                entry.holder = None;
            }
            let is_new = entry.failures.get(&self.origin).map(|known| &**known) != failure.as_ref();
            entry.failures.remove(&self.origin);
            entry.failures.extend(failure.map(|failure| (self.origin, Arc::new(failure))));
            is_new || released
        });
    }

    /// Returns once nobody has been subscribed for a while. A value that is good is kept longer than none.
    pub async fn deserted(&self) {
        let streams = || {
            let observed = lock(&self.slot.observed);
            (observed.streams, observed.arrivals)
        };
        loop {
            let before = streams();
            if before.0 > 0 {
                self.slot.deserted.notified().await;
                continue;
            }
            if self.slot.entry.borrow().good.is_some() {
                tokio::time::sleep(LINGER).await;
            }
            if streams() == before {
                return;
            }
        }
    }

    /// What is asked of the source of this entry.
    pub fn renewals(&self) -> Renewals {
        self.slot.renewal.get_or_init(watch::Sender::default);
        Renewals { slot: Arc::clone(&self.slot) }
    }

    /// Returns once every open stream holds the value that is served, or one has refused it: waiting longer would change
    /// nothing. At once where there is no stream.
    pub async fn settled(&self) {
        let mut entry = self.watch();
        loop {
            // Before the look, so that no verdict is lost in between.
            let verdict = self.slot.verdict.notified();
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

    /// How streams stand to the entry.
    pub fn observed(&self) -> Observed {
        lock(&self.slot.observed).clone()
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
    fn clear_failures(&self, entry: &mut Entry) -> bool {
        let before = entry.failures.len();
        entry.failures.retain(|origin, failure| *origin > self.origin && !failure.is_absence);
        entry.failures.len() < before
    }
}

/// The renewals that somebody asks for before they are due.
#[derive(Debug)]
pub struct Renewals {
    slot: Arc<Slot>,
}

impl Renewals {
    /// Returns when one is asked for and nothing was tried since.
    pub async fn wanted(&self) {
        let Some(renewal) = self.slot.renewal.get() else { return std::future::pending().await };
        // The sender lives in the slot.
        let _ = renewal.subscribe().wait_for(|renewal| renewal.asked > renewal.settled).await;
    }

    /// The source has tried: whoever has asked until now looks at the entry.
    pub fn settle(&self) {
        if let Some(renewal) = self.slot.renewal.get() {
            renewal.send_if_modified(|renewal| {
                let is_news = renewal.settled != renewal.asked;
                renewal.settled = renewal.asked;
                is_news
            });
        }
    }
}

/// One stream's view of one entry, and its verdicts on it.
#[derive(Debug)]
pub struct Subscription {
    slot: Arc<Slot>,
    node: Arc<str>,
    accepted: Option<Version>,
}

impl Subscription {
    /// Notes what the client says that it is called, for people.
    pub fn named(mut self, node: Arc<str>) -> Self {
        self.node = node;
        self
    }

    /// The entry now and at each change. A slow reader sees the newest state, not every one.
    pub fn changes(&self) -> WatchStream<Entry> {
        WatchStream::new(self.slot.entry.subscribe())
    }

    /// The client accepted `version`.
    pub fn accepted(&mut self, version: Version) {
        let mut observed = lock(&self.slot.observed);
        Self::let_go(&mut observed, self.accepted.take(), &self.node);
        *observed.holders.entry((version.clone(), Arc::clone(&self.node))).or_default() += 1;
        if observed.rejection.as_ref().is_some_and(|rejection| rejection.version != version) {
            observed.rejection = None;
        }
        self.accepted = Some(version);
        self.slot.verdict.notify_waiters();
    }

    /// The client refused `version`. True if that is news: no other stream said it of this version before.
    pub fn rejected(&self, version: Version, reason: &str) -> bool {
        let mut observed = lock(&self.slot.observed);
        let is_news = observed.rejection.as_ref().is_none_or(|rejection| rejection.version != version);
        let node = Arc::clone(&self.node);
        observed.rejection = Some(Rejection { version, node, reason: reason.to_owned() });
        self.slot.verdict.notify_waiters();
        is_news
    }

    fn let_go(observed: &mut Observed, version: Option<Version>, node: &Arc<str>) {
        let Some(version) = version else { return };
        let holder = (version, Arc::clone(node));
        if let Some(count) = observed.holders.get_mut(&holder) {
            *count -= 1;
            if *count == 0 {
                observed.holders.remove(&holder);
            }
        }
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        let mut observed = lock(&self.slot.observed);
        observed.streams -= 1;
        Self::let_go(&mut observed, self.accepted.take(), &self.node);
        if observed.streams == 0 {
            self.slot.deserted.notify_one();
        }
        self.slot.verdict.notify_waiters();
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
        assert_eq!(entry.failure().unwrap(), "the CA is down");
        ca.publish(bundle(), UNIX_EPOCH, None);
        assert!(ca.entry().failure().is_none());
    }

    #[test]
    fn equal_bytes_wake_nobody() {
        let cache = Cache::default();
        let ca = cache.publisher(ROOTS, Origin::Ca);
        let first = bundle();
        let again = same_bundle(&first);
        ca.publish(first, UNIX_EPOCH, None);
        let mut reader = cache.watch(&ROOTS).unwrap();
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
        files.release(None);
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
        assert_eq!(ca.entry().failure(), None);
        files.fail("half of it is gone".to_owned());
        assert_eq!(ca.entry().failure().unwrap(), "half of it is gone");
        files.release(None);
        ca.fail("the CA is down".to_owned());
        assert_eq!(ca.entry().failure().unwrap(), "the CA is down");
    }

    #[test]
    fn each_source_has_its_own_failure() {
        let cache = Cache::default();
        let ca = cache.publisher(ROOTS, Origin::Ca);
        let files = cache.publisher(ROOTS, Origin::Files);
        files.fail("the file is bad".to_owned());
        ca.fail("the CA is down".to_owned());
        assert_eq!(ca.entry().failure().unwrap(), "the file is bad; the CA is down");
        ca.publish(bundle(), UNIX_EPOCH, None);
        assert_eq!(ca.entry().failure().unwrap(), "the file is bad", "that the CA is back mends no file");
        // That files are gone is over once somebody else has a value.
        files.publish(bundle(), UNIX_EPOCH, None);
        files.release(Some("the files are gone".to_owned()));
        assert_eq!(ca.entry().failure().unwrap(), "the files are gone");
        ca.publish(bundle(), UNIX_EPOCH, None);
        assert_eq!(ca.entry().failure(), None);
    }

    fn named(index: usize) -> Key {
        Key { workload: Workload(0), name: format!("file-root:{index}").parse().unwrap() }
    }

    #[tokio::test(start_paused = true)]
    async fn a_name_that_is_asked_for_lives_as_long_as_its_streams_and_a_good_value_longer() {
        let cache = Cache::default();
        assert_eq!(cache.subscribe(&named(0)).unwrap_err(), NotServed::NoSource, "nobody takes demand yet");
        let mut demand = cache.demand();
        let stream = cache.subscribe(&named(0)).unwrap();
        let again = cache.subscribe(&named(0)).unwrap();
        assert_eq!(demand.recv().await, Some(named(0)));
        assert!(demand.try_recv().is_err(), "it is told once");
        let files = cache.publisher(named(0), Origin::Files);
        drop(stream);
        assert!(!cache.retire(&named(0)), "a stream is left");
        drop(again);
        files.deserted().await;
        assert!(cache.retire(&named(0)));
        assert!(cache.snapshot().is_empty());

        let stream = cache.subscribe(&named(0)).unwrap();
        assert_eq!(demand.recv().await, Some(named(0)), "it is told anew");
        let files = cache.publisher(named(0), Origin::Files);
        files.publish(bundle(), UNIX_EPOCH, None);
        drop(stream);
        let deserted = tokio::time::timeout(LINGER / 2, files.deserted()).await;
        assert!(deserted.is_err(), "a good value is kept for an Envoy that comes back");
        tokio::time::timeout(2 * LINGER, files.deserted()).await.unwrap();
    }

    #[test]
    fn the_number_of_names_on_demand_is_bounded() {
        let cache = Cache::default();
        let _demand = cache.demand();
        let streams: Vec<_> =
            (0..limits::NAMES_ON_DEMAND).map(|index| cache.subscribe(&named(index)).unwrap()).collect();
        let one_more = named(limits::NAMES_ON_DEMAND);
        assert_eq!(cache.subscribe(&one_more).unwrap_err(), NotServed::TooMany);
        assert!(cache.subscribe(&named(0)).is_ok(), "those that are there are served");
        drop(streams);
        assert!(cache.retire(&named(1)));
        assert!(cache.subscribe(&one_more).is_ok());
    }

    #[test]
    fn verdicts_count_streams_by_the_version_they_hold() {
        let cache = Cache::default();
        let _ca = cache.publisher(ROOTS, Origin::Ca);
        let (one, two) = (Version::of(b"1"), Version::of(b"2"));
        let mut a = cache.subscribe(&ROOTS).unwrap();
        let mut b = cache.subscribe(&ROOTS).unwrap();
        a.accepted(one.clone());
        b.accepted(one.clone());
        b.accepted(two.clone());
        assert!(a.rejected(two.clone(), "bad root"));
        assert!(!b.rejected(two.clone(), "bad root"), "the second stream says nothing new");
        let observed = &cache.snapshot()[0].observed;
        assert_eq!(observed.holding(), HashMap::from([(one.clone(), 1), (two, 1)]));
        assert_eq!(observed.rejection.as_ref().unwrap().reason, "bad root");
        drop(b);
        let observed = &cache.snapshot()[0].observed;
        assert_eq!((observed.streams, observed.holding()), (1, HashMap::from([(one, 1)])));
    }

    #[test]
    fn a_name_that_nobody_publishes_has_no_entry() {
        assert_eq!(Cache::default().subscribe(&ROOTS).unwrap_err(), NotServed::NoSource);
    }
}
