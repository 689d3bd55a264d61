//! Follows an object with a watch of its own.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, timeout};

use super::cluster::{Cluster, PACE, delay};
use super::content::{Content, Wants};
use super::kept;
use crate::base::offload;
use crate::base::text;
use crate::kube::{Api, Event, Kind, KubeError, Object, ObjectId, Of, Selection, Version, Watch};

/// How long an object that does not exist is left alone before it is watched: names that clients make up go sooner.
const ABSENT: Duration = Duration::from_secs(2);
/// Within this time a watch without a version has told what there is, also where the API server sends no bookmark then.
const FIRST_EVENT: Duration = Duration::from_secs(2);
/// A watch that ends sooner is not opened again at once.
const SHORT: Duration = Duration::from_secs(5);
/// How long an API server may take to answer before what was kept of an object is served.
const UNANSWERED: Duration = Duration::from_secs(1);

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

/// The same, and the object is kept in the state directory if it can be served.
pub(super) async fn parse_and_keep(
    cluster: &Cluster,
    place: &Place,
    object: Object,
    wants: Wants,
    before: Option<Arc<Content>>,
) -> Arc<Content> {
    let Some(keeper) = &cluster.keeper else { return parse(object, wants, before, cluster.now()).await };
    let encoded = kept::encode(place, &object);
    let content = parse(object, wants, before, cluster.now()).await;
    if content.is_usable() {
        keeper.keep(place, encoded);
    }
    content
}

pub(super) fn forget(cluster: &Cluster, place: &Place) {
    cluster.keeper.as_ref().inspect(|keeper| keeper.forget(place));
}

pub(super) fn failed(error: &KubeError) -> Seen {
    let reason = text::sanitize_for_log(&error.to_string()).into();
    Seen::Unknown { reason, is_final: error.is_forbidden() }
}

/// The next event of a watch, or why there is none.
pub(super) enum Next {
    Event(Event),
    /// The watch has ended as watches do.
    Ended,
    Failed(KubeError),
    /// There is another connection to the cluster.
    Reconnected,
}

pub(super) async fn next(watch: &mut Watch, connection: &mut watch::Receiver<Arc<dyn Api>>) -> Next {
    tokio::select! {
        event = watch.next() => match event {
            Some(Ok(event)) => Next::Event(event),
            Some(Err(error)) => Next::Failed(error),
            None => Next::Ended,
        },
        _ = connection.changed() => Next::Reconnected,
    }
}

/// Returns at this moment.
pub(super) async fn until(moment: Option<Instant>) {
    match moment {
        Some(moment) => tokio::time::sleep(moment.saturating_duration_since(Instant::now())).await,
        None => std::future::pending().await,
    }
}

/// Waits before a watch is opened again that ended soon after it was `opened`. Returns how often in a row that happened.
pub(super) async fn pause_after(opened: Instant, failures: u32) -> u32 {
    if opened.elapsed() >= SHORT {
        return 0;
    }
    let failures = failures + 1;
    tokio::time::sleep(PACE.delay(failures, fastrand::f64())).await;
    failures
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
            match self.read().await {
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
                    } else if self.content.is_none() {
                        self.load_kept().await;
                    }
                    self.report(failed(&error));
                    tokio::time::sleep(delay(&error, failures)).await;
                }
            }
        }
    }

    /// Reads the object. While the API server does not answer, what was kept is served.
    async fn read(&mut self) -> Result<Option<Object>, KubeError> {
        if self.cluster.keeper.is_none() || self.content.is_some() {
            return self.cluster.get(&self.place.object).await;
        }
        let cluster = Arc::clone(&self.cluster);
        let object = self.place.object.clone();
        let mut read = std::pin::pin!(cluster.get(&object));
        match timeout(UNANSWERED, &mut read).await {
            Ok(read) => read,
            Err(_) => {
                self.load_kept().await;
                read.await
            }
        }
    }

    /// Serves what was kept of the object, if anything was.
    async fn load_kept(&mut self) {
        let Some(keeper) = &self.cluster.keeper else { return };
        let Some(object) = keeper.load(&self.place).await else { return };
        let content = parse(object, self.wants, None, self.cluster.now()).await;
        if content.is_usable() {
            self.content = Some(Arc::clone(&content));
            self.report(Seen::Present(content));
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
            let opened = Instant::now();
            // What is there comes at once, and then a bookmark. If it does not, it was deleted after it was read.
            let mut unconfirmed =
                (from.is_none() && self.content.is_some()).then(|| Instant::now() + FIRST_EVENT);
            loop {
                let next = tokio::select! {
                    next = next(&mut watch, &mut connection) => next,
                    () = until(unconfirmed), if unconfirmed.is_some() => return,
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
            failures = pause_after(opened, failures).await;
        }
    }

    async fn take(&mut self, object: Option<Object>) {
        let Some(object) = object else {
            self.content = None;
            forget(&self.cluster, &self.place);
            return self.report(Seen::Absent);
        };
        let known = self.content.as_ref().filter(|known| known.version == object.version);
        let content = match known {
            Some(known) => Arc::clone(known),
            None => {
                parse_and_keep(&self.cluster, &self.place, object, self.wants, self.content.clone()).await
            }
        };
        self.content = Some(Arc::clone(&content));
        self.report(Seen::Present(content));
    }

    fn report(&self, seen: Seen) {
        // Fails when the agent stops.
        let _ = self.reports.send(Report::Object(self.place.clone(), seen));
    }
}
