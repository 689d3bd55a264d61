//! Commands of the user's: run by the shell, alone in their process group, bounded in what they say.

use std::convert::Infallible;
use std::fmt;
use std::io::{self, PipeWriter};
use std::process::ExitStatus;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process_group, test_kill_process_group};
use tokio::net::unix::pipe;
use tokio::process::{Child, Command};
use tokio::runtime::Handle;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::timeout;

use crate::base::limits;

/// What runs a command.
pub const SHELL: &str = "/bin/sh";
/// How long its processes may take to end after SIGTERM.
pub const TERM_GRACE: Duration = Duration::from_secs(2);

/// How variables of the agent's own begin, which may hold credentials, or let a command speak for the agent to systemd;
/// no command is given them.
const OWN_VARIABLES: [&str; 7] =
    ["ATTACHE_", "CA_HEADER_", "LISTEN_FD", "LISTEN_PID", "NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC"];

/// How many file descriptors this process was started with, where it takes more itself.
static FILES_BEFORE: OnceLock<u64> = OnceLock::new();

/// Takes as many file descriptors as this process may have: many systems give 1,024 at first, for old programs' sake.
/// Commands get no more than that: some close all they may have, one by one, and `select` knows no others.
pub fn allow_many_files() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    // It may fail where somebody forbids it; then there are fewer.
    let is_raised = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).is_ok();
    if let Some(before) = limit.current.filter(|_| is_raised && limit.current != limit.maximum) {
        let _ = FILES_BEFORE.set(before);
    }
}

/// `text` for the shell, which goes back to `files` before it does anything else.
fn with_files(text: &str, files: Option<u64>) -> String {
    match files {
        Some(files) => format!("ulimit -S -n {files} 2>/dev/null; {text}"),
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

/// Without the command: people put passwords there.
impl fmt::Debug for ShellCommand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ShellCommand(hidden)")
    }
}

impl ShellCommand {
    /// Starts it with the agent's environment, less the agent's own options, and with what `prepare` adds: variables,
    /// pipes. `heard` is what it writes into; `turn` is kept until the shell has ended.
    pub fn start(
        &self,
        prepare: impl FnOnce(&mut Command),
        heard: &[&Said],
        turn: Option<OwnedSemaphorePermit>,
    ) -> io::Result<Running> {
        let Self(text) = self;
        // The command holds the other ends of its pipes, and is gone at the end of the function.
        let mut command = Command::new(SHELL);
        command
            .arg("-c")
            .arg(with_files(text, FILES_BEFORE.get().copied()))
            .process_group(0)
            .kill_on_drop(true);
        for (name, _) in std::env::vars_os() {
            let is_own = |name: &str| OWN_VARIABLES.iter().any(|prefix| name.starts_with(prefix));
            if name.to_str().is_some_and(is_own) {
                command.env_remove(name);
            }
        }
        prepare(&mut command);
        let child = command.spawn()?;
        let group = Group::of(&child);
        let pipes = heard.iter().filter_map(|said| said.pipe.clone()).collect();
        Ok(Running(Some(Processes { child, group, turn, _pipes: pipes })))
    }
}

/// A command that runs. When this is dropped, all its processes are ended: SIGTERM, and SIGKILL to those that are left
/// [`TERM_GRACE`] later, or when the runtime ends.
#[derive(Debug)]
pub struct Running(Option<Processes>);

#[derive(Debug)]
struct Processes {
    child: Child,
    group: Group,
    turn: Option<OwnedSemaphorePermit>,
    /// Open until all are gone. A shell that tells of the end of its children into a pipe that nobody holds any more
    /// dies of that, instead of putting things in order.
    _pipes: Vec<Arc<pipe::Receiver>>,
}

impl Running {
    /// What its standard input is written to, where that is a pipe; once.
    pub fn stdin(&mut self) -> Option<tokio::process::ChildStdin> {
        self.0.as_mut()?.child.stdin.take()
    }

    /// Waits for the shell to end. What the command has left in the background on purpose may stay.
    pub async fn wait(&mut self) -> io::Result<ExitStatus> {
        let Some(processes) = &mut self.0 else { return std::future::pending().await };
        let status = processes.child.wait().await;
        // Its number may be another's from here on.
        processes.group.let_go();
        self.0 = None;
        status
    }

    /// Ends all its processes, and waits for that.
    pub async fn end(mut self) -> io::Result<()> {
        let Some(processes) = self.0.take() else { return Ok(()) };
        processes.group.signal(Signal::TERM);
        processes.killed().await
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let Some(processes) = self.0.take() else { return };
        if let Ok(runtime) = Handle::try_current() {
            processes.group.signal(Signal::TERM);
            // No longer than the grace; where the runtime ends before, they are killed at once.
            runtime.spawn(processes.killed());
        }
    }
}

impl Processes {
    /// Waits for all of them to be gone, but not longer than [`TERM_GRACE`].
    async fn killed(mut self) -> io::Result<()> {
        let Group(Some(pid)) = self.group else { return Ok(()) };
        let all_gone = async {
            let _ = self.child.wait().await;
            // What is left of the others may be a zombie that nobody buries.
            self.turn = None;
            while test_kill_process_group(pid).is_ok() {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        if timeout(TERM_GRACE, all_gone).await.is_err() {
            self.group.signal(Signal::KILL);
        }
        // Whatever it has done to its group, it does not outlive this.
        let _ = self.child.start_kill();
        self.child.wait().await?;
        self.group.let_go();
        Ok(())
    }
}

/// A process group. Killed when dropped.
#[derive(Debug)]
struct Group(Option<Pid>);

impl Group {
    fn of(child: &Child) -> Self {
        Self(child.id().and_then(|id| Pid::from_raw(id.try_into().ok()?)))
    }

    fn let_go(&mut self) {
        self.0 = None;
    }

    fn signal(&self, signal: Signal) {
        if let Some(pid) = self.0 {
            let _ = kill_process_group(pid, signal);
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.signal(Signal::KILL);
    }
}

/// What a command writes into a pipe. More than is kept is read and forgotten, so that it never waits for us.
#[derive(Debug)]
pub struct Said {
    /// None after its end.
    pipe: Option<Arc<pipe::Receiver>>,
    kept: Vec<u8>,
    most: usize,
    is_more: bool,
}

impl Said {
    /// A pipe of which `most` bytes are kept, and the end of it for the command.
    pub fn pipe(most: usize) -> io::Result<(Self, PipeWriter)> {
        let (reader, writer) = io::pipe()?;
        let pipe = Some(Arc::new(pipe::Receiver::from_owned_fd(reader.into())?));
        Ok((Self { pipe, kept: Vec::new(), most, is_more: false }, writer))
    }

    /// The same for words that people are to read.
    pub fn words() -> io::Result<(Self, PipeWriter)> {
        Self::pipe(limits::COMMAND_MESSAGE_BYTES)
    }

    /// Reads for as long as it is polled.
    pub async fn listen(&mut self) -> Infallible {
        loop {
            self.read_on().await;
        }
    }

    /// Reads until there is more than can be kept.
    pub async fn overflow(&mut self) {
        while !self.is_more {
            self.read_on().await;
        }
    }

    async fn read_on(&mut self) {
        let Some(pipe) = &self.pipe else { return std::future::pending().await };
        match pipe.readable().await {
            Ok(()) => self.take(),
            Err(_) => self.pipe = None,
        }
        // One that writes without end must not keep the thread.
        tokio::task::yield_now().await;
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
                    let room = self.most - self.kept.len();
                    self.kept.extend(buffer.iter().take(count.min(room)));
                    self.is_more |= count > room;
                }
            }
        }
    }

    /// The bytes; none if there were more than could be kept. Its end is not waited for: a process in the background
    /// may hold the pipe open.
    pub fn into_bytes(mut self) -> Option<Vec<u8>> {
        self.take();
        (!self.is_more).then_some(self.kept)
    }

    /// Reads on and forgets it, until nobody holds the other end any more: a process that was left in the background
    /// must not die at its next word. The agent's own end still ends the pipe.
    pub fn read_away(mut self) {
        const PAUSE: Duration = Duration::from_millis(100);
        // What is kept of it is not asked for any more.
        (self.kept, self.most) = (Vec::new(), 0);
        tokio::spawn(async move {
            while self.pipe.is_some() {
                self.read_on().await;
                // One that never stops talking waits for us, not we for it.
                tokio::time::sleep(PAUSE).await;
            }
        });
    }

    /// One line, fit for a log. Its end is not waited for either.
    pub fn into_text(mut self) -> String {
        self.text()
    }

    /// The same, as far as it has come.
    pub fn text(&mut self) -> String {
        self.take();
        let text = String::from_utf8_lossy(&self.kept);
        // A command that shows a key must not have us write it into the log.
        let text = match text.split_once("PRIVATE KEY") {
            Some((before, _)) => format!("{before}(a private key, and what follows, is not shown)"),
            None => text.into_owned(),
        };
        limits::sanitize_for_log(&text.trim().replace('\n', "; "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_gets_no_more_files_than_the_agent_was_started_with() {
        // The hard limit stays: a daemon may raise its own again.
        let text = "test $(ulimit -H -n) != 61 && ulimit -S -n && exit 7";
        let run = |text| std::process::Command::new(SHELL).arg("-c").arg(text).output().unwrap();
        let said = run(with_files(text, Some(61)));
        assert_eq!((said.stdout.as_slice(), said.status.code()), (b"61\n".as_slice(), Some(7)));
        assert_eq!(with_files(text, None), text);
        // A shell that can't do so runs the command all the same.
        let said = run(with_files("echo", Some(u64::MAX)));
        assert!(said.status.success() && said.stderr.is_empty(), "{said:?}");
    }
}
