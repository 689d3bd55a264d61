//! Certificates that a real Envoy fetches when a client names the host (SNI), from Secrets of Kubernetes.

use std::io;
use std::net::SocketAddr;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use attache::pki::certificate::Certificate;
use attache::pki::pem;
use rustls::{ClientConfig, RootCertStore};
use tokio::net::TcpStream;
use tokio::process::Command;
use tokio::time::{Instant, timeout};
use tokio_rustls::TlsConnector;

use crate::kubernetes_secrets::Gateway;
use crate::support::envoy::Envoy;
use crate::support::kube_cluster::Rule;
use crate::support::mesh::bootstrap;
use crate::support::process::PATIENCE;
use crate::support::wait::wait_for;

const HOST: &str = "web.example.com";
/// Far below Envoy's time-out of a handshake that waits for its certificate, 15 s.
const SOON: Duration = Duration::from_secs(5);

/// An Envoy with the printed bootstrap, an agent, and a cluster whose Secrets have the names of hosts.
struct Site {
    gateway: Gateway,
    envoy: Envoy,
    address: SocketAddr,
    tls: TlsConnector,
}

impl Site {
    async fn start() -> Self {
        let rule = Rule::to(&["get", "watch"], "secrets").within("shop");
        let gateway = Gateway::start(vec![rule], &["--kubernetes-bare-names"]).await;
        let bootstrap = bootstrap(&gateway.agent.socket, &["--gateway"]).await;
        let envoy = Envoy::start(bootstrap, gateway.directory.path(), "envoy").await;
        envoy.wait_listeners(&["gateway"]).await;
        let address = envoy.listener_address("gateway").await;
        let mut roots = RootCertStore::empty();
        for root in pem::certificates(gateway.cluster.root()).unwrap() {
            roots.add(root).unwrap();
        }
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let tls = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
        let tls = tls.unwrap().with_root_certificates(roots).with_no_client_auth();
        Self { gateway, envoy, address, tls: TlsConnector::from(Arc::new(tls)) }
    }

    /// Makes a handshake, and returns the serial number of the certificate, which must be the host's.
    async fn handshake(&self, host: &'static str) -> io::Result<String> {
        let connected = async {
            let io = TcpStream::connect(self.address).await?;
            self.tls.connect(host.try_into().unwrap(), io).await
        };
        let connected = timeout(PATIENCE, connected).await.expect("no end to the handshake")?;
        let leaf = &connected.get_ref().1.peer_certificates().unwrap()[0];
        Ok(Certificate::parse(leaf).unwrap().serial)
    }

    /// Puts a new pair into the Secret of the host; returns its serial number.
    fn put(&self, host: &str) -> String {
        let pair = self.gateway.put(host, host);
        let leaf = pem::certificates(&pair.chain).unwrap().swap_remove(0);
        Certificate::parse(&leaf).unwrap().serial
    }

    async fn wait_serial(&self, host: &'static str, serial: &str) {
        wait_for("a handshake has the new certificate", async || {
            (self.handshake(host).await.unwrap() == serial).then_some(())
        })
        .await;
    }
}

#[tokio::test]
async fn a_host_has_its_certificate_in_the_first_handshake_and_its_changes_in_the_next() {
    let site = Site::start().await;
    let first = site.put(HOST);
    assert_eq!(site.handshake(HOST).await.unwrap(), first, "{}", site.envoy.log());
    let calls = site.gateway.cluster.calls().len();
    for _ in 0..20 {
        assert_eq!(site.handshake(HOST).await.unwrap(), first);
    }
    // Opening the watch may be among them.
    let further = site.gateway.cluster.calls().len() - calls;
    assert!(further <= 1, "{further} calls for a host that is served");

    let second = site.put(HOST);
    site.wait_serial(HOST, &second).await;
    site.gateway.cluster.delete_secret("shop", HOST);
    wait_for("the host is refused", async || site.handshake(HOST).await.is_err().then_some(())).await;
    let third = site.put(HOST);
    wait_for("the host is served again", async || site.handshake(HOST).await.ok().filter(|it| *it == third))
        .await;
}

#[tokio::test]
async fn the_case_in_which_a_client_spells_a_host_does_not_matter() {
    let site = Site::start().await;
    site.put(HOST);
    // rustls lowers the case of what it sends.
    let client = Command::new("openssl")
        .args(["s_client", "-connect", &site.address.to_string(), "-servername", "WEB.Example.COM"])
        .stdin(Stdio::null())
        .output();
    let printed = timeout(PATIENCE, client).await.unwrap().unwrap();
    let printed = String::from_utf8_lossy(&printed.stdout).into_owned();
    let leaf = pem::certificates(printed.as_bytes()).unwrap().swap_remove(0);
    assert_eq!(Certificate::parse(&leaf).unwrap().dns_names, [HOST], "{printed}");
}

#[tokio::test]
async fn an_unknown_host_is_refused_soon_and_a_hundred_handshakes_for_it_cost_few_calls() {
    let site = Site::start().await;
    site.put(HOST);
    site.handshake(HOST).await.unwrap();
    for _ in 0..100 {
        let begun = Instant::now();
        let error = site.handshake("nope.example.com").await.unwrap_err();
        assert!(error.to_string().contains("HandshakeFailure"), "{error}");
        assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
    }
    let calls = site.gateway.cluster.count(|call| call.names("nope.example.com"));
    assert!((1..=5).contains(&calls), "{calls} calls");
    site.handshake(HOST).await.unwrap();
    // It is noticed when there is such a Secret, though it was refused before.
    let serial = site.put("nope.example.com");
    wait_for("the new host is served", async || {
        site.handshake("nope.example.com").await.ok().filter(|it| *it == serial)
    })
    .await;
}

#[tokio::test]
async fn envoy_goes_on_while_the_agent_restarts_and_gets_what_has_changed_meanwhile() {
    let mut site = Site::start().await;
    let first = site.put(HOST);
    assert_eq!(site.handshake(HOST).await.unwrap(), first);
    site.gateway.agent.process.kill().await;
    for _ in 0..10 {
        assert_eq!(site.handshake(HOST).await.unwrap(), first);
    }
    let second = site.put(HOST);
    site.gateway.agent.restart();
    site.wait_serial(HOST, &second).await;
    site.put("cold.example.com");
    site.handshake("cold.example.com").await.unwrap();
}
