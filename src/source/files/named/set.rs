//! Files that streams name, followed for all names that lead to them.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;

use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;

use super::Shared;
use super::look::{Content, Look, Seen, WatchedFiles};
use super::missing::Group;
use crate::fs::generation::{FileError, Found, Places};
use crate::fs::pending::HANGING;
use crate::fs::watch::Activity;
use crate::secret::Secret;
use crate::source::files::change::PendingChange;
use crate::source::files::publisher::SecretPublisher;
use crate::store::Key;

/// So many names are served in one turn; others of the agent's tasks get theirs in between.
const TURN: usize = 4;

/// A change of the names that lead to the same files.
#[derive(Debug)]
pub(super) enum NameChange {
    Added(Key),
    Removed(Key),
}

/// Files that are looked at together.
pub(super) struct NamedSet {
    shared: Arc<Shared>,
    places: Arc<Places>,
    /// Here between two looks; during a look, with the thread that makes it.
    files: Option<WatchedFiles>,
    names: Names,
    content: Option<Arc<Content>>,
}

/// The names as which files are served.
struct Names {
    shared: Arc<Shared>,
    places: Arc<Places>,
    served: BTreeMap<Key, SecretPublisher>,
    changes: mpsc::UnboundedReceiver<NameChange>,
    /// What was found last and taken as whole.
    taken: Option<Found<Secret>>,
}

impl NamedSet {
    pub(super) fn new(
        shared: Arc<Shared>,
        places: Places,
        names: Vec<Key>,
        changes: mpsc::UnboundedReceiver<NameChange>,
    ) -> Self {
        let watch = shared.watcher.watch(places.paths());
        let places = Arc::new(places);
        let files = Some(WatchedFiles { places: Arc::clone(&places), watch });
        let publisher = |key: Key| (key.clone(), SecretPublisher::new(&shared.cache, key, true));
        let served = names.into_iter().map(publisher).collect();
        let (at, of) = (Arc::clone(&shared), Arc::clone(&places));
        let names = Names { shared: at, places: of, served, changes, taken: None };
        Self { shared, places, files, names, content: None }
    }

    /// Follows every change. Does not return. `left` has watched the directories until now: until they are watched for
    /// these files, it notices which of them is written to.
    pub(super) async fn run(mut self, mut left: Vec<Group>) -> Infallible {
        let mut change = PendingChange::new(self.shared.debounce);
        loop {
            let seen = self.look().await;
            left.clear();
            let (looked, activity) = (Instant::now(), seen.activity);
            let is_whole = || self.names.served.values().all(|publisher| publisher.expects(&seen.found));
            if change.is_complete(activity, looked, is_whole) {
                if let (Activity::Open, Some(files)) = (activity, &self.files) {
                    files.watch.forget_writers();
                }
                change.end(self.take(seen).await);
                self.next_change().await;
                // Names may come and go meanwhile.
                change.wait_for_window(self.names.follow()).await;
            } else {
                if change.is_restless(looked) {
                    let error = FileError::Restless { paths: self.places.paths() };
                    self.names.serve(Found { secret: Err(error), rank: 0 }).await;
                }
                change.wait_for_rest(looked, self.changed()).await;
            }
            change.pause(looked).await;
        }
    }

    /// Has a thread look at the files, however long that takes.
    async fn look(&mut self) -> Seen {
        let (reply, mut looked) = oneshot::channel();
        let path = self.places.paths().into_iter().next().unwrap_or_default();
        let look = Look { shared: Arc::clone(&self.shared), files: self.files.take(), reply: Some(reply) };
        self.shared.pool.submit(path.as_path().into(), look);
        let mut unanswered = std::pin::pin!(tokio::time::sleep(HANGING));
        let mut is_reported = false;
        loop {
            tokio::select! {
                biased;
                looked = &mut looked => {
                    // A panic of the thread is one of the agent.
                    let Ok((files, seen)) = looked else { return std::future::pending().await };
                    self.files = Some(files);
                    return seen;
                }
                never = self.names.follow() => match never {},
                () = &mut unanswered, if !is_reported => {
                    is_reported = true;
                    let error = FileError::Unanswered { path: path.clone() };
                    self.names.serve(Found { secret: Err(error), rank: 0 }).await;
                }
            }
        }
    }

    /// Publishes what was seen, or reports what is wrong with it. True if it is a new secret for some name.
    async fn take(&mut self, seen: Seen) -> bool {
        self.content = seen.content.or(self.content.take());
        self.names.serve(seen.found).await
    }

    /// Returns when a file changes, or when a certificate becomes valid or expires.
    async fn next_change(&mut self) {
        let now = self.shared.clock.now();
        let expiries = self.names.served.values().filter_map(SecretPublisher::not_after);
        let expires = expiries.filter(|moment| *moment > now).min();
        let starts = self.names.taken.as_ref().and_then(Found::starts);
        let next = starts.into_iter().chain(expires).min();
        let clock = self.shared.clock.clone();
        tokio::select! {
            () = self.changed() => {}
            () = clock.sleep_until_any(next) => {}
        }
    }

    /// Returns when a file may have changed.
    async fn changed(&mut self) {
        let Some(files) = &self.files else { return };
        tokio::select! {
            _ = files.watch.changed() => {}
            never = self.names.follow() => match never {},
        }
    }
}

impl Names {
    /// Takes up names that come, and drops those that go.
    async fn follow(&mut self) -> Infallible {
        loop {
            match self.changes.recv().await {
                Some(NameChange::Added(key)) => {
                    let mut publisher = SecretPublisher::new(&self.shared.cache, key.clone(), true);
                    if let Some(found) = &self.taken {
                        self.shared.serve(&mut publisher, found, &self.places);
                    }
                    self.served.insert(key, publisher);
                }
                Some(NameChange::Removed(key)) => drop(self.served.remove(&key)),
                None => std::future::pending().await,
            }
        }
    }

    /// Serves every name what was found. True if that is new for some of them.
    async fn serve(&mut self, found: Found<Secret>) -> bool {
        let mut is_new = false;
        for (number, publisher) in self.served.values_mut().enumerate() {
            is_new |= self.shared.serve(publisher, &found, &self.places);
            if number % TURN == TURN - 1 {
                tokio::task::yield_now().await;
            }
        }
        self.taken = Some(found);
        is_new
    }
}

impl Shared {
    /// Serves a name what was found. True if that is new.
    fn serve(&self, publisher: &mut SecretPublisher, found: &Found<Secret>, places: &Places) -> bool {
        let secret = match &found.secret {
            Ok(secret) => Ok(secret.clone()),
            Err(error) => {
                publisher.fail(error, &self.metrics);
                return false;
            }
        };
        let found = Found { secret, rank: found.rank };
        publisher.take(found, self.clock.now(), places, &self.metrics)
    }
}
