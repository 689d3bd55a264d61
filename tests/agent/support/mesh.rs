//! Two Envoys with an agent each: `web` calls `api` over mutual TLS.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::task::JoinHandle;

use super::envoy::{Envoy, http_get};
use super::files::spiffe;
use super::process::{Agent, output};

/// The output of `attache bootstrap`, with listeners on free ports, and a new connection with a full handshake for each
/// request to the peer.
pub async fn bootstrap(socket: &Path, arguments: &[&str]) -> Value {
    let socket = socket.to_str().unwrap();
    let mut all = vec!["bootstrap", "--socket", socket, "--listen", "127.0.0.1:0"];
    all.extend(arguments);
    let output = output(&all).await;
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let mut bootstrap: Value = serde_json::from_slice(&output.stdout).unwrap();
    for cluster in bootstrap["static_resources"]["clusters"].as_array_mut().unwrap() {
        if cluster["name"] == "peer" {
            cluster["transport_socket"]["typed_config"]["max_session_keys"] = json!(0);
            let options = cluster["typed_extension_protocol_options"].as_object_mut().unwrap();
            for options in options.values_mut() {
                options["common_http_protocol_options"] = json!({ "max_requests_per_connection": 1 });
            }
        }
    }
    bootstrap
}

/// The same bootstrap with a trust bundle of this name.
pub fn named(bootstrap: &Value, roots: &str) -> Value {
    let text = bootstrap.to_string().replace("\"ROOTCA\"", &format!("\"{roots}\""));
    serde_json::from_str(&text).unwrap()
}

/// Starts the Envoy of `api`: only `web` may call.
pub async fn api_envoy(directory: &Path, agent: &Agent) -> Envoy {
    let bootstrap = bootstrap(&agent.socket, &["--allow", &spiffe("web")]).await;
    Envoy::start(bootstrap, directory, "api").await
}

/// Starts an Envoy that calls `peer`, whose identity must be `expected`.
pub async fn caller_envoy(
    directory: &Path,
    name: &str,
    agent: &Agent,
    peer: SocketAddr,
    expected: &str,
) -> Envoy {
    let peer = peer.to_string();
    let arguments =
        [["--outbound-listen", "127.0.0.1:0"], ["--outbound-to", &peer], ["--outbound-peer", expected]];
    let bootstrap = bootstrap(&agent.socket, &arguments.concat()).await;
    Envoy::start(bootstrap, directory, name).await
}

/// Sends requests, one after the other, until it is stopped.
pub struct Traffic {
    stop: Arc<AtomicBool>,
    task: JoinHandle<Report>,
}

/// The outcome of the requests.
#[derive(Debug, Default)]
pub struct Report {
    pub succeeded: usize,
    pub failures: Vec<String>,
    /// Serials of the caller's certificate as the peer saw them, consecutive repetitions once.
    pub serials: Vec<String>,
    /// Identities of the caller as the peer saw them, consecutive repetitions once.
    pub identities: Vec<String>,
}

impl Traffic {
    /// Sends requests to `to`.
    pub fn start(to: SocketAddr) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let task = tokio::spawn({
            let stop = Arc::clone(&stop);
            async move {
                let mut report = Report::default();
                while !stop.load(Ordering::Relaxed) {
                    report.note(http_get(to, "/").await);
                    // The rate of the requests.
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
                report
            }
        });
        Self { stop, task }
    }

    pub async fn stop(self) -> Report {
        self.stop.store(true, Ordering::Relaxed);
        self.task.await.unwrap()
    }
}

type Answer = anyhow::Result<(u16, std::collections::BTreeMap<String, String>, String)>;

impl Report {
    fn note(&mut self, answer: Answer) {
        match answer {
            Ok((200, headers, _)) => {
                self.succeeded += 1;
                let header = |name: &str| headers.get(name).cloned().unwrap_or_default();
                for (seen, value) in [
                    (&mut self.serials, header("x-peer-serial")),
                    (&mut self.identities, header("x-peer-uri-san")),
                ] {
                    if seen.last() != Some(&value) {
                        seen.push(value);
                    }
                }
            }
            other => self.failures.push(format!("{other:?}")),
        }
    }
}

/// Waits for the first request that succeeds.
pub async fn wait_success(envoy: &Envoy, to: SocketAddr) {
    envoy.wait_until("a request succeeds", async || matches!(http_get(to, "/").await, Ok((200, ..)))).await;
}
