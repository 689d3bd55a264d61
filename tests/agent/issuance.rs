//! The calls to a CA, how many there are, and how responses are handled.

use std::time::Duration;

use attache::proto::envoy::service::discovery::v3::DiscoveryRequest;
use rustix::process::Signal;
use tonic::Code;

use crate::support::fake_ca::{FakeCa, Mood};
use crate::support::files::{silent_server, spiffe, token};
use crate::support::process::{Agent, Ca, strs};
use crate::support::sds::{Stream, on_connection, request, secrets};

#[tokio::test]
async fn a_hundred_streams_cost_one_call_per_renewal() {
    let directory = tempfile::tempdir().unwrap();
    let ca = FakeCa::start(directory.path(), &spiffe("web")).await;
    let mut options = ca.client(directory.path());
    options.extend(["--cert-ttl", "6s", "--ca-header", "x-tenant=blue"].map(str::to_owned));
    let mut agent = Agent::start(directory.path(), "web", &strs(&options));
    agent.process.wait_log("attache serves").await;

    on_connection(&agent.socket.clone(), async |client| {
        let mut streams = Vec::new();
        for _ in 0..100 {
            streams.push(Stream::open(&client, &["default"]).await.unwrap());
        }
        for generation in 1..=3 {
            for stream in &mut streams {
                let response = stream.next().await.unwrap();
                stream.accept(&response).await;
            }
            assert_eq!(agent.process.count("certificate issued"), generation);
        }
        assert_eq!(agent.metric("attache_streams{name=\"default\"}").await, 100.0);
        assert_eq!(agent.metric("attache_pushes_total{name=\"default\"}").await, 300.0);
    })
    .await;
    let calls = ca.calls();
    assert_eq!(calls.len(), 3);
    let csrs: std::collections::HashSet<_> = calls.iter().map(|call| &call.request.csr).collect();
    assert_eq!(csrs.len(), 3, "each with a key of its own");
    let call = &calls[0];
    assert_eq!(call.request.validity_duration, 6);
    let header = |name| call.metadata.get(name).unwrap().to_str().unwrap();
    let token = std::fs::read_to_string(directory.path().join("token")).unwrap();
    assert_eq!(header("authorization"), format!("Bearer {token}"));
    assert_eq!((header("clusterid"), header("x-tenant")), ("Kubernetes", "blue"));
}

#[tokio::test]
async fn a_token_can_be_missing_empty_expired_and_rotated() {
    let directory = tempfile::tempdir().unwrap();
    let ca = Ca::start(directory.path()).await;
    let options = ca.client("web");
    let file = directory.path().join("web.token");
    std::fs::remove_file(&file).unwrap();
    let mut agent = Agent::start(directory.path(), "web", &strs(&options));

    let path = file.display().to_string();
    let cases = [
        (None, "can't be read"),
        (Some(String::new()), "is empty"),
        (Some("two\nlines".to_owned()), "one line of printable ASCII"),
        (Some(token("web", "istio-ca", -60)), "EXPIRED at"),
        (Some(token("web", "vault", 60)), "audience [vault]"),
    ];
    for (content, words) in cases {
        if let Some(content) = content {
            std::fs::write(&file, content).unwrap();
        }
        let (_, line) = agent.process.wait_log(words).await;
        assert!(line.contains("WARN") && line.contains(&path), "{line}");
        let (status, body) = agent.status("/readyz").await;
        assert_eq!(status, 503);
        assert!(body.starts_with("default: ") && body.contains("\nROOTCA: "), "{body}");
    }
    std::fs::write(&file, token("web", "istio-ca", 60)).unwrap();
    agent.process.wait_log("ready").await;
    assert!(agent.process.log().contains(&format!("identity=\"{}\"", spiffe("web"))));
    let log = agent.process.log();
    for part in token("web", "istio-ca", 60).split('.') {
        assert!(!log.contains(part), "a token is in the log:\n{log}");
    }
}

#[tokio::test]
async fn what_prevents_a_connection_to_the_ca_is_reported_with_the_remedy() {
    let directory = tempfile::tempdir().unwrap();
    let ca = Ca::start(directory.path()).await;
    let other = tempfile::tempdir().unwrap();
    let _other_ca = Ca::start(other.path()).await;
    let other_root = other.path().join("ca/root-cert.pem").display().to_string();
    let (_silent, silent_port) = silent_server().await;
    let token = |options: &mut Vec<String>, from: &[&str]| {
        // Repeating a flag is an error, so values are replaced.
        for pair in from.chunks(2) {
            match options.iter().position(|option| option == pair[0]) {
                Some(at) => options[at + 1] = pair[1].to_owned(),
                None => options.extend(pair.iter().map(|text| (*text).to_owned())),
            }
        }
    };
    let silent = format!("https://127.0.0.1:{silent_port}");
    let plain = format!("http://{}", ca.address);
    let cases: [(&[&str], &[&str]); 6] = [
        (&["--ca-address", "127.0.0.1:1"], &["Connection refused", "--ca-address"]),
        (&["--ca-root", &other_root], &["not signed by", &other_root, "--ca-root"]),
        (&["--ca-server-name", "elsewhere"], &["not for the name elsewhere", "--ca-server-name"]),
        (&["--ca-root", "/nowhere.pem"], &["/nowhere.pem", "--ca-root"]),
        (&["--ca-address", &silent, "--ca-timeout", "500ms"], &["answers no TLS handshake within 400ms"]),
        (&["--ca-address", &plain], &[&plain]),
    ];
    for (index, (changes, words)) in cases.into_iter().enumerate() {
        let mut options = ca.client("web");
        token(&mut options, changes);
        let mut agent = Agent::start(directory.path(), &format!("agent{index}"), &strs(&options));
        let (_, line) = agent.process.wait_log("no new certificate").await;
        for word in words {
            assert!(line.contains(word), "{changes:?}: {line}");
        }
        agent.process.signal(Signal::TERM);
        assert!(agent.process.ended().await.success());
    }
}

#[tokio::test]
async fn a_name_that_is_not_ready_is_sent_once_it_is_and_fetch_reports_the_cause() {
    let directory = tempfile::tempdir().unwrap();
    let ca = FakeCa::start(directory.path(), &spiffe("web")).await;
    ca.set(Mood::Refuse(Code::PermissionDenied));
    let mut agent = Agent::start(directory.path(), "web", &strs(&ca.client(directory.path())));
    agent.process.wait_log("no new certificate").await;
    on_connection(&agent.socket.clone(), async |mut client| {
        let mut stream = Stream::open(&client, &["default", "ROOTCA", "unknown"]).await.unwrap();
        let mut fetch = tonic::Request::new(request(&["default"]));
        fetch.set_timeout(Duration::from_millis(300));
        let status = client.fetch_secrets(fetch).await.unwrap_err();
        assert_eq!(status.code(), Code::Unavailable);
        assert!(
            status.message().contains("\"default\"") && status.message().contains("PermissionDenied"),
            "{status}"
        );
        let many: Vec<_> = (0..5000).map(|index| format!("name-{index}")).collect();
        let status = client.fetch_secrets(request(&strs(&many))).await.unwrap_err();
        assert!(status.message().ends_with("and 4997 more") && status.message().len() < 1000, "{status}");
        let status = client.fetch_secrets(request(&["unknown"])).await.unwrap_err();
        assert_eq!(status.code(), Code::NotFound);
        assert!(status.message().contains("unknown resource name \"unknown\""), "{status}");

        ca.set(Mood::Good);
        let mut names = Vec::new();
        while names.len() < 2 {
            let response = stream.next().await.unwrap();
            names.extend(secrets(&response).into_iter().map(|secret| secret.name));
            stream.accept(&response).await;
        }
        names.sort();
        assert_eq!(names, ["ROOTCA", "default"]);
        let both =
            client.fetch_secrets(request(&["default", "unknown", "ROOTCA"])).await.unwrap().into_inner();
        assert_eq!(both.resources.len(), 2, "what there is is answered");
    })
    .await;
    assert_eq!(agent.process.count("resource names refused"), 1);
}

#[tokio::test]
async fn bad_requests_end_only_their_own_stream() {
    let directory = tempfile::tempdir().unwrap();
    let ca_dir = directory.path().join("ca");
    let options = ["--ca", "embedded", "--ca-dir", ca_dir.to_str().unwrap()];
    let agent = Agent::ready(directory.path(), "web", &options).await;
    on_connection(&agent.socket, async |client| {
        let mut good = Stream::open(&client, &["ROOTCA"]).await.unwrap();
        let response = good.next().await.unwrap();
        let foreign = "type.googleapis.com/envoy.config.cluster.v3.Cluster".to_owned();
        let many = (0..10_001).map(|index| index.to_string()).collect();
        let cases = [
            (DiscoveryRequest { node: None, ..request(&["default"]) }, Code::InvalidArgument, "node id"),
            (
                DiscoveryRequest { type_url: foreign, ..request(&["default"]) },
                Code::InvalidArgument,
                "Cluster",
            ),
            (DiscoveryRequest { resource_names: many, ..request(&[]) }, Code::ResourceExhausted, "10000"),
            (request(&[&"x".repeat(2 << 20)]), Code::OutOfRange, "too large"),
        ];
        for (bad, code, words) in cases {
            let opened = Stream::open_with(&client, bad).await;
            let status = match opened {
                Ok(mut stream) => stream.next().await.unwrap_err(),
                Err(status) => status,
            };
            assert_eq!(status.code(), code, "{status}");
            assert!(status.message().contains(words), "{status}");
        }
        good.accept(&response).await;
        assert!(good.is_quiet(Duration::from_millis(200)).await);
        let mut another = Stream::open(&client, &["ROOTCA"]).await.unwrap();
        assert_eq!(another.next().await.unwrap().version_info, response.version_info);
    })
    .await;
    assert_eq!(agent.process.count("panicked"), 0);
}

#[tokio::test]
async fn a_thousand_streams_on_one_connection_all_get_their_secret() {
    let directory = tempfile::tempdir().unwrap();
    let ca_dir = directory.path().join("ca");
    let options = ["--ca", "embedded", "--ca-dir", ca_dir.to_str().unwrap()];
    let mut agent = Agent::ready(directory.path(), "web", &options).await;
    on_connection(&agent.socket.clone(), async |client| {
        let mut streams = Vec::new();
        for _ in 0..1000 {
            streams.push(Stream::open(&client, &["default"]).await.unwrap());
        }
        for stream in &mut streams {
            let response = stream.next().await.unwrap();
            stream.accept(&response).await;
        }
        assert_eq!(agent.metric("attache_streams{name=\"default\"}").await, 1000.0);
        // A stream that rejects: its reason is logged, once.
        let mut stream = Stream::open(&client, &["default"]).await.unwrap();
        let response = stream.next().await.unwrap();
        stream.reject(&response, "no thanks\nreally").await;
        let (_, line) = agent.process.wait_log("Envoy rejected a secret").await;
        assert!(line.contains("no thanks\u{fffd}really"), "{line}");
        assert_eq!(agent.metric("attache_nacks_total{name=\"default\"}").await, 1.0);
        assert_eq!(agent.metric("attache_secret_rejected{name=\"default\"}").await, 1.0);
    })
    .await;
}
