//! `attache ca`: the development CA as a server.

mod directories;
mod token;

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use rustls::RootCertStore;
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing_subscriber::filter::Targets;

use crate::agent::Signals;
use crate::base::clock::Clock;
use crate::base::limits;
use crate::base::spiffe_id::SpiffeId;
use crate::ca::embedded::DevelopmentCa;
use crate::ca::embedded::follow::Follower;
use crate::ca::embedded::server::{CaServer, CaServerSettings};
use crate::config::parse_duration;
use crate::fs::disk::Disk;
use crate::net::http2::{self, AnyService};
use crate::ops::telemetry;
use crate::os::hardening::{protect_memory, refuse_new_privileges};
use crate::pki::certificate::Certificate;
use crate::proto::istio::v1::auth::istio_certificate_service_server::IstioCertificateServiceServer;

/// A development CA that speaks Istio's CA protocol.
///
/// The CA keeps its root and intermediate in a directory: one that it makes by itself, or one of attache ca intermediate. It
/// follows the directory: changed files count once they all fit together. It issues the identity in the sub of the caller's
/// token (system:serviceaccount:NAMESPACE:ACCOUNT, audience istio-ca) without checking the token's signature. A caller may
/// present a client certificate below one of its roots instead (over TLS), and gets the SPIFFE ID in it. It is for trying things
/// out, not for production.
#[derive(Clone, Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(super) struct CaArgs {
    #[command(subcommand)]
    command: Option<CaCommand>,
    /// Where to listen; with port 0 the kernel chooses a free port
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:15012")]
    listen: SocketAddr,
    /// The directory of root and intermediate, created if missing
    #[arg(long, value_name = "DIR", default_value = "./attache-ca")]
    ca_dir: PathBuf,
    /// The longest lifetime; requests for more are refused, as by istiod
    #[arg(long, value_name = "DURATION", default_value = "2160h", value_parser = parse_ttl)]
    max_ttl: Duration,
    /// Serve without TLS
    #[arg(long)]
    plaintext: bool,
    /// The identity of every caller, instead of the one in its token or client certificate
    #[arg(long, value_name = "ID")]
    spiffe_id: Option<SpiffeId>,
    /// The trust domain of identities from tokens
    #[arg(long, value_name = "NAME", default_value = "cluster.local", value_parser = parse_trust_domain)]
    trust_domain: String,
    /// The cluster id that callers must send, if they send one
    #[arg(long, value_name = "ID", default_value = "Kubernetes")]
    cluster_id: String,
    /// The log level: error, warn, info, debug or trace
    #[arg(long, value_name = "LEVEL", default_value = "info")]
    log_level: tracing::Level,
}

#[derive(Clone, Debug, clap::Subcommand)]
enum CaCommand {
    Init(directories::InitArgs),
    Intermediate(directories::IntermediateArgs),
    Announce(directories::AnnounceArgs),
    Drop(directories::DropArgs),
    Exchange(directories::ExchangeArgs),
    Token(token::TokenArgs),
}

fn parse_ttl(text: &str) -> Result<Duration, String> {
    let ttl = parse_duration(text)?;
    if ttl < Duration::from_secs(1) {
        Err(format!("{text:?} is too short: the minimum is 1s"))
    } else {
        Ok(ttl)
    }
}

fn parse_trust_domain(text: &str) -> Result<String, String> {
    let identity: Result<SpiffeId, _> = format!("spiffe://{text}").parse();
    match identity {
        Ok(identity) if identity.trust_domain() == text => Ok(text.to_owned()),
        Ok(_) => Err(format!("{text:?} is not a trust domain: it has a path")),
        Err(error) => Err(error.to_string()),
    }
}

/// The DNS names in the server's certificate.
const SERVER_NAMES: [&str; 3] =
    ["istiod.istio-system.svc", "istiod.istio-system.svc.cluster.local", "localhost"];
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// When the server's certificate is replaced; it is valid for 30 days.
const MAX_SERVER_CERTIFICATE_AGE: Duration = Duration::from_secs(10 * 24 * 3600);

/// Serves until SIGTERM or SIGINT, or runs one of the commands that need no server.
pub(super) fn run(args: &CaArgs) -> anyhow::Result<()> {
    match &args.command {
        Some(CaCommand::Init(args)) => return directories::init(args),
        Some(CaCommand::Intermediate(args)) => return directories::intermediate(args),
        Some(CaCommand::Announce(args)) => return directories::announce(args),
        Some(CaCommand::Drop(args)) => return directories::withdraw(args),
        Some(CaCommand::Exchange(args)) => return directories::exchange(args),
        Some(CaCommand::Token(args)) => return token::run(args),
        None => {}
    }
    let filter = Targets::new().with_default(args.log_level);
    let log = telemetry::init(&telemetry::LogConfig { filter, json: false });
    let outcome = super::block_on(serve(args.clone()));
    log.close(None);
    outcome
}

async fn serve(args: CaArgs) -> anyhow::Result<()> {
    protect_memory();
    refuse_new_privileges();
    let clock = Clock::system();
    let ca = DevelopmentCa::open(&args.ca_dir, clock.clone())?;
    let root = ca.root_file();
    let (follower, ca) = Follower::new(ca, Disk::default());
    let listener = TcpListener::bind(args.listen)
        .await
        .with_context(|| format!("listening on {} failed; choose another --listen", args.listen))?;
    let address = listener.local_addr().unwrap_or(args.listen);
    let scheme = if args.plaintext { "http" } else { "https" };
    tracing::warn!("development CA: tokens are not verified");
    tracing::info!(address = %format!("{scheme}://{address}"), root = %root.display(), "CA listening");
    let server = CaServer::new(CaServerSettings {
        ca: ca.clone(),
        identity: args.spiffe_id,
        trust_domain: args.trust_domain,
        cluster_id: args.cluster_id,
        max_ttl: args.max_ttl,
        clock,
    });

    let stop = CancellationToken::new();
    let calls = TaskTracker::new();
    let mut tls = if args.plaintext { None } else { Some(Tls::new(ca, address.ip())?) };
    let connection = |io: TcpStream| {
        // Small answers must not wait for the acknowledgement of earlier ones.
        let _ = io.set_nodelay(true);
        let (server, stop) = (server.clone(), stop.clone());
        match tls.as_mut().map(Tls::acceptor) {
            None => drop(calls.spawn(http2::serve_any(Box::new(io), service(server), stop))),
            Some(Ok(acceptor)) => drop(calls.spawn(serve_tls(acceptor, io, server, stop))),
            Some(Err(error)) => tracing::error!(%error, "server certificate not issued"),
        }
    };
    let mut signals = Signals::new()?;
    tokio::select! {
        () = http2::accept("the CA's address", |cx| listener.poll_accept(cx), connection, &stop) => {}
        () = follower.run() => {}
        name = signals.next() => tracing::info!(signal = name, "stopping"),
    }
    stop.cancel();
    calls.close();
    tokio::select! {
        () = calls.wait() => {}
        () = tokio::time::sleep(Duration::from_secs(1)) => {}
        _ = signals.next() => {}
    }
    Ok(())
}

fn service(server: CaServer) -> AnyService {
    let server = IstioCertificateServiceServer::new(server);
    AnyService::new(server.max_decoding_message_size(limits::REQUEST_BYTES))
}

async fn serve_tls(acceptor: TlsAcceptor, io: TcpStream, server: CaServer, stop: CancellationToken) {
    let peer = io.peer_addr().ok().map(tracing::field::display);
    let io = match tokio::time::timeout(HANDSHAKE_TIMEOUT, acceptor.accept(io)).await {
        Ok(Ok(io)) => io,
        Ok(Err(error)) => {
            match refusal(&error) {
                Some(reason) => tracing::warn!(peer, reason, "client certificate refused"),
                None => tracing::warn!(peer, %error, "TLS handshake failed"),
            }
            return;
        }
        Err(_) => {
            tracing::debug!(peer, "TLS handshake timed out");
            return;
        }
    };
    let (_, tls) = io.get_ref();
    let leaf = tls.peer_certificates().and_then(<[_]>::first);
    let server = match leaf.map(Certificate::parse).transpose() {
        Ok(Some(certificate)) => server.for_caller(certificate),
        Ok(None) => server,
        Err(error) => {
            tracing::warn!(peer, %error, "client certificate refused");
            return;
        }
    };
    http2::serve_any(Box::new(io), service(server), stop).await;
}

/// Why a client certificate is refused, if that is the reason for the failed handshake.
fn refusal(error: &io::Error) -> Option<String> {
    use rustls::{CertificateError, Error};
    let Error::InvalidCertificate(error) = error.get_ref()?.downcast_ref()? else { return None };
    Some(match error {
        CertificateError::Expired | CertificateError::ExpiredContext { .. } => "it has expired".to_owned(),
        CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
            "it is not valid yet".to_owned()
        }
        // A bad signature comes from an issuer of the same name with another key.
        CertificateError::UnknownIssuer | CertificateError::BadSignature => {
            "it does not chain to this CA's root".to_owned()
        }
        other => other.to_string(),
    })
}

/// The server's TLS, with a certificate from the CA itself, which is replaced long before it expires and when the CA
/// changes.
struct Tls {
    ca: watch::Receiver<Arc<DevelopmentCa>>,
    addresses: Vec<IpAddr>,
    acceptor: TlsAcceptor,
    issued: Instant,
}

impl Tls {
    fn new(ca: watch::Receiver<Arc<DevelopmentCa>>, address: IpAddr) -> anyhow::Result<Self> {
        let addresses = vec![IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST), address];
        let acceptor = Self::make(&ca.borrow(), &addresses)?;
        Ok(Self { ca, addresses, acceptor, issued: Instant::now() })
    }

    fn acceptor(&mut self) -> anyhow::Result<TlsAcceptor> {
        let is_changed = self.ca.has_changed().unwrap_or_default();
        if is_changed || self.issued.elapsed() > MAX_SERVER_CERTIFICATE_AGE {
            let ca = Arc::clone(&self.ca.borrow_and_update());
            self.acceptor = Self::make(&ca, &self.addresses)?;
            self.issued = Instant::now();
        }
        Ok(self.acceptor.clone())
    }

    fn make(ca: &DevelopmentCa, addresses: &[IpAddr]) -> anyhow::Result<TlsAcceptor> {
        let (chain, key) = ca.issue_server(&SERVER_NAMES, addresses)?;
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let mut roots = RootCertStore::empty();
        // Callers renew with certificates of the root before this one, too.
        for root in ca.roots() {
            roots.add(root.clone())?;
        }
        // A caller without a client certificate has a token.
        let clients = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider))
            .allow_unauthenticated()
            .build()?;
        let mut config = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_client_cert_verifier(clients)
            .with_single_cert(chain, key.der().clone_key())?;
        // The client certificate of a resumed session would not be checked.
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        config.alpn_protocols = vec![b"h2".to_vec()];
        Ok(TlsAcceptor::from(Arc::new(config)))
    }
}
