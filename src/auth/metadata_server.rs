//! The metadata server of Google's machines and clusters, which issues tokens of the attached service account.

use std::time::SystemTime;

use http::header::{HeaderMap, HeaderName, HeaderValue};
use http::{Method, StatusCode};

use super::token::{Failure, Granted, parse_token};
use crate::base::retry::Class;
use crate::base::text;
use crate::fs::disk::Disk;
use crate::net::address::Address;
use crate::net::endpoint::Endpoint;
use crate::net::error::ConnectionOptions;
use crate::net::rest::{self, Call};
use crate::net::tls::Roots;

/// Its name on every machine that has one.
pub const HOST: &str = "metadata.google.internal";

const FLAVOR: HeaderName = HeaderName::from_static("metadata-flavor");

/// The metadata server, and the token that is requested.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MetadataServer {
    /// It has no TLS: the calls never leave the machine.
    pub address: Address,
    pub wanted: Wanted,
}

/// The kind of token of the service account.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// For Google's APIs.
    Access,
    /// A JWT that proves the caller's identity to `audience`.
    Identity { audience: String },
}

impl MetadataServer {
    pub(super) async fn fetch(&self, now: SystemTime, disk: &Disk) -> Result<Granted, Failure> {
        const ACCOUNT: &str = "/computeMetadata/v1/instance/service-accounts/default";
        const GOOGLE: HeaderValue = HeaderValue::from_static("Google");
        let path = match &self.wanted {
            Wanted::Access => format!("{ACCOUNT}/token"),
            Wanted::Identity { audience } => {
                format!("{ACCOUNT}/identity?audience={}&format=full", rest::encoded(audience))
            }
        };
        let endpoint = Endpoint { address: self.address.clone(), roots: Roots::System, server_name: None };
        let headers = HeaderMap::from_iter([(FLAVOR, GOOGLE)]);
        let call = Call { method: Method::GET, path: &path, headers, body: None };
        let reply = rest::call(&endpoint, call, disk).await;
        let reply = reply.map_err(|error| Failure::of_call(&error, OPTIONS, REMEDY))?;
        // Another server at this name must not be trusted.
        if reply.headers.get(FLAVOR) != Some(&GOOGLE) {
            let reason = format!("the server there is not Google's metadata server; {REMEDY}");
            return Err(Failure::new(Class::Permanent, reason));
        }
        let status = reply.status;
        if !status.is_success() {
            let said = text::sanitize_for_log(String::from_utf8_lossy(&reply.body).trim());
            let advice = match status {
                StatusCode::NOT_FOUND => ": does this machine, or this Pod, have a Google service account?",
                StatusCode::FORBIDDEN => {
                    ": is this machine, or this Pod, allowed to use its service account?"
                }
                _ => "",
            };
            let may_pass = status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS;
            let class = if may_pass { Class::Transient } else { Class::Permanent };
            let reason = format!("it answered {status}: {said}{advice}");
            return Err(Failure { retry_after: reply.retry_after, ..Failure::new(class, reason) });
        }
        let granted = reply.read_and_wipe(|body| match self.wanted {
            Wanted::Access => Granted::from_json(body, now),
            Wanted::Identity { .. } => Ok(Granted::new(parse_token(body)?, None, now)),
        });
        granted.map_err(|reason| Failure::new(Class::Permanent, reason))
    }
}

/// Calls are in plain text: only the address can be set.
const OPTIONS: &ConnectionOptions = &ConnectionOptions {
    address: "GCE_METADATA_HOST",
    roots: "--token-source",
    server_name: "choose another --token-source",
    client_cert: "choose another --token-source",
};

const REMEDY: &str = "only Google Cloud has one (GCE_METADATA_HOST sets another address): choose another \
                      --token-source";
