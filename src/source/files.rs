//! Secrets from files: read as one generation, checked as exactly those bytes, published when they fit.

mod locations;
mod publisher;
mod set;

use std::path::PathBuf;
use std::time::Duration;

use tokio::task::JoinSet;

pub use self::locations::{PLATFORM_DIRECTORY, places};
use self::publisher::SecretPublisher;
use self::set::FileSet;
use crate::base::clock::Clock;
use crate::fs::generation::{Place, Places};
use crate::fs::watch::Watcher;
use crate::metrics::{ByName, Metrics};
use crate::secret::{NameKind, SecretName};
use crate::store::{Cache, Demand, Key, Origin, Scope, Workload};

/// Which files are served, and how.
#[derive(Clone, Debug)]
pub struct FileSettings {
    /// Where `default` and `ROOTCA` are, in the order of their rank.
    pub mounted: Vec<Place>,
    /// There is no CA: missing files are a failure.
    pub is_alone: bool,
    /// At most one publish of a secret in each such span.
    pub debounce: Duration,
    /// The directories to which the agent itself writes: what lies there, after all links, is not served.
    pub own: Vec<PathBuf>,
    /// The directories in which files that streams name must lie; anywhere if empty.
    pub prefixes: Vec<PathBuf>,
    /// The file of the system's roots, instead of those that distributions have (`SSL_CERT_FILE`).
    pub system_roots: Option<PathBuf>,
}

/// Serves `default` and `ROOTCA` from mounted files, and the files that streams name.
#[derive(Debug)]
pub struct FileSource {
    settings: FileSettings,
    mounted: FileSet,
    /// Taken from the start: a name that a stream asks for must not be refused because the first look takes long.
    demand: Option<Demand>,
    context: Context,
}

/// What every set needs.
#[derive(Clone, Debug)]
struct Context {
    cache: Cache,
    watcher: Watcher,
    debounce: Duration,
    clock: Clock,
    metrics: Metrics,
}

impl FileSource {
    /// A source that publishes the mounted files of `workload` to `cache`.
    pub fn new(
        settings: FileSettings,
        cache: &Cache,
        workload: Workload,
        watcher: Watcher,
        clock: Clock,
        metrics: Metrics,
    ) -> Self {
        let context = Context { cache: cache.clone(), watcher, debounce: settings.debounce, clock, metrics };
        let places = Places { own: settings.own.clone(), ..Places::new(settings.mounted.clone()) };
        let publisher = |name| Some(SecretPublisher::new(cache, Key { workload, name }, settings.is_alone));
        let (key_pair, roots) = (publisher(SecretName::Workload), publisher(SecretName::Roots));
        let mounted = FileSet::new(places, key_pair, roots, context.clone());
        let demand = context.cache.demand(NameKind::File, Scope::Workload(workload));
        let demand =
            demand.inspect_err(|error| tracing::error!(%error, "requested files are not served")).ok();
        Self { settings, mounted, demand, context }
    }

    /// Publishes what is mounted now, so that no CA is called for what files provide.
    pub fn publish_once(&mut self) {
        self.mounted.publish_once();
    }

    /// Follows every change of the mounted files, and of those that streams name. Does not return.
    pub async fn run(self) {
        let Self { settings, mounted, mut demand, context } = self;
        let mut sets = JoinSet::new();
        // The first look is settled: the files may have changed since `publish_once`, before they were watched.
        sets.spawn(mounted.run(true));
        loop {
            tokio::select! {
                Some(key) = next(&mut demand) => {
                    let places = locations::places_of(&key.name, &settings);
                    drop(sets.spawn(context.clone().serve(key, places)));
                }
                Some(ended) = sets.join_next() => {
                    if let Err(error) = ended {
                        std::panic::resume_unwind(error.into_panic());
                    }
                }
            }
        }
    }
}

impl Context {
    /// Serves a name that a stream asked for, until no stream has been subscribed for a while.
    async fn serve(self, key: Key, places: Places) {
        locations::warn_of_own(&places);
        let (cache, metrics) = (self.cache.clone(), self.metrics.clone());
        let publisher = Some(SecretPublisher::new(&cache, key.clone(), true));
        let subscribers = cache.publisher(key.clone(), Origin::FILES);
        let retired = async {
            loop {
                subscribers.deserted().await;
                if cache.retire(&key) {
                    return;
                }
            }
        };
        let (key_pair, roots) = match &key.name {
            SecretName::FileKeyPair(_) => (publisher, None),
            _ => (None, publisher),
        };
        let set = FileSet::new(places, key_pair, roots, self);
        tokio::select! {
            () = set.run(false) => {}
            () = retired => {}
        }
        metrics.forget(&ByName::of(&cache, &key));
        tracing::debug!(name = %key.name, "no stream left, files no longer watched");
    }
}

/// The next name on demand; waits forever where another source serves the files of the workload.
async fn next(demand: &mut Option<Demand>) -> Option<Key> {
    match demand {
        Some(demand) => demand.next().await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests;
