//! inotify through the `notify` crate: one watch per directory, its limits, and the recovery from them.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fmt;
use std::path::{Path, PathBuf};

use notify::{Config, EventHandler, EventKindMask, RecommendedWatcher, RecursiveMode, Watcher as _};
use tokio::time::Instant;

use super::WatchCount;
use super::lookup::{Inode, Inodes};
use super::poll;

/// The events requested from inotify. Not those of opening: they would wake us for every program that starts.
const EVENTS: EventKindMask = EventKindMask::CREATE
    .union(EventKindMask::REMOVE)
    .union(EventKindMask::MODIFY_DATA)
    .union(EventKindMask::MODIFY_META)
    .union(EventKindMask::MODIFY_NAME)
    .union(EventKindMask::ACCESS_CLOSE);

/// The source of events.
pub(super) trait Notifier: fmt::Debug + Send {
    fn watch(&mut self, path: &Path) -> notify::Result<()>;

    fn unwatch(&mut self, path: &Path);

    /// Returns once every event until now was handled.
    fn flush(&mut self);
}

/// inotify. Its instance is created with the first watch, because that can fail and is retried then.
#[derive(Debug)]
pub(super) struct Inotify<H> {
    handler: H,
    watcher: Option<RecommendedWatcher>,
}

impl<H> Inotify<H> {
    pub(super) fn new(handler: H) -> Self {
        Self { handler, watcher: None }
    }
}

impl<H: EventHandler + Clone + fmt::Debug> Notifier for Inotify<H> {
    fn watch(&mut self, path: &Path) -> notify::Result<()> {
        let watcher = match &mut self.watcher {
            Some(watcher) => watcher,
            None => {
                let config = Config::default().with_event_kinds(EVENTS).with_follow_symlinks(false);
                self.watcher.insert(RecommendedWatcher::new(self.handler.clone(), config)?)
            }
        };
        watcher.watch(path, RecursiveMode::NonRecursive)
    }

    fn unwatch(&mut self, path: &Path) {
        if let Some(watcher) = &mut self.watcher {
            // The kernel drops the watch of a directory that is deleted, so there may be none.
            let _ = watcher.unwatch(path);
        }
    }

    fn flush(&mut self) {
        let Some(watcher) = &mut self.watcher else { return };
        // notify reads the events before it answers, and handles them before it takes the next message.
        for _ in 0..2 {
            let _ = watcher.update_paths(Vec::new());
        }
    }
}

/// How changes in a directory are noticed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Inotify,
    /// By polling: inotify was not asked yet, or has no watch left. It is asked again.
    Refused,
    /// By polling, because inotify can't report every change here.
    Polled,
}

#[derive(Debug)]
struct Watched {
    inode: Inode,
    /// The watches that need it.
    users: BTreeSet<u64>,
    mode: Mode,
}

/// What [`Backend::follow`] did.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Followed {
    /// Inotify reports changes in a directory in which it didn't before.
    pub(super) is_new: bool,
    /// Inotify doesn't report every change.
    pub(super) polls: bool,
}

/// What is watched, for which watches, and how.
#[derive(Debug)]
pub(super) struct Backend {
    notifier: Box<dyn Notifier>,
    watched: BTreeMap<PathBuf, Watched>,
    /// Inotify refused a watch, and is not asked again before.
    retry_at: Option<Instant>,
    /// The limit was logged, and inotify still refuses some of the directories.
    is_exhausted: bool,
    /// The devices whose polling was logged.
    logged: HashSet<u64>,
}

impl Backend {
    pub(super) fn new(notifier: Box<dyn Notifier>) -> Self {
        let (watched, logged) = (BTreeMap::new(), HashSet::new());
        Self { notifier, watched, retry_at: None, is_exhausted: false, logged }
    }

    pub(super) fn count(&self) -> WatchCount {
        let inotify = self.watched.values().filter(|watched| watched.mode == Mode::Inotify).count();
        WatchCount { inotify, polling: self.watched.len() - inotify }
    }

    pub(super) fn flush(&mut self) {
        self.notifier.flush();
    }

    /// Watches `inodes` for watch `id`.
    pub(super) fn follow(&mut self, id: u64, inodes: &Inodes) -> Followed {
        let mut followed = Followed::default();
        for (path, inode) in inodes {
            let new = || Watched { inode: *inode, users: BTreeSet::new(), mode: Mode::Refused };
            self.watched.entry(path.clone()).or_insert_with(new).users.insert(id);
            let mut mode = self.replace(path, *inode);
            if mode == Mode::Refused {
                mode = self.request(path, *inode);
                followed.is_new |= mode == Mode::Inotify;
            }
            followed.polls |= mode != Mode::Inotify;
        }
        followed
    }

    /// Watch `id` no longer needs what lies at `path`. True if no other one does.
    pub(super) fn release(&mut self, id: u64, path: &Path) -> bool {
        let Some(watched) = self.watched.get_mut(path) else { return false };
        watched.users.remove(&id);
        let is_unused = watched.users.is_empty();
        if is_unused {
            self.watched.remove(path);
            self.notifier.unwatch(path);
        }
        is_unused
    }

    /// The directory at `path` was removed or renamed, and its inotify watch with it.
    pub(super) fn lose(&mut self, path: &Path) {
        let Some(watched) = self.watched.get_mut(path) else { return };
        if std::mem::replace(&mut watched.mode, Mode::Refused) != Mode::Refused {
            self.notifier.unwatch(path);
        }
    }

    /// The mode for `path`, which is `inode` now: a new one there needs a new inotify watch.
    fn replace(&mut self, path: &Path, inode: Inode) -> Mode {
        let Some(watched) = self.watched.get_mut(path) else { return Mode::Refused };
        if watched.inode == inode {
            return watched.mode;
        }
        watched.inode = inode;
        self.lose(path);
        Mode::Refused
    }

    /// Whether inotify, which refused some of `inodes`, takes one now.
    pub(super) fn retry(&mut self, inodes: &Inodes) -> bool {
        let is_refused =
            |path: &PathBuf| self.watched.get(path).is_some_and(|watched| watched.mode == Mode::Refused);
        let Some((path, inode)) = inodes.iter().find(|(path, _)| is_refused(path)) else { return false };
        self.request(path, *inode) == Mode::Inotify
    }

    fn request(&mut self, path: &Path, inode: Inode) -> Mode {
        let mode = self.mode_of(path, inode.0);
        if let Some(watched) = self.watched.get_mut(path) {
            watched.mode = mode;
        }
        mode
    }

    /// Adds an inotify watch for the directory at `path`, if possible.
    fn mode_of(&mut self, path: &Path, device: u64) -> Mode {
        if let Some(kind) = remote_file_system(path) {
            if self.logged.insert(device) {
                tracing::warn!(
                    directory = %path.display(),
                    "inotify doesn't report every change on this file system ({kind}), polling every {:?}",
                    poll::INTERVAL
                );
            }
            // It does report changes by this machine.
            let _ = self.notifier.watch(path);
            return Mode::Polled;
        }
        if self.retry_at.is_some_and(|at| at > Instant::now()) {
            return Mode::Refused;
        }
        match self.notifier.watch(path) {
            Ok(()) => {
                self.retry_at = None;
                Mode::Inotify
            }
            // It has just been removed. Its successor may have the same inode number, and needs a watch of its own.
            Err(error) if is_gone(&error) => Mode::Refused,
            Err(error) if is_forbidden(&error) => {
                if self.logged.insert(device) {
                    tracing::warn!(
                        directory = %path.display(),
                        "directory not readable: inotify unavailable for it, polling every {:?}",
                        poll::INTERVAL
                    );
                }
                Mode::Polled
            }
            Err(error) => {
                if !std::mem::replace(&mut self.is_exhausted, true) {
                    tracing::warn!(
                        %error,
                        directory = %path.display(),
                        "inotify limit reached (fs.inotify.max_user_watches or max_user_instances), polling every {:?}",
                        poll::INTERVAL
                    );
                }
                // A little less than a round, so that the next one asks again.
                self.retry_at = Some(Instant::now() + poll::INTERVAL / 2);
                Mode::Refused
            }
        }
    }

    /// Logs the recovery once inotify has taken all directories. A removed directory frees one watch for one other
    /// directory, which is no recovery.
    pub(super) fn log_recovery(&mut self) {
        if self.is_exhausted && self.watched.values().all(|watched| watched.mode != Mode::Refused) {
            self.is_exhausted = false;
            tracing::info!("inotify available again, polling stopped");
        }
    }
}

fn is_gone(error: &notify::Error) -> bool {
    matches!(&error.kind, notify::ErrorKind::PathNotFound)
        || matches!(&error.kind, notify::ErrorKind::Io(source) if source.kind() == std::io::ErrorKind::NotFound)
}

/// A directory on the way that may be passed through but not listed.
fn is_forbidden(error: &notify::Error) -> bool {
    matches!(&error.kind, notify::ErrorKind::Io(source) if source.kind() == std::io::ErrorKind::PermissionDenied)
}

/// The kind of the file system at `path`, if it can change without this kernel's knowledge.
fn remote_file_system(path: &Path) -> Option<&'static str> {
    let kind = rustix::fs::statfs(path).ok()?.f_type;
    remote_kind(u64::try_from(kind).unwrap_or_default())
}

/// Magic numbers from the kernel's `linux/magic.h`; CIFS and SMB2 have theirs in `fs/smb`.
fn remote_kind(magic: u64) -> Option<&'static str> {
    let kinds = [
        (0x6969, "NFS"),
        (0xff53_4d42, "CIFS"),
        (0xfe53_4d42, "SMB2"),
        (0x0102_1997, "9p"),
        (0x6573_5546, "FUSE"),
        (0x00c3_6400, "Ceph"),
        (0x5346_414f, "AFS"),
    ];
    kinds.into_iter().find(|(number, _)| *number == magic & 0xffff_ffff).map(|(_, name)| name)
}
