//! `--ca-client-cert-dir`: calls to the CA present a certificate instead of the token, and the token where the
//! certificate is bad.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant, SystemTime};

use attache::auth::client_cert::ClientCertDir;
use attache::auth::token::TokenSource;
use attache::auth::token_file::TokenFile;
use attache::base::clock::Clock;
use attache::ca::citadel::Citadel;
use attache::ca::{CaError, CertificateAuthority as _, SigningRequest};
use attache::fs::disk::Disk;
use attache::net::endpoint::{Endpoint, Protocol};
use attache::net::grpc::Connections;
use attache::net::tls::Roots;
use attache::pki::certificate::Certificate;
use attache::pki::key::{KeyType, SigningKey};
use attache::pki::{csr, pem};
use attache::proto::envoy::config::core::v3::data_source::Specifier;
use attache::proto::envoy::extensions::transport_sockets::tls::v3::secret::Type;
use attache::proto::envoy::service::discovery::v3::DiscoveryResponse;
use attache::proto::istio::v1::auth::IstioCertificateRequest;
use attache::proto::istio::v1::auth::istio_certificate_service_client::IstioCertificateServiceClient;
use tonic::metadata::MetadataValue;
use tonic::{Code, Request, Status};

use crate::support::fake_ca::{Call, FakeCa, Mood, Tls};
use crate::support::files::{Mounted, spiffe, token};
use crate::support::process::{Agent, Ca, PATIENCE, strs};
use crate::support::sds::{Stream, on_connection, secrets};
use crate::support::wait::wait_until;

const FILES: [&str; 3] = ["cert-chain.pem", "key.pem", "root-cert.pem"];

/// Swaps `directory/..data` to a new directory with `mounted`, and deletes the previous one.
fn swap(directory: &Path, generation: usize, mounted: &Mounted) {
    let name = |generation| format!("..attache-{generation}");
    mounted.write(&directory.join(name(generation)));
    symlink(name(generation), directory.join("..next")).unwrap();
    std::fs::rename(directory.join("..next"), directory.join("..data")).unwrap();
    for file in FILES {
        let _ = symlink(format!("..data/{file}"), directory.join(file));
    }
    if let Some(before) = generation.checked_sub(1) {
        let _ = std::fs::remove_dir_all(directory.join(name(before)));
    }
}

/// What an agent serves as `default`, as another process would write it to files.
fn served(response: &DiscoveryResponse, root: &Path) -> Mounted {
    let [secret] = secrets(response).try_into().unwrap();
    let Some(Type::TlsCertificate(pair)) = secret.r#type else { panic!("no key pair") };
    let bytes = |source: Option<_>| match source
        .and_then(|source: attache::proto::envoy::config::core::v3::DataSource| source.specifier)
    {
        Some(Specifier::InlineBytes(bytes)) => bytes.to_vec(),
        _ => panic!("not inline"),
    };
    let (chain, key) = (bytes(pair.certificate_chain), bytes(pair.private_key));
    Mounted { chain, key, root: std::fs::read(root).unwrap() }
}

fn assert_no_key(log: &str, mounted: &Mounted) {
    let key = std::str::from_utf8(&mounted.key).unwrap();
    for line in key.lines().filter(|line| !line.contains("-----")) {
        assert!(!log.contains(line), "a key is in the log:\n{log}");
    }
}

/// An agent of the fake CA that renews five times a second.
fn busy_agent(directory: &Path, ca: &FakeCa, client: &Path, more: &[&str]) -> Agent {
    let mut options = ca.client(directory);
    let client = client.display().to_string();
    let fixed = [
        "--ca-client-cert-dir",
        &client,
        "--cert-ttl",
        "10s",
        "--grace-ratio",
        "0.99",
        "--grace-jitter",
        "0",
    ];
    options.extend(fixed.iter().chain(more).map(|text| (*text).to_owned()));
    Agent::start(directory, "web", &strs(&options))
}

/// Waits until the last `count` calls are all as wanted.
async fn wait_calls(ca: &FakeCa, count: usize, is_wanted: impl Fn(&Call) -> bool) {
    let known = ca.calls().len();
    let are_wanted = || {
        let calls = ca.calls();
        calls.len() >= known + count && calls.iter().rev().take(count).all(&is_wanted)
    };
    wait_until("the last calls are as wanted", are_wanted).await;
}

#[tokio::test]
async fn after_the_first_certificate_renewals_need_no_token() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let ca = FakeCa::start_tls(directory, &spiffe("web"), Tls::Optional).await;
    let root = directory.join("fake-ca/root-cert.pem");
    let out = directory.join("out");
    let mut options = ca.client(directory);
    let (out_text, root_text) = (out.display().to_string(), root.display().to_string());
    options.extend(["--ca-client-cert-dir", &out_text, "--ca-root", &root_text].map(str::to_owned));
    options.extend(["--cert-ttl", "4s"].map(str::to_owned));
    let mut agent = Agent::ready(directory, "web", &strs(&options)).await;

    let mut written = Vec::new();
    on_connection(&agent.socket.clone(), async |client| {
        let mut stream = Stream::open(&client, &["default"]).await.unwrap();
        for generation in 0..5 {
            let response = stream.next().await.unwrap();
            stream.accept(&response).await;
            let mounted = served(&response, &root);
            std::fs::create_dir_all(&out).unwrap();
            swap(&out, generation, &mounted);
            written.push(mounted);
            let _ = std::fs::remove_file(directory.join("token"));
        }
    })
    .await;
    let calls = ca.calls();
    assert!(calls[0].has_token() && calls[0].client.is_none());
    for (call, presented) in calls[1..].iter().zip(&written) {
        assert!(!call.has_token());
        let client = call.client.as_ref().unwrap();
        assert_eq!((&client.serial, &client.uris), (&presented.serial(), &vec![spiffe("web")]));
    }
    assert!(calls.len() >= 5);
    agent.process.wait_log("no client certificate, token used instead").await;
    assert_eq!(agent.process.count("client certificate used"), 1);
    assert_eq!(agent.process.count("no new certificate"), 0);
    written.iter().for_each(|mounted| assert_no_key(&agent.process.log(), mounted));
}

#[tokio::test]
async fn attache_ca_issues_the_identity_of_the_client_certificate() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let mut ca = Ca::start(directory).await;
    let certs = directory.join("certs");
    let mounted = Mounted::new(&directory.join("ca"), "till");
    mounted.write(&certs);
    let (address, certs) = (ca.address.to_string(), certs.display().to_string());
    let nowhere = directory.join("no-token").display().to_string();
    // No --ca-root: the root came with the certificate. The same directory is not a source of what Envoy gets.
    let options = [
        ["--ca-address", &address],
        ["--ca-client-cert-dir", &certs],
        ["--cert-dir", &certs],
        ["--token-file", &nowhere],
    ];
    let mut agent = Agent::ready(directory, "till", options.as_flattened()).await;
    let (_, line) = agent.process.wait_log("certificate issued").await;
    assert!(line.contains(&spiffe("till")), "{line}");
    assert_eq!(agent.process.count("served from files"), 0);
    agent.process.wait_log("are not served").await;
    ca.process.wait_log(&format!("identity={}", spiffe("till"))).await;
    assert_no_key(&(agent.process.log() + &ca.process.log()), &mounted);
}

#[tokio::test]
async fn a_bad_client_certificate_is_reported_once_and_the_token_is_used() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let ca = FakeCa::start_tls(directory, &spiffe("web"), Tls::Optional).await;
    let ca_dir = directory.join("fake-ca");
    let client = directory.join("client");
    let root = ca_dir.join("root-cert.pem").display().to_string();
    let good = Mounted::new(&ca_dir, "web");
    good.write(&client);
    let mut agent = busy_agent(directory, &ca, &client, &["--ca-root", &root]);
    let with_certificate = |call: &Call| call.client.is_some() && !call.has_token();
    let with_token = |call: &Call| call.client.is_none() && call.has_token();
    wait_calls(&ca, 2, with_certificate).await;

    let put = |name: &str, content: &[u8]| std::fs::write(client.join(name), content).unwrap();
    let expired = Mounted::expired(&ca_dir, "web");
    let foreign = Mounted::new(&ca_dir, "web");
    type Change<'a> = (&'a str, &'a str, Box<dyn Fn() + 'a>);
    let changes: [Change<'_>; 5] = [
        ("WARN", "expired at", Box::new(|| expired.write(&client))),
        ("WARN", "its PEM is damaged", Box::new(|| put("cert-chain.pem", &good.chain[..300]))),
        ("WARN", "does not match", Box::new(|| put("key.pem", &foreign.key))),
        ("WARN", "key.pem does not", Box::new(|| std::fs::remove_file(client.join("key.pem")).unwrap())),
        (
            "INFO",
            "neither cert-chain.pem nor key.pem",
            Box::new(|| std::fs::remove_dir_all(&client).unwrap()),
        ),
    ];
    for (round, (level, words, change)) in changes.into_iter().enumerate() {
        change();
        let (_, line) = agent.process.wait_log(words).await;
        assert!(line.contains(level) && line.contains("token used instead"), "{line}");
        wait_calls(&ca, 3, with_token).await;
        assert_eq!(agent.process.count(words), 1, "{}", agent.process.log());
        good.write(&client);
        agent.process.wait_log_times("client certificate used", round + 1).await;
        wait_calls(&ca, 2, with_certificate).await;
    }
    assert_eq!(agent.process.count("no new certificate"), 0, "{}", agent.process.log());

    // With neither of them there is no call.
    expired.write(&client);
    std::fs::remove_file(directory.join("token")).unwrap();
    let (_, line) = agent.process.wait_log("no new certificate").await;
    assert!(line.contains("expired at") && line.contains("the token file"), "{line}");
    for mounted in [&good, &expired, &foreign] {
        assert_no_key(&agent.process.log(), mounted);
    }
}

#[tokio::test]
async fn swaps_during_renewals_fail_no_call() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let ca = FakeCa::start_tls(directory, &spiffe("web"), Tls::Optional).await;
    let generations: Vec<_> = (0..8).map(|_| Mounted::new(&directory.join("fake-ca"), "web")).collect();
    let generation = |index: usize| &generations[index % generations.len()];
    let client = directory.join("client");
    std::fs::create_dir(&client).unwrap();
    swap(&client, 0, generation(0));
    let mut agent = busy_agent(directory, &ca, &client, &[]);
    // The token would hide a half-read certificate.
    std::fs::remove_file(directory.join("token")).unwrap();
    let mut swaps = 0;
    let (mut renewals, mut seen) = (0, std::collections::HashSet::new());
    let deadline = Instant::now() + PATIENCE;
    while renewals < 25 {
        assert!(Instant::now() < deadline, "only {renewals} renewals");
        swaps += 1;
        swap(&client, swaps, generation(swaps));
        // The rate of the swaps.
        tokio::time::sleep(Duration::from_millis(1)).await;
        renewals = ca.calls().len();
    }
    agent.process.wait_log_times("certificate issued", 25).await;
    for call in ca.calls() {
        assert!(!call.has_token());
        seen.insert(call.client.unwrap().serial);
    }
    assert!(swaps > 100 && seen.len() > 3, "{swaps} swaps, {} certificates", seen.len());
    assert_eq!(agent.process.count("no new certificate"), 0, "{}", agent.process.log());
    assert_eq!(agent.process.count("WARN"), 0, "{}", agent.process.log());
}

#[tokio::test]
async fn files_rewritten_in_place_fail_no_call() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let ca = FakeCa::start_tls(directory, &spiffe("web"), Tls::Optional).await;
    let ca_dir = directory.join("fake-ca");
    let root = ca_dir.join("root-cert.pem").display().to_string();
    let generations: Vec<_> = (0..8).map(|_| Mounted::new(&ca_dir, "web")).collect();
    let client = directory.join("client");
    generations[0].write(&client);
    let mut agent = busy_agent(directory, &ca, &client, &["--ca-root", &root]);
    std::fs::remove_file(directory.join("token")).unwrap();
    // During this pause the files don't match: the agent must not use them.
    let pause = || tokio::time::sleep(Duration::from_millis(10));
    let deadline = Instant::now() + PATIENCE;
    for generation in generations.iter().cycle().skip(1) {
        // The chain in two halves, then the key.
        let chain = &generation.chain;
        std::fs::write(client.join("cert-chain.pem"), &chain[..chain.len() / 2]).unwrap();
        pause().await;
        std::fs::write(client.join("cert-chain.pem"), chain).unwrap();
        pause().await;
        std::fs::write(client.join("key.pem"), &generation.key).unwrap();
        pause().await;
        pause().await;
        let renewals = ca.calls().len();
        if renewals >= 25 {
            break;
        }
        assert!(Instant::now() < deadline, "only {renewals} renewals");
    }
    agent.process.wait_log_times("certificate issued", 25).await;
    assert!(ca.calls().iter().all(|call| call.client.is_some() && !call.has_token()));
    assert_eq!(agent.process.count("no new certificate"), 0, "{}", agent.process.log());
}

#[tokio::test]
async fn a_ca_that_refuses_the_certificate_is_reported_with_reason_and_remedy() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let mut ca = Ca::start(directory).await;
    let old = FakeCa::start_tls(directory, &spiffe("web"), Tls::Old).await;
    let client = directory.join("client");
    let foreign = Mounted::new(&directory.join("elsewhere"), "web");
    foreign.write(&client);
    let client = client.display().to_string();
    let mut with_tls12 = old.client(directory);
    with_tls12
        .extend(["--ca-root".to_owned(), directory.join("fake-ca/root-cert.pem").display().to_string()]);
    for (name, mut options) in [("web", ca.client("web")), ("old", with_tls12)] {
        options.extend(["--ca-client-cert-dir".to_owned(), client.clone()]);
        let mut agent = Agent::start(directory, name, &strs(&options));
        let (_, line) = agent.process.wait_log("no new certificate").await;
        let (web, serial) = (spiffe("web"), foreign.serial());
        for words in ["refuses the client certificate", &client, &web, &serial, "the token is used"] {
            assert!(line.contains(words), "{name}: {line}");
        }
        // Both CAs have the name of the one that issued it.
        assert!(line.contains("it does not accept the issuer"), "{name}: {line}");
        let (_, line) = agent.process.wait_log("token used instead").await;
        assert!(line.contains(" WARN ") && line.contains("the CA refused it"), "{name}: {line}");
        agent.process.wait_log("certificate issued").await;
        assert_no_key(&agent.process.log(), &foreign);
    }
    let (_, line) = ca.process.wait_log("client certificate refused").await;
    assert!(line.contains("does not chain to this CA's root") && line.contains("peer=127.0.0.1"), "{line}");
}

#[tokio::test]
async fn a_refused_certificate_is_not_presented_again_while_there_is_a_token() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let ca = FakeCa::start_tls(directory, &spiffe("web"), Tls::Optional).await;
    let ca_dir = directory.join("fake-ca");
    let root = ca_dir.join("root-cert.pem").display().to_string();
    let client = directory.join("client");
    let foreign = Mounted::new(&directory.join("elsewhere"), "web");
    foreign.write(&client);
    let mut agent = busy_agent(directory, &ca, &client, &["--ca-root", &root]);
    let with_certificate = |call: &Call| call.client.is_some() && !call.has_token();
    let with_token = |call: &Call| call.client.is_none() && call.has_token();
    wait_calls(&ca, 5, with_token).await;
    assert_eq!(agent.process.count("no new certificate"), 1, "{}", agent.process.log());
    assert_eq!(agent.process.count("token used instead"), 1, "{}", agent.process.log());

    Mounted::new(&ca_dir, "web").write(&client);
    wait_calls(&ca, 2, with_certificate).await;
    assert_eq!(agent.process.count("no new certificate"), 1, "{}", agent.process.log());

    // A refused token is no better: the credentials are tried in turn, until the CA accepts one of them.
    foreign.write(&client);
    agent.process.wait_log_times("token used instead", 2).await;
    ca.set(Mood::Refuse(Code::Unauthenticated));
    agent.process.wait_log_times("refuses the client certificate", 3).await;
    ca.set(Mood::Good);
    wait_calls(&ca, 5, with_token).await;
    assert_no_key(&agent.process.log(), &foreign);
}

#[tokio::test]
async fn a_ca_that_ignores_certificates_gets_the_token() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let ca = FakeCa::start_tls(directory, &spiffe("web"), Tls::Never).await;
    let client = directory.join("client");
    Mounted::new(&directory.join("fake-ca"), "web").write(&client);
    let mut agent = busy_agent(directory, &ca, &client, &[]);
    wait_calls(&ca, 3, |call| call.client.is_none() && call.has_token()).await;
    agent.process.wait_log("the CA asks for no client certificate").await;
    assert_eq!(agent.process.count("the CA asks for no client certificate"), 1);
    std::fs::remove_file(directory.join("token")).unwrap();
    let (_, line) = agent.process.wait_log("no new certificate").await;
    assert!(line.contains("asks for no client certificate") && line.contains("the token file"), "{line}");
}

#[tokio::test]
async fn a_refusal_names_the_credential_of_the_call() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let ca = FakeCa::start_tls(directory, &spiffe("web"), Tls::Required).await;
    ca.set(Mood::Refuse(Code::Unauthenticated));
    let client = directory.join("client");
    let mounted = Mounted::new(&directory.join("fake-ca"), "web");
    mounted.write(&client);
    let mut agent = busy_agent(directory, &ca, &client, &[]);
    let (_, line) = agent.process.wait_log("no new certificate").await;
    for words in ["Unauthenticated", "used the client certificate", &mounted.serial(), "without the token"] {
        assert!(line.contains(words), "{line}");
    }
    // No client is accepted without a certificate.
    std::fs::remove_file(client.join("cert-chain.pem")).unwrap();
    std::fs::remove_file(client.join("key.pem")).unwrap();
    let (_, line) = agent.process.wait_log("wants a client certificate that it accepts").await;
    assert!(line.contains("--ca-client-cert-dir"), "{line}");
}

/// The address of `attache ca`, with the options to connect to it.
fn endpoint(ca: &Ca, directory: &Path) -> Endpoint {
    let address = ca.address.to_string().parse().unwrap();
    Endpoint { address, roots: Roots::File(directory.join("ca/root-cert.pem")), server_name: None }
}

#[tokio::test]
async fn attache_ca_refuses_an_expired_certificate() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let mut ca = Ca::start(directory).await;
    let client = directory.join("client");
    Mounted::expired(&directory.join("ca"), "web").write(&client);
    // A client whose clock is slow considers it valid.
    #[expect(clippy::disallowed_methods, reason = "two hours before the CA's own clock")]
    let clock = Clock::starting_at(SystemTime::now() - Duration::from_secs(2 * 3600));
    let citadel = Citadel {
        endpoint: endpoint(&ca, directory),
        token: TokenSource::new(
            TokenFile::new(directory.join("no-token")).into(),
            clock.clone(),
            Disk::default(),
        ),
        client_cert: Some(ClientCertDir::new(client)),
        repeats: Mutex::default(),
        refused: Mutex::default(),
        cluster_id: MetadataValue::from_static("Kubernetes"),
        headers: Vec::new(),
        cert_signer: None,
        impersonates: false,
        connections: Connections::new(Duration::from_secs(10), Disk::default()),
        clock,
        disk: Disk::default(),
    };
    let key = SigningKey::generate(KeyType::EcdsaP256).unwrap();
    let csr = csr::request(&key, None, &csr::Names::default()).unwrap();
    let request =
        SigningRequest { csr, identity: None, names: csr::Names::default(), ttl: Duration::from_secs(60) };
    for _ in 0..20 {
        let error = citadel.sign(&request).await.unwrap_err();
        assert!(matches!(error, CaError::ClientCertificate { .. }), "{error}");
        assert!(error.to_string().contains("by its clock it has expired"), "{error}");
    }
    let (_, line) = ca.process.wait_log("client certificate refused").await;
    assert!(line.contains("it has expired"), "{line}");
}

/// One call with a client certificate and, if there is one, a token.
async fn call(endpoint: &Endpoint, client: PathBuf, token: Option<&str>) -> Result<Certificate, Status> {
    let certificate = ClientCertDir::new(client).read(&Clock::system(), &Disk::default()).await.unwrap();
    let connected =
        endpoint.connect(Some(&certificate.pair), Protocol::Http2, &Disk::default()).await.unwrap();
    assert!(connected.has_presented);
    let key = SigningKey::generate(KeyType::EcdsaP256).unwrap();
    let csr = csr::to_pem(&csr::request(&key, None, &csr::Names::default()).unwrap());
    let mut request = Request::new(IstioCertificateRequest { csr, validity_duration: 60, metadata: None });
    if let Some(token) = token {
        request.metadata_mut().insert("authorization", format!("Bearer {token}").parse().unwrap());
    }
    let origin = endpoint.address.origin().parse().unwrap();
    let answer = attache::net::http2::with_connection(connected.io, async |connection| {
        IstioCertificateServiceClient::with_origin(connection, origin).create_certificate(request).await
    });
    let chain = answer.await.unwrap()?.into_inner().cert_chain;
    Ok(Certificate::parse(&pem::certificates(chain[0].as_bytes()).unwrap()[0]).unwrap())
}

#[tokio::test]
async fn attache_ca_prefers_a_certificate_to_a_token() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let mut ca = Ca::start(directory).await;
    let endpoint = endpoint(&ca, directory);
    let till = directory.join("till");
    Mounted::new(&directory.join("ca"), "till").write(&till);
    let token = token("web", "istio-ca", 60);
    assert_eq!(call(&endpoint, till.clone(), None).await.unwrap().uris, [spiffe("till")]);
    assert_eq!(call(&endpoint, till, Some(&token)).await.unwrap().uris, [spiffe("till")]);

    // With a certificate without an identity, the token decides.
    let nameless = directory.join("nameless");
    std::fs::create_dir(&nameless).unwrap();
    let own = attache::ca::embedded::DevelopmentCa::open(&directory.join("ca"), Clock::system()).unwrap();
    let (chain, key) = own.issue_server(&["localhost"], &[]).unwrap();
    std::fs::write(nameless.join("cert-chain.pem"), pem::of_certificates(&chain)).unwrap();
    std::fs::write(nameless.join("key.pem"), key.to_pem()).unwrap();
    assert_eq!(call(&endpoint, nameless.clone(), Some(&token)).await.unwrap().uris, [spiffe("web")]);
    let status = call(&endpoint, nameless, None).await.unwrap_err();
    assert_eq!(status.code(), Code::Unauthenticated);
    ca.process.wait_log("the client certificate has no SPIFFE ID").await;
}
