//! When changed files are worth a restart, and how often a program that crashes is started again. No I/O: moments are
//! inputs.

use std::time::Duration;

use tokio::time::Instant;

use crate::base::backoff::Backoff;

/// SHA-256 over names and contents of the files.
pub(super) type Digest = [u8; 32];

/// Files that never stand still for one debounce time cause a restart after this many of them.
const RESTLESS: u32 = 10;
/// Delays before a program that has crashed is started again.
const BACKOFF: Backoff = Backoff { base: Duration::from_millis(200), cap: Duration::from_secs(30) };
/// A program that was live for this long is healthy: its earlier crashes no longer count.
const HEALTHY: Duration = Duration::from_secs(10 * 60);

/// The state of the files in which the program was started, and changes since then.
#[derive(Debug)]
pub(super) struct Changes {
    debounce: Duration,
    /// What the newest program was started with, or could not be started with.
    applied: Option<Digest>,
    pending: Option<Pending>,
}

#[derive(Clone, Copy, Debug)]
struct Pending {
    digest: Digest,
    /// When the files first differed.
    first: Instant,
    /// When they last changed.
    last: Instant,
}

impl Changes {
    pub(super) fn new(debounce: Duration) -> Self {
        Self { debounce, applied: None, pending: None }
    }

    /// The files have this digest `now`. The first one is what the first program is started with.
    pub(super) fn look(&mut self, digest: Digest, now: Instant) {
        let Some(applied) = self.applied else {
            self.applied = Some(digest);
            return;
        };
        self.pending = match self.pending {
            // Back to what the program has read.
            _ if digest == applied => None,
            Some(pending) if pending.digest == digest => Some(pending),
            Some(pending) => Some(Pending { digest, last: now, ..pending }),
            None => Some(Pending { digest, first: now, last: now }),
        };
    }

    /// When a restart is due: the files have stood still for the debounce time, or changed for ten of them.
    pub(super) fn due(&self) -> Option<Instant> {
        let Pending { first, last, .. } = self.pending?;
        Some((last + self.debounce).min(first + self.debounce * RESTLESS))
    }

    /// Whether a restart is due `now`. The change then counts as applied, whatever becomes of the restart.
    pub(super) fn take(&mut self, now: Instant) -> bool {
        if self.due().is_none_or(|due| now < due) {
            return false;
        }
        self.apply();
        true
    }

    /// A program is started, which reads the files as they are.
    pub(super) fn apply(&mut self) {
        if let Some(pending) = self.pending.take() {
            self.applied = Some(pending.digest);
        }
    }
}

/// Crashes since the program was last healthy.
#[derive(Debug)]
pub(super) struct Crashes {
    budget: u32,
    count: u32,
}

impl Crashes {
    pub(super) fn new(budget: u32) -> Self {
        Self { budget, count: 0 }
    }

    /// Counts a crash of a program that was live for `live`. Returns the delay before the next start; none if the budget
    /// is spent. `jitter` is drawn from 0..1.
    pub(super) fn count(&mut self, live: Duration, jitter: f64) -> Option<Duration> {
        if live >= HEALTHY {
            self.count = 0;
        }
        self.count += 1;
        (self.count <= self.budget).then(|| BACKOFF.delay(self.count, jitter))
    }

    pub(super) fn counted(&self) -> u32 {
        self.count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEBOUNCE: Duration = Duration::from_millis(500);

    fn ms(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    fn digest(number: u8) -> Digest {
        [number; 32]
    }

    /// Looks at these digests at these times, and asks for a restart each 50 ms in between.
    fn restarts(looks: &[(u64, u8)], until: u64) -> Vec<u64> {
        let start = Instant::now();
        let mut changes = Changes::new(DEBOUNCE);
        changes.look(digest(0), start);
        let mut restarts = Vec::new();
        for at in (0..=until).step_by(50) {
            let now = start + ms(at);
            for (_, number) in looks.iter().filter(|(time, _)| *time == at) {
                changes.look(digest(*number), now);
            }
            if changes.take(now) {
                restarts.push(at);
            }
        }
        restarts
    }

    #[test]
    fn a_change_is_a_restart_once_the_files_have_stood_still() {
        assert_eq!(restarts(&[(100, 1)], 3000), [600]);
    }

    #[test]
    fn a_burst_is_one_restart() {
        assert_eq!(restarts(&[(100, 1), (300, 2), (500, 3), (700, 4)], 3000), [1200]);
    }

    #[test]
    fn equal_bytes_are_no_restart() {
        assert!(restarts(&[(100, 0), (300, 0)], 3000).is_empty());
        // Changed and changed back before it was due.
        assert!(restarts(&[(100, 1), (300, 0)], 3000).is_empty());
    }

    #[test]
    fn equal_bytes_do_not_prolong_the_debounce_time() {
        assert_eq!(restarts(&[(100, 1), (300, 1), (500, 1)], 3000), [600]);
    }

    #[test]
    fn files_that_never_rest_cause_a_restart_after_ten_debounce_times() {
        let looks: Vec<_> = (1..=240).map(|number| (50 * u64::from(number), number)).collect();
        assert_eq!(restarts(&looks, 12_000), [5050, 10_100]);
    }

    #[test]
    fn what_changes_while_a_program_is_started_is_another_restart() {
        assert_eq!(restarts(&[(100, 1), (650, 2)], 3000), [600, 1150]);
    }

    #[test]
    fn crashes_are_spaced_further_and_further_apart_up_to_the_budget() {
        let mut crashes = Crashes::new(10);
        let delays: Vec<_> = (0..11).map(|_| crashes.count(Duration::ZERO, 1.0)).collect();
        let seconds: Vec<_> = delays.iter().flatten().map(Duration::as_secs_f64).collect();
        assert_eq!(seconds, [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30.0, 30.0]);
        assert_eq!(delays.last(), Some(&None), "the eleventh");
    }

    #[test]
    fn ten_minutes_of_health_restore_the_budget() {
        let mut crashes = Crashes::new(1);
        assert!(crashes.count(Duration::ZERO, 0.0).is_some());
        assert!(crashes.count(HEALTHY, 0.0).is_some());
        assert!(crashes.count(HEALTHY - ms(1), 0.0).is_none());
        assert!(Crashes::new(0).count(Duration::ZERO, 0.0).is_none());
    }
}
