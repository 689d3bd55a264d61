//! The costs of Secrets from Kubernetes: 5,000 names at once, changes, memory, calls, and CPU while other Secrets change.
//! Prints one table.
//!
//! The agent is the release binary; `ATTACHE` selects another. Its API server is that of the tests
//! (`tests/agent/support/kube_cluster.rs`), inside this program: a real one takes longer for each call. Beside a figure is
//! that of a client that does the least (`benches/bare.rs`) with the same server in the same run.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stdout,
    clippy::disallowed_methods,
    unreachable_pub,
    reason = "a program of its own: it prints, sleeps, and panics where it can't go on"
)]

mod bare;
#[allow(dead_code, reason = "scale needs all of it")]
mod load;
#[allow(dead_code, reason = "the other benches need all of it")]
mod process;
#[path = "../tests/agent/support"]
mod support {
    #[allow(dead_code, reason = "the tests need all of it")]
    pub mod files;
    pub mod kube_cluster;
    #[allow(dead_code, reason = "the tests need all of it")]
    pub mod violations;
}

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use attache::proto::SECRET_TYPE_URL;
use attache::proto::envoy::config::core::v3::Node;
use attache::proto::envoy::service::discovery::v3::{DeltaDiscoveryRequest, DeltaDiscoveryResponse};
use prost::Message as _;

use crate::bare::{Bare, name, next};
use crate::load::{Call, Connection, Protocol, framed};
use crate::process::{Process, release_binary};
use crate::support::kube_cluster::{Draft, KubeCluster, Rule};

/// Names that one stream asks for at once.
const NAMES: usize = 5_000;
/// How often both the agent and the bare client get them, alternately.
const ROUNDS: usize = 3;
const CHANGES: usize = 300;
/// Changes of other Secrets per second, and for how long.
const UNRELATED: usize = 1_000;
const CHURN: Duration = Duration::from_secs(10);
/// Without any change. The agent's watches end after 50 to 60 minutes.
const IDLE: Duration = Duration::from_secs(10);
const SETTLE: Duration = Duration::from_secs(2);
/// Between changes, so that each is one push.
const APART: Duration = Duration::from_millis(20);
/// The mean of the time-outs of the agent's watches.
const WATCH_LASTS: f64 = 3_300.0;

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    if let [_, flag, address, root, token, count] = arguments.as_slice()
        && flag == "--gets"
    {
        return bare::run([address, root, token, count]);
    }
    let binary = release_binary();
    let columns = runtime().block_on(async {
        let bench = Bench::start(binary).await;
        let one = bench.measure("lister").await;
        let each = bench.measure("getter").await;
        [one, each]
    });
    print(&columns);
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

/// The API server, on a thread of its own.
async fn server(directory: &Path) -> KubeCluster {
    let (sender, started) = tokio::sync::oneshot::channel();
    let directory = directory.to_owned();
    std::thread::spawn(move || {
        runtime().block_on(async {
            let _ = sender.send(KubeCluster::start(&directory, "home").await);
            std::future::pending::<()>().await;
        });
    });
    started.await.unwrap()
}

/// The figures of one kind of watching. Times in milliseconds.
#[derive(Default)]
struct Figures {
    /// Until all names are served, and for as many plain reads.
    served: f64,
    gets: f64,
    /// The agent's CPU until then, for each name.
    cpu: f64,
    /// Bytes of a certificate chain with its key, and what a name takes beside them.
    content: f64,
    memory: f64,
    /// Until the stream has a change; after a bare watcher has it.
    change: [f64; 2],
    behind: [f64; 2],
    /// Calls until all names are served and watched.
    calls: String,
    /// Share of a processor.
    churn: f64,
    /// Calls while nothing changes, and open watches.
    idle: usize,
    watches: usize,
}

struct Bench {
    binary: PathBuf,
    directory: tempfile::TempDir,
    cluster: KubeCluster,
    root: PathBuf,
    admin: String,
    /// Bytes of all certificate chains and keys.
    content: usize,
}

impl Bench {
    async fn start(binary: PathBuf) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let cluster = server(directory.path()).await;
        let root = directory.path().join("root.pem");
        std::fs::write(&root, cluster.root()).unwrap();
        for (account, verbs) in [("lister", &["get", "list", "watch"][..]), ("getter", &["get", "watch"])] {
            cluster.account("shop", account);
            cluster.allow_account("shop", account, Rule::to(verbs, "secrets").within("shop"));
        }
        let mut content = 0;
        for number in 0..NAMES {
            let pair = cluster.pair(&name(number));
            content += pair.chain.len() + pair.key.len();
            cluster.put(&Draft::secret("shop", &name(number)).tls(&pair));
        }
        let admin = cluster.admin();
        Self { binary, directory, cluster, root, admin, content }
    }

    /// An agent with the rights of an account.
    fn agent(&self, account: &str) -> (Process, PathBuf) {
        let file = |suffix: &str| self.directory.path().join(format!("{account}.{suffix}"));
        let kubeconfig = file("kubeconfig");
        let token = self.cluster.account("shop", account);
        support::files::write_token(&kubeconfig, &self.cluster.kubeconfig(&token));
        let socket = file("socket");
        let mut command = Command::new(&self.binary);
        command.args(["run", "--ca", "none", "--kubernetes-secrets", "--status-address", "none"]);
        command.args(["--namespace", "shop", "--kubeconfig"]).arg(kubeconfig);
        let process = Process::start(command.arg("--socket").arg(&socket));
        process.wait_for("attache serves");
        (process, socket)
    }

    async fn gets(&self) -> Duration {
        let mut command = tokio::process::Command::new(std::env::current_exe().unwrap());
        command.args(["--gets", &self.cluster.address.to_string()]).arg(&self.root);
        let output = command.args([&self.admin, &NAMES.to_string()]).output().await.unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        Duration::from_micros(String::from_utf8(output.stdout).unwrap().trim().parse().unwrap())
    }

    async fn measure(&self, account: &str) -> Figures {
        let (mut served, mut gets) = (Vec::new(), Vec::new());
        for _ in 1..ROUNDS {
            gets.push(millis(self.gets().await));
            let (_agent, socket) = self.agent(account);
            served.push(millis(Subscriber::open(&socket).await.1));
        }
        gets.push(millis(self.gets().await));
        self.cluster.wait_all_watches(0).await;
        self.cluster.forget_calls();
        let (agent, socket) = self.agent(account);
        tokio::time::sleep(SETTLE).await;
        let (before, cpu_before) = (agent.status("RssAnon:"), cpu(&agent));
        let (mut subscriber, took) = Subscriber::open(&socket).await;
        let cpu = millis(cpu(&agent) - cpu_before) / NAMES as f64;
        served.push(millis(took));
        let watches = if account == "lister" { 1 } else { NAMES };
        self.cluster.wait_all_watches(watches).await;
        let calls = self.calls();
        tokio::time::sleep(SETTLE).await;
        let memory = (agent.status("RssAnon:") - before) as f64 * 1024.0 - self.content as f64;

        let [change, behind] = self.changes(&mut subscriber).await;
        let churn = self.churn(&agent).await;
        tokio::time::sleep(SETTLE).await;
        self.cluster.forget_calls();
        tokio::time::sleep(IDLE).await;
        Figures {
            served: quantile(served, 0.5),
            gets: quantile(gets, 0.5),
            cpu,
            content: self.content as f64 / NAMES as f64,
            memory: memory / NAMES as f64,
            change,
            behind,
            calls,
            churn,
            idle: self.cluster.calls().len(),
            watches,
        }
    }

    /// The calls so far.
    fn calls(&self) -> String {
        let of = |verb: &'static str| (verb, self.cluster.count(|call| call.verb == verb));
        let all = ["get", "list", "watch"].map(of);
        let all = all.into_iter().filter(|(_, count)| *count > 0);
        all.map(|(verb, count)| format!("{count} {verb}")).collect::<Vec<_>>().join(", ")
    }

    /// Median and 99 % of the time from a change of a Secret to the stream, and of what of it comes after the event has
    /// reached a bare watcher.
    async fn changes(&self, subscriber: &mut Subscriber) -> [[f64; 2]; 2] {
        let bare = Bare::connect(self.cluster.address, &self.root, &self.admin).await;
        let mut events = bare.watch(self.cluster.version()).await;
        let (sender, mut watched) = tokio::sync::mpsc::unbounded_channel();
        let watcher = tokio::spawn(async move {
            while let Some(part) = next(&mut events).await {
                if part.ends_with(b"\n") {
                    sender.send(Instant::now()).unwrap();
                }
            }
        });
        let (mut changes, mut behind) = (Vec::new(), Vec::new());
        for _ in 0..CHANGES {
            let host = name(fastrand::usize(..NAMES));
            let draft = Draft::secret("shop", &host).tls(&self.cluster.pair(&host));
            let begun = Instant::now();
            self.cluster.put(&draft);
            let [asked, event] = [subscriber.next().await, watched.recv().await.unwrap()];
            changes.push(millis(asked - begun));
            behind.push((asked.duration_since(begun).as_secs_f64() - (event - begun).as_secs_f64()) * 1e3);
            tokio::time::sleep(APART).await;
        }
        watcher.abort();
        [changes, behind].map(|times| [0.5, 0.99].map(|share| quantile(times.clone(), share)))
    }

    /// The agent's share of a processor while other Secrets of the namespace change.
    async fn churn(&self, agent: &Process) -> f64 {
        let drafts = |number: usize| {
            let draft = Draft::secret("shop", &format!("other-{number}"));
            draft.entry("content", format!("{:0>2000}", fastrand::u64(..)).as_bytes())
        };
        let mut ticks = tokio::time::interval(Duration::from_secs(1) / 100);
        let (begun, before) = (Instant::now(), cpu(agent));
        let mut sent = 0;
        while begun.elapsed() < CHURN {
            ticks.tick().await;
            for _ in 0..UNRELATED / 100 {
                self.cluster.put(&drafts(sent % UNRELATED));
                sent += 1;
            }
        }
        let took = begun.elapsed();
        let rate = sent as f64 / took.as_secs_f64();
        assert!(rate > 0.9 * UNRELATED as f64, "only {rate:.0} changes per second");
        (cpu(agent) - before).as_secs_f64() / took.as_secs_f64()
    }
}

/// A stream that has asked for all names.
struct Subscriber {
    call: Call,
    driver: tokio::task::JoinHandle<()>,
}

impl Drop for Subscriber {
    fn drop(&mut self) {
        // Before the agent ends, which would be an error of the connection.
        self.driver.abort();
    }
}

impl Subscriber {
    /// Opens it; returns it with the time until all names are served.
    async fn open(socket: &Path) -> (Self, Duration) {
        let (connection, driver) = Connection::open(socket).await;
        let request = DeltaDiscoveryRequest {
            node: Some(Node { id: "gateway".to_owned(), ..Node::default() }),
            resource_names_subscribe: (0..NAMES)
                .map(|number| format!("kubernetes://{}", name(number)))
                .collect(),
            type_url: SECRET_TYPE_URL.to_owned(),
            ..DeltaDiscoveryRequest::default()
        };
        let begun = Instant::now();
        let mut subscriber = Self { call: connection.begin(Protocol::Delta).await, driver };
        subscriber.call.send_slowly(framed(&request)).await;
        let mut served = std::collections::HashSet::new();
        while served.len() < NAMES {
            let response = subscriber.call.next().await.expect("the stream stays open");
            subscriber.acknowledge(&response, &mut served).await;
        }
        (subscriber, begun.elapsed())
    }

    async fn acknowledge(&mut self, response: &bytes::Bytes, served: &mut std::collections::HashSet<String>) {
        let response = DeltaDiscoveryResponse::decode(response.clone()).unwrap();
        assert!(response.removed_resources.is_empty(), "{:?}", response.removed_resources);
        let request = DeltaDiscoveryRequest {
            response_nonce: response.nonce,
            type_url: SECRET_TYPE_URL.to_owned(),
            ..DeltaDiscoveryRequest::default()
        };
        self.call.send_slowly(framed(&request)).await;
        served.extend(response.resources.into_iter().map(|resource| resource.name));
    }

    /// When the next response comes, which is about one name.
    async fn next(&mut self) -> Instant {
        let response = self.call.next().await.expect("the stream stays open");
        let arrived = Instant::now();
        let mut served = std::collections::HashSet::new();
        self.acknowledge(&response, &mut served).await;
        assert_eq!(served.len(), 1);
        arrived
    }
}

/// The CPU time of all threads, also of those that have ended, in whole ticks of the kernel's clock.
fn cpu(process: &Process) -> Duration {
    let stat = process.read("stat").unwrap();
    let (_, fields) = stat.rsplit_once(") ").unwrap();
    let ticks: u64 = fields.split(' ').skip(11).take(2).map(|field| field.parse::<u64>().unwrap()).sum();
    Duration::from_millis(ticks * 10)
}

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

fn quantile(mut values: Vec<f64>, share: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    values[((values.len() - 1) as f64 * share).round() as usize]
}

fn print(columns: &[Figures; 2]) {
    let row = |what: &str, cell: &dyn Fn(&Figures) -> String| {
        let [one, each] = columns.each_ref().map(cell);
        println!("| {what} | {one} | {each} |");
    };
    println!("\n| {NAMES} names | one watch (`list` allowed) | a watch for each name |\n|---|--:|--:|");
    row("all served", &|it| format!("{:.0} ms", it.served));
    row("as many plain reads, 32 at a time", &|it| format!("{:.0} ms", it.gets));
    row("ratio (at most 2)", &|it| format!("{:.2}", it.served / it.gets));
    row("CPU of the agent until then, for each name", &|it| format!("{:.2} ms", it.cpu));
    row("calls until all are served and watched", &|it| it.calls.clone());
    row("memory of a name, beside its certificate and key (at most 6 kB)", &|it| {
        format!("{:.1} kB beside {:.1} kB", it.memory / 1e3, it.content / 1e3)
    });
    row("a change reaches the stream: median, 99 %", &|it| pair(it.change));
    row("of that, after the API's event (at most 5 ms)", &|it| pair(it.behind));
    row(&format!("CPU while {UNRELATED} other Secrets change per second"), &|it| {
        format!("{:.1} %", it.churn * 100.0)
    });
    row(&format!("calls in {} idle seconds", IDLE.as_secs()), &|it| it.idle.to_string());
    row("calls for each name in an idle hour, from the watches' time-outs", &|it| {
        format!("{:.4}", it.watches as f64 * 3600.0 / WATCH_LASTS / NAMES as f64)
    });
}

fn pair([median, most]: [f64; 2]) -> String {
    format!("{median:.1} ms, {most:.1} ms")
}
