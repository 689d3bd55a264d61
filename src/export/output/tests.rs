//! A cache on one side, a real directory on the other.

use std::path::Path;
use std::time::{Duration, UNIX_EPOCH};

use tempfile::TempDir;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use zeroize::Zeroizing;

use super::directory::{OutputDirectory, OutputFile};
use super::writer::or_report;
use super::*;
use crate::ca::embedded::DevelopmentCa;
use crate::fs::generation::{CHAIN_FILE, KEY_FILE, ROOT_FILE};
use crate::fs::pending::PendingOperations;
use crate::pki::csr;
use crate::pki::key::{KeyType, SigningKey};
use crate::secret::{KeyPair, Payload, Resource, TrustBundle};
use crate::store::{Origin, Publisher};

const HOUR: Duration = Duration::from_secs(3600);
const LIMIT: Duration = Duration::from_secs(20);
const WORKLOAD: Workload = Workload::FIRST;

fn pem(directory: PathBuf) -> DirectorySettings {
    let format = Format::default();
    let owner = Owner::default();
    DirectorySettings { option: "--output-dir", directory, format, key_mode: 0o600, cert_mode: 0o644, owner }
}

/// A CA, a cache, and running outputs.
struct Stage {
    place: TempDir,
    ca: DevelopmentCa,
    pair: Publisher,
    roots: Publisher,
    clock: Clock,
    metrics: Metrics,
    stop: CancellationToken,
    tasks: Vec<JoinHandle<()>>,
    components: Components,
}

impl Stage {
    fn new(hook: Option<&str>) -> Self {
        Self::with(hook, |place| vec![pem(place.join("out"))])
    }

    /// With one output for each of `directories`.
    fn with(hook: Option<&str>, directories: impl FnOnce(&Path) -> Vec<DirectorySettings>) -> Self {
        let place = tempfile::tempdir().unwrap();
        let clock = Clock::starting_at(UNIX_EPOCH + 500_000 * HOUR);
        let ca = DevelopmentCa::open(&place.path().join("ca"), clock.clone()).unwrap();
        let (cache, metrics, stop) =
            (Cache::with_workload("").0, Metrics::default(), CancellationToken::new());
        let publisher = |name| cache.publisher(Key { workload: WORKLOAD, name }, Origin::CA);
        let (pair, roots) = (publisher(SecretName::Workload), publisher(SecretName::Roots));
        let hook = hook.map(|command| Hook { command: command.into(), timeout: LIMIT });
        let directories = directories(place.path());
        let settings = OutputSettings { directories, hook };
        let watcher = Watcher::new(PendingOperations::default());
        let (outputs, writers) = Outputs::new(
            settings,
            &cache,
            WORKLOAD,
            &watcher,
            Disk::default(),
            clock.clone(),
            metrics.clone(),
        );
        let mut tasks = vec![tokio::spawn(outputs.run(stop.clone()))];
        tasks.extend(writers.into_iter().map(|writer| tokio::spawn(writer.run(stop.clone()))));
        let components = cache.components(WORKLOAD);
        Self { place, ca, pair, roots, clock, metrics, stop, tasks, components }
    }

    fn new_pair(&self) -> (Secret, String) {
        let key = SigningKey::generate(KeyType::EcdsaP256).unwrap();
        let request = csr::request(&key, None, &csr::Names::default()).unwrap();
        let identity = "spiffe://cluster.local/ns/default/sa/web".parse().unwrap();
        let leaf = self.ca.issue(&request, &identity, HOUR).unwrap();
        let key = key.to_private_key();
        let text = String::from_utf8(key.to_pem().to_vec()).unwrap();
        let [intermediate, _] = self.ca.chain();
        (Secret::KeyPair(KeyPair::new(vec![leaf, intermediate.clone()], key).unwrap()), text)
    }

    fn publish_roots(&self) {
        let [_, root] = self.ca.chain();
        let bundle = TrustBundle::new(vec![root.clone()]).unwrap();
        self.roots.publish(Secret::TrustBundle(bundle), self.clock.now(), None);
    }

    /// Publishes a new pair, and returns its key as PEM.
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
        assert!(waited.await.is_ok(), "timed out: {what}");
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
        for task in self.tasks {
            timeout(LIMIT, task).await.unwrap().unwrap();
        }
    }
}

/// A second CA, and how it takes over from the first as with `--drop-old-roots`.
#[tokio::test]
async fn roots_that_the_certificate_does_not_chain_to_wait_for_the_next_certificate() {
    let mut stage = Stage::new(None);
    stage.publish_roots();
    let key = stage.publish_pair();
    // The files are there before the swap is counted.
    stage.wait("the first set is written", || stage.writes("ok") == 1).await;
    assert_eq!(stage.read(KEY_FILE), key);
    let root = stage.read(ROOT_FILE);
    stage.ca = DevelopmentCa::open(&stage.place.path().join("ca-2"), stage.clock.clone()).unwrap();
    stage.publish_roots();
    // The output sees the new roots, and would begin to write them.
    for _ in 0..3 {
        tokio::task::yield_now().await;
    }
    assert_eq!((stage.read(ROOT_FILE), stage.writes("ok")), (root.clone(), 1));
    let key = stage.publish_pair();
    stage.wait_key(&key).await;
    stage.wait("the swap is counted", || stage.writes("ok") > 1).await;
    assert_eq!(stage.writes("ok"), 2, "one swap for both");
    assert_ne!(stage.read(ROOT_FILE), root);
    stage.end().await;
}

fn is_empty(path: &Path) -> bool {
    std::fs::symlink_metadata(path).is_err()
}

#[tokio::test]
async fn key_pair_and_roots_are_written_together_and_every_change_is_followed() {
    let stage = Stage::new(None);
    // Roots alone are not written.
    stage.publish_roots();
    stage.wait("the directory is created", || stage.path("").exists()).await;
    assert!(is_empty(&stage.path(ROOT_FILE)));
    for writes in 1..4 {
        let key = stage.publish_pair();
        stage.wait_key(&key).await;
        stage.wait("the write is counted", || stage.writes("ok") == writes).await;
        assert!(!stage.read(ROOT_FILE).is_empty() && !stage.read(CHAIN_FILE).is_empty());
    }
    // A failure of the source does not change the value.
    stage.pair.fail("the CA is down".to_owned());
    let key = stage.publish_pair();
    stage.wait_key(&key).await;
    stage.wait("the write is counted", || stage.writes("ok") == 4).await;
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
async fn a_change_of_crls_needs_no_write() {
    let stage = Stage::new(None);
    let (Secret::KeyPair(pair), _) = stage.new_pair() else { unreachable!() };
    let [_, root] = stage.ca.chain();
    let roots = || Secret::TrustBundle(TrustBundle::new(vec![root.clone()]).unwrap());
    let good = |secret: Secret, version: &[u8]| {
        // As after a change of CRLs.
        let resource = Resource::new(Version::of(version), Payload::of(&secret));
        Arc::new(Good { secret, resource, origin: Origin::CA, received: UNIX_EPOCH, renews: None })
    };
    let pair = good(Secret::KeyPair(pair), b"pair");
    let set = |version| Set::new(Arc::clone(&pair), good(roots(), version));
    assert_eq!(set(b"1").versions, set(b"2").versions);
    stage.end().await;
}

#[tokio::test]
async fn an_expired_pair_is_not_written_and_existing_files_stay() {
    let stage = Stage::new(None);
    let (expired, _) = stage.new_pair();
    stage.clock.set_by(2 * 3_600_000);
    stage.publish_roots();
    stage.pair.publish(expired, stage.clock.now(), None);
    stage.wait("the directory is created", || stage.path("").exists()).await;
    // Give the output a chance to see the expired pair.
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
    assert_eq!(writes, 2, "only valid pairs are written");
}

#[tokio::test]
async fn a_failed_write_is_retried_until_it_succeeds() {
    let stage = Stage::new(None);
    stage.publish_roots();
    let first = stage.publish_pair();
    stage.wait_key(&first).await;
    // A foreign directory in the place of a link.
    std::fs::remove_file(stage.path(CHAIN_FILE)).unwrap();
    std::fs::create_dir(stage.path(CHAIN_FILE)).unwrap();
    let second = stage.publish_pair();
    stage.wait("the write has failed twice", || stage.writes("failed") >= 2).await;
    assert_eq!(stage.read(KEY_FILE), first, "the old key stays");
    std::fs::remove_dir(stage.path(CHAIN_FILE)).unwrap();
    stage.wait_key(&second).await;
    stage.end().await;
}

#[tokio::test]
async fn damage_is_repaired_and_files_of_another_agent_are_left_alone() {
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
        // The watch is armed a moment after the write. Damage before that is found when it is armed.
        damage(&stage.path(""));
        stage.wait("the files are rewritten", || stage.writes("ok") == done + 1).await;
        assert_eq!(stage.read(KEY_FILE), key);
        assert!(!stage.read(ROOT_FILE).is_empty() && !stage.read(CHAIN_FILE).is_empty());
    }
    // The hook may change permissions.
    use std::os::unix::fs::PermissionsExt as _;
    std::fs::set_permissions(stage.path(KEY_FILE), std::fs::Permissions::from_mode(0o640)).unwrap();
    let mut other = OutputDirectory::new(pem(stage.path("")).layout());
    let files = [KEY_FILE, CHAIN_FILE, ROOT_FILE].map(|name| {
        let content = Zeroizing::new(b"theirs".to_vec());
        OutputFile { name: name.to_owned(), mode: 0o600, content }
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
async fn a_hanging_disk_is_reported_once() {
    for (seconds, reports) in [(9, 0), (11, 1), (100, 1)] {
        let mut count = 0;
        let work = tokio::time::sleep(Duration::from_secs(seconds));
        or_report(work, || count += 1).await;
        assert_eq!(count, reports, "{seconds} s");
    }
}

#[tokio::test]
async fn a_hook_runs_once_for_each_swap_and_nothing_is_swapped_while_it_runs() {
    // Fails if another hook is running, or if the key changes while this one runs.
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
    stage.wait("the hook has seen the newest key", || seen().ends_with(&last)).await;
    stage.wait("the last hook has finished", || stage.hooks("ok") == stage.writes("ok")).await;
    assert_eq!(seen().matches("BEGIN").count() as u64, stage.writes("ok"));
    assert!((2..50).contains(&stage.writes("ok")), "{} swaps", stage.writes("ok"));
    assert_eq!((stage.hooks("failed"), stage.writes("failed")), (0, 0));
    stage.end().await;
}

#[tokio::test]
async fn a_hook_that_fails_runs_again_until_it_succeeds() {
    let stage = Stage::new(Some(
        r#"echo >> "$ATTACHE_OUTPUT_DIR/../runs"; test -e "$ATTACHE_OUTPUT_DIR/../repaired""#,
    ));
    stage.publish_roots();
    stage.publish_pair();
    stage.wait("the hook has failed", || stage.hooks("failed") == 1).await;
    // The next swap does not wait for the retry.
    let key = stage.publish_pair();
    stage.wait_key(&key).await;
    stage.wait("the hook has failed again", || stage.hooks("failed") >= 2).await;
    std::fs::write(stage.place.path().join("repaired"), "").unwrap();
    stage.wait("the hook has succeeded", || stage.hooks("ok") == 1).await;
    assert_eq!(stage.writes("ok"), 2);
    stage.end().await;
}

#[tokio::test]
async fn shutdown_waits_for_a_running_hook() {
    let stage = Stage::new(Some(r#"echo > "$ATTACHE_OUTPUT_DIR/../started"; sleep 0.5"#));
    stage.publish_roots();
    stage.publish_pair();
    stage.wait("the hook is running", || stage.place.path().join("started").exists()).await;
    let metrics = stage.metrics.clone();
    stage.end().await;
    assert_eq!(metrics.output_hooks.get_or_create(&ByResult { outcome: "ok" }).get(), 1);
}

/// The key in each of the directories.
fn keys(stage: &Stage, directories: &[&str]) -> Vec<String> {
    let read = |name: &&str| std::fs::read_to_string(stage.place.path().join(name).join(KEY_FILE));
    directories.iter().map(|name| read(name).unwrap_or_default()).collect()
}

#[tokio::test]
async fn one_hook_runs_after_all_directories_have_the_new_set() {
    // Fails unless all keys are the same, and stay the same while it runs.
    let hook = r#"cd "$ATTACHE_OUTPUT_DIR/.." && test "$ATTACHE_OUTPUT_DIRS" = "$PWD/a:$PWD/b:$PWD/c" &&
        cat a/key.pem >> seen && cmp a/key.pem b/key.pem && cmp b/key.pem c/key.pem && sleep 0.1 && cmp a/key.pem c/key.pem"#;
    let names = ["a", "b", "c"];
    let stage = Stage::with(Some(hook), |place| names.map(|name| pem(place.join(name))).to_vec());
    stage.publish_roots();
    let mut last = String::new();
    for _ in 0..20 {
        last = stage.publish_pair();
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let seen = || std::fs::read_to_string(stage.place.path().join("seen")).unwrap_or_default();
    stage.wait("the hook has seen the newest key", || seen().ends_with(&last)).await;
    stage.wait("the last hook has finished", || stage.hooks("ok") * 3 == stage.writes("ok")).await;
    assert_eq!(seen().matches("BEGIN").count() as u64, stage.hooks("ok"), "one run for three swaps");
    assert_eq!((stage.hooks("failed"), stage.writes("failed")), (0, 0));
    assert_eq!(keys(&stage, &names), [last.as_str(); 3]);
    stage.end().await;
}

#[tokio::test]
async fn a_directory_that_fails_does_not_stop_the_others_and_the_hook_runs_again_for_it() {
    let hook = r#"cd "$ATTACHE_OUTPUT_DIR/.." && cat b/key.pem >> seen"#;
    let stage = Stage::with(Some(hook), |place| {
        std::fs::write(place.join("a"), "in the way").unwrap();
        vec![pem(place.join("a")), pem(place.join("b"))]
    });
    stage.publish_roots();
    let key = stage.publish_pair();
    stage.wait("the other is written", || keys(&stage, &["b"]) == [key.as_str()]).await;
    stage.wait("the hook has run", || stage.hooks("ok") == 1).await;
    let health = stage.components.output().unwrap();
    let [failed, good] = &health.directories[..] else { panic!("{health:?}") };
    let failing = failed.failure.as_ref().unwrap();
    assert!(failing.reason.contains("a is not a directory: move it away"), "{failed:?}");
    assert!(failing.next_try.is_some_and(|at| at > failing.since), "{failed:?}");
    assert!(failed.not_after.is_none() && good.failure.is_none() && good.not_after.is_some());
    assert_eq!((health.not_after(), health.failure()), (None, failed.failure.clone()));
    // The next generation does not wait for it either.
    let key = stage.publish_pair();
    stage.wait("the other is written again", || keys(&stage, &["b"]) == [key.as_str()]).await;
    std::fs::remove_file(stage.place.path().join("a")).unwrap();
    stage.wait("the first is written", || keys(&stage, &["a", "b"]) == [key.as_str(); 2]).await;
    let seen = || std::fs::read_to_string(stage.place.path().join("seen")).unwrap();
    stage.wait("the hook has run for it", || seen().matches("BEGIN").count() >= 3).await;
    stage.wait("it is healthy", || stage.components.output().unwrap().failure().is_none()).await;
    assert!(stage.components.output().unwrap().not_after().is_some());
    stage.end().await;
}
