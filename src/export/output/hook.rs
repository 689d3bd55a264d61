//! The command that runs after each swap, with a time limit, bounded output, and a process group of its own.

use std::ffi::OsString;
use std::io;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use tokio::time::timeout;

use crate::os::command::{CapturedOutput, SHELL, ShellCommand};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hook {
    pub command: ShellCommand,
    pub timeout: Duration,
}

/// Why a hook failed.
#[derive(Debug, thiserror::Error)]
pub enum HookError {
    #[error("starting {SHELL} failed: {0}; --output-hook needs a shell where the agent runs")]
    NotStarted(#[from] io::Error),
    #[error("the hook failed with {status}")]
    Failed { status: ExitStatus, output: String },
    #[error(
        "the hook did not exit within {timeout:?} and was killed; --output-hook-timeout allows it more time"
    )]
    TimedOut { timeout: Duration, output: String },
}

impl HookError {
    /// The label value in metrics.
    pub fn label(&self) -> &'static str {
        match self {
            Self::NotStarted(_) | Self::Failed { .. } => "failed",
            Self::TimedOut { .. } => "timeout",
        }
    }

    /// What the hook printed before it failed.
    pub fn output(&self) -> &str {
        match self {
            Self::NotStarted(_) => "",
            Self::Failed { output, .. } | Self::TimedOut { output, .. } => output,
        }
    }
}

impl Hook {
    /// Runs the hook until it exits, and returns what it printed as one line for the log. If the future is dropped earlier,
    /// all processes of the hook are killed.
    pub async fn run(&self, directories: &[PathBuf]) -> Result<String, HookError> {
        let (mut printed, writer) = CapturedOutput::for_log()?;
        let stdout = writer.try_clone()?;
        let prepare = |command: &mut tokio::process::Command| {
            if let Some(first) = directories.first() {
                command.env("ATTACHE_OUTPUT_DIR", first);
            }
            let paths: Vec<_> = directories.iter().map(|path| path.as_os_str().to_owned()).collect();
            command.env("ATTACHE_OUTPUT_DIRS", paths.join(&OsString::from(":")));
            command.stdin(Stdio::null()).stdout(stdout).stderr(writer);
        };
        let mut running = self.command.start(prepare, &[&printed], None)?;
        let exited = tokio::select! {
            exited = timeout(self.timeout, running.wait()) => exited,
            never = printed.read_forever() => match never {},
        };
        let Ok(status) = exited else {
            running.terminate().await?;
            return Err(HookError::TimedOut { timeout: self.timeout, output: printed.text() });
        };
        let (status, output) = (status?, printed.text());
        printed.discard_rest();
        if status.success() { Ok(output) } else { Err(HookError::Failed { status, output }) }
    }
}

#[cfg(test)]
mod tests;
