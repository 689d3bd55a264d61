//! Files that are read together: when they are whole, and when they are read again.

use std::time::{Duration, SystemTime};

use tokio::time::Instant;

use super::publisher::SecretPublisher;
use super::{Context, locations};
use crate::base::failure_log::FailureLog;
use crate::fs::generation::{FileError, Generation, Places};
use crate::fs::watch::{Activity, Watch};
use crate::secret::Secret;

/// How long to wait for a file that was written to and is kept open, while nothing more is written.
pub(super) const OPEN_PATIENCE: Duration = Duration::from_secs(5);
/// The pause after a look that published nothing; it doubles up to a tenth of the debounce window.
const PAUSE: Duration = Duration::from_millis(1);

/// Files that are read together, and the secrets that they hold.
#[derive(Debug)]
pub(super) struct FileSet {
    places: Places,
    watch: Watch,
    key_pair: Option<SecretPublisher>,
    roots: Option<SecretPublisher>,
    /// Whether the leaf chains to the roots.
    chained: FailureLog,
    context: Context,
}

/// A change that may not be complete yet.
#[derive(Debug, Default)]
struct PendingChange {
    since: Option<Instant>,
    /// Nothing has happened since.
    quiet_since: Option<Instant>,
    /// Nothing has happened for a whole window.
    is_settled: bool,
    /// The failure was published that the files don't come to rest.
    is_reported: bool,
}

impl PendingChange {
    /// Whether the change had begun more than `patience` before `now`.
    fn lasts(&self, now: Instant, patience: Duration) -> bool {
        self.since.is_some_and(|since| now - since > patience)
    }

    fn is_quiet(&self, now: Instant, patience: Duration) -> bool {
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
        Self { places, watch, key_pair, roots, chained: FailureLog::default(), context }
    }

    pub(super) fn publish_once(&mut self) {
        locations::warn_of_own(&self.places);
        let generation = self.look();
        self.publish(generation);
    }

    /// Follows every change. Does not return. If `is_settled`, what the first look finds is reported at once.
    pub(super) async fn run(mut self, is_settled: bool) {
        let debounce = self.context.debounce;
        let mut pending = PendingChange { is_settled, ..PendingChange::default() };
        let mut pause = PAUSE;
        loop {
            self.watch.arm();
            let generation = self.look();
            let looked = Instant::now();
            // A file that is read while it is written may be half of what it will be.
            let activity = self.watch.activity();
            if self.is_complete(&generation, activity, &pending, looked) {
                // Only here: a write that has begun since the look must not be forgotten.
                if activity == Activity::Open {
                    self.watch.forget_writers();
                }
                pending = PendingChange::default();
                let starts = generation.key_pair.starts();
                if self.publish(generation) {
                    pause = PAUSE;
                }
                self.next_change(starts).await;
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

    fn publishers(&self) -> impl Iterator<Item = &SecretPublisher> {
        self.roots.iter().chain(&self.key_pair)
    }

    fn look(&self) -> Generation {
        self.places.look(self.context.clock.now())
    }

    /// Whether to take `generation`, or to wait for the rest of a change.
    fn is_complete(
        &self,
        generation: &Generation,
        activity: Activity,
        pending: &PendingChange,
        looked: Instant,
    ) -> bool {
        match activity {
            Activity::None => {
                pending.is_settled
                    || pending.lasts(looked, 10 * self.context.debounce)
                    || self.is_whole(generation)
            }
            Activity::Open => pending.is_quiet(looked, OPEN_PATIENCE),
            Activity::Change => false,
        }
    }

    /// Whether this can be taken for a whole generation, and not for half of a change.
    fn is_whole(&self, generation: &Generation) -> bool {
        let Generation { key_pair, roots } = generation;
        let is_mixed = match (key_pair.good(), roots.good()) {
            (Some(pair), Some(roots)) => roots.verify(pair, self.context.clock.now()).is_err(),
            _ => false,
        };
        self.key_pair.as_ref().is_none_or(|publisher| publisher.expects(key_pair))
            && self.roots.as_ref().is_none_or(|publisher| publisher.expects(roots))
            && !is_mixed
    }

    /// Returns when a file changes, or when a certificate becomes valid (at `starts`) or expires.
    async fn next_change(&self, starts: Option<SystemTime>) {
        let now = self.context.clock.now();
        let expiries =
            self.publishers().filter_map(SecretPublisher::not_after).filter(|moment| *moment > now);
        let next = starts.into_iter().chain(expiries).min();
        let due = async {
            match next {
                Some(moment) => self.context.clock.sleep_until(moment).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = self.watch.changed() => {}
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
        let changed = tokio::time::timeout(self.context.debounce, self.watch.changed()).await;
        pending.is_settled = changed.is_err();
        pending.quiet_since = match pending.is_settled {
            true => pending.quiet_since.or_else(|| Some(Instant::now())),
            false => None,
        };
    }

    /// Publishes what is good and reports what is not. True if a new secret was published.
    fn publish(&mut self, generation: Generation) -> bool {
        let now = self.context.clock.now();
        self.report_mixture(&generation, now);
        let Generation { key_pair, roots } = generation;
        let metrics = &self.context.metrics;
        let mut is_new = false;
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
        is_new
    }

    /// Files that go on changing may be half of a generation at every look.
    fn report_restless(&mut self) {
        let error = FileError::Restless { paths: self.places.paths() };
        for publisher in self.roots.iter_mut().chain(&mut self.key_pair) {
            publisher.fail(&error, &self.context.metrics);
        }
    }

    /// Files often pair one CA's certificate with the roots of the peers' CA, so this is no mistake by itself.
    fn report_mixture(&mut self, generation: &Generation, now: SystemTime) {
        let (Some(pair), Some(roots)) = (generation.key_pair.good(), generation.roots.good()) else { return };
        match roots.verify(pair, now) {
            Ok(()) => drop(self.chained.recovered()),
            Err(unchained) => {
                if self.chained.is_new(&unchained.to_string()) {
                    tracing::warn!(
                        reason = %unchained,
                        "mounted certificate does not chain to the mounted roots; both are served as they are, and \
                         peers with the same roots will reject it"
                    );
                }
            }
        }
    }
}
