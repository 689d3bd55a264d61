//! Work on files that may hang, on few threads.
//!
//! One thread does all work, one piece at a time. A piece that takes long has another thread take over, and the device
//! on which it hangs is closed to all others: these are set aside until that device answers. So a device that does not
//! answer keeps one thread, and costs nothing but the files on it.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fmt;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

use super::find::{Blocked, Gate};
use super::pending::PendingOperations;

/// After this time another thread takes over.
const SLOW: Duration = Duration::from_millis(100);
/// Threads that may hang at a time, each on a device of its own.
const THREADS: usize = 8;
/// How long a thread waits for more work.
const IDLE: Duration = Duration::from_secs(10);
const STACK_BYTES: usize = 256 << 10;

/// Threads for work on files. Clones share them. There are none before the first work.
#[derive(Clone, Debug)]
pub struct Pool(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    /// There is work, or a thread has to look whether it is still needed.
    ready: Condvar,
    /// Work has begun, which may take long.
    begun: Notify,
    pending: PendingOperations,
    #[cfg(test)]
    is_inline: bool,
}

#[derive(Debug, Default)]
struct State {
    queue: VecDeque<Task>,
    /// Work that needs a device on which other work hangs.
    set_aside: HashMap<u64, Vec<Task>>,
    /// How much work was waiting when what is no longer wanted was dropped last.
    wanted: usize,
    /// What each busy thread does.
    running: BTreeMap<u64, Running>,
    threads: usize,
    next: u64,
}

#[derive(Debug)]
struct Running {
    since: Instant,
    device: Option<u64>,
    /// Another thread has taken over.
    is_slow: bool,
}

/// Work on files.
pub trait Work: Send {
    /// Whether its outcome is still awaited. Work that is not wanted may be dropped.
    fn is_wanted(&self) -> bool {
        true
    }

    /// Does the work. It is done again from its start when it has met a closed device, and that answers.
    fn run(&mut self, entrance: &Entrance) -> Result<(), Blocked>;
}

impl<F: FnMut(&Entrance) -> Result<(), Blocked> + Send> Work for F {
    fn run(&mut self, entrance: &Entrance) -> Result<(), Blocked> {
        self(entrance)
    }
}

/// Work on the files of a path.
struct Task {
    path: Arc<Path>,
    work: Box<dyn Work>,
}

/// What a piece of work enters devices by.
#[derive(Debug)]
pub struct Entrance {
    shared: Arc<Shared>,
    id: u64,
}

impl fmt::Debug for Task {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Task({})", self.path.display())
    }
}

impl Pool {
    pub fn new(pending: PendingOperations) -> Self {
        let (state, ready, begun) = (Mutex::default(), Condvar::new(), Notify::new());
        Self(Arc::new(Shared {
            state,
            ready,
            begun,
            pending,
            #[cfg(test)]
            is_inline: false,
        }))
    }

    /// Does all work at once, on the thread that submits it: where time is virtual.
    #[cfg(test)]
    pub(crate) fn inline() -> Self {
        let mut pool = Self::new(PendingOperations::default());
        if let Some(shared) = Arc::get_mut(&mut pool.0) {
            shared.is_inline = true;
        }
        pool
    }

    /// Has a thread do `work` on the files of `path`.
    pub fn submit(&self, path: Arc<Path>, work: impl Work + 'static) {
        let mut state = self.0.lock();
        state.drop_unwanted();
        let task = Task { path, work: Box::new(work) };
        #[cfg(test)]
        if self.0.is_inline {
            drop(self.0.run(state, task));
            return;
        }
        state.queue.push_back(task);
        self.0.staff(&mut state);
        drop(state);
        self.0.begun.notify_one();
    }

    /// Has other threads take over from those that hang. Does not return.
    pub async fn supervise(&self) {
        loop {
            self.0.begun.notified().await;
            loop {
                tokio::time::sleep(SLOW).await;
                if !self.0.relieve() {
                    break;
                }
            }
        }
    }
}

impl Shared {
    /// No code panics while it holds this lock.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sees to it that a thread takes what is in the queue.
    fn staff(self: &Arc<Self>, state: &mut State) {
        if state.queue.is_empty() {
            return;
        }
        if state.has_able_thread() {
            self.ready.notify_one();
        } else if state.threads < THREADS {
            let shared = Arc::clone(self);
            let thread = std::thread::Builder::new().name("named-files".to_owned()).stack_size(STACK_BYTES);
            match thread.spawn(move || shared.work()) {
                Ok(_) => state.threads += 1,
                Err(error) => tracing::error!(%error, "no thread for files that clients name, retrying"),
            }
        }
    }

    /// Notes which work takes long. True while there is something to look after.
    fn relieve(self: &Arc<Self>) -> bool {
        let mut state = self.lock();
        for running in state.running.values_mut() {
            running.is_slow |= running.since.elapsed() >= SLOW;
        }
        self.staff(&mut state);
        let is_waiting = !state.queue.is_empty() && state.threads < THREADS;
        is_waiting || state.running.values().any(|running| !running.is_slow)
    }

    /// The life of a thread.
    fn work(self: Arc<Self>) {
        let mut state = self.lock();
        loop {
            // One thread is enough when those that hung have returned.
            if state.able_threads() > 1 {
                self.ready.notify_one();
                break;
            }
            if let Some(task) = state.queue.pop_front() {
                state = self.run(state, task);
                continue;
            }
            // Much work at a time is rare.
            state.queue.shrink_to(0);
            let (again, waited) =
                self.ready.wait_timeout(state, IDLE).unwrap_or_else(PoisonError::into_inner);
            state = again;
            if waited.timed_out() && state.queue.is_empty() {
                break;
            }
        }
        state.threads -= 1;
    }

    fn run<'a>(
        self: &'a Arc<Self>,
        mut state: MutexGuard<'a, State>,
        mut task: Task,
    ) -> MutexGuard<'a, State> {
        let id = state.next;
        state.next += 1;
        state.running.insert(id, Running { since: Instant::now(), device: None, is_slow: false });
        drop(state);
        let outcome = match task.work.is_wanted() {
            true => {
                let _operation = self.pending.begin(&task.path);
                task.work.run(&Entrance { shared: Arc::clone(self), id })
            }
            false => Ok(()),
        };
        // What work holds on to is dropped without the lock.
        let task = outcome.is_err().then_some(task);
        let mut state = self.lock();
        if let Some(Running { device: Some(device), is_slow: true, .. }) = state.running.remove(&id) {
            state.reopen(device);
        }
        if let (Err(Blocked(device)), Some(task)) = (outcome, task) {
            match state.is_closed(device, id) {
                true => state.set_aside.entry(device).or_default().push(task),
                false => state.queue.push_back(task),
            }
        }
        state
    }
}

impl State {
    /// Threads that don't hang.
    fn able_threads(&self) -> usize {
        self.threads - self.running.values().filter(|running| running.is_slow).count()
    }

    fn has_able_thread(&self) -> bool {
        self.able_threads() > 0
    }

    /// Whether other work than `id` hangs on `device`.
    fn is_closed(&self, device: u64, id: u64) -> bool {
        let hangs = |running: &Running| running.is_slow && running.device == Some(device);
        self.running.iter().any(|(other, running)| *other != id && hangs(running))
    }

    /// Drops what is no longer wanted once the work that waits has doubled: while a device hangs it could pile up.
    fn drop_unwanted(&mut self) {
        const FEW: usize = 64;
        let waiting =
            |state: &Self| state.queue.len() + state.set_aside.values().map(Vec::len).sum::<usize>();
        if waiting(self) <= 2 * self.wanted + FEW {
            return;
        }
        self.queue.retain(|task| task.work.is_wanted());
        for tasks in self.set_aside.values_mut() {
            tasks.retain(|task| task.work.is_wanted());
        }
        self.wanted = waiting(self);
    }

    /// Takes up again what was set aside for `device`, which answers.
    fn reopen(&mut self, device: u64) {
        self.queue.extend(self.set_aside.remove(&device).unwrap_or_default());
    }
}

impl Entrance {
    /// What follows touches no disk.
    pub fn leave(&self) {
        self.stay_at(None);
    }

    fn stay_at(&self, device: Option<u64>) {
        let mut state = self.shared.lock();
        let Some(running) = state.running.get_mut(&self.id) else { return };
        let before = std::mem::replace(&mut running.device, device);
        if let Some(before) = before.filter(|_| running.is_slow && before != device) {
            state.reopen(before);
            self.shared.staff(&mut state);
        }
    }
}

impl Gate for Entrance {
    fn enter(&self, device: u64) -> Result<(), Blocked> {
        if self.shared.lock().is_closed(device, self.id) {
            return Err(Blocked(device));
        }
        self.stay_at(Some(device));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(20);

    fn path(path: &str) -> Arc<Path> {
        Path::new(path).into()
    }

    /// Starts work that enters `device` and then hangs until the sender is dropped. Returns once it hangs.
    fn hang(pool: &Pool, device: u64) -> mpsc::Sender<()> {
        let (release, released) = mpsc::channel();
        let (entered, has_entered) = mpsc::channel();
        pool.submit(path("/dead"), move |entrance: &Entrance| {
            entrance.enter(device)?;
            let _ = entered.send(());
            let _ = released.recv();
            Ok(())
        });
        has_entered.recv_timeout(PATIENCE).unwrap();
        release
    }

    /// Starts work on `device`; the receiver gets a message when it is done.
    fn visit(pool: &Pool, device: u64) -> mpsc::Receiver<()> {
        let (done, is_done) = mpsc::channel();
        pool.submit(path("/file"), move |entrance: &Entrance| {
            entrance.enter(device)?;
            let _ = done.send(());
            Ok(())
        });
        is_done
    }

    /// A pool that is supervised on a thread of its own.
    fn pool() -> Pool {
        let pool = Pool::new(PendingOperations::default());
        let supervised = pool.clone();
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
            runtime.block_on(supervised.supervise());
        });
        pool
    }

    #[test]
    fn a_device_that_hangs_stops_only_what_needs_it_until_it_answers() {
        let pool = pool();
        assert_eq!(pool.0.lock().threads, 0, "no thread before there is work");
        let dead: Vec<_> = (0..3).map(|device| (device, hang(&pool, device))).collect();
        visit(&pool, 9).recv_timeout(PATIENCE).unwrap();
        let waiting: Vec<_> = (0..50).map(|number| visit(&pool, number % 3)).collect();
        visit(&pool, 9).recv_timeout(PATIENCE).unwrap();
        assert!(waiting.iter().all(|visit| visit.try_recv().is_err()));
        assert_eq!(pool.0.lock().threads, 4, "one for each device that hangs, and one that works");
        for (device, release) in dead {
            drop(release);
            for (number, visit) in (0..).zip(&waiting) {
                if number % 3 == device {
                    visit.recv_timeout(PATIENCE).unwrap();
                } else if number % 3 > device {
                    assert!(visit.try_recv().is_err());
                }
            }
        }
        visit(&pool, 9).recv_timeout(PATIENCE).unwrap();
    }

    #[test]
    fn the_threads_that_hang_are_bounded() {
        let pool = pool();
        let dead: Vec<_> = (0..THREADS as u64).map(|device| hang(&pool, device)).collect();
        let last = visit(&pool, 99);
        let until = Instant::now() + 3 * SLOW;
        while Instant::now() < until {
            assert!(pool.0.lock().threads <= THREADS);
            std::thread::yield_now();
        }
        assert!(last.try_recv().is_err(), "no thread is left");
        drop(dead);
        last.recv_timeout(PATIENCE).unwrap();
    }

    /// Work that meets a device that hangs, and whose outcome is not awaited.
    struct Unwanted(Arc<()>);

    impl Work for Unwanted {
        fn is_wanted(&self) -> bool {
            // True until it is set aside.
            Arc::strong_count(&self.0) < 100
        }

        fn run(&mut self, entrance: &Entrance) -> Result<(), Blocked> {
            entrance.enter(1)
        }
    }

    #[test]
    fn what_is_not_wanted_does_not_pile_up_behind_a_device_that_hangs() {
        let pool = pool();
        let release = hang(&pool, 1);
        let count = Arc::new(());
        for _ in 0..1_000 {
            pool.submit(path("/dead/other"), Unwanted(Arc::clone(&count)));
            assert!(Arc::strong_count(&count) < 250);
        }
        drop(release);
        visit(&pool, 1).recv_timeout(PATIENCE).unwrap();
    }

    #[test]
    fn what_takes_long_without_a_disk_closes_no_device() {
        let pool = pool();
        let (release, released) = mpsc::channel::<()>();
        let (left, has_left) = mpsc::channel();
        pool.submit(path("/large"), move |entrance: &Entrance| {
            entrance.enter(1)?;
            entrance.leave();
            let _ = left.send(());
            let _ = released.recv();
            Ok(())
        });
        has_left.recv_timeout(PATIENCE).unwrap();
        visit(&pool, 1).recv_timeout(PATIENCE).unwrap();
        drop(release);
    }
}
