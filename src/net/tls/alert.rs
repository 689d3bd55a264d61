//! The alert with which a server ended a TLS connection.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};

use rustls::AlertDescription;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;

/// The alert with which the server ended a connection, if it did.
#[derive(Clone, Debug, Default)]
pub struct Alert(Arc<OnceLock<AlertDescription>>);

impl Alert {
    /// The alert in an error of TLS.
    pub(crate) fn of(error: &io::Error) -> Option<AlertDescription> {
        match error.get_ref()?.downcast_ref()? {
            rustls::Error::AlertReceived(alert) => Some(*alert),
            _ => None,
        }
    }

    fn record(&self, error: &io::Error) {
        if let Some(alert) = Self::of(error) {
            let _ = self.0.set(alert);
        }
    }

    pub(crate) fn received(&self) -> Option<AlertDescription> {
        self.0.get().copied()
    }
}

/// A TLS connection that records the alert which ends it.
///
/// With TLS 1.3 the client's handshake is complete before the server has verified its certificate, so a refusal arrives
/// during HTTP/2, and h2 passes errors of its connection on as text only.
pub(crate) struct Watched {
    tls: TlsStream<TcpStream>,
    alert: Alert,
}

impl Watched {
    pub(crate) fn new(tls: TlsStream<TcpStream>) -> (Self, Alert) {
        let alert = Alert::default();
        (Self { tls, alert: alert.clone() }, alert)
    }

    /// Writing to a server that has gone fails while its alert is still unread: reads the alert first.
    fn after_alert<T>(&mut self, cx: &mut Context<'_>, written: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if !matches!(written, Poll::Ready(Err(_))) {
            return written;
        }
        let mut scratch = [0; 1024];
        loop {
            let mut unread = ReadBuf::new(&mut scratch);
            match Pin::new(&mut *self).poll_read(cx, &mut unread) {
                Poll::Ready(Ok(())) if !unread.filled().is_empty() => {}
                Poll::Ready(_) => return written,
                Poll::Pending => return Poll::Pending,
            }
        }
    }
}

impl AsyncRead for Watched {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let read = Pin::new(&mut self.tls).poll_read(cx, buffer);
        if let Poll::Ready(Err(error)) = &read {
            self.alert.record(error);
        }
        read
    }
}

impl AsyncWrite for Watched {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.tls).poll_write(cx, bytes);
        self.after_alert(cx, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.tls).poll_write_vectored(cx, bytes);
        self.after_alert(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.tls.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.tls).poll_flush(cx);
        self.after_alert(cx, flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.tls).poll_shutdown(cx)
    }
}
