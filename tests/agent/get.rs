//! `attache get`.

use serde_json::Value;

use crate::support::files::spiffe;
use crate::support::process::{Agent, failure, output};

#[tokio::test]
async fn get_prints_the_secrets_and_hides_the_key_without_show_key() {
    let dir = tempfile::tempdir().unwrap();
    let ca_dir = dir.path().join("ca");
    let id = spiffe("web");
    let options = ["--ca", "embedded", "--ca-dir", ca_dir.to_str().unwrap(), "--spiffe-id", &id];
    let agent = Agent::ready(dir.path(), "agent", &options).await;
    let get = async |more: &[&str]| {
        let arguments: Vec<_> =
            ["get", "--socket", agent.socket.to_str().unwrap()].iter().chain(more).copied().collect();
        let output = output(&arguments).await;
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let table = get(&[]).await;
    for text in [
        "default: key pair, 2 certificates",
        &id,
        "ECDSA P-256, the private key matches",
        "23h 59m left",
        "ROOTCA: trust bundle, 1 certificate",
        "CN=Attache development root",
    ] {
        assert!(table.contains(text), "{text}:\n{table}");
    }
    for format in ["table", "pem", "json"] {
        assert!(!get(&["--output", format]).await.contains("PRIVATE KEY"), "{format}");
    }
    let pem = get(&["default", "--output", "pem", "--show-key"]).await;
    assert_eq!(pem.matches("-----BEGIN CERTIFICATE-----").count(), 2);
    assert_eq!(pem.matches("-----BEGIN PRIVATE KEY-----").count(), 1);
    let json: Value = serde_json::from_str(&get(&["--output", "json", "--show-key"]).await).unwrap();
    assert_eq!((&json[0]["kind"], &json[0]["key_fits"]), (&"key_pair".into(), &true.into()));
    assert_eq!(json[0]["certificates"][0]["uris"][0], id.as_str());
    assert!(json[0]["private_key"].as_str().unwrap().starts_with("-----BEGIN PRIVATE KEY-----"));
    assert_eq!(json[1]["kind"], "trust_bundle");
    assert!(!agent.process.log().contains("PRIVATE"));
}

#[tokio::test]
async fn a_missing_secret_is_named_and_the_others_are_printed() {
    let dir = tempfile::tempdir().unwrap();
    let ca_dir = dir.path().join("ca");
    let options = ["--ca", "embedded", "--ca-dir", ca_dir.to_str().unwrap()];
    let agent = Agent::ready(dir.path(), "agent", &options).await;
    let socket = agent.socket.to_str().unwrap();
    let output = output(&["get", "--socket", socket, "other", "ROOTCA"]).await;
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8(output.stdout).unwrap().contains("ROOTCA: trust bundle"));
    assert!(String::from_utf8(output.stderr).unwrap().contains("unknown resource name \"other\""));

    let missing = dir.path().join("missing.sock");
    let (code, error) = failure(&["get", "--socket", missing.to_str().unwrap()]).await;
    assert_eq!(code, 1);
    assert!(error.contains("missing.sock") && error.contains("attache run"), "{error}");
}
