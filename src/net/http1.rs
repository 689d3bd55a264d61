//! HTTP/1.1 as a server, for people and probes. A connection has one request and a limited time, and a listener a limited number
//! of connections: clients that do nothing cost the others nothing.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use http::{HeaderValue, Request, Response, StatusCode, header};
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_util::sync::CancellationToken;

/// How long a connection lasts whose answer takes no time: for the request to arrive, and for the client to read the answer.
pub const CONNECTION_TIME: Duration = Duration::from_secs(10);

/// A complete answer.
pub type Answer = Response<Full<Bytes>>;

/// The connections of one listener. Clones share them.
#[derive(Clone, Debug)]
pub struct Connections(Arc<Mutex<Open<CancellationToken>>>);

/// The place of one connection, free again when dropped.
#[derive(Debug)]
pub struct Place {
    connections: Connections,
    id: u64,
    /// Cancelled when the connection has to make way for another one.
    closed: CancellationToken,
}

impl Connections {
    /// At most `limit` of them.
    pub fn new(limit: usize) -> Self {
        Self(Arc::new(Mutex::new(Open { limit, opened: 0, places: VecDeque::new() })))
    }

    /// A place for a new connection. At the limit the oldest idle one is closed; with none idle there is no place.
    pub fn admit(&self) -> Option<Place> {
        let closed = CancellationToken::new();
        let (id, oldest) = self.lock().admit(closed.clone())?;
        if let Some(oldest) = oldest {
            oldest.cancel();
        }
        Some(Place { connections: self.clone(), id, closed })
    }

    fn lock(&self) -> MutexGuard<'_, Open<CancellationToken>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Place {
    fn set_busy(&self, is_busy: bool) {
        self.connections.lock().set_busy(self.id, is_busy);
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.connections.lock().places.retain(|(id, ..)| *id != self.id);
    }
}

/// Which connections are open; `T` closes one.
#[derive(Debug)]
struct Open<T> {
    limit: usize,
    /// All that ever were.
    opened: u64,
    /// The oldest first: number, whether the agent works on its answer, what closes it.
    places: VecDeque<(u64, bool, T)>,
}

impl<T> Open<T> {
    /// Adds a connection: its number, and the one that makes way.
    fn admit(&mut self, closes: T) -> Option<(u64, Option<T>)> {
        let mut oldest = None;
        if self.places.len() >= self.limit {
            let index = self.places.iter().position(|(_, is_busy, _)| !is_busy)?;
            oldest = self.places.remove(index).map(|(.., closes)| closes);
        }
        self.opened += 1;
        self.places.push_back((self.opened, false, closes));
        Some((self.opened, oldest))
    }

    fn set_busy(&mut self, id: u64, is_busy: bool) {
        if let Some(place) = self.places.iter_mut().find(|place| place.0 == id) {
            place.1 = is_busy;
        }
    }
}

/// Serves one request on `io`. The connection ends with its answer, after `longest`, or when another one needs its place; once
/// `stop` is cancelled, only a request that has arrived is answered.
pub async fn serve<IO, F>(
    io: IO,
    answer: impl Fn(Request<Incoming>) -> F,
    place: Place,
    longest: Duration,
    stop: CancellationToken,
) where
    IO: AsyncRead + AsyncWrite + Unpin,
    F: Future<Output = Answer>,
{
    let service = service_fn(|request| {
        place.set_busy(true);
        let answer = answer(request);
        async {
            let answer = answer.await;
            place.set_busy(false);
            Ok::<_, Infallible>(answer)
        }
    });
    let connection = hyper::server::conn::http1::Builder::new()
        .header_read_timeout(None)
        .keep_alive(false)
        .max_buf_size(16 << 10)
        .serve_connection(TokioIo::new(io), service);
    let mut connection = std::pin::pin!(connection);
    let served = async {
        tokio::select! {
            ended = connection.as_mut() => ended,
            () = stop.cancelled() => {
                connection.as_mut().graceful_shutdown();
                connection.await
            }
        }
    };
    tokio::select! {
        ended = served => {
            if let Err(error) = ended {
                tracing::debug!(%error, "HTTP connection broken");
            }
        }
        () = place.closed.cancelled() => tracing::debug!("idle HTTP connection closed for a new one"),
        () = tokio::time::sleep(longest) => tracing::debug!("HTTP connection timed out"),
    }
}

pub fn text(status: StatusCode, body: &str) -> Answer {
    answer(status, "text/plain; charset=utf-8", body.to_owned())
}

/// Pretty-printed JSON.
pub fn json(status: StatusCode, body: &Value) -> Answer {
    answer(status, "application/json", format!("{body:#}\n"))
}

pub fn answer(status: StatusCode, content_type: &'static str, body: String) -> Answer {
    let mut response = Response::new(Full::new(Bytes::from(body)));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn at_the_limit_the_oldest_idle_connection_makes_way() {
        let mut open = Open { limit: 3, opened: 0, places: VecDeque::new() };
        for (id, name) in [(1, "a"), (2, "b"), (3, "c")] {
            assert_eq!(open.admit(name), Some((id, None)));
        }
        open.set_busy(1, true);
        assert_eq!(open.admit("d"), Some((4, Some("b"))));
        open.set_busy(1, false);
        assert_eq!(open.admit("e"), Some((5, Some("a"))));
        for id in 3..=5 {
            open.set_busy(id, true);
        }
        assert_eq!(open.admit("f"), None, "the agent works on every answer");
        open.set_busy(4, false);
        assert_eq!(open.admit("f"), Some((6, Some("d"))));
    }

    #[test]
    fn a_connection_that_ends_frees_its_place() {
        let connections = Connections::new(1);
        let first = connections.admit().unwrap();
        let second = connections.admit().unwrap();
        assert!(first.closed.is_cancelled() && !second.closed.is_cancelled());
        drop(first);
        drop(second);
        let third = connections.admit().unwrap();
        assert_eq!(connections.lock().places.len(), 1);
        assert!(!third.closed.is_cancelled());
    }
}
