//! A command as the CA: what goes in and comes out, and whatever can go wrong with commands.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use attache::pki::pem;
use rustix::fs::{CWD, FileType, mknodat};
use rustix::process::Signal;

use crate::support::files::spiffe;
use crate::support::issuer::{Issuer, LIES, Lie};
use crate::support::process::{Agent, Process, attache};
use crate::support::sds::served_serial;

/// A CA behind two FIFOs: `cat > csr && cat answer`.
struct Pipes {
    folder: PathBuf,
    lie: Arc<Mutex<Lie>>,
    requests: Arc<Mutex<Vec<String>>>,
}

/// Has the CSR signed.
const GOOD: &str = "cat > csr && cat answer";

impl Pipes {
    fn start(folder: &Path) -> Self {
        for name in ["csr", "answer"] {
            mknodat(CWD, folder.join(name), FileType::Fifo, 0o600.into(), 0).unwrap();
        }
        let ca = Self {
            folder: folder.to_owned(),
            lie: Arc::new(Mutex::new(Lie::None)),
            requests: Arc::default(),
        };
        let (place, lie, requests) = (ca.folder.clone(), Arc::clone(&ca.lie), Arc::clone(&ca.requests));
        let issuer = Issuer::new(folder);
        // FIFOs block whoever opens them. It ends with the test's process.
        std::thread::spawn(move || {
            while let Ok(csr) = std::fs::read_to_string(place.join("csr")) {
                requests.lock().unwrap().push(csr.clone());
                let lie = *lie.lock().unwrap();
                let leaf = issuer.issue(&csr, Duration::from_secs(120), lie);
                let [intermediate, root] = issuer.chain(lie);
                let _ =
                    std::fs::write(place.join("answer"), pem::of_certificates([&leaf, intermediate, root]));
            }
        });
        ca.set(GOOD, Lie::None);
        ca
    }

    /// What the command does from now on.
    fn set(&self, script: &str, lie: Lie) {
        *self.lie.lock().unwrap() = lie;
        std::fs::write(self.folder.join("new"), script).unwrap();
        std::fs::rename(self.folder.join("new"), self.folder.join("script")).unwrap();
    }

    fn options(&self) -> Vec<String> {
        let command = format!("cd '{}' && . ./script", self.folder.display());
        let options = [
            ("--ca", "exec"),
            ("--ca-exec", &command),
            ("--spiffe-id", &spiffe("web")),
            ("--cert-ttl", "120s"),
        ];
        options.into_iter().flat_map(|(flag, value)| [flag.to_owned(), value.to_owned()]).collect()
    }
}

fn strs<'a>(all: &'a [String], more: &[&'a str]) -> Vec<&'a str> {
    all.iter().map(String::as_str).chain(more.iter().copied()).collect()
}

#[tokio::test]
async fn whatever_a_command_does_the_good_certificate_stays_and_a_good_answer_recovers() {
    let folder = tempfile::tempdir().unwrap();
    let ca = Pipes::start(folder.path());
    // Down at the start.
    ca.set("echo 'the HSM is asleep' >&2; exit 75", Lie::None);
    let options = ca.options();
    // Renewal is due almost at once, long before the end.
    let options = strs(&options, &["--grace-ratio", "0.998", "--ca-timeout", "1s"]);
    let mut agent = Agent::start(folder.path(), "web", &options);
    let (_, line) = agent.process.wait_log("no new certificate").await;
    for words in
        ["WARN", "--ca-exec ended with exit status: 75; it said: the HSM is asleep", "no certificate yet"]
    {
        assert!(line.contains(words), "{line}");
    }
    assert_eq!(agent.status("/readyz").await.0, 503);
    ca.set(GOOD, Lie::None);
    agent.process.wait_log("ready").await;

    let failures = [
        ("echo 'not for you' >&2; exit 77", "exit status: 77; it said: not for you", "command"),
        ("no-such-ca", "found no such program", "command"),
        ("sleep 1000", "gave no answer within 1s", "timeout"),
        ("echo '<html>'", "no PEM certificate", "junk"),
        ("yes", "printed more than 1048576 bytes", "command"),
    ];
    let failures = failures.into_iter().map(|(script, words, label)| (script, Lie::None, words, label));
    let lies = LIES.into_iter().map(|(lie, words, label)| (GOOD, lie, words, label));
    for (script, lie, words, label) in failures.chain(lies) {
        let metric = format!("attache_ca_requests_total{{provider=\"exec\",outcome=\"{label}\"}}");
        let before = agent.metric(&metric).await;
        ca.set(script, lie);
        let (_, line) = agent.process.wait_next_log("no new certificate").await;
        assert!(line.contains("WARN") && line.contains(words), "{script}, {lie:?}: {line}");
        assert!(agent.metric(&metric).await > before, "{script}, {lie:?}");
        let good = agent.serials().last().unwrap().clone();
        // A stream that opens now gets the good one, at once.
        assert_eq!(served_serial(&agent.socket).await, good, "{script}, {lie:?}");
        assert_eq!(agent.status("/readyz").await.0, 200, "{script}, {lie:?}");

        ca.set(GOOD, Lie::None);
        agent.process.wait_next_log("the CA signs again").await;
        assert_ne!(agent.serials().last().unwrap(), &good, "{script}, {lie:?}");
    }
    let requests = ca.requests.lock().unwrap();
    let keys: std::collections::HashSet<_> = requests.iter().collect();
    assert_eq!(keys.len(), requests.len(), "each with a key of its own");
}

#[tokio::test]
async fn a_command_has_the_agents_environment_but_not_its_options() {
    let folder = tempfile::tempdir().unwrap();
    let ca = Pipes::start(folder.path());
    let seen = folder.path().join("env");
    ca.set(&format!("env > env; {GOOD}"), Lie::None);
    let socket = folder.path().join("sds.sock").display().to_string();
    let no_files = folder.path().join("no-files").display().to_string();
    let options = ca.options();
    let fixed = ["run", "--socket", &socket, "--status-address", "none", "--cert-dir", &no_files];
    let mut command = attache(&[&fixed[..], &strs(&options, &[])].concat());
    let variables = [
        ("REGION", "north"),
        ("ATTACHE_CA_HEADER", "x-token=s3cret"),
        ("CA_HEADER_X_TOKEN", "s3cret"),
        ("ATTACHE_LOG", "debug"),
    ];
    command.envs(variables);
    let mut process = Process::start(command);
    process.wait_log("ready").await;
    let seen = std::fs::read_to_string(seen).unwrap();
    let own: Vec<_> = seen.lines().filter(|line| line.starts_with("ATTACHE_")).collect();
    assert_eq!(own.len(), 2, "{seen}");
    for line in ["REGION=north", &format!("ATTACHE_SPIFFE_ID={}", spiffe("web")), "ATTACHE_TTL_SECONDS=120"] {
        assert!(seen.lines().any(|seen| seen == line), "{line}: {seen}");
    }
    assert!(!seen.contains("s3cret"), "{seen}");
}

#[tokio::test]
async fn a_command_that_runs_when_the_agent_stops_is_ended_with_its_children() {
    let folder = tempfile::tempdir().unwrap();
    let ca = Pipes::start(folder.path());
    ca.set("trap '' TERM; sleep 1000 & echo $! > pid.new; mv pid.new pid; wait", Lie::None);
    let options = ca.options();
    let mut agent = Agent::start(folder.path(), "web", &strs(&options, &[]));
    let pid = loop {
        match std::fs::read_to_string(folder.path().join("pid")) {
            Ok(pid) => break pid,
            Err(_) => tokio::time::sleep(Duration::from_millis(5)).await,
        }
    };
    agent.process.signal(Signal::TERM);
    assert!(agent.process.ended().await.success());
    let stat = format!("/proc/{}/stat", pid.trim());
    let gone = async {
        while std::fs::read_to_string(&stat).is_ok_and(|stat| !stat.contains(") Z ")) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), gone).await.expect("a child lives on");
}

#[tokio::test]
async fn a_chain_without_a_root_is_refused_with_the_way_out_which_is_one() {
    let folder = tempfile::tempdir().unwrap();
    let ca = Pipes::start(folder.path());
    // Leaf and intermediate: all but the last certificate.
    ca.set("cat > csr && awk '/BEGIN/ { n++ } n < 3' answer", Lie::None);
    let options = ca.options();
    let mut agent = Agent::start(folder.path(), "web", &strs(&options, &[]));
    let (_, line) = agent.process.wait_log("no new certificate").await;
    assert!(line.contains("names no root") && line.contains("--ca-exec-roots"), "{line}");
    agent.process.kill().await;
    let root = format!("cat '{}'", folder.path().join("issuer/root-cert.pem").display());
    Agent::ready(folder.path(), "web", &strs(&options, &["--ca-exec-roots", &root])).await;
}
