//! What the benches share: the release binary, processes, and the kernel's view of them.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

/// Far longer than anything takes: what has not happened by then never will.
const PATIENCE: Duration = Duration::from_secs(30);

/// The binary that people run. The one that cargo builds for this program differs: it can unwind, and has test-only
/// features.
pub(crate) fn release_binary() -> PathBuf {
    if let Some(binary) = std::env::var_os("ATTACHE") {
        return binary.into();
    }
    let cargo = std::env::var_os("CARGO").unwrap_or("cargo".into());
    let built = Command::new(cargo)
        .args(["build", "--release", "--locked", "--bin", "attache", "--manifest-path"])
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"))
        .status();
    assert!(built.is_ok_and(|status| status.success()), "building the release binary failed");
    // Both profiles put their binary here; the last build wins.
    env!("CARGO_BIN_EXE_attache").into()
}

/// A child process that is stopped when it is dropped.
pub(crate) struct Process {
    child: Child,
    log: Receiver<String>,
}

impl Process {
    pub(crate) fn start(command: &mut Command) -> Self {
        Self::start_with(command, &[])
    }

    /// Starts it with these variables alone: this program's environment may configure a CA.
    pub(crate) fn start_with(command: &mut Command, variables: &[(&str, &str)]) -> Self {
        command
            .env_clear()
            .envs(variables.iter().copied())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        let mut child = command.spawn().unwrap_or_else(|error| panic!("starting {command:?}: {error}"));
        let lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let (sender, log) = channel();
        std::thread::spawn(move || lines.map_while(Result::ok).all(|line| sender.send(line).is_ok()));
        Self { child, log }
    }

    /// The next line of the log that contains `words`.
    pub(crate) fn wait_for(&self, words: &str) -> String {
        let mut log = String::new();
        loop {
            match self.log.recv_timeout(PATIENCE) {
                Ok(line) if line.contains(words) => return line,
                Ok(line) => log = log + &line + "\n",
                Err(_) => panic!("{words:?} is never logged:\n{log}"),
            }
        }
    }

    /// How many lines of the log since the last call contain `words`.
    #[allow(dead_code, reason = "few benches need it")]
    pub(crate) fn count(&self, words: &str) -> usize {
        self.log.try_iter().filter(|line| line.contains(words)).count()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Its file of this name in `/proc`.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/{name}", self.child.id()))
    }

    pub(crate) fn read(&self, file: &str) -> Option<String> {
        fs::read_to_string(self.path(file)).ok()
    }

    pub(crate) fn status(&self, name: &str) -> u64 {
        field(&self.read("status").unwrap(), name).unwrap()
    }

    /// The file of this name of each of its threads.
    pub(crate) fn of_threads(&self, file: &str) -> impl Iterator<Item = String> {
        let tasks = fs::read_dir(self.path("task")).unwrap();
        tasks.map(move |task| fs::read_to_string(task.unwrap().path().join(file)).unwrap())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.signal(Signal::TERM);
        self.child.wait().unwrap();
    }
}

/// The number after `name` at the start of a line.
pub(crate) fn field(text: &str, name: &str) -> Option<u64> {
    let value = text.lines().find_map(|line| line.strip_prefix(name))?;
    value.split_whitespace().next()?.parse().ok()
}
