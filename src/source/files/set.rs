//! Files that are read together: when they are whole, and when they are read again.

use std::time::{Duration, SystemTime};

use tokio::time::Instant;

use super::publisher::SecretPublisher;
use super::{Context, locations};
use crate::base::failure_log::FailureLog;
use crate::base::limits;
use crate::fs::generation::{Contents, Digest, FileError, Generation, Places};
use crate::fs::walk::Lookups;
use crate::fs::watch::{Activity, Wake, Watch};
use crate::secret::{Secret, Unchained};
use crate::store::Cache;

/// How long to wait for a file that was written to and is kept open, while nothing more is written.
pub(super) const OPEN_PATIENCE: Duration = Duration::from_secs(5);
/// The pause after a look that published nothing; it doubles up to a tenth of the debounce window.
pub(super) const PAUSE: Duration = Duration::from_millis(1);

/// Files that are read together, and the secrets that they hold.
#[derive(Debug)]
pub(super) struct FileSet {
    places: Places,
    watch: Watch,
    key_pair: Option<SecretPublisher>,
    roots: Option<SecretPublisher>,
    /// Whether the leaf chains to the roots.
    chained: FailureLog,
    taken: Option<Taken>,
    context: Context,
}

/// What was published or reported last.
#[derive(Debug)]
struct Taken {
    digest: Digest,
    at: SystemTime,
    /// When the same content has to be judged again: a certificate becomes valid or expires.
    until: Option<SystemTime>,
}

impl Taken {
    fn holds_at(&self, now: SystemTime) -> bool {
        self.at <= now && self.until.is_none_or(|until| now < until)
    }
}

/// What came of a look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    /// The files are published or reported.
    Taken { is_new: bool },
    /// They may be half of a change.
    Incomplete,
}

/// A change that may not be complete yet.
#[derive(Debug, Default)]
pub(super) struct PendingChange {
    pub(super) since: Option<Instant>,
    /// Nothing has happened since.
    pub(super) quiet_since: Option<Instant>,
    /// Nothing has happened for a whole window.
    pub(super) is_settled: bool,
    /// The failure was published that the files don't come to rest.
    pub(super) is_reported: bool,
}

impl PendingChange {
    /// Whether the change had begun more than `patience` before `now`.
    pub(super) fn lasts(&self, now: Instant, patience: Duration) -> bool {
        self.since.is_some_and(|since| now - since > patience)
    }

    pub(super) fn is_quiet(&self, now: Instant, patience: Duration) -> bool {
        self.quiet_since.is_some_and(|since| now - since > patience)
    }
}

impl FileSet {
    pub(super) fn new(
        places: Places,
        key_pair: Option<SecretPublisher>,
        roots: Option<SecretPublisher>,
        context: Context,
    ) -> Self {
        let watch = context.watcher.watch(places.paths());
        Self { places, watch, key_pair, roots, chained: FailureLog::default(), taken: None, context }
    }

    /// Publishes what the files hold now, good or not.
    pub(super) fn publish_once(&mut self) {
        locations::warn_of_own(&self.places);
        let (contents, _) = self.look();
        let (now, digest) = (self.context.clock.now(), contents.digest());
        self.publish(contents.parse(&self.places, now), digest, now);
    }

    /// Follows every change. Does not return. If `is_settled`, what the first look finds is reported at once.
    pub(super) async fn run(mut self, is_settled: bool) {
        let debounce = self.context.debounce;
        let mut pending = PendingChange { is_settled, ..PendingChange::default() };
        let mut pause = PAUSE;
        loop {
            let (contents, lookups) = self.look();
            let looked = Instant::now();
            // A file that is read while it is written may be half of what it will be.
            let activity = self.watch.activity(&lookups);
            let outcome = self.consider(contents, activity, &pending, looked);
            self.watch.follow(lookups);
            if let Outcome::Taken { is_new } = outcome {
                pending = PendingChange::default();
                if is_new {
                    pause = PAUSE;
                }
                self.next_change().await;
                self.wait_for_window().await;
            } else {
                self.wait_for_rest(&mut pending, looked).await;
            }
            // A file that changes all the time, and never to a good one, must not keep the agent busy.
            let rest = pause.saturating_sub(looked.elapsed());
            if !rest.is_zero() {
                tokio::time::sleep(rest).await;
            }
            pause = (2 * pause).min(debounce / 10);
        }
    }

    /// Touches the disk.
    fn look(&mut self) -> (Contents, Lookups) {
        let look = self.watch.look(limits::FILE_BYTES, self.places.refusal());
        (self.places.contents(look.files, look.is_restless), look.lookups)
    }

    /// Takes `contents`, unless they may be half of a change.
    fn consider(
        &mut self,
        contents: Contents,
        activity: Activity,
        pending: &PendingChange,
        looked: Instant,
    ) -> Outcome {
        let is_due = match activity {
            Activity::Change => return Outcome::Incomplete,
            Activity::Open => pending.is_quiet(looked, OPEN_PATIENCE),
            Activity::None => pending.is_settled || pending.lasts(looked, 10 * self.context.debounce),
        };
        let now = self.context.clock.now();
        let digest = contents.digest();
        if self.taken.as_ref().is_some_and(|taken| taken.digest == digest && taken.holds_at(now)) {
            return Outcome::Taken { is_new: false };
        }
        let generation = contents.parse(&self.places, now);
        if !is_due && (activity == Activity::Open || !self.is_whole(&generation)) {
            return Outcome::Incomplete;
        }
        // Only here: a write that has begun since the look must not be forgotten.
        if activity == Activity::Open {
            self.watch.forget_writers();
        }
        Outcome::Taken { is_new: self.publish(generation, digest, now) }
    }

    fn publishers(&self) -> impl Iterator<Item = &SecretPublisher> {
        self.roots.iter().chain(&self.key_pair)
    }

    /// Whether this can be taken for a whole generation, and not for half of a change.
    fn is_whole(&self, generation: &Generation) -> bool {
        let Generation { key_pair, roots, chained } = generation;
        self.key_pair.as_ref().is_none_or(|publisher| publisher.expects(key_pair))
            && self.roots.as_ref().is_none_or(|publisher| publisher.expects(roots))
            && !matches!(chained, Some(Err(_)))
    }

    /// Returns when a file changes, or when a certificate becomes valid or expires.
    async fn next_change(&self) {
        let due = async {
            match self.taken.as_ref().and_then(|taken| taken.until) {
                Some(moment) => self.context.clock.sleep_until(moment).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            _ = self.watch.changed() => {}
            () = due => {}
        }
    }

    /// Waits until the window of the last publish is over: later changes are folded into the next one.
    async fn wait_for_window(&self) {
        let published = self.publishers().filter_map(|publisher| publisher.published).max();
        let window = published.map(|at| self.context.debounce.saturating_sub(at.elapsed()));
        if let Some(window) = window.filter(|window| !window.is_zero()) {
            tokio::time::sleep(window).await;
        }
    }

    /// Waits for the rest of a change, one window at most: if nothing completes it by then, it is reported. So is a
    /// change that goes on and gets no better.
    async fn wait_for_rest(&mut self, pending: &mut PendingChange, looked: Instant) {
        if pending.lasts(looked, OPEN_PATIENCE) && !std::mem::replace(&mut pending.is_reported, true) {
            self.report_restless();
        }
        pending.since.get_or_insert(looked);
        let changed = async { while self.watch.changed().await == Wake::Poll {} };
        pending.is_settled = tokio::time::timeout(self.context.debounce, changed).await.is_err();
        pending.quiet_since = match pending.is_settled {
            true => pending.quiet_since.or_else(|| Some(Instant::now())),
            false => None,
        };
    }

    /// Publishes what is good and reports what is not. True if a new secret was published.
    fn publish(&mut self, generation: Generation, digest: Digest, now: SystemTime) -> bool {
        let starts = generation.key_pair.starts();
        let Generation { key_pair, roots, chained } = generation;
        self.report_mixture(chained);
        let metrics = &self.context.metrics;
        let mut is_new = false;
        let cache = self.publishers().next().map(|publisher| publisher.cache().clone());
        let _together = cache.as_ref().map(Cache::together);
        // Roots first, as from a CA.
        if let (Some(publisher), Some(pair)) = (&self.key_pair, key_pair.good()) {
            publisher.announce(pair, now);
        }
        if let Some(publisher) = &mut self.roots {
            is_new |= publisher.take(roots.map(Secret::TrustBundle), now, &self.places, metrics);
        }
        if let Some(publisher) = &mut self.key_pair {
            is_new |= publisher.take(key_pair.map(Secret::KeyPair), now, &self.places, metrics);
        }
        let expiries =
            self.publishers().filter_map(SecretPublisher::not_after).filter(|moment| *moment > now);
        let until = starts.into_iter().chain(expiries).min();
        self.taken = Some(Taken { digest, at: now, until });
        is_new
    }

    /// Files that go on changing may be half of a generation at every look.
    fn report_restless(&mut self) {
        self.taken = None;
        let error = FileError::Restless { paths: self.places.paths() };
        for publisher in self.roots.iter_mut().chain(&mut self.key_pair) {
            publisher.fail(&error, &self.context.metrics);
        }
    }

    /// Files often pair one CA's certificate with the roots of the peers' CA, so this is no mistake by itself.
    fn report_mixture(&mut self, chained: Option<Result<(), Unchained>>) {
        let Some(chained) = chained else { return };
        let Err(unchained) = chained else {
            self.chained.recovered();
            return;
        };
        if self.chained.is_new(&unchained.to_string()) {
            tracing::warn!(
                reason = %unchained,
                "mounted certificate does not chain to the mounted roots; both are served as they are, and peers with the \
                 same roots will reject it"
            );
        }
    }
}
