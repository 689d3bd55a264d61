//! The secret discovery service, for Envoy.

mod bearer;
pub mod call;
pub mod dialect;
mod fetch;
mod followed;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
pub mod message;
pub mod naming;
pub(super) mod requests;
pub mod session;
mod stream;
pub mod turns;
pub mod version;

use std::fmt;
use std::sync::{Arc, OnceLock};

use tokio_util::sync::CancellationToken;
use tonic::Status;

pub use self::bearer::Bearer;
pub use self::call::Calls;
pub use self::naming::{Naming, SpiffeValidator};
use self::turns::Turns;
use crate::base::budget::{Budget, Charge, Full, Share};
use crate::base::clock::Clock;
use crate::base::limits;
use crate::metrics::Metrics;
use crate::secret::{BadName, Resource};
use crate::store::health::Components;
use crate::store::{Cache, Connection, Entry, Key, Workload};

/// Serves the secrets of one workload. Clones share everything.
#[derive(Clone, Debug)]
pub struct SecretDiscovery(Arc<Service>);

/// The memory and time that the clients of all workloads share. Clones are the same.
#[derive(Clone, Debug)]
pub struct Capacity {
    budget: Budget,
    turns: Turns,
}

impl Default for Capacity {
    fn default() -> Self {
        Self { budget: Budget::new(limits::CLIENT_MEMORY), turns: Turns::default() }
    }
}

#[derive(Debug)]
pub(super) struct Service {
    pub(super) cache: Cache,
    pub(super) workload: Workload,
    components: Components,
    metrics: Metrics,
    pub(super) clock: Clock,
    budget: Budget,
    turns: Turns,
    naming: OnceLock<Naming>,
    bearer: OnceLock<Box<Bearer>>,
    /// Ends every stream: the agent stops, or the workload was removed.
    pub(super) draining: CancellationToken,
}

/// One connection.
#[derive(Debug)]
pub(super) struct Peer {
    pub(super) service: Arc<Service>,
    pub(super) connection: Connection,
    share: Share,
    /// The memory of the connection itself.
    _charge: Charge,
}

impl SecretDiscovery {
    /// Serves the secrets of `workload` from `cache` until `draining` is cancelled.
    pub fn new(
        cache: Cache,
        workload: Workload,
        metrics: Metrics,
        clock: Clock,
        draining: CancellationToken,
        Capacity { budget, turns }: Capacity,
    ) -> Self {
        let components = cache.components(workload);
        let (naming, bearer) = (OnceLock::new(), OnceLock::new());
        let service =
            Service { cache, workload, components, metrics, clock, budget, turns, naming, bearer, draining };
        Self(Arc::new(service))
    }

    /// Which names clients may use, beside those that every agent serves. Set once, before the first connection.
    pub fn set_naming(&self, naming: Naming) {
        let _ = self.0.naming.set(naming);
    }

    /// Takes the tokens that clients bring. Set once, before the first connection.
    pub fn set_bearer(&self, bearer: Bearer) {
        let _ = self.0.bearer.set(Box::new(bearer));
    }

    /// Serves a new connection; none if there is no memory for another one, which is counted.
    pub fn connection(&self) -> Option<Calls> {
        let share = self.0.budget.share();
        let charge = share.charge(limits::CONNECTION_MEMORY);
        let charge = charge.inspect_err(|full| self.0.refuse("no_memory", full)).ok()?;
        let service = Arc::clone(&self.0);
        Some(Calls(Arc::new(Peer { service, connection: Connection::distinct(), share, _charge: charge })))
    }
}

impl Service {
    /// The last good value of an entry, unless it has expired. Envoy accepts an expired certificate without an error and opens
    /// its listeners, where every peer then rejects it; without a certificate it waits. A value is never removed from an
    /// Envoy that has it: that would close connections that are still open.
    fn sendable<'a>(&self, entry: &'a Entry) -> Result<&'a Resource, String> {
        entry.valid_at(self.clock.now()).map(|good| &good.resource)
    }

    /// The key of the name `text`, for a client that says it runs in `cluster`.
    fn key(&self, text: &Arc<str>, cluster: Option<&Arc<str>>) -> Result<Key, BadName> {
        let name = self.naming().name(text, cluster)?;
        Ok(Key { workload: self.workload, name })
    }

    fn naming(&self) -> Naming {
        self.naming.get().copied().unwrap_or_default()
    }

    /// Counts and reports a refusal.
    pub(super) fn refuse(&self, label: &'static str, reason: &dyn fmt::Display) {
        self.metrics.refuse(label);
        self.components.report_refusal(reason);
    }

    /// The status that streams end with when `draining` is cancelled.
    pub(super) fn stopping(&self) -> Status {
        Status::unavailable(if self.cache.has(self.workload) {
            "the agent is stopping"
        } else {
            "the agent no longer serves this workload"
        })
    }
}

impl Peer {
    /// Takes up memory for this connection; a refusal is counted.
    pub(super) fn charge(&self, bytes: usize) -> Result<Charge, Status> {
        self.share.charge(bytes).map_err(|full| self.refuse(full))
    }

    /// Counts a refusal of memory.
    fn refuse(&self, full: Full) -> Status {
        self.service.refuse("no_memory", &full);
        Status::resource_exhausted(full.to_string())
    }
}
