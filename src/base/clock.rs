//! The wall clock, tied to the runtime's time.
//!
//! Certificates have wall-clock times; timers run on the monotonic clock, which stops while a machine sleeps and ignores
//! changes of the wall clock. [`Clock::sleep_until`] bridges the two: the kernel wakes every sleeper when the clock was set
//! or the machine slept. With [`Clock::starting_at`] the wall clock follows tokio's time, so that tests run years in
//! milliseconds.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime};

use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec};
use tokio::io::unix::AsyncFd;
use tokio::time::Instant;

/// How often a sleeper checks the wall clock if the kernel does not report that it was set: a renewal can be this late.
const STEP: Duration = Duration::from_secs(30);
/// How often a sleeper checks the wall clock if the kernel does report it.
const LONG_STEP: Duration = Duration::from_secs(6 * 3600);

/// Reads the wall clock and sleeps until wall-clock times. Clones show the same time.
#[derive(Clone, Debug)]
pub struct Clock(Kind);

#[derive(Clone, Debug)]
enum Kind {
    /// With the timer that reports jumps, created at the first sleep.
    System(Arc<OnceLock<Option<AsyncFd<OwnedFd>>>>),
    Tied(Arc<Tied>),
}

#[derive(Debug)]
struct Tied {
    base: SystemTime,
    started: Instant,
    /// How often a sleeper checks the clock.
    step: Duration,
    /// Milliseconds by which the clock was set since `started`.
    set_by: AtomicI64,
}

impl Clock {
    pub fn system() -> Self {
        Self(Kind::System(Arc::default()))
    }

    /// A clock that shows `base` now and follows tokio's time from then on.
    pub fn starting_at(base: SystemTime) -> Self {
        Self::tied(base, STEP)
    }

    /// Like [`Clock::starting_at`], but the clock is never set, so sleepers don't check it before they wake. With thousands
    /// of sleepers, a simulation would spend most of its time on these checks.
    pub fn never_set(base: SystemTime) -> Self {
        Self::tied(base, Duration::MAX)
    }

    fn tied(base: SystemTime, step: Duration) -> Self {
        Self(Kind::Tied(Arc::new(Tied { base, started: Instant::now(), step, set_by: AtomicI64::new(0) })))
    }

    pub fn now(&self) -> SystemTime {
        match &self.0 {
            #[expect(clippy::disallowed_methods, reason = "the one place that reads the wall clock")]
            Kind::System(_) => SystemTime::now(),
            Kind::Tied(tied) => {
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
        if let Kind::Tied(tied) = &self.0 {
            tied.set_by.fetch_add(millis, Ordering::Relaxed);
        }
    }

    /// Has this runtime wait for jumps of the wall clock, for all clones. Sleepers on other threads depend on its thread
    /// from now on, instead of it on theirs.
    pub fn watch_jumps(&self) {
        if let Kind::System(timer) = &self.0 {
            timer.get_or_init(jump_timer);
        }
    }

    /// Returns when the wall clock was set or the machine has slept; never if the kernel does not report it.
    pub async fn jumped(&self) {
        match &self.0 {
            Kind::System(timer) => match timer.get_or_init(jump_timer) {
                Some(timer) => jump(timer).await,
                None => std::future::pending().await,
            },
            Kind::Tied(tied) => {
                let before = tied.set_by.load(Ordering::Relaxed);
                while tied.set_by.load(Ordering::Relaxed) == before {
                    tokio::time::sleep(tied.step).await;
                }
            }
        }
    }

    /// Returns once the wall clock shows `moment` or later, which may be at once.
    pub async fn sleep_until(&self, moment: SystemTime) {
        while let Ok(left) = moment.duration_since(self.now()) {
            if left.is_zero() {
                return;
            }
            match &self.0 {
                Kind::System(timer) => match timer.get_or_init(jump_timer) {
                    Some(timer) => tokio::select! {
                        () = tokio::time::sleep(left.min(LONG_STEP)) => {}
                        () = jump(timer) => {}
                    },
                    None => tokio::time::sleep(left.min(STEP)).await,
                },
                Kind::Tied(tied) => tokio::time::sleep(left.min(tied.step)).await,
            }
        }
    }

    /// The same where there may be no such moment: then it does not return.
    pub async fn sleep_until_any(&self, moment: Option<SystemTime>) {
        match moment {
            Some(moment) => self.sleep_until(moment).await,
            None => std::future::pending().await,
        }
    }
}

/// A timer that never expires, and that the kernel makes readable when the wall clock jumps. `None` if the kernel does not
/// support it.
fn jump_timer() -> Option<AsyncFd<OwnedFd>> {
    let timer = rustix::time::timerfd_create(
        TimerfdClockId::Realtime,
        TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC,
    )
    .ok()?;
    let no_interval = Timespec { tv_sec: 0, tv_nsec: 0 };
    let never = Itimerspec { it_interval: no_interval, it_value: Timespec { tv_sec: 1 << 33, tv_nsec: 0 } };
    let flags = TimerfdTimerFlags::ABSTIME | TimerfdTimerFlags::CANCEL_ON_SET;
    rustix::time::timerfd_settime(&timer, flags, &never).ok()?;
    #[expect(
        deprecated,
        reason = "its replacement is unsafe because descriptors may be closed early; this one is owned"
    )]
    let registered = AsyncFd::with_interest(timer, tokio::io::Interest::READABLE);
    registered.ok()
}

/// Returns when the wall clock has jumped.
async fn jump(timer: &AsyncFd<OwnedFd>) {
    let Ok(mut guard) = timer.readable().await else { return std::future::pending().await };
    // The first sleeper reads the timer, which rearms it for the next jump; the other sleepers woke at the same time.
    let _ = rustix::io::read(timer.get_ref(), &mut [0; 8]);
    guard.clear_ready();
}

/// The last time that RFC 3339 can express, in seconds: the end of the year 9999.
const LAST: u64 = 253_402_300_799;

/// Returns at this moment of the runtime's time; without one, never.
pub async fn until(moment: Option<Instant>) {
    match moment {
        Some(moment) => tokio::time::sleep(moment.saturating_duration_since(Instant::now())).await,
        None => std::future::pending().await,
    }
}

/// `moment` to the second, clamped to what RFC 3339 can express: certificates may begin before 1970, and computed times may
/// lie after 9999.
#[expect(clippy::disallowed_methods, reason = "this is the replacement")]
pub fn rfc3339(moment: SystemTime) -> humantime::Rfc3339Timestamp {
    humantime::format_rfc3339_seconds(clamped(moment))
}

/// `moment` to the millisecond, clamped like [`rfc3339`].
#[expect(clippy::disallowed_methods, reason = "this is the replacement")]
pub fn rfc3339_millis(moment: SystemTime) -> humantime::Rfc3339Timestamp {
    humantime::format_rfc3339_millis(clamped(moment))
}

fn clamped(moment: SystemTime) -> SystemTime {
    moment.clamp(SystemTime::UNIX_EPOCH, SystemTime::UNIX_EPOCH + Duration::from_secs(LAST))
}

/// `duration` in milliseconds, as log fields have it.
pub fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// `duration` in its two largest units: precise enough to see whether it is a problem.
pub fn span(duration: Duration) -> String {
    let seconds = duration.as_secs();
    let (days, hours, minutes) = (seconds / 86_400, seconds / 3600 % 24, seconds / 60 % 60);
    match (days, hours, minutes) {
        (1.., ..) => format!("{days}d {hours}h"),
        (0, 1.., _) => format!("{hours}h {minutes}m"),
        (0, 0, 1..) => format!("{minutes}m {}s", seconds % 60),
        _ => format!("{seconds}s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    #[tokio::test(start_paused = true)]
    async fn a_sleeper_wakes_on_time() {
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
    async fn a_clock_that_is_set_back_extends_the_sleep() {
        let clock = Clock::starting_at(SystemTime::UNIX_EPOCH + HOUR);
        let started = Instant::now();
        clock.set_by(-60_000);
        clock.sleep_until(SystemTime::UNIX_EPOCH + HOUR).await;
        assert!(started.elapsed() >= Duration::from_secs(60));
    }

    /// A test can't set the machine's clock: bytes in a socket stand for the kernel's notifications.
    #[tokio::test]
    async fn every_jump_wakes_every_sleeper() {
        use std::io::Write as _;
        assert!(jump_timer().is_some(), "this kernel does not report that the clock was set");
        let (ours, mut kernel) = std::os::unix::net::UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        #[expect(deprecated, reason = "as in jump_timer")]
        let timer = Arc::new(AsyncFd::new(OwnedFd::from(ours)).unwrap());
        for _ in 0..3 {
            let sleepers: Vec<_> = (0..3)
                .map(|_| {
                    let timer = Arc::clone(&timer);
                    tokio::spawn(async move { jump(&timer).await })
                })
                .collect();
            tokio::task::yield_now().await;
            assert!(sleepers.iter().all(|sleeper| !sleeper.is_finished()), "no jump yet");
            kernel.write_all(&[0; 8]).unwrap();
            for sleeper in sleepers {
                tokio::time::timeout(Duration::from_secs(20), sleeper)
                    .await
                    .expect("a jump wakes the sleeper")
                    .unwrap();
            }
        }
    }

    #[test]
    fn spans_have_at_most_two_units() {
        let cases = [
            (0, "0s"),
            (59, "59s"),
            (61, "1m 1s"),
            (3600, "1h 0m"),
            (90_000, "1d 1h"),
            (315_360_000, "3650d 0h"),
        ];
        for (seconds, expected) in cases {
            assert_eq!(span(Duration::from_secs(seconds)), expected);
        }
    }

    #[test]
    fn every_moment_can_be_formatted() {
        let (first, day) = (SystemTime::UNIX_EPOCH, Duration::from_secs(86_400));
        let last = first + Duration::from_secs(LAST);
        for (moment, expected) in [
            (first - 400 * day, "1970-01-01T00:00:00Z"),
            (first + day, "1970-01-02T00:00:00Z"),
            (last + day, "9999-12-31T23:59:59Z"),
        ] {
            assert_eq!(rfc3339(moment).to_string(), expected);
        }
        assert_eq!(rfc3339_millis(first - day).to_string(), "1970-01-01T00:00:00.000Z");
    }
}
