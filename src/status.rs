//! Probes and metrics over HTTP: `/livez`, `/readyz`, `/metrics`.

use std::convert::Infallible;
use std::fmt::Write as _;
use std::time::Duration;

use http::{Method, Request, Response, StatusCode, header};
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpStream;
use tokio_util::sync::CancellationToken;

use crate::cache::Cache;
use crate::clock::Clock;
use crate::metrics::Metrics;
use crate::readiness;

const METRICS_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
/// How long a client may take to say what it wants.
const HEADER_TIME: Duration = Duration::from_secs(5);
const TEXT_TYPE: &str = "text/plain; charset=utf-8";

/// Answers probes. Clones answer the same.
#[derive(Clone, Debug)]
pub struct Status {
    cache: Cache,
    metrics: Metrics,
    clock: Clock,
    /// A draining agent is not ready.
    draining: CancellationToken,
}

impl Status {
    /// Answers from `cache` and `metrics`.
    pub fn new(cache: Cache, metrics: Metrics, clock: Clock, draining: CancellationToken) -> Self {
        Self { cache, metrics, clock, draining }
    }

    /// Serves one connection until the client goes or the agent drains.
    pub async fn serve(self, io: TcpStream) {
        let draining = self.draining.clone();
        let service = service_fn(move |request| {
            let answer = self.answer(&request);
            async { Ok::<_, Infallible>(answer) }
        });
        let connection = hyper::server::conn::http1::Builder::new()
            // Whoever connects and says nothing is shown the door.
            .timer(TokioTimer::new())
            .header_read_timeout(HEADER_TIME)
            .max_buf_size(16 << 10)
            .serve_connection(TokioIo::new(io), service);
        let mut connection = std::pin::pin!(connection);
        let ended = tokio::select! {
            ended = connection.as_mut() => ended,
            () = draining.cancelled() => {
                connection.as_mut().graceful_shutdown();
                connection.await
            }
        };
        if let Err(error) = ended {
            tracing::debug!(%error, "a status connection broke");
        }
    }

    fn answer(&self, request: &Request<Incoming>) -> Response<Full<Bytes>> {
        if !matches!(*request.method(), Method::GET | Method::HEAD) {
            return text(StatusCode::METHOD_NOT_ALLOWED, "only GET is served here\n");
        }
        match request.uri().path() {
            "/livez" => text(StatusCode::OK, "alive\n"),
            "/readyz" => self.readiness(),
            "/metrics" => {
                let body = self.metrics.encode(&self.cache, &self.clock);
                response(StatusCode::OK, METRICS_TYPE, body)
            }
            _ => text(StatusCode::NOT_FOUND, "there are /livez, /readyz and /metrics\n"),
        }
    }

    fn readiness(&self) -> Response<Full<Bytes>> {
        if self.draining.is_cancelled() {
            return text(StatusCode::SERVICE_UNAVAILABLE, "the agent is stopping\n");
        }
        let output = self.metrics.output.borrow().clone();
        let missing = readiness::missing(&self.cache.snapshot(), output.as_ref(), self.clock.now());
        if missing.is_empty() {
            return text(StatusCode::OK, "ready\n");
        }
        let mut body = String::new();
        for one in missing {
            // Writing to a String does not fail.
            let _ = writeln!(body, "{}: {}", one.name, one.reason);
        }
        text(StatusCode::SERVICE_UNAVAILABLE, &body)
    }
}

fn text(status: StatusCode, body: &str) -> Response<Full<Bytes>> {
    response(status, TEXT_TYPE, body.to_owned())
}

fn response(status: StatusCode, content_type: &'static str, body: String) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from(body)));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static(content_type));
    response
}
