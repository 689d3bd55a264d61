//! `attache status`, `renew` and `log`, and the admin socket behind them.

use std::os::unix::fs::PermissionsExt as _;

use serde_json::Value;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tonic::Code;

use crate::support::fake_ca::{FakeCa, Mood};
use crate::support::files::spiffe;
use crate::support::process::{Agent, attache, failure, output, strs};
use crate::support::sds::{Stream, on_connection};

async fn succeeds(arguments: &[&str]) -> String {
    let output = output(arguments).await;
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[tokio::test]
async fn status_renew_and_log_report_and_act() {
    let directory = tempfile::tempdir().unwrap();
    let ca = FakeCa::start(directory.path(), &spiffe("web")).await;
    let mut agent = Agent::ready(directory.path(), "web", &strs(&ca.client(directory.path()))).await;
    let socket = agent.socket.to_str().unwrap().to_owned();
    let at = ["--socket", &socket];
    let mode = std::fs::metadata(format!("{socket}.admin")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);

    let report = async || -> Value {
        serde_json::from_str(&succeeds(&[&["status", "--output", "json"], &at[..]].concat()).await).unwrap()
    };
    let first = on_connection(&agent.socket.clone(), async |client| {
        let mut stream = Stream::open(&client, &["default"]).await.unwrap();
        let push = stream.next().await.unwrap();
        stream.accept(&push).await;
        agent.wait_metric("attache_acks_total{name=\"default\"}", 1).await;
        let table = succeeds(&[&["status"], &at[..]].concat()).await;
        for words in [
            &format!("on {socket}, process "),
            "ready; CA: citadel at",
            "default: ok, from ca",
            &spiffe("web"),
            "1 with this version (test)",
            "ROOTCA: ok",
        ] {
            assert!(table.contains(words), "{words}:\n{table}");
        }
        assert!(!table.contains('\u{1b}'), "no colours without a terminal");
        report().await
    })
    .await;
    assert_eq!((&first["schema"], &first["ready"]), (&1.into(), &true.into()));
    assert_eq!(first["secrets"][0]["key_pair"]["identity"], spiffe("web").as_str());
    let holding = &first["secrets"][0]["holding"][0];
    assert_eq!((&holding["streams"], &holding["nodes"]), (&1.into(), &serde_json::json!(["test"])));
    assert!(!first.to_string().contains("PRIVATE KEY"));

    // The certificate is renewed at once.
    succeeds(&[&["renew"], &at[..]].concat()).await;
    let second = report().await;
    let serial = |report: &Value| report["secrets"][0]["key_pair"]["serial"].clone();
    assert_ne!(serial(&first), serial(&second));
    // While the CA refuses, `renew` reports the reason, and the old certificate stays.
    ca.set(Mood::Refuse(Code::PermissionDenied));
    let (code, error) = failure(&[&["renew"], &at[..]].concat()).await;
    assert!(code == 1 && error.contains("PermissionDenied"), "{code} {error}");
    let third = report().await;
    assert_eq!((serial(&third), &third["secrets"][0]["state"]), (serial(&second), &"failing".into()));
    for field in ["failing_since", "next_try"] {
        assert!(
            third["secrets"][0][field].is_string() && second["secrets"][0][field].is_null(),
            "{field}: {third}"
        );
    }
    let table = succeeds(&[&["status"], &at[..]].concat()).await;
    let (_, shown) = table.split_once("    last error   ").unwrap();
    let rows: Vec<_> = shown.lines().skip(1).take(2).collect();
    assert!(rows[0].starts_with("    since        20") && rows[0].ends_with(" ago)"), "{table}");
    assert!(rows[1].starts_with("    next try     20"), "{table}");
    let events = third["events"].as_array().unwrap();
    assert_eq!(events.last().unwrap()["what"], "failing");
    let (code, error) = failure(&[&["renew", "file-root:system"], &at[..]].concat()).await;
    assert!(code == 1 && error.contains("files are read as soon as they change"), "{error}");

    assert_eq!(succeeds(&[&["log"], &at[..]].concat()).await, "info\n");
    assert_eq!(succeeds(&[&["log", "debug"], &at[..]].concat()).await, "debug\n");
    agent.process.wait_log("log level set").await;
    let (code, error) = failure(&[&["log", "loud"], &at[..]].concat()).await;
    assert!(code == 2 && error.contains("not a log level"), "{error}");
}

#[tokio::test]
async fn commands_report_an_agent_that_is_not_ready_or_not_running() {
    let directory = tempfile::tempdir().unwrap();
    let ca = FakeCa::start(directory.path(), &spiffe("web")).await;
    ca.set(Mood::Refuse(Code::PermissionDenied));
    let mut agent = Agent::start(directory.path(), "web", &strs(&ca.client(directory.path())));
    agent.process.wait_log("no new certificate").await;
    let socket = agent.socket.to_str().unwrap().to_owned();
    let (code, error) = failure(&["status", "--socket", &socket]).await;
    assert!(code == 1 && error.contains("not ready") && error.contains("PermissionDenied"), "{error}");

    let named = directory.path().join("named");
    let named = named.to_str().unwrap();
    let options = [ca.client(directory.path()), vec!["--admin-socket".to_owned(), named.to_owned()]].concat();
    let mut other = Agent::start(directory.path(), "other", &strs(&options));
    other.process.wait_log("no new certificate").await;
    assert_eq!(succeeds(&["log", "--admin-socket", named]).await, "info\n");
    let (code, error) = failure(&["log", "--socket", other.socket.to_str().unwrap()]).await;
    assert!(
        code == 1 && error.contains("has no admin socket") && error.contains("--admin-socket"),
        "{error}"
    );

    // Junk on the socket harms no other client.
    let mut io = tokio::net::UnixStream::connect(named).await.unwrap();
    io.write_all(b"\0\x01junk\r\n\r\n").await.unwrap();
    let mut answer = Vec::new();
    let _ = io.read_to_end(&mut answer).await;
    assert!(answer.is_empty() || answer.starts_with(b"HTTP/1.1 400"), "{answer:?}");
    assert_eq!(succeeds(&["log", "--admin-socket", named]).await, "info\n");

    let (code, error) = failure(&["status", "--socket", "/nowhere/socket"]).await;
    assert!(code == 1 && error.contains("/nowhere/socket.admin") && error.contains("attache run"), "{error}");
}

#[tokio::test]
async fn with_the_admin_socket_disabled_the_admin_commands_call_no_agent() {
    for command in ["status", "renew", "log"] {
        let mut command = attache(&[command]);
        let failed = command.env("ATTACHE_ADMIN_SOCKET", "none").output().await.unwrap();
        let error = String::from_utf8(failed.stderr).unwrap();
        assert!(failed.status.code() == Some(1), "{error}");
        assert!(
            error.contains("this agent has no admin socket (admin-socket is none)")
                && error.contains("--admin-socket"),
            "{error}"
        );
    }
}

#[tokio::test]
async fn each_command_reaches_the_agent_of_the_socket_that_it_names() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    let start = async |name: &str, more: &[&str]| {
        let (ca_dir, id) = (at(&format!("{name}-ca")), spiffe(name));
        let options = ["--ca", "embedded", "--ca-dir", &ca_dir, "--spiffe-id", &id];
        Agent::ready(directory.path(), name, &[&options[..], more].concat()).await
    };
    let (one, mut two) = (start("one", &[]).await, start("two", &[]).await);
    let identity = async |arguments: &[&str]| {
        let report = succeeds(&[&["status", "--output", "json"], arguments].concat()).await;
        let report: Value = serde_json::from_str(&report).unwrap();
        report["secrets"][0]["key_pair"]["identity"].as_str().unwrap().to_owned()
    };
    let (first, second) = (one.socket.display().to_string(), two.socket.display().to_string());
    let (first, second) = (first.as_str(), second.as_str());
    assert_eq!(identity(&["--socket", first]).await, spiffe("one"));
    assert_eq!(identity(&["--socket", second]).await, spiffe("two"));
    succeeds(&["renew", "--socket", second]).await;
    two.process.wait_log_times("certificate issued", 2).await;
    assert_eq!((one.serials().len(), two.serials().len()), (1, 2));

    // The same socket by another path.
    let link = at("link");
    std::os::unix::fs::symlink(directory.path(), &link).unwrap();
    assert_eq!(identity(&["--socket", &format!("{link}/two.sock")]).await, spiffe("two"));
    // No command acts on an agent that serves another socket than the one that it names.
    let (both, wrong) = (["--socket", second, "--admin-socket"], format!("{first}.admin"));
    for command in [&["status"][..], &["renew"], &["log", "debug"]] {
        let (code, error) = failure(&[command, &both, &[&wrong]].concat()).await;
        assert!(code == 1 && error.contains("belongs to another agent"), "{command:?}: {error}");
        assert!(error.contains(&format!("serves {first} and not {second}")), "{error}");
    }
    assert_eq!(
        (one.serials().len(), succeeds(&["log", "--admin-socket", &wrong]).await),
        (1, "info\n".into())
    );
}

#[tokio::test]
async fn the_shared_admin_socket_of_earlier_releases_is_used_for_its_own_agent_only() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    let (ca_dir, shared) = (at("ca"), at("admin.sock"));
    let options = ["--ca", "embedded", "--ca-dir", &ca_dir, "--admin-socket", &shared];
    let old = Agent::ready(directory.path(), "old", &options).await;
    let status = succeeds(&["status", "--socket", old.socket.to_str().unwrap()]).await;
    assert!(status.contains(&format!("process {},", old.process.pid().as_raw_nonzero())), "{status}");
    // An agent that is not reachable at all: the other one's state is not shown for it.
    let (code, error) = failure(&["status", "--socket", &at("new.sock")]).await;
    assert!(code == 1 && error.contains("new.sock.admin") && error.contains("attache run"), "{error}");

    // An agent that can't have its admin socket serves, and warns.
    std::fs::write(at("new.sock.admin"), "in the way").unwrap();
    let (ca_dir, new) = (at("new-ca"), at("new.sock"));
    let mut agent = Agent::ready(directory.path(), "new", &["--ca", "embedded", "--ca-dir", &ca_dir]).await;
    let (_, line) = agent.process.wait_log("no admin socket: attache status").await;
    assert!(line.contains("WARN") && line.contains("new.sock.admin exists and is not a socket"), "{line}");
    let (code, error) = failure(&["renew", "--socket", &new]).await;
    assert!(code == 1 && error.contains(&format!("the agent at {new} has no admin socket")), "{error}");
    assert_eq!((old.serials().len(), agent.serials().len()), (1, 1));
}
