//! gRPC's health checks: serving while the workload has what its sources are there to provide.

use std::sync::Arc;
use std::time::SystemTime;

use hyper::body::Incoming;
use prost::Message as _;
use tokio::sync::watch;
use tokio_stream::StreamExt as _;
use tonic::Status;

use super::others::{self, Responses, Step};
use super::reflection;
use super::sds::Peer;
use super::sds::message::Message;
use super::sds::requests::Requests;
use crate::base::budget::Charge;
use crate::base::limits;
use crate::proto::grpc::health::v1::health_check_response::ServingStatus;
use crate::proto::grpc::health::v1::{HealthCheckRequest, HealthCheckResponse};
use crate::secret::SecretName;
use crate::store::{Entry, Key};

pub(super) const SERVICE: &str = "grpc.health.v1.Health";

/// Answers a call of `method`.
pub(super) fn open(
    peer: Arc<Peer>,
    method: &str,
    request: http::Request<Incoming>,
) -> Result<Responses, Status> {
    let is_watch = match method {
        "Check" => false,
        "Watch" => true,
        _ => return Err(Status::unimplemented("the health service has Check and Watch")),
    };
    let charge = peer.charge(limits::STREAM_MEMORY)?;
    let requests = Requests::new(request.into_body(), Arc::clone(&peer));
    let call =
        HealthCall { peer, requests, is_watch, is_known: None, own: Vec::new(), sent: None, _charge: charge };
    Ok(others::responses(call, HealthCall::next))
}

/// One call.
struct HealthCall {
    peer: Arc<Peer>,
    requests: Requests<Incoming, HealthCheckRequest>,
    is_watch: bool,
    /// Whether the service that is asked for is served here; none before the request.
    is_known: Option<bool>,
    /// The workload's own secrets; none where no source provides them.
    own: Vec<watch::Receiver<Entry>>,
    sent: Option<ServingStatus>,
    _charge: Charge,
}

impl HealthCall {
    async fn next(mut self) -> Step<Self> {
        let service = Arc::clone(&self.peer.service);
        let status = tokio::select! {
            biased;
            () = service.draining.cancelled() => Err(service.stopping()),
            status = self.status() => status,
        };
        Ok(status?.map(|status| {
            self.sent = Some(status);
            let response = HealthCheckResponse { status: status.into() };
            (Message::of(response.encode_to_vec().into()), self)
        }))
    }

    /// The next status to send.
    async fn status(&mut self) -> Result<Option<ServingStatus>, Status> {
        let is_known = match self.is_known {
            Some(is_known) => is_known,
            None => self.begin().await?,
        };
        if self.sent.is_some() && !self.is_watch {
            return Ok(None);
        }
        if !is_known {
            return match (self.is_watch, self.sent) {
                (false, _) => Err(Status::not_found("this socket does not serve that service")),
                (true, None) => Ok(Some(ServingStatus::ServiceUnknown)),
                (true, Some(_)) => std::future::pending().await,
            };
        }
        loop {
            let now = self.peer.service.clock.now();
            let status = match self.own.iter_mut().all(|own| own.borrow_and_update().valid_at(now).is_ok()) {
                true => ServingStatus::Serving,
                false => ServingStatus::NotServing,
            };
            if self.sent != Some(status) {
                return Ok(Some(status));
            }
            self.changed(now).await;
        }
    }

    /// Reads the request. Returns whether its service is served here.
    async fn begin(&mut self) -> Result<bool, Status> {
        let missing = || Err(Status::invalid_argument("the call has no request"));
        let request = self.requests.next().await.unwrap_or_else(missing)?;
        let is_known = request.service.is_empty() || reflection::is_served(&request.service);
        let service = &self.peer.service;
        let keys = SecretName::OWN.map(|name| Key { workload: service.workload, name });
        self.own = keys.iter().filter_map(|key| service.cache.watch(key)).collect();
        self.is_known = Some(is_known);
        Ok(is_known)
    }

    /// Returns when a secret has changed, or expires.
    async fn changed(&mut self, now: SystemTime) {
        let ends = self.own.iter().filter_map(|own| own.borrow().not_after());
        let next_end = ends.filter(|end| *end > now).min();
        let clock = &self.peer.service.clock;
        let [first, second] = [0, 1].map(|index| self.own.get(index).cloned());
        tokio::select! {
            () = changed(first) => {}
            () = changed(second) => {}
            () = clock.sleep_until_any(next_end) => {}
        }
    }
}

/// Returns when the entry changes; never if there is none.
async fn changed(own: Option<watch::Receiver<Entry>>) {
    let Some(mut own) = own else { return std::future::pending().await };
    // It fails when the workload was removed, which ends the call.
    if own.changed().await.is_err() {
        std::future::pending().await
    }
}
