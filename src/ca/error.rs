//! Why a CA gave no certificate: messages with remedies, retry classes, metric labels.

use std::path::PathBuf;
use std::time::Duration;

use super::{InvalidResponse, exec};
use crate::auth::client_cert::NoClientCert;
use crate::auth::token::NoToken;
use crate::auth::token_file::{CredentialError, UnsendableToken};
use crate::base::retry::Class;
use crate::fs::disk::Unresponsive;
use crate::net::error::{code_class, status_class};

/// Why a CA gave no certificate.
#[derive(Debug, thiserror::Error)]
pub enum CaError {
    #[error("connecting to the CA at {address} failed: {source}; is it running, and is --ca-address right?")]
    Unreachable { address: String, source: std::io::Error },
    #[error(
        "the connection to the CA at {address} broke before it had answered: {source}; see its log, or that of a \
         proxy in front of it"
    )]
    Broken { address: String, source: std::io::Error },
    #[error("the TLS handshake with the CA at {address} failed: {reason}")]
    Tls { address: String, reason: String },
    #[error("the CA's roots can't be read: {0}")]
    Roots(String),
    #[error(
        "the CA gave no answer within {0:?}: it is overloaded, or packets are lost; --ca-timeout allows more time"
    )]
    Timeout(Duration),
    #[error("{0}")]
    Pending(String),
    #[error("the CA at {address} rejected the request: {reason}; the next attempt makes a new one")]
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
    #[error("the client certificate can't be used: {certificate}; and there is no token instead: {token}")]
    NoCredential { certificate: Box<NoClientCert>, token: NoToken },
    #[error("the CA at {address} answered {status}: {message}")]
    Api { address: String, status: http::StatusCode, message: String, class: Class },
    #[error("{option} {path} can't be used: {reason}")]
    File { option: &'static str, path: PathBuf, reason: String },
    #[error(transparent)]
    Unresponsive(#[from] Unresponsive),
    #[error("the command of {option} {failure}{said}")]
    Command { option: &'static str, failure: exec::Failure, said: String },
    #[error("the CA's response is invalid: {0}")]
    InvalidResponse(#[from] InvalidResponse),
    #[error("the CA's response is invalid: {response}; {remedy}")]
    InvalidResponseWithRemedy { response: InvalidResponse, remedy: &'static str },
    #[error("making a key or a request failed: {0}")]
    Local(String),
}

impl From<CredentialError> for CaError {
    fn from(error: CredentialError) -> Self {
        Self::Credential(error.into())
    }
}

impl From<UnsendableToken> for CaError {
    fn from(error: UnsendableToken) -> Self {
        Self::Local(error.to_string())
    }
}

impl CaError {
    /// Whether a retry may succeed without a change by a person.
    pub fn class(&self) -> Class {
        match self {
            Self::Unreachable { .. }
            | Self::Broken { .. }
            | Self::Timeout(_)
            | Self::Pending(_)
            | Self::Unresponsive(_)
            // The file may be about to be written.
            | Self::File { .. } => Class::Transient,
            Self::Api { class, .. } => *class,
            Self::Credential(token) | Self::NoCredential { token, .. } => token.class(),
            Self::Refused { code, .. } => code_class(*code),
            Self::Status { status, .. } => match status.as_u16() {
                // Another node of a Vault may answer the next call, or the same node once it has caught up.
                307 | 412 | 472 | 473 => Class::Transient,
                _ => status_class(*status),
            },
            Self::Command { failure, .. } => failure.class(),
            Self::Tls { .. }
            | Self::Rejected { .. }
            | Self::ClientCertificate { .. }
            | Self::Roots(_)
            | Self::InvalidResponse(_)
            | Self::InvalidResponseWithRemedy { .. }
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
            | Self::Unresponsive(_)
            | Self::Command { .. }
            | Self::InvalidResponse(_)
            | Self::InvalidResponseWithRemedy { .. }
            | Self::Local(_) => false,
        }
    }

    /// The delay before a retry that the CA asks for.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Status { retry_after, .. } | Self::Refused { retry_after, .. } => *retry_after,
            Self::Credential(NoToken::Service { retry_after, .. }) => *retry_after,
            _ => None,
        }
    }

    /// The label value in metrics.
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
            Self::File { .. } | Self::Unresponsive(_) => "file",
            Self::ClientCertificate { .. } => "client_certificate",
            Self::Credential(_) | Self::NoCredential { .. } => "credential",
            Self::Command { .. } => "command",
            Self::InvalidResponse(response) | Self::InvalidResponseWithRemedy { response, .. } => {
                response.label()
            }
            Self::Local(_) => "local",
        }
    }
}
