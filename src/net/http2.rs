//! HTTP/2 connections, both sides: gRPC without a framework around it.

use std::error::Error as _;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::time::Duration;

use hyper::body::Incoming;
use hyper::client::conn::http2::{self, SendRequest};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;
use tonic::body::Body;
use tower_service::Service;

/// Bytes that one stream may send before they are taken in: a first request of Envoy's at once.
const STREAM_WINDOW: u32 = 128 << 10;
/// Bytes that all streams of a connection together may. h2 takes half of it for its budget of small frames: a frame
/// of 100 bytes that waits to be read costs 156 of it, and when it is used up the connection is ended. With 5,000
/// streams on a connection a push brings 5,000 acknowledgements at once. It is a bound, and costs nothing by itself.
const CONNECTION_WINDOW: u32 = 16 << 20;

/// A connection to a gRPC server, as generated clients take it.
#[derive(Clone, Debug)]
pub struct Connection(SendRequest<Body>);

impl Service<http::Request<Body>> for Connection {
    type Response = http::Response<Incoming>;
    type Error = hyper::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        Box::pin(self.0.send_request(request))
    }
}

/// Opens HTTP/2 on `io` and runs `talk` on it; the connection ends with it.
pub async fn with_connection<IO, T>(
    io: IO,
    talk: impl AsyncFnOnce(Connection) -> T,
) -> Result<T, hyper::Error>
where
    IO: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let executor = TokioExecutor::new();
    let (sender, connection) = hyper::client::conn::http2::handshake(executor, TokioIo::new(io)).await?;
    let driver = async {
        // However the connection ends, `talk` hears of it through its own calls.
        let _ = connection.await;
        std::future::pending().await
    };
    tokio::select! {
        answer = talk(Connection(sender)) => Ok(answer),
        answer = driver => answer,
    }
}

/// A connection that can wait for its next call. It ends when this is dropped.
#[derive(Debug)]
pub struct Kept {
    connection: Connection,
    ended: Arc<OnceLock<hyper::Error>>,
    _driver: AbortOnDropHandle<()>,
}

impl Kept {
    /// Opens HTTP/2 on `io`. While a call is open, a server that says nothing for `patience` is asked whether it is
    /// there, and the call fails when it does not answer that for as long.
    pub async fn open<IO>(io: IO, patience: Duration) -> Result<Self, hyper::Error>
    where
        IO: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let opened = http2::Builder::new(TokioExecutor::new())
            .timer(TokioTimer::new())
            .keep_alive_interval(patience)
            .keep_alive_timeout(patience)
            .handshake(TokioIo::new(io));
        let (sender, connection) = opened.await?;
        let ended = Arc::new(OnceLock::new());
        let driver = tokio::spawn({
            let ended = Arc::clone(&ended);
            async move {
                if let Err(error) = connection.await {
                    let _ = ended.set(error);
                }
            }
        });
        Ok(Self { connection: Connection(sender), ended, _driver: AbortOnDropHandle::new(driver) })
    }

    /// For a call.
    pub fn connection(&self) -> Connection {
        self.connection.clone()
    }

    /// Why it broke, if it did. Of calls that had not left yet it is told only that they are cancelled.
    pub fn error(&self) -> Option<&hyper::Error> {
        self.ended.get()
    }

    /// Whether it is known to have ended, or to be about to.
    pub fn is_closed(&self) -> bool {
        self.connection.0.is_closed()
    }
}

/// True if the server has not begun with the request that failed so: it never left, or the server says that it did
/// not look at it.
pub fn is_untouched(error: &hyper::Error) -> bool {
    let said = error.source().and_then(|source| source.downcast_ref::<h2::Error>());
    // A GOAWAY fails the calls alone that it says were not begun.
    let is_refused = said.is_some_and(|said| {
        said.is_remote() && (said.is_go_away() || said.reason() == Some(h2::Reason::REFUSED_STREAM))
    });
    is_refused || error.is_canceled() || error.is_closed()
}

/// Serves gRPC on `io` until the client goes, or `stop` is cancelled and the open calls have ended.
pub async fn serve<IO, S>(io: IO, service: S, stop: CancellationToken)
where
    IO: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    S: Service<http::Request<Incoming>, Response = http::Response<Body>> + Clone + Send + 'static,
    S::Future: Send,
    S::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let connection = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
        // Envoy opens a stream for each secret: the default of 200 would silently hold the rest back.
        .max_concurrent_streams(None)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_send_buf_size(STREAM_WINDOW as usize)
        .serve_connection(TokioIo::new(io), TowerToHyperService::new(service));
    let mut connection = std::pin::pin!(connection);
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = stop.cancelled() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "a connection broke");
    }
}

/// Hands each connection that `poll_accept` gives to `connection`, until `stop` is cancelled.
pub async fn accept<IO, A>(
    what: &'static str,
    mut poll_accept: impl FnMut(&mut Context<'_>) -> Poll<io::Result<(IO, A)>>,
    mut connection: impl FnMut(IO),
    stop: &CancellationToken,
) {
    /// Out of file descriptors, most likely: some connection has to end first.
    const PAUSE: Duration = Duration::from_millis(100);
    /// After this long without a failure the next one is news.
    const QUIET: Duration = Duration::from_secs(60);
    let mut failed = tokio::time::Instant::now();
    let mut repeats = crate::base::failure_log::FailureLog::default();
    loop {
        let accepted = tokio::select! {
            accepted = std::future::poll_fn(&mut poll_accept) => accepted,
            () = stop.cancelled() => return,
        };
        match accepted {
            Ok((io, _)) => {
                if failed.elapsed() > QUIET {
                    repeats.recovered();
                }
                connection(io);
            }
            Err(error) => {
                failed = tokio::time::Instant::now();
                if repeats.is_new(&error.to_string()) {
                    tracing::warn!(%error, "{what} can't accept a connection; it goes on trying");
                }
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
}
