//! `--ca spiffe`: the identity comes from the Workload API of another agent.

use std::path::Path;

use rustix::process::Signal;
use serde_json::Value;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixListener;

use crate::support::files::spiffe;
use crate::support::process::{Agent, output};
use crate::support::sds::{Stream, on_connection, served, served_serial};
use crate::support::wait::wait_for;

/// The options of an agent whose source is the agent at `socket`.
fn behind(socket: &Path) -> Vec<String> {
    let endpoint = format!("unix://{}", socket.display());
    ["--ca", "spiffe", "--spiffe-endpoint", &endpoint].map(str::to_owned).to_vec()
}

fn strs(options: &[String]) -> Vec<&str> {
    options.iter().map(String::as_str).collect()
}

async fn upstream(directory: &Path, options: &[&str]) -> Agent {
    let ca = directory.join("ca");
    let own = ["--ca", "embedded", "--ca-dir", ca.to_str().unwrap(), "--service-account", "web"];
    Agent::ready(directory, "upstream", &[&own, options].concat()).await
}

async fn report(socket: &Path) -> Value {
    let status = output(&["status", "--socket", socket.to_str().unwrap(), "--output", "json"]).await;
    serde_json::from_slice(&status.stdout).unwrap()
}

async fn table(socket: &Path) -> String {
    let status = output(&["status", "--socket", socket.to_str().unwrap()]).await;
    String::from_utf8(status.stdout).unwrap()
}

#[tokio::test]
async fn another_agents_identity_is_served_and_its_renewals_and_restarts_are_followed() {
    let directory = tempfile::tempdir().unwrap();
    let mut source = upstream(directory.path(), &["--cert-ttl", "8s", "--grace-ratio", "0.7"]).await;
    let mut agent = Agent::ready(directory.path(), "web", &strs(&behind(&source.socket))).await;
    let name = format!("unix://{}", source.socket.display());
    assert_eq!(served_serial(&agent.socket).await, served_serial(&source.socket).await);
    assert_eq!(served(&agent.socket, "ROOTCA").await, served(&source.socket, "ROOTCA").await);

    let report = report(&agent.socket).await;
    let pair = report["secrets"].as_array().unwrap().iter().find(|one| one["name"] == "default").unwrap();
    assert_eq!((&pair["origin"], &pair["renews"]), (&"spiffe".into(), &Value::Null));
    assert_eq!(pair["key_pair"]["identity"], spiffe("web"));
    assert_eq!(report["ca"]["provider"], "spiffe");
    assert_eq!(report["ca"]["signed_by"], name);
    let table = table(&agent.socket).await;
    assert!(table.contains("renewal      when the SPIFFE endpoint pushes a newer one"), "{table}");
    assert_eq!(agent.metric(&format!("attache_ca_serving{{ca=\"{name}\"}}")).await, 1.0);

    on_connection(&agent.socket.clone(), async |client| {
        let mut stream = Stream::open(&client, &["default"]).await.unwrap();
        for _ in 0..3 {
            let pushed = stream.pushed().await.unwrap();
            stream.accept(&pushed).await;
        }
    })
    .await;
    assert_eq!(agent.metric("attache_ca_requests_total{provider=\"spiffe\",outcome=\"ok\"}").await, 1.0);

    source.process.signal(Signal::TERM);
    assert!(source.process.ended().await.success());
    agent.process.wait_log("stream of the SPIFFE endpoint ended").await;
    assert_eq!(agent.status("/readyz").await.0, 200);
    source.restart();
    source.process.wait_log("certificate issued").await;
    let renewed = output(&["renew", "--socket", agent.socket.to_str().unwrap()]).await;
    let renewed = String::from_utf8_lossy(&renewed.stderr).into_owned();
    wait_for("the certificate of the restarted agent", async || {
        (served_serial(&agent.socket).await == served_serial(&source.socket).await).then_some(())
    })
    .await;
    assert!(agent.process.count("ERROR") == 0, "{renewed}\n{}", agent.process.log());
}

#[tokio::test]
async fn an_agent_whose_endpoint_is_away_says_so_until_it_is_there() {
    let directory = tempfile::tempdir().unwrap();
    let options = behind(&directory.path().join("upstream.sock"));
    let mut agent = Agent::start(directory.path(), "web", &strs(&options));
    agent.process.wait_log("no new certificate").await;
    let (status, body) = agent.status("/readyz").await;
    assert_eq!(status, 503);
    assert!(body.contains("connecting failed: No such file or directory"), "{body}");
    let report = report(&agent.socket).await;
    let words = report["secrets"].to_string();
    assert!(words.contains("is --spiffe-endpoint right?"), "{words}");
    let _source = upstream(directory.path(), &[]).await;
    agent.process.wait_log("ready").await;
    agent.process.wait_log("SPIFFE endpoint delivers again").await;
    let (status, body) = agent.status("/readyz").await;
    assert_eq!(status, 200, "{body}");
}

#[tokio::test]
async fn an_identity_that_is_not_the_configured_one_is_not_served() {
    let directory = tempfile::tempdir().unwrap();
    let source = upstream(directory.path(), &[]).await;
    for (name, option, words) in [
        ("id", ["--spiffe-id", "spiffe://cluster.local/ns/default/sa/db"], "is not among its SVIDs ("),
        ("domain", ["--trust-domain", "example.org"], "is not in the trust domain example.org"),
        ("hint", ["--spiffe-hint", "internal"], "--spiffe-hint internal is not among"),
    ] {
        let options = behind(&source.socket);
        let mut agent = Agent::start(directory.path(), name, &[&strs(&options)[..], &option].concat());
        agent.process.wait_log(words).await;
        let (status, body) = agent.status("/readyz").await;
        assert!(status == 503 && body.contains(words), "{body}");
    }
    let id = spiffe("web");
    let behind = behind(&source.socket);
    let options = [&strs(&behind)[..], &["--spiffe-id", &id]].concat();
    drop(Agent::ready(directory.path(), "web", &options).await);
}

#[tokio::test]
async fn a_socket_of_something_else_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("other.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    tokio::spawn(async move {
        while let Ok((mut io, _)) = listener.accept().await {
            tokio::spawn(async move {
                let _ = io.read(&mut [0; 24]).await;
                let _ = io.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await;
            });
        }
    });
    let options = behind(&socket);
    let mut agent = Agent::start(directory.path(), "web", &strs(&options));
    let (_, line) = agent.process.wait_log("no new certificate").await;
    // Whether the answer or the end of the connection is seen first is a matter of chance.
    assert!(line.contains("SPIFFE endpoint unix://"), "{line}");
    assert_eq!(agent.status("/readyz").await.0, 503);
}

#[tokio::test]
async fn the_check_asks_the_endpoint_once() {
    let directory = tempfile::tempdir().unwrap();
    let source = upstream(directory.path(), &[]).await;
    let path = |name: &str| directory.path().join(name).display().to_string();
    let check = async |options: &[String]| {
        let (socket, none) = (path("sds.sock"), path("none"));
        let all = ["check", "--socket", &socket, "--cert-dir", &none, "--status-address", "none"];
        let done = output(&[&all, &strs(options)[..]].concat()).await;
        (done.status.code(), String::from_utf8(done.stdout).unwrap())
    };
    let (code, text) = check(&behind(&source.socket)).await;
    assert!(code == Some(0) && text.contains("SPIFFE endpoint"), "{text}");
    assert!(text.contains(&format!("{}, trust bundle of 1 root(s), valid until", spiffe("web"))), "{text}");
    let (code, text) = check(&behind(&directory.path().join("away.sock"))).await;
    assert!(code != Some(0) && text.contains("is --spiffe-endpoint right?"), "{text}");
}
