//! Envoy's admin endpoint: whether an epoch is live, and the end of its connections.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http::header::{HOST, HeaderValue};
use http::{Method, Request, StatusCode};
use http_body_util::Full;
use serde_json::Value;
use tokio::net::{TcpStream, UnixStream};
use tokio::time::{Instant, sleep, timeout};

use crate::fs::disk::Disk;
use crate::net::endpoint::Io;
use crate::net::rest::{self, Reply};
use crate::net::tls::Alert;

/// How long one request may take.
const PATIENCE: Duration = Duration::from_secs(2);
/// Between two looks at a starting epoch.
const POLL: Duration = Duration::from_millis(50);
/// Between two looks at connections that end.
const DRAIN_POLL: Duration = Duration::from_millis(200);
/// An Envoy whose admin endpoint has not answered for so long has none.
const NO_ADMIN: Duration = Duration::from_secs(20);
/// Bytes of the file that names the address.
const ADDRESS_BYTES: u64 = 4 << 10;
/// What Envoy answers to `/ready`.
const STATES: [&[u8]; 4] = [b"LIVE", b"DRAINING", b"PRE_INITIALIZING", b"INITIALIZING"];

/// Where Envoy's admin endpoint listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Address {
    /// Host and port.
    Tcp(String),
    Unix(PathBuf),
}

/// A live epoch, as its admin endpoint describes it.
#[derive(Clone, Debug)]
pub(super) struct Admin {
    pub(super) address: Address,
    /// None without hot restart.
    epoch: Option<u32>,
    /// The node's id, by which its streams are known.
    pub(super) node: String,
}

impl Address {
    /// From the file that Envoy writes.
    fn parse(text: &str) -> Option<Self> {
        let text = text.trim();
        match text {
            "" => None,
            path if path.starts_with('/') => Some(Self::Unix(path.into())),
            // An abstract socket: tokio writes its first byte so.
            name if name.starts_with('@') => Some(Self::Unix(name.replacen('@', "\0", 1).into())),
            // A listener on all addresses is reached by the loopback one.
            other => {
                Some(Self::Tcp(other.replacen("0.0.0.0:", "127.0.0.1:", 1).replacen("[::]:", "[::1]:", 1)))
            }
        }
    }

    async fn call(&self, method: Method, path: &str) -> Result<Reply, String> {
        let call = async {
            let failed = |error: std::io::Error| error.to_string();
            let (io, host): (Box<dyn Io>, _) = match self {
                Self::Tcp(address) => {
                    (Box::new(TcpStream::connect(address).await.map_err(failed)?), address.as_str())
                }
                Self::Unix(path) => (Box::new(UnixStream::connect(path).await.map_err(failed)?), "localhost"),
            };
            let mut request = Request::new(Full::new(Bytes::new()));
            *request.method_mut() = method;
            *request.uri_mut() = path.parse().map_err(|error: http::uri::InvalidUri| error.to_string())?;
            let host = HeaderValue::from_str(host).map_err(|error| error.to_string())?;
            request.headers_mut().insert(HOST, host);
            rest::exchange(io, request, &Alert::default()).await.map_err(|error| error.to_string())
        };
        timeout(PATIENCE, call).await.unwrap_or_else(|_| Err("it does not answer".to_owned()))
    }

    /// Whether this is the epoch, and it is live; an error if nothing answers.
    async fn is_live(&self, epoch: Option<u32>) -> Result<bool, String> {
        let ready = self.call(Method::GET, "/ready").await?;
        if ready.status != StatusCode::OK || !ready.body.starts_with(b"LIVE") {
            return Ok(false);
        }
        self.has_epoch(epoch).await
    }

    async fn has_epoch(&self, epoch: Option<u32>) -> Result<bool, String> {
        let Some(epoch) = epoch else { return Ok(true) };
        let stats = self.call(Method::GET, "/stats?filter=server.hot_restart_epoch").await?;
        Ok(is_epoch(&String::from_utf8_lossy(&stats.body), epoch))
    }

    /// The node's id; empty if it has none.
    async fn node(&self) -> String {
        // With the mask it has 200 bytes; `/server_info`, which has the id, too, has 120 kB.
        let dump = self.call(Method::GET, "/config_dump?mask=bootstrap.node.id").await;
        dump.ok().and_then(|dump| node_of(&dump.body)).unwrap_or_default()
    }

    /// Whether an Envoy answers that has this epoch and node, in whatever state.
    async fn is_envoy(&self, epoch: Option<u32>, node: &str) -> Result<bool, String> {
        let ready = self.call(Method::GET, "/ready").await?;
        let is_state = STATES.iter().any(|state| ready.body.trim_ascii_end() == *state);
        Ok(is_state && self.has_epoch(epoch).await? && self.node().await == node)
    }

    /// Connections of clients. Those of old epochs count as well.
    async fn connections(&self) -> Result<u64, String> {
        let reply = self.call(Method::GET, "/stats?usedonly&filter=downstream_cx_active").await?;
        Ok(connections(&String::from_utf8_lossy(&reply.body)))
    }
}

/// False if another epoch answers, which still has the port. A configuration may leave this figure out.
fn is_epoch(stats: &str, epoch: u32) -> bool {
    let mut numbers = stats.lines().filter_map(|line| line.strip_prefix("server.hot_restart_epoch: "));
    numbers.next().is_none_or(|number| number.trim().parse() == Ok(epoch))
}

fn node_of(config_dump: &[u8]) -> Option<String> {
    let dump: Value = serde_json::from_slice(config_dump).ok()?;
    let mut ids =
        dump.get("configs")?.as_array()?.iter().filter_map(|config| config.pointer("/bootstrap/node/id"));
    ids.next()?.as_str().map(str::to_owned)
}

/// The sum over all listeners but the admin endpoint's own.
fn connections(stats: &str) -> u64 {
    let of = |line: &str| {
        let (name, value) = line.split_once(": ")?;
        let listener = name.strip_prefix("listener.")?.strip_suffix(".downstream_cx_active")?;
        let is_worker = |(_, number): (&str, &str)| {
            !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
        };
        let is_part = matches!(listener, "admin" | "admin.main_thread")
            || listener.rsplit_once(".worker_").is_some_and(is_worker);
        value.trim().parse::<u64>().ok().filter(|_| !is_part)
    };
    stats.lines().filter_map(of).fold(0, u64::saturating_add)
}

/// Reads `text` as everything that Envoy may write or answer. True if it is any of that.
#[cfg(any(test, fuzzing))]
pub(super) fn read_all(text: &str) -> bool {
    let node = node_of(text.as_bytes());
    Address::parse(text).is_some() | (connections(text) > 0) | !is_epoch(text, 1) | node.is_some()
}

/// Returns once `epoch`, which leaves its admin address in `file`, is live; none if it has no admin endpoint, or one that
/// does not answer: then it counts as live after a while.
pub(super) async fn until_live(file: &Path, epoch: Option<u32>, disk: &Disk) -> Option<Admin> {
    let mut answered = Instant::now();
    loop {
        let read = disk.read(file, ADDRESS_BYTES).await.ok().and_then(Result::ok);
        if let Some(address) = read.and_then(|text| Address::parse(&String::from_utf8_lossy(&text))) {
            match address.is_live(epoch).await {
                Ok(true) => {
                    let node = address.node().await;
                    return Some(Admin { address, epoch, node });
                }
                Ok(false) => answered = Instant::now(),
                Err(_) => {}
            }
        }
        if answered.elapsed() > NO_ADMIN {
            return None;
        }
        sleep(POLL).await;
    }
}

impl Admin {
    /// Has the connections end: health checks fail, responses close their connections, and listeners close at the end of
    /// Envoy's drain time. Returns when no connection is left, or if Envoy does not answer. `left` is kept up to date.
    pub(super) async fn drain(&self, left: Arc<AtomicU64>) -> Result<(), String> {
        // A new epoch that has failed has closed this one's admin endpoint: the port may be another server's.
        if !self.address.is_envoy(self.epoch, &self.node).await? {
            return Err("another server has its address".to_owned());
        }
        for path in ["/healthcheck/fail", "/drain_listeners?graceful"] {
            let reply = self.address.call(Method::POST, path).await?;
            if reply.status != StatusCode::OK {
                return Err(format!("POST {path} is answered with {}", reply.status));
            }
        }
        loop {
            let connections = self.address.connections().await?;
            left.store(connections, Ordering::Relaxed);
            if connections == 0 {
                return Ok(());
            }
            sleep(DRAIN_POLL).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_names_an_address_or_a_socket() {
        let tcp = |text: &str| Some(Address::Tcp(text.to_owned()));
        for (text, expected) in [
            ("127.0.0.1:9901\n", tcp("127.0.0.1:9901")),
            ("0.0.0.0:9901", tcp("127.0.0.1:9901")),
            ("[::]:9901", tcp("[::1]:9901")),
            ("@envoy", Some(Address::Unix("\0envoy".into()))),
            ("/run/envoy/admin.sock", Some(Address::Unix("/run/envoy/admin.sock".into()))),
            ("", None),
        ] {
            assert_eq!(Address::parse(text), expected, "{text}");
        }
    }

    #[test]
    fn another_epoch_that_still_has_the_port_is_not_the_one() {
        assert!(is_epoch("server.hot_restart_epoch: 1\n", 1));
        assert!(!is_epoch("server.hot_restart_epoch: 0\n", 1));
        assert!(is_epoch("", 1), "statistics may be left out");
    }

    #[test]
    fn the_nodes_id_is_found() {
        let dump = br#"{"configs": [{"@type": "x"}, {"bootstrap": {"node": {"id": "a\"b"}}}]}"#;
        assert_eq!(node_of(dump).as_deref(), Some("a\"b"));
        for other in [&b"{}"[..], b"{\"configs\": [{\"bootstrap\": {}}]}", b"no JSON"] {
            assert_eq!(node_of(other), None);
        }
    }

    /// Answers as an Envoy of this state, epoch and node, and returns the requests once the caller has gone.
    async fn drain(state: &'static str, epoch: u32, node: &'static str) -> (Result<(), String>, Vec<String>) {
        use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = Address::Tcp(listener.local_addr().unwrap().to_string());
        let mut requests = Vec::new();
        let server = async {
            loop {
                let (mut stream, _) = listener.accept().await.unwrap();
                let mut lines = BufReader::new(&mut stream).lines();
                let request = lines.next_line().await.unwrap().unwrap_or_default();
                while lines.next_line().await.unwrap().is_some_and(|line| !line.is_empty()) {}
                let body = match request.split(' ').nth(1).unwrap_or_default() {
                    "/ready" => format!("{state}\n"),
                    "/config_dump?mask=bootstrap.node.id" => {
                        format!(r#"{{"configs": [{{"bootstrap": {{"node": {{"id": "{node}"}}}}}}]}}"#)
                    }
                    path if path.contains("hot_restart_epoch") => {
                        format!("server.hot_restart_epoch: {epoch}\n")
                    }
                    _ => String::new(),
                };
                requests.push(request);
                let answer = format!(
                    "HTTP/1.1 200 OK\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}",
                    body.len()
                );
                stream.write_all(answer.as_bytes()).await.unwrap();
            }
        };
        let admin = Admin { address, epoch: Some(1), node: "web".to_owned() };
        let outcome = tokio::select! {
            outcome = admin.drain(Arc::default()) => outcome,
            () = server => unreachable!(),
        };
        (outcome, requests)
    }

    #[tokio::test]
    async fn only_the_epoch_itself_is_drained_and_no_stranger_at_its_address() {
        for (state, epoch, node) in [("LIVE", 0, "web"), ("LIVE", 1, "other"), ("<html>", 1, "web")] {
            let (outcome, requests) = drain(state, epoch, node).await;
            outcome.unwrap_err();
            assert!(requests.iter().all(|request| request.starts_with("GET ")), "{requests:?}");
        }
        // An Envoy that already fails its health checks is drained all the same.
        for state in ["LIVE", "DRAINING"] {
            let (outcome, requests) = drain(state, 1, "web").await;
            outcome.unwrap();
            assert_eq!(requests.iter().filter(|request| request.starts_with("POST ")).count(), 2);
        }
    }

    #[test]
    fn each_connection_of_a_client_counts_once() {
        let stats = "http.in.downstream_cx_active: 3\n\
                     listener.127.0.0.1_18080.downstream_cx_active: 2\n\
                     listener.127.0.0.1_18080.worker_0.downstream_cx_active: 2\n\
                     listener.[__1]_443.downstream_cx_active: 1\n\
                     listener.admin.downstream_cx_active: 1\n\
                     listener.admin.main_thread.downstream_cx_active: 1\n\
                     listener.admin.web.downstream_cx_active: 4\n\
                     listener.admin.web.worker_11.downstream_cx_active: 4\n\
                     listener.a.worker_pool.downstream_cx_active: 5\n\
                     cluster.a.upstream_cx_active: 9\n";
        assert_eq!(connections(stats), 12);
    }
}
