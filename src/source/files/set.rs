//! Files that are read together: when they are whole, and when they are read again.

use std::convert::Infallible;
use std::time::SystemTime;

use tokio::time::Instant;

use super::change::PendingChange;
use super::publisher::SecretPublisher;
use super::{Context, locations};
use crate::base::failure_log::FailureLog;
use crate::base::limits;
use crate::fs::generation::{Contents, Digest, FileError, Generation, Places};
use crate::fs::walk::Lookups;
use crate::fs::watch::{Activity, Wake, Watch};
use crate::secret::{Secret, TrustBundle, Unchained};

/// Files that are read together, and the secrets that they hold.
#[derive(Debug)]
pub(super) struct FileSet {
    places: Places,
    watch: Watch,
    /// None where the files are roots alone.
    key_pair: Option<SecretPublisher>,
    roots: SecretPublisher,
    /// Whether the leaf chains to the roots.
    chained: FailureLog,
    taken: Option<Taken>,
    /// Where the first look has led, until it is followed.
    first: Option<Lookups>,
    /// The roots that were parsed last, without CRLs.
    bundle: Option<TrustBundle>,
    change: PendingChange,
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

impl FileSet {
    pub(super) fn new(
        places: Places,
        key_pair: Option<SecretPublisher>,
        roots: SecretPublisher,
        context: Context,
    ) -> Self {
        // The first place decides if it has all files.
        let watch = context.watcher.watch_with_fallbacks(places.paths(), places.files_of_first());
        let (chained, change) = (FailureLog::default(), PendingChange::new(context.debounce));
        Self {
            places,
            watch,
            key_pair,
            roots,
            chained,
            taken: None,
            first: None,
            bundle: None,
            change,
            context,
        }
    }

    /// Publishes what the files hold now, good or not.
    pub(super) fn publish_once(&mut self) {
        locations::warn_of_own(&self.places);
        let (contents, lookups) = self.look();
        self.first = Some(lookups);
        let (now, digest) = (self.context.clock.now(), contents.digest());
        let generation = self.parse(contents, now);
        let is_new = self.publish(generation, digest, now);
        self.change.end(is_new);
    }

    /// Follows every change since [`FileSet::publish_once`], which need not have been called. Does not return.
    pub(super) async fn run(mut self) -> Infallible {
        if self.first.is_none() {
            self.publish_once();
        }
        if let Some(lookups) = self.first.take() {
            self.watch.follow(lookups);
        }
        self.wait_for_change().await;
        loop {
            let (contents, lookups) = self.look();
            let looked = Instant::now();
            let activity = self.watch.activity(&lookups);
            let taken = self.consider(contents, activity, looked);
            self.watch.follow(lookups);
            if let Some(is_new) = taken {
                self.change.end(is_new);
                self.wait_for_change().await;
            } else {
                if self.change.is_restless(looked) {
                    self.report_restless();
                }
                let changed = async { while self.watch.changed().await == Wake::Poll {} };
                self.change.wait_for_rest(looked, changed).await;
            }
            self.change.pause(looked).await;
        }
    }

    /// Touches the disk.
    fn look(&mut self) -> (Contents, Lookups) {
        let look = self.watch.look(limits::FILE_BYTES, self.places.refusal());
        (self.places.contents(look.files, look.is_restless), look.lookups)
    }

    /// Publishes or reports `contents`, unless they may be half of a change. Returns whether a new secret was published.
    fn consider(&mut self, contents: Contents, activity: Activity, looked: Instant) -> Option<bool> {
        if activity == Activity::Change {
            return None;
        }
        let now = self.context.clock.now();
        let digest = contents.digest();
        if self.taken.as_ref().is_some_and(|taken| taken.digest == digest && taken.holds_at(now)) {
            return Some(false);
        }
        let generation = self.parse(contents, now);
        if !self.change.is_complete(activity, looked, || self.is_whole(&generation)) {
            return None;
        }
        // Only here: a write that has begun since the look must not be forgotten.
        if activity == Activity::Open {
            self.watch.forget_writers();
        }
        Some(self.publish(generation, digest, now))
    }

    fn parse(&mut self, contents: Contents, now: SystemTime) -> Generation {
        let generation = contents.parse(&self.places, self.bundle.as_ref(), now);
        if let Some(bundle) = generation.roots.good() {
            self.bundle = Some(bundle.clone());
        }
        generation
    }

    /// Whether this can be taken for a whole generation, and not for half of a change.
    fn is_whole(&self, generation: &Generation) -> bool {
        let Generation { key_pair, roots, chained } = generation;
        self.key_pair.as_ref().is_none_or(|publisher| publisher.expects(key_pair))
            && self.roots.expects(roots)
            && !matches!(chained, Some(Err(_)))
    }

    /// Returns when a file changes, or when a certificate becomes valid or expires, and the window of the last publish is
    /// over.
    async fn wait_for_change(&self) {
        let due = self.taken.as_ref().and_then(|taken| taken.until);
        tokio::select! {
            _ = self.watch.changed() => {}
            () = self.context.clock.sleep_until_any(due) => {}
        }
        self.change.wait_for_window(std::future::pending()).await;
    }

    /// Publishes what is good and reports what is not. True if a new secret was published.
    fn publish(&mut self, mut generation: Generation, digest: Digest, now: SystemTime) -> bool {
        self.hold_back(&mut generation, now);
        let starts = generation.key_pair.starts();
        let Generation { key_pair, roots, chained } = generation;
        self.report_mixture(chained);
        let metrics = &self.context.metrics;
        let cache = self.roots.cache().clone();
        let _together = cache.together();
        // Roots first, as from a CA.
        if let (Some(publisher), Some(pair)) = (&self.key_pair, key_pair.good()) {
            publisher.announce(pair, now);
        }
        let mut is_new = self.roots.take(roots.map(Secret::TrustBundle), now, &self.places, metrics);
        if let Some(publisher) = &mut self.key_pair {
            is_new |= publisher.take(key_pair.map(Secret::KeyPair), now, &self.places, metrics);
        }
        let publishers = std::iter::once(&self.roots).chain(&self.key_pair);
        let expiries = publishers.filter_map(SecretPublisher::not_after);
        let expiries = expiries.filter(|moment| *moment > now);
        let until = starts.into_iter().chain(expiries).min();
        self.taken = Some(Taken { digest, at: now, until });
        is_new
    }

    /// One half of a generation is not published without the other where the served secrets would no longer fit together.
    fn hold_back(&self, generation: &mut Generation, now: SystemTime) {
        if generation.key_pair.secret.is_ok() && generation.roots.secret.is_ok() {
            return;
        }
        if let (Some(Secret::KeyPair(pair)), Some(Secret::TrustBundle(bundle))) =
            (self.key_pair.as_ref().and_then(SecretPublisher::served), self.roots.served())
        {
            generation.hold_back((&pair, &bundle), &self.places, now);
        }
    }

    /// Files that go on changing may be half of a generation at every look.
    fn report_restless(&mut self) {
        self.taken = None;
        let error = FileError::Restless { paths: self.places.homes() };
        for publisher in std::iter::once(&mut self.roots).chain(&mut self.key_pair) {
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
