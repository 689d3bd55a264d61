//! The clusters that the agent reads: its own, and remote ones that come and go.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::watch;

use super::cluster::{Cluster, ClusterStatus};
use crate::kube::ClusterId;

/// The clusters by their names. Clones are the same.
#[derive(Clone, Debug)]
pub struct Clusters {
    local: Arc<Cluster>,
    remote: watch::Sender<Remote>,
    /// Whether every place that may have remote clusters has been looked at.
    is_complete: Arc<AtomicBool>,
}

/// Why there is no cluster for a client.
#[derive(Debug)]
pub(super) struct NoCluster {
    pub(super) reason: String,
    /// It may become known soon.
    pub(super) is_open: bool,
}

type Remote = Arc<BTreeMap<ClusterId, Arc<Cluster>>>;

impl Clusters {
    /// `local` is the agent's own, which is also the config cluster.
    pub fn new(local: Arc<Cluster>) -> Self {
        Self { local, remote: watch::Sender::default(), is_complete: Arc::default() }
    }

    pub fn local(&self) -> &Arc<Cluster> {
        &self.local
    }

    pub(super) fn changes(&self) -> watch::Receiver<Remote> {
        self.remote.subscribe()
    }

    pub(super) fn get(&self, id: &ClusterId) -> Option<Arc<Cluster>> {
        if *id == self.local.id {
            return Some(Arc::clone(&self.local));
        }
        self.remote.borrow().get(id).cloned()
    }

    /// The cluster that a client says it runs in, or the agent's own if it does not say.
    pub(super) fn of_client(&self, cluster: Option<&Arc<str>>) -> Result<Arc<Cluster>, NoCluster> {
        let Some(id) = cluster else { return Ok(Arc::clone(&self.local)) };
        self.get(&ClusterId(Arc::clone(id))).ok_or_else(|| {
            let known: Vec<_> = self.remote.borrow().keys().map(ToString::to_string).collect();
            let reason = format!(
                "the client says it runs in cluster {:?}, which is neither the agent's own ({}; see --cluster-id) nor one of \
                 the remote clusters ({})",
                crate::base::text::sanitize_for_log(id),
                self.local.id,
                if known.is_empty() { "there are none".to_owned() } else { known.join(", ") }
            );
            NoCluster { reason, is_open: !self.is_complete.load(Ordering::Relaxed) }
        })
    }

    /// All remote clusters are known that are configured now.
    pub(super) fn complete(&self) {
        if !self.is_complete.swap(true, Ordering::Relaxed) {
            // Names that waited for that look again.
            self.remote.send_modify(|_| {});
        }
    }

    /// Adds a remote cluster, or replaces it.
    pub fn add(&self, cluster: Arc<Cluster>) {
        self.remote.send_modify(|remote| drop(Arc::make_mut(remote).insert(cluster.id.clone(), cluster)));
    }

    /// Removes a remote cluster. What it delivered is served until no stream asks for it.
    pub fn remove(&self, id: &ClusterId) {
        self.remote.send_modify(|remote| drop(Arc::make_mut(remote).remove(id)));
    }

    /// The local cluster first, then the remote ones by name.
    pub fn status(&self) -> Vec<ClusterStatus> {
        let remote = Arc::clone(&self.remote.borrow());
        std::iter::once(&self.local).chain(remote.values()).map(|cluster| cluster.status()).collect()
    }
}
