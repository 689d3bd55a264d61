//! The driver as a whole: its two sockets, and the volumes behind them.

use std::io;
use std::os::unix::net::UnixListener as StdListener;
use std::path::PathBuf;
use std::sync::Arc;

use tokio::net::UnixListener;
use tokio::sync::{Semaphore, mpsc};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::registration::Registrar;
use super::restore::restore;
use super::services::Services;
use super::socket::{OwnFile, replace};
use super::volumes::Volumes;
use super::{DriverSettings, Runner};
use crate::base::limits;
use crate::fs::disk::{Disk, Unresponsive};
use crate::metrics::Metrics;
use crate::net::http2::{self, AnyService};
use crate::os::denial::directory_remedy;

/// Verdicts of the kubelet that wait to be read.
const VERDICTS: usize = 4;

/// A CSI driver. Its runner's workloads stay as they are when it ends.
#[derive(Debug)]
pub struct Driver {
    volumes: Volumes,
    disk: Disk,
}

/// The driver's socket, which listens.
#[derive(Debug)]
pub struct CsiSocket {
    socket: UnixListener,
    file: OwnFile,
}

/// Why the driver's socket was not opened.
#[derive(Debug, thiserror::Error)]
pub enum NotOpened {
    #[error(
        "can't listen on the socket {path}: {source}; {}, or choose another path with --csi-socket",
        directory_remedy(path.parent().unwrap_or(path), source)
    )]
    Io { path: PathBuf, source: io::Error },
    #[error(transparent)]
    Unresponsive(#[from] Unresponsive),
}

impl Driver {
    pub fn new(settings: DriverSettings, runner: Arc<dyn Runner>, disk: Disk, metrics: &Metrics) -> Self {
        let counts = metrics.csi().clone();
        Self { volumes: Volumes::new(settings, runner, disk.clone(), counts), disk }
    }

    /// Serves the volumes of the agent before again, and removes what is left of Pods that are gone. Comes before
    /// [`Driver::open`]: the kubelet's calls find the volumes there.
    pub async fn restore(&self) {
        restore(&self.volumes).await;
    }

    /// How many volumes are served, or being made.
    pub fn volumes(&self) -> usize {
        self.volumes.count()
    }

    /// Holds the place of a volume.
    #[cfg(test)]
    pub(super) fn hold(&self, number: usize) {
        self.volumes.hold(&format!("held-{number}").parse().unwrap());
    }

    /// Opens the driver's socket, in the place of an agent before.
    pub async fn open(&self) -> Result<CsiSocket, NotOpened> {
        let path = self.volumes.settings().csi_socket.clone();
        let failed = |source| NotOpened::Io { path: path.clone(), source };
        let (socket, file) = {
            let path = path.clone();
            self.disk.run(&path.clone(), move || replace(&path)).await?.map_err(failed)?
        };
        Ok(CsiSocket { socket: UnixListener::from_std(socket).map_err(failed)?, file })
    }

    /// Serves the kubelet, and keeps the driver registered with it, until `stop` is cancelled and what has begun is done. The
    /// sockets of volumes stay: a successor takes their places.
    pub async fn serve(&self, socket: CsiSocket, stop: CancellationToken) {
        let CsiSocket { socket, file } = socket;
        let (verdicts, received) = mpsc::channel(VERDICTS);
        let services = Services::new(self.volumes.clone(), verdicts);
        let server = Server::new(services, stop.clone());
        let registrar = Registrar::new(&self.volumes, received);
        let close = async {
            stop.cancelled().await;
            self.volumes.close().await;
        };
        tokio::join!(server.serve("the CSI socket", &socket), registrar.run(&server, &stop), close);
        server.end().await;
        remove(&self.disk, file).await;
    }
}

/// Removes a socket's file, unless a successor has put its own there.
pub(super) async fn remove(disk: &Disk, file: OwnFile) {
    let path = file.path().to_owned();
    let removed = disk.at_the_edges().run(&path, move || file.remove()).await;
    if let Err(error) = removed.map_err(io::Error::other).flatten() {
        tracing::warn!(path = %path.display(), %error, "socket not removed");
    }
}

/// Serves connections of the kubelet.
#[derive(Debug)]
pub(super) struct Server {
    services: Services,
    connections: TaskTracker,
    places: Arc<Semaphore>,
    stop: CancellationToken,
}

impl Server {
    fn new(services: Services, stop: CancellationToken) -> Self {
        let places = Arc::new(Semaphore::new(limits::CSI_CONNECTIONS));
        Self { services, connections: TaskTracker::new(), places, stop }
    }

    /// Accepts connections until the driver stops. Logs call the socket `what`.
    pub(super) async fn serve(&self, what: &'static str, socket: &UnixListener) {
        let serve = |io| {
            // Root alone can connect; too many calls are a mistake of the kubelet's, which retries.
            let Ok(place) = Arc::clone(&self.places).try_acquire_owned() else { return };
            let (services, stop) = (AnyService::new(self.services.clone()), self.stop.clone());
            self.connections.spawn(async move {
                http2::serve_any(Box::new(io), services, stop).await;
                drop(place);
            });
        };
        http2::accept(what, |cx| socket.poll_accept(cx), serve, &self.stop).await;
    }

    /// Returns when all connections have ended.
    async fn end(&self) {
        self.connections.close();
        self.connections.wait().await;
    }
}

/// A socket of the driver's, as the runtime listens on it.
pub(super) fn listener((socket, file): (StdListener, OwnFile)) -> io::Result<(UnixListener, OwnFile)> {
    Ok((UnixListener::from_std(socket)?, file))
}
