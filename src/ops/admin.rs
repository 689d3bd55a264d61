//! The admin socket, which `attache status`, `renew` and `log` use: JSON over HTTP/1.1. Only this agent's user can connect.
//!
//! | call | answer |
//! |---|---|
//! | `GET /v1/status` | the report (`docs/status.md`); with `?workload=NAME` that of one of many workloads |
//! | `POST /v1/renew` | likewise; 200 with the report after a renewal, 502 with `error` where no CA issued a certificate |
//! | `GET /v1/log` | `level` |
//! | `PUT /v1/log?level=LEVEL` | the new `level` |

use std::time::Duration;

use http::{Method, Request, StatusCode};
use hyper::body::Incoming;
use percent_encoding::percent_decode_str;
use serde_json::{Value, json};
use tokio::net::UnixStream;
use tokio_util::sync::CancellationToken;

use crate::net::http1::{self, Answer, CONNECTION_TIME, Place};
use crate::ops::report::{Reporter, Subject};
use crate::ops::telemetry::Log;
use crate::secret::SecretName;
use crate::store::{Key, NotRenewed};

/// How long a call waits for a renewal: several CAs may each take their time.
const PATIENCE: Duration = Duration::from_secs(60);

/// Answers calls on the admin socket. Clones answer the same.
#[derive(Clone, Debug)]
pub struct Admin {
    /// What is reported, and renewed.
    pub subject: Subject,
    pub log: Log,
}

impl Admin {
    /// Serves one connection.
    pub async fn serve(self, io: UnixStream, place: Place, stop: CancellationToken) {
        http1::serve(io, |request| self.answer(request), place, PATIENCE + CONNECTION_TIME, stop).await;
    }

    pub(super) async fn answer(&self, request: Request<Incoming>) -> Answer {
        let (status, body) = self.call(&request).await;
        http1::json(status, &body)
    }

    async fn call(&self, request: &Request<Incoming>) -> (StatusCode, Value) {
        match (request.method(), request.uri().path()) {
            (&Method::GET, "/v1/status") => match workload(request) {
                Some(name) => match self.subject.of(&name) {
                    Ok(reporter) => (StatusCode::OK, reporter.report()),
                    Err(error) => (StatusCode::NOT_FOUND, json!({ "error": error })),
                },
                None => (StatusCode::OK, self.subject.report()),
            },
            (&Method::POST, "/v1/renew") => match self.subject.of(&workload(request).unwrap_or_default()) {
                Ok(reporter) => renew(&reporter).await,
                Err(error) => (StatusCode::NOT_FOUND, json!({ "error": error })),
            },
            (&Method::GET, "/v1/log") => (StatusCode::OK, json!({ "level": self.log.get() })),
            (&Method::PUT, "/v1/log") => match self.log.set(parameter(request, "level")) {
                Ok(()) => {
                    let level = self.log.get();
                    tracing::warn!(level, "log level set");
                    (StatusCode::OK, json!({ "level": level }))
                }
                Err(error) => (StatusCode::BAD_REQUEST, json!({ "error": error })),
            },
            (method, path) => (
                StatusCode::NOT_FOUND,
                json!({ "error": format!("unknown call {method} {path}: this agent's admin socket does not have it") }),
            ),
        }
    }
}

async fn renew(reporter: &Reporter) -> (StatusCode, Value) {
    let Reporter { cache, workload, .. } = reporter;
    // The roots come with it.
    let key = Key { workload: *workload, name: SecretName::Workload };
    tracing::info!(workload = logged_name(&cache.name_of(*workload)), "renewal requested");
    match tokio::time::timeout(PATIENCE, cache.renew(&key)).await {
        Ok(Ok(())) => (StatusCode::OK, reporter.report()),
        Ok(Err(error)) => {
            let status = match error {
                NotRenewed::Failed(_) => StatusCode::BAD_GATEWAY,
                NotRenewed::NoSource | NotRenewed::Files => StatusCode::CONFLICT,
            };
            (status, json!({ "error": error.to_string() }))
        }
        Err(_) => {
            let error = format!("the CA has not answered within {PATIENCE:?}; the agent keeps retrying");
            (StatusCode::GATEWAY_TIMEOUT, json!({ "error": error }))
        }
    }
}

/// The name of a workload in logs; none of the only one.
fn logged_name(name: &str) -> Option<&str> {
    Some(name).filter(|name| !name.is_empty())
}

/// The workload that a client names.
pub(super) fn workload<B>(request: &Request<B>) -> Option<String> {
    let name = parameter(request, "workload");
    let name = percent_decode_str(name).decode_utf8_lossy();
    (!name.is_empty()).then(|| name.into_owned())
}

/// A parameter of the query, unescaped: log levels need no escapes.
fn parameter<'a, B>(request: &'a Request<B>, name: &str) -> &'a str {
    let pairs = request.uri().query().unwrap_or_default().split('&');
    let mut found = pairs.filter_map(|pair| pair.split_once('=')).filter(|(key, _)| *key == name);
    found.next().map_or("", |(_, value)| value)
}
