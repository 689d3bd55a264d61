//! Maps inotify events to the watches they wake.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use notify::event::{AccessKind, ModifyKind, RenameMode};
use notify::{Event, EventHandler, EventKind};
use tokio::sync::Notify;

use super::lock;
use crate::fs::lookup::Inode;
use crate::fs::walk::Lookups;

/// After so many writes to files that no watch is for, the files of their directory that a watch is for are watched
/// instead of the directory.
const STRAYS: u32 = 64;

/// While so many files are open, further ones are remembered only if a watch is for them.
const MAX_OPEN: usize = 1024;

/// A name in a directory.
pub(super) type Name = (Inode, OsString);

/// What happened to the files of a [`Watch`](super::Watch).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activity {
    None,
    /// Nothing new, but one of the files was written to earlier and is still open.
    Open,
    Change,
}

/// How long readers wait for a file that is [`Activity::Open`] before they take it as it is.
pub const OPEN_PATIENCE: Duration = Duration::from_secs(5);

/// Why a directory, or a file, needs another inotify watch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Flaw {
    /// The directory was removed or renamed, and its inotify watch with it.
    Lost,
    /// Other programs write to files in it that no watch is for.
    Noisy,
}

/// Learns which names appear in a directory, and which disappear.
pub trait NameListener: fmt::Debug + Send + Sync {
    /// Runs on one of inotify's threads, which must not wait.
    fn changed(&self, name: &OsStr);
}

/// The index, as inotify's threads and the watches share it.
#[derive(Clone, Debug, Default)]
pub(super) struct SharedIndex(Arc<Mutex<Index>>);

impl SharedIndex {
    /// Inotify's threads take this lock for each event: nothing that waits for such a thread may hold it.
    pub(super) fn lock(&self) -> MutexGuard<'_, Index> {
        lock(&self.0)
    }
}

impl EventHandler for SharedIndex {
    /// Runs on one of inotify's threads.
    fn handle_event(&mut self, event: notify::Result<Event>) {
        self.lock().handle(event);
    }
}

/// Nothing in it grows with the number of events.
#[derive(Debug, Default)]
pub(super) struct Index {
    /// The directories that are watched, and the files that are watched themselves.
    inodes: HashMap<PathBuf, Inode>,
    /// The watches that look a name up, by its directory.
    watches_of: HashMap<Inode, HashMap<OsString, HashSet<u64>>>,
    watches: HashMap<u64, Registered>,
    flaws: BTreeMap<PathBuf, Flaw>,
    /// Writes to files that no watch is for, by their directory.
    strays: HashMap<PathBuf, u32>,
    /// What learns of every name that appears or disappears in a directory, by watch.
    listeners: HashMap<u64, (Inode, Arc<dyn NameListener>)>,
    /// Files that were written to and not closed since: those that a watch is for, and those in the listeners' directories,
    /// which a watch may come for only now.
    open: HashSet<Name>,
}

/// A watch, as the index knows it.
#[derive(Debug, Default)]
struct Registered {
    wakes: Arc<Notify>,
    /// Its names in [`Index::watches_of`].
    names: HashSet<Name>,
    /// Those that changed since its last look began.
    changed: HashSet<Name>,
}

impl Index {
    /// Adds watch `id`, and returns what wakes it.
    pub(super) fn add(&mut self, id: u64) -> Arc<Notify> {
        Arc::clone(&self.watches.entry(id).or_default().wakes)
    }

    /// From now on, events about `lookups` wake watch `id`, and no others. `inodes` are what is watched for it. Returns the
    /// names about which no event woke it before.
    pub(super) fn register<'a>(
        &mut self,
        id: u64,
        lookups: &Lookups,
        inodes: impl Iterator<Item = (&'a PathBuf, Inode)>,
    ) -> HashSet<Name> {
        self.inodes.extend(inodes.map(|(path, inode)| (path.clone(), inode)));
        let Some(registered) = self.watches.get_mut(&id) else { return HashSet::new() };
        let names: HashSet<_> =
            lookups.keys().map(|(directory, name)| (directory, name.to_owned())).collect();
        let mut is_any_unheard = false;
        for (directory, name) in registered.names.difference(&names) {
            let Some(ids_of) = self.watches_of.get_mut(directory) else { continue };
            if ids_of.get_mut(name).is_some_and(|ids| ids.remove(&id) && ids.is_empty()) {
                ids_of.remove(name);
                is_any_unheard = true;
            }
            if ids_of.is_empty() {
                self.watches_of.remove(directory);
            }
        }
        let new: HashSet<_> = names.difference(&registered.names).cloned().collect();
        for (directory, name) in &new {
            let ids_of = self.watches_of.entry(*directory).or_default();
            ids_of.entry(name.clone()).or_default().insert(id);
        }
        registered.changed.retain(|name| names.contains(name));
        registered.names = names;
        if is_any_unheard {
            self.forget_unheard();
        }
        new
    }

    pub(super) fn remove(&mut self, id: u64) {
        self.register(id, &Lookups::default(), std::iter::empty());
        self.watches.remove(&id);
        self.listen_to_nothing(id);
    }

    /// Has `listener` learn of every name that appears or disappears in `directory`, as long as watch `id` exists.
    pub(super) fn listen(&mut self, id: u64, directory: Option<Inode>, listener: Arc<dyn NameListener>) {
        match directory {
            Some(directory) => drop(self.listeners.insert(id, (directory, listener))),
            None => self.listen_to_nothing(id),
        }
    }

    fn listen_to_nothing(&mut self, id: u64) {
        if self.listeners.remove(&id).is_some() {
            self.forget_unheard();
        }
    }

    /// Forgets the files that are open where no watch and no listener learns that they are closed.
    fn forget_unheard(&mut self) {
        let Self { open, listeners, watches_of, .. } = self;
        open.retain(|(directory, name)| {
            listeners.values().any(|(listens_to, _)| listens_to == directory)
                || watches_of.get(directory).is_some_and(|names| names.contains_key(name))
        });
    }

    /// No watch needs `path` now.
    pub(super) fn forget(&mut self, path: &Path) {
        self.inodes.remove(path);
        self.strays.remove(path);
    }

    /// What needs another inotify watch since the last call.
    pub(super) fn take_flaws(&mut self) -> BTreeMap<PathBuf, Flaw> {
        std::mem::take(&mut self.flaws)
    }

    /// A look begins: what has changed until now is seen by it.
    pub(super) fn begin_look(&mut self, id: u64) {
        if let Some(registered) = self.watches.get_mut(&id) {
            registered.changed.clear();
        }
    }

    /// What happened to `lookups` since [`Index::begin_look`].
    pub(super) fn activity(&self, id: u64, lookups: &Lookups) -> Activity {
        let Some(Registered { changed, .. }) = self.watches.get(&id) else { return Activity::None };
        let is_in = |names: &HashSet<Name>| {
            !names.is_empty()
                && lookups.keys().any(|(directory, name)| names.contains(&(directory, name.to_owned())))
        };
        match (is_in(changed), is_in(&self.open)) {
            (true, _) => Activity::Change,
            (false, true) => Activity::Open,
            (false, false) => Activity::None,
        }
    }

    pub(super) fn forget_writers(&mut self, id: u64) {
        if let Some(registered) = self.watches.get(&id) {
            self.open.retain(|name| !registered.names.contains(name));
        }
    }

    pub(super) fn wake(&self, id: u64) {
        if let Some(registered) = self.watches.get(&id) {
            registered.wakes.notify_one();
        }
    }

    pub(super) fn wake_all(&self) {
        self.watches.values().for_each(|registered| registered.wakes.notify_one());
    }

    pub(super) fn handle(&mut self, event: notify::Result<Event>) {
        match event {
            // Each half of a rename is an event of its own.
            Ok(Event { kind: EventKind::Modify(ModifyKind::Name(RenameMode::Both)), .. }) => {}
            Ok(event) if !event.need_rescan() => {
                for path in &event.paths {
                    self.handle_path(event.kind, path);
                }
            }
            // Events were lost, about any of the directories.
            _ => {
                self.open.clear();
                self.flaws.extend(self.inodes.keys().map(|path| (path.clone(), Flaw::Lost)));
                for registered in self.watches.values_mut() {
                    registered.changed.clone_from(&registered.names);
                    registered.wakes.notify_one();
                }
            }
        }
    }

    fn handle_path(&mut self, kind: EventKind, path: &Path) {
        // An inode with several paths has one inotify watch, and notify reports one of the paths.
        let Some(inode) = self.inodes.get(path) else { return self.handle_name(kind, path) };
        let same = self.inodes.iter().filter(|(_, other)| *other == inode);
        for path in same.map(|(path, _)| path.clone()).collect::<Vec<_>>() {
            self.handle_name(kind, &path);
        }
    }

    fn handle_name(&mut self, kind: EventKind, path: &Path) {
        let is_away = matches!(kind, EventKind::Remove(_) | EventKind::Modify(ModifyKind::Name(_)));
        if is_away && self.inodes.contains_key(path) {
            self.flaws.insert(path.to_owned(), Flaw::Lost);
        }
        let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else { return };
        let Some(directory) = self.inodes.get(parent).copied() else { return };
        let is_write = matches!(kind, EventKind::Modify(ModifyKind::Data(_)));
        let is_close = matches!(kind, EventKind::Access(AccessKind::Close(_)));
        let is_of_name = matches!(
            kind,
            EventKind::Create(_) | EventKind::Remove(_) | EventKind::Modify(ModifyKind::Name(_))
        );
        let mut listeners =
            self.listeners.values().filter(|(listens_to, _)| *listens_to == directory).peekable();
        let ids = self.watches_of.get(&directory).and_then(|names| names.get(name));
        if is_write && (ids.is_some() || listeners.peek().is_some() && self.open.len() < MAX_OPEN) {
            self.open.insert((directory, name.to_owned()));
        } else if (is_close || is_of_name) && !self.open.is_empty() {
            self.open.remove(&(directory, name.to_owned()));
        }
        if is_of_name {
            listeners.for_each(|(_, listener)| listener.changed(name));
        }
        let Some(ids) = ids else {
            if is_write || is_close {
                self.count_stray(parent);
            }
            return;
        };
        let name = (directory, name.to_owned());
        for id in ids {
            let Some(registered) = self.watches.get_mut(id) else { continue };
            registered.changed.insert(name.clone());
            registered.wakes.notify_one();
        }
    }

    fn count_stray(&mut self, directory: &Path) {
        let count = self.strays.entry(directory.to_owned()).or_default();
        *count += 1;
        if *count != STRAYS {
            return;
        }
        let Some(inode) = self.inodes.get(directory).copied() else { return };
        self.flaws.entry(directory.to_owned()).or_insert(Flaw::Noisy);
        let ids = self.watches_of.get(&inode).into_iter().flat_map(HashMap::values).flatten();
        for id in ids.copied().collect::<HashSet<_>>() {
            self.wake(id);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use notify::event::{AccessMode, CreateKind, DataChange, Flag, RemoveKind};

    use super::*;
    use crate::fs::walk::{Directory, Step};

    const WRITE: EventKind = EventKind::Modify(ModifyKind::Data(DataChange::Any));
    const CLOSE: EventKind = EventKind::Access(AccessKind::Close(AccessMode::Write));

    fn lookups(names: &[&str]) -> Lookups {
        let names: BTreeSet<PathBuf> = names.iter().map(PathBuf::from).collect();
        let directory = Directory { inode: (0, 7), holds_files: true };
        let directories = names.iter().map(|name| (name.parent().unwrap().to_owned(), directory)).collect();
        let names = names.into_iter().map(|name| (name, Step::Missing)).collect();
        Lookups { names, directories, ..Lookups::default() }
    }

    /// What watch 1 looks up, and what watch 2 does; `/a` and `/b` are one directory.
    fn both() -> [(u64, Lookups); 2] {
        [(1, lookups(&["/a/file"])), (2, lookups(&["/b/file", "/b/other"]))]
    }

    fn index() -> Index {
        let mut index = Index::default();
        for (id, lookups) in both() {
            index.add(id);
            let inodes = lookups.directories.iter().map(|(path, directory)| (path, directory.inode));
            index.register(id, &lookups, inodes);
        }
        index
    }

    fn handle(index: &mut Index, kind: EventKind, path: &str) {
        index.handle(Ok(Event::new(kind).add_path(path.into())));
    }

    fn activities(index: &Index) -> [Activity; 2] {
        both().map(|(id, lookups)| index.activity(id, &lookups))
    }

    #[test]
    fn an_event_wakes_the_watches_that_look_its_name_up_in_that_directory() {
        use Activity::{Change, None};
        let cases = [
            ("/a/file", [Change, Change]),
            ("/b/file", [Change, Change]),
            ("/a/other", [None, Change]),
            ("/a/stranger", [None, None]),
            ("/c/file", [None, None]),
        ];
        for (path, expected) in cases {
            let mut index = index();
            handle(&mut index, EventKind::Create(CreateKind::File), path);
            assert_eq!(activities(&index), expected, "{path}");
        }
    }

    #[test]
    fn a_removed_watch_is_not_woken() {
        let mut index = index();
        index.remove(2);
        handle(&mut index, WRITE, "/b/other");
        assert_eq!((activities(&index)[1], index.watches_of[&(0, 7)].len()), (Activity::None, 1));
    }

    #[test]
    fn what_no_longer_leads_to_a_file_does_not_count() {
        let mut index = index();
        handle(&mut index, EventKind::Create(CreateKind::File), "/b/other");
        assert_eq!(index.activity(2, &lookups(&["/b/file"])), Activity::None);
    }

    #[test]
    fn a_written_file_is_open_until_it_is_closed() {
        let mut index = index();
        handle(&mut index, WRITE, "/b/other");
        assert_eq!(activities(&index)[1], Activity::Change);
        index.begin_look(2);
        assert_eq!(activities(&index), [Activity::None, Activity::Open]);
        handle(&mut index, CLOSE, "/b/other");
        index.begin_look(2);
        assert_eq!(activities(&index)[1], Activity::None);
    }

    #[test]
    fn a_file_that_was_written_to_before_its_watch_is_open_until_it_is_closed() {
        #[derive(Debug)]
        struct Nothing;
        impl NameListener for Nothing {
            fn changed(&self, _: &OsStr) {}
        }
        for (kind, expected) in [(WRITE, Activity::Open), (CLOSE, Activity::None)] {
            let mut index = index();
            index.add(3);
            index.listen(3, Some((0, 7)), Arc::new(Nothing));
            handle(&mut index, WRITE, "/a/new");
            handle(&mut index, kind, "/a/new");
            let new = lookups(&["/a/new"]);
            index.add(4);
            index.register(4, &new, std::iter::empty());
            index.begin_look(4);
            assert_eq!(index.activity(4, &new), expected);
            handle(&mut index, CLOSE, "/a/new");
            handle(&mut index, WRITE, "/a/newer");
            index.remove(3);
            assert!(index.open.is_empty(), "without a listener nothing is remembered");
        }
    }

    #[test]
    fn a_removed_directory_is_reported_by_each_of_its_paths() {
        let mut index = index();
        handle(&mut index, EventKind::Remove(RemoveKind::Folder), "/a");
        assert_eq!(index.take_flaws(), ["/a", "/b"].map(|path| (path.into(), Flaw::Lost)).into());
    }

    #[test]
    fn an_overflow_wakes_every_watch_and_distrusts_every_directory() {
        let mut index = index();
        handle(&mut index, WRITE, "/b/other");
        let _ = [1, 2].map(|id| index.begin_look(id));
        index.handle(Ok(Event::new(EventKind::Other).set_flag(Flag::Rescan)));
        assert_eq!(activities(&index), [Activity::Change; 2]);
        let _ = [1, 2].map(|id| index.begin_look(id));
        assert_eq!(activities(&index)[1], Activity::None, "no writer is known");
        assert_eq!(index.take_flaws().into_values().collect::<Vec<_>>(), [Flaw::Lost; 2]);
    }

    #[test]
    fn a_storm_of_events_takes_no_memory_and_writes_to_other_files_are_reported_once() {
        let mut index = index();
        for number in 0..100_000 {
            handle(&mut index, WRITE, &format!("/a/log-{number}"));
            handle(&mut index, EventKind::Create(CreateKind::File), "/a/file");
        }
        assert_eq!(index.take_flaws(), [("/a".into(), Flaw::Noisy)].into());
        let registered = &index.watches[&1];
        assert_eq!((registered.changed.len(), index.strays.len(), index.inodes.len()), (1, 1, 2));
    }
}
