//! A real Envoy as a child process.
//!
//! The kernel chooses every port (`port_value: 0`), and the tests ask Envoy for it, so that any number of tests run
//! side by side.

use std::collections::BTreeMap;
use std::fs::File;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::process::{Child, Command};
use tokio::time::{Instant, sleep, timeout};

use super::installed::installed;
use super::process::PATIENCE;

const POLL: Duration = Duration::from_millis(20);

/// Envoy's version in tests that name none.
pub const NEWEST: &str = "1.40.0";
/// The oldest version that exists as a package.
pub const OLDEST: &str = "1.36.2";

/// Hot restart couples all Envoys of a machine, through shared memory and a base id.
const UNCOUPLED: &[&str] = &["--disable-hot-restart"];

/// The path of the newest Envoy's binary.
pub async fn binary() -> PathBuf {
    binary_of(NEWEST).await
}

/// The path of an Envoy binary, downloaded by the first test that needs it.
pub async fn binary_of(version: &str) -> PathBuf {
    installed("get-envoy", &[version]).await
}

/// A running Envoy; dropping it kills it.
pub struct Envoy {
    name: String,
    log: PathBuf,
    admin: SocketAddr,
    process: Child,
}

impl Envoy {
    /// Starts Envoy and returns as soon as its admin interface answers, which is long before its listeners open: those
    /// wait for their secrets. Its files are in `dir`, with names that begin with `name`.
    ///
    /// The bootstrap's admin address is replaced by a free one; its listeners should use port 0.
    pub async fn start(bootstrap: Value, dir: &Path, name: &str) -> Self {
        Self::start_version(NEWEST, bootstrap, dir, name).await
    }

    /// The same, with `root` as the working directory.
    pub async fn start_in(root: &Path, bootstrap: Value, dir: &Path, name: &str) -> Self {
        Self::launch(NEWEST, root, UNCOUPLED, bootstrap, dir, name).await
    }

    /// The same as `start`, with these options for hot restarts.
    pub async fn start_coupled(options: &[String], bootstrap: Value, dir: &Path, name: &str) -> Self {
        let options: Vec<&str> = options.iter().map(String::as_str).collect();
        Self::launch(NEWEST, Path::new("."), &options, bootstrap, dir, name).await
    }

    /// The same as `start` with an Envoy of this version.
    pub async fn start_version(version: &str, bootstrap: Value, dir: &Path, name: &str) -> Self {
        Self::launch(version, Path::new("."), UNCOUPLED, bootstrap, dir, name).await
    }

    async fn launch(
        version: &str,
        root: &Path,
        options: &[&str],
        mut bootstrap: Value,
        dir: &Path,
        name: &str,
    ) -> Self {
        let file = |suffix: &str| dir.join(format!("{name}.{suffix}"));
        bootstrap["admin"]["address"] =
            json!({ "socket_address": { "address": "127.0.0.1", "port_value": 0 } });
        std::fs::write(file("json"), format!("{bootstrap:#}")).unwrap();

        let log = File::create(file("log")).unwrap();
        let mut process = Command::new(binary_of(version).await)
            .current_dir(root)
            .arg("--config-path")
            .arg(file("json"))
            // Otherwise it keeps the address of an earlier Envoy of this name.
            .arg("--admin-address-path")
            .arg(fresh(file("admin")))
            .args(options)
            .args(["--concurrency", "1", "--log-level", "info"])
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .kill_on_drop(true)
            .spawn()
            .unwrap();

        let deadline = Instant::now() + PATIENCE;
        let admin = loop {
            let address = std::fs::read_to_string(file("admin")).unwrap_or_default();
            if let Ok(address) = address.trim_end().parse()
                && TcpStream::connect(address).await.is_ok()
            {
                break address;
            }
            let ended = process.try_wait().unwrap();
            assert!(
                ended.is_none() && Instant::now() < deadline,
                "{name} did not start ({ended:?}):\n{}",
                std::fs::read_to_string(file("log")).unwrap(),
            );
            sleep(POLL).await;
        };
        Self { name: name.to_owned(), log: file("log"), admin, process }
    }

    /// The body of an admin page, such as `/config_dump`.
    pub async fn admin_get(&self, path: &str) -> String {
        match http_get(self.admin, path).await {
            Ok((200, _, body)) => body,
            other => panic!("{} answers {path} with {other:?}:\n{}", self.name, self.log()),
        }
    }

    /// A listener's address. It is bound, and its port known, before it accepts anything.
    pub async fn listener_address(&self, name: &str) -> SocketAddr {
        self.bound(name).await.unwrap_or_else(|| panic!("{} has no listener {name}", self.name))
    }

    /// Waits until these listeners accept connections: their secrets have arrived, or `initial_fetch_timeout` has
    /// passed without them.
    pub async fn wait_listeners(&self, names: &[&str]) {
        self.wait_until(&format!("its listeners {names:?} are open"), async || {
            // Before Envoy is live no worker accepts, and this page answers 503.
            if !matches!(http_get(self.admin, "/ready").await, Ok((200, ..))) {
                return false;
            }
            for name in names {
                if self.bound(name).await.is_none() {
                    return false;
                }
            }
            true
        })
        .await;
    }

    /// Every counter and gauge.
    pub async fn stats(&self) -> BTreeMap<String, u64> {
        let page = self.admin_get("/stats").await;
        let number = |line: &str| {
            let (name, value) = line.rsplit_once(": ")?;
            Some((name.to_owned(), value.parse().ok()?))
        };
        page.lines().filter_map(number).collect()
    }

    /// One counter or gauge; 0 as long as Envoy has not counted it.
    pub async fn stat(&self, name: &str) -> u64 {
        self.stats().await.get(name).copied().unwrap_or(0)
    }

    /// Waits until a counter or gauge reaches a value.
    pub async fn wait_stat(&self, name: &str, at_least: u64) {
        self.wait_until(&format!("{name} is {at_least}"), async || self.stat(name).await >= at_least).await;
    }

    /// The certificates that Envoy uses now, from its admin page `/certs`.
    pub async fn certs(&self) -> Value {
        serde_json::from_str(&self.admin_get("/certs").await).unwrap()
    }

    /// Everything that Envoy has logged.
    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap()
    }

    /// Whether the process is still running.
    pub fn is_running(&mut self) -> bool {
        self.process.try_wait().unwrap().is_none()
    }

    /// Waits until `holds`; `what` describes it in the failure.
    pub async fn wait_until(&self, what: &str, mut holds: impl AsyncFnMut() -> bool) {
        let waited = timeout(PATIENCE, async {
            while !holds().await {
                sleep(POLL).await;
            }
        })
        .await;
        assert!(waited.is_ok(), "{}: timed out waiting until {what}:\n{}", self.name, self.log());
    }

    async fn bound(&self, name: &str) -> Option<SocketAddr> {
        let page: Value = serde_json::from_str(&self.admin_get("/listeners?format=json").await).unwrap();
        let listener = page["listener_statuses"].as_array()?.iter().find(|it| it["name"] == name)?;
        let address = &listener["local_address"]["socket_address"];
        let ip = address["address"].as_str()?.parse().ok()?;
        Some(SocketAddr::new(ip, address["port_value"].as_u64()?.try_into().ok()?))
    }
}

fn fresh(path: PathBuf) -> PathBuf {
    let _ = std::fs::remove_file(&path);
    path
}

/// Status, lower-case headers and body of a plain HTTP/1.1 GET on a connection of its own.
pub async fn http_get(to: SocketAddr, path: &str) -> Result<(u16, BTreeMap<String, String>, String)> {
    let request = format!("GET {path} HTTP/1.1\r\nhost: {to}\r\nconnection: close\r\n\r\n");
    let answer = timeout(PATIENCE, async {
        let mut stream = TcpStream::connect(to).await?;
        stream.write_all(request.as_bytes()).await?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await?;
        std::io::Result::Ok(answer)
    })
    .await
    .with_context(|| format!("no end to the answer of {to}{path}"))?
    .with_context(|| format!("asking {to}{path}"))?;

    let answer = String::from_utf8(answer)?;
    let (head, body) = answer.split_once("\r\n\r\n").with_context(|| format!("cut short: {answer:?}"))?;
    let mut lines = head.split("\r\n");
    let status = lines.next().and_then(|line| line.split(' ').nth(1)).context("no status line")?.parse()?;
    let mut headers = BTreeMap::new();
    for line in lines {
        let (name, value) = line.split_once(": ").with_context(|| format!("not a header: {line:?}"))?;
        headers
            .entry(name.to_ascii_lowercase())
            .and_modify(|values: &mut String| *values = format!("{values}, {value}"))
            .or_insert_with(|| value.to_owned());
    }
    let chunked = headers.get("transfer-encoding").is_some_and(|encoding| encoding == "chunked");
    Ok((status, headers, if chunked { unchunked(body)? } else { body.to_owned() }))
}

fn unchunked(mut rest: &str) -> Result<String> {
    let mut body = String::new();
    loop {
        let (size, after) = rest.split_once("\r\n").context("the chunks end early")?;
        let size = usize::from_str_radix(size, 16)?;
        if size == 0 {
            return Ok(body);
        }
        let Some((chunk, after)) = after.split_at_checked(size) else { bail!("a chunk ends early") };
        body += chunk;
        rest = after.strip_prefix("\r\n").context("a chunk is longer than it says")?;
    }
}
