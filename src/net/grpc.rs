//! What the clients of CAs that speak gRPC share: connections that are kept while calls follow each other closely, and
//! what a failed call means.

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
use hyper::body::Incoming;
use prost::Message as _;
use rustls::pki_types::CertificateDer;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;
use tonic::body::Body;
use tonic::{Code, Status};
use tower_service::Service;

use crate::auth::client_cert::ClientCertificate;
use crate::base::limits;
use crate::ca::{CaError, InvalidResponse};
use crate::net::endpoint::{Connected, Endpoint, Protocol, Trusted};
use crate::net::http2;
use crate::net::rest::{retry_after, with_causes};
use crate::net::tls::Alert;
use crate::proto::google::rpc::{RetryInfo, Status as Details};

/// Calls that come within this time of each other share a connection; one that waits for longer is closed.
const NEAR: Duration = Duration::from_secs(30);
/// A connection is not used for longer, however busy: the CA's name may stand for another server by now.
const OLDEST: Duration = Duration::from_secs(300);
/// How often a server that says nothing is asked within a call whether it is there. gRPC servers in Go end a connection
/// at the fourth time.
const PINGS: u32 = 3;

/// The header, or trailer, with a call's outcome.
const GRPC_STATUS: &str = "grpc-status";

/// The connection that waits for the next call, if there is one.
#[derive(Debug)]
pub struct Connections {
    waiting: Arc<Mutex<Option<Waiting>>>,
    /// When a call succeeded last.
    succeeded: Mutex<Option<Instant>>,
    /// How long a call may take.
    timeout: Duration,
}

#[derive(Debug)]
struct Waiting {
    channel: Channel,
    _closer: AbortOnDropHandle<()>,
}

/// A connection to a CA, for one call at a time.
#[derive(Debug)]
pub struct Channel {
    kept: http2::Kept,
    /// Whether the CA asked for the client certificate, and got it.
    pub has_presented: bool,
    /// Why the CA ended it.
    pub alert: Alert,
    /// Whether calls were made on it before.
    pub is_reused: bool,
    opened: Instant,
    trusted: Option<Trusted>,
    client: Option<CertificateDer<'static>>,
    is_refused: Arc<AtomicBool>,
}

impl Connections {
    /// For calls that take `timeout` at most.
    pub fn new(timeout: Duration) -> Self {
        Self { waiting: Arc::default(), succeeded: Mutex::default(), timeout }
    }

    /// The connection that waits, if it is still as a new one would be; else a new one.
    pub async fn channel(
        &self,
        endpoint: &Endpoint,
        client: Option<&ClientCertificate>,
    ) -> Result<Channel, CaError> {
        let waiting = self.waiting.lock().ok().and_then(|mut waiting| waiting.take());
        let trusted = endpoint.trusted()?;
        let client_leaf = client.and_then(ClientCertificate::leaf).cloned();
        if let Some(Waiting { channel, .. }) = waiting
            && !channel.kept.is_closed()
            && channel.opened.elapsed() < OLDEST
            && channel.trusted == trusted
            && channel.client == client_leaf
        {
            return Ok(Channel { is_reused: true, ..channel });
        }
        // Within the call's time, so that it is told what hangs.
        let patience = self.timeout * 4 / 5;
        let connected =
            endpoint.connect_trusting(trusted.as_ref(), client, Protocol::Http2, patience).await?;
        let Connected { io, has_presented, alert } = connected;
        let patience = (self.timeout / PINGS).max(Duration::from_secs(1));
        let kept = http2::Kept::open(io, patience).await.map_err(|error| {
            let address = endpoint.address.to_string();
            let presented = client.filter(|_| has_presented);
            let broken = || CaError::Unreachable {
                address: address.clone(),
                source: std::io::Error::other(words(&error)),
            };
            alert.explain(&address, presented).unwrap_or_else(broken)
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

    /// Takes a connection back after a call that succeeded. It waits for the next one where the last two came close
    /// upon each other: the next will as well. After a failure it is not given back: another server may do better.
    pub fn keep(&self, channel: Channel) {
        let now = Instant::now();
        let before = self.succeeded.lock().ok().and_then(|mut succeeded| succeeded.replace(now));
        if before.is_none_or(|before| now.duration_since(before) >= NEAR) || channel.kept.is_closed() {
            return;
        }
        let place = Arc::downgrade(&self.waiting);
        let is_over = tokio::time::sleep(NEAR);
        let closer = tokio::spawn(async move {
            is_over.await;
            let place = place.upgrade();
            drop(place.and_then(|place| place.lock().ok()?.take()));
        });
        if let Ok(mut waiting) = self.waiting.lock() {
            *waiting = Some(Waiting { channel, _closer: AbortOnDropHandle::new(closer) });
        }
    }
}

impl Channel {
    /// For a generated client, and one call.
    pub fn service(&self) -> Calls {
        self.is_refused.store(false, Ordering::Relaxed);
        Calls { connection: self.kept.connection(), is_refused: Arc::clone(&self.is_refused) }
    }

    /// True if the CA has not begun with the call that failed so: it can be made again elsewhere.
    pub fn is_untouched(&self, status: &Status) -> bool {
        cause(status).is_some_and(http2::is_untouched)
    }

    /// What `status`, the outcome of the last call, means: what the CA has said, or that it has said nothing of use.
    pub fn explain(&self, endpoint: &Endpoint, status: &Status) -> CaError {
        let address = endpoint.address.to_string();
        let broken = |words: String| CaError::Broken {
            address: address.clone(),
            source: std::io::Error::other(words),
        };
        let source = Error::source(status);
        if let Some(CallError::Foreign(Foreign { status, words, retry_after })) =
            source.and_then(|source| source.downcast_ref())
        {
            let (status, message, retry_after) = (*status, words.clone(), *retry_after);
            return CaError::Status { address, status, message, retry_after };
        }
        if let Some(error) = cause(status) {
            let cause = if error.is_canceled() || error.is_closed() { self.kept.error() } else { None };
            return broken(words(cause.unwrap_or(error)));
        }
        if let Some(source) = source {
            return broken(with_causes(source));
        }
        if self.is_refused.load(Ordering::Relaxed) {
            let (code, message) = (status.code(), limits::sanitize_for_log(status.message()));
            return CaError::Refused { address, code, message, retry_after: asked_delay(status) };
        }
        match status.code() {
            Code::Unknown => broken("the answer has no end: a proxy may have cut it off".to_owned()),
            Code::OutOfRange => {
                InvalidResponse::Unreadable(format!("it is longer than {} bytes", limits::CA_ANSWER_BYTES))
                    .into()
            }
            _ => InvalidResponse::Unreadable(limits::sanitize_for_log(status.message())).into(),
        }
    }
}

/// What failed beneath gRPC, if that is what failed.
fn cause(status: &Status) -> Option<&hyper::Error> {
    let source = Error::source(status)?;
    match source.downcast_ref() {
        Some(CallError::Connection(error)) => Some(error),
        Some(CallError::Foreign(_)) => None,
        None => source.downcast_ref(),
    }
}

/// What a broken connection means, for people.
fn words(error: &hyper::Error) -> String {
    if error.is_timeout() {
        return "it has stopped answering, HTTP/2 pings too".to_owned();
    }
    let Some(said) = error.source().and_then(|source| source.downcast_ref::<h2::Error>()) else {
        return with_causes(error);
    };
    if said.is_io() {
        return "it closed the connection".to_owned();
    }
    match (said.is_remote(), said.is_go_away()) {
        (true, true) if said.reason() == Some(h2::Reason::NO_ERROR) => {
            "it is about to stop (GOAWAY)".to_owned()
        }
        (true, true) => format!(
            "it takes no more calls on this connection (GOAWAY: {})",
            limits::sanitize_for_log(&said.to_string())
        ),
        (true, false) => format!("it gave the call up (RST_STREAM: {said})"),
        (false, _) => format!("what it says is against the rules of HTTP/2 ({said}); is this its gRPC port?"),
    }
}

/// How long the CA asks to be left alone: gRPC has two ways to say it.
fn asked_delay(status: &Status) -> Option<Duration> {
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
#[derive(Debug)]
struct Foreign {
    status: StatusCode,
    words: String,
    retry_after: Option<Duration>,
}

impl Foreign {
    /// None where gRPC may be in it.
    fn new(status: StatusCode, headers: &HeaderMap) -> Option<Self> {
        let kind = headers.get(CONTENT_TYPE).map(|kind| String::from_utf8_lossy(kind.as_bytes()));
        let is_grpc = kind.as_ref().is_some_and(|kind| kind.starts_with("application/grpc"));
        if is_grpc || headers.contains_key(GRPC_STATUS) {
            return None;
        }
        let kind = kind.map_or("without a content type".into(), |kind| limits::sanitize_for_log(&kind));
        let words = format!(
            "this is not gRPC ({kind}): does a proxy answer for it, or is --ca-address another server's?"
        );
        Some(Self { status, words, retry_after: retry_after(headers) })
    }
}

/// Why a call has no answer in gRPC.
#[derive(Debug, thiserror::Error)]
enum CallError {
    #[error(transparent)]
    Connection(#[from] hyper::Error),
    #[error("{}", .0.words)]
    Foreign(Foreign),
}

/// Makes calls on a connection, and looks at the answers before they are read as gRPC.
#[derive(Clone, Debug)]
pub struct Calls {
    connection: http2::Connection,
    /// Whether the server says itself that the call has failed.
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
            let answer: http::Response<Incoming> = answered.await.map_err(CallError::from)?;
            if let Some(foreign) = Foreign::new(answer.status(), answer.headers()) {
                return Err(CallError::Foreign(foreign).into());
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
