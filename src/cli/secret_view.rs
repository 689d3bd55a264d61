//! A secret as `attache get` and `attache watch` print it.

use std::fmt::Write as _;
use std::time::SystemTime;

use serde_json::{Value, json};
use tonic::Status;

use crate::base::clock::{rfc3339, span};
use crate::pki::certificate::Certificate;
use crate::pki::key::PrivateKey;
use crate::pki::{crl, pem};
use crate::proto::envoy::config::core::v3::{DataSource, data_source::Specifier};
use crate::proto::envoy::extensions::transport_sockets::tls::v3::{Secret, secret::Type};

/// A parsed secret.
pub(super) struct SecretView {
    pub(super) name: String,
    pub(super) certificates: Vec<Certificate>,
    pub(super) pem: Vec<u8>,
    /// The private key, if the secret is a key pair.
    pub(super) key: Option<Key>,
    /// The number of CRLs in a trust bundle.
    pub(super) crls: usize,
}

pub(super) struct Key {
    pub(super) pem: Vec<u8>,
    /// Whether it is the leaf's key.
    pub(super) fits: bool,
}

impl SecretView {
    pub(super) fn new(secret: Secret) -> Result<Self, Status> {
        let bad = |what: &str| Status::data_loss(format!("{}: {what}", secret.name));
        let (chain, key) = match &secret.r#type {
            Some(Type::TlsCertificate(pair)) => (&pair.certificate_chain, Some(&pair.private_key)),
            Some(Type::ValidationContext(context)) => (&context.trusted_ca, None),
            None => return Err(bad("neither a key pair nor a trust bundle")),
        };
        let chain = inline(chain.as_ref()).ok_or_else(|| bad("its certificates are not inline"))?;
        let ders = pem::certificates(chain).map_err(|error| bad(&error.to_string()))?;
        let certificates = ders.iter().map(Certificate::parse).collect::<Result<Vec<_>, _>>();
        let certificates = certificates.map_err(|error| bad(&error.to_string()))?;
        let key = key.map(|key| {
            let pem = inline(key.as_ref()).unwrap_or_default();
            let public = PrivateKey::from_pem(pem).and_then(|key| key.public_key()).ok();
            let fits = public.as_ref() == certificates.first().map(|leaf| &leaf.public_key);
            Key { pem: pem.to_vec(), fits }
        });
        let crls = match &secret.r#type {
            Some(Type::ValidationContext(context)) => inline(context.crl.as_ref()),
            _ => None,
        };
        let crls = crls.map_or(Ok(0), |crls| crl::from_pem(crls).map(|crls| crls.len()));
        let crls = crls.map_err(|error| bad(&format!("its CRLs: {error}")))?;
        Ok(Self { name: secret.name.clone(), certificates, pem: pem::of_certificates(&ders), key, crls })
    }

    pub(super) fn table(&self, now: SystemTime) -> String {
        let kind = if self.key.is_some() { "key pair" } else { "trust bundle" };
        let certificates = match self.certificates.len() {
            1 => "1 certificate".to_owned(),
            count => format!("{count} certificates"),
        };
        let crls = match self.crls {
            0 => String::new(),
            1 => ", 1 CRL".to_owned(),
            count => format!(", {count} CRLs"),
        };
        let parts: Vec<_> =
            (0..).zip(&self.certificates).map(|(index, one)| self.rows(index, one, now)).collect();
        format!("{}: {kind}, {certificates}{crls}\n{}\n", self.name, parts.join("\n"))
    }

    /// The rows of one certificate.
    fn rows(&self, index: usize, certificate: &Certificate, now: SystemTime) -> String {
        let role = match (&self.key, index) {
            (Some(_), 0) => "leaf",
            (Some(_), _) => "intermediate",
            (None, _) => "root",
        };
        let mut out = String::new();
        let mut row = |label: &str, value: &str| {
            // Writing to a String does not fail.
            let _ = writeln!(out, "    {label:<12} {value}");
        };
        row(role, &certificate.names());
        if !certificate.subject.is_empty() && certificate.names() != certificate.subject {
            row("subject", &certificate.subject);
        }
        row("issuer", &certificate.issuer);
        row("serial", &certificate.serial);
        row("valid", &validity(certificate, now));
        let fits = match &self.key {
            Some(key) if index == 0 && key.fits => ", the private key matches",
            Some(_) if index == 0 => ", THE PRIVATE KEY DOES NOT MATCH",
            _ => "",
        };
        row("key", &format!("{}{fits}", certificate.key_type));
        out
    }

    pub(super) fn write_pem(&self, show_key: bool, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.pem);
        if let Some(key) = self.key.as_ref().filter(|_| show_key) {
            out.extend_from_slice(&key.pem);
        }
    }

    pub(super) fn json(&self, show_key: bool) -> Value {
        let show = |moment| rfc3339(moment).to_string();
        let certificate = |certificate: &Certificate| {
            json!({
                "subject": certificate.subject,
                "issuer": certificate.issuer,
                "serial": certificate.serial,
                "uris": certificate.uris,
                "dns_names": certificate.dns_names,
                "ip_addresses": certificate.ip_addresses.iter().map(ToString::to_string).collect::<Vec<_>>(),
                "not_before": show(certificate.not_before),
                "not_after": show(certificate.not_after),
                "key_type": certificate.key_type,
            })
        };
        let mut value = json!({
            "name": self.name,
            "kind": if self.key.is_some() { "key_pair" } else { "trust_bundle" },
            "certificates": self.certificates.iter().map(certificate).collect::<Vec<_>>(),
            "pem": String::from_utf8_lossy(&self.pem),
        });
        if let (None, Some(fields)) = (&self.key, value.as_object_mut()) {
            fields.insert("crls".to_owned(), json!(self.crls));
        }
        if let (Some(key), Some(fields)) = (&self.key, value.as_object_mut()) {
            fields.insert("key_fits".to_owned(), json!(key.fits));
            if show_key {
                fields.insert("private_key".to_owned(), json!(String::from_utf8_lossy(&key.pem)));
            }
        }
        value
    }
}

fn inline(source: Option<&DataSource>) -> Option<&[u8]> {
    match source?.specifier.as_ref()? {
        Specifier::InlineBytes(bytes) => Some(bytes),
        Specifier::InlineString(text) => Some(text.as_bytes()),
        Specifier::Filename(_) => None,
    }
}

pub(super) fn validity(certificate: &Certificate, now: SystemTime) -> String {
    let show = |moment| rfc3339(moment);
    let (from, until) = (certificate.not_before, certificate.not_after);
    let state = match (from.duration_since(now), until.duration_since(now)) {
        (Ok(ahead), _) if !ahead.is_zero() => format!("NOT YET VALID: {} to go", span(ahead)),
        (_, Ok(left)) => format!("{} left", span(left)),
        (_, Err(past)) => format!("EXPIRED {} ago", span(past.duration())),
    };
    format!("{} to {} ({state})", show(from), show(until))
}
