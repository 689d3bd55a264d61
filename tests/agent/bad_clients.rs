//! Clients that are broken, careless or malicious: they cost other clients nothing, and the agent little.

use std::path::Path;

use attache::proto::envoy::service::discovery::v3::DiscoveryRequest;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Code;

use crate::support::files::Mounted;
use crate::support::process::Agent;
use crate::support::sds::{Stream, on_connection, request, secrets};

async fn agent(directory: &Path) -> Agent {
    let certs = directory.join("certs");
    Mounted::new(&directory.join("ca"), "web").write(&certs);
    Agent::ready(directory, "agent", &["--cert-dir", certs.to_str().unwrap()]).await
}

/// A well-behaved client gets its secret.
async fn others_are_served(agent: &Agent) {
    on_connection(&agent.socket, async |client| {
        let mut stream = Stream::open(&client, &["default"]).await.unwrap();
        let response = stream.next().await.unwrap();
        assert_eq!(secrets(&response).len(), 1);
    })
    .await;
}

#[tokio::test]
async fn odd_names_are_refused_one_by_one_and_cannot_forge_log_lines() {
    let directory = tempfile::tempdir().unwrap();
    let mut agent = agent(directory.path()).await;
    let long = "x".repeat(900_000);
    let odd =
        ["", "nul\0nul", "new\nline 2026-01-01T00:00:00Z ERROR forged", "\u{1b}[31mred", "default ", &long];
    let names: Vec<_> = odd.iter().copied().chain(["default", "default", "ROOTCA"]).collect();
    on_connection(&agent.socket.clone(), async |client| {
        let mut stream = Stream::open(&client, &names).await.unwrap();
        let response = stream.next().await.unwrap();
        let served: Vec<_> = secrets(&response).into_iter().map(|secret| secret.name).collect();
        assert_eq!(served, ["ROOTCA", "default"], "each once, and nothing for the others");
        let many = (0..9_999).map(|index| format!("name-{index}")).chain(["default".to_owned()]).collect();
        let request = DiscoveryRequest { resource_names: many, ..request(&[]) };
        let mut stream = Stream::open_with(&client, request).await.unwrap();
        assert_eq!(secrets(&stream.next().await.unwrap()).len(), 1);
    })
    .await;
    let refused = f64::from(u32::try_from(odd.len()).unwrap()) + 9_999.0;
    assert_eq!(agent.metric("attache_refusals_total{reason=\"unknown_name\"}").await, refused);
    let log = agent.process.log();
    assert!(
        log.lines().all(|line| !line.contains("ERROR forged") || line.contains("\\n")),
        "a line was forged"
    );
    assert!(log.lines().all(|line| line.starts_with("20") && line.len() < 2000), "a line is odd");
    assert!(!log.contains('\u{1b}') && !log.contains('\0'));
}

#[tokio::test]
async fn garbage_ends_only_its_own_connection() {
    let directory = tempfile::tempdir().unwrap();
    let agent = agent(directory.path()).await;
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".as_slice();
    let settings = [0, 0, 0, 4, 0, 0, 0, 0, 0].as_slice();
    let mut random = fastrand::Rng::with_seed(7);
    for round in 0..200 {
        let mut junk = vec![0; random.usize(1..5000)];
        random.fill(&mut junk);
        let bytes = match round % 3 {
            0 => junk,
            1 => [b"GET / HTTP/1.1\r\nhost: x\r\n\r\n".as_slice(), &junk].concat(),
            _ => [preface, settings, &junk].concat(),
        };
        let mut connection = UnixStream::connect(&agent.socket).await.unwrap();
        // The agent may close the connection during the write.
        let _ = connection.write_all(&bytes).await;
        let _ = connection.shutdown().await;
        let _ = connection.read_to_end(&mut Vec::new()).await;
    }
    others_are_served(&agent).await;
    assert_eq!(agent.process.count("panicked"), 0);
}

#[tokio::test]
async fn the_agent_does_not_buffer_for_a_client_that_never_reads_and_never_stops_sending() {
    let directory = tempfile::tempdir().unwrap();
    let agent = agent(directory.path()).await;
    others_are_served(&agent).await;
    let before = agent.memory();
    on_connection(&agent.socket, async |client| {
        let mut open = Vec::new();
        for _ in 0..20 {
            let (requests, inbound) = mpsc::channel(1);
            requests.send(request(&["default"])).await.unwrap();
            let responses = client.clone().stream_secrets(ReceiverStream::new(inbound)).await.unwrap();
            // 4 MB of requests each, as fast as the agent reads them; the responses are never read.
            let flood = tokio::spawn(async move {
                for index in 0..1000 {
                    let names = vec!["default".to_owned(), format!("{index}-{}", "x".repeat(4000))];
                    let request = DiscoveryRequest { resource_names: names, ..request(&[]) };
                    if requests.send(request).await.is_err() {
                        break;
                    }
                }
            });
            open.push((responses, flood));
        }
        others_are_served(&agent).await;
        // A stream buffers its window of 128 kB at most, and a connection 1 MB.
        let grown = agent.memory().saturating_sub(before);
        assert!(grown < 16 << 10, "{grown} kB");
        for (responses, flood) in open {
            flood.abort();
            drop(responses);
        }
    })
    .await;
}

#[tokio::test]
async fn streams_that_open_and_close_leave_nothing_behind() {
    let directory = tempfile::tempdir().unwrap();
    let mut agent = agent(directory.path()).await;
    on_connection(&agent.socket.clone(), async |client| {
        for round in 0..2000 {
            let mut stream = Stream::open(&client, &["default", "ROOTCA"]).await.unwrap();
            if round % 2 == 0 {
                stream.next().await.unwrap();
            }
        }
        // Several hundred resets at once, before any response.
        let opened: Vec<_> = (0..300).map(|_| Stream::open(&client, &["default"])).collect();
        drop(opened);
    })
    .await;
    let idle = async {
        while agent.metric("attache_streams{name=\"default\"}").await != 0.0 {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(crate::support::process::PATIENCE, idle).await.expect("streams stay");
    others_are_served(&agent).await;
}

#[tokio::test]
async fn a_call_to_an_unknown_service_is_refused_with_the_reason() {
    let directory = tempfile::tempdir().unwrap();
    let agent = agent(directory.path()).await;
    let io = UnixStream::connect(&agent.socket).await.unwrap();
    let code = attache::net::http2::with_connection(io, async |connection| {
        let origin = http::Uri::from_static("http://attache");
        let mut grpc = tonic::client::Grpc::with_origin(connection, origin);
        grpc.ready().await.unwrap();
        let codec = tonic_prost::ProstCodec::<DiscoveryRequest, DiscoveryRequest>::default();
        let path = http::uri::PathAndQuery::from_static(
            "/envoy.service.cluster.v3.ClusterDiscoveryService/FetchClusters",
        );
        grpc.unary(tonic::Request::new(request(&[])), path, codec).await.unwrap_err().code()
    });
    assert_eq!(code.await.unwrap(), Code::Unimplemented);
    others_are_served(&agent).await;
}
