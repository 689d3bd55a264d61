//! The files that the agent writes for other programs, without a connected Envoy.

use std::path::{Path, PathBuf};
use std::time::Duration;

use attache::pki::key::PrivateKey;
use attache::pki::pem;
use attache::secret::{KeyPair, TrustBundle};
use rustix::process::Signal;
use tokio::time::{sleep, timeout};

use crate::support::files::{Mounted, swap};
use crate::support::process::{Agent, PATIENCE, output};
use crate::support::wait::wait_until;

const NAMES: [&str; 3] = ["key.pem", "cert-chain.pem", "root-cert.pem"];

/// The key pair and the roots in `directory`.
fn read(directory: &Path) -> (KeyPair, TrustBundle) {
    let [key, chain, root] = NAMES.map(|name| {
        let path = directory.join(name);
        std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    });
    let key = PrivateKey::from_pem(&key).unwrap();
    let pair = KeyPair::new(pem::certificates(&chain).unwrap(), key).unwrap();
    (pair, TrustBundle::new(pem::certificates(&root).unwrap()).unwrap())
}

/// The serial of the key pair in `directory`.
fn serial(directory: &Path) -> String {
    read(directory).0.leaf().serial.clone()
}

/// The serial of the key pair in `directory`, which must be valid and chain to the roots beside it.
fn whole(directory: &Path) -> String {
    let (pair, roots) = read(directory);
    roots.verify(&pair, attache::base::clock::Clock::system().now()).unwrap();
    pair.leaf().serial.clone()
}

/// Options of an agent that renews a certificate of the embedded CA every two seconds.
fn embedded(directory: &Path) -> Vec<String> {
    let ca_dir = directory.join("ca").display().to_string();
    let output = directory.join("out").display().to_string();
    let options =
        [("--ca", "embedded"), ("--ca-dir", &ca_dir), ("--cert-ttl", "4s"), ("--output-dir", &output)];
    options.into_iter().flat_map(|(flag, value)| [flag.to_owned(), value.to_owned()]).collect()
}

/// Options of an agent that serves the files in `directory/certs`, without debouncing.
fn mounted(directory: &Path) -> Vec<String> {
    let certs = directory.join("certs").display().to_string();
    let output = directory.join("out").display().to_string();
    let options = [("--cert-dir", certs.as_str()), ("--file-debounce", "0ms"), ("--output-dir", &output)];
    options.into_iter().flat_map(|(flag, value)| [flag.to_owned(), value.to_owned()]).collect()
}

fn start(directory: &Path, options: &[String], more: &[&str]) -> Agent {
    let options: Vec<_> = options.iter().map(String::as_str).chain(more.iter().copied()).collect();
    Agent::start(directory, "agent", &options)
}

/// A new directory with mounted files in `certs`.
fn place() -> (tempfile::TempDir, PathBuf, Mounted) {
    let place = tempfile::tempdir().unwrap();
    let directory = place.path().to_owned();
    std::fs::create_dir(directory.join("certs")).unwrap();
    let first = Mounted::new(&directory.join("ca"), "web");
    swap(&directory.join("certs"), first.files());
    (place, directory, first)
}

#[tokio::test]
async fn files_are_written_and_renewed_without_a_connected_client() {
    let place = tempfile::tempdir().unwrap();
    let directory = place.path();
    let mut agent = start(directory, &embedded(directory), &[]);
    let out = directory.join("out");
    for times in 1..4 {
        agent.process.wait_log_times("files written", times).await;
        let serial = whole(&out.join(std::fs::read_link(out.join("..data")).unwrap()));
        assert!(agent.serials().contains(&serial), "{serial}: {}", agent.process.log());
        assert!(agent.serials().len() <= times + 1, "one generation per certificate");
    }
    assert!(agent.metric("attache_output_writes_total{outcome=\"ok\"}").await >= 3.0);
    assert_eq!(agent.process.count("output write failed"), 0);
}

#[tokio::test]
async fn an_unusable_directory_is_reported_at_the_start_and_retried() {
    let place = tempfile::tempdir().unwrap();
    let directory = place.path();
    let out = directory.join("out");
    std::fs::write(&out, "precious").unwrap();
    let mut agent = start(directory, &embedded(directory), &[]);
    let (_, line) = agent.process.wait_log("output directory not writable").await;
    for words in ["out is not a directory", "move it away, or choose another --output-dir"] {
        assert!(line.contains(words), "{line}");
    }
    agent.process.wait_log_times("certificate issued", 2).await;
    assert!(!line.contains("retry_in"), "no retry before there is something to write: {line}");
    let (status, body) = agent.status("/readyz").await;
    assert!(status == 503 && body.starts_with("output: not written yet: "), "{body}");
    assert!(body.contains("out is not a directory") && body.lines().count() == 1, "{body}");
    assert_eq!(agent.metric("attache_output_failing").await, 1.0);
    assert_eq!(agent.process.count(" ready "), 0);
    assert_eq!(std::fs::read_to_string(&out).unwrap(), "precious");
    assert_eq!(agent.process.count("output directory not writable"), 1, "{}", agent.process.log());
    assert_eq!(agent.process.count("output write failed"), 0, "{}", agent.process.log());
    std::fs::remove_file(&out).unwrap();
    agent.process.wait_log("output directory writable again").await;
    whole(&out);
    agent.process.wait_log(" ready ").await;
    assert_eq!(agent.status("/readyz").await.0, 200);
    assert_eq!(agent.metric("attache_output_failing").await, 0.0);
    let ends = agent.metric("attache_output_not_after_timestamp_seconds").await;
    assert!(ends > agent.metric("attache_secret_received_timestamp_seconds{name=\"default\"}").await);
}

#[tokio::test]
async fn a_kill_at_any_moment_leaves_one_whole_set() {
    let (_place, directory, first) = place();
    let (certs, out) = (directory.join("certs"), directory.join("out"));
    // From two CAs, so that no parts of consecutive sets match.
    let sets: Vec<_> = (0..10)
        .map(|number| Mounted::new(&directory.join(format!("ca{}", number % 2)), "web"))
        .chain([first])
        .collect();
    let mut agent = start(&directory, &mounted(&directory), &[]);
    agent.process.wait_log("files written").await;
    let serials: Vec<_> = sets.iter().map(Mounted::serial).collect();
    let mut generation = 0;
    let mut seen = std::collections::BTreeSet::new();
    // As many rounds as it takes to kill it at different sets, on a machine of any speed.
    for round in 0.. {
        if round >= 20 && seen.len() > 3 {
            break;
        }
        assert!(round < 300, "kills at only {} different sets", seen.len());
        let kill_at = tokio::time::Instant::now() + Duration::from_millis(20 + 11 * (round % 20));
        while tokio::time::Instant::now() < kill_at {
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
        wait_until("the newest set is written", || whole_now(&out).is_some_and(|serial| serial == newest))
            .await;
    }
    // No leftovers of the kills stay.
    let ours = || {
        let entries = std::fs::read_dir(&out).unwrap().flatten();
        entries.filter(|entry| entry.file_name().to_str().unwrap().starts_with("..attache-")).count()
    };
    wait_until("only the lock and one generation are left", || ours() == 2).await;
}

/// The serial of the generation that `..data` leads to, which must stay while it is read; none if there is no `..data`.
fn whole_now(out: &Path) -> Option<String> {
    let generation = out.join(std::fs::read_link(out.join("..data")).ok()?);
    Some(whole(&generation))
}

#[tokio::test]
async fn after_a_restart_unchanged_files_are_not_swapped_and_no_hook_runs() {
    let (_place, directory, first) = place();
    let out = directory.join("out");
    let runs = directory.join("runs");
    let hook = format!("echo . >> {}", runs.display());
    let mut agent = start(&directory, &mounted(&directory), &["--output-hook", &hook]);
    wait_until("the hook has run", || runs.exists()).await;
    let generation = std::fs::read_link(out.join("..data")).unwrap();
    agent.process.signal(Signal::TERM);
    assert_eq!(agent.process.ended().await.code(), Some(0));
    agent.restart();
    agent.process.wait_log("output files already up to date").await;
    assert_eq!(std::fs::read_link(out.join("..data")).unwrap(), generation);
    assert_eq!(whole(&out), first.serial());
    // Only the next set runs the hook.
    swap(&directory.join("certs"), Mounted::new(&directory.join("ca"), "web").files());
    wait_until("the hook has run again", || std::fs::read_to_string(&runs).unwrap() == ".\n.\n").await;
    assert_eq!(agent.metric("attache_output_writes_total{outcome=\"ok\"}").await, 1.0);
}

#[tokio::test]
async fn a_hook_that_has_not_succeeded_runs_after_a_restart() {
    let (_place, directory, _) = place();
    let hook = "cd \"$ATTACHE_OUTPUT_DIR/..\"; readlink out/..data >> tried; test -e repaired";
    let mut agent = start(&directory, &mounted(&directory), &["--output-hook", hook]);
    let tried = || std::fs::read_to_string(directory.join("tried")).unwrap_or_default();
    wait_until("the hook has run", || !tried().is_empty()).await;
    agent.process.kill().await;
    std::fs::write(directory.join("repaired"), "").unwrap();
    let before = tried().lines().count();
    agent.restart();
    agent.process.wait_log("output files already up to date").await;
    wait_until("the hook runs again", || tried().lines().count() > before).await;
    agent.wait_metric("attache_output_hooks_total{outcome=\"ok\"}", 1).await;
    let generations: std::collections::BTreeSet<_> = tried().lines().map(str::to_owned).collect();
    assert_eq!(generations.len(), 1, "all runs for one set: {generations:?}");
}

#[tokio::test]
async fn two_agents_on_one_directory_are_reported() {
    let (_place, directory, _) = place();
    let (other_place, other_directory, _) = place();
    let mut one = start(&directory, &mounted(&directory), &[]);
    one.process.wait_log("files written").await;
    let mut options = mounted(&other_directory);
    *options.last_mut().unwrap() = directory.join("out").display().to_string();
    let mut other = start(&other_directory, &options, &[]);
    let (_, line) = one.process.wait_log("another agent writes to the output directory").await;
    assert!(line.contains("an --output-dir of its own"), "{line}");
    swap(&directory.join("certs"), Mounted::new(&directory.join("ca"), "web").files());
    other.process.wait_log("another agent writes to the output directory").await;
    // Neither overwrites the other's files without a new set.
    assert_eq!((one.process.count("files written"), other.process.count("files written")), (2, 1));
    drop(other_place);
}

#[tokio::test]
async fn a_deleted_file_is_rewritten_and_the_hook_runs() {
    let (_place, directory, first) = place();
    let out = directory.join("out");
    let mut agent = start(
        &directory,
        &mounted(&directory),
        &["--output-hook", "echo . >> \"$ATTACHE_OUTPUT_DIR/../runs\""],
    );
    agent.process.wait_log("files written").await;
    agent.wait_metric("attache_output_hooks_total{outcome=\"ok\"}", 1).await;
    std::fs::remove_file(out.join("key.pem")).unwrap();
    let (_, line) = agent.process.wait_log("output files damaged").await;
    assert!(line.contains("key.pem is missing"), "{line}");
    agent.process.wait_log_times("files written", 2).await;
    assert_eq!(whole(&out), first.serial());
    agent.wait_metric("attache_output_hooks_total{outcome=\"ok\"}", 2).await;
}

#[tokio::test]
async fn files_of_another_agent_are_taken_over() {
    let (_place, directory, newest) = place();
    let out = directory.join("out");
    let old = Mounted::new(&directory.join("old-ca"), "web");
    old.write(&out);
    let mut agent = start(&directory, &mounted(&directory), &[]);
    // At every moment each name exists, and `..data` leads to one set.
    wait_until("the new set is written", || {
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
async fn a_failed_hook_is_logged_without_secrets() {
    let (_place, directory, _) = place();
    let hook = "echo output; cat \"$ATTACHE_OUTPUT_DIR/key.pem\"; echo last words; exit 5 # s3cret";
    let options = ["--output-hook", hook, "--log-level", "trace"];
    let mut agent = start(&directory, &mounted(&directory), &options);
    let (_, line) = agent.process.wait_log("output hook failed").await;
    for words in ["exit status: 5", "output; -----BEGIN", "is not shown"] {
        assert!(line.contains(words), "{line}");
    }
    agent.process.wait_log("output hook failed again").await;
    assert_eq!(agent.metric("attache_output_failing").await, 1.0);
    assert_eq!(agent.status("/readyz").await.0, 200, "the files are written");
    assert!(agent.metric("attache_output_hooks_total{outcome=\"failed\"}").await >= 2.0);
    let key = std::fs::read_to_string(directory.join("out/key.pem")).unwrap();
    let log = agent.process.log();
    assert!(!log.contains("s3cret"), "{log}");
    assert!(!key.lines().any(|line| log.contains(line) && !line.starts_with("-----")), "{log}");

    // The status has its last lines, since when it fails, and when it runs again.
    let socket = agent.socket.to_str().unwrap();
    let table = output(&["status", "--socket", socket]).await.stdout;
    let table = String::from_utf8(table).unwrap();
    let (_, shown) = table.split_once("output directory").unwrap();
    let rows: Vec<_> = shown.lines().skip(1).map(str::trim).collect();
    assert_eq!(rows[0], "hook         the hook failed with exit status: 5");
    assert!(rows[1].starts_with("since ") && rows[2].starts_with("next try "), "{table}");
    assert_eq!(rows[3..6], ["hook output  output", "(a private key is not shown)", "last words"], "{table}");
    assert!(!key.lines().any(|line| table.contains(line) && !line.starts_with("-----")), "{table}");
}

#[tokio::test]
async fn a_hook_gets_the_file_limit_that_the_agent_was_started_with() {
    let (_place, directory, _) = place();
    let hook = "ulimit -S -n > \"$ATTACHE_OUTPUT_DIR/../files\"";
    let mut options = mounted(&directory);
    options.extend(["--output-hook", hook].map(str::to_owned));
    let options: Vec<_> = options.iter().map(String::as_str).collect();
    let mut agent = Agent::with_files(&directory, "agent", &options, 99);
    agent.wait_metric("attache_output_hooks_total{outcome=\"ok\"}", 1).await;
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", agent.process.pid().as_raw_nonzero()));
    let own = limits.unwrap().lines().find(|line| line.starts_with("Max open files")).unwrap().to_owned();
    assert!(!own.contains(" 99 "), "the agent raises its own limit: {own}");
    assert_eq!(std::fs::read_to_string(directory.join("files")).unwrap(), "99\n");
}

#[tokio::test]
async fn a_hook_that_hangs_is_killed_with_its_children() {
    let (_place, directory, _) = place();
    let hook = "sleep 1000 & echo $! $$ >> \"$ATTACHE_OUTPUT_DIR/../pids\"; wait";
    let options = ["--output-hook", hook, "--output-hook-timeout", "300ms"];
    let mut agent = start(&directory, &mounted(&directory), &options);
    let (_, line) = agent.process.wait_log("output hook failed").await;
    assert!(line.contains("did not exit within 300ms") && line.contains("--output-hook-timeout"), "{line}");
    wait_all_gone(&directory).await;
    assert!(agent.metric("attache_output_hooks_total{outcome=\"timeout\"}").await >= 1.0);
}

#[tokio::test]
async fn a_hook_does_not_outlive_a_stopped_agent() {
    let (_place, directory, _) = place();
    let hook = "trap '' TERM; sleep 1000 & echo $! $$ >> \"$ATTACHE_OUTPUT_DIR/../pids\"; wait";
    let options = ["--output-hook", hook, "--drain-timeout", "200ms"];
    let mut agent = start(&directory, &mounted(&directory), &options);
    let pids = directory.join("pids");
    wait_until("the hook is running", || {
        std::fs::read_to_string(&pids).is_ok_and(|pids| pids.ends_with('\n'))
    })
    .await;
    agent.process.signal(Signal::TERM);
    assert_eq!(agent.process.ended().await.code(), Some(0));
    let (_, line) = agent.process.wait_log("drain timeout exceeded, killing the output hook").await;
    assert!(line.contains("--drain-timeout") && agent.process.count("is cut") == 0, "{line}");
    wait_all_gone(&directory).await;
}

/// Waits until every process whose id a hook has recorded has exited.
async fn wait_all_gone(directory: &Path) {
    let pids = std::fs::read_to_string(directory.join("pids")).unwrap();
    for pid in pids.split_whitespace() {
        let stat = format!("/proc/{pid}/stat");
        let lives = || std::fs::read_to_string(&stat).is_ok_and(|stat| !stat.contains(") Z "));
        wait_until(&format!("process {pid} has exited"), || !lives()).await;
    }
}

#[tokio::test]
async fn a_full_disk_leaves_the_old_set_until_there_is_room() {
    let place = tempfile::tempdir().unwrap();
    let directory = place.path();
    let disk = directory.join("disk");
    std::fs::create_dir(&disk).unwrap();
    let mut options = embedded(directory);
    let output = options.last_mut().unwrap();
    *output = disk.join("out").display().to_string();
    let options: Vec<_> = options.iter().map(String::as_str).collect();
    let mut agent = Agent::on_small_disk(directory, "agent", &options, &disk, "4m").await;
    agent.process.wait_log("files written").await;
    // The disk is mounted in the agent's own namespace.
    let root = PathBuf::from(format!("/proc/{}/root", agent.process.pid().as_raw_nonzero()));
    let disk = root.join(disk.strip_prefix("/").unwrap());
    let out = disk.join("out");
    // Fills the disk, and again when the removal of an old generation has made room.
    let mut filler = std::fs::File::create(disk.join("filler")).unwrap();
    wait_until("the disk is full", || {
        while std::io::Write::write_all(&mut filler, &[0; 512]).is_ok() {}
        agent.process.count("output write failed") > 0
    })
    .await;
    drop(filler);
    let (_, line) = agent.process.wait_log("output write failed").await;
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
    assert_eq!(serial(&out), held, "the old set stays, even when it has expired");
    assert_eq!(agent.process.count("output write failed"), 1, "{}", agent.process.log());

    std::fs::remove_file(disk.join("filler")).unwrap();
    agent.process.wait_log("output directory writable again").await;
    assert_ne!(whole(&out), held);
}
