//! Key pairs encoded as the SPIFFE Workload API sends them: once, for all streams.

use std::fmt;

use bytes::Bytes;
use prost::Message as _;
use rustls::pki_types::CertificateDer;
use zeroize::Zeroizing;

use super::{KeyPair, Version};
use crate::base::spiffe_id::SpiffeId;
use crate::proto::X509svid;

/// A key pair with a SPIFFE ID, encoded as an `X509SVID` message without its bundle. Clones share the bytes, which are wiped
/// when the last clone is dropped.
#[derive(Clone)]
pub struct Svid {
    pub id: SpiffeId,
    /// Of the bytes.
    pub version: Version,
    bytes: Bytes,
}

/// Why a key pair is not an X.509-SVID.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotAnSvid {
    #[error("the certificate has no SPIFFE ID, or further URI names")]
    NoSpiffeId,
    #[error("its private key can't be written as PKCS#8")]
    Key,
}

impl Svid {
    pub(super) fn encode(pair: &KeyPair) -> Result<Self, NotAnSvid> {
        let id = pair.spiffe_id().ok_or(NotAnSvid::NoSpiffeId)?;
        let key = pair.key().to_pkcs8().ok_or(NotAnSvid::Key)?;
        let message = X509svid {
            spiffe_id: id.to_string(),
            x509_svid: pair.chain().iter().map(CertificateDer::as_ref).collect::<Vec<_>>().concat().into(),
            x509_svid_key: Bytes::from_owner(key),
            bundle: Bytes::new(),
            hint: String::new(),
        };
        // Allocated once at its full size, so no part of the key is left behind.
        let bytes = Bytes::from_owner(Zeroizing::new(message.encode_to_vec()));
        Ok(Self { id, version: Version::of(&bytes), bytes })
    }

    pub fn bytes(&self) -> &Bytes {
        &self.bytes
    }
}

/// The bytes hold a private key.
impl fmt::Debug for Svid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Svid({}, key hidden)", self.id)
    }
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, CertifiedIssuer, PublicKeyData as _, SanType};

    use super::*;
    use crate::pki::key::{KeyFormat, KeyType, SigningKey};

    fn pair(uris: &[&str], key_type: KeyType, format: KeyFormat) -> KeyPair {
        let root = SigningKey::generate(KeyType::EcdsaP256).unwrap();
        let root = CertifiedIssuer::self_signed(CertificateParams::default(), root).unwrap();
        let key = SigningKey::generate(key_type).unwrap();
        let mut params = CertificateParams::default();
        params.subject_alt_names = uris.iter().map(|uri| SanType::URI((*uri).try_into().unwrap())).collect();
        let leaf = params.signed_by(&key, &root).unwrap().der().clone();
        KeyPair::new(vec![leaf], key.to_private_key().in_format(format).unwrap()).unwrap()
    }

    #[test]
    fn a_key_of_any_format_goes_out_as_pkcs8_with_its_chain() {
        for key_type in [KeyType::EcdsaP256, KeyType::EcdsaP384, KeyType::Rsa2048] {
            for format in [KeyFormat::Pkcs8, KeyFormat::Traditional] {
                let pair = pair(&["spiffe://td/web"], key_type, format);
                let svid = pair.svid().unwrap();
                let message = X509svid::decode(svid.bytes().clone()).unwrap();
                assert_eq!(
                    (message.spiffe_id.as_str(), svid.id.as_str()),
                    ("spiffe://td/web", "spiffe://td/web")
                );
                assert_eq!(message.x509_svid, pair.chain()[0].as_ref());
                let key = SigningKey::from_pkcs8(&message.x509_svid_key[..].into()).unwrap();
                assert_eq!(key.subject_public_key_info(), pair.key().public_key().unwrap());
            }
        }
    }

    #[test]
    fn a_certificate_without_one_spiffe_id_is_no_svid() {
        for uris in [&[][..], &["https://td/web"], &["spiffe://td/web", "spiffe://td/other"]] {
            let pair = pair(uris, KeyType::EcdsaP256, KeyFormat::Pkcs8);
            assert_eq!(pair.svid().unwrap_err(), NotAnSvid::NoSpiffeId, "{uris:?}");
        }
    }

    #[test]
    fn no_debug_shows_the_key() {
        let pair = pair(&["spiffe://td/web"], KeyType::EcdsaP256, KeyFormat::Pkcs8);
        let svid = pair.svid().unwrap();
        let message = X509svid::decode(svid.bytes().clone()).unwrap();
        assert_eq!(format!("{svid:?}"), "Svid(spiffe://td/web, key hidden)");
        assert_eq!(format!("{message:?}"), "X509svid(spiffe://td/web, key hidden)");
    }
}
