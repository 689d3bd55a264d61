//! File work that keeps nothing waiting but itself: it has threads of its own, and its caller stops waiting at a
//! deadline.
//!
//! A call to a file system that does not answer can't be ended. Its thread stays until it returns; one at a time for each
//! path, and a bounded number in all.

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak, mpsc};
use std::time::{Duration, Instant};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinHandle;
use tokio::time::timeout;
use zeroize::Zeroizing;

use super::file;
use super::pending::PendingOperations;
use crate::base::clock::{Clock, rfc3339};
use crate::base::limits;
use crate::base::offload;

/// How long a read may take where its caller has no deadline.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long the start and the exit of the agent wait for a disk.
pub const AT_THE_EDGES: Duration = Duration::from_millis(500);

/// Why file work has no result.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unresponsive {
    #[error(
        "the file system of {path} does not answer since {since}: is its server, or the process behind its mount, running?"
    )]
    Silent { path: PathBuf, since: String },
    #[error(
        "{path} is left alone: {} threads wait for file systems that do not answer",
        limits::STUCK_THREADS
    )]
    Full { path: PathBuf },
}

/// Runs file work for async callers. Clones share the threads.
#[derive(Clone, Debug)]
pub struct Disk {
    shared: Arc<Shared>,
    patience: Duration,
}

#[derive(Debug)]
struct Shared {
    pending: PendingOperations,
    clock: Clock,
    /// One operation at a time for each path.
    turns: Mutex<HashMap<PathBuf, Weak<Turn>>>,
    threads: Arc<Semaphore>,
}

#[derive(Debug)]
struct Turn {
    turn: Arc<Semaphore>,
    /// When the operation that runs now began.
    begun: Mutex<Option<Instant>>,
}

impl Default for Disk {
    /// One that reports to nothing, for commands and tests.
    fn default() -> Self {
        Self::new(PendingOperations::default(), Clock::system())
    }
}

impl Disk {
    pub fn new(pending: PendingOperations, clock: Clock) -> Self {
        let threads = Arc::new(Semaphore::new(limits::STUCK_THREADS));
        let shared = Shared { pending, clock, turns: Mutex::default(), threads };
        Self { shared: Arc::new(shared), patience: PATIENCE }
    }

    /// The same for a caller whose own deadline is `timeout`: less than that, so that its error names the path.
    pub fn within(&self, timeout: Duration) -> Self {
        Self { shared: Arc::clone(&self.shared), patience: timeout * 4 / 5 }
    }

    /// The same for work that the start or the exit of the agent or of its program waits for.
    pub fn at_the_edges(&self) -> Self {
        Self { shared: Arc::clone(&self.shared), patience: AT_THE_EDGES }
    }

    /// The content of a file, as by [`file::read`].
    pub async fn read(
        &self,
        path: &Path,
        limit: u64,
    ) -> Result<io::Result<Zeroizing<Vec<u8>>>, Unresponsive> {
        let file = path.to_owned();
        self.run(path, move || file::read(&file, limit)).await
    }

    /// The result of `work`, which is about `path`.
    pub async fn run<T: Send + 'static>(
        &self,
        path: &Path,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Unresponsive> {
        let turn = self.turn(path);
        // An earlier caller has waited for it in vain: the others fail at once.
        if let Some(begun) = turn.begun().filter(|begun| begun.elapsed() >= self.patience) {
            return Err(self.silent(path, begun));
        }
        let started = Instant::now();
        let mine = timeout(self.patience, Arc::clone(&turn.turn).acquire_owned()).await;
        let Ok(Ok(mine)) = mine else {
            return Err(self.silent(path, turn.begun().unwrap_or(started)));
        };
        let left = || self.patience.saturating_sub(started.elapsed());
        let thread = self.thread(path, left()).await?;
        let begun = Instant::now();
        turn.set_begun(Some(begun));
        let places = (mine, thread);
        let working = self.spawn(path, move || {
            let done = work();
            turn.set_begun(None);
            drop(places);
            done
        });
        match timeout(left(), working).await {
            Ok(ended) => match offload::finished(ended) {
                Some(done) => Ok(done),
                // The runtime is shutting down, and its caller with it.
                None => std::future::pending().await,
            },
            Err(_) => Err(self.silent(path, begun)),
        }
    }

    /// Starts `work`, which is about `path`, for a caller that has no more than one operation at a time and waits as long
    /// as it likes.
    pub fn spawn<T: Send + 'static>(
        &self,
        path: &Path,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> JoinHandle<T> {
        let operation = self.shared.pending.begin(path);
        tokio::task::spawn_blocking(move || {
            let done = work();
            drop(operation);
            done
        })
    }

    /// The result of `work`, which is about `path`, at the start or the exit of the agent; none if the disk does not answer
    /// soon. This blocks its caller.
    pub fn attempt<T: Send + 'static>(
        &self,
        path: &Path,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Option<T> {
        let operation = self.shared.pending.begin(path);
        attempt(AT_THE_EDGES, move || {
            let done = work();
            drop(operation);
            done
        })
    }

    /// A place among the threads, waited for as long as `patience`.
    async fn thread(&self, path: &Path, patience: Duration) -> Result<OwnedSemaphorePermit, Unresponsive> {
        let threads = Arc::clone(&self.shared.threads);
        if let Ok(thread) = Arc::clone(&threads).try_acquire_owned() {
            return Ok(thread);
        }
        let full = || Unresponsive::Full { path: path.to_owned() };
        // Others are only busy: they end soon.
        if self.shared.pending.hanging().len() >= limits::STUCK_THREADS {
            return Err(full());
        }
        timeout(patience, threads.acquire_owned()).await.ok().and_then(Result::ok).ok_or_else(full)
    }

    fn turn(&self, path: &Path) -> Arc<Turn> {
        let mut turns = self.shared.turns.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(turn) = turns.get(path).and_then(Weak::upgrade) {
            return turn;
        }
        turns.retain(|_, turn| turn.strong_count() > 0);
        let turn = Arc::new(Turn { turn: Arc::new(Semaphore::new(1)), begun: Mutex::default() });
        turns.insert(path.to_owned(), Arc::downgrade(&turn));
        turn
    }

    fn silent(&self, path: &Path, begun: Instant) -> Unresponsive {
        let since = rfc3339(self.shared.clock.now() - begun.elapsed()).to_string();
        Unresponsive::Silent { path: path.to_owned(), since }
    }
}

impl Turn {
    fn begun(&self) -> Option<Instant> {
        *self.begun.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set_begun(&self, begun: Option<Instant>) {
        *self.begun.lock().unwrap_or_else(PoisonError::into_inner) = begun;
    }
}

/// The result of `work` where there is no runtime yet, or no longer; none if it takes longer than `patience`. Its thread
/// ends when it returns.
pub fn attempt<T: Send + 'static>(
    patience: Duration,
    work: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    const STACK: usize = 256 << 10;
    let (done, result) = mpsc::channel();
    let thread = std::thread::Builder::new().stack_size(STACK).spawn(move || {
        // The caller may have given up.
        let _ = done.send(work());
    });
    thread.ok()?;
    result.recv_timeout(patience).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk(patience: Duration) -> Disk {
        Disk::new(PendingOperations::default(), Clock::system()).within(patience * 5 / 4)
    }

    const SHORT: Duration = Duration::from_millis(50);
    const LONG: Duration = Duration::from_secs(60);

    /// Work that hangs until the sender is dropped.
    fn hanging() -> (mpsc::Sender<()>, impl FnOnce() -> &'static str + Send) {
        let (answer, disk) = mpsc::channel::<()>();
        (answer, move || {
            let _ = disk.recv();
            "late"
        })
    }

    #[tokio::test]
    async fn the_caller_stops_waiting_and_the_path_has_one_thread_until_it_answers() {
        let disk = disk(SHORT);
        let path = Path::new("/dead/token");
        let (answer, work) = hanging();
        let error = disk.run(path, work).await.unwrap_err();
        assert!(
            error.to_string().starts_with("the file system of /dead/token does not answer since 2"),
            "{error}"
        );
        // By other callers, too: none of them begins.
        for patience in [SHORT, LONG] {
            let other = disk.within(patience);
            let attempt = timeout(SHORT, other.run(path, || unreachable!())).await;
            assert!(!matches!(attempt, Ok(Ok(()))));
        }
        // Other paths are not concerned.
        assert_eq!(disk.within(LONG).run(Path::new("/mnt/token"), || "soon").await, Ok("soon"));
        drop(answer);
        assert_eq!(disk.within(LONG).run(path, || "again").await, Ok("again"));
        assert!(disk.shared.pending.hanging().is_empty());
    }

    #[tokio::test]
    async fn threads_that_hang_are_bounded() {
        let disk = disk(SHORT);
        let mut answers = Vec::new();
        for number in 0..limits::STUCK_THREADS {
            let (answer, work) = hanging();
            answers.push(answer);
            disk.run(Path::new(&format!("/dead/{number}")), work).await.unwrap_err();
        }
        let path = Path::new("/mnt/token");
        let error = disk.run(path, || ()).await.unwrap_err();
        assert_eq!(error, Unresponsive::Full { path: path.to_owned() });
        answers.pop();
        assert_eq!(disk.within(LONG).run(path, || "soon").await, Ok("soon"));
    }

    #[tokio::test(start_paused = true)]
    async fn callers_on_one_path_take_turns() {
        let disk = Disk::new(PendingOperations::default(), Clock::system());
        let running = Arc::new(Mutex::new(()));
        let callers: Vec<_> = (0..20)
            .map(|_| {
                let (disk, running) = (disk.clone(), Arc::clone(&running));
                tokio::spawn(async move {
                    disk.run(Path::new("/mnt/token"), move || running.try_lock().map(drop).is_ok()).await
                })
            })
            .collect();
        for caller in callers {
            assert_eq!(caller.await.unwrap(), Ok(true));
        }
        assert_eq!(disk.shared.turns.lock().unwrap().len(), 1);
        disk.run(Path::new("/mnt/other"), || ()).await.unwrap();
        assert_eq!(disk.shared.turns.lock().unwrap().len(), 1, "a path without callers is forgotten");
    }

    #[test]
    fn without_a_runtime_the_wait_is_bounded_too() {
        assert_eq!(attempt(LONG, || 1), Some(1));
        let (_answer, work) = hanging();
        assert_eq!(attempt(SHORT, work), None);
    }
}
