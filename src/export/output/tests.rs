//! A cache on one side, a real folder on the other.

use std::path::Path;
use std::time::UNIX_EPOCH;

use tempfile::TempDir;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::*;
use crate::ca::embedded::DevelopmentCa;
use crate::pki::csr;
use crate::pki::key::{KeyType, SigningKey};
use crate::secret::{KeyPair, TrustBundle};
use crate::store::{Origin, Publisher};

const HOUR: Duration = Duration::from_secs(3600);
const LIMIT: Duration = Duration::from_secs(20);
const WORKLOAD: Workload = Workload(0);

/// A CA, a cache, and an output that runs.
struct Stage {
    place: TempDir,
    ca: DevelopmentCa,
    pair: Publisher,
    roots: Publisher,
    clock: Clock,
    metrics: Metrics,
    stop: CancellationToken,
    output: JoinHandle<()>,
}

impl Stage {
    fn new(hook: Option<&str>) -> Self {
        let place = tempfile::tempdir().unwrap();
        let clock = Clock::starting_at(UNIX_EPOCH + 500_000 * HOUR);
        let ca = DevelopmentCa::open(&place.path().join("ca"), clock.clone()).unwrap();
        let (cache, metrics, stop) = (Cache::default(), Metrics::default(), CancellationToken::new());
        let publisher = |name| cache.publisher(Key { workload: WORKLOAD, name }, Origin::Ca);
        let (pair, roots) = (publisher(SecretName::Workload), publisher(SecretName::Roots));
        let hook = hook.map(|command| Hook { command: command.into(), timeout: LIMIT });
        let folder = place.path().join("out");
        let settings = Settings { folder, key_mode: 0o600, cert_mode: 0o644, hook };
        let watcher = Watcher::new();
        let output = Output::new(settings, &cache, WORKLOAD, &watcher, clock.clone(), metrics.clone());
        let output = tokio::spawn(output.run(stop.clone()));
        Self { place, ca, pair, roots, clock, metrics, stop, output }
    }

    fn new_pair(&self) -> (Secret, String) {
        let key = SigningKey::generate(KeyType::EcdsaP256).unwrap();
        let request = csr::request(&key, None).unwrap();
        let identity = "spiffe://cluster.local/ns/default/sa/web".parse().unwrap();
        let leaf = self.ca.issue(&request, &identity, HOUR).unwrap();
        let key = key.to_private_key();
        let text = String::from_utf8(key.to_pem().to_vec()).unwrap();
        (Secret::KeyPair(KeyPair::new(vec![leaf], key).unwrap()), text)
    }

    fn publish_roots(&self) {
        let [_, root] = self.ca.chain();
        let bundle = TrustBundle::new(vec![root.clone()]).unwrap();
        self.roots.publish(Secret::TrustBundle(bundle), self.clock.now(), None);
    }

    /// Publishes a new pair: its key, as text.
    fn publish_pair(&self) -> String {
        let (pair, key) = self.new_pair();
        self.pair.publish(pair, self.clock.now(), None);
        key
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.place.path().join("out").join(name)
    }

    fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.path(name)).unwrap_or_default()
    }

    async fn wait(&self, what: &str, holds: impl Fn() -> bool) {
        let waited = timeout(LIMIT, async {
            while !holds() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        });
        assert!(waited.await.is_ok(), "waited in vain until {what}");
    }

    async fn wait_key(&self, key: &str) {
        self.wait("the key is written", || self.read(KEY_FILE) == key).await;
    }

    fn writes(&self, outcome: &'static str) -> u64 {
        self.metrics.output_writes.get_or_create(&ByResult { outcome }).get()
    }

    fn hooks(&self, outcome: &'static str) -> u64 {
        self.metrics.output_hooks.get_or_create(&ByResult { outcome }).get()
    }

    async fn end(self) {
        self.stop.cancel();
        timeout(LIMIT, self.output).await.unwrap().unwrap();
    }
}

fn is_empty(path: &Path) -> bool {
    std::fs::symlink_metadata(path).is_err()
}

#[tokio::test]
async fn both_are_written_together_and_every_change_is_followed() {
    let stage = Stage::new(None);
    // The roots alone are no set.
    stage.publish_roots();
    stage.wait("the folder is made", || stage.path("").exists()).await;
    assert!(is_empty(&stage.path(ROOT_FILE)));
    for writes in 1..4 {
        let key = stage.publish_pair();
        stage.wait_key(&key).await;
        stage.wait("it is counted", || stage.writes("ok") == writes).await;
        assert!(!stage.read(ROOT_FILE).is_empty() && !stage.read(CHAIN_FILE).is_empty());
    }
    // A failure of the source is no change of the value.
    stage.pair.fail("the CA is down".to_owned());
    let key = stage.publish_pair();
    stage.wait_key(&key).await;
    stage.wait("it is counted", || stage.writes("ok") == 4).await;
    let old = |name: &std::ffi::OsStr| name.to_string_lossy().starts_with("..attache-");
    let generations = || {
        let entries = std::fs::read_dir(stage.path("")).unwrap().flatten();
        // One of them is the lock.
        entries.filter(|entry| old(&entry.file_name())).count() - 1
    };
    stage.wait("old generations are removed", || generations() == 1).await;
    stage.end().await;
}

#[tokio::test]
async fn what_is_written_decides_whether_there_is_something_to_write() {
    let stage = Stage::new(None);
    let (Secret::KeyPair(pair), _) = stage.new_pair() else { unreachable!() };
    let [_, root] = stage.ca.chain();
    let roots = || Secret::TrustBundle(TrustBundle::new(vec![root.clone()]).unwrap());
    let good = |secret: Secret, version: &[u8]| {
        let mut resource = crate::secret::Resource::encode(&SecretName::Roots, &secret);
        // As if CRLs had come.
        resource.version = Version::of(version);
        Arc::new(Good { secret, resource, origin: Origin::Ca, received: UNIX_EPOCH, renews: None })
    };
    let pair = good(Secret::KeyPair(pair), b"pair");
    let set = |version| Set { pair: Arc::clone(&pair), roots: good(roots(), version) };
    assert_eq!(set(b"1").versions(), set(b"2").versions());
    stage.end().await;
}

#[tokio::test]
async fn what_has_expired_is_not_written_and_what_lies_there_stays() {
    let stage = Stage::new(None);
    let (expired, _) = stage.new_pair();
    stage.clock.set_by(2 * 3_600_000);
    stage.publish_roots();
    stage.pair.publish(expired, stage.clock.now(), None);
    stage.wait("the folder is made", || stage.path("").exists()).await;
    // It has its turns to look at what is not to be written.
    for _ in 0..10 {
        tokio::task::yield_now().await;
    }
    let first = stage.publish_pair();
    stage.wait_key(&first).await;
    let (expired, _) = stage.new_pair();
    stage.clock.set_by(2 * 3_600_000);
    stage.pair.publish(expired, stage.clock.now(), None);
    for _ in 0..10 {
        tokio::task::yield_now().await;
    }
    assert_eq!(stage.read(KEY_FILE), first);
    let second = stage.publish_pair();
    stage.wait_key(&second).await;
    let metrics = stage.metrics.clone();
    stage.end().await;
    let writes = metrics.output_writes.get_or_create(&ByResult { outcome: "ok" }).get();
    assert_eq!(writes, 2, "only what was good");
}

#[tokio::test]
async fn a_folder_that_cannot_be_written_is_tried_again_until_it_can() {
    let stage = Stage::new(None);
    stage.publish_roots();
    let first = stage.publish_pair();
    stage.wait_key(&first).await;
    // A folder in the place of a link: not ours, and in the way.
    std::fs::remove_file(stage.path(CHAIN_FILE)).unwrap();
    std::fs::create_dir(stage.path(CHAIN_FILE)).unwrap();
    let second = stage.publish_pair();
    stage.wait("it has failed twice", || stage.writes("failed") >= 2).await;
    assert_eq!(stage.read(KEY_FILE), first, "the old one stays");
    std::fs::remove_dir(stage.path(CHAIN_FILE)).unwrap();
    stage.wait_key(&second).await;
    stage.end().await;
}

#[tokio::test]
async fn what_is_damaged_is_mended_and_what_somebody_else_writes_is_left() {
    let stage = Stage::new(None);
    stage.publish_roots();
    let key = stage.publish_pair();
    stage.wait_key(&key).await;
    type Damage = fn(&Path);
    let damages: [Damage; 4] = [
        |out| std::fs::remove_file(out.join(KEY_FILE)).unwrap(),
        |out| std::fs::remove_dir_all(out.join("..data").canonicalize().unwrap()).unwrap(),
        |out| std::fs::write(out.join(CHAIN_FILE), "").unwrap(),
        |out| std::fs::remove_dir_all(out).unwrap(),
    ];
    for (done, damage) in (1..).zip(damages) {
        // The watch is set up a moment after the write; what comes before it is seen too, when it is.
        damage(&stage.path(""));
        stage.wait("it is written again", || stage.writes("ok") == done + 1).await;
        assert_eq!(stage.read(KEY_FILE), key);
        assert!(!stage.read(ROOT_FILE).is_empty() && !stage.read(CHAIN_FILE).is_empty());
    }
    // Permissions are for the hook to change.
    use std::os::unix::fs::PermissionsExt as _;
    std::fs::set_permissions(stage.path(KEY_FILE), std::fs::Permissions::from_mode(0o640)).unwrap();
    let mut other = Folder::new(stage.path(""));
    let files = [KEY_FILE, CHAIN_FILE, ROOT_FILE].map(|name| {
        let content = Zeroizing::new(b"theirs".to_vec());
        File { name, mode: 0o600, content }
    });
    other.write(&files).unwrap();
    let next = async {
        stage.publish_roots();
        tokio::time::sleep(Duration::from_secs(2)).await;
    };
    next.await;
    assert_eq!((stage.read(KEY_FILE).as_str(), stage.writes("ok")), ("theirs", 5));
    let key = stage.publish_pair();
    stage.wait_key(&key).await;
    stage.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_disk_that_hangs_is_told_of_once() {
    for (seconds, told) in [(9, 0), (11, 1), (100, 1)] {
        let mut count = 0;
        let work = tokio::time::sleep(Duration::from_secs(seconds));
        told_if_late(work, || count += 1).await;
        assert_eq!(count, told, "{seconds} s");
    }
}

#[tokio::test]
async fn a_hook_runs_once_for_each_swap_and_nothing_is_swapped_meanwhile() {
    // Fails if another one runs, or if the key changes under its eyes.
    let stage = Stage::new(Some(
        r#"cd "$ATTACHE_OUTPUT_DIR" && mkdir running && cat key.pem >> ../seen && before=$(cat key.pem) && sleep 0.1 &&
           test "$before" = "$(cat key.pem)" && rmdir running"#,
    ));
    stage.publish_roots();
    let mut last = String::new();
    for _ in 0..50 {
        last = stage.publish_pair();
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    stage.wait_key(&last).await;
    let seen = || std::fs::read_to_string(stage.place.path().join("seen")).unwrap_or_default();
    stage.wait("the hook has seen the newest", || seen().ends_with(&last)).await;
    stage.wait("it has ended", || stage.hooks("ok") == stage.writes("ok")).await;
    assert_eq!(seen().matches("BEGIN").count() as u64, stage.writes("ok"));
    assert!((2..50).contains(&stage.writes("ok")), "{} swaps", stage.writes("ok"));
    assert_eq!((stage.hooks("failed"), stage.writes("failed")), (0, 0));
    stage.end().await;
}

#[tokio::test]
async fn a_hook_that_fails_runs_again_until_it_succeeds() {
    let stage =
        Stage::new(Some(r#"echo >> "$ATTACHE_OUTPUT_DIR/../runs"; test -e "$ATTACHE_OUTPUT_DIR/../mended""#));
    stage.publish_roots();
    stage.publish_pair();
    stage.wait("it has failed", || stage.hooks("failed") == 1).await;
    // The next swap does not wait for its turn.
    let key = stage.publish_pair();
    stage.wait_key(&key).await;
    stage.wait("it has failed again", || stage.hooks("failed") >= 2).await;
    std::fs::write(stage.place.path().join("mended"), "").unwrap();
    stage.wait("it has succeeded", || stage.hooks("ok") == 1).await;
    assert_eq!(stage.writes("ok"), 2);
    stage.end().await;
}

#[tokio::test]
async fn a_hook_that_runs_at_the_end_is_waited_for() {
    let stage = Stage::new(Some(r#"echo > "$ATTACHE_OUTPUT_DIR/../began"; sleep 0.5"#));
    stage.publish_roots();
    stage.publish_pair();
    stage.wait("it runs", || stage.place.path().join("began").exists()).await;
    let metrics = stage.metrics.clone();
    stage.end().await;
    assert_eq!(metrics.output_hooks.get_or_create(&ByResult { outcome: "ok" }).get(), 1);
}
