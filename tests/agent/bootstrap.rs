//! `attache bootstrap`, and an Envoy with the printed configuration.

use std::path::Path;

use serde_json::Value;
use tokio::process::Command;

use crate::support::envoy::{Envoy, NEWEST, OLDEST, binary, binary_of, http_get};
use crate::support::process::{Agent, attache, failure, output};

async fn printed(line: &str) -> Value {
    let output = Command::new(env!("CARGO_BIN_EXE_attache"))
        .arg("bootstrap")
        .args(line.split_whitespace())
        .output()
        .await
        .unwrap();
    assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Envoy's warnings and errors about a configuration.
async fn complaints(version: &str, bootstrap: &Value, file: &Path) -> String {
    std::fs::write(file, bootstrap.to_string()).unwrap();
    let output = Command::new(binary_of(version).await)
        .args(["--mode", "validate", "--log-level", "warning", "--config-path"])
        .arg(file)
        .output()
        .await
        .unwrap();
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&text);
    let lines = text.lines().filter(|line| !line.ends_with("OK"));
    lines.chain((!output.status.success()).then_some("refused")).collect()
}

#[tokio::test]
async fn envoy_accepts_every_bootstrap_without_a_warning() {
    let dir = tempfile::tempdir().unwrap();
    for line in [
        "",
        "--delta",
        "--upstream 127.0.0.1:8080",
        "--upstream app.example:8080 --allow spiffe://td/a --allow spiffe://td/b",
        "--listen [::1]:0 --admin [::1]:0 --upstream [::1]:8080 --initial-fetch-timeout 500ms",
        "--outbound-listen 127.0.0.1:0 --outbound-to 10.0.0.1:8443 --initial-fetch-timeout 0s",
        "--outbound-listen 127.0.0.1:0 --outbound-to peer.example.:8443 --outbound-peer spiffe://td/a",
        "--gateway",
        "--gateway --upstream app.example:8080 --listen [::1]:0 --initial-fetch-timeout 2s",
        "--outbound-listen 127.0.0.1:0 --outbound-to 10.0.0.1:8443,weight=3,region=a,zone=b \
         --outbound-to 10.0.0.2:15443,region=b,priority=1,health=healthy --outbound-to app.example:8443,region=b \
         --outbound-service app.ns.svc:80/v1 --outbound-peer spiffe://td/a --outbound-peer spiffe://td/b \
         --outbound-requests-per-connection 5 --outbound-health-check 500ms",
        "--east-west --listen [::1]:0 --route app.ns.svc:80=10.0.0.1:8443 --route app.ns.svc:80=app.example:8443,weight=2 \
         --route app.ns.svc:80/v1=10.0.0.1:8443",
    ] {
        let bootstrap = printed(line).await;
        // Certificates by SNI came with 1.37.
        let versions = if line.starts_with("--gateway") { &[NEWEST][..] } else { &[OLDEST, NEWEST] };
        for version in versions {
            let complaints = complaints(version, &bootstrap, &dir.path().join("envoy.json")).await;
            assert_eq!(complaints, "", "{version}: {line}");
        }
    }
}

/// Envoy reads the file when it starts.
#[tokio::test]
async fn envoy_accepts_endpoints_from_a_file_that_the_command_prints() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("endpoints.json");
    let service = "--outbound-service app.ns.svc:80";
    let line = format!("--endpoints-only {service} --outbound-to 10.0.0.1:8443,weight=2,region=a");
    std::fs::write(&file, printed(&line).await.to_string()).unwrap();
    let line = format!(
        "--outbound-listen 127.0.0.1:0 --outbound-endpoints {} {service} --outbound-health-check 1s",
        file.display()
    );
    for version in [OLDEST, NEWEST] {
        let complaints = complaints(version, &printed(&line).await, &dir.path().join("envoy.json")).await;
        assert_eq!(complaints, "", "{version}");
    }
    let (code, error) = failure(&["bootstrap", "--endpoints-only", "--outbound-to", "app:80"]).await;
    assert!(code == 2 && error.contains("--outbound-to: app is a name"), "{error}");
}

#[tokio::test]
async fn envoy_starts_without_an_agent_and_accepts_no_client() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("no-listener");
    let line = format!(
        "--socket {} --listen 127.0.0.1:0 --outbound-listen 127.0.0.1:0 --outbound-to 127.0.0.1:1 \
         --initial-fetch-timeout 200ms",
        socket.display(),
    );
    let mut envoy = Envoy::start(printed(&line).await, dir.path(), "alone").await;
    envoy.wait_listeners(&["inbound", "outbound"]).await;

    let (status, _, body) = http_get(envoy.listener_address("outbound").await, "/").await.unwrap();
    assert_eq!(status, 503, "{body}");
    let inbound = envoy.listener_address("inbound").await;
    assert!(http_get(inbound, "/").await.is_err(), "the mutual TLS listener answered plain HTTP");
    envoy.wait_stat("sds.ROOTCA.init_fetch_timeout", 1).await;
    assert_eq!(envoy.stat("sds.default.update_success").await, 0);
    assert_eq!(envoy.certs().await["certificates"], serde_json::json!([]));
    assert!(envoy.is_running(), "{}", envoy.log());
}

/// The options of the commands that begin with `program`, about one machine with several Envoys in docs/envoy.md.
fn documented(program: &str) -> Vec<Vec<String>> {
    let page = include_str!("../../docs/envoy.md").replace("\\\n", " ");
    let (page, _) = page.split_once("## Several endpoints").unwrap();
    let commands = page.lines().filter_map(|line| line.strip_prefix(&format!("$ {program} ")));
    let options = |command: &str| {
        let options = command.split('>').next().unwrap_or_default().split_whitespace();
        options.map(str::to_owned).collect()
    };
    commands.map(options).collect()
}

#[tokio::test]
async fn a_second_and_a_third_envoy_run_on_one_machine_as_the_documentation_says() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let ca = directory.join("ca");
    let agent = Agent::ready(directory, "web", &["--ca", "embedded", "--ca-dir", ca.to_str().unwrap()]).await;
    // Base ids that no other test on this machine has.
    let base = u32::MAX / 1000 - std::process::id() % 100_000 * 10;
    let [bootstraps, starts] = [documented("attache bootstrap"), documented("envoy -c")];
    assert_eq!((bootstraps.len(), starts.len()), (3, 3));
    let mut envoys = Vec::new();
    for (bootstrap, start) in bootstraps.iter().zip(&starts) {
        let mut line: Vec<String> = Vec::new();
        for word in bootstrap {
            match line.last().map(String::as_str) {
                Some("--socket") => line.push(agent.socket.to_str().unwrap().to_owned()),
                // The kernel chooses the ports here.
                Some("--listen" | "--admin") => line.push("127.0.0.1:0".to_owned()),
                _ => line.push(word.clone()),
            }
        }
        if !line.iter().any(|word| word == "--listen") {
            line.extend(["--listen".to_owned(), "127.0.0.1:0".to_owned()]);
        }
        let [file, options @ ..] = start.as_slice() else { panic!("{start:?}") };
        let options = match options {
            [] => vec!["--base-id".to_owned(), base.to_string()],
            [flag, id] if flag == "--base-id" => {
                vec![flag.clone(), (base + id.parse::<u32>().unwrap()).to_string()]
            }
            other => other.to_vec(),
        };
        let envoy = Envoy::start_coupled(
            &options,
            printed(&line.join(" ")).await,
            directory,
            file.trim_end_matches(".json"),
        );
        envoys.push(envoy.await);
    }
    for envoy in &mut envoys {
        envoy.wait_listeners(&["inbound"]).await;
        envoy.wait_stat("sds.default.update_success", 1).await;
        assert!(envoy.is_running(), "{}", envoy.log());
    }
    // Without another base id the second one would not start, and says what the documentation quotes, with ten times the id.
    let second = Command::new(binary().await)
        .args(["--base-id", &base.to_string(), "-c"])
        .arg(directory.join("second.json"))
        .output()
        .await
        .unwrap();
    let text = String::from_utf8_lossy(&second.stderr);
    let quoted =
        format!("unable to bind domain socket with base_id={base}0, id=0, errno=98 (see --base-id option)");
    assert!(!second.status.success() && text.contains(&quoted), "{text}");
}

#[tokio::test]
async fn standard_error_says_how_to_start_envoy() {
    let output = output(&["bootstrap"]).await;
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(text.lines().all(|line| line.starts_with("attache: ")), "{text}");
    for words in ["envoy -c envoy.json", "--base-id 1", "--disable-hot-restart", "--admin"] {
        assert!(text.contains(words), "{words}: {text}");
    }
}

#[tokio::test]
async fn a_reader_that_leaves_early_is_no_failure() {
    for command in [&["bootstrap"][..], &["completions", "bash"]] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = attache(command).stdout(writer).stderr(std::process::Stdio::piped()).spawn().unwrap();
        let output = output.wait_with_output().await.unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && !text.contains("failed"), "{command:?}: {text}");
    }
}
