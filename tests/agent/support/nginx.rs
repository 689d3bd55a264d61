//! A real nginx as a child process, with its key pair and roots in files.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use rustix::process::{Pid, Signal, kill_process_group};
use rustls::client::Resumption;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, aws_lc_rs, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, SignatureScheme};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpStream, UnixStream};
use tokio::process::{Child, Command};
use tokio::time::{Instant, sleep, timeout};
use tokio_rustls::TlsConnector;

use super::installed::installed;
use super::process::PATIENCE;

/// The path of nginx, downloaded by the first test that needs it.
async fn binary() -> PathBuf {
    installed("get-nginx", &[]).await
}

/// A running nginx, master and workers; dropping it kills them.
pub struct Nginx {
    pub socket: PathBuf,
    /// A shell command that reloads its files, and exits afterwards. nginx pauses for 100 ms after each reload, which
    /// limits how often it can run.
    pub reload: String,
    log: PathBuf,
    master: Child,
    group: Pid,
}

impl Nginx {
    /// Starts it with its own files in `directory/NAME`, and with the TLS files in `certs`.
    pub async fn start(directory: &Path, name: &str, certs: &Path) -> Self {
        let directory = directory.join(name);
        std::fs::create_dir(&directory).unwrap();
        let (place, certs) = (directory.display(), certs.display());
        // The body says whether the caller's certificate chains to the roots.
        let configuration = format!(
            r#"daemon off; worker_processes 1; pid "{place}/pid"; error_log "{place}/error.log" notice;
            events {{}}
            http {{
                access_log off;
                client_body_temp_path "{place}/body"; proxy_temp_path "{place}/proxy";
                fastcgi_temp_path "{place}/fastcgi"; uwsgi_temp_path "{place}/uwsgi";
                scgi_temp_path "{place}/scgi";
                server {{
                    listen "unix:{place}/socket" ssl;
                    ssl_certificate "{certs}/cert-chain.pem"; ssl_certificate_key "{certs}/key.pem";
                    ssl_client_certificate "{certs}/root-cert.pem"; ssl_verify_client optional_no_ca;
                    ssl_session_cache off; ssl_session_tickets off;
                    return 200 "$ssl_client_verify";
                }}
            }}"#
        );
        std::fs::write(directory.join("conf"), configuration).unwrap();
        let (log, socket) = (directory.join("error.log"), directory.join("socket"));
        let arguments = ["-p", directory.to_str().unwrap(), "-e", log.to_str().unwrap(), "-c", "conf"];
        let binary = binary().await;
        let mut master = Command::new(&binary)
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(std::fs::File::create(directory.join("stderr")).unwrap())
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let group = Pid::from_raw(master.id().unwrap().try_into().unwrap()).unwrap();
        let deadline = Instant::now() + PATIENCE;
        while UnixStream::connect(&socket).await.is_err() {
            let log = std::fs::read_to_string(directory.join("stderr")).unwrap();
            assert!(master.try_wait().unwrap().is_none() && Instant::now() < deadline, "no start:\n{log}");
            sleep(Duration::from_millis(10)).await;
        }
        // `-s reload` only sends a signal. The new workers start after all files have been read.
        let reload = format!(
            "count() {{ grep -c 'start worker processes' '{log}'; }}; before=$(count) && \
             '{binary}' {arguments} -s reload && until [ \"$(count)\" -gt \"$before\" ]; do sleep 0.002; done",
            log = log.display(),
            binary = binary.display(),
            arguments = arguments.map(|argument| format!("'{argument}'")).join(" "),
        );
        Self { socket, reload, log, master, group }
    }

    /// Its errors and warnings.
    pub fn errors(&self) -> Vec<String> {
        let log = std::fs::read_to_string(&self.log).unwrap();
        let is_bad = |line: &&str| {
            ["[emerg]", "[alert]", "[crit]", "[error]", "[warn]"].iter().any(|level| line.contains(level))
        };
        log.lines().filter(is_bad).map(str::to_owned).collect()
    }

    /// The number of reloads since its start.
    pub fn reloads(&self) -> usize {
        let log = std::fs::read_to_string(&self.log).unwrap();
        log.matches("start worker processes").count() - 1
    }

    /// Whether the master is still running.
    pub fn is_running(&mut self) -> bool {
        self.master.try_wait().unwrap().is_none()
    }
}

impl Drop for Nginx {
    fn drop(&mut self) {
        let _ = kill_process_group(self.group, Signal::KILL);
    }
}

/// A client with a certificate of its own.
pub struct Client(TlsConnector);

impl Client {
    pub fn new(chain: Vec<CertificateDer<'static>>, key: PrivateKeyDer<'static>) -> Self {
        let provider = Arc::new(aws_lc_rs::default_provider());
        let verifier = Arc::new(HoldsItsKey(Arc::clone(&provider)));
        let mut config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .dangerous()
            .with_custom_certificate_verifier(verifier)
            .with_client_auth_cert(chain, key)
            .unwrap();
        config.resumption = Resumption::disabled();
        Self(TlsConnector::from(Arc::new(config)))
    }

    /// A handshake and a request: the server's leaf, and the body.
    pub async fn ask(&self, socket: &Path) -> Result<(CertificateDer<'static>, String)> {
        let talk = async { self.talk(UnixStream::connect(socket).await.context("connecting")?).await };
        timeout(PATIENCE, talk).await?
    }

    /// The same of a server with an address.
    pub async fn ask_at(&self, to: SocketAddr) -> Result<(CertificateDer<'static>, String)> {
        let talk = async { self.talk(TcpStream::connect(to).await.context("connecting")?).await };
        timeout(PATIENCE, talk).await?
    }

    async fn talk(
        &self,
        io: impl AsyncRead + AsyncWrite + Unpin,
    ) -> Result<(CertificateDer<'static>, String)> {
        let name = ServerName::try_from("nginx")?;
        let mut stream = self.0.connect(name, io).await.context("the handshake")?;
        let chain = stream.get_ref().1.peer_certificates().context("no certificate")?;
        let leaf = chain.first().context("no certificate")?.clone().into_owned();
        stream
            .write_all(b"GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
            .await
            .context("the request")?;
        // Not up to the end of the connection: a server may wait for the client to end it.
        let (mut answer, mut buffer) = (Vec::new(), [0; 4096]);
        let (head, body) = loop {
            let text = String::from_utf8_lossy(&answer).into_owned();
            if let Some((head, body)) = text.split_once("\r\n\r\n") {
                let length = head.to_ascii_lowercase();
                let length =
                    length.lines().find_map(|line| line.strip_prefix("content-length: ")?.parse().ok());
                if length.is_some_and(|length: usize| body.len() >= length) {
                    break (head.to_owned(), body.to_owned());
                }
            }
            let read = stream.read(&mut buffer).await.context("the answer")?;
            anyhow::ensure!(read > 0, "the answer is cut short: {text:?}");
            answer.extend(&buffer[..read]);
        };
        anyhow::ensure!(head.starts_with("HTTP/1.1 200 "), "{head}");
        Ok((leaf, body))
    }
}

/// Accepts any certificate whose key the server has; the test checks which one it is.
#[derive(Debug)]
struct HoldsItsKey(Arc<CryptoProvider>);

impl ServerCertVerifier for HoldsItsKey {
    fn verify_server_cert(
        &self,
        _leaf: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        leaf: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(message, leaf, signed, &self.0.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        leaf: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, leaf, signed, &self.0.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
