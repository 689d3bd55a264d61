//! The loop between a client that is a channel and a cache that is real.

use std::collections::HashMap;
use std::time::{Duration, UNIX_EPOCH};

use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;

use super::*;
use crate::cache::{Cache, Key, Observed, Origin, Published, Publisher, Workload};
use crate::metrics::{ByReason, Metrics};
use crate::pki::key::{KeyType, SigningKey};
use crate::proto::envoy::config::core::v3::Node;
use crate::proto::envoy::service::discovery::v3::{DiscoveryRequest, DiscoveryResponse};
use crate::proto::google::rpc;
use crate::sds::dialect::StateOfTheWorld;
use crate::secret::{Secret, TrustBundle, Version};

const ROOTS: Key = Key { workload: Workload(0), name: SecretName::Roots };
const KEY_PAIR: Key = Key { workload: Workload(0), name: SecretName::Workload };

/// An agent's inside: a cache with one source, and the service on it.
struct Agent {
    cache: Cache,
    metrics: Metrics,
    draining: CancellationToken,
    roots: Publisher,
    _key_pair: Publisher,
}

/// The client's end of one stream.
struct Client {
    requests: mpsc::Sender<Result<DiscoveryRequest, Status>>,
    responses: SecretStream<StateOfTheWorld, ReceiverStream<Result<DiscoveryRequest, Status>>>,
}

impl Agent {
    fn new() -> Self {
        let cache = Cache::default();
        let roots = cache.publisher(ROOTS, Origin::Ca);
        let key_pair = cache.publisher(KEY_PAIR, Origin::Ca);
        let (metrics, draining) = (Metrics::default(), CancellationToken::new());
        Self { cache, metrics, draining, roots, _key_pair: key_pair }
    }

    /// Makes a new bundle the one that is served.
    fn renew(&self) -> Version {
        let key = SigningKey::generate(KeyType::EcdsaP256).unwrap();
        let root = rcgen::CertificateParams::default().self_signed(&key).unwrap();
        let bundle = Secret::TrustBundle(TrustBundle::new(vec![root.der().clone()]).unwrap());
        assert_eq!(self.roots.publish(bundle, UNIX_EPOCH, None), Published::Changed);
        self.roots.entry().good.unwrap().resource.version.clone()
    }

    fn connect(&self) -> Client {
        let (requests, inbound) = mpsc::channel(16);
        let service = SecretDiscovery::new(
            self.cache.clone(),
            Workload(0),
            self.metrics.clone(),
            crate::clock::Clock::system(),
            self.draining.clone(),
        );
        Client { requests, responses: SecretStream::new(service, ReceiverStream::new(inbound)) }
    }

    fn observed(&self) -> Observed {
        let mut all = self.cache.snapshot().into_iter();
        all.find(|one| one.key == ROOTS).unwrap().observed
    }

    fn counts(&self) -> (u64, u64, u64) {
        let name = ByName { name: "ROOTCA".to_owned() };
        let count = |family: &prometheus_client::metrics::family::Family<ByName, _>| {
            let counter: prometheus_client::metrics::counter::Counter = family.get_or_create_owned(&name);
            counter.get()
        };
        (count(&self.metrics.pushes), count(&self.metrics.acks), count(&self.metrics.nacks))
    }
}

impl Client {
    async fn open(&self, names: &[&str]) {
        let request = DiscoveryRequest {
            node: Some(Node { id: "envoy".to_owned(), ..Node::default() }),
            resource_names: names.iter().map(|name| (*name).to_owned()).collect(),
            ..DiscoveryRequest::default()
        };
        self.requests.send(Ok(request)).await.unwrap();
    }

    async fn answer(&self, response: &DiscoveryResponse, rejection: Option<&str>) {
        let request = DiscoveryRequest {
            resource_names: vec!["ROOTCA".to_owned()],
            response_nonce: response.nonce.clone(),
            error_detail: rejection.map(|reason| rpc::Status { code: 13, message: reason.to_owned() }),
            ..DiscoveryRequest::default()
        };
        self.requests.send(Ok(request)).await.unwrap();
    }

    async fn next(&mut self) -> DiscoveryResponse {
        self.outcome().await.expect("a response").expect("no error")
    }

    /// What the stream gives next. It must come by itself, not only when somebody looks again later.
    async fn outcome(&mut self) -> Option<Result<DiscoveryResponse, Status>> {
        let started = Instant::now();
        let outcome = tokio::time::timeout(Duration::from_secs(60), self.responses.next()).await;
        assert_eq!(started.elapsed(), Duration::ZERO, "nothing woke the stream");
        outcome.expect("an outcome")
    }

    /// Lets the stream take in what was sent to it. True if it has no response to it.
    async fn is_silent(&mut self) -> bool {
        std::future::poll_fn(|cx| Poll::Ready(Pin::new(&mut self.responses).poll_next(cx).is_pending())).await
    }
}

#[tokio::test(start_paused = true)]
async fn what_is_there_is_sent_and_a_change_is_pushed() {
    let agent = Agent::new();
    let first = agent.renew();
    let mut client = agent.connect();
    client.open(&["ROOTCA"]).await;
    let response = client.next().await;
    assert_eq!((response.version_info.as_str(), response.resources.len()), (first.as_str(), 1));
    client.answer(&response, None).await;
    assert!(client.is_silent().await);
    // The client waits, and is woken by the change.
    let (response, second) = tokio::join!(client.next(), async { agent.renew() });
    assert_eq!(response.version_info, second.as_str());
    assert_eq!(agent.counts(), (2, 1, 0));
}

#[tokio::test(start_paused = true)]
async fn a_secret_that_is_not_there_yet_is_sent_when_it_comes() {
    let agent = Agent::new();
    let mut client = agent.connect();
    client.open(&["default", "ROOTCA", "nobody"]).await;
    assert!(client.is_silent().await);
    let (response, version) = tokio::join!(client.next(), async { agent.renew() });
    assert_eq!((response.version_info.as_str(), response.resources.len()), (version.as_str(), 1));
    let unknown = agent.metrics.refusals.get_or_create_owned(&ByReason { reason: "unknown_name" });
    assert_eq!(unknown.get(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_slow_reader_gets_the_newest_version_alone() {
    let agent = Agent::new();
    let mut client = agent.connect();
    agent.renew();
    client.open(&["ROOTCA"]).await;
    client.next().await;
    for _ in 0..4 {
        agent.renew();
    }
    let newest = agent.renew();
    let response = client.next().await;
    assert_eq!(response.version_info, newest.as_str());
    assert!(client.is_silent().await, "there is no queue behind it");
    assert_eq!(agent.counts(), (2, 0, 0));
}

#[tokio::test(start_paused = true)]
async fn a_client_that_closes_its_half_gets_what_is_ready_and_then_the_end() {
    let agent = Agent::new();
    let version = agent.renew();
    let client = agent.connect();
    client.open(&["ROOTCA"]).await;
    let Client { requests, mut responses } = client;
    drop(requests);
    let response = responses.next().await.unwrap().unwrap();
    assert_eq!(response.version_info, version.as_str());
    assert!(responses.next().await.is_none());
    agent.renew();
    assert!(responses.next().await.is_none(), "the end is the end");
    // Where nothing is ready, the end comes at once.
    let Client { requests, mut responses } = agent.connect();
    drop(requests);
    assert!(responses.next().await.is_none());
}

#[tokio::test(start_paused = true)]
async fn an_error_of_the_transport_ends_the_stream() {
    let agent = Agent::new();
    agent.renew();
    let mut client = agent.connect();
    client.open(&["ROOTCA"]).await;
    client.next().await;
    client.requests.send(Err(Status::cancelled("gone"))).await.unwrap();
    let status = client.outcome().await.unwrap().unwrap_err();
    assert_eq!(status.code(), tonic::Code::Cancelled);
    assert!(client.outcome().await.is_none());
}

#[tokio::test(start_paused = true)]
async fn a_request_that_is_refused_ends_the_stream_and_is_counted() {
    let agent = Agent::new();
    let mut client = agent.connect();
    client.requests.send(Ok(DiscoveryRequest::default())).await.unwrap();
    let status = client.outcome().await.unwrap().unwrap_err();
    assert_eq!(status.code(), tonic::Code::InvalidArgument);
    assert!(client.outcome().await.is_none());
    let refused = agent.metrics.refusals.get_or_create_owned(&ByReason { reason: "no_node" });
    assert_eq!(refused.get(), 1);
}

#[tokio::test(start_paused = true)]
async fn draining_ends_every_stream_with_unavailable() {
    let agent = Agent::new();
    agent.renew();
    let (mut idle, mut waiting) = (agent.connect(), agent.connect());
    waiting.open(&["ROOTCA"]).await;
    waiting.next().await;
    // Both wait, and are woken by it.
    let drain = async { agent.draining.cancel() };
    let (waiting_end, idle_end, ()) = tokio::join!(waiting.outcome(), idle.outcome(), drain);
    for end in [waiting_end, idle_end] {
        assert_eq!(end.unwrap().unwrap_err().code(), tonic::Code::Unavailable);
    }
    assert!(waiting.outcome().await.is_none());
}

#[tokio::test(start_paused = true)]
async fn verdicts_are_counted_and_seen_in_the_cache() {
    let agent = Agent::new();
    let good = agent.renew();
    let mut client = agent.connect();
    client.open(&["ROOTCA"]).await;
    let response = client.next().await;
    client.answer(&response, None).await;
    assert!(client.is_silent().await);
    assert_eq!(agent.observed().holding, HashMap::from([(good.clone(), 1)]));

    let bad = agent.renew();
    let response = client.next().await;
    client.answer(&response, Some("not a root")).await;
    assert!(client.is_silent().await, "a rejected version is not sent again");
    let observed = agent.observed();
    assert_eq!(observed.holding, HashMap::from([(good, 1)]), "the client keeps what it had");
    let rejection = observed.rejection.unwrap();
    assert_eq!((rejection.version, rejection.reason.as_str()), (bad, "not a root"));

    let mended = agent.renew();
    let response = client.next().await;
    client.answer(&response, None).await;
    assert!(client.is_silent().await);
    let observed = agent.observed();
    assert_eq!((observed.holding, observed.rejection), (HashMap::from([(mended, 1)]), None));
    assert_eq!(agent.counts(), (3, 2, 1));
}

#[tokio::test(start_paused = true)]
async fn a_stream_that_ends_is_no_longer_counted() {
    let agent = Agent::new();
    agent.renew();
    let mut clients: Vec<_> = (0..3).map(|_| agent.connect()).collect();
    for client in &mut clients {
        client.open(&["ROOTCA"]).await;
        let response = client.next().await;
        client.answer(&response, None).await;
        assert!(client.is_silent().await);
    }
    assert_eq!(agent.observed().streams, 3);
    drop(clients.pop());
    assert_eq!(agent.observed().streams, 2);
    // A name that is no longer wanted counts no longer either.
    let unwanted = DiscoveryRequest { resource_names: Vec::new(), ..DiscoveryRequest::default() };
    clients[0].requests.send(Ok(unwanted)).await.unwrap();
    assert!(clients[0].is_silent().await);
    assert_eq!(agent.observed().streams, 1);
    drop(clients);
    let observed = agent.observed();
    assert_eq!((observed.streams, observed.holding), (0, HashMap::new()));
}

#[tokio::test(start_paused = true)]
async fn new_streams_get_the_last_good_value_after_a_failed_renewal() {
    let agent = Agent::new();
    let good = agent.renew();
    agent.roots.fail("the CA is down".to_owned());
    let mut client = agent.connect();
    client.open(&["ROOTCA"]).await;
    assert_eq!(client.next().await.version_info, good.as_str());
    agent.roots.fail("the CA is still down".to_owned());
    assert!(client.is_silent().await, "a failure is nothing to send");
}
