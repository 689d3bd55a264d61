//! Noticing that a path leads somewhere else, or to other bytes, than before.
//!
//! A path is a chain of look-ups: each folder on the way, each link's target. The kubelet changes a mounted
//! file by swapping a link that lies two look-ups before it. Every folder in which something is looked up is
//! watched, and an event counts if it is about one of the names that are looked up there.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use notify::event::{AccessKind, AccessMode, ModifyKind};
use notify::{Event, EventKind, RecommendedWatcher, RecursiveMode, Watcher};
use tokio::sync::Notify;

/// How often files are looked at where the kernel does not tell of changes.
const POLL: Duration = Duration::from_secs(2);
/// As many links as the kernel follows in one path.
const LINKS: usize = 40;

/// Follows a set of paths.
#[derive(Debug)]
pub(super) struct Watch {
    paths: Vec<PathBuf>,
    shared: Arc<Shared>,
    watcher: Option<RecommendedWatcher>,
    folders: Folders,
}

/// Folders that are watched, with device and inode: another one at the same path needs a new watch.
type Folders = BTreeMap<PathBuf, (u64, u64)>;

#[derive(Debug, Default)]
struct Shared {
    changed: Notify,
    /// The names that matter, each with its folder.
    lookups: Mutex<BTreeSet<PathBuf>>,
    /// Those of them that were removed or renamed, whose watches went with them.
    lost: Mutex<BTreeSet<PathBuf>>,
}

/// No code panics while it holds one of these locks.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Watch {
    /// Follows `paths`, which need not exist.
    pub(super) fn new(paths: Vec<PathBuf>) -> Self {
        let shared = Arc::new(Shared::default());
        let watcher = notify::recommended_watcher({
            let shared = Arc::clone(&shared);
            move |event| shared.take(event)
        });
        let watcher = watcher.inspect_err(poll_instead).ok();
        Self { paths, shared, watcher, folders: Folders::new() }
    }

    /// Watches where the paths lead now. Whatever happens after this call wakes [`Watch::changed`].
    pub(super) fn arm(&mut self) {
        // A link may be swapped between the look at it and the watch on its folder: look until it stands still.
        for _ in 0..LINKS {
            let lookups: BTreeSet<PathBuf> = self.paths.iter().flat_map(|path| lookups(path)).collect();
            // Everybody opens what lies in `/`: events that only cost, unless something is yet to appear there.
            let is_quiet = |path: &&PathBuf| path.parent() != Some(Path::new("/")) || !path.exists();
            let folders = lookups.iter().filter(is_quiet).filter_map(|path| folder(path.parent()?)).collect();
            // A folder that is made again may get the device and inode of the one before: only the event tells.
            let lost = std::mem::take(&mut *lock(&self.shared.lost));
            self.folders.retain(|path, _| !lost.contains(path));
            let is_same = {
                let mut known = lock(&self.shared.lookups);
                std::mem::replace(&mut *known, lookups.clone()) == lookups
            };
            if is_same && folders == self.folders {
                return;
            }
            self.watch(folders);
        }
    }

    fn watch(&mut self, folders: Folders) {
        let Some(watcher) = &mut self.watcher else { return };
        let gone = self.folders.iter().filter(|(path, id)| folders.get(*path) != Some(id));
        for (path, _) in gone {
            // The kernel drops the watch of a folder that is deleted, so this may find none.
            let _ = watcher.unwatch(path);
        }
        let mut failure = None;
        let new = folders.iter().filter(|(path, id)| self.folders.get(*path) != Some(id));
        for (path, _) in new {
            match watcher.watch(path, RecursiveMode::NonRecursive) {
                Err(error) if !is_passing(&error) => failure = Some(error),
                _ => {}
            }
        }
        self.folders = folders;
        if let Some(error) = failure {
            poll_instead(&error);
            self.watcher = None;
        }
    }

    /// Returns once something may have changed since [`Watch::arm`].
    pub(super) async fn changed(&self) {
        match &self.watcher {
            Some(_) => self.shared.changed.notified().await,
            None => tokio::time::sleep(POLL).await,
        }
    }
}

fn folder(path: &Path) -> Option<(PathBuf, (u64, u64))> {
    let found = std::fs::metadata(path).ok().filter(std::fs::Metadata::is_dir)?;
    Some((path.to_owned(), (found.dev(), found.ino())))
}

/// A folder that has just gone, or one on the way that may be passed through but not listed: only a swap right
/// there goes unseen.
fn is_passing(error: &notify::Error) -> bool {
    use std::io::ErrorKind::{NotFound, PermissionDenied};
    match &error.kind {
        notify::ErrorKind::PathNotFound => true,
        notify::ErrorKind::Io(source) => matches!(source.kind(), NotFound | PermissionDenied),
        _ => false,
    }
}

fn poll_instead(error: &notify::Error) {
    tracing::warn!(
        %error,
        every = ?POLL,
        "the kernel does not tell of changed files (fs.inotify limits?); they are looked at regularly instead"
    );
}

impl Shared {
    /// Runs on notify's thread.
    fn take(&self, event: notify::Result<Event>) {
        let matters = match event {
            // Our own reading opens files: that must not wake us.
            Ok(Event { kind: EventKind::Access(kind), .. })
                if kind != AccessKind::Close(AccessMode::Write) =>
            {
                false
            }
            Ok(event) if event.need_rescan() || event.paths.is_empty() => true,
            Ok(event) => {
                let lookups = lock(&self.lookups);
                let mut ours = event.paths.into_iter().filter(|path| lookups.contains(path)).peekable();
                let matters = ours.peek().is_some();
                if matches!(event.kind, EventKind::Remove(_) | EventKind::Modify(ModifyKind::Name(_))) {
                    lock(&self.lost).extend(ours);
                }
                matters
            }
            Err(_) => true,
        };
        if matters {
            self.changed.notify_one();
        }
    }
}

/// Every name that is looked up on the way to `path`, each with its folder, links followed.
fn lookups(path: &Path) -> Vec<PathBuf> {
    let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let mut ahead: Vec<OsString> = Vec::new();
    let push_ahead = |ahead: &mut Vec<OsString>, path: &Path| {
        ahead.extend(path.components().rev().filter_map(|component| match component {
            Component::Normal(name) => Some(name.to_owned()),
            Component::ParentDir => Some("..".into()),
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

    #[test]
    fn a_circle_of_links_ends() {
        let folder = tempfile::tempdir().unwrap();
        symlink("b", folder.path().join("a")).unwrap();
        symlink("a", folder.path().join("b")).unwrap();
        assert!(lookups(&folder.path().join("a")).len() < 2 * LINKS + 20);
    }
}
