//! A secret as `attache get` and `attache watch` print it.

use std::fmt::Write as _;
use std::time::SystemTime;

use prost::Message as _;
use serde_json::{Value, json};
use tonic::Status;

use crate::base::clock::{rfc3339, span};
use crate::base::text;
use crate::pki::certificate::Certificate;
use crate::pki::key::PrivateKey;
use crate::pki::{crl, pem};
use crate::proto::envoy::config::core::v3::{DataSource, data_source::Specifier};
use crate::proto::envoy::extensions::transport_sockets::tls::v3::{
    CertificateValidationContext, Secret, SpiffeCertValidatorConfig, secret::Type,
};

/// The end of the type URL of a validator that knows several trust domains, as SPIRE's agent sends it.
const SPIFFE_VALIDATOR: &str = ".SPIFFECertValidatorConfig";

/// A parsed secret.
pub(super) struct SecretView {
    pub(super) name: String,
    pub(super) certificates: Vec<Certificate>,
    /// The trust domain of each certificate, if the secret is a SPIFFE validator.
    pub(super) trust_domains: Vec<String>,
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
        let (chains, key, crls) = match &secret.r#type {
            Some(Type::TlsCertificate(pair)) => {
                (vec![(None, pair.certificate_chain.clone())], Some(&pair.private_key), None)
            }
            Some(Type::ValidationContext(context)) => {
                (bundles(context).map_err(|what| bad(&what))?, None, inline(context.crl.as_ref()))
            }
            None => return Err(bad("neither a key pair nor a trust bundle")),
        };
        let (mut certificates, mut pem, mut trust_domains) = (Vec::new(), Vec::new(), Vec::new());
        for (domain, chain) in chains {
            let chain = inline(chain.as_ref()).ok_or_else(|| bad("its certificates are not inline"))?;
            let ders = pem::certificates(chain).map_err(|error| bad(&error.to_string()))?;
            for der in &ders {
                certificates.push(Certificate::parse(der).map_err(|error| bad(&error.to_string()))?);
                trust_domains.extend(domain.clone());
            }
            pem.extend_from_slice(&pem::of_certificates(&ders));
        }
        let key = key.map(|key| {
            let pem = inline(key.as_ref()).unwrap_or_default();
            let public = PrivateKey::from_pem(pem).and_then(|key| key.public_key()).ok();
            let fits = public.as_ref() == certificates.first().map(|leaf| &leaf.public_key);
            Key { pem: pem.to_vec(), fits }
        });
        let crls = crls.map_or(Ok(0), |crls| crl::from_pem(crls).map(|crls| crls.len()));
        let crls = crls.map_err(|error| bad(&format!("its CRLs: {error}")))?;
        Ok(Self { name: secret.name.clone(), certificates, trust_domains, pem, key, crls })
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
        let of = if self.trust_domains.is_empty() { "" } else { " of a SPIFFE validator" };
        let parts: Vec<_> =
            (0..).zip(&self.certificates).map(|(index, one)| self.rows(index, one, now)).collect();
        format!("{}: {kind}{of}, {certificates}{crls}\n{}\n", self.name, parts.join("\n"))
    }

    /// The rows of one certificate.
    fn rows(&self, index: usize, certificate: &Certificate, now: SystemTime) -> String {
        let role = match (&self.key, index) {
            (Some(_), 0) => "leaf",
            (Some(_), _) if certificate.subject == certificate.issuer => "root",
            (Some(_), _) => "intermediate",
            (None, _) => "root",
        };
        let mut out = String::new();
        let mut row = |label: &str, value: &str| {
            // Writing to a String does not fail.
            let _ = writeln!(out, "    {label:<12} {value}");
        };
        row(role, &certificate.names());
        if let Some(domain) = self.trust_domains.get(index) {
            row("trust domain", &text::one_line(domain));
        }
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
        let certificate = |(index, certificate): (usize, &Certificate)| {
            let mut value = json!({
                "subject": certificate.subject,
                "issuer": certificate.issuer,
                "serial": certificate.serial,
                "uris": certificate.uris,
                "dns_names": certificate.dns_names,
                "ip_addresses": certificate.ip_addresses.iter().map(ToString::to_string).collect::<Vec<_>>(),
                "not_before": show(certificate.not_before),
                "not_after": show(certificate.not_after),
                "key_type": certificate.key_type,
            });
            if let (Some(domain), Some(fields)) = (self.trust_domains.get(index), value.as_object_mut()) {
                fields.insert("trust_domain".to_owned(), json!(domain));
            }
            value
        };
        let mut value = json!({
            "name": self.name,
            "kind": if self.key.is_some() { "key_pair" } else { "trust_bundle" },
            "certificates": self.certificates.iter().enumerate().map(certificate).collect::<Vec<_>>(),
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

/// Roots, with their trust domain if they are in a SPIFFE validator.
type Bundle = (Option<String>, Option<DataSource>);

/// The roots of a trust bundle.
fn bundles(context: &CertificateValidationContext) -> Result<Vec<Bundle>, String> {
    let mut bundles = Vec::new();
    let validator = context.custom_validator_config.as_ref().and_then(|config| config.typed_config.as_ref());
    match validator {
        Some(config) if config.type_url.ends_with(SPIFFE_VALIDATOR) => {
            let validator = SpiffeCertValidatorConfig::decode(config.value.clone());
            let validator = validator.map_err(|error| format!("its SPIFFE validator is damaged: {error}"))?;
            let domains = validator.trust_domains.into_iter();
            bundles.extend(domains.map(|domain| (Some(domain.name), domain.trust_bundle)));
        }
        Some(config) if context.trusted_ca.is_none() => {
            return Err(format!("its validator {} is unknown", text::one_line(&config.type_url)));
        }
        _ => {}
    }
    // A validator ignores the other roots.
    if bundles.is_empty() {
        bundles.push((None, context.trusted_ca.clone()));
    }
    Ok(bundles)
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
