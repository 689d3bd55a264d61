//! The two formats of a written private key: PKCS#8 and the traditional one.

use std::str::FromStr;

use aws_lc_rs::encoding::{AsDer as _, EcPrivateKeyRfc5915Der, Pkcs8V1Der};
use aws_lc_rs::rsa;
use aws_lc_rs::signature::{
    ECDSA_P256_SHA256_ASN1_SIGNING, ECDSA_P384_SHA384_ASN1_SIGNING, ECDSA_P521_SHA512_ASN1_SIGNING,
    EcdsaKeyPair, EcdsaSigningAlgorithm,
};
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs1KeyDer, PrivateSec1KeyDer};
use x509_parser::asn1_rs::{Any, FromDer as _};
use zeroize::Zeroizing;

use super::PrivateKey;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum KeyFormat {
    /// PKCS#8, labelled `PRIVATE KEY` for every algorithm.
    #[default]
    Pkcs8,
    /// SEC1 or PKCS#1, labelled `EC PRIVATE KEY` or `RSA PRIVATE KEY`. Not available for Ed25519.
    Traditional,
}

impl FromStr for KeyFormat {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "pkcs8" => Ok(Self::Pkcs8),
            "traditional" => Ok(Self::Traditional),
            _ => Err(format!("{text:?} is not a key format; choose pkcs8 or traditional")),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("only RSA, ECDSA P-256 and P-384 keys have a traditional form: choose --key-format pkcs8")]
pub struct NoTraditionalForm;

impl PrivateKey {
    /// The same key in `format`. A key that is already in the traditional format stays in it.
    pub fn in_format(self, format: KeyFormat) -> Result<Self, NoTraditionalForm> {
        match &self.0 {
            PrivateKeyDer::Pkcs8(key) if format == KeyFormat::Traditional => {
                let pkcs8 = key.secret_pkcs8_der();
                let sec1 = |algorithm| sec1(algorithm, pkcs8);
                let traditional = sec1(&ECDSA_P256_SHA256_ASN1_SIGNING)
                    .or_else(|| sec1(&ECDSA_P384_SHA384_ASN1_SIGNING))
                    .or_else(|| pkcs1(pkcs8));
                traditional.map(Self).ok_or(NoTraditionalForm)
            }
            _ => Ok(self),
        }
    }

    /// The key as PKCS#8; none for kinds of keys that can't be converted.
    pub fn to_pkcs8(&self) -> Option<Zeroizing<Vec<u8>>> {
        let ec = |algorithm, sec1| {
            let key = EcdsaKeyPair::from_private_key_der(algorithm, sec1).ok()?;
            Some(Zeroizing::new(key.to_pkcs8v1().ok()?.as_ref().to_vec()))
        };
        match &self.0 {
            PrivateKeyDer::Pkcs8(key) => Some(Zeroizing::new(key.secret_pkcs8_der().to_vec())),
            PrivateKeyDer::Sec1(key) => {
                let curves = [
                    &ECDSA_P256_SHA256_ASN1_SIGNING,
                    &ECDSA_P384_SHA384_ASN1_SIGNING,
                    &ECDSA_P521_SHA512_ASN1_SIGNING,
                ];
                curves.into_iter().find_map(|curve| ec(curve, key.secret_sec1_der()))
            }
            PrivateKeyDer::Pkcs1(key) => {
                let key = rsa::KeyPair::from_der(key.secret_pkcs1_der()).ok()?;
                let pkcs8: Pkcs8V1Der<'_> = key.as_der().ok()?;
                Some(Zeroizing::new(pkcs8.as_ref().to_vec()))
            }
            _ => None,
        }
    }
}

/// Includes the curve's name, which OpenSSL requires. In PKCS#8 the name is outside of the key.
fn sec1(algorithm: &'static EcdsaSigningAlgorithm, pkcs8: &[u8]) -> Option<PrivateKeyDer<'static>> {
    let key = EcdsaKeyPair::from_pkcs8(algorithm, pkcs8).ok()?;
    let der: EcPrivateKeyRfc5915Der<'_> = key.private_key().as_der().ok()?;
    Some(PrivateSec1KeyDer::from(der.as_ref().to_vec()).into())
}

/// The key inside of PKCS#8, if it is RSA.
fn pkcs1(pkcs8: &[u8]) -> Option<PrivateKeyDer<'static>> {
    const RSA_ENCRYPTION: &[u8] = &[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 1, 1, 1];
    fn split(der: &[u8]) -> Option<(&[u8], &[u8])> {
        let (rest, value) = Any::from_der(der).ok()?;
        Some((value.data, rest))
    }
    let (_version, rest) = split(split(pkcs8)?.0)?;
    let (algorithm, rest) = split(rest)?;
    let (key, _) = split(rest)?;
    (split(algorithm)?.0 == RSA_ENCRYPTION).then(|| PrivatePkcs1KeyDer::from(key.to_vec()).into())
}

#[cfg(test)]
mod tests {
    use rcgen::PublicKeyData as _;

    use super::*;
    use crate::pki::key::{KeyType, SigningKey};

    #[test]
    fn each_format_has_its_label_and_holds_the_same_key() {
        for (name, key_type) in KeyType::ALL.into_iter().filter(|(name, _)| *name != "rsa-4096") {
            let key = SigningKey::generate(key_type).unwrap();
            let traditional = match key_type {
                KeyType::Ed25519 => None,
                _ if key_type.is_rsa() => Some("RSA PRIVATE KEY"),
                _ => Some("EC PRIVATE KEY"),
            };
            let forms = [(KeyFormat::Pkcs8, Some("PRIVATE KEY")), (KeyFormat::Traditional, traditional)];
            for (format, label) in forms {
                let written = key.to_private_key().in_format(format);
                let Some(label) = label else {
                    assert_eq!(written.unwrap_err(), NoTraditionalForm);
                    continue;
                };
                let pem = written.unwrap().to_pem();
                assert!(pem.starts_with(format!("-----BEGIN {label}-----\n").as_bytes()), "{name}: {label}");
                let read = PrivateKey::from_pem(&pem).unwrap();
                assert_eq!(read.public_key().unwrap(), key.subject_public_key_info(), "{name}: {label}");
                let pkcs8 = SigningKey::from_pkcs8(&read.to_pkcs8().unwrap()[..].into()).unwrap();
                assert_eq!(pkcs8.subject_public_key_info(), key.subject_public_key_info(), "{name}: {label}");
                // Converting again changes nothing.
                assert_eq!(read.in_format(format).unwrap().to_pem(), pem, "{name}: {label}");
            }
        }
    }

    #[test]
    fn the_error_for_an_unknown_format_lists_the_known_ones() {
        let error = "pkcs1".parse::<KeyFormat>().unwrap_err();
        assert!(error.contains("pkcs1") && error.contains("pkcs8 or traditional"), "{error}");
    }
}
