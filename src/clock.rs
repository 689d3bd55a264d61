//! The wall clock, tied to the runtime's time.
//!
//! Certificates speak of wall-clock moments; timers run on the monotonic clock, which stands still while a
//! machine sleeps and knows nothing of a clock that is set. [`Clock::sleep_until`] bridges the two, and a
//! clock made with [`Clock::starting_at`] makes the wall clock follow tokio's time, so that tests run years in
//! milliseconds.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, SystemTime};

use tokio::time::Instant;

/// The longest that a sleeper does not look at the wall clock: the most by which a renewal can be late after
/// the clock was set or the machine slept.
const STEP: Duration = Duration::from_secs(30);

/// Reads the wall clock and sleeps to moments on it. Clones show the same time.
#[derive(Clone, Debug, Default)]
pub struct Clock(Option<Arc<Tied>>);

#[derive(Debug)]
struct Tied {
    base: SystemTime,
    started: Instant,
    /// Milliseconds by which the clock was set since then.
    set_by: AtomicI64,
}

impl Clock {
    /// The system's clock.
    pub fn system() -> Self {
        Self(None)
    }

    /// A clock that shows `base` now and follows tokio's time from here on.
    pub fn starting_at(base: SystemTime) -> Self {
        Self(Some(Arc::new(Tied { base, started: Instant::now(), set_by: AtomicI64::new(0) })))
    }

    /// The wall-clock time.
    pub fn now(&self) -> SystemTime {
        match &self.0 {
            #[expect(clippy::disallowed_methods, reason = "the one place that reads the wall clock")]
            None => SystemTime::now(),
            Some(tied) => {
                let now = tied.base + tied.started.elapsed();
                let set_by = tied.set_by.load(Ordering::Relaxed);
                let by = Duration::from_millis(set_by.unsigned_abs());
                if set_by < 0 { now - by } else { now + by }
            }
        }
    }

    /// Sets a clock made with [`Clock::starting_at`] forward (or back, if negative) by `millis`, as an
    /// administrator or a time daemon does. The system's clock is left alone.
    pub fn set_by(&self, millis: i64) {
        if let Some(tied) = &self.0 {
            tied.set_by.fetch_add(millis, Ordering::Relaxed);
        }
    }

    /// Returns once the wall clock shows `moment` or later; at once if it does already.
    pub async fn sleep_until(&self, moment: SystemTime) {
        while let Ok(left) = moment.duration_since(self.now()) {
            if left.is_zero() {
                return;
            }
            tokio::time::sleep(left.min(STEP)).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    #[tokio::test(start_paused = true)]
    async fn a_sleeper_wakes_at_its_moment() {
        let clock = Clock::starting_at(SystemTime::UNIX_EPOCH);
        let moment = clock.now() + HOUR;
        clock.sleep_until(moment).await;
        assert!(clock.now() >= moment);
        assert!(clock.now() < moment + Duration::from_secs(1));
    }

    #[tokio::test(start_paused = true)]
    async fn a_clock_that_is_set_forward_wakes_the_sleeper_within_one_step() {
        let clock = Clock::starting_at(SystemTime::UNIX_EPOCH);
        let started = Instant::now();
        let sleeper = tokio::spawn({
            let clock = clock.clone();
            async move { clock.sleep_until(SystemTime::UNIX_EPOCH + HOUR).await }
        });
        tokio::time::sleep(Duration::from_secs(1)).await;
        clock.set_by(7_200_000);
        sleeper.await.unwrap();
        assert!(started.elapsed() <= STEP, "{:?}", started.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn a_clock_that_is_set_back_prolongs_the_sleep() {
        let clock = Clock::starting_at(SystemTime::UNIX_EPOCH + HOUR);
        let started = Instant::now();
        clock.set_by(-60_000);
        clock.sleep_until(SystemTime::UNIX_EPOCH + HOUR).await;
        assert!(started.elapsed() >= Duration::from_secs(60));
    }
}
