//! CRLs: what real Envoys do with them, and that they never cost a peer that is not revoked.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use attache::base::clock::Clock;
use attache::pki::key::{KeyType, SigningKey};
use attache::pki::pem;
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, KeyUsagePurpose, SanType, SerialNumber};
use rustls::pki_types::{CertificateDer, ServerName};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::support::envoy::{Envoy, NEWEST, OLDEST, http_get};
use crate::support::files::{Mounted, spiffe};
use crate::support::mesh::{Traffic, bootstrap, caller_envoy, named, wait_success};
use crate::support::process::{Agent, output};

const HOUR: i64 = 3600;

/// A CA with its key.
struct Authority {
    der: CertificateDer<'static>,
    params: CertificateParams,
    key: SigningKey,
    /// The chain that leaves need: empty below a root.
    chain: Vec<CertificateDer<'static>>,
}

impl Authority {
    fn new(name: &str, above: Option<&Self>, usages: &[KeyUsagePurpose]) -> Self {
        let key = SigningKey::generate(KeyType::EcdsaP256).unwrap();
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = [&[KeyUsagePurpose::KeyCertSign], usages].concat();
        let certificate = match above {
            Some(above) => params.signed_by(&key, &above.issuer()).unwrap(),
            None => params.self_signed(&key).unwrap(),
        };
        // The certificate limits the key's usage; here the key signs everything.
        params.key_usages.push(KeyUsagePurpose::CrlSign);
        let der = certificate.der().clone();
        let chain = above.map(|above| [vec![der.clone()], above.chain.clone()].concat()).unwrap_or_default();
        Self { der, params, key, chain }
    }

    fn root(name: &str) -> Self {
        Self::new(name, None, &[KeyUsagePurpose::CrlSign])
    }

    fn below(name: &str, above: &Self) -> Self {
        Self::new(name, Some(above), &[KeyUsagePurpose::CrlSign])
    }

    fn issuer(&self) -> rcgen::Issuer<'_, &SigningKey> {
        rcgen::Issuer::from_params(&self.params, &self.key)
    }

    /// A key pair of `account`, and this root for its peers.
    fn mounted(&self, account: &str, root: &Self) -> Mounted {
        let key = SigningKey::generate(KeyType::EcdsaP256).unwrap();
        let mut params = CertificateParams::default();
        // Envoy's SPIFFE validator refuses leaves that don't say what their key is for.
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.subject_alt_names = vec![
            SanType::URI(spiffe(account).try_into().unwrap()),
            SanType::DnsName("localhost".try_into().unwrap()),
        ];
        let leaf = params.signed_by(&key, &self.issuer()).unwrap();
        Mounted {
            chain: pem::of_certificates(std::iter::once(leaf.der()).chain(&self.chain)),
            key: key.to_private_key().to_pem().to_vec(),
            root: pem::of_certificates([&root.der]),
        }
    }

    /// A CRL, valid from and until so many seconds from now, that revokes these.
    fn crl(&self, from: i64, until: i64, revoked: &[&Mounted]) -> String {
        let at = |seconds: i64| {
            let distance = Duration::from_secs(seconds.unsigned_abs());
            let now = Clock::system().now();
            if seconds < 0 { now - distance } else { now + distance }
        };
        let revoked_certs = revoked.iter().map(|one| rcgen::RevokedCertParams {
            serial_number: serial(one),
            revocation_time: at(from).into(),
            reason_code: None,
            invalidity_date: None,
        });
        let params = rcgen::CertificateRevocationListParams {
            this_update: at(from).into(),
            next_update: at(until).into(),
            crl_number: 1.into(),
            issuing_distribution_point: None,
            revoked_certs: revoked_certs.collect(),
            key_identifier_method: rcgen::KeyIdMethod::Sha256,
        };
        let crl = params.signed_by(&self.issuer()).unwrap();
        String::from_utf8(pem::encode("X509 CRL", crl.der()).to_vec()).unwrap()
    }
}

fn serial(mounted: &Mounted) -> SerialNumber {
    let text = mounted.serial();
    let digits: Vec<_> = text.chars().map(|digit| digit.to_digit(16).unwrap()).collect();
    let bytes: Vec<_> = digits.chunks(2).map(|pair| u8::try_from(pair[0] * 16 + pair[1]).unwrap()).collect();
    SerialNumber::from_slice(&bytes)
}

/// A listener that checks its peers against the secret in `file`.
fn listener(name: &str, directory: &Path, file: &Path) -> Value {
    let path = |name: &str| json!({ "filename": directory.join(name) });
    let tls = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext";
    let http = "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager";
    let router = "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router";
    let sds_config = json!({ "path_config_source": { "path": file }, "resource_api_version": "V3" });
    json!({
        "name": name,
        "address": { "socket_address": { "address": "127.0.0.1", "port_value": 0 } },
        "filter_chains": [{
            "transport_socket": { "name": "tls", "typed_config": {
                "@type": tls,
                "require_client_certificate": true,
                "common_tls_context": {
                    "tls_certificates": [{
                        "certificate_chain": path("cert-chain.pem"),
                        "private_key": path("key.pem"),
                    }],
                    "validation_context_sds_secret_config": { "name": name, "sds_config": sds_config },
                },
            } },
            "filters": [{ "name": "http", "typed_config": {
                "@type": http,
                "stat_prefix": name,
                "http_filters": [{ "name": "router", "typed_config": { "@type": router } }],
                "route_config": { "virtual_hosts": [{ "name": "all", "domains": ["*"], "routes": [
                    { "match": { "prefix": "/" }, "direct_response": { "status": 200 } },
                ] }] },
            } }],
        }],
    })
}

/// Whether the listener at `port` accepts this peer.
async fn gets_in(port: std::net::SocketAddr, peer: &Mounted, root: &Authority) -> bool {
    let mut roots = rustls::RootCertStore::empty();
    roots.add(root.der.clone()).unwrap();
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let key = rustls::pki_types::pem::PemObject::from_pem_slice(&peer.key).unwrap();
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_client_auth_cert(pem::certificates(&peer.chain).unwrap(), key)
        .unwrap();
    let tcp = TcpStream::connect(port).await.unwrap();
    let name = ServerName::try_from("localhost").unwrap();
    let Ok(mut tls) = tokio_rustls::TlsConnector::from(Arc::new(config)).connect(name, tcp).await else {
        return false;
    };
    let request = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";
    let mut answer = [0; 12];
    tls.write_all(request).await.is_ok()
        && tls.read_exact(&mut answer).await.is_ok()
        && answer == *b"HTTP/1.1 200"
}

/// The reason why a bundle is served without CRLs where they are incomplete.
#[tokio::test]
async fn one_crl_makes_envoy_require_one_of_every_issuer() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let (root, second, namesake) =
        (Authority::root("root"), Authority::root("second"), Authority::root("root"));
    let middle = Authority::below("middle", &root);
    let mute = Authority::new("mute", Some(&root), &[]);
    let [good, revoked] = ["good", "revoked"].map(|account| middle.mounted(account, &root));
    let of_second = second.mounted("of second", &second);
    let of_mute = mute.mounted("of mute", &root);
    middle.mounted("server", &root).write(directory);

    let of_root = root.crl(-HOUR, HOUR, &[]);
    let of_middle = middle.crl(-HOUR, HOUR, &[&revoked]);
    let (expired, to_come) = (middle.crl(-HOUR, -60, &[]), middle.crl(60, HOUR, &[]));
    let forged = Authority { params: middle.params.clone(), ..Authority::root("forger") };
    let forged = Authority { der: middle.der.clone(), ..forged }.crl(-HOUR, HOUR, &[]);
    let both = || vec![of_root.clone(), of_middle.clone()];
    let with = |crl: String| vec![of_root.clone(), crl];
    let junk = "-----BEGIN X509 CRL-----\nAAAA\n-----END X509 CRL-----\n".to_owned();
    // Roots, CRLs, whether only the leaf is checked, and which peers are accepted.
    type Case<'a> = (&'a str, Vec<&'a Authority>, Vec<String>, bool, Vec<(&'a Mounted, bool)>);
    let cases: Vec<Case<'_>> = vec![
        ("none", vec![&root], vec![], false, vec![(&good, true), (&revoked, true)]),
        ("all", vec![&root], both(), false, vec![(&good, true), (&revoked, false)]),
        ("no text", vec![&root], vec!["nothing".to_owned()], false, vec![(&good, false)]),
        ("not the root's", vec![&root], vec![of_middle.clone()], false, vec![(&good, false)]),
        ("not the intermediate's", vec![&root], vec![of_root.clone()], false, vec![(&good, false)]),
        ("expired", vec![&root], with(expired), false, vec![(&good, false)]),
        ("to come", vec![&root], with(to_come), false, vec![(&good, false)]),
        ("signed by another", vec![&root], with(forged), false, vec![(&good, false)]),
        ("may not sign", vec![&root], with(mute.crl(-HOUR, HOUR, &[])), false, vec![(&of_mute, false)]),
        ("a root without", vec![&root, &second], both(), false, vec![(&good, true), (&of_second, false)]),
        ("no root", vec![&middle], both(), false, vec![(&good, false)]),
        ("leaf alone", vec![&root], vec![of_middle.clone()], true, vec![(&good, true), (&revoked, false)]),
        ("junk", vec![&root], vec![junk.clone()], false, vec![]),
        ("junk too", vec![&root], [both(), vec![junk]].concat(), false, vec![]),
    ];
    let namesakes_crls = [both(), vec![namesake.crl(-HOUR, HOUR, &[])]].concat();

    let mut listeners = Vec::new();
    let mut add = |name: &str, roots: &[&Authority], crls: &[String], leaf_only: bool| {
        let mut context = json!({
            "trusted_ca": { "inline_string": String::from_utf8(pem::of_certificates(roots.iter().map(|root| &root.der))).unwrap() },
            "only_verify_leaf_cert_crl": leaf_only,
        });
        if !crls.is_empty() {
            context["crl"] = json!({ "inline_string": crls.concat() });
        }
        let secret = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret";
        let resource = json!({ "@type": secret, "name": name, "validation_context": context });
        let file = directory.join(format!("{name}.sds"));
        std::fs::write(&file, json!({ "resources": [resource] }).to_string()).unwrap();
        listeners.push(listener(name, directory, &file));
    };
    for (name, roots, crls, leaf_only, _) in &cases {
        add(name, roots, crls, *leaf_only);
    }
    add("namesakes", &[&root, &namesake], &namesakes_crls, false);
    let bootstrap = json!({
        "node": { "id": "envoy", "cluster": "tests" },
        "admin": {},
        "static_resources": { "listeners": listeners },
    });
    let envoy = Envoy::start(bootstrap, directory, "envoy").await;
    let names: Vec<_> = cases.iter().map(|(name, ..)| *name).chain(["namesakes"]).collect();
    envoy.wait_listeners(&names).await;

    for (name, _, _, _, peers) in &cases {
        let address = envoy.listener_address(name).await;
        let rejected = envoy.stat(&format!("sds.{name}.update_rejected")).await;
        assert_eq!(rejected, u64::from(peers.is_empty()), "{name}");
        for (index, (peer, expected)) in peers.iter().enumerate() {
            assert_eq!(gets_in(address, peer, &root).await, *expected, "{name}, peer {index}");
        }
    }
    // Which peers are refused depends on Envoy's version, but some are.
    let address = envoy.listener_address("namesakes").await;
    let of_namesake = namesake.mounted("of namesake", &namesake);
    let both_get_in = gets_in(address, &good, &root).await && gets_in(address, &of_namesake, &root).await;
    assert!(!both_get_in, "two roots of one name");
}

/// Two callers of `api`: one that will be revoked, and one that will not.
struct World {
    directory: tempfile::TempDir,
    root: Authority,
    middle: Authority,
    revoked: Mounted,
    api: Agent,
    _others: Vec<Agent>,
    _api: Envoy,
    good_caller: Envoy,
    revoked_caller: Envoy,
    generation: usize,
}

impl World {
    /// All callers are accepted, without CRLs; the `--crl` file of `api` does not exist yet.
    async fn start() -> Self {
        Self::start_with(NEWEST, "ROOTCA").await
    }

    /// The same, with an Envoy of this version for `api`, which asks for its trust bundle by this name.
    async fn start_with(version: &str, roots: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        let root = Authority::root("root");
        let middle = Authority::below("middle", &root);
        let crl = path.join("crl/ca-crl.pem");
        std::fs::create_dir(path.join("crl")).unwrap();
        let revoked = middle.mounted("web", &root);
        let mounted = [
            ("api", middle.mounted("api", &root)),
            ("good", middle.mounted("web", &root)),
            ("revoked", middle.mounted("web", &root)),
        ];
        let mut agents = Vec::new();
        for (name, mounted) in mounted {
            let certs = path.join(format!("{name}-certs"));
            if name == "revoked" {
                revoked.write(&certs)
            } else {
                mounted.write(&certs)
            }
            let options = ["--cert-dir", certs.to_str().unwrap(), "--crl", crl.to_str().unwrap()];
            // The callers have no CRLs: only the callee's count here.
            let count = if name == "api" { 4 } else { 2 };
            agents.push(Agent::ready(path, name, &options[..count]).await);
        }
        let mut agents = agents.into_iter();
        let (api, good, bad) = (agents.next().unwrap(), agents.next().unwrap(), agents.next().unwrap());
        let bootstrap = bootstrap(&api.socket, &["--allow", &spiffe("web")]).await;
        let bootstrap = named(&bootstrap, roots);
        let api_envoy = Envoy::start_version(version, bootstrap, path, "api").await;
        let inbound = api_envoy.listener_address("inbound").await;
        let good_caller = caller_envoy(path, "good", &good, inbound, &spiffe("api")).await;
        let revoked_caller = caller_envoy(path, "revoked", &bad, inbound, &spiffe("api")).await;
        for caller in [&good_caller, &revoked_caller] {
            wait_success(caller, caller.listener_address("outbound").await).await;
        }
        let _others = vec![good, bad];
        let (_api, generation) = (api_envoy, 0);
        Self { directory, root, middle, revoked, api, _others, _api, good_caller, revoked_caller, generation }
    }

    fn volume(&self) -> PathBuf {
        self.directory.path().join("crl")
    }

    /// Swaps the volume's content, as the kubelet does.
    fn swap(&mut self, crls: &[String]) {
        self.generation += 1;
        let (volume, name) = (self.volume(), format!("..{}", self.generation));
        std::fs::create_dir(volume.join(&name)).unwrap();
        std::fs::write(volume.join(&name).join("ca-crl.pem"), crls.concat()).unwrap();
        symlink(&name, volume.join("..data_tmp")).unwrap();
        std::fs::rename(volume.join("..data_tmp"), volume.join("..data")).unwrap();
        let _ = symlink("..data/ca-crl.pem", volume.join("ca-crl.pem"));
    }

    async fn traffic(&self) -> Traffic {
        Traffic::start(self.good_caller.listener_address("outbound").await)
    }

    /// Waits until the revoked caller gets this status.
    async fn wait_revoked(&self, expected: u16) {
        let outbound = self.revoked_caller.listener_address("outbound").await;
        let is_so = async || http_get(outbound, "/").await.is_ok_and(|(status, ..)| status == expected);
        self.revoked_caller.wait_until(&format!("the revoked one gets {expected}"), is_so).await;
    }
}

async fn no_failure(world: &World, traffic: Traffic) {
    let report = traffic.stop().await;
    assert!(report.failures.is_empty(), "{:#?}\n{}", report.failures, world.api.process.log());
    assert!(report.succeeded >= 5, "only {} requests", report.succeeded);
}

#[tokio::test]
async fn a_revoked_client_is_refused_once_the_file_says_so_and_no_other_client_ever_is() {
    let mut world = World::start().await;
    assert_eq!(world.api.process.count("WARN CRL file missing"), 1, "{}", world.api.process.log());
    let traffic = world.traffic().await;
    let (of_root, of_middle) = (world.root.crl(-HOUR, HOUR, &[]), world.middle.crl(-2 * HOUR, HOUR / 2, &[]));
    world.swap(&[of_root.clone(), of_middle]);
    world.api.process.wait_log("CRLs added to the trust bundle").await;
    assert_eq!(world.api.metric("attache_crls{name=\"ROOTCA\"}").await, 2.0);
    let made = world.api.metric("attache_crl_this_update_timestamp_seconds{name=\"ROOTCA\"}").await;
    let ends = world.api.metric("attache_crl_next_update_timestamp_seconds{name=\"ROOTCA\"}").await;
    let life = 2.5 * HOUR as f64;
    assert!((ends - made - life).abs() < 60.0, "both of the one that ends first: {made}, {ends}");
    world.wait_revoked(200).await;

    let of_middle = world.middle.crl(-HOUR, HOUR, &[&world.revoked]);
    world.swap(&[of_root.clone(), of_middle.clone()]);
    world.wait_revoked(503).await;

    // Later mistakes in the file change nothing.
    world.swap(&["-----BEGIN X509 CRL-----\nhalf".to_owned()]);
    let (_, line) = world.api.process.wait_log("CRL file not used").await;
    assert!(line.contains("ca-crl.pem: its PEM is damaged"), "{line}");
    std::fs::remove_file(world.volume().join("ca-crl.pem")).unwrap();
    world.api.process.wait_log("CRL file removed").await;
    world.wait_revoked(503).await;
    let failures = "attache_source_failures_total{source=\"crl\",reason=\"not_parsed\"}";
    assert_eq!(world.api.metric(failures).await, 1.0);
    assert_eq!(world.api.metric("attache_nacks_total{name=\"ROOTCA\"}").await, 0.0);
    assert_eq!(world.api.status("/readyz").await.0, 200);
    no_failure(&world, traffic).await;

    let socket = world.api.socket.to_str().unwrap();
    let shown = output(&["get", "--socket", socket, "ROOTCA"]).await;
    let shown = String::from_utf8(shown.stdout).unwrap();
    assert!(shown.starts_with("ROOTCA: trust bundle, 1 certificate, 2 CRLs\n"), "{shown}");
    let shown = output(&["get", "--socket", socket, "--output", "json", "ROOTCA"]).await;
    assert_eq!(serde_json::from_slice::<Value>(&shown.stdout).unwrap()[0]["crls"], 2);
}

#[tokio::test]
async fn the_spiffe_validator_refuses_a_revoked_client_too() {
    for (version, name) in [(NEWEST, "ALL"), (OLDEST, "spiffe://cluster.local")] {
        let mut world = World::start_with(version, name).await;
        let traffic = world.traffic().await;
        let of_middle = world.middle.crl(-HOUR, HOUR, &[&world.revoked]);
        world.swap(&[world.root.crl(-HOUR, HOUR, &[]), of_middle]);
        world.wait_revoked(503).await;
        assert_eq!(world.api.metric("attache_nacks_total{name=\"ROOTCA\"}").await, 0.0);
        no_failure(&world, traffic).await;
    }
}

#[tokio::test]
async fn a_missing_or_expired_crl_costs_no_client_anything() {
    let mut world = World::start().await;
    let traffic = world.traffic().await;
    let of_root = world.root.crl(-HOUR, HOUR, &[]);
    let of_middle = |world: &World, left| world.middle.crl(-HOUR, left, &[&world.revoked]);

    // Only the intermediate's CRL: Envoy would refuse all clients.
    let crl = of_middle(&world, HOUR);
    world.swap(std::slice::from_ref(&crl));
    let (_, line) = world.api.process.wait_log("trust bundle served without CRLs").await;
    assert!(line.contains(" WARN ") && line.contains("there is no CRL of CN=root: add it"), "{line}");
    world.wait_revoked(200).await;

    // Complete, but valid only for a short time.
    let end = Clock::system().now() + Duration::from_secs(8);
    let crl = of_middle(&world, 8);
    world.swap(&[of_root.clone(), crl]);
    world.wait_revoked(503).await;
    let (_, line) = world.api.process.wait_log_times("trust bundle served without CRLs", 2).await;
    assert!(line.contains("the CRL of CN=middle is out of date (nextUpdate 20"), "{line}");
    world.wait_revoked(200).await;
    // Clients that are not revoked are accepted before and after its expiry.
    let outbound = world.good_caller.listener_address("outbound").await;
    let gets_in = async || {
        let has_ended = Clock::system().now() > end + Duration::from_secs(1);
        http_get(outbound, "/").await.is_ok_and(|(status, ..)| status == 200) && has_ended
    };
    world.good_caller.wait_until("the CRL has expired, and the good caller is accepted", gets_in).await;

    let crl = of_middle(&world, HOUR);
    world.swap(&[of_root, crl]);
    world.wait_revoked(503).await;
    let failures = "attache_source_failures_total{source=\"crl\",reason=\"not_covered\"}";
    assert_eq!(world.api.metric(failures).await, 2.0);

    world.swap(&["# none now\n".to_owned()]);
    world.wait_revoked(200).await;
    world.api.process.wait_log("CRL file holds no CRLs: revoked certificates are accepted").await;
    let (_, metrics) = world.api.status("/metrics").await;
    let crls: Vec<_> = metrics.lines().filter(|line| line.starts_with("attache_crls{")).collect();
    assert_eq!(crls, ["attache_crls{name=\"ROOTCA\"} 0"]);
    no_failure(&world, traffic).await;
}
