//! Ready means: every secret of the cache is there and valid.

use std::time::SystemTime;

use crate::cache::{Cache, Snapshot};
use crate::clock::Clock;
use crate::secret::SecretName;

/// A secret that keeps the agent from being ready.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Missing {
    /// Which one.
    pub name: SecretName,
    /// Why, for people.
    pub reason: String,
}

/// What is missing or expired at `now`.
pub fn missing(snapshots: &[Snapshot], now: SystemTime) -> Vec<Missing> {
    let check = |one: &Snapshot| {
        let reason = one.entry.valid_at(now).err()?;
        Some(Missing { name: one.key.name, reason })
    };
    snapshots.iter().filter_map(check).collect()
}

/// Returns when nothing is missing any more.
pub async fn ready(cache: &Cache, clock: &Clock) {
    loop {
        let snapshots = cache.snapshot();
        let Some(first) = missing(&snapshots, clock.now()).into_iter().next() else { return };
        let key = snapshots.iter().find(|one| one.key.name == first.name).map(|one| one.key);
        let Some(mut entry) = key.and_then(|key| cache.watch(key)) else { return };
        // Between the snapshot and here it may have come.
        if missing(&cache.snapshot(), clock.now()).is_empty() || entry.changed().await.is_err() {
            return;
        }
    }
}
