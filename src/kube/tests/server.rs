//! An HTTP/2 server whose answers a test scripts.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use http::{HeaderMap, Method, Response, StatusCode};
use http_body_util::{BodyExt as _, StreamBody, combinators::UnsyncBoxBody};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde_json::Value;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio_stream::wrappers::UnboundedReceiverStream;

use crate::base::clock::Clock;
use crate::fs::disk::Disk;
use crate::kube::{Cluster, ClusterConfig, Credential};
use crate::net::endpoint::Endpoint;
use crate::net::tls::Roots;

/// A request as it arrived.
#[derive(Clone, Debug)]
pub(super) struct Seen {
    /// The connection, from 1.
    pub(super) connection: usize,
    pub(super) method: Method,
    pub(super) path: String,
    pub(super) headers: HeaderMap,
    pub(super) body: Value,
}

impl Seen {
    pub(super) fn bearer(&self) -> &str {
        self.headers.get("authorization").map_or("", |header| header.to_str().unwrap())
    }

    pub(super) fn has(&self, parameter: &str) -> bool {
        self.path.split_once('?').is_some_and(|(_, query)| query.split('&').any(|part| part == parameter))
    }
}

/// The answer to a request.
pub(super) enum Reply {
    Json(u16, Value),
    Text(u16, String),
    /// JSON, and a header.
    With(u16, &'static str, &'static str, Value),
    /// The body comes later, in pieces; it ends with its sender, and breaks at an error.
    Open(mpsc::UnboundedReceiver<Result<Bytes, &'static str>>),
    Never,
}

type Answers = Arc<Mutex<dyn FnMut(&Seen) -> Reply + Send>>;

pub(super) struct Server {
    pub(super) address: SocketAddr,
    seen: Arc<Mutex<Vec<Seen>>>,
    /// Tells the connections up to this one to say GOAWAY.
    going: watch::Sender<usize>,
    /// Connections that were accepted.
    pub(super) accepted: watch::Receiver<usize>,
    /// Connections that have ended.
    pub(super) closed: watch::Receiver<usize>,
    tasks: JoinSet<()>,
}

impl Server {
    pub(super) async fn start(answer: impl FnMut(&Seen) -> Reply + Send + 'static) -> Self {
        Self::with_streams(None, answer).await
    }

    /// A server that allows `limit` streams on a connection.
    pub(super) async fn with_streams(
        limit: impl Into<Option<u32>>,
        answer: impl FnMut(&Seen) -> Reply + Send + 'static,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let seen = Arc::<Mutex<Vec<Seen>>>::default();
        let answers: Answers = Arc::new(Mutex::new(answer));
        let (going, (opened, accepted), (ended, closed)) =
            (watch::channel(0).0, watch::channel(0), watch::channel(0));
        let (ended, limit, mut tasks) = (Arc::new(ended), limit.into(), JoinSet::new());
        let (kept, goes) = (Arc::clone(&seen), going.clone());
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            loop {
                let (io, _) = listener.accept().await.unwrap();
                opened.send_modify(|count| *count += 1);
                let connection = *opened.borrow();
                let (seen, answers, ended) = (Arc::clone(&kept), Arc::clone(&answers), Arc::clone(&ended));
                let service = service_fn(move |request| {
                    let (seen, answers) = (Arc::clone(&seen), Arc::clone(&answers));
                    async move { respond(connection, request, seen, answers).await }
                });
                let mut goes = goes.subscribe();
                connections.spawn(async move {
                    let served = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
                        .max_concurrent_streams(limit)
                        .serve_connection(TokioIo::new(io), service);
                    let mut served = std::pin::pin!(served);
                    let has_ended = tokio::select! {
                        _ = served.as_mut() => true,
                        _ = goes.wait_for(|last| *last >= connection) => false,
                    };
                    if !has_ended {
                        served.as_mut().graceful_shutdown();
                        let _ = served.await;
                    }
                    ended.send_modify(|count| *count += 1);
                });
            }
        });
        Self { address, seen, going, accepted, closed, tasks }
    }

    pub(super) fn endpoint(&self) -> Endpoint {
        let address = format!("http://{}", self.address).parse().unwrap();
        Endpoint { address, roots: Roots::System, server_name: None }
    }

    pub(super) fn cluster(&self) -> Cluster {
        self.cluster_as(Credential::None)
    }

    pub(super) fn cluster_as(&self, credential: Credential) -> Cluster {
        let config = ClusterConfig::new(self.endpoint(), credential);
        Cluster::new(config, Disk::default(), Clock::system())
    }

    pub(super) fn seen(&self) -> Vec<Seen> {
        self.seen.lock().unwrap().clone()
    }

    /// Ends without a farewell.
    pub(super) async fn stop(mut self) -> SocketAddr {
        self.tasks.shutdown().await;
        self.address
    }

    /// All connections so far say GOAWAY.
    pub(super) fn goaway(&self) {
        self.going.send_replace(*self.accepted.borrow());
    }
}

async fn respond(
    connection: usize,
    request: http::Request<Incoming>,
    seen: Arc<Mutex<Vec<Seen>>>,
    answers: Answers,
) -> Result<Response<UnsyncBoxBody<Bytes, &'static str>>, hyper::Error> {
    let (head, body) = request.into_parts();
    let body = body.collect().await?.to_bytes();
    let body = serde_json::from_slice(&body).unwrap_or_default();
    let path = head.uri.path_and_query().unwrap().to_string();
    let request = Seen { connection, method: head.method, path, headers: head.headers, body };
    seen.lock().unwrap().push(request.clone());
    let reply = answers.lock().unwrap()(&request);
    let whole = |body: String| {
        UnsyncBoxBody::new(http_body_util::Full::new(Bytes::from(body)).map_err(|never| match never {}))
    };
    let (status, body) = match reply {
        Reply::Json(status, body) => (status, whole(body.to_string())),
        Reply::Text(status, text) => (status, whole(text)),
        Reply::With(status, name, value, body) => {
            let mut response = Response::new(whole(body.to_string()));
            response.headers_mut().insert(name, value.parse().unwrap());
            *response.status_mut() = StatusCode::from_u16(status).unwrap();
            return Ok(response);
        }
        Reply::Open(parts) => {
            let frames = tokio_stream::StreamExt::map(UnboundedReceiverStream::new(parts), |part| {
                part.map(Frame::data)
            });
            (200, UnsyncBoxBody::new(StreamBody::new(frames)))
        }
        Reply::Never => std::future::pending().await,
    };
    let mut response = Response::new(body);
    *response.status_mut() = StatusCode::from_u16(status).unwrap();
    Ok(response)
}
