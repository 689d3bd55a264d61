use std::path::Path;
use std::time::{Duration, UNIX_EPOCH};

use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Streaming};

use super::*;
use crate::ca::embedded::{DevelopmentCa, Embedded};
use crate::ca::failover::Member;
use crate::metrics::{Agent, Format, HangingPaths};
use crate::net::http2;
use crate::pki::certificate::Certificate;
use crate::pki::csr::Names;
use crate::pki::key::{KeyFormat, KeyType};
use crate::pki::pem;
use crate::proto::SECRET_TYPE_URL;
use crate::proto::envoy::config::core::v3::{Node, data_source::Specifier};
use crate::proto::envoy::extensions::transport_sockets::tls::v3::{Secret, secret::Type};
use crate::proto::envoy::service::discovery::v3::{DiscoveryRequest, DiscoveryResponse};
use crate::proto::envoy::service::secret::v3::secret_discovery_service_client::SecretDiscoveryServiceClient;
use crate::secret::SecretName;
use crate::source::issuer::{Grace, IdentitySource};
use crate::store::Key;

fn plan(account: &str, ca: &Path) -> Plan {
    plan_with(account, embedded(ca, Clock::system()))
}

fn embedded(ca: &Path, clock: Clock) -> Failover {
    let ca = Embedded::from(DevelopmentCa::open(ca, clock).unwrap());
    Failover::new(vec![Member::new("embedded", ca)])
}

fn plan_with(account: &str, cas: Failover) -> Plan {
    let identity = format!("spiffe://cluster.local/ns/default/sa/{account}").parse().unwrap();
    let debounce = Duration::from_millis(100);
    Plan {
        spiffe: None,
        kubernetes: None,
        files: files::FileSettings {
            mounted: Vec::new(),
            is_alone: false,
            debounce,
            own: Vec::new(),
            private: Vec::new(),
            prefixes: files::FilePrefixes::Usual(Vec::new()),
            system_roots: None,
            federated: Vec::new(),
        },
        crl: CrlFile { path: "/nowhere/crl.pem".into(), is_named: false },
        cas,
        issuer: IssuerSettings {
            identity: IdentitySource::Fixed(identity),
            names: Names::default(),
            key_type: KeyType::EcdsaP256,
            key_format: KeyFormat::Pkcs8,
            ttl: Duration::from_secs(3600),
            grace: Grace { ratio: 0.5, jitter: 0.0 },
            timeout: Duration::from_secs(10),
            drops_old_roots: false,
            state: None,
        },
        mint: None,
        output: None,
    }
}

/// A stream for `default`. It stays open as long as the sender exists.
async fn subscribe(
    workloads: &Workloads,
    running: &Running,
) -> (mpsc::Sender<DiscoveryRequest>, Streaming<DiscoveryResponse>) {
    let (near, far) = tokio::io::duplex(1 << 16);
    let service = workloads.service(running).connection().unwrap();
    tokio::spawn(http2::serve(far, service, running.ended.clone()));
    let (requests, outgoing) = mpsc::channel(4);
    let first = DiscoveryRequest {
        node: Some(Node { id: "envoy".to_owned(), ..Node::default() }),
        resource_names: vec!["default".to_owned()],
        type_url: SECRET_TYPE_URL.to_owned(),
        ..DiscoveryRequest::default()
    };
    requests.send(first).await.unwrap();
    let (opened, stream) = tokio::sync::oneshot::channel();
    tokio::spawn(http2::with_connection(near, async |connection| {
        let origin = http::Uri::from_static("http://attache");
        let mut client = SecretDiscoveryServiceClient::with_origin(connection, origin);
        let responses = client.stream_secrets(ReceiverStream::new(outgoing)).await.unwrap().into_inner();
        let _ = opened.send(responses);
        std::future::pending::<()>().await;
    }));
    (requests, stream.await.unwrap())
}

/// The identity in the next response.
async fn identity(responses: &mut Streaming<DiscoveryResponse>) -> String {
    let response = responses.message().await.unwrap().unwrap();
    let secret: Secret = prost::Message::decode(&*response.resources[0].value).unwrap();
    let Some(Type::TlsCertificate(certificate)) = secret.r#type else { panic!("no key pair") };
    let Some(Specifier::InlineBytes(chain)) = certificate.certificate_chain.unwrap().specifier else {
        panic!("no inline bytes")
    };
    let chain = pem::certificates(&chain).unwrap();
    Certificate::parse(&chain[0]).unwrap().names().to_string()
}

fn metrics(shared: &Shared) -> String {
    let agent = Agent {
        clusters: Vec::new(),
        started: UNIX_EPOCH,
        now: shared.clock.now(),
        watched: shared.watcher.count(),
        hanging: HangingPaths::default(),
        log_lines_dropped: [("", 0); 2],
    };
    shared.metrics.encode(&shared.cache, agent, Format::accepted(""))
}

#[tokio::test]
async fn workloads_come_and_go_while_others_are_served() {
    let directory = tempfile::tempdir().unwrap();
    let ca = directory.path();
    let shared = Shared::new(Clock::system());
    let mut workloads = Workloads::new(shared.clone());
    let [web, api] = ["web", "api"].map(|name| workloads.add(name));
    workloads.start(&web, plan("web", ca)).await.unwrap();
    workloads.start(&api, plan("api", ca)).await.unwrap();
    let (_web_requests, mut web_stream) = subscribe(&workloads, &web).await;
    let (_api_requests, mut api_stream) = subscribe(&workloads, &api).await;
    assert!(identity(&mut web_stream).await.ends_with("/sa/web"));
    assert!(identity(&mut api_stream).await.ends_with("/sa/api"));
    let text = metrics(&shared);
    for sample in [
        "attache_pushes_total{name=\"default\"} 2\n",
        "attache_streams{name=\"default\"} 2\n",
        "attache_workloads{namespace=\"default\",service_account=\"web\"} 1\n",
    ] {
        assert!(text.contains(sample), "{sample} in {text}");
    }

    workloads.remove(web.workload);
    let status = web_stream.message().await.unwrap_err();
    assert_eq!(
        (status.code(), status.message()),
        (Code::Unavailable, "the agent no longer serves this workload")
    );
    assert!(!metrics(&shared).contains("\"web\""), "{}", metrics(&shared));
    assert!(shared.cache.snapshot_of(web.workload).is_empty());
    assert!(shared.history.events(web.workload).is_empty());

    // The other one is still served, on its stream and on new ones, and one that comes later is too.
    let key = crate::store::Key { workload: api.workload, name: crate::secret::SecretName::Workload };
    shared.cache.renew(&key).await.unwrap();
    assert!(identity(&mut api_stream).await.ends_with("/sa/api"));
    let late = workloads.add("web");
    workloads.start(&late, plan("late", ca)).await.unwrap();
    let (_late_requests, mut late_stream) = subscribe(&workloads, &late).await;
    assert!(identity(&mut late_stream).await.ends_with("/sa/late"));
    let is_failed = tokio::time::timeout(Duration::ZERO, workloads.failed()).await;
    assert!(is_failed.is_err(), "the tasks of a removed workload have not failed");

    shared.stop.cancel();
    let status = api_stream.message().await.unwrap_err();
    assert_eq!((status.code(), status.message()), (Code::Unavailable, "the agent is stopping"));
}

#[tokio::test(start_paused = true)]
async fn after_a_machine_slept_for_a_month_each_of_250_workloads_is_renewed_once_and_soon() {
    let directory = tempfile::tempdir().unwrap();
    let clock = Clock::starting_at(Clock::system().now());
    let ca = embedded(directory.path(), clock.clone());
    let shared = Shared::new(clock.clone());
    let mut workloads = Workloads::new(shared.clone());
    let names: Vec<_> = (0..250).map(|number| format!("w{number}")).collect();
    let all: Vec<_> = names.iter().map(|name| workloads.add(name)).collect();
    for (running, name) in all.iter().zip(&names) {
        workloads.launch(running, plan_with(name, ca.apart()), std::future::pending());
    }
    let valid = || {
        let pairs = all.iter().map(|running| Key { workload: running.workload, name: SecretName::Workload });
        let goods = pairs.filter_map(|key| shared.cache.follow(key).borrow().good.clone());
        goods.filter(|good| good.secret.not_after() > clock.now()).count()
    };
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(valid(), all.len());
    let issued = |shared: &Shared| {
        let all = metrics(shared);
        let line = all.lines().find(|line| line.starts_with("attache_ca_requests_total{"));
        line.and_then(|line| line.rsplit_once(' ')).map(|(_, count)| count.parse::<usize>().unwrap())
    };
    assert_eq!(issued(&shared), Some(all.len()));
    clock.set_by(30 * 24 * 3_600_000);
    assert_eq!(valid(), 0);
    tokio::time::sleep(Duration::from_secs(40)).await;
    assert_eq!((valid(), issued(&shared)), (all.len(), Some(2 * all.len())));
}
