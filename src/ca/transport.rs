//! Connections to CAs: the transport's errors as [`CaError`]s, with the options that mend them.

use std::io;

use http::StatusCode;

use super::{CaError, InvalidResponse};
use crate::auth::client_cert::ClientCertificate;
use crate::fs::disk::Disk;
use crate::kube::KubeError;
use crate::net::endpoint::{Connected, Endpoint, Protocol};
use crate::net::error::{ConnectionOptions, RootsError, TlsError, TransportError};
use crate::net::rest::{self, Call, Reply};

const OPTIONS: &ConnectionOptions = &ConnectionOptions {
    address: "--ca-address",
    roots: "--ca-root",
    server_name: "set --ca-server-name to the name it has",
    client_cert: "name its directory with --ca-client-cert-dir",
};

/// Of the providers that present no client certificate.
const OPTIONS_WITHOUT_CERTIFICATE: &ConnectionOptions = &ConnectionOptions {
    client_cert: "this provider presents none (only citadel does): let the server, or the proxy before it, accept calls without one",
    ..*OPTIONS
};

/// The client certificate of calls to a CA.
#[derive(Clone, Copy, Debug)]
pub enum ClientAuth<'a> {
    /// The provider never presents one.
    Unsupported,
    /// The one that is presented if the server requests it; none if none is configured or usable.
    Certificate(Option<&'a ClientCertificate>),
}

impl<'a> ClientAuth<'a> {
    fn certificate(self) -> Option<&'a ClientCertificate> {
        match self {
            Self::Unsupported => None,
            Self::Certificate(certificate) => certificate,
        }
    }

    fn options(self) -> &'static ConnectionOptions {
        match self {
            Self::Unsupported => OPTIONS_WITHOUT_CERTIFICATE,
            Self::Certificate(_) => OPTIONS,
        }
    }
}

/// Connects to a CA without calling it.
pub async fn connect(
    endpoint: &Endpoint,
    client: ClientAuth<'_>,
    protocol: Protocol,
    disk: &Disk,
) -> Result<Connected, CaError> {
    let pair = client.certificate().map(|certificate| &certificate.pair);
    let connected = endpoint.connect(pair, protocol, disk).await;
    connected.map_err(|error| CaError::from_transport(error, endpoint, client))
}

/// Makes one call over HTTP/1.1, without a client certificate. The caller sets the deadline.
pub(super) async fn call(endpoint: &Endpoint, call: Call<'_>, disk: &Disk) -> Result<Reply, CaError> {
    let reply = rest::call(endpoint, call, disk).await.and_then(|reply| match wants_tls(&reply) {
        true if endpoint.address.plaintext => Err(TransportError::broken("the server expects TLS")),
        _ => Ok(reply),
    });
    reply.map_err(|error| CaError::from_transport(error, endpoint, ClientAuth::Unsupported))
}

/// Whether a server answers in plaintext that it expects TLS, as those in Go and nginx do.
fn wants_tls(reply: &Reply) -> bool {
    let says = |words: &[u8]| reply.body.windows(words.len()).any(|window| window == words);
    reply.status == StatusCode::BAD_REQUEST
        && (says(b"HTTP request to an HTTPS server") || says(b"HTTP request was sent to HTTPS port"))
}

impl CaError {
    /// The failure of a call to the API server at `endpoint`.
    pub(super) fn from_kube(error: KubeError, endpoint: &Endpoint) -> Self {
        let unreadable = |reason| InvalidResponse::Unreadable(reason).into();
        match error {
            KubeError::Status { address, status, message, retry_after } => {
                Self::Status { address, status, message, retry_after }
            }
            KubeError::Unreachable { source, .. } | KubeError::Transport(source) => {
                Self::from_transport(source, endpoint, ClientAuth::Unsupported)
            }
            KubeError::Credential(error) => error.into(),
            KubeError::Silent { patience, .. } => Self::Timeout(patience),
            KubeError::Unreadable { reason, .. } | KubeError::Undecided { reason, .. } => unreadable(reason),
            KubeError::Expired { .. } => unreadable(error.to_string()),
        }
    }

    /// The failure of a call to the CA at `endpoint`.
    pub(super) fn from_transport(error: TransportError, endpoint: &Endpoint, client: ClientAuth<'_>) -> Self {
        let options = client.options();
        let address = endpoint.address.to_string();
        match error {
            TransportError::Unreachable(source) => Self::Unreachable { address, source },
            // A server that expects TLS ends the connection without an answer.
            TransportError::Broken(source) if endpoint.address.plaintext => {
                let reason = format!("{source}; {}", options.is_it_plaintext());
                Self::Broken { address, source: io::Error::new(source.kind(), reason) }
            }
            TransportError::Broken(source) => Self::Broken { address, source },
            TransportError::Handshake(ref source) => {
                let remedy = error.remedy(options).unwrap_or_default();
                let reason = format!("{source} in the TLS handshake; {remedy}");
                Self::Broken { address, source: io::Error::new(source.kind(), reason) }
            }
            TransportError::Tls(error) => match (error, client.certificate()) {
                (TlsError::ClientCertRefused { reason }, Some(certificate)) => {
                    Self::ClientCertificate { address, certificate: certificate.to_string(), reason }
                }
                (error, _) => Self::Tls { address, reason: error.explain(options) },
            },
            TransportError::Roots(RootsError::Unresponsive(error)) => error.into(),
            TransportError::Roots(error) => Self::Roots(error.explain(options)),
            TransportError::Request(reason) => Self::Local(reason),
            TransportError::TooLong { limit } => {
                InvalidResponse::Unreadable(format!("it is longer than {limit} bytes")).into()
            }
            TransportError::Unreadable(reason) => InvalidResponse::Unreadable(reason).into(),
            TransportError::NotGrpc { status, content_type, retry_after } => {
                let message = format!(
                    "this is not gRPC ({content_type}): does a proxy answer for it, or is {} another server's?",
                    options.address
                );
                Self::Status { address, status, message, retry_after }
            }
            TransportError::Refused { code, message, retry_after } => {
                Self::Refused { address, code, message, retry_after }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::address::Address;
    use crate::net::error::TlsError;
    use crate::net::tls::Roots;

    #[test]
    fn a_server_that_expects_tls_is_told_from_one_that_is_down() {
        let endpoint = |address: &str| Endpoint {
            address: Address::with_ports(address, 443, 80).unwrap(),
            roots: Roots::System,
            server_name: None,
        };
        let words = |address: &str| {
            let error = TransportError::broken("the server closed it");
            CaError::from_transport(error, &endpoint(address), ClientAuth::Unsupported).to_string()
        };
        assert!(words("http://ca:1").contains("is this a TLS port? Use https:// in --ca-address"));
        assert!(!words("https://ca:1").contains("TLS port"));
        let reply = |status, body: &'static str| Reply {
            status,
            headers: http::HeaderMap::new(),
            body: body.into(),
            retry_after: None,
        };
        let go = "Client sent an HTTP request to an HTTPS server.\n";
        assert!(wants_tls(&reply(StatusCode::BAD_REQUEST, go)));
        let nginx = "<center>The plain HTTP request was sent to HTTPS port</center>";
        assert!(wants_tls(&reply(StatusCode::BAD_REQUEST, nginx)));
        assert!(
            !wants_tls(&reply(StatusCode::OK, go)) && !wants_tls(&reply(StatusCode::BAD_REQUEST, "no role"))
        );
    }

    #[test]
    fn only_a_provider_that_presents_a_client_certificate_names_the_option_for_it() {
        let remedy = |client: ClientAuth<'_>| {
            TransportError::from(TlsError::ClientCertRequired).explain(client.options())
        };
        let (citadel, others) = (remedy(ClientAuth::Certificate(None)), remedy(ClientAuth::Unsupported));
        assert!(citadel.contains("--ca-client-cert-dir"), "{citadel}");
        assert!(
            !others.contains("--ca-client-cert-dir") && others.contains("accept calls without one"),
            "{others}"
        );
    }
}
