//! The files that the agent writes for other programs, with no Envoy connected.

use std::path::{Path, PathBuf};
use std::time::Duration;

use attache::pki::key::PrivateKey;
use attache::pki::pem;
use attache::secret::{KeyPair, TrustBundle};
use rustix::process::Signal;
use tokio::time::{sleep, timeout};

use crate::support::files::{Mounted, swap};
use crate::support::process::{Agent, PATIENCE};

const NAMES: [&str; 3] = ["key.pem", "cert-chain.pem", "root-cert.pem"];

/// What is in `folder`: a key and its chain, and roots.
fn read(folder: &Path) -> (KeyPair, TrustBundle) {
    let [key, chain, root] = NAMES.map(|name| {
        let path = folder.join(name);
        std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    });
    let key = PrivateKey::from_pem(&key).unwrap();
    let pair = KeyPair::new(pem::certificates(&chain).unwrap(), key).unwrap();
    (pair, TrustBundle::new(pem::certificates(&root).unwrap()).unwrap())
}

/// The serial of the key pair in `folder`.
fn serial(folder: &Path) -> String {
    read(folder).0.leaf().serial.clone()
}

/// The same of one that reaches the roots beside it now.
fn whole(folder: &Path) -> String {
    let (pair, roots) = read(folder);
    roots.verify(&pair, attache::base::clock::Clock::system().now()).unwrap();
    pair.leaf().serial.clone()
}

pub async fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let waited = timeout(PATIENCE, async {
        while !holds() {
            sleep(Duration::from_millis(5)).await;
        }
    });
    assert!(waited.await.is_ok(), "waited in vain until {what}");
}

/// An agent's options: certificates of the embedded CA that are renewed every two seconds.
fn embedded(folder: &Path) -> Vec<String> {
    let ca_dir = folder.join("ca").display().to_string();
    let output = folder.join("out").display().to_string();
    let options =
        [("--ca", "embedded"), ("--ca-dir", &ca_dir), ("--cert-ttl", "4s"), ("--output-dir", &output)];
    options.into_iter().flat_map(|(flag, value)| [flag.to_owned(), value.to_owned()]).collect()
}

/// The same for files in `folder/certs`, of which every change counts.
fn mounted(folder: &Path) -> Vec<String> {
    let certs = folder.join("certs").display().to_string();
    let output = folder.join("out").display().to_string();
    let options = [("--cert-dir", certs.as_str()), ("--file-debounce", "0ms"), ("--output-dir", &output)];
    options.into_iter().flat_map(|(flag, value)| [flag.to_owned(), value.to_owned()]).collect()
}

fn start(folder: &Path, options: &[String], more: &[&str]) -> Agent {
    let options: Vec<_> = options.iter().map(String::as_str).chain(more.iter().copied()).collect();
    Agent::start(folder, "agent", &options)
}

/// A new folder with mounted files in `certs`.
fn place() -> (tempfile::TempDir, PathBuf, Mounted) {
    let place = tempfile::tempdir().unwrap();
    let folder = place.path().to_owned();
    std::fs::create_dir(folder.join("certs")).unwrap();
    let first = Mounted::new(&folder.join("ca"), "web");
    swap(&folder.join("certs"), first.files());
    (place, folder, first)
}

#[tokio::test]
async fn files_appear_and_are_renewed_with_nobody_connected() {
    let place = tempfile::tempdir().unwrap();
    let folder = place.path();
    let mut agent = start(folder, &embedded(folder), &[]);
    let out = folder.join("out");
    for times in 1..4 {
        agent.process.wait_log_times("files written", times).await;
        let serial = whole(&out.join(std::fs::read_link(out.join("..data")).unwrap()));
        assert!(agent.serials().contains(&serial), "{serial}: {}", agent.process.log());
        assert!(agent.serials().len() <= times + 1, "one generation for each certificate");
    }
    assert!(agent.metric("attache_output_writes_total{outcome=\"ok\"}").await >= 3.0);
    assert_eq!(agent.process.count("can't be written"), 0);
}

#[tokio::test]
async fn a_folder_that_cannot_be_used_is_told_at_the_start_and_tried_again() {
    let place = tempfile::tempdir().unwrap();
    let folder = place.path();
    let out = folder.join("out");
    std::fs::write(&out, "precious").unwrap();
    let mut agent = start(folder, &embedded(folder), &[]);
    let (_, line) = agent.process.wait_log("files can't be written").await;
    for words in ["out is not a folder", "move it away, or choose another --output-dir"] {
        assert!(line.contains(words), "{line}");
    }
    agent.process.wait_log_times("certificate issued", 2).await;
    assert!(!line.contains("retry_in"), "nothing is tried before there is something to write: {line}");
    let (status, body) = agent.status("/readyz").await;
    assert!(status == 503 && body.starts_with("output: not written yet: "), "{body}");
    assert!(body.contains("out is not a folder") && body.lines().count() == 1, "{body}");
    assert_eq!(agent.metric("attache_output_failing").await, 1.0);
    assert_eq!(agent.process.count(" ready "), 0);
    assert_eq!(std::fs::read_to_string(&out).unwrap(), "precious");
    assert_eq!(agent.process.count("files can't be written"), 1, "{}", agent.process.log());
    std::fs::remove_file(&out).unwrap();
    agent.process.wait_log("can be written again").await;
    whole(&out);
    agent.process.wait_log(" ready ").await;
    assert_eq!(agent.status("/readyz").await.0, 200);
    assert_eq!(agent.metric("attache_output_failing").await, 0.0);
    let ends = agent.metric("attache_output_not_after_timestamp_seconds").await;
    assert!(ends > agent.metric("attache_secret_received_timestamp_seconds{name=\"default\"}").await);
}

#[tokio::test]
async fn a_kill_at_any_moment_leaves_one_whole_set() {
    let (_place, folder, first) = place();
    let (certs, out) = (folder.join("certs"), folder.join("out"));
    // Of two CAs, so that no two parts of different sets fit.
    let sets: Vec<_> = (0..10)
        .map(|number| Mounted::new(&folder.join(format!("ca{}", number % 2)), "web"))
        .chain([first])
        .collect();
    let mut agent = start(&folder, &mounted(&folder), &[]);
    agent.process.wait_log("files written").await;
    let serials: Vec<_> = sets.iter().map(Mounted::serial).collect();
    let mut generation = 0;
    let mut seen = std::collections::BTreeSet::new();
    // As many rounds as it takes to end it at different sets, on a machine of any speed.
    for round in 0.. {
        if round >= 20 && seen.len() > 3 {
            break;
        }
        assert!(round < 300, "the kills came at {} different sets only", seen.len());
        let end = tokio::time::Instant::now() + Duration::from_millis(20 + 11 * (round % 20));
        while tokio::time::Instant::now() < end {
            generation += 1;
            swap(&certs, sets[generation % sets.len()].files());
            sleep(Duration::from_millis(2)).await;
        }
        agent.process.kill().await;
        let serial = whole(&out);
        assert!(serials.contains(&serial), "{serial}");
        seen.insert(serial);
        agent.restart();
        let newest = sets[generation % sets.len()].serial();
        wait_until("the newest is written", || whole_now(&out).is_some_and(|serial| serial == newest)).await;
    }
    // Nothing of all that stays.
    let ours = || {
        let entries = std::fs::read_dir(&out).unwrap().flatten();
        entries.filter(|entry| entry.file_name().to_str().unwrap().starts_with("..attache-")).count()
    };
    wait_until("the lock and one generation are left", || ours() == 2).await;
}

/// The serial of what `..data` leads to, if it stays there for as long as it is read.
fn whole_now(out: &Path) -> Option<String> {
    let generation = out.join(std::fs::read_link(out.join("..data")).ok()?);
    Some(whole(&generation))
}

#[tokio::test]
async fn after_a_restart_equal_files_are_neither_swapped_nor_told_of() {
    let (_place, folder, first) = place();
    let out = folder.join("out");
    let told = folder.join("told");
    let hook = format!("echo . >> {}", told.display());
    let mut agent = start(&folder, &mounted(&folder), &["--output-hook", &hook]);
    wait_until("the hook has run", || told.exists()).await;
    let generation = std::fs::read_link(out.join("..data")).unwrap();
    agent.process.signal(Signal::TERM);
    assert_eq!(agent.process.ended().await.code(), Some(0));
    agent.restart();
    agent.process.wait_log("the files are there already").await;
    assert_eq!(std::fs::read_link(out.join("..data")).unwrap(), generation);
    assert_eq!(whole(&out), first.serial());
    // Only the next one is told of.
    swap(&folder.join("certs"), Mounted::new(&folder.join("ca"), "web").files());
    wait_until("the hook has run again", || std::fs::read_to_string(&told).unwrap() == ".\n.\n").await;
    assert_eq!(agent.metric("attache_output_writes_total{outcome=\"ok\"}").await, 1.0);
}

#[tokio::test]
async fn a_hook_that_is_owed_survives_the_end_of_the_agent() {
    let (_place, folder, _) = place();
    let hook = "cd \"$ATTACHE_OUTPUT_DIR/..\"; readlink out/..data >> tried; test -e mended";
    let mut agent = start(&folder, &mounted(&folder), &["--output-hook", hook]);
    let tried = || std::fs::read_to_string(folder.join("tried")).unwrap_or_default();
    wait_until("it was tried", || !tried().is_empty()).await;
    agent.process.kill().await;
    std::fs::write(folder.join("mended"), "").unwrap();
    let before = tried().lines().count();
    agent.restart();
    agent.process.wait_log("the files are there already").await;
    wait_until("it is tried again", || tried().lines().count() > before).await;
    agent.wait_metric("attache_output_hooks_total{outcome=\"ok\"}", 1).await;
    let generations: std::collections::BTreeSet<_> = tried().lines().map(str::to_owned).collect();
    assert_eq!(generations.len(), 1, "all of it for one set: {generations:?}");
}

#[tokio::test]
async fn two_agents_on_one_folder_are_told_so() {
    let (_place, folder, _) = place();
    let (other_place, other_folder, _) = place();
    let mut one = start(&folder, &mounted(&folder), &[]);
    one.process.wait_log("files written").await;
    let mut options = mounted(&other_folder);
    *options.last_mut().unwrap() = folder.join("out").display().to_string();
    let mut other = start(&other_folder, &options, &[]);
    let (_, line) = one.process.wait_log("somebody else writes here").await;
    assert!(line.contains("an --output-dir of its own"), "{line}");
    swap(&folder.join("certs"), Mounted::new(&folder.join("ca"), "web").files());
    other.process.wait_log("somebody else writes here").await;
    // Neither undoes what the other has written.
    assert_eq!((one.process.count("files written"), other.process.count("files written")), (2, 1));
    drop(other_place);
}

#[tokio::test]
async fn what_is_deleted_comes_back_and_is_told_of() {
    let (_place, folder, first) = place();
    let out = folder.join("out");
    let mut agent =
        start(&folder, &mounted(&folder), &["--output-hook", "echo . >> \"$ATTACHE_OUTPUT_DIR/../told\""]);
    agent.process.wait_log("files written").await;
    agent.wait_metric("attache_output_hooks_total{outcome=\"ok\"}", 1).await;
    std::fs::remove_file(out.join("key.pem")).unwrap();
    let (_, line) = agent.process.wait_log("it is written again").await;
    assert!(line.contains("key.pem is gone"), "{line}");
    agent.process.wait_log_times("files written", 2).await;
    assert_eq!(whole(&out), first.serial());
    agent.wait_metric("attache_output_hooks_total{outcome=\"ok\"}", 2).await;
}

#[tokio::test]
async fn files_of_another_agent_are_taken_over() {
    let (_place, folder, newest) = place();
    let out = folder.join("out");
    let old = Mounted::new(&folder.join("old-ca"), "web");
    old.write(&out);
    let mut agent = start(&folder, &mounted(&folder), &[]);
    // From the first moment to the last each name leads somewhere, and `..data` to one set.
    wait_until("the new set is there", || {
        NAMES.iter().for_each(|name| drop(std::fs::read(out.join(name)).unwrap()));
        whole_now(&out).is_some_and(|serial| {
            assert!(serial == old.serial() || serial == newest.serial());
            serial == newest.serial()
        })
    })
    .await;
    agent.process.wait_log("files written").await;
    assert_eq!(whole(&out), newest.serial());
}

#[tokio::test]
async fn a_hook_is_told_of_in_the_log_without_what_is_secret() {
    let (_place, folder, _) = place();
    let hook = "echo said; cat \"$ATTACHE_OUTPUT_DIR/key.pem\"; exit 5 # s3cret";
    let options = ["--output-hook", hook, "--log-level", "trace"];
    let mut agent = start(&folder, &mounted(&folder), &options);
    let (_, line) = agent.process.wait_log("the output hook failed").await;
    for words in ["exit status: 5", "said; -----BEGIN", "is not shown"] {
        assert!(line.contains(words), "{line}");
    }
    agent.process.wait_log("the output hook failed again").await;
    assert_eq!(agent.metric("attache_output_failing").await, 1.0);
    assert_eq!(agent.status("/readyz").await.0, 200, "the files are there");
    assert!(agent.metric("attache_output_hooks_total{outcome=\"failed\"}").await >= 2.0);
    let key = std::fs::read_to_string(folder.join("out/key.pem")).unwrap();
    let log = agent.process.log();
    assert!(!log.contains("s3cret"), "{log}");
    assert!(!key.lines().any(|line| log.contains(line) && !line.starts_with("-----")), "{log}");
}

#[tokio::test]
async fn a_hook_has_as_many_files_as_the_agent_was_started_with() {
    let (_place, folder, _) = place();
    let hook = "ulimit -S -n > \"$ATTACHE_OUTPUT_DIR/../files\"";
    let mut options = mounted(&folder);
    options.extend(["--output-hook", hook].map(str::to_owned));
    let options: Vec<_> = options.iter().map(String::as_str).collect();
    let mut agent = Agent::with_files(&folder, "agent", &options, 99);
    agent.wait_metric("attache_output_hooks_total{outcome=\"ok\"}", 1).await;
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", agent.process.pid().as_raw_nonzero()));
    let own = limits.unwrap().lines().find(|line| line.starts_with("Max open files")).unwrap().to_owned();
    assert!(!own.contains(" 99 "), "the agent takes more: {own}");
    assert_eq!(std::fs::read_to_string(folder.join("files")).unwrap(), "99\n");
}

#[tokio::test]
async fn a_hook_that_hangs_is_killed_with_its_children() {
    let (_place, folder, _) = place();
    let hook = "sleep 1000 & echo $! $$ >> \"$ATTACHE_OUTPUT_DIR/../pids\"; wait";
    let options = ["--output-hook", hook, "--output-hook-timeout", "300ms"];
    let mut agent = start(&folder, &mounted(&folder), &options);
    let (_, line) = agent.process.wait_log("the output hook failed").await;
    assert!(line.contains("did not end in 300ms") && line.contains("--output-hook-timeout"), "{line}");
    wait_all_gone(&folder).await;
    assert!(agent.metric("attache_output_hooks_total{outcome=\"timeout\"}").await >= 1.0);
}

#[tokio::test]
async fn a_hook_does_not_outlive_the_agent_that_was_stopped() {
    let (_place, folder, _) = place();
    let hook = "trap '' TERM; sleep 1000 & echo $! $$ >> \"$ATTACHE_OUTPUT_DIR/../pids\"; wait";
    let options = ["--output-hook", hook, "--drain-timeout", "200ms"];
    let mut agent = start(&folder, &mounted(&folder), &options);
    let pids = folder.join("pids");
    wait_until("it runs", || std::fs::read_to_string(&pids).is_ok_and(|pids| pids.ends_with('\n'))).await;
    agent.process.signal(Signal::TERM);
    assert_eq!(agent.process.ended().await.code(), Some(0));
    let (_, line) = agent.process.wait_log("the output hook did not end in time").await;
    assert!(line.contains("--drain-timeout") && agent.process.count("is cut") == 0, "{line}");
    wait_all_gone(&folder).await;
}

/// Waits until no process of those that hooks have written down is left.
async fn wait_all_gone(folder: &Path) {
    let pids = std::fs::read_to_string(folder.join("pids")).unwrap();
    for pid in pids.split_whitespace() {
        let stat = format!("/proc/{pid}/stat");
        let lives = || std::fs::read_to_string(&stat).is_ok_and(|stat| !stat.contains(") Z "));
        wait_until(&format!("process {pid} is gone"), || !lives()).await;
    }
}

#[tokio::test]
async fn a_full_disk_leaves_the_old_set_whole_until_there_is_room() {
    let place = tempfile::tempdir().unwrap();
    let folder = place.path();
    let disk = folder.join("disk");
    std::fs::create_dir(&disk).unwrap();
    let mut options = embedded(folder);
    let output = options.last_mut().unwrap();
    *output = disk.join("out").display().to_string();
    let options: Vec<_> = options.iter().map(String::as_str).collect();
    let mut agent = Agent::on_small_disk(folder, "agent", &options, &disk, "4m").await;
    agent.process.wait_log("files written").await;
    // The disk is in a namespace of the agent's own.
    let root = PathBuf::from(format!("/proc/{}/root", agent.process.pid().as_raw_nonzero()));
    let disk = root.join(disk.strip_prefix("/").unwrap());
    let out = disk.join("out");
    // Until it is full, and again when an old generation has made room.
    let mut filler = std::fs::File::create(disk.join("filler")).unwrap();
    wait_until("the disk is full", || {
        while std::io::Write::write_all(&mut filler, &[0; 512]).is_ok() {}
        agent.process.count("files can't be written") > 0
    })
    .await;
    drop(filler);
    let (_, line) = agent.process.wait_log("files can't be written").await;
    for words in ["No space left", "free some space there, or choose another --output-dir"] {
        assert!(line.contains(words), "{line}");
    }
    let held = whole(&out);
    let has_failed = async {
        while agent.metric("attache_output_writes_total{outcome=\"failed\"}").await < 3.0 {
            sleep(Duration::from_millis(50)).await;
        }
    };
    timeout(PATIENCE, has_failed).await.unwrap();
    assert_eq!(serial(&out), held, "it stays, even when it has expired meanwhile");
    assert_eq!(agent.process.count("files can't be written"), 1, "{}", agent.process.log());

    std::fs::remove_file(disk.join("filler")).unwrap();
    agent.process.wait_log("can be written again").await;
    assert_ne!(whole(&out), held);
}
