//! Notices that a path leads to another file, or to other bytes, than before.
//!
//! A path is a chain of look-ups: each directory on the way, each link's target. The kubelet changes a mounted
//! file by swapping a link that lies two look-ups before it. Every directory in which a name is looked up is
//! watched, and an event counts if it is about one of these names. Where files are read, writes are reported too; on the
//! way there, names alone. A file that has other names elsewhere (hard links, or a mount of that one file) is watched
//! itself: writing to it under another name does nothing to the directory. So is a file in a directory where other
//! programs write all the time.
//!
//! One [`Watcher`] serves any number of [`Watch`]es. A directory is watched once, however many of them look a name up
//! in it. Where inotify does not report changes, a watch asks for a look every two seconds.

mod backend;
pub mod directory;
mod index;
mod inotify;
mod poll;
#[cfg(test)]
pub(crate) mod testing;

use std::collections::{BTreeSet, HashSet};
use std::ffi::OsStr;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError, Weak};

use tokio::sync::Notify;
use tokio::time::Instant;

use self::backend::{Backend, Targets};
pub use self::index::{Activity, NameListener, OPEN_PATIENCE};
use self::index::{Name, SharedIndex};
use self::inotify::{Inotify, Notifier, Outcomes, Watching};
use crate::fs::lookup::MAX_LINKS;
use crate::fs::pending::{Operation, PendingOperations};
use crate::fs::walk::{Look, Lookups, RegularFile, Step, Walk};

/// No code panics while it holds one of these locks.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn try_lock<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    match mutex.try_lock() {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(guard)) => Some(guard.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

/// What all watches share. Clones are the same watcher.
#[derive(Clone, Debug)]
pub struct Watcher(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    index: SharedIndex,
    backend: Mutex<Backend>,
    /// Held while watches are added and removed, which may take forever where a file system doesn't answer. So no thread
    /// waits for this lock: one that doesn't get it leaves the change to the holder, and its watch polls meanwhile.
    notifier: Mutex<Box<dyn Notifier>>,
    /// Where looks are registered.
    pending: PendingOperations,
    next_id: AtomicU64,
    started: Instant,
    apart: Mutex<Vec<Weak<Shared>>>,
}

/// How many directories, and files that are watched themselves, are watched in which way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WatchCount {
    pub inotify: usize,
    /// Those where inotify reports no changes, or not every change.
    pub polling: usize,
}

/// Why to look again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wake {
    /// Something has changed.
    Event,
    /// Inotify doesn't report every change.
    Poll,
}

impl Watcher {
    /// A watcher that registers in `pending` while it touches the disk.
    pub fn new(pending: PendingOperations) -> Self {
        Self::with(pending, Backend::default(), |index| Box::new(Inotify::new(index)))
    }

    /// A watcher with the notifier that `notifier` makes, which passes its events to the index.
    fn with(
        pending: PendingOperations,
        backend: Backend,
        notifier: impl FnOnce(SharedIndex) -> Box<dyn Notifier>,
    ) -> Self {
        let index = SharedIndex::default();
        let notifier = Mutex::new(notifier(index.clone()));
        let backend = Mutex::new(backend);
        let (next_id, started, apart) = (AtomicU64::new(0), Instant::now(), Mutex::default());
        Self(Arc::new(Shared { index, backend, notifier, pending, next_id, started, apart }))
    }

    /// Another watcher with threads of its own; what it watches counts as watched by this one.
    pub fn apart(&self) -> Self {
        let backend = lock(&self.0.backend).apart();
        let other = Self::with(self.0.pending.clone(), backend, |index| Box::new(Inotify::new(index)));
        lock(&self.0.apart).push(Arc::downgrade(&other.0));
        other
    }

    /// Has all watches look again, whether or not anything has happened.
    pub fn look_again(&self) {
        self.0.index.lock().wake_all();
        for other in self.others() {
            other.index.lock().wake_all();
        }
    }

    /// Those that are apart.
    fn others(&self) -> Vec<Arc<Shared>> {
        let mut apart = lock(&self.0.apart);
        apart.retain(|other| other.strong_count() > 0);
        apart.iter().filter_map(Weak::upgrade).collect()
    }

    pub fn count(&self) -> WatchCount {
        let mut count = lock(&self.0.backend).count();
        for other in self.others() {
            let other = lock(&other.backend).count();
            count.inotify += other.inotify;
            count.polling += other.polling;
        }
        count
    }

    /// A watch of `paths`, which need not exist. It starts with the first [`Watch::look`] or [`Watch::arm`].
    pub fn watch(&self, paths: Vec<PathBuf>) -> Watch {
        self.watch_walk(Walk::new(paths))
    }

    /// A watch of `paths`, of which those behind the first `decisive` count only if one of these is no file.
    pub fn watch_with_fallbacks(&self, paths: Vec<PathBuf>, decisive: usize) -> Watch {
        self.watch_walk(Walk::with_fallbacks(paths, decisive))
    }

    fn watch_walk(&self, walk: Walk) -> Watch {
        let id = self.0.next_id.fetch_add(1, Ordering::Relaxed);
        Watch {
            shared: Arc::clone(&self.0),
            id,
            walk,
            wakes: self.0.index.lock().add(id),
            lookups: Lookups::default(),
            targets: Targets::new(),
            polls: true,
        }
    }
}

/// Follows a set of paths until it is dropped.
///
/// [`Watch::look`], [`Watch::follow`] and [`Watch::arm`] touch the disk. A look finds the files, and `follow` what has to
/// be watched so that nothing that happens after the look is missed; what the look found may be used in between.
#[derive(Debug)]
pub struct Watch {
    shared: Arc<Shared>,
    id: u64,
    walk: Walk,
    wakes: Arc<Notify>,
    /// What is followed.
    lookups: Lookups,
    targets: Targets,
    polls: bool,
}

impl Watch {
    /// Reads the files, of `limit` bytes at most each, except for those that `refuse` has an error for.
    pub fn look(&mut self, limit: u64, refuse: impl Fn(&Path) -> Option<std::io::Error>) -> Look {
        let operation = self.begin_operation();
        self.begin_look();
        let mut look = self.walk.read(limit, refuse);
        look.lookups.operation = operation;
        look
    }

    /// What has happened to these files since the last look began, which is the one that found them. Polling doesn't notice
    /// writers, nor does inotify before a file is watched in a directory that is not watched for writes: a file that
    /// appears there counts as a change until it is followed.
    pub fn activity(&self, lookups: &Lookups) -> Activity {
        let is_unwatched = self.has_unwatched_writers(lookups);
        if is_unwatched || self.may_be_half_written(lookups) && !self.shared.catch_up() {
            return Activity::Change;
        }
        self.shared.index.lock().activity(self.id, lookups)
    }

    /// Watches where a look has led: whatever happens after that look wakes [`Watch::changed`]. False if something has
    /// happened already.
    pub fn follow(&mut self, mut lookups: Lookups) -> bool {
        let Following { targets, new_names, unreported } =
            self.shared.follow(self.id, &self.targets, &lookups);
        let _operation = lookups.operation.take().or_else(|| self.begin_operation());
        self.shared.apply(self.id);
        let still_unreported = self.shared.unreported(&targets);
        // What inotify reports from now on may have changed since the look.
        let is_reported_now = |path: &Path| unreported.contains(path) && !still_unreported.contains(path);
        let is_new = |path: &Path| {
            // A directory whose names are looked up again shows in them.
            if is_reported_now(path) && lookups.directories.contains_key(path) {
                return false;
            }
            let key = lookups.key(path).map(|(directory, name)| (directory, name.to_owned()));
            key.is_some_and(|key| new_names.contains(&key))
                || is_reported_now(path)
                || path.parent().is_some_and(is_reported_now)
        };
        let is_current =
            lookups.names.keys().filter(|path| is_new(path)).all(|path| lookups.is_current(path));
        if !is_current {
            self.wakes.notify_one();
        }
        self.polls = !still_unreported.is_empty() || lookups.is_broken;
        (self.lookups, self.targets) = (lookups, targets);
        is_current
    }

    /// Watches where the paths lead now. Whatever happens after this call wakes [`Watch::changed`].
    pub fn arm(&mut self) {
        // A link may be swapped between its look-up and the watch on its directory: repeat until nothing changes.
        for _ in 0..MAX_LINKS {
            let operation = self.begin_operation();
            self.begin_look();
            let lookups = Lookups { operation, ..self.walk.look_up() };
            if self.follow(lookups) {
                break;
            }
        }
    }

    /// Returns once something may have changed since the last look.
    pub async fn changed(&self) -> Wake {
        if !self.polls {
            self.wakes.notified().await;
            return Wake::Event;
        }
        tokio::select! {
            () = self.wakes.notified() => Wake::Event,
            () = poll::next_round(self.shared.started) => Wake::Poll,
        }
    }

    /// Has `listener` learn of every name that appears or disappears in the directory in which `name` is looked up.
    pub fn listen(&self, name: &OsStr, listener: Arc<dyn NameListener>) {
        let directory =
            self.lookups.keys().find(|(_, looked_up)| *looked_up == name).map(|(directory, _)| directory);
        self.shared.index.lock().listen(self.id, directory, listener);
    }

    /// No longer counts files as open that were written to and not closed.
    pub fn forget_writers(&self) {
        self.shared.index.lock().forget_writers(self.id);
    }

    /// Whether inotify doesn't report every change.
    pub fn polls(&self) -> bool {
        self.polls
    }

    /// Registers that the file system of these paths is asked, until this is dropped.
    fn begin_operation(&self) -> Option<Operation> {
        self.walk.paths().first().map(|path| self.shared.pending.begin(path))
    }

    fn begin_look(&self) {
        // What has happened until now is seen by this look: it needs no further one.
        let _ = pin!(self.wakes.notified()).enable();
        self.shared.index.lock().begin_look(self.id);
    }

    /// Whether a file is not watched itself yet that has to be.
    fn has_unwatched_writers(&self, lookups: &Lookups) -> bool {
        let backend = lock(&self.shared.backend);
        let is_watched = |path: &Path, file: &RegularFile| {
            self.targets.get(path).is_some_and(|target| target.inode == file.inode)
        };
        lookups.files().any(|(path, file)| backend.is_in_noise(path) && !is_watched(path, file))
    }

    /// Whether a file has changed whose writers are known: one may not have finished.
    fn may_be_half_written(&self, lookups: &Lookups) -> bool {
        let backend = lock(&self.shared.backend);
        let is_known = |path: &Path, file: &RegularFile| {
            let directory = path.parent().and_then(|parent| lookups.directories.get_key_value(parent));
            backend.reports_writes(path, file.inode)
                || directory.is_some_and(|(path, it)| backend.reports_writes(path, it.inode))
        };
        let is_new = |path: &Path, file: &RegularFile| {
            self.lookups.names.get(path).is_none_or(|before| *before != Step::File(*file))
        };
        lookups.files().any(|(path, file)| is_new(path, file) && is_known(path, file))
    }
}

impl Drop for Watch {
    /// What it alone has watched is no longer watched from the next change on. Logs no recovery: at shutdown all watches
    /// are dropped.
    fn drop(&mut self) {
        self.shared.follow(self.id, &self.targets, &Lookups::default());
        self.shared.index.lock().remove(self.id);
    }
}

/// What has been noted down for a watch, and is not applied yet.
#[derive(Debug)]
struct Following {
    targets: Targets,
    /// About these no event woke the watch before.
    new_names: HashSet<Name>,
    /// Those of the targets where inotify doesn't report every change.
    unreported: BTreeSet<PathBuf>,
}

impl Shared {
    /// Notes down what watch `id` needs for `lookups`, and what of `before` it no longer needs.
    fn follow(&self, id: u64, before: &Targets, lookups: &Lookups) -> Following {
        let flaws = self.index.lock().take_flaws();
        let mut backend = lock(&self.backend);
        backend.note_flaws(flaws);
        let targets = backend.targets(lookups);
        let not_needed = before.keys().filter(|path| !targets.contains_key(*path));
        let unused: Vec<_> = not_needed.filter(|path| backend.release(id, path)).collect();
        backend.follow(id, &targets);
        let unreported = backend.unreported(&targets);
        drop(backend);
        let mut index = self.index.lock();
        unused.into_iter().for_each(|path| index.forget(path));
        let inodes = targets.iter().map(|(path, target)| (path, target.inode));
        let new_names = index.register(id, lookups, inodes);
        drop(index);
        Following { targets, new_names, unreported }
    }

    /// Makes the changes that are noted down, of whichever watches, and wakes those, except for `id`, that have to look
    /// again. May block where a file system doesn't answer.
    fn apply(&self, id: u64) {
        self.make_changes(id);
        // Another thread may be making the changes: then these watches poll until it has.
        let users = lock(&self.backend).take_unreported_users();
        self.wake(users, id);
    }

    fn wake(&self, users: BTreeSet<u64>, except: u64) {
        let index = self.index.lock();
        users.into_iter().filter(|user| *user != except).for_each(|user| index.wake(user));
    }

    /// Leaves the changes to the thread that is making some, if there is one.
    fn make_changes(&self, id: u64) {
        let Some(mut notifier) = try_lock(&self.notifier) else { return };
        loop {
            let changes = lock(&self.backend).take_changes();
            if changes.is_empty() {
                break;
            }
            for (report, mut change) in changes {
                // inotify would report changes by this machine only, and a file system that doesn't answer would stop it.
                change.watch.retain(|path| {
                    let is_local = lock(&self.backend).is_local(path);
                    let kind = if is_local { None } else { inotify::remote_file_system(path) };
                    kind.inspect(|kind| lock(&self.backend).settle_polled(path, kind)).is_none()
                });
                let mut outcomes = notifier.update(report, change);
                let is_misled = self.find_replaced(&mut outcomes);
                let users = lock(&self.backend).settle(report, outcomes);
                if is_misled {
                    // inotify reports an inode by one of its paths, and this one is in the index as another inode.
                    self.index.lock().wake_all();
                }
                self.wake(users, id);
            }
        }
        lock(&self.backend).log_recovery();
    }

    /// Notes which paths have led elsewhere than when they were looked up. True if there are any.
    fn find_replaced(&self, outcomes: &mut Outcomes) -> bool {
        let mut is_any = false;
        for (path, outcome) in outcomes {
            let expected = lock(&self.backend).inode(path);
            let Some(expected) = expected.filter(|_| matches!(outcome, Watching::Ok)) else { continue };
            if std::fs::symlink_metadata(path).map(|found| (found.dev(), found.ino())).ok() != Some(expected)
            {
                (*outcome, is_any) = (Watching::Replaced, true);
            }
        }
        is_any
    }

    fn unreported(&self, targets: &Targets) -> BTreeSet<PathBuf> {
        lock(&self.backend).unreported(targets)
    }

    /// Returns once the index has every event until now. False if inotify's threads are busy.
    fn catch_up(&self) -> bool {
        try_lock(&self.notifier).map(|mut notifier| notifier.flush()).is_some()
    }
}

#[cfg(test)]
mod tests;
