//! `--state-dir`: what survives a restart, and what does not.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use rustix::process::Signal;
use tonic::Code;

use crate::support::fake_ca::{FakeCa, Mood};
use crate::support::files::spiffe;
use crate::support::process::{Agent, failure, strs};
use crate::support::sds::{Stream, content, on_connection, secrets, served_serial};
use crate::support::wait::wait_until;

/// Options of an agent that keeps its state in `state`, and renews with `ratio` of a minute left.
fn options(ca: &FakeCa, directory: &Path, state: &Path, ratio: &str) -> Vec<String> {
    let mut options = ca.client(directory);
    let more = ["--cert-ttl", "60s", "--grace-ratio", ratio, "--state-dir", state.to_str().unwrap()];
    options.extend(more.map(str::to_owned));
    options
}

/// Everything that a new stream gets.
async fn served(agent: &Agent) -> Vec<(String, Option<String>)> {
    on_connection(&agent.socket, async |client| {
        let mut all = Vec::new();
        for name in ["default", "ROOTCA"] {
            let mut stream = Stream::open(&client, &[name]).await.unwrap();
            all.extend(secrets(&stream.next().await.unwrap()).into_iter().map(content));
        }
        all
    })
    .await
}

async fn stop(agent: &mut Agent) {
    agent.process.signal(Signal::TERM);
    assert!(agent.process.ended().await.success());
}

/// An agent whose first certificate is on disk.
async fn kept(directory: &Path, ca: &FakeCa, state: &Path, ratio: &str) -> (Agent, PathBuf) {
    let agent = Agent::ready(directory, "web", &strs(&options(ca, directory, state, ratio))).await;
    let file = state.join("attache.state");
    wait_until("the state is written", || file.exists()).await;
    (agent, file)
}

#[tokio::test]
async fn an_agent_that_starts_while_the_ca_is_down_serves_its_state_and_renews_once_the_ca_is_back() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let ca = FakeCa::start(directory, &spiffe("web")).await;
    let state = directory.join("state");
    // Renewed after 2 s.
    let (mut agent, file) = kept(directory, &ca, &state, "0.97").await;
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
    assert_eq!((mode(&state), mode(&file)), (0o700, 0o600));
    let before = served(&agent).await;
    stop(&mut agent).await;

    ca.set(Mood::Refuse(Code::Unavailable));
    agent.restart();
    let (_, line) = agent.process.wait_log("certificate of an earlier run restored").await;
    assert!(line.contains(" INFO ") && line.contains(file.to_str().unwrap()), "{line}");
    assert!(line.contains("renews="), "{line}");
    agent.process.wait_log(" ready ").await;
    assert_eq!(agent.status("/readyz").await, (200, "ready\n".to_owned()));
    assert_eq!(served(&agent).await, before);

    let (_, line) = agent.process.wait_log("no new certificate").await;
    assert!(line.contains("the served certificate is valid until"), "{line}");
    assert_eq!(served(&agent).await, before);
    ca.set(Mood::Good);
    agent.process.wait_log("the CA signs again").await;
    assert_ne!(served(&agent).await[0], before[0]);
    assert_eq!(served(&agent).await[1], before[1]);
}

#[tokio::test]
async fn whenever_the_agent_is_killed_the_next_run_finds_a_complete_state() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let ca = FakeCa::start(directory, &spiffe("web")).await;
    // Renewed every 0.2 s.
    let (mut agent, _) = kept(directory, &ca, &directory.join("state"), "0.999").await;
    for round in 1..=6 {
        // The kill comes before the state is written, during the write, or after it.
        agent.process.wait_next_log("certificate issued").await;
        tokio::time::sleep(std::time::Duration::from_micros(300 * round)).await;
        agent.process.kill().await;
        agent.restart();
        agent.process.wait_log("certificate of an earlier run restored").await;
    }
}

#[tokio::test]
async fn a_useless_state_is_reported_and_replaced() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let ca = FakeCa::start(directory, &spiffe("web")).await;
    let state = directory.join("state");
    let (mut agent, file) = kept(directory, &ca, &state, "0.5").await;
    stop(&mut agent).await;
    let good = fs::read_to_string(&file).unwrap();
    let other_ca = FakeCa::start(directory, &spiffe("web")).await;
    let other_account = FakeCa::start(directory, &spiffe("other")).await;
    let there = format!("http://{}", ca.address);

    let as_before = || options(&ca, directory, &state, "0.5");
    let elsewhere = || options(&other_ca, directory, &state, "0.5");
    let somebody_else = || {
        let mut options = as_before();
        let both =
            ["--service-account", "other", "--ca-address", &format!("http://{}", other_account.address)];
        options.extend(both.map(str::to_owned));
        options
    };
    let cases: [(&str, &str, Vec<String>, &[&str]); 6] = [
        ("empty", "", as_before(), &["is not a state file of this agent", "no first line"]),
        ("junk", "<html>\n</html>\n", as_before(), &["is not a state file of this agent", "not JSON"]),
        ("cut", &good[..good.len() - 60], as_before(), &["is not a state file of this agent"]),
        ("newer", &good.replace("\"version\":1", "\"version\":9"), as_before(), &["the format 9"]),
        ("elsewhere", &good, elsewhere(), &["it came from citadel at", &there]),
        ("other", &good, somebody_else(), &["names spiffe://cluster.local/ns/default/sa/web, not"]),
    ];
    for (name, content, options, words) in cases {
        fs::write(&file, content).unwrap();
        let mut agent = Agent::ready(directory, name, &strs(&options)).await;
        let (_, line) = agent.process.wait_log("of an earlier run not used").await;
        assert!(line.contains(" WARN ") && line.contains(file.to_str().unwrap()), "{name}: {line}");
        assert!(words.iter().all(|word| line.contains(word)), "{name}: {line}");
        wait_until("the state is replaced", || {
            fs::read_to_string(&file).is_ok_and(|now| now != content && now.starts_with("{\"version\":1,"))
        })
        .await;
        stop(&mut agent).await;
        let log = agent.process.log();
        assert!(!log.contains("PRIVATE KEY") && !log.contains("<html>"), "{log}");
    }
}

#[tokio::test]
async fn a_disk_that_refuses_the_state_is_reported_once_and_delays_no_certificate() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let ca = FakeCa::start(directory, &spiffe("web")).await;
    let disk = directory.join("disk");
    fs::create_dir(&disk).unwrap();
    // Renewed every 0.2 s.
    let options = options(&ca, directory, &disk, "0.999");
    let options = strs(&options);
    let written = "state not saved";

    let mut agent = Agent::on_small_disk(directory, "full", &options, &disk, "1m").await;
    agent.process.wait_log(" ready ").await;
    // The disk is mounted in the agent's own namespace.
    let root = PathBuf::from(format!("/proc/{}/root", agent.process.pid().as_raw_nonzero()));
    let its_disk = root.join(disk.strip_prefix("/").unwrap());
    let mut filler = fs::File::create(its_disk.join("filler")).unwrap();
    wait_until("the disk is full", || {
        while std::io::Write::write_all(&mut filler, &[0; 512]).is_ok() {}
        agent.process.count(written) > 0
    })
    .await;
    drop(filler);
    let (_, line) = agent.process.wait_log(written).await;
    let words = [" WARN ", "No space left", "free some space there", "--state-dir", "attache.state.new"];
    assert!(words.iter().all(|word| line.contains(word)), "{line}");
    agent.process.wait_next_log("certificate issued").await;
    agent.process.wait_next_log("certificate issued").await;
    assert!(agent.serials().contains(&served_serial(&agent.socket).await));
    assert_eq!(agent.process.count(written), 1, "{}", agent.process.log());
    fs::remove_file(its_disk.join("filler")).unwrap();
    agent.process.wait_log("state saved again").await;
    drop(agent);

    let mut agent = Agent::on_small_disk(directory, "read-only", &options, &disk, "1m,ro").await;
    let (_, line) = agent.process.wait_log(written).await;
    assert!(line.contains("Read-only") && line.contains("--state-dir"), "{line}");
    agent.process.wait_next_log("certificate issued").await;
    agent.process.wait_next_log("certificate issued").await;
    assert!(agent.serials().contains(&served_serial(&agent.socket).await));
    assert_eq!(agent.process.count(written), 1, "{}", agent.process.log());
}

#[tokio::test]
async fn naming_the_state_file_does_not_serve_it() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let ca = FakeCa::start(directory, &spiffe("web")).await;
    let (mut agent, file) = kept(directory, &ca, &directory.join("state"), "0.5").await;
    // With the chain, a client could ask for a whole pair.
    let chain = directory.join("chain.pem");
    fs::write(&chain, &served(&agent).await[0].0).unwrap();
    let link = directory.join("link.pem");
    std::os::unix::fs::symlink(&file, &link).unwrap();
    let told = "whose files are the agent's own and not served by name";
    for (times, key) in [(1, &file), (2, &link)] {
        let name = format!("file-cert:{}~{}", chain.display(), key.display());
        let socket = agent.socket.to_str().unwrap();
        let (code, error) = failure(&["get", "--socket", socket, "--timeout", "300ms", &name]).await;
        assert_eq!(code, 1);
        assert!(!error.contains("PRIVATE KEY"), "{error}");
        let (_, line) = agent.process.wait_log_times(told, times).await;
        assert!(line.contains(&format!("{}: it lies in", key.display())), "{line}");
    }
}
