//! An SDS server that is not Attaché: it serves a test's secrets, and records the requests.

use std::collections::BTreeMap;
use std::path::Path;
use std::pin::Pin;
use std::sync::{Arc, Mutex};

use attache::net::http2;
use attache::proto::SECRET_TYPE_URL;
use attache::proto::envoy::extensions::transport_sockets::tls::v3::Secret;
use attache::proto::envoy::service::discovery::v3::{
    DeltaDiscoveryRequest, DeltaDiscoveryResponse, DiscoveryRequest, DiscoveryResponse,
};
use attache::proto::envoy::service::secret::v3::secret_discovery_service_server::{
    SecretDiscoveryService, SecretDiscoveryServiceServer,
};
use attache::proto::google::protobuf::Any;
use prost::Message as _;
use tokio::net::UnixListener;
use tokio::sync::mpsc;
use tokio_stream::Stream;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, Streaming};

type Answer<T> = Result<Response<T>, Status>;
type Messages<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;
type Pushes = mpsc::UnboundedSender<Result<DiscoveryResponse, Status>>;

#[derive(Clone, Default)]
pub struct FakeSds(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    has_fetch: bool,
    secrets: BTreeMap<String, Secret>,
    /// Requests of streams, and of calls.
    asked: Vec<DiscoveryRequest>,
    pushed: usize,
    /// The open streams.
    streams: Vec<(DiscoveryRequest, Pushes)>,
}

impl FakeSds {
    /// Serves these secrets at `socket`; like SPIRE's agent it refuses streams and calls with other names. Istio's agent has
    /// no FetchSecrets.
    pub fn start(socket: &Path, secrets: impl IntoIterator<Item = Secret>, has_fetch: bool) -> Self {
        let secrets = secrets.into_iter().map(|secret| (secret.name.clone(), secret)).collect();
        let fake = Self(Arc::new(Mutex::new(State { has_fetch, secrets, ..State::default() })));
        let listener = UnixListener::bind(socket).unwrap();
        let service = fake.clone();
        tokio::spawn(async move {
            loop {
                let (io, _) = listener.accept().await.unwrap();
                let server = SecretDiscoveryServiceServer::new(service.clone());
                tokio::spawn(http2::serve(io, server, CancellationToken::new()));
            }
        });
        fake
    }

    /// All requests so far, acknowledgements among them.
    pub fn asked(&self) -> Vec<DiscoveryRequest> {
        self.0.lock().unwrap().asked.clone()
    }

    /// Sends its secrets to all open streams again.
    pub fn push(&self) {
        let mut state = self.0.lock().unwrap();
        let streams = std::mem::take(&mut state.streams);
        for (request, pushes) in &streams {
            let _ = pushes.send(state.answer(request));
        }
        state.streams = streams;
    }
}

impl State {
    fn answer(&mut self, request: &DiscoveryRequest) -> Result<DiscoveryResponse, Status> {
        let resources = request.resource_names.iter().map(|name| {
            let secret = self.secrets.get(name).ok_or_else(|| {
                Status::invalid_argument(format!("workload is not authorized for the identity {name:?}"))
            })?;
            Ok(Any { type_url: SECRET_TYPE_URL.to_owned(), value: secret.encode_to_vec().into() })
        });
        let resources = resources.collect::<Result<_, Status>>()?;
        self.pushed += 1;
        Ok(DiscoveryResponse {
            version_info: format!("version-{}", self.pushed),
            nonce: format!("nonce-{}", self.pushed),
            type_url: SECRET_TYPE_URL.to_owned(),
            resources,
            ..DiscoveryResponse::default()
        })
    }
}

#[tonic::async_trait]
impl SecretDiscoveryService for FakeSds {
    type DeltaSecretsStream = Messages<DeltaDiscoveryResponse>;
    type StreamSecretsStream = Messages<DiscoveryResponse>;

    async fn delta_secrets(
        &self,
        _: Request<Streaming<DeltaDiscoveryRequest>>,
    ) -> Answer<Self::DeltaSecretsStream> {
        Err(Status::unimplemented("DeltaSecrets"))
    }

    async fn stream_secrets(
        &self,
        request: Request<Streaming<DiscoveryRequest>>,
    ) -> Answer<Self::StreamSecretsStream> {
        let (pushes, outgoing) = mpsc::unbounded_channel();
        let mut requests = request.into_inner();
        let fake = self.clone();
        tokio::spawn(async move {
            while let Ok(Some(request)) = requests.message().await {
                let mut state = fake.0.lock().unwrap();
                state.asked.push(request.clone());
                if request.response_nonce.is_empty() {
                    let answer = state.answer(&request);
                    let is_refused = answer.is_err();
                    let _ = pushes.send(answer);
                    if is_refused {
                        return;
                    }
                    state.streams.push((request, pushes.clone()));
                }
            }
        });
        Ok(Response::new(Box::pin(UnboundedReceiverStream::new(outgoing))))
    }

    async fn fetch_secrets(&self, request: Request<DiscoveryRequest>) -> Answer<DiscoveryResponse> {
        let mut state = self.0.lock().unwrap();
        if !state.has_fetch {
            return Err(Status::unimplemented("FetchSecrets"));
        }
        let request = request.into_inner();
        state.asked.push(request.clone());
        state.answer(&request).map(Response::new)
    }
}
