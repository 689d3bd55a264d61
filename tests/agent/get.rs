//! `attache get`.

use serde_json::Value;

use crate::support::files::spiffe;
use crate::support::process::{Agent, failure, output};

#[tokio::test]
async fn it_shows_what_is_served_and_hides_the_key_unless_asked() {
    let folder = tempfile::tempdir().unwrap();
    let ca_dir = folder.path().join("ca");
    let id = spiffe("web");
    let options = ["--ca", "embedded", "--ca-dir", ca_dir.to_str().unwrap(), "--spiffe-id", &id];
    let agent = Agent::ready(folder.path(), "agent", &options).await;
    let get = async |more: &[&str]| {
        let arguments: Vec<_> =
            ["get", "--socket", agent.socket.to_str().unwrap()].iter().chain(more).copied().collect();
        let output = output(&arguments).await;
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let table = get(&[]).await;
    for words in [
        "default: key pair, 2 certificates",
        &id,
        "ECDSA P-256, the private key fits",
        "23h 59m left",
        "ROOTCA: trust bundle, 1 certificate",
        "CN=Attache development root",
    ] {
        assert!(table.contains(words), "{words}:\n{table}");
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
async fn what_is_missing_is_told_by_name_and_the_rest_is_shown() {
    let folder = tempfile::tempdir().unwrap();
    let ca_dir = folder.path().join("ca");
    let options = ["--ca", "embedded", "--ca-dir", ca_dir.to_str().unwrap()];
    let agent = Agent::ready(folder.path(), "agent", &options).await;
    let socket = agent.socket.to_str().unwrap();
    let output = output(&["get", "--socket", socket, "nobody", "ROOTCA"]).await;
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8(output.stdout).unwrap().contains("ROOTCA: trust bundle"));
    assert!(String::from_utf8(output.stderr).unwrap().contains("unknown resource name \"nobody\""));

    let nobody = folder.path().join("nobody.sock");
    let (code, error) = failure(&["get", "--socket", nobody.to_str().unwrap()]).await;
    assert_eq!(code, 1);
    assert!(error.contains("nobody.sock") && error.contains("attache run"), "{error}");
}
