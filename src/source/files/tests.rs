//! Real directories that change under a real watch, in real time: each test waits for what it can observe.

mod changes;
mod checks;
mod damage;
mod federated;
mod lifetime;
mod model;
mod names;
mod rotations;

use std::cell::Cell;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex};
use std::time::SystemTime;

use tempfile::TempDir;
use tokio::sync::watch;
use tokio::time::Instant;

use self::rotations::{ROTATIONS, Rotation, swap};
use super::locations::GKE_NAMES;
use super::named::NamedFiles;
use super::publisher::REMOVED;
use super::*;
use crate::base::spiffe_id::SpiffeId;
use crate::ca::embedded::DevelopmentCa;
use crate::fs::generation::{NAMES, TLS_NAMES};
use crate::fs::pending::PendingOperations;
use crate::fs::pool::Pool;
use crate::fs::watch::OPEN_PATIENCE;
use crate::fs::watch::testing::{self, Kernel};
use crate::metrics::BySource;
use crate::pki::key::{KeyType, PrivateKey, SigningKey};
use crate::pki::{csr, pem};
use crate::secret::{KeyPair, Resource, Secret, TrustBundle, Version};
use crate::store::{Entry, Origin, Published, Scope, Subscription};

const DAY: Duration = Duration::from_secs(24 * 3600);
const DEBOUNCE: Duration = Duration::from_millis(20);
/// Far longer than anything here takes.
const PATIENCE: Duration = Duration::from_secs(20);

const CHAIN_FILE: &str = NAMES[0];
const KEY_FILE: &str = NAMES[1];
const ROOT_FILE: &str = NAMES[2];
/// Not the one of the sidecar: the source assumes none.
const WORKLOAD: Workload = Workload::FIRST;
const KEY_PAIR: Key = Key { workload: WORKLOAD, name: SecretName::Workload };
const ROOTS: Key = Key { workload: WORKLOAD, name: SecretName::Roots };

/// One generation of mounted files, and the versions under which it is served.
#[derive(Clone)]
struct Files {
    chain: Vec<u8>,
    key: Vec<u8>,
    /// The roots of three CAs, of which the second signed the chain: half of them are roots as well.
    root: Vec<u8>,
    pair_version: Version,
    root_version: Version,
}

/// Key pairs are made once, for all tests.
static FILES: LazyLock<Vec<Files>> = LazyLock::new(|| (0..64).map(|_| Files::at(Clock::system())).collect());

/// A new number at each call, for names.
fn count() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

impl Files {
    /// A key pair and the roots of its CA, different from those of the test's last 60 calls.
    fn new() -> Self {
        thread_local!(static NEXT: Cell<usize> = const { Cell::new(0) });
        Self::nth(NEXT.replace(NEXT.get() + 1))
    }

    fn nth(number: usize) -> Self {
        FILES[number % FILES.len()].clone()
    }

    /// Files as a CA with this clock issues them.
    fn at(clock: Clock) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let ca = |name: &str| DevelopmentCa::open(&directory.path().join(name), clock.clone()).unwrap();
        let (first, ca, last) = (ca("first"), ca("ca"), ca("last"));
        let identity: SpiffeId = "spiffe://cluster.local/ns/default/sa/web".parse().unwrap();
        let key = SigningKey::generate(KeyType::EcdsaP256).unwrap();
        let csr = csr::request(&key, Some(&identity), &csr::Names::default()).unwrap();
        let leaf = ca.issue(&csr, &identity, DAY).unwrap();
        let [intermediate, root] = ca.chain();
        let chain = pem::of_certificates([&leaf, intermediate]);
        let key = key.to_private_key().to_pem().to_vec();
        let root = pem::of_certificates([first.chain()[1], root, last.chain()[1]]);
        let pair_version = pair_version(&SecretName::Workload, &chain, &key);
        let root_version = roots_version(&SecretName::Roots, &root);
        Self { chain, key, root, pair_version, root_version }
    }

    /// The version under which these files are served as `name`.
    fn version(&self, name: &SecretName) -> Version {
        match name {
            SecretName::Workload | SecretName::FileKeyPair(_) => pair_version(name, &self.chain, &self.key),
            _ => roots_version(name, &self.root),
        }
    }

    fn each(&self) -> [(&'static str, &[u8]); 3] {
        [(CHAIN_FILE, &self.chain), (KEY_FILE, &self.key), (ROOT_FILE, &self.root)]
    }

    fn write(&self, directory: &Path) {
        for (name, content) in self.each() {
            fs::write(directory.join(name), content).unwrap();
        }
    }
}

fn pair_version(name: &SecretName, chain: &[u8], key: &[u8]) -> Version {
    let key = PrivateKey::from_pem(key).unwrap();
    let pair = KeyPair::new(pem::certificates(chain).unwrap(), key).unwrap();
    Resource::encode(name, &Secret::KeyPair(pair)).version.clone()
}

fn roots_version(name: &SecretName, roots: &[u8]) -> Version {
    let bundle = TrustBundle::new(pem::certificates(roots).unwrap()).unwrap();
    Resource::encode(name, &Secret::TrustBundle(bundle)).version.clone()
}

fn key_of(name: &str) -> Key {
    Key { workload: WORKLOAD, name: name.parse().unwrap() }
}

/// Pauses a change of files, which runs on a thread of its own.
fn pause(time: Duration) {
    #[expect(clippy::disallowed_methods, reason = "it is not the runtime's thread")]
    std::thread::sleep(time);
}

/// Changes files on a thread of its own, so that the source sees every state in between.
async fn change(how: impl FnOnce() + Send + 'static) {
    tokio::task::spawn_blocking(how).await.unwrap();
}

/// The settings of a source beside a CA.
fn settings(directory: &Path) -> FileSettings {
    FileSettings {
        mounted: places(directory, &FileNames::default()),
        own: Vec::new(),
        private: Vec::new(),
        is_alone: false,
        debounce: DEBOUNCE,
        prefixes: FilePrefixes::Usual(vec!["/".into()]),
        system_roots: None,
        federated: Vec::new(),
    }
}

/// A mounted directory, and the cache to which its files are published.
struct Mount {
    temp: TempDir,
    cache: Cache,
    watcher: Watcher,
    kernel: Kernel,
    pool: Pool,
    metrics: Metrics,
    clock: Clock,
}

impl Mount {
    /// An empty directory.
    fn new() -> Self {
        let temp = tempfile::tempdir().unwrap();
        fs::create_dir(temp.path().join("mount")).unwrap();
        let (watcher, kernel) = testing::watcher();
        Self {
            temp,
            cache: Cache::with_workload("").0,
            watcher,
            kernel,
            pool: Pool::new(PendingOperations::default()),
            metrics: Metrics::default(),
            clock: Clock::system(),
        }
    }

    /// A mount where inotify refuses every watch. Time may be virtual.
    fn polled() -> Self {
        let mount = Self { pool: Pool::inline(), ..Self::new() };
        mount.kernel.refuse_watches();
        mount
    }

    fn directory(&self) -> PathBuf {
        self.temp.path().join("mount")
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory().join(name)
    }

    fn source_of(&self, directory: PathBuf) -> FileSource {
        self.source_with(settings(&directory))
    }

    fn source_with(&self, settings: FileSettings) -> FileSource {
        let (clock, metrics) = (self.clock.clone(), self.metrics.clone());
        FileSource::new(settings, &self.cache, WORKLOAD, self.watcher.clone(), clock, metrics)
    }

    fn source(&self) -> FileSource {
        self.source_of(self.directory())
    }

    /// Follows the directory from now on, and the names that streams ask for.
    fn follow(&self) {
        self.follow_with(settings(&self.directory()));
    }

    fn follow_with(&self, settings: FileSettings) {
        tokio::spawn(self.source_with(settings.clone()).run());
        let (cache, watcher, pool) = (self.cache.clone(), self.watcher.clone(), self.pool.clone());
        let (clock, metrics) = (self.clock.clone(), self.metrics.clone());
        tokio::spawn(async move {
            NamedFiles::with_pool(settings, &cache, Scope::Workload(WORKLOAD), watcher, pool, clock, metrics)
                .await
                .run()
                .await;
        });
    }

    /// Subscribes to a name, as a stream does.
    async fn subscribe(&self, key: &Key) -> Subscription {
        loop {
            match self.cache.subscribe(key) {
                Ok(stream) => return stream,
                // The source has not run yet.
                Err(_) => tokio::task::yield_now().await,
            }
        }
    }

    fn watch(&self, key: Key) -> watch::Receiver<Entry> {
        self.cache.watch(&key).unwrap()
    }

    fn entry(&self, key: Key) -> Entry {
        self.watch(key).borrow().clone()
    }

    fn version(&self, key: Key) -> Option<Version> {
        self.entry(key).good.map(|good| good.resource.version.clone())
    }

    async fn until(&self, key: Key, what: &str, mut is_reached: impl FnMut(&Entry) -> bool) -> Entry {
        let mut entries = self.watch(key.clone());
        let entry = tokio::time::timeout(PATIENCE, entries.wait_for(|entry| is_reached(entry))).await;
        match entry {
            Ok(entry) => entry.unwrap().clone(),
            Err(_) => panic!("{what}: not noticed; the entry is {:?}", self.entry(key)),
        }
    }

    /// Waits until exactly these files are served, without a failure.
    async fn serves(&self, files: &Files, what: &str) {
        for (key, version) in [(KEY_PAIR, &files.pair_version), (ROOTS, &files.root_version)] {
            self.serves_version(&key, version, what).await;
        }
    }

    /// Waits until `version` is served, without a failure.
    async fn serves_version(&self, key: &Key, version: &Version, what: &str) {
        let is_served = |entry: &Entry| {
            entry.good.as_ref().map(|good| &good.resource.version) == Some(version)
                && entry.failure().is_none()
        };
        self.until(key.clone(), &format!("{what}, {}", key.name), is_served).await;
    }

    fn failures(&self, reason: &'static str) -> u64 {
        let label = BySource { source: "files", reason };
        self.metrics.source_failures.get_or_create_owned(&label).get()
    }
}

/// Records each value that an entry has from now on.
fn record(mut entries: watch::Receiver<Entry>) -> Arc<Mutex<Vec<Version>>> {
    let record = Arc::new(Mutex::new(Vec::new()));
    entries.mark_unchanged();
    tokio::spawn({
        let record = Arc::clone(&record);
        let version = |entry: &Entry| entry.good.as_ref().map(|good| good.resource.version.clone());
        let mut last = version(&entries.borrow());
        async move {
            while entries.changed().await.is_ok() {
                let now = version(&entries.borrow_and_update());
                if now != last {
                    record.lock().unwrap().extend(now.clone());
                    last = now;
                }
            }
        }
    });
    record
}

/// The one DER block of a PEM text.
fn der(text: &[u8]) -> Vec<u8> {
    pem::certificates(text).map_or_else(
        |_| PrivateKey::from_pem(text).unwrap().der().secret_der().to_vec(),
        |found| found[0].to_vec(),
    )
}

const ENCRYPTED: &[u8] =
    b"-----BEGIN ENCRYPTED PRIVATE KEY-----\nAAAA\n-----END ENCRYPTED PRIVATE KEY-----\n";

fn put(directory: &Path, name: &str, content: impl AsRef<[u8]>) {
    fs::write(directory.join(name), content).unwrap();
}
