//! Names of files that streams choose: `file-cert:`, `file-root:`. Files are followed once, however their path is spelled.
//!
//! Nothing here touches a disk: threads that may hang do (`fs/pool`), and only once the first such name is asked for.

mod look;
mod missing;
mod set;

use std::collections::{HashMap, HashSet, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use smallvec::{SmallVec, smallvec};
use tokio::sync::mpsc;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::Instant;

use self::look::Contents;
use self::missing::{Absence, Group, GroupEvent, Search, SearchResult, Sought};
use self::set::{NameChange, NamedSet};
use super::locations::{Files, Prefixes, normalized};
use super::publisher::SecretPublisher;
use super::{FilePrefixes, FileSettings};
use crate::base::clock::Clock;
use crate::fs::find::{self, Private};
use crate::fs::generation::FileError;
use crate::fs::pending::{HANGING, PendingOperations};
use crate::fs::pool::{Entrance, Pool};
use crate::fs::watch::Watcher;
use crate::metrics::Metrics;
use crate::secret::{NameKind, SecretName};
use crate::store::{Cache, Demand, Event, Key, Origin, Scope};

/// How long the start waits for directories of `--file-prefix` whose links have to be resolved.
const PREFIX_PATIENCE: Duration = Duration::from_secs(2);

/// Serves the files that streams name.
#[derive(Debug)]
pub struct NamedFiles {
    settings: FileSettings,
    working_directory: Arc<Path>,
    demand: Option<Demand>,
    shared: Arc<Shared>,
}

/// What all names share.
#[derive(Debug)]
struct Shared {
    cache: Cache,
    pool: Pool,
    watcher: Watcher,
    prefixes: Prefixes,
    /// Where no name leads.
    private: Mutex<Vec<Private>>,
    contents: Contents,
    debounce: Duration,
    clock: Clock,
    metrics: Metrics,
}

/// Files, as their names lead to them.
#[derive(Debug)]
struct Known {
    /// Sorted; mostly one.
    names: SmallVec<[Key; 1]>,
    state: State,
}

#[derive(Debug)]
enum State {
    /// They are being looked for. True: their file system has not answered for a while, and the names' entries say so.
    Sought {
        is_unanswered: bool,
    },
    /// At least one does not exist.
    Missing(Vec<Absence>),
    Followed {
        changes: mpsc::UnboundedSender<NameChange>,
        task: AbortHandle,
    },
}

/// What has become of the names.
struct Running {
    shared: Arc<Shared>,
    settings: FileSettings,
    working_directory: Arc<Path>,
    files: HashMap<Arc<Files>, Known>,
    groups: HashMap<Arc<Path>, Group>,
    /// Searches that have begun, the oldest first, until they count as unanswered.
    searches: VecDeque<(Instant, Weak<Files>)>,
    /// Names whose files are missing or unanswered, and whose entries don't say so yet.
    reports: VecDeque<Key>,
    /// Names without streams whose value is kept for a while.
    lingering: HashSet<Key>,
    tasks: JoinSet<Option<Key>>,
    results: mpsc::UnboundedSender<SearchResult>,
    events: mpsc::UnboundedSender<GroupEvent>,
}

impl NamedFiles {
    /// A source of the names that streams ask for, of the workloads that `scope` means. `watcher` is for these names alone. Returns when it is
    /// known which directories `--file-prefix` means, or when their file systems don't answer.
    pub async fn start(
        settings: FileSettings,
        cache: &Cache,
        scope: Scope,
        watcher: Watcher,
        pending: PendingOperations,
        clock: Clock,
        metrics: Metrics,
    ) -> Self {
        Self::with_pool(settings, cache, scope, watcher, Pool::new(pending), clock, metrics).await
    }

    pub(super) async fn with_pool(
        mut settings: FileSettings,
        cache: &Cache,
        scope: Scope,
        watcher: Watcher,
        pool: Pool,
        clock: Clock,
        metrics: Metrics,
    ) -> Self {
        let working_directory: Arc<Path> = std::env::current_dir().unwrap_or_else(|_| "/".into()).into();
        settings.system_roots = settings.system_roots.map(|path| normalized(&path, &working_directory));
        let prefixes = resolve_prefixes(&pool, &settings.prefixes, &working_directory).await;
        let unresolved = |path: &PathBuf| Private { path: path.clone(), inode: None };
        let shared = Shared {
            cache: cache.clone(),
            pool,
            watcher,
            prefixes: prefixes.clone(),
            private: Mutex::new(settings.private.iter().map(unresolved).collect()),
            contents: Contents::default(),
            debounce: settings.debounce,
            clock,
            metrics,
        };
        let at = Arc::clone(&working_directory);
        let admission =
            move |name: &SecretName| Files::of(name, &at).map_or(Ok(()), |files| prefixes.admit(&files));
        let demand = cache.demand(NameKind::File, scope, admission);
        let demand =
            demand.inspect_err(|error| tracing::error!(%error, "requested files are not served")).ok();
        Self { settings, working_directory, demand, shared: Arc::new(shared) }
    }

    /// Follows the files of every name that a stream asks for. Does not return.
    pub async fn run(self) {
        let Self { settings, working_directory, demand, shared } = self;
        let Some(mut demand) = demand else { return std::future::pending().await };
        let (results, mut searched) = mpsc::unbounded_channel();
        let (events, mut group_events) = mpsc::unbounded_channel();
        let mut running = Running {
            shared: Arc::clone(&shared),
            settings,
            working_directory,
            files: HashMap::new(),
            groups: HashMap::new(),
            searches: VecDeque::new(),
            reports: VecDeque::new(),
            lingering: HashSet::new(),
            tasks: JoinSet::new(),
            results,
            events,
        };
        let mut supervised = std::pin::pin!(shared.pool.supervise());
        let mut is_first = true;
        loop {
            let due = running.searches.front().map(|(begun, _)| HANGING.saturating_sub(begun.elapsed()));
            let unanswered = async {
                match due {
                    Some(due) => tokio::time::sleep(due).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                event = demand.next() => match event {
                    Some(Event::Wanted(key)) => {
                        if std::mem::take(&mut is_first) {
                            running.resolve_private();
                        }
                        running.add(key);
                    }
                    Some(Event::Deserted(key)) => running.desert(key),
                    Some(Event::Asked(_)) => {}
                    // The workload was removed.
                    None => return std::future::pending().await,
                },
                Some(result) = searched.recv() => running.found(result),
                Some(event) = group_events.recv() => running.take_event(event),
                Some(ended) = running.tasks.join_next() => running.end(ended),
                () = unanswered => running.give_up(),
                () = tokio::task::yield_now(), if !running.reports.is_empty() => running.report(),
                () = &mut supervised => {}
            }
        }
    }
}

/// The directories as they are spelled, and with their links resolved as far as their file systems answer.
async fn resolve_prefixes(pool: &Pool, prefixes: &FilePrefixes, working_directory: &Path) -> Prefixes {
    let given = match prefixes {
        FilePrefixes::None => return Prefixes::none(),
        FilePrefixes::Usual(usual) => return Prefixes::new(usual, working_directory),
        FilePrefixes::Given(given) => given,
    };
    let mut all: Vec<_> = given.iter().map(|prefix| normalized(prefix, working_directory)).collect();
    let (reply, mut resolved) = mpsc::unbounded_channel();
    for prefix in all.clone() {
        let reply = reply.clone();
        pool.submit(prefix.as_path().into(), move |entrance: &Entrance| {
            // Fails when the start no longer waits.
            let _ = reply.send(find::private(&prefix, entrance)?.path);
            Ok(())
        });
    }
    drop(reply);
    let resolve_all = async {
        while let Some(path) = resolved.recv().await {
            all.push(path);
        }
    };
    tokio::select! {
        biased;
        () = resolve_all => {}
        () = tokio::time::sleep(PREFIX_PATIENCE) => {}
        () = pool.supervise() => {}
    }
    Prefixes::new(&all, working_directory)
}

impl Running {
    /// Finds out where the directories of the agent's own files lie. Before that, their spelling counts.
    fn resolve_private(&self) {
        for (index, path) in self.settings.private.iter().enumerate() {
            let (shared, path) = (Arc::clone(&self.shared), path.clone());
            self.shared.pool.submit(path.as_path().into(), move |entrance: &Entrance| {
                let resolved = find::private(&path, entrance)?;
                let mut private = shared.private.lock().unwrap_or_else(PoisonError::into_inner);
                if let Some(private) = private.get_mut(index) {
                    *private = resolved;
                }
                Ok(())
            });
        }
    }

    /// A stream asks for a name.
    fn add(&mut self, key: Key) {
        let Some(files) = Files::of(&key.name, &self.working_directory) else { return };
        let files = Arc::new(files);
        let Some(known) = self.files.get_mut(&files) else {
            let state = State::Sought { is_unanswered: false };
            self.files.insert(Arc::clone(&files), Known { names: smallvec![key], state });
            return self.search(&files);
        };
        if let State::Followed { changes, .. } = &known.state {
            // Fails when its task has ended.
            let _ = changes.send(NameChange::Added(key.clone()));
        } else {
            self.reports.push_back(key.clone());
        }
        if let Err(at) = known.names.binary_search(&key) {
            known.names.insert(at, key);
        }
    }

    fn search(&mut self, files: &Arc<Files>) {
        if let Some(Known { state: State::Sought { .. }, .. }) = self.files.get(files) {
            self.searches.push_back((Instant::now(), Arc::downgrade(files)));
        }
        let (shared, reply) = (Arc::clone(&self.shared), self.results.clone());
        let path = files.paths().next().unwrap_or(Path::new("/")).into();
        self.shared.pool.submit(path, Search { shared, files: Arc::downgrade(files), reply });
    }

    /// Notes which searches take too long.
    fn give_up(&mut self) {
        while let Some((_, files)) = self.searches.pop_front_if(|(begun, _)| begun.elapsed() >= HANGING) {
            let known = files.upgrade().and_then(|files| self.files.get_mut(&files));
            if let Some(Known { names, state: State::Sought { is_unanswered } }) = known {
                *is_unanswered = true;
                self.reports.extend(names.iter().cloned());
            }
        }
    }

    /// Reports why some names are not served: a few in one turn.
    fn report(&mut self) {
        const TURN: usize = 16;
        for key in self.reports.drain(..TURN.min(self.reports.len())) {
            let Some(files) = Files::of(&key.name, &self.working_directory) else { continue };
            match self.files.get(&files).map(|known| &known.state) {
                Some(State::Missing(absences)) => self.shared.fail(&key, &missing(&files, absences)),
                Some(State::Sought { is_unanswered: true }) => self.shared.fail(&key, &unanswered(&files)),
                _ => {}
            }
        }
        // Thousands of names at a time are rare.
        if self.reports.is_empty() {
            self.reports.shrink_to(0);
            self.searches.shrink_to(0);
        }
    }

    /// A search has come to its end.
    fn found(&mut self, SearchResult { files, begun, sought }: SearchResult) {
        let Some(files) = files.upgrade() else { return };
        let Some(known) = self.files.get_mut(&files) else { return };
        // They end in the order in which they begin, unless one hangs.
        self.searches.pop_front_if(|(_, first)| first.as_ptr() == Arc::as_ptr(&files));
        if matches!(known.state, State::Followed { .. }) {
            return;
        }
        let before = match &known.state {
            State::Missing(absences) => absences.clone(),
            _ => Vec::new(),
        };
        match sought {
            Sought::Present => {
                let (changes, changed) = mpsc::unbounded_channel();
                let places = files.places(&self.settings);
                let set = NamedSet::new(Arc::clone(&self.shared), places, known.names.to_vec(), changed);
                let left = leave_groups(&mut self.groups, &files, &before);
                let task = self.tasks.spawn(async { match set.run(left).await {} });
                known.state = State::Followed { changes, task };
            }
            Sought::Missing(absences) if absences == before => {}
            Sought::Missing(mut absences) => {
                // One text for all that is missing there.
                for absence in &mut absences {
                    if let Some((directory, _)) = self.groups.get_key_value(&absence.directory) {
                        absence.directory = Arc::clone(directory);
                    }
                }
                let missing = |absences: &[Absence]| {
                    absences.iter().map(|it| (it.file, it.is_missing)).collect::<Vec<_>>()
                };
                if missing(&absences) != missing(&before) {
                    self.reports.extend(known.names.iter().cloned());
                }
                known.state = State::Missing(absences.clone());
                drop(leave_groups(&mut self.groups, &files, &before));
                self.join_groups(&files, &absences, begun);
            }
        }
    }

    fn join_groups(&mut self, files: &Arc<Files>, absences: &[Absence], sought: std::time::Instant) {
        let mut may_have_appeared = false;
        for absence in absences {
            let directory = Arc::clone(&absence.directory);
            let group = self
                .groups
                .entry(Arc::clone(&directory))
                .or_insert_with(|| Group::new(&self.shared, directory, self.events.clone(), &mut self.tasks));
            may_have_appeared |= group.add(absence.name, Arc::clone(files), sought);
        }
        if may_have_appeared {
            self.search(files);
        }
    }

    fn take_event(&mut self, event: GroupEvent) {
        let (directory, armed) = match event {
            GroupEvent::Armed(directory, at) => (directory, Some(at)),
            GroupEvent::Appeared(directory) => (directory, None),
        };
        let Some(group) = self.groups.get_mut(&*directory) else { return };
        let again = match armed {
            Some(at) => group.arm(at),
            None => group.take_appeared(),
        };
        again.iter().for_each(|files| self.search(files));
    }

    /// The last stream of a name has left.
    fn desert(&mut self, key: Key) {
        if self.lingering.contains(&key) {
            return;
        }
        if !self.shared.cache.has_value(&key) {
            return self.retire(key);
        }
        self.lingering.insert(key.clone());
        let publisher = self.shared.cache.publisher(key.clone(), Origin::FILES);
        self.tasks.spawn(async move {
            publisher.deserted().await;
            Some(key)
        });
    }

    fn end(&mut self, ended: Result<Option<Key>, tokio::task::JoinError>) {
        match ended {
            Ok(Some(key)) => {
                self.lingering.remove(&key);
                self.retire(key);
            }
            Ok(None) => {}
            Err(error) if error.is_cancelled() => {}
            Err(error) => std::panic::resume_unwind(error.into_panic()),
        }
    }

    /// Forgets a name, unless a stream has come back.
    fn retire(&mut self, key: Key) {
        if !self.shared.cache.retire(&key) {
            return;
        }
        let Some(files) = Files::of(&key.name, &self.working_directory) else { return };
        let Some(known) = self.files.get_mut(&files) else { return };
        if let Ok(at) = known.names.binary_search(&key) {
            known.names.remove(at);
        }
        if let State::Followed { changes, .. } = &known.state {
            // Fails when its task has ended.
            let _ = changes.send(NameChange::Removed(key.clone()));
        }
        tracing::debug!(name = %key.name, "no stream left, files no longer watched");
        if !known.names.is_empty() {
            return;
        }
        let Some((files, known)) = self.files.remove_entry(&files) else { return };
        match known.state {
            State::Sought { .. } => {}
            State::Missing(absences) => drop(leave_groups(&mut self.groups, &files, &absences)),
            State::Followed { task, .. } => task.abort(),
        }
    }
}

impl Shared {
    /// Reports why a name is not served.
    fn fail(&self, key: &Key, error: &FileError) {
        SecretPublisher::new(&self.cache, key.clone(), true).fail(error, &self.metrics);
    }
}

fn unanswered(files: &Files) -> FileError {
    FileError::Unanswered { path: files.paths().next().unwrap_or(Path::new("/")).to_owned() }
}

/// Removes files from the groups of what is missing. Returns the groups that have no others.
fn leave_groups(
    groups: &mut HashMap<Arc<Path>, Group>,
    files: &Arc<Files>,
    absences: &[Absence],
) -> Vec<Group> {
    let mut left = Vec::new();
    for absence in absences {
        let group = groups.get(&absence.directory);
        if group.is_some_and(|group| group.remove(absence.name, files)) {
            left.extend(groups.remove(&absence.directory));
        }
    }
    left
}

/// Why files are not served of which some don't exist.
fn missing(files: &Files, absences: &[Absence]) -> FileError {
    let is_absent = |file: usize| absences.iter().any(|absence| absence.file == file && absence.is_missing);
    let (absent, present): (Vec<_>, Vec<_>) =
        files.paths().enumerate().partition(|(file, _)| is_absent(*file));
    match (present.first(), absent.first()) {
        (Some((_, present)), Some((_, absent))) => {
            FileError::Half { present: (*present).to_owned(), absent: (*absent).to_owned() }
        }
        _ => FileError::Missing { paths: absent.into_iter().map(|(_, path)| path.to_owned()).collect() },
    }
}
