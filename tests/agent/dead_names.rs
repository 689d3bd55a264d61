//! Names of files on a file system that does not answer, and what no name leads to.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use tonic::{Code, Status};

use crate::support::dead_fs::DeadFs;
use crate::support::files::{Mounted, swap};
use crate::support::process::{Agent, output, strs};
use crate::support::sds::{
    Client, DeltaStream, Stream, certificates, content, fetch, on_connection, secrets,
};
use crate::support::wait::{wait_for, wait_until};

/// How long the exit may take after the drain timeout, on a busy machine: without a bound it takes for ever.
const SOON: Duration = Duration::from_secs(10);
const THREAD: &str = "named-files";

fn roots_name(path: impl AsRef<Path>) -> String {
    format!("file-root:{}", path.as_ref().display())
}

fn pair_name(directory: &Path) -> String {
    let (chain, key) = (directory.join("cert-chain.pem"), directory.join("key.pem"));
    format!("file-cert:{}~{}", chain.display(), key.display())
}

/// Mounted files, files on a disk that answers, and a directory on one that does not.
struct House(tempfile::TempDir);

impl House {
    fn new() -> Self {
        let house = Self(tempfile::tempdir().unwrap());
        for name in ["certs", "live", "later", "dead"] {
            house.renew(name);
        }
        house
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().canonicalize().unwrap().join(name)
    }

    /// Puts new files into a directory.
    fn renew(&self, name: &str) -> Mounted {
        let authority = tempfile::tempdir().unwrap();
        let mounted = Mounted::new(authority.path(), "web");
        if name == "certs" {
            swap(&self.path(name), mounted.files());
        } else {
            mounted.write(&self.path(name));
        }
        mounted
    }

    fn start(&self, options: &[&str]) -> (Agent, DeadFs) {
        let certs = self.path("certs").display().to_string();
        let options = [&["--ca", "none", "--cert-dir", &certs, "--drain-timeout", "1s"], options].concat();
        DeadFs::agent(self.0.path(), "agent", &options, &[&self.path("dead")])
    }
}

/// How many threads the agent has for files that streams name.
fn threads(agent: &Agent) -> usize {
    let tasks = format!("/proc/{}/task", agent.process.pid().as_raw_nonzero());
    let names = std::fs::read_dir(tasks)
        .unwrap()
        .map(|task| std::fs::read_to_string(task.unwrap().path().join("comm")));
    names.filter(|name| name.as_ref().is_ok_and(|name| name.trim() == THREAD)).count()
}

async fn refusal(client: &Client, name: &str) -> Status {
    fetch(client, &[name]).await.expect_err(name)
}

/// Acknowledges what comes until these roots do.
async fn receives(stream: &mut Stream, roots: &[u8]) {
    let roots = String::from_utf8(roots.to_vec()).unwrap();
    loop {
        let response = stream.next().await.unwrap();
        stream.accept(&response).await;
        if secrets(&response).into_iter().any(|secret| content(secret).0 == roots) {
            return;
        }
    }
}

async fn lives_beside_dead_names(options: impl Fn(&House) -> Vec<String>) {
    let house = House::new();
    let (mut agent, mut disk) = house.start(&strs(&options(&house)));
    agent.process.wait_log(" ready ").await;
    // The one that resolved the links of the prefixes ends when it has nothing more to do.
    wait_until("there is no thread before a file is asked for", || threads(&agent) == 0).await;
    let dead: Vec<_> = (0..40).map(|number| roots_name(house.path(&format!("dead/{number}.pem")))).collect();
    let [dead_roots, dead_pair] =
        [roots_name(house.path("dead/root-cert.pem")), pair_name(&house.path("dead"))];
    let [live, later] = ["live", "later"].map(|name| roots_name(house.path(name).join("root-cert.pem")));
    on_connection(&agent.socket.clone(), async |client| {
        let mut waiting = Stream::open(&client, &[&dead_roots, &dead_pair]).await.unwrap();
        let names = [&strs(&dead)[..], &["default", "ROOTCA", &live]].concat();
        let mut stream = Stream::open(&client, &names).await.unwrap();
        let mut served = Vec::new();
        while served.len() < 3 {
            let response = stream.next().await.unwrap();
            stream.accept(&response).await;
            served.extend(secrets(&response).into_iter().map(|secret| secret.name));
        }
        served.sort_unstable();
        served.dedup();
        assert_eq!(served, ["ROOTCA", "default", &live]);
        let error = refusal(&client, &dead[7]).await;
        wait_for("the names on it say that it does not answer", async || {
            refusal(&client, &dead[7]).await.message().contains("does not answer").then_some(())
        })
        .await;
        assert_eq!(error.code(), Code::Unavailable);
        // What comes and goes meanwhile is served, and what is renewed.
        fetch(&client, &[&later]).await.unwrap();
        let renewed = house.renew("certs");
        receives(&mut stream, &renewed.root).await;
        let renewed = house.renew("live");
        receives(&mut stream, &renewed.root).await;
        assert_eq!(agent.status("/livez").await.0, 200);
        assert_eq!(agent.status("/readyz").await.0, 200);
        agent.wait_metric("attache_hanging_paths", 1).await;
        let socket = agent.socket.display().to_string();
        let status = output(&["status", "--socket", &socket]).await;
        let status = String::from_utf8(status.stdout).unwrap();
        assert!(status.contains(&house.path("dead").display().to_string()), "{status}");
        assert!(threads(&agent) <= 2, "{} threads", threads(&agent));

        disk.revive().await;
        let mut back = Vec::new();
        while back.len() < 2 {
            let response = waiting.next().await.unwrap();
            waiting.accept(&response).await;
            back.extend(secrets(&response).into_iter().map(|secret| secret.name));
        }
        back.sort_unstable();
        assert_eq!(back, [dead_pair.as_str(), &dead_roots]);
        agent.wait_metric("attache_hanging_paths", 0).await;
        // It is followed like any other.
        let renewed = house.renew("dead");
        wait_for("the roots are renewed", async || {
            let response = fetch(&client, &[&dead_roots]).await.unwrap();
            (certificates(&response).as_bytes() == renewed.root).then_some(())
        })
        .await;
        // It may die under names that are served.
        disk.die(&[&house.path("dead")]).await;
        let error = refusal(&client, &dead[3]).await;
        assert_eq!(error.code(), Code::Unavailable);
        fetch(&client, &[&dead_roots]).await.expect("what it held is still served");
        fetch(&client, &[&roots_name(house.path("later/./root-cert.pem"))]).await.unwrap();
        let began = Instant::now();
        agent.process.signal(Signal::TERM);
        assert_eq!(agent.process.ended().await.code(), Some(0), "{}", agent.process.log());
        assert!(began.elapsed() < SOON, "{:?}", began.elapsed());
    })
    .await;
}

#[tokio::test]
async fn a_file_system_that_does_not_answer_stops_only_the_names_on_it() {
    lives_beside_dead_names(|_| Vec::new()).await;
}

#[tokio::test]
async fn a_file_system_that_does_not_answer_beneath_a_prefix_stops_only_the_names_on_it() {
    let prefixes = ["live", "later", "dead"];
    lives_beside_dead_names(|house| {
        let prefix = |name| ["--file-prefix".to_owned(), house.path(name).display().to_string()];
        prefixes.into_iter().flat_map(prefix).collect()
    })
    .await;
}

#[tokio::test]
async fn a_name_outside_the_prefixes_is_refused_from_its_text() {
    let house = House::new();
    symlink(house.path("dead"), house.path("live/link")).unwrap();
    let prefix = house.path("live").display().to_string();
    let (mut agent, _disk) = house.start(&["--file-prefix", &prefix]);
    agent.process.wait_log(" ready ").await;
    // The thread that resolved the links of the prefix has nothing more to do.
    wait_until("the thread is gone", || threads(&agent) == 0).await;
    let inside = house.path("live/root-cert.pem").display().to_string();
    let dead = house.path("dead/root-cert.pem");
    let outside = [
        roots_name(&dead),
        roots_name(house.path("live/../dead/root-cert.pem")),
        roots_name(house.path("dead/../live/root-cert.pem")),
        roots_name(house.path("live/link/../root-cert.pem")),
        roots_name(house.path("live-too/root-cert.pem")),
        "file-root:root-cert.pem".to_owned(),
        format!("file-cert:{inside}~{}", dead.display()),
        format!("file-cert:{}~{inside}", dead.display()),
        pair_name(&house.path("dead")),
    ];
    on_connection(&agent.socket.clone(), async |client| {
        for name in &outside {
            let error = refusal(&client, name).await;
            assert_eq!(error.code(), Code::NotFound, "{name}: {error:?}");
            assert!(
                error.message().contains("outside the directories that --file-prefix allows"),
                "{error:?}"
            );
        }
        // A stream learns that it is never served.
        let mut delta = DeltaStream::open(&client, &strs(&outside)).await.unwrap();
        let mut removed = delta.next().await.unwrap().removed_resources;
        removed.sort_unstable();
        let mut expected = outside.to_vec();
        expected.sort_unstable();
        assert_eq!(removed, expected);
        assert_eq!(threads(&agent), 0, "nothing was looked up");
        let refused = agent.metric("attache_refusals_total{reason=\"forbidden\"}").await;
        assert_eq!(refused, 2.0 * outside.len() as f64);
        let (_, metrics) = agent.status("/metrics").await;
        assert!(!metrics.contains("file-"), "a refused name leaves nothing: {metrics}");
        fetch(&client, &[&format!("file-root:{inside}")]).await.unwrap();
    })
    .await;
    agent.process.wait_log("resource names refused").await;
}

#[tokio::test]
async fn the_agents_own_files_are_served_by_no_name() {
    let house = House::new();
    let options = ["ca", "state", "output"].map(|name| house.path(name).display().to_string());
    let mut options = vec![
        "--ca".to_owned(),
        "embedded".to_owned(),
        "--ca-dir".to_owned(),
        options[0].clone(),
        "--state-dir".to_owned(),
        options[1].clone(),
        "--output-dir".to_owned(),
        options[2].clone(),
    ];
    // Its own files are its own beneath a prefix, too.
    for prefix in [false, true] {
        if prefix {
            options.extend(["--file-prefix".to_owned(), house.path("").display().to_string()]);
        }
        let agent = Agent::ready(house.0.path(), &format!("agent-{prefix}"), &strs(&options)).await;
        wait_until("the output is written", || house.path("output/key.pem").exists()).await;
        let link = house.path(&format!("link-{prefix}"));
        symlink(house.path("ca"), &link).unwrap();
        let ca_pair = |directory: &Path| {
            format!(
                "file-cert:{}~{}",
                directory.join("ca-cert.pem").display(),
                directory.join("ca-key.pem").display()
            )
        };
        let live_chain = house.path("live/cert-chain.pem");
        let mut private = vec![
            ca_pair(&house.path("ca")),
            ca_pair(&link),
            ca_pair(&house.path("live/./ca").parent().unwrap().join("../ca")),
            roots_name(house.path("ca/root-cert.pem")),
            format!("file-cert:{}~{}", live_chain.display(), house.path("ca/ca-key.pem").display()),
            roots_name(house.path("state/attache.state")),
            pair_name(&house.path("output")),
            pair_name(&house.path("output/..data")),
            roots_name(house.path("output/root-cert.pem")),
        ];
        if prefix {
            // Refused from its text already.
            private.retain(|name| !name.contains("/../"));
        }
        on_connection(&agent.socket, async |client| {
            for name in &private {
                let error = wait_for("the name is refused for good", async || {
                    let error = refusal(&client, name).await;
                    (!error.message().ends_with("not available yet")).then_some(error)
                })
                .await;
                assert!(error.message().contains("files are the agent's own"), "{name}: {error:?}");
            }
            fetch(&client, &["default", "ROOTCA"]).await.unwrap();
            fetch(&client, &[&pair_name(&house.path("live"))]).await.unwrap();
        })
        .await;
    }
}

#[tokio::test]
async fn a_client_certificate_is_served_by_no_name() {
    let house = House::new();
    let client_cert = house.path("client");
    house.renew("client");
    let client = client_cert.display().to_string();
    // No CA listens there.
    let options = ["--ca-address", "127.0.0.1:1", "--ca-client-cert-dir", &client, "--cert-dir", &client];
    let mut agent = Agent::start(house.0.path(), "agent", &options);
    agent.process.wait_log("attache serves").await;
    on_connection(&agent.socket, async |client| {
        for name in [pair_name(&client_cert), roots_name(client_cert.join("root-cert.pem"))] {
            let error = refusal(&client, &name).await;
            assert!(error.message().contains("files are the agent's own"), "{name}: {error:?}");
        }
        fetch(&client, &[&pair_name(&house.path("live"))]).await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn ten_thousand_names_that_do_not_exist_cost_less_than_ten_megabytes_and_are_served_when_they_appear() {
    // As many as one connection may cause: half of what all may.
    const NAMES: usize = 9_990;
    let house = House::new();
    let certs = house.path("certs");
    let options = ["--ca", "none", "--cert-dir", certs.to_str().unwrap()];
    let mut agent = Agent::start_as(house.0.path(), "agent", &options, |mut command| {
        // Of what is freed again at the top of its heap, glibc's allocator would keep 0.5 MB.
        command.env("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=131072");
        command
    });
    agent.process.wait_log(" ready ").await;
    on_connection(&agent.socket.clone(), async |client| {
        // What a first name costs is not a matter of their number.
        let mut first =
            Stream::open(&client, &["default", &roots_name(house.path("live/root-cert.pem"))]).await.unwrap();
        first.next().await.unwrap();
        let before = agent.memory();
        let name = |number: usize| match number % 2 {
            // In a directory that exists, and in one that does not.
            0 => roots_name(house.path(&format!("live/{number}.pem"))),
            _ => roots_name(house.path(&format!("nowhere/{number}.pem"))),
        };
        let names: Vec<_> = (0..NAMES).map(name).collect();
        let mut stream = Stream::open(&client, &strs(&names)).await.unwrap();
        // Not by the metrics: a page with all these names is long.
        for name in names.iter().step_by(500).chain(names.last()) {
            wait_for("the name is looked for", async || {
                refusal(&client, name).await.message().contains("does not exist").then_some(())
            })
            .await;
        }
        let cost = agent.memory().saturating_sub(before);
        eprintln!("{NAMES} names that do not exist: {cost} kB");
        let watched = agent.metric("attache_watched_paths{mode=\"inotify\"}").await;
        assert!(watched < 100.0, "{watched} watches");
        assert!(threads(&agent) <= 2);
        let root = house.renew("later").root;
        std::fs::write(house.path("live/5000.pem"), &root).unwrap();
        assert_eq!(certificates(&stream.next().await.unwrap()).as_bytes(), root);
        std::fs::create_dir(house.path("nowhere")).unwrap();
        std::fs::write(house.path("nowhere/5001.pem"), &root).unwrap();
        let response = stream.next().await.unwrap();
        let found: Vec<_> = secrets(&response).into_iter().map(|secret| secret.name).collect();
        assert!(found.contains(&names[5001]), "{found:?}");
        assert!(cost < 10 << 10, "{cost} kB");
    })
    .await;
}
