//! Polling: look-ups are compared every two seconds, where inotify does not report every change.

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;
use std::time::Duration;

use tokio::time::Instant;

use crate::fs::file::{self, Stamp};

pub(super) const INTERVAL: Duration = Duration::from_secs(2);

/// The stamps of a set of look-ups.
#[derive(Debug, Default)]
pub(super) struct Snapshot {
    stamps: Vec<Stamp>,
    /// The last comparison found a change. A second change within the same tick of the file system's clock may show in
    /// no stamp, so one more round reports a change in any case.
    is_fresh: bool,
}

impl Snapshot {
    pub(super) fn refresh(&mut self, names: &BTreeSet<PathBuf>) {
        let stamps = stamps(names);
        self.is_fresh = stamps != self.stamps;
        self.stamps = stamps;
    }

    pub(super) fn differs(&self, names: &BTreeSet<PathBuf>) -> bool {
        self.is_fresh || stamps(names) != self.stamps
    }
}

fn stamps(names: &BTreeSet<PathBuf>) -> Vec<Stamp> {
    let stamp = |path: &PathBuf| match std::fs::symlink_metadata(path) {
        // A change inside a directory shows in the names that are looked up there.
        Ok(metadata) if metadata.is_dir() => Some(((metadata.dev(), metadata.ino()), 0, (0, 0), (0, 0))),
        metadata => file::stamp(metadata),
    };
    names.iter().map(stamp).collect()
}

/// Sleeps until the next round. All watches that share `started` poll at the same moments: one wake-up for all.
pub(super) async fn next_round(started: Instant) {
    let since = started.elapsed().as_nanos() % INTERVAL.as_nanos();
    tokio::time::sleep(INTERVAL - Duration::from_nanos(u64::try_from(since).unwrap_or_default())).await;
}
