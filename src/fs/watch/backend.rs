//! What is watched, for which watches, and how. Nothing here touches a disk: changes are noted down until a thread that
//! may wait makes them.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::time::Instant;

use super::WatchCount;
use super::index::Flaw;
use super::inotify::{Change, Outcomes, Report, Watching};
use super::poll;
use crate::fs::lookup::Inode;
use crate::fs::walk::Lookups;

/// What is to be watched, by path: directories, and files that are watched themselves.
pub(super) type Targets = BTreeMap<PathBuf, Target>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Target {
    pub(super) inode: Inode,
    report: Report,
}

/// How changes in a directory are noticed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Inotify,
    /// By polling: inotify has not answered yet, or has no watch left. It is asked again.
    Refused,
    /// By polling, because inotify can't report every change here.
    Polled,
}

#[derive(Debug)]
struct Watched {
    inode: Inode,
    /// The watches that need it, and what they need.
    users: BTreeMap<u64, Report>,
    /// Other programs write to files in it that no watch is for.
    is_noisy: bool,
    mode: Mode,
    report: Report,
}

impl Watched {
    /// What all of its users together need.
    fn needed(&self) -> Report {
        let needed = self.users.values().max().filter(|_| !self.is_noisy);
        needed.copied().unwrap_or(Report::Names)
    }

    /// Whether inotify reports what a user needs that needs `report`.
    fn reports(&self, report: Report) -> bool {
        self.mode == Mode::Inotify && (self.is_noisy || self.report >= report)
    }
}

#[derive(Debug, Default)]
pub(super) struct Backend {
    watched: BTreeMap<PathBuf, Watched>,
    /// What inotify has to be told.
    changes: BTreeMap<Report, Change>,
    /// What inotify no longer watches, since [`Backend::take_unreported_users`].
    lost: BTreeSet<PathBuf>,
    /// Inotify refused a watch, and is not asked again before.
    retry_at: Option<Instant>,
    /// Inotify's limit is reached, and it still refuses some of the directories.
    is_exhausted: bool,
    /// How many of the agent's backends are exhausted: the limit is logged once for all of them.
    exhausted: Arc<AtomicUsize>,
    /// The devices whose polling was logged.
    logged: HashSet<u64>,
}

impl Backend {
    /// Another one of the same agent.
    pub(super) fn apart(&self) -> Self {
        let mut apart = Self::default();
        apart.exhausted = Arc::clone(&self.exhausted);
        apart
    }

    pub(super) fn count(&self) -> WatchCount {
        let inotify = self.watched.values().filter(|watched| watched.reports(watched.needed())).count();
        WatchCount { inotify, polling: self.watched.len() - inotify }
    }

    /// What to watch for `lookups`: their directories; and files that can be written to under another name, or that are
    /// in a directory where other files are written to all the time.
    pub(super) fn targets(&self, lookups: &Lookups) -> Targets {
        let directories = lookups.directories.iter().map(|(path, directory)| {
            let report = if directory.holds_files { Report::Content } else { Report::Names };
            (path.clone(), Target { inode: directory.inode, report })
        });
        let files = lookups.files().filter(|(path, file)| file.has_several_names || self.is_in_noise(path));
        let files =
            files.map(|(path, file)| (path.clone(), Target { inode: file.inode, report: Report::Content }));
        directories.chain(files).collect()
    }

    /// Whether `directory` is not watched for writes, because other programs write to files in it that no watch is for.
    pub(super) fn is_noisy(&self, directory: &Path) -> bool {
        self.watched.get(directory).is_some_and(|watched| watched.is_noisy)
    }

    /// Whether the file at `path` is in such a directory.
    pub(super) fn is_in_noise(&self, path: &Path) -> bool {
        path.parent().is_some_and(|directory| self.is_noisy(directory))
    }

    /// Whether inotify reports writes to what is at `path`, or in it, if that is still `inode`.
    pub(super) fn reports_writes(&self, path: &Path, inode: Inode) -> bool {
        self.watched.get(path).is_some_and(|watched| {
            watched.inode == inode && watched.report == Report::Content && watched.mode == Mode::Inotify
        })
    }

    pub(super) fn note_flaws(&mut self, flaws: BTreeMap<PathBuf, Flaw>) {
        for (path, flaw) in flaws {
            match (flaw, self.watched.get_mut(&path)) {
                (Flaw::Lost, _) => self.lose(&path),
                (Flaw::Noisy, Some(watched)) => watched.is_noisy = true,
                (Flaw::Noisy, None) => {}
            }
        }
    }

    /// Watches `targets` for watch `id` once the changes are made.
    pub(super) fn follow(&mut self, id: u64, targets: &Targets) {
        for (path, target) in targets {
            let inode = target.inode;
            let new = || Watched {
                inode,
                users: BTreeMap::new(),
                is_noisy: false,
                mode: Mode::Refused,
                report: target.report,
            };
            let watched = self.watched.entry(path.clone()).or_insert_with(new);
            watched.users.insert(id, target.report);
            let report = watched.needed();
            let is_due = self.retry_at.is_none_or(|at| at <= Instant::now());
            let is_same = watched.inode == inode;
            if is_same && watched.mode == Mode::Inotify && watched.report < report && !is_due {
                // Inotify might refuse more now: those who need no more keep what there is.
                continue;
            }
            if !is_same || watched.report != report {
                self.lose(path);
            }
            let Some(watched) = self.watched.get_mut(path) else { continue };
            (watched.inode, watched.report) = (inode, report);
            let wanted = &mut self.changes.entry(report).or_default().watch;
            if watched.mode == Mode::Refused && is_due && !wanted.contains(path) {
                wanted.push(path.clone());
            }
        }
    }

    /// Watch `id` no longer needs what lies at `path`. True if no other one does.
    pub(super) fn release(&mut self, id: u64, path: &Path) -> bool {
        let Some(watched) = self.watched.get_mut(path) else { return false };
        watched.users.remove(&id);
        let is_unused = watched.users.is_empty();
        if is_unused {
            self.lose(path);
            self.watched.remove(path);
        }
        is_unused
    }

    /// What inotify watches at `path` is no longer what is to be watched.
    fn lose(&mut self, path: &Path) {
        let Some(watched) = self.watched.get_mut(path) else { return };
        let change = self.changes.entry(watched.report).or_default();
        change.watch.retain(|wanted| wanted != path);
        // Another thread may be about to watch it.
        let mode = std::mem::replace(&mut watched.mode, Mode::Refused);
        if mode != Mode::Polled {
            change.unwatch.push(path.to_owned());
        }
        if mode == Mode::Inotify {
            self.lost.insert(path.to_owned());
        }
    }

    /// The watches that need what inotify has stopped watching since the last call, and does not watch again: they don't
    /// poll yet.
    pub(super) fn take_unreported_users(&mut self) -> BTreeSet<u64> {
        let lost = std::mem::take(&mut self.lost);
        let lost = lost.iter().filter_map(|path| self.watched.get(path));
        lost.filter(|watched| watched.mode != Mode::Inotify)
            .flat_map(|watched| watched.users.keys().copied())
            .collect()
    }

    /// Those of `targets` where inotify doesn't report every change.
    pub(super) fn unreported(&self, targets: &Targets) -> BTreeSet<PathBuf> {
        let is_reported = |path: &Path, target: &Target| {
            self.watched.get(path).is_some_and(|watched| watched.reports(target.report))
        };
        let unreported = targets.iter().filter(|(path, target)| !is_reported(path, target));
        unreported.map(|(path, _)| path.clone()).collect()
    }

    /// What inotify has to be told since the last call.
    pub(super) fn take_changes(&mut self) -> BTreeMap<Report, Change> {
        let mut changes = std::mem::take(&mut self.changes);
        changes.retain(|_, change| *change != Change::default());
        changes
    }

    /// What is to be watched at `path`.
    pub(super) fn inode(&self, path: &Path) -> Option<Inode> {
        self.watched.get(path).map(|watched| watched.inode)
    }

    /// Whether inotify watches another directory of the same file system.
    pub(super) fn is_local(&self, path: &Path) -> bool {
        let Some((device, _)) = self.inode(path) else { return false };
        let is_same = |watched: &Watched| watched.mode == Mode::Inotify && watched.inode.0 == device;
        self.watched.values().any(is_same)
    }

    /// Notes that `path` is on a file system of this `kind`, whose changes inotify doesn't report.
    pub(super) fn settle_polled(&mut self, path: &Path, kind: &str) {
        let Some(watched) = self.watched.get_mut(path) else { return };
        watched.mode = Mode::Polled;
        if self.logged.insert(watched.inode.0) {
            tracing::warn!(
                directory = %path.display(),
                "inotify doesn't report every change on this file system ({kind}), polling every {:?}",
                poll::INTERVAL
            );
        }
    }

    /// Notes what came of a change. Returns the watches that need what inotify reports from now on: its changes may have
    /// gone unnoticed until now.
    pub(super) fn settle(&mut self, report: Report, outcomes: Outcomes) -> BTreeSet<u64> {
        let mut users = BTreeSet::new();
        for (path, outcome) in outcomes {
            let Some(watched) = self.watched.get_mut(&path).filter(|watched| watched.report == report) else {
                // It was released meanwhile.
                if matches!(outcome, Watching::Ok | Watching::Replaced) {
                    self.changes.entry(report).or_default().unwatch.push(path);
                }
                continue;
            };
            match outcome {
                Watching::Ok => {
                    watched.mode = Mode::Inotify;
                    users.extend(watched.users.keys());
                    self.retry_at = None;
                }
                Watching::Gone => {}
                Watching::Replaced => self.changes.entry(report).or_default().unwatch.push(path),
                Watching::Forbidden => {
                    watched.mode = Mode::Polled;
                    if self.logged.insert(watched.inode.0) {
                        tracing::warn!(
                            directory = %path.display(),
                            "directory not readable: inotify unavailable for it, polling every {:?}",
                            poll::INTERVAL
                        );
                    }
                }
                Watching::Limit(error) => {
                    let is_new = !std::mem::replace(&mut self.is_exhausted, true);
                    if is_new && self.exhausted.fetch_add(1, Ordering::Relaxed) == 0 {
                        tracing::warn!(
                            %error,
                            directory = %path.display(),
                            "inotify limit reached (fs.inotify.max_user_watches or max_user_instances), polling every {:?}",
                            poll::INTERVAL
                        );
                    }
                    // A little less than a round, so that the next one asks again.
                    self.retry_at = Some(Instant::now() + poll::INTERVAL / 2);
                }
            }
        }
        users
    }

    /// Logs the recovery once inotify has taken all directories. A removed directory frees one watch for one other
    /// directory, which is no recovery.
    pub(super) fn log_recovery(&mut self) {
        let is_settled =
            |watched: &Watched| watched.mode == Mode::Polled || watched.reports(watched.needed());
        if self.is_exhausted && self.watched.values().all(is_settled) {
            self.is_exhausted = false;
            if self.exhausted.fetch_sub(1, Ordering::Relaxed) == 1 {
                tracing::info!("inotify available again, polling stopped");
            }
        }
    }
}

impl Drop for Backend {
    fn drop(&mut self) {
        if self.is_exhausted {
            self.exhausted.fetch_sub(1, Ordering::Relaxed);
        }
    }
}
