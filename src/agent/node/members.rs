//! The workloads of a node that files describe: started, replaced and removed as their files appear, change and disappear.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::files::{Found, WorkloadFile};
use super::socket::Socket;
use super::starter::Starter;
use crate::agent::workloads::{Running, Workloads};
use crate::base::failure_log::FailureLog;
use crate::config::{Config, ConfigErrors, Description, parse_description};
use crate::export::output::OutputSettings;
use crate::ops::report::{Member, Roster};
use crate::secret::Version;
use crate::serve::listener::SocketFile;
use crate::source::issuer::StateDir;

/// The workloads by their names.
#[derive(Debug)]
pub(super) struct Members {
    starter: Starter,
    running: BTreeMap<Arc<str>, Served>,
    /// What was last seen of each file that is not applied.
    refused: BTreeMap<Arc<str>, Refused>,
    log: FailureLog,
    roster: Roster,
}

/// A workload that runs.
#[derive(Debug)]
struct Served {
    running: Running,
    /// Of its file.
    version: Version,
    path: PathBuf,
    socket: Socket,
    /// What is left on the disk when it goes.
    leaves: Leaves,
}

/// The files of a workload.
#[derive(Clone, Debug, Default)]
struct Leaves {
    state: Option<StateDir>,
    output: Option<OutputSettings>,
}

impl Leaves {
    /// Touches the disk.
    fn clear(&self, keeps: &Self) -> Vec<String> {
        let mut failures = Vec::new();
        if let Some(state) = self.state.as_ref().filter(|_| self.state != keeps.state) {
            failures.extend(state.clear().err().map(|error| format!("{}: {error}", state.path().display())));
        }
        if let Some(output) = self.output.as_ref().filter(|_| self.output != keeps.output) {
            failures.extend(output.clear().err().map(|error| error.to_string()));
        }
        failures
    }
}

/// A file that is not applied.
#[derive(Debug)]
struct Refused {
    version: Version,
    /// It depends on other files, too.
    is_conflict: bool,
}

/// Why a file is not applied.
enum Mistake {
    /// As long as the file does not change.
    InFile(Vec<String>),
    /// As long as another workload has what it names.
    Conflict(String),
}

impl From<ConfigErrors> for Mistake {
    fn from(ConfigErrors(mistakes): ConfigErrors) -> Self {
        Self::InFile(mistakes)
    }
}

impl Members {
    pub(super) fn new(starter: Starter, roster: Roster) -> Self {
        Self {
            starter,
            running: BTreeMap::new(),
            refused: BTreeMap::new(),
            log: FailureLog::default(),
            roster,
        }
    }

    /// Brings the workloads in line with what the directory holds.
    pub(super) fn apply(&mut self, directory: &Path, found: Found, workloads: &mut Workloads) {
        let mut found = match found {
            Ok(found) => found,
            Err(error) => return self.keep_all(directory, &error),
        };
        if self.log.recovered() {
            tracing::info!(directory = %directory.display(), "workloads read again");
        }
        self.roster.set_directory_failure(None);
        let gone: Vec<_> = self.running.keys().filter(|name| !found.contains_key(*name)).cloned().collect();
        for name in gone {
            self.remove(&name, workloads);
        }
        self.refused.retain(|name, _| found.contains_key(name));
        self.roster.retain_mistakes(|name| found.contains_key(name));
        // A file that names what another workload has may be applied once that one has gone, or was changed.
        let mut waiting: Vec<Arc<str>> = found.keys().cloned().collect();
        loop {
            let before = waiting.len();
            waiting.retain(|name| {
                let file = found.get(name).map(|file| self.apply_one(name, file, workloads));
                file == Some(false)
            });
            if waiting.is_empty() || waiting.len() == before {
                break;
            }
        }
        found.clear();
    }

    /// The directory can't be read: what is known stays.
    fn keep_all(&mut self, directory: &Path, error: &io::Error) {
        let reason = format!(
            "reading the directory {} failed: {error}; make it readable for the agent's user, or change --workloads",
            directory.display()
        );
        if self.log.is_new(&reason) {
            tracing::warn!(reason, workloads = self.running.len(), "workloads stay as they are");
        }
        self.roster.set_directory_failure(Some(reason));
    }

    /// False if the file conflicts with another workload.
    fn apply_one(&mut self, name: &Arc<str>, file: &WorkloadFile, workloads: &mut Workloads) -> bool {
        let version = match &file.content {
            Ok(content) => Version::of(content),
            Err(error) => Version::of(error.to_string().as_bytes()),
        };
        if self.running.get(name).is_some_and(|running| running.version == version) {
            if self.refused.remove(name).is_some() {
                self.roster.set_mistakes(name, Vec::new());
            }
            return true;
        }
        let before = self.refused.get(name).filter(|refused| refused.version == version);
        if before.is_some_and(|refused| !refused.is_conflict) {
            return true;
        }
        let is_known = before.is_some();
        match self.read(name, file) {
            Ok((description, config)) => {
                self.refused.remove(name);
                self.roster.set_mistakes(name, Vec::new());
                self.start(name, version, &file.path, &description, config, workloads);
                true
            }
            Err(mistake) => {
                let is_conflict = matches!(mistake, Mistake::Conflict(_));
                let mistakes = match mistake {
                    Mistake::InFile(mistakes) => mistakes,
                    Mistake::Conflict(mistake) => vec![mistake],
                };
                if !is_known {
                    self.warn(name, &mistakes);
                }
                self.roster.set_mistakes(name, mistakes);
                self.refused.insert(Arc::clone(name), Refused { version, is_conflict });
                !is_conflict
            }
        }
    }

    fn warn(&self, name: &str, mistakes: &[String]) {
        let consequence = match self.running.contains_key(name) {
            true => "file of a workload not used, the workload stays as it was",
            false => "file of a workload not used, the workload is not served",
        };
        for reason in mistakes {
            tracing::warn!(workload = name, reason, "{consequence}");
        }
    }

    /// What the file says, checked.
    fn read(&self, name: &Arc<str>, file: &WorkloadFile) -> Result<(Description, Config), Mistake> {
        let content = file.content.as_ref().map_err(|error| {
            Mistake::InFile(vec![format!(
                "reading {} failed: {error}; make it readable for the agent's user",
                file.path.display()
            )])
        })?;
        let description = parse_description(&file.path, content)?;
        let config = self.starter.config(name, &description)?;
        let others = || self.running.iter().filter(|(other, _)| *other != name);
        if let Some((other, _)) = others().find(|(_, other)| other.socket.path == config.socket) {
            return Err(Mistake::Conflict(format!(
                "socket {} is that of the workload {other} already: give each a socket of its own",
                config.socket.display()
            )));
        }
        let paths = |output: &Option<OutputSettings>| -> BTreeSet<PathBuf> {
            output.iter().flat_map(OutputSettings::paths).cloned().collect()
        };
        let own = paths(&config.output);
        let shared = |running: &Served| paths(&running.leaves.output).intersection(&own).next().cloned();
        if let Some((other, path)) = others().find_map(|(name, other)| Some((name, shared(other)?))) {
            return Err(Mistake::Conflict(format!(
                "{} is an output directory of the workload {other} already: give each a directory of its own",
                path.display()
            )));
        }
        Ok((description, config))
    }

    /// Starts a workload, in the place of the one that had its name.
    fn start(
        &mut self,
        name: &Arc<str>,
        version: Version,
        path: &Path,
        description: &Description,
        config: Config,
        workloads: &mut Workloads,
    ) {
        let leaves = Leaves { state: config.workload.state.clone(), output: config.output.clone() };
        let before = self.running.remove(name);
        let is_replaced = before.is_some();
        let kept = before.as_ref().map(|before| before.socket.clone());
        let kept = kept.filter(|socket| socket.path == config.socket && socket.mode == config.socket_mode);
        if let Some(before) = before {
            self.end(name, before, &leaves, kept.is_some(), workloads);
        }
        let socket = kept.unwrap_or_else(|| Socket::new(config.socket.clone(), config.socket_mode));
        let (bound, disk) = (socket.clone(), self.starter.shared.disk.clone());
        let listener = async move { bound.listener(&disk).await };
        let running = match self.starter.start(name, description, config, listener, workloads) {
            Ok(running) => running,
            Err(error) => {
                tracing::error!(workload = &**name, %error, "workload not started");
                return;
            }
        };
        let what = if is_replaced { "workload changed" } else { "workload added" };
        tracing::info!(workload = &**name, socket = %socket.path.display(), "{what}");
        let listed = Member {
            workload: running.workload,
            socket: Arc::new(socket.clone()),
            file: Some(path.to_owned()),
        };
        self.roster.add(name, listed);
        let member = Served { running, version, path: path.to_owned(), socket, leaves };
        self.running.insert(Arc::clone(name), member);
    }

    fn remove(&mut self, name: &Arc<str>, workloads: &mut Workloads) {
        let Some(running) = self.running.remove(name) else { return };
        self.roster.remove(name);
        tracing::info!(workload = &**name, file = %running.path.display(), "workload removed, its file is gone");
        self.end(name, running, &Leaves::default(), false, workloads);
    }

    /// Ends a workload. What it has on the disk goes, unless its successor keeps it.
    fn end(
        &self,
        name: &Arc<str>,
        ended: Served,
        keeps: &Leaves,
        keeps_socket: bool,
        workloads: &mut Workloads,
    ) {
        let Served { running, socket, leaves, .. } = ended;
        workloads.remove(running.workload);
        running.draining.close();
        let file = (!keeps_socket).then(|| socket.take_file()).flatten();
        let (disk, name, keeps) = (self.starter.shared.disk.clone(), Arc::clone(name), keeps.clone());
        // Each on a thread of its own: a disk that does not answer keeps nothing else.
        self.starter.shared.calls.spawn(async move {
            if let Some(file) = file {
                let path = file.path().to_owned();
                if let Err(reason) = disk.run(&path, move || drop(file)).await {
                    tracing::warn!(workload = &*name, %reason, "socket not removed");
                }
            }
            running.draining.wait().await;
            let path = leaves.state.as_ref().map(|state| state.path().to_owned());
            let path = path.or_else(|| leaves.output.as_ref()?.paths().next().cloned());
            let Some(path) = path else { return };
            match disk.run(&path, move || leaves.clear(&keeps)).await {
                Ok(failures) => {
                    for reason in failures {
                        tracing::warn!(workload = &*name, reason, "files of a removed workload left behind");
                    }
                }
                Err(reason) => {
                    tracing::warn!(workload = &*name, %reason, "files of a removed workload left behind");
                }
            }
        });
    }

    /// The files of all sockets, which are removed when the agent stops.
    pub(super) fn take_socket_files(&self) -> Vec<SocketFile> {
        self.running.values().filter_map(|member| member.socket.take_file()).collect()
    }
}
