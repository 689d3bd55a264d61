//! What has been done for a directory and by the hook, and when the next step is due.

use std::time::Duration;

use tokio::time::Instant;

use super::board::{Board, Generations};
use super::{Set, Versions};
use crate::base::backoff::Backoff;
use crate::base::clock::until;
use crate::base::failure_log::FailureLog;

/// Delays after a failed write, hook or sweep, and after repairs.
const BACKOFF: Backoff = Backoff { base: Duration::from_secs(1), cap: Duration::from_secs(60) };
/// Damage after such a time is not part of the same conflict.
const CALM: Duration = Duration::from_secs(600);

/// Failures of one kind of step in a row.
#[derive(Debug, Default)]
pub(super) struct Failures {
    pub(super) count: u32,
    pub(super) log: FailureLog,
}

impl Failures {
    /// Counts a failure, and returns the delay before the retry.
    pub(super) fn add(&mut self) -> Duration {
        self.count = self.count.saturating_add(1);
        BACKOFF.delay(self.count, fastrand::f64())
    }

    /// Notes a success; true after at least one failure.
    pub(super) fn reset(&mut self) -> bool {
        self.count = 0;
        self.log.recovered()
    }
}

/// Finished and scheduled steps of a directory.
#[derive(Debug, Default)]
pub(super) struct Progress {
    /// What the directory contains for certain.
    pub(super) written: Option<Versions>,
    /// What could not be written, and when to retry.
    pub(super) failed: Option<(Versions, Instant)>,
    pub(super) writes: Failures,
    /// The success of the hook is to be recorded.
    pub(super) awaits_hook: bool,
    /// When to remove old generations.
    pub(super) sweep_at: Option<Instant>,
    pub(super) sweeps: Failures,
    /// When to check the files for damage.
    pub(super) inspect_at: Option<Instant>,
    /// Repairs in a row.
    pub(super) repairs: u32,
    pub(super) repaired: Option<Instant>,
    /// The conflict with another writer has been logged.
    pub(super) conflict_is_logged: bool,
}

impl Progress {
    /// Whether `set` needs to be written: not written yet, and no failed write of it awaits its retry.
    pub(super) fn needs_write(&self, set: &Set) -> bool {
        self.written.as_ref() != Some(&set.versions)
            && self.failed.as_ref().is_none_or(|(failed, _)| *failed != set.versions)
    }

    /// Schedules an inspection after a change in the directory. The pause lets the other program finish.
    pub(super) fn files_changed(&mut self) {
        if self.repaired.is_some_and(|last| last.elapsed() > CALM) {
            self.repairs = 0;
        }
        self.inspect_at = Some(Instant::now() + self.pause());
    }

    /// Grows with the number of repairs that were undone.
    pub(super) fn pause(&self) -> Duration {
        BACKOFF.delay(self.repairs.saturating_add(1), fastrand::f64())
    }

    /// Returns when a scheduled step is due.
    pub(super) async fn due(&self) {
        let retry_at = self.failed.as_ref().map(|(_, retry_at)| *retry_at);
        until([retry_at, self.sweep_at, self.inspect_at].into_iter().flatten().min()).await;
    }
}

/// What the hook has done, and when it runs again.
#[derive(Debug, Default)]
pub(super) struct HookProgress {
    /// What it ran for last, and when to retry.
    tried: Option<(Generations, Instant)>,
    pub(super) failures: Failures,
}

impl HookProgress {
    /// The moment of the next run; none while nothing waits for it.
    fn next(&self, board: &Board) -> Option<Instant> {
        let pending = board.pending()?;
        Some(match &self.tried {
            Some((tried, retry_at)) if *tried == pending => *retry_at,
            // A new generation does not wait for the retry.
            _ => Instant::now(),
        })
    }

    pub(super) fn is_due(&self, board: &Board) -> bool {
        self.next(board).is_some_and(is_due)
    }

    pub(super) async fn due(&self, board: &Board) {
        until(self.next(board)).await;
    }

    /// Notes that the hook runs for `generations`.
    pub(super) fn begin(&mut self, generations: &Generations) {
        if self.tried.as_ref().is_none_or(|(tried, _)| tried != generations) {
            self.failures.count = 0;
        }
        self.tried = Some((generations.clone(), Instant::now()));
    }

    /// Counts a failure, and returns the delay before the retry.
    pub(super) fn retry(&mut self) -> Duration {
        let delay = self.failures.add();
        if let Some((_, retry_at)) = &mut self.tried {
            *retry_at = Instant::now() + delay;
        }
        delay
    }
}

pub(super) fn is_due(moment: Instant) -> bool {
    moment <= Instant::now()
}
