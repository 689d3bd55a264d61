//! `--ca exec`: a command's input, its output, and its failures.

use rustix::process::Signal;

use crate::support::files::spiffe;
use crate::support::issuer::Lie;
use crate::support::pipes::{GOOD, Pipes};
use crate::support::process::{Agent, Process, attache, strs};
use crate::support::wait::{wait_for, wait_until};

#[tokio::test]
async fn a_failed_command_is_reported_with_its_standard_error_and_retried() {
    let directory = tempfile::tempdir().unwrap();
    let ca = Pipes::start(directory.path());
    let options = ca.client();
    ca.set("yes", Lie::None);
    let mut agent = Agent::start(directory.path(), "web", &strs(&options));
    agent.process.wait_log("printed more than 1048576 bytes").await;
    ca.set("echo 'the HSM is asleep' >&2; exit 75", Lie::None);
    let (_, line) = agent.process.wait_log("exit status: 75").await;
    for words in
        ["WARN", "--ca-exec failed with exit status: 75; stderr: the HSM is asleep", "no certificate yet"]
    {
        assert!(line.contains(words), "{line}");
    }
    ca.set(GOOD, Lie::None);
    agent.process.wait_log("ready").await;
}

#[tokio::test]
async fn a_command_gets_the_agents_environment_without_its_options() {
    let directory = tempfile::tempdir().unwrap();
    let ca = Pipes::start(directory.path());
    let seen = directory.path().join("env");
    ca.set(&format!("env > env; {GOOD}"), Lie::None);
    let socket = directory.path().join("sds.sock").display().to_string();
    let no_files = directory.path().join("no-files").display().to_string();
    let options = ca.client();
    let fixed = ["run", "--socket", &socket, "--status-address", "none", "--cert-dir", &no_files];
    let mut command = attache(&[&fixed[..], &strs(&options), &["--cert-ttl", "120s"]].concat());
    let variables = [
        ("REGION", "north"),
        ("ATTACHE_CA_HEADER", "x-token=s3cret"),
        ("CA_HEADER_X_TOKEN", "s3cret"),
        ("ATTACHE_LOG", "debug"),
    ];
    command.envs(variables);
    let mut process = Process::start(command);
    process.wait_log("ready").await;
    let seen = std::fs::read_to_string(seen).unwrap();
    let own: Vec<_> = seen.lines().filter(|line| line.starts_with("ATTACHE_")).collect();
    assert_eq!(own.len(), 2, "{seen}");
    for line in ["REGION=north", &format!("ATTACHE_SPIFFE_ID={}", spiffe("web")), "ATTACHE_TTL_SECONDS=120"] {
        assert!(seen.lines().any(|seen| seen == line), "{line}: {seen}");
    }
    assert!(!seen.contains("s3cret"), "{seen}");
}

#[tokio::test]
async fn stopping_the_agent_kills_a_running_command_and_its_children() {
    let directory = tempfile::tempdir().unwrap();
    let ca = Pipes::start(directory.path());
    ca.set("trap '' TERM; sleep 1000 & echo $! > pid.new; mv pid.new pid; wait", Lie::None);
    let options = ca.client();
    let mut agent = Agent::start(directory.path(), "web", &strs(&options));
    let pid_file = directory.path().join("pid");
    let pid = wait_for("the command runs", async || std::fs::read_to_string(&pid_file).ok()).await;
    agent.process.signal(Signal::TERM);
    assert!(agent.process.ended().await.success());
    let stat = format!("/proc/{}/stat", pid.trim());
    let lives = || std::fs::read_to_string(&stat).is_ok_and(|stat| !stat.contains(") Z "));
    wait_until("the command's child is gone", || !lives()).await;
}

#[tokio::test]
async fn a_chain_without_a_root_is_refused_with_a_remedy_that_works() {
    let directory = tempfile::tempdir().unwrap();
    let ca = Pipes::start(directory.path());
    // Leaf and intermediate: all but the last certificate.
    ca.set("cat > csr && awk '/BEGIN/ { n++ } n < 3' answer", Lie::None);
    let options = ca.client();
    let mut agent = Agent::start(directory.path(), "web", &strs(&options));
    let (_, line) = agent.process.wait_log("no new certificate").await;
    assert!(line.contains("names no root") && line.contains("--ca-exec-roots"), "{line}");
    agent.process.kill().await;
    let root = format!("cat '{}'", directory.path().join("issuer/root-cert.pem").display());
    Agent::ready(directory.path(), "web", &[&strs(&options)[..], &["--ca-exec-roots", &root]].concat()).await;
}
