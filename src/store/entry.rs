//! One entry of the cache: the last good value and the current failures.

use std::fmt;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, SystemTime};

use smallvec::SmallVec;
use tokio::time::Instant;

use super::subscription::Observed;
use super::workload::Workload;
use crate::base::clock::rfc3339;
use crate::secret::{Resource, Secret, SecretName};

/// Key of a cache entry.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key {
    pub workload: Workload,
    pub name: SecretName,
}

/// Where a value comes from. A source of higher rank keeps those of lower rank from writing an entry it holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Origin(Source);

/// The lowest rank first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Source {
    Ca,
    WorkloadApi,
    Files,
    Kubernetes,
}

impl Origin {
    /// Signed by a CA for a key made here.
    pub const CA: Self = Self(Source::Ca);
    /// Received from a SPIFFE Workload API, with its key.
    pub const WORKLOAD_API: Self = Self(Source::WorkloadApi);
    /// Read from mounted files.
    pub const FILES: Self = Self(Source::Files);
    /// Read from Kubernetes' Secrets and ConfigMaps.
    pub const KUBERNETES: Self = Self(Source::Kubernetes);

    /// Whether the roots that belong to a certificate come before it, from the same source.
    pub fn is_issued(self) -> bool {
        matches!(self.0, Source::Ca | Source::WorkloadApi)
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            Source::Ca => "ca",
            Source::WorkloadApi => "spiffe",
            Source::Files => "files",
            Source::Kubernetes => "kubernetes",
        })
    }
}

/// The state of one secret: the last good value and the current failures, independent of each other.
#[derive(Clone, Debug, Default)]
pub struct Entry {
    /// The newest value that passed every check.
    pub good: Option<Arc<Good>>,
    /// Why each source can't deliver a newer value.
    pub(super) failures: Failures,
    /// The source that holds the entry: sources of lower rank can't publish, and need not try.
    pub holder: Option<Origin>,
    /// The source knows that there is nothing to serve, and took back what it served: streams tell their clients where the
    /// protocol can.
    pub is_withdrawn: bool,
    /// The workload was removed: nothing more is published.
    pub(super) is_removed: bool,
}

impl Entry {
    /// The good value if it is valid at `now`, else the reason there is none, for people.
    pub fn valid_at(&self, now: SystemTime) -> Result<&Good, String> {
        match &self.good {
            Some(good) if good.secret.not_after() > now => Ok(good),
            Some(good) => {
                let at = rfc3339(good.secret.not_after());
                Err(format!(
                    "expired at {at}; {}",
                    self.failure().as_deref().unwrap_or("no newer one arrived")
                ))
            }
            None => Err(self.failure().unwrap_or_else(|| "not available yet".to_owned())),
        }
    }

    /// Why its sources can't deliver a newer value, for people; the source of the highest rank first.
    pub fn failure(&self) -> Option<String> {
        let reasons: Vec<_> = self.failures.0.iter().rev().map(|failure| &*failure.reason).collect();
        (!reasons.is_empty()).then(|| reasons.join("; "))
    }

    /// When the oldest of these failures began.
    pub fn failing_since(&self) -> Option<Instant> {
        self.failures.0.iter().map(|failure| failure.since).min().map(Moment::instant)
    }

    /// Ends the failure of `origin`, and those of lower ranks: while `origin` holds the entry they don't matter. True
    /// if there was one.
    pub(super) fn clear_failures(&mut self, origin: Origin) -> bool {
        let before = self.failures.0.len();
        self.failures.0.retain(|failure| failure.origin > origin && !failure.is_absence);
        self.failures.0.len() < before
    }

    /// When the good value expires.
    pub fn not_after(&self) -> Option<SystemTime> {
        self.good.as_ref().map(|good| good.secret.not_after())
    }
}

/// A value that passed every check.
#[derive(Debug)]
pub struct Good {
    pub secret: Secret,
    /// The value on the wire.
    pub resource: Resource,
    pub origin: Origin,
    pub received: SystemTime,
    /// When its source means to replace it; none where the source can't know.
    pub renews: Option<SystemTime>,
}

impl Good {
    /// Whether it is a key pair whose renewal is late by more than a twentieth of its lifetime.
    pub fn is_overdue(&self, now: SystemTime) -> bool {
        let (Secret::KeyPair(pair), Some(renews)) = (&self.secret, self.renews) else { return false };
        let lifetime = self.secret.not_after().duration_since(pair.leaf().not_before).unwrap_or_default();
        now.duration_since(renews).is_ok_and(|late| late > lifetime / 20)
    }
}

/// Why a source can't deliver a value.
#[derive(Clone, Debug)]
pub(super) struct Failure {
    origin: Origin,
    /// For people.
    reason: Arc<str>,
    /// The source has nothing to deliver: the failure is over as soon as any source has a value.
    is_absence: bool,
    /// The reason may have changed since.
    since: Moment,
}

impl Failure {
    pub(super) fn new(origin: Origin, reason: String, is_absence: bool) -> Self {
        Self { origin, reason: reason.into(), is_absence, since: Moment::now() }
    }

    /// Whether readers see the same.
    fn is_same(&self, other: &Self) -> bool {
        (&self.reason, self.is_absence) == (&other.reason, other.is_absence)
    }
}

/// Seconds since the first failure of this process: a quarter of an `Instant`, for there is one for each name that is not served.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Moment(u32);

static FIRST: LazyLock<Instant> = LazyLock::new(Instant::now);

impl Moment {
    fn now() -> Self {
        Self(u32::try_from(FIRST.elapsed().as_secs()).unwrap_or(u32::MAX))
    }

    fn instant(self) -> Instant {
        *FIRST + Duration::from_secs(self.0.into())
    }
}

/// The failure of each source that has one, in the order of their ranks. Most entries have one source.
#[derive(Clone, Debug, Default)]
pub(super) struct Failures(SmallVec<[Failure; 1]>);

impl Failures {
    /// Replaces the failure of `origin`. True if it is another one than before.
    pub(super) fn set(&mut self, origin: Origin, failure: Option<Failure>) -> bool {
        let at = self.0.iter().position(|known| known.origin >= origin).unwrap_or(self.0.len());
        let known = self.0.get(at).filter(|known| known.origin == origin);
        let since = known.map(|known| known.since);
        match (known, &failure) {
            (None, None) => return false,
            (Some(known), Some(failure)) if known.is_same(failure) => return false,
            _ => {}
        }
        if since.is_some() {
            self.0.remove(at);
        }
        if let Some(mut failure) = failure {
            failure.since = since.unwrap_or(failure.since);
            self.0.insert(at, failure);
        }
        true
    }
}

/// One entry at one moment.
#[derive(Clone, Debug)]
pub struct Snapshot {
    pub key: Key,
    /// The name of the key's workload; empty for a sidecar's only one.
    pub workload: Arc<str>,
    pub entry: Entry,
    pub observed: Observed,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_lasts_from_the_first_reason_on_and_takes_little_memory() {
        let mut failures = Failures::default();
        let failure = |reason: &str, since| {
            let failure = Failure::new(Origin::CA, reason.to_owned(), false);
            Some(Failure { since: Moment(since), ..failure })
        };
        assert!(failures.set(Origin::CA, failure("refused", 1)));
        assert!(!failures.set(Origin::CA, failure("refused", 2)), "readers see the same");
        assert!(failures.set(Origin::CA, failure("timed out", 3)));
        let entry = Entry { failures: failures.clone(), ..Entry::default() };
        assert_eq!(entry.failure().as_deref(), Some("timed out"));
        assert_eq!(entry.failing_since(), Some(Moment(1).instant()));
        assert!(failures.set(Origin::CA, None) && !failures.set(Origin::CA, None));
        // There may be as many as there are names that nothing serves.
        assert!(size_of::<Failure>() <= 3 * size_of::<usize>());
    }
}
