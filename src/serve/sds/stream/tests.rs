//! The stream loop with a channel as client and a real store.

use std::collections::HashMap;
use std::time::{Duration, UNIX_EPOCH};

use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;

use super::*;
use crate::metrics::{ByReason, Metrics};
use crate::pki::key::{KeyType, SigningKey};
use crate::secret::{Secret, SecretName, TrustBundle, Version};
use crate::serve::sds::dialect::client::{ClientDialect, RequestFields, ResponseFields};
use crate::serve::sds::{Capacity, SecretDiscovery};
use crate::store::{Cache, Key, Observed, Origin, Published, Publisher, Verdicts, Workload};

const ROOTS: Key = Key { workload: Workload::FIRST, name: SecretName::Roots };
const KEY_PAIR: Key = Key { workload: Workload::FIRST, name: SecretName::Workload };

/// A store with one source, and the service that uses it.
struct Agent {
    cache: Cache,
    metrics: Metrics,
    draining: CancellationToken,
    roots: Publisher,
    _key_pair: Publisher,
}

/// The client side of one stream.
struct Client<D: ClientDialect> {
    requests: Requests<D>,
    responses: Responses<D>,
}

type Responses<D> = SecretStream<D, ReceiverStream<Result<<D as Dialect>::Request, Status>>>;
type Requests<D> = mpsc::Sender<Result<<D as Dialect>::Request, Status>>;

impl Agent {
    fn new() -> Self {
        let cache = Cache::with_workload("").0;
        let roots = cache.publisher(ROOTS, Origin::CA);
        let key_pair = cache.publisher(KEY_PAIR, Origin::CA);
        let (metrics, draining) = (Metrics::default(), CancellationToken::new());
        Self { cache, metrics, draining, roots, _key_pair: key_pair }
    }

    /// Publishes a new bundle.
    fn renew(&self) -> Version {
        let key = SigningKey::generate(KeyType::EcdsaP256).unwrap();
        let root = rcgen::CertificateParams::default().self_signed(&key).unwrap();
        let bundle = Secret::TrustBundle(TrustBundle::new(vec![root.der().clone()]).unwrap());
        assert_eq!(self.roots.publish(bundle, UNIX_EPOCH, None), Published::Changed);
        self.roots.entry().good.unwrap().resource.version.clone()
    }

    fn connect<D: ClientDialect>(&self) -> Client<D> {
        let (requests, inbound) = mpsc::channel(16);
        let service = SecretDiscovery::new(
            self.cache.clone(),
            Workload::FIRST,
            self.metrics.clone(),
            crate::base::clock::Clock::system(),
            self.draining.clone(),
            Capacity::default(),
        );
        let peer = service.connection().unwrap().0;
        let charge = peer.charge(0).unwrap();
        Client { requests, responses: SecretStream::new(peer, ReceiverStream::new(inbound), charge) }
    }

    fn observed(&self) -> Observed {
        let mut all = self.cache.snapshot().into_iter();
        all.find(|one| one.key == ROOTS).unwrap().observed
    }

    fn verdicts(&self) -> Verdicts {
        self.observed().verdicts().clone()
    }

    fn counts(&self) -> (u64, u64, u64) {
        let Verdicts { pushes, acks, nacks, .. } = self.verdicts();
        (pushes, acks, nacks)
    }
}

impl<D: ClientDialect> Client<D> {
    async fn send(&self, fields: RequestFields) {
        self.requests.send(Ok(D::request(fields))).await.unwrap();
    }

    async fn open(&self, names: &[&str]) {
        let names: Vec<_> = names.iter().map(|name| (*name).to_owned()).collect();
        self.send(RequestFields {
            node: RequestFields::node(),
            subscribe: names.clone(),
            names,
            ..RequestFields::default()
        })
        .await;
    }

    async fn answer(&self, answer: &ResponseFields, rejection: Option<&str>) {
        let names = vec!["ROOTCA".to_owned()];
        let (nonce, rejection) = (answer.nonce.clone(), rejection.map(str::to_owned));
        self.send(RequestFields { names, nonce, rejection, ..RequestFields::default() }).await;
    }

    async fn next(&mut self) -> ResponseFields {
        self.outcome().await.expect("a response").expect("no error")
    }

    /// The stream's next item. The stream must wake by itself, not only when it is polled again later.
    async fn outcome(&mut self) -> Option<Result<ResponseFields, Status>> {
        let started = Instant::now();
        let outcome = tokio::time::timeout(Duration::from_secs(60), self.responses.next()).await;
        assert_eq!(started.elapsed(), Duration::ZERO, "nothing woke the stream");
        outcome.expect("an outcome").map(|outcome| outcome.map(D::response))
    }

    /// Lets the stream handle the requests. True if it has no response.
    async fn is_silent(&mut self) -> bool {
        std::future::poll_fn(|cx| Poll::Ready(Pin::new(&mut self.responses).poll_next(cx).is_pending())).await
    }
}

/// Runs generic tests in each dialect.
macro_rules! in_both_dialects {
    ($($name:ident)*) => {
        mod sotw {
            $(#[tokio::test(start_paused = true)]
            async fn $name() { super::$name::<crate::serve::sds::dialect::StateOfTheWorld>().await; })*
        }
        mod delta {
            $(#[tokio::test(start_paused = true)]
            async fn $name() { super::$name::<crate::serve::sds::dialect::Delta>().await; })*
        }
    };
}

in_both_dialects! {
    an_available_secret_is_sent_and_a_change_is_pushed
    a_secret_is_sent_once_it_becomes_available
    a_slow_reader_gets_only_the_newest_version
    a_client_that_closes_its_side_gets_what_is_ready_before_the_stream_ends
    a_transport_error_ends_the_stream
    a_refused_request_ends_the_stream_and_is_counted
    a_request_has_a_bounded_number_of_names_however_often_each_is_repeated
    a_request_that_waits_for_its_turn_takes_up_memory
    draining_ends_every_stream_with_unavailable
    verdicts_are_counted_and_reach_the_store
    an_ended_stream_is_no_longer_counted
    new_streams_get_the_last_good_value_after_a_failed_renewal
    a_restarted_client_is_sent_only_what_is_newer
    a_name_that_is_unsubscribed_and_subscribed_again_is_sent_again
}

async fn an_available_secret_is_sent_and_a_change_is_pushed<D: ClientDialect>() {
    let agent = Agent::new();
    let first = agent.renew();
    let mut client = agent.connect::<D>();
    client.open(&["ROOTCA"]).await;
    let response = client.next().await;
    assert_eq!((response.version.clone(), response.resources.len()), (first.to_string(), 1));
    client.answer(&response, None).await;
    assert!(client.is_silent().await);
    // The change wakes the waiting client.
    let (response, second) = tokio::join!(client.next(), async { agent.renew() });
    assert_eq!(response.version, second.to_string());
    assert_eq!(agent.counts(), (2, 1, 0));
}

async fn a_secret_is_sent_once_it_becomes_available<D: ClientDialect>() {
    let agent = Agent::new();
    let mut client = agent.connect::<D>();
    client.open(&["default", "ROOTCA", "unknown"]).await;
    // Delta removes a name that can never be served.
    if D::IS_DELTA {
        let answer = client.next().await;
        assert_eq!((answer.resources, answer.removed), (Vec::new(), vec!["unknown".to_owned()]));
        client.send(RequestFields { nonce: answer.nonce, ..RequestFields::default() }).await;
    }
    assert!(client.is_silent().await);
    let (response, version) = tokio::join!(client.next(), async { agent.renew() });
    assert_eq!((response.version.clone(), response.resources.len()), (version.to_string(), 1));
    assert_eq!(response.removed, Vec::<String>::new());
    let unknown = agent.metrics.refusals.get_or_create_owned(&ByReason { reason: "unknown_name" });
    assert_eq!(unknown.get(), 1);
}

async fn a_slow_reader_gets_only_the_newest_version<D: ClientDialect>() {
    let agent = Agent::new();
    let mut client = agent.connect::<D>();
    agent.renew();
    client.open(&["ROOTCA"]).await;
    client.next().await;
    for _ in 0..4 {
        agent.renew();
    }
    let newest = agent.renew();
    let response = client.next().await;
    assert_eq!(response.version, newest.to_string());
    assert!(client.is_silent().await, "there is no queue of older versions");
    assert_eq!(agent.counts(), (2, 0, 0));
}

async fn a_client_that_closes_its_side_gets_what_is_ready_before_the_stream_ends<D: ClientDialect>() {
    let agent = Agent::new();
    let version = agent.renew();
    let client = agent.connect::<D>();
    client.open(&["ROOTCA"]).await;
    let Client { requests, mut responses } = client;
    drop(requests);
    let response = D::response(responses.next().await.unwrap().unwrap());
    assert_eq!(response.version, version.to_string());
    assert!(responses.next().await.is_none());
    agent.renew();
    assert!(responses.next().await.is_none(), "an ended stream stays ended");
    // If nothing is ready, the stream ends at once.
    let Client { requests, mut responses } = agent.connect::<D>();
    drop(requests);
    assert!(responses.next().await.is_none());
}

async fn a_transport_error_ends_the_stream<D: ClientDialect>() {
    let agent = Agent::new();
    agent.renew();
    let mut client = agent.connect::<D>();
    client.open(&["ROOTCA"]).await;
    client.next().await;
    client.requests.send(Err(Status::cancelled("gone"))).await.unwrap();
    let status = client.outcome().await.unwrap().unwrap_err();
    assert_eq!(status.code(), tonic::Code::Cancelled);
    assert!(client.outcome().await.is_none());
}

async fn a_refused_request_ends_the_stream_and_is_counted<D: ClientDialect>() {
    let agent = Agent::new();
    let mut client = agent.connect::<D>();
    client.send(RequestFields::default()).await;
    let status = client.outcome().await.unwrap().unwrap_err();
    assert_eq!(status.code(), tonic::Code::InvalidArgument);
    assert!(client.outcome().await.is_none());
    let refused = agent.metrics.refusals.get_or_create_owned(&ByReason { reason: "no_node" });
    assert_eq!(refused.get(), 1);
}

async fn a_request_has_a_bounded_number_of_names_however_often_each_is_repeated<D: ClientDialect>() {
    let agent = Agent::new();
    agent.renew();
    let mut client = agent.connect::<D>();
    let most = 2 * limits::NAMES_PER_STREAM;
    client.open(&vec!["ROOTCA"; most]).await;
    client.next().await;
    client.open(&vec!["ROOTCA"; most + 1]).await;
    let status = client.outcome().await.unwrap().unwrap_err();
    assert_eq!(status.code(), tonic::Code::ResourceExhausted);
    assert!(client.outcome().await.is_none());
    let refused = agent.metrics.refusals.get_or_create_owned(&ByReason { reason: "too_many_names" });
    assert_eq!(refused.get(), 1);
}

async fn a_request_that_waits_for_its_turn_takes_up_memory<D: ClientDialect>() {
    let agent = Agent::new();
    let mut client = agent.connect::<D>();
    let service = Arc::clone(&client.responses.peer.service);
    let mut other = Turn::new(service.turns.clone());
    other.take().await;
    let before = service.budget.used();
    client.open(&["ROOTCA"; 5_000]).await;
    assert!(client.is_silent().await);
    assert!(service.budget.used() - before > 5_000 * size_of::<String>());
    other.end();
    agent.renew();
    client.next().await;
    assert_eq!(service.budget.used() - before, limits::NAME_MEMORY + "ROOTCA".len());
}

async fn draining_ends_every_stream_with_unavailable<D: ClientDialect>() {
    let agent = Agent::new();
    agent.renew();
    let (mut idle, mut waiting) = (agent.connect::<D>(), agent.connect::<D>());
    waiting.open(&["ROOTCA"]).await;
    waiting.next().await;
    // Draining wakes both waiting clients.
    let drain = async { agent.draining.cancel() };
    let (waiting_end, idle_end, ()) = tokio::join!(waiting.outcome(), idle.outcome(), drain);
    for end in [waiting_end, idle_end] {
        assert_eq!(end.unwrap().unwrap_err().code(), tonic::Code::Unavailable);
    }
    assert!(waiting.outcome().await.is_none());
}

async fn verdicts_are_counted_and_reach_the_store<D: ClientDialect>() {
    let agent = Agent::new();
    let good = agent.renew();
    let mut client = agent.connect::<D>();
    client.open(&["ROOTCA"]).await;
    let response = client.next().await;
    client.answer(&response, None).await;
    assert!(client.is_silent().await);
    assert_eq!(agent.verdicts().acknowledged(), HashMap::from([(good.clone(), 1)]));

    let bad = agent.renew();
    let response = client.next().await;
    client.answer(&response, Some("not a root")).await;
    assert!(client.is_silent().await, "a rejected version is not sent again");
    let observed = agent.verdicts();
    assert_eq!(observed.acknowledged(), HashMap::from([(good, 1)]), "the client keeps what it had");
    let rejection = observed.rejection.unwrap();
    assert_eq!((rejection.version, rejection.reason.as_str()), (bad, "not a root"));

    let repaired = agent.renew();
    let response = client.next().await;
    client.answer(&response, None).await;
    assert!(client.is_silent().await);
    let observed = agent.verdicts();
    assert_eq!((observed.acknowledged(), observed.rejection), (HashMap::from([(repaired, 1)]), None));
    assert_eq!(agent.counts(), (3, 2, 1));
}

async fn an_ended_stream_is_no_longer_counted<D: ClientDialect>() {
    let agent = Agent::new();
    agent.renew();
    let mut clients: Vec<_> = (0..3).map(|_| agent.connect::<D>()).collect();
    for client in &mut clients {
        client.open(&["ROOTCA"]).await;
        let response = client.next().await;
        client.answer(&response, None).await;
        assert!(client.is_silent().await);
    }
    assert_eq!(agent.observed().streams, 3);
    drop(clients.pop());
    assert_eq!(agent.observed().streams, 2);
    // An unsubscribed name is no longer counted either.
    clients[0]
        .send(RequestFields { unsubscribe: vec!["ROOTCA".to_owned()], ..RequestFields::default() })
        .await;
    assert!(clients[0].is_silent().await);
    assert_eq!(agent.observed().streams, 1);
    drop(clients);
    let observed = agent.observed();
    assert_eq!((observed.streams, observed.verdicts().acknowledged()), (0, HashMap::new()));
}

async fn new_streams_get_the_last_good_value_after_a_failed_renewal<D: ClientDialect>() {
    let agent = Agent::new();
    let good = agent.renew();
    agent.roots.fail("the CA is down".to_owned());
    let mut client = agent.connect::<D>();
    client.open(&["ROOTCA"]).await;
    assert_eq!(client.next().await.version, good.to_string());
    agent.roots.fail("the CA is still down".to_owned());
    assert!(client.is_silent().await, "a failure is not sent");
}

async fn a_restarted_client_is_sent_only_what_is_newer<D: ClientDialect>() {
    let agent = Agent::new();
    let held = agent.renew();
    let version = held.to_string();
    let mut client = agent.connect::<D>();
    let names = vec!["ROOTCA".to_owned()];
    let subscribe = names.clone();
    let claims = vec![("ROOTCA".to_owned(), version.clone())];
    client
        .send(RequestFields {
            node: RequestFields::node(),
            names,
            subscribe,
            version,
            held: claims,
            ..RequestFields::default()
        })
        .await;
    assert!(client.is_silent().await);
    // The root switch need not wait for this client.
    assert_eq!(agent.verdicts().acknowledged(), HashMap::from([(held, 1)]));
    agent.roots.settled().await;
    let (response, newer) = tokio::join!(client.next(), async { agent.renew() });
    assert_eq!(response.version, newer.to_string());
    assert_eq!(agent.counts(), (1, 0, 0));
}

async fn a_name_that_is_unsubscribed_and_subscribed_again_is_sent_again<D: ClientDialect>() {
    let agent = Agent::new();
    agent.renew();
    let mut client = agent.connect::<D>();
    client.open(&["ROOTCA"]).await;
    let first = client.next().await;
    let names = || vec!["ROOTCA".to_owned()];
    client
        .send(RequestFields { nonce: first.nonce.clone(), unsubscribe: names(), ..RequestFields::default() })
        .await;
    assert!(client.is_silent().await);
    let newer = agent.renew();
    assert!(client.is_silent().await);
    let fields = RequestFields {
        nonce: first.nonce.clone(),
        names: names(),
        subscribe: names(),
        ..RequestFields::default()
    };
    client.send(fields).await;
    let response = client.next().await;
    assert_eq!(response.version, newer.to_string());
    assert_ne!(response.nonce, first.nonce);
    assert!(client.is_silent().await);
    assert_eq!(agent.observed().streams, 1);
}

/// Delta only: with or without unsubscribing in the same request.
#[tokio::test(start_paused = true)]
async fn a_name_that_is_requested_again_is_sent_again() {
    let agent = Agent::new();
    let version = agent.renew();
    let mut client = agent.connect::<crate::serve::sds::dialect::Delta>();
    client.open(&["ROOTCA"]).await;
    client.next().await;
    let names = || vec!["ROOTCA".to_owned()];
    for unsubscribe in [Vec::new(), names()] {
        client.send(RequestFields { subscribe: names(), unsubscribe, ..RequestFields::default() }).await;
        let answer = client.next().await;
        assert_eq!(answer.version, version.to_string());
        client.answer(&answer, None).await;
        assert!(client.is_silent().await);
        assert_eq!(agent.verdicts().acknowledged(), HashMap::from([(version.clone(), 1)]));
    }
    assert_eq!(agent.counts(), (3, 2, 0));
    assert_eq!(agent.observed().streams, 1);
}
