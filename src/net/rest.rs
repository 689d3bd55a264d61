//! Calls over HTTP/1.1, mostly with JSON: one connection for each call.

use std::convert::Infallible;
use std::error::Error;
use std::time::Duration;

use bytes::Bytes;
use http::header::{ACCEPT, CONTENT_TYPE, HOST, HeaderMap, HeaderValue};
use http::{Method, Request, StatusCode};
use http_body_util::{BodyExt as _, Full, LengthLimitError, Limited};
use hyper_util::rt::TokioIo;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, PercentEncode, utf8_percent_encode};
use zeroize::{Zeroize as _, Zeroizing};

use crate::base::limits;
use crate::fs::disk::Disk;
use crate::net::Header;
use crate::net::endpoint::{Connected, Endpoint, Io, Protocol};
use crate::net::error::{TlsError, TransportError, retry_after, with_causes};
use crate::net::tls::Alert;

/// One call.
#[derive(Debug)]
pub struct Call<'a> {
    pub method: Method,
    /// Path and query, from the first slash on.
    pub path: &'a str,
    /// In addition to those of every call. Credentials are marked as sensitive.
    pub headers: HeaderMap,
    /// JSON, unless the headers say otherwise. It may hold a credential.
    pub body: Option<Zeroizing<Vec<u8>>>,
}

/// An answer, whatever its status.
#[derive(Debug)]
pub struct Reply {
    pub status: StatusCode,
    pub headers: HeaderMap,
    /// At most [`limits::ANSWER_BYTES`].
    pub body: Bytes,
    /// The delay before a retry that the server asks for.
    pub retry_after: Option<Duration>,
}

/// Makes one call to `endpoint`. The caller sets the deadline.
pub async fn call(endpoint: &Endpoint, call: Call<'_>, disk: &Disk) -> Result<Reply, TransportError> {
    let Connected { io, alert, .. } = endpoint.connect(None, Protocol::Http1, disk).await?;
    exchange(io, request(endpoint, call)?, &alert).await
}

/// Sends `request` on a new connection, and reads the answer.
pub async fn exchange(
    io: impl Io,
    request: Request<Full<Bytes>>,
    alert: &Alert,
) -> Result<Reply, TransportError> {
    let broken = |error: &(dyn Error + 'static)| match alert.received() {
        Some(alert) => TlsError::of_alert(alert, false).into(),
        None => TransportError::broken(with_causes(error)),
    };
    let handshake = hyper::client::conn::http1::handshake(TokioIo::new(io)).await;
    let (mut sender, connection) = handshake.map_err(|error| broken(&error))?;
    let driver = async {
        // However the connection ends, the call fails with it.
        let _ = connection.await;
        std::future::pending::<Infallible>().await
    };
    let exchange = async {
        let (head, body) = sender.send_request(request).await.map_err(|error| broken(&error))?.into_parts();
        let body = Limited::new(body, limits::ANSWER_BYTES).collect().await;
        let body = body.map_err(|error| match error.is::<LengthLimitError>() {
            true => TransportError::TooLong { limit: limits::ANSWER_BYTES },
            false => broken(&*error),
        });
        let body = body?.to_bytes();
        let retry_after = retry_after(&head.headers);
        Ok(Reply { status: head.status, headers: head.headers, body, retry_after })
    };
    tokio::select! {
        reply = exchange => reply,
        never = driver => match never {},
    }
}

fn request(endpoint: &Endpoint, call: Call<'_>) -> Result<Request<Full<Bytes>>, TransportError> {
    let unsendable = |what: String| TransportError::Request(what);
    let mut request = Request::new(Full::new(call.body.map(Bytes::from_owner).unwrap_or_default()));
    *request.method_mut() = call.method;
    *request.uri_mut() =
        call.path.parse().map_err(|_| unsendable(format!("{:?} is not a URL path", call.path)))?;
    *request.headers_mut() = call.headers;
    let host = HeaderValue::from_str(&endpoint.address.authority())
        .map_err(|_| unsendable(format!("{} can't be sent in a header", endpoint.address)))?;
    let headers = request.headers_mut();
    headers.insert(HOST, host);
    headers.entry(ACCEPT).or_insert(HeaderValue::from_static("application/json"));
    headers.entry(CONTENT_TYPE).or_insert(HeaderValue::from_static("application/json"));
    Ok(request)
}

impl Reply {
    /// The result of `read` on the body, whose bytes are wiped afterwards: they may hold a credential.
    pub fn read_and_wipe<T>(self, read: impl FnOnce(&[u8]) -> T) -> T {
        let result = read(&self.body);
        if let Ok(mut bytes) = self.body.try_into_mut() {
            bytes.zeroize();
        }
        result
    }
}

/// `text` percent-encoded, as a value of a form or a query.
pub fn encoded(text: &str) -> PercentEncode<'_> {
    const UNRESERVED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');
    utf8_percent_encode(text, UNRESERVED)
}

pub fn headers(configured: &[Header]) -> HeaderMap {
    configured.iter().cloned().collect()
}
