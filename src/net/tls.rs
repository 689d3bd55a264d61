//! What TLS does not do by itself: to know whether the client certificate was presented, and why a server ended the
//! connection.

use std::fmt;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};

use rustls::client::ResolvesClientCert;
use rustls::sign::CertifiedKey;
use rustls::{AlertDescription, SignatureScheme};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;

use crate::auth::client_cert::ClientCertificate;
use crate::ca::CaError;
use crate::secret::KeyPair;

/// Presents one certificate where the server asks for one, and notes that it did.
pub(crate) struct Presenter {
    certified: Arc<CertifiedKey>,
    has_presented: AtomicBool,
}

impl Presenter {
    pub(crate) fn new(pair: &KeyPair) -> Result<Self, rustls::Error> {
        let key = rustls::crypto::aws_lc_rs::sign::any_supported_type(pair.key().der())?;
        let certified = Arc::new(CertifiedKey::new(pair.chain().to_vec(), key));
        Ok(Self { certified, has_presented: AtomicBool::new(false) })
    }

    /// Whether the server has asked for it, and got it.
    pub(crate) fn has_presented(&self) -> bool {
        self.has_presented.load(Ordering::Relaxed)
    }
}

impl fmt::Debug for Presenter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Presenter(hidden)")
    }
}

impl ResolvesClientCert for Presenter {
    fn resolve(&self, _: &[&[u8]], schemes: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        // Without a scheme for this kind of key rustls would present nothing.
        self.certified.key.choose_scheme(schemes)?;
        self.has_presented.store(true, Ordering::Relaxed);
        Some(Arc::clone(&self.certified))
    }

    fn has_certs(&self) -> bool {
        true
    }
}

/// The alert with which the server ended a connection, if it did.
#[derive(Clone, Debug, Default)]
pub struct Alert(Arc<OnceLock<AlertDescription>>);

impl Alert {
    /// The alert in the error of a handshake.
    pub(crate) fn of(error: &io::Error) -> Option<AlertDescription> {
        match error.get_ref()?.downcast_ref()? {
            rustls::Error::AlertReceived(alert) => Some(*alert),
            _ => None,
        }
    }

    fn note(&self, error: &io::Error) {
        if let Some(alert) = Self::of(error) {
            let _ = self.0.set(alert);
        }
    }

    /// What it means, where there was one.
    pub(crate) fn explain(&self, address: &str, presented: Option<&ClientCertificate>) -> Option<CaError> {
        self.0.get().map(|alert| explain(*alert, address, presented))
    }
}

/// What an alert means for whoever has to mend it.
pub(crate) fn explain(
    alert: AlertDescription,
    address: &str,
    presented: Option<&ClientCertificate>,
) -> CaError {
    use AlertDescription as A;
    let address = address.to_owned();
    let refused = match alert {
        A::CertificateExpired => "by its clock it has expired".to_owned(),
        A::CertificateRevoked => "it has been revoked".to_owned(),
        // A bad signature: the CA knows one of the issuer's name, with another key.
        A::UnknownCA | A::DecryptError => {
            format!("it does not accept who issued it (alert {alert:?}); is it of another CA?")
        }
        // Many servers say no more than this.
        A::BadCertificate | A::CertificateUnknown => {
            format!("it does not accept it, perhaps because of who issued it (alert {alert:?})")
        }
        A::UnsupportedCertificate => {
            format!("its key or its use is none that it takes (alert {alert:?})")
        }
        A::AccessDenied => format!("whoever it names has no access (alert {alert:?})"),
        A::CertificateRequired if presented.is_none() => {
            let reason =
                "it wants a client certificate that it accepts; name its folder with --ca-client-cert-dir"
                    .to_owned();
            return CaError::Tls { address, reason };
        }
        A::NoApplicationProtocol => {
            let reason = "it does not speak the protocol of this kind of CA there (no common ALPN name); is the port the right one?";
            return CaError::Tls { address, reason: reason.to_owned() };
        }
        _ => return CaError::Tls { address, reason: format!("the CA ended it with the alert {alert:?}") },
    };
    match presented {
        Some(certificate) => {
            CaError::ClientCertificate { address, certificate: certificate.to_string(), reason: refused }
        }
        None => CaError::Tls { address, reason: format!("the CA ended it with the alert {alert:?}") },
    }
}

/// A TLS connection that notes the alert which ends it.
///
/// With TLS 1.3 the client is done before the server has looked at its certificate, so a refusal comes when HTTP/2
/// is spoken already, and h2 hands errors of its connection on as words alone.
pub(crate) struct Watched {
    tls: TlsStream<TcpStream>,
    alert: Alert,
}

impl Watched {
    pub(crate) fn new(tls: TlsStream<TcpStream>) -> (Self, Alert) {
        let alert = Alert::default();
        (Self { tls, alert: alert.clone() }, alert)
    }

    /// A server that has gone makes writing fail, while its alert is still to be read: that comes first.
    fn noted<T>(&mut self, cx: &mut Context<'_>, written: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
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
            self.alert.note(error);
        }
        read
    }
}

impl AsyncWrite for Watched {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.tls).poll_write(cx, bytes);
        self.noted(cx, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.tls).poll_write_vectored(cx, bytes);
        self.noted(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.tls.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.tls).poll_flush(cx);
        self.noted(cx, flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.tls).poll_shutdown(cx)
    }
}
