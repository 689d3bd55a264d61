//! Where a CA is, and how to trust it: address, TLS roots, server name.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use rustix::net::sockopt;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use crate::auth::client_cert::ClientCertificate;
use crate::base::limits;
use crate::ca::CaError;
use crate::fs::file;
use crate::net::tls::{self, Alert, Presenter, Watched};
use crate::pki::pem;

/// `[https://|http://]HOST[:PORT]`. Without a scheme it is TLS, but for Istio's plaintext port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    host: String,
    port: u16,
    /// Whether the connection is without TLS.
    pub plaintext: bool,
}

impl Address {
    /// Istio's port for TLS.
    const TLS_PORT: u16 = 15012;
    /// Istio's port for plaintext.
    const PLAINTEXT_PORT: u16 = 15010;

    /// `https://HOST:PORT`, as gRPC's `:scheme` and `:authority`.
    pub fn origin(&self) -> String {
        let scheme = if self.plaintext { "http" } else { "https" };
        format!("{scheme}://{}", self.authority())
    }

    /// `HOST:PORT`.
    pub fn authority(&self) -> String {
        let Self { host, port, .. } = self;
        if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.origin())
    }
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let address = Self::with_ports(text, Self::TLS_PORT, Self::PLAINTEXT_PORT)?;
        let is_istios = address.port == Self::PLAINTEXT_PORT && !text.contains("://");
        Ok(Self { plaintext: address.plaintext || is_istios, ..address })
    }
}

impl Address {
    /// `text` as an address of a CA whose ports are these, where it names none.
    pub fn with_ports(text: &str, tls_port: u16, plaintext_port: u16) -> Result<Self, String> {
        let wrong = || {
            format!(
                "{text:?} is not an address of a CA; the shape is HOST:PORT (TLS) or http://HOST:PORT (plaintext)"
            )
        };
        let (scheme, rest) = match text.split_once("://") {
            Some((scheme @ ("http" | "https"), rest)) => (Some(scheme), rest),
            Some(_) => return Err(wrong()),
            None => (None, text),
        };
        let plaintext = scheme == Some("http");
        let authority: http::uri::Authority = rest.trim_end_matches('/').parse().map_err(|_| wrong())?;
        let host = authority.host().trim_start_matches('[').trim_end_matches(']').to_owned();
        if host.is_empty() || authority.as_str().contains('@') {
            return Err(wrong());
        }
        let port = match authority.as_str().strip_prefix(authority.host()) {
            Some("") if plaintext => plaintext_port,
            Some("") => tls_port,
            Some(port) => port.trim_start_matches(':').parse().map_err(|_| wrong())?,
            None => return Err(wrong()),
        };
        Ok(Self { host, port, plaintext })
    }
}

impl Address {
    /// `HOST:PORT` with neither a scheme nor a default: an IP address or a DNS name, and a port that is not 0.
    pub fn with_required_port(text: &str) -> Result<Self, String> {
        let parsed = Self::with_ports(text, 0, 0).ok().filter(|address| {
            let is_host = match text.starts_with('[') {
                true => address.host.parse::<std::net::Ipv6Addr>().is_ok(),
                false => address.host.parse::<std::net::Ipv4Addr>().is_ok() || is_dns_name(&address.host),
            };
            is_host && address.port != 0 && !text.contains('/')
        });
        parsed.ok_or_else(|| {
            "an endpoint is a name or an IP address and a port from 1 to 65535, like app:8080, 127.0.0.1:8080 or [::1]:8080"
                .to_owned()
        })
    }

    pub fn host(&self) -> &str {
        &self.host
    }

    pub fn port(&self) -> u16 {
        self.port
    }
}

/// A last label of digits means a mistyped IPv4 address, which no resolver would find.
fn is_dns_name(text: &str) -> bool {
    let is_label = |label: &str| {
        !label.is_empty() && label.chars().all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '_')
    };
    let name = text.strip_suffix('.').unwrap_or(text);
    let last = name.rsplit('.').next().unwrap_or_default();
    name.split('.').all(is_label) && !last.bytes().all(|byte| byte.is_ascii_digit())
}

/// Which roots the CA's own server certificate must chain to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Roots {
    /// Those of the operating system.
    System,
    /// A PEM file, read anew for each connection.
    File(PathBuf),
    /// The first of these PEM files that exists.
    FirstOf(Vec<PathBuf>),
}

/// Roots as they were read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trusted {
    roots: Vec<CertificateDer<'static>>,
    /// Where they came from.
    place: String,
}

impl Roots {
    /// Reads them. `option` names other ones.
    fn load(&self, option: &str) -> Result<Trusted, String> {
        let way_out = || format!("name the server's root with {option} FILE, or {option} system");
        let file = match self {
            Self::System => {
                let roots = rustls_native_certs::load_native_certs().certs;
                if roots.is_empty() {
                    return Err(format!("this machine has no system roots; {}", way_out()));
                }
                return Ok(Trusted { roots, place: "the system's roots".to_owned() });
            }
            Self::File(path) => path,
            Self::FirstOf(paths) => paths.iter().find(|path| is_there(path)).ok_or_else(|| {
                let places: Vec<_> = paths.iter().map(|path| path.display().to_string()).collect();
                format!("none of {} exists; {}", places.join(", "), way_out())
            })?,
        };
        let text = file::read(file, limits::FILE_BYTES)
            .map_err(|error| format!("{}: {error}; {}", file.display(), way_out()))?;
        let roots = pem::certificates(&text)
            .map_err(|error| format!("{}: {error}; {}", file.display(), way_out()))?;
        Ok(Trusted { roots, place: file.display().to_string() })
    }
}

/// What a link leads to may be replaced at this moment (the kubelet does so): it is there at the second look.
fn is_there(path: &Path) -> bool {
    path.exists() || (path.is_symlink() && path.exists())
}

/// A byte stream to a CA: TCP, with or without TLS.
pub trait Io: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Io for T {}

/// A connection to a CA.
pub struct Connected {
    /// Its bytes.
    pub io: Box<dyn Io>,
    /// Whether the CA asked for the client certificate, and got it. It has not looked at it yet.
    pub has_presented: bool,
    /// Why the CA ended it.
    pub alert: Alert,
}

/// What is spoken on a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// gRPC.
    Http2,
    /// REST.
    Http1,
}

impl Protocol {
    fn alpn(self) -> &'static [u8] {
        match self {
            Self::Http2 => b"h2",
            Self::Http1 => b"http/1.1",
        }
    }
}

/// What a person can set of a connection, for error messages.
#[derive(Debug)]
pub struct Options {
    /// The option with the address.
    pub address: &'static str,
    /// The one with the roots.
    pub roots: &'static str,
    /// How to have the certificate's name fit.
    pub rename: &'static str,
}

/// The options of a connection to a CA.
pub const CA_OPTIONS: &Options = &Options {
    address: "--ca-address",
    roots: "--ca-root",
    rename: "set --ca-server-name to the name it has",
};

/// Everything that is needed to connect.
#[derive(Clone, Debug)]
pub struct Endpoint {
    /// Where.
    pub address: Address,
    /// Whom to trust.
    pub roots: Roots,
    /// The name that the CA's certificate must carry, where it is not the address's host.
    pub server_name: Option<String>,
    /// What this is called on the command line.
    pub options: &'static Options,
}

impl Endpoint {
    /// A new connection, ready for `protocol`. Where the server asks for a client certificate, it gets `client`.
    pub async fn connect(
        &self,
        client: Option<&ClientCertificate>,
        protocol: Protocol,
    ) -> Result<Connected, CaError> {
        let trusted = self.trusted()?;
        self.connect_trusting(trusted.as_ref(), client, protocol, Duration::MAX).await
    }

    /// The roots as they are now; none for a connection without TLS.
    pub fn trusted(&self) -> Result<Option<Trusted>, CaError> {
        if self.address.plaintext {
            return Ok(None);
        }
        self.roots.load(self.options.roots).map(Some).map_err(CaError::Roots)
    }

    /// The same as `connect`, with roots that were read before. TCP and TLS have `patience` for their handshakes: where
    /// that is less than what the call has, the error can say which of them hangs.
    pub async fn connect_trusting(
        &self,
        trusted: Option<&Trusted>,
        client: Option<&ClientCertificate>,
        protocol: Protocol,
        patience: Duration,
    ) -> Result<Connected, CaError> {
        let address = self.address.to_string();
        let unreachable = |source| CaError::Unreachable { address: address.clone(), source };
        let tcp = self.connect_tcp(patience).await.map_err(unreachable)?;
        let Some(Trusted { roots, place }) = trusted else {
            return Ok(Connected { io: Box::new(tcp), has_presented: false, alert: Alert::default() });
        };
        let failed = |reason: String| CaError::Tls { address: address.clone(), reason };
        let mut store = RootCertStore::empty();
        store.add_parsable_certificates(roots.iter().cloned());
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
        let config = config.map_err(|error| failed(error.to_string()))?.with_root_certificates(store);
        let presenter = client.map(|client| Presenter::new(&client.pair).map(Arc::new)).transpose();
        let presenter = presenter.map_err(|error| failed(error.to_string()))?;
        let mut config = match presenter.clone() {
            Some(presenter) => config.with_client_cert_resolver(presenter),
            None => config.with_no_client_auth(),
        };
        config.alpn_protocols = vec![protocol.alpn().to_vec()];
        let name = self.server_name.as_ref().unwrap_or(&self.address.host).clone();
        let server_name = ServerName::try_from(name.clone())
            .map_err(|_| failed(format!("{name:?} is not a server name; {}", self.options.rename)))?;
        let connector = TlsConnector::from(Arc::new(config));
        let tls = tokio::time::timeout(patience, connector.connect(server_name, tcp)).await;
        let tls = tls.map_err(|_| {
            unreachable(silent("it takes connections, but answers no TLS handshake", patience))
        })?;
        let has_presented = presenter.is_some_and(|presenter| presenter.has_presented());
        let tls = tls.map_err(|error| match Alert::of(&error) {
            Some(alert) => tls::explain(alert, &address, client.filter(|_| has_presented)),
            None => match error.get_ref().and_then(|inner| inner.downcast_ref()) {
                Some(error) => failed(self.explain(error, place, &name)),
                // A load balancer without anybody behind it does so: it may pass by itself.
                None => CaError::Broken { address: address.clone(), source: self.with_tls_hint(&error) },
            },
        })?;
        let (io, alert) = Watched::new(tls);
        Ok(Connected { io: Box::new(io), has_presented, alert })
    }

    async fn connect_tcp(&self, patience: Duration) -> io::Result<TcpStream> {
        let addresses: Vec<_> =
            tokio::net::lookup_host((self.address.host.as_str(), self.address.port)).await?.collect();
        // One that does not answer must not take the time of the others.
        let share = patience / u32::try_from(addresses.len()).unwrap_or(u32::MAX).max(1);
        let mut outcome = Err(io::Error::new(io::ErrorKind::NotFound, "its name has no address"));
        for address in addresses {
            let connected = tokio::time::timeout(share, TcpStream::connect(address)).await;
            outcome = connected.unwrap_or_else(|_| Err(silent("nothing answers there", share)));
            if outcome.is_ok() {
                break;
            }
        }
        let tcp = outcome?;
        tcp.set_nodelay(true)?;
        keep_alive(&tcp);
        Ok(tcp)
    }

    /// What a failed handshake means for whoever has to mend it.
    fn explain(&self, error: &rustls::Error, trusted: &str, name: &str) -> String {
        use rustls::{CertificateError, Error};
        let Options { roots, rename, .. } = self.options;
        match error {
            // A bad signature: a root of the same name, but another key.
            Error::InvalidCertificate(CertificateError::UnknownIssuer | CertificateError::BadSignature) => {
                format!("its certificate is not signed by {trusted}; set {roots} to its root")
            }
            Error::InvalidCertificate(
                CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
            ) => format!("its certificate is not for the name {name}; {rename}"),
            // A server that answers a handshake in plain text.
            Error::InvalidMessage(_) => format!("{error}; {}", self.tls_hint()),
            other => other.to_string(),
        }
    }

    /// The end of a connection in its handshake. A server without TLS may end it so, too.
    fn with_tls_hint(&self, error: &io::Error) -> io::Error {
        let words = if is_end(error) { "the server ended it".to_owned() } else { error.to_string() };
        io::Error::new(error.kind(), format!("{words} in the TLS handshake; {}", self.tls_hint()))
    }

    fn tls_hint(&self) -> String {
        format!("is this a TLS port? Plaintext needs http:// in {}", self.options.address)
    }
}

/// Has the kernel look after a connection that waits for its next call, which wakes nobody: one whose other end has
/// vanished is closed. Where it can't, that shows in the next call.
fn keep_alive(tcp: &TcpStream) {
    const SILENCE: Duration = Duration::from_secs(5);
    const PROBES: u32 = 2;
    let _ = sockopt::set_tcp_keepidle(tcp, SILENCE);
    let _ = sockopt::set_tcp_keepintvl(tcp, SILENCE);
    let _ = sockopt::set_tcp_keepcnt(tcp, PROBES);
    let _ = sockopt::set_socket_keepalive(tcp, true);
}

fn silent(what: &str, patience: Duration) -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, format!("{what} within {patience:?}"))
}

/// Whether the other side ended the connection. Which of these it looks like is a matter of chance.
pub(crate) fn is_end(error: &io::Error) -> bool {
    use io::ErrorKind as Kind;
    matches!(
        error.kind(),
        Kind::UnexpectedEof | Kind::ConnectionReset | Kind::ConnectionAborted | Kind::BrokenPipe
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses() {
        let cases = [
            ("istiod.istio-system.svc:15012", Some("https://istiod.istio-system.svc:15012")),
            ("istiod:15010", Some("http://istiod:15010")),
            ("https://istiod:15010", Some("https://istiod:15010")),
            ("https://ca.example", Some("https://ca.example:15012")),
            ("http://127.0.0.1", Some("http://127.0.0.1:15010")),
            ("http://[::1]:80/", Some("http://[::1]:80")),
            ("[::1]:15012", Some("https://[::1]:15012")),
            ("", None),
            (":15012", None),
            ("host:", None),
            ("host:99999", None),
            ("host:1/path", None),
            ("ftp://host", None),
            ("user@host:1", None),
            ("two words", None),
        ];
        for (text, expected) in cases {
            let parsed = text.parse::<Address>();
            assert_eq!(parsed.as_ref().map(Address::origin).ok().as_deref(), expected, "{text}: {parsed:?}");
        }
    }

    #[test]
    fn roots_that_are_not_there_are_named_with_the_way_out() {
        let missing = PathBuf::from("/nowhere/root-cert.pem");
        for roots in [Roots::File(missing.clone()), Roots::FirstOf(vec![missing])] {
            let error = roots.load("--ca-root").unwrap_err();
            assert!(error.contains("/nowhere/root-cert.pem") && error.contains("--ca-root"), "{error}");
        }
    }
}
