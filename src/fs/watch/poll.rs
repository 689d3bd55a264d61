//! Polling: where inotify does not report every change, the files are read again every two seconds.

use std::time::Duration;

use tokio::time::Instant;

pub(super) const INTERVAL: Duration = Duration::from_secs(2);

/// Sleeps until the next round. All watches that share `started` poll at the same moments: one wake-up for all.
pub(super) async fn next_round(started: Instant) {
    let since = started.elapsed().as_nanos() % INTERVAL.as_nanos();
    tokio::time::sleep(INTERVAL - Duration::from_nanos(u64::try_from(since).unwrap_or_default())).await;
}
