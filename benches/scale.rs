//! The costs of many streams: how fast they open, how soon a push has reached all of them, memory and CPU. Prints one
//! table.
//!
//! Beside each figure of the agent is that of the simplest server that is possible with tonic (`benches/floor.rs`),
//! measured alternately in the same run, with the same client (`benches/load.rs`). The client uses one processor and
//! the server another: with two processors, a server that is much faster than the client appears no faster than the
//! client. CPU time is the server's alone, so it shows the difference.
//!
//! The agent is the release binary, optimized for size; `ATTACHE` selects another. The floor is this program, optimized
//! for speed. A push begins with the swap of a mounted directory, as by the kubelet, and includes reading and checking;
//! the floor's begins with a signal. Each client acknowledges every response.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stdout,
    clippy::disallowed_methods,
    reason = "a program of its own: it prints, sleeps, and panics where it can't go on"
)]

mod floor;
mod load;
mod process;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use attache::base::clock::Clock;
use attache::ca::embedded::DevelopmentCa;
use attache::pki::key::{KeyType, SigningKey};
use attache::pki::{csr, pem};
use attache::proto::envoy::service::discovery::v3::DiscoveryResponse;
use prost::Message as _;
use rustix::process::Signal;

use crate::load::{Connection, Protocol, Streams, cycles};
use crate::process::{Process, release_binary};

/// How often both servers are measured, alternately.
const ROUNDS: usize = 3;
/// Streams on the one crowded connection.
const CROWD: usize = 5_000;
/// Further connections, and the streams on each.
const CONNECTIONS: usize = 100;
const FEW: usize = 10;
const MANY: usize = 50;
const PUSHES: usize = 5;
const CYCLES: usize = 9_600;
/// The agent folds changes within 100 ms into one push. The time counts from when it last read the files, which it does
/// once more after the last event of a swap.
const DEBOUNCE: Duration = Duration::from_millis(250);

fn main() {
    let arguments: Vec<OsString> = std::env::args_os().collect();
    if let [_, flag, socket, secret] = arguments.as_slice()
        && flag == "--floor"
    {
        return floor::run(socket.as_ref(), secret.as_ref());
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let figures = runtime.block_on(measure());
    print(&figures);
}

/// The measured figures, in the order of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum What {
    Opens,
    OpenCpu,
    PushMedian(usize),
    PushP99(usize),
    PushMax(usize),
    PushCpu(usize),
    StreamMemory,
    ConnectionMemory,
    MemoryAfter,
    Cycles,
    CycleCpu,
    Fetches,
    FetchCpu,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Who {
    Agent,
    Floor,
}

/// All measurements of one figure.
type Figures = BTreeMap<(What, &'static str, Who), Vec<f64>>;

const DIALECTS: [(&str, Protocol); 2] = [("SotW", Protocol::StateOfTheWorld), ("Delta", Protocol::Delta)];

async fn measure() -> Figures {
    let dir = tempfile::tempdir().unwrap();
    let bench = Bench::new(dir.path());
    let mut figures = Figures::new();
    for round in 1..=ROUNDS {
        eprintln!("round {round} of {ROUNDS}");
        for (dialect, protocol) in DIALECTS {
            for who in [Who::Agent, Who::Floor] {
                let mut note = |what, value| figures.entry((what, dialect, who)).or_default().push(value);
                // Used memory differs from fresh memory: each of the two has a server of its own.
                connections(&bench.start(who).await, protocol, &mut note).await;
                streams(&bench.start(who).await, protocol, &mut note).await;
            }
        }
    }
    figures
}

/// Measures a connection with one stream.
async fn connections(server: &Server, protocol: Protocol, note: &mut impl FnMut(What, f64)) {
    let before = server.memory();
    let (streams, ends) = server.open(protocol, CONNECTIONS, 1).await;
    server.rest().await;
    note(What::ConnectionMemory, (server.memory() - before) / CONNECTIONS as f64);
    streams.close().await;
    for end in ends {
        end.await.unwrap();
    }
}

/// Measures everything else.
async fn streams(server: &Server, protocol: Protocol, note: &mut impl FnMut(What, f64)) {
    let (connection, end) = Connection::open(&server.socket).await;
    cycles(&connection, protocol, 320).await;
    let at_first = server.memory();

    let mut crowd = Streams::none();
    let (took, cpu) = server.time(crowd.open(&connection, protocol, CROWD)).await;
    note(What::Opens, CROWD as f64 / took.as_secs_f64());
    note(What::OpenCpu, cpu.as_secs_f64() * 1e6 / CROWD as f64);
    note(What::StreamMemory, (server.memory() - at_first) / CROWD as f64);

    let mut ends = vec![end];
    for _ in 0..CONNECTIONS {
        let (connection, end) = Connection::open(&server.socket).await;
        crowd.open(&connection, protocol, MANY).await;
        ends.push(end);
    }
    pushes(server, &mut crowd, CROWD + CONNECTIONS * MANY, note).await;
    crowd.close().await;
    drop(connection);
    for end in ends {
        end.await.unwrap();
    }
    server.rest().await;
    note(What::MemoryAfter, (server.memory() - at_first) / 1e3);

    let (mut few, ends) = server.open(protocol, CONNECTIONS, FEW).await;
    pushes(server, &mut few, CONNECTIONS * FEW, note).await;
    few.close().await;
    for end in ends {
        end.await.unwrap();
    }

    let (connection, end) = Connection::open(&server.socket).await;
    let kinds = [(protocol, What::Cycles, What::CycleCpu), (Protocol::Fetch, What::Fetches, What::FetchCpu)];
    for (protocol, rate, each) in kinds {
        let (took, cpu) = server.time(cycles(&connection, protocol, CYCLES)).await;
        note(rate, CYCLES as f64 / took.as_secs_f64());
        note(each, cpu.as_secs_f64() * 1e6 / CYCLES as f64);
    }
    drop(connection);
    end.await.unwrap();
}

/// Changes the secret, and times its way to each of the `count` open streams.
async fn pushes(server: &Server, streams: &mut Streams, count: usize, note: &mut impl FnMut(What, f64)) {
    for _ in 0..PUSHES {
        server.rest().await;
        tokio::time::sleep(DEBOUNCE).await;
        let began = Instant::now();
        let (mut moments, cpu) = {
            let cpu = server.cpu();
            server.change();
            let moments = streams.arrivals(count).await;
            server.rest().await;
            (moments, server.cpu() - cpu)
        };
        streams.assert_quiet();
        moments.sort_unstable();
        let after = |rank: usize| (moments[rank] - began).as_secs_f64() * 1e3;
        note(What::PushMedian(count), after(count / 2));
        note(What::PushP99(count), after(count * 99 / 100));
        note(What::PushMax(count), after(count - 1));
        note(What::PushCpu(count), cpu.as_secs_f64() * 1e3);
    }
}

struct Bench {
    binary: PathBuf,
    dir: PathBuf,
    number: std::cell::Cell<usize>,
}

struct Server {
    process: Process,
    socket: PathBuf,
    /// The mounted directory; the floor has none.
    volume: Option<PathBuf>,
}

impl Bench {
    fn new(dir: &Path) -> Self {
        let volume = dir.join("volume");
        let ca = DevelopmentCa::open(&dir.join("ca"), Clock::system()).unwrap();
        let identity = "spiffe://cluster.local/ns/default/sa/bench".parse().unwrap();
        for generation in GENERATIONS {
            let directory = volume.join(generation);
            fs::create_dir_all(&directory).unwrap();
            let key = SigningKey::generate(KeyType::EcdsaP256).unwrap();
            let request = csr::request(&key, None, &csr::Names::default()).unwrap();
            let leaf = ca.issue(&request, &identity, Duration::from_secs(24 * 3600)).unwrap();
            let [intermediate, root] = ca.chain();
            fs::write(directory.join("cert-chain.pem"), pem::of_certificates([&leaf, intermediate])).unwrap();
            fs::write(directory.join("key.pem"), key.to_private_key().to_pem()).unwrap();
            fs::write(directory.join("root-cert.pem"), pem::of_certificates([root])).unwrap();
        }
        symlink(GENERATIONS[0], volume.join("..data")).unwrap();
        for file in ["cert-chain.pem", "key.pem", "root-cert.pem"] {
            symlink(format!("..data/{file}"), volume.join(file)).unwrap();
        }
        Self { binary: release_binary(), dir: dir.to_owned(), number: Default::default() }
    }

    async fn start(&self, who: Who) -> Server {
        self.number.set(self.number.get() + 1);
        let socket = self.dir.join(format!("{}.sock", self.number.get()));
        // The floor sends the same bytes as the agent.
        let secret = self.dir.join("secret");
        match who {
            Who::Agent => {
                let volume = self.dir.join("volume");
                let mut command = Command::new(&self.binary);
                command.args(["run", "--status-address", "none", "--socket"]).arg(&socket);
                command.arg("--cert-dir").arg(&volume);
                let process = Process::start(&mut command);
                process.wait_for(" ready ");
                if !secret.exists() {
                    let (connection, _) = Connection::open(&socket).await;
                    let (_, response) = connection.call(Protocol::Fetch).await;
                    let response = DiscoveryResponse::decode(response).unwrap();
                    fs::write(&secret, &response.resources[0].value).unwrap();
                }
                Server { process, socket, volume: Some(volume) }
            }
            Who::Floor => {
                let mut command = Command::new(std::env::current_exe().unwrap());
                let process = Process::start(command.arg("--floor").args([&socket, &secret]));
                process.wait_for(floor::SERVES);
                Server { process, socket, volume: None }
            }
        }
    }
}

/// Two contents of the mounted directory; alternating between them makes every change a real one.
const GENERATIONS: [&str; 2] = ["..generation-0", "..generation-1"];

impl Server {
    /// Triggers a push.
    fn change(&self) {
        let Some(volume) = &self.volume else { return self.process.signal(Signal::USR1) };
        let data = volume.join("..data");
        let is_first = fs::read_link(&data).unwrap() == Path::new(GENERATIONS[0]);
        let staged = volume.join("..data_tmp");
        symlink(GENERATIONS[usize::from(is_first)], &staged).unwrap();
        fs::rename(staged, data).unwrap();
    }

    async fn open(
        &self,
        protocol: Protocol,
        connections: usize,
        each: usize,
    ) -> (Streams, Vec<tokio::task::JoinHandle<()>>) {
        let (mut streams, mut ends) = (Streams::none(), Vec::new());
        for _ in 0..connections {
            let (connection, end) = Connection::open(&self.socket).await;
            streams.open(&connection, protocol, each).await;
            ends.push(end);
        }
        (streams, ends)
    }

    /// How long `work` takes, and the server's CPU time for it, including what it does afterwards.
    async fn time(&self, work: impl Future<Output = ()>) -> (Duration, Duration) {
        self.rest().await;
        let (cpu, began) = (self.cpu(), Instant::now());
        work.await;
        let took = began.elapsed();
        self.rest().await;
        (took, self.cpu() - cpu)
    }

    /// Waits until the server is idle.
    async fn rest(&self) {
        loop {
            let cpu = self.cpu();
            tokio::time::sleep(Duration::from_millis(20)).await;
            if self.cpu() - cpu < Duration::from_micros(200) {
                return;
            }
        }
    }

    /// CPU time of all its threads, in nanoseconds.
    fn cpu(&self) -> Duration {
        let thread = |stat: String| stat.split(' ').next().unwrap().parse::<u64>().unwrap();
        Duration::from_nanos(self.process.of_threads("schedstat").map(thread).sum())
    }

    /// Anonymous memory, in kB.
    fn memory(&self) -> f64 {
        self.process.status("RssAnon:") as f64
    }
}

fn print(figures: &Figures) {
    let all = CROWD + CONNECTIONS * MANY;
    let few = CONNECTIONS * FEW;
    let rows = [
        (What::Opens, "streams opened per second".to_owned()),
        (What::OpenCpu, "  CPU of each, µs".to_owned()),
    ]
    .into_iter()
    .chain([few, all].into_iter().flat_map(|count| {
        [
            (What::PushMedian(count), format!("push to {count}: median, ms")),
            (What::PushP99(count), "  99 %, ms".to_owned()),
            (What::PushMax(count), "  the last, ms".to_owned()),
            (What::PushCpu(count), "  CPU, ms".to_owned()),
        ]
    }))
    .chain([
        (What::StreamMemory, "memory of a stream, kB".to_owned()),
        (What::ConnectionMemory, "memory of a connection with a stream, kB".to_owned()),
        (What::MemoryAfter, format!("kept after {all} streams have closed, MB")),
        (What::Cycles, "open, get, close: per second".to_owned()),
        (What::CycleCpu, "  CPU of each, µs".to_owned()),
        (What::Fetches, "FetchSecrets per second".to_owned()),
        (What::FetchCpu, "  CPU of each, µs".to_owned()),
    ]);
    let line = |name: &str, cells: [String; 6]| println!("| {name:<41} | {} |", cells.join(" | "));
    let heading =
        DIALECTS.map(|(dialect, _)| [format!("{dialect:>9}"), format!("{:>9}", "floor"), "ratio".to_owned()]);
    println!();
    line("", heading.concat().try_into().unwrap());
    let rule = [10, 10, 6].map(|width| format!("{:->width$}:", "")).join("|");
    println!("|{:-<43}|{rule}|{rule}|", "");
    for (what, name) in rows {
        let cells = DIALECTS.map(|(dialect, _)| {
            let [ours, floor] = [Who::Agent, Who::Floor].map(|who| median(&figures[&(what, dialect, who)]));
            let is_rate = matches!(what, What::Opens | What::Cycles | What::Fetches);
            let ratio = if is_rate { floor / ours } else { ours / floor };
            let number = |value: f64| {
                let digits = if value < 10.0 {
                    2
                } else if value < 1000.0 {
                    1
                } else {
                    0
                };
                format!("{value:>9.digits$}")
            };
            [number(ours), number(floor), format!("{ratio:>5.2}")]
        });
        line(&name, cells.concat().try_into().unwrap());
    }
    println!("\nratio: the agent's time, CPU or memory divided by the floor's");
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}
