//! Private keys, generated or read from a file. They are wiped when dropped and never shown.

mod format;

use std::fmt;
use std::str::FromStr;

use aws_lc_rs::rand::SystemRandom;
use aws_lc_rs::signature::Ed25519KeyPair;
use rcgen::{PublicKeyData, SignatureAlgorithm};
use rustls::crypto::aws_lc_rs::sign::{any_ecdsa_type, any_supported_type};
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use zeroize::{Zeroize, Zeroizing};

pub use self::format::{KeyFormat, NoTraditionalForm};
use super::pem::{damage, encode, looks_like_der};

/// The algorithm and size of a new key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum KeyType {
    #[default]
    EcdsaP256,
    EcdsaP384,
    Rsa2048,
    Rsa3072,
    Rsa4096,
    Ed25519,
}

impl KeyType {
    /// Every key type with its `--key-type` name.
    pub const ALL: [(&'static str, Self); 6] = [
        ("ecdsa-p256", Self::EcdsaP256),
        ("ecdsa-p384", Self::EcdsaP384),
        ("rsa-2048", Self::Rsa2048),
        ("rsa-3072", Self::Rsa3072),
        ("rsa-4096", Self::Rsa4096),
        ("ed25519", Self::Ed25519),
    ];

    /// Its `--key-type` name.
    pub fn name(self) -> &'static str {
        Self::ALL.iter().find(|(_, key_type)| *key_type == self).map_or("unknown", |(name, _)| name)
    }

    /// Whether generating a key takes so long (50 ms or more) that the runtime's thread must not do it.
    pub fn is_slow(self) -> bool {
        self.is_rsa()
    }

    pub fn is_rsa(self) -> bool {
        matches!(self, Self::Rsa2048 | Self::Rsa3072 | Self::Rsa4096)
    }
}

impl FromStr for KeyType {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let found = Self::ALL.iter().find(|(name, _)| *name == text);
        found.map(|(_, key_type)| *key_type).ok_or_else(|| {
            let names: Vec<_> = Self::ALL.iter().map(|(name, _)| *name).collect();
            format!("{text:?} is not a key type; choose one of {}", names.join(", "))
        })
    }
}

/// A private key that can sign, usually a new one.
pub struct SigningKey(rcgen::KeyPair);

impl SigningKey {
    /// Takes about 20 µs, and 50 ms or more for RSA (see [`KeyType::is_slow`]).
    pub fn generate(key_type: KeyType) -> Result<Self, rcgen::Error> {
        use rcgen::RsaKeySize::{_2048, _3072, _4096};
        let rsa = |size| rcgen::KeyPair::generate_rsa_for(&rcgen::PKCS_RSA_SHA256, size);
        let pair = match key_type {
            KeyType::EcdsaP256 => rcgen::KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256),
            KeyType::EcdsaP384 => rcgen::KeyPair::generate_for(&rcgen::PKCS_ECDSA_P384_SHA384),
            KeyType::Ed25519 => return Self::ed25519(),
            KeyType::Rsa2048 => rsa(_2048),
            KeyType::Rsa3072 => rsa(_3072),
            KeyType::Rsa4096 => rsa(_4096),
        };
        pair.map(Self)
    }

    /// In version 1 of PKCS#8. rcgen generates version 2, which includes the public key and which neither Envoy nor OpenSSL
    /// reads.
    fn ed25519() -> Result<Self, rcgen::Error> {
        let unspecified = |_| rcgen::Error::RingUnspecified;
        let pkcs8 = Ed25519KeyPair::generate_pkcs8v1(&SystemRandom::new()).map_err(unspecified)?;
        Self::from_pkcs8(&pkcs8.as_ref().into())
    }

    pub fn from_pkcs8(der: &PrivatePkcs8KeyDer<'_>) -> Result<Self, rcgen::Error> {
        rcgen::KeyPair::try_from(der).map(Self)
    }

    /// The same key in the form in which it is published.
    pub fn to_private_key(&self) -> PrivateKey {
        PrivateKey(PrivateKeyDer::Pkcs8(self.0.serialized_der().to_vec().into()))
    }
}

impl Drop for SigningKey {
    fn drop(&mut self) {
        self.0.zeroize();
    }
}

impl fmt::Debug for SigningKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SigningKey(hidden)")
    }
}

impl PublicKeyData for SigningKey {
    fn der_bytes(&self) -> &[u8] {
        self.0.der_bytes()
    }

    fn algorithm(&self) -> &'static SignatureAlgorithm {
        self.0.algorithm()
    }
}

impl rcgen::SigningKey for SigningKey {
    fn sign(&self, message: &[u8]) -> Result<Vec<u8>, rcgen::Error> {
        rcgen::SigningKey::sign(&self.0, message)
    }
}

/// A private key as bytes: PKCS#8, PKCS#1 (RSA) or SEC1 (EC).
pub struct PrivateKey(PrivateKeyDer<'static>);

/// Why a text is not a usable private key.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotAKey {
    #[error("it holds no PEM private key (a \"-----BEGIN PRIVATE KEY-----\" block, or EC or RSA)")]
    NoKey,
    #[error("its private key is encrypted: store it without a password")]
    Encrypted,
    #[error("it is DER, not PEM: convert it with `openssl pkey -inform der -outform pem`")]
    Der,
    #[error("its PEM is damaged: {0}")]
    Damaged(&'static str),
    #[error("its private key can't be read: RSA, ECDSA and Ed25519 keys are supported")]
    Unknown,
}

impl PrivateKey {
    /// The first private key of `text`.
    pub fn from_pem(text: &[u8]) -> Result<Self, NotAKey> {
        let contains = |marker: &[u8]| text.windows(marker.len()).any(|window| window == marker);
        match PrivateKeyDer::from_pem_slice(text) {
            Ok(_) if contains(b"Proc-Type: 4,ENCRYPTED") => Err(NotAKey::Encrypted),
            Ok(key) => Ok(Self(key)),
            Err(_) if contains(b"BEGIN ENCRYPTED PRIVATE KEY") || contains(b"Proc-Type: 4,ENCRYPTED") => {
                Err(NotAKey::Encrypted)
            }
            Err(pem::Error::NoItemsFound) if looks_like_der(text) => Err(NotAKey::Der),
            Err(pem::Error::NoItemsFound) => Err(NotAKey::NoKey),
            Err(error) => Err(NotAKey::Damaged(damage(&error))),
        }
    }

    /// A key in PKCS#8, if it is one that can be used.
    pub fn from_pkcs8(der: &[u8]) -> Result<Self, NotAKey> {
        let key = Self(PrivateKeyDer::Pkcs8(der.to_vec().into()));
        key.public_key()?;
        Ok(key)
    }

    /// A PEM block in the format in which the key was read or generated.
    pub fn to_pem(&self) -> Zeroizing<Vec<u8>> {
        match &self.0 {
            PrivateKeyDer::Pkcs1(key) => encode("RSA PRIVATE KEY", key.secret_pkcs1_der()),
            PrivateKeyDer::Sec1(key) => encode("EC PRIVATE KEY", key.secret_sec1_der()),
            key => encode("PRIVATE KEY", key.secret_der()),
        }
    }

    pub fn der(&self) -> &PrivateKeyDer<'static> {
        &self.0
    }

    /// The public key as DER SubjectPublicKeyInfo, as in a certificate for this key.
    pub fn public_key(&self) -> Result<Vec<u8>, NotAKey> {
        // The general way tries RSA first, and checks an EC key twice.
        let key = if self.is_ec() { any_ecdsa_type(&self.0) } else { any_supported_type(&self.0) };
        let key = key.map_err(|_| NotAKey::Unknown)?;
        key.public_key().map(|spki| spki.to_vec()).ok_or(NotAKey::Unknown)
    }

    fn is_ec(&self) -> bool {
        /// The algorithm of EC keys in PKCS#8: id-ecPublicKey, in DER.
        const EC: &[u8] = &[0x06, 0x07, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x02, 0x01];
        match &self.0 {
            PrivateKeyDer::Sec1(_) => true,
            PrivateKeyDer::Pkcs8(key) => {
                let head = key.secret_pkcs8_der().get(..32).unwrap_or_default();
                head.windows(EC.len()).any(|window| window == EC)
            }
            _ => false,
        }
    }
}

impl Drop for PrivateKey {
    fn drop(&mut self) {
        self.0.zeroize();
    }
}

impl fmt::Debug for PrivateKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PrivateKey(hidden)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_type_can_be_generated_written_and_read_back() {
        for (name, key_type) in KeyType::ALL.into_iter().filter(|(name, _)| *name != "rsa-4096") {
            let key = SigningKey::generate(key_type).unwrap();
            let text = key.to_private_key().to_pem();
            let read = PrivateKey::from_pem(&text).unwrap();
            assert_eq!(read.public_key().unwrap(), key.subject_public_key_info(), "{name}");
        }
    }

    #[test]
    fn the_error_for_an_unknown_key_type_lists_the_known_ones() {
        let error = "rsa-1024".parse::<KeyType>().unwrap_err();
        assert!(error.contains("rsa-1024") && error.contains("ecdsa-p256, ecdsa-p384, rsa-2048"), "{error}");
    }

    #[test]
    fn the_error_says_why_a_text_is_not_a_key() {
        let cases: [(&[u8], NotAKey); 4] = [
            (b"", NotAKey::NoKey),
            (&[0x30, 0x82, 1, 1], NotAKey::Der),
            (
                b"-----BEGIN ENCRYPTED PRIVATE KEY-----\nAAAA\n-----END ENCRYPTED PRIVATE KEY-----\n",
                NotAKey::Encrypted,
            ),
            (
                b"-----BEGIN RSA PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\nDEK-Info: AES-256-CBC,00\n\nAAAA\n-----END RSA PRIVATE KEY-----\n",
                NotAKey::Encrypted,
            ),
        ];
        for (text, expected) in cases {
            assert_eq!(PrivateKey::from_pem(text).unwrap_err(), expected);
        }
        let junk = PrivateKey::from_pem(b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n");
        assert_eq!(junk.unwrap().public_key().unwrap_err(), NotAKey::Unknown);
    }

    #[test]
    fn no_debug_shows_a_key() {
        let key = SigningKey::generate(KeyType::default()).unwrap();
        assert_eq!(format!("{key:?} {:?}", key.to_private_key()), "SigningKey(hidden) PrivateKey(hidden)");
    }
}
