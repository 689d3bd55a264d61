//! HTTP/2 connections, client and server: gRPC without a framework around it.

mod authority;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
mod hpack;
#[cfg(test)]
mod testing;

use std::convert::Infallible;
use std::error::Error as _;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::time::Duration;

use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use base64::{Engine as _, alphabet};
use bytes::Bytes;
use http::HeaderMap;
use http_body_util::BodyExt as _;
use http_body_util::combinators::MapFrame;
use hyper::body::{Frame, Incoming};
use hyper::client::conn::http2::{self, SendRequest};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;
use tonic::body::Body;
use tower_service::Service;

use self::authority::AuthorityFilter;
use super::endpoint::Io;
use crate::base::limits;

/// Bytes that one stream may send before they are read: one whole first request of Envoy.
const STREAM_WINDOW: u32 = 128 << 10;
/// Bytes that all streams of a connection together may send before they are read. h2 takes half of it as the budget for
/// small frames: an unread frame of 100 bytes costs 156 of it, and h2 closes a connection that exceeds it. With 5,000
/// streams on a connection a push brings 5,000 acknowledgements at once. It is a bound, and costs nothing by itself.
const CONNECTION_WINDOW: u32 = 4 << 20;
/// Bytes that are read from a connection before the streams that they are for, and other connections, get their turn.
const READ_AT_ONCE: usize = 64 << 10;
/// A client that reads nothing of what waits for it for this long is disconnected: nothing is kept for it.
const UNREAD_FOR: Duration = Duration::from_secs(60);

/// The header, or trailer, with details of a failed call, in base64.
pub(super) const GRPC_DETAILS: &str = "grpc-status-details-bin";

/// A connection to a gRPC server, as generated clients take it.
#[derive(Clone, Debug)]
pub struct Connection(SendRequest<Body>);

/// The body of an answer.
pub type AnswerBody = MapFrame<Incoming, fn(Frame<Bytes>) -> Frame<Bytes>>;

impl Service<http::Request<Body>> for Connection {
    type Response = http::Response<AnswerBody>;
    type Error = hyper::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let answered = self.0.send_request(request);
        Box::pin(async move {
            let mut answer = answered.await?;
            remove_damaged_details(answer.headers_mut());
            Ok(answer.map(|body| body.map_frame(without_damaged_details as fn(_) -> _)))
        })
    }
}

fn without_damaged_details(mut frame: Frame<Bytes>) -> Frame<Bytes> {
    frame.trailers_mut().into_iter().for_each(remove_damaged_details);
    frame
}

/// Removes details that are not base64, at which tonic panics.
pub(super) fn remove_damaged_details(headers: &mut HeaderMap) {
    const PADDING: DecodePaddingMode = DecodePaddingMode::Indifferent;
    const BASE64: GeneralPurpose = GeneralPurpose::new(
        &alphabet::STANDARD,
        GeneralPurposeConfig::new().with_decode_padding_mode(PADDING),
    );
    if headers.get(GRPC_DETAILS).is_some_and(|details| BASE64.decode(details).is_err()) {
        headers.remove(GRPC_DETAILS);
    }
}

/// Opens HTTP/2 on `io` and runs `talk` on it; the connection closes when `talk` returns.
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
        // However the connection ends, the calls of `talk` fail with it.
        let _ = connection.await;
        std::future::pending().await
    };
    tokio::select! {
        answer = talk(Connection(sender)) => Ok(answer),
        answer = driver => answer,
    }
}

/// A connection that stays open between calls, until this is dropped.
#[derive(Debug)]
pub struct Kept {
    connection: Connection,
    ended: Arc<OnceLock<hyper::Error>>,
    _driver: AbortOnDropHandle<()>,
}

impl Kept {
    /// Opens HTTP/2 on `io`. During a call, a server that is silent for `patience` gets a ping, and the call fails when
    /// the server does not answer the ping within the same time.
    pub async fn open<IO>(io: IO, patience: Duration) -> Result<Self, hyper::Error>
    where
        IO: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        Self::open_pinging(io, patience, patience).await
    }

    /// The same where the server gets its ping after another time, `interval`.
    pub async fn open_pinging<IO>(
        io: IO,
        interval: Duration,
        patience: Duration,
    ) -> Result<Self, hyper::Error>
    where
        IO: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let opened = http2::Builder::new(TokioExecutor::new())
            .timer(TokioTimer::new())
            .keep_alive_interval(interval)
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

    pub fn connection(&self) -> Connection {
        self.connection.clone()
    }

    /// Why it broke, if it did. Calls that were not sent yet report only that they are cancelled.
    pub fn error(&self) -> Option<&hyper::Error> {
        self.ended.get()
    }

    /// Whether it is known to be closed or closing.
    pub fn is_closed(&self) -> bool {
        self.connection.0.is_closed()
    }
}

/// True if the server has not processed the request that failed with `error`: it was never sent, or the server says so.
pub fn is_unprocessed(error: &hyper::Error) -> bool {
    let h2 = error.source().and_then(|source| source.downcast_ref::<h2::Error>());
    // A GOAWAY fails only the calls that the server has not processed.
    let is_refused = h2.is_some_and(|h2| {
        h2.is_remote() && (h2.is_go_away() || h2.reason() == Some(h2::Reason::REFUSED_STREAM))
    });
    is_refused || error.is_canceled() || error.is_closed()
}

/// A service behind a pointer. Clones are the same service.
#[derive(Clone)]
pub struct AnyService(Arc<dyn Fn(http::Request<Incoming>) -> AnyAnswer + Send + Sync>);

type AnyAnswer = Pin<Box<dyn Future<Output = Result<http::Response<Body>, Infallible>> + Send>>;

impl AnyService {
    pub fn new<S>(service: S) -> Self
    where
        S: Service<http::Request<Incoming>, Response = http::Response<Body>, Error = Infallible>,
        S: Clone + Send + Sync + 'static,
        S::Future: Send + 'static,
    {
        Self(Arc::new(move |request| Box::pin(service.clone().call(request))))
    }
}

impl Service<http::Request<Incoming>> for AnyService {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = AnyAnswer;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Incoming>) -> AnyAnswer {
        (self.0)(request)
    }
}

/// Like [`serve`], for services other than SDS: each further type of service or connection would be another HTTP/2 server in the
/// program, of 0.1 MB.
pub async fn serve_any(io: Box<dyn Io>, service: AnyService, stop: CancellationToken) {
    serve(io, service, stop).await;
}

/// Serves gRPC on `io` until the client disconnects, or `stop` is cancelled and the open calls are done.
pub async fn serve<IO, S, B>(io: IO, service: S, stop: CancellationToken)
where
    IO: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    S: Service<http::Request<Incoming>, Response = http::Response<B>> + Clone + Send + 'static,
    B: hyper::body::Body<Data: Send, Error: Into<Box<dyn std::error::Error + Send + Sync>>> + Send + 'static,
    S::Future: Send,
    S::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let connection = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
        // Envoy opens a stream for each secret: the default of 200 would silently block the rest.
        .max_concurrent_streams(limits::STREAMS_PER_CONNECTION)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_send_buf_size(STREAM_WINDOW as usize)
        .serve_connection(TokioIo::new(FairIo::new(io)), TowerToHyperService::new(service));
    let mut connection = std::pin::pin!(connection);
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = stop.cancelled() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "HTTP/2 connection broken");
    }
}

/// A connection of which little is read at once, that breaks when its client does not read, and whose requests may have any
/// authority.
struct FairIo<IO> {
    io: IO,
    authority: AuthorityFilter,
    /// Bytes that were read since others had their turn.
    read: usize,
    /// Runs while the client does not read.
    unread: Option<Pin<Box<tokio::time::Sleep>>>,
}

impl<IO> FairIo<IO> {
    fn new(io: IO) -> Self {
        Self { io, authority: AuthorityFilter::new(), read: 0, unread: None }
    }

    /// Passes `written` on, but fails if nothing could be written for too long.
    fn bounded<T>(&mut self, written: Poll<io::Result<T>>, cx: &mut Context<'_>) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.unread = None;
            return written;
        }
        let unread = self.unread.get_or_insert_with(|| Box::pin(tokio::time::sleep(UNREAD_FOR)));
        unread.as_mut().poll(cx).map(|()| Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<IO: AsyncRead + Unpin> AsyncRead for FairIo<IO> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.read >= READ_AT_ONCE {
            self.read = 0;
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        let before = buffer.filled().len();
        let Self { io, authority, .. } = &mut *self;
        let read = authority.poll_read(io, cx, buffer);
        self.read = if read.is_pending() { 0 } else { self.read + buffer.filled().len() - before };
        read
    }
}

impl<IO: AsyncWrite + Unpin> AsyncWrite for FairIo<IO> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.io).poll_write(cx, bytes);
        self.bounded(written, cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.io).poll_write_vectored(cx, slices);
        self.bounded(written, cx)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.io).poll_flush(cx);
        self.bounded(flushed, cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let shut = Pin::new(&mut self.io).poll_shutdown(cx);
        self.bounded(shut, cx)
    }
}

/// Passes each connection that `poll_accept` returns to `connection`, until `stop` is cancelled. `what` is the listener's
/// name in log lines.
pub async fn accept<IO, A>(
    what: &'static str,
    mut poll_accept: impl FnMut(&mut Context<'_>) -> Poll<io::Result<(IO, A)>>,
    mut connection: impl FnMut(IO),
    stop: &CancellationToken,
) {
    /// The likely cause is a lack of file descriptors: another connection has to close first.
    const PAUSE: Duration = Duration::from_millis(100);
    /// After this long without a failure the next one is logged as new.
    const QUIET: Duration = Duration::from_secs(60);
    let mut failed_at = tokio::time::Instant::now();
    let mut failures = crate::base::failure_log::FailureLog::default();
    loop {
        let accepted = tokio::select! {
            accepted = std::future::poll_fn(&mut poll_accept) => accepted,
            () = stop.cancelled() => return,
        };
        match accepted {
            Ok((io, _)) => {
                if failed_at.elapsed() > QUIET {
                    failures.recovered();
                }
                connection(io);
            }
            Err(error) => {
                failed_at = tokio::time::Instant::now();
                if failures.is_new(&error.to_string()) {
                    tracing::warn!(%error, "{what} can't accept a connection; retrying");
                }
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use tokio::io::{AsyncReadExt as _, DuplexStream};
    use tokio::task::JoinHandle;
    use tokio::time::{Instant, timeout};

    use super::*;

    /// Serves nothing.
    #[derive(Clone)]
    struct Nothing;

    impl Service<http::Request<Incoming>> for Nothing {
        type Response = http::Response<Body>;
        type Error = Infallible;
        type Future = std::future::Pending<Result<Self::Response, Infallible>>;

        fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
            Poll::Ready(Ok(()))
        }

        fn call(&mut self, _: http::Request<Incoming>) -> Self::Future {
            std::future::pending()
        }
    }

    /// A client for which more waits than the pipe holds.
    fn connect() -> (DuplexStream, JoinHandle<()>) {
        // The server begins with settings of more bytes.
        let (client, server) = tokio::io::duplex(16);
        (client, tokio::spawn(serve(server, Nothing, CancellationToken::new())))
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_does_not_read_is_disconnected() {
        let (_client, served) = connect();
        let began = Instant::now();
        timeout(2 * UNREAD_FOR, served).await.expect("it stays connected").unwrap();
        assert_eq!(began.elapsed().as_secs(), UNREAD_FOR.as_secs());
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_reads_slowly_or_has_read_everything_stays_connected() {
        let (mut client, mut served) = connect();
        // All that waits for it, in pieces.
        while timeout(UNREAD_FOR, client.read(&mut [0; 8])).await.is_ok() {
            tokio::time::sleep(UNREAD_FOR * 3 / 4).await;
        }
        assert!(timeout(10 * UNREAD_FOR, &mut served).await.is_err());
        drop(client);
        served.await.unwrap();
    }
}
