//! The secret discovery service, for Envoy.

pub mod dialect;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
pub mod session;
mod stream;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use tokio_stream::{StreamExt as _, StreamMap};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, Streaming};

use self::dialect::{Delta, StateOfTheWorld};
use self::stream::SecretStream;
use crate::base::clock::Clock;
use crate::base::limits;
use crate::base::text;
use crate::metrics::{ByName, Metrics};
use crate::proto::SECRET_TYPE_URL;
use crate::proto::envoy::service::discovery::v3::{
    DeltaDiscoveryRequest, DiscoveryRequest, DiscoveryResponse,
};
use crate::proto::envoy::service::secret::v3::secret_discovery_service_server::SecretDiscoveryService;
use crate::secret::{Resource, SecretName};
use crate::store::health::Components;
use crate::store::{Cache, Entry, Key, Workload};

/// How long `FetchSecrets` waits for secrets that are not available yet, if the client sets no deadline.
const FETCH_PATIENCE: Duration = Duration::from_secs(5);
/// The longest that it waits, whatever the client's deadline.
const LONGEST_PATIENCE: Duration = Duration::from_secs(600);
/// How many problems of a request are reported; they are sent to the client in a header.
const REPORTED: usize = 3;
/// The part of a client's deadline that is reserved for sending the response.
const RESPONSE_TIME: Duration = Duration::from_millis(100);

/// Serves the secrets of one workload. Clones share everything: there is one for each stream.
#[derive(Clone, Debug)]
pub struct SecretDiscovery(Arc<Service>);

#[derive(Debug)]
struct Service {
    cache: Cache,
    workload: Workload,
    /// The workload's name, for metrics.
    workload_name: Arc<str>,
    components: Components,
    metrics: Metrics,
    clock: Clock,
    /// Ends every stream: the agent stops, or the workload was removed.
    draining: CancellationToken,
}

impl SecretDiscovery {
    /// Serves the secrets of `workload` from `cache` until `draining` is cancelled.
    pub fn new(
        cache: Cache,
        workload: Workload,
        metrics: Metrics,
        clock: Clock,
        draining: CancellationToken,
    ) -> Self {
        let (workload_name, components) = (cache.name_of(workload), cache.components(workload));
        Self(Arc::new(Service { cache, workload, workload_name, components, metrics, clock, draining }))
    }
}

impl Service {
    /// The last good value of an entry, unless it has expired. Envoy accepts an expired certificate without an error and opens
    /// its listeners, where every peer then rejects it; without a certificate it waits. A value is never removed from an
    /// Envoy that has it: that would close connections that are still open.
    fn sendable<'a>(&self, entry: &'a Entry) -> Result<&'a Resource, String> {
        entry.valid_at(self.clock.now()).map(|good| &good.resource)
    }

    fn key(&self, name: &SecretName) -> Key {
        Key { workload: self.workload, name: name.clone() }
    }

    fn label(&self, name: &str) -> ByName {
        ByName { workload: Arc::clone(&self.workload_name), name: name.to_owned() }
    }

    /// Counts and reports a refusal.
    fn refuse(&self, label: &'static str, reason: &dyn fmt::Display) {
        self.metrics.refuse(label);
        self.components.report_refusal(reason);
    }

    /// The status that streams end with when `draining` is cancelled.
    fn stopping(&self) -> Status {
        Status::unavailable(if self.cache.has(self.workload) {
            "the agent is stopping"
        } else {
            "the agent no longer serves this workload"
        })
    }

    /// Responds with the available secrets. If there are none, waits for at most `patience`.
    async fn fetch(&self, names: Vec<String>, patience: Duration) -> Result<DiscoveryResponse, Status> {
        let mut waiting = StreamMap::new();
        let mut subscriptions = Vec::new();
        let mut problems = BTreeMap::new();
        for text in names {
            match text.parse::<SecretName>() {
                Ok(name) => match self.cache.subscribe(&self.key(&name)) {
                    Ok(subscription) => {
                        problems.insert(text, "not available yet".to_owned());
                        waiting.insert(name, subscription.changes());
                        subscriptions.push(subscription);
                    }
                    Err(error) => {
                        self.refuse(error.label(), &error);
                        problems.insert(text, error.to_string());
                    }
                },
                Err(unknown) => {
                    self.refuse("unknown_name", &unknown);
                    problems.insert(text, unknown.to_string());
                }
            }
        }
        let is_unknown = waiting.is_empty();
        let mut found: HashMap<SecretName, Resource> = HashMap::new();
        let deadline = Instant::now() + patience;
        let mut undecided: BTreeSet<_> = waiting.keys().cloned().collect();
        // An available secret does not wait for a name that fails. If none is available, a CA may still respond, but a file is
        // unlikely to be repaired meanwhile.
        let may_come = |waiting: &StreamMap<SecretName, _>| !waiting.keys().all(SecretName::is_on_demand);
        while !undecided.is_empty() || (found.is_empty() && may_come(&waiting)) {
            let next = tokio::time::timeout_at(deadline, waiting.next()).await;
            let Ok(Some((name, entry))) = next else { break };
            match self.sendable(&entry) {
                Ok(resource) => {
                    problems.remove(name.as_str());
                    undecided.remove(&name);
                    waiting.remove(&name);
                    found.insert(name, resource.clone());
                }
                Err(reason) => {
                    if entry.good.is_some() || entry.failure().is_some() {
                        undecided.remove(&name);
                    }
                    problems.insert(name.to_string(), reason);
                }
            }
        }
        if found.is_empty() {
            let mut reported: Vec<_> =
                problems.iter().take(REPORTED).map(|(name, reason)| no_secret(name, reason)).collect();
            if problems.len() > REPORTED {
                reported.push(format!("and {} more", problems.len() - REPORTED));
            }
            let message = match reported.as_slice() {
                [] => "the request has no resource names".to_owned(),
                reported => reported.join("; "),
            };
            return Err(match (is_unknown, problems.is_empty()) {
                (_, true) => Status::invalid_argument(message),
                (true, _) => Status::not_found(message),
                (false, _) => Status::unavailable(message),
            });
        }
        let mut found: Vec<_> = found.into_iter().collect();
        found.sort_by(|(one, _), (other, _)| one.cmp(other));
        for (name, _) in &found {
            self.metrics.pushes.get_or_create(&self.label(name.as_str())).inc();
        }
        let versions = found.iter().map(|(name, resource)| (name.as_str(), &resource.version));
        let version_info = dialect::combined(versions);
        let resources = found.into_iter().map(|(_, resource)| resource.any).collect();
        Ok(DiscoveryResponse {
            version_info,
            resources,
            type_url: SECRET_TYPE_URL.to_owned(),
            nonce: String::new(),
            control_plane: dialect::control_plane(),
        })
    }
}

#[tonic::async_trait]
impl SecretDiscoveryService for SecretDiscovery {
    type DeltaSecretsStream = SecretStream<Delta, Streaming<DeltaDiscoveryRequest>>;
    type StreamSecretsStream = SecretStream<StateOfTheWorld, Streaming<DiscoveryRequest>>;

    async fn delta_secrets(
        &self,
        request: Request<Streaming<DeltaDiscoveryRequest>>,
    ) -> Result<Response<Self::DeltaSecretsStream>, Status> {
        Ok(Response::new(SecretStream::new(Arc::clone(&self.0), request.into_inner())))
    }

    async fn stream_secrets(
        &self,
        request: Request<Streaming<DiscoveryRequest>>,
    ) -> Result<Response<Self::StreamSecretsStream>, Status> {
        Ok(Response::new(SecretStream::new(Arc::clone(&self.0), request.into_inner())))
    }

    async fn fetch_secrets(
        &self,
        request: Request<DiscoveryRequest>,
    ) -> Result<Response<DiscoveryResponse>, Status> {
        let patience = client_timeout(request.metadata())
            .map_or(FETCH_PATIENCE, |timeout| timeout.saturating_sub(RESPONSE_TIME).min(LONGEST_PATIENCE));
        let request = request.into_inner();
        let refuse = |refusal: dialect::Refusal| {
            self.0.refuse(refusal.label(), &refusal);
            Status::from(refusal)
        };
        dialect::check_type(&request.type_url).map_err(refuse)?;
        if request.resource_names.len() > limits::NAMES_PER_STREAM {
            return Err(refuse(dialect::Refusal::TooManyNames(request.resource_names.len())));
        }
        tokio::select! {
            response = self.0.fetch(request.resource_names, patience) => response.map(Response::new),
            () = self.0.draining.cancelled() => Err(self.0.stopping()),
        }
    }
}

/// Short enough for a header, even several times.
fn no_secret(name: &str, reason: &str) -> String {
    format!("no secret {:?}: {}", text::sanitize_for_log(name), text::sanitize_for_log(reason))
}

/// The client's deadline, from the header of the gRPC protocol: digits and a unit.
fn client_timeout(metadata: &tonic::metadata::MetadataMap) -> Option<Duration> {
    let text = metadata.get("grpc-timeout")?.to_str().ok()?;
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    let value: u64 = digits.parse().ok()?;
    match unit {
        "H" => Some(Duration::from_secs(value.saturating_mul(3600))),
        "M" => Some(Duration::from_secs(value.saturating_mul(60))),
        "S" => Some(Duration::from_secs(value)),
        "m" => Some(Duration::from_millis(value)),
        "u" => Some(Duration::from_micros(value)),
        "n" => Some(Duration::from_nanos(value)),
        _ => None,
    }
}
