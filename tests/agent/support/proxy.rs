//! A TCP proxy in front of a server: simulates network failures, and observes the server's clients.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

/// What happens to connections, including open ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Line {
    Open,
    /// Every piece of an answer is late.
    Slow,
    /// Answers come byte by byte.
    Trickle,
    /// Accepted and closed, like a load balancer without a backend.
    Cut,
    /// Refused.
    Down,
}

/// A running proxy. It stops with the test's runtime.
pub struct Proxy {
    pub address: SocketAddr,
    line: watch::Sender<Line>,
    seen: Arc<Mutex<Seen>>,
}

#[derive(Default)]
struct Seen {
    connections: Vec<Instant>,
    open: usize,
    most_open: usize,
}

/// A connection, until either side closes it.
struct Open(Arc<Mutex<Seen>>);

impl Open {
    fn new(seen: Arc<Mutex<Seen>>, port: u16) -> Self {
        let mut counts = seen.lock().unwrap();
        counts.open += 1;
        // On a busy machine a client's close arrives here late; the kernel knows earlier.
        let open = if counts.open > 1 { established(port) } else { 1 };
        counts.most_open = counts.most_open.max(open);
        drop(counts);
        Self(seen)
    }
}

/// The connections to a port of 127.0.0.1 that no client has closed.
fn established(port: u16) -> usize {
    let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
    let local = format!("0100007F:{port:04X}");
    let is_open = |line: &&str| {
        let mut fields = line.split_whitespace().skip(1);
        fields.next() == Some(&local) && fields.nth(1) == Some("01")
    };
    table.lines().filter(is_open).count()
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.lock().unwrap().open -= 1;
    }
}

impl Proxy {
    /// A proxy for `server` on a free port.
    pub fn start(server: SocketAddr) -> Self {
        let listener = listen(bind("127.0.0.1:0".parse().unwrap()));
        let address = listener.local_addr().unwrap();
        let (line, watched) = watch::channel(Line::Open);
        let seen = Arc::default();
        tokio::spawn(run(listener, server, watched, Arc::clone(&seen)));
        Self { address, line, seen }
    }

    pub fn set(&self, line: Line) {
        self.line.send_replace(line);
    }

    /// When each connection was accepted.
    pub fn connections(&self) -> Vec<Instant> {
        self.seen.lock().unwrap().connections.clone()
    }

    /// The largest number of connections open at the same time.
    pub fn most_open(&self) -> usize {
        self.seen.lock().unwrap().most_open
    }
}

/// A socket that keeps the port while nothing listens. Earlier connections don't matter, but the port must not be
/// shared: other sockets that bind to any free port would get it.
fn bind(address: SocketAddr) -> TcpSocket {
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_reuseaddr(true).unwrap();
    socket.bind(address).unwrap();
    socket.set_reuseaddr(false).unwrap();
    socket
}

fn listen(socket: TcpSocket) -> TcpListener {
    socket.set_reuseaddr(true).unwrap();
    socket.listen(1024).unwrap()
}

async fn run(
    mut listener: TcpListener,
    server: SocketAddr,
    mut line: watch::Receiver<Line>,
    seen: Arc<Mutex<Seen>>,
) {
    let address = listener.local_addr().unwrap();
    loop {
        let mut down = line.clone();
        tokio::select! {
            biased;
            ended = down.wait_for(|line| *line == Line::Down) => if ended.is_err() { return },
            never = accept(&listener, server, &line, &seen) => match never {},
        }
        drop(listener);
        let socket = bind(address);
        if line.wait_for(|line| *line != Line::Down).await.is_err() {
            return;
        }
        listener = listen(socket);
    }
}

/// Accepts connections, which end with this future.
async fn accept(
    listener: &TcpListener,
    server: SocketAddr,
    line: &watch::Receiver<Line>,
    seen: &Arc<Mutex<Seen>>,
) -> std::convert::Infallible {
    let port = listener.local_addr().unwrap().port();
    let mut connections = JoinSet::new();
    loop {
        let (io, _) = listener.accept().await.unwrap();
        seen.lock().unwrap().connections.push(Instant::now());
        let (mut line, seen) = (line.clone(), Arc::clone(seen));
        connections.spawn(async move {
            let _open = Open::new(seen, port);
            tokio::select! {
                () = pass(io, server, line.clone()) => {}
                _ = line.wait_for(|line| *line == Line::Cut) => {}
            }
        });
    }
}

/// Passes bytes in both directions until one side closes.
async fn pass(mut client: TcpStream, server: SocketAddr, line: watch::Receiver<Line>) {
    let Ok(mut server) = TcpStream::connect(server).await else { return };
    let (mut from_client, mut to_client) = client.split();
    let (mut from_server, mut to_server) = server.split();
    let answers = async {
        let mut piece = vec![0; 16 << 10];
        while let Ok(length @ 1..) = from_server.read(&mut piece).await {
            let now = *line.borrow();
            if now == Line::Slow {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            let size = if now == Line::Trickle { 1 } else { length };
            for part in piece[..length].chunks(size) {
                if *line.borrow() == Line::Trickle {
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
                if to_client.write_all(part).await.is_err() {
                    return;
                }
            }
        }
    };
    tokio::select! {
        _ = tokio::io::copy(&mut from_client, &mut to_server) => {}
        () = answers => {}
    }
}
