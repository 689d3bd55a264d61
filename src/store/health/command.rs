//! Health of the program that the agent keeps running.

use std::time::SystemTime;

/// The program, its processes, and how it has fared.
#[derive(Clone, Debug, Default)]
pub struct CommandHealth {
    /// Without its directory.
    pub program: String,
    pub state: CommandState,
    /// The oldest first. With hot restart, two of them overlap.
    pub epochs: Vec<EpochHealth>,
    pub restarts: Restarts,
    pub last_exit: Option<LastExit>,
    /// When the program is started again after a crash.
    pub next_start: Option<SystemTime>,
    /// Why the newest files have not led to a restart.
    pub restart_failure: Option<String>,
    /// Why the files of `--restart-on` can't be followed.
    pub files_failure: Option<String>,
    /// The node id of the Envoy that serves, by which its streams are known.
    pub node: Option<String>,
}

/// What the program does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CommandState {
    /// It is started once the agent is ready.
    #[default]
    Waiting,
    Starting,
    Live,
    /// It has crashed and is started again.
    BackingOff,
    /// It stops, to be started again.
    Restarting,
    /// It stops for good.
    Stopping,
}

/// Starts after the first one, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Restarts {
    pub files: u64,
    pub crash: u64,
    /// Restarts that the newest files should have caused, and that have failed.
    pub failed: u64,
}

/// One process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EpochHealth {
    pub epoch: u32,
    pub pid: u32,
    /// One word.
    pub state: &'static str,
    /// When the state began.
    pub since: SystemTime,
}

/// The last exit of a process that should have run on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LastExit {
    pub at: SystemTime,
    pub epoch: u32,
    /// For people.
    pub reason: String,
}

impl CommandState {
    pub fn word(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Starting => "starting",
            Self::Live => "live",
            Self::BackingOff => "backing off",
            Self::Restarting => "restarting",
            Self::Stopping => "stopping",
        }
    }
}

impl CommandHealth {
    /// Why the program does not serve.
    pub(super) fn missing(&self) -> Option<String> {
        let program = &self.program;
        let exited = self.last_exit.as_ref().map_or("it has not run yet", |exit| exit.reason.as_str());
        match self.state {
            CommandState::Live => None,
            CommandState::Waiting => {
                Some(format!("{program} is not started yet: it waits for the agent's secrets"))
            }
            CommandState::Starting => Some(format!("{program} is starting")),
            CommandState::BackingOff => Some(format!("{program} is to be started again: {exited}")),
            CommandState::Restarting => Some(format!("{program} is being restarted")),
            CommandState::Stopping => Some(format!("{program} is stopping")),
        }
    }
}
