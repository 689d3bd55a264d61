//! Notices that a path leads to another file, or to other bytes, than before.
//!
//! A path is a chain of look-ups: each directory on the way, each link's target. The kubelet changes a mounted
//! file by swapping a link that lies two look-ups before it. Every directory in which a name is looked up is
//! watched, and an event counts if it is about one of these names. A file that has other names elsewhere (hard links,
//! or a mount of that one file) is watched itself: writing to it under another name does nothing to the directory.
//!
//! One [`Watcher`] serves any number of [`Watch`]es. A directory is watched once, however many of them look a name up
//! in it. Where inotify does not report changes, the look-ups are compared every two seconds.

mod index;
mod inotify;
mod lookup;
mod poll;
#[cfg(test)]
pub(crate) mod testing;

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;
use tokio::time::Instant;

pub use self::index::Activity;
use self::index::SharedIndex;
use self::inotify::{Backend, Followed, Inotify, Notifier};
use self::lookup::{Inodes, Lookups};
use self::poll::Snapshot;

/// No code panics while it holds one of these locks.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What all watches share. Clones are the same watcher.
#[derive(Clone, Debug)]
pub struct Watcher(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    index: SharedIndex,
    /// Never locked on inotify's thread: the holder of this lock waits for that thread.
    backend: Mutex<Backend>,
    next_id: AtomicU64,
    started: Instant,
}

/// How many directories, and files with several names, are watched in which way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WatchCount {
    pub inotify: usize,
    /// Those where inotify reports no changes, or not every change.
    pub polling: usize,
}

impl Default for Watcher {
    fn default() -> Self {
        Self::new()
    }
}

impl Watcher {
    pub fn new() -> Self {
        Self::with(|index| Box::new(Inotify::new(index)))
    }

    /// A watcher with the notifier that `notifier` makes, which passes its events to the index.
    fn with(notifier: impl FnOnce(SharedIndex) -> Box<dyn Notifier>) -> Self {
        let index = SharedIndex::default();
        let backend = Mutex::new(Backend::new(notifier(index.clone())));
        Self(Arc::new(Shared { index, backend, next_id: AtomicU64::new(0), started: Instant::now() }))
    }

    pub fn count(&self) -> WatchCount {
        lock(&self.0.backend).count()
    }

    /// A watch of `paths`, which need not exist. It starts with [`Watch::arm`].
    pub fn watch(&self, paths: Vec<PathBuf>) -> Watch {
        let id = self.0.next_id.fetch_add(1, Ordering::Relaxed);
        Watch {
            shared: Arc::clone(&self.0),
            id,
            paths,
            changed: self.0.index.lock().add(id),
            lookups: Lookups::default(),
            snapshot: Snapshot::default(),
            polls: false,
            events: 0,
        }
    }
}

/// Follows a set of paths until it is dropped.
#[derive(Debug)]
pub struct Watch {
    shared: Arc<Shared>,
    id: u64,
    paths: Vec<PathBuf>,
    changed: Arc<Notify>,
    lookups: Lookups,
    /// Compared while this watch polls.
    snapshot: Snapshot,
    polls: bool,
    /// How many events had woken it when it was armed.
    events: u64,
}

impl Watch {
    /// Watches where the paths lead now. Whatever happens after this call wakes [`Watch::changed`].
    pub fn arm(&mut self) {
        // A link may be swapped between its look-up and the watch on its directory: repeat until nothing changes.
        for _ in 0..lookup::MAX_LINKS {
            let lookups = Lookups::of(&self.paths);
            let is_same = lookups == self.lookups;
            if !is_same {
                self.shared.index.lock().register(self.id, &lookups);
            }
            let Followed { is_new, polls } =
                self.shared.follow(self.id, &self.lookups.inodes, &lookups.inodes);
            self.polls = polls;
            self.lookups = lookups;
            if is_same && !is_new {
                break;
            }
        }
        lock(&self.shared.backend).log_recovery();
        if self.polls {
            self.snapshot.refresh(&self.lookups.names);
        }
        self.events = self.shared.index.lock().events(self.id);
    }

    /// Returns once something may have changed since [`Watch::arm`].
    pub async fn changed(&self) {
        if !self.polls {
            return self.changed.notified().await;
        }
        let polled = async {
            loop {
                poll::next_round(self.shared.started).await;
                if self.snapshot.differs(&self.lookups.names)
                    || lock(&self.shared.backend).retry(&self.lookups.inodes)
                {
                    return;
                }
            }
        };
        tokio::select! {
            () = self.changed.notified() => {}
            () = polled => {}
        }
    }

    /// What has happened since [`Watch::arm`]. Polling doesn't notice writers.
    pub fn activity(&self) -> Activity {
        self.shared.catch_up();
        self.shared.index.lock().activity(self.id, self.events)
    }

    /// No longer counts files as open that were written to and not closed.
    pub fn forget_writers(&self) {
        self.shared.index.lock().forget_writers(self.id);
    }

    /// Whether inotify doesn't report every change.
    pub fn polls(&self) -> bool {
        self.polls
    }
}

impl Drop for Watch {
    /// Logs no recovery, though fewer directories are watched afterwards: at shutdown all watches are dropped.
    fn drop(&mut self) {
        self.shared.index.lock().remove(self.id);
        self.shared.follow(self.id, &self.lookups.inodes, &Inodes::new());
    }
}

impl Shared {
    /// Watches `inodes` for watch `id`, and no longer those of `before` that no watch needs.
    fn follow(&self, id: u64, before: &Inodes, inodes: &Inodes) -> Followed {
        let mut backend = lock(&self.backend);
        let removed = self.index.lock().take_removed();
        for path in removed {
            backend.lose(&path);
        }
        for path in before.keys().filter(|path| !inodes.contains_key(*path)) {
            if backend.release(id, path) {
                self.index.lock().forget(path);
            }
        }
        backend.follow(id, inodes)
    }

    /// Returns once the index has every event until now.
    fn catch_up(&self) {
        lock(&self.backend).flush();
    }
}

#[cfg(test)]
mod tests;
