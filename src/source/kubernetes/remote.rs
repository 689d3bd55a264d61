//! Finds remote clusters: labelled Secrets, as Istio has them, and a directory of kubeconfigs. Both are looked at while the
//! agent runs.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::Instant;
use zeroize::Zeroizing;

use super::cluster::{Cluster, PACE, delay};
use super::clusters::Clusters;
use super::follow::pause_after;
use crate::base::clock::Clock;
use crate::base::failure_log::FailureLog;
use crate::base::limits;
use crate::base::offload;
use crate::base::text;
use crate::fs::disk::Disk;
use crate::fs::file;
use crate::kube::kubeconfig::{Kubeconfig, Policy, Risk};
use crate::kube::{self, Api, ClusterId, Event, Kind, KubeError, Object, Of, Selection};
use crate::secret::Version;

/// Istio's label of Secrets with kubeconfigs.
const LABEL: &str = "istio/multiCluster=true";
/// How often the directory is read.
const INTERVAL: Duration = Duration::from_secs(5);
/// How often a kubeconfig that can't be used is read again.
const RETRY: Duration = Duration::from_secs(30);
/// The longest pause before a kubeconfig that does not work is retried.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// Where kubeconfigs of remote clusters are, and what they may do.
#[derive(Clone, Debug)]
pub struct RemoteSettings {
    /// The namespace of labelled Secrets in the agent's own cluster.
    pub namespace: Option<Arc<str>>,
    pub directory: Option<PathBuf>,
    pub allows: Vec<Risk>,
    /// The option that allows more.
    pub option: &'static str,
}

/// Keeps the remote clusters as they are configured.
pub struct RemoteClusters {
    settings: RemoteSettings,
    clusters: Clusters,
    disk: Disk,
    clock: Clock,
    /// The kubeconfigs of each cluster and where they are; the first one counts.
    claims: BTreeMap<ClusterId, Vec<Claim>>,
    /// What is in use, or about to be.
    current: HashMap<ClusterId, Current>,
    /// Clusters whose kubeconfig can't be used, and why.
    unusable: BTreeSet<ClusterId>,
    refusals: HashMap<ClusterId, FailureLog>,
    attempts: JoinSet<(ClusterId, Version, Arc<dyn Api>)>,
}

struct Claim {
    origin: Arc<str>,
    kubeconfig: Zeroizing<Vec<u8>>,
    version: Version,
}

struct Current {
    /// The kubeconfig that is in use or being tried.
    version: Version,
    /// It is being tried, while an older connection is in use.
    attempt: Option<AbortHandle>,
}

/// What a place has: each cluster's name with its kubeconfig.
type Found = Vec<(ClusterId, Zeroizing<Vec<u8>>)>;

/// What a finder reports.
enum Change {
    /// A place, and what it has now.
    Place(Arc<str>, Found),
    /// This one has looked at all of its places.
    Complete(&'static str),
}

impl RemoteClusters {
    pub fn new(settings: RemoteSettings, clusters: Clusters, disk: Disk, clock: Clock) -> Self {
        let (claims, current, unusable, refusals, attempts) = Default::default();
        Self { settings, clusters, disk, clock, claims, current, unusable, refusals, attempts }
    }

    /// Follows every change. Does not return.
    pub async fn run(mut self) {
        let (changes, mut changed) = mpsc::channel(16);
        let mut finders = JoinSet::new();
        if let Some(namespace) = self.settings.namespace.clone() {
            finders.spawn(find_in_secrets(Arc::clone(self.clusters.local()), namespace, changes.clone()));
        }
        if let Some(directory) = self.settings.directory.clone() {
            finders.spawn(find_in_directory(directory, self.disk.clone(), changes.clone()));
        }
        let finder_count = finders.len();
        let mut complete = BTreeSet::new();
        loop {
            tokio::select! {
                Some(change) = changed.recv() => match change {
                    Change::Place(origin, found) => self.take(&origin, found).await,
                    Change::Complete(finder) => {
                        complete.insert(finder);
                        if complete.len() == finder_count {
                            self.clusters.complete();
                        }
                    }
                },
                () = tokio::time::sleep(RETRY), if !self.unusable.is_empty() => {
                    for id in std::mem::take(&mut self.unusable) {
                        self.settle(&id).await;
                    }
                }
                // None: it was given up for a newer one.
                Some(ended) = self.attempts.join_next() => if let Some((id, version, api)) = offload::finished(ended) {
                    self.switch(&id, &version, api);
                },
                Some(ended) = finders.join_next() => drop(offload::finished(ended)),
            }
        }
    }

    /// A place has changed.
    async fn take(&mut self, origin: &Arc<str>, found: Found) {
        let mut touched: Vec<ClusterId> = Vec::new();
        for (id, claims) in &mut self.claims {
            let before = claims.len();
            claims.retain(|claim| claim.origin != *origin || found.iter().any(|(other, _)| other == id));
            if claims.len() != before {
                touched.push(id.clone());
            }
        }
        for (id, kubeconfig) in found {
            if id == self.clusters.local().id {
                tracing::info!(
                    cluster = &*id.0,
                    from = &**origin,
                    "kubeconfig of the agent's own cluster ignored"
                );
                continue;
            }
            let version = Version::of(&kubeconfig);
            let claim = Claim { origin: Arc::clone(origin), kubeconfig, version };
            let claims = self.claims.entry(id.clone()).or_default();
            match claims.iter_mut().find(|known| known.origin == *origin) {
                Some(known) => *known = claim,
                None => {
                    if let Some(first) = claims.first() {
                        let (cluster, in_force) = (&*id.0, &*first.origin);
                        tracing::warn!(
                            cluster,
                            from = &**origin,
                            in_force,
                            "two kubeconfigs for one cluster: the second is not used until the first goes; remove one of them"
                        );
                    }
                    claims.push(claim);
                }
            }
            touched.push(id);
        }
        for id in touched {
            self.settle(&id).await;
        }
    }

    /// Uses the first of a cluster's kubeconfigs.
    async fn settle(&mut self, id: &ClusterId) {
        let Some(claim) = self.claims.get(id).and_then(|claims| claims.first()) else {
            self.claims.remove(id);
            if let Some(current) = self.current.remove(id) {
                current.attempt.inspect(AbortHandle::abort);
                self.clusters.remove(id);
                tracing::info!(
                    cluster = &*id.0,
                    "remote cluster removed; what it delivered is served until no stream asks for it"
                );
            }
            return;
        };
        if self.current.get(id).is_some_and(|current| current.version == claim.version) {
            return;
        }
        let (version, origin) = (claim.version.clone(), Arc::clone(&claim.origin));
        let api = match self.client(claim.kubeconfig.clone()).await {
            Ok(api) => api,
            Err(reason) => {
                let cluster = &*id.0;
                if self.refusals.entry(id.clone()).or_default().is_new(&reason) {
                    tracing::warn!(
                        cluster,
                        from = &*origin,
                        reason,
                        "kubeconfig of a remote cluster is not used"
                    );
                }
                // It may name files, which others write.
                self.unusable.insert(id.clone());
                return;
            }
        };
        self.refusals.remove(id);
        let before = self.current.remove(id).and_then(|current| current.attempt);
        before.inspect(AbortHandle::abort);
        let attempt = match self.clusters.get(id) {
            None => {
                let keeper = self.clusters.local().keeper.clone();
                let cluster = Cluster::new(id.clone(), api, keeper, self.clock.clone());
                self.clusters.add(cluster);
                tracing::info!(cluster = &*id.0, from = &*origin, "remote cluster added");
                None
            }
            Some(cluster) => {
                let (id, version) = (id.clone(), version.clone());
                Some(self.attempts.spawn(async move {
                    until_usable(&cluster, &*api, &origin).await;
                    (id, version, api)
                }))
            }
        };
        self.current.insert(id.clone(), Current { version, attempt });
    }

    /// A new connection to a known cluster works.
    fn switch(&mut self, id: &ClusterId, version: &Version, api: Arc<dyn Api>) {
        let Some(current) = self.current.get_mut(id).filter(|current| current.version == *version) else {
            return;
        };
        current.attempt = None;
        if let Some(cluster) = self.clusters.get(id) {
            cluster.reconnect(api);
            tracing::info!(cluster = &*id.0, "remote cluster is read with its new kubeconfig");
        }
    }

    async fn client(&self, kubeconfig: Zeroizing<Vec<u8>>) -> Result<Arc<dyn Api>, String> {
        let (allows, option) = (self.settings.allows.clone(), self.settings.option);
        let path = self.settings.directory.clone().unwrap_or_else(|| "kubeconfig".into());
        // It may name files, where that is allowed.
        let parsed = self.disk.run(&path, move || {
            Kubeconfig::parse(&kubeconfig, None, &Policy::Foreign { allows: &allows, option })
        });
        let parsed = parsed.await.map_err(|error| error.to_string())?;
        let parsed = parsed.map_err(|error| text::sanitize_for_log(&error.to_string()))?;
        Ok(Arc::new(kube::cluster::Cluster::new(parsed.config, self.disk.clone(), self.clock.clone())))
    }
}

/// Returns when `api` answers, and delivers what the cluster's connection delivers now.
async fn until_usable(cluster: &Cluster, api: &dyn Api, origin: &str) {
    let (mut failures, mut log) = (0, FailureLog::default());
    loop {
        let Err(error) = try_out(cluster, api).await else { return };
        failures += 1;
        let reason = text::sanitize_for_log(&error.to_string());
        if log.is_new(&reason) {
            let cluster = &*cluster.id.0;
            tracing::warn!(
                cluster,
                from = origin,
                reason,
                "new kubeconfig of a remote cluster does not work; the previous connection stays in use"
            );
        }
        tokio::time::sleep(delay(&error, failures).min(LONGEST_PAUSE).max(PACE.base)).await;
    }
}

async fn try_out(cluster: &Cluster, api: &dyn Api) -> Result<(), KubeError> {
    api.probe().await?;
    let samples = cluster.samples();
    let mut found = samples.is_empty();
    for object in &samples {
        found |= api.get(object).await?.is_some();
    }
    match found {
        true => Ok(()),
        false => Err(KubeError::Unreadable {
            address: cluster.id.to_string(),
            reason: "it has none of the objects that are served from this cluster: is it another one?"
                .to_owned(),
        }),
    }
}

/// The Secrets of `namespace` with kubeconfigs.
pub fn selection(namespace: &Arc<str>) -> Selection {
    Selection { kind: Kind::Secret, namespace: Arc::clone(namespace), of: Of::Label(LABEL.into()) }
}

/// Reports the labelled Secrets of `namespace`. Does not return.
async fn find_in_secrets(cluster: Arc<Cluster>, namespace: Arc<str>, changes: mpsc::Sender<Change>) {
    let selection = selection(&namespace);
    let origin = |name: &str| -> Arc<str> { format!("Secret {namespace}/{name}").into() };
    let (mut known, mut failures, mut log) = (Vec::<Box<str>>::new(), 0, FailureLog::default());
    loop {
        let followed = async {
            let list = cluster.list(&selection).await?;
            let now: Vec<_> = list.objects.iter().map(|object| object.name.clone()).collect();
            for gone in known.iter().filter(|name| !now.contains(name)) {
                let _ = changes.send(Change::Place(origin(gone), Vec::new())).await;
            }
            known = now;
            for object in list.objects {
                let _ = changes.send(Change::Place(origin(&object.name), kubeconfigs(object))).await;
            }
            failures = 0;
            log.recovered();
            let _ = changes.send(Change::Complete("secrets")).await;
            let (mut from, mut endings) = (list.version, 0);
            loop {
                let opened = Instant::now();
                let mut connection = cluster.connection();
                let mut watch = cluster.watch(&selection, Some(&from)).await?;
                loop {
                    let event = tokio::select! {
                        event = watch.next() => event,
                        _ = connection.changed() => break,
                    };
                    match event {
                        None => break,
                        Some(Err(error)) => {
                            cluster.note(Some(&error));
                            return Err(error);
                        }
                        Some(Ok(Event::Version(version))) => from = version,
                        Some(Ok(Event::Deleted { name, version })) => {
                            from = version;
                            known.retain(|known| *known != name);
                            let _ = changes.send(Change::Place(origin(&name), Vec::new())).await;
                        }
                        Some(Ok(Event::Object(object))) => {
                            from = object.version.clone();
                            if !known.contains(&object.name) {
                                known.push(object.name.clone());
                            }
                            let _ =
                                changes.send(Change::Place(origin(&object.name), kubeconfigs(object))).await;
                        }
                    }
                }
                endings = pause_after(opened, endings).await;
            }
        };
        let Err(error): Result<std::convert::Infallible, KubeError> = followed.await;
        if matches!(error, KubeError::Expired { .. }) {
            continue;
        }
        failures += 1;
        let reason = text::sanitize_for_log(&error.to_string());
        if log.is_new(&reason) {
            tracing::warn!(
                namespace = &*namespace,
                reason,
                "Secrets with remote clusters can't be read (RBAC: list and watch on secrets in that namespace); the clusters \
                 that are known stay in use"
            );
        }
        tokio::time::sleep(delay(&error, failures)).await;
    }
}

fn kubeconfigs(object: Object) -> Found {
    object.data.into_iter().map(|(key, value)| (ClusterId((&*key).into()), value)).collect()
}

/// Reports the kubeconfigs in a directory. Does not return.
async fn find_in_directory(directory: PathBuf, disk: Disk, changes: mpsc::Sender<Change>) {
    let mut known = HashMap::<Arc<str>, Version>::new();
    let mut log = FailureLog::default();
    loop {
        let path = directory.clone();
        let read = disk.run(&directory, move || read_all(&path)).await;
        let read =
            read.map_err(|error| error.to_string()).and_then(|read| read.map_err(|error| error.to_string()));
        match read {
            Ok(files) => {
                log.recovered();
                let mut now = HashMap::new();
                for (path, id, content) in files {
                    let origin: Arc<str> = path.display().to_string().into();
                    let version = Version::of(&content);
                    if known.remove(&origin).as_ref() != Some(&version) {
                        let _ = changes.send(Change::Place(Arc::clone(&origin), vec![(id, content)])).await;
                    }
                    now.insert(origin, version);
                }
                for origin in known.into_keys() {
                    let _ = changes.send(Change::Place(origin, Vec::new())).await;
                }
                known = now;
                let _ = changes.send(Change::Complete("directory")).await;
            }
            Err(reason) => {
                if log.is_new(&reason) {
                    tracing::warn!(
                        directory = %directory.display(),
                        reason,
                        "kubeconfigs of remote clusters can't be read; the clusters that are known stay in use"
                    );
                }
            }
        }
        tokio::time::sleep(INTERVAL).await;
    }
}

/// Its path, the cluster that has its name, and its content.
pub type KubeconfigFile = (PathBuf, ClusterId, Zeroizing<Vec<u8>>);

/// The files of a directory, each the kubeconfig of the cluster that has its name. Hidden files are none.
pub fn read_all(directory: &Path) -> io::Result<Vec<KubeconfigFile>> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(directory)? {
        let path = entry?.path();
        let Some(name) = path.file_name().and_then(|name| name.to_str()) else { continue };
        if name.starts_with('.') || !path.is_file() {
            continue;
        }
        let id = ClusterId(name.into());
        match file::read(&path, limits::KUBECONFIG_BYTES) {
            Ok(content) => files.push((path, id, content)),
            // It was removed meanwhile.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(io::Error::new(error.kind(), format!("{}: {error}", path.display()))),
        }
    }
    files.sort_by(|one, other| one.0.cmp(&other.0));
    Ok(files)
}
