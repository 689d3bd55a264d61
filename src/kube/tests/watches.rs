use bytes::Bytes;
use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::server::{Reply, Server};
use super::{named, secret, status, wanted};
use crate::base::limits;
use crate::kube::{Api as _, Event, KubeError, Version, Watch};

type Sender = mpsc::UnboundedSender<Result<Bytes, &'static str>>;

/// A server with one watch, and what it sends.
async fn watched() -> (Server, Sender) {
    let (sender, receiver) = mpsc::unbounded_channel();
    let mut receiver = Some(receiver);
    let server = Server::start(move |_| match receiver.take() {
        Some(receiver) => Reply::Open(receiver),
        None => Reply::Never,
    });
    (server.await, sender)
}

fn line(kind: &str, object: &Value) -> Result<Bytes, &'static str> {
    Ok(format!("{}\n", json!({ "type": kind, "object": object })).into())
}

async fn version(watch: &mut Watch) -> String {
    match watch.next().await {
        Some(Ok(Event::Version(Version(version)))) => version.into(),
        other => panic!("no version: {other:?}"),
    }
}

async fn failure(watch: &mut Watch) -> KubeError {
    let error = watch.next().await.unwrap().unwrap_err();
    assert!(watch.next().await.is_none(), "an error is the last item");
    error
}

#[tokio::test]
async fn changes_arrive_as_events() {
    let (server, sender) = watched().await;
    let mut watch = server.cluster().watch(&named("tls"), Some(&Version("5".into()))).await.unwrap();
    sender.send(line("ADDED", &secret("tls", "6", &[("k", "1")]))).unwrap();
    sender.send(line("MODIFIED", &secret("tls", "7", &[("k", "2")]))).unwrap();
    sender.send(line("DELETED", &secret("tls", "8", &[("k", "2")]))).unwrap();
    let bookmark = json!({ "kind": "Secret", "apiVersion": "v1", "metadata": { "resourceVersion": "99", "creationTimestamp": null } });
    sender.send(line("BOOKMARK", &bookmark)).unwrap();
    for (expected, data) in [("6", b"1"), ("7", b"2")] {
        let Some(Ok(Event::Object(object))) = watch.next().await else { panic!("no object") };
        assert_eq!((&*object.version.0, object.data["k"].as_slice()), (expected, &data[..]));
    }
    let Some(Ok(Event::Deleted { name, version: Version(at) })) = watch.next().await else {
        panic!("not deleted")
    };
    assert_eq!((&*name, &*at), ("tls", "8"));
    assert_eq!(version(&mut watch).await, "99");
    drop(sender);
    assert!(watch.next().await.is_none(), "the server ended it");
    let call = &server.seen()[0];
    for parameter in
        ["watch=1", "allowWatchBookmarks=true", "resourceVersion=5", "fieldSelector=metadata.name%3Dtls"]
    {
        assert!(call.has(parameter), "{}", call.path);
    }
    let timeout = call.path.split_once("timeoutSeconds=").unwrap().1;
    let timeout: u32 = timeout.split('&').next().unwrap().parse().unwrap();
    assert!((3_000..3_600).contains(&timeout), "{timeout}");
}

#[tokio::test]
async fn events_are_found_however_they_are_cut_and_ordered() {
    let (server, sender) = watched().await;
    let mut watch = server.cluster().watch(&named("tls"), None).await.unwrap();
    let mut text = Vec::new();
    // The type after the object, and the metadata after the data, as some proxies and fakes sort them.
    text.extend_from_slice(
        b"{\"object\":{\"data\":{\"k\":\"AQID\"},\"metadata\":{\"resourceVersion\":\"1\",\"namespace\":\"gw\",\"name\":\"tls\"}},\"type\":\"ADDED\"}\r\n\n",
    );
    text.extend_from_slice(&line("MODIFIED", &secret("tls", "2", &[("k", "x")])).unwrap());
    text.extend_from_slice(&line("MODIFIED", &secret("tls", "3", &[("k", "y")])).unwrap());
    for piece in text.chunks(7) {
        sender.send(Ok(Bytes::copy_from_slice(piece))).unwrap();
    }
    for (expected, data) in [("1", &[1, 2, 3][..]), ("2", b"x"), ("3", b"y")] {
        let Some(Ok(Event::Object(object))) = watch.next().await else { panic!("no object") };
        assert_eq!((&*object.version.0, object.data["k"].as_slice()), (expected, data));
    }
    assert!(!server.seen()[0].path.contains("resourceVersion"), "it begins with what there is");
}

#[tokio::test]
async fn unrelated_objects_only_advance_the_version() {
    let (server, sender) = watched().await;
    let mut watch = server.cluster().watch(&wanted(|name| name == "tls"), None).await.unwrap();
    let mut damaged = secret("other", "4", &[]);
    damaged["data"] = json!({ "k": "not base64" });
    sender.send(line("ADDED", &damaged)).unwrap();
    sender.send(line("DELETED", &secret("another", "5", &[]))).unwrap();
    sender.send(line("ADDED", &secret("tls", "6", &[]))).unwrap();
    assert_eq!(version(&mut watch).await, "4");
    assert_eq!(version(&mut watch).await, "5");
    assert!(matches!(watch.next().await, Some(Ok(Event::Object(object))) if &*object.name == "tls"));
}

#[tokio::test]
async fn a_version_that_is_too_old_is_expired_before_and_during_a_watch() {
    let expired = status(410, "Expired", "too old resource version: 1 (5)");
    let answer = expired.clone();
    let server = Server::start(move |_| Reply::Json(410, answer.clone())).await;
    let error = server.cluster().watch(&named("tls"), Some(&Version("1".into()))).await.unwrap_err();
    assert!(matches!(error, KubeError::Expired { .. }), "{error}");
    let (server, sender) = watched().await;
    let mut watch = server.cluster().watch(&named("tls"), None).await.unwrap();
    sender.send(line("ERROR", &expired)).unwrap();
    assert!(matches!(failure(&mut watch).await, KubeError::Expired { .. }));
}

#[tokio::test]
async fn another_error_event_keeps_its_words_and_its_delay() {
    let (server, sender) = watched().await;
    let mut watch = server.cluster().watch(&named("tls"), None).await.unwrap();
    let mut failed = status(429, "TooManyRequests", "storage is (re)initializing");
    failed["details"] = json!({ "retryAfterSeconds": 3 });
    sender.send(line("ERROR", &failed)).unwrap();
    let error = failure(&mut watch).await;
    assert_eq!(error.retry_after().unwrap().as_secs(), 3);
    assert!(error.to_string().contains("429") && error.to_string().contains("initializing"), "{error}");
}

#[tokio::test]
async fn junk_ends_a_watch_and_is_not_shown() {
    let mut foreign = secret("tls", "1", &[("k", "hidden")]);
    foreign["metadata"]["namespace"] = json!("other");
    let mut no_version = secret("tls", "", &[("k", "hidden")]);
    no_version["metadata"]["resourceVersion"] = json!(null);
    let cases: [(Bytes, &str); 7] = [
        ("hidden\n".into(), "JSON"),
        ("[\"hidden\"]\n".into(), "JSON"),
        ("{}\n".into(), "type \"\""),
        (line("GONE\u{1b}", &json!({})).unwrap(), "type \"GONE"),
        (line("ADDED", &foreign).unwrap(), "namespace \"other\""),
        (line("ADDED", &no_version).unwrap(), "resourceVersion"),
        ("{\"type\":\"ADDED\",\"object\":{\"metadata\":{\"name\":\"tls\",\"namespace\":\"gw\",\"resourceVersion\":\"1\"},\"data\":{\"k\":\"hid\n".into(), "JSON"),
    ];
    for (bytes, words) in cases {
        let (server, sender) = watched().await;
        let mut watch = server.cluster().watch(&named("tls"), None).await.unwrap();
        sender.send(Ok(bytes)).unwrap();
        let error = failure(&mut watch).await.to_string();
        assert!(error.contains(words) && !error.contains("hid"), "{error}");
        assert!(!error.contains(char::is_control), "{error}");
    }
}

#[tokio::test]
async fn an_event_that_is_cut_off_is_a_broken_watch() {
    for is_reset in [false, true] {
        let (server, sender) = watched().await;
        let mut watch = server.cluster().watch(&named("tls"), None).await.unwrap();
        sender.send(Ok("{\"type\":\"ADDED\",".into())).unwrap();
        if is_reset {
            sender.send(Err("reset")).unwrap();
        }
        drop(sender);
        let error = failure(&mut watch).await;
        assert!(matches!(error, KubeError::Unreachable { .. }), "{error}");
    }
}

#[tokio::test]
async fn an_event_without_end_ends_the_watch() {
    let (server, sender) = watched().await;
    let mut watch = server.cluster().watch(&named("tls"), None).await.unwrap();
    for _ in 0..=limits::KUBE_OBJECT_BYTES >> 16 {
        sender.send(Ok(vec![b' '; 1 << 16].into())).unwrap();
    }
    let error = failure(&mut watch).await;
    assert!(error.to_string().contains("longer than 3145728 bytes"), "{error}");
}
