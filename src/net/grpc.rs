//! gRPC as a client: connections that are kept while calls follow each other closely, and the meaning of failed calls.

#[cfg(any(test, fuzzing))]
pub mod fuzz;
pub mod messages;

use std::error::Error;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use http::header::CONTENT_TYPE;
use http::{HeaderMap, StatusCode};
use http_body_util::BodyExt as _;
use prost::Message as _;
use rustls::pki_types::CertificateDer;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;
use tonic::body::Body;
use tonic::{Code, Status};
use tower_service::Service;

use crate::base::limits;
use crate::base::text;
use crate::fs::disk::Disk;
use crate::net::endpoint::{Connected, Endpoint, Protocol};
use crate::net::error::{TlsError, TransportError, retry_after, with_causes};
use crate::net::http2;
use crate::net::tls::{Alert, Trusted};
use crate::proto::google::rpc::{RetryInfo, Status as Details};
use crate::secret::KeyPair;

/// Calls within this time of each other share a connection; one that is idle for longer is closed.
const NEAR: Duration = Duration::from_secs(30);
/// The maximum age of a connection, however busy: the server's name may resolve to another server by now.
const OLDEST: Duration = Duration::from_secs(300);
/// HTTP/2 pings to a silent server within one call. gRPC servers in Go close a connection at the fourth.
const PINGS: u32 = 3;

/// The header, or trailer, with the outcome of a call.
const GRPC_STATUS: &str = "grpc-status";

/// Holds the idle connection for the next call, if there is one.
#[derive(Debug)]
pub struct Connections {
    idle: Arc<Mutex<Option<Idle>>>,
    /// The time of the last call that succeeded.
    succeeded: Mutex<Option<Instant>>,
    /// The timeout of a call.
    timeout: Duration,
    disk: Disk,
}

#[derive(Debug)]
struct Idle {
    channel: Channel,
    _closer: AbortOnDropHandle<()>,
}

/// A connection to a server, for one call at a time.
#[derive(Debug)]
pub struct Channel {
    kept: http2::Kept,
    /// Whether the server asked for the client certificate, and got it.
    pub has_presented: bool,
    /// Why the server ended the connection.
    alert: Alert,
    /// Whether it has carried calls before.
    pub is_reused: bool,
    opened: Instant,
    trusted: Option<Trusted>,
    client: Option<CertificateDer<'static>>,
    is_refused: Arc<AtomicBool>,
}

impl Connections {
    /// For calls that take `timeout` at most.
    pub fn new(timeout: Duration, disk: Disk) -> Self {
        Self { idle: Arc::default(), succeeded: Mutex::default(), timeout, disk }
    }

    /// The idle connection, if a new one would be the same; else a new one. `client` is the client certificate.
    pub async fn channel(
        &self,
        endpoint: &Endpoint,
        client: Option<&KeyPair>,
    ) -> Result<Channel, TransportError> {
        let idle = self.idle.lock().ok().and_then(|mut idle| idle.take());
        let trusted = endpoint.trusted(&self.disk).await?;
        let client_leaf = client.and_then(|pair| pair.chain().first()).cloned();
        if let Some(Idle { channel, .. }) = idle
            && !channel.kept.is_closed()
            && channel.opened.elapsed() < OLDEST
            && channel.trusted == trusted
            && channel.client == client_leaf
        {
            return Ok(Channel { is_reused: true, ..channel });
        }
        // Less than the call's timeout, so that the error names what hangs.
        let patience = self.timeout * 4 / 5;
        let connected =
            endpoint.connect_trusting(trusted.as_ref(), client, Protocol::Http2, patience).await?;
        let Connected { io, has_presented, alert } = connected;
        let patience = (self.timeout / PINGS).max(Duration::from_secs(1));
        let kept = http2::Kept::open(io, patience).await.map_err(|error| match alert.received() {
            Some(alert) => TlsError::of_alert(alert, has_presented).into(),
            None => TransportError::Unreachable(std::io::Error::other(describe(&error))),
        })?;
        Ok(Channel {
            kept,
            has_presented,
            alert,
            is_reused: false,
            opened: Instant::now(),
            trusted,
            client: client_leaf,
            is_refused: Arc::default(),
        })
    }

    /// Takes a connection back after a call that succeeded. It stays open for the next call if the last two were close to
    /// each other: the next one probably is, too. After a failure a connection is not reused: another server may do better.
    pub fn keep(&self, channel: Channel) {
        let now = Instant::now();
        let before = self.succeeded.lock().ok().and_then(|mut succeeded| succeeded.replace(now));
        if before.is_none_or(|before| now.duration_since(before) >= NEAR) || channel.kept.is_closed() {
            return;
        }
        let slot = Arc::downgrade(&self.idle);
        let idle_time = tokio::time::sleep(NEAR);
        let closer = tokio::spawn(async move {
            idle_time.await;
            drop(slot.upgrade().and_then(|slot| slot.lock().ok()?.take()));
        });
        if let Ok(mut idle) = self.idle.lock() {
            *idle = Some(Idle { channel, _closer: AbortOnDropHandle::new(closer) });
        }
    }
}

impl Channel {
    /// For a generated client, and one call.
    pub fn service(&self) -> Calls {
        self.is_refused.store(false, Ordering::Relaxed);
        Calls { connection: self.kept.connection(), is_refused: Arc::clone(&self.is_refused) }
    }

    /// True if the server has not processed the call that failed with `status`: it can be repeated elsewhere.
    pub fn is_unprocessed(&self, status: &Status) -> bool {
        cause(status).is_some_and(http2::is_unprocessed)
    }

    /// The meaning of `status`, with which the last call failed: a refusal, or no usable answer.
    pub fn explain(&self, status: &Status) -> TransportError {
        if let Some(alert) = self.alert.received() {
            return TlsError::of_alert(alert, self.has_presented).into();
        }
        let source = Error::source(status);
        if let Some(CallError::NotGrpc(answer)) = source.and_then(|source| source.downcast_ref()) {
            let NotGrpc { status, content_type, retry_after } = answer.clone();
            return TransportError::NotGrpc { status, content_type, retry_after };
        }
        if let Some(error) = cause(status) {
            let cause = if error.is_canceled() || error.is_closed() { self.kept.error() } else { None };
            return TransportError::broken(describe(cause.unwrap_or(error)));
        }
        if let Some(source) = source {
            return TransportError::broken(with_causes(source));
        }
        let message = text::sanitize_for_log(status.message());
        if self.is_refused.load(Ordering::Relaxed) {
            return TransportError::Refused {
                code: status.code(),
                message,
                retry_after: requested_delay(status),
            };
        }
        match status.code() {
            Code::Unknown => TransportError::broken("the answer is incomplete: a proxy may have cut it off"),
            Code::OutOfRange => TransportError::TooLong { limit: limits::ANSWER_BYTES },
            _ => TransportError::Unreadable(message),
        }
    }
}

/// The failure of the connection, if that is why the call failed.
fn cause(status: &Status) -> Option<&hyper::Error> {
    let source = Error::source(status)?;
    match source.downcast_ref() {
        Some(CallError::Connection(error)) => Some(error),
        Some(CallError::NotGrpc(_)) => None,
        None => source.downcast_ref(),
    }
}

/// Describes why a connection broke.
fn describe(error: &hyper::Error) -> String {
    if error.is_timeout() {
        return "it has stopped answering, HTTP/2 pings too".to_owned();
    }
    let Some(h2) = error.source().and_then(|source| source.downcast_ref::<h2::Error>()) else {
        return with_causes(error);
    };
    if h2.is_io() {
        return "it closed the connection".to_owned();
    }
    match (h2.is_remote(), h2.is_go_away()) {
        (true, true) if h2.reason() == Some(h2::Reason::NO_ERROR) => {
            "it is shutting down (GOAWAY)".to_owned()
        }
        (true, true) => format!(
            "it accepts no more calls on this connection (GOAWAY: {})",
            text::sanitize_for_log(&h2.to_string())
        ),
        (true, false) => format!("it reset the call (RST_STREAM: {h2})"),
        (false, _) => format!("it violates HTTP/2 ({h2}); is this its gRPC port?"),
    }
}

/// The delay before a retry that the server asks for: gRPC has two ways to say it.
fn requested_delay(status: &Status) -> Option<Duration> {
    const TYPE: &str = "type.googleapis.com/google.rpc.RetryInfo";
    let pushback = status.metadata().get("grpc-retry-pushback-ms");
    let pushback = pushback.and_then(|value| value.to_str().ok()?.parse().ok()).map(Duration::from_millis);
    let details = Details::decode(status.details()).unwrap_or_default().details;
    let info = details.into_iter().find(|detail| detail.type_url == TYPE);
    let info = info.and_then(|info| RetryInfo::decode(info.value).ok()?.retry_delay);
    let info = info.and_then(|delay| {
        let (seconds, nanos) = (u64::try_from(delay.seconds).ok()?, u64::try_from(delay.nanos).ok()?);
        Duration::from_secs(seconds).checked_add(Duration::from_nanos(nanos))
    });
    info.max(pushback)
}

/// An answer that is not gRPC.
#[derive(Clone, Debug)]
struct NotGrpc {
    status: StatusCode,
    content_type: String,
    retry_after: Option<Duration>,
}

impl NotGrpc {
    /// None where the answer may be gRPC.
    fn new(status: StatusCode, headers: &HeaderMap) -> Option<Self> {
        let kind = headers.get(CONTENT_TYPE).map(|kind| String::from_utf8_lossy(kind.as_bytes()));
        let is_grpc = kind.as_ref().is_some_and(|kind| kind.starts_with("application/grpc"));
        if is_grpc || headers.contains_key(GRPC_STATUS) {
            return None;
        }
        let content_type = kind.map_or("without a content type".into(), |kind| text::sanitize_for_log(&kind));
        Some(Self { status, content_type, retry_after: retry_after(headers) })
    }
}

/// Why a call has no gRPC answer.
#[derive(Debug, thiserror::Error)]
enum CallError {
    #[error(transparent)]
    Connection(#[from] hyper::Error),
    #[error("the answer is not gRPC ({})", .0.content_type)]
    NotGrpc(NotGrpc),
}

/// Makes calls on a connection, and checks the answers before they are read as gRPC.
#[derive(Clone, Debug)]
pub struct Calls {
    connection: http2::Connection,
    /// Whether the server itself reports that the call failed.
    is_refused: Arc<AtomicBool>,
}

impl Service<http::Request<Body>> for Calls {
    type Response = http::Response<Body>;
    type Error = Box<dyn Error + Send + Sync>;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.connection.poll_ready(cx).map_err(|error| CallError::from(error).into())
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let is_refused = Arc::clone(&self.is_refused);
        let answered = self.connection.call(request);
        Box::pin(async move {
            let answer = answered.await.map_err(CallError::from)?;
            if let Some(answer) = NotGrpc::new(answer.status(), answer.headers()) {
                return Err(CallError::NotGrpc(answer).into());
            }
            let note = move |headers: &HeaderMap| {
                if headers.get(GRPC_STATUS).is_some_and(|status| status != "0") {
                    is_refused.store(true, Ordering::Relaxed);
                }
            };
            note(answer.headers());
            Ok(answer.map(|body| {
                Body::new(body.map_frame(move |frame| {
                    frame.trailers_ref().into_iter().for_each(&note);
                    frame
                }))
            }))
        })
    }
}

#[cfg(test)]
mod tests;
