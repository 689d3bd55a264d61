//! Real Envoys that the agent keeps running.

use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use attache::pki::key::PrivateKey;
use attache::pki::pem;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;

use crate::support::envoy::{NEWEST, OLDEST, binary_of};
use crate::support::files::Mounted;
use crate::support::nginx::Client;
use crate::support::process::{Agent, output, strs};
use crate::support::wait::{wait_for, wait_until};

/// An agent with a real Envoy that answers on `listener`.
struct Served {
    agent: Agent,
    listener: SocketAddr,
    bootstrap: PathBuf,
    _directory: tempfile::TempDir,
}

/// A port that is free now.
fn free() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}

/// A listener that answers each request with `body`, after a while, and one with the agent's certificate.
fn bootstrap(listener: SocketAddr, socket: &Path, body: &str) -> Value {
    let hcm = json!({
        "@type": "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "in",
        "route_config": { "virtual_hosts": [{
            "name": "all", "domains": ["*"],
            "routes": [{ "match": { "prefix": "/" }, "direct_response": { "status": 200, "body": { "inline_string": body } } }],
        }] },
        "http_filters": [{
            "name": "router",
            "typed_config": { "@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router" },
        }],
    });
    let address =
        |at: SocketAddr| json!({ "socket_address": { "address": "127.0.0.1", "port_value": at.port() } });
    let sds = json!({
        "resource_api_version": "V3",
        "api_config_source": {
            "api_type": "GRPC", "transport_api_version": "V3",
            "grpc_services": [{ "envoy_grpc": { "cluster_name": "sds" } }],
        },
    });
    let tls = json!({ "name": "tls", "typed_config": {
        "@type": "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext",
        "common_tls_context": { "tls_certificate_sds_secret_configs": [{ "name": "default", "sds_config": sds }] },
    } });
    let filters = json!([{ "name": "hcm", "typed_config": hcm }]);
    json!({
        "node": { "id": "supervised", "cluster": "test" },
        "admin": { "address": address("127.0.0.1:0".parse().unwrap()) },
        "static_resources": {
            "listeners": [
                { "name": "in", "address": address(listener), "filter_chains": [{ "filters": filters }] },
                {
                    "name": "tls", "address": address("127.0.0.1:0".parse().unwrap()),
                    "filter_chains": [{ "filters": filters, "transport_socket": tls }],
                },
            ],
            "clusters": [{
                "name": "sds", "connect_timeout": "1s",
                "load_assignment": { "cluster_name": "sds", "endpoints": [{ "lb_endpoints": [{ "endpoint": {
                    "address": { "pipe": { "path": socket } },
                } }] }] },
                "typed_extension_protocol_options": { "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                    "@type": "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
                    "explicit_http_config": { "http2_protocol_options": {} },
                } },
            }],
        },
    })
}

impl Served {
    async fn start(version: &str, options: &[&str]) -> Self {
        // Tests run side by side: each Envoy has a base id that no other one has.
        let options = [&["--drain-time", "1s"], options].concat();
        Self::start_as(version, &options, &["--use-dynamic-base-id"]).await
    }

    async fn start_as(version: &str, options: &[&str], arguments: &[&str]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let (listener, path) = (free(), directory.path().join("envoy.json"));
        let socket = directory.path().join("a.sock");
        std::fs::write(&path, bootstrap(listener, &socket, "one").to_string()).unwrap();
        let (ca, bootstrap) = (directory.path().join("ca").display().to_string(), path.display().to_string());
        let envoy = binary_of(version).await.display().to_string();
        let mut all: Vec<String> =
            ["--ca", "embedded", "--ca-dir", &ca, "--restart-on", &bootstrap].map(str::to_owned).to_vec();
        all.extend(options.iter().map(|&option| option.to_owned()));
        let command = ["--", &envoy, "-c", &bootstrap, "--concurrency", "1", "--log-level", "warning"];
        all.extend(command.iter().chain(arguments).map(|&word| word.to_owned()));
        let mut agent = Agent::start(directory.path(), "a", &strs(&all));
        agent.process.wait_log("command live").await;
        Self { agent, listener, bootstrap: path, _directory: directory }
    }

    /// Has Envoy answer with `body` from its next epoch on.
    fn change(&self, body: &str) {
        let text = bootstrap(self.listener, &self.agent.socket, body).to_string();
        std::fs::write(&self.bootstrap, text).unwrap();
    }

    async fn answers(&self, body: &str) {
        wait_for(&format!("Envoy answers {body}"), async || {
            let answer = request(self.listener).await.ok()?;
            (answer == body).then_some(())
        })
        .await;
    }

    async fn command(&self) -> Value {
        let socket = self.agent.socket.display().to_string();
        let output = output(&["status", "--output", "json", "--socket", &socket]).await;
        serde_json::from_slice::<Value>(&output.stdout).unwrap()["command"].clone()
    }

    async fn pid(&self) -> Pid {
        let command = self.command().await;
        let pid = command["epochs"].as_array().unwrap().last().unwrap()["pid"].as_i64().unwrap();
        Pid::from_raw(pid.try_into().unwrap()).unwrap()
    }
}

/// The body of an answer, on a connection of its own.
async fn request(to: SocketAddr) -> std::io::Result<String> {
    let mut stream = TcpStream::connect(to).await?;
    exchange(&mut stream, "connection: close\r\n").await.map(|(body, _)| body)
}

/// The body of one answer, and whether the connection stays.
async fn exchange(stream: &mut TcpStream, header: &str) -> std::io::Result<(String, bool)> {
    stream.write_all(format!("GET / HTTP/1.1\r\nhost: a\r\n{header}\r\n").as_bytes()).await?;
    let (mut read, mut buffer) = (Vec::new(), [0; 4096]);
    loop {
        let text = String::from_utf8_lossy(&read).into_owned();
        if let Some((head, body)) = text.split_once("\r\n\r\n") {
            let length =
                head.lines().find_map(|line| line.strip_prefix("content-length: ")?.parse::<usize>().ok());
            if length.is_some_and(|length| body.len() >= length) {
                assert!(head.starts_with("HTTP/1.1 200"), "{head}");
                return Ok((body.to_owned(), !head.contains("connection: close")));
            }
        }
        match stream.read(&mut buffer).await? {
            0 => return Err(std::io::ErrorKind::UnexpectedEof.into()),
            count => read.extend(&buffer[..count]),
        }
    }
}

/// Requests without a pause: on new connections, and on such that stay as long as Envoy keeps them.
struct Load {
    stop: Arc<AtomicBool>,
    sent: Arc<AtomicU64>,
    failed: Arc<AtomicU64>,
    loops: Vec<JoinHandle<()>>,
}

impl Load {
    fn start(to: SocketAddr) -> Self {
        let (stop, sent, failed) = (Arc::new(AtomicBool::new(false)), Arc::default(), Arc::default());
        let mut load = Self { stop, sent, failed, loops: Vec::new() };
        for keeps in [false, false, true, true] {
            let (stop, sent, failed) =
                (Arc::clone(&load.stop), Arc::clone(&load.sent), Arc::clone(&load.failed));
            load.loops.push(tokio::spawn(async move {
                let mut open: Option<TcpStream> = None;
                while !stop.load(Ordering::Relaxed) {
                    sent.fetch_add(1, Ordering::Relaxed);
                    let once = async {
                        let mut stream = match open.take() {
                            Some(stream) => stream,
                            None => TcpStream::connect(to).await?,
                        };
                        let header = if keeps { "" } else { "connection: close\r\n" };
                        let (_, stays) = exchange(&mut stream, header).await?;
                        std::io::Result::Ok((stays && keeps).then_some(stream))
                    };
                    match once.await {
                        Ok(stream) => open = stream,
                        Err(_) => {
                            failed.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                    tokio::time::sleep(Duration::from_millis(2)).await;
                }
            }));
        }
        load
    }

    /// How many requests were sent, and how many of them failed.
    async fn end(self) -> (u64, u64) {
        self.stop.store(true, Ordering::Relaxed);
        for one in self.loops {
            one.await.unwrap();
        }
        (self.sent.load(Ordering::Relaxed), self.failed.load(Ordering::Relaxed))
    }
}

async fn hot_restarts_lose_nothing(version: &str) {
    let mut served = Served::start(version, &[]).await;
    let load = Load::start(served.listener);
    let begun = Instant::now();
    served.change("two");
    served.answers("two").await;
    let took = begun.elapsed();
    served.agent.process.wait_log_times("old epoch drained and exited", 1).await;
    // Touched, with the same bytes: no restart.
    served.change("two");
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(served.agent.process.count("command started"), 2);
    served.change("three");
    served.answers("three").await;
    served.agent.process.wait_log_times("old epoch drained and exited", 2).await;
    assert_eq!(served.agent.process.count("command started"), 3);
    let (sent, failed) = load.end().await;
    eprintln!(
        "{version}: {sent} requests, {failed} failed; the new epoch answered {} ms after the change",
        took.as_millis()
    );
    assert!(sent > 200 && failed == 0, "{failed} of {sent} requests failed:\n{}", served.agent.process.log());
    // The newest epoch has the agent's secrets.
    wait_for("the newest epoch has its certificate", async || {
        let command = served.command().await;
        (command["secrets"] == json!([{ "name": "default", "has": "current" }])).then_some(())
    })
    .await;
    served.agent.process.signal(Signal::TERM);
    assert_eq!(served.agent.process.ended().await.code(), Some(0), "{}", served.agent.process.log());
}

#[tokio::test]
async fn hot_restarts_of_the_newest_envoy_lose_no_request() {
    hot_restarts_lose_nothing(NEWEST).await;
}

#[tokio::test]
async fn hot_restarts_of_the_oldest_envoy_lose_no_request() {
    hot_restarts_lose_nothing(OLDEST).await;
}

#[tokio::test]
async fn a_second_epoch_that_breaks_early_or_late_costs_no_request_and_the_next_one_starts() {
    for version in [OLDEST, NEWEST] {
        let mut served = Served::start(version, &[]).await;
        let load = Load::start(served.listener);
        std::fs::write(&served.bootstrap, "{ \"no_such_field\": 1 }").unwrap();
        let (_, line) = served.agent.process.wait_log("new configuration refused").await;
        assert!(line.contains("no_such_field"), "{line}");
        // A port that is taken shows only when the epoch starts.
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let right = bootstrap(served.listener, &served.agent.socket, "two");
        let mut late = right.clone();
        late["static_resources"]["listeners"][1]["address"]["socket_address"]["port_value"] =
            taken.local_addr().unwrap().port().into();
        late["static_resources"]["listeners"][1]["enable_reuse_port"] = false.into();
        std::fs::write(&served.bootstrap, late.to_string()).unwrap();
        served.agent.process.wait_log("new epoch failed, the old one serves on").await;
        assert_eq!(served.agent.process.count("hot restart not possible"), 0);
        std::fs::write(&served.bootstrap, right.to_string()).unwrap();
        served.answers("two").await;
        served.agent.process.wait_log("old epoch drained and exited").await;
        let (sent, failed) = load.end().await;
        eprintln!("{version}: {failed} of {sent} requests failed across two broken epochs and a good one");
        assert_eq!(failed, 0, "of {sent}:\n{}", served.agent.process.log());
        served.agent.process.signal(Signal::TERM);
        assert_eq!(served.agent.process.ended().await.code(), Some(0));
    }
}

#[tokio::test]
async fn without_hot_restart_envoy_drains_and_stops_before_the_next_one_starts() {
    let mut served = Served::start_as(NEWEST, &["--no-hot-restart", "--log-format", "json"], &[]).await;
    let before = served.pid().await;
    std::fs::write(&served.bootstrap, "{ \"no_such_field\": 1 }").unwrap();
    served.agent.process.wait_log("new configuration refused").await;
    served.answers("one").await;
    served.change("two");
    served.answers("two").await;
    assert!(rustix::process::test_kill_process(before).is_err());
    served.agent.process.signal(Signal::TERM);
    assert_eq!(served.agent.process.ended().await.code(), Some(0));
    for line in served.agent.process.log().lines() {
        let line: Value = serde_json::from_str(line).unwrap_or_else(|_| panic!("{line}"));
        assert!(line["level"].is_string() && line["timestamp"].is_string(), "{line}");
    }
}

#[tokio::test]
async fn an_envoy_that_is_killed_is_started_again() {
    let mut served = Served::start(NEWEST, &[]).await;
    let load = Load::start(served.listener);
    kill_process(served.pid().await, Signal::KILL).unwrap();
    served.agent.process.wait_log_times("command live", 2).await;
    served.answers("one").await;
    // While the old epoch drains, the new one is killed: the same number again.
    served.change("two");
    served.agent.process.wait_log_times("command live", 3).await;
    kill_process(served.pid().await, Signal::KILL).unwrap();
    let (_, line) = served.agent.process.wait_log_times("command live", 4).await;
    assert!(line.contains("epoch=1"), "{line}");
    served.answers("two").await;
    let (sent, failed) = load.end().await;
    // Each kill costs the requests until the next Envoy serves.
    assert!(failed > 0 && failed < sent, "{failed} of {sent} requests failed across two kills");
    served.agent.process.signal(Signal::TERM);
    assert_eq!(served.agent.process.ended().await.code(), Some(0));
}

#[tokio::test]
async fn an_envoy_ends_with_a_killed_agent_and_the_next_agent_starts_another() {
    let mut served = Served::start(NEWEST, &[]).await;
    let before = served.pid().await;
    served.agent.process.kill().await;
    wait_until("Envoy is gone", || rustix::process::test_kill_process(before).is_err()).await;
    served.agent.restart();
    served.agent.process.wait_log("command live").await;
    served.answers("one").await;
}

#[tokio::test]
async fn a_certificate_in_files_that_envoy_reads_once_changes_without_a_lost_request() {
    for version in [OLDEST, NEWEST] {
        let directory = tempfile::tempdir().unwrap();
        let out = directory.path().join("out").display().to_string();
        let (listener, path) = (free(), directory.path().join("envoy.json"));
        let mut bootstrap = bootstrap(listener, &directory.path().join("a.sock"), "one");
        let file = |name: &str| json!({ "filename": format!("{out}/{name}") });
        let tls = json!({ "name": "tls", "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext",
            "common_tls_context": { "tls_certificates": [
                { "certificate_chain": file("cert-chain.pem"), "private_key": file("key.pem") },
            ] },
        } });
        bootstrap["static_resources"]["listeners"][0]["filter_chains"][0]["transport_socket"] = tls;
        std::fs::write(&path, bootstrap.to_string()).unwrap();
        let (ca, config) = (directory.path().join("ca").display().to_string(), path.display().to_string());
        let envoy = binary_of(version).await.display().to_string();
        let options = [
            "--ca",
            "embedded",
            "--ca-dir",
            &ca,
            "--output-dir",
            &out,
            "--restart-on",
            &out,
            "--drain-time",
            "1s",
            "--",
            &envoy,
            "-c",
            &config,
            "--use-dynamic-base-id",
            "--concurrency",
            "1",
            "--log-level",
            "warning",
        ];
        let mut agent = Agent::start(directory.path(), "a", &options);
        agent.process.wait_log("command live").await;
        let own = Mounted::new(Path::new(&ca), "client");
        let key = PrivateKey::from_pem(&own.key).unwrap();
        let client = Client::new(pem::certificates(&own.chain).unwrap(), key.der().clone_key());
        let (first, _) = client.ask_at(listener).await.unwrap();
        let socket = agent.socket.display().to_string();
        let renewed = output(&["renew", "--socket", &socket]).await;
        assert!(renewed.status.success());
        let begun = Instant::now();
        // Until the old epoch is gone.
        let (mut sent, mut took) = (0, None);
        while agent.process.count("old epoch drained and exited") == 0 {
            let (leaf, _) = client
                .ask_at(listener)
                .await
                .unwrap_or_else(|error| panic!("{error:#}: {}", agent.process.log()));
            sent += 1;
            if leaf != first {
                took.get_or_insert(begun.elapsed());
            }
            assert!(begun.elapsed() < Duration::from_secs(60), "{}", agent.process.log());
        }
        let took = took.expect("the new certificate is served").as_millis();
        eprintln!("{version}: 0 of {sent} handshakes failed, the new certificate after {took} ms");
        agent.process.signal(Signal::TERM);
        assert_eq!(agent.process.ended().await.code(), Some(0));
    }
}

#[tokio::test]
async fn quitquitquit_ends_the_agent_with_0() {
    let mut served = Served::start(NEWEST, &[]).await;
    let admin = served.agent.socket.with_extension("sock.envoy-admin");
    let admin: SocketAddr = std::fs::read_to_string(admin).unwrap().trim().parse().unwrap();
    let mut stream = TcpStream::connect(admin).await.unwrap();
    stream.write_all(b"POST /quitquitquit HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\n\r\n").await.unwrap();
    assert_eq!(served.agent.process.ended().await.code(), Some(0));
}

#[tokio::test]
async fn a_storm_of_changes_never_starts_two_epochs_at_once_and_loses_no_request() {
    let mut served = Served::start(NEWEST, &["--restart-debounce", "100ms"]).await;
    let load = Load::start(served.listener);
    let seconds = std::env::var("ATTACHE_STORM_SECONDS").ok().and_then(|it| it.parse().ok()).unwrap_or(6);
    let begun = Instant::now();
    let mut number = 0;
    while begun.elapsed() < Duration::from_secs(seconds) {
        number += 1;
        served.change(&number.to_string());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    served.answers(&number.to_string()).await;
    let (sent, failed) = load.end().await;
    let log = served.agent.process.log();
    let (mut starting, mut starts) = (0, 0_u64);
    for line in log.lines() {
        // A file that is half written when an epoch reads it fails this epoch, and no other one.
        let is_over = ["command live", "new epoch failed"].iter().any(|words| line.contains(words));
        starting += i32::from(line.contains("command started")) - i32::from(is_over);
        starts += u64::from(line.contains("command started"));
        assert!((0..=1).contains(&starting), "{log}");
    }
    eprintln!("{number} changes in {seconds} s: {starts} starts, {failed} of {sent} requests failed");
    // One for each debounce time at most.
    assert!(
        (2..=2 + 10 * seconds).contains(&starts) && failed == 0,
        "{starts} starts, {failed} of {sent} failed:\n{log}"
    );
    served.agent.process.signal(Signal::TERM);
    assert_eq!(served.agent.process.ended().await.code(), Some(0));
}
