//! The measuring client: gRPC by hand on HTTP/2, so that its own share of the time is small.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use attache::proto::SECRET_TYPE_URL;
use attache::proto::envoy::config::core::v3::Node;
use attache::proto::envoy::service::discovery::v3::{
    DeltaDiscoveryRequest, DeltaDiscoveryResponse, DiscoveryRequest, DiscoveryResponse,
};
use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use h2::client::SendRequest;
use h2::{RecvStream, SendStream};
use prost::Message;
use tokio::net::UnixStream;
use tokio::sync::mpsc;
use tokio::task::{JoinHandle, JoinSet};

/// The name it subscribes to.
const NAME: &str = "default";
/// Bytes before each message: the compression flag, and the length.
const PREFIX: usize = 5;
/// Concurrent calls in a sequence of calls.
const AT_ONCE: usize = 32;
/// More than anything sent here.
const WINDOW: u32 = 1 << 30;

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Protocol {
    StateOfTheWorld,
    Delta,
    Fetch,
}

impl Protocol {
    fn uri(self) -> &'static str {
        match self {
            Self::StateOfTheWorld => {
                "http://attache/envoy.service.secret.v3.SecretDiscoveryService/StreamSecrets"
            }
            Self::Delta => "http://attache/envoy.service.secret.v3.SecretDiscoveryService/DeltaSecrets",
            Self::Fetch => "http://attache/envoy.service.secret.v3.SecretDiscoveryService/FetchSecrets",
        }
    }

    fn first_request(self, name: &str) -> Bytes {
        let node = Some(Node { id: "load".to_owned(), cluster: "bench".to_owned(), ..Node::default() });
        let (type_url, names) = (SECRET_TYPE_URL.to_owned(), vec![name.to_owned()]);
        match self {
            Self::StateOfTheWorld | Self::Fetch => {
                let resource_names = names;
                framed(&DiscoveryRequest { node, resource_names, type_url, ..DiscoveryRequest::default() })
            }
            Self::Delta => {
                let resource_names_subscribe = names;
                let request = DeltaDiscoveryRequest::default();
                framed(&DeltaDiscoveryRequest { node, resource_names_subscribe, type_url, ..request })
            }
        }
    }

    /// The ACK of `response`, as Envoy sends it.
    fn ack(self, name: &str, response: Bytes) -> Bytes {
        let type_url = SECRET_TYPE_URL.to_owned();
        match self {
            Self::StateOfTheWorld | Self::Fetch => {
                let response = DiscoveryResponse::decode(response).unwrap();
                assert_eq!(response.resources.len(), 1);
                framed(&DiscoveryRequest {
                    version_info: response.version_info,
                    response_nonce: response.nonce,
                    resource_names: vec![name.to_owned()],
                    type_url,
                    ..DiscoveryRequest::default()
                })
            }
            Self::Delta => {
                let response = DeltaDiscoveryResponse::decode(response).unwrap();
                assert_eq!(response.resources.len(), 1);
                let response_nonce = response.nonce;
                framed(&DeltaDiscoveryRequest {
                    response_nonce,
                    type_url,
                    ..DeltaDiscoveryRequest::default()
                })
            }
        }
    }
}

/// A message of gRPC.
pub(crate) fn framed(message: &impl Message) -> Bytes {
    let length = message.encoded_len();
    let mut bytes = BytesMut::with_capacity(PREFIX + length);
    bytes.put_u8(0);
    bytes.put_u32(length.try_into().unwrap());
    message.encode(&mut bytes).unwrap();
    bytes.freeze()
}

/// One HTTP/2 connection.
#[derive(Clone)]
pub(crate) struct Connection(SendRequest<Bytes>);

impl Connection {
    /// Connects to `socket`. The connection closes some time after its last call.
    pub(crate) async fn open(socket: &Path) -> (Self, JoinHandle<()>) {
        let io = UnixStream::connect(socket).await.unwrap();
        let mut http = h2::client::Builder::new();
        http.initial_window_size(WINDOW)
            .initial_connection_window_size(WINDOW)
            .initial_max_send_streams(1 << 20);
        let (sender, connection) = http.handshake(io).await.unwrap();
        (Self(sender), tokio::spawn(async { connection.await.unwrap() }))
    }

    /// Makes a call; returns it with the first message of its answer.
    pub(crate) async fn call(&self, protocol: Protocol) -> (Call, Bytes) {
        self.call_for(protocol, NAME.into()).await
    }

    /// The same for a secret of another name.
    pub(crate) async fn call_for(&self, protocol: Protocol, name: Arc<str>) -> (Call, Bytes) {
        let mut ready = self.0.clone().ready().await.unwrap();
        let (response, mut requests) = ready.send_request(post(protocol), false).unwrap();
        requests.send_data(protocol.first_request(&name), protocol == Protocol::Fetch).unwrap();
        let responses = response.await.unwrap().into_body();
        let mut call = Call { protocol, name, requests, responses, received: BytesMut::new() };
        let first = call.next().await.expect("an answer");
        (call, first)
    }

    /// Makes a call without a request.
    #[allow(dead_code, reason = "only neighbours needs it")]
    pub(crate) async fn begin(&self, protocol: Protocol) -> Call {
        let mut ready = self.0.clone().ready().await.unwrap();
        let (response, requests) = ready.send_request(post(protocol), false).unwrap();
        let responses = response.await.unwrap().into_body();
        Call { protocol, name: NAME.into(), requests, responses, received: BytesMut::new() }
    }
}

fn post(protocol: Protocol) -> http::Request<()> {
    http::Request::post(protocol.uri())
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .body(())
        .unwrap()
}

pub(crate) struct Call {
    protocol: Protocol,
    name: Arc<str>,
    requests: SendStream<Bytes>,
    responses: RecvStream,
    received: BytesMut,
}

impl Call {
    /// The next message.
    pub(crate) async fn next(&mut self) -> Option<Bytes> {
        loop {
            if self.received.len() >= PREFIX {
                let length = (&self.received[1..]).get_u32() as usize;
                if self.received.len() >= PREFIX + length {
                    let message = self.received.split_to(PREFIX + length).freeze();
                    if self.received.is_empty() {
                        // Frees the bytes, so that this program keeps little memory per stream.
                        self.received = BytesMut::new();
                    }
                    return Some(message.slice(PREFIX..));
                }
            }
            let data = self.responses.data().await?.unwrap();
            self.responses.flow_control().release_capacity(data.len()).unwrap();
            self.received.extend_from_slice(&data);
        }
    }

    /// Sends `data` as fast as the other side takes it.
    #[allow(dead_code, reason = "only neighbours needs it")]
    pub(crate) async fn send_slowly(&mut self, mut data: Bytes) {
        while !data.is_empty() {
            self.requests.reserve_capacity(data.len());
            let capacity = std::future::poll_fn(|cx| self.requests.poll_capacity(cx)).await;
            let part = data.split_to(capacity.unwrap().unwrap().min(data.len()));
            self.requests.send_data(part, false).unwrap();
        }
    }

    /// Sends the ACK of `response`.
    pub(crate) fn accept(&mut self, response: Bytes) {
        self.requests.send_data(self.protocol.ack(&self.name, response), false).unwrap();
    }

    /// Half-closes it, and reads until the other side closes.
    async fn close(mut self) {
        if self.protocol != Protocol::Fetch {
            self.requests.send_data(Bytes::new(), true).unwrap();
        }
        assert!(self.next().await.is_none());
        let trailers = self.responses.trailers().await.unwrap().expect("trailers");
        assert_eq!(trailers["grpc-status"], "0");
    }
}

/// Streams that stay open and acknowledge every response.
pub(crate) struct Streams {
    tasks: JoinSet<()>,
    arrivals: mpsc::UnboundedReceiver<Instant>,
    arrived: mpsc::UnboundedSender<Instant>,
}

impl Streams {
    pub(crate) fn none() -> Self {
        let (arrived, arrivals) = mpsc::unbounded_channel();
        Self { tasks: JoinSet::new(), arrivals, arrived }
    }

    /// Opens `count` more, all at once, and waits until each has its first response.
    pub(crate) async fn open(&mut self, connection: &Connection, protocol: Protocol, count: usize) {
        for _ in 0..count {
            let (connection, arrived) = (connection.clone(), self.arrived.clone());
            self.tasks.spawn(async move {
                let (mut call, mut message) = connection.call(protocol).await;
                drop(connection);
                loop {
                    arrived.send(Instant::now()).unwrap();
                    call.accept(message);
                    message = call.next().await.expect("the stream stays open");
                }
            });
        }
        self.arrivals(count).await;
    }

    /// Closes all of them.
    pub(crate) async fn close(mut self) {
        self.tasks.shutdown().await;
    }

    /// When the next `count` responses arrived, on any of the streams.
    pub(crate) async fn arrivals(&mut self, count: usize) -> Vec<Instant> {
        let mut moments = Vec::with_capacity(count);
        while moments.len() < count {
            tokio::select! {
                Some(moment) = self.arrivals.recv() => moments.push(moment),
                Some(ended) = self.tasks.join_next() => ended.unwrap(),
            }
        }
        moments
    }

    /// Asserts that no response arrived beside those that were awaited.
    pub(crate) fn assert_quiet(&mut self) {
        assert!(self.arrivals.try_recv().is_err(), "an unexpected response");
    }
}

/// Makes `count` complete calls.
pub(crate) async fn cycles(connection: &Connection, protocol: Protocol, count: usize) {
    let mut tasks = JoinSet::new();
    for _ in 0..AT_ONCE {
        let connection = connection.clone();
        tasks.spawn(async move {
            for _ in 0..count / AT_ONCE {
                let (call, _) = connection.call(protocol).await;
                call.close().await;
            }
        });
    }
    while let Some(ended) = tasks.join_next().await {
        ended.unwrap();
    }
}
