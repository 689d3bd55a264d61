//! `--ca google-cas`: the requests to Google's service, their token, and how responses are handled.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use attache::auth::metadata_server::{MetadataServer, Wanted};
use attache::auth::token::{self, Service, TokenSource};
use attache::base::clock::Clock;
use attache::ca::google_cas::{GoogleCas, GoogleCasSettings};
use attache::ca::{CertificateAuthority as _, SigningRequest};
use attache::fs::disk::Disk;
use attache::net::endpoint::Endpoint;
use attache::net::grpc::Connections;
use attache::net::tls::Roots;
use attache::pki::key::{KeyType, SigningKey};
use attache::pki::{certificate::Certificate, csr};
use tonic::Code;

use crate::support::fake_google_cas::{CALLER, FakeGoogleCas, Mood, POOL};
use crate::support::files::silent_server;
use crate::support::issuer::{LIES, Lie};
use crate::support::process::{Agent, strs};
use crate::support::sds::served;
use crate::support::token_service::{Mood as TokenMood, TokenService};
use crate::support::wait::wait_until;

/// What Google's token service expects in a request.
const ASKED: [(&str, &str); 2] = [
    ("audience", "//iam.googleapis.com/projects/1/locations/global/workloadIdentityPools/p/providers/k8s"),
    ("scope", "https://www.googleapis.com/auth/cloud-platform"),
];

/// The token that the services issue by default.
const TOKEN: &str = "ya29.the-token";

/// The options of an agent that exchanges its token.
fn exchanging(cas: &FakeGoogleCas, sts: &TokenService, directory: &Path, more: &[&str]) -> Vec<String> {
    sts.change(|rules| (rules.asked, rules.gives) = (ASKED.to_vec(), Some(TOKEN.to_owned())));
    let url = format!("http://{}/v1/token", sts.address);
    let [(_, audience), _] = ASKED;
    let mut options = cas.client(directory);
    let subject = sts.subject_file(directory);
    let token =
        ["--token-exchange-url", &url, "--token-exchange-audience", audience, "--token-file", &subject];
    options.extend(token.iter().chain(more).map(|text| (*text).to_owned()));
    options
}

/// Renewal is due almost at once, long before expiry.
const BUSY: [&str; 8] =
    ["--cert-ttl", "20s", "--grace-ratio", "0.99", "--grace-jitter", "0", "--ca-timeout", "1s"];

/// Asserts that neither the exchanged token nor the one it was exchanged for is in the log.
fn assert_silent(agent: &Agent, service: &TokenService) {
    let log = agent.process.log();
    for secret in [TOKEN, &service.subject()] {
        for part in secret.split('.').filter(|part| part.len() > 8) {
            assert!(!log.contains(part), "a token is in the log:\n{log}");
        }
    }
}

#[tokio::test]
async fn one_exchanged_token_signs_many_certificates_for_its_identity() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let (cas, sts) = (FakeGoogleCas::start(directory).await, TokenService::start().await);
    cas.change(|rules| {
        rules.lifetime = 20;
        rules.ca = "ca-1";
        rules.header = Some(("x-goog-user-project", "payer"));
    });
    cas.admit(TOKEN);
    let more =
        ["--google-cas-ca", "ca-1", "--ca-header", "x-goog-user-project=payer", "--log-level", "debug"];
    let more = [&BUSY[..], &more].concat();
    let mut agent = Agent::start(directory, "web", &strs(&exchanging(&cas, &sts, directory, &more)));
    agent.process.wait_log_times("certificate issued", 3).await;

    let chain = served(&agent.socket, "default").await;
    assert_eq!((chain.len(), chain[0].uris.as_slice()), (2, &[CALLER.to_owned()][..]), "without the root");
    let roots = served(&agent.socket, "ROOTCA").await;
    assert!(
        roots.len() == 2 && roots.iter().all(|root| root.subject == root.issuer),
        "of every CA of the pool"
    );
    let requests = cas.requests();
    assert_eq!(requests.iter().collect::<BTreeSet<_>>().len(), requests.len(), "each is one of its own");
    assert_eq!((cas.issued(), sts.calls().len()), (requests.len(), 1));
    // A slow answer within the timeout is accepted.
    cas.set(Mood::Slow);
    agent.process.wait_next_log("certificate issued").await;
    agent.process.wait_next_log("certificate issued").await;
    assert_silent(&agent, &sts);
}

/// Runs an agent that has a certificate through one mood of its CA after the other.
async fn meets(cases: &[(Mood, &str, &str)]) {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let (cas, sts) = (FakeGoogleCas::start(directory).await, TokenService::start().await);
    cas.change(|rules| rules.lifetime = 20);
    cas.admit(TOKEN);
    let more = [&BUSY[..], &["--trust-domain", "my-project.svc.id.goog"]].concat();
    let mut agent = Agent::ready(directory, "web", &strs(&exchanging(&cas, &sts, directory, &more))).await;
    for (mood, words, label) in cases {
        let metric = format!("attache_ca_requests_total{{provider=\"google-cas\",outcome=\"{label}\"}}");
        let before = agent.metric(&metric).await;
        cas.set(*mood);
        let (_, line) = agent.process.wait_next_log("no new certificate").await;
        assert!(line.contains("WARN") && line.contains(words), "{mood:?}: {line}");
        assert!(agent.metric(&metric).await > before, "{mood:?}");
        let good = agent.serials().last().unwrap().clone();
        assert_eq!(served(&agent.socket, "default").await[0].serial, good, "{mood:?}");
        assert_eq!(agent.status("/readyz").await.0, 200, "{mood:?}");

        cas.set(Mood::Good);
        agent.process.wait_next_log("the CA signs again").await;
        assert_ne!(agent.serials().last().unwrap(), &good, "{mood:?}");
    }
    assert_silent(&agent, &sts);
}

#[tokio::test]
async fn bad_answers_of_google_keep_the_good_certificate_and_a_good_answer_recovers() {
    let lies = LIES.map(|(lie, [what, _], label)| {
        let words = match lie {
            Lie::OtherIdentity => "--spiffe-id or --trust-domain set another one",
            _ => what,
        };
        (Mood::Lie(lie), words, label)
    });
    let others = [
        (Mood::Junk, "pem_certificate: ", "junk"),
        (Mood::Empty, "pem_certificate: ", "junk"),
        (Mood::Hang, "gave no answer within 1s", "timeout"),
    ];
    meets(&[&lies[..], &others].concat()).await;
}

#[tokio::test]
async fn a_refusal_of_google_is_reported_with_the_remedy() {
    let cases = [
        (Mood::Refuse(Code::PermissionDenied), "privateca.workloadCertificateRequester", "refused"),
        (Mood::Refuse(Code::NotFound), "--google-cas-pool", "refused"),
        (Mood::Refuse(Code::FailedPrecondition), "is a CA of the pool enabled", "refused"),
        (Mood::Refuse(Code::InvalidArgument), "issuance policy", "refused"),
        (Mood::Refuse(Code::ResourceExhausted), "a quota of the project", "refused"),
        (Mood::Refuse(Code::Unavailable), "CreateCertificate: as the test wants it", "refused"),
    ];
    meets(&cases).await;
}

#[tokio::test]
async fn services_that_are_down_at_first_are_retried_until_they_are_up() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let (cas, sts) = (FakeGoogleCas::start(directory).await, TokenService::start().await);
    let mut options = exchanging(&cas, &sts, directory, &[]);
    // Addresses without a listener.
    let mut elsewhere = async |now: SocketAddr| {
        let (_, port) = silent_server().await;
        let free = SocketAddr::from(([127, 0, 0, 1], port));
        for option in &mut options {
            *option = option.replace(&now.to_string(), &free.to_string());
        }
        free
    };
    let (cas_address, sts_address) = (elsewhere(cas.address).await, elsewhere(sts.address).await);
    let mut agent = Agent::start(directory, "web", &strs(&options));
    let (_, line) = agent.process.wait_log("no new certificate").await;
    let words = format!("the token service at http://{sts_address} issued no token: connecting failed: ");
    assert!(line.contains("WARN") && line.contains(&words), "{line}");

    let subject = sts.subject();
    let sts = TokenService::start_at(sts_address, None).await;
    sts.change(|rules| rules.subject = subject);
    exchanging(&cas, &sts, directory, &[]);
    agent.process.wait_log(&format!("connecting to the CA at https://{cas_address} failed")).await;
    let cas = FakeGoogleCas::start_at(directory, cas_address).await;
    let (_, line) = agent.process.wait_log("it does not accept the token").await;
    assert!(
        line.contains("credentials: (the token)") && line.contains("issued it for the token in"),
        "{line}"
    );
    assert_eq!(agent.status("/readyz").await.0, 503);
    cas.admit(TOKEN);
    agent.process.wait_log("ready").await;
    assert_silent(&agent, &sts);
}

/// The client alone, with the metadata server's token.
fn client(cas: &FakeGoogleCas, metadata: &TokenService, directory: &Path) -> GoogleCas {
    let endpoint = Endpoint {
        address: format!("https://{}", cas.address).parse().unwrap(),
        roots: Roots::File(directory.join("web/root-cert.pem")),
        server_name: None,
    };
    let server = MetadataServer {
        address: format!("http://{}", metadata.address).parse().unwrap(),
        wanted: Wanted::Access,
    };
    let patience = Duration::from_secs(30);
    let token = token::TokenSettings::Service { service: Service::Metadata(server), patience };
    let settings = GoogleCasSettings { pool: POOL.parse().unwrap(), ca: None };
    GoogleCas::new(
        endpoint,
        settings,
        TokenSource::new(token, Clock::system(), Disk::default()),
        Vec::new(),
        Connections::new(Duration::from_secs(10), Disk::default()),
    )
}

fn a_request() -> SigningRequest {
    let key = SigningKey::generate(KeyType::EcdsaP256).unwrap();
    let csr = csr::request(&key, None, &csr::Names::default()).unwrap();
    SigningRequest { csr, identity: None, names: csr::Names::default(), ttl: Duration::from_secs(24 * 3600) }
}

#[tokio::test]
async fn a_lost_answer_does_not_cost_a_second_certificate() {
    let directory = tempfile::tempdir().unwrap();
    let (cas, metadata) = (FakeGoogleCas::start(directory.path()).await, TokenService::start().await);
    metadata.change(|rules| rules.gives = Some(TOKEN.to_owned()));
    cas.admit(TOKEN);
    let client = client(&cas, &metadata, directory.path());
    let request = a_request();
    assert!(client.pending().is_none());
    cas.set(Mood::Lost);
    tokio::select! {
        _ = client.sign(&request) => panic!("the answer was to be lost"),
        () = wait_until("a certificate is issued", || cas.issued() > 0) => {}
    }
    assert!(client.pending().is_some(), "its outcome is unknown");
    // Before the retry reaches the service, something else fails.
    cas.change(|rules| rules.roots = Err(Code::Unavailable));
    client.sign(&request).await.unwrap_err();
    assert!(client.pending().is_some());
    cas.change(|rules| (rules.roots, rules.mood) = (Ok(()), Mood::Refuse(Code::Unavailable)));
    client.sign(&request).await.unwrap_err();
    assert!(client.pending().is_some());

    // The second refusal does not say what became of the first attempt.
    cas.set(Mood::Refuse(Code::PermissionDenied));
    client.sign(&request).await.unwrap_err();
    assert!(client.pending().is_some());

    cas.set(Mood::Good);
    let answer = client.sign(&request).await.unwrap();
    assert!(client.pending().is_none());
    let facts = Certificate::parse(&answer.chain[0]).unwrap();
    assert_eq!((cas.issued(), facts.uris.as_slice()), (1, &[CALLER.to_owned()][..]));
    let requests = cas.requests();
    assert!(requests.len() == 4 && requests.iter().all(|id| *id == requests[0]), "{requests:?}");

    // A permanent refusal settles the request, and one that fails repeatedly is given up after a while.
    cas.set(Mood::Refuse(Code::PermissionDenied));
    client.sign(&a_request()).await.unwrap_err();
    assert!(client.pending().is_none());
    cas.set(Mood::Refuse(Code::Internal));
    let request = a_request();
    for is_pending in [true, true, true, true, false] {
        client.sign(&request).await.unwrap_err();
        assert_eq!(client.pending().is_some(), is_pending);
    }
    assert_eq!(metadata.calls().len(), 1, "one token for all");
}

#[tokio::test]
async fn a_refused_token_is_replaced_within_the_same_attempt() {
    let directory = tempfile::tempdir().unwrap();
    let (cas, metadata) = (FakeGoogleCas::start(directory.path()).await, TokenService::start().await);
    let client = client(&cas, &metadata, directory.path());
    // The metadata server returns the same token for a while: a second attempt with it would be pointless.
    metadata.change(|rules| rules.gives = Some("ya29.outdated".to_owned()));
    let error = client.sign(&a_request()).await.unwrap_err().to_string();
    assert!(error.contains("Unauthenticated") && !error.contains("outdated"), "{error}");
    assert!(error.contains("the metadata server at http://127.0.0.1"), "{error}");
    assert_eq!(metadata.calls().len(), 1, "the token was fetched just before");
    cas.admit("ya29.outdated");
    client.sign(&a_request()).await.unwrap();
    client.sign(&a_request()).await.unwrap();
    assert_eq!(metadata.calls().len(), 2, "the refused one was not kept");

    cas.revoke();
    client.sign(&a_request()).await.unwrap_err();
    assert_eq!((metadata.calls().len(), cas.requests().len()), (3, 2), "the same one is not tried again");
    metadata.change(|rules| rules.gives = Some("ya29.current".to_owned()));
    cas.admit("ya29.outdated");
    metadata.change(|rules| rules.gives = Some("ya29.outdated".to_owned()));
    client.sign(&a_request()).await.unwrap();
    cas.revoke();
    cas.admit("ya29.current");
    metadata.change(|rules| rules.gives = Some("ya29.current".to_owned()));
    client.sign(&a_request()).await.unwrap();
    assert_eq!(cas.requests().len(), 4);
}

#[tokio::test]
async fn on_a_google_machine_no_token_is_configured() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let (cas, metadata) = (FakeGoogleCas::start(directory).await, TokenService::start().await);
    metadata.change(|rules| rules.gives = Some(TOKEN.to_owned()));
    cas.admit(TOKEN);
    let host = metadata.address.to_string();
    metadata.set(TokenMood::NoFlavor);
    let mut agent = Agent::start_as(directory, "web", &strs(&cas.client(directory)), |mut command| {
        command.env("GCE_METADATA_HOST", host);
        command
    });
    agent.process.wait_log("the server there is not Google's metadata server").await;
    metadata.set(TokenMood::Say(404, "not found"));
    agent.process.wait_log("does this machine, or this Pod, have a Google service account?").await;
    assert!(cas.requests().is_empty());
    metadata.set(TokenMood::Good);
    agent.process.wait_log("ready").await;
    assert_silent(&agent, &metadata);
}
