//! Follows all objects of a namespace that are asked for with one watch.

use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasher as _, RandomState};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::task::{JoinError, JoinSet};
use tokio::time::Instant;

use super::cluster::{Cluster, delay};
use super::content::{Content, Wants};
use super::follow::{
    By, Group, Next, Report, Reports, Seen, failed, forget, next, parse_and_keep, pause_after,
};
use crate::base::offload;
use crate::base::text;
use crate::kube::{Api, Event, KubeError, Object, Of, Selection, Version, Watch};

/// So many objects are parsed in one turn; others of the agent's tasks get theirs in between.
const TURN: usize = 8;
/// How many names of a namespace are remembered that are not asked for.
const KNOWN_NAMES: usize = 100_000;

/// The names of a namespace: those that are asked for, and which there may be.
#[derive(Debug, Default)]
pub(super) struct Wanted {
    wanted: Mutex<HashMap<Arc<str>, Known>>,
    /// Hashes of the names that the API server has sent. None: there are too many of them.
    known: Mutex<Option<HashSet<u64>>>,
    hasher: RandomState,
}

/// What is known of a name that is asked for.
#[derive(Debug, Default)]
struct Known {
    wants: Wants,
    content: Option<Arc<Content>>,
    /// It was in a list or an event of the namespace, or missing there. What else was read of it may be older.
    is_followed: bool,
}

impl Wanted {
    pub(super) fn new() -> Self {
        Self { known: Mutex::new(Some(HashSet::new())), ..Self::default() }
    }

    pub(super) fn want(&self, name: Arc<str>, wants: Wants) {
        lock(&self.wanted).entry(name).or_default().wants = wants;
    }

    /// Notes what was read of a name by itself.
    pub(super) fn know(&self, name: &str, content: &Arc<Content>) {
        if let Some(known) = lock(&self.wanted).get_mut(name) {
            known.content = Some(Arc::clone(content));
        }
    }

    /// Whether all that is wanted of a name is followed with the namespace.
    pub(super) fn is_followed(&self, name: &str) -> bool {
        lock(&self.wanted).get(name).is_some_and(|known| {
            let has_all = known.content.as_ref().is_none_or(|content| content.wants.covers(known.wants));
            known.is_followed && has_all
        })
    }

    /// What else is read of the names counts again.
    pub(super) fn release(&self) {
        for known in lock(&self.wanted).values_mut() {
            known.is_followed = false;
        }
    }

    fn follow(&self, name: &str, content: Option<Arc<Content>>) {
        if let Some(known) = lock(&self.wanted).get_mut(name) {
            (known.content, known.is_followed) = (content, true);
        }
    }

    fn content(&self, name: &str) -> Option<Arc<Content>> {
        lock(&self.wanted).get(name)?.content.clone()
    }

    pub(super) fn forget(&self, name: &str) {
        lock(&self.wanted).remove(name);
    }

    fn wants(&self, name: &str) -> Option<Wants> {
        lock(&self.wanted).get(name).map(|known| known.wants)
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

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An object that was read.
type Read = (Arc<str>, u64, Result<Option<Object>, KubeError>);

/// Follows all objects of a namespace that are asked for.
pub(super) struct GroupFollower {
    cluster: Arc<Cluster>,
    group: Group,
    names: Arc<Wanted>,
    /// Wanted that are asked for from now on.
    added: mpsc::UnboundedReceiver<Arc<str>>,
    reports: Reports,
    reads: JoinSet<Read>,
    /// The number of the last read of each name, unless the watch has brought something newer meanwhile.
    reading: HashMap<Arc<str>, u64>,
    last_read: u64,
    connection: watch::Receiver<Arc<dyn Api>>,
}

impl GroupFollower {
    pub(super) fn new(
        cluster: Arc<Cluster>,
        group: Group,
        names: Arc<Wanted>,
        added: mpsc::UnboundedReceiver<Arc<str>>,
        reports: Reports,
    ) -> Self {
        let (reads, reading) = Default::default();
        let connection = cluster.connection();
        Self { cluster, group, names, added, reports, reads, reading, last_read: 0, connection }
    }

    /// Reports every change. Returns if the namespace must not be listed or watched.
    pub(super) async fn run(mut self) {
        let names = Arc::clone(&self.names);
        let selection = Selection {
            kind: self.group.kind,
            namespace: Arc::clone(&self.group.namespace),
            of: Of::Wanted(Arc::new(move |name| names.meet(name))),
        };
        let mut failures = 0;
        loop {
            // What is read now is of this connection.
            self.connection.mark_unchanged();
            let error = match self.list(&selection).await {
                Ok(version) => match self.watch(&selection, version).await {
                    Ok(()) => {
                        failures = 0;
                        continue;
                    }
                    Err(error) => error,
                },
                Err(error) => error,
            };
            if error.is_forbidden() {
                let reason = text::sanitize_for_log(&error.to_string());
                let _ = self.reports.send(Report::NotTaken(self.group.clone(), reason));
                return;
            }
            failures += 1;
            let _ = self.reports.send(Report::Failed(self.group.clone()));
            tokio::time::sleep(delay(&error, failures)).await;
        }
    }

    /// Takes what there is, page by page. What is being read meanwhile may be older; what is newer comes in the watch.
    async fn list(&mut self, selection: &Selection) -> Result<Version, KubeError> {
        let mut missing: HashSet<_> = self.names.all().into_iter().collect();
        let mut next = String::new();
        let version = loop {
            let page = self.cluster.page(selection, &next).await?;
            for (number, object) in page.objects.into_iter().enumerate() {
                missing.remove(&*object.name);
                self.overtake(&object.name);
                self.take(object).await;
                if number % TURN == TURN - 1 {
                    tokio::task::yield_now().await;
                }
            }
            if page.next.is_empty() {
                break page.version;
            }
            next = page.next;
        };
        for name in missing {
            if self.names.wants(&name).is_some() {
                self.overtake(&name);
                self.miss(&name);
            }
        }
        Ok(version)
    }

    /// Watches from `version` on, until the namespace has to be listed again. Fails where that can't begin.
    async fn watch(&mut self, selection: &Selection, version: Version) -> Result<(), KubeError> {
        let (mut from, mut failures, mut endings) = (version, 0, 0);
        let mut is_taken = false;
        loop {
            let watch = match self.cluster.watch(selection, Some(&from)).await {
                Ok(watch) => watch,
                Err(KubeError::Expired { .. }) => return Ok(()),
                // Until the first one is open, each object has a watch of its own.
                Err(error) if error.is_forbidden() || !is_taken => return Err(error),
                Err(error) => {
                    failures += 1;
                    tokio::time::sleep(delay(&error, failures)).await;
                    continue;
                }
            };
            failures = 0;
            is_taken = true;
            let _ = self.reports.send(Report::Taken(self.group.clone()));
            let opened = Instant::now();
            if !self.follow(watch, &mut from).await {
                return Ok(());
            }
            endings = pause_after(opened, endings).await;
        }
    }

    /// Takes the events of a watch until it ends. False: the namespace has to be listed again.
    async fn follow(&mut self, mut watch: Watch, from: &mut Version) -> bool {
        loop {
            let event = tokio::select! {
                event = next(&mut watch, &mut self.connection) => event,
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
                    *from = object.version.clone();
                    self.overtake(&object.name);
                    self.take(object).await;
                }
                Next::Event(Event::Deleted { name, version }) => {
                    *from = version;
                    if self.names.wants(&name).is_some() {
                        // Reading it confirms that.
                        self.read((&*name).into(), Duration::ZERO);
                    }
                }
                Next::Event(Event::Version(version)) => *from = version,
                Next::Reconnected => return false,
                Next::Ended => return true,
                Next::Failed(KubeError::Expired { .. }) => return false,
                Next::Failed(error) => {
                    self.cluster.note(Some(&error));
                    return true;
                }
            }
        }
    }

    /// A name that is asked for now costs a call only if there may be such an object.
    fn add(&mut self, name: Arc<str>) {
        match self.names.may_exist(&name) {
            true => self.read(name, Duration::ZERO),
            false => self.miss(&name),
        }
    }

    fn read(&mut self, name: Arc<str>, pause: Duration) {
        self.last_read += 1;
        let number = self.last_read;
        self.reading.insert(Arc::clone(&name), number);
        let (cluster, object) = (Arc::clone(&self.cluster), self.group.place(&name).object);
        self.reads.spawn(async move {
            tokio::time::sleep(pause).await;
            (name, number, cluster.get(&object).await)
        });
    }

    /// A list or the watch has brought an object that is being read: what is read may be older.
    fn overtake(&mut self, name: &str) {
        self.reading.remove(name);
    }

    async fn finish_read(&mut self, read: Result<Read, JoinError>) {
        let Some((name, number, result)) = offload::finished(read) else { return };
        if self.reading.get(&name) != Some(&number) {
            return;
        }
        self.reading.remove(&name);
        if self.names.wants(&name).is_none() {
            return;
        }
        match result {
            Ok(Some(object)) => self.take(object).await,
            Ok(None) => self.miss(&name),
            Err(error) => {
                self.report(&name, failed(&error));
                // Until it is known.
                self.read(name, delay(&error, 3));
            }
        }
    }

    async fn take(&mut self, object: Object) {
        let Some(wants) = self.names.wants(&object.name) else { return };
        let before = self.names.content(&object.name);
        let name: Arc<str> = (&*object.name).into();
        let content = match before {
            Some(known) if known.version == object.version && known.wants.covers(wants) => known,
            before => {
                let place = self.group.place(&name);
                parse_and_keep(&self.cluster, &place, object, wants, before).await
            }
        };
        self.names.follow(&name, Some(Arc::clone(&content)));
        self.report(&name, Seen::Present(content));
    }

    fn miss(&mut self, name: &Arc<str>) {
        self.names.follow(name, None);
        forget(&self.cluster, &self.group.place(name));
        self.report(name, Seen::Absent);
    }

    fn report(&self, name: &Arc<str>, seen: Seen) {
        // Fails when the agent stops.
        let _ = self.reports.send(Report::Object(self.group.place(name), seen, By::Namespace));
    }
}
