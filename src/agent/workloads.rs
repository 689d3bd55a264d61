//! The workloads that the agent serves, added and removed while it runs.

use std::collections::HashMap;
use std::future::{Future, poll_fn};
use std::io;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::Poll;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::task::{JoinError, JoinSet};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::Instrument as _;

use super::kubernetes::KubernetesPlan;
use super::mounted;
use crate::base::clock::{Clock, millis};
use crate::ca::failover::Failover;
use crate::export::output::{OutputSettings, Outputs};
use crate::fs::disk::Disk;
use crate::fs::pending::PendingOperations;
use crate::fs::watch::Watcher;
use crate::metrics::Metrics;
use crate::serve::sds::{Capacity, SecretDiscovery};
use crate::source::crl::{CrlFile, CrlSource};
use crate::source::files::named::NamedFiles;
use crate::source::files::{self, FederatedFile, FileSettings, FileSource};
use crate::source::issuer::{IssuanceQueue, Issuer, IssuerContext, IssuerSettings};
use crate::source::kubernetes::{Clusters, KubernetesSource};
use crate::source::mint::{MintSettings, MintSource};
use crate::source::spiffe::{SpiffeSettings, SpiffeSource};
use crate::store::history::History;
use crate::store::{Cache, Scope, Workload};

/// How long the start waits for what is mounted, so that no CA is called for what files provide.
const FIRST_LOOK: Duration = Duration::from_secs(2);

/// What all workloads share. Clones share the same.
#[derive(Clone, Debug)]
pub struct Shared {
    pub cache: Cache,
    pub metrics: Metrics,
    pub history: History,
    pub watcher: Watcher,
    pub pending: PendingOperations,
    pub disk: Disk,
    /// Set at the start, where Secrets of Kubernetes are served.
    pub clusters: Arc<OnceLock<Clusters>>,
    pub clock: Clock,
    /// Bounds how many certificates are requested at a time, whichever workloads they are for.
    pub queue: IssuanceQueue,
    /// Bounds what clients may cost.
    pub capacity: Capacity,
    /// Work that is waited for when the agent stops.
    pub calls: TaskTracker,
    pub stop: CancellationToken,
}

impl Shared {
    pub fn new(clock: Clock) -> Self {
        let pending = PendingOperations::default();
        Self {
            cache: Cache::default(),
            metrics: Metrics::default(),
            history: History::default(),
            watcher: Watcher::new(pending.clone()),
            disk: Disk::new(pending.clone(), clock.clone()),
            pending,
            clusters: Arc::default(),
            clock,
            queue: IssuanceQueue::default(),
            capacity: Capacity::default(),
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
    /// The Workload API that delivers the identity instead.
    pub spiffe: Option<Box<SpiffeSettings>>,
    /// Certificates for hosts.
    pub mint: Option<MintSettings>,
    pub kubernetes: Option<KubernetesPlan>,
    pub output: Option<OutputSettings>,
}

impl Plan {
    /// An agent without any of them serves only what streams name.
    fn has_own(&self) -> bool {
        !self.files.mounted.is_empty() || !self.cas.is_empty() || self.spiffe.is_some()
    }
}

/// A workload that runs.
#[derive(Clone, Debug)]
pub struct Running {
    pub workload: Workload,
    /// Cancelled when the workload is removed or the agent stops. Ends the workload's tasks and streams.
    pub ended: CancellationToken,
    /// What still writes files for other programs after that.
    pub draining: TaskTracker,
}

/// The tasks of a workload beside those that follow files.
struct Tasks {
    /// They don't end by themselves.
    own: Vec<Task>,
    /// They end after the workload.
    draining: Vec<Task>,
}

type Task = Pin<Box<dyn Future<Output = ()> + Send>>;

impl Tasks {
    /// What is kept from an earlier run is published before this returns, unless its file system does not answer.
    async fn of(plan: Plan, running: &Running, shared: &Shared) -> Self {
        let Running { workload, ended, .. } = running;
        let Shared { cache, metrics, history, watcher, disk, clock, queue, .. } = shared.clone();
        let (mut own, mut draining) = (Vec::<Task>::new(), Vec::<Task>::new());
        if plan.has_own() {
            own.push(Box::pin(history.follow(cache.clone(), *workload, clock.clone())));
        }
        if let Some(KubernetesPlan { clusters, settings }) = plan.kubernetes {
            let (clock, metrics) = (clock.clone(), metrics.clone());
            match KubernetesSource::new(settings, clusters, &cache, *workload, clock, metrics) {
                Ok(source) => own.push(Box::pin(source.run())),
                Err(error) => tracing::error!(%error, "Secrets of Kubernetes are not served"),
            }
        }
        if !plan.cas.is_empty() {
            let disk = disk.within(plan.issuer.timeout);
            let context = IssuerContext { clock: clock.clone(), metrics: metrics.clone(), queue, disk };
            if let Some(settings) = plan.mint {
                let (cas, issuer) = (plan.cas.apart(), plan.issuer.clone());
                let hosts = MintSource::new(settings, cas, issuer, &cache, *workload, context.clone());
                own.push(Box::pin(hosts.run()));
            }
            let mut issuer = Issuer::new(plan.cas, plan.issuer, &cache, *workload, context);
            issuer.restore().await;
            own.push(Box::pin(issuer.run()));
        }
        if let Some(settings) = plan.spiffe {
            let (clock, metrics) = (clock.clone(), metrics.clone());
            let source = SpiffeSource::new(*settings, &cache, *workload, &disk, clock, metrics);
            own.push(Box::pin(async { match source.run().await {} }));
        }
        if let Some(settings) = plan.output {
            // After the sources, whose entries it follows.
            let (outputs, writers) =
                Outputs::new(settings, &cache, *workload, &watcher, disk, clock, metrics);
            draining.push(Box::pin(outputs.run(ended.clone())));
            for writer in writers {
                draining.push(Box::pin(writer.run(ended.clone())));
            }
        }
        Self { own, draining }
    }
}

/// The workloads and their tasks.
#[derive(Debug)]
pub struct Workloads {
    shared: Shared,
    running: HashMap<Workload, CancellationToken>,
    /// The thread for mounted files. It starts with the first workload: the process may confine itself before that.
    mounted: Option<Handle>,
    /// None: the task ended as it should. Some: it ended by itself, although its workload exists.
    tasks: JoinSet<Option<()>>,
}

impl Workloads {
    pub fn new(shared: Shared) -> Self {
        Self { shared, running: HashMap::new(), mounted: None, tasks: JoinSet::new() }
    }

    /// Adds a workload, which has no secrets yet. `name` is for people and metrics; empty for a sidecar's only one.
    pub fn add(&mut self, name: &str) -> Running {
        let workload = self.shared.cache.add_workload(name);
        let ended = self.shared.stop.child_token();
        self.running.insert(workload, ended.clone());
        Running { workload, ended, draining: TaskTracker::new() }
    }

    /// Starts the sources and exports of a sidecar's workload. What is mounted, or kept from an earlier run, is published
    /// before this returns, unless its file system does not answer.
    pub async fn start(&mut self, running: &Running, plan: Plan) -> io::Result<()> {
        let Running { workload, ended, .. } = running;
        let Shared { cache, metrics, watcher, pending, clock, .. } = self.shared.clone();
        let debounce = plan.files.debounce;
        self.follow_federated(ended, *workload, &plan.files).await?;
        let named = plan.files.clone();
        if plan.has_own() {
            let crls = CrlSource::new(
                plan.crl.clone(),
                debounce,
                &cache,
                *workload,
                &watcher,
                clock.clone(),
                metrics.clone(),
            );
            let files = FileSource::new(
                plan.files.clone(),
                &cache,
                *workload,
                watcher.clone(),
                clock.clone(),
                metrics.clone(),
            );
            self.follow_mounted(ended, files, crls).await?;
        } else {
            clock.watch_jumps();
        }
        let scope = Scope::Workload(*workload);
        let names = NamedFiles::start(named, &cache, scope, watcher.apart(), pending, clock, metrics).await;
        self.spawn(ended, names.run());
        let Tasks { own, draining } = Tasks::of(plan, running, &self.shared).await;
        for task in own {
            self.spawn(ended, task);
        }
        for task in draining {
            self.spawn_draining(task);
        }
        Ok(())
    }

    /// Starts the same of one workload of many, without mounted files, and `serving` beside it. This does not wait for
    /// its disks: what a disk delays is this workload alone.
    pub fn launch(
        &mut self,
        running: &Running,
        plan: Plan,
        serving: impl Future<Output = ()> + Send + 'static,
    ) {
        let name = self.shared.cache.name_of(running.workload);
        // At the level of errors, so that lines of every level have it.
        let span = tracing::error_span!("workload", name = &*name);
        let (shared, starting) = (self.shared.clone(), running.clone());
        // What only the start needs is freed with this box.
        let start = Box::pin(async move {
            let Tasks { own, draining } = Tasks::of(plan, &starting, &shared).await;
            for task in draining {
                // Its end is waited for when the workload is removed, and when the agent stops.
                tokio::spawn(
                    shared.calls.track_future(starting.draining.track_future(task)).in_current_span(),
                );
            }
            starting.draining.close();
            own
        });
        let serving = Box::pin(serving);
        let all = async move {
            tokio::select! {
                () = async { first_end(start.await).await } => {}
                () = serving => {}
            }
        };
        self.spawn(&running.ended, all.instrument(span));
    }

    /// The thread for mounted files, which starts with the first of them.
    fn mounted(&mut self) -> io::Result<Handle> {
        match &self.mounted {
            Some(mounted) => Ok(mounted.clone()),
            None => Ok(self.mounted.insert(mounted::start(self.shared.stop.clone())?).clone()),
        }
    }

    /// Publishes the trust bundles of other trust domains for `workload`, and follows their files until `ended`. Returns after
    /// the first look, unless a file system does not answer.
    pub async fn follow_federated(
        &mut self,
        ended: &CancellationToken,
        workload: Workload,
        settings: &FileSettings,
    ) -> io::Result<()> {
        let Shared { cache, metrics, watcher, clock, .. } = &self.shared;
        let all = FederatedFile::all(settings, cache, workload, watcher, clock, metrics);
        for mut file in all {
            let (looked, first_look) = oneshot::channel();
            let follow = async move {
                file.publish_once();
                let _ = looked.send(());
                file.run().await;
            };
            let mounted = self.mounted()?;
            self.tasks.spawn_on(until(ended.clone(), Box::pin(follow)), &mounted);
            let _ = tokio::time::timeout(FIRST_LOOK, first_look).await;
        }
        Ok(())
    }

    /// Follows what is mounted, on its thread. Returns after the first look, unless a file system does not answer.
    async fn follow_mounted(
        &mut self,
        ended: &CancellationToken,
        mut files: FileSource,
        mut crls: CrlSource,
    ) -> io::Result<()> {
        let mounted = self.mounted()?;
        self.shared.clock.watch_jumps();
        let (looked, first_look) = oneshot::channel();
        let follow = async move {
            // The first trust bundle already has its CRLs.
            crls.amend_once();
            files.publish_once();
            // The receiver may have given up waiting.
            let _ = looked.send(());
            tokio::join!(files.run(), crls.run());
        };
        self.tasks.spawn_on(until(ended.clone(), Box::pin(follow)), &mounted);
        if tokio::time::timeout(FIRST_LOOK, first_look).await.is_err() {
            tracing::warn!(
                waited_ms = millis(FIRST_LOOK),
                "mounted files not read yet, starting without them"
            );
        }
        Ok(())
    }

    /// The service that serves a workload's secrets.
    pub fn service(&self, running: &Running) -> SecretDiscovery {
        let Shared { cache, metrics, clock, capacity, .. } = self.shared.clone();
        SecretDiscovery::new(cache, running.workload, metrics, clock, running.ended.clone(), capacity)
    }

    /// Runs `task` until the workload is removed or the agent stops.
    pub fn spawn(&mut self, ended: &CancellationToken, task: impl Future<Output = ()> + Send + 'static) {
        self.tasks.spawn(until(ended.clone(), Box::pin(task)));
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
        let Shared { cache, history, .. } = &self.shared;
        let Some(ended) = self.running.remove(&workload) else { return };
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

/// Runs `tasks` until one of them ends, which none does by itself.
async fn first_end(mut tasks: Vec<Task>) {
    poll_fn(|cx| match tasks.iter_mut().any(|task| task.as_mut().poll(cx).is_ready()) {
        true => Poll::Ready(()),
        false => Poll::Pending,
    })
    .await;
}

/// Runs `task` until `ended`. Some if it ended by itself. A box, because this future has room for its arguments twice.
async fn until(ended: CancellationToken, task: Task) -> Option<()> {
    // The token first: a source of a removed workload finds its secrets missing, and must not request new ones.
    tokio::select! {
        biased;
        () = ended.cancelled() => None,
        () = task => Some(()),
    }
}

#[cfg(test)]
mod tests;
