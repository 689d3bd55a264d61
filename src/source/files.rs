//! Secrets from files: read as one generation, checked as exactly those bytes, published when they fit.

mod change;
mod locations;
pub mod named;
mod publisher;
mod set;

use std::path::PathBuf;
use std::time::Duration;

pub use self::locations::{FileNames, PLATFORM_DIRECTORY, places};
use self::publisher::SecretPublisher;
use self::set::FileSet;
use crate::base::clock::Clock;
use crate::fs::generation::{Place, Places};
use crate::fs::watch::Watcher;
use crate::metrics::Metrics;
use crate::secret::{FederatedName, SecretName};
use crate::store::{Cache, Key, Workload};

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
    /// The directories with files of the agent's own, which no name leads to.
    pub private: Vec<PathBuf>,
    pub prefixes: FilePrefixes,
    /// The file of the system's roots, instead of those that distributions have (`SSL_CERT_FILE`).
    pub system_roots: Option<PathBuf>,
    /// The trust bundles of other trust domains.
    pub federated: Vec<FederatedBundle>,
}

/// A trust bundle of another trust domain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FederatedBundle {
    pub name: FederatedName,
    pub path: PathBuf,
}

/// The directories in which files must lie that streams name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FilePrefixes {
    /// By default. Taken as they are spelled, so that no agent waits at its start for directories that it may not need.
    Usual(Vec<PathBuf>),
    /// Those of `--file-prefix`, also with their links resolved.
    Given(Vec<PathBuf>),
    /// On a node: of its files, streams get the system's roots alone.
    None,
}

/// Serves `default` and `ROOTCA` from mounted files.
#[derive(Debug)]
pub struct FileSource {
    mounted: FileSet,
}

/// What a set needs.
#[derive(Clone, Debug)]
struct Context {
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
        let context = Context { watcher, debounce: settings.debounce, clock, metrics };
        let places = Places { own: settings.own, ..Places::new(settings.mounted) };
        let publisher = |name| SecretPublisher::new(cache, Key { workload, name }, settings.is_alone);
        let (key_pair, roots) = (publisher(SecretName::Workload), publisher(SecretName::Roots));
        Self { mounted: FileSet::new(places, Some(key_pair), roots, context) }
    }

    /// Publishes what is mounted now, so that no CA is called for what files provide.
    pub fn publish_once(&mut self) {
        self.mounted.publish_once();
    }

    /// Follows every change of the mounted files since [`FileSource::publish_once`]. Does not return.
    pub async fn run(self) {
        match self.mounted.run().await {}
    }
}

/// Serves one trust bundle of another trust domain.
#[derive(Debug)]
pub struct FederatedFile(FileSet);

impl FederatedFile {
    /// Sources that publish the bundles in `settings` for `workload`, each by itself.
    pub fn all(
        settings: &FileSettings,
        cache: &Cache,
        workload: Workload,
        watcher: &Watcher,
        clock: &Clock,
        metrics: &Metrics,
    ) -> Vec<Self> {
        let source = |FederatedBundle { name, path }: &FederatedBundle| {
            let place = Place { roots: Some(path.clone()), ..Place::default() };
            let places = Places { own: settings.own.clone(), ..Places::new(vec![place]) };
            let key = Key { workload, name: SecretName::Federated(name.clone()) };
            let context = Context {
                watcher: watcher.clone(),
                debounce: settings.debounce,
                clock: clock.clone(),
                metrics: metrics.clone(),
            };
            // No other source has it: a missing file is a failure.
            Self(FileSet::new(places, None, SecretPublisher::new(cache, key, true), context))
        };
        settings.federated.iter().map(source).collect()
    }

    /// Publishes what the file holds now.
    pub fn publish_once(&mut self) {
        self.0.publish_once();
    }

    /// Follows every change of the file. Does not return.
    pub async fn run(self) {
        match self.0.run().await {}
    }
}

#[cfg(test)]
mod tests;
