//! What clients may cost each other: room, time, memory.

use std::path::Path;
use std::time::{Duration, Instant};

use attache::base::limits;
use attache::net::http2::Connection;
use attache::proto::envoy::service::discovery::v3::{DeltaDiscoveryRequest, DiscoveryRequest};
use attache::proto::envoy::service::secret::v3::secret_discovery_service_client::SecretDiscoveryServiceClient;
use serde_json::Value;
use tokio::io::AsyncWriteExt as _;
use tokio::net::UnixStream;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::Code;

use crate::support::files::Mounted;
use crate::support::process::{Agent, PATIENCE, output};
use crate::support::sds::{DeltaStream, Stream, fetch, on_connection, request, secrets};

async fn agent(directory: &Path) -> Agent {
    let certs = directory.join("certs");
    Mounted::new(&directory.join("ca"), "web").write(&certs);
    Agent::ready(directory, "agent", &["--cert-dir", certs.to_str().unwrap()]).await
}

/// Names of files that don't exist.
fn missing_names(directory: &Path, count: usize) -> Vec<String> {
    (0..count).map(|index| format!("file-root:{}/missing/{index}.pem", directory.display())).collect()
}

fn with_names(names: Vec<String>) -> DiscoveryRequest {
    DiscoveryRequest { resource_names: names, ..request(&[]) }
}

#[tokio::test]
async fn a_name_without_room_is_served_once_there_is_room_and_never_removed() {
    let directory = tempfile::tempdir().unwrap();
    let mut agent = agent(directory.path()).await;
    let root = |copy: &str| {
        let path = directory.path().join(copy);
        std::fs::copy(directory.path().join("certs/root-cert.pem"), &path).unwrap();
        format!("file-root:{}", path.display())
    };
    let (full, delta, other) = (root("full.pem"), root("delta.pem"), root("other.pem"));
    let socket = agent.socket.clone();
    on_connection(&socket, async |client| {
        // All that one connection may have while as much is left for others.
        let names = missing_names(directory.path(), limits::NAMES_ON_DEMAND / 2);
        let greedy = Stream::open_with(&client, with_names(names)).await.unwrap();
        let last = format!("file-root:{}/missing/9999.pem", directory.path().display());
        agent.wait_metric(&format!("attache_streams{{name={last:?}}}"), 1).await;

        let mut in_full = Stream::open(&client, &[&full, "default"]).await.unwrap();
        let mut in_delta = DeltaStream::open(&client, &[&delta, "default"]).await.unwrap();
        let first = in_full.next().await.unwrap();
        assert_eq!(secrets(&first).len(), 1, "what has room does not wait");
        let first = in_delta.next().await.unwrap();
        assert_eq!((first.resources.len(), first.removed_resources.len()), (1, 0), "nothing is removed");
        agent.wait_metric("attache_refusals_total{reason=\"too_many_names\"}", 2).await;

        let status = fetch(&client, &[&full]).await.unwrap_err();
        assert_eq!(status.code(), Code::ResourceExhausted, "a name without room is there: {status}");

        // Another connection has room of its own.
        let others = on_connection(&socket, async |client| {
            let mut stream = Stream::open(&client, &[&other]).await.unwrap();
            secrets(&stream.next().await.unwrap()).len()
        });
        assert_eq!(others.await, 1);

        drop(greedy);
        let served = secrets(&in_full.next().await.unwrap());
        assert_eq!(served.iter().map(|secret| &secret.name).collect::<Vec<_>>(), [&full]);
        let served = in_delta.next().await.unwrap();
        assert_eq!(served.resources.iter().map(|one| &one.name).collect::<Vec<_>>(), [&delta]);
        assert!(served.removed_resources.is_empty());
    })
    .await;
}

#[tokio::test]
async fn a_reconnecting_clients_claim_counts_as_holding_the_version() {
    let directory = tempfile::tempdir().unwrap();
    let agent = agent(directory.path()).await;
    let socket = agent.socket.clone();
    let holding = async || -> Value {
        let socket = socket.to_str().unwrap();
        let report = output(&["status", "--output", "json", "--socket", socket]).await.stdout;
        let report: Value = serde_json::from_slice(&report).unwrap();
        let secrets = report["secrets"].as_array().unwrap();
        secrets.iter().find(|secret| secret["name"] == "ROOTCA").unwrap()["holding"].clone()
    };
    let version =
        on_connection(&socket, async |client| fetch(&client, &["ROOTCA"]).await.unwrap().version_info).await;
    assert_eq!(holding().await, serde_json::json!([]));
    on_connection(&socket, async |client| {
        let first = DiscoveryRequest { version_info: version.clone(), ..request(&["ROOTCA"]) };
        let mut in_full = Stream::open_with(&client, first).await.unwrap();
        let (requests, inbound) = mpsc::channel(4);
        let first = DeltaDiscoveryRequest {
            node: request(&[]).node,
            resource_names_subscribe: vec!["ROOTCA".to_owned()],
            initial_resource_versions: [("ROOTCA".to_owned(), version.clone())].into(),
            ..DeltaDiscoveryRequest::default()
        };
        requests.send(first).await.unwrap();
        let _in_delta = client.clone().delta_secrets(ReceiverStream::new(inbound)).await.unwrap();
        let expected = serde_json::json!([{ "version": version, "streams": 2, "nodes": ["test"] }]);
        let both_hold = async {
            while holding().await != expected {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(PATIENCE, both_hold).await.expect("the claims do not count");
        assert!(in_full.is_quiet(Duration::from_millis(50)).await, "what the client holds is sent again");
    })
    .await;
}

/// How long others may take with hostile clients beside them. Without bounds on work it is many seconds: the agent of
/// this test is not optimized, and all tests share its processors.
const SOON: Duration = Duration::from_secs(2);

#[tokio::test]
async fn clients_with_endless_lists_of_names_delay_nobody() {
    let directory = tempfile::tempdir().unwrap();
    let agent = agent(directory.path()).await;
    let socket = agent.socket.clone();
    let stop = CancellationToken::new();
    // On a thread of their own, so that only the agent makes this one wait.
    let hostile = std::thread::spawn({
        let (socket, directory, stop) = (socket.clone(), directory.path().to_owned(), stop.clone());
        move || hostile_clients(&socket, &directory, &stop)
    });
    on_connection(&socket, async |client| {
        let mut times = Vec::new();
        let began = Instant::now();
        while times.len() < 200 && began.elapsed() < Duration::from_secs(15) {
            let asked = Instant::now();
            let mut stream = Stream::open(&client, &["default"]).await.unwrap();
            assert_eq!(secrets(&stream.next().await.unwrap()).len(), 1);
            times.push(asked.elapsed());
        }
        times.sort_unstable();
        let (median, longest) = (times[times.len() / 2], times[times.len() - 1]);
        println!("{} streams beside hostile ones: median {median:?}, longest {longest:?}", times.len());
        assert!(longest < SOON, "a stream waited {longest:?}, the median is {median:?}");
    })
    .await;
    stop.cancel();
    let is_cut_off = hostile.join().unwrap();
    assert!(!is_cut_off, "they only wait for each other");
}

/// Runs hostile clients until `stop` is cancelled. True if one was disconnected before.
fn hostile_clients(socket: &Path, directory: &Path, stop: &CancellationToken) -> bool {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut connections = tokio::task::JoinSet::new();
        for kind in 0..6 {
            let (socket, directory) = (socket.to_owned(), directory.to_owned());
            connections.spawn(async move {
                on_connection(&socket, async |client| match kind {
                    0..3 => unknown_lists(client).await,
                    3 => on_demand_lists(client, &directory).await,
                    _ => alternating(client).await,
                })
                .await;
            });
        }
        tokio::select! {
            () = stop.cancelled() => false,
            _ = connections.join_next() => true,
        }
    })
}

type Client = SecretDiscoveryServiceClient<Connection>;

/// Subscribes to two lists of 10,000 names that don't exist in turn, as fast as the agent takes them.
async fn unknown_lists(client: Client) {
    let lists = ["one", "two"].map(|list| {
        let names = (0..limits::NAMES_PER_STREAM).map(|index| format!("{list} {index}"));
        with_names(names.collect())
    });
    endless(client, lists).await;
}

/// The same with names of files.
async fn on_demand_lists(client: Client, directory: &Path) {
    let names = missing_names(directory, limits::NAMES_PER_STREAM / 4);
    endless(client, [with_names(names), request(&["default"])]).await;
}

async fn endless(client: Client, lists: [DiscoveryRequest; 2]) {
    let (requests, inbound) = mpsc::channel(1);
    let _responses = client.clone().stream_secrets(ReceiverStream::new(inbound)).await.unwrap();
    for list in lists.iter().cycle() {
        requests.send(list.clone()).await.unwrap();
    }
}

/// Subscribes to a name and unsubscribes from it in turn, on a stream with 10,000 names.
async fn alternating(client: Client) {
    let (requests, inbound) = mpsc::channel(16);
    let first = DeltaDiscoveryRequest {
        node: request(&[]).node,
        resource_names_subscribe: (0..limits::NAMES_PER_STREAM - 1).map(|index| index.to_string()).collect(),
        ..DeltaDiscoveryRequest::default()
    };
    requests.send(first).await.unwrap();
    let mut responses =
        client.clone().delta_secrets(ReceiverStream::new(inbound)).await.unwrap().into_inner();
    tokio::spawn(async move { while let Ok(Some(_)) = responses.message().await {} });
    let names = || vec!["default".to_owned()];
    for is_on in [true, false].into_iter().cycle() {
        let (on, off) = if is_on { (names(), Vec::new()) } else { (Vec::new(), names()) };
        let request = DeltaDiscoveryRequest {
            resource_names_subscribe: on,
            resource_names_unsubscribe: off,
            ..DeltaDiscoveryRequest::default()
        };
        requests.send(request).await.unwrap();
    }
}

#[tokio::test]
async fn streams_beyond_the_memory_of_clients_are_refused_until_there_is_room() {
    let directory = tempfile::tempdir().unwrap();
    let mut agent = agent(directory.path()).await;
    let socket = agent.socket.clone();
    on_connection(&socket, async |client| {
        // Names of the longest kind: few streams take up all that one connection may have.
        let names = |stream: usize| {
            let names =
                (0..limits::NAMES_PER_STREAM).map(|index| format!("{stream} {index} {}", "x".repeat(80)));
            with_names(names.collect())
        };
        let mut open = Vec::new();
        let refused = loop {
            let mut stream = Stream::open_with(&client, names(open.len())).await.unwrap();
            let all = f64::from(u32::try_from((open.len() + 1) * limits::NAMES_PER_STREAM).unwrap());
            let is_refused = loop {
                if agent.metric("attache_refusals_total{reason=\"no_memory\"}").await > 0.0 {
                    break true;
                }
                if agent.metric("attache_refusals_total{reason=\"unknown_name\"}").await == all {
                    break false;
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            };
            if is_refused {
                break stream.next().await.unwrap_err();
            }
            open.push(stream);
            assert!(open.len() < 100, "there is no bound");
        };
        assert_eq!(refused.code(), tonic::Code::ResourceExhausted);
        assert!(refused.message().contains("no memory left for this connection"), "{refused:?}");
        // Others are served, and this connection again once it has closed some.
        assert!(on_connection(&socket, async |client| fetch(&client, &["default"]).await.is_ok()).await);
        drop(open);
        let again = async {
            loop {
                if let Ok(response) = fetch(&client, &["default"]).await {
                    break response;
                }
            }
        };
        assert!(!tokio::time::timeout(PATIENCE, again).await.expect("there is no room").resources.is_empty());
    })
    .await;
}

#[tokio::test]
async fn ten_thousand_unknown_names_cost_less_than_five_megabytes() {
    let directory = tempfile::tempdir().unwrap();
    let mut agent = agent(directory.path()).await;
    let socket = agent.socket.clone();
    on_connection(&socket, async |client| {
        fetch(&client, &["default"]).await.unwrap();
        let before = agent.memory();
        let names =
            (0..limits::NAMES_PER_STREAM).map(|index| format!("unknown://namespace/credential-{index}"));
        let _stream = Stream::open_with(&client, with_names(names.collect())).await.unwrap();
        agent.wait_metric("attache_refusals_total{reason=\"unknown_name\"}", limits::NAMES_PER_STREAM).await;
        let grown = agent.memory().saturating_sub(before);
        println!("{} unknown names: {grown} kB", limits::NAMES_PER_STREAM);
        assert!(grown < 5 << 10, "{grown} kB");
    })
    .await;
}

#[tokio::test]
async fn a_client_that_reads_nothing_at_all_costs_little_memory() {
    let directory = tempfile::tempdir().unwrap();
    let agent = agent(directory.path()).await;
    let socket = agent.socket.clone();
    let before = agent.memory();
    let mut silent = UnixStream::connect(&socket).await.unwrap();
    // Calls without end: their responses fill the socket, and the client does not read them.
    let flood = async {
        silent.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").await.unwrap();
        let mut id: u32 = 1;
        loop {
            let mut calls = Vec::new();
            for _ in 0..100 {
                calls.extend(call(id));
                id += 2;
            }
            if silent.write_all(&calls).await.is_err() || id > 2_000_000 {
                return id / 2;
            }
        }
    };
    let sent = tokio::time::timeout(Duration::from_secs(10), flood).await;
    let grown = agent.memory().saturating_sub(before);
    assert!(grown < 300 << 10, "{grown} kB after {sent:?} calls");
    assert!(on_connection(&socket, async |client| fetch(&client, &["default"]).await.is_ok()).await);
}

/// The frames of a `FetchSecrets` for `default`, on stream `id`.
fn call(id: u32) -> Vec<u8> {
    let frame = |kind: u8, flags: u8, payload: &[u8]| {
        let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
        [&length[1..], &[kind, flags], &id.to_be_bytes(), payload].concat()
    };
    // Literal header fields without indexing; the first three names are of the static table.
    let field =
        |index: u8, value: &str| [&[index, u8::try_from(value.len()).unwrap()], value.as_bytes()].concat();
    let path = "/envoy.service.secret.v3.SecretDiscoveryService/FetchSecrets";
    // :method POST, :scheme http, :path, :authority.
    let headers = [vec![0x83, 0x86], field(4, path), field(1, "attache")].concat();
    // An ID of a node, and the name.
    let request = b"\x12\x06\x0a\x04test\x1a\x07default".as_slice();
    let length = u32::try_from(request.len()).unwrap().to_be_bytes();
    let data = [&[0], length.as_slice(), request].concat();
    [frame(1, 4, &headers), frame(0, 1, &data)].concat()
}
