//! Rights that the process gives up, and its warnings about modes that give other users too many.

use std::fs::{self, Permissions};
use std::io::Write as _;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::Path;
use std::process::Stdio;

use landlock::{AccessFs, CompatLevel, Compatible as _, Ruleset, RulesetAttr as _};
use tokio::process::Command;

use crate::readiness::renew;
use crate::support::fake_ca::FakeCa;
use crate::support::files::spiffe;
use crate::support::process::{Agent, failure, strs};
use crate::support::wait::wait_until;

/// The values of `label` in the kernel's status of each thread of the agent.
fn threads(agent: &Agent, label: &str) -> Vec<String> {
    let tasks = format!("/proc/{}/task", agent.process.pid().as_raw_nonzero());
    let tasks = fs::read_dir(tasks).unwrap();
    // A thread may end meanwhile.
    let statuses = tasks.filter_map(|task| fs::read_to_string(task.unwrap().path().join("status")).ok());
    let value = |status: String| {
        let value = status.lines().find_map(|line| line.strip_prefix(label)).unwrap();
        value.trim().to_owned()
    };
    statuses.map(value).collect()
}

#[tokio::test]
async fn no_thread_can_gain_privileges_unless_commands_are_configured() {
    let directory = tempfile::tempdir().unwrap();
    let ca = FakeCa::start(directory.path(), &spiffe("web")).await;
    let mut options = ca.client(directory.path());
    let agent = Agent::ready(directory.path(), "plain", &strs(&options)).await;
    let threads_of_plain = threads(&agent, "NoNewPrivs:");
    assert!(
        threads_of_plain.len() > 1 && threads_of_plain.iter().all(|it| it == "1"),
        "{threads_of_plain:?}"
    );
    let out = directory.path().join("out");
    options.extend(["--output-dir", out.to_str().unwrap(), "--output-hook", "true"].map(str::to_owned));
    let agent = Agent::ready(directory.path(), "hook", &strs(&options)).await;
    assert!(threads(&agent, "NoNewPrivs:").iter().all(|it| it == "0"));
}

/// Starts an agent with `--landlock`. Its output directory `directory/out` is a link, which leads to `outside` once the agent
/// has started.
async fn confined(
    directory: &Path,
    outside: &Path,
    ca: &FakeCa,
    change: impl FnOnce(Command) -> Command,
) -> Agent {
    for name in ["inside", "place"] {
        fs::create_dir(directory.join(name)).unwrap();
    }
    symlink("inside", directory.join("out")).unwrap();
    let path = |name: &str| directory.join(name).display().to_string();
    let mut options = ca.client(directory);
    options.extend(["--output-dir".to_owned(), path("out"), "--state-dir".to_owned(), path("new/state")]);
    options.extend(["--ready-file".to_owned(), path("place/ready"), "--landlock".to_owned()]);
    let mut agent = Agent::start_as(directory, "agent", &strs(&options), change);
    agent.process.wait_log(" ready ").await;
    wait_until("the ready file exists", || directory.join("place/ready").exists()).await;
    assert!(directory.join("inside/key.pem").exists() && directory.join("new/state/attache.state").exists());
    // The agent's own output path now leads to another directory.
    fs::remove_file(directory.join("out")).unwrap();
    symlink(outside, directory.join("out")).unwrap();
    let socket = agent.socket.to_str().unwrap().to_owned();
    renew(&socket).await;
    agent
}

#[tokio::test]
async fn a_confined_agent_does_its_work_and_writes_nowhere_else() {
    let (directory, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let ca = FakeCa::start(directory.path(), &spiffe("web")).await;
    let mut agent = confined(directory.path(), outside.path(), &ca, |command| command).await;
    let is_enforced = kernel_has_landlock();
    assert_eq!(agent.process.count("Landlock enforced"), usize::from(is_enforced), "{}", agent.process.log());
    assert_eq!(agent.process.count("Landlock not available"), usize::from(!is_enforced));
    if is_enforced {
        // The user of this test may write there.
        let (_, line) = agent.process.wait_log("Permission denied").await;
        assert!(line.contains(&directory.path().join("out").display().to_string()), "{line}");
        fs::write(outside.path().join("probe"), "").unwrap();
        assert!(!outside.path().join("key.pem").exists());
    } else {
        not_run("writes outside the agent's directories are denied", "this kernel does not provide Landlock");
    }
    let (ready_file, socket) = (directory.path().join("place/ready"), agent.socket.clone());
    agent.process.signal(rustix::process::Signal::TERM);
    assert_eq!(agent.process.ended().await.code(), Some(0));
    assert!(!ready_file.exists() && !socket.exists());
}

#[tokio::test]
async fn a_confined_agents_output_directory_is_open_to_readers_whatever_the_umask() {
    let directory = tempfile::tempdir().unwrap();
    let ca = FakeCa::start(directory.path(), &spiffe("web")).await;
    let out = directory.path().join("out");
    let state = directory.path().join("state");
    for (name, more) in [("confined", &["--landlock"][..]), ("free", &[])] {
        let mut options = ca.client(directory.path());
        options.extend(["--output-dir", out.to_str().unwrap()].map(str::to_owned));
        options.extend(["--state-dir", state.to_str().unwrap()].map(str::to_owned));
        options.extend(more.iter().map(|it| (*it).to_owned()));
        let with_umask = |agent: Command| {
            let mut command = Command::new("sh");
            command.args(["-c", "umask 077 && exec \"$@\"", "sh"]).arg(agent.as_std().get_program());
            command.args(agent.as_std().get_args()).env_clear().kill_on_drop(true).stdin(Stdio::null());
            command
        };
        let mut agent = Agent::start_as(directory.path(), name, &strs(&options), with_umask);
        agent.process.wait_log("output files written").await;
        wait_until("the state is written", || state.join("attache.state").exists()).await;
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&out), mode(&state)), (0o755, 0o700), "{name}");
        assert_eq!(mode(&out.join("root-cert.pem")), 0o644, "{name}");
        agent.process.kill().await;
        fs::remove_dir_all(&out).unwrap();
        fs::remove_dir_all(&state).unwrap();
    }
}

#[tokio::test]
async fn landlock_and_commands_contradict_each_other() {
    let commands: [(&[&str], &str); 2] = [
        (
            &["--ca", "embedded", "--ca-dir", "/x/ca", "--output-dir", "/x", "--output-hook", "true"],
            "--output-hook",
        ),
        (&["--ca", "exec", "--ca-exec", "true"], "--ca exec"),
    ];
    for (options, words) in commands {
        let (code, error) = failure(&[&["run", "--landlock"], options].concat()).await;
        assert!(
            code == 2 && error.contains(&format!("--landlock and {words} contradict each other")),
            "{error}"
        );
    }
}

/// Whether the kernel provides Landlock to this process.
fn kernel_has_landlock() -> bool {
    let ruleset = Ruleset::default().set_compatibility(CompatLevel::HardRequirement);
    ruleset.handle_access(AccessFs::Execute).and_then(Ruleset::create).is_ok()
}

/// Reports a case that can't run here, past the test harness, which captures the output of tests that pass.
fn not_run(case: &str, reason: &str) {
    let _ = writeln!(std::io::stderr(), "\nNOT RUN: {case}: {reason}\n");
}

/// Starts a program without Landlock: a seccomp filter makes its first system call fail with ENOSYS.
const WITHOUT_LANDLOCK: &str = r#"
import ctypes, os, struct, sys
CREATE_RULESET, ENOSYS = 444, 38
LOAD, IF_EQUAL, RETURN = 0x20, 0x15, 0x06
code = b"".join(struct.pack("<HBBI", *one) for one in [
    (LOAD, 0, 0, 0), (IF_EQUAL, 0, 1, CREATE_RULESET), (RETURN, 0, 0, 0x00050000 | ENOSYS), (RETURN, 0, 0, 0x7fff0000)])
kept = ctypes.create_string_buffer(code, len(code))
program = ctypes.create_string_buffer(struct.pack("HL", len(code) // 8, ctypes.addressof(kept)))
prctl = ctypes.CDLL(None, use_errno=True).prctl
assert prctl(38, 1, 0, 0, 0) == 0 and prctl(22, 2, program, 0, 0) == 0, os.strerror(ctypes.get_errno())
os.execv(sys.argv[1], sys.argv[1:])
"#;

#[tokio::test]
async fn a_kernel_without_landlock_is_reported_and_the_agent_works() {
    let (directory, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let ca = FakeCa::start(directory.path(), &spiffe("web")).await;
    let wrapped = |command: Command| {
        let command = command.into_std();
        let mut wrapped = Command::new("python3");
        wrapped.args(["-c", WITHOUT_LANDLOCK]).arg(command.get_program()).args(command.get_args());
        wrapped.kill_on_drop(true).stdin(std::process::Stdio::null());
        wrapped
    };
    let mut agent = confined(directory.path(), outside.path(), &ca, wrapped).await;
    let (_, line) = agent.process.wait_log("Landlock not available").await;
    assert!(line.contains(" WARN ") && line.contains("SystemCallFilter="), "{line}");
    assert_eq!(agent.process.count("Landlock enforced"), 0);
    wait_until("the renewed key is written", || outside.path().join("key.pem").exists()).await;
}

#[tokio::test]
async fn paths_open_to_every_user_are_reported_once_with_the_remedy_and_others_are_not() {
    let directory = tempfile::tempdir().unwrap();
    let ca = FakeCa::start(directory.path(), &spiffe("web")).await;
    let path = |name: &str| directory.path().join(name);
    let open = |name: &str, mode| fs::set_permissions(path(name), Permissions::from_mode(mode)).unwrap();
    let (certs, state) = (path("certs").display().to_string(), path("state").display().to_string());
    for directory in ["certs", "state"] {
        fs::create_dir(path(directory)).unwrap();
    }
    fs::write(path("certs/key.pem"), "not a key").unwrap();
    let mut options = ca.client(directory.path());
    options.extend(["--cert-dir", &certs, "--state-dir", &state, "--socket-mode", "0666"].map(str::to_owned));
    open("token", 0o644);
    open("state", 0o777);
    open("certs/key.pem", 0o644);
    let warnings = async |name: &str, more: &[&str]| {
        let agent = Agent::ready(directory.path(), name, &[&strs(&options)[..], more].concat()).await;
        let log = agent.process.log();
        log.lines()
            .filter(|line| line.contains("every local user can"))
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    // No other user can reach the paths.
    open("", 0o700);
    assert_eq!(warnings("closed", &[]).await, Vec::<String>::new());
    open("", 0o755);
    let concerns = warnings("open", &[]).await;
    let expected = [
        ("open.sock", "--allow-uid"),
        ("state", "chmod +t"),
        ("certs/key.pem, a private key", "chmod o-r"),
        ("token, which contains a credential for the CA", "chmod o-r"),
    ];
    for ((what, remedy), concern) in expected.iter().zip(&concerns) {
        assert!(
            concern.contains(" WARN ") && concern.contains(what) && concern.contains(remedy),
            "{concerns:#?}"
        );
    }
    assert_eq!(concerns.len(), expected.len(), "{concerns:#?}");
    open("token", 0o600);
    open("certs/key.pem", 0o640);
    open("state", 0o1777);
    assert_eq!(warnings("limited", &["--allow-uid", "1"]).await, Vec::<String>::new());
    open("", 0o777);
    let concerns = warnings("exposed", &["--allow-uid", "1"]).await;
    assert!(concerns.len() == 1 && concerns[0].contains("the directory of the socket"), "{concerns:#?}");
}

#[tokio::test]
async fn open_directories_of_the_client_certificate_and_of_roots_are_reported() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    let open = |name: &str, mode| fs::set_permissions(path(name), Permissions::from_mode(mode)).unwrap();
    for name in ["client", "roots", "token", "certs"] {
        fs::create_dir(path(name)).unwrap();
        open(name, if name == "client" { 0o755 } else { 0o777 });
    }
    for name in ["client/key.pem", "roots/ca.pem", "token/token"] {
        fs::write(path(name), "").unwrap();
        open(name, 0o644);
    }
    open("", 0o755);
    let text = |name: &str| path(name).display().to_string();
    // No CA listens there.
    let mut options = ["--ca-address", "127.0.0.1:1"].map(str::to_owned).to_vec();
    for (option, name) in [
        ("--ca-client-cert-dir", "client"),
        ("--ca-root", "roots/ca.pem"),
        ("--token-file", "token/token"),
        ("--cert-dir", "certs"),
    ] {
        options.extend([option.to_owned(), text(name)]);
    }
    let mut agent = Agent::start(directory.path(), "agent", &strs(&options));
    agent.process.wait_log("attache serves").await;
    for words in [
        format!("read {}, a private key", text("client/key.pem")),
        format!("write to {}, the directory of the CA's root", text("roots")),
        format!("write to {}, the directory of a credential for the CA", text("token")),
        format!("write to {}, a directory whose certificates are served", text("certs")),
    ] {
        assert_eq!(agent.process.count(&words), 1, "{words}: {}", agent.process.log());
    }

    // In a Pod a mount protects its files from other users; elsewhere it does not.
    for (name, host) in [("host", None), ("pod", Some(("KUBERNETES_SERVICE_HOST", "10.0.0.1")))] {
        let options = ["--ca-address", "http://127.0.0.1:1", "--token-file", "/proc/version"];
        let mut agent = Agent::start_as(directory.path(), name, &options, |mut command| {
            command.envs(host);
            command
        });
        agent.process.wait_log("attache serves").await;
        let reports = agent.process.count("every local user can read /proc/version");
        assert_eq!(reports, usize::from(host.is_none()), "{}", agent.process.log());
    }
}
