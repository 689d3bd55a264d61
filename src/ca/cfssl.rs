//! cfssl's signing API (`cfssl serve`, `multirootca`).

#[cfg(any(test, fuzzing))]
pub mod fuzz;
pub mod options;

use std::path::PathBuf;

use aws_lc_rs::hmac;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use http::{HeaderMap, Method, StatusCode};
use rustls::pki_types::CertificateDer;
use serde_json::{Map, Value, json};
use zeroize::Zeroizing;

use super::transport::call;
use super::{CaError, CertificateAuthority, Class, InvalidResponse, IssuedChain, SigningRequest};
use crate::base::limits;
use crate::base::text;
use crate::fs::disk::Disk;
use crate::net::endpoint::Endpoint;
use crate::net::rest::{Call, Reply};
use crate::pki::{csr, pem};

/// cfssl's default port, with and without TLS.
pub const PORT: u16 = 8888;

/// The maximum length of a server's message in an error, in characters: the remedy needs room, too.
const MESSAGE_CHARS: usize = 200;

/// A client of cfssl.
#[derive(Debug)]
pub struct Cfssl {
    pub endpoint: Endpoint,
    /// The server's profile for the certificate; none for its default.
    pub profile: Option<String>,
    /// The signer, where the server has several.
    pub label: Option<String>,
    /// The file with the key that authenticates requests, hexadecimal; read for each call.
    pub auth_key: Option<PathBuf>,
    /// The file with the roots, and intermediates below them; read for each call.
    pub bundle: Option<PathBuf>,
    /// Additional headers.
    pub headers: HeaderMap,
    pub disk: Disk,
}

#[tonic::async_trait]
impl CertificateAuthority for Cfssl {
    fn name(&self) -> &'static str {
        "cfssl"
    }

    async fn sign(&self, request: &SigningRequest) -> Result<IssuedChain, CaError> {
        // First the steps that can fail without issuing a certificate.
        let bundle = self.bundle().await?;
        let (path, body) = self.request(request).await?;
        let signer = self.certificates("info", self.common()).await?;
        let chain = self.certificates(path, body).await?;
        Ok(match bundle {
            None => IssuedChain::read_with_others(chain, signer).await?,
            // Configured roots replace all others; the signer's certificate can still complete the chain.
            Some(bundle) => IssuedChain::read_with_others([chain, signer].concat(), bundle).await?,
        })
    }

    fn remedy(&self, answer: &InvalidResponse) -> Option<&'static str> {
        match (answer, &self.bundle) {
            (InvalidResponse::NoIdentity { .. }, _) => Some(
                "cfssl before 1.4 omits URI names, or writes them as DNS names (Debian 12 has such a version): this agent needs a newer one",
            ),
            (InvalidResponse::MissingNames { .. }, _) => Some(
                "cfssl issues the names of the request unless the profile has a CSRWhitelist without SubjectAlternativeNames and Subject",
            ),
            (InvalidResponse::NoRoot, None) => {
                Some("this cfssl signs with an intermediate: name a file with its root, --cfssl-bundle FILE")
            }
            (InvalidResponse::NoRoot, Some(_)) => Some("the file of --cfssl-bundle has none"),
            (InvalidResponse::Unchained(_), None) => {
                Some("the root is cfssl's own certificate for --cfssl-label and --cfssl-profile")
            }
            (InvalidResponse::Unchained(_), Some(_)) => Some(
                "the roots are those in the file of --cfssl-bundle, which must also hold the intermediates up to the signer",
            ),
            (InvalidResponse::Expired { .. }, _) => Some(
                "cfssl counts a profile's expiry from its backdate, which is 5 minutes: give the profile more than that",
            ),
            _ => None,
        }
    }
}

impl Cfssl {
    /// The fields of every request.
    fn common(&self) -> Map<String, Value> {
        let named = [("label", &self.label), ("profile", &self.profile)];
        // `info` requires a label, even an empty one.
        named
            .into_iter()
            .map(|(key, value)| (key.to_owned(), json!(value.as_deref().unwrap_or_default())))
            .collect()
    }

    /// The endpoint that signs, and the request's body.
    async fn request(&self, request: &SigningRequest) -> Result<(&'static str, Map<String, Value>), CaError> {
        let mut body = self.common();
        body.insert("certificate_request".to_owned(), json!(csr::to_pem(&request.csr)));
        if let Some(identity) = &request.identity {
            // The CSR has it too, but a profile may take only the key of a CSR. An empty list would remove names.
            let mut hosts = vec![identity.to_string()];
            hosts.extend(request.names.dns.iter().map(ToString::to_string));
            body.insert("hosts".to_owned(), json!(hosts));
        }
        let Some(path) = &self.auth_key else { return Ok(("sign", body)) };
        let key = hmac::Key::new(hmac::HMAC_SHA256, &read_key(path, &self.disk).await?);
        let request = Value::Object(body).to_string();
        let token = hmac::sign(&key, request.as_bytes());
        let body = [("token", token.as_ref()), ("request", request.as_bytes())];
        let body = body.into_iter().map(|(name, bytes)| (name.to_owned(), json!(STANDARD.encode(bytes))));
        Ok(("authsign", body.collect()))
    }

    /// Calls an endpoint, and returns the certificates in `result.certificate` of its answer.
    async fn certificates(
        &self,
        path: &'static str,
        body: Map<String, Value>,
    ) -> Result<Vec<CertificateDer<'static>>, CaError> {
        let request = Call {
            method: Method::POST,
            path: &format!("/api/v1/cfssl/{path}"),
            headers: self.headers.clone(),
            body: Some(Zeroizing::new(Value::Object(body).to_string().into_bytes())),
        };
        let reply = call(&self.endpoint, request, &self.disk).await?;
        self.answered(path, &reply)
    }

    /// The certificates in an answer.
    fn answered(&self, path: &str, reply: &Reply) -> Result<Vec<CertificateDer<'static>>, CaError> {
        let envelope = serde_json::from_slice::<Value>(&reply.body).ok();
        let success = envelope.as_ref().and_then(|envelope| envelope.get("success")).and_then(Value::as_bool);
        if let (Some(envelope), Some(false)) = (&envelope, success) {
            return Err(self.refused(reply.status, envelope));
        }
        if !reply.status.is_success() {
            let message = unknown_endpoint(path, reply.status, &reply.body);
            return Err(CaError::Status {
                address: self.endpoint.address.to_string(),
                status: reply.status,
                message: text::sanitize_for_log(message.trim()),
                retry_after: reply.retry_after,
            });
        }
        let unreadable =
            |what: &str| InvalidResponse::Unreadable(format!("{what} in the answer of {path}; is it cfssl?"));
        let (Some(envelope), Some(true)) = (envelope, success) else {
            return Err(unreadable("there is no JSON with success and result").into());
        };
        let text = envelope.pointer("/result/certificate").and_then(Value::as_str);
        let text = text.ok_or_else(|| unreadable("there is no result.certificate"))?;
        let certificates = pem::certificates(text.as_bytes());
        Ok(certificates
            .map_err(|error| InvalidResponse::Unreadable(format!("result.certificate of {path}: {error}")))?)
    }

    /// A refusal with cfssl's own messages.
    fn refused(&self, status: StatusCode, envelope: &Value) -> CaError {
        let errors = envelope.get("errors").and_then(Value::as_array);
        let errors = errors.into_iter().flatten();
        let (mut messages, mut codes) = (Vec::new(), Vec::new());
        for error in errors {
            let code = error.get("code").and_then(Value::as_i64).unwrap_or_default();
            let message = error.get("message").and_then(Value::as_str).unwrap_or_default();
            messages.push(format!("{message} (code {code})"));
            codes.push(code);
        }
        let message = messages.join(", ");
        let remedy = remedy(&message);
        // Calls to another cfssl or to its logs, and its database; the rest is about the request or the configuration.
        let may_pass = codes.iter().any(|code| matches!(code, 6000..8000 | 10_000..12_000));
        let class = if may_pass || status.is_server_error() { Class::Transient } else { Class::Permanent };
        let shown: String = text::sanitize_for_log(&message).chars().take(MESSAGE_CHARS).collect();
        let message = format!("{shown}{remedy}");
        CaError::Api { address: self.endpoint.address.to_string(), status, message, class }
    }

    async fn bundle(&self) -> Result<Option<Vec<CertificateDer<'static>>>, CaError> {
        let Some(path) = &self.bundle else { return Ok(None) };
        let failed = |reason: &dyn std::fmt::Display| CaError::File {
            option: "--cfssl-bundle",
            path: path.clone(),
            reason: reason.to_string(),
        };
        let text = self.disk.read(path, limits::FILE_BYTES).await?.map_err(|error| failed(&error))?;
        Ok(Some(pem::certificates(&text).map_err(|error| failed(&error))?))
    }
}

/// The remedy for a known refusal.
fn remedy(message: &str) -> &'static str {
    let known = [
        ("authentication required", "; the profile has an auth_key: give it with --cfssl-auth-key-file"),
        (
            "no authentication provider",
            "; the profile has no auth_key: choose one that has with --cfssl-profile, or drop --cfssl-auth-key-file",
        ),
        (
            "invalid token",
            "; the key in the file of --cfssl-auth-key-file is not the auth_key of the profile",
        ),
        ("policy whitelist", "; the name_whitelist of the profile has to match the SPIFFE ID"),
        ("algorithm unimplemented", "; this cfssl does not know this kind of key: choose another --key-type"),
    ];
    match known.into_iter().find(|(text, _)| message.contains(text)) {
        Some((_, remedy)) => remedy,
        None if message.is_empty() => "it gave no reason; see its log",
        None => "",
    }
}

/// Describes the answer of a server that may not be cfssl.
fn unknown_endpoint(path: &str, status: StatusCode, body: &[u8]) -> String {
    let message: String =
        text::sanitize_for_log(String::from_utf8_lossy(body).trim()).chars().take(MESSAGE_CHARS).collect();
    let remedy = match (status, path) {
        (StatusCode::NOT_FOUND, "sign") => {
            "; where all its profiles have an auth_key, cfssl has only authsign: give --cfssl-auth-key-file"
        }
        (StatusCode::NOT_FOUND, "authsign") => {
            "; where none of its profiles has an auth_key, cfssl has no authsign: drop --cfssl-auth-key-file"
        }
        (StatusCode::NOT_FOUND, _) => "; is it cfssl, with this endpoint?",
        _ => "",
    };
    format!("{message}{remedy}")
}

/// Reads a key in the format of cfssl's configuration: hexadecimal.
async fn read_key(path: &std::path::Path, disk: &Disk) -> Result<Zeroizing<Vec<u8>>, CaError> {
    let failed =
        |reason: String| CaError::File { option: "--cfssl-auth-key-file", path: path.to_owned(), reason };
    let text = disk.read(path, limits::TOKEN_BYTES).await?.map_err(|error| failed(error.to_string()))?;
    let digits = text.trim_ascii();
    // Allocated at full size: a buffer that grows leaves copies of a key in memory.
    let mut key = Zeroizing::new(Vec::with_capacity(digits.len() / 2));
    for pair in digits.chunks(2) {
        let byte = match pair {
            [high, low] => digit(*high).zip(digit(*low)).map(|(high, low)| high << 4 | low),
            _ => None,
        };
        let invalid =
            || "it is not a key as in cfssl's auth_keys: an even number of hexadecimal digits".to_owned();
        key.push(byte.ok_or_else(|| failed(invalid()))?);
    }
    if key.is_empty() { Err(failed("it is empty".to_owned())) } else { Ok(key) }
}

fn digit(byte: u8) -> Option<u8> {
    char::from(byte).to_digit(16).and_then(|digit| digit.try_into().ok())
}

#[cfg(test)]
mod tests;
