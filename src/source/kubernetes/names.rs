//! The names that streams ask for: where each one leads, who may read it, and what is published as it.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use smallvec::{SmallVec, smallvec};
use tokio::task::{JoinError, JoinSet};
use tokio::time::Instant;

use super::KubernetesSettings;
use super::access::{Check, check};
use super::cluster::{Cluster, FORBIDDEN, PACE};
use super::clusters::{Clusters, NoCluster};
use super::content::Wants;
use super::follow::{Place, Report, Seen};
use super::objects::Objects;
use super::served::{Finding, Served};
use crate::base::clock::Clock;
use crate::base::offload;
use crate::kube::{Account, Kind, KubeError, ObjectId};
use crate::metrics::Metrics;
use crate::secret::{KubernetesName, Scheme, Secret, SecretName};
use crate::store::{Cache, Key, LINGER, Workload};

/// How long a yes or a no of a review is good for.
const REVIEWED: Duration = FORBIDDEN;
const NO_NAMESPACE: &str = "it names no namespace, and the workload's own is not known (yet): set --namespace, or ask for \
    kubernetes://NAMESPACE/NAME";
/// How often it is tried to find out where a name leads, or whose it is.
const AIM_AGAIN: Duration = Duration::from_secs(2);
/// With more names than this, an object gets no other spellings.
const SPELLINGS: usize = 64;

/// One name that a stream asks for.
pub(super) struct Name {
    served: Served,
    /// None while it is not known where to look.
    target: Option<Target>,
    access: Access,
    /// Its rights are being reviewed.
    is_in_review: bool,
    /// When to look at it again.
    due: Option<SystemTime>,
    /// Until then its value is kept, if no stream returns.
    kept_until: Option<Instant>,
}

/// Where the secret of a name is.
#[derive(Clone)]
struct Target {
    cluster: Arc<Cluster>,
    /// The first one that exists counts.
    places: SmallVec<[Place; 1]>,
    wants: Wants,
}

/// Which of a name's objects may be served.
#[derive(Clone, Debug)]
enum Access {
    /// All.
    Free,
    /// None, for this reason.
    Refused(&'static str),
    /// The API server is being asked for the first time.
    Asked,
    /// These.
    Reviewed { objects: Vec<ObjectId>, at: SystemTime },
    /// It can't be found out: for people.
    Unknown(String),
}

pub(super) type Review = (Key, Result<Vec<ObjectId>, KubeError>);

/// All names that streams ask for.
pub(super) struct Names {
    pub(super) settings: KubernetesSettings,
    pub(super) clusters: Clusters,
    pub(super) cache: Cache,
    pub(super) workload: Workload,
    pub(super) clock: Clock,
    pub(super) metrics: Metrics,
    /// In boxes: a map has room for more than it holds.
    pub(super) by_key: HashMap<Key, Box<Name>>,
    pub(super) objects: Objects,
    pub(super) reviews: JoinSet<Review>,
    /// Names whose last stream has left, and whose value is kept for a while; about the oldest first.
    pub(super) lingering: VecDeque<(Instant, Key)>,
    /// When to look at names again: certificates and CRLs begin and end, rights are asked for again.
    pub(super) due: BTreeSet<(SystemTime, Key)>,
    /// Names that have no value because nothing is known of their objects.
    pub(super) unresolved: BTreeSet<Key>,
}

impl Names {
    /// A stream asks for a name.
    pub(super) fn add(&mut self, key: Key) {
        if self.by_key.contains_key(&key) {
            // There is room for its value now.
            return self.settle(&key);
        }
        let served = Served::new(&self.cache, key.clone());
        let access = Access::Asked;
        let name = Name { served, target: None, access, is_in_review: false, due: None, kept_until: None };
        self.by_key.insert(key.clone(), Box::new(name));
        self.aim(&key);
    }

    /// Finds out where a name leads and who may read it, and has its objects followed.
    fn aim(&mut self, key: &Key) {
        let SecretName::Kubernetes(kubernetes_name) = &key.name else { return };
        let target = self.target(kubernetes_name);
        self.lose(key);
        let Some(name) = self.by_key.get_mut(key) else { return };
        let has_room = |target: &Target| {
            let first = target.places.first().map_or(0, |place| self.objects.count(place));
            first < SPELLINGS
        };
        match target {
            Ok(target) if !has_room(&target) => {
                let reason = "its object is served under many other spellings of this name".to_owned();
                let finding = Finding::Refused { reason, is_sure: false };
                name.served.settle(finding, Wants::default(), self.clock.now(), &self.metrics);
                return;
            }
            Ok(target) => name.target = Some(target),
            Err(finding) => {
                name.served.settle(finding, Wants::default(), self.clock.now(), &self.metrics);
                return self.set_due(key, AIM_AGAIN);
            }
        }
        self.review(key, kubernetes_name);
        if self.by_key.get(key).is_some_and(|name| matches!(name.access, Access::Free)) {
            self.follow(key);
        }
        self.settle(key);
    }

    /// Has the objects of a name followed.
    fn follow(&mut self, key: &Key) {
        let Some(target) = self.by_key.get(key).and_then(|name| name.target.clone()) else { return };
        for (index, place) in target.places.iter().enumerate() {
            // Most names with `-cacert` have only the other object.
            let is_counted = index + 1 == target.places.len();
            self.objects.follow(&target.cluster, place, key, target.wants, is_counted);
        }
    }

    /// A name no longer needs its objects.
    fn lose(&mut self, key: &Key) {
        let target = self.by_key.get_mut(key).and_then(|name| name.target.take());
        for place in target.iter().flat_map(|target| &target.places) {
            self.objects.unfollow(place, key);
        }
    }

    /// Finds out who may read the objects of a name. The last answer counts until there is another.
    fn review(&mut self, key: &Key, kubernetes_name: &KubernetesName) {
        let (account, own) = (self.account(), self.own_namespace());
        let Some(name) = self.by_key.get_mut(key) else { return };
        let Some(target) = &name.target else { return };
        let objects: Vec<_> = target.places.iter().map(|place| place.object.clone()).collect();
        let authorize = self.settings.authorize;
        match check(authorize, kubernetes_name, &objects, account.as_ref(), own.as_deref()) {
            Check::Allowed => name.access = Access::Free,
            Check::Refused(reason) => name.access = Access::Refused(reason),
            Check::Unknown(reason) => {
                if !matches!(name.access, Access::Reviewed { .. }) {
                    name.access = Access::Unknown(reason.to_owned());
                }
                self.set_due(key, AIM_AGAIN);
            }
            Check::Ask(questions) => {
                if std::mem::replace(&mut name.is_in_review, true) {
                    return;
                }
                if !matches!(name.access, Access::Reviewed { .. }) {
                    name.access = Access::Asked;
                }
                let (cluster, key) = (Arc::clone(&target.cluster), key.clone());
                self.reviews.spawn(async move {
                    let answer = questions.ask(&cluster).await;
                    (key, answer)
                });
            }
        }
    }

    /// Looks at a name again after `delay`, or sooner if that was planned.
    fn set_due(&mut self, key: &Key, delay: Duration) {
        let spread = delay.mul_f64(0.8 + 0.2 * fastrand::f64());
        self.set_due_at(key, self.clock.now() + spread);
    }

    fn set_due_at(&mut self, key: &Key, at: SystemTime) {
        let Some(name) = self.by_key.get_mut(key) else { return };
        match name.due {
            Some(planned) if planned <= at => return,
            Some(planned) => drop(self.due.remove(&(planned, key.clone()))),
            None => {}
        }
        name.due = Some(at);
        self.due.insert((at, key.clone()));
    }

    fn target(&self, name: &KubernetesName) -> Result<Target, Finding> {
        let cluster =
            match name.scheme() {
                Scheme::Gateway | Scheme::ConfigMap => Arc::clone(self.clusters.local()),
                _ => self.clusters.of_client(name.cluster()).map_err(|NoCluster { reason, is_open }| {
                    match is_open {
                        true => Finding::Unknown { reason: reason.into() },
                        false => Finding::Refused { reason, is_sure: false },
                    }
                })?,
            };
        let namespace: Arc<str> = match name.namespace() {
            Some(namespace) => namespace.into(),
            None => self.own_namespace().ok_or_else(|| Finding::Unknown { reason: NO_NAMESPACE.into() })?,
        };
        let kind = if name.scheme() == Scheme::ConfigMap { Kind::ConfigMap } else { Kind::Secret };
        let place = |name: &str| Place {
            cluster: cluster.id.clone(),
            cluster_number: cluster.number,
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
    pub(super) fn ask_again(&mut self, key: &Key) {
        let is_fresh = self.by_key.get(key).is_some_and(|name| match &name.access {
            Access::Reviewed { at, .. } => self.is_fresh(*at),
            Access::Free | Access::Asked | Access::Refused(_) => true,
            // It is asked again soon.
            Access::Unknown(_) => name.due.is_some(),
        });
        if !is_fresh {
            self.ask(key);
        }
    }

    /// Finds out again who may read the objects of a name, and where they are if that was not known.
    fn ask(&mut self, key: &Key) {
        let Some(name) = self.by_key.get(key) else { return };
        match (&key.name, &name.target) {
            (_, None) => self.aim(key),
            (SecretName::Kubernetes(name), Some(_)) => {
                self.review(key, name);
                if self.by_key.get(key).is_some_and(|name| matches!(name.access, Access::Free)) {
                    self.follow(key);
                }
                self.settle(key);
            }
            _ => {}
        }
    }

    fn is_fresh(&self, at: SystemTime) -> bool {
        self.clock.now().duration_since(at).is_ok_and(|age| age < REVIEWED)
    }

    /// The last stream of a name has left.
    pub(super) fn desert(&mut self, key: Key) {
        if !self.cache.has_value(&key) {
            self.retire(&key);
            return;
        }
        let Some(name) = self.by_key.get_mut(&key) else { return };
        let until = Instant::now() + LINGER;
        // One place in the queue, however often streams come and go.
        if name.kept_until.replace(until).is_none() {
            self.lingering.push_back((until, key));
        }
    }

    /// Drops the names that were kept for long enough, and `more` of the others: a name that a stream waits for goes before a
    /// value that no stream has.
    pub(super) fn drop_deserted(&mut self, mut more: usize) {
        let now = Instant::now();
        while let Some((until, key)) = self.lingering.pop_front_if(|(until, _)| more > 0 || *until <= now) {
            let Some(name) = self.by_key.get_mut(&key) else { continue };
            match name.kept_until.filter(|later| *later > until && more == 0) {
                Some(later) => self.lingering.push_back((later, key)),
                None => {
                    name.kept_until = None;
                    let is_gone = self.retire(&key);
                    more = more.saturating_sub(usize::from(is_gone));
                }
            }
        }
    }

    /// Drops a name, unless a stream has returned. True if it is gone.
    fn retire(&mut self, key: &Key) -> bool {
        if !self.cache.retire(key) {
            return false;
        }
        self.lose(key);
        if let Some(at) = self.by_key.remove(key).and_then(|name| name.due) {
            self.due.remove(&(at, key.clone()));
        }
        self.unresolved.remove(key);
        true
    }

    pub(super) fn take(&mut self, report: Report) {
        match report {
            Report::Object(place, seen, by) => {
                if !self.objects.note(&place, seen, by) {
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
            Report::Failed(group) => self.objects.not_taken_yet(&group),
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

    pub(super) fn reviewed(&mut self, review: Result<Review, JoinError>) {
        let Some((key, answer)) = offload::finished(review) else { return };
        let Some(name) = self.by_key.get_mut(&key) else { return };
        name.is_in_review = false;
        match answer {
            Ok(objects) => {
                let all = name.target.as_ref().map_or(0, |target| target.places.len());
                let is_refused = objects.len() < all;
                let is_allowed = !objects.is_empty();
                name.access = Access::Reviewed { objects, at: self.clock.now() };
                if is_allowed {
                    self.follow(&key);
                }
                // A yes is asked for again when a stream opens.
                if is_refused {
                    self.set_due(&key, REVIEWED);
                }
            }
            Err(error) => {
                // No answer is no refusal.
                if !matches!(name.access, Access::Reviewed { .. }) {
                    name.access = Access::Unknown(error.to_string());
                }
                self.set_due(&key, PACE.cap);
            }
        }
        self.settle(&key);
    }

    /// The clusters have changed: some names lead elsewhere.
    pub(super) fn retarget(&mut self) {
        let moved = |name: &Name| match &name.target {
            None => true,
            Some(target) => {
                let now = self.clusters.get(&target.cluster.id);
                // What a cluster delivered that is gone is still served.
                now.is_some_and(|now| !Arc::ptr_eq(&now, &target.cluster))
            }
        };
        let keys: Vec<_> =
            self.by_key.iter().filter(|(_, name)| moved(name)).map(|(key, _)| key.clone()).collect();
        // All of them first: what they share is followed through the new connection.
        keys.iter().for_each(|key| self.lose(key));
        keys.iter().for_each(|key| self.aim(key));
    }

    /// Looks again at the names whose time has come.
    pub(super) fn look_again(&mut self) {
        let now = self.clock.now();
        while self.due.first().is_some_and(|(at, _)| *at <= now) {
            let Some((_, key)) = self.due.pop_first() else { return };
            let Some(name) = self.by_key.get_mut(&key) else { continue };
            name.due = None;
            // Who may read it is asked for again only where the answer was no, or none.
            let is_refused = match (&name.access, &name.target) {
                (Access::Reviewed { objects, .. }, Some(target)) => objects.len() < target.places.len(),
                (Access::Unknown(_), _) | (_, None) => true,
                _ => false,
            };
            match is_refused {
                true => self.ask(&key),
                false => self.settle(&key),
            }
        }
    }

    /// Names that have no value get the reason why their API server does not answer.
    pub(super) fn report_outages(&mut self) {
        for key in self.unresolved.clone() {
            let Some(name) = self.by_key.get_mut(&key) else { continue };
            let outage = name.target.as_ref().and_then(|target| target.cluster.outage());
            if let Some(reason) = outage {
                let finding = Finding::Unknown { reason: reason.into() };
                name.served.settle(finding, Wants::default(), self.clock.now(), &self.metrics);
            }
        }
    }

    /// Publishes what is known of a name.
    fn settle(&mut self, key: &Key) {
        let Some(name) = self.by_key.get_mut(key) else { return };
        let Some(target) = &name.target else { return };
        let finding = find(&name.access, target, &self.objects);
        let is_open = matches!(finding, Finding::Open | Finding::Unknown { .. });
        let next = name.served.settle(finding, target.wants, self.clock.now(), &self.metrics);
        match is_open && !self.cache.has_value(key) {
            true => drop(self.unresolved.insert(key.clone())),
            false => drop(self.unresolved.remove(key)),
        }
        if let Some(at) = next {
            self.set_due_at(key, at);
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
            // It may exist: it is not passed over for the next one.
            Some(Seen::Postponed) => return Finding::Postponed,
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
