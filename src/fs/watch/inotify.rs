//! inotify through the `notify` crate: two instances, since one has the same events for all that it watches.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::{fmt, io};

use notify::{
    Config, ErrorKind, EventHandler, EventKindMask, PathOp, RecommendedWatcher, RecursiveMode,
    WatchPathConfig, Watcher as _,
};

/// What inotify reports of a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Report {
    /// That names appear, disappear or change: for the directories on the way to a file.
    Names,
    /// That also, and writes to its files.
    Content,
}

impl Report {
    /// The events requested from inotify. Not those of opening: they would wake us for every program that starts.
    fn events(self) -> EventKindMask {
        let names = EventKindMask::CREATE
            .union(EventKindMask::REMOVE)
            .union(EventKindMask::MODIFY_META)
            .union(EventKindMask::MODIFY_NAME);
        match self {
            Self::Names => names,
            Self::Content => names.union(EventKindMask::MODIFY_DATA).union(EventKindMask::ACCESS_CLOSE),
        }
    }
}

/// Paths that are no longer watched, and then those that are from now on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Change {
    pub(super) unwatch: Vec<PathBuf>,
    pub(super) watch: Vec<PathBuf>,
}

/// What came of watching a path.
#[derive(Debug)]
pub(super) enum Watching {
    Ok,
    /// It has just been removed. Its successor may have the same inode number, and needs a watch of its own.
    Gone,
    /// Something else is at this path by now, and is watched instead.
    Replaced,
    /// A directory on the way that may be passed through but not listed.
    Forbidden,
    /// A limit is reached. The paths behind this one were not tried.
    Limit(notify::Error),
}

impl Watching {
    fn failed(error: notify::Error) -> Self {
        match &error.kind {
            ErrorKind::PathNotFound => Self::Gone,
            ErrorKind::Io(source) if source.kind() == io::ErrorKind::NotFound => Self::Gone,
            ErrorKind::Io(source) if source.kind() == io::ErrorKind::PermissionDenied => Self::Forbidden,
            _ => Self::Limit(error),
        }
    }
}

/// What came of each path that was tried.
pub(super) type Outcomes = BTreeMap<PathBuf, Watching>;

/// The source of events.
pub(super) trait Notifier: fmt::Debug + Send {
    fn update(&mut self, report: Report, change: Change) -> Outcomes;

    /// Returns once every event until now was handled.
    fn flush(&mut self);
}

/// inotify. Its instances are created with their first watches, because that can fail and is retried then.
#[derive(Debug)]
pub(super) struct Inotify<H> {
    handler: H,
    names: Option<RecommendedWatcher>,
    content: Option<RecommendedWatcher>,
}

impl<H> Inotify<H> {
    pub(super) fn new(handler: H) -> Self {
        Self { handler, names: None, content: None }
    }
}

impl<H: EventHandler + Clone + fmt::Debug> Inotify<H> {
    fn watcher(&mut self, report: Report) -> notify::Result<&mut RecommendedWatcher> {
        let watcher = match report {
            Report::Names => &mut self.names,
            Report::Content => &mut self.content,
        };
        match watcher {
            Some(watcher) => Ok(watcher),
            None => {
                let config = Config::default().with_event_kinds(report.events()).with_follow_symlinks(false);
                Ok(watcher.insert(RecommendedWatcher::new(self.handler.clone(), config)?))
            }
        }
    }
}

impl<H: EventHandler + Clone + fmt::Debug> Notifier for Inotify<H> {
    fn update(&mut self, report: Report, change: Change) -> Outcomes {
        let Change { unwatch, watch } = change;
        let watcher = match self.watcher(report) {
            Ok(watcher) => watcher,
            Err(error) => return watch.into_iter().take(1).zip([Watching::Limit(error)]).collect(),
        };
        let mut outcomes: Outcomes = watch.iter().map(|path| (path.clone(), Watching::Ok)).collect();
        let config = || WatchPathConfig::new(RecursiveMode::NonRecursive).with_dereference_symlinks(false);
        let watch = watch.into_iter().map(|path| PathOp::Watch(path, config()));
        let mut left: Vec<_> = unwatch.into_iter().map(PathOp::Unwatch).chain(watch).collect();
        while !left.is_empty() {
            let Err(error) = watcher.update_paths(left) else { break };
            left = error.remaining;
            // The kernel drops the watch of a directory that is deleted, so there may be none to drop.
            let Some(PathOp::Watch(path, _)) = error.origin else { continue };
            let outcome = Watching::failed(error.source);
            if matches!(outcome, Watching::Limit(_)) {
                for untried in left.drain(..) {
                    outcomes.remove(untried.as_path());
                }
            }
            outcomes.insert(path, outcome);
        }
        outcomes
    }

    fn flush(&mut self) {
        for watcher in [&mut self.names, &mut self.content].into_iter().flatten() {
            // notify reads the events before it answers, and handles them before it takes the next message.
            for _ in 0..2 {
                let _ = watcher.update_paths(Vec::new());
            }
        }
    }
}

/// The kind of the file system at `path`, if it can change without this kernel's knowledge.
pub(super) fn remote_file_system(path: &Path) -> Option<&'static str> {
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
