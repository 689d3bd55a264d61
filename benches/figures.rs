//! The agent's costs: time to the first certificate, memory, wake-ups, size; each certificate; a CA that is down.
//! Prints one table for each.
//!
//! The figures are those of the release binary as `cargo build --release` makes it; `ATTACHE` selects another. They are
//! only as stable as the machine: on a busy one the slowest start mostly measures other processes.
//!
//! PSS is read from `/proc/PID/smaps_rollup`. Only root can read it, since the agent is not dumpable; without root that
//! row is empty, and the others come from `/proc/PID/status`.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stdout,
    clippy::disallowed_methods,
    reason = "a program of its own, without a runtime: it prints, sleeps, and panics where it can't go on"
)]

mod issuance;
mod outage;
mod process;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;

use crate::process::{Process, field, release_binary};

const STARTS: usize = 20;
/// Afterwards an agent only waits for its renewal, hours away.
const SETTLE: Duration = Duration::from_secs(2);
const IDLE: Duration = Duration::from_secs(10);

fn main() {
    outage::run_if_child();
    let dir = tempfile::tempdir().unwrap();
    let bench = Bench { binary: release_binary(), dir: dir.path().to_owned() };
    let ca = bench.ca();
    let columns = [Case::NewDirectory, Case::KnownDirectory, Case::Tls(&ca)];

    let starts = columns.each_ref().map(|case| bench.starts(case));
    let idle = bench.idle(&columns);
    let size = fs::metadata(&bench.binary).unwrap().len();

    let row = |name: &str, values: [String; 3]| println!("| {name:<46} | {:>15} |", values.join(" | "));
    let cell = |text: &str| format!("{text:>17}");
    println!();
    row("", ["embedded, new", "embedded, known", "CA over TLS"].map(cell));
    println!("|{0:-<48}|{0:->18}:|{0:->18}:|{0:->18}:|", "");
    let milliseconds = |time: Duration| cell(&format!("{:.1} ms", time.as_secs_f64() * 1e3));
    row(
        &format!("start to first certificate, median of {STARTS}"),
        starts.each_ref().map(|times| milliseconds(times[STARTS / 2])),
    );
    row(
        &format!("start to first certificate, slowest of {STARTS}"),
        starts.each_ref().map(|times| milliseconds(times[STARTS - 1])),
    );
    let kilobytes = |amount: Option<u64>| cell(&amount.map_or("-".to_owned(), |kb| format!("{kb} kB")));
    row("idle memory, proportional (PSS)", idle.each_ref().map(|idle| kilobytes(idle.pss)));
    row("idle memory, resident (RSS)", idle.each_ref().map(|idle| kilobytes(Some(idle.rss))));
    row("idle memory, anonymous", idle.each_ref().map(|idle| kilobytes(Some(idle.anonymous))));
    row("threads", idle.each_ref().map(|idle| cell(&idle.threads.to_string())));
    row("wake-ups in 10 s, idle", idle.each_ref().map(|idle| cell(&idle.wake_ups.to_string())));
    row("binary", [(); 3].map(|()| cell(&format!("{:.2} MB", size as f64 / 1e6))));
    println!("\nembedded: the CA inside the agent, in a new directory, or in one that already holds a CA");
    if idle[0].pss.is_none() {
        println!("PSS needs root: the agent's memory is hidden from other users");
    }
    issuance::print();
    outage::print(&bench.dir);
    let [retrying] = bench.idle(&[Case::Unreachable(&ca)]);
    println!(
        "\nthe release binary, while it retries: {} kB anonymous, {} wake-ups in 10 s",
        retrying.anonymous, retrying.wake_ups
    );
}

struct Bench {
    binary: PathBuf,
    dir: PathBuf,
}

/// The source of the first certificate.
enum Case<'a> {
    /// An embedded CA that must be created first.
    NewDirectory,
    /// An embedded CA whose directory exists.
    KnownDirectory,
    /// `attache ca`.
    Tls(&'a Ca),
    /// A CA that refuses connections: nothing listens.
    Unreachable(&'a Ca),
}

/// A running `attache ca`.
struct Ca {
    _process: Process,
    address: String,
    root: PathBuf,
    token: PathBuf,
}

struct Idle {
    pss: Option<u64>,
    rss: u64,
    anonymous: u64,
    threads: u64,
    wake_ups: u64,
}

impl Bench {
    fn ca(&self) -> Ca {
        let directory = self.dir.join("tls-ca");
        // A copy, since PSS divides a page by the number of processes that share it.
        let mut command = Command::new(self.copy("ca"));
        command.args(["ca", "--listen", "127.0.0.1:0", "--ca-dir"]).arg(&directory);
        let process = Process::start(&mut command);
        let line = process.wait_for("CA listening");
        let (_, address) = line.split_once("address=").expect("the CA logs its address");
        let address = address.split_whitespace().next().unwrap().to_owned();
        let token = self.dir.join("token");
        fs::write(&token, service_account_token()).unwrap();
        Ca { _process: process, address, root: directory.join("root-cert.pem"), token }
    }

    fn copy(&self, name: &str) -> PathBuf {
        let copy = self.dir.join(name);
        fs::copy(&self.binary, &copy).unwrap();
        copy
    }

    /// Starts `binary`, and returns when it has logged that it is ready, or that it can't be.
    fn agent(&self, binary: &Path, case: &Case<'_>) -> (Process, Duration) {
        let mut command = Command::new(binary);
        let file = |name: &str| self.dir.join(format!("{}-{name}", binary.file_name().unwrap().display()));
        // Not the default directory, which may hold files on this machine. Other processes' changes in /etc wake the
        // agent, too.
        command.args(["run", "--status-address", "none", "--cert-dir", "/etc/attache-no-certs"]);
        command.arg("--socket").arg(file("socket"));
        match case {
            Case::NewDirectory => {
                let directory = file("new-ca");
                let _ = fs::remove_dir_all(&directory);
                command.args(["--ca", "embedded", "--ca-dir"]).arg(directory)
            }
            Case::KnownDirectory => command.args(["--ca", "embedded", "--ca-dir"]).arg(file("known-ca")),
            Case::Tls(ca) | Case::Unreachable(ca) => {
                let address = if matches!(case, Case::Unreachable(_)) { "127.0.0.1:1" } else { &ca.address };
                command.args(["--ca-address", address, "--ca-root"]).arg(&ca.root);
                command.arg("--token-file").arg(&ca.token)
            }
        };
        let started = Instant::now();
        let process = Process::start(&mut command);
        process.wait_for(if matches!(case, Case::Unreachable(_)) { "no new certificate" } else { " ready " });
        (process, started.elapsed())
    }

    /// The duration of each start, the fastest first.
    fn starts(&self, case: &Case<'_>) -> Vec<Duration> {
        let binary = self.copy("agent");
        // The first start loads the binary into memory, and creates the directory for the known case.
        drop(self.agent(&binary, case));
        let mut times: Vec<_> = (0..STARTS).map(|_| self.agent(&binary, case).1).collect();
        times.sort_unstable();
        times
    }

    /// The costs of agents while nothing happens, one for each case, side by side.
    fn idle<const N: usize>(&self, cases: &[Case<'_>; N]) -> [Idle; N] {
        let mut number = 0;
        let agents = cases.each_ref().map(|case| {
            number += 1;
            self.agent(&self.copy(&format!("idle-{number}")), case).0
        });
        std::thread::sleep(SETTLE);
        let before = agents.each_ref().map(switches);
        std::thread::sleep(IDLE);
        let mut before = before.into_iter();
        agents.each_ref().map(|agent| Idle {
            pss: agent.read("smaps_rollup").and_then(|text| field(&text, "Pss:")),
            rss: agent.status("VmRSS:"),
            anonymous: agent.status("RssAnon:"),
            threads: agent.status("Threads:"),
            wake_ups: switches(agent) - before.next().unwrap(),
        })
    }
}

/// The number of context switches of all its threads, and so of wake-ups.
fn switches(process: &Process) -> u64 {
    let threads = process.of_threads("status");
    threads.map(|status| field(&status, "voluntary_ctxt_switches:").unwrap()).sum()
}

/// A token that `attache ca` accepts: unsigned.
fn service_account_token() -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    let claims = serde_json::json!({
        "sub": "system:serviceaccount:default:bench",
        "aud": ["istio-ca"],
        "exp": now + 3600,
    });
    let part = |value: &serde_json::Value| URL_SAFE_NO_PAD.encode(value.to_string());
    format!("{}.{}.unsigned", part(&serde_json::json!({ "alg": "none" })), part(&claims))
}
