//! Files of the agent on a file system that does not answer: what needs them waits, everything else goes on, and the agent
//! exits when asked to.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::Value;

use crate::support::dead_fs::DeadFs;
use crate::support::files::{Mounted, token, write_token};
use crate::support::process::{Agent, Ca, output, strs};
use crate::support::sds::{Stream, on_connection, secrets, served_serial};
use crate::support::wait::{wait_for, wait_until};

const HANGS: &str = "file system does not answer";
const ANSWERS: &str = "file system answers again";
const DRAIN: &[&str] = &["--drain-timeout", "1s", "--ca-timeout", "3s"];
/// How long the exit may take after the drain timeout, on a busy machine: without a bound it takes for ever.
const SOON: Duration = Duration::from_secs(10);

/// A CA, files on a disk that answers, and a directory on one that does not.
struct House {
    directory: tempfile::TempDir,
    ca: Ca,
}

impl House {
    async fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let ca = Ca::start(directory.path()).await;
        Mounted::new(&directory.path().join("other-ca"), "other").write(&directory.path().join("live"));
        std::fs::create_dir(directory.path().join("dead")).unwrap();
        Self { directory, ca }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// The options for the CA, with `changes` to their values. All files that they name exist.
    fn options(&self, changes: &[(&str, PathBuf)]) -> Vec<String> {
        let mut options = self.ca.client("web");
        options.extend(DRAIN.iter().map(|&option| option.to_owned()));
        for (flag, path) in changes {
            let path = path.display().to_string();
            match options.iter().position(|option| option == flag) {
                Some(at) => options[at + 1] = path,
                None => options.extend([(*flag).to_owned(), path]),
            }
        }
        options
    }

    fn start(&self, options: &[String]) -> (Agent, DeadFs) {
        DeadFs::agent(self.directory.path(), "web", &strs(options), &[&self.path("dead")])
    }

    /// What `attache status` says of paths that hang.
    async fn hanging(&self) -> Vec<String> {
        let socket = self.path("web.sock").display().to_string();
        let printed = output(&["status", "--socket", &socket, "--output", "json"]).await.stdout;
        let report: Value = serde_json::from_slice(&printed).unwrap();
        let hanging = report["hanging"].as_array().unwrap().iter();
        hanging
            .map(|one| format!("{} {}", one["path"].as_str().unwrap(), one["since"].as_str().unwrap()))
            .collect()
    }

    /// Asserts that the dead file system is named.
    async fn is_named(&self, agent: &mut Agent) {
        let dead = self.path("dead").display().to_string();
        let (_, line) = agent.process.wait_log(HANGS).await;
        assert!(line.contains(" WARN ") && line.contains(&dead) && line.contains("since="), "{line}");
        assert_eq!(agent.status("/livez").await.0, 200);
        let hanging = self.hanging().await;
        assert!(hanging.iter().all(|one| one.starts_with(&dead)) && !hanging.is_empty(), "{hanging:?}");
        agent.wait_metric_that("attache_hanging_paths", |paths| paths > 0.0).await;
    }

    /// Asserts that the dead file system is named, and that the agent serves beside it.
    async fn serves_beside_it(&self, agent: &mut Agent) {
        self.is_named(agent).await;
        let name = format!("file-root:{}/root-cert.pem", self.path("live").display());
        on_connection(&agent.socket, async |client| {
            let mut stream = Stream::open(&client, &[&name]).await.unwrap();
            assert_eq!(secrets(&stream.next().await.unwrap())[0].name, name);
        })
        .await;
    }
}

async fn exits_in_time(agent: &mut Agent) {
    let began = Instant::now();
    agent.process.signal(Signal::TERM);
    assert_eq!(agent.process.ended().await.code(), Some(0), "{}", agent.process.log());
    assert!(began.elapsed() < SOON, "{:?}", began.elapsed());
}

/// With `changes` of its options, whose files are in `dead`, the agent starts, serves, recovers as `recovered` waits for,
/// and exits. Of calls to the CA that fail meanwhile it names the `culprit`.
async fn lives_beside(
    house: &House,
    changes: &[(&str, PathBuf)],
    culprit: Option<&Path>,
    recovered: impl AsyncFnOnce(&mut Agent),
) {
    let (mut agent, mut disk) = house.start(&house.options(changes));
    house.serves_beside_it(&mut agent).await;
    if let Some(path) = culprit {
        let (_, line) = agent.process.wait_log("no new certificate").await;
        let words = format!("the file system of {} does not answer since", path.display());
        assert!(line.contains(&words), "{line}");
    }
    disk.revive().await;
    recovered(&mut agent).await;
    agent.process.wait_log(ANSWERS).await;
    agent.wait_metric("attache_hanging_paths", 0).await;
    assert!(house.hanging().await.is_empty());
    // Whatever touches it at the exit.
    disk.die(&[&house.path("dead")]).await;
    exits_in_time(&mut agent).await;
}

async fn is_ready(agent: &mut Agent) {
    agent.process.wait_log("certificate issued").await;
    agent.process.wait_log(" ready ").await;
}

#[tokio::test]
async fn a_token_file_that_hangs_stops_nothing_else() {
    let house = House::new().await;
    let file = house.path("dead/token");
    write_token(&file, &token("web", "istio-ca", 3600));
    lives_beside(&house, &[("--token-file", file.clone())], Some(&file), is_ready).await;
}

#[tokio::test]
async fn roots_that_hang_stop_nothing_else() {
    let house = House::new().await;
    let file = house.path("dead/root.pem");
    std::fs::copy(house.path("ca/root-cert.pem"), &file).unwrap();
    lives_beside(&house, &[("--ca-root", file.clone())], Some(&file), is_ready).await;
}

#[tokio::test]
async fn a_client_certificate_that_hangs_stops_nothing_else() {
    let house = House::new().await;
    let dead = house.path("dead");
    Mounted::new(&house.path("ca"), "web").write(&dead);
    let changes = [("--ca-client-cert-dir", dead.clone()), ("--token-file", house.path("no-token"))];
    lives_beside(&house, &changes, Some(&dead), is_ready).await;
}

#[tokio::test]
async fn a_state_directory_that_hangs_delays_no_certificate() {
    let house = House::new().await;
    lives_beside(&house, &[("--state-dir", house.path("dead"))], None, async |agent| {
        is_ready(agent).await;
        let file = house.path("dead/attache.state");
        wait_until("the state is written", || file.exists()).await;
    })
    .await;
}

#[tokio::test]
async fn an_output_directory_that_hangs_is_written_once_it_answers() {
    let house = House::new().await;
    lives_beside(&house, &[("--output-dir", house.path("dead"))], None, async |agent| {
        let file = house.path("dead/key.pem");
        wait_until("the files are written", || file.exists()).await;
        is_ready(agent).await;
    })
    .await;
}

#[tokio::test]
async fn an_output_that_hangs_delays_no_other_one_and_the_hook_runs_again_for_it() {
    let house = House::new().await;
    let mut options = house.options(&[]);
    let [dead, near, runs] = ["dead/out", "near", "runs"].map(|name| house.path(name));
    let hook = format!("echo . >> {}", runs.display());
    for directory in [&dead, &near] {
        options.extend(["--output".to_owned(), directory.display().to_string()]);
    }
    options.extend(["--output-hook".to_owned(), hook]);
    let (mut agent, mut disk) = house.start(&options);
    wait_until("the other output is written", || near.join("key.pem").exists()).await;
    // It waits for the dead one for a while only.
    wait_until("the hook has run", || runs.exists()).await;
    let series =
        |path: &Path| format!("attache_output_directory_failing{{directory=\"{}\"}}", path.display());
    assert_eq!(agent.metric(&series(&dead)).await, 1.0);
    assert_eq!(agent.metric(&series(&near)).await, 0.0);
    disk.revive().await;
    wait_until("the dead one is written", || dead.join("key.pem").exists()).await;
    agent.process.wait_log(" ready ").await;
    agent.wait_metric("attache_output_hooks_total{outcome=\"ok\"}", 2).await;
    disk.die(&[&house.path("dead")]).await;
    exits_in_time(&mut agent).await;
}

#[tokio::test]
async fn a_ready_file_that_hangs_is_written_once_it_answers() {
    let house = House::new().await;
    let file = house.path("dead/ready");
    lives_beside(&house, &[("--ready-file", file.clone())], None, async |_| {
        wait_until("the ready file is written", || file.exists()).await;
    })
    .await;
}

#[tokio::test]
async fn an_embedded_ca_that_hangs_signs_once_it_answers() {
    let house = House::new().await;
    let options = ["--ca", "embedded", "--ca-dir", house.path("dead").to_str().unwrap()].map(str::to_owned);
    let options: Vec<_> = options.into_iter().chain(DRAIN.iter().map(|&option| option.to_owned())).collect();
    let (mut agent, mut disk) = house.start(&options);
    house.serves_beside_it(&mut agent).await;
    disk.revive().await;
    is_ready(&mut agent).await;
    exits_in_time(&mut agent).await;
}

#[tokio::test]
async fn a_certificate_directory_that_hangs_leaves_the_certificate_to_the_ca_until_it_answers() {
    let house = House::new().await;
    let mounted = Mounted::new(&house.path("other-ca"), "web");
    mounted.write(&house.path("dead"));
    let (mut agent, mut disk) = house.start(&house.options(&[("--cert-dir", house.path("dead"))]));
    house.is_named(&mut agent).await;
    is_ready(&mut agent).await;
    assert_ne!(served_serial(&agent.socket).await, mounted.serial());
    disk.revive().await;
    wait_for("the mounted certificate is served", async || {
        (served_serial(&agent.socket).await == mounted.serial()).then_some(())
    })
    .await;
    agent.wait_metric("attache_hanging_paths", 0).await;
    disk.die(&[&house.path("dead")]).await;
    exits_in_time(&mut agent).await;
}

#[tokio::test]
async fn mounted_files_that_hang_are_served_once_they_answer() {
    let house = House::new().await;
    let (dead, mounted) = (house.path("dead"), Mounted::new(&house.path("other-ca"), "web"));
    mounted.write(&dead);
    for ends_early in [true, false] {
        let options = [&["--cert-dir", dead.to_str().unwrap()][..], DRAIN].concat();
        let (mut agent, mut disk) = DeadFs::agent(house.directory.path(), "web", &options, &[&dead]);
        house.is_named(&mut agent).await;
        assert_eq!(agent.status("/readyz").await.0, 503);
        if !ends_early {
            disk.revive().await;
            agent.process.wait_log(" ready ").await;
            assert_eq!(served_serial(&agent.socket).await, mounted.serial());
        }
        exits_in_time(&mut agent).await;
    }
}

#[tokio::test]
async fn an_agent_whose_directories_all_hang_answers_probes_and_exits() {
    let house = House::new().await;
    let names = ["token", "root", "client", "state", "output", "ready"];
    let places = names.map(|name| house.path(name));
    for place in &places {
        std::fs::create_dir(place).unwrap();
    }
    let [token, root, client, state, output, ready] = &places;
    let changes = [
        ("--token-file", token.join("token")),
        ("--ca-root", root.join("root.pem")),
        ("--ca-client-cert-dir", client.clone()),
        ("--state-dir", state.clone()),
        ("--output-dir", output.clone()),
        ("--ready-file", ready.join("ready")),
    ];
    let dead = places.each_ref().map(PathBuf::as_path);
    let (mut agent, _disk) =
        DeadFs::agent(house.directory.path(), "web", &strs(&house.options(&changes)), &dead);
    assert_eq!(agent.status("/livez").await.0, 200);
    let is_named =
        |hanging: &[String], place: &Path| hanging.iter().any(|one| one.starts_with(place.to_str().unwrap()));
    // The roots are read once there is a credential.
    wait_for("each directory is named", async || {
        let hanging = house.hanging().await;
        [token, client, state, output].iter().all(|place| is_named(&hanging, place)).then_some(())
    })
    .await;
    assert_eq!(agent.status("/livez").await.0, 200);
    exits_in_time(&mut agent).await;
}

#[tokio::test]
async fn an_options_file_that_hangs_is_named_by_each_reload_and_stops_no_other_one() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    std::fs::create_dir(path("options")).unwrap();
    let content = format!("ca = 'embedded'\nca-dir = '{}'\n", path("ca").display());
    std::fs::write(path("options/attache.toml"), content).unwrap();
    let file = path("options/attache.toml");
    let (mut agent, mut dead) =
        DeadFs::agent(directory.path(), "agent", &["--config", file.to_str().unwrap()], &[]);
    agent.process.wait_log(" ready ").await;
    dead.die(&[&path("options")]).await;
    for times in 1..=2 {
        agent.process.signal(Signal::HUP);
        agent.process.wait_log_times("reload requested", times).await;
        let (_, line) = agent.process.wait_log_times("options file not used", times).await;
        assert!(line.contains("has not answered within") && line.contains("change --config"), "{line}");
    }
    exits_in_time(&mut agent).await;
}
