//! Parsed certificate revocation lists (CRLs), and which issuer each belongs to.

#[cfg(any(test, fuzzing))]
pub mod fuzz;
mod strict;

use std::fmt;
use std::time::SystemTime;

use rustls::pki_types::CertificateRevocationListDer;
use rustls::pki_types::pem::PemObject;
use x509_parser::asn1_rs::{Any, BitString, Sequence};
use x509_parser::extensions::{ParsedExtension, X509Extension};
use x509_parser::oid_registry::OID_X509_EXT_DELTA_CRL_INDICATOR;
use x509_parser::prelude::FromDer;
use x509_parser::revocation_list::CertificateRevocationList;
use x509_parser::x509::{AlgorithmIdentifier, SubjectPublicKeyInfo, X509Version};

use super::certificate::{Certificate, hexadecimal, moment};
use super::pem::{self, looks_like_der};
use crate::base::limits;
use crate::base::text::one_line;

/// A complete CRL in a form that Envoy reads. Its signature is not checked yet.
#[derive(Clone, PartialEq, Eq)]
pub struct Crl {
    der: CertificateRevocationListDer<'static>,
    /// On one line.
    pub issuer: String,
    /// When it was issued. Before that time, Envoy rejects every peer.
    pub this_update: SystemTime,
    /// When the next CRL is due. After that time, Envoy rejects every peer.
    pub next_update: Option<SystemTime>,
    /// The number of revoked certificates.
    pub revoked: usize,
    number: Option<Vec<u8>>,
    key_id: Option<Vec<u8>>,
    issuer_serial: Option<String>,
}

/// Why a text holds no usable CRLs.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotCrls {
    #[error("it holds no PEM CRL (a \"-----BEGIN X509 CRL-----\" block)")]
    NoCrl,
    #[error("it is DER, not PEM: convert it with `openssl crl -inform der -outform pem`")]
    Der,
    #[error("its PEM is damaged: {0}")]
    Damaged(String),
    #[error("it holds more than {max} CRLs: remove those that a newer one replaces", max = limits::CRLS)]
    TooMany,
    #[error("CRL {place} in it can't be used: {reason}")]
    Unusable { place: usize, reason: String },
}

/// Every CRL of a PEM text, in order; other blocks and text between blocks are ignored.
pub fn from_pem(text: &[u8]) -> Result<Vec<Crl>, NotCrls> {
    let mut found = Vec::new();
    for der in CertificateRevocationListDer::pem_slice_iter(text) {
        if found.len() == limits::CRLS {
            return Err(NotCrls::TooMany);
        }
        let der = der.map_err(|error| NotCrls::Damaged(error.to_string()))?;
        let place = found.len() + 1;
        found.push(Crl::parse(der).map_err(|reason| NotCrls::Unusable { place, reason })?);
    }
    match found.is_empty() {
        false => Ok(found),
        true if looks_like_der(text) => Err(NotCrls::Der),
        true => Err(NotCrls::NoCrl),
    }
}

/// Whether `text` is an empty list of CRLs: only spaces, empty lines, and lines that begin with "#".
pub fn is_blank(text: &[u8]) -> bool {
    let mut lines = text.split(|byte| *byte == b'\n').map(<[u8]>::trim_ascii);
    lines.all(|line| line.is_empty() || line.starts_with(b"#"))
}

/// `crls` as one PEM text.
pub fn to_pem<'a>(crls: impl IntoIterator<Item = &'a Crl>) -> Vec<u8> {
    crls.into_iter().flat_map(|crl| pem::encode("X509 CRL", &crl.der).to_vec()).collect()
}

impl Crl {
    /// The CRL that `der` holds.
    pub fn from_der(der: &[u8]) -> Result<Self, String> {
        Self::parse(der.to_vec().into())
    }

    /// Strict, because Envoy rejects the whole trust bundle if it can't read one CRL.
    fn parse(der: CertificateRevocationListDer<'static>) -> Result<Self, String> {
        let (rest, parsed) = CertificateRevocationList::from_der(&der).map_err(|error| error.to_string())?;
        if !rest.is_empty() {
            return Err(format!("{} trailing bytes", rest.len()));
        }
        if parsed.tbs_cert_list.signature != parsed.signature_algorithm {
            return Err("it names two different signature algorithms".to_owned());
        }
        if !strict::is_crl(&der) {
            return Err("its encoding is not the strict DER that Envoy requires".to_owned());
        }
        let mut entries = parsed.iter_revoked_certificates();
        let has_extensions =
            !parsed.extensions().is_empty() || entries.any(|one| !one.extensions().is_empty());
        match parsed.version() {
            // The default of `openssl ca -gencrl`.
            None if !has_extensions => {}
            Some(X509Version::V2) => {}
            _ => return Err("its version does not allow its content".to_owned()),
        }
        parsed.tbs_cert_list.extensions_map().map_err(|error| error.to_string())?;
        let is_critical = |extension: &X509Extension<'_>| extension.critical;
        if parsed.iter_revoked_certificates().any(|entry| entry.extensions().iter().any(is_critical)) {
            return Err("one of its entries has a critical extension".to_owned());
        }
        let mut crl = Self {
            issuer: one_line(&parsed.issuer().to_string()),
            this_update: moment(parsed.last_update().timestamp()),
            next_update: parsed.next_update().map(|at| moment(at.timestamp())),
            revoked: parsed.iter_revoked_certificates().count(),
            number: None,
            key_id: None,
            issuer_serial: None,
            der: der.clone(),
        };
        for extension in parsed.extensions() {
            match extension.parsed_extension() {
                ParsedExtension::ParseError { error } => return Err(format!("extension: {error}")),
                ParsedExtension::CRLNumber(number) => crl.number = Some(number.to_bytes_be()),
                ParsedExtension::AuthorityKeyIdentifier(id) => {
                    crl.key_id = id.key_identifier.as_ref().map(|id| id.0.to_vec());
                    crl.issuer_serial = id.authority_cert_serial.map(hexadecimal);
                }
                // Such a CRL covers only some certificates, or only the changes since another CRL.
                other => {
                    let is_partial = matches!(other, ParsedExtension::IssuingDistributionPoint(_));
                    if is_partial || extension.critical || extension.oid == OID_X509_EXT_DELTA_CRL_INDICATOR {
                        let id = one_line(&extension.oid.to_id_string());
                        return Err(format!("it is not complete (extension {id}); Envoy needs a full CRL"));
                    }
                }
            }
        }
        Ok(crl)
    }

    pub fn der(&self) -> &CertificateRevocationListDer<'static> {
        &self.der
    }

    /// Orders the CRLs of one issuer: Envoy uses the one with the greatest rank, the newest.
    pub fn age_rank(&self) -> (SystemTime, usize, Option<&[u8]>) {
        let number = self.number.as_deref();
        (self.this_update, number.map_or(0, <[u8]>::len), number)
    }

    /// Whether Envoy would use this CRL for certificates of `issuer`, a CA with the same name as its issuer. The signature is
    /// not checked.
    pub fn may_be_of(&self, issuer: &Certificate) -> bool {
        let differ = |ours: &Option<Vec<u8>>, its: &Option<Vec<u8>>| matches!((ours, its), (Some(ours), Some(its)) if ours != its);
        !differ(&self.key_id, &issuer.key_id)
            && self.issuer_serial.as_ref().is_none_or(|serial| *serial == issuer.serial)
    }

    /// The fields of a CRL that distinguish issuers with the same name.
    pub fn authority(&self) -> (Option<&[u8]>, Option<&str>) {
        (self.key_id.as_deref(), self.issuer_serial.as_deref())
    }

    pub fn is_signed_by(&self, issuer: &Certificate) -> bool {
        self.verify(&issuer.public_key).is_some()
    }

    /// Parses only the outermost sequence: a CRL may be long.
    fn verify(&self, public_key: &[u8]) -> Option<()> {
        let (_, outer) = Sequence::from_der(&self.der).ok()?;
        let content: &[u8] = &outer.content;
        let (after, _) = Any::from_der(content).ok()?;
        let signed = content.get(..content.len() - after.len())?;
        let (rest, algorithm) = AlgorithmIdentifier::from_der(after).ok()?;
        let (_, signature) = BitString::from_der(rest).ok()?;
        let (_, key) = SubjectPublicKeyInfo::from_der(public_key).ok()?;
        x509_parser::verify::verify_signature(&key, &algorithm, &signature, signed).ok()
    }
}

impl fmt::Debug for Crl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Crl({}, {} revoked)", self.issuer, self.revoked)
    }
}

#[cfg(test)]
pub(crate) mod testing;

#[cfg(test)]
mod tests;
