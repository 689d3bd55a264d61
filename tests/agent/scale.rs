//! As many streams as a large gateway opens, on one connection and on many.

use std::path::PathBuf;
use std::rc::Rc;
use std::task::Poll;

use attache::proto::envoy::service::discovery::v3::{DeltaDiscoveryResponse, DiscoveryResponse};
use tokio::sync::Barrier;
use tokio::task::{JoinSet, LocalSet};

use crate::support::files::Mounted;
use crate::support::process::Agent;
use crate::support::sds::{Client, DeltaStream, Stream, on_connection};

/// Streams on each connection: many on one, few on many.
const CONNECTIONS: [(usize, usize); 2] = [(1, 5_000), (100, 50)];
const STREAMS: usize = 10_000;

/// Streams of alternating dialects.
enum Either {
    InFull(Stream, Option<DiscoveryResponse>),
    Delta(DeltaStream, Option<DeltaDiscoveryResponse>),
}

impl Either {
    async fn open(client: &Client, is_delta: bool) -> Self {
        if !is_delta {
            return Self::InFull(Stream::open(client, &["default"]).await.unwrap(), None);
        }
        Self::Delta(DeltaStream::open(client, &["default"]).await.unwrap(), None)
    }

    /// The version of the only secret in the next response.
    async fn next(&mut self) -> String {
        match self {
            Self::InFull(stream, last) => {
                let response = stream.next().await.unwrap();
                assert_eq!(response.resources.len(), 1);
                last.insert(response).version_info.clone()
            }
            Self::Delta(stream, last) => {
                let response = stream.next().await.unwrap();
                assert_eq!(response.resources.len(), 1);
                last.insert(response).resources[0].version.clone()
            }
        }
    }

    /// Accepts the last response.
    async fn accept(&self) {
        match self {
            Self::InFull(stream, last) => stream.accept(last.as_ref().unwrap()).await,
            Self::Delta(stream, last) => stream.accept(last.as_ref().unwrap()).await,
        }
    }

    /// Whether there is no unread response.
    async fn is_quiet(&mut self) -> bool {
        let mut next = std::pin::pin!(self.next());
        std::future::poll_fn(|cx| Poll::Ready(next.as_mut().poll(cx).is_pending())).await
    }
}

/// `count` streams on a connection of their own; each step starts when all other connections have reached it.
async fn connection(socket: PathBuf, count: usize, part: Rc<Barrier>) {
    on_connection(&socket, async |client| {
        let mut streams = Vec::new();
        for index in 0..count {
            streams.push(Either::open(&client, index % 2 == 1).await);
        }
        let mut before = String::new();
        for _ in 0..2 {
            // Concurrently: unread responses must not delay the one that is read next.
            let mut reads = JoinSet::new();
            for mut stream in streams.drain(..) {
                reads.spawn_local(async { (stream.next().await, stream) });
            }
            let mut version = None;
            while let Some(read) = reads.join_next().await {
                let (sent, stream) = read.unwrap();
                assert_ne!(sent, before);
                assert_eq!(*version.get_or_insert_with(|| sent.clone()), sent);
                streams.push(stream);
            }
            before = version.unwrap();
            // At once, like the workers of an Envoy.
            for stream in &streams {
                stream.accept().await;
            }
            part.wait().await;
        }
        // The agent has processed every ACK: any further response would have arrived by now.
        part.wait().await;
        for stream in &mut streams {
            assert!(stream.is_quiet().await, "more than one response to a change");
        }
    })
    .await;
}

#[tokio::test]
async fn ten_thousand_streams_get_each_change_once_and_leave_nothing_behind() {
    let directory = tempfile::tempdir().unwrap();
    let (ca, dir) = (directory.path().join("ca"), directory.path().join("certs"));
    Mounted::new(&ca, "web").write(&dir);
    let mut agent = Agent::ready(directory.path(), "agent", &["--cert-dir", dir.to_str().unwrap()]).await;
    let local = LocalSet::new();
    let waves = local.run_until(async {
        let mut open = [0; 2];
        for (wave, open) in (1..).zip(&mut open) {
            let connections: usize = CONNECTIONS.iter().map(|(connections, _)| connections).sum();
            let part = Rc::new(Barrier::new(connections + 1));
            let mut tasks = JoinSet::new();
            for (connections, streams) in CONNECTIONS {
                for _ in 0..connections {
                    tasks.spawn_local(connection(agent.socket.clone(), streams, Rc::clone(&part)));
                }
            }
            let mut parts = async || {
                tokio::select! {
                    _ = part.wait() => {}
                    Some(ended) = tasks.join_next() => panic!("a connection ended: {ended:?}"),
                }
            };
            let acks = |times: usize| (2 * (wave - 1) + times) * STREAMS;
            parts().await;
            agent.wait_metric("attache_acks_total{name=\"default\"}", acks(1)).await;
            assert_eq!(agent.metric("attache_streams{name=\"default\"}").await, STREAMS as f64);
            *open = agent.memory();
            Mounted::new(&ca, "web").write(&dir);
            parts().await;
            agent.wait_metric("attache_acks_total{name=\"default\"}", acks(2)).await;
            assert_eq!(agent.metric("attache_pushes_total{name=\"default\"}").await, acks(2) as f64);
            parts().await;
            while let Some(ended) = tasks.join_next().await {
                ended.unwrap();
            }
            agent.wait_metric("attache_streams{name=\"default\"}", 0).await;
        }
        open
    });
    // The memory of the first wave is free for the second. The process may still hold it: glibc keeps memory below a
    // page in use, and spreads the second wave over more of it. musl, which the image uses, does not.
    let [first, second] = waves.await;
    assert!(
        second < first * 8 / 5,
        "{STREAMS} streams took {first} kB, and {second} kB when they came again"
    );
}
