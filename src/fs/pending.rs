//! Operations on files that have begun and not returned, and which of them hang.
//!
//! A call to a file system that does not answer can't be ended, and keeps its thread. Threads that may be kept register
//! each operation here. No method touches a disk, and none waits.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec};
use tokio::io::unix::AsyncFd;

use crate::base::clock::{Clock, millis, rfc3339};
use crate::base::text;

/// An operation that has been running for this long hangs.
pub const HANGING: Duration = Duration::from_secs(2);

/// As the timer takes them.
const AT_ONCE: Duration = Duration::from_nanos(1);
const NEVER: Duration = Duration::ZERO;

/// The operations that run now. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct PendingOperations(Arc<Mutex<Running>>);

#[derive(Debug, Default)]
struct Running {
    /// As many as have ever run at the same time. A free slot keeps its buffer for the next path.
    slots: Vec<Slot>,
    /// How many run that the reporter has not seen hanging.
    unseen: usize,
    /// One that the reporter has seen hanging has returned, and the reporter does not know yet.
    has_returned: bool,
    /// Wakes the reporter. The kernel counts the time: an operation that ends soon wakes nothing.
    timer: Option<Arc<AsyncFd<OwnedFd>>>,
}

#[derive(Debug, Default)]
struct Slot {
    path: PathBuf,
    /// None: the slot is free.
    begun: Option<Instant>,
    /// The reporter knows that it hangs.
    is_seen: bool,
}

/// An operation. It ends when this is dropped.
#[derive(Debug)]
#[must_use]
pub struct Operation {
    running: Arc<Mutex<Running>>,
    slot: usize,
}

/// A path whose file system does not answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hanging {
    pub path: PathBuf,
    /// When the oldest operation on it began.
    pub begun: Instant,
}

impl Hanging {
    pub fn since(&self, clock: &Clock) -> SystemTime {
        clock.now() - self.begun.elapsed()
    }
}

/// No code panics while it holds this lock.
fn lock(running: &Mutex<Running>) -> MutexGuard<'_, Running> {
    running.lock().unwrap_or_else(PoisonError::into_inner)
}

impl PendingOperations {
    /// Registers an operation on `path`, which begins now.
    pub fn begin(&self, path: &Path) -> Operation {
        let begun = Instant::now();
        let mut running = lock(&self.0);
        // One slot for each thread that works on files: few.
        let free = running.slots.iter().position(|slot| slot.begun.is_none());
        let index = free.unwrap_or(running.slots.len());
        if free.is_none() {
            running.slots.push(Slot::default());
        }
        if let Some(slot) = running.slots.get_mut(index) {
            slot.path.clear();
            slot.path.push(path);
            slot.begun = Some(begun);
            slot.is_seen = false;
        }
        running.unseen += 1;
        if running.unseen == 1 && !running.has_returned {
            running.set_timer(HANGING);
        }
        drop(running);
        Operation { running: Arc::clone(&self.0), slot: index }
    }

    /// The paths whose operations hang, the oldest first.
    pub fn hanging(&self) -> Vec<Hanging> {
        let mut hanging: Vec<Hanging> = Vec::new();
        let running = lock(&self.0);
        let now = Instant::now();
        for slot in &running.slots {
            let Some(begun) = slot.begun.filter(|begun| is_hanging(*begun, now)) else { continue };
            match hanging.iter_mut().find(|one| one.path == slot.path) {
                Some(known) => known.begun = known.begun.min(begun),
                None => hanging.push(Hanging { path: slot.path.clone(), begun }),
            }
        }
        drop(running);
        hanging.sort_by_key(|one| one.begun);
        hanging
    }

    /// Logs which paths hang, and which answer again. Never returns.
    pub async fn report(self, clock: Clock) {
        let timer = match timer() {
            Ok(timer) => Arc::new(timer),
            Err(error) => {
                tracing::warn!(%error, "timer unavailable, file systems that do not answer are not logged");
                return std::future::pending().await;
            }
        };
        lock(&self.0).timer = Some(Arc::clone(&timer));
        let mut known: HashMap<PathBuf, Instant> = HashMap::new();
        loop {
            lock(&self.0).see();
            let hanging = self.hanging();
            for one in &hanging {
                if known.insert(one.path.clone(), one.begun).is_none() {
                    let since = rfc3339(one.since(&clock));
                    tracing::warn!(path = shown(&one.path), %since, "file system does not answer");
                }
            }
            known.retain(|path, begun| {
                let is_left = hanging.iter().any(|one| one.path == *path);
                if !is_left {
                    tracing::info!(
                        path = shown(path),
                        after_ms = millis(begun.elapsed()),
                        "file system answers again"
                    );
                }
                is_left
            });
            expired(&timer).await;
        }
    }
}

fn is_hanging(begun: Instant, now: Instant) -> bool {
    now.duration_since(begun) >= HANGING
}

/// A path may come from a peer.
fn shown(path: &Path) -> String {
    text::sanitize_for_log(&path.display().to_string())
}

impl Running {
    /// Notes which operations hang by now, and wakes the reporter when the next one does.
    fn see(&mut self) {
        let now = Instant::now();
        let mut next: Option<Instant> = None;
        for slot in &mut self.slots {
            let Some(begun) = slot.begun.filter(|_| !slot.is_seen) else { continue };
            if is_hanging(begun, now) {
                slot.is_seen = true;
                self.unseen -= 1;
            } else {
                next = Some(next.map_or(begun, |next| next.min(begun)));
            }
        }
        self.has_returned = false;
        let left = next.map(|begun| (begun + HANGING).saturating_duration_since(now).max(AT_ONCE));
        self.set_timer(left.unwrap_or(NEVER));
    }

    fn set_timer(&self, time: Duration) {
        let Some(timer) = &self.timer else { return };
        let once = Timespec {
            tv_sec: i64::try_from(time.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: time.subsec_nanos().into(),
        };
        let setting = Itimerspec { it_interval: Timespec { tv_sec: 0, tv_nsec: 0 }, it_value: once };
        // Fails only for invalid times.
        let _ = rustix::time::timerfd_settime(timer, TimerfdTimerFlags::empty(), &setting);
    }
}

impl Drop for Operation {
    fn drop(&mut self) {
        let mut running = lock(&self.running);
        let Some(slot) = running.slots.get_mut(self.slot) else { return };
        slot.begun = None;
        if slot.is_seen {
            running.has_returned = true;
            running.set_timer(AT_ONCE);
            return;
        }
        running.unseen -= 1;
        if running.unseen == 0 && !running.has_returned {
            running.set_timer(NEVER);
        }
    }
}

fn timer() -> std::io::Result<AsyncFd<OwnedFd>> {
    let flags = TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC;
    let timer = rustix::time::timerfd_create(TimerfdClockId::Monotonic, flags)?;
    #[expect(
        deprecated,
        reason = "its replacement is unsafe because descriptors may be closed early; this one is owned"
    )]
    AsyncFd::with_interest(timer, tokio::io::Interest::READABLE)
}

/// Returns when the timer has expired, and sometimes when it was disarmed just then.
async fn expired(timer: &AsyncFd<OwnedFd>) {
    let Ok(mut guard) = timer.readable().await else { return std::future::pending().await };
    let _ = rustix::io::read(timer.get_ref(), &mut [0; 8]);
    guard.clear_ready();
}

#[cfg(test)]
mod tests {
    use super::*;

    fn age(pending: &PendingOperations, by: Duration) {
        for slot in &mut lock(&pending.0).slots {
            slot.begun = slot.begun.map(|begun| begun - by);
        }
    }

    fn paths(pending: &PendingOperations) -> Vec<String> {
        pending.hanging().iter().map(|one| one.path.display().to_string()).collect()
    }

    #[test]
    fn what_has_not_returned_for_two_seconds_hangs_until_it_does() {
        let pending = PendingOperations::default();
        let first = pending.begin(Path::new("/dead/a"));
        assert!(paths(&pending).is_empty());
        age(&pending, HANGING);
        let second = pending.begin(Path::new("/dead/b"));
        assert_eq!(paths(&pending), ["/dead/a"]);
        age(&pending, HANGING);
        assert_eq!(paths(&pending), ["/dead/a", "/dead/b"]);
        drop(first);
        assert_eq!(paths(&pending), ["/dead/b"]);
        drop(second);
        assert!(paths(&pending).is_empty());
    }

    #[test]
    fn several_operations_on_a_path_are_one_from_the_oldest_on() {
        let pending = PendingOperations::default();
        let _second = pending.begin(Path::new("/dead/a"));
        age(&pending, HANGING);
        let begun = pending.hanging()[0].begun;
        let _third = pending.begin(Path::new("/dead/a"));
        age(&pending, HANGING);
        assert_eq!(pending.hanging(), [Hanging { path: "/dead/a".into(), begun: begun - HANGING }]);
        let clock = Clock::system();
        let since = clock.now().duration_since(pending.hanging()[0].since(&clock)).unwrap();
        assert!(since >= 2 * HANGING, "{since:?}");
    }

    #[test]
    fn slots_are_used_again() {
        let pending = PendingOperations::default();
        for _ in 0..100 {
            let _one = pending.begin(Path::new("/a"));
            let _other = pending.begin(Path::new("/b"));
        }
        let running = lock(&pending.0);
        assert_eq!((running.slots.len(), running.unseen), (2, 0));
    }

    /// The times at which the timer wakes the reporter, and which operations it has seen.
    #[tokio::test]
    async fn the_reporter_is_woken_only_when_an_operation_hangs_or_one_that_hung_returns() {
        let timer = Arc::new(timer().unwrap());
        let pending = PendingOperations::default();
        lock(&pending.0).timer = Some(Arc::clone(&timer));
        let left = || {
            let at = rustix::time::timerfd_gettime(&timer).unwrap().it_value;
            Duration::new(at.tv_sec.unsigned_abs(), u32::try_from(at.tv_nsec).unwrap())
        };
        let quick = pending.begin(Path::new("/mnt/quick"));
        assert!(left() > HANGING / 2, "{:?}", left());
        drop(quick);
        assert_eq!(left(), Duration::ZERO);

        let slow = pending.begin(Path::new("/dead/slow"));
        age(&pending, HANGING / 2);
        lock(&pending.0).see();
        assert!(!left().is_zero() && left() <= HANGING / 2, "{:?}", left());
        age(&pending, HANGING);
        lock(&pending.0).see();
        assert_eq!(left(), Duration::ZERO, "it is seen once");
        drop(pending.begin(Path::new("/mnt/quick")));
        assert_eq!(left(), Duration::ZERO);
        drop(slow);
        drop(pending.begin(Path::new("/mnt/quick")));
        tokio::time::timeout(Duration::from_secs(20), expired(&timer)).await.expect("woken by the return");
        assert_eq!(lock(&pending.0).unseen, 0);
    }
}
