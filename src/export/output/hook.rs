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
    Failed { status: ExitStatus, printed: Printed },
    #[error(
        "the hook did not exit within {timeout:?} and was killed; --output-hook-timeout allows it more time"
    )]
    TimedOut { timeout: Duration, printed: Printed },
}

/// What a hook printed before it failed.
#[derive(Debug)]
pub struct Printed {
    /// The begin, as one line for the log.
    line: String,
    /// The end, for the status.
    last_lines: Vec<String>,
}

impl From<&mut CapturedOutput> for Printed {
    fn from(output: &mut CapturedOutput) -> Self {
        Self { line: output.text(), last_lines: output.last_lines() }
    }
}

impl HookError {
    /// The label value in metrics.
    pub fn label(&self) -> &'static str {
        match self {
            Self::NotStarted(_) | Self::Failed { .. } => "failed",
            Self::TimedOut { .. } => "timeout",
        }
    }

    fn printed(&self) -> Option<&Printed> {
        match self {
            Self::NotStarted(_) => None,
            Self::Failed { printed, .. } | Self::TimedOut { printed, .. } => Some(printed),
        }
    }

    /// What the hook printed first, as one line.
    pub fn output(&self) -> &str {
        self.printed().map_or("", |printed| &printed.line)
    }

    /// What the hook printed last.
    pub fn last_lines(&self) -> &[String] {
        self.printed().map_or(&[], |printed| &printed.last_lines)
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
            return Err(HookError::TimedOut { timeout: self.timeout, printed: (&mut printed).into() });
        };
        let (status, kept) = (status?, Printed::from(&mut printed));
        printed.discard_rest();
        if status.success() { Ok(kept.line) } else { Err(HookError::Failed { status, printed: kept }) }
    }
}

#[cfg(test)]
mod tests;
