//! Calls to CAs, and to whoever gives tokens for them, over HTTP/1.1: mostly JSON, one connection for each call.

use std::convert::Infallible;
use std::error::Error;
use std::time::Duration;

use bytes::Bytes;
use http::header::{ACCEPT, CONTENT_TYPE, HOST, HeaderMap, HeaderValue, RETRY_AFTER};
use http::{Method, Request, StatusCode};
use http_body_util::{BodyExt as _, Full, LengthLimitError, Limited};
use hyper_util::rt::TokioIo;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, PercentEncode, utf8_percent_encode};
use tonic::metadata::MetadataMap;
use zeroize::{Zeroize as _, Zeroizing};

use crate::base::limits;
use crate::ca::citadel::Header;
use crate::ca::{CaError, InvalidResponse};
use crate::net::endpoint::{self, Connected, Endpoint, Protocol};

/// One call.
#[derive(Debug)]
pub struct Call<'a> {
    /// GET, POST and so on.
    pub method: Method,
    /// Path and query, from the first slash on.
    pub path: &'a str,
    /// Beside those that every call has. Credentials are marked as sensitive.
    pub headers: HeaderMap,
    /// JSON, unless the headers say otherwise. It may hold a credential.
    pub body: Option<Zeroizing<Vec<u8>>>,
}

/// What came back, whatever its status.
#[derive(Debug)]
pub struct Reply {
    /// 200 and so on.
    pub status: StatusCode,
    /// Its headers.
    pub headers: HeaderMap,
    /// Of [`limits::CA_ANSWER_BYTES`] at most.
    pub body: Bytes,
    /// How long the server asks to be left alone.
    pub retry_after: Option<Duration>,
}

/// Makes one call to `endpoint`. The caller sets the deadline.
pub async fn call(endpoint: &Endpoint, call: Call<'_>) -> Result<Reply, CaError> {
    let address = endpoint.address.to_string();
    let Connected { io, alert, .. } = endpoint.connect(None, Protocol::Http1).await?;
    let broken = |error: &(dyn Error + 'static)| {
        let source = std::io::Error::other(with_causes(error));
        alert.explain(&address, None).unwrap_or(CaError::Broken { address: address.clone(), source })
    };
    let host = HeaderValue::from_str(&endpoint.address.authority());
    let mut request = Request::new(Full::new(call.body.map(Bytes::from_owner).unwrap_or_default()));
    *request.method_mut() = call.method;
    *request.uri_mut() =
        call.path.parse().map_err(|_| CaError::Local(format!("{:?} is no path of a URL", call.path)))?;
    *request.headers_mut() = call.headers;
    let headers = request.headers_mut();
    headers.insert(HOST, host.map_err(|_| CaError::Local(format!("{address} can't be sent in a header")))?);
    headers.entry(ACCEPT).or_insert(HeaderValue::from_static("application/json"));
    headers.entry(CONTENT_TYPE).or_insert(HeaderValue::from_static("application/json"));

    let handshake = hyper::client::conn::http1::handshake(TokioIo::new(io)).await;
    let (mut sender, connection) = handshake.map_err(|error| broken(&error))?;
    let driver = async {
        // However the connection ends, the call hears of it.
        let _ = connection.await;
        std::future::pending::<Infallible>().await
    };
    let exchange = async {
        let (head, body) = sender.send_request(request).await.map_err(|error| broken(&error))?.into_parts();
        let body = Limited::new(body, limits::CA_ANSWER_BYTES).collect().await;
        let body = body.map_err(|error| match error.is::<LengthLimitError>() {
            true => {
                InvalidResponse::Unreadable(format!("it is longer than {} bytes", limits::CA_ANSWER_BYTES))
                    .into()
            }
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

impl Reply {
    /// What `read` makes of the body, whose bytes are wiped then: they may hold a credential.
    pub fn read_and_wipe<T>(self, read: impl FnOnce(&[u8]) -> T) -> T {
        let it = read(&self.body);
        if let Ok(mut bytes) = self.body.try_into_mut() {
            bytes.zeroize();
        }
        it
    }

    /// The answer, if the server was content; else what it said, made into an error by `explain`.
    pub fn success(
        self,
        endpoint: &Endpoint,
        explain: impl FnOnce(&[u8]) -> Option<String>,
    ) -> Result<Bytes, CaError> {
        if self.status.is_success() {
            return Ok(self.body);
        }
        let message = explain(&self.body).unwrap_or_else(|| String::from_utf8_lossy(&self.body).into_owned());
        Err(CaError::Status {
            address: endpoint.address.to_string(),
            status: self.status,
            message: limits::sanitize_for_log(message.trim()),
            retry_after: self.retry_after,
        })
    }
}

/// `error` with what is behind it: hyper says no more than "connection error".
pub(crate) fn with_causes(error: &(dyn Error + 'static)) -> String {
    let causes = || std::iter::successors(Some(error), |&error| error.source());
    // The same end looks different each time, and must not be told as news each time.
    let is_end = |error: &(dyn Error + 'static)| {
        error.downcast_ref().is_some_and(hyper::Error::is_incomplete_message)
            || error.downcast_ref().is_some_and(endpoint::is_end)
    };
    if causes().any(is_end) {
        return "the server ended it".to_owned();
    }
    causes().map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

/// `text` as a value of a form or a query.
pub fn encoded(text: &str) -> PercentEncode<'_> {
    const UNRESERVED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');
    utf8_percent_encode(text, UNRESERVED)
}

/// The configured headers, as a call takes them.
pub fn headers(configured: &[Header]) -> HeaderMap {
    let mut map = MetadataMap::new();
    for (name, value) in configured {
        map.insert(name.clone(), value.clone());
    }
    map.into_headers()
}

/// Seconds. The other form, a date, is rare, and depends on two clocks.
pub(crate) fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let seconds = headers.get(RETRY_AFTER)?.to_str().ok()?.trim().parse().ok()?;
    Some(Duration::from_secs(seconds))
}
