//! The admin socket: what `attache status`, `renew` and `log` speak with, JSON over HTTP/1.1. Only this agent's user
//! can connect.
//!
//! | call | answer |
//! |---|---|
//! | `GET /v1/status` | the report (`docs/status.md`) |
//! | `POST /v1/renew` | 200 when there is a new certificate, 502 with `error` when the CA gave none |
//! | `GET /v1/log` | `level` |
//! | `PUT /v1/log?level=LEVEL` | `level`, which counts from now on |

use std::time::Duration;

use http::{Method, Request, StatusCode};
use hyper::body::Incoming;
use serde_json::{Value, json};
use tokio::net::UnixStream;
use tokio_util::sync::CancellationToken;

use crate::net::http1::{self, Answer};
use crate::ops::report::Reporter;
use crate::ops::telemetry::LogLevel;
use crate::secret::SecretName;
use crate::store::{Cache, Key, NotRenewed, Workload};

/// How long somebody waits for a renewal: several CAs may each take their time.
const PATIENCE: Duration = Duration::from_secs(60);

/// Answers calls on the admin socket. Clones answer the same.
#[derive(Clone, Debug)]
pub struct Admin {
    /// What is told.
    pub reporter: Reporter,
    /// Whose sources are asked to renew.
    pub workload: Workload,
    /// What can be set.
    pub log: LogLevel,
}

impl Admin {
    /// Serves one connection until the client goes or the agent drains.
    pub async fn serve(self, io: UnixStream, stop: CancellationToken) {
        http1::serve(io, |request| self.answer(request), stop).await;
    }

    async fn answer(&self, request: Request<Incoming>) -> Answer {
        let (status, body) = self.call(&request).await;
        http1::json(status, &body)
    }

    async fn call(&self, request: &Request<Incoming>) -> (StatusCode, Value) {
        match (request.method(), request.uri().path()) {
            (&Method::GET, "/v1/status") => (StatusCode::OK, self.reporter.report()),
            (&Method::POST, "/v1/renew") => self.renew().await,
            (&Method::GET, "/v1/log") => (StatusCode::OK, json!({ "level": self.log.get() })),
            (&Method::PUT, "/v1/log") => match self.log.set(parameter(request, "level")) {
                Ok(()) => {
                    let level = self.log.get();
                    tracing::warn!(level, "the log level is set");
                    (StatusCode::OK, json!({ "level": level }))
                }
                Err(error) => (StatusCode::BAD_REQUEST, json!({ "error": error })),
            },
            (method, path) => (
                StatusCode::NOT_FOUND,
                json!({ "error": format!("there is no {method} {path} on this agent's admin socket") }),
            ),
        }
    }

    async fn renew(&self) -> (StatusCode, Value) {
        let cache: &Cache = &self.reporter.cache;
        // The roots come with it.
        let key = Key { workload: self.workload, name: SecretName::Workload };
        tracing::info!("somebody asks for a renewal");
        match tokio::time::timeout(PATIENCE, cache.renew(&key)).await {
            Ok(Ok(())) => (StatusCode::OK, self.reporter.report()),
            Ok(Err(error)) => {
                let status = match error {
                    NotRenewed::Failed(_) => StatusCode::BAD_GATEWAY,
                    NotRenewed::NoSource | NotRenewed::Files => StatusCode::CONFLICT,
                };
                (status, json!({ "error": error.to_string() }))
            }
            Err(_) => {
                let error =
                    format!("the CA has not answered within {PATIENCE:?}; it is asked again and again");
                (StatusCode::GATEWAY_TIMEOUT, json!({ "error": error }))
            }
        }
    }
}

/// A parameter of the query, as it stands there: log levels need no escapes.
fn parameter<'a>(request: &'a Request<Incoming>, name: &str) -> &'a str {
    let pairs = request.uri().query().unwrap_or_default().split('&');
    let mut found = pairs.filter_map(|pair| pair.split_once('=')).filter(|(key, _)| *key == name);
    found.next().map_or("", |(_, value)| value)
}
