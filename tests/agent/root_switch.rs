//! The mesh gets a new root: real Envoys under traffic, each with an agent and a CA of its own, whose answers the test
//! decides.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use attache::base::clock::Clock;
use attache::ca::embedded::DevelopmentCa;
use attache::pki::certificate::Certificate;
use attache::pki::pem;
use attache::proto::envoy::service::discovery::v3::DiscoveryResponse;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use rustls::pki_types::CertificateDer;
use serde_json::Value;
use tokio::time::timeout;

use crate::support::envoy::{Envoy, http_get};
use crate::support::fake_ca::FakeCa;
use crate::support::files::spiffe;
use crate::support::mesh::{Traffic, bootstrap, wait_success};
use crate::support::process::{Agent, strs};
use crate::support::sds::{DeltaStream, Stream, certificates as only, content, delta_secrets, on_connection};

/// Renewed every 1.6 s.
const LIFETIME: Duration = Duration::from_secs(8);
const SHORT: [&str; 4] = ["--cert-ttl", "8s", "--grace-ratio", "0.8"];
/// One warning: the CA is called in plain text.
const PLAIN_TEXT: usize = 1;

type Root = Arc<DevelopmentCa>;

/// Two CAs that share nothing but their name.
fn roots(directory: &Path) -> [Root; 2] {
    ["old", "new"].map(|name| Arc::new(DevelopmentCa::open(&directory.join(name), Clock::system()).unwrap()))
}

/// A CA that signs with `root`, and the options of an agent that uses it.
async fn ca_of(directory: &Path, account: &str, root: &Root) -> (FakeCa, Vec<String>) {
    let ca = FakeCa::start(directory, &spiffe(account)).await;
    ca.switch(root, &[root]);
    let mut options = ca.client(directory);
    let state = directory.join(format!("{account}-state"));
    options.extend(SHORT.map(str::to_owned));
    let more = [
        "--service-account",
        account,
        "--state-dir",
        state.to_str().unwrap(),
        "--log-level",
        "info,attache::serve::sds=debug",
    ];
    options.extend(more.map(str::to_owned));
    (ca, options)
}

/// One of the two peers: its CA, its agent, its Envoy.
struct Side {
    ca: FakeCa,
    agent: Agent,
    options: Vec<String>,
    envoy: Envoy,
    /// The agent whose Workload API is the other one's source.
    _upstream: Option<Agent>,
}

impl Side {
    /// A secret as Envoy uses it: all its certificates.
    async fn used(&self, name: &str, field: &str) -> Vec<CertificateDer<'static>> {
        let dump = self.envoy.admin_get("/config_dump?resource=dynamic_active_secrets").await;
        let dump: Value = serde_json::from_str(&dump).unwrap();
        let secrets = dump["configs"].as_array().unwrap();
        let secret = secrets.iter().find(|secret| secret["name"] == name).unwrap();
        let bytes = secret["secret"].pointer(field).unwrap().as_str().unwrap();
        pem::certificates(&STANDARD.decode(bytes).unwrap()).unwrap()
    }

    /// Waits until Envoy trusts these roots, and no others.
    async fn wait_trust(&self, roots: &[&Root]) {
        let sorted = |mut ders: Vec<CertificateDer<'static>>| {
            ders.sort_unstable_by(|a, b| a.as_ref().cmp(b.as_ref()));
            ders
        };
        let wanted = sorted(roots.iter().map(|root| root.chain()[1].clone()).collect());
        let is_trusted = async || {
            sorted(self.used("ROOTCA", "/validation_context/trusted_ca/inline_bytes").await) == wanted
        };
        self.envoy.wait_until(&format!("Envoy trusts these {} roots", wanted.len()), is_trusted).await;
    }

    /// Waits until Envoy presents a certificate of `root`.
    async fn wait_signed_by(&self, root: &Root) {
        let is_used = async || {
            let chain = self.used("default", "/tls_certificate/certificate_chain/inline_bytes").await;
            chain.last() == Some(root.chain()[0])
        };
        self.envoy.wait_until("Envoy presents a certificate of the other root", is_used).await;
    }
}

/// How the certificates of a CA reach an Envoy's agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Direct,
    /// Through the Workload API of another agent.
    WorkloadApi,
}

/// `web` calls `api`, with a handshake for each request.
struct Mesh {
    web: Side,
    api: Side,
    outbound: SocketAddr,
}

impl Mesh {
    async fn start(directory: &Path, root: &Root, delta: bool) -> Self {
        Self::start_by(directory, root, delta, Way::Direct).await
    }

    async fn start_by(directory: &Path, root: &Root, delta: bool, way: Way) -> Self {
        let dialect: &[&str] = if delta { &["--delta"] } else { &[] };
        let side = async |account: &str, listeners: &[&str]| {
            let (ca, options) = ca_of(directory, account, root).await;
            let (agent, upstream) = match way {
                Way::Direct => (Agent::ready(directory, account, &strs(&options)).await, None),
                Way::WorkloadApi => {
                    let upstream = Agent::ready(directory, &format!("{account}-up"), &strs(&options)).await;
                    let endpoint = format!("unix://{}", upstream.socket.display());
                    let options = ["--ca", "spiffe", "--spiffe-endpoint", &endpoint];
                    (Agent::ready(directory, account, &options).await, Some(upstream))
                }
            };
            let envoy = bootstrap(&agent.socket, &[listeners, dialect].concat()).await;
            let envoy = Envoy::start(envoy, directory, account).await;
            Side { ca, agent, options, envoy, _upstream: upstream }
        };
        let api = side("api", &["--allow", &spiffe("web")]).await;
        let peer = api.envoy.listener_address("inbound").await.to_string();
        let expected = spiffe("api");
        let way_out =
            ["--outbound-listen", "127.0.0.1:0", "--outbound-to", &peer, "--outbound-peer", &expected];
        let web = side("web", &way_out).await;
        let outbound = web.envoy.listener_address("outbound").await;
        wait_success(&web.envoy, outbound).await;
        Self { web, api, outbound }
    }

    fn sides(&self) -> [&Side; 2] {
        [&self.web, &self.api]
    }

    /// Waits until requests fail because the peer's certificate chains to no trusted root.
    async fn wait_refused(&self, by: &Side) {
        let is_refused = async || http_get(self.outbound, "/").await.unwrap().0 == 503;
        self.web.envoy.wait_until("requests fail", is_refused).await;
        let stats = by.envoy.stats().await;
        let refusals: u64 = stats
            .iter()
            .filter(|(name, _)| name.ends_with(".ssl.fail_verify_error"))
            .map(|(_, count)| count)
            .sum();
        assert!(refusals > 0, "{stats:#?}");
    }
}

async fn nothing_fails_when_the_new_root_is_announced(delta: bool, way: Way) {
    let directory = tempfile::tempdir().unwrap();
    let [old, new] = roots(directory.path());
    let mut mesh = Mesh::start_by(directory.path(), &old, delta, way).await;
    let traffic = Traffic::start(mesh.outbound);
    // The new root is announced, the old one signs.
    for side in mesh.sides() {
        side.ca.switch(&old, &[&old, &new]);
    }
    for side in mesh.sides() {
        side.wait_trust(&[&old, &new]).await;
    }
    // The new root signs, for one side after the other.
    for side in mesh.sides() {
        side.ca.switch(&new, &[&old, &new]);
        side.wait_signed_by(&new).await;
    }
    // The old root is no longer in the answers. It is trusted as long as certificates of it may exist.
    for side in mesh.sides() {
        side.ca.switch(&new, &[&new]);
    }
    for side in mesh.sides() {
        side.wait_trust(&[&new]).await;
    }
    let report = traffic.stop().await;
    assert!(report.failures.is_empty(), "{:#?}\n{}", report.failures, mesh.web.envoy.log());
    assert!(report.serials.len() >= 4, "{:?}", report.serials);
    for side in [&mut mesh.web, &mut mesh.api] {
        // The first bundle, both roots, the new root.
        side.agent.wait_metric("attache_acks_total{name=\"ROOTCA\"}", 3).await;
        assert_eq!(side.agent.metric("attache_pushes_total{name=\"ROOTCA\"}").await, 3.0);
        let log = side.agent.process.log();
        assert_eq!(side.agent.process.count("trust roots changed"), 2, "{log}");
        let warnings = if way == Way::Direct { PLAIN_TEXT } else { 0 };
        assert_eq!(side.agent.process.count("WARN"), warnings, "{log}");
        let (_, metrics) = side.agent.status("/metrics").await;
        let roots: Vec<_> =
            metrics.lines().filter(|line| line.starts_with("attache_trust_root_not")).collect();
        let root = Certificate::parse(new.chain()[1]).unwrap();
        let sample = format!("attache_trust_root_not_after_timestamp_seconds{{serial=\"{}\"}} ", root.serial);
        assert!(matches!(roots[..], [root] if root.starts_with(&sample)), "{roots:#?}");
    }
}

#[tokio::test]
async fn nothing_fails_in_state_of_the_world_when_the_new_root_is_announced() {
    nothing_fails_when_the_new_root_is_announced(false, Way::Direct).await;
}

#[tokio::test]
async fn nothing_fails_in_delta_when_the_new_root_is_announced() {
    nothing_fails_when_the_new_root_is_announced(true, Way::Direct).await;
}

#[tokio::test]
async fn nothing_fails_behind_another_agents_workload_api_when_the_new_root_is_announced() {
    nothing_fails_when_the_new_root_is_announced(false, Way::WorkloadApi).await;
}

/// The side that switches first presents a certificate that the other can't verify yet.
#[tokio::test]
async fn without_an_announcement_requests_fail_until_the_last_side_has_switched() {
    let directory = tempfile::tempdir().unwrap();
    let [old, new] = roots(directory.path());
    let mut mesh = Mesh::start(directory.path(), &old, false).await;
    let before = Traffic::start(mesh.outbound);
    mesh.web.agent.process.wait_next_log("certificate issued").await;
    let before = before.stop().await;
    assert!(before.failures.is_empty(), "{:#?}", before.failures);

    mesh.web.ca.switch(&new, &[&new]);
    mesh.web.wait_signed_by(&new).await;
    mesh.web.wait_trust(&[&old, &new]).await;
    mesh.wait_refused(&mesh.api).await;

    mesh.api.ca.switch(&new, &[&new]);
    mesh.api.wait_signed_by(&new).await;
    wait_success(&mesh.web.envoy, mesh.outbound).await;
    let after = Traffic::start(mesh.outbound);
    for side in [&mut mesh.web, &mut mesh.api] {
        side.agent.process.wait_next_log("certificate issued").await;
    }
    let after = after.stop().await;
    assert!(after.failures.is_empty(), "{:#?}\n{}", after.failures, mesh.web.envoy.log());

    for side in [&mesh.web, &mesh.api] {
        let log = side.agent.process.log();
        assert_eq!(side.agent.process.count("WARN"), PLAIN_TEXT, "{log}");
        let (_, switch) = log.split_once("trust roots changed").unwrap();
        // Both roots are pushed, and acknowledged by Envoy, before it gets the certificate.
        let steps = switch.lines().filter_map(|line| {
            let (step, line) = ["sent", "accepted"]
                .into_iter()
                .find_map(|step| Some((step, line.split_once(&format!(" {step} name="))?.1)))?;
            Some((step, line.split('"').nth(1)?))
        });
        let steps: Vec<_> = steps.take(4).collect();
        assert_eq!(
            steps,
            [("sent", "ROOTCA"), ("accepted", "ROOTCA"), ("sent", "default"), ("accepted", "default")],
            "{switch}"
        );
        // The old root stays for one lifetime, counted from the switch.
        let line = log.lines().find(|line| line.contains("trust roots changed")).unwrap();
        let moment = |text: &str| humantime::parse_rfc3339(text.split_whitespace().next().unwrap()).unwrap();
        let until = moment(line.split_once("old_until=").unwrap().1);
        let stays = until.duration_since(moment(line)).unwrap();
        let second = Duration::from_secs(1);
        assert!((LIFETIME - 2 * second..=LIFETIME).contains(&stays), "{stays:?}: {line}");
    }
}

/// Its key is lost: certificates of the old root are refused from now on.
#[tokio::test]
async fn an_agent_that_drops_old_roots_makes_its_envoy_refuse_their_certificates_at_once() {
    let directory = tempfile::tempdir().unwrap();
    let [old, new] = roots(directory.path());
    let mut mesh = Mesh::start(directory.path(), &old, false).await;
    for side in mesh.sides() {
        side.ca.switch(&old, &[&old, &new]);
    }
    for side in mesh.sides() {
        side.wait_trust(&[&old, &new]).await;
    }
    mesh.web.ca.switch(&new, &[&new]);
    mesh.web.wait_signed_by(&new).await;
    // A restart does not forget the old root.
    mesh.web.agent.process.kill().await;
    mesh.web.agent.restart();
    mesh.web.agent.process.wait_log("certificate of an earlier run restored").await;
    mesh.web.agent.wait_metric("attache_streams{name=\"ROOTCA\"}", 1).await;
    mesh.web.wait_trust(&[&old, &new]).await;
    assert_eq!(http_get(mesh.outbound, "/").await.unwrap().0, 200);

    mesh.web.agent.process.kill().await;
    mesh.web.options.push("--drop-old-roots".to_owned());
    mesh.web.agent = Agent::start(directory.path(), "web", &strs(&mesh.web.options));
    mesh.web.wait_trust(&[&new]).await;
    mesh.wait_refused(&mesh.web).await;
    mesh.api.ca.switch(&new, &[&new]);
    wait_success(&mesh.web.envoy, mesh.outbound).await;
}

/// However long a stream takes to accept the roots (within 5 s), the certificate that needs them is sent afterwards.
#[tokio::test]
async fn the_certificate_waits_for_the_streams_of_the_roots_in_both_dialects() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let [old, new] = roots(directory);
    let ca = FakeCa::start(directory, &spiffe("web")).await;
    ca.switch(&old, &[&old]);
    let mut options = ca.client(directory);
    options.extend(["--cert-ttl", "60s", "--grace-ratio", "0.98"].map(str::to_owned));
    let agent = Agent::ready(directory, "web", &strs(&options)).await;
    on_connection(&agent.socket.clone(), async |client| {
        let mut pair = Stream::open(&client, &["default"]).await.unwrap();
        let mut sotw = Stream::open(&client, &["ROOTCA"]).await.unwrap();
        let mut delta = DeltaStream::open(&client, &["ROOTCA"]).await.unwrap();
        let certificates = |pem: &str| pem::certificates(pem.as_bytes()).unwrap();
        let roots = sotw.next().await.unwrap();
        sotw.accept(&roots).await;
        let roots = delta.next().await.unwrap();
        delta.accept(&roots).await;
        ca.switch(&new, &[&new]);
        let in_sotw = sotw.next().await.unwrap();
        assert_eq!(certificates(&only(&in_sotw)).len(), 2);
        let in_delta = delta.next().await.unwrap();
        let [secret] = delta_secrets(&in_delta).try_into().unwrap();
        assert_eq!(certificates(&content(secret).0).len(), 2);

        let is_new = |push: &DiscoveryResponse| certificates(&only(push)).contains(new.chain()[0]);
        let quiet = Duration::from_millis(200);
        // Certificates renewed before the switch may still arrive.
        while let Ok(push) = timeout(quiet, pair.next()).await {
            let push = push.unwrap();
            assert!(!is_new(&push), "no stream has accepted the roots");
            pair.accept(&push).await;
        }
        sotw.accept(&in_sotw).await;
        assert!(pair.is_quiet(quiet).await, "one stream has not accepted them");
        delta.accept(&in_delta).await;
        assert!(is_new(&pair.next().await.unwrap()));
    })
    .await;
    assert_eq!(agent.process.count("WARN"), PLAIN_TEXT, "{}", agent.process.log());
}
