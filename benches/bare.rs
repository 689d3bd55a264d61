//! A client of an API server that does the least: the yardstick for the agent's.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use attache::pki::pem;
use bytes::Bytes;
use h2::RecvStream;
use h2::client::SendRequest;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, RootCertStore};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio_rustls::TlsConnector;

/// The calls that the agent makes at a time.
const AT_ONCE: usize = 32;

/// Where the Secrets of the measured namespace are.
pub(crate) const SECRETS: &str = "/api/v1/namespaces/shop/secrets";

/// One connection with a token.
#[derive(Clone)]
pub(crate) struct Bare {
    requests: SendRequest<Bytes>,
    address: SocketAddr,
    token: Arc<str>,
}

impl Bare {
    /// Connects to the server, whose root is in a file.
    pub(crate) async fn connect(address: SocketAddr, root: &Path, token: &str) -> Self {
        let mut roots = RootCertStore::empty();
        for root in pem::certificates(&std::fs::read(root).unwrap()).unwrap() {
            roots.add(root).unwrap();
        }
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let tls = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
        let mut tls = tls.unwrap().with_root_certificates(roots).with_no_client_auth();
        tls.alpn_protocols = vec![b"h2".to_vec()];
        let io = TcpStream::connect(address).await.unwrap();
        io.set_nodelay(true).unwrap();
        let name = ServerName::IpAddress(address.ip().into());
        let io = TlsConnector::from(Arc::new(tls)).connect(name, io).await.unwrap();
        let mut http = h2::client::Builder::new();
        http.initial_window_size(1 << 20).initial_connection_window_size(8 << 20);
        let (requests, connection) = http.handshake(io).await.unwrap();
        tokio::spawn(connection);
        Self { requests, address, token: token.into() }
    }

    async fn open(&self, path: &str) -> RecvStream {
        let request = http::Request::get(format!("https://{}{path}", self.address))
            .header("authorization", format!("Bearer {}", self.token))
            .header("accept", "application/json")
            .header("user-agent", "bench")
            .body(());
        let mut ready = self.requests.clone().ready().await.unwrap();
        let (response, _) = ready.send_request(request.unwrap(), true).unwrap();
        let response = response.await.unwrap();
        assert_eq!(response.status(), 200, "{path}");
        response.into_body()
    }

    /// Reads one object, and returns its length.
    async fn get(&self, path: &str) -> usize {
        let (mut body, mut length) = (self.open(path).await, 0);
        while let Some(part) = next(&mut body).await {
            length += part.len();
        }
        length
    }

    /// Watches all Secrets of the namespace from now on. The first bytes of each event are returned by `next`.
    pub(crate) async fn watch(&self, version: u64) -> RecvStream {
        self.open(&format!("{SECRETS}?watch=1&resourceVersion={version}")).await
    }
}

/// The next bytes of an answer.
pub(crate) async fn next(body: &mut RecvStream) -> Option<Bytes> {
    let part = body.data().await?.unwrap();
    let _ = body.flow_control().release_capacity(part.len());
    Some(part)
}

/// The name of the Secret of this number.
pub(crate) fn name(number: usize) -> String {
    format!("host-{number}.example.com")
}

/// How long it takes to read `count` Secrets, one call for each, as many at a time as the agent makes.
async fn gets(address: SocketAddr, root: &Path, token: &str, count: usize) -> Duration {
    let begun = Instant::now();
    let client = Bare::connect(address, root, token).await;
    let (next, mut workers) = (Arc::new(AtomicUsize::new(0)), JoinSet::new());
    for _ in 0..AT_ONCE {
        let (client, next) = (client.clone(), Arc::clone(&next));
        workers.spawn(async move {
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                if number >= count {
                    return;
                }
                assert!(client.get(&format!("{SECRETS}/{}", name(number))).await > 1000);
            }
        });
    }
    while let Some(ended) = workers.join_next().await {
        ended.unwrap();
    }
    begun.elapsed()
}

/// In a process of its own, as the agent is: prints the microseconds that `count` reads take.
pub(crate) fn run([address, root, token, count]: [&str; 4]) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (address, count) = (address.parse().unwrap(), count.parse().unwrap());
    println!("{}", runtime.block_on(gets(address, Path::new(root), token, count)).as_micros());
}
