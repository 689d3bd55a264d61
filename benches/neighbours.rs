//! What a client that behaves well waits for while another one is hostile: the time from opening a stream, or a call of
//! `FetchSecrets`, to the first response. Prints one table.
//!
//! The hostile client is a process of its own with a low priority, so that it takes no processor from the measured one. The
//! agent is the release binary; `ATTACHE` selects another.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stdout,
    clippy::disallowed_methods,
    reason = "a program of its own: it prints, sleeps, and panics where it can't go on"
)]

#[allow(dead_code, reason = "the other benches use the rest")]
mod load;
#[allow(dead_code, reason = "the other benches use the rest")]
mod process;

use std::ffi::OsString;
use std::fs;
use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use attache::base::limits;
use attache::pki::pem;
use attache::proto::envoy::config::core::v3::Node;
use attache::proto::envoy::service::discovery::v3::{DeltaDiscoveryRequest, DiscoveryRequest};
use rcgen::{CertificateParams, KeyPair, PKCS_ECDSA_P521_SHA512, SerialNumber};

use crate::load::{Connection, Protocol, framed};
use crate::process::{Process, release_binary};

const LENGTH: Duration = Duration::from_secs(8);
/// Between two measurements.
const PAUSE: Duration = Duration::from_millis(2);
/// Bundles that the hostile client asks for.
const BUNDLES: usize = 8;

/// What the hostile client does, and its row in the table.
const KINDS: [(&str, &str); 6] = [
    ("nothing", "nothing"),
    ("unknown", "lists of 10,000 unknown names, one after the other"),
    ("missing", "lists of 10,000 names of files that don't exist"),
    ("closing", "the same, each on a connection that is closed"),
    ("bundles", "bundles of 500 P-521 roots that change all the time"),
    ("alternating", "a name subscribed and unsubscribed, beside 9,999 others"),
];

fn main() {
    let arguments: Vec<OsString> = std::env::args_os().collect();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    if let [_, flag, kind, directory] = arguments.as_slice()
        && flag == "--hostile"
    {
        rustix::process::nice(19).unwrap();
        return runtime.block_on(hostile(kind.to_str().unwrap(), directory.as_ref()));
    }
    println!(
        "| the other client | stream: median | 99 % | longest | FetchSecrets: median | 99 % | longest |"
    );
    println!("|---|--:|--:|--:|--:|--:|--:|");
    for (kind, row) in KINDS {
        let [streams, fetches] = runtime.block_on(measure(kind));
        let cells =
            [streams, fetches].concat().into_iter().map(|time| format!("{:.1} ms", time.as_secs_f64() * 1e3));
        println!("| {row} | {} |", cells.collect::<Vec<_>>().join(" | "));
    }
}

/// The hostile client, stopped when it is dropped.
struct Hostile(Child);

impl Drop for Hostile {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

/// Median, 99 % and longest time of opening a stream, and of a fetch.
async fn measure(kind: &str) -> [[Duration; 3]; 2] {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("socket");
    let mut agent = Command::new(release_binary());
    agent
        .args(["run", "--status-address", "none", "--ca", "embedded", "--file-prefix"])
        .arg(directory.path());
    agent.arg("--socket").arg(&socket).arg("--ca-dir").arg(directory.path().join("ca"));
    let agent = Process::start(&mut agent);
    agent.wait_for(" ready ");
    let hostile = Command::new(std::env::current_exe().unwrap())
        .args(["--hostile", kind])
        .arg(directory.path())
        .spawn()
        .unwrap();
    let hostile = Hostile(hostile);
    tokio::time::sleep(Duration::from_secs(2)).await;
    let (connection, _) = Connection::open(&socket).await;
    let mut times = [Protocol::StateOfTheWorld, Protocol::Fetch].map(|protocol| (protocol, Vec::new()));
    let end = Instant::now() + LENGTH;
    while Instant::now() < end {
        for (protocol, times) in &mut times {
            tokio::time::sleep(PAUSE).await;
            let began = Instant::now();
            drop(connection.call(*protocol).await);
            times.push(began.elapsed());
        }
    }
    drop(hostile);
    times.map(|(_, mut times)| {
        times.sort_unstable();
        [times[times.len() / 2], times[times.len() * 99 / 100], times[times.len() - 1]]
    })
}

async fn hostile(kind: &str, directory: &Path) {
    let socket = directory.join("socket");
    match kind {
        "nothing" => std::future::pending().await,
        "unknown" => lists(&socket, |list, index| format!("{list} {index}")).await,
        "missing" => {
            let directory = directory.display();
            lists(&socket, |list, index| format!("file-root:{directory}/{list}/{index}.pem")).await;
        }
        "closing" => closing(&socket, directory).await,
        "bundles" => bundles(&socket, directory).await,
        "alternating" => alternating(&socket).await,
        other => panic!("{other}"),
    }
}

fn node() -> Option<Node> {
    Some(Node { id: "hostile".to_owned(), ..Node::default() })
}

fn list(names: Vec<String>) -> DiscoveryRequest {
    DiscoveryRequest { node: node(), resource_names: names, ..DiscoveryRequest::default() }
}

/// Sends two lists in turn, as fast as the agent takes them. One connection may have half of the room for names of files.
async fn lists(socket: &Path, name: impl Fn(&str, usize) -> String) {
    let lists = ["one", "two"]
        .map(|which| framed(&list((0..limits::NAMES_PER_STREAM).map(|index| name(which, index)).collect())));
    let (connection, _) = Connection::open(socket).await;
    let mut call = connection.begin(Protocol::StateOfTheWorld).await;
    for list in lists.iter().cycle() {
        call.send_slowly(list.clone()).await;
    }
}

/// Subscribes to many names and closes the connection, over and over.
async fn closing(socket: &Path, directory: &Path) {
    let name = |index| format!("file-root:{}/missing/{index}.pem", directory.display());
    let names = framed(&list((0..limits::NAMES_PER_STREAM).map(name).collect()));
    loop {
        let (connection, end) = Connection::open(socket).await;
        let mut call = connection.begin(Protocol::StateOfTheWorld).await;
        call.send_slowly(names.clone()).await;
        tokio::time::sleep(Duration::from_millis(300)).await;
        drop((call, connection));
        end.abort();
    }
}

/// Subscribes to bundles, and changes their files.
async fn bundles(socket: &Path, directory: &Path) {
    let key = KeyPair::generate_for(&PKCS_ECDSA_P521_SHA512).unwrap();
    let bundle = |number: usize| {
        let roots = (0..limits::CERTIFICATES).map(|serial| {
            let mut params = CertificateParams::default();
            params.serial_number =
                Some(SerialNumber::from((number * limits::CERTIFICATES + serial + 1) as u64));
            params.self_signed(&key).unwrap().der().clone()
        });
        pem::of_certificates(&roots.collect::<Vec<_>>())
    };
    let contents: Vec<_> = (0..2 * BUNDLES).map(bundle).collect();
    let path = |number: usize| directory.join(format!("bundle-{number}.pem"));
    let put = |number: usize, content: &[u8]| {
        let staged = directory.join("staged");
        fs::write(&staged, content).unwrap();
        fs::rename(staged, path(number)).unwrap();
    };
    (0..BUNDLES).for_each(|number| put(number, &contents[number]));
    let names = (0..BUNDLES).map(|number| format!("file-root:{}", path(number).display())).collect();
    let (connection, _) = Connection::open(socket).await;
    let mut call = connection.begin(Protocol::StateOfTheWorld).await;
    call.send_slowly(framed(&list(names))).await;
    tokio::spawn(async move { while call.next().await.is_some() {} });
    for round in 1.. {
        for number in 0..BUNDLES {
            put(number, &contents[(number + round * (BUNDLES + 1)) % contents.len()]);
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
}

async fn alternating(socket: &Path) {
    let (connection, _) = Connection::open(socket).await;
    let mut call = connection.begin(Protocol::Delta).await;
    let first = DeltaDiscoveryRequest {
        node: node(),
        resource_names_subscribe: (1..limits::NAMES_PER_STREAM).map(|index| index.to_string()).collect(),
        ..DeltaDiscoveryRequest::default()
    };
    call.send_slowly(framed(&first)).await;
    let names = || vec!["default".to_owned()];
    let request = DeltaDiscoveryRequest::default;
    let both = [
        framed(&DeltaDiscoveryRequest { resource_names_subscribe: names(), ..request() }),
        framed(&DeltaDiscoveryRequest { resource_names_unsubscribe: names(), ..request() }),
    ];
    for request in both.iter().cycle() {
        call.send_slowly(request.clone()).await;
    }
}
