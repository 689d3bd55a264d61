//! The built binary as a child process, and its log.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Output, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, ChildStdin, Command};
use tokio::sync::watch;
use tokio::time::timeout;

use super::envoy::http_get;

/// Far longer than anything takes on a busy machine: what has not happened by then never will.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// The built binary, or the one that `ATTACHE` names.
pub fn binary() -> PathBuf {
    named_binary().unwrap_or_else(|| env!("CARGO_BIN_EXE_attache").into())
}

/// The binary that `ATTACHE` names: a release build.
pub fn named_binary() -> Option<PathBuf> {
    std::env::var_os("ATTACHE").filter(|binary| !binary.is_empty()).map(PathBuf::from)
}

/// A command line of the binary, without the test's own environment.
pub fn attache(arguments: &[&str]) -> Command {
    let mut command = Command::new(binary());
    command.args(arguments).env_clear().kill_on_drop(true).stdin(Stdio::null());
    command
}

/// A program of the machine that starts `attache`, without the test's own variables.
fn tool(name: &str) -> Command {
    let mut command = Command::new(name);
    command.env_clear().envs(std::env::var_os("PATH").map(|path| ("PATH", path)));
    command
}

/// Options as arguments.
pub fn strs(options: &[String]) -> Vec<&str> {
    options.iter().map(String::as_str).collect()
}

/// Flags with their values, as arguments.
pub fn flags<'a>(options: impl IntoIterator<Item = (&'a str, impl Into<String>)>) -> Vec<String> {
    options.into_iter().flat_map(|(flag, value)| [flag.to_owned(), value.into()]).collect()
}

/// Runs a command line until it exits.
pub async fn output(arguments: &[&str]) -> Output {
    timeout(PATIENCE, attache(arguments).output()).await.expect("the command does not exit").unwrap()
}

/// The same; returns exit code and standard error.
pub async fn failure(arguments: &[&str]) -> (i32, String) {
    let output = output(arguments).await;
    (output.status.code().unwrap(), String::from_utf8(output.stderr).unwrap())
}

type Lines = Arc<Mutex<Vec<(Instant, String)>>>;

/// A running `attache`; dropping it kills it.
pub struct Process {
    child: Child,
    lines: Lines,
    /// The number of lines.
    grown: watch::Receiver<usize>,
}

impl Process {
    /// Starts `command` and reads its log.
    pub fn start(mut command: Command) -> Self {
        let mut child = command.stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        let mut log = BufReader::new(child.stderr.take().unwrap()).lines();
        let lines = Lines::default();
        let (grow, grown) = watch::channel(0);
        tokio::spawn({
            let lines = Arc::clone(&lines);
            async move {
                while let Ok(Some(line)) = log.next_line().await {
                    let mut lines = lines.lock().unwrap();
                    lines.push((Instant::now(), line));
                    grow.send_replace(lines.len());
                }
            }
        });
        Self { child, lines, grown }
    }

    /// Everything logged so far.
    pub fn log(&self) -> String {
        let lines = self.lines.lock().unwrap();
        lines.iter().map(|(_, line)| format!("{line}\n")).collect()
    }

    /// The number of log lines with `words`.
    pub fn count(&self, words: &str) -> usize {
        self.lines.lock().unwrap().iter().filter(|(_, line)| line.contains(words)).count()
    }

    /// Waits until the log has `times` lines with `words`; returns the last of them, and when it was read.
    pub async fn wait_log_times(&mut self, words: &str, times: usize) -> (Instant, String) {
        let found = timeout(PATIENCE, async {
            loop {
                let found = {
                    let lines = self.lines.lock().unwrap();
                    lines.iter().filter(|(_, line)| line.contains(words)).nth(times - 1).cloned()
                };
                if let Some(found) = found {
                    return Some(found);
                }
                if self.grown.changed().await.is_err() {
                    return None;
                }
            }
        })
        .await;
        let Ok(Some(found)) = found else { panic!("{words:?} is not logged {times} times:\n{}", self.log()) };
        found
    }

    pub async fn wait_log(&mut self, words: &str) -> (Instant, String) {
        self.wait_log_times(words, 1).await
    }

    /// Waits for the next line with `words`.
    pub async fn wait_next_log(&mut self, words: &str) -> (Instant, String) {
        let known = self.count(words);
        self.wait_log_times(words, known + 1).await
    }

    /// Its standard input, if that is a pipe.
    pub fn input(&mut self) -> ChildStdin {
        self.child.stdin.take().unwrap()
    }

    pub fn signal(&self, signal: rustix::process::Signal) {
        rustix::process::kill_process(self.pid(), signal).unwrap();
    }

    pub fn pid(&self) -> rustix::process::Pid {
        let pid = self.child.id().expect("the process has exited");
        rustix::process::Pid::from_raw(pid.try_into().unwrap()).unwrap()
    }

    /// How it exited, if it did.
    pub fn exited(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().unwrap()
    }

    /// Waits until it exits.
    pub async fn ended(&mut self) -> ExitStatus {
        let ended = timeout(PATIENCE, self.child.wait()).await;
        ended.unwrap_or_else(|_| panic!("the process does not exit:\n{}", self.log())).unwrap()
    }

    /// Sends SIGKILL, and waits until it exits.
    pub async fn kill(&mut self) {
        self.child.start_kill().unwrap();
        self.ended().await;
    }
}

/// `attache run`.
pub struct Agent {
    pub process: Process,
    pub socket: PathBuf,
    arguments: Vec<String>,
}

impl Agent {
    /// Starts an agent with its socket in `directory`, and without the machine's own files. It may not be ready yet.
    pub fn start(directory: &Path, name: &str, arguments: &[&str]) -> Self {
        Self::start_as(directory, name, arguments, |command| command)
    }

    /// Starts it with another environment or working directory, or inside another program.
    pub fn start_as(
        directory: &Path,
        name: &str,
        arguments: &[&str],
        change: impl FnOnce(Command) -> Command,
    ) -> Self {
        let arguments = Self::arguments(directory, name, arguments);
        let socket = directory.join(format!("{name}.sock"));
        let all = strs(&arguments);
        Self { process: Process::start(change(attache(&all))), socket, arguments }
    }

    fn arguments(directory: &Path, name: &str, arguments: &[&str]) -> Vec<String> {
        let socket = directory.join(format!("{name}.sock"));
        let mut all = vec!["run", "--socket", socket.to_str().unwrap(), "--status-address", "127.0.0.1:0"];
        let no_files = directory.join("no-files");
        if !arguments.contains(&"--cert-dir") {
            all.extend(["--cert-dir", no_files.to_str().unwrap()]);
        }
        if !arguments.contains(&"--file-prefix") {
            // The files of tests lie elsewhere than those of Pods.
            all.extend(["--file-prefix", "/"]);
        }
        all.extend(arguments);
        all.into_iter().map(str::to_owned).collect()
    }

    /// Starts it in its own mount namespace, with a disk of `size` mounted on `disk`, which others reach through the
    /// process's `/proc/PID/root`.
    pub async fn on_small_disk(
        directory: &Path,
        name: &str,
        arguments: &[&str],
        disk: &Path,
        size: &str,
    ) -> Self {
        const SCRIPT: &str = r#"mount -t tmpfs -o "size=$1" none "$2" && shift 2 && exec "$@""#;
        let unshare = |script: &str| {
            let mut command = tool("unshare");
            command.args(["--user", "--map-root-user", "--mount", "sh", "-c", script, "sh"]);
            command.kill_on_drop(true).stdin(Stdio::null());
            command
        };
        let possible =
            unshare("true").output().await.expect("unshare (util-linux) is needed for a small disk");
        assert!(
            possible.status.success(),
            "a small disk needs user namespaces, which this machine does not allow: {}",
            String::from_utf8_lossy(&possible.stderr)
        );
        let arguments = Self::arguments(directory, name, arguments);
        let mut command = unshare(SCRIPT);
        command.arg(size).arg(disk).arg(binary()).args(&arguments);
        let socket = directory.join(format!("{name}.sock"));
        Self { process: Process::start(command), socket, arguments }
    }

    /// Starts it with `files` as its soft limit of open files.
    pub fn with_files(directory: &Path, name: &str, arguments: &[&str], files: u64) -> Self {
        let arguments = Self::arguments(directory, name, arguments);
        let mut command = tool("sh");
        command.args(["-c", &format!("ulimit -S -n {files} && exec \"$@\""), "sh"]);
        command.arg(binary()).args(&arguments);
        command.kill_on_drop(true).stdin(Stdio::null());
        let socket = directory.join(format!("{name}.sock"));
        Self { process: Process::start(command), socket, arguments }
    }

    /// Starts it and waits until it is ready.
    pub async fn ready(directory: &Path, name: &str, arguments: &[&str]) -> Self {
        let mut agent = Self::start(directory, name, arguments);
        agent.process.wait_log("ready").await;
        agent
    }

    /// Starts it again with the same options, after it has exited. Changes by [`Agent::start_as`] are not repeated.
    pub fn restart(&mut self) {
        let arguments: Vec<_> = self.arguments.iter().map(String::as_str).collect();
        self.process = Process::start(attache(&arguments));
    }

    /// The address of its probes and metrics.
    pub async fn status_address(&mut self) -> SocketAddr {
        let (_, line) = self.process.wait_log("attache serves").await;
        let (_, behind) = line.split_once("status=").unwrap();
        behind.split_whitespace().next().unwrap().parse().unwrap()
    }

    /// Status and body of a page at its status address.
    pub async fn status(&mut self, path: &str) -> (u16, String) {
        let (status, _, body) = http_get(self.status_address().await, path).await.unwrap();
        (status, body)
    }

    /// One sample of `/metrics`, by name and labels; 0 if there is none.
    pub async fn metric(&mut self, sample: &str) -> f64 {
        let (_, body) = self.status("/metrics").await;
        let value = body.lines().find_map(|line| line.strip_prefix(sample)?.strip_prefix(' ')?.parse().ok());
        value.unwrap_or(0.0)
    }

    /// Waits until a sample of its metrics has `value`.
    pub async fn wait_metric(&mut self, sample: &str, value: usize) {
        self.wait_metric_that(sample, |seen| seen == value as f64).await;
    }

    /// Waits until a sample of its metrics is as wanted.
    pub async fn wait_metric_that(&mut self, sample: &str, is_wanted: impl Fn(f64) -> bool) {
        let mut seen = self.metric(sample).await;
        let reached = async {
            while !is_wanted(seen) {
                tokio::time::sleep(Duration::from_millis(20)).await;
                seen = self.metric(sample).await;
            }
        };
        let is_reached = timeout(PATIENCE, reached).await.is_ok();
        assert!(is_reached, "{sample} stays at {seen}:\n{}", self.process.log());
    }

    /// Its anonymous memory, in kB. The agent hides the rest of its memory; this stays readable.
    pub fn memory(&self) -> u64 {
        let status = format!("/proc/{}/status", self.process.pid().as_raw_nonzero());
        let status = std::fs::read_to_string(status).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
        line.split_whitespace().next().unwrap().parse().unwrap()
    }

    /// The serial of each certificate issued to it, in order.
    pub fn serials(&self) -> Vec<String> {
        let log = self.process.log();
        let issued = log.lines().filter(|line| line.contains("certificate issued"));
        issued
            .filter_map(|line| Some(line.split_once("serial=\"")?.1.split('"').next()?.to_owned()))
            .collect()
    }
}

/// `attache ca`.
pub struct Ca {
    pub process: Process,
    pub address: SocketAddr,
    directory: PathBuf,
}

impl Ca {
    /// Starts a CA with TLS on a free port, with its files in `directory`.
    pub async fn start(directory: &Path) -> Self {
        Self::start_at(directory, "127.0.0.1:0".parse().unwrap()).await
    }

    async fn start_at(directory: &Path, listen: SocketAddr) -> Self {
        let ca_dir = directory.join("ca");
        let listen = listen.to_string();
        let arguments = ["ca", "--listen", &listen, "--ca-dir", ca_dir.to_str().unwrap()];
        let mut process = Process::start(attache(&arguments));
        let (_, line) = process.wait_log("CA listening").await;
        let (_, behind) = line.split_once("address=https://").unwrap();
        let address = behind.split_whitespace().next().unwrap().parse().unwrap();
        Self { process, address, directory: directory.to_owned() }
    }

    /// Starts it again at the same address, after it has exited.
    pub async fn restart(&mut self) {
        *self = Self::start_at(&self.directory, self.address).await;
    }

    /// The agent's options for it, with a fresh token for `account`.
    pub fn client(&self, account: &str) -> Vec<String> {
        let token = self.directory.join(format!("{account}.token"));
        super::files::write_token(&token, &super::files::token(account, "istio-ca", 3600));
        let root = self.directory.join("ca/root-cert.pem");
        let options = [
            ("--ca-address", self.address.to_string()),
            ("--ca-root", root.display().to_string()),
            ("--token-file", token.display().to_string()),
        ];
        flags(options)
    }
}
