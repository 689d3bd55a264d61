//! The command that is run after each swap: bounded in time and words, and alone in its process group.

use std::io;
use std::path::Path;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use tokio::time::timeout;

use crate::os::command::{SHELL, Said, ShellCommand};

/// What is run, and how long.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hook {
    /// The command.
    pub command: ShellCommand,
    /// How long it may take.
    pub timeout: Duration,
}

/// Why a hook did not do its work.
#[derive(Debug, thiserror::Error)]
pub enum HookError {
    #[error("{SHELL} can't be started: {0}; --output-hook needs a shell where the agent runs")]
    NotStarted(#[from] io::Error),
    #[error("it ended with {status}")]
    Failed { status: ExitStatus, output: String },
    #[error("it did not end in {timeout:?} and was killed; --output-hook-timeout gives it longer")]
    TimedOut { timeout: Duration, output: String },
}

impl HookError {
    /// The word in the metrics.
    pub fn label(&self) -> &'static str {
        match self {
            Self::NotStarted(_) | Self::Failed { .. } => "failed",
            Self::TimedOut { .. } => "timeout",
        }
    }

    /// What the hook said before.
    pub fn output(&self) -> &str {
        match self {
            Self::NotStarted(_) => "",
            Self::Failed { output, .. } | Self::TimedOut { output, .. } => output,
        }
    }
}

impl Hook {
    /// Runs it to its end: what it said, fit for a log line. If this is dropped before, all its processes are killed.
    pub async fn run(&self, folder: &Path) -> Result<String, HookError> {
        let (mut words, writer) = Said::words()?;
        let stdout = writer.try_clone()?;
        let prepare = |command: &mut tokio::process::Command| {
            command.env("ATTACHE_OUTPUT_DIR", folder).stdin(Stdio::null()).stdout(stdout).stderr(writer);
        };
        let mut running = self.command.start(prepare, &[&words], None)?;
        let ended = tokio::select! {
            ended = timeout(self.timeout, running.wait()) => ended,
            never = words.listen() => match never {},
        };
        let Ok(status) = ended else {
            running.end().await?;
            return Err(HookError::TimedOut { timeout: self.timeout, output: words.into_text() });
        };
        let (status, output) = (status?, words.text());
        words.read_away();
        if status.success() { Ok(output) } else { Err(HookError::Failed { status, output }) }
    }
}

#[cfg(test)]
mod tests;
