//! Noticing that a path leads somewhere else, or to other bytes, than before.
//!
//! A path is a chain of look-ups: each folder on the way, each link's target. The kubelet changes a mounted
//! file by swapping a link that lies two look-ups before it. Every folder in which something is looked up is
//! watched, and an event counts if it is about one of the names that are looked up there. A file that has other names
//! elsewhere (hard links, or a mount of that one file) is watched itself: who writes to it under another name does
//! nothing to the folder.
//!
//! One [`Watcher`] serves any number of [`Watch`]es. A folder is watched once, however many of them look something up
//! in it. Where the kernel does not tell of changes, the look-ups are compared every two seconds.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use notify::event::ModifyKind;
use notify::{Config, Event, EventKind, EventKindMask, RecommendedWatcher, RecursiveMode, Watcher as _};
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::fs::file::{self, Stamp};
use crate::metrics;

/// How often files are looked at where the kernel does not tell of changes.
const POLL: Duration = Duration::from_secs(2);
/// As many links as the kernel follows in one path.
const LINKS: usize = 40;

/// What the kernel is asked to tell of: not who opens what, which would wake us for every program that starts.
const EVENTS: EventKindMask = EventKindMask::CREATE
    .union(EventKindMask::REMOVE)
    .union(EventKindMask::MODIFY_DATA)
    .union(EventKindMask::MODIFY_META)
    .union(EventKindMask::MODIFY_NAME)
    .union(EventKindMask::ACCESS_CLOSE);

/// Device and inode: another folder at the same path needs a new watch, and one folder may have several paths.
type FolderId = (u64, u64);
/// What is watched, by path: folders, and files that have several names.
type Folders = BTreeMap<PathBuf, FolderId>;

/// No code panics while it holds one of these locks.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The kernel's ear. Clones share it.
#[derive(Clone, Debug)]
pub struct Watcher(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    index: Arc<Mutex<Index>>,
    /// Never locked on notify's thread: whoever holds it waits for that thread.
    kernel: Mutex<Kernel>,
    next: AtomicU64,
    started: Instant,
}

/// Who is to be woken by what. Locked on notify's thread for each event.
#[derive(Debug, Default)]
struct Index {
    folders: Folders,
    lookups: HashMap<FolderId, HashMap<OsString, BTreeSet<u64>>>,
    watches: HashMap<u64, Woken>,
    /// Folders that were removed or renamed, whose watches went with them.
    lost: BTreeSet<PathBuf>,
    #[cfg(test)]
    is_overflowing: bool,
}

/// One watch, as notify's thread sees it.
#[derive(Debug, Default)]
struct Woken {
    changed: Arc<Notify>,
    /// Its names in [`Index::lookups`].
    ways: Vec<(FolderId, OsString)>,
    /// Files that were written to and not closed since.
    written: HashSet<(FolderId, OsString)>,
    /// How many events woke it.
    events: u64,
}

impl Woken {
    fn wake(&mut self) {
        self.events += 1;
        self.changed.notify_one();
    }
}

#[derive(Debug, Default)]
struct Kernel {
    watcher: Option<RecommendedWatcher>,
    /// Who needs which folder.
    folders: BTreeMap<PathBuf, Watched>,
    /// The kernel refused something: it is not asked again before.
    rests_until: Option<Instant>,
    /// It was told that the kernel refuses, and it still refuses some of the folders.
    is_short: bool,
    /// File systems of which it was told that they are polled.
    told: HashSet<u64>,
    #[cfg(test)]
    is_deaf: bool,
}

#[derive(Debug)]
struct Watched {
    id: FolderId,
    users: BTreeSet<u64>,
    state: State,
}

/// How changes in a folder are noticed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// The kernel tells.
    Told,
    /// The kernel was not asked yet, or has no room; it is asked again.
    Refused,
    /// The kernel can't tell here.
    Silent,
}

impl Default for Watcher {
    fn default() -> Self {
        Self::new()
    }
}

impl Watcher {
    /// A watcher that follows nothing yet.
    pub fn new() -> Self {
        let (index, kernel, next) = (Arc::default(), Mutex::default(), AtomicU64::new(0));
        Self(Arc::new(Shared { index, kernel, next, started: Instant::now() }))
    }

    /// One that the kernel refuses.
    #[cfg(test)]
    pub(crate) fn deaf() -> Self {
        let watcher = Self::new();
        lock(&watcher.0.kernel).is_deaf = true;
        watcher
    }

    /// Returns once everybody is woken who is to be woken by what happened until now.
    #[cfg(test)]
    pub(crate) fn catch_up(&self) {
        self.0.catch_up();
    }

    /// How many folders the kernel tells of, and how many it does not tell of, or not of every change.
    pub fn count(&self) -> metrics::Watched {
        let kernel = lock(&self.0.kernel);
        let by_kernel = kernel.folders.values().filter(|watched| watched.state == State::Told).count();
        metrics::Watched { by_kernel, by_polling: kernel.folders.len() - by_kernel }
    }

    /// How many folders and files are watched.
    #[cfg(test)]
    pub(crate) fn watched(&self) -> usize {
        lock(&self.0.kernel).folders.len()
    }

    /// From now on nothing that happens is told, as if there was more of it than the kernel can hold.
    #[cfg(test)]
    pub(crate) fn overflow(&self) {
        lock(&self.0.index).is_overflowing = true;
    }

    /// That is told now, and what happens from now on.
    #[cfg(test)]
    pub(crate) fn recover(&self) {
        let event = Event::new(EventKind::Other).set_flag(notify::event::Flag::Rescan);
        self.0.catch_up();
        let mut index = lock(&self.0.index);
        index.is_overflowing = false;
        index.take(Ok(event));
    }

    /// Follows `paths`, which need not exist, as soon as it is armed.
    pub fn watch(&self, paths: Vec<PathBuf>) -> Watch {
        let id = self.0.next.fetch_add(1, Ordering::Relaxed);
        let changed = Arc::new(Notify::new());
        let woken = Woken { changed: Arc::clone(&changed), ..Woken::default() };
        lock(&self.0.index).watches.insert(id, woken);
        let (ways, folders, stamps) = (BTreeSet::new(), Folders::new(), Vec::new());
        let shared = Arc::clone(&self.0);
        Watch { shared, id, paths, changed, ways, folders, stamps, polls: false, is_fresh: false, events: 0 }
    }
}

/// What goes on with the files of a [`Watch`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activity {
    /// Nothing.
    None,
    /// Somebody has written to one of them before, and has not closed it.
    Open,
    /// Something has changed.
    Change,
}

/// Follows a set of paths. Dropping it ends that.
#[derive(Debug)]
pub struct Watch {
    shared: Arc<Shared>,
    id: u64,
    paths: Vec<PathBuf>,
    changed: Arc<Notify>,
    /// Every name that is looked up, with its folder.
    ways: BTreeSet<PathBuf>,
    folders: Folders,
    /// Of `ways`, while this watch polls.
    stamps: Vec<Stamp>,
    polls: bool,
    /// What was found last was new. A second change within the same tick of the file system's clock may show in no
    /// stamp, so it is looked at once more.
    is_fresh: bool,
    /// Those that were known when it was armed.
    events: u64,
}

impl Watch {
    /// Watches where the paths lead now. Whatever happens after this call wakes [`Watch::changed`].
    pub fn arm(&mut self) {
        // A link may be swapped between the look at it and the watch on its folder: look until it stands still.
        for _ in 0..LINKS {
            let found: Vec<_> = self.paths.iter().map(|path| lookups(path)).collect();
            let files = found.iter().filter_map(|ways| file_of_several_names(ways.last()?));
            let ways: BTreeSet<PathBuf> = found.iter().flatten().cloned().collect();
            let folders = ways.iter().filter_map(|path| folder(path.parent()?)).chain(files).collect();
            let is_same = ways == self.ways && folders == self.folders;
            if !is_same {
                self.shared.register(self.id, &ways, &folders);
            }
            let installed;
            (installed, self.polls) = self.shared.follow(self.id, &self.folders, &folders);
            (self.ways, self.folders) = (ways, folders);
            if is_same && !installed {
                break;
            }
        }
        if self.polls {
            let stamps = self.stamps();
            self.is_fresh = stamps != self.stamps;
            self.stamps = stamps;
        }
        self.events = lock(&self.shared.index).watches.get(&self.id).map_or(0, |woken| woken.events);
    }

    fn stamps(&self) -> Vec<Stamp> {
        let stamp = |path: &PathBuf| match std::fs::symlink_metadata(path) {
            // What changes in a folder shows in what is looked up there.
            Ok(found) if found.is_dir() => Some(((found.dev(), found.ino()), 0, (0, 0), (0, 0))),
            found => file::stamp(found),
        };
        self.ways.iter().map(stamp).collect()
    }

    /// Returns once something may have changed since [`Watch::arm`].
    pub async fn changed(&self) {
        if !self.polls {
            return self.changed.notified().await;
        }
        let looked = async {
            loop {
                // All watches look at the same moments: one wake-up for all.
                let since = self.shared.started.elapsed().as_nanos() % POLL.as_nanos();
                tokio::time::sleep(POLL - Duration::from_nanos(u64::try_from(since).unwrap_or_default()))
                    .await;
                if self.is_fresh || self.stamps() != self.stamps || self.shared.tells_again(&self.folders) {
                    return;
                }
            }
        };
        tokio::select! {
            () = self.changed.notified() => {}
            () = looked => {}
        }
    }

    /// What has happened since [`Watch::arm`]. Where files are polled, nobody knows.
    pub fn activity(&self) -> Activity {
        self.shared.catch_up();
        match lock(&self.shared.index).watches.get(&self.id) {
            Some(woken) if woken.events != self.events => Activity::Change,
            Some(woken) if !woken.written.is_empty() => Activity::Open,
            _ => Activity::None,
        }
    }

    /// Whoever still writes is not waited for any more.
    pub fn forget_writers(&self) {
        if let Some(woken) = lock(&self.shared.index).watches.get_mut(&self.id) {
            woken.written.clear();
        }
    }

    /// Whether the kernel does not tell of every change.
    pub fn polls(&self) -> bool {
        self.polls
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.shared.register(self.id, &BTreeSet::new(), &Folders::new());
        lock(&self.shared.index).watches.remove(&self.id);
        self.shared.follow(self.id, &self.folders, &Folders::new());
    }
}

impl Shared {
    /// Events about `ways` wake watch `id`, others no longer do.
    fn register(&self, id: u64, ways: &BTreeSet<PathBuf>, folders: &Folders) {
        let mut index = lock(&self.index);
        let index = &mut *index;
        let Some(woken) = index.watches.get_mut(&id) else { return };
        for (folder, name) in woken.ways.drain(..) {
            let Some(names) = index.lookups.get_mut(&folder) else { continue };
            if names.get_mut(&name).is_some_and(|ids| ids.remove(&id) && ids.is_empty()) {
                names.remove(&name);
            }
            if names.is_empty() {
                index.lookups.remove(&folder);
            }
        }
        for path in ways {
            let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else { continue };
            let Some(folder) = folders.get(parent) else { continue };
            let names = index.lookups.entry(*folder).or_default();
            names.entry(name.to_owned()).or_default().insert(id);
            woken.ways.push((*folder, name.to_owned()));
        }
        index.folders.extend(folders.iter().map(|(path, folder)| (path.clone(), *folder)));
    }

    /// Has the kernel tell of changes in `folders`, and no longer in those of `before` that nobody needs. Says whether
    /// something new is told of, and whether something is not.
    fn follow(&self, id: u64, before: &Folders, folders: &Folders) -> (bool, bool) {
        let mut kernel = lock(&self.kernel);
        let kernel = &mut *kernel;
        let lost = std::mem::take(&mut lock(&self.index).lost);
        for path in lost {
            kernel.lose(&path, None);
        }
        for path in before.keys().filter(|path| !folders.contains_key(*path)) {
            let Some(watched) = kernel.folders.get_mut(path) else { continue };
            watched.users.remove(&id);
            if watched.users.is_empty() {
                kernel.folders.remove(path);
                lock(&self.index).folders.remove(path);
                kernel.forget(path);
            }
        }
        let (mut installed, mut polls) = (false, false);
        for (path, folder) in folders {
            let new = || Watched { id: *folder, users: BTreeSet::new(), state: State::Refused };
            kernel.folders.entry(path.clone()).or_insert_with(new).users.insert(id);
            let state = kernel.lose(path, Some(*folder));
            if state == State::Refused {
                let state = kernel.ask(path, folder.0, &self.index);
                installed |= state == State::Told;
                if let Some(watched) = kernel.folders.get_mut(path) {
                    watched.state = state;
                }
                polls |= state != State::Told;
            } else {
                polls |= state == State::Silent;
            }
        }
        kernel.note_room();
        (installed, polls)
    }

    /// Returns once the index knows of everything that the kernel has told until now.
    fn catch_up(&self) {
        let mut kernel = lock(&self.kernel);
        let Some(watcher) = &mut kernel.watcher else { return };
        // notify reads the events before it answers, and passes them on before it takes the next message.
        for _ in 0..2 {
            let _ = watcher.update_paths(Vec::new());
        }
    }

    /// Whether the kernel, which refused to tell of some of `folders`, does so now.
    fn tells_again(&self, folders: &Folders) -> bool {
        let mut kernel = lock(&self.kernel);
        let is_refused =
            |path: &PathBuf| kernel.folders.get(path).is_some_and(|it| it.state == State::Refused);
        let Some((path, id)) = folders.iter().find(|(path, _)| is_refused(path)) else { return false };
        let state = kernel.ask(path, id.0, &self.index);
        if let Some(watched) = kernel.folders.get_mut(path) {
            watched.state = state;
        }
        state == State::Told
    }
}

impl Kernel {
    /// The watch of `path` went with its folder, unless that is still `now`. Gives the state.
    fn lose(&mut self, path: &Path, now: Option<FolderId>) -> State {
        let Some(watched) = self.folders.get_mut(path) else { return State::Refused };
        if now == Some(watched.id) {
            return watched.state;
        }
        watched.id = now.unwrap_or(watched.id);
        let was = std::mem::replace(&mut watched.state, State::Refused);
        if was != State::Refused {
            self.forget(path);
        }
        State::Refused
    }

    /// Has the kernel tell of changes in the folder at `path`, if it can.
    fn ask(&mut self, path: &Path, device: u64, index: &Arc<Mutex<Index>>) -> State {
        if let Some(kind) = silent(path) {
            if self.told.insert(device) {
                tracing::warn!(
                    folder = %path.display(),
                    every = ?POLL,
                    "on a file system of this kind ({kind}) the kernel does not tell of every change; files there are \
                     looked at regularly as well"
                );
            }
            // It does tell of what is changed on this machine.
            let _ = self.watch(path, index);
            return State::Silent;
        }
        if self.rests_until.is_some_and(|until| until > Instant::now()) {
            return State::Refused;
        }
        match self.watch(path, index) {
            Ok(()) => {
                self.rests_until = None;
                State::Told
            }
            // It has just gone. One that comes in its place may look the same: it needs a watch of its own.
            Err(error) if is_gone(&error) => State::Refused,
            Err(error) if is_forbidden(&error) => {
                if self.told.insert(device) {
                    tracing::warn!(
                        folder = %path.display(),
                        every = ?POLL,
                        "this folder may not be read, so the kernel does not tell of changes in it; what lies there is \
                         looked at regularly instead"
                    );
                }
                State::Silent
            }
            Err(error) => {
                if !std::mem::replace(&mut self.is_short, true) {
                    tracing::warn!(
                        %error,
                        folder = %path.display(),
                        every = ?POLL,
                        "the kernel does not tell of changed files: fs.inotify.max_user_watches or max_user_instances \
                         is used up; they are looked at regularly instead, until there is room again"
                    );
                }
                // A little less than a round, so that the next one asks again.
                self.rests_until = Some(Instant::now() + POLL / 2);
                State::Refused
            }
        }
    }

    /// Tells it once the kernel has taken all folders. One that is gone makes room for one other, which is no news.
    fn note_room(&mut self) {
        if self.is_short && self.folders.values().all(|watched| watched.state != State::Refused) {
            self.is_short = false;
            tracing::info!("the kernel tells of changed files again");
        }
    }

    fn watch(&mut self, path: &Path, index: &Arc<Mutex<Index>>) -> notify::Result<()> {
        #[cfg(test)]
        if self.is_deaf {
            return Err(notify::Error::new(notify::ErrorKind::MaxFilesWatch));
        }
        let watcher = match &mut self.watcher {
            Some(watcher) => watcher,
            None => {
                let index = Arc::clone(index);
                let take = move |event| lock(&index).take(event);
                let config = Config::default().with_event_kinds(EVENTS).with_follow_symlinks(false);
                self.watcher.insert(RecommendedWatcher::new(take, config)?)
            }
        };
        watcher.watch(path, RecursiveMode::NonRecursive)
    }

    fn forget(&mut self, path: &Path) {
        if let Some(watcher) = &mut self.watcher {
            // The kernel drops the watch of a folder that is deleted, so there may be none.
            let _ = watcher.unwatch(path);
        }
    }
}

impl Index {
    /// Runs on notify's thread.
    fn take(&mut self, event: notify::Result<Event>) {
        #[cfg(test)]
        if self.is_overflowing {
            return;
        }
        match event {
            Ok(event) if !event.need_rescan() => {
                for path in &event.paths {
                    self.wake(event.kind, path);
                }
            }
            // Events were lost: of anything.
            _ => {
                self.lost.extend(self.folders.keys().cloned());
                for woken in self.watches.values_mut() {
                    woken.written.clear();
                    woken.wake();
                }
            }
        }
    }

    fn wake(&mut self, kind: EventKind, path: &Path) {
        // What has several paths is watched once, and notify speaks of one of them.
        let Some(watched) = self.folders.get(path) else { return self.wake_at(kind, path) };
        let same = self.folders.iter().filter(|(_, id)| *id == watched);
        for path in same.map(|(path, _)| path.clone()).collect::<Vec<_>>() {
            self.wake_at(kind, &path);
        }
    }

    fn wake_at(&mut self, kind: EventKind, path: &Path) {
        let is_away = matches!(kind, EventKind::Remove(_) | EventKind::Modify(ModifyKind::Name(_)));
        if is_away && self.folders.contains_key(path) {
            self.lost.insert(path.to_owned());
        }
        let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else { return };
        let Some(folder) = self.folders.get(parent) else { return };
        let Some(ids) = self.lookups.get(folder).and_then(|names| names.get(name)) else { return };
        for id in ids {
            let Some(woken) = self.watches.get_mut(id) else { continue };
            if matches!(kind, EventKind::Modify(ModifyKind::Data(_))) {
                woken.written.insert((*folder, name.to_owned()));
            } else if !matches!(kind, EventKind::Modify(ModifyKind::Metadata(_))) {
                // Closed, or another file in its place.
                woken.written.remove(&(*folder, name.to_owned()));
            }
            woken.wake();
        }
    }
}

fn folder(path: &Path) -> Option<(PathBuf, FolderId)> {
    let found = std::fs::metadata(path).ok().filter(std::fs::Metadata::is_dir)?;
    Some((path.to_owned(), (found.dev(), found.ino())))
}

/// The plain file at `path`, if it can be written to under another name.
fn file_of_several_names(path: &Path) -> Option<(PathBuf, FolderId)> {
    use rustix::fs::{AtFlags, CWD, StatxAttributes, StatxFlags, statx};
    let found = std::fs::symlink_metadata(path).ok().filter(std::fs::Metadata::is_file)?;
    let is_mounted = || {
        let found = statx(CWD, path, AtFlags::SYMLINK_NOFOLLOW, StatxFlags::empty());
        found.is_ok_and(|found| found.stx_attributes.contains(StatxAttributes::MOUNT_ROOT))
    };
    (found.nlink() > 1 || is_mounted()).then(|| (path.to_owned(), (found.dev(), found.ino())))
}

fn is_gone(error: &notify::Error) -> bool {
    matches!(&error.kind, notify::ErrorKind::PathNotFound)
        || matches!(&error.kind, notify::ErrorKind::Io(source) if source.kind() == std::io::ErrorKind::NotFound)
}

/// A folder on the way that may be passed through but not listed.
fn is_forbidden(error: &notify::Error) -> bool {
    matches!(&error.kind, notify::ErrorKind::Io(source) if source.kind() == std::io::ErrorKind::PermissionDenied)
}

/// The kind of the file system at `path`, if others can change it without this kernel's knowledge.
fn silent(path: &Path) -> Option<&'static str> {
    let kind = rustix::fs::statfs(path).ok()?.f_type;
    silent_kind(u64::try_from(kind).unwrap_or_default())
}

/// Magic numbers from the kernel's `linux/magic.h`; CIFS and SMB2 have theirs in `fs/smb`.
fn silent_kind(magic: u64) -> Option<&'static str> {
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

/// Every name that is looked up on the way to `path`, each with its folder, links followed. It ends at the first that
/// is not there: what comes behind it can't come before it.
fn lookups(path: &Path) -> Vec<PathBuf> {
    let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let mut ahead: Vec<OsString> = Vec::new();
    let push_ahead = |ahead: &mut Vec<OsString>, path: &Path| {
        ahead.extend(path.components().rev().filter_map(|component| match component {
            Component::Normal(name) => Some(name.to_owned()),
            Component::ParentDir => Some(OsStr::new("..").to_owned()),
            _ => None,
        }));
    };
    push_ahead(&mut ahead, &absolute);
    let mut at = PathBuf::from("/");
    let mut found = Vec::new();
    let mut links = 0;
    while let Some(name) = ahead.pop() {
        if name == ".." {
            at.pop();
            continue;
        }
        let step = at.join(&name);
        found.push(step.clone());
        match std::fs::read_link(&step) {
            Ok(target) if links < LINKS => {
                links += 1;
                if target.is_absolute() {
                    at = PathBuf::from("/");
                }
                push_ahead(&mut ahead, &target);
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => break,
            _ => at = step,
        }
    }
    found
}
#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn the_way_to_a_mounted_file_goes_through_its_links() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().canonicalize().unwrap();
        std::fs::create_dir_all(root.join("volume/..2026")).unwrap();
        symlink("..2026", root.join("volume/..data")).unwrap();
        symlink("..data/key.pem", root.join("volume/key.pem")).unwrap();
        symlink(root.join("volume"), root.join("mount")).unwrap();
        let found = lookups(&root.join("mount/key.pem"));
        let found: Vec<_> =
            found.iter().filter_map(|path| path.strip_prefix(&root).ok()).filter_map(Path::to_str).collect();
        // Links are found by the names under which the kernel looks them up, in its order.
        assert_eq!(
            found,
            [
                "",
                "mount",
                "",
                "volume",
                "volume/key.pem",
                "volume/..data",
                "volume/..2026",
                "volume/..2026/key.pem"
            ]
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_poll_that_finds_something_is_followed_by_one_more_look() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let mut watch = Watcher::deaf().watch(vec![path.clone()]);
        for content in ["one", "two"] {
            std::fs::write(&path, content).unwrap();
            watch.arm();
            tokio::time::timeout(2 * POLL, watch.changed()).await.expect("one more look");
            watch.arm();
            let idle = tokio::time::timeout(10 * POLL, watch.changed()).await;
            assert!(idle.is_err(), "nothing has changed since");
        }
    }

    #[test]
    fn a_folder_that_has_just_gone_is_not_taken_for_one_that_is_watched() {
        let folder = tempfile::tempdir().unwrap();
        let gone = folder.path().join("gone");
        let state = Kernel::default().ask(&gone, 0, &Arc::default());
        assert_eq!(state, State::Refused, "one that comes in its place may look the same");
    }

    #[test]
    fn a_circle_of_links_ends() {
        let folder = tempfile::tempdir().unwrap();
        symlink("b", folder.path().join("a")).unwrap();
        symlink("a", folder.path().join("b")).unwrap();
        assert!(lookups(&folder.path().join("a")).len() < 2 * LINKS + 20);
    }
}
