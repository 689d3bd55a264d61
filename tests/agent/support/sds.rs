//! A plain SDS client.

use std::path::Path;
use std::time::Duration;

use attache::net::http2::{Connection, with_connection};
use attache::pki::certificate::Certificate;
use attache::proto::SECRET_TYPE_URL;
use attache::proto::envoy::config::core::v3::{DataSource, Node, data_source::Specifier};
use attache::proto::envoy::extensions::transport_sockets::tls::v3::{Secret, secret::Type};
use attache::proto::envoy::service::discovery::v3::{
    DeltaDiscoveryRequest, DeltaDiscoveryResponse, DiscoveryRequest, DiscoveryResponse,
};
use attache::proto::envoy::service::secret::v3::secret_discovery_service_client::SecretDiscoveryServiceClient;
use attache::proto::google::rpc;
use prost::Message as _;
use tokio::net::UnixStream;
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_stream::StreamExt as _;
use tonic::{Status, Streaming};

use super::process::PATIENCE;

pub type Client = SecretDiscoveryServiceClient<Connection>;

/// Runs `talk` on one connection to `socket`.
pub async fn on_connection<T>(socket: &Path, talk: impl AsyncFnOnce(Client) -> T) -> T {
    let io = UnixStream::connect(socket).await.unwrap();
    let origin = http::Uri::from_static("http://attache");
    with_connection(io, async |connection| talk(Client::with_origin(connection, origin)).await).await.unwrap()
}

/// A client's first request.
pub fn request(names: &[&str]) -> DiscoveryRequest {
    DiscoveryRequest {
        node: Some(Node { id: "test".to_owned(), cluster: "tests".to_owned(), ..Node::default() }),
        resource_names: names.iter().map(|name| (*name).to_owned()).collect(),
        type_url: SECRET_TYPE_URL.to_owned(),
        ..DiscoveryRequest::default()
    }
}

pub struct Stream {
    requests: mpsc::Sender<DiscoveryRequest>,
    responses: Streaming<DiscoveryResponse>,
    names: Vec<String>,
}

impl Stream {
    /// Opens a stream and subscribes to `names`.
    pub async fn open(client: &Client, names: &[&str]) -> Result<Self, Status> {
        Self::open_with(client, request(names)).await
    }

    pub async fn open_with(client: &Client, first: DiscoveryRequest) -> Result<Self, Status> {
        let (requests, inbound) = mpsc::channel(4);
        let names = first.resource_names.clone();
        requests.send(first).await.unwrap();
        let inbound = tokio_stream::wrappers::ReceiverStream::new(inbound);
        let responses = client.clone().stream_secrets(inbound).await?.into_inner();
        Ok(Self { requests, responses, names })
    }

    pub async fn next(&mut self) -> Result<DiscoveryResponse, Status> {
        let next = timeout(PATIENCE, self.responses.next()).await.expect("no response comes");
        next.unwrap_or_else(|| Err(Status::ok("the stream ended")))
    }

    /// The same, however long it takes.
    pub async fn pushed(&mut self) -> Result<DiscoveryResponse, Status> {
        self.responses.next().await.unwrap_or_else(|| Err(Status::ok("the stream ended")))
    }

    /// True if nothing comes for `quiet`.
    pub async fn is_quiet(&mut self, quiet: Duration) -> bool {
        timeout(quiet, self.responses.next()).await.is_err()
    }

    /// Sends an ACK.
    pub async fn accept(&self, response: &DiscoveryResponse) {
        self.answer(response, None).await;
    }

    /// Sends a NACK.
    pub async fn reject(&self, response: &DiscoveryResponse, reason: &str) {
        let status = rpc::Status { code: 13, message: reason.to_owned(), details: Vec::new() };
        self.answer(response, Some(status)).await;
    }

    async fn answer(&self, response: &DiscoveryResponse, error_detail: Option<rpc::Status>) {
        let version_info = if error_detail.is_none() { response.version_info.clone() } else { String::new() };
        let request = DiscoveryRequest {
            version_info,
            resource_names: self.names.clone(),
            type_url: SECRET_TYPE_URL.to_owned(),
            response_nonce: response.nonce.clone(),
            error_detail,
            node: None,
        };
        self.requests.send(request).await.unwrap();
    }
}

/// One open stream of the delta protocol.
pub struct DeltaStream {
    requests: mpsc::Sender<DeltaDiscoveryRequest>,
    responses: Streaming<DeltaDiscoveryResponse>,
}

impl DeltaStream {
    /// Opens a stream and subscribes to `names`.
    pub async fn open(client: &Client, names: &[&str]) -> Result<Self, Status> {
        let (requests, inbound) = mpsc::channel(4);
        let DiscoveryRequest { node, resource_names, type_url, .. } = request(names);
        let first = DeltaDiscoveryRequest {
            node,
            resource_names_subscribe: resource_names,
            type_url,
            ..DeltaDiscoveryRequest::default()
        };
        requests.send(first).await.unwrap();
        let inbound = tokio_stream::wrappers::ReceiverStream::new(inbound);
        let responses = client.clone().delta_secrets(inbound).await?.into_inner();
        Ok(Self { requests, responses })
    }

    pub async fn next(&mut self) -> Result<DeltaDiscoveryResponse, Status> {
        let next = timeout(PATIENCE, self.responses.next()).await.expect("no response comes");
        next.unwrap_or_else(|| Err(Status::ok("the stream ended")))
    }

    /// The same, however long it takes.
    pub async fn pushed(&mut self) -> Result<DeltaDiscoveryResponse, Status> {
        self.responses.next().await.unwrap_or_else(|| Err(Status::ok("the stream ended")))
    }

    /// Sends an ACK.
    pub async fn accept(&self, response: &DeltaDiscoveryResponse) {
        let ack = DeltaDiscoveryRequest {
            response_nonce: response.nonce.clone(),
            type_url: SECRET_TYPE_URL.to_owned(),
            ..DeltaDiscoveryRequest::default()
        };
        self.requests.send(ack).await.unwrap();
    }
}

pub async fn fetch(client: &Client, names: &[&str]) -> Result<DiscoveryResponse, Status> {
    let answer = timeout(PATIENCE, client.clone().fetch_secrets(request(names))).await;
    answer.expect("no answer comes").map(tonic::Response::into_inner)
}

/// The secrets of a response.
pub fn secrets(response: &DiscoveryResponse) -> Vec<Secret> {
    response.resources.iter().map(|any| Secret::decode(any.value.clone()).unwrap()).collect()
}

/// The secrets of a delta response.
pub fn delta_secrets(response: &DeltaDiscoveryResponse) -> Vec<Secret> {
    let anys = response.resources.iter().filter_map(|resource| resource.resource.as_ref());
    anys.map(|any| Secret::decode(any.value.clone()).unwrap()).collect()
}

/// The certificates of the only secret of a response, as PEM.
pub fn certificates(response: &DiscoveryResponse) -> String {
    let [secret] = secrets(response).try_into().unwrap();
    content(secret).0
}

/// The certificates of a secret, and the private key of a key pair, as PEM.
pub fn content(secret: Secret) -> (String, Option<String>) {
    let text = |source: Option<DataSource>| {
        let Some(Specifier::InlineBytes(bytes)) = source.unwrap().specifier else { panic!("not inline") };
        String::from_utf8(bytes.to_vec()).unwrap()
    };
    match secret.r#type.unwrap() {
        Type::TlsCertificate(pair) => (text(pair.certificate_chain), Some(text(pair.private_key))),
        Type::ValidationContext(context) => (text(context.trusted_ca), None),
    }
}

/// Parses PEM.
pub fn parsed(pem: &str) -> Vec<Certificate> {
    let ders = attache::pki::pem::certificates(pem.as_bytes()).unwrap();
    ders.iter().map(|der| Certificate::parse(der).unwrap()).collect()
}

/// The certificates that a new stream gets for `name`.
pub async fn served(socket: &Path, name: &str) -> Vec<Certificate> {
    let response = on_connection(socket, async |client| {
        Stream::open(&client, &[name]).await.unwrap().next().await.unwrap()
    });
    parsed(&certificates(&response.await))
}

/// The serial number of the leaf that a new stream gets.
pub async fn served_serial(socket: &Path) -> String {
    served(socket, "default").await.swap_remove(0).serial
}
