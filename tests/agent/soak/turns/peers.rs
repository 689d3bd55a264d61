//! Clients that ask for too much, don't read, or don't stop.

use std::cell::Cell;
use std::path::Path;
use std::time::{Duration, Instant};

use attache::proto::envoy::service::discovery::v3::DiscoveryRequest;
use fastrand::Rng;
use tokio::io::AsyncWriteExt as _;
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Code;

use super::frames::RawClient;
use crate::soak::stage::Stage;
use crate::support::process::PATIENCE;
use crate::support::sds::{Client, DeltaStream, Stream, on_connection, request};

/// The most names that one stream may have.
const NAMES: usize = 10_000;

/// Some seconds of load.
pub fn a_while(random: &mut Rng) -> Duration {
    Duration::from_millis(random.u64(500..2000))
}

/// Subscribes to `names` on a stream of each dialect, reads what comes for a while, and goes.
async fn subscribe(socket: &Path, names: Vec<String>, time: Duration) {
    on_connection(socket, async |client| {
        let all: Vec<_> = names.iter().map(String::as_str).collect();
        let mut in_full = Stream::open(&client, &all).await.unwrap();
        let mut delta = DeltaStream::open(&client, &all).await.unwrap();
        let reads = async {
            loop {
                tokio::select! {
                    push = in_full.pushed() => match push {
                        Ok(push) => in_full.accept(&push).await,
                        Err(_) => return,
                    },
                    push = delta.pushed() => match push {
                        Ok(push) => delta.accept(&push).await,
                        Err(_) => return,
                    },
                }
            }
        };
        let _ = timeout(time, reads).await;
    })
    .await;
}

/// Lists of names that no source knows.
pub async fn unknown_names(stage: &Stage, random: &mut Rng) {
    for _ in 0..3 {
        let salt = random.u32(..);
        let names = (0..NAMES).map(|index| format!("unknown-{salt}-{index}")).collect();
        subscribe(&stage.socket, names, a_while(random)).await;
    }
}

/// Lists of files that do not exist, in directories that do and that do not.
pub async fn missing_files(stage: &Stage, random: &mut Rng) {
    let salt = random.u32(..);
    let directory = stage.volume.path.display().to_string();
    for place in [directory, format!("/nowhere-{salt}"), format!("/nowhere-{salt}/a/b/c")] {
        // As many bytes as one request may have.
        let names = (0..NAMES).map(|index| format!("file-root:{place}/{index}"));
        let fits = Cell::new(0);
        let names = names.take_while(|name| fits.replace(fits.get() + name.len() + 5) < 1_000_000).collect();
        subscribe(&stage.socket, names, a_while(random)).await;
    }
}

/// Many spellings of the names of two files, one of which is large.
pub async fn spellings(stage: &Stage, random: &mut Rng) {
    let bundle = stage.directory.join("spelled.pem");
    std::fs::write(&bundle, stage.large_bundle(random)).unwrap();
    let volume = stage.volume.path.join("root-cert.pem");
    for (file, count) in [(volume, 1000), (bundle, 100)] {
        let (directory, name) = (file.parent().unwrap().display(), file.file_name().unwrap().display());
        let names = (0..count).map(|index| {
            // Which of the ten places in the path say `.` instead of nothing.
            let dots: String = (0..10).map(|bit| if index >> bit & 1 == 1 { "./" } else { "/" }).collect();
            format!("file-root:{directory}/{dots}{name}")
        });
        subscribe(&stage.socket, names.collect(), a_while(random)).await;
    }
}

/// Names as long as a path may be.
pub async fn long_names(stage: &Stage, random: &mut Rng) {
    for kind in ["", "file-root:/", "file-cert:/a~/"] {
        let names = (0..240).map(|index| format!("{kind}{}{index}", "x".repeat(4000))).collect();
        subscribe(&stage.socket, names, a_while(random)).await;
    }
}

/// Subscriptions that alternate between two lists as fast as the agent reads them.
pub async fn alternation(stage: &Stage, random: &mut Rng) {
    let salt = random.u32(..);
    let lists = ["a", "b"].map(|list| {
        let names = (0..5000).map(|index| format!("file-root:/nowhere-{salt}/{list}/{index}"));
        names.chain(["default".to_owned()]).collect::<Vec<_>>()
    });
    let end = Instant::now() + 2 * a_while(random);
    on_connection(&stage.socket, async |client| {
        let (requests, inbound) = mpsc::channel(1);
        let of = |resource_names: &Vec<String>| DiscoveryRequest {
            resource_names: resource_names.clone(),
            ..request(&[])
        };
        requests.send(of(&lists[0])).await.unwrap();
        let responses = client.clone().stream_secrets(ReceiverStream::new(inbound)).await.unwrap();
        for names in lists.iter().cycle() {
            if Instant::now() >= end || requests.send(of(names)).await.is_err() {
                break;
            }
        }
        drop(responses);
    })
    .await;
}

/// A client with `streams` streams of the certificate and the mounted files, which it never reads.
pub async fn deaf_client(stage: &Stage, streams: u32) -> RawClient {
    let [pair, roots] = stage.volume.names();
    let mut client = RawClient::connect(&stage.socket).await;
    for index in 0..streams {
        let first = request(&["default", "ROOTCA", &pair, &roots]);
        assert!(client.open_stream(2 * index + 1, &first).await, "the agent reads no request");
    }
    client
}

/// Clients that don't read, while they are pushed large files that change.
pub async fn deaf(stage: &Stage, random: &mut Rng) {
    let bundle = stage.directory.join("unread.pem");
    let name = format!("file-root:{}", bundle.display());
    std::fs::write(&bundle, stage.large_bundle(random)).unwrap();
    let mut clients = Vec::new();
    for _ in 0..5 {
        let mut client = deaf_client(stage, 100).await;
        for index in 100..120 {
            assert!(
                client.open_stream(2 * index + 1, &request(&[&name])).await,
                "the agent reads no request"
            );
        }
        clients.push(client);
    }
    for _ in 0..10 {
        std::fs::write(&bundle, stage.large_bundle(random)).unwrap();
        sleep(Duration::from_millis(200)).await;
    }
}

/// Streams without a node, each of which is refused.
pub async fn no_node(stage: &Stage) {
    let streams = async |client: Client| {
        for _ in 0..1000 {
            let first = DiscoveryRequest { node: None, ..request(&["default"]) };
            let refused = match Stream::open_with(&client, first).await {
                Ok(mut stream) => stream.next().await.map(drop),
                Err(status) => Err(status),
            };
            assert_eq!(refused.unwrap_err().code(), Code::InvalidArgument);
        }
    };
    let mut connections = JoinSet::new();
    for _ in 0..10 {
        let socket = stage.socket.clone();
        connections.spawn_local(async move { on_connection(&socket, streams).await });
    }
    timeout(PATIENCE, connections.join_all()).await.expect("10,000 streams are not refused");
}

/// Clients that reject every push.
pub async fn rejections(stage: &Stage) {
    let [pair, roots] = stage.volume.names();
    on_connection(&stage.socket, async |client| {
        for round in 0..100 {
            let mut stream = Stream::open(&client, &["default", "ROOTCA", &pair, &roots]).await.unwrap();
            let push = stream.next().await.unwrap();
            for _ in 0..5 {
                stream.reject(&push, &format!("not wanted {round} {}", "x".repeat(2000))).await;
            }
        }
    })
    .await;
}

/// Connections that open and close, with streams and without.
pub async fn churn(stage: &Stage, random: &mut Rng) {
    for _ in 0..5 {
        let mut open = Vec::new();
        for _ in 0..100 {
            open.push(UnixStream::connect(&stage.socket).await.unwrap());
        }
        drop(open);
        for _ in 0..20 {
            let reads = random.bool();
            on_connection(&stage.socket, async |client| {
                let mut stream = Stream::open(&client, &["default", "ROOTCA"]).await.unwrap();
                if reads {
                    stream.next().await.unwrap();
                }
            })
            .await;
        }
    }
}

/// More clients of the status address than it takes, which send their requests slowly or never.
pub async fn slow_status(stage: &Stage, random: &mut Rng) {
    let mut clients = Vec::new();
    for _ in 0..200 {
        let mut client = TcpStream::connect(stage.status).await.unwrap();
        let _ = client.write_all(b"GET /metrics HTTP/1.1\r\n").await;
        clients.push(client);
    }
    let end = Instant::now() + 2 * a_while(random);
    while Instant::now() < end {
        for client in &mut clients {
            let _ = client.write_all(b"x: y\r\n").await;
        }
        sleep(Duration::from_millis(200)).await;
    }
}

/// Calls, junk and slow clients on the admin socket, more than it takes.
pub async fn admin_calls(stage: &Stage, random: &mut Rng) {
    for _ in 0..50 {
        assert_eq!(stage.call_admin("GET", "/v1/status").await.unwrap(), 200);
        assert_eq!(stage.call_admin("PUT", "/v1/log?level=%00loud").await.unwrap(), 400);
        assert_eq!(stage.call_admin("DELETE", "/v1/nothing").await.unwrap(), 404);
    }
    let mut clients = Vec::new();
    for _ in 0..100 {
        let mut client = UnixStream::connect(&stage.admin).await.unwrap();
        let mut junk = vec![0; random.usize(1..2000)];
        random.fill(&mut junk);
        let _ = client.write_all(if random.bool() { &junk } else { b"GET /v1/status HTTP/1.1\r\n" }).await;
        clients.push(client);
    }
    sleep(a_while(random)).await;
}
