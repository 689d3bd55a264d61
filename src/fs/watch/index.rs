//! Maps inotify events to the watches they wake.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

use notify::event::ModifyKind;
use notify::{Event, EventHandler, EventKind};
use tokio::sync::Notify;

use super::lock;
use super::lookup::{Inode, Inodes, Lookups};

/// What happened to the files of a [`Watch`](super::Watch).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activity {
    None,
    /// Nothing new, but one of the files was written to earlier and is still open.
    Open,
    Change,
}

/// The index, as inotify's thread and the watches share it.
#[derive(Clone, Debug, Default)]
pub(super) struct SharedIndex(Arc<Mutex<Index>>);

impl SharedIndex {
    /// Inotify's thread takes this lock for each event: nothing that waits for that thread may hold it.
    pub(super) fn lock(&self) -> MutexGuard<'_, Index> {
        lock(&self.0)
    }
}

impl EventHandler for SharedIndex {
    /// Runs on inotify's thread.
    fn handle_event(&mut self, event: notify::Result<Event>) {
        self.lock().handle(event);
    }
}

#[derive(Debug, Default)]
pub(super) struct Index {
    inodes: Inodes,
    /// The watches that look a name up, by its directory.
    watches_of: HashMap<Inode, HashMap<OsString, BTreeSet<u64>>>,
    watches: HashMap<u64, Registered>,
    /// Directories that were removed or renamed, and their inotify watches with them.
    removed: BTreeSet<PathBuf>,
}

/// A watch, as the index knows it.
#[derive(Debug, Default)]
struct Registered {
    changed: Arc<Notify>,
    /// Its names in [`Index::watches_of`].
    names: Vec<(Inode, OsString)>,
    /// Files that were written to, and not closed since.
    written: HashSet<(Inode, OsString)>,
    /// How many events woke it.
    events: u64,
}

impl Registered {
    fn wake(&mut self) {
        self.events += 1;
        self.changed.notify_one();
    }
}

impl Index {
    /// Adds watch `id`, and returns what wakes it.
    pub(super) fn add(&mut self, id: u64) -> Arc<Notify> {
        Arc::clone(&self.watches.entry(id).or_default().changed)
    }

    /// From now on, events about `lookups` wake watch `id`, and no others.
    pub(super) fn register(&mut self, id: u64, lookups: &Lookups) {
        let Some(registered) = self.watches.get_mut(&id) else { return };
        for (directory, name) in registered.names.drain(..) {
            let Some(names) = self.watches_of.get_mut(&directory) else { continue };
            if names.get_mut(&name).is_some_and(|ids| ids.remove(&id) && ids.is_empty()) {
                names.remove(&name);
            }
            if names.is_empty() {
                self.watches_of.remove(&directory);
            }
        }
        for path in &lookups.names {
            let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else { continue };
            let Some(directory) = lookups.inodes.get(parent) else { continue };
            let names = self.watches_of.entry(*directory).or_default();
            names.entry(name.to_owned()).or_default().insert(id);
            registered.names.push((*directory, name.to_owned()));
        }
        self.inodes.extend(lookups.inodes.iter().map(|(path, inode)| (path.clone(), *inode)));
    }

    pub(super) fn remove(&mut self, id: u64) {
        self.register(id, &Lookups::default());
        self.watches.remove(&id);
    }

    /// No watch needs `path` now.
    pub(super) fn forget(&mut self, path: &Path) {
        self.inodes.remove(path);
    }

    /// Directories that were removed or renamed since the last call.
    pub(super) fn take_removed(&mut self) -> BTreeSet<PathBuf> {
        std::mem::take(&mut self.removed)
    }

    /// How many events woke watch `id`.
    pub(super) fn events(&self, id: u64) -> u64 {
        self.watches.get(&id).map_or(0, |registered| registered.events)
    }

    /// What happened to the files of watch `id` since it had counted so many `events`.
    pub(super) fn activity(&self, id: u64, events: u64) -> Activity {
        match self.watches.get(&id) {
            Some(registered) if registered.events != events => Activity::Change,
            Some(registered) if !registered.written.is_empty() => Activity::Open,
            _ => Activity::None,
        }
    }

    pub(super) fn forget_writers(&mut self, id: u64) {
        if let Some(registered) = self.watches.get_mut(&id) {
            registered.written.clear();
        }
    }

    pub(super) fn handle(&mut self, event: notify::Result<Event>) {
        match event {
            Ok(event) if !event.need_rescan() => {
                for path in &event.paths {
                    self.wake(event.kind, path);
                }
            }
            // Events were lost, about any of the directories.
            _ => {
                self.removed.extend(self.inodes.keys().cloned());
                for registered in self.watches.values_mut() {
                    registered.written.clear();
                    registered.wake();
                }
            }
        }
    }

    fn wake(&mut self, kind: EventKind, path: &Path) {
        // An inode with several paths has one inotify watch, and notify reports one of the paths.
        let Some(inode) = self.inodes.get(path) else { return self.wake_at(kind, path) };
        let same = self.inodes.iter().filter(|(_, other)| *other == inode);
        for path in same.map(|(path, _)| path.clone()).collect::<Vec<_>>() {
            self.wake_at(kind, &path);
        }
    }

    fn wake_at(&mut self, kind: EventKind, path: &Path) {
        let is_away = matches!(kind, EventKind::Remove(_) | EventKind::Modify(ModifyKind::Name(_)));
        if is_away && self.inodes.contains_key(path) {
            self.removed.insert(path.to_owned());
        }
        let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else { return };
        let Some(directory) = self.inodes.get(parent) else { return };
        let Some(ids) = self.watches_of.get(directory).and_then(|names| names.get(name)) else { return };
        for id in ids {
            let Some(registered) = self.watches.get_mut(id) else { continue };
            if matches!(kind, EventKind::Modify(ModifyKind::Data(_))) {
                registered.written.insert((*directory, name.to_owned()));
            } else if !matches!(kind, EventKind::Modify(ModifyKind::Metadata(_))) {
                // The file was closed, or replaced by another one.
                registered.written.remove(&(*directory, name.to_owned()));
            }
            registered.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use notify::event::{AccessKind, AccessMode, CreateKind, DataChange, Flag, RemoveKind};

    use super::*;

    const WRITE: EventKind = EventKind::Modify(ModifyKind::Data(DataChange::Any));
    const CLOSE: EventKind = EventKind::Access(AccessKind::Close(AccessMode::Write));

    /// Watch 1 looks up `/a/file`; watch 2 looks up `/b/file` and `/b/other`; `/a` and `/b` are one directory.
    fn index() -> Index {
        let mut index = Index::default();
        for (id, names) in [(1, &["/a/file"][..]), (2, &["/b/file", "/b/other"])] {
            let names: BTreeSet<PathBuf> = names.iter().map(PathBuf::from).collect();
            let directories = names.iter().map(|name| (name.parent().unwrap().to_owned(), (0, 7)));
            let inodes = directories.collect();
            index.add(id);
            index.register(id, &Lookups { names, inodes });
        }
        index
    }

    fn handle(index: &mut Index, kind: EventKind, path: &str) {
        index.handle(Ok(Event::new(kind).add_path(path.into())));
    }

    #[test]
    fn an_event_wakes_the_watches_that_look_its_name_up_in_that_directory() {
        let cases = [
            ("/a/file", [1, 1]),
            ("/b/file", [1, 1]),
            ("/a/other", [0, 1]),
            ("/a/stranger", [0, 0]),
            ("/c/file", [0, 0]),
        ];
        for (path, expected) in cases {
            let mut index = index();
            handle(&mut index, EventKind::Create(CreateKind::File), path);
            assert_eq!([index.events(1), index.events(2)], expected, "{path}");
        }
    }

    #[test]
    fn a_removed_watch_is_not_woken() {
        let mut index = index();
        index.remove(2);
        handle(&mut index, WRITE, "/b/other");
        assert_eq!((index.events(2), index.watches_of[&(0, 7)].len()), (0, 1));
    }

    #[test]
    fn a_written_file_is_open_until_it_is_closed() {
        let mut index = index();
        handle(&mut index, WRITE, "/b/other");
        assert_eq!(index.activity(2, 0), Activity::Change);
        assert_eq!(index.activity(2, index.events(2)), Activity::Open);
        assert_eq!(index.activity(1, 0), Activity::None);
        handle(&mut index, CLOSE, "/b/other");
        assert_eq!(index.activity(2, index.events(2)), Activity::None);
    }

    #[test]
    fn a_removed_directory_is_reported_by_each_of_its_paths() {
        let mut index = index();
        handle(&mut index, EventKind::Remove(RemoveKind::Folder), "/a");
        assert_eq!(index.take_removed(), ["/a", "/b"].map(PathBuf::from).into());
    }

    #[test]
    fn an_overflow_wakes_every_watch_and_distrusts_every_directory() {
        let mut index = index();
        handle(&mut index, WRITE, "/b/other");
        let before = index.events(2);
        index.handle(Ok(Event::new(EventKind::Other).set_flag(Flag::Rescan)));
        assert_eq!([index.activity(1, 0), index.activity(2, before)], [Activity::Change; 2]);
        assert_eq!(index.activity(2, index.events(2)), Activity::None, "no writer is known");
        assert_eq!(index.take_removed().len(), 2);
    }
}
