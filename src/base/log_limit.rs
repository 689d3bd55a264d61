//! How many lines of one kind are logged: what a client can repeat at will must not fill the log.

use std::time::Duration;

use tokio::time::Instant;

/// Lines of one kind that are logged in each interval.
pub const LINES: u32 = 50;
pub const INTERVAL: Duration = Duration::from_secs(60);

/// Counts the lines of one kind. An interval begins with its first line.
#[derive(Clone, Copy, Debug, Default)]
pub struct LogLimit {
    ends: Option<Instant>,
    logged: u32,
    suppressed: u64,
}

impl LogLimit {
    /// Whether a line may be logged at `now`; otherwise it is counted.
    pub fn admits(&mut self, now: Instant) -> bool {
        // Until the summary is taken, its interval goes on.
        if self.suppressed == 0 && self.ends.is_none_or(|ends| now >= ends) {
            *self = Self { ends: Some(now + INTERVAL), logged: 0, suppressed: 0 };
        }
        let is_admitted = self.logged < LINES;
        if is_admitted {
            self.logged += 1;
        } else {
            self.suppressed += 1;
        }
        is_admitted
    }

    /// When the summary is due, if lines were suppressed.
    pub fn due(&self) -> Option<Instant> {
        self.ends.filter(|_| self.suppressed > 0)
    }

    /// Ends an interval that is over at `now`, and returns how many lines were suppressed in it, if any.
    pub fn summary(&mut self, now: Instant) -> Option<u64> {
        self.due().filter(|due| now >= *due)?;
        Some(std::mem::take(self).suppressed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_interval_has_its_lines_and_one_summary() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        // At a second: how many lines come, how many of them are logged, and the summary after them.
        let table: &[(u64, u32, u32, Option<u64>)] = &[
            (0, 1, 1, None),
            (1, LINES + 9, LINES - 1, None),
            (59, 5, 0, None),
            (60, 0, 0, Some(15)),
            (60, 0, 0, None),
            // The next interval begins with the next line.
            (100, LINES, LINES, None),
            (159, 1, 0, None),
            // Late: the interval has not ended without its summary.
            (170, 1, 0, Some(2)),
            (171, 1, 1, None),
            // An interval without a suppressed line needs no summary.
            (400, LINES, LINES, None),
            (600, LINES, LINES, None),
        ];
        let mut limit = LogLimit::default();
        for &(second, lines, logged, summary) in table {
            let admitted = (0..lines).filter(|_| limit.admits(at(second))).count();
            assert_eq!(admitted, logged as usize, "at {second}");
            assert_eq!(limit.summary(at(second)), summary, "at {second}");
            assert_eq!(limit.due().is_some(), limit.suppressed > 0, "at {second}");
        }
    }
}
