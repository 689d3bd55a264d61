//! Mounted files beside noisy neighbours, and on a file system that does not answer.

use std::fs::File;
use std::io::Write as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::process::Signal;

use crate::support::dead_fs::DeadFs;
use crate::support::files::{Mounted, swap};
use crate::support::process::Agent;
use crate::support::sds::{Stream, certificates, on_connection, served_serial};

/// A directory in which, and above which, nothing else happens.
fn quiet_directory() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// How often the agent's threads have been woken or interrupted.
fn switches(agent: &Agent) -> u64 {
    let tasks = format!("/proc/{}/task", agent.process.pid().as_raw_nonzero());
    let of_task = |task: std::io::Result<std::fs::DirEntry>| {
        let status = std::fs::read_to_string(task.unwrap().path().join("status")).unwrap_or_default();
        let counts = status.lines().filter(|line| line.contains("ctxt_switches"));
        counts.map(|line| line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap()).sum::<u64>()
    };
    std::fs::read_dir(tasks).unwrap().map(of_task).sum()
}

/// Writes `count` lines to a file that stays open, and as many to one that is opened for each.
fn log_lines(directory: &Path, count: usize) {
    let mut open = File::options().append(true).create(true).open(directory.join("open.log")).unwrap();
    for _ in 0..count {
        open.write_all(b"a line\n").unwrap();
        let mut other = File::options().append(true).create(true).open(directory.join("other.log")).unwrap();
        other.write_all(b"a line\n").unwrap();
    }
}

#[tokio::test]
async fn writes_beside_the_files_and_above_them_cost_nothing() {
    const LINES: usize = 10_000;
    let (directory, quiet) = (tempfile::tempdir().unwrap(), quiet_directory());
    let volume = quiet.path().join("above/certs");
    let ca = directory.path().join("ca");
    Mounted::new(&ca, "web").write(&volume);
    let places = [quiet.path(), &quiet.path().join("above"), &volume];
    for place in places {
        log_lines(place, 1);
    }
    let agent = Agent::ready(directory.path(), "agent", &["--cert-dir", volume.to_str().unwrap()]).await;
    on_connection(&agent.socket, async |client| {
        let mut pairs = Stream::open(&client, &["default"]).await.unwrap();
        let first = pairs.next().await.unwrap();
        pairs.accept(&first).await;
        // The agent first has to see that another process writes there all the time.
        for place in places {
            log_lines(place, 200);
        }
        assert!(pairs.is_quiet(Duration::from_millis(500)).await);
        let before = switches(&agent);
        for place in places {
            log_lines(place, LINES);
        }
        // A thread may have ended meanwhile.
        let woken = switches(&agent).saturating_sub(before);
        assert!(woken < 1_000, "{woken} times for {} writes", 2 * LINES * places.len());

        // The files are still followed, in every way.
        let change = async |pairs: &mut Stream, how: &dyn Fn(&Mounted)| {
            let next = Mounted::new(&ca, "web");
            how(&next);
            let pushed = pairs.next().await.unwrap();
            assert_eq!(certificates(&pushed).as_bytes(), next.chain);
            pairs.accept(&pushed).await;
        };
        for _ in 0..3 {
            change(&mut pairs, &|next| next.write(&volume)).await;
            change(&mut pairs, &|next| {
                for (name, content) in next.files() {
                    std::fs::write(volume.join("new"), content).unwrap();
                    std::fs::rename(volume.join("new"), volume.join(name)).unwrap();
                }
            })
            .await;
            change(&mut pairs, &|next| {
                for (name, content) in next.files() {
                    std::fs::remove_file(volume.join(name)).unwrap();
                    std::fs::write(volume.join(name), content).unwrap();
                }
            })
            .await;
        }
    })
    .await;
}

#[tokio::test]
async fn a_storm_of_events_delays_no_change_and_takes_no_memory() {
    let directory = tempfile::tempdir().unwrap();
    let volume = directory.path().join("certs");
    let ca = directory.path().join("ca");
    swap(&volume, Mounted::new(&ca, "web").files());
    let agent = Agent::ready(directory.path(), "agent", &["--cert-dir", volume.to_str().unwrap()]).await;
    on_connection(&agent.socket, async |client| {
        let mut pairs = Stream::open(&client, &["default"]).await.unwrap();
        let first = pairs.next().await.unwrap();
        pairs.accept(&first).await;
        let before = agent.memory();
        let is_over = Arc::new(AtomicBool::new(false));
        let storms: Vec<_> = ["one", "two", "three"]
            .map(|name| {
                let (volume, is_over) = (volume.clone(), Arc::clone(&is_over));
                let data = volume.join("..data");
                std::thread::spawn(move || {
                    while !is_over.load(Ordering::Relaxed) {
                        // In the volume, and where its files are.
                        for directory in [&volume, &data] {
                            let [from, to] =
                                [name.to_owned(), format!("{name}-renamed")].map(|name| directory.join(name));
                            let _ = std::fs::write(&from, "a storm");
                            let _ = std::fs::rename(from, &to);
                            let _ = std::fs::remove_file(to);
                        }
                    }
                })
            })
            .into();
        for number in 0..10 {
            let next = Mounted::new(&ca, "web");
            swap(&volume, next.files());
            let pushed = pairs.next().await.unwrap();
            assert_eq!(certificates(&pushed).as_bytes(), next.chain, "{number}");
            pairs.accept(&pushed).await;
        }
        let grown = agent.memory().saturating_sub(before);
        is_over.store(true, Ordering::Relaxed);
        storms.into_iter().for_each(|storm| storm.join().unwrap());
        assert!(grown < 4_000, "{grown} kB");
    })
    .await;
}

#[tokio::test]
async fn a_dead_cert_dir_at_the_start_stops_nothing_and_is_used_once_it_answers() {
    let directory = tempfile::tempdir().unwrap();
    let (volume, ca) = (directory.path().join("certs"), directory.path().join("ca"));
    let mounted = Mounted::new(&directory.path().join("other-ca"), "web");
    mounted.write(&volume);
    let arguments =
        ["--cert-dir", volume.to_str().unwrap(), "--ca", "embedded", "--ca-dir", ca.to_str().unwrap()];
    let (mut agent, mut dead) = DeadFs::agent(directory.path(), "agent", &arguments, &[&volume]);
    agent.process.wait_log("mounted files not read yet").await;
    agent.process.wait_log(" ready ").await;
    assert_eq!(agent.status("/livez").await.0, 200);
    assert_ne!(served_serial(&agent.socket).await, mounted.serial());
    agent.wait_metric_that("attache_hanging_paths", |paths| paths >= 1.0).await;
    dead.revive().await;
    agent.process.wait_log("secret served from files").await;
    agent.wait_metric("attache_hanging_paths", 0).await;
    // The roots come first.
    agent.process.wait_log_times("secret served from files", 2).await;
    assert_eq!(served_serial(&agent.socket).await, mounted.serial());
}

#[tokio::test]
async fn a_cert_dir_that_dies_keeps_its_last_content_served_and_stops_no_exit() {
    let directory = tempfile::tempdir().unwrap();
    let volume = directory.path().join("certs");
    let ca = directory.path().join("ca");
    let first = Mounted::new(&ca, "web");
    first.write(&volume);
    let arguments = ["--cert-dir", volume.to_str().unwrap()];
    let (mut agent, mut dead) = DeadFs::agent(directory.path(), "agent", &arguments, &[]);
    agent.process.wait_log(" ready ").await;
    dead.die(&[&volume]).await;
    // The directory below it is still watched.
    let second = Mounted::new(&ca, "web");
    second.write(&volume);
    agent.wait_metric_that("attache_hanging_paths", |paths| paths >= 1.0).await;
    assert_eq!(served_serial(&agent.socket).await, first.serial());
    assert_eq!(agent.status("/readyz").await.0, 200);
    dead.revive().await;
    agent.wait_metric("attache_hanging_paths", 0).await;
    agent.process.wait_log("file system answers again").await;
    while served_serial(&agent.socket).await != second.serial() {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    dead.die(&[&volume]).await;
    Mounted::new(&ca, "web").write(&volume);
    agent.wait_metric_that("attache_hanging_paths", |paths| paths >= 1.0).await;
    agent.process.signal(Signal::TERM);
    assert!(agent.process.ended().await.success());
}
