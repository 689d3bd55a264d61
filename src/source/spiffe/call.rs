//! The call to a Workload API: connection, first answer, further answers.

use std::fmt;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_TYPE, HeaderName, HeaderValue, TE};
use http_body_util::Full;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use tokio::time::timeout;
use tonic::body::Body;

use super::error::{Cause, SpiffeError};
use crate::base::limits;
use crate::fs::disk::Disk;
use crate::net::endpoint::Io;
use crate::net::grpc::Channel;
use crate::net::grpc::messages::{Messages, Pings};

const METHOD: &str = "http://localhost/SpiffeWorkloadAPI/FetchX509SVID";
/// What each request of the Workload API carries.
const SECURITY_HEADER: HeaderName = HeaderName::from_static("workload.spiffe.io");
/// An endpoint may hold the first call for some seconds until there is an identity.
const HELD: Duration = Duration::from_secs(5);
const PINGS: Pings = Pings { interval: Duration::from_secs(330), patience: Duration::from_secs(20) };

/// Connects to an endpoint.
#[tonic::async_trait]
pub(super) trait Dial: fmt::Debug + Send + Sync {
    async fn dial(&self) -> Result<Box<dyn Io>, Cause>;
}

/// A Unix socket.
#[derive(Debug)]
pub(super) struct UnixSocket {
    pub(super) path: PathBuf,
    pub(super) disk: Disk,
}

#[tonic::async_trait]
impl Dial for UnixSocket {
    async fn dial(&self) -> Result<Box<dyn Io>, Cause> {
        let path = self.path.clone();
        let stream = self.disk.run(&self.path, move || connect(&path)).await?;
        let stream = stream.and_then(tokio::net::UnixStream::from_std);
        Ok(Box::new(stream.map_err(Cause::Unreachable)?))
    }
}

/// Fails at once where the server accepts no more connections: only the path's file system can hang.
fn connect(path: &Path) -> io::Result<UnixStream> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket.into())
}

/// An endpoint and how long it may take.
#[derive(Clone, Debug)]
pub(super) struct Endpoint {
    /// As the option names it.
    pub(super) name: Arc<str>,
    pub(super) dial: Arc<dyn Dial>,
    /// How long an attempt may take that is not held.
    pub(super) timeout: Duration,
}

impl Endpoint {
    pub(super) fn error(&self, cause: impl Into<Cause>) -> SpiffeError {
        SpiffeError { endpoint: Arc::clone(&self.name), cause: cause.into() }
    }

    /// Opens the stream, and returns it with its first message.
    pub(super) async fn open(&self) -> Result<(Messages, Bytes), SpiffeError> {
        let patience = self.timeout + HELD;
        let opened = timeout(patience, async {
            let io = self.dial.dial().await?;
            let channel = Channel::over(io, PINGS).await.map_err(Cause::of)?;
            let messages = channel.call(request(), limits::SPIFFE_ANSWER_BYTES).await;
            let mut messages = messages.map_err(Cause::of)?;
            let first = messages.next().await.map_err(Cause::of)?.ok_or(Cause::Ended)?;
            Ok((messages, first))
        });
        let opened = opened.await.unwrap_or(Err(Cause::Silent(patience)));
        opened.map_err(|cause| self.error(cause))
    }

    /// The next message.
    pub(super) async fn next(&self, messages: &mut Messages) -> Result<Bytes, SpiffeError> {
        let next = messages.next().await.map_err(Cause::of).and_then(|next| next.ok_or(Cause::Ended));
        next.map_err(|cause| self.error(cause))
    }
}

fn request() -> http::Request<Body> {
    // A request without fields is an empty message.
    let body = Body::new(Full::new(Bytes::from_static(&[0; 5])));
    let mut request = http::Request::new(body);
    *request.method_mut() = http::Method::POST;
    *request.uri_mut() = http::Uri::from_static(METHOD);
    *request.version_mut() = http::Version::HTTP_2;
    let headers = request.headers_mut();
    headers.insert(TE, HeaderValue::from_static("trailers"));
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    headers.insert(SECURITY_HEADER, HeaderValue::from_static("true"));
    request
}
