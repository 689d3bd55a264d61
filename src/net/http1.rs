//! HTTP/1.1 as a server, for people and probes.

use std::convert::Infallible;
use std::future::Future;
use std::time::Duration;

use http::{HeaderValue, Request, Response, StatusCode, header};
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_util::sync::CancellationToken;

/// The time in which a client must send its request's headers.
const HEADER_TIME: Duration = Duration::from_secs(5);

/// A complete answer.
pub type Answer = Response<Full<Bytes>>;

/// Serves `io` until the client disconnects or `stop` is cancelled.
pub async fn serve<IO, F>(io: IO, answer: impl Fn(Request<Incoming>) -> F, stop: CancellationToken)
where
    IO: AsyncRead + AsyncWrite + Unpin,
    F: Future<Output = Answer>,
{
    let service = service_fn(|request| {
        let answer = answer(request);
        async { Ok::<_, Infallible>(answer.await) }
    });
    let connection = hyper::server::conn::http1::Builder::new()
        // Disconnects clients that send nothing.
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIME)
        .max_buf_size(16 << 10)
        .serve_connection(TokioIo::new(io), service);
    let mut connection = std::pin::pin!(connection);
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = stop.cancelled() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "HTTP connection broken");
    }
}

pub fn text(status: StatusCode, body: &str) -> Answer {
    answer(status, "text/plain; charset=utf-8", body.to_owned())
}

/// Pretty-printed JSON.
pub fn json(status: StatusCode, body: &Value) -> Answer {
    answer(status, "application/json", format!("{body:#}\n"))
}

pub fn answer(status: StatusCode, content_type: &'static str, body: String) -> Answer {
    let mut response = Response::new(Full::new(Bytes::from(body)));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}
