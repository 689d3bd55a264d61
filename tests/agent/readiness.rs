//! Waiting for the agent with its ready file and `attache get --wait`, and commands that keep watching it.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use rustix::process::Signal;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStderr, ChildStdout, Command};
use tokio::time::timeout;
use tonic::Code;

use crate::support::fake_ca::{FakeCa, Mood};
use crate::support::files::spiffe;
use crate::support::process::{Agent, PATIENCE, Process, attache, failure, output, strs};
use crate::support::wait::wait_until;

async fn refusing_ca(directory: &Path) -> FakeCa {
    let ca = FakeCa::start(directory, &spiffe("web")).await;
    ca.set(Mood::Refuse(Code::PermissionDenied));
    ca
}

/// Requests a renewal, until one succeeds.
pub async fn renew(socket: &str) {
    let mut renewed = output(&["renew", "--socket", socket]).await;
    if !renewed.status.success() {
        // A renewal in progress reports its own outcome, which may be a refusal from just before.
        renewed = output(&["renew", "--socket", socket]).await;
    }
    assert!(renewed.status.success(), "{}", String::from_utf8_lossy(&renewed.stderr));
}

#[tokio::test]
async fn the_ready_file_exists_while_the_agent_is_ready() {
    let directory = tempfile::tempdir().unwrap();
    let place = directory.path().join("place");
    std::fs::create_dir(&place).unwrap();
    let ready = place.join("ready");
    let ca = refusing_ca(directory.path()).await;
    let mut options = ca.client(directory.path());
    options.extend(["--ready-file", ready.to_str().unwrap(), "--cert-ttl", "6s"].map(str::to_owned));
    // The file of a run that was killed.
    std::fs::write(&ready, "attache is ready (process 1)\n").unwrap();
    let mut agent = Agent::start(directory.path(), "agent", &strs(&options));
    agent.process.wait_log("no new certificate").await;
    assert!(!ready.exists());

    // A disk that refuses writes is reported once, and retried.
    std::fs::remove_dir(&place).unwrap();
    ca.set(Mood::Good);
    let socket = agent.socket.to_str().unwrap().to_owned();
    renew(&socket).await;
    let (_, line) = agent.process.wait_log("ready file not written").await;
    assert!(line.contains(" WARN ") && line.contains("--ready-file"), "{line}");
    std::fs::create_dir(&place).unwrap();
    wait_until("the ready file exists", || ready.exists()).await;
    assert_eq!(std::fs::metadata(&ready).unwrap().permissions().mode() & 0o777, 0o644);
    let pid = agent.process.pid().as_raw_nonzero();
    assert_eq!(std::fs::read_to_string(&ready).unwrap(), format!("attache is ready (process {pid})\n"));
    assert_eq!(std::fs::read_dir(&place).unwrap().count(), 1);

    // Another agent that can't start leaves the file alone.
    let same = [&["run", "--socket", &socket], &strs(&options)[..]].concat();
    let (code, error) = failure(&same).await;
    assert!(code == 1 && error.contains("belongs to a live agent") && ready.exists(), "{error}");

    // So does an agent with another socket.
    let other = directory.path().join("other.sock").display().to_string();
    let other = [&["run", "--socket", &other, "--status-address", "none"], &strs(&options)[..]].concat();
    let (code, error) = failure(&other).await;
    assert!(code == 1 && error.contains(&format!("a running agent (process {pid})")), "{error}");
    assert!(error.contains("--ready-file") && ready.exists(), "{error}");

    ca.set(Mood::Refuse(Code::Unavailable));
    agent.process.wait_log("no longer ready").await;
    wait_until("the ready file is gone", || !ready.exists()).await;
    ca.set(Mood::Good);
    renew(&socket).await;
    wait_until("the ready file exists again", || ready.exists()).await;
    agent.process.signal(Signal::TERM);
    assert_eq!(agent.process.ended().await.code(), Some(0));
    assert!(!ready.exists());
    assert_eq!(agent.process.count("ready file not"), 1);

    std::fs::remove_dir(&place).unwrap();
    let (code, error) = failure(&same).await;
    assert!(code == 1 && error.contains("create or mount it") && error.contains("--ready-file"), "{error}");
}

#[tokio::test]
async fn get_waits_for_the_agent_and_for_all_secrets() {
    let directory = tempfile::tempdir().unwrap();
    let ca = refusing_ca(directory.path()).await;
    let socket = directory.path().join("agent.sock");
    let get = |more: &[&str]| {
        let mut command = attache(&[&["get", "--wait"], more].concat());
        command.env("ATTACHE_SOCKET", &socket);
        command
    };
    // Without an agent, it waits no longer than its timeout.
    let gone = get(&["--timeout", "300ms"]).output().await.unwrap();
    let error = String::from_utf8(gone.stderr).unwrap();
    assert!(
        gone.status.code() == Some(1) && error.contains("not available within 300ms: connecting"),
        "{error}"
    );

    let mut waiting = Process::start(get(&["--output", "none"]));
    waiting.wait_log("waiting: connecting to").await;
    let agent = Agent::start(directory.path(), "agent", &strs(&ca.client(directory.path())));
    waiting.wait_log("PermissionDenied").await;
    let late = get(&["default", "--timeout", "1s"]).output().await.unwrap();
    let error = String::from_utf8(late.stderr).unwrap();
    let last = error.lines().last().unwrap();
    assert!(
        late.status.code() == Some(1) && last.contains("not available within 1s: no secret \"default\""),
        "{error}"
    );
    assert!(last.contains("PermissionDenied"), "{error}");
    // A name that can never come is not waited for.
    let unknown = get(&["unknown", "default"]).output().await.unwrap();
    let error = String::from_utf8(unknown.stderr).unwrap();
    assert!(
        unknown.status.code() == Some(1) && error.contains("unknown resource name \"unknown\""),
        "{error}"
    );

    ca.set(Mood::Good);
    renew(socket.to_str().unwrap()).await;
    assert_eq!(waiting.ended().await.code(), Some(0), "{}", waiting.log());
    let silent = get(&["--output", "none"]).output().await.unwrap();
    assert!(silent.status.success() && silent.stdout.is_empty() && silent.stderr.is_empty());
    let shown = get(&["ROOTCA"]).output().await.unwrap();
    assert!(shown.status.success() && shown.stdout.starts_with(b"ROOTCA: trust bundle"));
    drop(agent);
}

/// Accepts `count` connections at `socket` and closes them silently, every other one after it has sent something.
async fn turn_away(socket: &Path, count: usize) {
    let listener = tokio::net::UnixListener::bind(socket).unwrap();
    for index in 0..count {
        let (mut peer, _) = timeout(PATIENCE, listener.accept()).await.expect("no client connects").unwrap();
        if index % 2 == 0 {
            peer.read_exact(&mut [0; 24]).await.unwrap();
        }
    }
    std::fs::remove_file(socket).unwrap();
}

#[tokio::test]
async fn a_client_that_is_always_turned_away_gives_up_and_one_turned_away_once_waits() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("agent.sock");
    let command = |arguments: &[&str]| {
        let mut command = attache(arguments);
        command.env("ATTACHE_SOCKET", &socket);
        command
    };
    let uid = rustix::process::getuid().as_raw();
    let words =
        format!("closed the connection: if it is Attaché, is user {uid} in its --allow-uid or --allow-gid?");
    let away = tokio::spawn({
        let socket = socket.clone();
        async move { turn_away(&socket, 1000).await }
    });
    wait_until("the test listens", || socket.exists()).await;
    // Each client reports once that it waits, and once that it has stopped waiting.
    for (arguments, times) in [(&["get"][..], 1), (&["get"], 1), (&["get", "--wait"], 2), (&["watch"], 1)] {
        let ended =
            timeout(PATIENCE, command(arguments).output()).await.expect("the command does not exit").unwrap();
        let error = String::from_utf8(ended.stderr).unwrap();
        assert_eq!(ended.status.code(), Some(1), "{error}");
        assert!(error.lines().count() == times && error.matches(&words).count() == times, "{error}");
    }
    away.abort();
    let _ = away.await;
    std::fs::remove_file(&socket).unwrap();

    // An agent that is stopping is followed by another one.
    let mut waiting = Process::start(command(&["get", "--wait"]));
    waiting.wait_log("waiting: connecting to").await;
    turn_away(&socket, 2).await;
    let ca = FakeCa::start(directory.path(), &spiffe("web")).await;
    let _agent = Agent::start(directory.path(), "agent", &strs(&ca.client(directory.path())));
    assert_eq!(waiting.ended().await.code(), Some(0), "{}", waiting.log());
}

/// A long-running command and its output.
struct Running {
    lines: Lines<BufReader<ChildStdout>>,
    errors: Lines<BufReader<ChildStderr>>,
    _child: Child,
}

impl Running {
    fn start(mut command: Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let errors = BufReader::new(child.stderr.take().unwrap()).lines();
        Self { lines, errors, _child: child }
    }

    /// The next line with `words`.
    async fn wait(&mut self, words: &str) -> String {
        wait(&mut self.lines, words).await
    }

    /// The next line with `words` on standard error.
    async fn wait_error(&mut self, words: &str) -> String {
        wait(&mut self.errors, words).await
    }
}

async fn wait<IO: tokio::io::AsyncBufRead + Unpin>(lines: &mut Lines<IO>, words: &str) -> String {
    let found = timeout(PATIENCE, async {
        loop {
            let line = lines.next_line().await.unwrap().expect("the command has exited");
            if line.contains(words) {
                return line;
            }
        }
    });
    found.await.unwrap_or_else(|_| panic!("{words:?} does not come"))
}

#[tokio::test]
async fn watch_and_status_continue_when_the_agent_restarts() {
    let directory = tempfile::tempdir().unwrap();
    let ca = FakeCa::start(directory.path(), &spiffe("web")).await;
    let mut agent = Agent::ready(directory.path(), "web", &strs(&ca.client(directory.path()))).await;
    let socket = agent.socket.to_str().unwrap().to_owned();
    let mut command = attache(&["watch", "default", "--output", "json"]);
    command.env("ATTACHE_SOCKET", &socket);
    let mut watching = Running::start(command);
    let serial = |line: String| {
        let push: serde_json::Value = serde_json::from_str(&line).unwrap();
        push["secret"]["certificates"][0]["serial"].as_str().unwrap().to_owned()
    };
    let mut serials = vec![serial(watching.wait("\"version\"").await)];
    let mut looking = Running::start(attache(&["status", "--watch", "--socket", &socket]));
    looking.wait("ready; CA: citadel").await;
    // A renewal is pushed.
    renew(&socket).await;
    serials.push(serial(watching.wait("\"version\"").await));

    agent.process.kill().await;
    // Reported once each: that the agent is gone, and that no agent listens.
    let gone = watching.wait_error("").await;
    assert!(gone.ends_with("; reconnecting") && !gone.contains("status:"), "{gone}");
    let retrying = watching.wait_error("").await;
    assert!(retrying.contains("connecting to ") && retrying.ends_with("; reconnecting"), "{retrying}");
    assert!(timeout(Duration::from_millis(1500), watching.wait_error("")).await.is_err());
    looking.wait_error("agent unreachable: connecting to the admin socket").await;
    agent.restart();
    serials.push(serial(watching.wait("\"version\"").await));
    looking.wait(&format!("process {},", agent.process.pid().as_raw_nonzero())).await;
    serials.dedup();
    assert_eq!(serials.len(), 3, "{serials:?}");

    let (code, error) = failure(&["watch", "--socket", "/nowhere/socket"]).await;
    assert!(code == 1 && error.contains("/nowhere/socket") && error.contains("attache run"), "{error}");
    let (code, error) = failure(&["status", "--watch", "--socket", "/nowhere/socket"]).await;
    assert!(code == 1 && error.contains("/nowhere/socket.admin"), "{error}");
}
