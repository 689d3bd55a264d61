//! cfssl's signing API (`cfssl serve`, `multirootca`).

pub mod options;

use std::path::PathBuf;

use aws_lc_rs::hmac;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use http::{HeaderMap, Method, StatusCode};
use rustls::pki_types::CertificateDer;
use serde_json::{Map, Value, json};
use zeroize::Zeroizing;

use super::{Answer, CaError, CertificateAuthority, Class, InvalidResponse, SigningRequest};
use crate::base::limits;
use crate::fs::file;
use crate::net::endpoint::Endpoint;
use crate::net::rest::{self, Call};
use crate::pki::{csr, pem};

/// cfssl's default port, with and without TLS.
pub const PORT: u16 = 8888;

/// Characters of what the server says that are shown: there is to be room for what to do about it.
const WORDS: usize = 200;

/// A client of cfssl.
#[derive(Debug)]
pub struct Cfssl {
    /// Where the server is.
    pub endpoint: Endpoint,
    /// Which of the server's profiles decides what is in the certificate; none for its default.
    pub profile: Option<String>,
    /// Which of several signers is to sign.
    pub label: Option<String>,
    /// The key with which requests are authenticated, hexadecimal; read anew for each call.
    pub auth_key: Option<PathBuf>,
    /// Roots, and intermediates below them; read anew for each call.
    pub bundle: Option<PathBuf>,
    /// Further headers.
    pub headers: HeaderMap,
}

#[tonic::async_trait]
impl CertificateAuthority for Cfssl {
    fn name(&self) -> &'static str {
        "cfssl"
    }

    async fn sign(&self, request: &SigningRequest) -> Result<Answer, CaError> {
        // Whatever may fail without a certificate having been issued goes first.
        let bundle = self.bundle()?;
        let (path, body) = self.request(request)?;
        let signer = self.certificates("info", self.common()).await?;
        let chain = self.certificates(path, body).await?;
        Ok(match bundle {
            None => Answer::with_others(chain, signer)?,
            // Who names the roots means these, and no others; the signer's certificate can still complete the chain.
            Some(bundle) => Answer::with_others([chain, signer].concat(), bundle)?,
        })
    }

    fn remedy(&self, answer: &InvalidResponse) -> Option<&'static str> {
        match (answer, &self.bundle) {
            (InvalidResponse::NoIdentity { .. }, _) => Some(
                "versions of cfssl before 1.4 leave URI names out, or write them as DNS names (Debian 12 has such a one): this agent needs a newer one",
            ),
            (InvalidResponse::NoRoot, None) => {
                Some("this cfssl signs with an intermediate: name a file with its root, --cfssl-bundle FILE")
            }
            (InvalidResponse::NoRoot, Some(_)) => Some("there is none in the file of --cfssl-bundle"),
            (InvalidResponse::Unchained(_), None) => {
                Some("the root is what cfssl calls its own certificate for --cfssl-label and --cfssl-profile")
            }
            (InvalidResponse::Unchained(_), Some(_)) => Some(
                "the roots are those in the file of --cfssl-bundle, which has to hold what is between them and the signer",
            ),
            (InvalidResponse::Expired { .. }, _) => Some(
                "cfssl counts a profile's expiry from its backdate on, which is 5 minutes: give the profile more than that",
            ),
            _ => None,
        }
    }
}

impl Cfssl {
    /// What every request says.
    fn common(&self) -> Map<String, Value> {
        let named = [("label", &self.label), ("profile", &self.profile)];
        // `info` wants a label, be it an empty one.
        named
            .into_iter()
            .map(|(key, value)| (key.to_owned(), json!(value.as_deref().unwrap_or_default())))
            .collect()
    }

    /// The endpoint that signs, and what it is sent.
    fn request(&self, request: &SigningRequest) -> Result<(&'static str, Map<String, Value>), CaError> {
        let mut body = self.common();
        body.insert("certificate_request".to_owned(), json!(csr::to_pem(&request.csr)));
        if let Some(identity) = &request.identity {
            // The CSR has it too, but of CSRs a profile may take the key alone. An empty list would take names away.
            body.insert("hosts".to_owned(), json!([identity.as_str()]));
        }
        let Some(path) = &self.auth_key else { return Ok(("sign", body)) };
        let key = hmac::Key::new(hmac::HMAC_SHA256, &read_key(path)?);
        let request = Value::Object(body).to_string();
        let token = hmac::sign(&key, request.as_bytes());
        let body = [("token", token.as_ref()), ("request", request.as_bytes())];
        let body = body.into_iter().map(|(name, bytes)| (name.to_owned(), json!(STANDARD.encode(bytes))));
        Ok(("authsign", body.collect()))
    }

    /// The certificates in `result.certificate` of what an endpoint answers.
    async fn certificates(
        &self,
        path: &'static str,
        body: Map<String, Value>,
    ) -> Result<Vec<CertificateDer<'static>>, CaError> {
        let call = Call {
            method: Method::POST,
            path: &format!("/api/v1/cfssl/{path}"),
            headers: self.headers.clone(),
            body: Some(Zeroizing::new(Value::Object(body).to_string().into_bytes())),
        };
        let reply = rest::call(&self.endpoint, call).await?;
        let envelope = serde_json::from_slice::<Value>(&reply.body).ok();
        let success = envelope.as_ref().and_then(|envelope| envelope.get("success")).and_then(Value::as_bool);
        if let (Some(envelope), Some(false)) = (&envelope, success) {
            return Err(self.refused(reply.status, envelope));
        }
        let status = reply.status;
        reply.success(&self.endpoint, |body| Some(unknown_endpoint(path, status, body)))?;
        let unreadable = |what: &str| {
            InvalidResponse::Unreadable(format!("{what}, in what {path} answered; is it cfssl?"))
        };
        let (Some(envelope), Some(true)) = (envelope, success) else {
            return Err(unreadable("there is no JSON with success and result").into());
        };
        let text = envelope.pointer("/result/certificate").and_then(Value::as_str);
        let text = text.ok_or_else(|| unreadable("there is no result.certificate"))?;
        let certificates = pem::certificates(text.as_bytes());
        Ok(certificates
            .map_err(|error| InvalidResponse::Unreadable(format!("result.certificate of {path}: {error}")))?)
    }

    /// A refusal in cfssl's own words.
    fn refused(&self, status: StatusCode, envelope: &Value) -> CaError {
        let errors = envelope.get("errors").and_then(Value::as_array);
        let errors = errors.into_iter().flatten();
        let (mut words, mut codes) = (Vec::new(), Vec::new());
        for error in errors {
            let code = error.get("code").and_then(Value::as_i64).unwrap_or_default();
            let message = error.get("message").and_then(Value::as_str).unwrap_or_default();
            words.push(format!("{message} (code {code})"));
            codes.push(code);
        }
        let said = words.join(", ");
        let advice = advice(&said);
        // Calls to another cfssl or to its logs, and its data base; the rest is about the request or the configuration.
        let may_pass = codes.iter().any(|code| matches!(code, 6000..8000 | 10_000..12_000));
        let class = if may_pass || status.is_server_error() { Class::Transient } else { Class::Permanent };
        let said: String = limits::sanitize_for_log(&said).chars().take(WORDS).collect();
        let message = format!("{said}{advice}");
        CaError::Api { address: self.endpoint.address.to_string(), status, message, class }
    }

    fn bundle(&self) -> Result<Option<Vec<CertificateDer<'static>>>, CaError> {
        let Some(path) = &self.bundle else { return Ok(None) };
        let failed = |reason: &dyn std::fmt::Display| CaError::File {
            option: "--cfssl-bundle",
            path: path.clone(),
            reason: reason.to_string(),
        };
        let text = file::read(path, limits::FILE_BYTES).map_err(|error| failed(&error))?;
        Ok(Some(pem::certificates(&text).map_err(|error| failed(&error))?))
    }
}

/// What to do about a refusal that is known.
fn advice(said: &str) -> &'static str {
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
    match known.into_iter().find(|(words, _)| said.contains(words)) {
        Some((_, advice)) => advice,
        None if said.is_empty() => "it gave no reason; see its log",
        None => "",
    }
}

/// What somebody said who may not be cfssl.
fn unknown_endpoint(path: &str, status: StatusCode, body: &[u8]) -> String {
    let said: String =
        limits::sanitize_for_log(String::from_utf8_lossy(body).trim()).chars().take(WORDS).collect();
    let advice = match (status, path) {
        (StatusCode::NOT_FOUND, "sign") => {
            "; where all its profiles have an auth_key, cfssl has only authsign: give --cfssl-auth-key-file"
        }
        (StatusCode::NOT_FOUND, "authsign") => {
            "; where none of its profiles has an auth_key, cfssl has no authsign: drop --cfssl-auth-key-file"
        }
        (StatusCode::NOT_FOUND, _) => "; is it cfssl, with this endpoint?",
        _ => "",
    };
    format!("{said}{advice}")
}

/// The key in a file, as cfssl's configuration has it: hexadecimal.
fn read_key(path: &std::path::Path) -> Result<Zeroizing<Vec<u8>>, CaError> {
    let failed =
        |reason: String| CaError::File { option: "--cfssl-auth-key-file", path: path.to_owned(), reason };
    let text = file::read(path, limits::TOKEN_BYTES).map_err(|error| failed(error.to_string()))?;
    let digits = text.trim_ascii();
    // Sized beforehand: a buffer that grows leaves copies of a key behind.
    let mut key = Zeroizing::new(Vec::with_capacity(digits.len() / 2));
    for pair in digits.chunks(2) {
        let byte = match pair {
            [high, low] => digit(*high).zip(digit(*low)).map(|(high, low)| high << 4 | low),
            _ => None,
        };
        let wrong =
            || "it is not a key as in cfssl's auth_keys: an even number of hexadecimal digits".to_owned();
        key.push(byte.ok_or_else(|| failed(wrong()))?);
    }
    if key.is_empty() { Err(failed("it is empty".to_owned())) } else { Ok(key) }
}

fn digit(byte: u8) -> Option<u8> {
    char::from(byte).to_digit(16).and_then(|digit| digit.try_into().ok())
}

#[cfg(test)]
mod tests;
