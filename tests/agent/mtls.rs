//! The main job: two real Envoys, mutual TLS, certificates that live for seconds, and no failed request.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use crate::support::envoy::{Envoy, http_get};
use crate::support::files::spiffe;
use crate::support::mesh::{Traffic, api_envoy, caller_envoy, wait_success};
use crate::support::process::{Agent, Ca, strs};

/// `attache ca` options for `account`, and a certificate lifetime.
fn options(ca: &Ca, account: &str, ttl: &str) -> Vec<String> {
    let mut options = ca.client(account);
    options.extend(["--cert-ttl".to_owned(), ttl.to_owned()]);
    options
}

async fn agent(directory: &Path, ca: &Ca, account: &str, ttl: &str) -> Agent {
    let options = options(ca, account, ttl);
    Agent::ready(directory, account, &strs(&options)).await
}

/// The Envoys of both sides: `web` calls `api`.
struct Envoys {
    api: Envoy,
    inbound: SocketAddr,
    web: Envoy,
    outbound: SocketAddr,
}

impl Envoys {
    async fn start(directory: &Path, web: &Agent, api: &Agent) -> Self {
        let api = api_envoy(directory, api).await;
        let inbound = api.listener_address("inbound").await;
        let web = caller_envoy(directory, "web", web, inbound, &spiffe("api")).await;
        let outbound = web.listener_address("outbound").await;
        Self { api, inbound, web, outbound }
    }
}

#[tokio::test]
async fn every_request_succeeds_across_ten_renewals_and_strangers_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let ca = Ca::start(directory).await;
    let mut web = agent(directory, &ca, "web", "10s").await;
    let mut api = agent(directory, &ca, "api", "10s").await;
    let Envoys { api: api_envoy, inbound, web: web_envoy, outbound } =
        Envoys::start(directory, &web, &api).await;
    wait_success(&web_envoy, outbound).await;

    let traffic = Traffic::start(outbound);
    let known = [&web, &api].map(|agent| agent.process.count("certificate issued"));
    // One renewal after the other, so that each has a deadline of its own.
    for renewals in 1..=10 {
        web.process.wait_log_times("certificate issued", known[0] + renewals).await;
        api.process.wait_log_times("certificate issued", known[1] + renewals).await;
    }
    // The newest certificate needs time to reach the peer.
    let newest = web.serials().last().unwrap().clone();
    let is_used = async || http_get(outbound, "/").await.unwrap().1["x-peer-serial"].contains(&newest);
    web_envoy.wait_until("the newest serial is seen by the peer", is_used).await;
    let report = traffic.stop().await;

    assert!(report.failures.is_empty(), "{:#?}\n{}", report.failures, web_envoy.log());
    assert!(report.succeeded > 500, "only {} requests", report.succeeded);
    assert_eq!(report.identities, [spiffe("web")]);
    let issued = web.serials();
    assert!(report.serials.len() >= 10, "the peer saw {:?} of {issued:?}", report.serials);
    assert!(
        report.serials.iter().all(|serial| issued.contains(serial)),
        "{:?} of {issued:?}",
        report.serials
    );
    assert_eq!(web.metric("attache_nacks_total{name=\"default\"}").await, 0.0);
    assert!(web.metric("attache_acks_total{name=\"default\"}").await >= 10.0);

    // The callee is not the one that the caller expects.
    let picky = caller_envoy(directory, "picky", &web, inbound, &spiffe("another")).await;
    picky.wait_listeners(&["outbound"]).await;
    picky.wait_stat("sds.default.update_success", 1).await;
    let (status, ..) = http_get(picky.listener_address("outbound").await, "/").await.unwrap();
    assert_eq!(status, 503);
    assert!(picky.stat("cluster.peer.ssl.fail_verify_san").await >= 1);

    // The caller is not one that the callee accepts.
    let stranger = agent(directory, &ca, "stranger", "60s").await;
    let stranger = caller_envoy(directory, "stranger", &stranger, inbound, &spiffe("api")).await;
    stranger.wait_listeners(&["outbound"]).await;
    let (status, ..) = http_get(stranger.listener_address("outbound").await, "/").await.unwrap();
    assert_eq!(status, 503);
    let refused: Vec<_> = api_envoy
        .stats()
        .await
        .into_iter()
        .filter(|(name, _)| name.ends_with(".ssl.fail_verify_san"))
        .collect();
    assert_eq!(refused.iter().map(|(_, count)| count).sum::<u64>(), 1, "{refused:?}");
}

#[tokio::test]
async fn envoy_can_start_first_and_the_agent_can_be_killed_under_traffic() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let ca_dir = directory.join("ca");
    let arguments = |account: &str| {
        let all =
            ["--ca", "embedded", "--ca-dir", ca_dir.to_str().unwrap(), "--cert-ttl", "30s", "--spiffe-id"];
        all.into_iter().map(str::to_owned).chain([spiffe(account)]).collect::<Vec<_>>()
    };
    let start = |account: &str| {
        let arguments = arguments(account);
        Agent::start(directory, account, &strs(&arguments))
    };
    let mut web = start("web");
    web.process.wait_log("ready").await;
    web.process.kill().await;

    // Both Envoys start while no agent listens: one finds a dead socket, one finds none.
    let mut api = start("api");
    api.process.wait_log("ready").await;
    api.process.signal(rustix::process::Signal::TERM);
    assert!(api.process.ended().await.success());
    let Envoys { api: api_envoy, web: web_envoy, outbound, .. } = Envoys::start(directory, &web, &api).await;
    api_envoy.wait_stat("cluster.attache_sds.upstream_cx_connect_fail", 1).await;
    web_envoy.wait_stat("cluster.attache_sds.upstream_cx_connect_fail", 1).await;

    web.restart();
    api.restart();
    wait_success(&web_envoy, outbound).await;

    let traffic = Traffic::start(outbound);
    for _ in 0..3 {
        web.process.wait_log("ready").await;
        api.process.wait_log("ready").await;
        let updates = web_envoy.stat("sds.default.update_success").await;
        web.process.kill().await;
        api.process.kill().await;
        web.restart();
        api.restart();
        // The new agent has a new certificate, and Envoy fetches it.
        web_envoy.wait_stat("sds.default.update_success", updates + 1).await;
    }
    let report = traffic.stop().await;
    assert!(report.failures.is_empty(), "{:#?}\n{}", report.failures, web_envoy.log());
    assert!(report.serials.len() >= 3, "{:?}", report.serials);
    // The root never changed: a client that reconnects with its version is not sent it again.
    assert_eq!(web_envoy.stat("sds.ROOTCA.update_success").await, 1);
    assert!(web_envoy.stat("sds.ROOTCA.update_attempt").await >= 4);
    let replaced = format!("socket of a dead agent replaced path={}", web.socket.display());
    let log = web.process.log();
    assert_eq!(log.lines().filter(|line| line.ends_with(&replaced)).count(), 1, "{log}");
}

#[tokio::test]
async fn no_request_fails_while_the_ca_is_down_and_it_is_used_again_within_two_seconds() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let mut ca = Ca::start(directory).await;
    let mut web = agent(directory, &ca, "web", "20s").await;
    let api = agent(directory, &ca, "api", "20s").await;
    let Envoys { web: web_envoy, outbound, api: _api_envoy, .. } = Envoys::start(directory, &web, &api).await;
    wait_success(&web_envoy, outbound).await;

    let traffic = Traffic::start(outbound);
    ca.process.kill().await;
    // Renewal is due with 10 s left, and fails several times.
    let (_, line) = web.process.wait_next_log("no new certificate").await;
    assert!(line.contains("connecting to the CA at https://127.0.0.1"), "{line}");
    assert!(line.contains("the served certificate is valid until"), "{line}");
    let failures = "attache_ca_requests_total{provider=\"citadel\",outcome=\"unreachable\"}";
    web.wait_metric_that(failures, |count| count >= 4.0).await;
    assert_eq!(web.process.count(" WARN no new certificate"), 1, "logged once:\n{}", web.process.log());
    assert_eq!(web.status("/readyz").await, (200, "ready\n".to_owned()));
    assert_eq!(web.metric("attache_secret_failing{name=\"default\"}").await, 1.0);

    let issued = web.process.count("certificate issued");
    ca.restart().await;
    let back = std::time::Instant::now();
    let (renewed, _) = web.process.wait_log_times("certificate issued", issued + 1).await;
    let took = renewed.duration_since(back);
    assert!(took < Duration::from_secs(2), "{took:?}");
    web.process.wait_log("the CA signs again").await;
    assert_eq!(web.metric("attache_secret_failing{name=\"default\"}").await, 0.0);

    let newest = web.serials().last().unwrap().clone();
    let is_used = async || http_get(outbound, "/").await.unwrap().1["x-peer-serial"].contains(&newest);
    web_envoy.wait_until("the newest serial is seen by the peer", is_used).await;
    let report = traffic.stop().await;
    assert!(report.failures.is_empty(), "{:#?}\n{}", report.failures, web_envoy.log());
}
