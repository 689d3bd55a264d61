//! How long to wait after a failure.

use std::time::Duration;

/// Delays that double from `base` to `cap`, each cut by jitter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backoff {
    /// The first delay at full length.
    pub base: Duration,
    /// The longest delay.
    pub cap: Duration,
}

impl Backoff {
    /// The longest delay after the `failures`-th failure in a row (1 is the first).
    pub fn longest(self, failures: u32) -> Duration {
        let doublings = failures.saturating_sub(1).min(31);
        self.base.saturating_mul(1 << doublings).min(self.cap)
    }

    /// The delay after the `failures`-th failure in a row: in the second half of the longest one. `jitter` is drawn
    /// from 0..1 and spreads callers that failed together.
    pub fn delay(self, failures: u32, jitter: f64) -> Duration {
        let half = self.longest(failures).div_f64(2.0);
        half + half.mul_f64(jitter.clamp(0.0, 1.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_double_up_to_the_cap() {
        let backoff = Backoff { base: Duration::from_millis(100), cap: Duration::from_secs(1) };
        let full: Vec<_> = (1..=6).map(|failures| backoff.delay(failures, 1.0).as_millis()).collect();
        assert_eq!(full, [100, 200, 400, 800, 1000, 1000]);
        assert_eq!(backoff.delay(u32::MAX, 1.0), backoff.cap);
    }

    #[test]
    fn jitter_keeps_a_delay_between_half_and_full() {
        let backoff = Backoff { base: Duration::from_secs(4), cap: Duration::from_secs(60) };
        assert_eq!(backoff.delay(1, 0.0), Duration::from_secs(2));
        assert_eq!(backoff.delay(1, 0.5), Duration::from_secs(3));
        assert_eq!(backoff.delay(1, 7.0), Duration::from_secs(4));
    }
}
