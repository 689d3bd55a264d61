//! The program that the agent keeps running: Envoy, or any other one.
//!
//! [`Epochs`] decides, and [`Supervisor`] does what it says: starts processes and waits for them, asks Envoy's admin
//! endpoint, follows files. It runs on the main thread: Envoy ends when the thread that started it does.

mod admin;
mod epochs;
mod files;
pub mod launch;
mod line;
mod lock;
mod log_lines;
mod process;
mod report;
mod restarts;
mod validate;

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::process::ExitStatus;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::process::Signal;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Instant, sleep};

use self::admin::Admin;
pub use self::epochs::Policy;
use self::epochs::{Action, Epochs, Event, Exit, Note, Outcome, Role, RunId, Why};
use self::files::RestartFiles;
use self::line::ForEnvoy;
pub use self::line::{CommandLine, OwnFiles, Restarts};
use self::log_lines::Lines;
use self::process::Process;
use self::restarts::Digest;
use crate::base::clock::{Clock, millis};
use crate::fs::disk::Disk;
use crate::fs::watch::Watcher;
use crate::os::command::orphans;
use crate::os::stderr::LogOutput;
use crate::store::health::{Components, LastExit};

/// A program that is no Envoy counts as live when it has run for this long.
const RUNS: Duration = Duration::from_secs(1);
/// Bytes of the file with Envoy's base id.
const BASE_ID_BYTES: u64 = 64;

/// The program, and how it is kept running.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    pub line: CommandLine,
    /// Files that Envoy reads once.
    pub restart_on: Vec<PathBuf>,
    pub policy: Policy,
    /// How long an old Envoy drains.
    pub drain_seconds: u64,
    /// When an old Envoy exits.
    pub parent_shutdown_seconds: u64,
    /// How long the program waits for the agent's secrets.
    pub wait: Duration,
}

/// What others want of the program.
#[derive(Clone, Copy, Debug)]
pub enum Request {
    /// It may start.
    Begin,
    /// A restart that failed is repeated; a program without hot restart gets SIGHUP.
    Reload,
    /// It gets this signal, if it handles it.
    Pass(Signal),
    /// The agent stops. A further one is a hurry.
    Stop,
}

/// What a supervisor works with.
#[derive(Clone, Debug)]
pub struct Context {
    /// Where the files that Envoy writes for the agent are.
    pub files: OwnFiles,
    pub disk: Disk,
    pub watcher: Watcher,
    pub components: Components,
    pub clock: Clock,
    /// Where the program's lines are written as JSON; none if its standard error stays as it is.
    pub output: Option<LogOutput>,
}

/// The program has ended the agent.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CommandFailed {
    #[error("{program} can't run, or refuses its configuration ({exit}): {words}")]
    Refused { program: String, exit: String, words: String, code: u8 },
    #[error(
        "{program} exited {crashes} times without being live for ten minutes in between, the last time with {exit}: \
         --restart-budget is spent; its own log says why"
    )]
    GivenUp { program: String, exit: String, crashes: u32, code: u8 },
}

impl CommandFailed {
    /// The exit status that the agent takes over.
    pub fn code(&self) -> u8 {
        match self {
            Self::Refused { code, .. } | Self::GivenUp { code, .. } => *code,
        }
    }
}

/// A process, and what is known of it.
#[derive(Debug)]
struct Running {
    process: Process,
    epoch: u32,
    /// Once it is live, if it has an admin endpoint.
    admin: Option<Admin>,
    /// Connections of clients, while they are counted.
    left: Arc<AtomicU64>,
    /// Asks whether it is live, or has its connections end.
    task: Option<AbortHandle>,
}

/// What a task has found.
#[derive(Debug)]
enum Done {
    Exited(RunId, io::Result<ExitStatus>),
    Live(RunId, Option<Admin>, Option<String>),
    Validated(Result<(), String>),
    Drained(RunId, Result<(), String>),
    Looked(RestartFiles, Result<Digest, String>),
    /// The program has closed its standard error.
    Printed,
}

/// Keeps the program running.
#[derive(Debug)]
pub struct Supervisor {
    settings: Settings,
    context: Context,
    epochs: Epochs,
    running: BTreeMap<RunId, Running>,
    tasks: JoinSet<Done>,
    /// The base id that the first epoch has chosen.
    base_id: Option<String>,
    has_begun: bool,
    drained_badly: bool,
    restart_failure: Option<String>,
    files_failure: Option<String>,
}

impl Supervisor {
    pub fn new(settings: Settings, context: Context) -> Self {
        let epochs = Epochs::new(settings.policy, fastrand::f64);
        context.components.report_command(|health| health.program = settings.line.name().to_owned());
        Self {
            settings,
            context,
            epochs,
            running: BTreeMap::new(),
            tasks: JoinSet::new(),
            base_id: None,
            has_begun: false,
            drained_badly: false,
            restart_failure: None,
            files_failure: None,
        }
    }

    /// Runs until the program has ended for good: as requested, by itself, or because it can't be kept running.
    pub async fn run(mut self, mut requests: UnboundedReceiver<Request>) -> Result<(), CommandFailed> {
        orphans::adopt();
        let mut children = signal(SignalKind::child()).ok();
        if !self.settings.restart_on.is_empty() {
            let Context { watcher, disk, .. } = self.context.clone();
            self.look(RestartFiles::new(self.settings.restart_on.clone(), watcher, disk));
        }
        loop {
            let due = self.epochs.due();
            let event = tokio::select! {
                Some(done) = self.tasks.join_next() => match done {
                    Ok(done) => self.done(done),
                    Err(error) => match error.try_into_panic() {
                        Ok(panic) => std::panic::resume_unwind(panic),
                        Err(_) => None,
                    },
                },
                Some(request) = requests.recv() => self.request(request),
                () = until(due) => Some(Event::Time),
                Some(()) = async { children.as_mut()?.recv().await } => {
                    orphans::reap();
                    None
                }
                else => std::future::pending().await,
            };
            let Some(event) = event else {
                self.report();
                continue;
            };
            let mut events = vec![event];
            while let Some(event) = events.pop() {
                for action in self.epochs.on(event, Instant::now()) {
                    if let Action::End(outcome) = action {
                        return self.end(outcome).await;
                    }
                    events.extend(self.perform(action).await);
                }
            }
            self.report();
        }
    }

    fn request(&mut self, request: Request) -> Option<Event> {
        match request {
            Request::Begin => {
                self.has_begun = true;
                Some(Event::Begin)
            }
            Request::Reload => {
                if !self.settings.line.is_envoy() {
                    self.pass(Signal::HUP);
                }
                Some(Event::Again)
            }
            Request::Pass(signal) => {
                self.pass(signal);
                None
            }
            Request::Stop => Some(Event::Stop),
        }
    }

    /// To every process that handles it: another one would be killed by it.
    fn pass(&self, signal: Signal) {
        for running in self.running.values() {
            if running.process.handles(signal) {
                running.process.signal(signal);
            }
        }
    }

    fn look(&mut self, files: RestartFiles) {
        self.tasks.spawn(async {
            let (files, looked) = files.next().await;
            Done::Looked(files, looked)
        });
    }

    fn done(&mut self, done: Done) -> Option<Event> {
        match done {
            Done::Exited(run, status) => {
                let running = self.running.remove(&run)?;
                running.task.inspect(AbortHandle::abort);
                // What it has left behind of its group.
                running.process.kill();
                Some(Event::Exited(run, exit_of(status)))
            }
            Done::Live(run, admin, base_id) => {
                let is_without = admin.is_none() && self.settings.line.is_envoy();
                if is_without && self.running.contains_key(&run) {
                    tracing::warn!(
                        "Envoy has no admin endpoint, or can't write its address beside the socket: whether it is live is a \
                         guess, and its connections are cut when the agent stops; add admin: to its configuration"
                    );
                }
                self.running.get_mut(&run)?.admin = admin;
                self.base_id = base_id.or(self.base_id.take());
                Some(Event::Live(run))
            }
            Done::Validated(verdict) => Some(Event::Validated(verdict)),
            Done::Drained(run, outcome) => {
                if let Err(reason) = outcome {
                    self.drained_badly = true;
                    tracing::warn!(%reason, "connections not drained, stopping: Envoy's admin endpoint failed");
                }
                Some(Event::Drained(run))
            }
            Done::Looked(files, looked) => {
                self.look(files);
                let failure = looked.as_ref().err().cloned();
                if failure != self.files_failure {
                    match &failure {
                        Some(reason) => {
                            tracing::warn!(%reason, "files of --restart-on not read, changes have no effect")
                        }
                        None => tracing::info!("files of --restart-on readable again"),
                    }
                    self.files_failure = failure;
                }
                looked.ok().map(Event::Looked)
            }
            Done::Printed => None,
        }
    }

    /// Does what was decided, and returns what has happened by that.
    async fn perform(&mut self, action: Action) -> Option<Event> {
        match action {
            Action::Start { run, epoch, why } => return self.start(run, epoch, why).await,
            Action::Validate => {
                let words = self.settings.line.validate();
                self.tasks.spawn(async move { Done::Validated(validate::validate(&words).await) });
            }
            Action::Drain(run) => return self.drain(run),
            Action::Terminate(run) => self.terminate(run),
            Action::Kill(run) => {
                if let Some(running) = self.running.get(&run) {
                    running.process.kill();
                }
            }
            Action::Unlock => {
                let base_id = self.base_id.as_deref().unwrap_or(self.settings.line.base_id());
                // Shared memory is no disk: this takes microseconds, and the next start needs it.
                if let Err(error) = lock::remove(base_id) {
                    tracing::warn!(
                        %error, base_id,
                        "hot restart not possible until Envoy is stopped: a failed epoch has left its mark in shared memory; \
                         the next restart stops Envoy first"
                    );
                    return Some(Event::Locked);
                }
            }
            Action::Log(note) => self.log(note),
            Action::End(_) => {}
        }
        None
    }

    async fn start(&mut self, run: RunId, epoch: u32, why: Why) -> Option<Event> {
        let Settings { line, drain_seconds, parent_shutdown_seconds, .. } = &self.settings;
        let files = &self.context.files;
        let words = line.start(&ForEnvoy {
            epoch,
            files,
            base_id: self.base_id.as_deref(),
            drain_seconds: *drain_seconds,
            parent_shutdown_seconds: *parent_shutdown_seconds,
        });
        let admin_file = line.admin_file(files).to_owned();
        let base_id_file = line.chooses_base_id().then(|| line.base_id_file(files).to_owned());
        let is_envoy = line.is_envoy();
        let (program, number) = (line.name().to_owned(), is_envoy.then_some(epoch));
        if is_envoy {
            // That of an earlier one.
            let stale = admin_file.clone();
            let _ = self.context.disk.run(&admin_file, move || std::fs::remove_file(stale)).await;
        }
        let lines = self.context.output.clone();
        let lines =
            lines.map(|output| Lines::new(output, program.clone(), epoch, self.context.clock.clone()));
        let (lines, writer) = lines.and_then(Result::ok).unzip();
        let process = Process::start(&words, writer);
        let (process, child) = match process {
            Ok(started) => started,
            Err(error) => {
                tracing::error!(program, %error, "command not started");
                return Some(Event::Exited(run, Exit::Code(126)));
            }
        };
        let because = match why {
            Why::First => "the agent is ready or has waited long enough",
            Why::FilesChanged => "files have changed",
            Why::Crash => "it has exited",
        };
        tracing::info!(program, epoch = number, pid = process.id(), because, "command started");
        self.count(why);
        if let Some(lines) = lines {
            self.tasks.spawn(async move {
                lines.run().await;
                Done::Printed
            });
        }
        let mut child = child;
        self.tasks.spawn(async move { Done::Exited(run, child.wait().await) });
        let disk = self.context.disk.clone();
        let is_hot = line_is_hot(&self.settings);
        let task = self.tasks.spawn(async move {
            if !is_envoy {
                sleep(RUNS).await;
                return Done::Live(run, None, None);
            }
            let admin = admin::until_live(&admin_file, is_hot.then_some(epoch), &disk).await;
            let base_id = match base_id_file.filter(|_| epoch == 0) {
                Some(file) => disk.read(&file, BASE_ID_BYTES).await.ok().and_then(Result::ok),
                None => None,
            };
            let base_id = base_id.map(|text| String::from_utf8_lossy(&text).trim().to_owned());
            Done::Live(run, admin, base_id)
        });
        let running = Running { process, epoch, admin: None, left: Arc::default(), task: Some(task) };
        self.running.insert(run, running);
        None
    }

    fn drain(&mut self, run: RunId) -> Option<Event> {
        let running = self.running.get_mut(&run)?;
        let Some(admin) = running.admin.clone() else { return Some(Event::Drained(run)) };
        tracing::info!(epoch = running.epoch, "draining connections");
        let left = Arc::clone(&running.left);
        let task = self.tasks.spawn(async move { Done::Drained(run, admin.drain(left).await) });
        running.task = Some(task);
        None
    }

    fn terminate(&mut self, run: RunId) {
        let Some(running) = self.running.get_mut(&run) else { return };
        if let Some(task) = running.task.take() {
            task.abort();
        }
        let connections = running.left.load(Ordering::Relaxed);
        if connections > 0 && !self.drained_badly {
            tracing::warn!(
                epoch = running.epoch,
                connections,
                timeout_ms = millis(self.settings.policy.drain_timeout),
                "drain timeout exceeded, connections are cut; --drain-timeout gives them longer"
            );
        }
        running.process.signal(Signal::TERM);
    }

    fn log(&mut self, note: Note) {
        let program = self.settings.line.name();
        match note {
            Note::Live { epoch, took, .. } => {
                self.restart_failure = None;
                tracing::info!(program, epoch, after_ms = millis(took), "command live");
            }
            Note::Exited { epoch, exit, role: Role::Current, .. } => {
                let reason = exit.to_string();
                tracing::warn!(program, epoch, reason, "command exited");
                let at = self.context.clock.now();
                let last = LastExit { at, epoch, reason };
                self.context.components.report_command(|health| health.last_exit = Some(last));
            }
            Note::Exited { epoch, exit, role: Role::Old, .. } => {
                tracing::info!(program, epoch, reason = %exit, "old epoch drained and exited");
            }
            Note::Exited { epoch, exit, role: Role::Stopped, .. } => {
                tracing::info!(program, epoch, reason = %exit, "command stopped");
            }
            Note::BackingOff { delay, crashes, budget } => {
                tracing::warn!(
                    program,
                    delay_ms = millis(delay),
                    crashes,
                    budget,
                    "command is started again"
                );
            }
            Note::Refused { words } => {
                tracing::error!(
                    program,
                    reason = words,
                    "new configuration refused, the running Envoy keeps the old one; correct the file, or send SIGHUP to \
                     have it checked again"
                );
                self.failed(format!("the new configuration is refused: {words}"));
            }
            Note::RestartFailed { epoch, exit } => {
                tracing::error!(
                    program,
                    epoch,
                    reason = %exit,
                    "new epoch failed, the old one serves on; SIGHUP repeats the restart"
                );
                self.failed(format!("the new epoch ended before it was live: {exit}"));
            }
            Note::Stuck { epoch } => {
                tracing::warn!(program, epoch, "epoch not live after a minute, stopped for newer files");
            }
            Note::Killed { epoch } => {
                tracing::warn!(program, epoch, "command still running after SIGTERM, killed");
            }
        }
    }

    fn failed(&mut self, reason: String) {
        self.restart_failure = Some(reason);
        self.context.components.report_command(|health| health.restarts.failed += 1);
    }

    async fn end(mut self, outcome: Outcome) -> Result<(), CommandFailed> {
        self.running.clear();
        self.report();
        let program = self.settings.line.name().to_owned();
        if self.settings.line.is_envoy() {
            let files = self.context.files.clone();
            let disk = self.context.disk.at_the_edges();
            let remove = move || [files.admin, files.base_id].map(std::fs::remove_file);
            let _ = disk.run(&self.context.files.admin, remove).await;
        }
        match outcome {
            Outcome::Done => Ok(()),
            Outcome::Refused { exit, words } => {
                let words = if words.is_empty() { "its own message is above".to_owned() } else { words };
                Err(CommandFailed::Refused { program, exit: exit.to_string(), words, code: exit.code() })
            }
            Outcome::GivenUp { exit, crashes } => {
                Err(CommandFailed::GivenUp { program, exit: exit.to_string(), crashes, code: exit.code() })
            }
        }
    }
}

fn line_is_hot(settings: &Settings) -> bool {
    settings.line.restarts() == Restarts::Hot
}

async fn until(due: Option<Instant>) {
    match due {
        Some(due) => sleep(due.saturating_duration_since(Instant::now())).await,
        None => std::future::pending().await,
    }
}

fn exit_of(status: io::Result<ExitStatus>) -> Exit {
    use std::os::unix::process::ExitStatusExt as _;
    let Ok(status) = status else { return Exit::Code(1) };
    match (status.code(), status.signal()) {
        (Some(code), _) => Exit::Code(code),
        (None, signal) => Exit::Signal(signal.unwrap_or_default()),
    }
}
