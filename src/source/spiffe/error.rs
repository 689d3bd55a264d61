//! Why a SPIFFE endpoint gave no identity: messages with remedies, retry classes, metric labels.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use tonic::Code;

use super::answer::InvalidAnswer;
use crate::base::limits;
use crate::base::retry::Class;
use crate::fs::disk::Unresponsive;
use crate::net::error::{TransportError, code_class};

/// What clients look for in the message of a refusal that may end by itself.
const NO_IDENTITY: &str = "no identity issued";

/// Why an endpoint gave no identity.
#[derive(Debug)]
pub struct SpiffeError {
    /// As the option names it.
    pub(super) endpoint: Arc<str>,
    pub(super) cause: Cause,
}

#[derive(Debug, thiserror::Error)]
pub(super) enum Cause {
    #[error(
        "connecting failed: {0}; is SPIRE's agent, or what else serves the Workload API there, running, and is \
         --spiffe-endpoint right?"
    )]
    Unreachable(#[source] io::Error),
    #[error(transparent)]
    Unresponsive(#[from] Unresponsive),
    #[error("it gave no answer within {0:?}")]
    Silent(Duration),
    #[error(
        "it has no identity for this process yet (PermissionDenied: {0}): waiting for a registration entry whose selectors \
         match the agent"
    )]
    NoIdentity(String),
    #[error("it ended the stream without a reason")]
    Ended,
    #[error("it answered {code:?}: {message}{}", remedy(*code))]
    Refused { code: Code, message: String },
    #[error(
        "its answer is longer than {limit} bytes, which the agent does not read: does it have so many federated bundles?",
        limit = limits::SPIFFE_ANSWER_BYTES
    )]
    TooLong,
    #[error("{0}")]
    Call(#[source] TransportError),
    #[error("its answer is not used: {0}")]
    Invalid(#[from] InvalidAnswer),
}

fn remedy(code: Code) -> &'static str {
    match code {
        Code::Unimplemented => "; does this socket serve the SPIFFE Workload API?",
        Code::PermissionDenied => "; may this process use the endpoint?",
        _ => "",
    }
}

impl Cause {
    /// The meaning of a failed call.
    pub(super) fn of(error: TransportError) -> Self {
        match error {
            TransportError::Refused { code: Code::PermissionDenied, message, .. }
                if message.contains(NO_IDENTITY) =>
            {
                Self::NoIdentity(message)
            }
            TransportError::Refused { code, message, .. } => Self::Refused { code, message },
            TransportError::TooLong { .. } => Self::TooLong,
            other => Self::Call(other),
        }
    }

    /// Whether a stream that has delivered an identity merely ended: a new one is likely to deliver the same.
    pub(super) fn is_end(&self) -> bool {
        match self {
            Self::Ended => true,
            Self::Refused { code, .. } => code_class(*code) == Class::Transient,
            Self::Call(error) => error.class() == Class::Transient,
            _ => false,
        }
    }
}

impl fmt::Display for SpiffeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SPIFFE endpoint {}: {}", self.endpoint, self.cause)
    }
}

impl std::error::Error for SpiffeError {}

impl SpiffeError {
    /// Whether a retry may succeed without a change by a person.
    pub(super) fn class(&self) -> Class {
        match &self.cause {
            Cause::Unreachable(_) | Cause::Unresponsive(_) | Cause::Silent(_) | Cause::Ended => {
                Class::Transient
            }
            Cause::Refused { code, .. } => code_class(*code),
            Cause::Call(error) => error.class(),
            Cause::NoIdentity(_) | Cause::TooLong | Cause::Invalid(_) => Class::Permanent,
        }
    }

    /// The label value in metrics.
    pub(super) fn label(&self) -> &'static str {
        match &self.cause {
            Cause::Unreachable(_) | Cause::Ended => "unreachable",
            Cause::Unresponsive(_) => "file",
            Cause::Silent(_) => "timeout",
            Cause::NoIdentity(_) => "no_identity",
            Cause::Refused { .. } => "refused",
            Cause::TooLong => "junk",
            Cause::Call(error) if error.class() == Class::Transient => "unreachable",
            Cause::Call(_) => "junk",
            Cause::Invalid(invalid) => invalid.label(),
        }
    }
}
