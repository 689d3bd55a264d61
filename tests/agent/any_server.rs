//! `attache get` and `attache watch` with SDS servers of every kind.

use std::path::Path;
use std::process::Stdio;

use attache::proto::envoy::config::core::v3::{DataSource, TypedExtensionConfig, data_source::Specifier};
use attache::proto::envoy::extensions::transport_sockets::tls::v3::spiffe_cert_validator_config::TrustDomain;
use attache::proto::envoy::extensions::transport_sockets::tls::v3::{
    CertificateValidationContext, Secret, SpiffeCertValidatorConfig, TlsCertificate, secret::Type,
};
use attache::proto::google::protobuf::Any;
use prost::Message as _;
use serde_json::Value;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, BufReader};
use tokio::process::{Child, ChildStderr, ChildStdout};
use tokio::time::timeout;

use crate::support::fake_sds::FakeSds;
use crate::support::files::{Mounted, spiffe};
use crate::support::process::{Agent, PATIENCE, attache, failure, output};
use crate::support::wait::wait_until;

fn inline(bytes: &[u8]) -> Option<DataSource> {
    Some(DataSource { specifier: Some(Specifier::InlineBytes(bytes.to_vec().into())) })
}

fn key_pair(name: &str, mounted: &Mounted) -> Secret {
    let (certificate_chain, private_key) = (inline(&mounted.chain), inline(&mounted.key));
    let pair = TlsCertificate { certificate_chain, private_key, ocsp_staple: None };
    Secret { name: name.to_owned(), r#type: Some(Type::TlsCertificate(pair)) }
}

fn trust_bundle(context: CertificateValidationContext) -> Secret {
    Secret { name: "ROOTCA".to_owned(), r#type: Some(Type::ValidationContext(context)) }
}

/// What Istio's agent serves.
fn istios(mounted: &Mounted) -> [Secret; 2] {
    let roots = CertificateValidationContext { trusted_ca: inline(&mounted.root), ..Default::default() };
    [key_pair("default", mounted), trust_bundle(roots)]
}

/// What SPIRE's agent serves: the bundles of two trust domains, for a validator.
fn spires(mounted: &Mounted, other: &Mounted) -> [Secret; 2] {
    let domain = |name: &str, root: &[u8]| TrustDomain { name: name.to_owned(), trust_bundle: inline(root) };
    let trust_domains = vec![domain("cluster.local", &mounted.root), domain("other.example", &other.root)];
    let validator = SpiffeCertValidatorConfig { trust_domains };
    let typed = Any {
        type_url: "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.SPIFFECertValidatorConfig"
            .to_owned(),
        value: validator.encode_to_vec().into(),
    };
    let name = "envoy.tls.cert_validator.spiffe".to_owned();
    let custom = TypedExtensionConfig { name, typed_config: Some(typed) };
    let bundles =
        CertificateValidationContext { custom_validator_config: Some(custom), ..Default::default() };
    [key_pair("default", mounted), trust_bundle(bundles)]
}

async fn get(socket: &Path, more: &[&str]) -> (Option<i32>, String, String) {
    let output = output(&[&["get", "--socket", socket.to_str().unwrap()], more].concat()).await;
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

/// `attache watch`, and what it prints.
struct Watch {
    lines: tokio::io::Lines<BufReader<ChildStdout>>,
    errors: tokio::io::Lines<BufReader<ChildStderr>>,
    child: Child,
}

impl Watch {
    fn start(socket: &Path, more: &[&str]) -> Self {
        let mut command = attache(&[&["watch", "--socket", socket.to_str().unwrap()], more].concat());
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let errors = BufReader::new(child.stderr.take().unwrap()).lines();
        Self { lines, errors, child }
    }

    async fn line(&mut self) -> String {
        timeout(PATIENCE, self.lines.next_line()).await.expect("no push").unwrap().expect("no more pushes")
    }

    async fn push(&mut self) -> Value {
        serde_json::from_str(&self.line().await).unwrap()
    }

    async fn error(&mut self) -> String {
        timeout(PATIENCE, self.errors.next_line()).await.expect("no message").unwrap().unwrap()
    }
}

#[tokio::test]
async fn a_server_without_fetch_is_asked_by_streams() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("socket");
    let mounted = Mounted::new(&directory.path().join("ca"), "web");
    let fake = FakeSds::start(&socket, istios(&mounted), false);
    let (code, table, note) = get(&socket, &["--node-id", "sidecar~web"]).await;
    assert_eq!(code, Some(0), "{note}");
    assert!(table.contains("default: key pair, 2 certificates") && table.contains("ROOTCA: trust bundle"));
    assert_eq!(note.matches("the server has no FetchSecrets").count(), 1, "{note}");
    let asked = fake.asked();
    let nodes = asked.iter().filter(|request| request.node.as_ref().unwrap().id == "sidecar~web");
    assert_eq!(nodes.count(), 2, "{asked:?}");

    let (code, _, error) = get(&socket, &["other"]).await;
    assert_eq!(code, Some(1));
    assert!(error.contains("other") && error.contains("not authorized"), "{error}");
}

#[tokio::test]
async fn the_bundles_of_spires_validators_are_shown_with_their_trust_domains() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("socket");
    let of = |ca: &str| Mounted::new(&directory.path().join(ca), "web");
    let (mounted, other) = (of("ca"), of("other"));
    let fake = FakeSds::start(&socket, spires(&mounted, &other), true);
    let (code, table, note) = get(&socket, &[]).await;
    assert_eq!((code, note.as_str()), (Some(0), ""));
    for text in [
        "ROOTCA: trust bundle of a SPIFFE validator, 2 certificates\n",
        "    trust domain cluster.local\n",
        "    trust domain other.example\n",
    ] {
        assert!(table.contains(text), "{text}:\n{table}");
    }
    let (_, json, _) = get(&socket, &["--output", "json", "ROOTCA"]).await;
    let json: Value = serde_json::from_str(&json).unwrap();
    let domains = ["cluster.local", "other.example"];
    assert_eq!([0, 1].map(|index| json[0]["certificates"][index]["trust_domain"].as_str().unwrap()), domains);
    let (_, pem, _) = get(&socket, &["--output", "pem", "ROOTCA"]).await;
    assert_eq!(pem.matches("BEGIN CERTIFICATE").count(), 2);

    // A name that the server refuses costs the others nothing.
    let mut watch = Watch::start(&socket, &["--output", "json", "--node-id", "me", "ROOTCA", "other"]);
    let push = watch.push().await;
    assert_eq!(push["secret"]["certificates"][1]["trust_domain"], "other.example");
    assert!(watch.error().await.contains("other: workload is not authorized"));
    fake.push();
    assert_ne!(watch.push().await["version"], push["version"]);
    let version = push["version"].as_str().unwrap();
    let is_acknowledged = || {
        fake.asked().iter().any(|request| {
            let node = request.node.as_ref().is_some_and(|node| node.id == "me");
            node && request.version_info == version && request.response_nonce.starts_with("nonce-")
        })
    };
    wait_until("the push is acknowledged", is_acknowledged).await;
    assert!(watch.child.try_wait().unwrap().is_none());

    let (code, error) = failure(&["watch", "--socket", socket.to_str().unwrap(), "other"]).await;
    assert!(code == 1 && error.contains("not authorized"), "{error}");
}

#[tokio::test]
async fn get_fails_for_another_identity_or_too_short_a_life() {
    let directory = tempfile::tempdir().unwrap();
    let ca = directory.path().join("ca");
    let id = spiffe("web");
    let options = ["--ca", "embedded", "--ca-dir", ca.to_str().unwrap(), "--spiffe-id", &id];
    let agent = Agent::ready(directory.path(), "agent", &options).await;
    let other = spiffe("other");
    // The certificate is valid for a day, the root for years.
    let cases: [(&[&str], Option<&str>); 9] = [
        (&["--expect", &id], None),
        (&["--min-life", "1h", "--expect", &id], None),
        (&["--min-life", "48h", "ROOTCA"], None),
        (&["--expect", &other], Some("(--expect)")),
        (&["--expect", &id, "ROOTCA"], Some("--expect: none of these secrets is a key pair")),
        (&["--min-life", "48h"], Some("less than 2days (--min-life)")),
        (&["--min-life", "1h", "--wait", "--output", "none"], None),
        (&["--min-life", "48h", "--wait", "--timeout", "1s"], Some("not available within 1s")),
        (&["--expect", &other, "--wait", "--timeout", "1s"], Some("(--expect)")),
    ];
    for (arguments, expected) in cases {
        let (code, _, error) = get(&agent.socket, arguments).await;
        assert_eq!(code, Some(i32::from(expected.is_some())), "{arguments:?}: {error}");
        assert!(error.contains(expected.unwrap_or_default()), "{arguments:?}: {error}");
    }
    let (code, _, error) = get(&agent.socket, &["--expect", "web"]).await;
    assert_eq!(code, Some(2), "{error}");
}

#[tokio::test]
async fn watch_shows_the_version_of_each_name_and_reports_an_unknown_one_at_once() {
    let directory = tempfile::tempdir().unwrap();
    let ca = directory.path().join("ca");
    let agent =
        Agent::ready(directory.path(), "agent", &["--ca", "embedded", "--ca-dir", ca.to_str().unwrap()])
            .await;
    let mut watch = Watch::start(&agent.socket, &["--output", "json", "default", "ROOTCA", "defualt"]);
    let socket = agent.socket.to_str().unwrap();
    let status = output(&["status", "--output", "json", "--socket", socket]).await;
    let status: Value = serde_json::from_slice(&status.stdout).unwrap();
    for _ in 0..2 {
        let push = watch.push().await;
        let served = status["secrets"].as_array().unwrap();
        let served = served.iter().find(|one| one["name"] == push["secret"]["name"]).unwrap();
        assert_eq!(push["version"], served["version"], "{push}");
    }
    assert!(watch.error().await.contains("unknown resource name \"defualt\""));
    // Without a name that it could have, it has nothing to wait for.
    let (code, error) = failure(&["watch", "--socket", socket, "defualt"]).await;
    assert!(code == 1 && error.contains("unknown resource name \"defualt\""), "{error}");
    let pem = Watch::start(&agent.socket, &["--output", "pem", "default"]).line().await;
    assert_eq!(pem, "-----BEGIN CERTIFICATE-----");
}

#[tokio::test]
async fn watching_ends_quietly_when_its_output_is_closed() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("socket");
    let mounted = Mounted::new(&directory.path().join("ca"), "web");
    let _fake = FakeSds::start(&socket, istios(&mounted), true);
    let Watch { mut lines, errors, mut child } = Watch::start(&socket, &[]);
    lines.next_line().await.unwrap().unwrap();
    // No push follows that would fail.
    drop(lines);
    let status = timeout(PATIENCE, child.wait()).await.expect("it stays").unwrap();
    let mut said = String::new();
    errors.into_inner().read_to_string(&mut said).await.unwrap();
    assert_eq!((status.code(), said.as_str()), (Some(0), ""));

    let ca = directory.path().join("ca-of-agent");
    let ca = ca.to_str().unwrap();
    let agent = Agent::ready(directory.path(), "agent", &["--ca", "embedded", "--ca-dir", ca]).await;
    let mut watch = attache(&["status", "--watch", "--socket", agent.socket.to_str().unwrap()]);
    let mut watch = watch.stdout(Stdio::piped()).kill_on_drop(true).spawn().unwrap();
    let mut lines = BufReader::new(watch.stdout.take().unwrap()).lines();
    lines.next_line().await.unwrap().unwrap();
    drop(lines);
    let status = timeout(PATIENCE, watch.wait()).await.expect("it stays").unwrap();
    assert_eq!(status.code(), Some(0));
}
