//! `--dns-san` and `--common-name`: names for ordinary TLS clients, with every provider.

use attache::pki::certificate::Certificate;

use crate::support::cfssl::FakeCfssl;
use crate::support::fake_ca::FakeCa;
use crate::support::fake_google_cas::FakeGoogleCas;
use crate::support::fake_vault::FakeVault;
use crate::support::issuer::Lie;
use crate::support::kube_api::KubeApi;
use crate::support::pipes::Pipes;
use crate::support::process::Agent;
use crate::support::provider::{Behaviour, Embedded, Provider, Site};
use crate::support::sds::served;

const OPTIONS: [&str; 5] =
    ["--dns-san", "Web.example,*.web.example", "--common-name", "web", "--ca-timeout=10s"];

async fn leaf(agent: &Agent) -> Certificate {
    let chain = served(&agent.socket, "default").await;
    chain.into_iter().next().unwrap()
}

fn assert_has_names(leaf: &Certificate) {
    assert_eq!(leaf.dns_names, ["web.example", "*.web.example"]);
    assert_eq!(leaf.common_names, ["web"]);
    assert!(leaf.spiffe_id().is_some(), "{leaf:?}");
}

/// A certificate without the names is not used; one with them is served.
async fn names_the_workload<P: Provider>() {
    let lie = Behaviour::Lies(Lie::OtherNamesMissing);
    let mut site = Site::<P>::start(lie, P::LIFETIME, &OPTIONS).await;
    let line = site.wait_failure("the certificate lacks ", 0).await;
    for words in [
        "WARN",
        "lacks web.example, *.web.example, the common name web (it names spiffe://",
        "the CA must allow what --dns-san and --common-name request",
    ] {
        assert!(line.contains(words), "{}: {line}", P::NAME);
    }
    assert!(site.count("missing_names").await >= 1.0, "{}", P::NAME);
    site.set(Behaviour::Signs);
    site.agent.process.wait_log(" ready ").await;
    assert_has_names(&leaf(&site.agent).await);
}

#[tokio::test]
async fn vault_issues_the_requested_names() {
    names_the_workload::<FakeVault>().await;
}

#[tokio::test]
async fn cfssl_issues_the_requested_names() {
    names_the_workload::<FakeCfssl>().await;
}

#[tokio::test]
async fn google_cas_issues_the_requested_names() {
    names_the_workload::<FakeGoogleCas>().await;
}

#[tokio::test]
async fn a_kubernetes_signer_issues_the_requested_names() {
    names_the_workload::<KubeApi>().await;
}

#[tokio::test]
async fn a_command_issues_the_requested_names() {
    names_the_workload::<Pipes>().await;
}

#[tokio::test]
async fn the_embedded_ca_issues_the_requested_names() {
    let mut site = Site::<Embedded>::start(Behaviour::Signs, 60, &OPTIONS).await;
    site.agent.process.wait_log(" ready ").await;
    assert_has_names(&leaf(&site.agent).await);
}

#[tokio::test]
async fn istios_ca_gets_no_names_and_the_start_says_so() {
    let mut site = Site::<FakeCa>::start(Behaviour::Signs, 60, &OPTIONS).await;
    let (_, line) = site.agent.process.wait_log("is not used with --ca citadel").await;
    assert!(
        line.contains("WARN") && line.contains("Istio's CA issues the caller's identity alone"),
        "{line}"
    );
    // The fake refuses a CSR with names that istiod refuses.
    site.agent.process.wait_log(" ready ").await;
    assert!(leaf(&site.agent).await.dns_names.is_empty());
}
