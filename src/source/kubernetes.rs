//! Secrets and ConfigMaps of Kubernetes, for the names that streams ask for: `kubernetes://`, `sds://`,
//! `kubernetes-gateway://`, `configmap://`, and bare names.
//!
//! One task owns all of it. It takes the demand, has objects followed, asks for rights, and publishes; calls to API servers
//! are other tasks, which report to it.

mod access;
pub mod cluster;
pub mod clusters;
mod content;
mod follow;
mod group;
pub mod kept;
mod names;
mod objects;
pub mod remote;
mod served;
#[cfg(test)]
mod testing;

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::Instant;

pub use self::access::Authorize;
pub use self::clusters::Clusters;
use self::names::Names;
use self::objects::Objects;
use crate::base::clock::{Clock, until};
use crate::kube::Account;
use crate::metrics::Metrics;
use crate::secret::{NameKind, SecretName};
use crate::store::{AlreadyTaken, Cache, Demand, Event, Scope, Workload};

/// How many names without streams go when another one waits for room: mostly many wait.
const ROOM: usize = 100;
/// How often names without a value get the reason why an API server does not answer.
const OUTAGE_CHECK: Duration = Duration::from_secs(1);

/// What the source needs to know of its workload.
#[derive(Clone, Debug, Default)]
pub struct KubernetesSettings {
    pub authorize: Authorize,
    /// The workload's own namespace; none if it follows from its identity.
    pub namespace: Option<Arc<str>>,
    /// The workload's service account; none if it follows from its certificate.
    pub account: Option<Account>,
}

/// Serves Secrets and ConfigMaps of Kubernetes to one workload.
#[derive(Debug)]
pub struct KubernetesSource {
    settings: KubernetesSettings,
    clusters: Clusters,
    cache: Cache,
    workload: Workload,
    demand: Demand,
    clock: Clock,
    metrics: Metrics,
}

impl KubernetesSource {
    /// A source of the names that streams of `workload` ask for.
    pub fn new(
        settings: KubernetesSettings,
        clusters: Clusters,
        cache: &Cache,
        workload: Workload,
        clock: Clock,
        metrics: Metrics,
    ) -> Result<Self, AlreadyTaken> {
        let demand =
            cache.demand(NameKind::Kubernetes, Scope::Workload(workload), |_: &SecretName| Ok(()))?;
        Ok(Self { settings, clusters, cache: cache.clone(), workload, demand, clock, metrics })
    }

    /// Serves the names that streams ask for. Does not return.
    pub async fn run(self) {
        let Self { settings, clusters, cache, workload, mut demand, clock, metrics } = self;
        let (reports, mut reported) = mpsc::unbounded_channel();
        let mut changes = clusters.changes();
        let room = cache.clone();
        let mut names = Names {
            settings,
            clusters,
            cache,
            workload,
            clock: clock.clone(),
            metrics,
            by_key: HashMap::new(),
            objects: Objects::new(reports),
            reviews: JoinSet::new(),
            lingering: VecDeque::new(),
            due: BTreeSet::new(),
            unresolved: BTreeSet::new(),
        };
        let mut outage_check = Instant::now();
        loop {
            let due = names.due.first().map(|(at, _)| *at);
            let forget = names.objects.next_to_forget();
            let drop_next = names.lingering.front().map(|(until, _)| *until);
            tokio::select! {
                event = demand.next() => match event {
                    Some(Event::Wanted(key)) => names.add(key),
                    Some(Event::Asked(key)) => names.ask_again(&key),
                    Some(Event::Deserted(key)) => names.desert(key),
                    // The workload was removed.
                    None => return std::future::pending().await,
                },
                Some(report) = reported.recv() => names.take(report),
                Some(review) = names.reviews.join_next() => names.reviewed(review),
                () = until(drop_next), if drop_next.is_some() => names.drop_deserted(0),
                () = room.room_wanted(), if drop_next.is_some() => names.drop_deserted(ROOM),
                Ok(()) = changes.changed() => names.retarget(),
                () = clock.sleep_until_any(due), if due.is_some() => names.look_again(),
                () = until(forget), if forget.is_some() => names.objects.forget(),
                () = until(Some(outage_check)), if !names.unresolved.is_empty() => {
                    names.report_outages();
                    outage_check = Instant::now() + OUTAGE_CHECK;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
