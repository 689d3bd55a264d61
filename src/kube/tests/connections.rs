use std::time::Duration;

use http::Method;
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout};

use super::server::{Reply, Server};
use super::{id, named, secret};
use crate::base::clock::Clock;
use crate::fs::disk::Disk;
use crate::kube::{Api as _, Cluster, ClusterConfig, Credential, Event, KubeError};
use crate::net::endpoint::Endpoint;
use crate::net::tls::Roots;

/// Watches stay open, and everything else is answered. The senders keep the watches open.
fn open_watches(
    senders: mpsc::UnboundedSender<mpsc::UnboundedSender<Result<bytes::Bytes, &'static str>>>,
) -> impl FnMut(&super::server::Seen) -> Reply + Send + 'static {
    move |request| {
        if !request.has("watch=1") {
            return Reply::Json(200, secret("tls", "1", &[]));
        }
        let (sender, receiver) = mpsc::unbounded_channel();
        let bookmark = json!({ "type": "BOOKMARK", "object": { "metadata": { "resourceVersion": "1" } } });
        sender.send(Ok(format!("{bookmark}\n").into())).unwrap();
        senders.send(sender).unwrap();
        Reply::Open(receiver)
    }
}

fn cluster(address: &str) -> Cluster {
    let endpoint = Endpoint { address: address.parse().unwrap(), roots: Roots::System, server_name: None };
    Cluster::new(ClusterConfig::new(endpoint, Credential::None), Disk::default(), Clock::system())
}

#[tokio::test]
async fn a_server_that_allows_three_streams_gets_more_connections() {
    let (senders, _kept) = mpsc::unbounded_channel();
    let server = Server::with_streams(3, open_watches(senders)).await;
    let cluster = server.cluster();
    let mut watches = Vec::new();
    for _ in 0..10 {
        let mut watch = cluster.watch(&named("tls"), None).await.unwrap();
        assert!(matches!(watch.next().await, Some(Ok(Event::Version(_)))));
        watches.push(watch);
    }
    assert!(cluster.get(&id("tls")).await.unwrap().is_some(), "a call finds a place beside them");
    assert_eq!(*server.accepted.borrow(), 4);
    let seen = server.seen();
    let on = |number| seen.iter().filter(|call| call.connection == number).count();
    assert_eq!([on(1), on(2), on(3), on(4)], [3, 3, 3, 2]);
}

#[tokio::test]
async fn calls_that_begin_together_share_one_new_connection() {
    let server = Server::start(|_| Reply::Json(200, secret("tls", "1", &[]))).await;
    let cluster = server.cluster();
    let mut calls = tokio::task::JoinSet::new();
    for _ in 0..100 {
        let cluster = cluster.clone();
        calls.spawn(async move { cluster.get(&id("tls")).await.unwrap().unwrap() });
    }
    assert_eq!(calls.join_all().await.len(), 100);
    assert_eq!(*server.accepted.borrow(), 1);
}

#[tokio::test]
async fn after_goaway_calls_use_a_new_connection_and_open_watches_go_on() {
    let (senders, mut kept) = mpsc::unbounded_channel();
    let server = Server::start(open_watches(senders)).await;
    let cluster = server.cluster();
    let mut watch = cluster.watch(&named("tls"), None).await.unwrap();
    watch.next().await.unwrap().unwrap();
    server.goaway();
    for _ in 0..5 {
        assert!(cluster.get(&id("tls")).await.unwrap().is_some());
    }
    let sender = kept.recv().await.unwrap();
    let event = json!({ "type": "ADDED", "object": secret("tls", "2", &[]) });
    sender.send(Ok(format!("{event}\n").into())).unwrap();
    assert!(matches!(watch.next().await, Some(Ok(Event::Object(_)))));
    drop(sender);
    assert!(watch.next().await.is_none());
    let mut closed = server.closed.clone();
    closed.wait_for(|closed| *closed == 1).await.unwrap();
    assert_eq!(*server.accepted.borrow(), 2);
}

#[tokio::test]
async fn a_restarted_server_is_called_on_a_new_connection() {
    let first = Server::start(|_| Reply::Json(200, secret("tls", "1", &[]))).await;
    let cluster = first.cluster();
    assert!(cluster.get(&id("tls")).await.unwrap().is_some());
    let address = first.stop().await;
    let listener = TcpListener::bind(address).await.unwrap();
    let server = tokio::spawn(async move {
        let (io, _) = listener.accept().await.unwrap();
        let mut connection = h2::server::handshake(io).await.unwrap();
        while let Some(Ok((_, mut answer))) = connection.accept().await {
            let mut body = answer.send_response(http::Response::new(()), false).unwrap();
            body.send_data(secret("tls", "2", &[]).to_string().into(), true).unwrap();
        }
    });
    let found = cluster.get(&id("tls")).await.unwrap().unwrap();
    assert_eq!(&*found.version.0, "2");
    server.abort();
}

#[tokio::test]
async fn a_call_that_the_server_has_not_processed_is_sent_again_and_no_other_is() {
    for (reason, is_repeated) in [(h2::Reason::REFUSED_STREAM, true), (h2::Reason::INTERNAL_ERROR, false)] {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let server = tokio::spawn(async move {
            let (io, _) = listener.accept().await.unwrap();
            let mut connection = h2::server::handshake(io).await.unwrap();
            let mut calls = 0;
            while let Some(Ok((_, mut answer))) = connection.accept().await {
                calls += 1;
                if calls == 1 {
                    answer.send_reset(reason);
                    continue;
                }
                let mut body = answer.send_response(http::Response::new(()), false).unwrap();
                body.send_data("{}".into(), true).unwrap();
            }
        });
        let made = cluster(&format!("http://{address}")).call(Method::POST, "/x", None).await;
        assert_eq!(made.is_ok(), is_repeated, "{made:?}");
        server.abort();
    }
}

/// A server that answers nothing after a while: all it gets after that goes nowhere.
async fn falls_silent(answers: bool) -> (Cluster, tokio::task::JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let task = tokio::spawn(async move {
        let (io, _) = listener.accept().await.unwrap();
        if !answers {
            return std::future::pending().await;
        }
        let mut connection = h2::server::handshake(io).await.unwrap();
        let (_request, mut answer) = connection.accept().await.unwrap().unwrap();
        let mut body = answer.send_response(http::Response::new(()), false).unwrap();
        let bookmark = "{\"type\":\"BOOKMARK\",\"object\":{\"metadata\":{\"resourceVersion\":\"1\"}}}\n";
        body.send_data(bookmark.into(), false).unwrap();
        // Sends what is to be sent, and stops.
        let _ = timeout(Duration::from_millis(100), connection.accept()).await;
        std::future::pending::<()>().await;
        drop(body);
    });
    (cluster(&format!("http://{address}")), task)
}

#[tokio::test(start_paused = true)]
async fn a_watch_on_a_silent_connection_fails_within_thirty_seconds() {
    let (cluster, server) = falls_silent(true).await;
    let mut watch = cluster.watch(&named("tls"), None).await.unwrap();
    watch.next().await.unwrap().unwrap();
    let began = Instant::now();
    let error = watch.next().await.unwrap().unwrap_err();
    assert!(error.to_string().contains("does not answer a ping within 10s"), "{error}");
    assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
    server.abort();
}

#[tokio::test(start_paused = true)]
async fn a_server_that_answers_nothing_is_silent_after_the_deadline() {
    let server = Server::start(|_| Reply::Never).await;
    let error = server.cluster().get(&id("tls")).await.unwrap_err();
    assert!(matches!(&error, KubeError::Silent { .. }), "{error}");
    assert!(error.to_string().contains("did not answer within 10s"), "{error}");
    let error = server.cluster().watch(&named("tls"), None).await.unwrap_err();
    assert!(matches!(&error, KubeError::Silent { .. }), "{error}");
    let (cluster, server) = falls_silent(false).await;
    let error = cluster.get(&id("tls")).await.unwrap_err().to_string();
    assert!(error.contains("answers no HTTP/2 within 3s"), "{error}");
    server.abort();
}

#[tokio::test]
async fn a_server_that_only_speaks_http1_is_named_as_such() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let server = tokio::spawn(async move {
        let (mut io, _) = listener.accept().await.unwrap();
        let _ = io.read(&mut [0; 24]).await;
        io.write_all(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n400 Bad Request").await.unwrap();
        io.flush().await.unwrap();
        std::future::pending::<()>().await;
    });
    let error = cluster(&format!("http://{address}")).get(&id("tls")).await.unwrap_err().to_string();
    assert!(error.contains("does not speak HTTP/2"), "{error}");
    server.abort();
}

#[tokio::test]
async fn an_idle_connection_is_closed_and_the_next_call_opens_another_one() {
    let server = Server::start(|_| Reply::Json(200, secret("tls", "1", &[]))).await;
    let cluster = server.cluster();
    cluster.get(&id("tls")).await.unwrap();
    tokio::time::pause();
    let mut closed = server.closed.clone();
    closed.wait_for(|closed| *closed == 1).await.unwrap();
    tokio::time::resume();
    cluster.get(&id("tls")).await.unwrap();
    assert_eq!(*server.accepted.borrow(), 2);
}

#[tokio::test]
async fn an_unreachable_server_is_named_as_such() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    let error = cluster(&format!("http://{address}")).get(&id("tls")).await.unwrap_err();
    assert!(
        matches!(error, KubeError::Unreachable { .. }) && error.to_string().contains("connecting failed"),
        "{error}"
    );
}
