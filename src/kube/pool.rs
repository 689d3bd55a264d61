//! The connections to one API server.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::time::Instant;

use super::connection::{Connection, Lease, Room};
use crate::base::limits;
use crate::fs::disk::Disk;
use crate::net::endpoint::{Endpoint, Protocol};
use crate::net::error::{TlsError, TransportError};
use crate::secret::KeyPair;

/// Opens connections as calls and watches need them.
pub(super) struct Connections {
    pub(super) endpoint: Endpoint,
    certificate: Option<KeyPair>,
    disk: Disk,
    /// TCP, TLS and HTTP/2 have this long each.
    handshake: Duration,
    open: Mutex<Vec<Arc<Connection>>>,
    /// One connection is opened at a time; the calls that wait use it.
    turn: Semaphore,
    /// Why the last attempt failed, for the calls that waited for it.
    failure: Mutex<Option<(Instant, io::ErrorKind, String)>>,
}

impl Connections {
    pub(super) fn new(
        endpoint: Endpoint,
        certificate: Option<KeyPair>,
        disk: Disk,
        handshake: Duration,
    ) -> Self {
        Self {
            endpoint,
            certificate,
            disk,
            handshake,
            open: Mutex::default(),
            turn: Semaphore::new(1),
            failure: Mutex::default(),
        }
    }

    /// A place for a call, and whether its connection is new.
    pub(super) async fn lease(&self) -> Result<(Lease, bool), TransportError> {
        if let Some(lease) = self.free() {
            return Ok((lease, false));
        }
        let asked = Instant::now();
        // The semaphore is never closed; at worst there would be one connection too many.
        let _turn = self.turn.acquire().await;
        if let Some(lease) = self.free() {
            return Ok((lease, false));
        }
        // The server was just as silent for them.
        if let Some((_, kind, reason)) = self.failure().as_ref().filter(|(at, ..)| *at >= asked) {
            return Err(TransportError::Unreachable(io::Error::new(*kind, reason.clone())));
        }
        if self.open().len() >= limits::KUBE_CONNECTIONS {
            let reason =
                format!("all calls that it allows on {} connections are open", limits::KUBE_CONNECTIONS);
            return Err(TransportError::Request(reason));
        }
        let opened = self.connect().await;
        if let Err(TransportError::Unreachable(error)) = &opened {
            *self.failure() = Some((Instant::now(), error.kind(), error.to_string()));
        }
        let connection = Arc::new(opened?);
        let Room::Free(lease) = connection.room() else {
            return Err(TransportError::broken("it allows no calls on a new connection"));
        };
        self.open().push(connection);
        Ok((lease, true))
    }

    async fn connect(&self) -> Result<Connection, TransportError> {
        let trusted = self.endpoint.trusted(&self.disk).await?;
        let (trusted, client) = (trusted.as_ref(), self.certificate.as_ref());
        let connected =
            self.endpoint.connect_trusting(trusted, client, Protocol::Http2, self.handshake).await;
        let connected = connected.map_err(|error| match error {
            TransportError::Tls(TlsError::NoCommonProtocol) => TransportError::broken(
                "it does not speak HTTP/2 (ALPN h2), which the agent needs; does a proxy with HTTP/1.1 stand before it?",
            ),
            error => error,
        })?;
        Connection::open(connected, self.handshake).await
    }

    /// A place on an open connection: the oldest one that has any, so that the others become idle and close.
    fn free(&self) -> Option<Lease> {
        let mut free = None;
        self.open().retain(|connection| match free {
            Some(_) => true,
            None => match connection.room() {
                Room::Free(lease) => {
                    free = Some(lease);
                    true
                }
                Room::Full => true,
                // Its open calls keep it.
                Room::Closed => false,
            },
        });
        free
    }

    fn open(&self) -> MutexGuard<'_, Vec<Arc<Connection>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn failure(&self) -> MutexGuard<'_, Option<(Instant, io::ErrorKind, String)>> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
