//! `attache ca`: refuses what istiod refuses, and answers like istiod.

use attache::ca::{CertificateAuthority as _, SigningRequest};
use attache::net::http2::with_connection;
use attache::pki::key::{KeyType, SigningKey};
use attache::pki::{certificate::Certificate, csr, pem};
use attache::proto::istio::v1::auth::IstioCertificateRequest;
use attache::proto::istio::v1::auth::istio_certificate_service_client::IstioCertificateServiceClient;
use rustix::process::{Pid, Signal, kill_process_group};
use tokio::net::TcpStream;
use tokio::process::{Child, Command};
use tonic::{Code, Request, Status};

use crate::support::envoy;
use crate::support::files::{spiffe, token};
use crate::support::process::{Process, attache, failure, output};
use crate::support::wait::wait_for;

/// Starts a CA without TLS; returns its address.
async fn plaintext(directory: &std::path::Path, more: &[&str]) -> (Process, String) {
    let ca_dir = directory.join("ca");
    let fixed = ["ca", "--plaintext", "--listen", "127.0.0.1:0", "--ca-dir", ca_dir.to_str().unwrap()];
    let mut process = Process::start(attache(&[&fixed, more].concat()));
    let (_, line) = process.wait_log("CA listening").await;
    let address = line.split_once("address=http://").unwrap().1.split_whitespace().next().unwrap().to_owned();
    (process, address)
}

/// One call, as from any client.
async fn call(
    address: &str,
    headers: &[(&'static str, String)],
    csr: String,
    ttl: i64,
) -> Result<Vec<String>, Status> {
    let mut request = Request::new(IstioCertificateRequest { csr, validity_duration: ttl, metadata: None });
    for (name, value) in headers {
        request.metadata_mut().insert(*name, value.parse().unwrap());
    }
    let origin = format!("http://{address}").parse().unwrap();
    let io = TcpStream::connect(address).await.unwrap();
    let answer = with_connection(io, async |connection| {
        IstioCertificateServiceClient::with_origin(connection, origin).create_certificate(request).await
    });
    answer.await.unwrap().map(|answer| answer.into_inner().cert_chain)
}

fn bearer(token: &str) -> (&'static str, String) {
    ("authorization", format!("Bearer {token}"))
}

fn a_csr() -> String {
    let key = SigningKey::generate(KeyType::EcdsaP256).unwrap();
    let thief = "spiffe://cluster.local/ns/default/sa/thief".parse().unwrap();
    csr::to_pem(&csr::request(&key, Some(&thief), &csr::Names::default()).unwrap())
}

fn parse(text: &str) -> Vec<Certificate> {
    let ders = pem::certificates(text.as_bytes()).unwrap();
    ders.iter().map(|der| Certificate::parse(der).unwrap()).collect()
}

#[tokio::test]
async fn the_ca_issues_the_identity_of_the_token_whatever_the_csr_asks_for() {
    let directory = tempfile::tempdir().unwrap();
    let (_ca, address) = plaintext(directory.path(), &[]).await;
    let headers = [bearer(&token("web", "istio-ca", 60)), ("clusterid", "Kubernetes".to_owned())];
    let chain = call(&address, &headers, a_csr(), 3600).await.unwrap();
    let strings: Vec<_> = chain.iter().map(|text| parse(text)).collect();
    assert_eq!(
        strings.iter().map(Vec::len).collect::<Vec<_>>(),
        [1, 2, 1],
        "as an istiod with an intermediate"
    );
    let [leaf] = strings[0].as_slice() else { panic!("no leaf") };
    assert_eq!(leaf.uris, [spiffe("web")]);
    let lifetime = leaf.not_after.duration_since(leaf.not_before).unwrap().as_secs();
    assert!((3719..=3721).contains(&lifetime), "dated back by two minutes: {lifetime}");
    assert_eq!(strings[2][0].subject, strings[2][0].issuer);
    assert_eq!(strings[1][1], strings[2][0], "the root comes twice");
    // A lifetime of zero or less means the default.
    let chain = call(&address, &headers, a_csr(), 0).await.unwrap();
    let [leaf] = &parse(&chain[0])[..] else { panic!("no leaf") };
    assert_eq!(leaf.not_after.duration_since(leaf.not_before).unwrap().as_secs(), 24 * 3600 + 120);
}

#[tokio::test]
async fn the_ca_refuses_what_istiod_refuses() {
    let directory = tempfile::tempdir().unwrap();
    let (mut ca, address) = plaintext(directory.path(), &["--max-ttl", "1h"]).await;
    let good = bearer(&token("web", "istio-ca", 60));
    let cluster = |id: &str| ("clusterid", id.to_owned());
    let cases = [
        (vec![], a_csr(), 60, Code::Unauthenticated, "no bearer token"),
        (vec![bearer("opaque")], a_csr(), 60, Code::Unauthenticated, "not a JWT"),
        (vec![bearer(&token("web", "istio-ca", -1))], a_csr(), 60, Code::Unauthenticated, "has expired"),
        (vec![bearer(&token("web", "vault", 60))], a_csr(), 60, Code::Unauthenticated, "audience"),
        (vec![good.clone(), cluster("other")], a_csr(), 60, Code::Unauthenticated, "another cluster id"),
        (vec![good.clone()], "junk".to_owned(), 60, Code::InvalidArgument, ""),
        (vec![good.clone()], a_csr().replace('M', "N"), 60, Code::InvalidArgument, ""),
        (vec![good], a_csr(), 3601, Code::InvalidArgument, ""),
    ];
    for (headers, csr, ttl, code, logged) in cases {
        let status = call(&address, &headers, csr, ttl).await.unwrap_err();
        assert_eq!(status.code(), code, "{status}");
        match code {
            // istiod does not return a reason; the CA logs it.
            Code::Unauthenticated => {
                assert_eq!(status.message(), "request authenticate failure");
                ca.wait_log(logged).await;
            }
            _ => assert!(!status.message().is_empty()),
        }
    }
    assert_eq!(ca.count("certificate issued"), 0);
}

#[tokio::test]
async fn a_ca_with_a_fixed_identity_accepts_any_token() {
    let directory = tempfile::tempdir().unwrap();
    let (_ca, address) = plaintext(directory.path(), &["--spiffe-id", "spiffe://td/fixed"]).await;
    let chain = call(&address, &[bearer("opaque")], a_csr(), 60).await.unwrap();
    assert_eq!(parse(&chain[0])[0].uris, ["spiffe://td/fixed"]);
}

#[tokio::test]
async fn the_embedded_ca_and_attache_ca_share_a_directory() {
    let directory = tempfile::tempdir().unwrap();
    let (_ca, address) = plaintext(directory.path(), &[]).await;
    let chain = call(&address, &[bearer(&token("web", "istio-ca", 60))], a_csr(), 60).await.unwrap();
    let clock = attache::base::clock::Clock::system();
    let ca = attache::ca::embedded::DevelopmentCa::open(&directory.path().join("ca"), clock).unwrap();
    let embedded = attache::ca::embedded::Embedded::from(ca);
    let key = SigningKey::generate(KeyType::EcdsaP256).unwrap();
    let request = SigningRequest {
        csr: csr::request(&key, None, &csr::Names::default()).unwrap(),
        identity: Some(spiffe("web").parse().unwrap()),
        names: csr::Names::default(),
        ttl: std::time::Duration::from_secs(60),
    };
    let answer = embedded.sign(&request).await.unwrap();
    assert_eq!(pem::certificates(chain[2].as_bytes()).unwrap(), answer.roots);
}

#[tokio::test]
async fn an_address_in_use_is_reported_with_the_remedy() {
    let directory = tempfile::tempdir().unwrap();
    let (_ca, address) = plaintext(directory.path(), &[]).await;
    let other = directory.path().join("other");
    let (code, error) = failure(&["ca", "--listen", &address, "--ca-dir", other.to_str().unwrap()]).await;
    assert_eq!(code, 1);
    assert!(error.contains(&address) && error.contains("--listen"), "{error}");
}

#[tokio::test]
async fn a_token_of_the_command_gives_the_identity_that_it_names() {
    let directory = tempfile::tempdir().unwrap();
    let (mut process, address) = plaintext(directory.path(), &[]).await;
    let made = output(&["ca", "token", "shop", "cart"]).await;
    let made = String::from_utf8(made.stdout).unwrap();
    let chain = call(&address, &[bearer(made.trim_end())], a_csr(), 3600).await.unwrap();
    assert_eq!(parse(&chain[0])[0].uris, ["spiffe://cluster.local/ns/shop/sa/cart"]);
    let short = output(&["ca", "token", "shop", "cart", "--ttl", "1s"]).await;
    let short = String::from_utf8(short.stdout).unwrap();
    wait_for("the token expires", async || {
        let answer = call(&address, &[bearer(short.trim_end())], a_csr(), 3600).await;
        answer.is_err_and(|status| status.code() == Code::Unauthenticated).then_some(())
    })
    .await;
    process.wait_log("the token has expired").await;
    for (arguments, words) in [
        (&["ca", "token", "shop"][..], "<ACCOUNT>"),
        (&["ca", "token", "shop", "a/b"], "\"a/b\" holds a slash"),
        (&["ca", "token", "", "cart"], "NAMESPACE"),
        (&["ca", "token", "shop", "cart", "--ttl", "0s"], "is too short"),
        (&["ca", "--plaintext", "token", "shop", "cart"], "cannot be used with"),
    ] {
        let (code, error) = failure(arguments).await;
        assert!(code == 2 && error.contains(words), "{arguments:?}: {error}");
    }
}

/// A shell with everything that it has started, which ends with it.
struct Shell(Child);

impl Drop for Shell {
    fn drop(&mut self) {
        let group = self.0.id().and_then(|id| Pid::from_raw(id.try_into().unwrap()));
        kill_process_group(group.unwrap(), Signal::KILL).unwrap();
    }
}

#[tokio::test]
async fn the_page_leads_to_two_envoys_with_two_identities() {
    let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/ca-embedded.md")).unwrap();
    let (_, section) = page.split_once("## Two Envoys with two identities").unwrap();
    let block = section.split("```").nth(1).unwrap().strip_prefix("console\n").unwrap().replace("\\\n", " ");
    // Other ports, so that nothing else has them.
    let mut block = block;
    let listeners = [15012, 15001, 15002, 8443, 8444, 8080].map(|port| {
        let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let other = free.local_addr().unwrap();
        assert!(block.contains(&format!("127.0.0.1:{port}")), "{port}");
        block = block.replace(&format!("127.0.0.1:{port}"), &other.to_string());
        free
    });
    let outbound = listeners[5].local_addr().unwrap();
    drop(listeners);
    let mut commands: Vec<_> = block.lines().filter_map(|line| line.strip_prefix("$ ")).collect();
    assert_eq!(commands.pop(), Some(format!("curl -si http://{outbound}/ | grep x-peer-uri-san").as_str()));
    let expected = block.lines().last().unwrap().strip_prefix("x-peer-uri-san: ").unwrap();

    let directory = tempfile::tempdir().unwrap();
    let binaries = directory.path().join("bin");
    std::fs::create_dir(&binaries).unwrap();
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_attache"), binaries.join("attache")).unwrap();
    std::os::unix::fs::symlink(envoy::binary().await, binaries.join("envoy")).unwrap();
    let place = directory.path().join("empty");
    std::fs::create_dir(&place).unwrap();
    let mut shell = Command::new("/bin/sh");
    shell.args(["-e", "-c", &format!("{}\nwait", commands.join("\n"))]).current_dir(&place);
    let path = format!("{}:/usr/bin:/bin", binaries.display());
    shell.env_clear().env("PATH", path).stdin(std::process::Stdio::null()).process_group(0);
    let _shell = Shell(shell.spawn().unwrap());
    let caller = wait_for("api answers web", async || {
        let (status, headers, _) = envoy::http_get(outbound, "/").await.ok()?;
        headers.get("x-peer-uri-san").filter(|_| status == 200).cloned()
    })
    .await;
    assert_eq!(caller, expected);
}
