//! Health: what is missing or expired, and what fails.
//!
//! Ready means: each workload's own secrets are there and valid, and so are the files written for other programs, where
//! there are to be any. Names on demand have no part in it: any stream can ask for one that does not exist.

mod command;
mod renewal;

use std::collections::HashMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::SystemTime;

use tokio::sync::watch;

pub use self::command::{CommandHealth, CommandState, EpochHealth, LastExit, Restarts};
pub use self::renewal::{CaHealth, RenewalHealth};
use super::cache::{Cache, lock};
use super::entry::Snapshot;
use super::workload::Workload;
use crate::base::clock::{Clock, rfc3339};

/// The name of the program that the agent keeps running, among what is missing.
const COMMAND: &str = "command";

/// A component that works, or fails for a reason; none where it is not used.
pub type ComponentHealth = Option<Result<(), String>>;

/// What the components report of one workload: each writes its own part; readiness, status, the page and metrics read
/// all of them. Clones share the parts.
#[derive(Clone, Debug)]
pub struct Components(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    reports: Mutex<Reports>,
    /// Of the cache.
    changes: watch::Sender<()>,
}

/// The newest report of each component.
#[derive(Clone, Debug, Default)]
pub struct Reports {
    /// Files for other programs; none where none are configured.
    pub output: Option<OutputHealth>,
    /// Writing the state directory.
    pub state: ComponentHealth,
    /// Reading the mounted CRLs, and serving them.
    pub crls: ComponentHealth,
    /// The newest refusal of a connection, a request or a name, for people.
    pub refusal: Option<String>,
    /// Calls to CAs.
    pub renewal: RenewalHealth,
    /// The program that the agent keeps running; none without one.
    pub command: Option<Box<CommandHealth>>,
}

impl Components {
    pub(super) fn new(changes: watch::Sender<()>) -> Self {
        Self(Arc::new(Shared { reports: Mutex::default(), changes }))
    }

    /// Of no workload: only what is reported last is kept.
    pub fn detached() -> Self {
        Self::new(watch::Sender::default())
    }

    /// All reports as they are now.
    pub fn reports(&self) -> Reports {
        lock(&self.0.reports).clone()
    }

    pub fn output(&self) -> Option<OutputHealth> {
        lock(&self.0.reports).output.clone()
    }

    /// Changes what is reported of the output. The first report says that there is to be one.
    pub fn report_output(&self, change: impl FnOnce(&mut OutputHealth)) {
        change(lock(&self.0.reports).output.get_or_insert_default());
        // Readiness depends on it.
        self.0.changes.send_replace(());
    }

    pub fn command(&self) -> Option<Box<CommandHealth>> {
        lock(&self.0.reports).command.clone()
    }

    /// Changes what is reported of the program that the agent keeps running. The first report says that there is one.
    pub fn report_command(&self, change: impl FnOnce(&mut CommandHealth)) {
        change(lock(&self.0.reports).command.get_or_insert_default());
        // Readiness depends on it.
        self.0.changes.send_replace(());
    }

    pub fn report_state(&self, health: Result<(), String>) {
        lock(&self.0.reports).state = Some(health);
    }

    pub fn report_crls(&self, health: Result<(), String>) {
        lock(&self.0.reports).crls = Some(health);
    }

    pub fn report_refusal(&self, reason: &dyn fmt::Display) {
        lock(&self.0.reports).refusal = Some(reason.to_string());
    }

    pub fn report_renewal(&self, change: impl FnOnce(&mut RenewalHealth)) {
        change(&mut lock(&self.0.reports).renewal);
    }
}

/// Health of the files for other programs.
#[derive(Clone, Debug, Default)]
pub struct OutputHealth {
    pub directories: Vec<DirectoryHealth>,
    /// The hook has not succeeded since it failed.
    pub hook_failure: Option<HookFailing>,
    pub is_hook_running: bool,
}

/// A step that fails and is retried.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failing {
    /// Of the last try, for people.
    pub reason: String,
    /// When the first try failed.
    pub since: SystemTime,
    /// When the next try is; none where something else must happen before.
    pub next_try: Option<SystemTime>,
}

/// A hook that fails.
#[derive(Clone, Debug)]
pub struct HookFailing {
    pub failing: Failing,
    /// What it printed last.
    pub last_lines: Vec<String>,
}

impl Failing {
    /// A try failed `now`, after those of `before`.
    pub fn after(
        before: Option<&Self>,
        reason: String,
        now: SystemTime,
        next_try: Option<SystemTime>,
    ) -> Self {
        Self { reason, since: before.map_or(now, |before| before.since), next_try }
    }
}

/// Health of one directory of files for other programs.
#[derive(Clone, Debug, Default)]
pub struct DirectoryHealth {
    pub path: PathBuf,
    /// When its files expire; none as long as none are known to be there.
    pub not_after: Option<SystemTime>,
    /// Why nothing newer can be written.
    pub failure: Option<Failing>,
    /// The disk does not answer.
    pub is_hanging: bool,
}

impl OutputHealth {
    /// The health of the directory at `path`, which is added if it is a new one.
    pub fn directory(&mut self, path: &Path) -> &mut DirectoryHealth {
        let index = self.directories.iter().position(|directory| directory.path == path);
        let index = index.unwrap_or_else(|| {
            self.directories.push(DirectoryHealth { path: path.to_owned(), ..DirectoryHealth::default() });
            self.directories.len() - 1
        });
        #[expect(clippy::indexing_slicing, reason = "it was found or added there")]
        &mut self.directories[index]
    }

    /// Says that there is to be output in these directories.
    pub fn expect<'a>(&mut self, paths: impl IntoIterator<Item = &'a PathBuf>) {
        for path in paths {
            self.directory(path);
        }
    }

    /// When the first files expire; none as long as some are missing.
    pub fn not_after(&self) -> Option<SystemTime> {
        let all: Option<Vec<_>> = self.directories.iter().map(|directory| directory.not_after).collect();
        all?.into_iter().min()
    }

    /// Why nothing newer can be written: the reasons of all directories that have one, since the first of them failed.
    pub fn failure(&self) -> Option<Failing> {
        let failing = || self.directories.iter().filter_map(|directory| directory.failure.as_ref());
        let reasons: Vec<_> = failing().map(|one| one.reason.as_str()).collect();
        Some(Failing {
            reason: reasons.join("; "),
            since: failing().map(|one| one.since).min()?,
            next_try: failing().filter_map(|one| one.next_try).min(),
        })
    }

    pub fn is_hanging(&self) -> bool {
        self.directories.iter().any(|directory| directory.is_hanging)
    }

    /// What is missing or has expired.
    fn missing(&self, now: SystemTime) -> Option<String> {
        let is_one = self.directories.len() == 1;
        let missing = self.directories.iter().filter_map(|directory| {
            let reason = directory.missing(now)?;
            Some(if is_one { reason } else { format!("{}: {reason}", directory.path.display()) })
        });
        let missing: Vec<_> = missing.collect();
        (!missing.is_empty()).then(|| missing.join("; "))
    }
}

impl DirectoryHealth {
    fn missing(&self, now: SystemTime) -> Option<String> {
        let hangs = || self.is_hanging.then_some("the disk does not answer");
        let failure = self.failure.as_ref().map(|failing| failing.reason.as_str());
        let why = failure.or_else(hangs).unwrap_or("there was nothing to write");
        match self.not_after {
            Some(at) if at > now => None,
            Some(at) => Some(format!("expired at {}; {why}", rfc3339(at))),
            None => Some(format!("not written yet: {why}")),
        }
    }
}

/// Something that is missing, expired or failing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The workload's name; empty for a sidecar's only one.
    pub workload: Arc<str>,
    /// The secret's name, or `output`.
    pub name: String,
    /// For people.
    pub reason: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.workload.is_empty() {
            write!(f, "{} ", self.workload)?;
        }
        write!(f, "{}: {}", self.name, self.reason)
    }
}

/// All `problems` in one line.
pub fn listed(problems: &[Problem]) -> String {
    problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

/// Overall health.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Health {
    /// What keeps the agent from being ready: missing or expired.
    pub missing: Vec<Problem>,
    /// What is served and can't be renewed at present.
    pub failing: Vec<Problem>,
}

impl Health {
    /// Health before the first look: not ready.
    pub fn unknown() -> Self {
        let first = Problem {
            workload: "".into(),
            name: "default".to_owned(),
            reason: "not available yet".to_owned(),
        };
        Self { missing: vec![first], failing: Vec::new() }
    }

    /// Whether nothing is missing of a sidecar's workload. What one of many workloads lacks does not count: it would take
    /// the agent away from all others.
    pub fn is_ready(&self) -> bool {
        self.missing.iter().all(|problem| !problem.workload.is_empty())
    }

    /// What is missing beside the program that the agent keeps running, which waits for it.
    pub fn missing_for_command(&self) -> Vec<Problem> {
        self.missing.iter().filter(|problem| problem.name != COMMAND).cloned().collect()
    }

    /// Adds a workload's part at `now`.
    fn add(
        &mut self,
        workload: &Arc<str>,
        own: &[&Snapshot],
        output: Option<&OutputHealth>,
        command: Option<&CommandHealth>,
        now: SystemTime,
    ) {
        let problem =
            |name: &str, reason| Problem { workload: Arc::clone(workload), name: name.to_owned(), reason };
        for one in own {
            let name = one.key.name.as_str();
            match (one.entry.valid_at(now), one.entry.failure()) {
                (Err(reason), _) => self.missing.push(problem(name, reason)),
                (Ok(_), Some(reason)) => self.failing.push(problem(name, reason)),
                (Ok(_), None) => {}
            }
        }
        match command.map(|command| (command.missing(), command.restart_failure.clone())) {
            Some((Some(reason), _)) => self.missing.push(problem(COMMAND, reason)),
            Some((None, Some(reason))) => self.failing.push(problem(COMMAND, reason)),
            Some((None, None)) | None => {}
        }
        let Some(output) = output else { return };
        match (output.missing(now), output.failure()) {
            (Some(reason), _) => self.missing.push(problem("output", reason)),
            (None, Some(failing)) => self.failing.push(problem("output", failing.reason)),
            (None, None) => {}
        }
    }
}

impl Cache {
    /// Health of every workload at `now`.
    pub fn health(&self, now: SystemTime) -> Health {
        let snapshots = self.snapshot_if(|key| key.name.is_own());
        self.health_from(&snapshots, self.workloads(), now).0
    }

    /// Health of `workload` at `now`.
    pub fn health_of(&self, workload: Workload, now: SystemTime) -> Health {
        let snapshots = self.snapshot_if(|key| key.workload == workload && key.name.is_own());
        self.health_from(&snapshots, vec![(workload, self.name_of(workload))], now).0
    }

    /// The health, and when something valid expires next.
    fn health_from(
        &self,
        snapshots: &[Snapshot],
        workloads: Vec<(Workload, Arc<str>)>,
        now: SystemTime,
    ) -> (Health, Option<SystemTime>) {
        let mut health = Health::default();
        let mut expirations = Vec::new();
        let mut by_workload: HashMap<_, Vec<_>> = HashMap::new();
        for one in snapshots {
            by_workload.entry(one.key.workload).or_default().push(one);
        }
        for (workload, name) in workloads {
            let own = by_workload.remove(&workload).unwrap_or_default();
            let components = self.components(workload);
            let (output, command) = (components.output(), components.command());
            health.add(&name, &own, output.as_ref(), command.as_deref(), now);
            expirations.extend(own.iter().filter_map(|one| one.entry.not_after()));
            let directories = output.iter().flat_map(|output| &output.directories);
            expirations.extend(directories.filter_map(|directory| directory.not_after));
        }
        (health, expirations.into_iter().filter(|at| *at > now).min())
    }
}

/// Follows the overall health.
#[derive(Debug)]
pub struct HealthWatcher {
    cache: Cache,
    changes: watch::Receiver<()>,
    clock: Clock,
    last: Option<Health>,
}

impl HealthWatcher {
    pub fn new(cache: Cache, clock: Clock) -> Self {
        Self { changes: cache.changes(), cache, clock, last: None }
    }

    /// Returns the health as soon as it differs from what was returned last.
    pub async fn next(&mut self) -> Health {
        loop {
            // Marked before the look: a change in between is not missed.
            self.changes.mark_unchanged();
            let now = self.clock.now();
            let snapshots = self.cache.snapshot_if(|key| key.name.is_own());
            let (health, expires) = self.cache.health_from(&snapshots, self.cache.workloads(), now);
            if self.last.as_ref() != Some(&health) {
                self.last = Some(health.clone());
                return health;
            }
            tokio::select! {
                () = self.clock.sleep_until_any(expires) => {}
                // The sender lives in the cache.
                _ = self.changes.changed() => {}
            }
        }
    }
}
