//! The agent, its CA, and the files that it serves.

use std::net::SocketAddr;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use attache::pki::pem;
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, KeyUsagePurpose, PKCS_ECDSA_P521_SHA512};
use rustls::pki_types::CertificateDer;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tokio::sync::watch;
use tokio::time::timeout;

use super::neighbours::Follower;
use super::record::Record;
use crate::support::dead_fs::DeadFs;
use crate::support::envoy::http_get;
use crate::support::fake_ca::FakeCa;
use crate::support::files::{Mounted, spiffe, swap, token, write_token};
use crate::support::process::{Agent, PATIENCE, flags, strs};
use crate::support::proxy::Proxy;

/// The life of a certificate: half of it is far more than any fault of the CA lasts.
pub const LIFE: Duration = Duration::from_secs(30);
pub const DRAIN: Duration = Duration::from_secs(3);
/// Roots of a bundle, the most that the agent takes from one file, and those that they are drawn from.
const ROOTS: usize = 500;
const MORE_ROOTS: usize = 520;
/// CAs that sign the mounted sets in turn, so that the roots change with each set.
const AUTHORITIES: usize = 4;

/// What a key pair's and a bundle's followers are to see: certificates, and the key of a pair.
pub type Content = (String, Option<String>);

/// All that turns act on.
pub struct Stage {
    pub directory: PathBuf,
    pub socket: PathBuf,
    pub admin: PathBuf,
    pub status: SocketAddr,
    pub ca: FakeCa,
    /// Between the agent and the CA.
    pub line: Proxy,
    pub volume: Volume,
    pub followers: OnceLock<Vec<Follower>>,
    /// The number of certificates that the agent has pushed.
    pub renewed: watch::Sender<usize>,
    /// The newest of them.
    pub newest: watch::Sender<Content>,
    pub record: Record,
    /// Where turns mount file systems that do not answer, in the agent's namespace.
    pub mounts: tokio::sync::Mutex<DeadFs>,
    roots: OnceLock<Vec<CertificateDer<'static>>>,
}

impl Stage {
    pub async fn start(directory: &Path, record: Record) -> (Arc<Self>, Agent) {
        let ca = FakeCa::start(directory, &spiffe("web")).await;
        let line = Proxy::start(ca.address);
        let path = |name: &str| directory.join(name).display().to_string();
        for name in ["state", "credentials", "named", "output"] {
            std::fs::DirBuilder::new().mode(0o700).create(path(name)).unwrap();
        }
        // It outlives the longest run.
        let token = token("web", "istio-ca", 365 * 24 * 3600);
        write_token(&directory.join("credentials/token"), &token);
        let options = [
            ("--ca-address", format!("http://{}", line.address)),
            ("--token-file", path("credentials/token")),
            ("--cert-ttl", format!("{}s", LIFE.as_secs())),
            ("--ca-timeout", "3s".to_owned()),
            ("--drain-timeout", format!("{}s", DRAIN.as_secs())),
            ("--admin-socket", path("admin")),
            ("--state-dir", path("state")),
            ("--output-dir", path("output")),
        ];
        let volume = Volume::new(directory);
        let (mut agent, mounts) = DeadFs::agent(directory, "soak", &strs(&flags(options)), &[]);
        agent.process.wait_log(" ready ").await;
        let stage = Self {
            directory: directory.to_owned(),
            socket: agent.socket.clone(),
            admin: directory.join("admin"),
            status: agent.status_address().await,
            ca,
            line,
            volume,
            followers: OnceLock::new(),
            renewed: watch::Sender::new(0),
            newest: watch::Sender::default(),
            record,
            mounts: tokio::sync::Mutex::new(mounts),
            roots: OnceLock::new(),
        };
        (Arc::new(stage), agent)
    }

    /// A bundle of as many P-521 roots as one file may hold, others each time.
    pub fn large_bundle(&self, random: &mut fastrand::Rng) -> Vec<u8> {
        let roots = self.roots.get_or_init(|| {
            let key = rcgen::KeyPair::generate_for(&PKCS_ECDSA_P521_SHA512).unwrap();
            let root = |number: usize| {
                let mut params = CertificateParams::default();
                params.distinguished_name.push(DnType::CommonName, format!("Root {number}"));
                params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
                params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
                params.self_signed(&key).unwrap().der().clone()
            };
            (0..MORE_ROOTS).map(root).collect()
        });
        let mut order: Vec<_> = roots.iter().collect();
        random.shuffle(&mut order);
        pem::of_certificates(order.into_iter().take(ROOTS))
    }

    /// Whether the last renewal failed.
    pub async fn is_failing(&self) -> bool {
        let page = http_get(self.status, "/metrics").await;
        let sample = "attache_secret_failing{name=\"default\"} 1";
        page.is_ok_and(|(_, _, page)| page.lines().any(|line| line == sample))
    }

    /// Calls the admin socket as `attache status` and `renew` do; returns the HTTP status.
    pub async fn call_admin(&self, method: &str, path: &str) -> std::io::Result<u16> {
        let answer = timeout(PATIENCE, async {
            let mut stream = UnixStream::connect(&self.admin).await?;
            let request = format!("{method} {path} HTTP/1.1\r\nhost: attache\r\nconnection: close\r\n\r\n");
            stream.write_all(request.as_bytes()).await?;
            let mut answer = Vec::new();
            stream.read_to_end(&mut answer).await?;
            std::io::Result::Ok(answer)
        });
        let answer = answer.await.map_err(|_| std::io::Error::from(std::io::ErrorKind::TimedOut))??;
        let text = String::from_utf8_lossy(&answer);
        let status = text.split(' ').nth(1).and_then(|status| status.parse().ok());
        status.ok_or_else(|| std::io::Error::other(format!("not an answer: {text:?}")))
    }
}

/// A key pair and its roots in a directory such as the kubelet mounts, which streams name.
pub struct Volume {
    pub path: PathBuf,
    directory: PathBuf,
    made: AtomicUsize,
    /// Every set that was ever written, as its followers see it.
    written: Mutex<Vec<[Content; 2]>>,
}

impl Volume {
    fn new(directory: &Path) -> Self {
        let volume = Self {
            path: directory.join("volume"),
            directory: directory.to_owned(),
            made: AtomicUsize::new(0),
            written: Mutex::default(),
        };
        swap(&volume.path, volume.next().files());
        volume
    }

    /// The names of the key pair and the roots.
    pub fn names(&self) -> [String; 2] {
        let path = self.path.display();
        [format!("file-cert:{path}/cert-chain.pem~{path}/key.pem"), format!("file-root:{path}/root-cert.pem")]
    }

    /// A new set, which is to be written next.
    pub fn next(&self) -> Mounted {
        let authority = self.made.fetch_add(1, Ordering::Relaxed) % AUTHORITIES;
        let set = Mounted::new(&self.directory.join(format!("authority-{authority}")), "web");
        self.expect(&set);
        set
    }

    /// From now on this is the set that followers are to see.
    pub fn expect(&self, set: &Mounted) {
        let text = |pem: &[u8]| String::from_utf8(pem.to_vec()).unwrap();
        let pair = (text(&set.chain), Some(text(&set.key)));
        self.written.lock().unwrap().push([pair, (text(&set.root), None)]);
    }

    /// What the followers of `name` are to see now.
    pub fn expected(&self, name: &str) -> Content {
        let written = self.written.lock().unwrap();
        let [pair, roots] = written.last().unwrap();
        if name.starts_with("file-cert:") { pair.clone() } else { roots.clone() }
    }

    /// Whether a content is one that was written as one set.
    pub fn has_written(&self, content: &Content) -> bool {
        self.written.lock().unwrap().iter().rev().any(|set| set.contains(content))
    }
}
