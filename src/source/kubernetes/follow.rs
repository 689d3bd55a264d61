//! Follows an object with a watch of its own.

use std::convert::Infallible;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, timeout};

use super::cluster::{Cluster, FORBIDDEN, PACE, delay};
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
    /// [`Cluster::number`].
    pub(super) cluster_number: u64,
    pub(super) object: ObjectId,
}

/// What was found out of an object.
#[derive(Clone, Debug)]
pub(super) enum Seen {
    Present(Arc<Content>),
    /// It does not exist.
    Absent,
    /// For people, why it is not known. Final: RBAC forbids it.
    Unknown {
        reason: Arc<str>,
        is_final: bool,
    },
    /// Too many names that don't exist are asked for: this one is looked up later.
    Postponed,
}

/// What a follower reports.
#[derive(Debug)]
pub(super) enum Report {
    Object(Place, Seen, By),
    /// Every object that is asked for in the namespace is followed by one watch from now on.
    Taken(Group),
    /// The namespace could not be listed or watched now. It is attempted again.
    Failed(Group),
    /// The namespace can't be listed, for this reason.
    NotTaken(Group, String),
}

/// What an object is followed by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum By {
    /// A watch of its own.
    Itself,
    /// The watch of its namespace.
    Namespace,
}

/// The objects of one kind in one namespace.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Group {
    pub(super) cluster: crate::kube::ClusterId,
    cluster_number: u64,
    pub(super) kind: Kind,
    pub(super) namespace: Arc<str>,
}

impl Group {
    pub(super) fn of(place: &Place) -> Self {
        let ObjectId { kind, namespace, .. } = &place.object;
        let (cluster, cluster_number) = (place.cluster.clone(), place.cluster_number);
        Self { cluster, cluster_number, kind: *kind, namespace: Arc::clone(namespace) }
    }

    pub(super) fn place(&self, name: &Arc<str>) -> Place {
        let Self { cluster, cluster_number, kind, namespace } = self.clone();
        Place { cluster, cluster_number, object: ObjectId { kind, namespace, name: Arc::clone(name) } }
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

/// Waits before a watch is opened again that ended soon after it was `opened`. Returns how often in a row that happened.
pub(super) async fn pause_after(opened: Instant, failures: u32) -> u32 {
    if opened.elapsed() >= SHORT {
        return 0;
    }
    let failures = failures + 1;
    tokio::time::sleep(PACE.delay(failures, fastrand::f64())).await;
    failures
}

/// How a watch ended.
enum Ending {
    /// Another one continues it.
    Known,
    /// The object has to be read again.
    Unknown,
}

/// Follows one object.
pub(super) struct Follower {
    pub(super) cluster: Arc<Cluster>,
    pub(super) place: Place,
    pub(super) wants: Wants,
    pub(super) reports: Reports,
    /// What is known of it, as far as it is enough.
    pub(super) content: Option<Arc<Content>>,
    /// What was kept of it may be served.
    pub(super) may_load: bool,
    /// It counts among the names that don't exist, if it does not.
    pub(super) is_counted: bool,
    /// Before the first call.
    pub(super) pause: Duration,
    pub(super) connection: watch::Receiver<Arc<dyn Api>>,
    /// Watching it is forbidden: nothing newer is noticed soon.
    pub(super) is_unwatched: bool,
    /// How often in a row a watch began with something else than what was read.
    pub(super) mismatches: u32,
    /// How often in a row it could not be read.
    pub(super) failures: u32,
}

impl Follower {
    /// Reports every change. Does not return.
    pub(super) async fn run(mut self: Box<Self>) -> Infallible {
        tokio::time::sleep(self.pause).await;
        loop {
            // What is read now is of this connection.
            self.connection.mark_unchanged();
            // Thousands of tasks wait in a watch for years: what takes a moment is in boxes of its own.
            if Box::pin(self.refresh()).await {
                self.watch().await;
            }
        }
    }

    /// Reads the object. False: it could not be read, and it is time to try again.
    async fn refresh(&mut self) -> bool {
        match self.read().await {
            Ok(object) => {
                self.failures = 0;
                let was_present = self.content.is_some();
                self.take(object).await;
                if self.content.is_none() && !was_present {
                    self.count_miss();
                    tokio::time::sleep(ABSENT).await;
                }
                true
            }
            Err(error) => {
                self.failures += 1;
                if error.is_forbidden() {
                    self.count_miss();
                } else if self.content.is_none() {
                    self.load_kept().await;
                }
                self.report(failed(&error));
                tokio::time::sleep(delay(&error, self.failures)).await;
                false
            }
        }
    }

    /// Once: what is asked for again by the agent itself is no new name.
    fn count_miss(&mut self) {
        if std::mem::take(&mut self.is_counted) {
            self.cluster.missed();
        }
    }

    /// Reads the object. While the API server does not answer, what was kept is served.
    async fn read(&mut self) -> Result<Option<Object>, KubeError> {
        if self.content.is_some() {
            return self.cluster.get(&self.place.object).await;
        }
        let cluster = Arc::clone(&self.cluster);
        let object = self.place.object.clone();
        let mut read = std::pin::pin!(cluster.get_first(&object));
        if self.cluster.keeper.is_none() || !self.may_load {
            return read.await;
        }
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
        let Some(keeper) = self.cluster.keeper.as_ref().filter(|_| self.may_load) else { return };
        let Some(object) = keeper.load(&self.place).await else { return };
        let content = parse(object, self.wants, None, self.cluster.now()).await;
        if content.is_usable() {
            self.content = Some(Arc::clone(&content));
            self.report(Seen::Present(content));
        }
    }

    /// Watches the object until it has to be read again.
    async fn watch(&mut self) {
        let cluster = Arc::clone(&self.cluster);
        let Ok(_room) = cluster.watches.try_acquire() else {
            // It is read from time to time instead.
            return tokio::time::sleep(FORBIDDEN).await;
        };
        let mut from: Option<Version> = None;
        let mut endings = 0;
        while let Some(watch) = Box::pin(self.open(from.as_ref())).await {
            let opened = Instant::now();
            if let Ending::Unknown = self.follow(watch, &mut from).await {
                return;
            }
            endings = Box::pin(pause_after(opened, endings)).await;
        }
    }

    /// Opens the watch; none if the object has to be read again.
    async fn open(&mut self, from: Option<&Version>) -> Option<Watch> {
        let ObjectId { kind, namespace, name } = self.place.object.clone();
        let selection = Selection { kind, namespace, of: Of::Name(name) };
        let mut failures = 0;
        loop {
            match self.cluster.watch(&selection, from).await {
                Ok(watch) => {
                    if std::mem::take(&mut self.is_unwatched)
                        && let Some(content) = self.content.clone()
                    {
                        self.report(Seen::Present(content));
                    }
                    return Some(watch);
                }
                Err(KubeError::Expired { .. }) => return None,
                Err(error) => {
                    failures += 1;
                    let is_forbidden = error.is_forbidden();
                    if is_forbidden || self.content.is_some() {
                        self.report(failed(&error));
                    }
                    self.is_unwatched = is_forbidden;
                    tokio::time::sleep(delay(&error, failures)).await;
                    if is_forbidden {
                        return None;
                    }
                }
            }
        }
    }

    /// Takes the events of a watch until it ends.
    async fn follow(&mut self, mut watch: Watch, from: &mut Option<Version>) -> Ending {
        if from.is_none()
            && self.content.is_some()
            && let ControlFlow::Break(ending) = Box::pin(self.confirm(&mut watch, from)).await
        {
            return ending;
        }
        loop {
            let next = next(&mut watch, &mut self.connection).await;
            if let ControlFlow::Break(ending) = Box::pin(self.advance(next, from)).await {
                return ending;
            }
        }
    }

    /// Takes the first event of a watch. What is there comes at once, and then a bookmark. If it does not, it was deleted after
    /// it was read; if it is something else, it has changed, or the API server's cache is behind.
    async fn confirm(&mut self, watch: &mut Watch, from: &mut Option<Version>) -> ControlFlow<Ending> {
        let version = self.content.as_ref().map(|content| &content.version);
        match timeout(FIRST_EVENT, next(watch, &mut self.connection)).await {
            Err(_) | Ok(Next::Event(Event::Version(_))) => self.mismatch().await,
            Ok(Next::Event(Event::Object(object))) if version != Some(&object.version) => {
                self.mismatch().await
            }
            Ok(next) => return self.advance(next, from).await,
        }
        ControlFlow::Break(Ending::Unknown)
    }

    /// Takes what comes next in a watch.
    async fn advance(&mut self, next: Next, from: &mut Option<Version>) -> ControlFlow<Ending> {
        match next {
            Next::Event(Event::Object(object)) => {
                self.mismatches = 0;
                *from = Some(object.version.clone());
                self.take(Some(object)).await;
            }
            Next::Event(Event::Version(version)) => *from = Some(version),
            // Reading it confirms that.
            Next::Event(Event::Deleted { .. }) | Next::Reconnected => {
                return ControlFlow::Break(Ending::Unknown);
            }
            Next::Ended => return ControlFlow::Break(Ending::Known),
            Next::Failed(KubeError::Expired { .. }) => return ControlFlow::Break(Ending::Unknown),
            Next::Failed(error) => {
                self.cluster.note(Some(&error));
                return ControlFlow::Break(Ending::Known);
            }
        }
        ControlFlow::Continue(())
    }

    /// A watch began with something else than what was read: both are asked for again, less and less often.
    async fn mismatch(&mut self) {
        tokio::time::sleep(PACE.delay(self.mismatches, fastrand::f64()) * u32::from(self.mismatches > 0))
            .await;
        self.mismatches += 1;
    }

    async fn take(&mut self, object: Option<Object>) {
        let Some(object) = object else {
            self.content = None;
            forget(&self.cluster, &self.place);
            return self.report(Seen::Absent);
        };
        let known = self.content.as_ref().filter(|known| known.version == object.version);
        let content = match known {
            // Nothing has changed, and nothing newer is noticed soon, as was reported.
            Some(_) if self.is_unwatched => return,
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
        let _ = self.reports.send(Report::Object(self.place.clone(), seen, By::Itself));
    }
}
