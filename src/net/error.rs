//! Why a call over the network failed.
//!
//! Errors name the cause and no flag: the caller knows which options set the connection up, and adds the remedies.

use std::error::Error;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use http::StatusCode;
use http::header::{HeaderMap, RETRY_AFTER};
use rustls::{AlertDescription, CertificateError};
use tonic::Code;

use crate::base::retry::Class;
use crate::fs::disk::Unresponsive;
use crate::pki::pem::NotPem;

/// Why a call failed, or what the server answered instead of a result.
#[derive(Debug, thiserror::Error)]
pub enum TransportError {
    #[error("connecting failed: {0}")]
    Unreachable(#[source] io::Error),
    #[error("the TLS handshake failed: {0}")]
    Tls(#[from] TlsError),
    /// A load balancer without a backend does so, too.
    #[error("the connection broke before it had answered: {0} in the TLS handshake")]
    Handshake(#[source] io::Error),
    #[error("the connection broke before it had answered: {0}")]
    Broken(#[source] io::Error),
    #[error("the roots for it can't be read: {0}")]
    Roots(#[from] RootsError),
    #[error("the request can't be sent: {0}")]
    Request(String),
    #[error("the answer can't be read: it is longer than {limit} bytes")]
    TooLong { limit: usize },
    #[error("the answer can't be read: {0}")]
    Unreadable(String),
    #[error("the answer is not gRPC ({content_type})")]
    NotGrpc { status: StatusCode, content_type: String, retry_after: Option<Duration> },
    /// What a gRPC server itself says of a call.
    #[error("it answered {code:?}: {message}")]
    Refused { code: Code, message: String, retry_after: Option<Duration> },
}

/// Why a TLS handshake failed. "It" is the server.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("its certificate is not signed by {roots}")]
    UnknownIssuer { roots: String },
    #[error("its certificate is not for the name {name}")]
    WrongName { name: String },
    #[error("{name:?} is not a server name")]
    InvalidName { name: String },
    /// A server that answers a handshake in plain text.
    #[error("{0}")]
    NotTls(rustls::Error),
    #[error("it refuses the client certificate: {reason}")]
    ClientCertRefused { reason: String },
    #[error("it wants a client certificate that it accepts")]
    ClientCertRequired,
    #[error(
        "it does not speak the protocol that this connection needs (no common ALPN name); is the port the right one?"
    )]
    NoCommonProtocol,
    #[error("the server ended it with the alert {0:?}")]
    Alert(AlertDescription),
    #[error(transparent)]
    Other(#[from] rustls::Error),
}

/// Why there are no roots to verify a server's certificate with.
#[derive(Debug, thiserror::Error)]
pub enum RootsError {
    #[error("this machine has no system roots")]
    NoSystemRoots,
    #[error("none of {} exists", .paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", "))]
    NoFile { paths: Vec<PathBuf> },
    #[error("{path}: {source}")]
    Unreadable { path: PathBuf, source: io::Error },
    #[error("{path}: {source}")]
    NotPem { path: PathBuf, source: NotPem },
    #[error(transparent)]
    Unresponsive(#[from] Unresponsive),
}

/// How a person mends a connection, in the words of the caller that set it up.
#[derive(Debug)]
pub struct ConnectionOptions {
    /// The name of the option with the address.
    pub address: &'static str,
    /// The name of the option with the roots.
    pub roots: &'static str,
    /// The remedy for a certificate that carries another name.
    pub server_name: &'static str,
    /// The remedy for a server that requires a client certificate.
    pub client_cert: &'static str,
}

impl ConnectionOptions {
    fn is_it_tls(&self) -> String {
        format!("is this a TLS port? Plaintext needs http:// in {}", self.address)
    }

    /// The remedy where a server does not answer in plaintext.
    pub fn is_it_plaintext(&self) -> String {
        format!("is this a TLS port? Use https:// in {}", self.address)
    }

    fn name_the_root(&self) -> String {
        let Self { roots, .. } = self;
        format!("name the server's root with {roots} FILE, or {roots} system")
    }
}

impl TransportError {
    pub(crate) fn broken(reason: impl Into<String>) -> Self {
        Self::Broken(io::Error::other(reason.into()))
    }

    /// Whether a retry may succeed without a change by a person.
    pub fn class(&self) -> Class {
        match self {
            Self::Unreachable(_)
            | Self::Handshake(_)
            | Self::Broken(_)
            | Self::Roots(RootsError::Unresponsive(_)) => Class::Transient,
            Self::NotGrpc { status, .. } => status_class(*status),
            Self::Refused { code, .. } => code_class(*code),
            Self::Tls(_) | Self::Roots(_) | Self::Request(_) | Self::TooLong { .. } | Self::Unreadable(_) => {
                Class::Permanent
            }
        }
    }

    /// The remedy that depends on how the connection was set up.
    pub fn remedy(&self, options: &ConnectionOptions) -> Option<String> {
        match self {
            Self::Tls(error) => error.remedy(options),
            Self::Roots(RootsError::Unresponsive(_)) => None,
            Self::Roots(_) => Some(options.name_the_root()),
            Self::Handshake(_) => Some(options.is_it_tls()),
            _ => None,
        }
    }

    /// The cause and its remedy.
    pub fn explain(&self, options: &ConnectionOptions) -> String {
        with_remedy(self.to_string(), self.remedy(options))
    }
}

impl TlsError {
    /// The meaning of a failed handshake with a server that should be `name`, and chain to `roots`.
    pub(super) fn of(error: &rustls::Error, roots: &str, name: &str) -> Self {
        match error {
            // A bad signature: a root of the same name with another key.
            rustls::Error::InvalidCertificate(
                CertificateError::UnknownIssuer | CertificateError::BadSignature,
            ) => Self::UnknownIssuer { roots: roots.to_owned() },
            rustls::Error::InvalidCertificate(
                CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
            ) => Self::WrongName { name: name.to_owned() },
            rustls::Error::InvalidMessage(_) => Self::NotTls(error.clone()),
            other => Self::Other(other.clone()),
        }
    }

    /// The meaning of an alert from the server; `has_presented` if it got a client certificate.
    pub(crate) fn of_alert(alert: AlertDescription, has_presented: bool) -> Self {
        use AlertDescription as A;
        let reason = match alert {
            A::CertificateRequired if !has_presented => return Self::ClientCertRequired,
            A::NoApplicationProtocol => return Self::NoCommonProtocol,
            _ if !has_presented => return Self::Alert(alert),
            A::CertificateExpired => "by its clock it has expired".to_owned(),
            A::CertificateRevoked => "it has been revoked".to_owned(),
            // A bad signature: the server knows a CA of the issuer's name with another key.
            A::UnknownCA | A::DecryptError => {
                format!("it does not accept the issuer (alert {alert:?}); was another CA the issuer?")
            }
            // Many servers say no more than this.
            A::BadCertificate | A::CertificateUnknown => {
                format!("it does not accept it, perhaps because of the issuer (alert {alert:?})")
            }
            A::UnsupportedCertificate => format!("unsupported key type or key usage (alert {alert:?})"),
            A::AccessDenied => format!("the identity that it names has no access (alert {alert:?})"),
            _ => return Self::Alert(alert),
        };
        Self::ClientCertRefused { reason }
    }

    fn remedy(&self, options: &ConnectionOptions) -> Option<String> {
        match self {
            Self::UnknownIssuer { .. } => Some(format!("set {} to its root", options.roots)),
            Self::WrongName { .. } | Self::InvalidName { .. } => Some(options.server_name.to_owned()),
            Self::NotTls(_) => Some(options.is_it_tls()),
            Self::ClientCertRequired => Some(options.client_cert.to_owned()),
            Self::ClientCertRefused { .. } | Self::NoCommonProtocol | Self::Alert(_) | Self::Other(_) => None,
        }
    }

    /// The cause and its remedy.
    pub fn explain(&self, options: &ConnectionOptions) -> String {
        with_remedy(self.to_string(), self.remedy(options))
    }
}

impl RootsError {
    /// The cause and its remedy.
    pub fn explain(&self, options: &ConnectionOptions) -> String {
        with_remedy(self.to_string(), Some(options.name_the_root()))
    }
}

fn with_remedy(cause: String, remedy: Option<String>) -> String {
    match remedy {
        Some(remedy) => format!("{cause}; {remedy}"),
        None => cause,
    }
}

/// The retry class of a gRPC status.
pub fn code_class(code: Code) -> Class {
    match code {
        Code::Unavailable
        | Code::DeadlineExceeded
        | Code::ResourceExhausted
        | Code::Aborted
        | Code::Internal
        | Code::Cancelled
        // The kubelet rotates the token, and each call reads it again.
        | Code::Unauthenticated => Class::Transient,
        _ => Class::Permanent,
    }
}

/// The retry class of an HTTP status: too many requests and the server's own trouble pass, and 401, because tokens are
/// rotated.
pub fn status_class(status: StatusCode) -> Class {
    match status.as_u16() {
        401 | 408 | 425 | 429 | 500..=599 => Class::Transient,
        _ => Class::Permanent,
    }
}

/// The delay in `retry-after`, in seconds. The other form, a date, is rare, and depends on two clocks.
pub(crate) fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let seconds = headers.get(RETRY_AFTER)?.to_str().ok()?.trim().parse().ok()?;
    Some(Duration::from_secs(seconds))
}

/// `error` with its sources: hyper says no more than "connection error".
pub(crate) fn with_causes(error: &(dyn Error + 'static)) -> String {
    let causes = || std::iter::successors(Some(error), |&error| error.source());
    // The same end looks different each time, and must not be logged as a new failure each time.
    let is_closed = |error: &(dyn Error + 'static)| {
        error.downcast_ref().is_some_and(hyper::Error::is_incomplete_message)
            || error.downcast_ref().is_some_and(is_closed_by_peer)
    };
    if causes().any(is_closed) {
        return CLOSED_BY_PEER.to_owned();
    }
    causes().map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

pub(super) const CLOSED_BY_PEER: &str = "the server closed it";

/// Whether the other side closed the connection. Which of these kinds it looks like is a matter of chance.
pub(super) fn is_closed_by_peer(error: &io::Error) -> bool {
    use io::ErrorKind as Kind;
    matches!(
        error.kind(),
        Kind::UnexpectedEof | Kind::ConnectionReset | Kind::ConnectionAborted | Kind::BrokenPipe
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const OPTIONS: &ConnectionOptions = &ConnectionOptions {
        address: "the address",
        roots: "the-root",
        server_name: "correct the name",
        client_cert: "give it one",
    };

    #[test]
    fn each_failure_that_an_option_mends_comes_with_its_remedy() {
        let cases: [(TransportError, &str); 7] = [
            (
                RootsError::NoSystemRoots.into(),
                "no system roots; name the server's root with the-root FILE, or the-root system",
            ),
            (
                TlsError::UnknownIssuer { roots: "/r.pem".to_owned() }.into(),
                "not signed by /r.pem; set the-root to its root",
            ),
            (TlsError::WrongName { name: "ca".to_owned() }.into(), "not for the name ca; correct the name"),
            (
                TlsError::InvalidName { name: "c a".to_owned() }.into(),
                "\"c a\" is not a server name; correct the name",
            ),
            (TlsError::ClientCertRequired.into(), "that it accepts; give it one"),
            (
                TransportError::Handshake(io::Error::other(CLOSED_BY_PEER)),
                "the server closed it in the TLS handshake; is this a TLS port? Plaintext needs http:// in the address",
            ),
            (TransportError::broken("reset"), "before it had answered: reset"),
        ];
        for (error, end) in cases {
            let words = error.explain(OPTIONS);
            assert!(words.ends_with(end), "{words}");
        }
    }

    #[test]
    fn roots_on_a_file_system_that_does_not_answer_are_read_again_soon() {
        let silent =
            Unresponsive::Silent { path: "/dead/root.pem".into(), since: "2026-06-21T07:20:00Z".to_owned() };
        let error = TransportError::from(RootsError::from(silent));
        assert_eq!(error.class(), Class::Transient);
        let words = error.explain(OPTIONS);
        assert!(words.contains("the file system of /dead/root.pem does not answer since"), "{words}");
        assert!(!words.contains("the-root"), "no option mends it: {words}");
    }

    #[test]
    fn an_alert_is_about_the_client_certificate_only_if_there_was_one() {
        use AlertDescription as A;
        let is_refusal = |alert, presented| {
            matches!(TlsError::of_alert(alert, presented), TlsError::ClientCertRefused { .. })
        };
        for alert in [
            A::CertificateExpired,
            A::CertificateRevoked,
            A::UnknownCA,
            A::DecryptError,
            A::BadCertificate,
            A::CertificateUnknown,
            A::UnsupportedCertificate,
            A::AccessDenied,
        ] {
            assert!(is_refusal(alert, true) && !is_refusal(alert, false), "{alert:?}");
        }
        for presented in [true, false] {
            assert!(
                !is_refusal(A::InternalError, presented) && !is_refusal(A::NoApplicationProtocol, presented)
            );
        }
        assert!(matches!(TlsError::of_alert(A::CertificateRequired, false), TlsError::ClientCertRequired));
    }
}
