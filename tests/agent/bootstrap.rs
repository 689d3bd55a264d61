//! `attache bootstrap`, and an Envoy with the printed configuration.

use std::path::Path;

use serde_json::Value;
use tokio::process::Command;

use crate::support::envoy::{Envoy, binary, http_get};

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
async fn complaints(bootstrap: &Value, file: &Path) -> String {
    std::fs::write(file, bootstrap.to_string()).unwrap();
    let output = Command::new(binary().await)
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
    ] {
        let complaints = complaints(&printed(line).await, &dir.path().join("envoy.json")).await;
        assert_eq!(complaints, "", "{line}");
    }
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
