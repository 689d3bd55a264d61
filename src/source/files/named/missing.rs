//! Names whose files don't exist: a peer can make up any number of them, so each costs little. Those that would appear in
//! the same directory share one watch.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::ffi::OsStr;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Instant;

use tokio::sync::{Notify, mpsc, oneshot};
use tokio::task::{AbortHandle, JoinSet};

use super::{Files, Shared};
use crate::fs::find::{Blocked, Bounds, Failed, find};
use crate::fs::pool::{Entrance, Work};
use crate::fs::watch::{NameListener, Wake, Watch};
use crate::store::Key;

/// Looked up, never created. As if it were a file: its directory is watched for writes, so that a file is known to be
/// open that appears there.
const NEVER: &str = "..attache-never";

/// The hash of a name in a directory.
pub(super) type NameHash = u64;

pub(super) fn hash_of(name: &OsStr) -> NameHash {
    let mut hasher = DefaultHasher::new();
    name.hash(&mut hasher);
    hasher.finish()
}

/// Where a file is missing: a directory that exists, and the name in it that does not. Or where the other file of a pair
/// is of which one is missing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Absence {
    /// Which one of the paths of the files.
    pub(super) file: usize,
    pub(super) directory: Arc<Path>,
    pub(super) name: NameHash,
    pub(super) is_missing: bool,
}

/// What looking for files found out.
#[derive(Debug)]
pub(super) enum Sought {
    /// They can be looked at, with or without success.
    Present,
    /// At least one does not exist, and where the others would disappear is known.
    Missing(Vec<Absence>),
}

/// A search for files that is to be made.
pub(super) struct Search {
    pub(super) shared: Arc<Shared>,
    /// Gone when no name leads to them any longer.
    pub(super) files: Weak<Files>,
    pub(super) reply: mpsc::UnboundedSender<SearchResult>,
}

#[derive(Debug)]
pub(super) struct SearchResult {
    pub(super) files: Weak<Files>,
    pub(super) begun: Instant,
    pub(super) sought: Sought,
}

impl Work for Search {
    fn is_wanted(&self) -> bool {
        self.files.strong_count() > 0
    }

    fn run(&mut self, entrance: &Entrance) -> Result<(), Blocked> {
        let Some(files) = self.files.upgrade() else { return Ok(()) };
        let begun = Instant::now();
        let (mut names, mut is_missing, mut is_certain) = (Vec::new(), false, true);
        for (file, path) in files.paths().enumerate() {
            match find(path, &self.shared.bounds(path), entrance) {
                Err(Failed::Blocked(blocked)) => return Err(blocked),
                Err(Failed::Missing(Some(existing))) => {
                    is_missing = true;
                    names.extend(absence(file, path, existing, true));
                }
                Ok(found) if found.is_direct() => {
                    let above = path.components().count().saturating_sub(2);
                    names.extend(absence(file, path, above, false));
                }
                Ok(_) | Err(Failed::Missing(None) | Failed::Io(_)) => is_certain = false,
            }
        }
        let sought = if is_missing && is_certain { Sought::Missing(names) } else { Sought::Present };
        // Fails when the source has ended.
        let _ = self.reply.send(SearchResult { files: self.files.clone(), begun, sought });
        Ok(())
    }
}

/// Where `path` is missing if so many of its names exist.
fn absence(file: usize, path: &Path, existing: usize, is_missing: bool) -> Option<Absence> {
    let mut names = path.components();
    // The root directory, and the names in it.
    let directory: PathBuf = names.by_ref().take(existing + 1).collect();
    let name = hash_of(names.next()?.as_os_str());
    Some(Absence { file, directory: directory.into(), name, is_missing })
}

/// What is missing in one directory.
#[derive(Debug)]
pub(super) struct Group {
    names: Arc<Names>,
    /// When it began to be watched; searches from before may have missed what appeared meanwhile.
    armed: Option<Instant>,
    task: AbortHandle,
}

#[derive(Debug, Default)]
struct Names {
    state: Mutex<NamesState>,
    appeared: Notify,
}

#[derive(Debug, Default)]
struct NamesState {
    /// The number distinguishes files with the same hash.
    missing: BTreeMap<(NameHash, u32), Arc<Files>>,
    next: u32,
    appeared: BTreeSet<NameHash>,
}

/// Something has happened in the directory of a group.
#[derive(Debug)]
pub(super) enum GroupEvent {
    /// It is watched since this moment, and everything in it has to be looked for again.
    Armed(Arc<Path>, Instant),
    /// Names have appeared, or disappeared.
    Appeared(Arc<Path>),
}

impl Names {
    fn lock(&self) -> MutexGuard<'_, NamesState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl NameListener for Names {
    /// Runs on a thread of inotify.
    fn changed(&self, name: &OsStr) {
        let hash = hash_of(name);
        let mut state = self.lock();
        if state.missing.range((hash, 0)..=(hash, u32::MAX)).next().is_some() && state.appeared.insert(hash) {
            drop(state);
            self.appeared.notify_one();
        }
    }
}

impl Group {
    /// A group for what is missing in `directory`, which begins to be watched now.
    pub(super) fn new(
        shared: &Arc<Shared>,
        directory: Arc<Path>,
        events: mpsc::UnboundedSender<GroupEvent>,
        tasks: &mut JoinSet<Option<Key>>,
    ) -> Self {
        let names = Arc::new(Names::default());
        let followed = follow(Arc::clone(shared), directory, Arc::clone(&names), events);
        let task = tasks.spawn(async { match followed.await {} });
        Self { names, armed: None, task }
    }

    /// Adds files that were looked for at `sought` and not found. True if they may have appeared since.
    pub(super) fn add(&self, name: NameHash, files: Arc<Files>, sought: Instant) -> bool {
        let mut state = self.names.lock();
        let number = state.next;
        state.next = state.next.wrapping_add(1);
        state.missing.insert((name, number), files);
        // Before it is armed, everything is looked for again anyway.
        self.armed.is_some_and(|armed| sought < armed)
    }

    /// Removes files. True if none are left.
    pub(super) fn remove(&self, name: NameHash, files: &Arc<Files>) -> bool {
        let mut state = self.names.lock();
        let same = state.missing.range((name, 0)..=(name, u32::MAX));
        let same = same.filter(|(_, other)| Arc::ptr_eq(other, files)).map(|(key, _)| *key).next();
        if let Some(key) = same {
            state.missing.remove(&key);
        }
        state.missing.is_empty()
    }

    pub(super) fn arm(&mut self, at: Instant) -> Vec<Arc<Files>> {
        self.armed = Some(at);
        self.names.lock().missing.values().cloned().collect()
    }

    pub(super) fn take_appeared(&self) -> Vec<Arc<Files>> {
        let mut state = self.names.lock();
        let appeared = std::mem::take(&mut state.appeared);
        let of = |hash: NameHash| {
            state.missing.range((hash, 0)..=(hash, u32::MAX)).map(|(_, files)| Arc::clone(files))
        };
        appeared.into_iter().flat_map(of).collect()
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Follows a directory. Does not return.
async fn follow(
    shared: Arc<Shared>,
    directory: Arc<Path>,
    names: Arc<Names>,
    events: mpsc::UnboundedSender<GroupEvent>,
) -> Infallible {
    let mut watch = shared.watcher.watch(vec![directory.join(NEVER)]);
    let mut last = None;
    let mut is_polled = false;
    loop {
        let (reply, armed) = oneshot::channel();
        let arm = Arm {
            directory: Arc::clone(&directory),
            names: Arc::clone(&names),
            watch: Some(watch),
            reply: Some(reply),
        };
        shared.pool.submit(Arc::clone(&directory), arm);
        let Ok(Armed { watch: again, at, stamp }) = armed.await else { return std::future::pending().await };
        watch = again;
        // A poll that finds the same directory finds the same names in it.
        if !is_polled || last != Some(stamp) {
            let _ = events.send(GroupEvent::Armed(Arc::clone(&directory), at));
        }
        last = Some(stamp);
        loop {
            tokio::select! {
                wake = watch.changed() => {
                    is_polled = wake == Wake::Poll;
                    break;
                }
                () = names.appeared.notified() => {
                    let _ = events.send(GroupEvent::Appeared(Arc::clone(&directory)));
                }
            }
        }
    }
}

/// Has a directory watched.
struct Arm {
    directory: Arc<Path>,
    names: Arc<Names>,
    watch: Option<Watch>,
    reply: Option<oneshot::Sender<Armed>>,
}

/// Distinguishes two states of a directory.
type Stamp = Option<(u64, i64, i64)>;

struct Armed {
    watch: Watch,
    at: Instant,
    stamp: Stamp,
}

impl Work for Arm {
    fn is_wanted(&self) -> bool {
        self.reply.as_ref().is_some_and(|reply| !reply.is_closed())
    }

    fn run(&mut self, entrance: &Entrance) -> Result<(), Blocked> {
        let stamp = match find(&self.directory, &Bounds::default(), entrance) {
            Err(Failed::Blocked(blocked)) => return Err(blocked),
            Ok(_) => {
                std::fs::metadata(&self.directory).ok().map(|it| (it.ino(), it.mtime(), it.mtime_nsec()))
            }
            Err(_) => None,
        };
        let (Some(mut watch), Some(reply)) = (self.watch.take(), self.reply.take()) else { return Ok(()) };
        watch.arm();
        watch.listen(OsStr::new(NEVER), self.names.clone());
        let _ = reply.send(Armed { watch, at: Instant::now(), stamp });
        Ok(())
    }
}
