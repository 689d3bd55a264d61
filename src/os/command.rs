//! User commands: run by the shell, in a process group of their own, with bounded output.

mod captured;
mod last_lines;
pub mod orphans;

use std::fmt;
use std::io;
use std::process::ExitStatus;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process_group, test_kill_process_group};
use tokio::net::unix::pipe;
use tokio::process::{Child, Command};
use tokio::runtime::Handle;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::timeout;

pub use self::captured::CapturedOutput;
use self::orphans::OwnChild;

pub const SHELL: &str = "/bin/sh";
/// How long processes may take to exit after SIGTERM.
pub const TERM_GRACE: Duration = Duration::from_secs(2);

/// Prefixes of the agent's own variables that may hold credentials, or let a command speak for the agent to systemd.
/// Commands don't inherit them.
const OWN_VARIABLES: [&str; 7] =
    ["ATTACHE_", "CA_HEADER_", "LISTEN_FD", "LISTEN_PID", "NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC"];

/// The soft limit of file descriptors before the agent raised it, if it did.
static ORIGINAL_FILE_LIMIT: OnceLock<u64> = OnceLock::new();

/// Raises the soft limit of file descriptors to the hard one: many systems start processes with 1,024, for the sake of old
/// programs. Commands keep the original limit: some close every descriptor up to it one by one, and `select` can't handle
/// higher ones.
pub fn raise_file_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    // May fail where a sandbox forbids it; then the limit stays.
    let is_raised = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).is_ok();
    if let Some(original) = limit.current.filter(|_| is_raised && limit.current != limit.maximum) {
        let _ = ORIGINAL_FILE_LIMIT.set(original);
    }
}

/// The soft limit of file descriptors that the agent was started with, if it has raised it.
pub(super) fn original_file_limit() -> Option<u64> {
    ORIGINAL_FILE_LIMIT.get().copied()
}

/// Has `command` not inherit the agent's own variables.
pub(super) fn remove_own_variables(command: &mut Command) {
    for (name, _) in std::env::vars_os() {
        let is_own = |name: &str| OWN_VARIABLES.iter().any(|prefix| name.starts_with(prefix));
        if name.to_str().is_some_and(is_own) {
            command.env_remove(name);
        }
    }
}

/// The shell script that restores the limit of file descriptors, if there is one to restore, and then runs `text`.
fn with_file_limit(text: &str, limit: Option<u64>) -> String {
    match limit {
        Some(limit) => format!("ulimit -S -n {limit} 2>/dev/null; {text}"),
        None => text.to_owned(),
    }
}

/// A command for the shell.
#[derive(Clone, PartialEq, Eq)]
pub struct ShellCommand(String);

impl From<&str> for ShellCommand {
    fn from(text: &str) -> Self {
        Self(text.to_owned())
    }
}

impl From<String> for ShellCommand {
    fn from(text: String) -> Self {
        Self(text)
    }
}

/// Without the text, which may contain passwords.
impl fmt::Debug for ShellCommand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ShellCommand(hidden)")
    }
}

impl ShellCommand {
    /// Starts the command with the agent's environment, less the agent's own options, and with what `prepare` adds:
    /// variables, pipes. `outputs` are the pipes it writes to; `permit` is held until the shell has exited.
    pub fn start(
        &self,
        prepare: impl FnOnce(&mut Command),
        outputs: &[&CapturedOutput],
        permit: Option<OwnedSemaphorePermit>,
    ) -> io::Result<RunningCommand> {
        let Self(text) = self;
        // Holds the command's ends of the pipes, and closes them at the end of this function.
        let mut command = Command::new(SHELL);
        command
            .arg("-c")
            .arg(with_file_limit(text, original_file_limit()))
            .process_group(0)
            .kill_on_drop(true);
        remove_own_variables(&mut command);
        prepare(&mut command);
        let child = command.spawn()?;
        let group = ProcessGroup::of(&child);
        let own = OwnChild::new(&child);
        let pipes = outputs.iter().filter_map(|output| output.pipe()).collect();
        Ok(RunningCommand(Some(Processes { child, _own: own, group, permit, _pipes: pipes })))
    }
}

/// A running command. When this is dropped, all its processes are terminated: SIGTERM, and SIGKILL to those that are left
/// [`TERM_GRACE`] later, or when the runtime shuts down.
#[derive(Debug)]
pub struct RunningCommand(Option<Processes>);

#[derive(Debug)]
struct Processes {
    child: Child,
    _own: OwnChild,
    group: ProcessGroup,
    permit: Option<OwnedSemaphorePermit>,
    /// Open until all processes have exited: a shell that reports the end of its children into a closed pipe is killed by
    /// SIGPIPE, before it can clean up.
    _pipes: Vec<Arc<pipe::Receiver>>,
}

impl RunningCommand {
    /// Takes the command's standard input, if that is a pipe.
    pub fn stdin(&mut self) -> Option<tokio::process::ChildStdin> {
        self.0.as_mut()?.child.stdin.take()
    }

    /// Waits until the shell exits. Processes that the command has left in the background on purpose keep running.
    pub async fn wait(&mut self) -> io::Result<ExitStatus> {
        let Some(processes) = &mut self.0 else { return std::future::pending().await };
        let status = processes.child.wait().await;
        // The kernel may reuse the group's number from here on.
        processes.group.release();
        self.0 = None;
        status
    }

    /// Terminates all processes of the command, and waits until they have exited.
    pub async fn terminate(mut self) -> io::Result<()> {
        let Some(processes) = self.0.take() else { return Ok(()) };
        processes.group.signal(Signal::TERM);
        processes.exited_or_killed().await
    }
}

impl Drop for RunningCommand {
    fn drop(&mut self) {
        let Some(processes) = self.0.take() else { return };
        if let Ok(runtime) = Handle::try_current() {
            processes.group.signal(Signal::TERM);
            // Ends after the grace period at the latest. If the runtime shuts down before, the processes are killed then.
            runtime.spawn(processes.exited_or_killed());
        }
    }
}

impl Processes {
    /// Waits until all processes have exited, and kills them after [`TERM_GRACE`].
    async fn exited_or_killed(mut self) -> io::Result<()> {
        let ProcessGroup(Some(pid)) = self.group else { return Ok(()) };
        let all_exited = async {
            let _ = self.child.wait().await;
            // What is left of the group may be a zombie that is never reaped.
            self.permit = None;
            while test_kill_process_group(pid).is_ok() {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        if timeout(TERM_GRACE, all_exited).await.is_err() {
            self.group.signal(Signal::KILL);
        }
        // Even if the shell has left its group, it does not survive this.
        let _ = self.child.start_kill();
        self.child.wait().await?;
        self.group.release();
        Ok(())
    }
}

/// A process group, which is killed when this is dropped.
#[derive(Debug)]
struct ProcessGroup(Option<Pid>);

impl ProcessGroup {
    fn of(child: &Child) -> Self {
        Self(child.id().and_then(|id| Pid::from_raw(id.try_into().ok()?)))
    }

    fn release(&mut self) {
        self.0 = None;
    }

    fn signal(&self, signal: Signal) {
        if let Some(pid) = self.0 {
            let _ = kill_process_group(pid, signal);
        }
    }
}

impl Drop for ProcessGroup {
    fn drop(&mut self) {
        self.signal(Signal::KILL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_gets_the_file_limit_that_the_agent_was_started_with() {
        // The hard limit stays, so that a daemon may raise its own again.
        let text = "test $(ulimit -H -n) != 61 && ulimit -S -n && exit 7";
        let run = |text| std::process::Command::new(SHELL).arg("-c").arg(text).output().unwrap();
        let output = run(with_file_limit(text, Some(61)));
        assert_eq!((output.stdout.as_slice(), output.status.code()), (b"61\n".as_slice(), Some(7)));
        assert_eq!(with_file_limit(text, None), text);
        // A shell that can't restore the limit still runs the command.
        let output = run(with_file_limit("echo", Some(u64::MAX)));
        assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    }
}
