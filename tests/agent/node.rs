//! One agent with many workloads.

use std::os::unix::fs::PermissionsExt as _;
use std::time::Duration;

use rustix::process::Signal;
use serde_json::Value;
use tonic::Code;

use crate::support::fake_ca::{FakeCa, Mood};
use crate::support::files::{spiffe, token, write_token};
use crate::support::node::{Node, identity};
use crate::support::process::{failure, flags, output, strs};
use crate::support::sds::{Stream, fetch, on_connection, served_serial};
use crate::support::wait::{wait_for, wait_until};

/// The options of an embedded CA in `directory`.
fn embedded(directory: &std::path::Path) -> Vec<String> {
    flags([("--ca", "embedded".to_owned()), ("--ca-dir", directory.join("ca").display().to_string())])
}

#[tokio::test]
async fn workloads_come_and_go_and_change_without_the_others_noticing() {
    let directory = tempfile::tempdir().unwrap();
    let mut node = Node::start(directory.path(), &strs(&embedded(directory.path()))).await;
    node.describe("web", "web", "");
    node.wait_socket("web").await;
    assert_eq!(identity(&node.socket("web")).await, spiffe("web"));
    on_connection(&node.socket("web"), async |web| {
        let mut stream = Stream::open(&web, &["default"]).await.unwrap();
        let first = stream.next().await.unwrap();
        stream.accept(&first).await;

        node.describe("db", "db", "socket-mode = \"0600\"\nkey-type = \"ecdsa-p384\"");
        node.wait_socket("db").await;
        assert_eq!(identity(&node.socket("db")).await, spiffe("db"));
        let mode = std::fs::metadata(node.socket("db")).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);

        on_connection(&node.socket("db"), async |db| {
            let mut ended = Stream::open(&db, &["default"]).await.unwrap();
            let pushed = ended.next().await.unwrap();
            ended.accept(&pushed).await;
            node.describe("db", "other", "socket-mode = \"0600\"");
            assert_eq!(ended.next().await.unwrap_err().code(), Code::Unavailable);
        })
        .await;
        // The same socket serves the new identity.
        wait_for("the new identity", async || {
            (identity(&node.socket("db")).await == spiffe("other")).then_some(())
        })
        .await;

        std::fs::remove_file(node.file("db")).unwrap();
        wait_until("the end of db", || !node.socket("db").exists()).await;
        wait_until("the end of its state", || !directory.path().join("state/db").exists()).await;
        assert!(directory.path().join("state/web/attache.state").exists());
        assert!(stream.is_quiet(Duration::from_millis(200)).await, "web's stream goes on");
    })
    .await;
    node.process.signal(Signal::TERM);
    assert_eq!(node.process.ended().await.code(), Some(0));
    assert!(!node.socket("web").exists());
}

#[tokio::test]
async fn a_mistake_in_one_file_names_the_line_and_leaves_the_others_and_what_runs_alone() {
    let directory = tempfile::tempdir().unwrap();
    let mut node = Node::start(directory.path(), &strs(&embedded(directory.path()))).await;
    node.describe("web", "web", "");
    node.wait_socket("web").await;
    let before = served_serial(&node.socket("web")).await;
    node.describe("web", "web", "keytype = \"rsa-2048\"");
    let (_, line) = node.process.wait_log("the workload stays as it was").await;
    assert!(line.contains("keytype (line 3 of") && line.contains("did you mean key-type?"), "{line}");
    node.describe("db", "db", "cert-ttl = \"soon\"");
    let (_, line) = node.process.wait_log("the workload is not served").await;
    assert!(line.contains("workload=\"db\"") && line.contains("cert-ttl (line 3 of"), "{line}");
    assert_eq!(served_serial(&node.socket("web")).await, before);
    let report = node.report().await;
    assert_eq!((&report["ready"], report["mistakes"].as_array().unwrap().len()), (&Value::Bool(false), 2));
    let admin = directory.path().join("admin.sock").display().to_string();
    let table = output(&["status", "--admin-socket", &admin]).await;
    let table = String::from_utf8(table.stdout).unwrap();
    assert!(table.contains("file of db not used") && table.contains("file of web not used"), "{table}");

    // Of two files with one socket the second is the mistake, until the first is gone.
    node.describe("db", "db", "");
    node.wait_socket("db").await;
    std::fs::copy(node.file("db"), node.file("a")).unwrap();
    let (_, line) = node.process.wait_log("is that of the workload db already").await;
    assert!(line.contains("workload=\"a\"") && line.contains("give each a socket of its own"), "{line}");
    std::fs::remove_file(node.file("db")).unwrap();
    node.process.wait_log("workload added workload=\"a\"").await;
    wait_for("a", async || node.workload("a").await["ready"].as_bool().filter(|ready| *ready)).await;
    assert_eq!(identity(&node.socket("db")).await, spiffe("db"));
    assert_eq!(node.workload("db").await, Value::Null);
}

#[tokio::test]
async fn a_workload_is_reported_and_renewed_by_its_name() {
    let directory = tempfile::tempdir().unwrap();
    let node = Node::start(directory.path(), &strs(&embedded(directory.path()))).await;
    node.describe("web", "web", "");
    node.describe("db", "db", "");
    for name in ["web", "db"] {
        node.wait_socket(name).await;
        identity(&node.socket(name)).await;
    }
    let (web, db) = (served_serial(&node.socket("web")).await, served_serial(&node.socket("db")).await);
    let admin = directory.path().join("admin.sock").display().to_string();
    let agent = ["--admin-socket", &admin];
    let renewed = output(&[&["renew", "--workload", "web"], &agent[..]].concat()).await;
    assert!(renewed.status.success(), "{}", String::from_utf8_lossy(&renewed.stderr));
    assert_ne!(served_serial(&node.socket("web")).await, web);
    assert_eq!(served_serial(&node.socket("db")).await, db);
    let (code, error) = failure(&[&["renew"], &agent[..]].concat()).await;
    assert!(code == 1 && error.contains("name one with --workload"), "{error}");
    let (_, error) = failure(&[&["status", "--workload", "nope"], &agent[..]].concat()).await;
    assert!(error.contains("has no workload \"nope\""), "{error}");
    let one = output(&[&["status", "--workload", "db", "--output", "json"], &agent[..]].concat()).await;
    let one: Value = serde_json::from_slice(&one.stdout).unwrap();
    assert_eq!(one["socket"], node.socket("db").display().to_string());
    assert_eq!(one["workload"], "db");
}

#[tokio::test]
async fn a_nodes_files_are_served_by_no_name() {
    let directory = tempfile::tempdir().unwrap();
    let node = Node::start(directory.path(), &strs(&embedded(directory.path()))).await;
    node.describe("web", "web", "");
    node.wait_socket("web").await;
    on_connection(&node.socket("web"), async |client| {
        let roots = directory.path().join("ca/root-cert.pem");
        let name = format!("file-root:{}", roots.display());
        let refused = fetch(&client, &[&name]).await.unwrap_err();
        assert!(refused.message().contains("file-root:system alone"), "{refused}");
        let pair = fetch(&client, &["file-cert:/etc/hosts~/etc/hosts"]).await.unwrap_err();
        assert!(pair.message().contains("file-root:system alone"), "{pair}");
    })
    .await;
}

#[tokio::test]
async fn each_workload_uses_its_own_token_and_one_without_keeps_none_waiting() {
    let directory = tempfile::tempdir().unwrap();
    let ca = FakeCa::start(directory.path(), &spiffe("web")).await;
    let address = format!("http://{}", ca.address);
    let node = Node::start(directory.path(), &["--ca-address", &address]).await;
    let with_token = |name: &str| {
        let file = directory.path().join(format!("{name}.token"));
        format!("token-file = \"{}\"", file.display())
    };
    node.describe("absent", "absent", &with_token("absent"));
    write_token(&directory.path().join("web.token"), &token("web", "istio-ca", 3600));
    node.describe("web", "web", &with_token("web"));
    node.wait_socket("web").await;
    assert_eq!(identity(&node.socket("web")).await, spiffe("web"));
    let sent = ca.calls()[0].metadata.get("authorization").unwrap().to_str().unwrap().to_owned();
    assert_eq!(
        sent,
        format!("Bearer {}", std::fs::read_to_string(directory.path().join("web.token")).unwrap())
    );
    let absent =
        wait_for("the reason", async || node.workload("absent").await["error"].as_str().map(str::to_owned));
    let reason = absent.await;
    assert!(reason.contains("absent.token can't be read"), "{reason}");
    assert!(node.socket("absent").exists(), "a workload without a certificate has its socket");
}

#[tokio::test]
async fn with_the_agents_own_token_the_ca_is_asked_for_each_identity() {
    let directory = tempfile::tempdir().unwrap();
    let ca = FakeCa::start(directory.path(), &spiffe("web")).await;
    let own = directory.path().join("own.token");
    write_token(&own, &token("attache", "istio-ca", 3600));
    let (address, own) = (format!("http://{}", ca.address), own.display().to_string());
    let options = ["--ca-address", &address, "--ca-impersonate", "--token-file", &own];
    let node = Node::start(directory.path(), &options).await;
    node.describe("web", "web", "");
    node.wait_socket("web").await;
    assert_eq!(identity(&node.socket("web")).await, spiffe("web"));
    let asked = format!("{:?}", ca.calls()[0].request.metadata);
    assert!(asked.contains("ImpersonatedIdentity") && asked.contains(&spiffe("web")), "{asked}");
}

#[tokio::test]
async fn a_restart_serves_all_workloads_from_their_state_while_the_ca_is_down() {
    let directory = tempfile::tempdir().unwrap();
    let ca = FakeCa::start(directory.path(), &spiffe("web")).await;
    write_token(&directory.path().join("web.token"), &token("web", "istio-ca", 3600));
    let address = format!("http://{}", ca.address);
    let mut node = Node::start(directory.path(), &["--ca-address", &address]).await;
    let file = directory.path().join("web.token");
    node.describe("web", "web", &format!("token-file = \"{}\"", file.display()));
    node.wait_socket("web").await;
    let serial = served_serial(&node.socket("web")).await;
    wait_until("its state", || directory.path().join("state/web/attache.state").exists()).await;
    ca.set(Mood::Refuse(Code::Unavailable));
    for signal in [Signal::TERM, Signal::KILL] {
        node.restart(signal).await;
        wait_for("web", async || node.workload("web").await["ready"].as_bool().filter(|ready| *ready)).await;
        assert_eq!(served_serial(&node.socket("web")).await, serial);
    }
}

#[tokio::test]
async fn a_check_reports_the_mistakes_of_all_files_with_their_lines_and_what_each_workload_lacks() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    for name in ["workloads", "state", "kubelet/pods", "kubelet/plugins"] {
        std::fs::create_dir_all(path(name)).unwrap();
    }
    let socket = |name: &str| format!("socket = \"{}\"\n", path(name).display());
    let id = "spiffe-id = \"spiffe://cluster.local/ns/default/sa/web\"\n";
    let files = [
        ("web", socket("web.sock") + id),
        ("twin", socket("web.sock") + id),
        ("typo", socket("typo.sock") + id + "keytype = \"rsa-2048\"\ncert-ttl = \"soon\"\n"),
        ("lost", socket("nowhere/lost.sock") + id),
        ("token", socket("token.sock") + &format!("token-file = \"{}\"\n", path("absent").display())),
    ];
    for (name, text) in files {
        std::fs::write(path(&format!("workloads/{name}.toml")), text).unwrap();
    }
    let shown = |name: &str| path(name).display().to_string();
    let options = flags([
        ("--ca", "embedded".to_owned()),
        ("--ca-dir", shown("ca")),
        ("--workloads", shown("workloads")),
        ("--state-dir", shown("state")),
        ("--admin-socket", shown("admin.sock")),
        ("--status-address", "127.0.0.1:0".to_owned()),
        ("--kubelet-dir", shown("kubelet")),
        ("--csi-socket", shown("kubelet/plugins/csi.sock")),
    ]);
    let check = [&["check", "node", "--output", "json"], &strs(&options)[..]].concat();
    let checked = output(&check).await;
    assert_eq!(checked.status.code(), Some(1), "{}", String::from_utf8_lossy(&checked.stderr));
    let findings: Value = serde_json::from_slice(&checked.stdout).unwrap();
    let of = |state: &str, about: &str, words: &[&str]| {
        findings.as_array().unwrap().iter().any(|one| {
            let text = one["text"].as_str().unwrap();
            one["state"] == state && one["about"] == about && words.iter().all(|word| text.contains(word))
        })
    };
    let expected: [(&str, &str, &[&str]); 9] = [
        ("error", "workload", &["typo: ", "keytype (line 3 of", "did you mean key-type?"]),
        ("error", "workload", &["typo: ", "cert-ttl (line 4 of"]),
        ("error", "workload", &["web: ", "twin.toml does already"]),
        ("error", "socket", &["lost.sock", "create or mount it"]),
        ("ok", "socket", &["web.sock: free"]),
        ("error", "registration", &["plugins_registry", "--csi-registration-dir"]),
        ("ok", "kubelet", &["pods is writable"]),
        ("ok", "CSI driver", &["csi.attache.dev", "tokenRequests"]),
        ("ok", "workloads", &["3 in "]),
    ];
    for (state, about, words) in expected {
        assert!(of(state, about, words), "{state} {about} {words:?}: {findings:#}");
    }
    assert!(!path("admin.sock").exists() && !path("state/web").exists() && !path("web.sock").exists());

    // The agent's own options are judged first.
    let (code, error) = failure(&["check", "node", "--ca", "embedded", "--crl", "/crls"]).await;
    assert!(code == 2 && error.contains("--crl is not for attache node"), "{error}");
    assert!(error.contains("there are no workloads"), "{error}");
}

#[tokio::test]
async fn workloads_take_the_tokens_of_their_own_clients() {
    let directory = tempfile::tempdir().unwrap();
    let ca = FakeCa::start(directory.path(), &spiffe("web")).await;
    let address = format!("http://{}", ca.address);
    let node = Node::start(directory.path(), &["--ca-address", &address]).await;
    node.describe("web", "web", "token-from-request = true");
    node.describe("db", "db", "token-from-request = true");
    for name in ["web", "db"] {
        node.wait_socket(name).await;
    }
    let ask = async |name: &str, account: &str| {
        let own = token(account, "istio-ca", 3600);
        on_connection(&node.socket(name), async |mut client| {
            let mut request = tonic::Request::new(crate::support::sds::request(&["default"]));
            request.metadata_mut().insert("authorization", format!("Bearer {own}").parse().unwrap());
            client.fetch_secrets(request).await.map(drop)
        })
        .await
    };
    let refused = ask("web", "db").await.unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied, "{refused}");
    ask("web", "web").await.unwrap();
    assert_eq!(identity(&node.socket("web")).await, spiffe("web"));
    let waits =
        wait_for("the reason", async || node.workload("db").await["error"].as_str().map(str::to_owned));
    assert!(waits.await.contains("no client has brought a token"));
}
