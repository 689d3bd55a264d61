//! The wall clock, tied to the runtime's time.
//!
//! Certificates speak of wall-clock moments; timers run on the monotonic clock, which stands still while a
//! machine sleeps and knows nothing of a clock that is set. [`Clock::sleep_until`] bridges the two: the kernel wakes
//! every sleeper when the clock was set or the machine slept. A clock made with [`Clock::starting_at`] makes the wall
//! clock follow tokio's time, so that tests run years in milliseconds.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime};

use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec};
use tokio::io::unix::AsyncFd;
use tokio::time::Instant;

/// The longest that a sleeper does not look at the wall clock where the kernel does not tell that it was set: the most
/// by which a renewal can be late then.
const STEP: Duration = Duration::from_secs(30);
/// The longest where it does.
const LONG_STEP: Duration = Duration::from_secs(6 * 3600);

/// Reads the wall clock and sleeps to moments on it. Clones show the same time.
#[derive(Clone, Debug)]
pub struct Clock(Kind);

#[derive(Clone, Debug)]
enum Kind {
    /// With what tells that it was set, from the first sleep on.
    System(Arc<OnceLock<Option<AsyncFd<OwnedFd>>>>),
    Tied(Arc<Tied>),
}

#[derive(Debug)]
struct Tied {
    base: SystemTime,
    started: Instant,
    /// The longest that a sleeper does not look at it.
    step: Duration,
    /// Milliseconds by which the clock was set since then.
    set_by: AtomicI64,
}

impl Clock {
    /// The system's clock.
    pub fn system() -> Self {
        Self(Kind::System(Arc::default()))
    }

    /// A clock that shows `base` now and follows tokio's time from here on.
    pub fn starting_at(base: SystemTime) -> Self {
        Self::tied(base, STEP)
    }

    /// The same, but one that nobody sets: sleepers don't look at it before their moment. With thousands of them
    /// those looks are what a simulation spends its time on.
    pub fn never_set(base: SystemTime) -> Self {
        Self::tied(base, Duration::MAX)
    }

    fn tied(base: SystemTime, step: Duration) -> Self {
        Self(Kind::Tied(Arc::new(Tied { base, started: Instant::now(), step, set_by: AtomicI64::new(0) })))
    }

    /// The wall-clock time.
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

    /// Returns when the wall clock was set, or the machine has slept; never where the kernel does not tell.
    pub async fn jumped(&self) {
        match &self.0 {
            Kind::System(set) => match set.get_or_init(clock_is_set) {
                Some(set) => told(set).await,
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

    /// Returns once the wall clock shows `moment` or later; at once if it does already.
    pub async fn sleep_until(&self, moment: SystemTime) {
        while let Ok(left) = moment.duration_since(self.now()) {
            if left.is_zero() {
                return;
            }
            match &self.0 {
                Kind::System(set) => match set.get_or_init(clock_is_set) {
                    Some(set) => tokio::select! {
                        () = tokio::time::sleep(left.min(LONG_STEP)) => {}
                        () = told(set) => {}
                    },
                    None => tokio::time::sleep(left.min(STEP)).await,
                },
                Kind::Tied(tied) => tokio::time::sleep(left.min(tied.step)).await,
            }
        }
    }
}

/// What becomes readable when the wall clock jumps: a timer that is never due, and that the kernel cancels then. None
/// where the kernel has none.
fn clock_is_set() -> Option<AsyncFd<OwnedFd>> {
    let timer = rustix::time::timerfd_create(
        TimerfdClockId::Realtime,
        TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC,
    );
    let timer = timer.ok()?;
    let never = Timespec { tv_sec: 1 << 33, tv_nsec: 0 };
    let never = Itimerspec { it_interval: Timespec { tv_sec: 0, tv_nsec: 0 }, it_value: never };
    let flags = TimerfdTimerFlags::ABSTIME | TimerfdTimerFlags::CANCEL_ON_SET;
    rustix::time::timerfd_settime(&timer, flags, &never).ok()?;
    #[expect(
        deprecated,
        reason = "the other one is unsafe, because of descriptors that are closed early; this is owned"
    )]
    let registered = AsyncFd::with_interest(timer, tokio::io::Interest::READABLE);
    registered.ok()
}

/// Returns when the wall clock has jumped.
async fn told(set: &AsyncFd<OwnedFd>) {
    let Ok(mut guard) = set.readable().await else { return std::future::pending().await };
    // The first sleeper takes the note away, which makes the timer ready for the next jump; the others were woken with it.
    let _ = rustix::io::read(set.get_ref(), &mut [0; 8]);
    guard.clear_ready();
}

/// The last moment that RFC 3339 can name, in seconds: the end of the year 9999.
const LAST: u64 = 253_402_300_799;

/// `moment` for people, to the second. Certificates may begin before 1970, and sums of moments end after 9999: then it is
/// the first, or the last, that can be shown.
#[expect(clippy::disallowed_methods, reason = "this is that function")]
pub fn rfc3339(moment: SystemTime) -> humantime::Rfc3339Timestamp {
    humantime::format_rfc3339_seconds(shown(moment))
}

/// The same, to the millisecond.
#[expect(clippy::disallowed_methods, reason = "this is that function")]
pub fn rfc3339_millis(moment: SystemTime) -> humantime::Rfc3339Timestamp {
    humantime::format_rfc3339_millis(shown(moment))
}

fn shown(moment: SystemTime) -> SystemTime {
    moment.clamp(SystemTime::UNIX_EPOCH, SystemTime::UNIX_EPOCH + Duration::from_secs(LAST))
}

/// `duration` in its two largest units: enough to see whether to worry.
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

    /// The clock of a machine is not set by a test: bytes in a socket stand for the kernel's notes.
    #[tokio::test]
    async fn every_sleeper_hears_of_every_jump() {
        use std::io::Write as _;
        assert!(clock_is_set().is_some(), "this kernel does not tell that the clock was set");
        let (ours, mut kernels) = std::os::unix::net::UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        #[expect(deprecated, reason = "as in the code")]
        let set = Arc::new(AsyncFd::new(OwnedFd::from(ours)).unwrap());
        for _ in 0..3 {
            let sleepers: Vec<_> = (0..3)
                .map(|_| {
                    let set = Arc::clone(&set);
                    tokio::spawn(async move { told(&set).await })
                })
                .collect();
            tokio::task::yield_now().await;
            assert!(sleepers.iter().all(|sleeper| !sleeper.is_finished()), "woken by nothing");
            kernels.write_all(&[0; 8]).unwrap();
            for sleeper in sleepers {
                tokio::time::timeout(Duration::from_secs(20), sleeper)
                    .await
                    .expect("it is not woken")
                    .unwrap();
            }
        }
    }

    #[test]
    fn spans_have_two_units_at_most() {
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
    fn every_moment_can_be_shown() {
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
