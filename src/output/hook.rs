//! The command that is run after each swap: bounded in time and words, and alone in its process group.

use std::convert::Infallible;
use std::fmt;
use std::io;
use std::path::Path;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process_group, test_kill_process_group};
use tokio::net::unix::pipe;
use tokio::process::{Child, Command};
use tokio::time::timeout;

use crate::limits;

const SHELL: &str = "/bin/sh";
/// How long its processes may take to end after SIGTERM.
const TERM_GRACE: Duration = Duration::from_secs(2);

/// A command for the shell.
#[derive(Clone, PartialEq, Eq)]
pub struct Hook {
    /// The command.
    pub command: String,
    /// How long it may take.
    pub timeout: Duration,
}

impl fmt::Debug for Hook {
    /// Without the command: people put passwords there.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Hook(command hidden, timeout {:?})", self.timeout)
    }
}

/// Why a hook did not do its work.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "each variant's message is its documentation")]
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
        let (reader, writer) = io::pipe()?;
        let mut words = Words { pipe: Some(pipe::Receiver::from_owned_fd(reader.into())?), kept: Vec::new() };
        // The command holds the pipe's other end, and is gone at the end of the statement.
        let mut child = Command::new(SHELL)
            .arg("-c")
            .arg(&self.command)
            .env("ATTACHE_OUTPUT_DIR", folder)
            .stdin(Stdio::null())
            .stdout(writer.try_clone()?)
            .stderr(writer)
            .process_group(0)
            .kill_on_drop(true)
            .spawn()?;
        let group = Group::of(&child);
        let ended = tokio::select! {
            ended = timeout(self.timeout, child.wait()) => ended,
            never = words.listen() => match never {},
        };
        let Ok(status) = ended else {
            group.end(&mut child).await?;
            return Err(HookError::TimedOut { timeout: self.timeout, output: words.into_text() });
        };
        // What it has left in the background on purpose may stay.
        group.let_go();
        let (status, output) = (status?, words.into_text());
        if status.success() { Ok(output) } else { Err(HookError::Failed { status, output }) }
    }
}

/// The hook's process group. Killed when dropped.
struct Group(Option<Pid>);

impl Group {
    fn of(child: &Child) -> Self {
        Self(child.id().and_then(|id| Pid::from_raw(id.try_into().ok()?)))
    }

    fn let_go(mut self) {
        self.0 = None;
    }

    /// SIGTERM, and SIGKILL to those that are left [`TERM_GRACE`] later.
    async fn end(self, child: &mut Child) -> io::Result<()> {
        let Self(Some(pid)) = self else { return Ok(()) };
        let _ = kill_process_group(pid, Signal::TERM);
        let all_gone = async {
            let _ = child.wait().await;
            while test_kill_process_group(pid).is_ok() {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        if timeout(TERM_GRACE, all_gone).await.is_err() {
            let _ = kill_process_group(pid, Signal::KILL);
        }
        // Whatever it has done to its group, it does not outlive this.
        let _ = child.start_kill();
        child.wait().await?;
        self.let_go();
        Ok(())
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if let Some(pid) = self.0 {
            let _ = kill_process_group(pid, Signal::KILL);
        }
    }
}

/// What the hook writes to standard output and standard error. More than is kept is read and forgotten, so that it
/// never waits for us.
struct Words {
    /// None after its end.
    pipe: Option<pipe::Receiver>,
    kept: Vec<u8>,
}

impl Words {
    async fn listen(&mut self) -> Infallible {
        while let Some(pipe) = &self.pipe {
            match pipe.readable().await {
                Ok(()) => self.take(),
                Err(_) => self.pipe = None,
            }
            // One that writes without end must not keep the thread.
            tokio::task::yield_now().await;
        }
        std::future::pending().await
    }

    /// Takes what is there now, as much as a pipe holds.
    fn take(&mut self) {
        let mut buffer = [0; 4096];
        for _ in 0..16 {
            let Some(pipe) = &self.pipe else { return };
            match pipe.try_read(&mut buffer) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Ok(0) | Err(_) => self.pipe = None,
                Ok(count) => {
                    let room = limits::HOOK_OUTPUT_BYTES - self.kept.len();
                    self.kept.extend(buffer.iter().take(count.min(room)));
                }
            }
        }
    }

    /// As one line. Its end is not waited for: a process in the background may hold the pipe open.
    fn into_text(mut self) -> String {
        self.take();
        let text = String::from_utf8_lossy(&self.kept);
        // A hook that shows the key that it was called for must not have us write it into the log.
        let text = match text.split_once("PRIVATE KEY") {
            Some((before, _)) => format!("{before}(a private key, and what follows, is not shown)"),
            None => text.into_owned(),
        };
        limits::foreign(&text.trim().replace('\n', "; "))
    }
}

#[cfg(test)]
mod tests;
