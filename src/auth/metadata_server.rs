//! The metadata server of Google's machines and clusters, which gives the tokens of the service account that is attached.

use std::time::SystemTime;

use http::header::{HeaderMap, HeaderName, HeaderValue};
use http::{Method, StatusCode};

use super::token::{Failure, Granted, parsed};
use crate::base::limits;
use crate::base::retry::Class;
use crate::net::address::Address;
use crate::net::endpoint::Endpoint;
use crate::net::error::ConnectionOptions;
use crate::net::rest::{self, Call};
use crate::net::tls::Roots;

/// Where it is, on every machine that has one.
pub const HOST: &str = "metadata.google.internal";

const FLAVOR: HeaderName = HeaderName::from_static("metadata-flavor");

/// The metadata server, and what it is asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MetadataServer {
    /// Where it is. It speaks no TLS: what is called never leaves the machine.
    pub address: Address,
    /// Which token.
    pub wanted: Wanted,
}

/// Which token of the service account.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// The one that Google's APIs take.
    Access,
    /// A JWT that says who the caller is, to whom it is for.
    Identity {
        /// Whom.
        audience: String,
    },
}

impl MetadataServer {
    pub(super) async fn fetch(&self, now: SystemTime) -> Result<Granted, Failure> {
        const FOLDER: &str = "/computeMetadata/v1/instance/service-accounts/default";
        const GOOGLE: HeaderValue = HeaderValue::from_static("Google");
        let path = match &self.wanted {
            Wanted::Access => format!("{FOLDER}/token"),
            Wanted::Identity { audience } => {
                format!("{FOLDER}/identity?audience={}&format=full", rest::encoded(audience))
            }
        };
        let endpoint = Endpoint { address: self.address.clone(), roots: Roots::System, server_name: None };
        let headers = HeaderMap::from_iter([(FLAVOR, GOOGLE)]);
        let call = Call { method: Method::GET, path: &path, headers, body: None };
        let reply = rest::call(&endpoint, call).await;
        let reply = reply.map_err(|error| Failure::of_call(&error, OPTIONS, WAY_OUT))?;
        // Whoever else answers at this name must not be believed.
        if reply.headers.get(FLAVOR) != Some(&GOOGLE) {
            let reason = format!("what answers there is no metadata server of Google's; {WAY_OUT}");
            return Err(Failure::new(Class::Permanent, reason));
        }
        let status = reply.status;
        if !status.is_success() {
            let said = limits::sanitize_for_log(String::from_utf8_lossy(&reply.body).trim());
            let advice = match status {
                StatusCode::NOT_FOUND => ": has this machine, or this pod, a service account of Google's?",
                StatusCode::FORBIDDEN => ": may this machine, or this pod, use its service account?",
                _ => "",
            };
            let may_pass = status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS;
            let class = if may_pass { Class::Transient } else { Class::Permanent };
            let reason = format!("it answered {status}: {said}{advice}");
            return Err(Failure { retry_after: reply.retry_after, ..Failure::new(class, reason) });
        }
        let granted = reply.read_and_wipe(|body| match self.wanted {
            Wanted::Access => Granted::from_json(body, now),
            Wanted::Identity { .. } => Ok(Granted::new(parsed(body)?, None, now)),
        });
        granted.map_err(|reason| Failure::new(Class::Permanent, reason))
    }
}

/// It is called in plain text: nothing but its address can be set.
const OPTIONS: &ConnectionOptions = &ConnectionOptions {
    address: "GCE_METADATA_HOST",
    roots: "--token-source",
    server_name: "choose another --token-source",
    client_cert: "choose another --token-source",
};

const WAY_OUT: &str = "only machines and clusters of Google Cloud have one (GCE_METADATA_HOST names another): choose \
                       another --token-source";
