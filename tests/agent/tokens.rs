//! Sources of tokens: a file, a token service, the metadata server; and what happens after a CA refuses one.

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use attache::auth::exchange::Exchange;
use attache::auth::token::{Service, TokenSettings, TokenSource};
use attache::auth::token_file::TokenFile;
use attache::base::clock::Clock;
use attache::ca::citadel::Citadel;
use attache::ca::{CertificateAuthority as _, Class, SigningRequest};
use attache::fs::disk::Disk;
use attache::net::endpoint::Endpoint;
use attache::net::grpc::Connections;
use attache::net::tls::Roots;
use attache::pki::csr;
use attache::pki::key::{KeyType, SigningKey};
use tonic::Code;
use tonic::metadata::MetadataValue;

use crate::support::fake_ca::{FakeCa, Mood as CaMood};
use crate::support::fake_vault::FakeVault;
use crate::support::files::{spiffe, token};
use crate::support::process::{Agent, failure, output, strs};
use crate::support::sds::on_connection;
use crate::support::token_service::{Mood, TokenService};
use crate::support::wait::wait_until;

/// The exchange with `service`, whose subject token is in `directory`.
fn exchange(service: &TokenService, directory: &Path, scheme: &str, roots: Roots) -> Exchange {
    Exchange {
        url: format!("{scheme}://{}/v1/token", service.address).parse().unwrap(),
        roots,
        subject: TokenFile::new(service.subject_file(directory)),
        audience: None,
        scope: None,
    }
}

fn settings(exchange: Exchange, patience: Duration) -> TokenSettings {
    TokenSettings::Service { service: Service::Exchange(exchange), patience }
}

/// A source of tokens, and a clock that the test sets.
fn source(service: &TokenService, directory: &Path) -> (Arc<TokenSource>, Clock) {
    #[expect(clippy::disallowed_methods, reason = "tokens of now")]
    let clock = Clock::starting_at(SystemTime::now());
    let settings = settings(exchange(service, directory, "http", Roots::System), Duration::from_secs(30));
    (Arc::new(TokenSource::new(settings, clock.clone(), Disk::default())), clock)
}

#[tokio::test]
async fn a_token_is_kept_until_it_nears_expiry_or_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let service = TokenService::start().await;
    let (source, clock) = source(&service, directory.path());
    let first = source.token().await.unwrap();
    assert_eq!(source.token().await.unwrap().secret(), first.secret());
    assert!(source.another(&first).await.is_none(), "the token was fetched just before");
    // But it is not kept.
    let second = source.token().await.unwrap();
    assert_ne!(second.secret(), first.secret());
    let kept = source.token().await.unwrap();
    let third = source.another(&kept).await.unwrap();
    assert_eq!(service.given(), [first.secret(), second.secret(), third.secret()]);
    assert_eq!(source.token().await.unwrap().secret(), third.secret());
    // A late refusal does not apply to the newer token.
    assert!(source.another(&second).await.is_none());
    assert_eq!(source.token().await.unwrap().secret(), third.secret());

    clock.set_by(2_690_000);
    assert_eq!(source.token().await.unwrap().secret(), third.secret());
    clock.set_by(20_000);
    assert_ne!(source.token().await.unwrap().secret(), third.secret());
    assert_eq!(service.given().len(), 4);
}

#[tokio::test]
async fn concurrent_calls_share_an_exchange_and_a_cancelled_one_blocks_no_other() {
    let directory = tempfile::tempdir().unwrap();
    let service = TokenService::start().await;
    let (source, _) = source(&service, directory.path());
    service.set(Mood::Hang);
    tokio::select! {
        _ = source.token() => panic!("nothing was given"),
        () = wait_until("the service is called", || !service.calls().is_empty()) => {}
    }
    service.set(Mood::Good);
    let calls: Vec<_> = (0..8)
        .map(|_| {
            let source = Arc::clone(&source);
            tokio::spawn(async move { source.token().await.map(|token| token.secret().to_owned()) })
        })
        .collect();
    for call in calls {
        assert_eq!(call.await.unwrap().unwrap(), service.given()[0]);
    }
    assert_eq!(service.calls().len(), 2);
}

#[tokio::test]
async fn every_failed_exchange_is_reported_and_the_next_one_succeeds() {
    use Class::{Permanent, Transient};
    let directory = tempfile::tempdir().unwrap();
    let service = TokenService::start().await;
    let (source, _) = source(&service, directory.path());
    let own = "the token is for system:serviceaccount:default:web, audience [sts], valid until";
    let google = r#"{"error":{"code":503,"message":"try later","status":"UNAVAILABLE"}}"#;
    let cases = [
        (Mood::Cut, "broke before it had answered", Transient),
        (Mood::Huge, "longer than 1048576 bytes", Permanent),
        (Mood::Html, "its answer is not JSON; is --token-exchange-url", Permanent),
        (Mood::OtherJson, "no access_token", Permanent),
        (Mood::TwoLines, "one line of printable ASCII", Permanent),
        (Mood::DPoP, "\"DPoP\"", Permanent),
        (Mood::Refuse(400, "invalid_grant", "expired"), own, Transient),
        (
            Mood::Refuse(400, "invalid_grant", ""),
            "400 Bad Request: invalid_grant: it does not accept",
            Transient,
        ),
        (Mood::Refuse(400, "invalid_request", "bad audience"), "--token-exchange-audience", Permanent),
        (Mood::Refuse(400, "invalid_target", ""), "--token-exchange-audience", Permanent),
        (Mood::Refuse(400, "invalid_scope", ""), "--token-exchange-scope", Permanent),
        (
            Mood::Refuse(401, "invalid_client", ""),
            "requires client authentication in addition to the token",
            Transient,
        ),
        (Mood::Refuse(400, "unsupported_grant_type", ""), "--token-exchange-url", Permanent),
        (Mood::Say(307, ""), "it redirects, and the token is not sent elsewhere", Permanent),
        (Mood::Say(403, "<html>\nno"), "<html>\u{fffd}no: it does not accept", Permanent),
        (Mood::Say(404, ""), "404 Not Found: is --token-exchange-url right?", Permanent),
        (Mood::Say(429, ""), "too often", Transient),
        (Mood::Say(503, google), "503 Service Unavailable: try later", Transient),
    ];
    for (mood, words, class) in cases {
        service.set(mood);
        let error = source.token().await.unwrap_err();
        assert!(error.to_string().starts_with("the token service at http://127.0.0.1:"), "{mood:?}: {error}");
        assert!(error.to_string().contains(words) && error.class() == class, "{mood:?}: {error}");
        assert!(!format!("{error:?}").contains(&service.subject()), "{error:?}");
    }
    service.set(Mood::Good);
    source.token().await.unwrap();

    std::fs::write(directory.path().join("subject-token"), "").unwrap();
    source.token().await.unwrap();
    let kept = source.token().await.unwrap();
    assert!(source.another(&kept).await.is_none());
    let error = source.token().await.unwrap_err();
    assert!(error.to_string().contains("subject-token is empty"), "{error}");
}

#[tokio::test]
async fn a_slow_token_service_is_distinguished_from_a_slow_ca() {
    let directory = tempfile::tempdir().unwrap();
    let service = TokenService::start().await;
    let exchange = exchange(&service, directory.path(), "http", Roots::System);
    let source =
        TokenSource::new(settings(exchange, Duration::from_millis(300)), Clock::system(), Disk::default());
    for mood in [Mood::Hang, Mood::Slow] {
        service.set(mood);
        let error = source.token().await.unwrap_err();
        assert!(error.to_string().contains("it did not answer within 300ms"), "{mood:?}: {error}");
        assert_eq!(error.class(), Class::Transient);
    }
}

#[tokio::test]
async fn a_token_service_is_authenticated_by_its_tls_certificate() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let ca = directory.join("ca");
    let service = TokenService::start_at("127.0.0.1:0".parse().unwrap(), Some(&ca)).await;
    let stranger = directory.join("stranger");
    attache::ca::embedded::DevelopmentCa::open(&stranger, Clock::system()).unwrap();
    let cases = [
        (stranger.join("root-cert.pem"), Some("set --token-exchange-root to its root")),
        (directory.join("nowhere.pem"), Some("with --token-exchange-root FILE")),
        (ca.join("root-cert.pem"), None),
    ];
    for (root, words) in cases {
        let exchange = exchange(&service, directory, "https", Roots::File(root));
        let source =
            TokenSource::new(settings(exchange, Duration::from_secs(30)), Clock::system(), Disk::default());
        match (source.token().await, words) {
            (Ok(_), None) => {}
            (Err(error), Some(words)) => assert!(error.to_string().contains(words), "{error}"),
            (token, _) => panic!("{token:?}"),
        }
    }
}

fn a_request() -> SigningRequest {
    let key = SigningKey::generate(KeyType::EcdsaP256).unwrap();
    let csr = csr::request(&key, None, &csr::Names::default()).unwrap();
    SigningRequest { csr, identity: None, names: csr::Names::default(), ttl: Duration::from_secs(60) }
}

fn citadel(ca: &FakeCa, token: TokenSettings) -> Citadel {
    let address = format!("http://{}", ca.address).parse().unwrap();
    Citadel {
        endpoint: Endpoint { address, roots: Roots::System, server_name: None },
        token: TokenSource::new(token, Clock::system(), Disk::default()),
        client_cert: None,
        repeats: Mutex::default(),
        refused: Mutex::default(),
        cluster_id: MetadataValue::from_static("Kubernetes"),
        headers: Vec::new(),
        cert_signer: None,
        impersonates: false,
        connections: Connections::new(Duration::from_secs(10), Disk::default()),
        clock: Clock::system(),
        disk: Disk::default(),
    }
}

/// The tokens of the calls to the CA.
fn bearers(ca: &FakeCa) -> Vec<String> {
    let header =
        |value: &MetadataValue<_>| value.to_str().unwrap().strip_prefix("Bearer ").unwrap().to_owned();
    ca.calls().iter().map(|call| header(call.metadata.get("authorization").unwrap())).collect()
}

#[tokio::test]
async fn a_refused_token_that_was_rotated_meanwhile_is_read_again_within_the_same_attempt() {
    let directory = tempfile::tempdir().unwrap();
    let ca = FakeCa::start(directory.path(), &spiffe("web")).await;
    let file = directory.path().join("token");
    std::fs::write(&file, "outdated").unwrap();
    let citadel = citadel(&ca, TokenFile::new(&file).into());
    ca.set(CaMood::Refuse(Code::Unauthenticated));
    ca.during_next_call(move || std::fs::write(file, "rotated").unwrap());
    citadel.sign(&a_request()).await.unwrap();
    assert_eq!(bearers(&ca), ["outdated", "rotated"]);

    // The same token would be refused again.
    ca.set(CaMood::Refuse(Code::Unauthenticated));
    let error = citadel.sign(&a_request()).await.unwrap_err();
    assert!(error.to_string().contains("the token is not a JWT; it is read from"), "{error}");
    assert_eq!(bearers(&ca).len(), 3);
    // Other refusals are not about the token.
    ca.set(CaMood::Refuse(Code::PermissionDenied));
    let path = directory.path().join("token");
    ca.during_next_call(move || std::fs::write(path, "rotated-again").unwrap());
    citadel.sign(&a_request()).await.unwrap_err();
    assert_eq!(bearers(&ca).len(), 4);
}

#[tokio::test]
async fn istios_ca_gets_the_exchanged_token() {
    let directory = tempfile::tempdir().unwrap();
    let ca = FakeCa::start(directory.path(), &spiffe("web")).await;
    let service = TokenService::start().await;
    let exchange = exchange(&service, directory.path(), "http", Roots::System);
    let citadel = citadel(&ca, settings(exchange, Duration::from_secs(30)));
    citadel.sign(&a_request()).await.unwrap();
    ca.set(CaMood::Refuse(Code::Unauthenticated));
    ca.during_next_call(|| {});
    citadel.sign(&a_request()).await.unwrap();
    let given = service.given();
    assert_eq!(given.len(), 2);
    assert_eq!(bearers(&ca), [0, 0, 1].map(|index| given[index].clone()));

    // A refused token is not used again.
    ca.set(CaMood::Refuse(Code::Unauthenticated));
    citadel.sign(&a_request()).await.unwrap_err();
    ca.set(CaMood::Good);
    citadel.sign(&a_request()).await.unwrap();
    let given = service.given();
    assert_eq!(bearers(&ca), [0, 0, 1, 1, 2, 3].map(|index| given[index].clone()));
}

#[tokio::test]
async fn a_token_for_another_audience_is_reported_with_the_one_that_istios_ca_expects() {
    let directory = tempfile::tempdir().unwrap();
    let ca = FakeCa::start(directory.path(), &spiffe("web")).await;
    ca.set(CaMood::Refuse(Code::Unauthenticated));
    let file = directory.path().join("token");
    let citadel = citadel(&ca, TokenFile::new(&file).into());
    let hint = "istiod usually wants a token for the audience istio-ca";
    for (audience, expected) in [("vault", true), ("istio-ca", false)] {
        std::fs::write(&file, token("web", audience, 60)).unwrap();
        let error = citadel.sign(&a_request()).await.unwrap_err().to_string();
        assert_eq!(error.contains(hint), expected, "{error}");
    }
}

#[tokio::test]
async fn the_metadata_servers_identity_token_is_for_istios_ca() {
    let directory = tempfile::tempdir().unwrap();
    let ca = FakeCa::start(directory.path(), &spiffe("web")).await;
    let metadata = TokenService::start().await;
    let address = format!("http://{}", ca.address);
    let host = metadata.address.to_string();
    let options = ["--ca-address", &address, "--token-source", "gce", "--token-file", "/nowhere/token"];
    let mut agent = Agent::start_as(directory.path(), "web", &options, |mut command| {
        command.env("GCE_METADATA_HOST", host);
        command
    });
    agent.process.wait_log("ready").await;
    assert_eq!(bearers(&ca), metadata.given());
    assert!(
        metadata.calls()[0].ends_with("/identity?audience=istio-ca&format=full"),
        "{:?}",
        metadata.calls()
    );
}

#[tokio::test]
async fn the_login_to_vault_uses_the_exchanged_token() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let (vault, service) = (FakeVault::start(directory).await, TokenService::start().await);
    service.change(|rules| rules.gives = Some(vault.jwt.clone()));
    let mut options = vault.client(directory);
    // The agent exchanges another token than the one that Vault accepts.
    std::fs::write(directory.join("jwt"), service.subject()).unwrap();
    options.extend(["--token-exchange-url".to_owned(), format!("http://{}/v1/token", service.address)]);
    let mut agent = Agent::start(directory, "web", &strs(&options));
    agent.process.wait_log("goes to http://127.0.0.1").await;
    agent.process.wait_log("ready").await;
    assert_eq!(service.calls(), ["/v1/token"]);
    let log = agent.process.log();
    for part in vault.jwt.split('.').chain(service.subject().split('.')).filter(|part| part.len() > 8) {
        assert!(!log.contains(part), "a token is in the log:\n{log}");
    }
}

/// The outcome of a fetch of `default` with `token`.
async fn fetched_with(socket: &Path, token: Option<&str>) -> Result<(), tonic::Status> {
    on_connection(socket, async |mut client| {
        let mut request = tonic::Request::new(crate::support::sds::request(&["default"]));
        if let Some(token) = token {
            request.metadata_mut().insert("authorization", format!("Bearer {token}").parse().unwrap());
        }
        client.fetch_secrets(request).await.map(drop)
    })
    .await
}

#[tokio::test]
async fn the_token_of_a_request_is_the_workloads_and_that_of_another_identity_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let ca = FakeCa::start(directory.path(), &spiffe("web")).await;
    let mut options = ca.client(directory.path());
    options.truncate(2);
    options.push("--token-from-request".to_owned());
    let mut agent = Agent::start(directory.path(), "web", &strs(&options));
    let (_, line) = agent.process.wait_log("no new certificate").await;
    assert!(line.contains("no client has brought a token since the agent started"), "{line}");
    assert_eq!(ca.calls().len(), 0);

    let own = crate::support::files::token("web", "istio-ca", 3600);
    fetched_with(&agent.socket, Some(&own)).await.unwrap();
    let sent = ca.calls()[0].metadata.get("authorization").unwrap().to_str().unwrap().to_owned();
    assert_eq!(sent, format!("Bearer {own}"));

    // From now on the workload has an identity.
    let other = crate::support::files::token("other", "istio-ca", 7200);
    let refused = fetched_with(&agent.socket, Some(&other)).await.unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied);
    assert!(refused.message().contains("serviceaccount:default:other"), "{refused}");
    assert!(refused.message().contains(&spiffe("web")), "{refused}");
    let expired = crate::support::files::token("web", "istio-ca", -10);
    for usual in [None, Some("opaque"), Some(&*expired), Some(&*own)] {
        fetched_with(&agent.socket, usual).await.unwrap();
    }
    assert_eq!(agent.metric("attache_refusals_total{reason=\"foreign_token\"}").await, 1.0);
    assert_eq!(agent.metric("attache_refusals_total{reason=\"bad_token\"}").await, 2.0);

    // The newest one is used for the next certificate.
    let newer = crate::support::files::token("web", "istio-ca", 7200);
    fetched_with(&agent.socket, Some(&newer)).await.unwrap();
    let socket = agent.socket.to_str().unwrap().to_owned();
    assert!(output(&["renew", "--socket", &socket]).await.status.success());
    let calls = ca.calls();
    let last = calls.last().unwrap().metadata.get("authorization").unwrap().to_str().unwrap().to_owned();
    assert_eq!(last, format!("Bearer {newer}"));
    let status = output(&["status", "--output", "json", "--socket", &socket]).await;
    let status = String::from_utf8(status.stdout).unwrap();
    for token in [&own, &other, &newer, &expired] {
        let signature = token.rsplit('.').nth(1).unwrap();
        assert!(!agent.process.log().contains(signature) && !status.contains(signature));
    }
}

#[tokio::test]
async fn a_token_from_requests_is_refused_beside_what_contradicts_it() {
    let cases: [(&[&str], &str); 4] = [
        (&["run", "--ca-address", "ca:1", "--token-file", "t"], "contradict each other"),
        (&["run", "--ca", "embedded"], "is for CAs that take such a token"),
        (&["run", "--ca-address", "ca:1", "--token-source", "gce"], "contradict each other"),
        (
            &["node", "--ca-address", "ca:1", "--workloads", "/w", "--ca-impersonate"],
            "--ca-impersonate contradict each other",
        ),
    ];
    for (line, words) in cases {
        let (code, error) = failure(&[line, &["--token-from-request"]].concat()).await;
        assert!(code == 2 && error.contains("--token-from-request") && error.contains(words), "{error}");
    }
}
