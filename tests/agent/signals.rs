//! Signals that are requests: SIGHUP reloads, SIGUSR1 logs the status, and neither ends the agent.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use rustix::process::Signal;
use tokio::process::Command;
use tonic::Code;

use crate::support::fake_ca::{FakeCa, Mood};
use crate::support::files::{Mounted, spiffe};
use crate::support::process::{Agent, Process, output, strs};
use crate::support::wait::wait_until;

/// Whether the process handles SIGHUP and SIGUSR1.
fn handles_requests(process: &Process) -> bool {
    let status = format!("/proc/{}/status", process.pid().as_raw_nonzero());
    let status = std::fs::read_to_string(status).unwrap_or_default();
    let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap_or("0");
    let caught = u64::from_str_radix(caught.trim(), 16).unwrap();
    [Signal::HUP, Signal::USR1].iter().all(|signal| caught & 1 << (signal.as_raw() - 1) != 0)
}

fn request(process: &Process) {
    process.signal(Signal::HUP);
    process.signal(Signal::USR1);
}

fn embedded(directory: &Path) -> Vec<String> {
    ["--ca", "embedded", "--ca-dir", directory.join("ca").to_str().unwrap()].map(str::to_owned).into()
}

#[tokio::test]
async fn requests_by_signals_are_answered_and_end_the_agent_neither_at_its_start_nor_at_its_end() {
    let directory = tempfile::tempdir().unwrap();
    let go = directory.path().join("go");
    let hook = format!("while [ ! -e '{}' ]; do sleep 0.02; done", go.display());
    let out = directory.path().join("out");
    let mut options = embedded(directory.path());
    options.extend(["--output-dir", out.to_str().unwrap(), "--output-hook", &hook].map(str::to_owned));
    options.extend(["--drain-timeout", "1h", "--output-hook-timeout", "1h"].map(str::to_owned));
    let mut agent = Agent::start(directory.path(), "agent", &strs(&options));
    // As early as a signal can be handled.
    wait_until("requests are handled", || handles_requests(&agent.process)).await;
    request(&agent.process);
    // They are not lost.
    agent.process.wait_log("reload requested").await;
    agent.process.wait_log("status requested by SIGUSR1").await;
    agent.process.wait_log("ready").await;

    agent.process.signal(Signal::USR1);
    agent.process.wait_log_times("status requested by SIGUSR1", 2).await;
    // The text of `attache status`: what changes with time aside.
    agent.process.wait_log_times("output directory", 2).await;
    let shown = output(&["status", "--socket", agent.socket.to_str().unwrap()]).await;
    let shown = String::from_utf8(shown.stdout).unwrap();
    let log = agent.process.log();
    let dumped = log.rsplit("status requested by SIGUSR1\n").next().unwrap();
    let rows = |text: &str| -> Vec<String> {
        let rows = text.lines().filter(|line| !line.contains("left)") && !line.contains(" (in "));
        rows.skip(1).filter(|line| !line.is_empty()).map(str::to_owned).collect()
    };
    assert!(rows(&shown).len() > 5, "{shown}");
    assert_eq!(rows(dumped)[..rows(&shown).len()], rows(&shown), "{log}");

    // The agent waits for the hook.
    agent.process.signal(Signal::TERM);
    agent.process.wait_log("stopping").await;
    for _ in 0..20 {
        request(&agent.process);
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert!(agent.process.exited().is_none(), "{}", agent.process.log());
    std::fs::write(&go, "").unwrap();
    assert_eq!(agent.process.ended().await.code(), Some(0), "{}", agent.process.log());
    assert_eq!(agent.process.count("stopping at once"), 0);
}

#[tokio::test]
async fn a_reload_has_a_ca_that_failed_called_at_once() {
    let directory = tempfile::tempdir().unwrap();
    let ca = FakeCa::start(directory.path(), &spiffe("web")).await;
    ca.set(Mood::Refuse(Code::PermissionDenied));
    let options = ca.client(directory.path());
    let mut agent = Agent::start(directory.path(), "agent", &strs(&options));
    agent.process.wait_log("PermissionDenied").await;
    ca.set(Mood::Good);
    agent.process.signal(Signal::HUP);
    agent.process.wait_log("renewal requested").await;
    agent.process.wait_log("certificate issued").await;
    // A good certificate is left alone.
    agent.process.wait_log("ready").await;
    agent.process.signal(Signal::HUP);
    agent.process.wait_log_times("reload requested", 2).await;
    agent.process.signal(Signal::USR1);
    agent.process.wait_log("status requested").await;
    assert_eq!((agent.process.count("renewal requested"), agent.serials().len()), (1, 1));
}

/// An agent in whose mount namespace `merged` shows the files of `lower`. The kernel reports no change of these there.
fn behind_overlay(directory: &Path, arguments: &[&str], lower: &Path, merged: &Path) -> Agent {
    const SCRIPT: &str = r#"mount -t overlay -o "lowerdir=$1:$2" overlay "$3" && shift 3 && exec "$@""#;
    let empty = directory.join("empty");
    [lower, merged, &empty].iter().for_each(|path| std::fs::create_dir_all(path).unwrap());
    Agent::start_as(directory, "agent", arguments, |agent| {
        let mut command = Command::new("unshare");
        command.args(["-Urm", "sh", "-c", SCRIPT, "sh"]).args([lower, &empty, merged]);
        command.arg(agent.as_std().get_program()).args(agent.as_std().get_args());
        command
            .env_clear()
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
            .kill_on_drop(true)
            .stdin(Stdio::null());
        command
    })
}

#[tokio::test]
async fn a_reload_reads_mounted_files_again_whose_change_was_not_reported() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    let (lower, certs) = (path("lower"), path("certs"));
    // In place: an overlay keeps to the files that it has found.
    Mounted::new(&path("ca"), "web").write(&lower);
    let options = ["--ca", "none", "--cert-dir", certs.to_str().unwrap()];
    let mut agent = behind_overlay(directory.path(), &options, &lower, &certs);
    agent.process.wait_log(" ready ").await;
    // The looks at the start may still see the first ones. Then nothing is noticed within the debounce window.
    let mut unnoticed = None;
    for account in ["one", "two", "three", "four", "five"] {
        Mounted::new(&path("ca"), account).write(&lower);
        tokio::time::sleep(Duration::from_millis(400)).await;
        if agent.process.count(&spiffe(account)) == 0 {
            unnoticed = Some(spiffe(account));
            break;
        }
    }
    let unnoticed = unnoticed.unwrap_or_else(|| panic!("the kernel reports them:\n{}", agent.process.log()));
    agent.process.signal(Signal::HUP);
    let (_, line) = agent.process.wait_log(&unnoticed).await;
    assert!(line.contains("secret served from files"), "{line}");
}
