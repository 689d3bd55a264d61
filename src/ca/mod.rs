//! What the agent knows of a CA: it signs, or it says why not.

mod response;
pub mod cfssl;
pub mod citadel;
pub mod embedded;
pub mod google_cas;
pub mod kubernetes;
pub mod exec;
pub mod failover;
pub mod provider;
pub mod providers;
pub mod vault;

use std::fmt;
use std::time::Duration;

pub use self::response::{Answer, InvalidResponse};
use crate::auth::client_cert::NoClientCert;
use crate::auth::token::NoToken;
use crate::auth::token_file::CredentialError;
use crate::base::spiffe_id::SpiffeId;

/// A client of one CA. `providers.rs` says what a new one takes.
#[tonic::async_trait]
pub trait CertificateAuthority: fmt::Debug + Send + Sync {
    /// The provider's name, as `--ca` takes it.
    fn name(&self) -> &'static str;

    /// Has `request` signed. The caller sets the deadline, and checks the answer.
    async fn sign(&self, request: &SigningRequest) -> Result<Answer, CaError>;

    /// What to do about an answer that did not pass the check, where that depends on the provider.
    fn remedy(&self, _answer: &InvalidResponse) -> Option<&'static str> {
        None
    }

    /// What is left of the last request at a CA that takes its time: after a call that failed or was cut off,
    /// `sign` goes on with it when it is given the same one again.
    fn pending(&self) -> Option<Pending> {
        None
    }

    /// Removes what calls have left at the CA and is of no use any more, as far as it can. It is called after each
    /// `sign`, when its outcome is settled; the caller sets the deadline.
    async fn tidy(&self) {}
}

/// A request that the CA may still answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pending {
    /// What the CA said, in the last call, that it waits for, and what to do about it.
    pub waits_for: Option<String>,
}

/// What a CA is asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SigningRequest {
    /// DER.
    pub csr: Vec<u8>,
    /// Who the certificate is for, where that is known.
    pub identity: Option<SpiffeId>,
    /// How long it is to be valid.
    pub ttl: Duration,
}

/// Why a CA gave no certificate.
#[derive(Debug, thiserror::Error)]
pub enum CaError {
    #[error("connecting to the CA at {address} failed: {source}; is it running, and is --ca-address right?")]
    Unreachable { address: String, source: std::io::Error },
    #[error(
        "the connection to the CA at {address} broke before it had answered: {source}; its log may tell why, or that of \
         what stands before it"
    )]
    Broken { address: String, source: std::io::Error },
    #[error("the TLS handshake with the CA at {address} failed: {reason}")]
    Tls { address: String, reason: String },
    #[error("the CA's roots can't be read: {0}")]
    Roots(String),
    #[error(
        "the CA gave no answer within {0:?}: it is overloaded, or what is sent gets lost; --ca-timeout gives it longer"
    )]
    Timeout(Duration),
    #[error("{0}")]
    Pending(String),
    #[error("the CA at {address} rejects the request: {reason}; the next try makes a new one")]
    Rejected { address: String, reason: String },
    #[error("the CA at {address} answered {code:?}: {message}")]
    Refused { address: String, code: tonic::Code, message: String, retry_after: Option<Duration> },
    #[error("the CA at {address} answered {status}: {message}")]
    Status { address: String, status: http::StatusCode, message: String, retry_after: Option<Duration> },
    #[error(
        "the CA at {address} refuses the client certificate {certificate}: {reason}; replace it: until then the token is used, if there is one"
    )]
    ClientCertificate { address: String, certificate: String, reason: String },
    #[error(transparent)]
    Credential(#[from] NoToken),
    #[error("the client certificate can't be used: {certificate}; and instead of it, {token}")]
    NoCredential { certificate: Box<NoClientCert>, token: NoToken },
    #[error("the CA at {address} answered {status}: {message}")]
    Api { address: String, status: http::StatusCode, message: String, class: Class },
    #[error("{path}, which {option} names, can't be used: {reason}")]
    File { option: &'static str, path: std::path::PathBuf, reason: String },
    #[error("the command of {option} {failure}{said}")]
    Command { option: &'static str, failure: exec::Failure, said: String },
    #[error("the CA's answer is not used: {0}")]
    Answer(#[from] InvalidResponse),
    #[error("the CA's answer is not used: {answer}; {remedy}")]
    AnswerWithRemedy { answer: InvalidResponse, remedy: &'static str },
    #[error("making a key or a request failed: {0}")]
    Local(String),
}

impl From<CredentialError> for CaError {
    fn from(error: CredentialError) -> Self {
        Self::Credential(error.into())
    }
}

/// How soon a failed call is worth repeating.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// It may pass by itself.
    Transient,
    /// Somebody has to mend something first.
    Permanent,
}

impl CaError {
    /// Whether it may pass by itself.
    pub fn class(&self) -> Class {
        use tonic::Code;
        match self {
            Self::Unreachable { .. }
            | Self::Broken { .. }
            | Self::Timeout(_)
            | Self::Pending(_)
            // Somebody may be about to put it there.
            | Self::File { .. } => Class::Transient,
            Self::Api { class, .. } => *class,
            Self::Credential(token) | Self::NoCredential { token, .. } => token.class(),
            Self::Refused { code, .. } => match code {
                Code::Unavailable
                | Code::DeadlineExceeded
                | Code::ResourceExhausted
                | Code::Aborted
                | Code::Internal
                | Code::Cancelled
                // The kubelet rotates the token, and each call reads it anew.
                | Code::Unauthenticated => Class::Transient,
                _ => Class::Permanent,
            },
            // Too many requests, or the server's own trouble; 401, because tokens are rotated; 307, 412, 472 and 473,
            // because another node of a Vault may answer the next call, or the same one when it has caught up.
            Self::Status { status, .. } if status.is_server_error() => Class::Transient,
            Self::Status { status, .. } => match status.as_u16() {
                307 | 401 | 408 | 412 | 425 | 429 | 472 | 473 => Class::Transient,
                _ => Class::Permanent,
            },
            Self::Command { failure, .. } => failure.class(),
            Self::Tls { .. }
            | Self::Rejected { .. }
            | Self::ClientCertificate { .. }
            | Self::Roots(_)
            | Self::Answer(_)
            | Self::AnswerWithRemedy { .. }
            | Self::Local(_) => Class::Permanent,
        }
    }

    /// Whether the message has the CA's address in it.
    pub fn names_its_ca(&self) -> bool {
        match self {
            Self::Unreachable { .. }
            | Self::Broken { .. }
            | Self::Tls { .. }
            | Self::Rejected { .. }
            | Self::Refused { .. }
            | Self::Status { .. }
            | Self::ClientCertificate { .. }
            | Self::Api { .. } => true,
            Self::Roots(_)
            | Self::Timeout(_)
            | Self::Pending(_)
            | Self::Credential(_)
            | Self::NoCredential { .. }
            | Self::File { .. }
            | Self::Command { .. }
            | Self::Answer(_)
            | Self::AnswerWithRemedy { .. }
            | Self::Local(_) => false,
        }
    }

    /// How long the CA asks to be left alone.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Status { retry_after, .. } | Self::Refused { retry_after, .. } => *retry_after,
            Self::Credential(NoToken::Service { retry_after, .. }) => *retry_after,
            _ => None,
        }
    }

    /// The one word for it in metrics.
    pub fn label(&self) -> &'static str {
        match self {
            Self::Unreachable { .. } | Self::Broken { .. } => "unreachable",
            Self::Tls { .. } => "tls",
            Self::Roots(_) => "roots",
            Self::Timeout(_) => "timeout",
            Self::Pending(_) => "pending",
            Self::Refused { .. } | Self::Status { .. } | Self::Api { .. } | Self::Rejected { .. } => {
                "refused"
            }
            Self::File { .. } => "file",
            Self::ClientCertificate { .. } => "client_certificate",
            Self::Credential(_) | Self::NoCredential { .. } => "credential",
            Self::Command { .. } => "command",
            Self::Answer(answer) | Self::AnswerWithRemedy { answer, .. } => answer.label(),
            Self::Local(_) => "local",
        }
    }
}
