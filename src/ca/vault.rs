//! HashiCorp Vault, and OpenBao, which has the same API: the PKI engine signs with one of its roles.

mod access;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
mod refusal;
pub mod options;

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Mutex;

use http::header::{HeaderMap, HeaderName, HeaderValue};
use http::{Method, StatusCode};
use serde_json::{Value, json};
use zeroize::Zeroizing;

use self::access::{VaultAuth, VaultToken};
use self::refusal::VaultRequest;
use super::transport;
use super::{CaError, CertificateAuthority, InvalidResponse, IssuedChain, SigningRequest};
use crate::auth::token;
use crate::auth::token_file::{Token, TokenFile};
use crate::base::clock::Clock;
use crate::base::failure_log::FailureLog;
use crate::base::limits;
use crate::base::offload;
use crate::base::text;
use crate::fs::disk::Disk;
use crate::net::Header;
use crate::net::endpoint::Endpoint;
use crate::net::rest;
use crate::pki::certificate::{Certificate, is_self_issued};
use crate::pki::pem;

/// Vault's port, with and without TLS.
pub const PORT: u16 = 8200;

/// The mount path of an engine or an auth method: `pki`, `teams/blue/pki`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountPath(String);

/// The name of a role of the PKI engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoleName(String);

/// The PKI engine, and the credential for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VaultSettings {
    /// The mount path of the PKI engine.
    pub mount: MountPath,
    /// The role of the PKI engine.
    pub role: RoleName,
    /// The namespace of both mounts.
    pub namespace: Option<HeaderValue>,
    pub access: Access,
    /// A file with the roots, instead of those in the answers. Read for each call.
    pub roots: Option<PathBuf>,
}

/// The credential for calls to Vault.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Access {
    /// A Vault token that another process obtains and renews.
    Token(TokenFile),
    /// A login with the workload's JWT: Vault's auth methods `kubernetes` and `jwt`.
    Login {
        /// The mount path of the auth method, below `auth/`.
        mount: MountPath,
        /// The auth method's role.
        role: String,
        jwt: token::TokenSettings,
    },
}

/// A client of Vault's PKI engine.
#[derive(Debug)]
pub struct Vault {
    server: Server,
    path: String,
    auth: VaultAuth,
    roots: Option<PathBuf>,
    /// Logs each of Vault's warnings once.
    warnings_log: Mutex<FailureLog>,
}

impl Vault {
    /// `headers` go with each call.
    pub fn new(
        endpoint: Endpoint,
        settings: VaultSettings,
        headers: &[Header],
        clock: Clock,
        disk: Disk,
    ) -> Self {
        const REQUEST: HeaderName = HeaderName::from_static("x-vault-request");
        const NAMESPACE: HeaderName = HeaderName::from_static("x-vault-namespace");
        let VaultSettings { mount, role, namespace, access, roots } = settings;
        let mut headers = rest::headers(headers);
        // Vault's own proxies can be configured to refuse calls without it.
        headers.insert(REQUEST, HeaderValue::from_static("true"));
        headers.extend(namespace.map(|namespace| (NAMESPACE, namespace)));
        Self {
            auth: VaultAuth::new(access, clock, disk.clone()),
            server: Server { endpoint, headers, disk },
            path: format!("{mount}/sign/{role}"),
            roots,
            warnings_log: Mutex::default(),
        }
    }

    async fn sign_with(&self, token: &VaultToken, body: &Value) -> Result<Value, CaError> {
        let request = VaultRequest::Sign { path: &self.path, token: self.auth.token_file() };
        let body = Zeroizing::new(body.to_string().into_bytes());
        let headers = with_token(token.secret())?;
        self.server.post(&format!("/v1/{}", self.path), headers, body, &request, token.secret()).await
    }

    async fn answer(&self, mut reply: Value) -> Result<IssuedChain, CaError> {
        self.log_warnings(&reply);
        let data = reply.pointer_mut("/data").map(Value::take).unwrap_or_default();
        let size = texts(data.get("ca_chain")).iter().map(|text| text.len()).sum();
        let mut answer = offload::large(size, move || sorted(data)).await?;
        if let Some(file) = &self.roots {
            let unreadable = |error: &dyn fmt::Display| {
                CaError::Roots(format!("{}: {error}; --vault-root sets the path", file.display()))
            };
            let text = self.server.disk.read(file, limits::FILE_BYTES).await?;
            let text = text.map_err(|error| unreadable(&error))?;
            let roots = offload::large(text.len(), move || {
                let mut roots = pem::certificates(&text)?;
                // Envoy accepts no chain that ends at an intermediate, and chains are often kept in one file.
                roots.retain(|der| is_self_issued(der) == Ok(true));
                Ok(roots)
            });
            answer.roots = roots.await.map_err(|error: pem::NotPem| unreadable(&error))?;
            if answer.roots.is_empty() {
                return Err(unreadable(&"none of its certificates is a self-issued root"));
            }
        }
        if answer.roots.is_empty() {
            let highest = answer.chain.last().and_then(|der| Certificate::parse(der).ok());
            let issuer = highest.map(|highest| highest.issuer).unwrap_or_default();
            return Err(InvalidResponse::NoRootAbove { issuer, remedy: ROOT_REMEDY }.into());
        }
        Ok(answer)
    }

    /// Logs warnings once: a role that shortens the lifetime warns in each answer.
    fn log_warnings(&self, reply: &Value) {
        let warnings = texts(reply.get("warnings"));
        if warnings.is_empty() {
            return;
        }
        let warnings = text::sanitize_for_log(&warnings.join("; "));
        if self.warnings_log.lock().is_ok_and(|mut log| log.is_new(&warnings)) {
            tracing::info!(path = self.path, warnings, "Vault returned warnings");
        } else {
            tracing::debug!(path = self.path, warnings, "Vault returned warnings");
        }
    }
}

const ROOT_REMEDY: &str = "name a file that holds it with --vault-root FILE, or import it into Vault's PKI engine \
                            beside the intermediate";

#[tonic::async_trait]
impl CertificateAuthority for Vault {
    fn name(&self) -> &'static str {
        "vault"
    }

    async fn sign(&self, request: &SigningRequest) -> Result<IssuedChain, CaError> {
        let Some(identity) = &request.identity else {
            return Err(self.auth.no_identity(&self.server.disk).await);
        };
        let mut body = json!({
            "csr": crate::pki::csr::to_pem(&request.csr),
            "format": "pem",
            "ttl": format!("{}s", request.ttl.as_secs()),
            // The role decides whether names come from here or from the CSR (`use_csr_sans`): they are the same.
            "uri_sans": identity.as_str(),
            "exclude_cn_from_sans": true,
        });
        if let Some(body) = body.as_object_mut() {
            let dns = (!request.names.dns.is_empty()).then(|| ("alt_names", request.names.dns_list()));
            let common_name =
                request.names.common_name.as_ref().map(|name| ("common_name", name.to_string()));
            body.extend(dns.into_iter().chain(common_name).map(|(key, name)| (key.to_owned(), name.into())));
        }
        let token = self.auth.token(&self.server, None).await?;
        let signed = match self.sign_with(&token, &body).await {
            // Vault answers the same to an expired token and to one that must not sign.
            Err(CaError::Status { status: StatusCode::FORBIDDEN, .. }) if token.is_kept() => {
                let token = self.auth.token(&self.server, Some(&token)).await?;
                self.sign_with(&token, &body).await
            }
            signed => signed,
        };
        self.answer(signed?).await
    }

    fn remedy(&self, answer: &InvalidResponse) -> Option<&'static str> {
        match (answer, &self.roots) {
            (InvalidResponse::MissingNames { .. }, _) => Some(
                "does the role have allowed_domains, and use_csr_sans and use_csr_common_name as they are by default?",
            ),
            (InvalidResponse::Unchained(_), Some(_)) => {
                Some("the roots are those in the file of --vault-root: did one of them sign Vault's issuer?")
            }
            (InvalidResponse::Unchained(_), None) => Some(
                "the roots are those in the ca_chain of Vault's issuer, which may have been set manually",
            ),
            _ => None,
        }
    }
}

/// A Vault, and the headers of each call to it.
#[derive(Debug)]
struct Server {
    endpoint: Endpoint,
    headers: HeaderMap,
    disk: Disk,
}

impl Server {
    /// Posts `body`, and parses the answer. `secret` is redacted in the message about a refusal.
    async fn post(
        &self,
        path: &str,
        more: HeaderMap,
        body: Zeroizing<Vec<u8>>,
        request: &VaultRequest<'_>,
        secret: &Token,
    ) -> Result<Value, CaError> {
        let mut headers = self.headers.clone();
        headers.extend(more);
        let call = rest::Call { method: Method::POST, path, headers, body: Some(body) };
        let reply = transport::call(&self.endpoint, call, &self.disk).await?;
        if !reply.status.is_success() {
            return Err(CaError::Status {
                address: self.endpoint.address.to_string(),
                status: reply.status,
                message: refusal::explain(reply.status, &reply.body, request, secret),
                retry_after: reply.retry_after,
            });
        }
        reply.read_and_wipe(|body| serde_json::from_slice(body)).map_err(|_| {
            let reason = "it is not JSON; is --ca-address that of a Vault?".to_owned();
            InvalidResponse::Unreadable(reason).into()
        })
    }
}

/// The header with Vault's token.
fn with_token(token: &Token) -> Result<HeaderMap, CaError> {
    const TOKEN: HeaderName = HeaderName::from_static("x-vault-token");
    let mut value = HeaderValue::from_str(token.secret())
        .map_err(|_| CaError::Local("Vault's token can't be sent in a header".to_owned()))?;
    value.set_sensitive(true);
    Ok(HeaderMap::from_iter([(TOKEN, value)]))
}

/// The texts of a JSON list; empty if it is no list.
fn texts(value: Option<&Value>) -> Vec<&str> {
    value.and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str).collect()
}

/// Sorts the answer of `sign`. The roots are the self-issued certificates in any position: `issuing_ca` is one if the
/// engine's own certificate is a root, and `ca_chain` ends with one if Vault knows it.
fn sorted(data: Value) -> Result<IssuedChain, InvalidResponse> {
    let unreadable = |what: &str| InvalidResponse::Unreadable(format!("it has no data.{what}"));
    let leaf = data.get("certificate").and_then(Value::as_str).ok_or_else(|| unreadable("certificate"))?;
    let issuer = data.get("issuing_ca").and_then(Value::as_str);
    let mut all = Vec::new();
    for text in [leaf].into_iter().chain(issuer).chain(texts(data.get("ca_chain"))) {
        let read = pem::certificates(text.as_bytes());
        all.extend(read.map_err(|error| InvalidResponse::Unreadable(error.to_string()))?);
    }
    // One group: an intermediate in the last position must not be taken as a root.
    IssuedChain::from_groups(vec![all])
}

impl FromStr for MountPath {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let path = text.trim_matches('/');
        if path.split('/').all(is_segment) {
            return Ok(Self(path.to_owned()));
        }
        Err(format!("{text:?} is not a Vault path; the shape is pki, or teams/blue/pki"))
    }
}

impl FromStr for RoleName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if is_segment(text) {
            return Ok(Self(text.to_owned()));
        }
        Err(format!(
            "{text:?} is not the name of a role; the shape is letters, digits, \"-\", \"_\" and \".\""
        ))
    }
}

/// Whether `text` is a valid path segment: Vault refuses those that end in a period.
fn is_segment(text: &str) -> bool {
    let is_valid = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    !text.is_empty() && !text.ends_with('.') && text.chars().all(is_valid)
}

impl fmt::Display for MountPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Display for RoleName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests;
