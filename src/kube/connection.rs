//! One HTTP/2 connection to an API server, which calls and watches share.

use std::future::poll_fn;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use h2::client::{ResponseFuture, SendRequest};
use h2::{Ping, PingPong, Reason, RecvStream};
use http::{Request, Response};
use tokio::sync::Notify;
use tokio::time::timeout;
use tokio_util::task::AbortOnDropHandle;

use crate::net::endpoint::{Connected, Io};
use crate::net::error::{TlsError, TransportError, with_causes};
use crate::net::tls::Alert;

/// While calls or watches are open, the server gets a ping this often.
const PING_INTERVAL: Duration = Duration::from_secs(15);
/// A server that does not answer a ping for this long has gone.
const PING_PATIENCE: Duration = Duration::from_secs(10);
/// A connection without calls closes after this long.
const IDLE: Duration = Duration::from_secs(60);
/// Bytes that the server may send on one call before they are read.
const STREAM_WINDOW: u32 = 1 << 20;
/// The same for all calls and watches of a connection together.
const CONNECTION_WINDOW: u32 = 8 << 20;

/// A connection that stays open between calls. Those that are open keep it, too.
pub(super) struct Connection {
    requests: SendRequest<Bytes>,
    state: Arc<State>,
    _driver: AbortOnDropHandle<()>,
}

struct State {
    usage: Mutex<Usage>,
    /// Wakes the driver at the first call after a pause.
    used: Notify,
    /// Why it ended.
    ended: OnceLock<String>,
    alert: Alert,
    has_presented: bool,
}

#[derive(Default)]
struct Usage {
    /// Calls and watches that are open.
    streams: usize,
    /// It takes no further ones.
    is_closed: bool,
}

/// Whether a connection takes another call.
pub(super) enum Room {
    Free(Lease),
    /// The server allows no further one now.
    Full,
    Closed,
}

/// The place of one call on a connection.
pub(super) struct Lease(Arc<Connection>);

/// Why a call failed on its connection.
pub(super) struct Failed {
    pub(super) error: TransportError,
    /// The server has not processed the call, and another connection may take it.
    pub(super) is_unprocessed: bool,
}

impl State {
    fn usage(&self) -> MutexGuard<'_, Usage> {
        self.usage.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_unused(&self) -> bool {
        self.usage().streams == 0
    }

    /// Ends the connection unless a call has begun.
    fn close_if_unused(&self) -> bool {
        let mut usage = self.usage();
        usage.is_closed |= usage.streams == 0;
        usage.is_closed
    }

    fn failure(&self, error: &h2::Error) -> TransportError {
        let alert = self.alert.received().map(|alert| TlsError::of_alert(alert, self.has_presented));
        match (alert, self.ended.get(), error.get_io()) {
            (Some(alert), ..) => alert.into(),
            (None, Some(reason), Some(_)) => TransportError::broken(reason.as_str()),
            (None, _, Some(io)) => TransportError::broken(with_causes(io)),
            (None, ..) if error.is_library() && error.reason() == Some(Reason::FRAME_SIZE_ERROR) => {
                TransportError::broken(
                    "it does not speak HTTP/2, which the agent needs; does a proxy with HTTP/1.1 stand before it?",
                )
            }
            (None, ..) => TransportError::broken(error.to_string()),
        }
    }
}

impl Connection {
    /// Opens HTTP/2, and returns once the server's limits are known. It has `patience` to send them.
    pub(super) async fn open(connected: Connected, patience: Duration) -> Result<Self, TransportError> {
        let Connected { io, has_presented, alert } = connected;
        let state = State {
            usage: Mutex::default(),
            used: Notify::new(),
            ended: OnceLock::new(),
            alert,
            has_presented,
        };
        let opened = h2::client::Builder::new()
            .initial_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .max_header_list_size(16 << 10)
            .enable_push(false)
            .handshake::<_, Bytes>(io)
            .await;
        let (requests, mut connection) = opened.map_err(|error| state.failure(&error))?;
        let mut pings = connection.ping_pong().ok_or_else(|| TransportError::broken("it has no pings"))?;
        // The server's settings come before anything else that it sends.
        let settings = async {
            tokio::select! {
                // The connection first: its error is the cause of the other one.
                biased;
                ended = &mut connection => ended.and(Err(Reason::NO_ERROR.into())),
                pong = pings.ping(Ping::opaque()) => pong.map(drop),
            }
        };
        let answered = timeout(patience, settings).await.map_err(|_| {
            TransportError::broken(format!("it takes connections, but answers no HTTP/2 within {patience:?}"))
        })?;
        answered.map_err(|error| state.failure(&error))?;
        let state = Arc::new(state);
        let driver = tokio::spawn(drive(connection, pings, Arc::clone(&state)));
        Ok(Self { requests, state, _driver: AbortOnDropHandle::new(driver) })
    }

    /// A place for another call.
    pub(super) fn room(self: &Arc<Self>) -> Room {
        // Without a call of its own a handle is ready at once, or never again: after GOAWAY.
        let ready = self.requests.clone().poll_ready(&mut Context::from_waker(Waker::noop()));
        let limit = self.requests.current_max_send_streams();
        let mut usage = self.state.usage();
        usage.is_closed |= self.state.ended.get().is_some() || !matches!(ready, Poll::Ready(Ok(())));
        if usage.is_closed {
            return Room::Closed;
        }
        if usage.streams >= limit {
            return Room::Full;
        }
        usage.streams += 1;
        if usage.streams == 1 {
            self.state.used.notify_one();
        }
        Room::Free(Lease(Arc::clone(self)))
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.0.state.usage().streams -= 1;
    }
}

impl Lease {
    /// Sends a request, and returns once the head of its answer has arrived.
    pub(super) async fn send(
        &self,
        request: Request<()>,
        body: Option<Bytes>,
    ) -> Result<Response<RecvStream>, Failed> {
        let mut requests = self.0.requests.clone();
        let sent = async {
            poll_fn(|cx| requests.poll_ready(cx)).await?;
            let (answer, mut stream) = requests.send_request(request, body.is_none())?;
            if let Some(body) = body {
                stream.send_data(body, true)?;
            }
            Ok::<ResponseFuture, h2::Error>(answer)
        };
        // It fails before anything is sent.
        let answer =
            sent.await.map_err(|error| Failed { error: self.failure(&error), is_unprocessed: true })?;
        answer.await.map_err(|error| Failed {
            error: self.failure(&error),
            // A GOAWAY fails only the calls that the server has not processed.
            is_unprocessed: error.is_remote()
                && (error.is_go_away() || error.reason() == Some(Reason::REFUSED_STREAM)),
        })
    }

    pub(super) fn failure(&self, error: &h2::Error) -> TransportError {
        self.0.state.failure(error)
    }
}

/// Runs the connection until it ends, the server is silent, or it is idle for long.
async fn drive(connection: h2::client::Connection<Box<dyn Io>>, pings: PingPong, state: Arc<State>) {
    let mut connection = std::pin::pin!(connection);
    let reason = tokio::select! {
        ended = connection.as_mut() => match ended {
            Ok(()) => "the server closed it".to_owned(),
            Err(error) => match error.get_io() {
                Some(io) => with_causes(io),
                None => error.to_string(),
            },
        },
        reason = watch_over(pings, &state) => reason,
    };
    // Before the connection is dropped, which fails its calls.
    let _ = state.ended.set(reason);
}

/// Returns when the connection has to end, and why.
async fn watch_over(mut pings: PingPong, state: &State) -> String {
    loop {
        if state.is_unused() {
            let used = timeout(IDLE, state.used.notified()).await;
            if used.is_err() && state.close_if_unused() {
                return "it was idle".to_owned();
            }
            continue;
        }
        tokio::time::sleep(PING_INTERVAL).await;
        if state.is_unused() {
            continue;
        }
        match timeout(PING_PATIENCE, pings.ping(Ping::opaque())).await {
            Ok(Ok(_)) => {}
            // The connection itself says why.
            Ok(Err(_)) => std::future::pending().await,
            Err(_) => return format!("the server does not answer a ping within {PING_PATIENCE:?}"),
        }
    }
}
