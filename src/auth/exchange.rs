//! Token exchange (RFC 8693): a token service accepts the workload's own token, and issues one that the CA accepts.

use std::str::FromStr;
use std::time::SystemTime;

use http::header::{CONTENT_TYPE, HeaderMap, HeaderValue};
use http::{Method, StatusCode};
use serde_json::Value;
use zeroize::Zeroizing;

use super::token::{Failure, Granted};
use crate::auth::token_file::{Token, TokenFile};
use crate::base::retry::Class;
use crate::fs::disk::Disk;
use crate::net::address::Address;
use crate::net::endpoint::Endpoint;
use crate::net::error::{ConnectionOptions, TransportError, status_class};
use crate::net::rest::{self, Call, Reply};
use crate::net::tls::Roots;

const OPTIONS: &ConnectionOptions = &ConnectionOptions {
    address: "--token-exchange-url",
    roots: "--token-exchange-root",
    server_name: "use the name it has in --token-exchange-url",
    client_cert: "the agent has none for a token service: allow calls without one there",
};

/// Google's token service.
pub const GOOGLES_URL: &str = "https://sts.googleapis.com/v1/token";
/// The default scope at Google's token service.
pub const GOOGLES_SCOPE: &str = "https://www.googleapis.com/auth/cloud-platform";

/// A token service, and the token that is requested.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exchange {
    pub url: Url,
    /// The roots for its TLS certificate.
    pub roots: Roots,
    /// The token that is exchanged, read for each exchange.
    pub subject: TokenFile,
    /// Audience of the exchanged token.
    pub audience: Option<String>,
    /// Scope of the exchanged token.
    pub scope: Option<String>,
}

/// `https://HOST[:PORT]/PATH`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Url {
    pub address: Address,
    path: String,
}

impl FromStr for Url {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let invalid = || format!("{text:?} is not a URL of a token service; the shape is https://HOST/PATH");
        let uri: http::Uri = text.parse().map_err(|_| invalid())?;
        let (Some(scheme @ ("https" | "http")), Some(authority)) = (uri.scheme_str(), uri.authority()) else {
            return Err(invalid());
        };
        let address = Address::with_ports(&format!("{scheme}://{authority}"), 443, 80);
        let path = uri.path_and_query().map_or("/", |path| path.as_str());
        Ok(Self { address: address.map_err(|_| invalid())?, path: path.to_owned() })
    }
}

impl Exchange {
    pub(super) async fn fetch(
        &self,
        subject: &Token,
        now: SystemTime,
        disk: &Disk,
    ) -> Result<Granted, Failure> {
        let endpoint =
            Endpoint { address: self.url.address.clone(), roots: self.roots.clone(), server_name: None };
        let kind = HeaderValue::from_static("application/x-www-form-urlencoded");
        let call = Call {
            method: Method::POST,
            path: &self.url.path,
            headers: HeaderMap::from_iter([(CONTENT_TYPE, kind)]),
            body: Some(self.form(subject)),
        };
        let reply = rest::call(&endpoint, call, disk).await.map_err(|error| match error {
            TransportError::Broken(_) if endpoint.address.plaintext => {
                Failure::new(error.class(), format!("{error}; {}", OPTIONS.is_it_plaintext()))
            }
            error => Failure::of_call(&error, OPTIONS, "is --token-exchange-url right?"),
        })?;
        if !reply.status.is_success() {
            return Err(self.refused(&reply, subject, now));
        }
        let granted = reply.read_and_wipe(|body| Granted::from_json(body, now));
        granted.map_err(|reason| {
            Failure::new(
                Class::Permanent,
                format!("{reason}; is --token-exchange-url that of a token service?"),
            )
        })
    }

    /// The body of the request, written once, into memory that is wiped.
    fn form(&self, subject: &Token) -> Zeroizing<Vec<u8>> {
        let optional = [("audience", &self.audience), ("scope", &self.scope)];
        let optional = optional.iter().filter_map(|(name, value)| Some((*name, value.as_deref()?)));
        let fields: Vec<_> = [
            ("grant_type", "urn:ietf:params:oauth:grant-type:token-exchange"),
            ("requested_token_type", "urn:ietf:params:oauth:token-type:access_token"),
            ("subject_token_type", "urn:ietf:params:oauth:token-type:jwt"),
            ("subject_token", subject.secret()),
        ]
        .into_iter()
        .chain(optional)
        .collect();
        // An escape takes three bytes. Allocated at full size: a buffer that grows leaves copies in memory.
        let size = fields.iter().map(|(name, value)| name.len() + 3 * value.len() + 2).sum();
        let mut form = Zeroizing::new(Vec::with_capacity(size));
        for (name, value) in fields {
            if !form.is_empty() {
                form.push(b'&');
            }
            form.extend_from_slice(name.as_bytes());
            form.push(b'=');
            for part in rest::encoded(value) {
                form.extend_from_slice(part.as_bytes());
            }
        }
        form
    }

    pub(super) fn refused(&self, reply: &Reply, subject: &Token, now: SystemTime) -> Failure {
        let body: Option<Value> = serde_json::from_slice(&reply.body).ok();
        let text = |path: &str| body.as_ref().and_then(|body| body.pointer(path)).and_then(Value::as_str);
        let error = text("/error").unwrap_or_default();
        let said = match (error, text("/error_description")) {
            // The format of Google's other services, and of its proxies.
            ("", _) => text("/error/message").map(str::to_owned),
            (error, Some(description)) => Some(format!("{error}: {description}")),
            (error, None) => Some(error.to_owned()),
        };
        // The answer of a proxy, or of another server.
        let said = said.unwrap_or_else(|| String::from_utf8_lossy(&reply.body).trim().to_owned());
        let (status, said) = (reply.status, subject.redact(&said));
        let mut reason = format!("it answered {status}");
        for part in [said, self.remedy(status, error, subject, now)] {
            if !part.is_empty() {
                reason = format!("{reason}: {part}");
            }
        }
        // The kubelet rotates the token.
        let class = if error == "invalid_grant" { Class::Transient } else { status_class(status) };
        Failure { retry_after: reply.retry_after, ..Failure::new(class, reason) }
    }

    fn remedy(&self, status: StatusCode, error: &str, subject: &Token, now: SystemTime) -> String {
        let own = || format!("{}; {}", subject.describe(now), self.subject.origin());
        let remedy = match (error, status.as_u16()) {
            ("invalid_grant" | "invalid_token", _) => {
                return format!("it does not accept this workload's own token ({})", own());
            }
            ("invalid_target", _) => "is --token-exchange-audience right?",
            ("invalid_scope", _) => "is --token-exchange-scope right?",
            // Services that require client authentication answer one of these.
            ("invalid_client" | "unauthorized_client", _) => {
                "it requires client authentication in addition to the token, which this agent does not support: allow \
                 this workload's tokens there"
            }
            ("unsupported_grant_type", _) => {
                "it does not exchange tokens, or not for this caller; is --token-exchange-url right?"
            }
            ("invalid_request", _) => {
                return format!(
                    "are --token-exchange-audience and --token-exchange-scope right? Some services answer the same \
                     to a token that they do not accept ({})",
                    own()
                );
            }
            (_, 301 | 302 | 303 | 307 | 308) => {
                "it redirects, and the token is not sent elsewhere; is --token-exchange-url right?"
            }
            (_, 401 | 403) => return format!("it does not accept this workload's own token ({})", own()),
            (_, 404 | 405) => "is --token-exchange-url right?",
            (_, 429) => "it is called too often",
            _ => "",
        };
        remedy.to_owned()
    }
}
