//! The SDS client of `attache get` and `attache watch`.

use std::io;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use tokio::net::UnixStream;

use super::{SOCKETS, variable};
use crate::config::DEFAULT_SOCKET;
use crate::net::http2;
use crate::os::denial::denial;
use crate::proto::SECRET_TYPE_URL;
use crate::proto::envoy::config::core::v3::Node;
use crate::proto::envoy::service::discovery::v3::DiscoveryRequest;
use crate::proto::envoy::service::secret::v3::secret_discovery_service_client::SecretDiscoveryServiceClient;

pub(super) type SdsClient = SecretDiscoveryServiceClient<http2::Connection>;

/// The SDS socket: the given one, else the one in the environment, which is the agent's own in its container.
pub(super) fn sds_socket(given: Option<&Path>) -> PathBuf {
    given.map(Path::to_owned).or_else(agents_socket).unwrap_or_else(|| DEFAULT_SOCKET.into())
}

/// The SDS socket in the agent's environment or options file; of several, the first one.
pub(super) fn agents_socket() -> Option<PathBuf> {
    variable(SOCKETS)
}

/// The first request of a stream, or the only one of a call.
pub(super) fn first_request(name: &str, node_id: &str) -> DiscoveryRequest {
    DiscoveryRequest {
        node: Some(Node { id: node_id.to_owned(), ..Node::default() }),
        resource_names: vec![name.to_owned()],
        type_url: SECRET_TYPE_URL.to_owned(),
        ..DiscoveryRequest::default()
    }
}

/// Connects to `socket` and runs `talk`; the connection ends with it.
pub(super) async fn with_client<T>(
    socket: &Path,
    talk: impl AsyncFnOnce(SdsClient) -> T,
) -> anyhow::Result<T> {
    let connected = UnixStream::connect(socket).await;
    let io = connected.map_err(|source| ConnectFailed { socket: socket.to_owned(), source })?;
    let talk = async move |connection| {
        talk(SdsClient::with_origin(connection, http::Uri::from_static("http://attache"))).await
    };
    match http2::with_connection(io, talk).await {
        Err(error) if ConnectionClosed::is_cause_of(&error) => Err(ConnectionClosed::new(socket).into()),
        outcome => outcome.with_context(|| format!("{} does not speak HTTP/2", socket.display())),
    }
}

/// What to do where connecting to an agent's socket fails.
pub(super) fn connect_remedy(socket: &Path, error: &io::Error, same: &str) -> String {
    match error.kind() {
        io::ErrorKind::PermissionDenied => {
            format!(
                "{}: run the command as that user, or in that group if the mode allows it",
                denial(socket)
            )
        }
        _ => format!("is `attache run` running, and {same}"),
    }
}

#[derive(Debug, thiserror::Error)]
#[error("connecting to {} failed: {source}; {}", socket.display(), connect_remedy(socket, source, "is --socket the same?"))]
pub(super) struct ConnectFailed {
    socket: PathBuf,
    source: io::Error,
}

impl ConnectFailed {
    pub(super) fn is_permission_denied(&self) -> bool {
        self.source.kind() == io::ErrorKind::PermissionDenied
    }
}

/// The server closed the connection without an answer, as the agent does with users that it does not serve.
#[derive(Debug, thiserror::Error)]
#[error("the server at {} closed the connection: if it is Attaché, is user {uid} in its --allow-uid or --allow-gid?", socket.display())]
pub(super) struct ConnectionClosed {
    socket: PathBuf,
    uid: u32,
}

impl ConnectionClosed {
    pub(super) fn new(socket: &Path) -> Self {
        Self { socket: socket.to_owned(), uid: rustix::process::getuid().as_raw() }
    }

    /// Whether `error` is caused by a closed connection, which has many forms.
    pub(super) fn is_cause_of(error: &(dyn std::error::Error + 'static)) -> bool {
        let mut causes = std::iter::successors(Some(error), |error| error.source());
        causes.any(|cause| {
            let hyper = cause.downcast_ref::<hyper::Error>();
            let is_closed = hyper.is_some_and(|error| error.is_canceled() || error.is_closed());
            is_closed
                || cause.downcast_ref::<h2::Error>().is_some_and(h2::Error::is_io)
                || cause.is::<io::Error>()
        })
    }
}
