//! `attache node` with a directory of workloads.

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use rustix::process::Signal;
use serde_json::Value;

use super::envoy::http_get;
use super::process::{Process, attache, output, strs};
use super::sds::{Stream, on_connection, parsed};
use super::wait::wait_until;

/// A node's agent.
pub struct Node {
    pub process: Process,
    directory: PathBuf,
    arguments: Vec<String>,
}

impl Node {
    /// Starts it. Its workloads are in `workloads` beneath `directory`, which is created, and its state in `state`.
    pub async fn start(directory: &Path, arguments: &[&str]) -> Self {
        let path = |name: &str| directory.join(name).display().to_string();
        std::fs::create_dir_all(directory.join("workloads")).unwrap();
        let own = ["node", "--status-address", "127.0.0.1:0"].map(str::to_owned);
        let paths = [
            ["--workloads".to_owned(), path("workloads")],
            ["--admin-socket".to_owned(), path("admin.sock")],
            ["--state-dir".to_owned(), path("state")],
        ];
        let given = arguments.iter().map(|argument| (*argument).to_owned());
        let arguments: Vec<_> = own.into_iter().chain(paths.into_iter().flatten()).chain(given).collect();
        let mut process = Process::start(attache(&strs(&arguments)));
        process.wait_log("ready").await;
        Self { process, directory: directory.to_owned(), arguments }
    }

    /// Ends it by `signal`, and starts it again with the same options.
    pub async fn restart(&mut self, signal: Signal) {
        self.process.signal(signal);
        self.process.ended().await;
        self.process = Process::start(attache(&strs(&self.arguments)));
        self.process.wait_log("ready").await;
    }

    pub fn socket(&self, name: &str) -> PathBuf {
        self.directory.join(format!("{name}.sock"))
    }

    /// Waits until clients can connect to the socket of the workload `name`.
    pub async fn wait_socket(&self, name: &str) {
        wait_until("the socket", || UnixStream::connect(self.socket(name)).is_ok()).await;
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.directory.join(format!("workloads/{name}.toml"))
    }

    /// Describes the workload `name`, by its socket, its service account and further lines.
    pub fn describe(&self, name: &str, account: &str, lines: &str) {
        let socket = self.socket(name);
        let socket = socket.display();
        let text = format!(
            "socket = \"{socket}\"\nspiffe-id = \"spiffe://cluster.local/ns/default/sa/{account}\"\n{lines}\n"
        );
        // As a careful writer does it.
        let draft = self.directory.join("draft");
        std::fs::write(&draft, text).unwrap();
        std::fs::rename(draft, self.file(name)).unwrap();
    }

    /// What `attache status` reports.
    pub async fn report(&self) -> Value {
        let admin = self.directory.join("admin.sock").display().to_string();
        let status = output(&["status", "--output", "json", "--admin-socket", &admin]).await;
        serde_json::from_slice(&status.stdout).unwrap()
    }

    /// The text of its metrics.
    pub async fn metrics(&mut self) -> String {
        let (_, line) = self.process.wait_log("attache serves the workloads of this node").await;
        let (_, address) = line.split_once("status=").unwrap();
        let address = address.split_whitespace().next().unwrap().parse().unwrap();
        let (status, _, text) = http_get(address, "/metrics").await.unwrap();
        assert_eq!(status, 200, "{text}");
        text
    }

    /// What it reports of the workload `name`.
    pub async fn workload(&self, name: &str) -> Value {
        let report = self.report().await;
        let all = report["workloads"].as_array().unwrap();
        all.iter().find(|workload| workload["workload"] == name).cloned().unwrap_or(Value::Null)
    }
}

/// The identity that the socket serves, once it serves one.
pub async fn identity(socket: &Path) -> String {
    on_connection(socket, async |client| {
        let mut stream = Stream::open(&client, &["default"]).await.unwrap();
        let chain = super::sds::certificates(&stream.next().await.unwrap());
        parsed(&chain)[0].spiffe_id().unwrap().to_string()
    })
    .await
}
