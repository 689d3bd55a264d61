//! The log: what clients cause fills no disk, and a standard error that is blocked stops nothing.

use std::process::Stdio;
use std::time::Duration;

use attache::proto::envoy::service::discovery::v3::DiscoveryRequest;
use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, BufReader};
use tokio::time::timeout;
use tonic::Code;

use crate::support::envoy::http_get;
use crate::support::files::Mounted;
use crate::support::process::{Agent, PATIENCE, attache};
use crate::support::sds::{Stream, on_connection, request, served};

#[tokio::test]
async fn ten_thousand_streams_without_a_node_are_a_page_of_log() {
    let directory = tempfile::tempdir().unwrap();
    let certs = directory.path().join("certs");
    Mounted::new(&directory.path().join("ca"), "web").write(&certs);
    let mut agent = Agent::ready(directory.path(), "agent", &["--cert-dir", certs.to_str().unwrap()]).await;
    for _ in 0..10 {
        on_connection(&agent.socket.clone(), async |client| {
            for _ in 0..500 {
                let mut first = request(&["default"]);
                first.node = None;
                let refused = Stream::open_with(&client, first).await.unwrap().next().await.unwrap_err();
                assert_eq!(refused.code(), Code::InvalidArgument);
                // Names that do not exist, and files.
                let odd = ["no-such-name", "file-root:/no/such/file"];
                drop(Stream::open(&client, &odd).await.unwrap());
            }
        })
        .await;
    }
    agent.wait_metric("attache_refusals_total{reason=\"no_node\"}", 5_000).await;
    // A stream that ends at once may be gone before its request is read.
    agent.wait_metric_that("attache_refusals_total{reason=\"unknown_name\"}", |seen| seen > 4_000.0).await;
    let suppressed = agent.metric("attache_log_lines_dropped_total{reason=\"suppressed\"}").await;
    assert!(suppressed > 8_000.0, "{suppressed}");
    assert_eq!(agent.metric("attache_log_lines_dropped_total{reason=\"blocked\"}").await, 0.0);
    let log = agent.process.log();
    assert!(log.len() < 100_000, "{} bytes of log", log.len());
    // A few of each kind are there.
    assert!(log.contains("stream refused") && log.contains("resource names refused"), "{log}");
    // And their number, after a while.
    let (_, line) = agent.process.wait_log("log lines suppressed").await;
    assert!(line.contains("lines="), "{line}");
}

#[tokio::test]
async fn a_blocked_standard_error_stops_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let certs = directory.join("certs");
    Mounted::new(&directory.join("ca"), "web").write(&certs);
    let socket = directory.join("agent.sock");
    let mut command =
        attache(&["run", "--status-address", "127.0.0.1:0", "--log-level", "debug", "--socket"]);
    command.arg(&socket).arg("--cert-dir").arg(&certs).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut log = BufReader::new(child.stderr.take().unwrap());
    let mut first = String::new();
    while !first.contains(" ready ") {
        assert_ne!(timeout(PATIENCE, log.read_line(&mut first)).await.unwrap().unwrap(), 0, "{first}");
    }
    let (_, status) = first.split_once("status=").unwrap();
    let status = status.split_whitespace().next().unwrap().parse().unwrap();

    // From here on the log is not read. The agent logs a line for each name that a stream subscribes to.
    let blocked = async || {
        let (_, _, metrics) =
            timeout(PATIENCE, http_get(status, "/metrics")).await.expect("it hangs").unwrap();
        let prefix = "attache_log_lines_dropped_total{reason=\"blocked\"} ";
        metrics.lines().find_map(|line| line.strip_prefix(prefix)?.parse::<u64>().ok()).unwrap()
    };
    let long = "x".repeat(180);
    let names: Vec<_> = (0..500).map(|number| format!("file-root:/{long}{number}")).collect();
    let many = async || {
        on_connection(&socket, async |client| {
            let first = DiscoveryRequest { resource_names: names.clone(), ..request(&[]) };
            let mut stream = Stream::open_with(&client, first).await.unwrap();
            let more = Stream::open(&client, &["default"]).await.unwrap().next().await.unwrap();
            assert_eq!(more.resources.len(), 1);
            stream.is_quiet(Duration::from_millis(1)).await;
        })
        .await;
    };
    timeout(2 * PATIENCE, async {
        while blocked().await == 0 {
            many().await;
        }
    })
    .await
    .expect("the pipe takes everything");
    assert_eq!(http_get(status, "/livez").await.unwrap().0, 200);
    assert!(!served(&socket, "default").await.is_empty());

    // A reader that is back gets what there was room for, and the number of lines that are missing.
    let mut line = String::new();
    let reported = async {
        while !line.contains("log lines dropped") {
            line.clear();
            assert_ne!(log.read_line(&mut line).await.unwrap(), 0, "the log ends");
        }
    };
    timeout(PATIENCE, reported).await.expect("no line reports the dropped ones");
    assert!(line.contains("WARN") && line.contains("lines="), "{line}");

    // Blocked again: it stops nevertheless.
    let before = blocked().await;
    timeout(2 * PATIENCE, async {
        while blocked().await == before {
            many().await;
        }
    })
    .await
    .expect("the pipe takes everything");
    kill_process(Pid::from_raw(child.id().unwrap().try_into().unwrap()).unwrap(), Signal::TERM).unwrap();
    let ended = timeout(PATIENCE, child.wait()).await.expect("the agent does not stop").unwrap();
    assert_eq!(ended.code(), Some(0));
    let mut rest = Vec::new();
    log.read_to_end(&mut rest).await.unwrap();
    assert!(rest.len() < 3 << 20, "{} bytes", rest.len());
}

#[tokio::test]
async fn durations_in_json_are_numbers_with_their_unit_in_the_key() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    let (ca_dir, out) = (at("ca"), at("out"));
    let options = ["--ca", "embedded", "--ca-dir", &ca_dir, "--log-format", "json", "--log-level", "debug"];
    let more = ["--output-dir", &out, "--output-hook", "exit 3"];
    let mut agent = Agent::start(directory.path(), "agent", &[&options[..], &more].concat());
    agent.process.wait_log("output hook failed again").await;
    agent.process.wait_log("\"ready\"").await;
    let log = agent.process.log();
    let lines = log.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    let (mut keys, mut count) = (std::collections::BTreeSet::new(), 0);
    for line in lines {
        for (key, value) in line.as_object().unwrap() {
            let is_text = value.as_str().is_some_and(|text| humantime::parse_duration(text).is_ok());
            assert!(!is_text, "{key} is a duration in words: {line}");
            if key.ends_with("_ms") || key.ends_with("_s") {
                assert!(value.is_u64(), "{key}: {line}");
                keys.insert(key.clone());
            }
        }
        count += 1;
    }
    assert!(count > 5, "{log}");
    for key in ["took_ms", "after_ms", "retry_in_ms"] {
        assert!(keys.contains(key), "{key} is not among {keys:?}");
    }
}
