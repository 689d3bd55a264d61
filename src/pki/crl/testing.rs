//! CAs that issue CRLs.

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, KeyUsagePurpose, RevokedCertParams};
use rustls::pki_types::CertificateDer;

use super::*;
use crate::base::clock::rfc3339;
use crate::pki::key::{KeyType, PrivateKey, SigningKey};

/// A CA with its key.
pub(crate) struct Authority {
    pub(crate) certificate: CertificateDer<'static>,
    params: CertificateParams,
    key: SigningKey,
}

impl Authority {
    /// A self-signed CA.
    pub(crate) fn root(name: &str) -> Self {
        Self::new(name, None, |_| {})
    }

    /// A CA whose certificate `above` issued; without `above` it is self-signed.
    pub(crate) fn new(name: &str, above: Option<&Self>, change: impl Fn(&mut CertificateParams)) -> Self {
        let key = SigningKey::generate(KeyType::EcdsaP256).unwrap();
        let mut params = params(name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        change(&mut params);
        let certificate = match above {
            Some(above) => params.signed_by(&key, &above.issuer()).unwrap(),
            None => params.self_signed(&key).unwrap(),
        };
        Self { certificate: certificate.der().clone(), params, key }
    }

    pub(super) fn issuer(&self) -> rcgen::Issuer<'_, &SigningKey> {
        rcgen::Issuer::from_params(&self.params, &self.key)
    }

    /// The certificate of a new leaf followed by this CA's, and the leaf's key.
    pub(crate) fn issue(&self) -> (Vec<CertificateDer<'static>>, PrivateKey) {
        let key = SigningKey::generate(KeyType::EcdsaP256).unwrap();
        let leaf = params("leaf").signed_by(&key, &self.issuer()).unwrap();
        (vec![leaf.der().clone(), self.certificate.clone()], key.to_private_key())
    }

    /// A CRL in PEM, valid from `from` to `until`, that revokes these serial numbers.
    pub(crate) fn crl(&self, from: SystemTime, until: SystemTime, revoked: &[u64]) -> String {
        let revoked_certs = revoked.iter().map(|serial| RevokedCertParams {
            serial_number: (*serial).into(),
            revocation_time: from.into(),
            reason_code: None,
            invalidity_date: None,
        });
        let params = rcgen::CertificateRevocationListParams {
            this_update: from.into(),
            next_update: until.into(),
            crl_number: 1.into(),
            issuing_distribution_point: None,
            revoked_certs: revoked_certs.collect(),
            key_identifier_method: rcgen::KeyIdMethod::Sha256,
        };
        let crl = params.signed_by(&self.issuer()).unwrap();
        String::from_utf8(pem::encode("X509 CRL", crl.der()).to_vec()).unwrap()
    }

    /// An empty CRL in PEM of version 1, which does not name the key that signed it.
    pub(crate) fn old_crl(&self, from: SystemTime, until: SystemTime) -> String {
        let tlv = |tag: u8, content: &[u8]| {
            let length = u16::try_from(content.len()).unwrap().to_be_bytes();
            let length = match length {
                [0, short @ ..0x80] => vec![short],
                [0, medium] => vec![0x81, medium],
                [a, b] => vec![0x82, a, b],
            };
            [&[tag], length.as_slice(), content].concat()
        };
        let time = |at: SystemTime| {
            let text = rfc3339(at).to_string();
            let digits: String = text.chars().skip(2).filter(char::is_ascii_digit).collect();
            tlv(0x17, format!("{digits}Z").as_bytes())
        };
        let algorithm = tlv(0x30, &tlv(0x06, &[0x2a, 0x86, 0x48, 0xce, 0x3d, 4, 3, 2]));
        let (_, parsed) = x509_parser::parse_x509_certificate(&self.certificate).unwrap();
        let name = parsed.subject().as_raw().to_vec();
        let tbs = tlv(0x30, &[algorithm.clone(), name, time(from), time(until)].concat());
        let signature = rcgen::SigningKey::sign(&self.key, &tbs).unwrap();
        let der = tlv(0x30, &[tbs, algorithm, tlv(3, &[&[0], signature.as_slice()].concat())].concat());
        String::from_utf8(pem::encode("X509 CRL", &der).to_vec()).unwrap()
    }
}

fn params(name: &str) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, name);
    params
}
