//! `mint://HOST`: certificates for hosts from the agent's CA.

use serde_json::Value;
use tokio::process::Command;

use crate::support::cfssl::FakeCfssl;
use crate::support::envoy::Envoy;
use crate::support::fake_google_cas::FakeGoogleCas;
use crate::support::fake_vault::FakeVault;
use crate::support::kube_api::KubeApi;
use crate::support::pipes::Pipes;
use crate::support::process::{Agent, failure, output};
use crate::support::provider::{Behaviour, Provider, Site};
use crate::support::sds::{DeltaStream, content, delta_secrets, on_connection, parsed, served};

const HOST: &str = "mint://web.example.test";

async fn agent(directory: &std::path::Path) -> Agent {
    let ca_dir = directory.join("ca");
    let options =
        ["--ca", "embedded", "--ca-dir", ca_dir.to_str().unwrap(), "--mint-suffix", ".example.test"];
    Agent::ready(directory, "agent", &options).await
}

#[tokio::test]
async fn a_host_beneath_the_suffix_gets_a_certificate_and_others_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let mut agent = agent(directory.path()).await;
    let leaf = served(&agent.socket, HOST).await.swap_remove(0);
    assert_eq!(leaf.dns_names, ["web.example.test"]);
    assert_eq!(leaf.spiffe_id().unwrap().to_string(), "spiffe://cluster.local/ns/default/sa/default");
    // Each has its own key: the workload's certificate has another serial, and no name of a host.
    assert!(served(&agent.socket, "default").await[0].dns_names.is_empty());
    let (_, line) = agent.process.wait_log(HOST).await;
    assert!(line.contains("certificate issued") && line.contains("serial="), "{line}");

    on_connection(&agent.socket.clone(), async |client| {
        let names = ["mint://example.test", "mint://web.example.test.evil", "mint://10.0.0.1", HOST];
        let mut stream = DeltaStream::open(&client, &names).await.unwrap();
        let (mut added, mut removed) = (Vec::new(), Vec::new());
        while added.len() + removed.len() < names.len() {
            let response = stream.next().await.unwrap();
            added.extend(delta_secrets(&response).into_iter().map(|secret| secret.name));
            removed.extend(response.removed_resources);
        }
        assert_eq!(added, [HOST]);
        assert_eq!(removed.len(), 3, "{removed:?}");
    })
    .await;
    agent.process.wait_log("its host is beneath no --mint-suffix").await;
    let status = output(&["status", "--output", "json", "--socket", agent.socket.to_str().unwrap()]).await;
    let status: Value = serde_json::from_slice(&status.stdout).unwrap();
    let secrets = status["secrets"].as_array().unwrap();
    assert!(secrets.iter().any(|secret| secret["name"] == HOST && secret["origin"] == "ca"), "{secrets:#?}");
}

#[tokio::test]
async fn a_ca_that_issues_no_names_of_hosts_is_refused_at_the_start() {
    for (options, words) in [
        (&["--ca-address", "a:1"][..], "--ca citadel: Istio's CA issues the caller's identity alone"),
        (&["--ca", "none"], "without a CA there are no certificates for hosts"),
    ] {
        let line = [&["run", "--mint-suffix", ".example.test"], options].concat();
        let (code, error) = failure(&line).await;
        assert!(
            code == 2 && error.contains("--mint-suffix .example.test") && error.contains(words),
            "{error}"
        );
    }
    let (code, error) = failure(&["run", "--ca", "embedded", "--mint-suffix", "*.test"]).await;
    assert!(code == 2 && error.contains("the shape is .example.com"), "{error}");
}

#[tokio::test]
async fn without_a_suffix_nothing_is_minted() {
    let directory = tempfile::tempdir().unwrap();
    let ca_dir = directory.path().join("ca").display().to_string();
    let agent = Agent::ready(directory.path(), "agent", &["--ca", "embedded", "--ca-dir", &ca_dir]).await;
    let (code, error) = failure(&["get", "--socket", agent.socket.to_str().unwrap(), HOST]).await;
    assert!(code == 1 && error.contains("only with --mint-suffix"), "{error}");
}

#[tokio::test]
async fn a_real_envoy_serves_a_host_with_its_minted_certificate() {
    let directory = tempfile::tempdir().unwrap();
    let agent = agent(directory.path()).await;
    let mut command = Command::new(env!("CARGO_BIN_EXE_attache"));
    command.args(["bootstrap", "--listen", "127.0.0.1:0", "--socket"]).arg(&agent.socket);
    let printed = String::from_utf8(command.output().await.unwrap().stdout).unwrap();
    let bootstrap = printed.replace("\"default\"", &format!("{HOST:?}"));
    assert_ne!(bootstrap, printed);
    let envoy = Envoy::start(serde_json::from_str(&bootstrap).unwrap(), directory.path(), "gateway").await;
    envoy.wait_listeners(&["inbound"]).await;
    let certs = envoy.certs().await.to_string();
    assert!(certs.contains("\"dns\":\"web.example.test\""), "{certs}");
}

/// Several hosts at the same moment, beside the workload's own certificate.
async fn mints_for_hosts<P: Provider>() {
    let mut site = Site::<P>::start(Behaviour::Signs, P::LIFETIME, &["--mint-suffix", ".example"]).await;
    site.agent.process.wait_log(" ready ").await;
    let hosts: Vec<_> = (0..6).map(|host| format!("mint://{host}.example")).collect();
    on_connection(&site.agent.socket.clone(), async |client| {
        let names: Vec<_> = hosts.iter().map(String::as_str).collect();
        let mut stream = DeltaStream::open(&client, &names).await.unwrap();
        let mut missing: std::collections::BTreeSet<_> = hosts.iter().cloned().collect();
        while !missing.is_empty() {
            for secret in delta_secrets(&stream.next().await.unwrap()) {
                let name = secret.name.clone();
                let leaf = parsed(&content(secret).0).swap_remove(0);
                assert_eq!(leaf.dns_names, [name.trim_start_matches("mint://")], "{}", P::NAME);
                missing.remove(&name);
            }
        }
    })
    .await;
}

#[tokio::test]
async fn vault_issues_for_hosts() {
    mints_for_hosts::<FakeVault>().await;
}

#[tokio::test]
async fn cfssl_issues_for_hosts() {
    mints_for_hosts::<FakeCfssl>().await;
}

#[tokio::test]
async fn google_cas_issues_for_hosts() {
    mints_for_hosts::<FakeGoogleCas>().await;
}

#[tokio::test]
async fn a_kubernetes_signer_issues_for_hosts() {
    mints_for_hosts::<KubeApi>().await;
}

#[tokio::test]
async fn a_command_issues_for_hosts() {
    mints_for_hosts::<Pipes>().await;
}
