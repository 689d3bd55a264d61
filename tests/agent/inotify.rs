//! Polling where inotify's limits are reached, and one directory that is mounted twice.
//!
//! The limits are those of a user namespace of the agent's own (`unshare`): no other process is affected.

use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use tokio::io::AsyncWriteExt as _;
use tokio::process::{ChildStdin, Command};

use crate::support::files::{Mounted, swap};
use crate::support::process::Agent;
use crate::support::sds::{Client, Stream, content, fetch, on_connection, secrets};

const REFUSED: &str = "inotify limit reached";
const AGAIN: &str = "inotify available again";

/// `agent` as root in namespaces of its own, which `flags` select, after `script`. The shell stays there and runs what
/// is written to its standard input.
fn in_a_namespace(flags: &str, script: &str, agent: &Command) -> Command {
    let tried = std::process::Command::new("unshare").args([flags, "true"]).output();
    let tried = tried.expect("this test needs unshare, of util-linux");
    let error = String::from_utf8_lossy(&tried.stderr);
    assert!(tried.status.success(), "this test needs user namespaces, and there are none: {error}");
    let script = format!("{script}\nexec 3<&0\nsh <&3 &\nexec \"$0\" \"$@\" 3<&- </dev/null");
    let mut command = Command::new("unshare");
    command.args([flags, "sh", "-e", "-c", &script]);
    command.arg(agent.as_std().get_program()).args(agent.as_std().get_args());
    command.env_clear().kill_on_drop(true).stdin(Stdio::piped());
    command
}

/// A ready agent in such namespaces, and its shell.
async fn start(directory: &Path, volume: &Path, flags: &str, script: &str) -> (Agent, ChildStdin) {
    let arguments = ["--cert-dir", volume.to_str().unwrap()];
    let inside = |command| in_a_namespace(flags, script, &command);
    let mut agent = Agent::start_as(directory, "agent", &arguments, inside);
    let shell = agent.process.input();
    agent.process.wait_log(" ready ").await;
    (agent, shell)
}

fn limit(kind: &str, value: u32) -> String {
    format!("echo {value} >/proc/sys/user/max_inotify_{kind}\n")
}

fn pair_name(volume: &Path) -> String {
    format!("file-cert:{0}/cert-chain.pem~{0}/key.pem", volume.display())
}

fn roots_name(volume: &Path) -> String {
    format!("file-root:{}/root-cert.pem", volume.display())
}

/// A stream for each of `names`, whose first response is accepted.
async fn open(client: &Client, names: &[&str]) -> Vec<Stream> {
    let mut streams = Vec::new();
    for name in names {
        let mut stream = Stream::open(client, &[name]).await.unwrap();
        let response = stream.next().await.unwrap();
        stream.accept(&response).await;
        streams.push(stream);
    }
    streams
}

/// Asserts that each stream's next push is `newest`, complete.
async fn all_get(streams: &mut [Stream], newest: &Mounted, change: &str) {
    let text = |pem: &[u8]| String::from_utf8(pem.to_vec()).unwrap();
    for stream in streams {
        let response = stream.next().await.unwrap();
        let [secret] = secrets(&response).try_into().unwrap();
        let name = secret.name.clone();
        let expected = match name == "ROOTCA" || name.starts_with("file-root:") {
            true => (text(&newest.root), None),
            false => (text(&newest.chain), Some(text(&newest.key))),
        };
        assert_eq!(content(secret), expected, "{name} after: {change}");
        stream.accept(&response).await;
    }
}

/// Makes a change of each kind, and asserts that all streams get it.
async fn changes_arrive(directory: &Path, volumes: &[&Path], streams: &mut [Stream], round: &str) {
    let next = |kind: &str| Mounted::new(&directory.join(format!("ca-{round}-{kind}")), "web");
    let swapped = next("swap");
    for volume in volumes {
        let old = volume.join(std::fs::read_link(volume.join("..data")).unwrap());
        swap(volume, swapped.files());
        std::fs::remove_dir_all(old).unwrap();
    }
    all_get(streams, &swapped, &format!("{round}: a swap")).await;
    let renamed = next("rename");
    for volume in volumes {
        for (name, content) in renamed.files() {
            std::fs::write(volume.join("..data/staged"), content).unwrap();
            std::fs::rename(volume.join("..data/staged"), volume.join("..data").join(name)).unwrap();
        }
    }
    all_get(streams, &renamed, &format!("{round}: new files")).await;
    let written = next("write");
    for volume in volumes {
        written.write(volume);
    }
    all_get(streams, &written, &format!("{round}: files written in place")).await;
}

#[tokio::test]
async fn without_inotify_files_are_polled_until_it_is_available_again() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let volume = directory.join("volume");
    swap(&volume, Mounted::new(&directory.join("ca"), "web").files());
    let (mut agent, mut shell) = start(directory, &volume, "-Ur", &limit("instances", 0)).await;
    let (_, line) = agent.process.wait_log(REFUSED).await;
    assert!(line.contains("max_user_instances") && line.contains("WARN"), "{line}");
    let polled = "attache_watched_folders{mode=\"polling\"}";
    assert!(agent.metric(polled).await > 0.0);
    on_connection(&agent.socket.clone(), async |client| {
        let names = ["default", "ROOTCA", &pair_name(&volume), &roots_name(&volume)];
        let mut streams = open(&client, &names).await;
        changes_arrive(directory, &[&volume], &mut streams, "without").await;
        shell.write_all(limit("instances", 128).as_bytes()).await.unwrap();
        let (_, line) = agent.process.wait_log(AGAIN).await;
        assert!(line.contains("INFO"), "{line}");
        agent.wait_metric(polled, 0).await;
        changes_arrive(directory, &[&volume], &mut streams, "with").await;
    })
    .await;
    let log = agent.process.log();
    assert_eq!((agent.process.count(REFUSED), agent.process.count(AGAIN)), (1, 1), "{log}");
}

#[tokio::test]
async fn with_few_watches_some_directories_are_watched_and_others_polled() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let volumes = ["one", "two", "three"].map(|name| directory.join(name));
    for volume in &volumes {
        swap(volume, Mounted::new(&directory.join("ca"), "web").files());
    }
    // The parent directories, the first volume with its content, and one or two where platforms mount certificates.
    let above = u32::try_from(directory.ancestors().count()).unwrap();
    let (mut agent, mut shell) = start(directory, &volumes[0], "-Ur", &limit("watches", above + 4)).await;
    on_connection(&agent.socket.clone(), async |client| {
        assert_eq!(agent.process.count(REFUSED), 0, "{}", agent.process.log());
        let names: Vec<_> =
            volumes.iter().flat_map(|volume| [pair_name(volume), roots_name(volume)]).collect();
        let names: Vec<_> = names.iter().map(String::as_str).chain(["default", "ROOTCA"]).collect();
        let mut streams = open(&client, &names).await;
        let (_, line) = agent.process.wait_log(REFUSED).await;
        assert!(line.contains("max_user_watches") && line.contains("WARN"), "{line}");
        let volumes = volumes.each_ref().map(|volume| volume.as_path());
        changes_arrive(directory, &volumes, &mut streams, "few").await;
        // A deleted directory frees one watch, at any moment of the polling rounds of the others.
        let began = Instant::now();
        while began.elapsed() < Duration::from_secs(3) {
            let next = Mounted::new(&directory.join("ca"), "web");
            let old = volumes[0].join(std::fs::read_link(volumes[0].join("..data")).unwrap());
            swap(volumes[0], next.files());
            std::fs::remove_dir_all(old).unwrap();
            let (pairs, _) = streams.split_at_mut(1);
            all_get(pairs, &next, "a swap of the first alone").await;
        }
        for stream in &mut streams {
            while !stream.is_quiet(Duration::from_millis(1)).await {}
        }
        changes_arrive(directory, &volumes, &mut streams, "few again").await;
        let log = agent.process.log();
        assert_eq!((agent.process.count(REFUSED), agent.process.count(AGAIN)), (1, 0), "{log}");
        shell.write_all(limit("watches", 1000).as_bytes()).await.unwrap();
        agent.process.wait_log(AGAIN).await;
        changes_arrive(directory, &volumes, &mut streams, "enough").await;
    })
    .await;
    let log = agent.process.log();
    assert_eq!((agent.process.count(REFUSED), agent.process.count(AGAIN)), (1, 1), "{log}");
}

/// The kernel has one watch per directory, whatever path leads to it.
#[tokio::test]
async fn a_directory_that_is_mounted_twice_is_followed_by_either_path() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let (volume, other) = (directory.join("volume"), directory.join("other"));
    std::fs::create_dir(&other).unwrap();
    swap(&volume, Mounted::new(&directory.join("ca"), "web").files());
    let mount = format!("mount --bind {} {}", volume.display(), other.display());
    let (agent, _shell) = start(directory, &volume, "-Urm", &mount).await;
    on_connection(&agent.socket, async |client| {
        let names = [
            "default",
            "ROOTCA",
            &pair_name(&volume),
            &pair_name(&other),
            &roots_name(&volume),
            &roots_name(&other),
        ];
        let mut streams = open(&client, &names).await;
        changes_arrive(directory, &[&volume], &mut streams, "both").await;
        // A name without a file is dropped as soon as its last subscriber is gone, and its part of the watch with it.
        for (round, path) in [&volume, &other].into_iter().enumerate() {
            let nowhere = format!("file-root:{}/nowhere", path.display());
            let mut request = tonic::Request::new(crate::support::sds::request(&[&nowhere]));
            request.set_timeout(Duration::from_millis(200));
            client.clone().fetch_secrets(request).await.unwrap_err();
            changes_arrive(directory, &[&volume], &mut streams, &format!("one name less, {round}")).await;
        }
        assert!(fetch(&client, &names).await.is_ok());
    })
    .await;
    assert_eq!(agent.process.count("WARN"), 2, "{}", agent.process.log());
}
