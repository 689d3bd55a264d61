//! The status address, the page and the admin socket: clients that do nothing, or too much, cost the others nothing.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream, UnixStream};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::support::envoy::http_get;
use crate::support::files::Mounted;
use crate::support::process::{Agent, PATIENCE, output};

/// Far more connections than the agent keeps.
const NEIGHBOURS: usize = 200;

/// An agent with mounted files, and its addresses of probes and page.
async fn agent(directory: &Path) -> (Agent, SocketAddr, SocketAddr) {
    let certs = directory.join("certs");
    Mounted::new(&directory.join("ca"), "web").write(&certs);
    let options = ["--cert-dir", certs.to_str().unwrap(), "--admin-address", "0"];
    let mut agent = Agent::ready(directory, "agent", &options).await;
    let status = agent.status_address().await;
    let (_, line) = agent.process.wait_log("attache serves").await;
    let (_, page) = line.split_once("page=http://").unwrap();
    let page = page.split('/').next().unwrap().parse().unwrap();
    (agent, status, page)
}

/// Connects again and again, and wastes each connection in one of three ways.
async fn neighbour(to: SocketAddr, path: &'static str, way: usize) {
    let request = format!("GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n");
    loop {
        let socket = TcpSocket::new_v4().unwrap();
        // The answer does not fit.
        socket.set_recv_buffer_size(1024).unwrap();
        let Ok(mut io) = socket.connect(to).await else {
            sleep(Duration::from_millis(50)).await;
            continue;
        };
        match way {
            // Sends nothing.
            0 => drop(io.read(&mut [0]).await),
            // Sends a byte a second.
            1 => {
                for byte in request.bytes() {
                    if io.write_all(&[byte]).await.is_err() {
                        break;
                    }
                    sleep(Duration::from_secs(1)).await;
                }
            }
            // Does not read.
            _ => {
                let _ = io.write_all(request.as_bytes()).await;
                sleep(Duration::from_secs(5)).await;
            }
        }
        // What the agent closed is replaced, but not in a tight loop.
        sleep(Duration::from_millis(500)).await;
    }
}

#[tokio::test]
async fn slow_neighbours_cost_no_probe() {
    let directory = tempfile::tempdir().unwrap();
    let (agent, status, page) = agent(directory.path()).await;
    let mut neighbours = JoinSet::new();
    for number in 0..NEIGHBOURS {
        neighbours.spawn(neighbour(status, "/metrics", number % 3));
        neighbours.spawn(neighbour(page, "/v1/status", number % 3));
    }
    for _ in 0..20 {
        sleep(Duration::from_millis(100)).await;
        for (to, path) in
            [(status, "/livez"), (status, "/readyz"), (status, "/metrics"), (page, "/v1/status")]
        {
            let answer = timeout(Duration::from_secs(5), http_get(to, path)).await;
            let answer = answer.unwrap_or_else(|_| panic!("{path} takes too long"));
            assert_eq!(answer.unwrap_or_else(|error| panic!("{path}: {error:#}")).0, 200, "{path}");
        }
    }
    let open =
        std::fs::read_dir(format!("/proc/{}/fd", agent.process.pid().as_raw_nonzero())).unwrap().count();
    assert!(open < 250, "{open} descriptors are open");
}

/// Waits until the agent closes `io`; what it sent until then.
async fn until_closed(io: &mut TcpStream) -> String {
    let mut answer = Vec::new();
    let closed = timeout(PATIENCE, io.read_to_end(&mut answer)).await;
    // Unread input makes it a reset.
    let _ = closed.expect("the agent keeps the connection");
    String::from_utf8(answer).unwrap()
}

#[tokio::test]
async fn a_connection_is_one_request_and_ends_soon() {
    let directory = tempfile::tempdir().unwrap();
    let (agent, status, page) = agent(directory.path()).await;
    for (to, path) in [(status, "/livez"), (page, "/")] {
        let mut io = TcpStream::connect(to).await.unwrap();
        io.write_all(format!("GET {path} HTTP/1.1\r\nhost: {to}\r\n\r\n").as_bytes()).await.unwrap();
        let answer = until_closed(&mut io).await;
        assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
        assert!(answer.to_lowercase().contains("connection: close"), "{answer}");
        // One that trickles: it gets no longer for that.
        let (mut read, mut write) = TcpStream::connect(to).await.unwrap().into_split();
        let trickle = async {
            while write.write_all(b"x").await.is_ok() {
                sleep(Duration::from_millis(200)).await;
            }
        };
        let mut answer = Vec::new();
        let closed = async {
            let _ = read.read_to_end(&mut answer).await;
        };
        timeout(PATIENCE, async {
            tokio::select! {
                () = trickle => {}
                () = closed => {}
            }
        })
        .await
        .expect("the agent keeps the connection");
    }
    // The admin socket's commands work as before, one call a connection.
    let socket = agent.socket.to_str().unwrap();
    let mut io = UnixStream::connect(format!("{}.admin", agent.socket.display())).await.unwrap();
    io.write_all(b"GET /v1/log HTTP/1.1\r\nhost: attache\r\n\r\n").await.unwrap();
    let mut answer = String::new();
    timeout(PATIENCE, io.read_to_string(&mut answer)).await.expect("the agent keeps the connection").unwrap();
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n") && answer.contains("info"), "{answer}");
    let mut idle = JoinSet::new();
    for _ in 0..NEIGHBOURS {
        let admin = format!("{}.admin", agent.socket.display());
        idle.spawn(async move {
            let mut io = UnixStream::connect(admin).await.unwrap();
            let _ = io.read(&mut [0]).await;
        });
    }
    assert!(output(&["log", "--socket", socket]).await.status.success());
    assert!(output(&["status", "--socket", socket]).await.status.success());
}

#[tokio::test]
async fn on_loopback_no_website_gets_an_answer() {
    let directory = tempfile::tempdir().unwrap();
    let (_agent, status, page) = agent(directory.path()).await;
    let ask = async |to: SocketAddr, path: &str, host: &str| {
        let mut io = TcpStream::connect(to).await.unwrap();
        io.write_all(format!("GET {path} HTTP/1.1\r\n{host}\r\n").as_bytes()).await.unwrap();
        until_closed(&mut io).await
    };
    let names =
        ["host: evil.example\r\n", "host: localhost.evil.example:15055\r\n", "host: a\r\nhost: b\r\n"];
    // A kubelet's probe names the Pod, and some proxies name nothing.
    let addresses = ["host: localhost:1\r\n", "host: 10.1.2.3:15055\r\n", "host: [fd00::1]:15055\r\n", ""];
    for (to, path, option) in [
        (status, "/metrics", "--status-address"),
        (status, "/readyz", "--status-address"),
        (status, "/livez", "--status-address"),
        (page, "/v1/status", "--admin-address"),
    ] {
        for host in names {
            let answer = ask(to, path, host).await;
            assert!(answer.starts_with("HTTP/1.1 403 ") && answer.contains(option), "{host}: {answer}");
        }
        for host in addresses {
            let answer = ask(to, path, host).await;
            assert!(answer.contains("200 OK"), "{path} {host}: {answer}");
        }
    }
}
