//! Unreachable CAs: at the start, and for longer than the certificate is valid.

use std::time::Duration;

use tonic::{Code, Request};

use crate::support::fake_ca::FakeCa;
use crate::support::fake_vault::FakeVault;
use crate::support::provider::{Behaviour, Provider, Site};
use crate::support::sds::{Client, Stream, on_connection, request, secrets};

const QUIET: Duration = Duration::from_millis(300);
/// How soon a CA is used again once it is back, on a machine that is not busy.
const SOON: Duration = Duration::from_secs(2);

/// The delay that the agent announced after each logged failure.
fn delays(log: &str) -> Vec<Duration> {
    let failures = log.lines().filter(|line| line.contains("no new certificate"));
    let delays = failures.map(|line| line.rsplit_once(" retry_in_ms=").unwrap().1);
    delays.map(|text| Duration::from_millis(text.parse().unwrap())).collect()
}

/// The status message for `default`.
async fn refusal(client: &Client) -> String {
    let mut fetch = Request::new(request(&["default"]));
    fetch.set_timeout(QUIET);
    let status = client.clone().fetch_secrets(fetch).await.unwrap_err();
    assert_eq!(status.code(), Code::Unavailable, "{status}");
    status.message().to_owned()
}

async fn waits_for_the_ca<P: Provider>() {
    let mut site = Site::<P>::start(Behaviour::Down, P::LIFETIME, &["--log-level", "attache=debug"]).await;
    let told = P::expected_log(Behaviour::Down).unwrap().words;
    let line = site.wait_failure(told[0], 0).await;
    for words in told.iter().copied().chain(["there is no certificate yet"]) {
        assert!(line.contains(words), "{words:?} is not in {line}");
    }
    on_connection(&site.agent.socket.clone(), async |client| {
        let mut stream = Stream::open(&client, &["default", "ROOTCA"]).await.unwrap();
        assert!(stream.is_quiet(QUIET).await);
        assert!(refusal(&client).await.contains("connecting to the CA at"));
        let (status, body) = site.agent.status("/readyz").await;
        assert_eq!(status, 503);
        for name in ["default", "ROOTCA"] {
            assert!(body.contains(&format!("{name}: connecting to the CA at")), "{body}");
        }
        site.assert_logged_once(told[0]);
        let failures = site.agent.process.count("no new certificate");
        site.set(Behaviour::Signs);
        site.agent.process.wait_log("ready").await;
        // A call may have been in progress.
        assert!(
            site.agent.process.count("no new certificate") <= failures + 1,
            "{}",
            site.agent.process.log()
        );
        let mut names = Vec::new();
        while names.len() < 2 {
            names.extend(secrets(&stream.next().await.unwrap()).into_iter().map(|secret| secret.name));
        }
        assert_eq!(site.agent.status("/readyz").await.0, 200);
    })
    .await;
}

#[tokio::test]
async fn a_ca_that_is_down_at_the_start_is_used_once_it_is_up() {
    tokio::join!(waits_for_the_ca::<FakeCa>(), waits_for_the_ca::<FakeVault>());
}

async fn outlives_its_certificate<P: Provider>() {
    // Renewal is due with half of the lifetime left.
    let mut site = Site::<P>::start(Behaviour::Signs, 8, &["--log-level", "attache=debug"]).await;
    site.agent.process.wait_log("ready").await;
    let tries = |site: &Site<P>| site.proxy.as_ref().unwrap().connections();
    on_connection(&site.agent.socket.clone(), async |client| {
        let mut old = Stream::open(&client, &["default"]).await.unwrap();
        let before = old.next().await.unwrap();
        old.accept(&before).await;
        site.set(Behaviour::Cut);
        let known = tries(&site).len();

        let (expired, line) = site.agent.process.wait_log("no longer ready").await;
        for words in
            ["ERROR", "missing=\"default: expired at ", "the connection to the CA at https://127.0.0.1"]
        {
            assert!(line.contains(words), "{words:?} is not in {line}");
        }
        let failed = site.agent.process.wait_log("no new certificate").await.0;
        assert!(failed < expired, "{}", site.agent.process.log());
        let tries_before = tries(&site)[known..].iter().filter(|at| **at < expired).count() as u32;
        assert!(tries_before * SOON >= expired - failed, "{tries_before} in {:?}", expired - failed);
        let (status, body) = site.agent.status("/readyz").await;
        assert!(
            status == 503 && body.starts_with("default: expired at ") && !body.contains("ROOTCA"),
            "{body}"
        );

        // Nothing is taken from old streams, and nothing is sent to new ones.
        assert!(old.is_quiet(QUIET).await);
        let mut new = Stream::open(&client, &["default"]).await.unwrap();
        assert!(new.is_quiet(QUIET).await);
        assert!(refusal(&client).await.contains("expired at"));
        site.agent.process.wait_next_log("no new certificate").await;
        let log = site.agent.process.log();
        assert!(delays(&log).into_iter().all(|delay| delay <= SOON), "{log}");
        site.assert_logged_once("the connection to the CA at");

        let failures = site.agent.process.count("no new certificate");
        site.set(Behaviour::Signs);
        let back = std::time::Instant::now();
        let (recovered, _) = site.agent.process.wait_log("the CA signs again").await;
        // A call may have been in progress; and a busy machine is slow.
        assert!(
            site.agent.process.count("no new certificate") <= failures + 1,
            "{}",
            site.agent.process.log()
        );
        assert!(recovered.saturating_duration_since(back) < 10 * SOON, "{}", site.agent.process.log());
        for stream in [&mut old, &mut new] {
            assert_ne!(stream.next().await.unwrap().version_info, before.version_info);
        }
        site.agent.process.wait_log("ready again").await;
        assert_eq!(site.agent.status("/readyz").await.0, 200);
    })
    .await;
}

#[tokio::test]
async fn an_outage_longer_than_the_certificate_is_reported_and_its_end_is_noticed_soon() {
    tokio::join!(outlives_its_certificate::<FakeCa>(), outlives_its_certificate::<FakeVault>());
}
