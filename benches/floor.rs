//! The floor: the simplest gRPC server that is possible with tonic. It answers every request for a secret with the same
//! bytes, and sends them again at a signal. It knows no names, versions, or ACKs; only the nonce increases, since a
//! client must answer to it.

use std::path::Path;
use std::pin::Pin;
use std::task::{Context, Poll};

use attache::proto::SECRET_TYPE_URL;
use attache::proto::envoy::service::discovery::v3::{
    DeltaDiscoveryRequest, DeltaDiscoveryResponse, DiscoveryRequest, DiscoveryResponse, Resource,
};
use attache::proto::envoy::service::secret::v3::secret_discovery_service_server::{
    SecretDiscoveryService, SecretDiscoveryServiceServer,
};
use attache::proto::google::protobuf::Any;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::service::TowerToHyperService;
use tokio::net::UnixListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio_stream::Stream;
use tokio_stream::wrappers::WatchStream;
use tonic::{Request, Response, Status, Streaming};

/// Its log line once it accepts connections.
pub(crate) const SERVES: &str = "the floor serves";

/// Serves the bytes of the file `secret` on `socket`. Each SIGUSR1 is a push.
pub(crate) fn run(socket: &Path, secret: &Path) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let value = std::fs::read(secret).unwrap().into();
        let (push, pushes) = watch::channel(());
        let any = Any { type_url: SECRET_TYPE_URL.to_owned(), value };
        let service = SecretDiscoveryServiceServer::new(Floor { any, pushes });
        let mut signals = signal(SignalKind::user_defined1()).unwrap();
        let listener = UnixListener::bind(socket).unwrap();
        eprintln!("{SERVES}");
        loop {
            tokio::select! {
                Ok((io, _)) = listener.accept() => {
                    let service = TowerToHyperService::new(service.clone());
                    let mut http = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
                    // Without these two settings it could not handle the load: see `src/net/http2.rs`.
                    http.max_concurrent_streams(None).initial_connection_window_size(8 << 20);
                    tokio::spawn(http.serve_connection(TokioIo::new(io), service));
                }
                Some(()) = signals.recv() => push.send_replace(()),
            }
        }
    });
}

#[derive(Clone)]
struct Floor {
    any: Any,
    pushes: watch::Receiver<()>,
}

/// A response with the fixed bytes, for a stream.
trait Answer {
    fn answer(any: Any, nonce: u64) -> Self;
}

impl Answer for DiscoveryResponse {
    fn answer(any: Any, nonce: u64) -> Self {
        Self {
            version_info: "fixed".to_owned(),
            resources: vec![any],
            type_url: SECRET_TYPE_URL.to_owned(),
            nonce: nonce.to_string(),
            ..Self::default()
        }
    }
}

impl Answer for DeltaDiscoveryResponse {
    fn answer(any: Any, nonce: u64) -> Self {
        let version = "fixed".to_owned();
        Self {
            resources: vec![Resource { version, resource: Some(any), name: "default".to_owned() }],
            type_url: SECRET_TYPE_URL.to_owned(),
            nonce: nonce.to_string(),
            ..Self::default()
        }
    }
}

/// One stream: a response to the first request, and one for each push.
struct Answers<Q, A> {
    any: Any,
    requests: Streaming<Q>,
    pushes: WatchStream<()>,
    nonce: u64,
    answer: fn(Any, u64) -> A,
}

impl<Q, A> Stream for Answers<Q, A> {
    type Item = Result<A, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let mut is_due = false;
        while let Poll::Ready(request) = Pin::new(&mut self.requests).poll_next(cx) {
            match request {
                Some(Ok(_)) => is_due |= self.nonce == 0,
                _ => return Poll::Ready(None),
            }
        }
        is_due |= Pin::new(&mut self.pushes).poll_next(cx).is_ready();
        if !is_due {
            return Poll::Pending;
        }
        self.nonce += 1;
        Poll::Ready(Some(Ok((self.answer)(self.any.clone(), self.nonce))))
    }
}

impl Floor {
    fn answers<Q, A: Answer>(&self, request: Request<Streaming<Q>>) -> Response<Answers<Q, A>> {
        Response::new(Answers {
            any: self.any.clone(),
            requests: request.into_inner(),
            pushes: WatchStream::from_changes(self.pushes.clone()),
            nonce: 0,
            answer: A::answer,
        })
    }
}

#[tonic::async_trait]
impl SecretDiscoveryService for Floor {
    type DeltaSecretsStream = Answers<DeltaDiscoveryRequest, DeltaDiscoveryResponse>;
    type StreamSecretsStream = Answers<DiscoveryRequest, DiscoveryResponse>;

    async fn delta_secrets(
        &self,
        request: Request<Streaming<DeltaDiscoveryRequest>>,
    ) -> Result<Response<Self::DeltaSecretsStream>, Status> {
        Ok(self.answers(request))
    }

    async fn stream_secrets(
        &self,
        request: Request<Streaming<DiscoveryRequest>>,
    ) -> Result<Response<Self::StreamSecretsStream>, Status> {
        Ok(self.answers(request))
    }

    async fn fetch_secrets(
        &self,
        _: Request<DiscoveryRequest>,
    ) -> Result<Response<DiscoveryResponse>, Status> {
        Ok(Response::new(DiscoveryResponse::answer(self.any.clone(), 0)))
    }
}
