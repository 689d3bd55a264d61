//! Connections to CAs: the transport's errors as [`CaError`]s, with the options that mend them.

use std::io;

use super::{CaError, InvalidResponse};
use crate::auth::client_cert::ClientCertificate;
use crate::fs::disk::Disk;
use crate::net::endpoint::{Connected, Endpoint, Protocol};
use crate::net::error::{ConnectionOptions, RootsError, TlsError, TransportError};
use crate::net::rest::{self, Call, Reply};

const OPTIONS: &ConnectionOptions = &ConnectionOptions {
    address: "--ca-address",
    roots: "--ca-root",
    server_name: "set --ca-server-name to the name it has",
    client_cert: "name its directory with --ca-client-cert-dir",
};

/// Connects to a CA without calling it. A CA that asks for a client certificate gets `certificate`.
pub async fn connect(
    endpoint: &Endpoint,
    certificate: Option<&ClientCertificate>,
    protocol: Protocol,
    disk: &Disk,
) -> Result<Connected, CaError> {
    let pair = certificate.map(|certificate| &certificate.pair);
    let connected = endpoint.connect(pair, protocol, disk).await;
    connected.map_err(|error| CaError::from_transport(error, endpoint, certificate))
}

/// Makes one call over HTTP/1.1. The caller sets the deadline.
pub(super) async fn call(endpoint: &Endpoint, call: Call<'_>, disk: &Disk) -> Result<Reply, CaError> {
    rest::call(endpoint, call, disk).await.map_err(|error| CaError::from_transport(error, endpoint, None))
}

impl CaError {
    /// The failure of a call to the CA at `endpoint`, to which `certificate` was or would have been presented.
    pub(super) fn from_transport(
        error: TransportError,
        endpoint: &Endpoint,
        certificate: Option<&ClientCertificate>,
    ) -> Self {
        let address = endpoint.address.to_string();
        match error {
            TransportError::Unreachable(source) => Self::Unreachable { address, source },
            TransportError::Broken(source) => Self::Broken { address, source },
            TransportError::Handshake(ref source) => {
                let remedy = error.remedy(OPTIONS).unwrap_or_default();
                let reason = format!("{source} in the TLS handshake; {remedy}");
                Self::Broken { address, source: io::Error::new(source.kind(), reason) }
            }
            TransportError::Tls(error) => match (error, certificate) {
                (TlsError::ClientCertRefused { reason }, Some(certificate)) => {
                    Self::ClientCertificate { address, certificate: certificate.to_string(), reason }
                }
                (error, _) => Self::Tls { address, reason: error.explain(OPTIONS) },
            },
            TransportError::Roots(RootsError::Unresponsive(error)) => error.into(),
            TransportError::Roots(error) => Self::Roots(error.explain(OPTIONS)),
            TransportError::Request(reason) => Self::Local(reason),
            TransportError::TooLong { limit } => {
                InvalidResponse::Unreadable(format!("it is longer than {limit} bytes")).into()
            }
            TransportError::Unreadable(reason) => InvalidResponse::Unreadable(reason).into(),
            TransportError::NotGrpc { status, content_type, retry_after } => {
                let message = format!(
                    "this is not gRPC ({content_type}): does a proxy answer for it, or is {} another server's?",
                    OPTIONS.address
                );
                Self::Status { address, status, message, retry_after }
            }
            TransportError::Refused { code, message, retry_after } => {
                Self::Refused { address, code, message, retry_after }
            }
        }
    }
}
