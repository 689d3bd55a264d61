//! Follows objects: one each with a watch of its own, or all that are asked for of a namespace with one watch.

use std::collections::{HashMap, HashSet};
use std::convert::Infallible;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::cluster::{Cluster, delay};
use super::content::{Content, Wants};
use crate::base::offload;
use crate::base::text;
use crate::kube::{Api, Event, Kind, KubeError, Object, ObjectId, Of, Selection, Version, Watch};

/// How long an object that does not exist is left alone before it is watched: names that clients make up go sooner.
const ABSENT: Duration = Duration::from_secs(2);
/// Within this time a watch without a version has told what there is, also where the API server sends no bookmark then.
const FIRST_EVENT: Duration = Duration::from_secs(2);
/// So many objects are parsed in one turn; others of the agent's tasks get theirs in between.
const TURN: usize = 8;
/// How many names of a namespace are remembered that are not asked for.
const KNOWN_NAMES: usize = 100_000;

/// An object in a cluster.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Place {
    pub(super) cluster: crate::kube::ClusterId,
    pub(super) object: ObjectId,
}

/// What was found out of an object.
#[derive(Clone, Debug)]
pub(super) enum Seen {
    Present(Arc<Content>),
    /// It does not exist.
    Absent,
    /// For people, why it is not known. Final: it will not be known soon, because RBAC forbids it, or because names that don't
    /// exist were asked for too often.
    Unknown {
        reason: Arc<str>,
        is_final: bool,
    },
}

/// What a follower reports.
#[derive(Debug)]
pub(super) enum Report {
    Object(Place, Seen),
    /// Every object that is asked for in the namespace is followed by one watch from now on.
    Taken(Group),
    /// The namespace can't be listed, for this reason.
    NotTaken(Group, String),
}

/// The objects of one kind in one namespace.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Group {
    pub(super) cluster: crate::kube::ClusterId,
    pub(super) kind: Kind,
    pub(super) namespace: Arc<str>,
}

impl Group {
    pub(super) fn of(place: &Place) -> Self {
        let ObjectId { kind, namespace, .. } = &place.object;
        Self { cluster: place.cluster.clone(), kind: *kind, namespace: Arc::clone(namespace) }
    }

    pub(super) fn place(&self, name: &Arc<str>) -> Place {
        let Self { cluster, kind, namespace } = self.clone();
        Place { cluster, object: ObjectId { kind, namespace, name: Arc::clone(name) } }
    }
}

pub(super) type Reports = mpsc::UnboundedSender<Report>;

async fn parse(object: Object, wants: Wants, before: Option<Arc<Content>>, now: SystemTime) -> Arc<Content> {
    let bytes = Content::bytes(&object);
    offload::large(bytes, move || Arc::new(Content::parse(&object, wants, before.as_deref(), now))).await
}

fn failed(error: &KubeError) -> Seen {
    let reason = text::sanitize_for_log(&error.to_string()).into();
    Seen::Unknown { reason, is_final: error.is_forbidden() }
}

/// The next event of a watch, or why there is none.
enum Next {
    Event(Event),
    /// The watch has ended as watches do.
    Ended,
    Failed(KubeError),
    /// There is another connection to the cluster.
    Reconnected,
}

async fn next(watch: &mut Watch, connection: &mut watch::Receiver<Arc<dyn Api>>) -> Next {
    tokio::select! {
        event = watch.next() => match event {
            Some(Ok(event)) => Next::Event(event),
            Some(Err(error)) => Next::Failed(error),
            None => Next::Ended,
        },
        _ = connection.changed() => Next::Reconnected,
    }
}

/// Follows one object.
pub(super) struct Follower {
    pub(super) cluster: Arc<Cluster>,
    pub(super) place: Place,
    pub(super) wants: Wants,
    pub(super) reports: Reports,
    pub(super) content: Option<Arc<Content>>,
    /// Before the first call.
    pub(super) pause: Duration,
}

impl Follower {
    /// Reports every change. Does not return.
    pub(super) async fn run(mut self) -> Infallible {
        tokio::time::sleep(self.pause).await;
        let mut failures = 0;
        loop {
            match self.cluster.get(&self.place.object).await {
                Ok(object) => {
                    failures = 0;
                    let was_present = self.content.is_some();
                    self.take(object).await;
                    if self.content.is_none() && !was_present {
                        self.cluster.missed();
                        tokio::time::sleep(ABSENT).await;
                    }
                    self.watch().await;
                }
                Err(error) => {
                    failures += 1;
                    if error.is_forbidden() {
                        self.cluster.missed();
                    }
                    self.report(failed(&error));
                    tokio::time::sleep(delay(&error, failures)).await;
                }
            }
        }
    }

    /// Watches the object until it has to be read again.
    async fn watch(&mut self) {
        let ObjectId { kind, namespace, name } = self.place.object.clone();
        let selection = Selection { kind, namespace, of: Of::Name(name) };
        let mut from: Option<Version> = None;
        let mut failures = 0;
        loop {
            let mut connection = self.cluster.connection();
            let mut watch = match self.cluster.watch(&selection, from.as_ref()).await {
                Ok(watch) => watch,
                Err(KubeError::Expired { .. }) => return,
                Err(error) => {
                    failures += 1;
                    self.report(failed(&error));
                    tokio::time::sleep(delay(&error, failures)).await;
                    if error.is_forbidden() {
                        // It is read from time to time instead.
                        return;
                    }
                    continue;
                }
            };
            failures = 0;
            // What is there comes at once, and then a bookmark. If it does not, it was deleted after it was read.
            let mut unconfirmed =
                (from.is_none() && self.content.is_some()).then(|| Instant::now() + FIRST_EVENT);
            loop {
                let silent = async {
                    match unconfirmed {
                        Some(until) => {
                            tokio::time::sleep(until.saturating_duration_since(Instant::now())).await
                        }
                        None => std::future::pending().await,
                    }
                };
                let next = tokio::select! {
                    next = next(&mut watch, &mut connection) => next,
                    () = silent => return,
                };
                match next {
                    Next::Event(Event::Object(object)) => {
                        unconfirmed = None;
                        from = Some(object.version.clone());
                        self.take(Some(object)).await;
                    }
                    Next::Event(Event::Version(_)) if unconfirmed.is_some() => return,
                    Next::Event(Event::Version(version)) => from = Some(version),
                    // Reading it confirms that.
                    Next::Event(Event::Deleted { .. }) | Next::Reconnected => return,
                    Next::Ended => break,
                    Next::Failed(KubeError::Expired { .. }) => return,
                    Next::Failed(error) => {
                        self.cluster.note(Some(&error));
                        break;
                    }
                }
            }
        }
    }

    async fn take(&mut self, object: Option<Object>) {
        let Some(object) = object else {
            self.content = None;
            return self.report(Seen::Absent);
        };
        let known = self.content.as_ref().filter(|known| known.version == object.version);
        let content = match known {
            Some(known) => Arc::clone(known),
            None => parse(object, self.wants, self.content.clone(), self.cluster.now()).await,
        };
        self.content = Some(Arc::clone(&content));
        self.report(Seen::Present(content));
    }

    fn report(&self, seen: Seen) {
        // Fails when the agent stops.
        let _ = self.reports.send(Report::Object(self.place.clone(), seen));
    }
}

/// The names of a namespace: those that are asked for, and which there may be.
#[derive(Debug, Default)]
pub(super) struct Names {
    wanted: Mutex<HashMap<Arc<str>, Wants>>,
    /// Hashes of the names that the API server has sent. None: there are too many of them.
    known: Mutex<Option<HashSet<u64>>>,
    hasher: RandomState,
}

impl Names {
    pub(super) fn new(wanted: HashMap<Arc<str>, Wants>) -> Self {
        Self { wanted: Mutex::new(wanted), known: Mutex::new(Some(HashSet::new())), ..Self::default() }
    }

    pub(super) fn want(&self, name: Arc<str>, wants: Wants) {
        lock(&self.wanted).insert(name, wants);
    }

    pub(super) fn forget(&self, name: &str) {
        lock(&self.wanted).remove(name);
    }

    fn wants(&self, name: &str) -> Option<Wants> {
        lock(&self.wanted).get(name).copied()
    }

    fn all(&self) -> Vec<Arc<str>> {
        lock(&self.wanted).keys().cloned().collect()
    }

    /// Notes that there is an object of this name; true if it is asked for.
    fn meet(&self, name: &str) -> bool {
        let mut known = lock(&self.known);
        if let Some(names) = &mut *known {
            names.insert(self.hasher.hash_one(name));
            if names.len() > KNOWN_NAMES {
                *known = None;
            }
        }
        drop(known);
        self.wants(name).is_some()
    }

    /// Whether there may be an object of this name.
    fn may_exist(&self, name: &str) -> bool {
        lock(&self.known).as_ref().is_none_or(|known| known.contains(&self.hasher.hash_one(name)))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A name that was read.
type Read = (Arc<str>, Result<Option<Object>, KubeError>);

/// Follows all objects of a namespace that are asked for.
pub(super) struct GroupFollower {
    cluster: Arc<Cluster>,
    group: Group,
    names: Arc<Names>,
    /// Names that are asked for from now on.
    added: mpsc::UnboundedReceiver<Arc<str>>,
    reports: Reports,
    contents: HashMap<Arc<str>, Arc<Content>>,
    /// Names that are being read, and those of them that the watch has reported meanwhile.
    reads: JoinSet<Read>,
    reading: HashMap<Arc<str>, bool>,
}

impl GroupFollower {
    pub(super) fn new(
        cluster: Arc<Cluster>,
        group: Group,
        names: Arc<Names>,
        added: mpsc::UnboundedReceiver<Arc<str>>,
        reports: Reports,
        contents: HashMap<Arc<str>, Arc<Content>>,
    ) -> Self {
        let (reads, reading) = Default::default();
        Self { cluster, group, names, added, reports, contents, reads, reading }
    }

    /// Reports every change. Returns if the namespace must not be listed.
    pub(super) async fn run(mut self) {
        let names = Arc::clone(&self.names);
        let selection = Selection {
            kind: self.group.kind,
            namespace: Arc::clone(&self.group.namespace),
            of: Of::Wanted(Arc::new(move |name| names.meet(name))),
        };
        let (mut failures, mut is_taken) = (0, false);
        loop {
            match self.cluster.list(&selection).await {
                Ok(list) => {
                    failures = 0;
                    self.take_list(list.objects).await;
                    if !std::mem::replace(&mut is_taken, true) {
                        let _ = self.reports.send(Report::Taken(self.group.clone()));
                    }
                    self.watch(&selection, list.version).await;
                }
                Err(error) if error.is_forbidden() => {
                    let reason = text::sanitize_for_log(&error.to_string());
                    let _ = self.reports.send(Report::NotTaken(self.group.clone(), reason));
                    return;
                }
                Err(error) => {
                    failures += 1;
                    tokio::time::sleep(delay(&error, failures)).await;
                }
            }
        }
    }

    async fn take_list(&mut self, objects: Vec<Object>) {
        let mut missing: HashSet<_> = self.names.all().into_iter().collect();
        for (number, object) in objects.into_iter().enumerate() {
            missing.remove(&*object.name);
            self.take(object).await;
            if number % TURN == TURN - 1 {
                tokio::task::yield_now().await;
            }
        }
        for name in missing {
            self.miss(&name);
        }
    }

    /// Watches from `version` on, until the namespace has to be listed again.
    async fn watch(&mut self, selection: &Selection, version: Version) {
        let mut from = version;
        let mut failures = 0;
        loop {
            let mut connection = self.cluster.connection();
            let mut watch = match self.cluster.watch(selection, Some(&from)).await {
                Ok(watch) => watch,
                Err(KubeError::Expired { .. }) => return,
                Err(error) => {
                    failures += 1;
                    tokio::time::sleep(delay(&error, failures)).await;
                    if error.is_forbidden() {
                        return;
                    }
                    continue;
                }
            };
            failures = 0;
            loop {
                let event = tokio::select! {
                    event = next(&mut watch, &mut connection) => event,
                    Some(name) = self.added.recv() => {
                        self.add(name);
                        continue;
                    }
                    Some(read) = self.reads.join_next() => {
                        self.finish_read(read).await;
                        continue;
                    }
                };
                match event {
                    Next::Event(Event::Object(object)) => {
                        from = object.version.clone();
                        self.overtake(&object.name);
                        self.take(object).await;
                    }
                    Next::Event(Event::Deleted { name, version }) => {
                        from = version;
                        if self.names.wants(&name).is_some() {
                            // Reading it confirms that.
                            self.read((&*name).into(), Duration::ZERO);
                        }
                    }
                    Next::Event(Event::Version(version)) => from = version,
                    Next::Reconnected => return,
                    Next::Ended => break,
                    Next::Failed(KubeError::Expired { .. }) => return,
                    Next::Failed(error) => {
                        self.cluster.note(Some(&error));
                        break;
                    }
                }
            }
        }
    }

    /// A name that is asked for now costs a call only if there may be such an object.
    fn add(&mut self, name: Arc<str>) {
        let wanted = lock(&self.names.wanted);
        if self.contents.len() > 2 * wanted.len() {
            self.contents.retain(|name, _| wanted.contains_key(name));
        }
        drop(wanted);
        match self.names.may_exist(&name) {
            true => self.read(name, Duration::ZERO),
            false => self.miss(&name),
        }
    }

    fn read(&mut self, name: Arc<str>, pause: Duration) {
        self.reading.insert(Arc::clone(&name), false);
        let (cluster, object) = (Arc::clone(&self.cluster), self.group.place(&name).object);
        self.reads.spawn(async move {
            tokio::time::sleep(pause).await;
            (name, cluster.get(&object).await)
        });
    }

    /// The watch reports an object that is being read: what is read may be older.
    fn overtake(&mut self, name: &str) {
        if let Some(is_overtaken) = self.reading.get_mut(name) {
            *is_overtaken = true;
        }
    }

    async fn finish_read(&mut self, read: Result<Read, tokio::task::JoinError>) {
        let (name, result) = match read {
            Ok(read) => read,
            Err(error) => match error.try_into_panic() {
                Ok(panic) => std::panic::resume_unwind(panic),
                Err(_) => return,
            },
        };
        if self.reading.remove(&name) == Some(true) {
            return;
        }
        match result {
            Ok(Some(object)) => self.take(object).await,
            Ok(None) => self.miss(&name),
            Err(error) => {
                let place = self.group.place(&name);
                let _ = self.reports.send(Report::Object(place, failed(&error)));
                // Until it is known.
                self.read(name, delay(&error, 3));
            }
        }
    }

    async fn take(&mut self, object: Object) {
        let Some(wants) = self.names.wants(&object.name) else { return };
        let before = self.contents.get(&*object.name).cloned();
        let name: Arc<str> = (&*object.name).into();
        let content = match before {
            Some(known) if known.version == object.version && known.wants.covers(wants) => known,
            before => parse(object, wants, before, self.cluster.now()).await,
        };
        self.contents.insert(Arc::clone(&name), Arc::clone(&content));
        let _ = self.reports.send(Report::Object(self.group.place(&name), Seen::Present(content)));
    }

    fn miss(&mut self, name: &Arc<str>) {
        self.contents.remove(name);
        let _ = self.reports.send(Report::Object(self.group.place(name), Seen::Absent));
    }
}
