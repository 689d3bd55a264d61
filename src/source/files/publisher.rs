//! One secret's way from its files into the cache.

use std::time::SystemTime;

use crate::base::clock::rfc3339;
use crate::base::failure_log::FailureLog;
use crate::base::text;
use crate::fs::generation::{FileError, Found, Places};
use crate::metrics::{BySource, Metrics};
use crate::secret::{KeyPair, Secret, SecretName};
use crate::store::{Cache, Key, Origin, Published, Publisher};

/// The reason why no newer secret comes once the files were removed.
pub(super) const REMOVED: &str = "the files were removed; their last content is served until it expires";

/// Publishes one secret, and logs what happens to its files.
#[derive(Debug)]
pub(super) struct SecretPublisher {
    name: SecretName,
    publisher: Publisher,
    /// There is no other source: missing files are a failure.
    is_alone: bool,
    failures: FailureLog,
    /// The place from which it was served last, if that still has it.
    rank: Option<usize>,
}

impl SecretPublisher {
    pub(super) fn new(cache: &Cache, key: Key, is_alone: bool) -> Self {
        let name = key.name.clone();
        let publisher = cache.publisher(key, Origin::FILES);
        Self { name, publisher, is_alone, failures: FailureLog::default(), rank: None }
    }

    pub(super) fn cache(&self) -> &Cache {
        self.publisher.cache()
    }

    /// Whether `found` may be the whole of a change: it is good, and no worse than before.
    pub(super) fn expects<T>(&self, found: &Found<T>) -> bool {
        match &found.secret {
            Ok(Some(_)) => self.rank.is_none_or(|before| found.rank <= before),
            Ok(None) => self.rank.is_none(),
            Err(_) => false,
        }
    }

    /// What is served from files.
    pub(super) fn served(&self) -> Option<Secret> {
        let good = self.publisher.entry().good.filter(|good| good.origin == Origin::FILES)?;
        Some(good.secret.clone())
    }

    /// When the secret expires that is served from files.
    pub(super) fn not_after(&self) -> Option<SystemTime> {
        Some(self.served()?.not_after())
    }

    /// Announces the key pair whose roots are published first.
    pub(super) fn announce(&self, pair: &KeyPair, now: SystemTime) {
        self.publisher.announce(pair, now);
    }

    /// Publishes or reports what was found. True if a new secret was published.
    pub(super) fn take(
        &mut self,
        found: Found<Secret>,
        now: SystemTime,
        places: &Places,
        metrics: &Metrics,
    ) -> bool {
        match found.secret {
            Ok(Some(secret)) => return self.publish(secret, found.rank, now, places),
            Ok(None) => self.miss(places, metrics),
            Err(error) => self.reject(&error, now, metrics),
        }
        false
    }

    fn publish(&mut self, secret: Secret, rank: usize, now: SystemTime, places: &Places) -> bool {
        let what = secret.to_string();
        let not_after = rfc3339(secret.not_after());
        let entry = self.publisher.entry();
        let was_failing = entry.failure().is_some();
        let before = entry.good.map(|good| good.origin);
        self.failures.recovered();
        self.rank = Some(rank);
        let is_new = self.publisher.publish(secret, now, None) == Published::Changed;
        if is_new {
            let from = places.shown(rank);
            let other = before.filter(|origin| *origin != Origin::FILES);
            let instead_of = other.map(tracing::field::display);
            tracing::info!(name = self.log_name(), from, instead_of, what, %not_after, "secret served from files");
        } else if was_failing && self.publisher.entry().failure().is_none() {
            let from = places.shown(rank);
            tracing::info!(name = self.log_name(), from, what, %not_after, "files usable again; they hold what is served already");
        }
        is_new
    }

    /// No place has a file.
    fn miss(&mut self, places: &Places, metrics: &Metrics) {
        if self.rank.take().is_some() {
            tracing::warn!(name = self.log_name(), "{REMOVED}");
            self.failures.recovered();
            self.publisher.release(Some(REMOVED.to_owned()));
        } else if self.is_alone && !self.has_value() {
            let is_pair = matches!(self.name, SecretName::Workload | SecretName::FileKeyPair(_));
            self.fail(&places.missing(is_pair), metrics);
        } else if self.failures.recovered() {
            tracing::info!(name = self.log_name(), "unusable files removed");
            // The value that is served may be from files that were removed before.
            let is_left = self.not_after().is_some();
            self.publisher.release(is_left.then(|| REMOVED.to_owned()));
        }
    }

    fn reject(&mut self, error: &FileError, now: SystemTime, metrics: &Metrics) {
        self.fail(error, metrics);
        let is_expired = self.not_after().is_some_and(|not_after| not_after <= now);
        if !self.is_alone && is_expired && self.rank.take().is_some() {
            tracing::warn!(
                name = self.log_name(),
                "mounted secret expired without being renewed, the CA takes over"
            );
            self.publisher.release(Some(error.to_string()));
        }
    }

    pub(super) fn fail(&mut self, error: &FileError, metrics: &Metrics) {
        let reason = error.to_string();
        let label = BySource { source: "files", reason: error.label() };
        metrics.source_failures.get_or_create(&label).inc();
        if self.failures.is_new(&reason) {
            let what = match (self.name.is_on_demand(), self.has_value()) {
                (false, true) => "mounted files are not used; the previous secret is still served",
                (false, false) => "mounted files are not used; there is nothing else to serve yet",
                (true, true) => "requested files are not used; the previous secret is still served",
                (true, false) => "requested files are not used; there is nothing else to serve yet",
            };
            tracing::warn!(name = self.log_name(), reason = text::sanitize_for_log(&reason), "{what}");
        }
        self.publisher.fail(reason);
    }

    fn has_value(&self) -> bool {
        self.publisher.entry().good.is_some()
    }

    /// The name may be a client's text: the log quotes it, so that it can't pass for more than a name.
    fn log_name(&self) -> String {
        text::sanitize_for_log(self.name.as_str())
    }
}
