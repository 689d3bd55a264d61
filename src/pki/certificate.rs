//! Parsed certificates.

use std::net::IpAddr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustls::pki_types::CertificateDer;
use x509_parser::certificate::X509Certificate;
use x509_parser::error::X509Error;
use x509_parser::extensions::{GeneralName, ParsedExtension};
use x509_parser::prelude::FromDer;
use x509_parser::public_key::PublicKey;

use crate::base::spiffe_id::SpiffeId;
use crate::base::text::one_line;

/// The fields of a certificate that checks and messages use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Certificate {
    /// On one line, and cut if it is long; so are all texts here.
    pub subject: String,
    pub issuer: String,
    /// Lower-case hexadecimal.
    pub serial: String,
    pub not_before: SystemTime,
    pub not_after: SystemTime,
    /// URI subject alternative names.
    pub uris: Vec<String>,
    /// DNS subject alternative names.
    pub dns_names: Vec<String>,
    /// The common names in its subject.
    pub common_names: Vec<String>,
    /// IP subject alternative names.
    pub ip_addresses: Vec<IpAddr>,
    /// Algorithm and size of its key, as shown in messages: `ECDSA P-256`.
    pub key_type: String,
    /// DER SubjectPublicKeyInfo.
    pub public_key: Vec<u8>,
    pub is_ca: bool,
    /// How many CAs may be below it, if that is limited.
    pub path_len: Option<u32>,
    /// Whether its key usage allows signing certificates.
    pub signs_certificates: bool,
    /// Whether its key usage allows signing CRLs.
    pub signs_crls: bool,
    /// Subject key identifier.
    pub key_id: Option<Vec<u8>>,
}

/// Why DER is not a certificate.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not an X.509 certificate: {0}")]
pub struct NotACertificate(String);

impl Certificate {
    /// Parses a DER certificate.
    pub fn parse(der: &CertificateDer<'_>) -> Result<Self, NotACertificate> {
        let parsed = decode(der)?;
        let mut facts = Self {
            subject: one_line(&parsed.subject().to_string()),
            issuer: one_line(&parsed.issuer().to_string()),
            serial: hexadecimal(parsed.raw_serial()),
            not_before: moment(parsed.validity().not_before.timestamp()),
            not_after: moment(parsed.validity().not_after.timestamp()),
            uris: Vec::new(),
            dns_names: Vec::new(),
            common_names: common_names(&parsed),
            ip_addresses: Vec::new(),
            key_type: key_type(&parsed),
            public_key: parsed.public_key().raw.to_vec(),
            is_ca: parsed.is_ca(),
            path_len: None,
            signs_certificates: true,
            signs_crls: true,
            key_id: None,
        };
        for extension in parsed.extensions() {
            match extension.parsed_extension() {
                ParsedExtension::BasicConstraints(basic) => facts.path_len = basic.path_len_constraint,
                ParsedExtension::KeyUsage(usage) => {
                    (facts.signs_crls, facts.signs_certificates) = (usage.crl_sign(), usage.key_cert_sign());
                }
                ParsedExtension::SubjectKeyIdentifier(id) => facts.key_id = Some(id.0.to_vec()),
                _ => {}
            }
        }
        let names = parsed.subject_alternative_name().map_err(|error| NotACertificate(error.to_string()))?;
        for name in names.iter().flat_map(|names| &names.value.general_names) {
            match name {
                GeneralName::URI(uri) => facts.uris.push(one_line(uri)),
                GeneralName::DNSName(name) => facts.dns_names.push(one_line(name)),
                GeneralName::IPAddress(bytes) => facts.ip_addresses.extend(ip_address(bytes)),
                _ => {}
            }
        }
        // An agent may hold thousands of certificates.
        let Self { uris, dns_names, common_names, ip_addresses, .. } = &mut facts;
        for names in [uris, dns_names, common_names] {
            names.shrink_to_fit();
        }
        ip_addresses.shrink_to_fit();
        Ok(facts)
    }

    /// The SPIFFE ID, if it is the only URI name (an X.509-SVID has exactly one).
    pub fn spiffe_id(&self) -> Option<SpiffeId> {
        match self.uris.as_slice() {
            [uri] => uri.parse().ok(),
            _ => None,
        }
    }

    /// Its subject alternative names, or its subject if it has none, cut if there are many.
    pub fn names(&self) -> String {
        let names: Vec<_> = self
            .uris
            .iter()
            .chain(&self.dns_names)
            .cloned()
            .chain(self.ip_addresses.iter().map(ToString::to_string))
            .collect();
        match names.is_empty() {
            true if self.subject.is_empty() => "no name at all".to_owned(),
            true => self.subject.clone(),
            false => one_line(&names.join(", ")),
        }
    }
}

fn common_names(certificate: &X509Certificate<'_>) -> Vec<String> {
    let names = certificate.subject().iter_common_name();
    names.filter_map(|name| name.as_str().ok()).map(one_line).collect()
}

fn decode<'a>(der: &'a CertificateDer<'_>) -> Result<X509Certificate<'a>, NotACertificate> {
    let (rest, parsed) =
        X509Certificate::from_der(der).map_err(|error| NotACertificate(error.to_string()))?;
    match rest {
        [] => Ok(parsed),
        rest => Err(NotACertificate(format!("{} trailing bytes", rest.len()))),
    }
}

/// The certificates that stand one after the other in `bytes`; an error if they are more than `limit`.
pub fn split(mut bytes: &[u8], limit: usize) -> Result<Vec<CertificateDer<'static>>, NotACertificate> {
    let mut found = Vec::new();
    while !bytes.is_empty() {
        if found.len() == limit {
            return Err(NotACertificate(format!("there are more than {limit} of them")));
        }
        let (rest, _) =
            X509Certificate::from_der(bytes).map_err(|error| NotACertificate(error.to_string()))?;
        let (first, _) = bytes.split_at(bytes.len() - rest.len());
        found.push(first.to_vec().into());
        bytes = rest;
    }
    Ok(found)
}

/// Whether a certificate is its own issuer, like a root. An intermediate may have the same name as its root, or both may
/// have none: if the signature can be checked, it decides. Checking it takes up to a millisecond.
pub fn is_self_issued(der: &CertificateDer<'_>) -> Result<bool, NotACertificate> {
    let certificate = decode(der)?;
    let has_own_name = certificate.subject().as_raw() == certificate.issuer().as_raw();
    Ok(has_own_name
        && !matches!(certificate.verify_signature(None), Err(X509Error::SignatureVerificationError)))
}

/// Whether each attribute stands in its subject once, and alone. Others (`DC=corp, DC=example`) can't be written into what a CA
/// signs here: a subject is a map there.
pub fn has_plain_subject(der: &CertificateDer<'_>) -> Result<bool, NotACertificate> {
    let certificate = decode(der)?;
    let mut seen = Vec::new();
    for part in certificate.subject().iter_rdn() {
        let mut attributes = part.iter().map(|attribute| attribute.attr_type());
        match (attributes.next(), attributes.next()) {
            (Some(kind), None) if !seen.contains(&kind) => seen.push(kind),
            _ => return Ok(false),
        }
    }
    Ok(true)
}

/// A name in the form in which Envoy compares names: it ignores case and the number of spaces.
pub fn folded(name: &str) -> String {
    name.split_whitespace().collect::<Vec<_>>().join(" ").to_lowercase()
}

/// A DER integer in the form in which Envoy and OpenSSL print serial numbers: without leading zero bytes.
pub(super) fn hexadecimal(integer: &[u8]) -> String {
    let start = integer.iter().position(|byte| *byte != 0).unwrap_or_default();
    one_line(&integer.iter().skip(start).map(|byte| format!("{byte:02x}")).collect::<String>())
}

pub(super) fn moment(timestamp: i64) -> SystemTime {
    let distance = Duration::from_secs(timestamp.unsigned_abs());
    if timestamp < 0 { UNIX_EPOCH - distance } else { UNIX_EPOCH + distance }
}

fn ip_address(bytes: &[u8]) -> Option<IpAddr> {
    let v4 = <[u8; 4]>::try_from(bytes).map(IpAddr::from);
    v4.or_else(|_| <[u8; 16]>::try_from(bytes).map(IpAddr::from)).ok()
}

fn key_type(certificate: &X509Certificate<'_>) -> String {
    let key = certificate.public_key();
    match key.parsed() {
        Ok(PublicKey::RSA(rsa)) => format!("RSA {}", rsa.key_size()),
        Ok(PublicKey::EC(point)) => format!("ECDSA P-{}", point.key_size()),
        _ if key.algorithm.algorithm.to_id_string() == "1.3.101.112" => "Ed25519".to_owned(),
        _ => one_line(&key.algorithm.algorithm.to_id_string()),
    }
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, DnType, SanType};

    use super::*;
    use crate::pki::key::{KeyType, SigningKey};

    fn parsed(change: impl Fn(&mut CertificateParams)) -> Certificate {
        let mut params = CertificateParams::default();
        change(&mut params);
        let key = SigningKey::generate(KeyType::EcdsaP256).unwrap();
        Certificate::parse(params.self_signed(&key).unwrap().der()).unwrap()
    }

    #[test]
    fn a_name_of_several_lines_is_one_line_of_a_message() {
        let forged = "web\n2026-01-01T00:00:00Z  INFO certificate renewed\u{1b}[2J";
        let certificate = parsed(|params| {
            params.distinguished_name.push(DnType::CommonName, forged);
            params.subject_alt_names = vec![SanType::DnsName(forged.try_into().unwrap())];
        });
        for text in [&certificate.subject, &certificate.issuer, &certificate.names()] {
            assert!(text.contains("web\u{fffd}2026") && !text.contains(char::is_control), "{text:?}");
        }
    }

    #[test]
    fn long_and_many_names_are_cut() {
        let certificate = parsed(|params| {
            params.distinguished_name.push(DnType::CommonName, "x".repeat(100_000));
            let name = |number| SanType::DnsName(format!("{number}.example").try_into().unwrap());
            params.subject_alt_names = (0..2_000).map(name).collect();
        });
        assert_eq!(certificate.dns_names.len(), 2_000);
        for text in [&certificate.subject, &certificate.issuer, &certificate.names()] {
            assert!(text.len() < 3_000 && text.ends_with('\u{2026}'), "{} bytes: {text}", text.len());
        }
    }
}
