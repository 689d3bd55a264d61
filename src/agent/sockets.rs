//! The sockets and addresses that the agent listens on, and the accept loops.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use rustix::net::{RecvFlags, recv};
use tokio::io::Interest;
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::Instrument as _;

use crate::base::limits;
use crate::config::{AdminSocket, Config, default_admin_socket};
use crate::export::ready_file::ReadyFile;
use crate::fs::disk::Disk;
use crate::net::http1::{Connections, Place};
use crate::net::http2;
use crate::ops::admin::Admin;
use crate::os::systemd::PassedSocket;
use crate::serve::listener::{Listener, SocketFile};
use crate::serve::peer::{AdminPeers, Peers};
use crate::serve::sds::SecretDiscovery;

/// Everything that another process may hold already.
pub(super) struct Sockets {
    pub(super) sds: SdsSockets,
    pub(super) admin: Option<Listener>,
    pub(super) status: Option<TcpListener>,
    pub(super) page: Option<TcpListener>,
    pub(super) ready_file: Option<ReadyFile>,
}

/// The sockets on which the secrets are served.
pub(super) struct SdsSockets {
    /// The one that admin commands go by.
    pub(super) first: Listener,
    pub(super) others: Vec<Listener>,
}

impl SdsSockets {
    /// Takes over the sockets that were `passed` to the agent; if there are none, opens those that `config` names.
    fn open(config: &Config, passed: Vec<PassedSocket>) -> anyhow::Result<Self> {
        let take = |passed| Listener::passed(passed).context("taking over the SDS socket failed");
        let bind = |path: &Path| Listener::bind(path, config.socket_mode, "--socket");
        let mut passed = passed.into_iter();
        Ok(match passed.next() {
            Some(first) => Self { first: take(first)?, others: passed.map(take).collect::<Result<_, _>>()? },
            None => Self {
                first: bind(&config.socket)?,
                others: config.other_sockets.iter().map(|path| bind(path)).collect::<Result<_, _>>()?,
            },
        })
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Listener> {
        std::iter::once(&self.first).chain(&self.others)
    }

    pub(super) fn paths(&self) -> Vec<PathBuf> {
        self.iter().map(|socket| socket.path().to_owned()).collect()
    }

    /// The sockets, and the guards that remove their files on drop.
    pub(super) fn into_parts(self) -> impl Iterator<Item = (UnixListener, Option<SocketFile>)> {
        std::iter::once(self.first).chain(self.others).map(Listener::into_parts)
    }
}

impl Sockets {
    /// Opens what `config` names, except for the sockets that were passed to the agent.
    pub(super) async fn open(
        config: &Config,
        sds: Vec<PassedSocket>,
        admin: Option<PassedSocket>,
        disk: &Disk,
    ) -> anyhow::Result<Self> {
        let sds = SdsSockets::open(config, sds)?;
        let admin = match (admin, &config.admin_socket) {
            (Some(passed), _) => {
                Some(Listener::passed(passed).context("taking over the admin socket failed")?)
            }
            (None, Some(socket)) => bind_admin(socket, sds.first.path())?,
            (None, None) => None,
        };
        let status = bind_http(config.status_address, "--status-address", "probes and metrics").await?;
        let page = bind_http(config.admin_address, "--admin-address", "the status page").await?;
        // A dead agent's ready file must not pass for ours. A live agent's stays, also where this agent doesn't start.
        let claim = |path| ReadyFile::claim(path, disk);
        let ready_file = config.ready_file.clone().map(claim).transpose()?;
        Ok(Self { sds, admin, status, page, ready_file })
    }
}

/// The admin socket of the agent that serves `sds`, unless an option names another path. Only one that an option names is
/// worth not starting.
pub(super) fn bind_admin(socket: &AdminSocket, sds: &Path) -> anyhow::Result<Option<Listener>> {
    let path = if socket.is_named { socket.path.clone() } else { default_admin_socket(sds) };
    match Listener::bind(&path, 0o600, "--admin-socket") {
        Ok(listener) => Ok(Some(listener)),
        Err(error) if socket.is_named => Err(error.into()),
        Err(error) => {
            tracing::warn!(reason = %error, "no admin socket: attache status, renew and log are unavailable");
            Ok(None)
        }
    }
}

/// The admin socket of a node's agent, whose directory is created if it is the usual one.
pub(super) fn bind_nodes_admin(socket: &AdminSocket) -> anyhow::Result<Option<Listener>> {
    if let (false, Some(directory)) = (socket.is_named, socket.path.parent()) {
        // A failure shows when the socket is bound.
        let _ = std::fs::DirBuilder::new().mode(0o755).create(directory);
    }
    match Listener::bind(&socket.path, 0o600, "--admin-socket") {
        Ok(listener) => Ok(Some(listener)),
        Err(error) if socket.is_named => Err(error.into()),
        Err(error) => {
            tracing::warn!(reason = %error, "no admin socket: attache status, renew and log are unavailable");
            Ok(None)
        }
    }
}

/// Removes the files of sockets. Each disk has its own time to answer.
pub(super) async fn remove(files: Vec<SocketFile>, disk: &Disk) {
    let mut removals = JoinSet::new();
    for file in files {
        let (path, disk) = (file.path().to_owned(), disk.clone());
        removals.spawn(async move {
            if let Err(reason) = disk.run(&path, move || drop(file)).await {
                tracing::warn!(%reason, "socket not removed");
            }
        });
    }
    removals.join_all().await;
}

/// A listener for `purpose` on the address that `option` names.
pub(super) async fn bind_http(
    address: Option<SocketAddr>,
    option: &str,
    purpose: &str,
) -> anyhow::Result<Option<TcpListener>> {
    let Some(address) = address else { return Ok(None) };
    let listener = TcpListener::bind(address).await;
    let failed = || format!("listening on {address} for {purpose} failed; choose another {option}, or none");
    listener.map(Some).with_context(failed)
}

/// The address that the listener is bound to.
pub(super) fn address_of(listener: &Option<TcpListener>) -> Option<SocketAddr> {
    listener.as_ref()?.local_addr().ok()
}

/// Whether only this machine can connect.
pub(super) fn is_local(listener: &TcpListener) -> bool {
    listener.local_addr().is_ok_and(|address| address.ip().is_loopback())
}

/// Returns when the client has sent something or closed the connection. What it sent stays to be read.
async fn first_byte(io: &UnixStream) -> io::Result<()> {
    let look = || {
        let read = recv(io, &mut [0_u8], RecvFlags::PEEK);
        read.map(drop).map_err(io::Error::from)
    };
    io.async_io(Interest::READABLE, look).await
}

/// Serves connections, which are tracked, until `stop` is cancelled.
#[derive(Clone, Debug)]
pub(super) struct Server {
    pub(super) calls: TaskTracker,
    pub(super) stop: CancellationToken,
}

impl Server {
    /// Serves SDS.
    pub(super) async fn sds(&self, socket: &UnixListener, peers: &Peers, service: &SecretDiscovery) {
        let serve = |io| {
            let Some(place) = peers.admit(&io) else { return };
            let Some(service) = service.connection() else { return };
            let stop = self.stop.clone();
            let connection = async move {
                // A client that has sent nothing yet is not waited for when the agent stops.
                let has_begun = tokio::select! {
                    begun = first_byte(&io) => begun.is_ok(),
                    () = stop.cancelled() => false,
                };
                if has_begun {
                    http2::serve(io, service, stop).await;
                }
                drop(place);
            };
            self.calls.spawn(connection.in_current_span());
        };
        http2::accept("the SDS socket", |cx| socket.poll_accept(cx), serve, &self.stop).await;
    }

    /// Serves the admin socket.
    pub(super) async fn admin(self, socket: UnixListener, peers: AdminPeers, admin: Admin) {
        let connections = Connections::new(limits::STATUS_CONNECTIONS);
        let serve = |io| {
            if peers.admits(&io)
                && let Some(place) = connections.admit()
            {
                self.calls.spawn(admin.clone().serve(io, place, self.stop.clone()));
            }
        };
        http2::accept("the admin socket", |cx| socket.poll_accept(cx), serve, &self.stop).await;
    }

    /// Serves probes or browsers on `listener`, which logs call `what`.
    pub(super) async fn http<F>(
        self,
        what: &'static str,
        listener: TcpListener,
        serve: impl Fn(TcpStream, Place) -> F,
    ) where
        F: Future<Output = ()> + Send + 'static,
    {
        let connections = Connections::new(limits::STATUS_CONNECTIONS);
        let serve = |io| {
            if let Some(place) = connections.admit() {
                self.calls.spawn(serve(io, place));
            }
        };
        http2::accept(what, |cx| listener.poll_accept(cx), serve, &self.stop).await;
    }
}
