//! The workloads of volumes: started, given tokens and ended as the kubelet wants it.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{mpsc, oneshot};

use super::starter::Starter;
use crate::agent::workloads::{Running, Workloads};
use crate::auth::token_file::{BroughtToken, Token};
use crate::config::Description;
use crate::csi::{NotStarted, Runner, VolumeFiles, VolumeId, VolumeWorkload};
use crate::export::output::{DirectorySettings, Format, OutputSettings, Owner};
use crate::fs::disk::Disk;
use crate::ops::report::{Member, Roster, SocketView};
use crate::options::OptionsFile;
use crate::secret::SecretName;
use crate::source::issuer::StateDir;
use crate::store::{Cache, Key, Workload};

/// What the driver wants of the workloads, which belong to another task.
#[derive(Debug)]
pub(super) enum Order {
    Start(Box<VolumeWorkload>, oneshot::Sender<Result<(), NotStarted>>),
    /// Answered when nothing is left of it.
    Stop(VolumeId, oneshot::Sender<()>),
}

/// The workloads of volumes, as the driver sees them. Clones see the same.
#[derive(Clone, Debug)]
pub(super) struct VolumeRunner {
    orders: mpsc::UnboundedSender<Order>,
    known: Arc<Mutex<HashMap<VolumeId, Known>>>,
    cache: Cache,
}

/// What the driver may ask of a workload that runs.
#[derive(Clone, Debug)]
struct Known {
    workload: Workload,
    token: Option<BroughtToken>,
}

impl VolumeRunner {
    /// The driver's side, and the orders that it gives.
    pub(super) fn new(cache: Cache) -> (Self, mpsc::UnboundedReceiver<Order>) {
        let (orders, received) = mpsc::unbounded_channel();
        (Self { orders, known: Arc::default(), cache }, received)
    }

    fn known(&self, id: &VolumeId) -> Option<Known> {
        self.lock().get(id).cloned()
    }

    /// No code panics while it holds this lock.
    fn lock(&self) -> MutexGuard<'_, HashMap<VolumeId, Known>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn key_pair(workload: Workload) -> Key {
    Key { workload, name: SecretName::Workload }
}

#[tonic::async_trait]
impl Runner for VolumeRunner {
    async fn start(&self, workload: VolumeWorkload) -> Result<(), NotStarted> {
        let (done, started) = oneshot::channel();
        let stopping = || NotStarted { reason: "the agent is stopping".to_owned(), is_retryable: true };
        self.orders.send(Order::Start(Box::new(workload), done)).map_err(|_| stopping())?;
        started.await.unwrap_or_else(|_| Err(stopping()))
    }

    async fn renew_token(&self, id: &VolumeId, token: Token) -> bool {
        let Some(Known { workload, token: place }) = self.known(id) else { return false };
        let Some(place) = place else { return true };
        place.bring(token);
        let key = key_pair(workload);
        let is_failing = self.cache.watch(&key).is_some_and(|entry| entry.borrow().failure().is_some());
        if is_failing {
            // The request is made by the first poll. Its outcome is logged by the source.
            tokio::select! {
                biased;
                refused = self.cache.renew(&key) => drop(refused),
                () = std::future::ready(()) => {}
            }
        }
        true
    }

    async fn issued(&self, id: &VolumeId) {
        let Some(Known { workload, .. }) = self.known(id) else { return std::future::pending().await };
        let mut entry = self.cache.follow(key_pair(workload));
        // Fails when the workload was removed.
        if entry.wait_for(|entry| entry.good.is_some()).await.is_err() {
            std::future::pending().await
        }
    }

    fn failure(&self, id: &VolumeId) -> Option<String> {
        let entry = self.cache.watch(&key_pair(self.known(id)?.workload))?;
        let entry = entry.borrow();
        Some(entry.failure()?.to_string())
    }

    async fn stop(&self, id: &VolumeId) {
        self.lock().remove(id);
        let (done, stopped) = oneshot::channel();
        if self.orders.send(Order::Stop(id.clone(), done)).is_ok() {
            let _ = stopped.await;
        }
    }
}

/// The workloads of volumes, as the agent runs them.
#[derive(Debug)]
pub(super) struct Volumes {
    starter: Starter,
    runner: VolumeRunner,
    roster: Roster,
    running: HashMap<VolumeId, Served>,
}

/// A workload that runs.
#[derive(Debug)]
struct Served {
    name: Arc<str>,
    running: Running,
}

/// The socket of a volume, which the driver has bound.
#[derive(Debug)]
struct VolumeSocket(PathBuf);

impl SocketView for VolumeSocket {
    fn path(&self) -> PathBuf {
        self.0.clone()
    }

    fn is_bound(&self) -> bool {
        true
    }

    fn id(&self) -> Option<String> {
        None
    }

    fn failure(&self) -> Option<String> {
        None
    }
}

impl Volumes {
    pub(super) fn new(starter: Starter, runner: VolumeRunner, roster: Roster) -> Self {
        Self { starter, runner, roster, running: HashMap::new() }
    }

    /// Does what the driver wants.
    pub(super) fn obey(&mut self, order: Order, workloads: &mut Workloads) {
        match order {
            // The driver may have given up waiting.
            Order::Start(volume, done) => drop(done.send(self.start(*volume, workloads))),
            Order::Stop(id, done) => self.stop(&id, done, workloads),
        }
    }

    fn start(&mut self, volume: VolumeWorkload, workloads: &mut Workloads) -> Result<(), NotStarted> {
        let VolumeWorkload { id, pod, attributes, socket, directory, files, token } = volume;
        let name = self.name(&pod.namespace, &pod.name, &id);
        let own = [
            ("namespace", Some(pod.namespace)),
            ("service-account", Some(pod.service_account)),
            ("trust-domain", attributes.trust_domain),
            ("key-type", attributes.key_type.map(|key_type| key_type.name().to_owned())),
            ("cert-ttl", attributes.cert_ttl.map(|ttl| humantime::format_duration(ttl).to_string())),
        ];
        let own = own.into_iter().filter_map(|(option, value)| Some((option, value?)));
        let options = OptionsFile::described(Path::new(id.as_str()), own);
        let brought = (!self.starter.template.impersonates()).then(BroughtToken::default);
        if let (Some(place), Some(token)) = (&brought, token) {
            place.bring(token);
        }
        let description = Description { options, token: brought.clone() };
        // Neither changes by itself: the kubelet's next try would end as this one.
        let refused = |reason: String| NotStarted { reason, is_retryable: false };
        let mut config = self
            .starter
            .config(id.as_str(), &description)
            .map_err(|mistakes| refused(mistakes.to_string()))?;
        config.output = files.map(output);
        let listener = std::future::ready(Arc::new(socket));
        let running = self
            .starter
            .start(&name, &description, config, listener, workloads)
            .map_err(|error| refused(error.to_string()))?;
        let workload = running.workload;
        self.runner.lock().insert(id.clone(), Known { workload, token: brought });
        let socket = Arc::new(VolumeSocket(directory.join("socket")));
        self.roster.add(&name, Member { workload, socket, file: None });
        tracing::info!(workload = &*name, volume = %id, "workload of a volume added");
        self.running.insert(id, Served { name, running });
        Ok(())
    }

    /// `NAMESPACE/POD`, and the volume where a Pod has several.
    fn name(&self, namespace: &str, pod: &str, id: &VolumeId) -> Arc<str> {
        let short = format!("{namespace}/{pod}");
        let is_taken = self.running.values().any(|served| *served.name == *short);
        if is_taken { format!("{short}/{id}").into() } else { short.into() }
    }

    fn stop(&mut self, id: &VolumeId, done: oneshot::Sender<()>, workloads: &mut Workloads) {
        let state = self.starter.template.state(id.as_str());
        let served = self.running.remove(id);
        if let Some(Served { name, running }) = &served {
            self.roster.remove(name);
            workloads.remove(running.workload);
            running.draining.close();
            tracing::info!(workload = &**name, volume = %id, "workload of a volume removed");
        }
        let disk = self.starter.shared.disk.clone();
        self.starter.shared.calls.spawn(async move {
            if let Some(Served { running, .. }) = served {
                running.draining.wait().await;
            }
            clear(state, &disk).await;
            let _ = done.send(());
        });
    }
}

/// Removes what was kept of a workload.
async fn clear(state: Option<StateDir>, disk: &Disk) {
    let Some(state) = state else { return };
    let path = state.path().to_owned();
    let failure = match disk.run(&path, move || state.clear()).await {
        Ok(cleared) => cleared.err().map(|error| error.to_string()),
        Err(unresponsive) => Some(unresponsive.to_string()),
    };
    if let Some(reason) = failure {
        tracing::warn!(directory = %path.display(), reason, "state of a removed volume left behind");
    }
}

/// Key and certificates in the volume itself: for the Pod alone, whose containers may have any user.
fn output(VolumeFiles { directory, group }: VolumeFiles) -> OutputSettings {
    let settings = DirectorySettings {
        option: "files",
        directory,
        format: Format::default(),
        key_mode: if group.is_some() { 0o440 } else { 0o444 },
        cert_mode: 0o444,
        owner: Owner { user: None, group },
    };
    OutputSettings { directories: vec![settings], hook: None }
}
