//! Connections to a server: TCP, and TLS where its address says so.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use rustix::net::sockopt;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use crate::fs::disk::Disk;
use crate::net::address::Address;
use crate::net::error::{self, TlsError, TransportError};
use crate::net::tls::{self, Alert, Presenter, Roots, Trusted, Watched};
use crate::secret::KeyPair;

/// A byte stream to a server: TCP, with or without TLS.
pub trait Io: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Io for T {}

/// A connection to a server.
pub struct Connected {
    pub io: Box<dyn Io>,
    /// Whether the server asked for the client certificate, and got it. It may not have verified it yet.
    pub has_presented: bool,
    /// Why the server ended the connection.
    pub alert: Alert,
}

/// The protocol of a connection.
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

/// Everything that is needed to connect.
#[derive(Clone, Debug)]
pub struct Endpoint {
    pub address: Address,
    pub roots: Roots,
    /// The name that the server's certificate must carry, where it is not the address's host.
    pub server_name: Option<String>,
}

impl Endpoint {
    /// A new connection for `protocol`. A server that asks for a client certificate gets `client`.
    pub async fn connect(
        &self,
        client: Option<&KeyPair>,
        protocol: Protocol,
        disk: &Disk,
    ) -> Result<Connected, TransportError> {
        let trusted = self.trusted(disk).await?;
        self.connect_trusting(trusted.as_ref(), client, protocol, Duration::MAX).await
    }

    /// Reads the roots; none for a connection without TLS.
    pub async fn trusted(&self, disk: &Disk) -> Result<Option<Trusted>, TransportError> {
        if self.address.plaintext {
            return Ok(None);
        }
        Ok(Some(self.roots.load(disk).await?))
    }

    /// Like `connect`, with roots that were read before. TCP and TLS have `patience` each for their handshakes: where that
    /// is less than the call's timeout, the error can say which of them hangs.
    pub async fn connect_trusting(
        &self,
        trusted: Option<&Trusted>,
        client: Option<&KeyPair>,
        protocol: Protocol,
        patience: Duration,
    ) -> Result<Connected, TransportError> {
        let tcp = self.connect_tcp(patience).await.map_err(TransportError::Unreachable)?;
        match trusted {
            Some(trusted) => self.connect_tls(tcp, trusted, client, protocol, patience).await,
            None => Ok(Connected { io: Box::new(tcp), has_presented: false, alert: Alert::default() }),
        }
    }

    async fn connect_tcp(&self, patience: Duration) -> io::Result<TcpStream> {
        let addresses: Vec<_> =
            tokio::net::lookup_host((self.address.host.as_str(), self.address.port)).await?.collect();
        // An address that does not answer must not take the time of the others.
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

    async fn connect_tls(
        &self,
        tcp: TcpStream,
        trusted: &Trusted,
        client: Option<&KeyPair>,
        protocol: Protocol,
        patience: Duration,
    ) -> Result<Connected, TransportError> {
        let presenter =
            client.map(|pair| Presenter::new(pair).map(Arc::new)).transpose().map_err(TlsError::from)?;
        let config =
            tls::client_config(trusted, presenter.clone(), protocol.alpn()).map_err(TlsError::from)?;
        let name = self.server_name.as_ref().unwrap_or(&self.address.host);
        let server_name =
            ServerName::try_from(name.clone()).map_err(|_| TlsError::InvalidName { name: name.clone() })?;
        let connector = TlsConnector::from(Arc::new(config));
        let handshake = tokio::time::timeout(patience, connector.connect(server_name, tcp)).await;
        let handshake = handshake.map_err(|_| {
            let hangs = "it takes connections, but answers no TLS handshake";
            TransportError::Unreachable(silent(hangs, patience))
        })?;
        let has_presented = presenter.is_some_and(|presenter| presenter.has_presented());
        let tls = handshake.map_err(|error| match Alert::of(&error) {
            Some(alert) => TlsError::of_alert(alert, has_presented).into(),
            None => match error.get_ref().and_then(|inner| inner.downcast_ref()) {
                Some(error) => TlsError::of(error, &trusted.place, name).into(),
                None if error::is_closed_by_peer(&error) => {
                    TransportError::Handshake(io::Error::new(error.kind(), error::CLOSED_BY_PEER))
                }
                None => TransportError::Handshake(error),
            },
        })?;
        let (io, alert) = Watched::new(tls);
        Ok(Connected { io: Box::new(io), has_presented, alert })
    }
}

/// Makes the kernel close an idle connection whose other end has vanished, without waking the agent. Where the kernel
/// can't, the next call finds out.
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
