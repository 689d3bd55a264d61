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
mod objects;
pub mod remote;
mod served;
#[cfg(test)]
mod testing;

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use smallvec::{SmallVec, smallvec};
use tokio::sync::mpsc;
use tokio::task::{JoinError, JoinSet};

pub use self::access::Authorize;
use self::access::{Check, check};
use self::cluster::{Cluster, FORBIDDEN, PACE};
pub use self::clusters::Clusters;
use self::content::Wants;
use self::follow::{Place, Report, Seen};
use self::objects::Objects;
use self::served::{Finding, Served};
use crate::base::clock::Clock;
use crate::kube::{Account, Kind, KubeError, ObjectId};
use crate::metrics::Metrics;
use crate::secret::{KubernetesName, NameKind, Scheme, Secret, SecretName};
use crate::store::{AlreadyTaken, Cache, Demand, Event, Key, Scope, Workload};

/// How long a yes or a no of a review is good for.
const REVIEWED: Duration = FORBIDDEN;
/// How often names without a value are marked where their API server does not answer.
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

/// One name that a stream asks for.
struct Name {
    served: Served,
    /// None while it is not known where to look.
    target: Option<Target>,
    access: Access,
}

/// Where the secret of a name is.
#[derive(Clone)]
struct Target {
    cluster: Arc<Cluster>,
    /// The first one that exists counts.
    places: SmallVec<[Place; 2]>,
    wants: Wants,
}

/// Which of a name's objects may be served.
#[derive(Clone, Debug)]
enum Access {
    /// All.
    Free,
    /// None, for this reason.
    Refused(&'static str),
    /// It is being asked for the first time.
    Asked,
    /// These.
    Reviewed { objects: Vec<ObjectId>, at: SystemTime },
    /// The API server did not say: for people.
    Unknown(String),
}

type Review = (Key, Result<Vec<ObjectId>, KubeError>);

struct Running {
    settings: KubernetesSettings,
    clusters: Clusters,
    cache: Cache,
    workload: Workload,
    clock: Clock,
    metrics: Metrics,
    names: HashMap<Key, Name>,
    objects: Objects,
    reviews: JoinSet<Review>,
    /// Names without streams whose value is kept for a while.
    deserted: JoinSet<Key>,
    /// When to look at names again: certificates and CRLs begin and end, rights are asked for again.
    due: BTreeSet<(SystemTime, Key)>,
    /// Names that have no value because nothing is known of their objects.
    unresolved: BTreeSet<Key>,
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
        let mut running = Running {
            settings,
            clusters,
            cache,
            workload,
            clock: clock.clone(),
            metrics,
            names: HashMap::new(),
            objects: Objects::new(reports),
            reviews: JoinSet::new(),
            deserted: JoinSet::new(),
            due: BTreeSet::new(),
            unresolved: BTreeSet::new(),
        };
        loop {
            let due = running.due.first().map(|(at, _)| *at);
            let forget = running.objects.next_to_forget();
            let forgotten = async {
                match forget {
                    Some(at) => {
                        tokio::time::sleep(at.saturating_duration_since(tokio::time::Instant::now())).await
                    }
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                event = demand.next() => match event {
                    Some(Event::Wanted(key)) => running.add(key),
                    Some(Event::Asked(key)) => running.ask_again(&key),
                    Some(Event::Deserted(key)) => running.desert(key),
                    // The workload was removed.
                    None => return std::future::pending().await,
                },
                Some(report) = reported.recv() => running.take(report),
                Some(review) = running.reviews.join_next() => running.reviewed(review),
                Some(ended) = running.deserted.join_next() => running.end(ended),
                Ok(()) = changes.changed() => running.retarget(),
                () = clock.sleep_until_any(due), if due.is_some() => running.look_again(),
                () = forgotten => running.objects.forget(),
                () = tokio::time::sleep(OUTAGE_CHECK), if !running.unresolved.is_empty() => {
                    running.report_outages();
                }
            }
        }
    }
}

impl Running {
    /// A stream asks for a name.
    fn add(&mut self, key: Key) {
        if self.names.contains_key(&key) {
            // There is room for its value now.
            return self.settle(&key);
        }
        let served = Served::new(&self.cache, key.clone());
        self.names.insert(key.clone(), Name { served, target: None, access: Access::Asked });
        self.aim(&key);
    }

    /// Finds out where a name leads and who may read it, and has its objects followed.
    fn aim(&mut self, key: &Key) {
        let SecretName::Kubernetes(kubernetes_name) = &key.name else { return };
        let target = self.target(kubernetes_name);
        let Some(name) = self.names.get_mut(key) else { return };
        if let Some(old) = name.target.take() {
            old.places.iter().for_each(|place| self.objects.unfollow(place, key));
        }
        let target = match target {
            Ok(target) => target,
            Err(reason) => {
                let finding = Finding::Refused { reason, is_sure: false };
                name.served.settle(finding, Wants::default(), self.clock.now(), &self.metrics);
                self.due.insert((self.clock.now() + PACE.cap, key.clone()));
                return;
            }
        };
        name.target = Some(target.clone());
        self.review(key, kubernetes_name);
        if self.names.get(key).is_some_and(|name| !matches!(name.access, Access::Refused(_))) {
            for place in &target.places {
                self.objects.follow(&target.cluster, place, key, target.wants);
            }
        }
        self.settle(key);
    }

    /// Finds out who may read the objects of a name. The last answer counts until there is another.
    fn review(&mut self, key: &Key, kubernetes_name: &KubernetesName) {
        let (account, own) = (self.account(), self.own_namespace());
        let Some(name) = self.names.get_mut(key) else { return };
        let Some(target) = &name.target else { return };
        let objects: Vec<_> = target.places.iter().map(|place| place.object.clone()).collect();
        let check =
            check(self.settings.authorize, kubernetes_name, &objects, account.as_ref(), own.as_deref());
        match check {
            Check::Allowed => name.access = Access::Free,
            Check::Refused(reason) => {
                name.access = Access::Refused(reason);
                if account.is_none() {
                    self.due.insert((self.clock.now() + PACE.cap, key.clone()));
                }
            }
            Check::Ask(questions) => {
                let (cluster, key) = (Arc::clone(&target.cluster), key.clone());
                self.reviews.spawn(async move {
                    let answer = questions.ask(&cluster).await;
                    (key, answer)
                });
                if !matches!(name.access, Access::Reviewed { .. }) {
                    name.access = Access::Asked;
                }
            }
        }
    }

    fn target(&self, name: &KubernetesName) -> Result<Target, String> {
        let cluster = match name.scheme() {
            Scheme::Gateway | Scheme::ConfigMap => Arc::clone(self.clusters.local()),
            _ => self.clusters.of_client(name.cluster())?,
        };
        let namespace: Arc<str> = match name.namespace() {
            Some(namespace) => namespace.into(),
            None => self.own_namespace().ok_or(
                "it names no namespace, and the workload's own is not known (yet): set --namespace, or ask for \
                 kubernetes://NAMESPACE/NAME",
            )?,
        };
        let kind = if name.scheme() == Scheme::ConfigMap { Kind::ConfigMap } else { Kind::Secret };
        let place = |name: &str| Place {
            cluster: cluster.id.clone(),
            object: ObjectId { kind, namespace: Arc::clone(&namespace), name: name.into() },
        };
        let mut places = smallvec![place(name.name())];
        places.extend(name.base().map(place));
        let wants = Wants { pair: !name.is_roots(), roots: name.is_roots() };
        Ok(Target { cluster: Arc::clone(&cluster), places, wants })
    }

    /// The workload's service account: as configured, or as its certificate says.
    fn account(&self) -> Option<Account> {
        self.settings.account.clone().or_else(|| {
            let key = Key { workload: self.workload, name: SecretName::Workload };
            let good = self.cache.watch(&key)?.borrow().good.clone()?;
            let Secret::KeyPair(pair) = &good.secret else { return None };
            let account = pair.spiffe_id()?.service_account()?;
            Some(Account { namespace: account.namespace.into(), name: account.name.into() })
        })
    }

    fn own_namespace(&self) -> Option<Arc<str>> {
        self.settings.namespace.clone().or_else(|| Some(self.account()?.namespace))
    }

    /// Another stream asks for a name: an older answer to who may read it is not good enough.
    fn ask_again(&mut self, key: &Key) {
        let is_fresh = self.names.get(key).is_some_and(|name| match &name.access {
            Access::Reviewed { at, .. } => self.is_fresh(*at),
            Access::Free | Access::Asked => true,
            Access::Refused(_) | Access::Unknown(_) => false,
        });
        if !is_fresh {
            self.ask(key);
        }
    }

    /// Finds out again who may read the objects of a name, and where they are if that was not known.
    fn ask(&mut self, key: &Key) {
        let Some(name) = self.names.get(key) else { return };
        match (&key.name, &name.access, &name.target) {
            (_, Access::Refused(_), _) | (_, _, None) => self.aim(key),
            (SecretName::Kubernetes(name), ..) => self.review(key, name),
            _ => {}
        }
    }

    fn is_fresh(&self, at: SystemTime) -> bool {
        self.clock.now().duration_since(at).is_ok_and(|age| age < REVIEWED)
    }

    /// The last stream of a name has left.
    fn desert(&mut self, key: Key) {
        let Some(name) = self.names.get(&key) else { return };
        if !self.cache.has_value(&key) {
            return self.retire(&key);
        }
        let publisher = name.served.publisher();
        self.deserted.spawn(async move {
            publisher.deserted().await;
            key
        });
    }

    fn end(&mut self, ended: Result<Key, JoinError>) {
        match ended {
            Ok(key) => self.retire(&key),
            Err(error) => {
                if let Ok(panic) = error.try_into_panic() {
                    std::panic::resume_unwind(panic);
                }
            }
        }
    }

    fn retire(&mut self, key: &Key) {
        if !self.cache.retire(key) {
            return;
        }
        let Some(name) = self.names.remove(key) else { return };
        for place in name.target.iter().flat_map(|target| &target.places) {
            self.objects.unfollow(place, key);
        }
        self.unresolved.remove(key);
        self.due.retain(|(_, other)| other != key);
    }

    fn take(&mut self, report: Report) {
        match report {
            Report::Object(place, seen) => {
                if !self.objects.note(&place, seen) {
                    return;
                }
                let names = self.objects.names(&place);
                // A key pair and its roots change together.
                let cache = self.cache.clone();
                let _together = cache.together();
                for key in names {
                    self.settle(&key);
                }
            }
            Report::Taken(group) => self.objects.taken(&group),
            Report::NotTaken(group, reason) => {
                let (cluster, namespace) = (&*group.cluster.0, &*group.namespace);
                tracing::info!(
                    cluster,
                    namespace,
                    reason,
                    "each object of the namespace is watched by itself: with the right to list them, one watch would do"
                );
                self.objects.not_taken(&group);
            }
        }
    }

    fn reviewed(&mut self, review: Result<Review, JoinError>) {
        let (key, answer) = match review {
            Ok(review) => review,
            Err(error) => match error.try_into_panic() {
                Ok(panic) => std::panic::resume_unwind(panic),
                Err(_) => return,
            },
        };
        let Some(name) = self.names.get_mut(&key) else { return };
        let now = self.clock.now();
        let again = match answer {
            Ok(objects) => {
                let all = name.target.as_ref().map_or(0, |target| target.places.len());
                let is_refused = objects.len() < all;
                name.access = Access::Reviewed { objects, at: now };
                // A yes is asked for again when a stream opens.
                is_refused.then_some(REVIEWED)
            }
            Err(error) => {
                // No answer is no refusal.
                if !matches!(name.access, Access::Reviewed { .. }) {
                    name.access = Access::Unknown(error.to_string());
                }
                Some(PACE.cap)
            }
        };
        if let Some(delay) = again {
            self.due.insert((now + delay.mul_f64(0.8 + 0.2 * fastrand::f64()), key.clone()));
        }
        self.settle(&key);
    }

    /// The clusters have changed: some names lead elsewhere.
    fn retarget(&mut self) {
        let moved = |name: &Name| match &name.target {
            None => true,
            Some(target) => {
                let now = self.clusters.get(&target.cluster.id);
                // What a cluster delivered that is gone is still served.
                now.is_some_and(|now| !Arc::ptr_eq(&now, &target.cluster))
            }
        };
        let keys: Vec<_> =
            self.names.iter().filter(|(_, name)| moved(name)).map(|(key, _)| key.clone()).collect();
        keys.iter().for_each(|key| self.aim(key));
    }

    /// Looks again at the names whose time has come.
    fn look_again(&mut self) {
        let now = self.clock.now();
        while let Some((_, key)) = self.due.pop_first_if(now) {
            // Who may read it is asked for again only where the answer was no, or none.
            let is_refused = self.names.get(&key).is_some_and(|name| match (&name.access, &name.target) {
                (Access::Reviewed { objects, .. }, Some(target)) => objects.len() < target.places.len(),
                (Access::Refused(_) | Access::Unknown(_), _) | (_, None) => true,
                _ => false,
            });
            match is_refused {
                true => self.ask(&key),
                false => self.settle(&key),
            }
        }
    }

    /// Names that have no value get the reason why their API server does not answer.
    fn report_outages(&mut self) {
        for key in self.unresolved.clone() {
            let Some(name) = self.names.get_mut(&key) else { continue };
            let outage = name.target.as_ref().and_then(|target| target.cluster.outage());
            if let Some(reason) = outage {
                let finding = Finding::Unknown { reason: reason.into() };
                name.served.settle(finding, Wants::default(), self.clock.now(), &self.metrics);
            }
        }
    }

    /// Publishes what is known of a name.
    fn settle(&mut self, key: &Key) {
        let Some(name) = self.names.get_mut(key) else { return };
        let Some(target) = &name.target else { return };
        let finding = find(&name.access, target, &self.objects);
        let is_open = matches!(finding, Finding::Open | Finding::Unknown { .. });
        let next = name.served.settle(finding, target.wants, self.clock.now(), &self.metrics);
        match is_open && !self.cache.has_value(key) {
            true => drop(self.unresolved.insert(key.clone())),
            false => drop(self.unresolved.remove(key)),
        }
        if let Some(at) = next {
            self.due.insert((at, key.clone()));
        }
    }
}

/// What is known of a name.
fn find(access: &Access, target: &Target, objects: &Objects) -> Finding {
    let allowed: Vec<_> = match access {
        Access::Free => target.places.iter().collect(),
        Access::Reviewed { objects, .. } => {
            target.places.iter().filter(|place| objects.contains(&place.object)).collect()
        }
        Access::Refused(reason) => {
            return Finding::Refused { reason: (*reason).to_owned(), is_sure: true };
        }
        Access::Asked => return Finding::Open,
        Access::Unknown(reason) => return Finding::Unknown { reason: reason.as_str().into() },
    };
    let Some(first) = allowed.first() else {
        let reason = "the workload's service account may not read it (see --authorize)".to_owned();
        return Finding::Refused { reason, is_sure: true };
    };
    let mut refusal = None;
    for place in &allowed {
        match objects.seen(place) {
            Some(Seen::Present(content)) => {
                let (place, content) = ((*place).clone(), Arc::clone(content));
                let trouble = objects.trouble(&place);
                return Finding::Present { place, content, trouble };
            }
            Some(Seen::Absent) => {}
            Some(Seen::Unknown { reason, is_final: true }) => refusal = Some(Arc::clone(reason)),
            Some(Seen::Unknown { reason, is_final: false }) => {
                return Finding::Unknown { reason: Arc::clone(reason) };
            }
            None => return Finding::Open,
        }
    }
    match refusal {
        Some(reason) => Finding::Refused { reason: reason.to_string(), is_sure: false },
        None => Finding::Absent { place: (*first).clone() },
    }
}

/// The first element of a set of moments, if its time has come.
trait PopDue {
    fn pop_first_if(&mut self, now: SystemTime) -> Option<(SystemTime, Key)>;
}

impl PopDue for BTreeSet<(SystemTime, Key)> {
    fn pop_first_if(&mut self, now: SystemTime) -> Option<(SystemTime, Key)> {
        let is_due = self.first().is_some_and(|(at, _)| *at <= now);
        if is_due { self.pop_first() } else { None }
    }
}

#[cfg(test)]
mod tests;
