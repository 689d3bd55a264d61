//! The workloads that the agent serves, added and removed while it runs.

use std::collections::HashMap;
use std::future::Future;

use tokio::task::{JoinError, JoinSet};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::base::clock::Clock;
use crate::ca::failover::Failover;
use crate::export::output::{Output, OutputSettings};
use crate::fs::pending::PendingOperations;
use crate::fs::watch::Watcher;
use crate::metrics::{ByName, Metrics};
use crate::serve::sds::SecretDiscovery;
use crate::source::crl::{CrlFile, CrlSource};
use crate::source::files::named::NamedFiles;
use crate::source::files::{self, FileSource};
use crate::source::issuer::{IssuanceQueue, Issuer, IssuerSettings};
use crate::store::history::History;
use crate::store::{Cache, Workload};

/// What all workloads share. Clones share the same.
#[derive(Clone, Debug)]
pub struct Shared {
    pub cache: Cache,
    pub metrics: Metrics,
    pub history: History,
    pub watcher: Watcher,
    pub pending: PendingOperations,
    pub clock: Clock,
    /// Bounds how many certificates are requested at a time, whichever workloads they are for.
    pub queue: IssuanceQueue,
    /// Work that is waited for when the agent stops.
    pub calls: TaskTracker,
    pub stop: CancellationToken,
}

impl Shared {
    pub fn new(clock: Clock) -> Self {
        Self {
            cache: Cache::default(),
            metrics: Metrics::default(),
            history: History::default(),
            watcher: Watcher::new(),
            pending: PendingOperations::default(),
            clock,
            queue: IssuanceQueue::default(),
            calls: TaskTracker::new(),
            stop: CancellationToken::new(),
        }
    }
}

/// What makes up one workload.
#[derive(Debug)]
pub struct Plan {
    pub files: files::FileSettings,
    pub crl: CrlFile,
    /// The CAs that sign; empty where mounted files are the only source.
    pub cas: Failover,
    pub issuer: IssuerSettings,
    pub output: Option<OutputSettings>,
}

/// A workload that runs.
#[derive(Clone, Debug)]
pub struct Running {
    pub workload: Workload,
    /// Cancelled when the workload is removed or the agent stops. Ends the workload's tasks and streams.
    pub ended: CancellationToken,
}

/// The workloads and their tasks.
#[derive(Debug)]
pub struct Workloads {
    shared: Shared,
    running: HashMap<Workload, CancellationToken>,
    /// None: the task ended as it should. Some: it ended by itself, although its workload exists.
    tasks: JoinSet<Option<()>>,
}

impl Workloads {
    pub fn new(shared: Shared) -> Self {
        Self { shared, running: HashMap::new(), tasks: JoinSet::new() }
    }

    /// Adds a workload, which has no secrets yet. `name` is for people and metrics; empty for a sidecar's only one.
    pub fn add(&mut self, name: &str) -> Running {
        let workload = self.shared.cache.add_workload(name);
        let ended = self.shared.stop.child_token();
        self.running.insert(workload, ended.clone());
        Running { workload, ended }
    }

    /// Starts the sources and exports of a workload. What is mounted, or kept from an earlier run, is published before
    /// this returns.
    pub async fn start(&mut self, running: &Running, plan: Plan) {
        let Running { workload, ended } = running;
        let Shared { cache, metrics, history, watcher, pending, clock, queue, .. } = self.shared.clone();
        let debounce = plan.files.debounce;
        let mut crls =
            CrlSource::new(plan.crl, debounce, &cache, *workload, &watcher, clock.clone(), metrics.clone());
        crls.amend_once();
        let named = plan.files.clone();
        let mut files =
            FileSource::new(plan.files, &cache, *workload, watcher.clone(), clock.clone(), metrics.clone());
        files.publish_once();
        self.spawn(ended, files.run());
        let watcher_of_names = watcher.apart();
        let names = NamedFiles::start(
            named,
            &cache,
            *workload,
            watcher_of_names,
            pending,
            clock.clone(),
            metrics.clone(),
        );
        let names = names.await;
        self.spawn(ended, names.run());
        self.spawn(ended, crls.run());
        self.spawn(ended, history.follow(cache.clone(), *workload, clock.clone()));
        if !plan.cas.is_empty() {
            let (clock, metrics) = (clock.clone(), metrics.clone());
            let mut issuer = Issuer::new(plan.cas, plan.issuer, &cache, *workload, clock, metrics, queue);
            issuer.restore().await;
            self.spawn(ended, issuer.run());
        }
        if let Some(settings) = plan.output {
            // After the sources, whose entries it follows.
            let output = Output::new(settings, &cache, *workload, &watcher, clock, metrics);
            self.spawn_draining(output.run(ended.clone()));
        }
    }

    /// The service that serves a workload's secrets.
    pub fn service(&self, running: &Running) -> SecretDiscovery {
        let Shared { cache, metrics, clock, .. } = self.shared.clone();
        SecretDiscovery::new(cache, running.workload, metrics, clock, running.ended.clone())
    }

    /// Runs `task` until the workload is removed or the agent stops.
    pub fn spawn(&mut self, ended: &CancellationToken, task: impl Future<Output = ()> + Send + 'static) {
        let ended = ended.clone();
        self.tasks.spawn(async move {
            // The token first: a source of a removed workload finds its secrets missing, and must not request new ones.
            tokio::select! {
                biased;
                () = ended.cancelled() => None,
                () = task => Some(()),
            }
        });
    }

    /// Runs `task`, which ends by itself when its workload is removed or the agent stops. The agent waits for it when
    /// it stops, for as long as open calls have.
    pub fn spawn_draining(&mut self, task: impl Future<Output = ()> + Send + 'static) {
        self.tasks.spawn(self.shared.calls.track_future(async {
            task.await;
            None
        }));
    }

    /// Removes a workload: its secrets are dropped, its streams end, its tasks stop, its metrics disappear.
    pub fn remove(&mut self, workload: Workload) {
        let Shared { cache, metrics, history, .. } = &self.shared;
        let Some(ended) = self.running.remove(&workload) else { return };
        for one in cache.snapshot_of(workload) {
            metrics.forget(&ByName::of(cache, &one.key));
        }
        cache.remove_workload(workload);
        ended.cancel();
        history.forget(workload);
    }

    /// Returns when a task has panicked, or ended although its workload still exists.
    pub async fn failed(&mut self) -> Result<(), JoinError> {
        loop {
            match self.tasks.join_next().await {
                Some(Ok(None)) => {}
                Some(Ok(Some(()))) => return Ok(()),
                Some(Err(error)) => return Err(error),
                None => std::future::pending().await,
            }
        }
    }
}

#[cfg(test)]
mod tests;
