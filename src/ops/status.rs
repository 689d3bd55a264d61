//! Probes and metrics over HTTP: `/livez`, `/readyz`, `/metrics`.

use std::fmt::Write as _;
use std::sync::{Arc, OnceLock};
use std::time::SystemTime;

use http::{Method, Request, StatusCode, header};
use hyper::body::Incoming;
use tokio::net::TcpStream;
use tokio_util::sync::CancellationToken;

use crate::base::clock::Clock;
use crate::fs::pending::PendingOperations;
use crate::fs::watch::Watcher;
use crate::metrics::{Agent, ClusterCounts, Format, HangingPaths, Metrics};
use crate::net::http1::{self, Answer, CONNECTION_TIME, Place, text};
use crate::ops::host;
use crate::ops::telemetry::{Log, MissingLines};
use crate::source::kubernetes::Clusters;
use crate::source::kubernetes::cluster::ClusterStatus;
use crate::store::Cache;

/// Answers probes. Clones answer the same.
#[derive(Clone, Debug)]
pub struct Status {
    pub cache: Cache,
    pub metrics: Metrics,
    pub clock: Clock,
    pub started: SystemTime,
    pub watcher: Watcher,
    pub pending: PendingOperations,
    pub clusters: Arc<OnceLock<Clusters>>,
    pub log: Log,
    /// It listens on loopback, and refuses requests for other host names (DNS rebinding).
    pub is_local: bool,
    /// A draining agent is not ready.
    pub draining: CancellationToken,
}

impl Status {
    /// Serves one connection.
    pub async fn serve(self, io: TcpStream, place: Place) {
        let answer = |request| std::future::ready(self.answer(&request));
        http1::serve(io, answer, place, CONNECTION_TIME, self.draining.clone()).await;
    }

    pub(super) fn answer(&self, request: &Request<Incoming>) -> Answer {
        if self.is_local && !host::is_no_website(request) {
            let message = "this address is for this machine only: ask for localhost or an IP address; for requests by other \
                           names set --status-address to an address that is not loopback\n";
            return text(StatusCode::FORBIDDEN, message);
        }
        if !matches!(*request.method(), Method::GET | Method::HEAD) {
            return text(StatusCode::METHOD_NOT_ALLOWED, "this address serves GET only\n");
        }
        match request.uri().path() {
            "/livez" => text(StatusCode::OK, "alive\n"),
            "/readyz" => self.readiness(),
            "/metrics" => self.metrics(request),
            _ => text(StatusCode::NOT_FOUND, "not found: this address serves /livez, /readyz and /metrics\n"),
        }
    }

    fn metrics(&self, request: &Request<Incoming>) -> Answer {
        let accept = request.headers().get(header::ACCEPT).and_then(|accept| accept.to_str().ok());
        let format = Format::accepted(accept.unwrap_or_default());
        let (now, watched) = (self.clock.now(), self.watcher.count());
        let hanging = HangingPaths::of(&self.pending.hanging(), &self.clock);
        let MissingLines { blocked, suppressed } = self.log.missing_lines();
        let log_lines_dropped = [("blocked", blocked), ("suppressed", suppressed)];
        let clusters = self.clusters.get().map(Clusters::status).unwrap_or_default();
        let counts = |it: ClusterStatus| ClusterCounts {
            cluster: it.id.to_string(),
            // As far as is known.
            is_reachable: it.reachable_since.is_some() || it.calls == 0,
            names: it.names,
            calls: it.calls,
            errors: it.errors,
        };
        let clusters = clusters.into_iter().map(counts).collect();
        let agent = Agent { started: self.started, now, watched, hanging, log_lines_dropped, clusters };
        let body = self.metrics.encode(&self.cache, agent, format);
        http1::answer(StatusCode::OK, format.content_type(), body)
    }

    fn readiness(&self) -> Answer {
        if self.draining.is_cancelled() {
            return text(StatusCode::SERVICE_UNAVAILABLE, "the agent is stopping\n");
        }
        let health = self.cache.health(self.clock.now());
        if health.is_ready() {
            return text(StatusCode::OK, "ready\n");
        }
        let mut body = String::new();
        for one in health.missing {
            // Writing to a String does not fail.
            let _ = writeln!(body, "{one}");
        }
        text(StatusCode::SERVICE_UNAVAILABLE, &body)
    }
}
