//! Every touch of a network. A transport knows no CA and no flag: its errors are [`error::TransportError`]s, to which the
//! callers add the remedies.

pub mod address;
pub(crate) mod buffer;
pub mod error;
pub mod tls;
pub mod endpoint;
pub mod http1;
pub mod http2;
pub mod rest;
pub mod grpc;
#[cfg(any(test, fuzzing))]
pub mod fuzz;

use http::{HeaderName, HeaderValue};

/// A header that goes with every call of a client.
pub type Header = (HeaderName, HeaderValue);
