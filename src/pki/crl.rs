//! Certificate revocation lists (CRLs): what they say, and whose they are.

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

/// One CRL: complete, with a form that Envoy reads. Nothing is known of its signature yet.
#[derive(Clone, PartialEq, Eq)]
pub struct Crl {
    der: CertificateRevocationListDer<'static>,
    /// Who issued it, as one line.
    pub issuer: String,
    /// When it was made. Envoy refuses everybody before that moment.
    pub this_update: SystemTime,
    /// When the next one is due. Envoy refuses everybody after that moment.
    pub next_update: Option<SystemTime>,
    /// How many certificates it revokes.
    pub revoked: usize,
    number: Option<Vec<u8>>,
    key_id: Option<Vec<u8>>,
    issuer_serial: Option<String>,
}

/// Why a file gives no CRLs.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotCrls {
    #[error("it holds no PEM CRL (a \"-----BEGIN X509 CRL-----\" block)")]
    NoCrl,
    #[error("it is DER, not PEM: convert it with `openssl crl -inform der -outform pem`")]
    Der,
    #[error("its PEM is damaged: {0}")]
    Damaged(String),
    #[error("it holds more than {max} CRLs: leave those out that a newer one replaces", max = limits::CRLS)]
    TooMany,
    #[error("CRL {place} of it can't be used: {reason}")]
    Unusable { place: usize, reason: String },
}

/// Every CRL of a PEM text, in order; other blocks and text between blocks are passed over.
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

/// Whether there is nothing in `text` but spaces, empty lines, and lines that begin with "#": a list of no CRLs.
pub fn is_blank(text: &[u8]) -> bool {
    let mut lines = text.split(|byte| *byte == b'\n').map(<[u8]>::trim_ascii);
    lines.all(|line| line.is_empty() || line.starts_with(b"#"))
}

/// `crls` as one PEM text.
pub fn to_pem<'a>(crls: impl IntoIterator<Item = &'a Crl>) -> Vec<u8> {
    crls.into_iter().flat_map(|crl| pem::encode("X509 CRL", &crl.der).to_vec()).collect()
}

impl Crl {
    /// Envoy refuses a whole trust bundle for one CRL that it can't read, so this is strict.
    fn parse(der: CertificateRevocationListDer<'static>) -> Result<Self, String> {
        let (rest, parsed) = CertificateRevocationList::from_der(&der).map_err(|error| error.to_string())?;
        if !rest.is_empty() {
            return Err(format!("{} bytes behind it", rest.len()));
        }
        if parsed.tbs_cert_list.signature != parsed.signature_algorithm {
            return Err("it names two signature algorithms".to_owned());
        }
        if !strict::is_crl(&der) {
            return Err("its DER is not as strict as Envoy wants it".to_owned());
        }
        let mut entries = parsed.iter_revoked_certificates();
        let has_extensions =
            !parsed.extensions().is_empty() || entries.any(|one| !one.extensions().is_empty());
        match parsed.version() {
            // What `openssl ca -gencrl` makes where nothing else is configured.
            None if !has_extensions => {}
            Some(X509Version::V2) => {}
            _ => return Err("its version is not one that has what it holds".to_owned()),
        }
        parsed.tbs_cert_list.extensions_map().map_err(|error| error.to_string())?;
        let is_critical = |extension: &X509Extension<'_>| extension.critical;
        if parsed.iter_revoked_certificates().any(|entry| entry.extensions().iter().any(is_critical)) {
            return Err("an entry of it has a critical extension".to_owned());
        }
        let mut crl = Self {
            issuer: parsed.issuer().to_string(),
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
                ParsedExtension::ParseError { error } => return Err(format!("an extension: {error}")),
                ParsedExtension::CRLNumber(number) => crl.number = Some(number.to_bytes_be()),
                ParsedExtension::AuthorityKeyIdentifier(id) => {
                    crl.key_id = id.key_identifier.as_ref().map(|id| id.0.to_vec());
                    crl.issuer_serial = id.authority_cert_serial.map(hexadecimal);
                }
                // Such a one speaks of some certificates only, or of the changes since another one.
                other => {
                    let is_partial = matches!(other, ParsedExtension::IssuingDistributionPoint(_));
                    if is_partial || extension.critical || extension.oid == OID_X509_EXT_DELTA_CRL_INDICATOR {
                        let id = extension.oid.to_id_string();
                        return Err(format!("it is not complete (extension {id}); Envoy needs a full CRL"));
                    }
                }
            }
        }
        Ok(crl)
    }

    /// The CRL's DER.
    pub fn der(&self) -> &CertificateRevocationListDer<'static> {
        &self.der
    }

    /// Of two CRLs of one issuer Envoy uses the newer one: that with the greater age rank.
    pub fn age_rank(&self) -> (SystemTime, usize, Option<&[u8]>) {
        let number = self.number.as_deref();
        (self.this_update, number.map_or(0, <[u8]>::len), number)
    }

    /// Whether Envoy would look into this CRL for what `issuer`, a CA of its issuer's name, issued. The signature is
    /// another question.
    pub fn may_be_of(&self, issuer: &Certificate) -> bool {
        let differ = |ours: &Option<Vec<u8>>, its: &Option<Vec<u8>>| matches!((ours, its), (Some(ours), Some(its)) if ours != its);
        !differ(&self.key_id, &issuer.key_id)
            && self.issuer_serial.as_ref().is_none_or(|serial| *serial == issuer.serial)
    }

    /// What tells two issuers of one name apart, as far as a CRL knows.
    pub fn authority(&self) -> (Option<&[u8]>, Option<&str>) {
        (self.key_id.as_deref(), self.issuer_serial.as_deref())
    }

    /// Whether it is signed with the key of `issuer`.
    pub fn is_signed_by(&self, issuer: &Certificate) -> bool {
        self.verify(&issuer.public_key).is_some()
    }

    /// Takes apart no more than the outermost sequence: a CRL may be long.
    fn verify(&self, public_key: &[u8]) -> Option<()> {
        let (_, outer) = Sequence::from_der(&self.der).ok()?;
        let content: &[u8] = &outer.content;
        let (behind, _) = Any::from_der(content).ok()?;
        let signed = content.get(..content.len() - behind.len())?;
        let (rest, algorithm) = AlgorithmIdentifier::from_der(behind).ok()?;
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
pub(crate) mod testing {
    //! CAs that make CRLs.

    use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, KeyUsagePurpose, RevokedCertParams};
    use rustls::pki_types::CertificateDer;

    use super::*;
    use crate::base::clock::rfc3339;
    use crate::pki::key::{KeyType, SigningKey};
    use crate::secret::KeyPair;

    /// A CA that has its key.
    pub(crate) struct Authority {
        pub(crate) certificate: CertificateDer<'static>,
        params: CertificateParams,
        key: SigningKey,
    }

    impl Authority {
        /// One that signed itself.
        pub(crate) fn root(name: &str) -> Self {
            Self::new(name, None, |_| {})
        }

        /// One with a certificate of `above`, if there is one.
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

        /// A leaf with the chain up to here.
        pub(crate) fn key_pair(&self) -> KeyPair {
            let key = SigningKey::generate(KeyType::EcdsaP256).unwrap();
            let leaf = params("leaf").signed_by(&key, &self.issuer()).unwrap();
            KeyPair::new(vec![leaf.der().clone(), self.certificate.clone()], key.to_private_key()).unwrap()
        }

        /// A CRL in PEM, from and until these moments, that revokes serial numbers.
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

        /// The same in the old form, which says nothing of the key that signed it.
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
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use super::testing::Authority;
    use super::*;

    const FROM: SystemTime = UNIX_EPOCH;

    fn until() -> SystemTime {
        FROM + Duration::from_secs(3600)
    }

    #[test]
    fn several_in_one_file_with_comments_and_crlf() {
        let (one, two) = (Authority::root("one"), Authority::root("two"));
        let text = format!("# both\n{}text\n{}", one.crl(FROM, until(), &[7, 8]), two.old_crl(FROM, until()));
        let crls = from_pem(text.replace('\n', "\r\n").as_bytes()).unwrap();
        let [first, second] = crls.as_slice() else { panic!("{crls:?}") };
        assert!(first.issuer.contains("one") && second.issuer.contains("two"));
        assert_eq!((first.revoked, second.revoked), (2, 0));
        assert_eq!((first.this_update, first.next_update), (FROM, Some(until())));
        assert_eq!(second.next_update, Some(until()));
        assert_eq!(from_pem(&to_pem(&crls)).unwrap(), crls, "what is written is read back");
    }

    #[test]
    fn it_is_its_issuers_by_key_id_and_signature() {
        let (one, namesake) = (Authority::root("one"), Authority::root("one"));
        let facts = |ca: &Authority| Certificate::parse(&ca.certificate).unwrap();
        let crl = &from_pem(one.crl(FROM, until(), &[]).as_bytes()).unwrap()[0];
        let old = &from_pem(one.old_crl(FROM, until()).as_bytes()).unwrap()[0];
        for (ca, is_its) in [(facts(&one), true), (facts(&namesake), false)] {
            assert_eq!((crl.may_be_of(&ca), old.may_be_of(&ca)), (is_its, true), "the old form knows no key");
            assert_eq!((crl.is_signed_by(&ca), old.is_signed_by(&ca)), (is_its, is_its));
        }
    }

    #[test]
    fn what_gives_no_crls_is_named() {
        let good = Authority::root("one").crl(FROM, until(), &[]);
        let der = from_pem(good.as_bytes()).unwrap()[0].der().to_vec();
        assert_eq!(from_pem(b""), Err(NotCrls::NoCrl));
        assert_eq!(from_pem(&der), Err(NotCrls::Der));
        assert!(matches!(from_pem(&good.as_bytes()[..good.len() / 2]), Err(NotCrls::Damaged(_))));
        assert_eq!(from_pem(good.repeat(limits::CRLS + 1).as_bytes()), Err(NotCrls::TooMany));
        let behind = pem::encode("X509 CRL", &[der.as_slice(), &[0]].concat());
        let error = from_pem(&[good.as_bytes(), &behind].concat()).unwrap_err().to_string();
        assert_eq!(error, "CRL 2 of it can't be used: 1 bytes behind it");
    }

    #[test]
    fn a_list_of_none_is_not_junk() {
        for (text, is_blank) in
            [("", true), ("\n \t\r\n", true), ("# none\n\n  # yet", true), ("none", false)]
        {
            assert_eq!(super::is_blank(text.as_bytes()), is_blank, "{text:?}");
        }
    }

    #[test]
    fn a_partial_crl_is_refused() {
        let ca = Authority::root("one");
        let part = rcgen::CertificateRevocationListParams {
            this_update: FROM.into(),
            next_update: until().into(),
            crl_number: 1.into(),
            issuing_distribution_point: Some(rcgen::CrlIssuingDistributionPoint {
                distribution_point: rcgen::CrlDistributionPoint { uris: vec!["http://ca/crl".to_owned()] },
                scope: None,
            }),
            revoked_certs: Vec::new(),
            key_identifier_method: rcgen::KeyIdMethod::Sha256,
        };
        let part = part.signed_by(&ca.issuer()).unwrap();
        let error = from_pem(&pem::encode("X509 CRL", part.der())).unwrap_err();
        assert!(error.to_string().contains("not complete"), "{error}");
    }
}
