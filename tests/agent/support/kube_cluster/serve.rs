//! Connections: TLS, HTTP/2 and HTTP/1.1, and the ways in which they break.

use std::convert::Infallible;
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};

use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt as _, Full};
use hyper::body::Bytes;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::{Shared, answer};

pub type Body = UnsyncBoxBody<Bytes, io::Error>;

/// A whole body.
pub fn whole(bytes: impl Into<Bytes>) -> Body {
    Full::new(bytes.into()).map_err(|never: Infallible| match never {}).boxed_unsync()
}

/// What all connections are made to do.
#[derive(Default)]
pub struct Connections {
    /// How often all were asked to go (GOAWAY).
    goaways: watch::Sender<u64>,
    /// Cancelled to close all; then replaced.
    close: Mutex<CancellationToken>,
    frozen: Arc<Frozen>,
    /// What new connections get instead of HTTP.
    raw: Mutex<Option<Vec<u8>>>,
    pub open: AtomicUsize,
    pub accepted: AtomicUsize,
}

impl Connections {
    pub fn go_away(&self) {
        self.goaways.send_modify(|count| *count += 1);
    }

    pub fn close(&self) {
        std::mem::take(&mut *self.close.lock().unwrap()).cancel();
    }

    pub fn set_raw(&self, bytes: Option<Vec<u8>>) {
        *self.raw.lock().unwrap() = bytes;
    }

    /// Nothing is read or written: the network drops every packet.
    pub fn freeze(&self, is_frozen: bool) {
        let mut state = self.frozen.0.lock().unwrap();
        state.is_frozen = is_frozen;
        for waker in state.waiting.drain(..) {
            waker.wake();
        }
    }
}

#[derive(Default)]
struct Frozen(Mutex<FrozenState>);

#[derive(Default)]
struct FrozenState {
    is_frozen: bool,
    waiting: Vec<Waker>,
}

impl Frozen {
    fn is_frozen(&self, context: &Context<'_>) -> bool {
        let mut state = self.0.lock().unwrap();
        if state.is_frozen {
            state.waiting.push(context.waker().clone());
        }
        state.is_frozen
    }
}

/// A TCP connection that can be frozen.
pub struct Freezable {
    io: TcpStream,
    frozen: Arc<Frozen>,
}

impl AsyncRead for Freezable {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.frozen.is_frozen(context) {
            return Poll::Pending;
        }
        Pin::new(&mut self.io).poll_read(context, buffer)
    }
}

impl AsyncWrite for Freezable {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        if self.frozen.is_frozen(context) {
            return Poll::Pending;
        }
        Pin::new(&mut self.io).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(context)
    }
}

/// Accepts connections, each in a task of its own, until this task is aborted. The connections stay.
pub async fn accept(listener: TcpListener, shared: Arc<Shared>) {
    while let Ok((io, _)) = listener.accept().await {
        let _ = io.set_nodelay(true);
        let shared = Arc::clone(&shared);
        let close = shared.connections.close.lock().unwrap().clone();
        tokio::spawn(async move {
            let open = &shared.connections.open;
            shared.connections.accepted.fetch_add(1, Ordering::Relaxed);
            open.fetch_add(1, Ordering::Relaxed);
            // One connection can close alone.
            let own = close.child_token();
            tokio::select! {
                () = serve(io, &shared, &own) => (),
                () = own.cancelled() => (),
            }
            open.fetch_sub(1, Ordering::Relaxed);
            shared.counted.send_modify(|count| *count += 1);
        });
    }
}

async fn serve(io: TcpStream, shared: &Arc<Shared>, close: &CancellationToken) {
    let io = Freezable { io, frozen: Arc::clone(&shared.connections.frozen) };
    let Ok(mut io) = shared.acceptor.accept(io).await else { return };
    let raw = shared.connections.raw.lock().unwrap().clone();
    if let Some(bytes) = raw {
        let _ = io.write_all(&bytes).await;
        let _ = io.flush().await;
        // Closing a connection with unread data resets it, and written data may be lost.
        while !bytes.is_empty() && io.read(&mut [0; 1024]).await.is_ok_and(|read| read > 0) {}
        return;
    }
    let session = io.get_ref().1;
    let is_http2 = session.alpn_protocol() == Some(b"h2");
    let certificate = session.peer_certificates().and_then(|chain| chain.first()).cloned();
    let service = service_fn(|request| {
        let (shared, close, certificate) = (Arc::clone(shared), close.clone(), certificate.clone());
        async move { answer::answer(&shared, request, &close, is_http2, certificate.as_ref()).await }
    });
    let mut goaways = shared.connections.goaways.subscribe();
    if is_http2 {
        let mut builder = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
        builder.max_concurrent_streams(*shared.streams.lock().unwrap());
        let connection = builder.serve_connection(TokioIo::new(io), service);
        tokio::pin!(connection);
        loop {
            tokio::select! {
                _ = &mut connection => return,
                changed = goaways.changed() => {
                    if changed.is_ok() {
                        connection.as_mut().graceful_shutdown();
                    }
                }
            }
        }
    }
    let _ = hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(io), service).await;
}
