//! Ready means: the workload's own secrets are there and valid. What streams ask for by name has no part in it: anybody
//! can ask for what is not there.

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
        Some(Missing { name: one.key.name.clone(), reason })
    };
    snapshots.iter().filter(|one| !one.key.name.is_on_demand()).filter_map(check).collect()
}

/// Returns when nothing is missing any more.
pub async fn ready(cache: &Cache, clock: &Clock) {
    loop {
        let snapshots = cache.snapshot();
        let Some(first) = missing(&snapshots, clock.now()).into_iter().next() else { return };
        let key = snapshots.iter().map(|one| &one.key).find(|key| key.name == first.name);
        let Some(mut entry) = key.and_then(|key| cache.watch(key)) else { return };
        // Between the snapshot and here it may have come.
        if missing(&cache.snapshot(), clock.now()).is_empty() || entry.changed().await.is_err() {
            return;
        }
    }
}
