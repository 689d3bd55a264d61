//! The program that the agent keeps running: Envoy, or any other one.
//!
//! `Epochs` decides, and [`Supervisor`] does what it says: starts processes and waits for them, asks Envoy's admin
//! endpoint, follows files. It runs on the main thread: Envoy ends when the thread that started it does.

mod admin;
mod epochs;
mod events;
mod files;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
pub mod launch;
mod line;
mod lock;
mod log_lines;
mod notes;
mod process;
mod report;
mod restarts;
mod start;
mod tasks;
mod validate;

use std::collections::{BTreeMap, VecDeque};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::process::Signal;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Instant, sleep, timeout};

use self::admin::Admin;
use self::epochs::Epochs;
pub use self::events::Policy;
use self::events::{Action, Event, Outcome, RunId};
use self::files::RestartFiles;
pub use self::line::{CommandLine, OwnFiles, Restarts};
use self::process::Process;
use self::tasks::Done;
pub use self::validate::validate;
use crate::base::clock::{Clock, millis, until};
use crate::base::offload;
use crate::fs::disk::Disk;
use crate::fs::watch::Watcher;
use crate::os::command::orphans;
use crate::os::stderr::LogOutput;
use crate::store::health::Components;

/// How long the end waits for lines that the program has printed.
const LAST_WORDS: Duration = Duration::from_millis(500);
/// How long the first start waits for the files of `--restart-on`, with which it is compared later.
const FIRST_LOOK: Duration = Duration::from_secs(2);

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
    /// Processes whose lines are being passed on.
    printing: usize,
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
            printing: 0,
            restart_failure: None,
            files_failure: None,
        }
    }

    /// Runs until the program has ended for good: as requested, by itself, or because it can't be kept running.
    pub async fn run(mut self, mut requests: UnboundedReceiver<Request>) -> Result<(), CommandFailed> {
        orphans::adopt();
        let mut children = signal(SignalKind::child()).ok();
        loop {
            let due = self.epochs.due();
            let happened = tokio::select! {
                Some(done) = self.tasks.join_next() => {
                    offload::finished(done).map(|done| self.done(done)).unwrap_or_default()
                }
                Some(request) = requests.recv() => self.request(request).into_iter().collect(),
                () = until(due) => vec![Event::Time],
                Some(()) = async { children.as_mut()?.recv().await } => {
                    orphans::reap();
                    Vec::new()
                }
                else => std::future::pending().await,
            };
            let mut events = VecDeque::from(happened);
            while let Some(event) = events.pop_front() {
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
                if self.settings.restart_on.is_empty() {
                    return self.begin();
                }
                // Not before: the agent's own output may be among these files.
                let Context { watcher, disk, .. } = self.context.clone();
                self.look(RestartFiles::new(self.settings.restart_on.clone(), watcher, disk));
                self.tasks.spawn(async {
                    sleep(FIRST_LOOK).await;
                    Done::LookedLongEnough
                });
                None
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

    /// The program may start, if it has not been started yet.
    fn begin(&mut self) -> Option<Event> {
        (!std::mem::replace(&mut self.has_begun, true)).then_some(Event::Begin)
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

    /// Does what was decided, and returns what has happened by that.
    async fn perform(&mut self, action: Action) -> Option<Event> {
        match action {
            Action::Start { run, epoch, why } => return self.start(run, epoch, why).await,
            Action::Validate => {
                let words = self.settings.line.validate();
                self.tasks.spawn(async move { Done::Validated(validate(&words, validate::PATIENCE).await) });
            }
            Action::Drain(run) => return self.drain(run),
            Action::Terminate(run) => self.terminate(run),
            Action::Kill(run) => {
                if let Some(running) = self.running.get(&run) {
                    running.process.kill();
                }
            }
            Action::Unlock => {
                let line = &self.settings.line;
                // Of an Envoy that has chosen one, nothing else is known.
                let given = (!line.chooses_base_id()).then(|| line.base_id());
                let Some(base_id) = self.base_id.as_deref().or(given) else { return Some(Event::Locked) };
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

    fn drain(&mut self, run: RunId) -> Option<Event> {
        let running = self.running.get_mut(&run)?;
        let Some(admin) = running.admin.clone() else { return Some(Event::Drained(run)) };
        self.drained_badly = false;
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
        if connections > 0 && !self.drained_badly && !self.epochs.is_hurried() {
            tracing::warn!(
                epoch = running.epoch,
                connections,
                timeout_ms = millis(self.settings.policy.drain_timeout),
                "drain timeout exceeded, connections are cut; --drain-timeout gives them longer"
            );
        }
        running.process.signal(Signal::TERM);
    }

    /// Passes on what the program has printed last.
    async fn print_rest(&mut self) {
        while self.printing > 0
            && let Some(done) = self.tasks.join_next().await
        {
            self.printing -= usize::from(matches!(done, Ok(Done::Printed)));
        }
    }

    async fn end(mut self, outcome: Outcome) -> Result<(), CommandFailed> {
        self.running.clear();
        self.report();
        let _ = timeout(LAST_WORDS, self.print_rest()).await;
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
