//! Real folders that change under a real watch, in real time: each test waits for what it can see.

mod changes;
mod checks;
mod model;
mod names;

use std::cell::Cell;
use std::fs;
use std::os::unix::fs::{MetadataExt as _, symlink};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex, mpsc};

use tempfile::TempDir;
use tokio::sync::watch;

use super::*;
use crate::base::spiffe_id::SpiffeId;
use crate::ca::embedded::DevelopmentCa;
use crate::pki::key::{KeyType, PrivateKey, SigningKey};
use crate::pki::{csr, pem};
use crate::secret::{KeyPair, Resource, TrustBundle, Version};
use crate::store::{Entry, Subscription};

const DAY: Duration = Duration::from_secs(24 * 3600);
const DEBOUNCE: Duration = Duration::from_millis(20);
/// Far longer than anything here takes.
const PATIENCE: Duration = Duration::from_secs(20);

const CHAIN_FILE: &str = NAMES[0];
const KEY_FILE: &str = NAMES[1];
const ROOT_FILE: &str = NAMES[2];
const KEY_PAIR: Key = Key { workload: Workload(0), name: SecretName::Workload };
const ROOTS: Key = Key { workload: Workload(0), name: SecretName::Roots };

/// What is mounted at one time, and the versions under which it is served.
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

/// A number that nobody had before, for names.
fn count() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

impl Files {
    /// A key pair and the roots of its CA, unlike those of a test's last 60 calls.
    fn new() -> Self {
        thread_local!(static NEXT: Cell<usize> = const { Cell::new(0) });
        Self::nth(NEXT.replace(NEXT.get() + 1))
    }

    fn nth(number: usize) -> Self {
        FILES[number % FILES.len()].clone()
    }

    /// As a CA with this clock gives them.
    fn at(clock: Clock) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let ca = |name: &str| DevelopmentCa::open(&folder.path().join(name), clock.clone()).unwrap();
        let (first, ca, last) = (ca("first"), ca("ca"), ca("last"));
        let identity: SpiffeId = "spiffe://cluster.local/ns/default/sa/web".parse().unwrap();
        let key = SigningKey::generate(KeyType::EcdsaP256).unwrap();
        let csr = csr::request(&key, Some(&identity)).unwrap();
        let leaf = ca.issue(&csr, &identity, DAY).unwrap();
        let [intermediate, root] = ca.chain();
        let chain = pem::of_certificates([&leaf, intermediate]);
        let key = key.to_private_key().to_pem().to_vec();
        let root = pem::of_certificates([first.chain()[1], root, last.chain()[1]]);
        let pair_version = pair_version(&SecretName::Workload, &chain, &key);
        let root_version = roots_version(&SecretName::Roots, &root);
        Self { chain, key, root, pair_version, root_version }
    }

    /// The version under which they are served as `name`.
    fn version(&self, name: &SecretName) -> Version {
        match name {
            SecretName::Workload | SecretName::FileKeyPair(_) => pair_version(name, &self.chain, &self.key),
            _ => roots_version(name, &self.root),
        }
    }

    fn each(&self) -> [(&'static str, &[u8]); 3] {
        [(CHAIN_FILE, &self.chain), (KEY_FILE, &self.key), (ROOT_FILE, &self.root)]
    }

    fn write(&self, folder: &Path) {
        for (name, content) in self.each() {
            fs::write(folder.join(name), content).unwrap();
        }
    }
}

fn pair_version(name: &SecretName, chain: &[u8], key: &[u8]) -> Version {
    let key = PrivateKey::from_pem(key).unwrap();
    let pair = KeyPair::new(pem::certificates(chain).unwrap(), key).unwrap();
    Resource::encode(name, &Secret::KeyPair(pair)).version
}

fn roots_version(name: &SecretName, roots: &[u8]) -> Version {
    let bundle = TrustBundle::new(pem::certificates(roots).unwrap()).unwrap();
    Resource::encode(name, &Secret::TrustBundle(bundle)).version
}

fn key_of(name: &str) -> Key {
    Key { workload: Workload(0), name: name.parse().unwrap() }
}

/// Stops whoever changes files, who does so on a thread of its own.
fn pause(time: Duration) {
    #[expect(clippy::disallowed_methods, reason = "it is not the runtime's thread")]
    std::thread::sleep(time);
}

/// Changes files on a thread of its own, so that the source sees every state in between.
async fn change(how: impl FnOnce() + Send + 'static) {
    tokio::task::spawn_blocking(how).await.unwrap();
}

/// With a CA beside it.
fn settings(folder: &Path) -> Settings {
    Settings {
        mounted: places(folder),
        own: Vec::new(),
        is_alone: false,
        debounce: DEBOUNCE,
        prefixes: Vec::new(),
        system_roots: None,
    }
}

/// A folder and the cache that its files go to.
struct Mount {
    temp: TempDir,
    cache: Cache,
    watcher: Watcher,
    metrics: Metrics,
    clock: Clock,
}

impl Mount {
    /// An empty folder.
    fn new() -> Self {
        let temp = tempfile::tempdir().unwrap();
        fs::create_dir(temp.path().join("mount")).unwrap();
        Self {
            temp,
            cache: Cache::default(),
            watcher: Watcher::new(),
            metrics: Metrics::default(),
            clock: Clock::system(),
        }
    }

    fn folder(&self) -> PathBuf {
        self.temp.path().join("mount")
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder().join(name)
    }

    fn source_of(&self, folder: PathBuf) -> FileSource {
        self.source_with(settings(&folder))
    }

    fn source_with(&self, settings: Settings) -> FileSource {
        let (clock, metrics) = (self.clock.clone(), self.metrics.clone());
        FileSource::new(settings, &self.cache, Workload(0), self.watcher.clone(), clock, metrics)
    }

    fn source(&self) -> FileSource {
        self.source_of(self.folder())
    }

    /// Follows the folder from now on.
    fn follow(&self) {
        tokio::spawn(self.source().run());
    }

    /// Asks for a name, as a stream does.
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

    async fn until(&self, key: Key, what: &str, mut is_it: impl FnMut(&Entry) -> bool) -> Entry {
        let mut entries = self.watch(key.clone());
        let entry = tokio::time::timeout(PATIENCE, entries.wait_for(|entry| is_it(entry))).await;
        match entry {
            Ok(entry) => entry.unwrap().clone(),
            Err(_) => panic!("{what}: it was not noticed; the entry is {:?}", self.entry(key)),
        }
    }

    /// Waits until exactly these files are served, and nothing is wrong.
    async fn serves(&self, files: &Files, what: &str) {
        for (key, version) in [(KEY_PAIR, &files.pair_version), (ROOTS, &files.root_version)] {
            self.serves_version(&key, version, what).await;
        }
    }

    /// Waits until `version` is served, and nothing is wrong.
    async fn serves_version(&self, key: &Key, version: &Version, what: &str) {
        let is_it = |entry: &Entry| {
            entry.good.as_ref().map(|good| &good.resource.version) == Some(version)
                && entry.failure().is_none()
        };
        self.until(key.clone(), &format!("{what}, {}", key.name), is_it).await;
    }

    fn failures(&self, reason: &'static str) -> u64 {
        let label = BySource { source: "files", reason };
        self.metrics.source_failures.get_or_create_owned(&label).get()
    }
}

/// Notes each value that an entry has from now on.
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

/// One way to spoil a folder: its title, the way (given the next good files), words of the reason, the metric's label.
type Damage = (&'static str, fn(&Path, &Files), &'static str, &'static str);

fn put(folder: &Path, name: &str, content: impl AsRef<[u8]>) {
    fs::write(folder.join(name), content).unwrap();
}

const DAMAGES: [Damage; 16] = [
    ("no key", |at, _| fs::remove_file(at.join(KEY_FILE)).unwrap(), "but", "incomplete"),
    ("no chain", |at, _| fs::remove_file(at.join(CHAIN_FILE)).unwrap(), "but", "incomplete"),
    ("another key", |at, next| put(at, KEY_FILE, &next.key), "does not match", "mismatch"),
    ("another chain", |at, next| put(at, CHAIN_FILE, &next.chain), "does not match", "mismatch"),
    ("a chain in DER", |at, next| put(at, CHAIN_FILE, der(&next.chain)), "it is DER", "not_parsed"),
    ("a key in DER", |at, next| put(at, KEY_FILE, der(&next.key)), "it is DER", "not_parsed"),
    ("an encrypted key", |at, _| put(at, KEY_FILE, ENCRYPTED), "encrypted", "not_parsed"),
    ("a key that is none", |at, _| put(at, KEY_FILE, "root:x:0:0"), "no PEM private key", "not_parsed"),
    ("a chain that is none", |at, _| put(at, CHAIN_FILE, "root:x:0:0"), "no PEM certificate", "not_parsed"),
    ("half a chain", |at, next| put(at, CHAIN_FILE, &next.chain[..300]), "cert-chain.pem", "not_parsed"),
    ("an empty key", |at, _| put(at, KEY_FILE, ""), "no PEM private key", "not_parsed"),
    ("2 MiB of chain", |at, next| put(at, CHAIN_FILE, next.chain.repeat(2 << 10)), "1 MiB", "unreadable"),
    ("2 MiB of key", |at, _| put(at, KEY_FILE, vec![b'a'; 2 << 20]), "1 MiB", "unreadable"),
    (
        "a folder in the place of the key",
        |at, _| {
            fs::remove_file(at.join(KEY_FILE)).unwrap();
            fs::create_dir(at.join(KEY_FILE)).unwrap();
        },
        "not a plain file",
        "unreadable",
    ),
    (
        "an expired pair",
        |at, _| {
            let files = Files::at(Clock::starting_at(Clock::system().now() - 3 * DAY));
            put(at, CHAIN_FILE, &files.chain);
            put(at, KEY_FILE, &files.key);
        },
        "it expired at",
        "not_valid",
    ),
    (
        "a pair of the future",
        |at, _| {
            let files = Files::at(Clock::starting_at(Clock::system().now() + 3 * DAY));
            put(at, CHAIN_FILE, &files.chain);
            put(at, KEY_FILE, &files.key);
        },
        "it is valid only from",
        "not_valid",
    ),
];

fn mend(folder: &Path, files: &Files) {
    // A folder may stand in a file's place.
    let _ = fs::remove_dir(folder.join(KEY_FILE));
    files.write(folder);
}

#[test]
fn a_pair_that_is_not_fit_is_told_and_the_last_good_one_stays() {
    let (first, next) = (Files::new(), Files::new());
    for (title, damage, words, label) in DAMAGES {
        let mount = Mount::new();
        let mut source = mount.source();
        first.write(&mount.folder());
        source.publish_once();
        assert_eq!(mount.version(KEY_PAIR).as_ref(), Some(&first.pair_version), "{title}");

        damage(&mount.folder(), &next);
        source.publish_once();
        let entry = mount.entry(KEY_PAIR);
        let reason = entry.failure().expect(title);
        assert!(reason.contains(words), "{title}: {reason}");
        assert!(reason.contains(mount.folder().to_str().unwrap()), "{title}: {reason}");
        assert_eq!(mount.failures(label), 1, "{title}");
        assert_eq!(mount.version(KEY_PAIR).as_ref(), Some(&first.pair_version), "{title}");
        let roots = mount.entry(ROOTS);
        assert!(roots.good.is_some() && roots.failure().is_none(), "{title}: the roots have no part in it");

        mend(&mount.folder(), &next);
        source.publish_once();
        assert_eq!(mount.version(KEY_PAIR).as_ref(), Some(&next.pair_version), "{title}");
        assert_eq!(mount.entry(KEY_PAIR).failure(), None, "{title}");
    }
}

#[test]
fn roots_that_are_not_fit_are_told_and_the_last_good_ones_stay() {
    let (first, next) = (Files::new(), Files::new());
    let cases: [(&str, Vec<u8>, &str); 4] = [
        ("no certificate", b"root:x:0:0".to_vec(), "no PEM certificate"),
        ("DER", der(&next.root), "it is DER"),
        ("2 MiB", next.root.repeat(4 << 10), "1 MiB"),
        ("a key", next.key.clone(), "no PEM certificate"),
    ];
    for (title, content, words) in cases {
        let mount = Mount::new();
        let mut source = mount.source();
        first.write(&mount.folder());
        source.publish_once();
        put(&mount.folder(), ROOT_FILE, content);
        source.publish_once();
        let reason = mount.entry(ROOTS).failure().expect(title);
        assert!(reason.contains(words), "{title}: {reason}");
        assert_eq!(mount.version(ROOTS).as_ref(), Some(&first.root_version), "{title}");
        assert_eq!(mount.entry(KEY_PAIR).failure(), None, "{title}");
        next.write(&mount.folder());
        source.publish_once();
        assert_eq!(mount.version(ROOTS).as_ref(), Some(&next.root_version), "{title}");
    }
}

#[test]
fn a_fifo_in_the_place_of_a_file_stops_nobody() {
    let (done, is_done) = mpsc::channel();
    std::thread::spawn(move || {
        let mount = Mount::new();
        Files::new().write(&mount.folder());
        for name in [CHAIN_FILE, KEY_FILE, ROOT_FILE] {
            fs::remove_file(mount.path(name)).unwrap();
            let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
            rustix::fs::mknodat(rustix::fs::CWD, mount.path(name), rustix::fs::FileType::Fifo, mode, 0)
                .unwrap();
        }
        mount.source().publish_once();
        let reasons = [KEY_PAIR, ROOTS].map(|key| mount.entry(key).failure());
        done.send(reasons).unwrap();
    });
    for reason in is_done.recv_timeout(PATIENCE).expect("the look at a FIFO to end") {
        let reason = reason.unwrap();
        assert!(reason.contains("not a plain file"), "{reason}");
    }
}

#[test]
fn a_folder_without_files_is_nothing_to_tell() {
    let mount = Mount::new();
    let mut source = mount.source();
    source.publish_once();
    let mut missing = mount.source_of(mount.path("missing"));
    missing.publish_once();
    for key in [KEY_PAIR, ROOTS] {
        let entry = mount.entry(key);
        assert!(entry.good.is_none() && entry.failure().is_none() && entry.holder.is_none());
    }
}

/// A way to replace what is mounted by the next files.
type Rotation = fn(&Path, &Files);

/// As the kubelet does: a new folder, to which `..data` leads from one moment to the next.
fn swap(volume: &Path, files: &Files, old: fn(&Path)) {
    fs::create_dir_all(volume).unwrap();
    let data = volume.join("..data");
    let before = fs::read_link(&data).ok();
    let name = format!("..{}", count());
    fs::create_dir(volume.join(&name)).unwrap();
    files.write(&volume.join(&name));
    let beside = volume.join("..data_tmp");
    symlink(&name, &beside).unwrap();
    fs::rename(&beside, &data).unwrap();
    for (name, _) in files.each() {
        let target = Path::new("..data").join(name);
        if fs::read_link(volume.join(name)).ok().as_ref() != Some(&target) {
            symlink(target, &beside).unwrap();
            fs::rename(&beside, volume.join(name)).unwrap();
        }
    }
    if let Some(before) = before {
        old(&volume.join(before));
    }
}

const ROTATIONS: [(&str, Rotation); 12] = [
    ("overwriting in place", |at, files| files.write(at)),
    ("overwriting in place, the root first", |at, files| {
        files.each().iter().rev().for_each(|(name, content)| put(at, name, content));
    }),
    ("renaming over", |at, files| {
        for (name, content) in files.each() {
            put(at, "new", content);
            fs::rename(at.join("new"), at.join(name)).unwrap();
        }
    }),
    ("renaming over from another folder", |at, files| {
        let beside = at.with_extension("beside");
        fs::create_dir_all(&beside).unwrap();
        files.write(&beside);
        for (name, _) in files.each() {
            fs::rename(beside.join(name), at.join(name)).unwrap();
        }
    }),
    ("deleting and creating", |at, files| {
        for (name, content) in files.each() {
            fs::remove_file(at.join(name)).unwrap();
            put(at, name, content);
        }
    }),
    ("a kubelet swap, the old folder deleted at once", |at, files| {
        swap(at, files, |old| fs::remove_dir_all(old).unwrap());
    }),
    ("a kubelet swap, the old folder kept", |at, files| swap(at, files, |_| {})),
    ("a kubelet swap, the old folder deleted at the next one", |at, files| {
        swap(at, files, |old| {
            let grave = old.parent().unwrap().join("..grave");
            let _ = fs::remove_dir_all(&grave);
            fs::rename(old, grave).unwrap();
        });
    }),
    ("removing the folder and making it again", |at, files| {
        fs::remove_dir_all(at).unwrap();
        fs::create_dir(at).unwrap();
        files.write(at);
    }),
    ("moving the folder away and another in", |at, files| {
        let beside = at.with_extension("beside");
        fs::create_dir(&beside).unwrap();
        files.write(&beside);
        let old = at.with_extension("old");
        fs::rename(at, &old).unwrap();
        fs::rename(&beside, at).unwrap();
        fs::remove_dir_all(old).unwrap();
    }),
    ("replacing the files by links to files elsewhere", |at, files| {
        let elsewhere = at.with_file_name(format!("elsewhere-{}", count()));
        fs::create_dir(&elsewhere).unwrap();
        files.write(&elsewhere);
        for (name, _) in files.each() {
            let beside = at.join("new");
            symlink(elsewhere.join(name), &beside).unwrap();
            fs::rename(&beside, at.join(name)).unwrap();
        }
    }),
    ("replacing the folder by a link to another", |at, files| {
        let elsewhere = at.with_file_name(format!("elsewhere-{}", count()));
        fs::create_dir(&elsewhere).unwrap();
        files.write(&elsewhere);
        let beside = at.with_extension("beside");
        symlink(&elsewhere, &beside).unwrap();
        if fs::read_link(at).is_err() {
            fs::remove_dir_all(at).unwrap();
        }
        fs::rename(&beside, at).unwrap();
    }),
];

#[tokio::test]
async fn every_way_to_change_mounted_files_is_noticed_every_time() {
    for (title, rotate) in ROTATIONS {
        let mount = Mount::new();
        Files::new().write(&mount.folder());
        mount.follow();
        for round in 0..4 {
            let files = Files::new();
            rotate(&mount.folder(), &files);
            mount.serves(&files, &format!("{title}, round {round}")).await;
        }
    }
}

#[tokio::test]
async fn after_any_change_the_next_one_of_any_kind_is_noticed() {
    // A plain file after a kubelet link, an overwritten file in a folder that was made anew, and so on.
    let mut random = fastrand::Rng::with_seed(7);
    // These two need plain files to be there.
    let rotations: Vec<_> =
        ROTATIONS.into_iter().filter(|(title, _)| !title.contains("the folder")).collect();
    let mount = Mount::new();
    Files::new().write(&mount.folder());
    mount.follow();
    let mut told = Vec::new();
    for _ in 0..40 {
        let (title, rotate) = rotations[random.usize(0..rotations.len())];
        told.push(title);
        let files = Files::new();
        rotate(&mount.folder(), &files);
        mount.serves(&files, &told.join(", then ")).await;
    }
}

/// Removes a folder and makes it again, with the same inode if it can be had.
fn make_again(folder: &Path) {
    let old = fs::metadata(folder).unwrap().ino();
    fs::remove_dir_all(folder).unwrap();
    // Most file systems use an inode's number again as soon as they can.
    for _ in 0..1000 {
        fs::create_dir(folder).unwrap();
        if fs::metadata(folder).unwrap().ino() == old {
            return;
        }
        fs::remove_dir(folder).unwrap();
    }
    fs::create_dir(folder).unwrap();
}

#[tokio::test]
async fn a_folder_that_is_made_again_is_followed_though_it_looks_like_the_old_one() {
    let mount = Mount::new();
    Files::new().write(&mount.folder());
    mount.follow();
    for round in 0..10 {
        let files = Files::new();
        make_again(&mount.folder());
        files.write(&mount.folder());
        mount.serves(&files, &format!("made again, round {round}")).await;
        // The first looks may be due to what happened to the old folder; the later ones need a watch on the new one.
        for write in 0..4 {
            let files = Files::new();
            files.write(&mount.folder());
            mount.serves(&files, &format!("write {write} to it, round {round}")).await;
        }
    }
}

#[tokio::test]
async fn what_the_kernel_could_not_tell_is_found_afterwards() {
    let mount = Mount::new();
    Files::new().write(&mount.folder());
    mount.follow();
    for round in 0..10 {
        let files = Files::new();
        mount.watcher.overflow();
        make_again(&mount.folder());
        files.write(&mount.folder());
        mount.watcher.recover();
        mount.serves(&files, &format!("unheard, round {round}")).await;
        let files = Files::new();
        files.write(&mount.folder());
        mount.serves(&files, &format!("a change after it, round {round}")).await;
    }
}

#[tokio::test]
async fn a_folder_that_appears_later_is_found() {
    let mount = Mount::new();
    let deep = mount.path("a/b/c");
    tokio::spawn(mount.source_of(deep.clone()).run());
    // The first look has to be over, or it alone would find everything.
    tokio::task::yield_now().await;
    assert!(mount.entry(KEY_PAIR).good.is_none());
    for folder in [mount.path("a"), mount.path("a/b"), deep.clone()] {
        fs::create_dir(folder).unwrap();
        tokio::task::yield_now().await;
    }
    let files = Files::new();
    files.write(&deep);
    mount.serves(&files, "a folder that appears").await;
    let files = Files::new();
    files.write(&deep);
    mount.serves(&files, "a change in it").await;
}

#[tokio::test]
async fn a_key_that_comes_after_its_chain_completes_the_pair() {
    type Write = fn(&Path, &[u8]);
    let ways: [(&str, Write); 2] = [
        ("in place", |path, content| fs::write(path, content).unwrap()),
        ("renamed over", |path, content| {
            let beside = path.with_extension("new");
            fs::write(&beside, content).unwrap();
            fs::rename(beside, path).unwrap();
        }),
    ];
    for (title, write) in ways {
        let mount = Mount::new();
        let mut served = Files::new();
        served.write(&mount.folder());
        mount.follow();
        mount.serves(&served, title).await;
        for _ in 0..3 {
            let next = Files {
                root: served.root.clone(),
                root_version: served.root_version.clone(),
                ..Files::new()
            };
            write(&mount.path(CHAIN_FILE), &next.chain);
            let failed = mount.until(KEY_PAIR, title, |entry| entry.failure().is_some()).await;
            assert_eq!(failed.good.unwrap().resource.version, served.pair_version, "{title}");
            // The key alone.
            write(&mount.path(KEY_FILE), &next.key);
            mount.serves(&next, title).await;
            served = next;
        }
    }
}

#[tokio::test]
async fn what_does_not_change_the_bytes_is_not_published() {
    let mount = Mount::new();
    let mut files = Files::new();
    files.write(&mount.folder());
    mount.follow();
    mount.serves(&files, "at first").await;
    let record = record(mount.watch(KEY_PAIR));
    let mut expected = Vec::new();
    for round in 0..5 {
        // A touch, a rewrite, a rename, a change of mode. The other roots show that all this was looked at.
        let key = mount.path(KEY_FILE);
        std::fs::File::options()
            .write(true)
            .open(&key)
            .unwrap()
            .set_modified(SystemTime::UNIX_EPOCH)
            .unwrap();
        files.write(&mount.folder());
        fs::write(mount.path("new"), &files.key).unwrap();
        fs::rename(mount.path("new"), &key).unwrap();
        fs::set_permissions(&key, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
        let other = Files::new();
        files = Files { root: other.root.clone(), root_version: other.root_version.clone(), ..files };
        put(&mount.folder(), ROOT_FILE, &files.root);
        mount.serves(&files, &format!("the roots of round {round}")).await;
        files = Files { root: files.root, root_version: files.root_version, ..other };
        files.write(&mount.folder());
        mount.serves(&files, &format!("round {round}")).await;
        expected.push(files.pair_version.clone());
    }
    // The last change was published; whoever records it may not have run yet.
    while record.lock().unwrap().len() < expected.len() {
        tokio::task::yield_now().await;
    }
    assert_eq!(*record.lock().unwrap(), expected);
}

#[tokio::test]
async fn a_burst_is_folded_into_few_publishes() {
    let mount = Mount::new();
    let first = Files::new();
    swap(&mount.folder(), &first, |_| {});
    mount.follow();
    mount.serves(&first, "at first").await;
    let record = record(mount.watch(KEY_PAIR));
    let burst: Vec<_> = (0..20).map(|_| Files::new()).collect();
    let started = Instant::now();
    for files in &burst {
        swap(&mount.folder(), files, |_| {});
        tokio::task::yield_now().await;
    }
    mount.serves(&burst[19], "the last of the burst").await;
    let windows = started.elapsed().as_millis() / DEBOUNCE.as_millis() + 2;
    let seen = record.lock().unwrap().clone();
    assert!(seen.len() as u128 <= windows, "{} publishes in {windows} windows", seen.len());
}

#[tokio::test]
async fn files_that_are_gone_leave_their_value_and_let_go() {
    let mount = Mount::new();
    let files = Files::new();
    files.write(&mount.folder());
    mount.follow();
    mount.serves(&files, "at first").await;
    assert_eq!(mount.entry(KEY_PAIR).holder, Some(Origin::Files));
    for (name, _) in files.each() {
        fs::remove_file(mount.path(name)).unwrap();
    }
    for (key, version) in [(KEY_PAIR, &files.pair_version), (ROOTS, &files.root_version)] {
        let entry = mount.until(key, "the deletion", |entry| entry.holder.is_none()).await;
        assert!(entry.failure().unwrap().contains("the files are gone"));
        assert_eq!(entry.good.unwrap().resource.version, *version, "what they held is served on");
    }
    files.write(&mount.folder());
    mount.until(KEY_PAIR, "the return", |entry| entry.holder == Some(Origin::Files)).await;
}

#[tokio::test]
async fn a_failure_ends_with_the_files_that_caused_it() {
    let mount = Mount::new();
    put(&mount.folder(), KEY_FILE, Files::new().key);
    put(&mount.folder(), ROOT_FILE, "root:x:0:0");
    mount.follow();
    for key in [KEY_PAIR, ROOTS] {
        mount.until(key, "the bad file", |entry| entry.failure().is_some()).await;
    }
    fs::remove_file(mount.path(KEY_FILE)).unwrap();
    fs::remove_file(mount.path(ROOT_FILE)).unwrap();
    for key in [KEY_PAIR, ROOTS] {
        mount.until(key, "its deletion", |entry| entry.failure().is_none()).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_pair_of_the_future_is_served_once_its_time_has_come() {
    // No change of a file tells of it.
    let mount = Mount { clock: Clock::starting_at(Clock::system().now() - DAY), ..Mount::new() };
    let files = Files::new();
    files.write(&mount.folder());
    mount.follow();
    mount.until(KEY_PAIR, "a pair of the future", |entry| entry.failure().is_some()).await;
    let mut entries = mount.watch(KEY_PAIR);
    let served = tokio::time::timeout(2 * DAY, entries.wait_for(|entry| entry.good.is_some())).await;
    assert!(served.is_ok(), "it is never served");
    drop(served);
    mount.serves(&files, "its failure ends").await;
}

#[tokio::test(start_paused = true)]
async fn files_that_nobody_renews_let_go_when_what_they_gave_has_ended() {
    // No change of a file tells of it.
    let mount = Mount { clock: Clock::starting_at(Clock::system().now()), ..Mount::new() };
    let files = Files::new();
    files.write(&mount.folder());
    mount.follow();
    mount.serves(&files, "at first").await;
    let mut entries = mount.watch(KEY_PAIR);
    let released = tokio::time::timeout(2 * DAY, entries.wait_for(|entry| entry.holder.is_none())).await;
    let entry = released.expect("files hold what has expired").unwrap().clone();
    assert!(entry.failure().unwrap().contains("it expired at"), "{entry:?}");
    assert!(entry.valid_at(mount.clock.now()).is_err());
    let ca = mount.cache.publisher(KEY_PAIR, Origin::Ca);
    let Files { chain, key, .. } = Files::at(mount.clock.clone());
    let pair = KeyPair::new(pem::certificates(&chain).unwrap(), PrivateKey::from_pem(&key).unwrap()).unwrap();
    assert_eq!(ca.publish(Secret::KeyPair(pair), mount.clock.now(), None), Published::Changed);
}

#[test]
fn what_the_agent_writes_is_not_read_back_whatever_leads_to_it() {
    let mount = Mount::new();
    let output = mount.temp.path().join("output");
    let files = Files::new();
    fs::create_dir_all(output.join("..data")).unwrap();
    files.write(&output.join("..data"));
    symlink(&output, mount.temp.path().join("link")).unwrap();
    for (name, _) in files.each() {
        symlink(output.join("..data").join(name), mount.path(name)).unwrap();
    }
    let own = vec![mount.temp.path().join("link")];
    for folder in [mount.folder(), output.join("..data")] {
        let mut source = mount.source_with(Settings { own: own.clone(), ..settings(&folder) });
        source.publish_once();
        for key in [KEY_PAIR, ROOTS] {
            let entry = mount.entry(key);
            assert!(entry.good.is_none() && entry.holder.is_none(), "{}", folder.display());
        }
    }
    mount.source().publish_once();
    assert!(mount.entry(KEY_PAIR).good.is_some(), "without an output they are files like others");
}
