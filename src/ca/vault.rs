//! HashiCorp Vault, and OpenBao, whose API is the same: the PKI engine signs by one of its roles.

mod access;
mod words;

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Mutex;

use http::header::{HeaderMap, HeaderName, HeaderValue};
use http::{Method, StatusCode};
use serde_json::{Value, json};
use zeroize::Zeroizing;

use self::access::{Door, Pass};
use self::words::Asked;
use super::citadel::Header;
use super::{Answer, CaError, CertificateAuthority, InvalidResponse, SigningRequest};
use crate::auth::token;
use crate::auth::token_file::{Token, TokenFile};
use crate::base::clock::Clock;
use crate::base::failure_log::FailureLog;
use crate::base::limits;
use crate::fs::file;
use crate::net::endpoint::Endpoint;
use crate::net::rest;
use crate::pki::certificate::Certificate;
use crate::pki::pem;

/// Vault's port, with and without TLS.
pub const PORT: u16 = 8200;

/// Where an engine or an auth method is mounted: `pki`, `teams/blue/pki`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountPath(String);

/// The name of a role of the PKI engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoleName(String);

/// What is asked of a Vault, and how to get in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Where the PKI engine is mounted.
    pub mount: MountPath,
    /// Its role that signs.
    pub role: RoleName,
    /// The namespace of both mounts.
    pub namespace: Option<HeaderValue>,
    /// What calls are made with.
    pub access: Access,
    /// The roots, where they are not to be taken from the answers. Read anew for each call.
    pub roots: Option<PathBuf>,
}

/// What calls are made with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Access {
    /// A token of Vault's that somebody else gets and keeps alive.
    Token(TokenFile),
    /// The workload's JWT, for which Vault gives a token: its auth methods `kubernetes` and `jwt`.
    Login {
        /// Where the auth method is mounted, below `auth/`.
        mount: MountPath,
        /// The auth method's role.
        role: String,
        /// Where the JWT comes from.
        jwt: token::Settings,
    },
}

/// A client of Vault's PKI engine.
#[derive(Debug)]
pub struct Vault {
    server: Server,
    path: String,
    door: Door,
    roots: Option<PathBuf>,
    /// What was said last of warnings that came with a certificate.
    repeats: Mutex<FailureLog>,
}

impl Vault {
    /// A client of the Vault at `endpoint`. `headers` go with each call.
    pub fn new(endpoint: Endpoint, settings: Settings, headers: &[Header], clock: Clock) -> Self {
        const REQUEST: HeaderName = HeaderName::from_static("x-vault-request");
        const NAMESPACE: HeaderName = HeaderName::from_static("x-vault-namespace");
        let Settings { mount, role, namespace, access, roots } = settings;
        let mut headers = rest::headers(headers);
        // Vault's own proxies can be told to refuse calls without it.
        headers.insert(REQUEST, HeaderValue::from_static("true"));
        headers.extend(namespace.map(|namespace| (NAMESPACE, namespace)));
        Self {
            server: Server { endpoint, headers },
            path: format!("{mount}/sign/{role}"),
            door: Door::new(access, clock),
            roots,
            repeats: Mutex::default(),
        }
    }

    async fn sign_with(&self, pass: &Pass, body: &Value) -> Result<Value, CaError> {
        let asked = Asked::Sign { path: &self.path, token: self.door.token_file() };
        let body = Zeroizing::new(body.to_string().into_bytes());
        let headers = with_token(pass.token())?;
        self.server.post(&format!("/v1/{}", self.path), headers, body, &asked, pass.token()).await
    }

    fn answer(&self, mut reply: Value) -> Result<Answer, CaError> {
        self.tell_warnings(&reply);
        let mut answer = sorted(reply.pointer_mut("/data").map(Value::take).unwrap_or_default())?;
        if let Some(file) = &self.roots {
            let unreadable = |error: &dyn fmt::Display| {
                CaError::Roots(format!("{}: {error}; --vault-root names it", file.display()))
            };
            let text = file::read(file, limits::FILE_BYTES).map_err(|error| unreadable(&error))?;
            answer.roots = pem::certificates(&text).map_err(|error| unreadable(&error))?;
            // Envoy takes no chain that ends at an intermediate, and chains are often kept in one file.
            answer.roots.retain(|der| Certificate::parse(der).is_ok_and(|facts| facts.is_self_issued));
            if answer.roots.is_empty() {
                return Err(unreadable(&"none of its certificates is a root, which is its own issuer"));
            }
        }
        if answer.roots.is_empty() {
            let highest = answer.chain.last().and_then(|der| Certificate::parse(der).ok());
            let issuer = highest.map(|highest| highest.issuer).unwrap_or_default();
            return Err(InvalidResponse::NoRootAbove { issuer, way_out: ROOT_WAY_OUT }.into());
        }
        Ok(answer)
    }

    /// A lifetime that the role cuts short is in each answer: it is news once.
    fn tell_warnings(&self, reply: &Value) {
        let warnings = texts(reply.get("warnings"));
        if warnings.is_empty() {
            return;
        }
        let warnings = limits::sanitize_for_log(&warnings.join("; "));
        if self.repeats.lock().is_ok_and(|mut repeats| repeats.is_new(&warnings)) {
            tracing::info!(path = self.path, warnings, "Vault signs, and remarks");
        } else {
            tracing::debug!(path = self.path, warnings, "Vault signs, and remarks");
        }
    }
}

const ROOT_WAY_OUT: &str = "name a file that holds it with --vault-root FILE, or import it into Vault's PKI engine \
                            beside the intermediate";

#[tonic::async_trait]
impl CertificateAuthority for Vault {
    fn name(&self) -> &'static str {
        "vault"
    }

    async fn sign(&self, request: &SigningRequest) -> Result<Answer, CaError> {
        let Some(identity) = &request.identity else { return Err(self.door.nameless()) };
        let body = json!({
            "csr": crate::pki::csr::to_pem(&request.csr),
            "format": "pem",
            "ttl": format!("{}s", request.ttl.as_secs()),
            // A role says whether names come from here or from the CSR (`use_csr_sans`): they are the same.
            "uri_sans": identity.as_str(),
            "exclude_cn_from_sans": true,
        });
        let pass = self.door.pass(&self.server, None).await?;
        let signed = match self.sign_with(&pass, &body).await {
            // Vault says the same of a token that has ended and of one that must not sign.
            Err(CaError::Status { status: StatusCode::FORBIDDEN, .. }) if pass.is_kept() => {
                let pass = self.door.pass(&self.server, Some(&pass)).await?;
                self.sign_with(&pass, &body).await
            }
            signed => signed,
        };
        self.answer(signed?)
    }

    fn remedy(&self, answer: &InvalidResponse) -> Option<&'static str> {
        match (answer, &self.roots) {
            (InvalidResponse::Unchained(_), Some(_)) => {
                Some("the roots are those in the file of --vault-root: are they above Vault's issuer?")
            }
            (InvalidResponse::Unchained(_), None) => {
                Some("the roots are those in the ca_chain of Vault's issuer, which may be set by hand")
            }
            _ => None,
        }
    }
}

/// A Vault, and what goes with each call to it.
#[derive(Debug)]
struct Server {
    endpoint: Endpoint,
    headers: HeaderMap,
}

impl Server {
    /// Posts `body`, and reads what comes. `secret` is kept out of what is said of a refusal.
    async fn post(
        &self,
        path: &str,
        more: HeaderMap,
        body: Zeroizing<Vec<u8>>,
        asked: &Asked<'_>,
        secret: &Token,
    ) -> Result<Value, CaError> {
        let mut headers = self.headers.clone();
        headers.extend(more);
        let call = rest::Call { method: Method::POST, path, headers, body: Some(body) };
        let reply = rest::call(&self.endpoint, call).await?;
        if !reply.status.is_success() {
            return Err(CaError::Status {
                address: self.endpoint.address.to_string(),
                status: reply.status,
                message: words::explain(reply.status, &reply.body, asked, secret),
                retry_after: reply.retry_after,
            });
        }
        reply.read_and_wipe(|body| serde_json::from_slice(body)).map_err(|_| {
            let words = "it is not JSON; is --ca-address that of a Vault?".to_owned();
            InvalidResponse::Unreadable(words).into()
        })
    }
}

/// The header for a call that needs a token.
fn with_token(token: &Token) -> Result<HeaderMap, CaError> {
    const TOKEN: HeaderName = HeaderName::from_static("x-vault-token");
    let mut value = HeaderValue::from_str(token.secret())
        .map_err(|_| CaError::Local("Vault's token can't be sent in a header".to_owned()))?;
    value.set_sensitive(true);
    Ok(HeaderMap::from_iter([(TOKEN, value)]))
}

/// The texts of a JSON list; none where it is something else.
fn texts(value: Option<&Value>) -> Vec<&str> {
    value.and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str).collect()
}

/// What `sign` answers, as an answer. The roots are those that issued themselves, wherever they stand: `issuing_ca` is
/// one where the engine's own certificate is a root, and `ca_chain` ends with one where Vault knows it.
fn sorted(data: Value) -> Result<Answer, InvalidResponse> {
    let unreadable = |what: &str| InvalidResponse::Unreadable(format!("it has no data.{what}"));
    let leaf = data.get("certificate").and_then(Value::as_str).ok_or_else(|| unreadable("certificate"))?;
    let issuer = data.get("issuing_ca").and_then(Value::as_str);
    let mut all = Vec::new();
    for text in [leaf].into_iter().chain(issuer).chain(texts(data.get("ca_chain"))) {
        let read = pem::certificates(text.as_bytes());
        all.extend(read.map_err(|error| InvalidResponse::Unreadable(error.to_string()))?);
    }
    // One group: an intermediate that comes last must not be taken for a root.
    Answer::from_groups(vec![all])
}

impl FromStr for MountPath {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let path = text.trim_matches('/');
        if path.split('/').all(is_segment) {
            return Ok(Self(path.to_owned()));
        }
        Err(format!("{text:?} is not a path of Vault's; the shape is pki, or teams/blue/pki"))
    }
}

impl FromStr for RoleName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if is_segment(text) {
            return Ok(Self(text.to_owned()));
        }
        Err(format!(
            "{text:?} is not the name of a role; it is made of letters, digits, \"-\", \"_\" and \".\""
        ))
    }
}

/// Whether it can stand between two slashes, and is taken by Vault: nothing there may end in a period.
fn is_segment(text: &str) -> bool {
    let is_fit = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    !text.is_empty() && !text.ends_with('.') && text.chars().all(is_fit)
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
