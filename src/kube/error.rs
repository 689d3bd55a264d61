//! Why a call to an API server failed.

use std::time::Duration;

use http::StatusCode;

use crate::auth::token_file::CredentialError;
use crate::net::error::TransportError;

/// Why a call to an API server failed. Texts name the server, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum KubeError {
    /// The API server refused the call, or failed.
    #[error("the API server {address} answered {status}: {message}")]
    Status {
        address: String,
        status: StatusCode,
        /// The server's words, cut and without credentials, and a hint where there is one.
        message: String,
        /// The delay before a retry that the server asks for.
        retry_after: Option<Duration>,
    },
    /// 410: the version to watch from is too old.
    #[error("the API server {address} no longer knows what happened since the last event that it sent")]
    Expired { address: String },
    #[error("the API server {address}: {source}")]
    Unreachable { address: String, source: TransportError },
    /// Within this room only: the callers know which server it is.
    #[error(transparent)]
    Transport(#[from] TransportError),
    #[error(transparent)]
    Credential(#[from] CredentialError),
    /// The answer makes no sense.
    #[error("the API server {address} sent something unreadable: {reason}")]
    Unreadable { address: String, reason: String },
    /// The review has no result.
    #[error("the API server {address} could not decide about a right: {reason}")]
    Undecided { address: String, reason: String },
    #[error("the API server {address} did not answer within {patience:?}")]
    Silent { address: String, patience: Duration },
}

impl KubeError {
    /// RBAC, or an admission plugin, says no: repeating the call does not help.
    pub fn is_forbidden(&self) -> bool {
        matches!(self, Self::Status { status: StatusCode::FORBIDDEN, .. })
    }

    /// The credential is refused.
    pub fn is_unauthenticated(&self) -> bool {
        matches!(self, Self::Status { status: StatusCode::UNAUTHORIZED, .. })
    }

    /// The delay before a retry that the server asks for.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Status { retry_after, .. } => *retry_after,
            _ => None,
        }
    }
}
