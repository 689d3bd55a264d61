//! The SPIFFE Workload API: identity and trust bundle of the socket's workload, for programs that are not Envoys.

mod identity;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use http::header::HeaderMap;
use hyper::body::Incoming;
use tonic::Status;

use self::identity::{Content, IdentityStream};
use super::others::{self, Responses};
use super::sds::Peer;
use super::sds::call::client_timeout;
use super::sds::requests::Requests;

/// Its name, which has no package.
pub(super) const SERVICE: &str = "SpiffeWorkloadAPI";
/// What each request carries, so that a server that is talked into calling a socket can't reach it.
const SECURITY_HEADER: &str = "workload.spiffe.io";

/// Answers a call of `method`.
pub(super) fn open(
    peer: Arc<Peer>,
    method: &str,
    request: http::Request<Incoming>,
) -> Result<Responses, Status> {
    if !has_security_header(request.headers()) {
        let reason = "each request of the Workload API has the metadata workload.spiffe.io: true, once";
        refuse(&peer, "no_spiffe_header", reason);
        return Err(Status::invalid_argument(reason));
    }
    let content = match method {
        "FetchX509SVID" => Content::Svid,
        "FetchX509Bundles" => Content::Bundles,
        "FetchJWTBundles" => Content::JwtBundles,
        _ => {
            return Err(Status::unimplemented(
                "this agent issues X.509-SVIDs alone: FetchX509SVID, FetchX509Bundles, FetchJWTBundles (empty)",
            ));
        }
    };
    let timeout = client_timeout(request.headers());
    let requests = Requests::new(request.into_body(), Arc::clone(&peer));
    let stream = IdentityStream::new(peer, requests, content, timeout)?;
    Ok(others::responses(stream, IdentityStream::next))
}

/// Counts, reports and logs a refusal.
fn refuse(peer: &Peer, label: &'static str, reason: &str) {
    peer.service.refuse(label, &reason);
    tracing::warn!(reason, "call of the Workload API refused");
}

fn has_security_header(headers: &HeaderMap) -> bool {
    let mut values = headers.get_all(SECURITY_HEADER).iter();
    values.next().is_some_and(|value| value == "true") && values.next().is_none()
}
