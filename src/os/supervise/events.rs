//! What happens to the program, and what is done about it.

use std::fmt;
use std::time::Duration;

use tokio::time::Instant;

use super::restarts::Digest;

/// What does not change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    /// A new epoch takes over from the old one. Otherwise the old one stops before the new one starts.
    pub is_hot: bool,
    /// The program can only check its configuration (`--mode validate`), and be drained. Any other one drains by itself
    /// after SIGTERM.
    pub is_envoy: bool,
    pub debounce: Duration,
    pub budget: u32,
    /// How long connections may last after SIGTERM.
    pub drain_timeout: Duration,
    /// When the old epoch is gone, counted from the moment when the new one is live.
    pub parent_shutdown: Duration,
}

/// Identifies a process of this run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct RunId(pub(super) u64);

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Exit {
    Code(i32),
    Signal(i32),
}

impl Exit {
    /// As a shell reports it.
    pub(super) fn code(self) -> u8 {
        let code = match self {
            Self::Code(code) => code,
            Self::Signal(signal) => 128 + signal,
        };
        u8::try_from(code).unwrap_or(u8::MAX)
    }

    pub(super) fn is_success(self) -> bool {
        self == Self::Code(0)
    }
}

impl fmt::Display for Exit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Code(code) => write!(f, "exit status {code}"),
            Self::Signal(signal) => write!(f, "signal {signal}"),
        }
    }
}

/// Why a process is started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Why {
    First,
    FilesChanged,
    Crash,
}

/// What has happened.
#[derive(Clone, Debug)]
pub(super) enum Event {
    /// The program may start.
    Begin,
    /// The files of `--restart-on` have this digest.
    Looked(Digest),
    /// A restart that failed is to be attempted again.
    Again,
    /// The program serves.
    Live(RunId),
    /// The program's own verdict on its configuration; an error has its words.
    Validated(Result<(), String>),
    /// The configuration could not be checked, for this reason.
    NotValidated(String),
    /// No connections are left, or nothing can be learned of them.
    Drained(RunId),
    Exited(RunId, Exit),
    /// The next epoch can't be started beside the old one.
    Locked,
    /// The agent stops. Each further one is a hurry.
    Stop,
    /// Only time has passed.
    Time,
}

/// What to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Action {
    Start {
        run: RunId,
        epoch: u32,
        why: Why,
    },
    /// Have the program check its configuration.
    Validate,
    /// Have the connections end.
    Drain(RunId),
    Terminate(RunId),
    Kill(RunId),
    /// Remove what the failed epoch has left: it keeps later ones from starting beside the old one.
    Unlock,
    Log(Note),
    End(Outcome),
}

/// What people want to know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Note {
    Live {
        run: RunId,
        epoch: u32,
        took: Duration,
    },
    Exited {
        run: RunId,
        epoch: u32,
        exit: Exit,
        role: Role,
    },
    BackingOff {
        delay: Duration,
        crashes: u32,
        budget: u32,
    },
    /// Files have changed, and an old epoch still drains.
    Waiting {
        epoch: u32,
    },
    Refused {
        words: String,
    },
    NotChecked {
        reason: String,
    },
    RestartFailed {
        epoch: u32,
        exit: Exit,
    },
    /// An epoch is stopped that did not become live.
    Stuck {
        epoch: u32,
        why: Why,
    },
    Killed {
        epoch: u32,
    },
}

/// What an epoch was for when it exited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// It served, or was to.
    Current,
    /// A newer one had taken over.
    Old,
    /// It was asked to exit.
    Stopped,
}

/// How it ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// As asked, or by itself with status 0.
    Done,
    /// The program's configuration is wrong, or it can't be executed.
    Refused { exit: Exit, words: String },
    /// It exited too often.
    GivenUp { exit: Exit, crashes: u32 },
}

/// The state of an epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    Starting,
    Live,
    /// A newer one has taken over.
    Draining,
    /// Its connections end, and it is stopped then.
    Leaving,
    /// It was sent SIGTERM.
    Stopping,
    Killed,
}

impl Phase {
    pub(super) fn word(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Live => "live",
            Self::Draining => "draining",
            Self::Leaving => "leaving",
            Self::Stopping | Self::Killed => "stopping",
        }
    }
}

/// One process.
#[derive(Clone, Copy, Debug)]
pub(super) struct Epoch {
    pub(super) run: RunId,
    pub(super) number: u32,
    pub(super) phase: Phase,
    pub(super) was_live: bool,
    /// When the phase began.
    pub(super) since: Instant,
}
