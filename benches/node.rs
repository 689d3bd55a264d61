//! One agent with many workloads: memory and time for 250 and for 1,000 of them, with two streams each; volumes of Pods, as a
//! kubelet has them published; renewals. Prints one table.
//!
//! The certificates are those of an embedded CA, which signs in the agent's own process. The agent is the release binary; `ATTACHE`
//! selects another. PSS can be read by root alone.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stdout,
    clippy::disallowed_methods,
    reason = "a program of its own: it prints, sleeps, and panics where it can't go on"
)]

#[path = "../tests/agent/support/kubelet.rs"]
#[allow(dead_code, unreachable_pub, reason = "a part of the tests, which use the rest")]
mod kubelet;
#[allow(dead_code, reason = "the other benches use the rest")]
mod load;
#[allow(dead_code, reason = "the other benches use the rest")]
mod process;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::task::Poll;
use std::time::{Duration, Instant};

use tokio::task::JoinSet;

use crate::kubelet::{Kubelet, Volume};
use crate::load::{Connection, Protocol, Streams};
use crate::process::{Process, field, release_binary};

/// Afterwards the agent only waits.
const SETTLE: Duration = Duration::from_secs(3);
const IDLE: Duration = Duration::from_secs(10);
const RENEWING: Duration = Duration::from_secs(60);
/// Clock ticks in a second, on every Linux that this runs on.
const TICKS: f64 = 100.0;

struct Figures {
    /// From the start of the process until each stream has its first secret.
    without_state: Duration,
    /// CPU time of that.
    cpu: f64,
    with_state: Duration,
    pss: Option<u64>,
    anonymous: u64,
    threads: u64,
    idle_cpu: f64,
    renewal_cpu: f64,
    volumes: Volumes,
}

/// Volumes of Pods.
struct Volumes {
    /// From the call of a publish until its answer, each alone: the median.
    publish: Duration,
    /// Of that, what the agent waited for its CA.
    signing: Duration,
    /// Until all were published, begun at once.
    all_at_once: Duration,
    /// CPU time of 10 s in which a kubelet comes by for one volume after the other, with 13 connections a second.
    republish_cpu: f64,
}

fn main() {
    let binary = release_binary();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let counts = [1, 250, 1000];
    let figures = counts.map(|count| runtime.block_on(measure(&binary, count)));
    let row = |name: &str, value: &dyn Fn(&Figures) -> String| {
        let cells = figures.each_ref().map(|figures| format!("{:>12}", value(figures)));
        println!("| {name:<52} | {} |", cells.join(" | "));
    };
    println!("\n| {:<52} | {} |", "workloads", counts.map(|count| format!("{count:>12}")).join(" | "));
    println!("|{0:-<54}|{0:->13}:|{0:->13}:|{0:->13}:|", "");
    let milliseconds = |time: Duration| format!("{:.0} ms", time.as_secs_f64() * 1e3);
    row("start until all are served, certificates issued", &|it| milliseconds(it.without_state));
    row("CPU time of that", &|it| format!("{:.2} s", it.cpu));
    row("start until all are served, from the state", &|it| milliseconds(it.with_state));
    let megabytes = |kilobytes: u64| format!("{:.2} MB", kilobytes as f64 * 1024.0 / 1e6);
    row("memory with two streams each, PSS", &|it| it.pss.map_or("-".to_owned(), megabytes));
    row("memory with two streams each, anonymous", &|it| megabytes(it.anonymous));
    row("threads", &|it| it.threads.to_string());
    row("CPU time of 10 idle seconds", &|it| format!("{:.2} s", it.idle_cpu));
    row("CPU time of one renewal, the CA's signature included", &|it| {
        format!("{:.2} ms", it.renewal_cpu * 1e3)
    });
    row("a volume's publish until its socket serves, median", &|it| milliseconds(it.volumes.publish));
    row("of that, the CA's answer, median", &|it| milliseconds(it.volumes.signing));
    row("all volumes published at once", &|it| milliseconds(it.volumes.all_at_once));
    row("CPU time of 10 s of republishing, 13 connections/s", &|it| {
        format!("{:.2} s", it.volumes.republish_cpu)
    });
}

async fn measure(binary: &Path, count: usize) -> Figures {
    let place = tempfile::tempdir().unwrap();
    let workloads = place.path().join("workloads");
    fs::create_dir(&workloads).unwrap();
    let sockets: Vec<_> = (0..count).map(|number| place.path().join(format!("{number}.sock"))).collect();
    for (number, socket) in sockets.iter().enumerate() {
        let identity = format!("spiffe://cluster.local/ns/default/sa/w{number}");
        let text = format!("socket = {socket:?}\nspiffe-id = {identity:?}\n");
        fs::write(workloads.join(format!("w{number}.toml")), text).unwrap();
    }
    let agent = |more: &[&str]| {
        let mut command = Command::new(binary);
        command.args(["node", "--ca", "embedded", "--status-address", "none", "--admin-socket", "none"]);
        command.args(more);
        for (option, name) in [("--ca-dir", "ca"), ("--workloads", "workloads"), ("--state-dir", "state")] {
            command.arg(option).arg(place.path().join(name));
        }
        Process::start(&mut command)
    };
    let quiet = || agent(&["--log-level", "warn"]);
    let (process, without_state, streams) = served(quiet, &sockets).await;
    let cpu = cpu_of(&process);
    std::thread::sleep(SETTLE);
    drop((process, streams));
    let (process, with_state, streams) = served(quiet, &sockets).await;
    tokio::time::sleep(SETTLE).await;
    let before = cpu_of(&process);
    tokio::time::sleep(IDLE).await;
    let pss = process.read("smaps_rollup").and_then(|text| field(&text, "Pss:"));
    let idle_cpu = cpu_of(&process) - before;
    let (anonymous, threads) = (process.status("RssAnon:"), process.status("Threads:"));
    drop((process, streams));
    // Its certificates live longer.
    fs::remove_dir_all(place.path().join("state")).unwrap();
    let renewing = || agent(&["--cert-ttl", "60s", "--log-level", "info"]);
    let (process, _, streams) = served(renewing, &sockets).await;
    tokio::time::sleep(SETTLE).await;
    let before = cpu_of(&process);
    process.count("");
    tokio::time::sleep(RENEWING).await;
    let renewal_cpu = (cpu_of(&process) - before) / process.count("certificate issued") as f64;
    drop((process, streams));
    let volumes = volumes(binary, count).await;
    Figures { without_state, cpu, with_state, pss, anonymous, threads, idle_cpu, renewal_cpu, volumes }
}

async fn volumes(binary: &Path, count: usize) -> Volumes {
    let place = tempfile::tempdir().unwrap();
    let kubelet = Kubelet::new(place.path());
    let mut command = Command::new(binary);
    command.args(["node", "--ca", "embedded", "--status-address", "none", "--admin-socket", "none"]);
    command.args(["--csi-token-audience", "istio-ca"]).args(kubelet.options());
    for (option, name) in [("--ca-dir", "ca"), ("--state-dir", "state")] {
        command.arg(option).arg(place.path().join(name));
    }
    let process = Process::start(&mut command);
    process.wait_for("attache serves");
    let all: Vec<Volume> = (0..count).map(|number| kubelet.volume(number, "web", &[])).collect();
    let (mut took, mut signed) = (Vec::new(), Vec::new());
    for volume in &all {
        let start = Instant::now();
        kubelet.publish(volume).await.unwrap();
        took.push(start.elapsed());
        let issued = process.wait_for("certificate issued");
        signed.push(Duration::from_millis(issued.rsplit_once("took_ms=").unwrap().1.trim().parse().unwrap()));
    }
    let before = cpu_of(&process);
    let mut ticks = tokio::time::interval(Duration::from_secs(3) / 13);
    let start = Instant::now();
    for volume in all.iter().cycle() {
        ticks.tick().await;
        if start.elapsed() > IDLE {
            break;
        }
        kubelet.publish(volume).await.unwrap();
    }
    let republish_cpu = cpu_of(&process) - before;
    for volume in &all {
        kubelet.unpublish(volume).await.unwrap();
    }
    let start = Instant::now();
    futures_of(all.iter().map(|volume| kubelet.publish(volume))).await;
    Volumes { publish: median(took), signing: median(signed), all_at_once: start.elapsed(), republish_cpu }
}

/// Runs them at once.
async fn futures_of(calls: impl Iterator<Item = impl Future<Output = Result<(), tonic::Status>>>) {
    let mut calls: Vec<_> = calls.map(Box::pin).collect();
    std::future::poll_fn(|cx| {
        calls.retain_mut(|call| match call.as_mut().poll(cx) {
            Poll::Ready(published) => {
                published.unwrap();
                false
            }
            Poll::Pending => true,
        });
        if calls.is_empty() { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
}

fn median(mut all: Vec<Duration>) -> Duration {
    all.sort_unstable();
    all[all.len() / 2]
}

/// Starts an agent, and waits until each socket serves two streams of one connection.
async fn served(agent: impl Fn() -> Process, sockets: &[PathBuf]) -> (Process, Duration, Vec<Streams>) {
    let start = Instant::now();
    let process = agent();
    let mut opening = JoinSet::new();
    for socket in sockets {
        let socket = socket.clone();
        opening.spawn(async move {
            while tokio::net::UnixStream::connect(&socket).await.is_err() {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
            let (connection, _) = Connection::open(&socket).await;
            let mut streams = Streams::none();
            streams.open(&connection, Protocol::StateOfTheWorld, 2).await;
            streams
        });
    }
    let streams = opening.join_all().await;
    (process, start.elapsed(), streams)
}

/// In seconds.
fn cpu_of(process: &Process) -> f64 {
    let stat = process.read("stat").unwrap();
    let (_, fields) = stat.rsplit_once(") ").unwrap();
    let ticks: Vec<f64> = fields.split(' ').skip(11).take(2).map(|ticks| ticks.parse().unwrap()).collect();
    (ticks[0] + ticks[1]) / TICKS
}
