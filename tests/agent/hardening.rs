//! What the process gives up of its own rights, and what it says of modes that give others too many.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::Path;

use tokio::process::Command;

use crate::readiness::renew;
use crate::support::fake_ca::FakeCa;
use crate::support::files::spiffe;
use crate::support::process::{Agent, failure, strs};
use crate::support::wait::wait_until;

/// What the kernel says of each of its threads under `label`.
fn threads(agent: &Agent, label: &str) -> Vec<String> {
    let tasks = format!("/proc/{}/task", agent.process.pid().as_raw_nonzero());
    let statuses = fs::read_dir(tasks)
        .unwrap()
        .map(|task| fs::read_to_string(task.unwrap().path().join("status")).unwrap());
    let value = |status: String| {
        let value = status.lines().find_map(|line| line.strip_prefix(label)).unwrap();
        value.trim().to_owned()
    };
    statuses.map(value).collect()
}

#[tokio::test]
async fn no_thread_can_gain_privileges_unless_there_are_commands() {
    let folder = tempfile::tempdir().unwrap();
    let ca = FakeCa::start(folder.path(), &spiffe("web")).await;
    let mut options = ca.client(folder.path());
    let agent = Agent::ready(folder.path(), "plain", &strs(&options)).await;
    let threads_of_plain = threads(&agent, "NoNewPrivs:");
    assert!(
        threads_of_plain.len() > 1 && threads_of_plain.iter().all(|it| it == "1"),
        "{threads_of_plain:?}"
    );
    let out = folder.path().join("out");
    options.extend(["--output-dir", out.to_str().unwrap(), "--output-hook", "true"].map(str::to_owned));
    let agent = Agent::ready(folder.path(), "hook", &strs(&options)).await;
    assert!(threads(&agent, "NoNewPrivs:").iter().all(|it| it == "0"));
}

/// An agent that may write in its own folders alone, of which `folder/out` is a link: to `outside` when it has started.
async fn confined(
    folder: &Path,
    outside: &Path,
    ca: &FakeCa,
    change: impl FnOnce(Command) -> Command,
) -> Agent {
    for name in ["inside", "place"] {
        fs::create_dir(folder.join(name)).unwrap();
    }
    symlink("inside", folder.join("out")).unwrap();
    let path = |name: &str| folder.join(name).display().to_string();
    let mut options = ca.client(folder);
    options.extend(["--output-dir".to_owned(), path("out"), "--state-dir".to_owned(), path("new/state")]);
    options.extend(["--ready-file".to_owned(), path("place/ready"), "--landlock".to_owned()]);
    let mut agent = Agent::start_as(folder, "agent", &strs(&options), change);
    agent.process.wait_log(" ready ").await;
    wait_until("the ready file is there", || folder.join("place/ready").exists()).await;
    assert!(folder.join("inside/key.pem").exists() && folder.join("new/state/attache.state").exists());
    // What was a folder of its own at the start is another one now.
    fs::remove_file(folder.join("out")).unwrap();
    symlink(outside, folder.join("out")).unwrap();
    let socket = agent.socket.to_str().unwrap().to_owned();
    renew(&socket).await;
    agent
}

#[tokio::test]
async fn a_confined_agent_does_its_work_and_writes_nowhere_else() {
    let (folder, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let ca = FakeCa::start(folder.path(), &spiffe("web")).await;
    let mut agent = confined(folder.path(), outside.path(), &ca, |command| command).await;
    if agent.process.log().contains("there is no landlock") {
        // The same as in the test below.
        return;
    }
    agent.process.wait_log("landlock is in force").await;
    // Whoever runs this test may write there.
    let (_, line) = agent.process.wait_log("Permission denied").await;
    assert!(line.contains(&folder.path().join("out").display().to_string()), "{line}");
    fs::write(outside.path().join("probe"), "").unwrap();
    assert!(!outside.path().join("key.pem").exists());
    let (kept, socket) = (folder.path().join("place/ready"), agent.socket.clone());
    agent.process.signal(rustix::process::Signal::TERM);
    assert_eq!(agent.process.ended().await.code(), Some(0));
    assert!(!kept.exists() && !socket.exists());

    let ca_dir = folder.path().join("ca").display().to_string();
    let commands: [(&[&str], &str); 2] = [
        (
            &["--ca", "embedded", "--ca-dir", &ca_dir, "--output-dir", "/x", "--output-hook", "true"],
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

/// Starts a program for which the kernel has no landlock: its first system call is not there.
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
async fn a_kernel_without_landlock_is_told_of_and_is_no_obstacle() {
    let (folder, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let ca = FakeCa::start(folder.path(), &spiffe("web")).await;
    let wrapped = |command: Command| {
        let command = command.into_std();
        let mut wrapped = Command::new("python3");
        wrapped.args(["-c", WITHOUT_LANDLOCK]).arg(command.get_program()).args(command.get_args());
        wrapped.kill_on_drop(true).stdin(std::process::Stdio::null());
        wrapped
    };
    let mut agent = confined(folder.path(), outside.path(), &ca, wrapped).await;
    let (_, line) = agent.process.wait_log("there is no landlock").await;
    assert!(line.contains(" WARN ") && line.contains("SystemCallFilter="), "{line}");
    assert_eq!(agent.process.count("landlock is in force"), 0);
    wait_until("the renewed key is there", || outside.path().join("key.pem").exists()).await;
}

#[tokio::test]
async fn what_everybody_can_reach_is_told_once_with_the_remedy_and_the_rest_is_not() {
    let folder = tempfile::tempdir().unwrap();
    let ca = FakeCa::start(folder.path(), &spiffe("web")).await;
    let path = |name: &str| folder.path().join(name);
    let open = |name: &str, mode| fs::set_permissions(path(name), Permissions::from_mode(mode)).unwrap();
    let (certs, state) = (path("certs").display().to_string(), path("state").display().to_string());
    for folder in ["certs", "state"] {
        fs::create_dir(path(folder)).unwrap();
    }
    fs::write(path("certs/key.pem"), "not a key").unwrap();
    let mut options = ca.client(folder.path());
    options.extend(["--cert-dir", &certs, "--state-dir", &state, "--socket-mode", "0666"].map(str::to_owned));
    open("token", 0o644);
    open("state", 0o777);
    open("certs/key.pem", 0o644);
    let said = async |name: &str, more: &[&str]| {
        let agent = Agent::ready(folder.path(), name, &[&strs(&options)[..], more].concat()).await;
        let log = agent.process.log();
        log.lines()
            .filter(|line| line.contains("everybody on this machine"))
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    // Nobody gets there.
    open("", 0o700);
    assert_eq!(said("closed", &[]).await, Vec::<String>::new());
    open("", 0o755);
    let concerns = said("open", &[]).await;
    let expected = [
        ("open.sock", "--allow-uid"),
        ("state", "chmod +t"),
        ("certs/key.pem, a private key", "chmod o-r"),
        ("token, which holds a credential for the CA", "chmod o-r"),
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
    assert_eq!(said("limited", &["--allow-uid", "1"]).await, Vec::<String>::new());
    open("", 0o777);
    let concerns = said("anybody", &["--allow-uid", "1"]).await;
    assert!(concerns.len() == 1 && concerns[0].contains("the folder of the socket"), "{concerns:#?}");
}

#[tokio::test]
async fn the_client_certificate_and_the_folders_that_decide_on_trust_are_looked_at() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
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
    // Nobody is there.
    let mut options = ["--ca-address", "127.0.0.1:1"].map(str::to_owned).to_vec();
    for (option, name) in [
        ("--ca-client-cert-dir", "client"),
        ("--ca-root", "roots/ca.pem"),
        ("--token-file", "token/token"),
        ("--cert-dir", "certs"),
    ] {
        options.extend([option.to_owned(), text(name)]);
    }
    let mut agent = Agent::start(folder.path(), "agent", &strs(&options));
    agent.process.wait_log("attache serves").await;
    for words in [
        format!("read {}, a private key", text("client/key.pem")),
        format!("write to {}, the folder of the CA's root", text("roots")),
        format!("write to {}, the folder of a credential for the CA", text("token")),
        format!("write to {}, a folder whose certificates are served", text("certs")),
    ] {
        assert_eq!(agent.process.count(&words), 1, "{words}: {}", agent.process.log());
    }

    // In a Pod a mount is nobody else's; elsewhere it is no excuse.
    for (name, host) in [("host", None), ("pod", Some(("KUBERNETES_SERVICE_HOST", "10.0.0.1")))] {
        let options = ["--ca-address", "http://127.0.0.1:1", "--token-file", "/proc/version"];
        let mut agent = Agent::start_as(folder.path(), name, &options, |mut command| {
            command.envs(host);
            command
        });
        agent.process.wait_log("attache serves").await;
        let told = agent.process.count("everybody on this machine can read /proc/version");
        assert_eq!(told, usize::from(host.is_none()), "{}", agent.process.log());
    }
}
