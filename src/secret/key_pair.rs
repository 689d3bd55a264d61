//! A private key with its certificate chain.

use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::SystemTime;

use rustls::pki_types::CertificateDer;

use super::{NotAnSvid, Payload, Svid};
use crate::base::spiffe_id::SpiffeId;
use crate::pki::certificate::{Certificate, NotACertificate, is_self_issued};
use crate::pki::key::{NotAKey, PrivateKey};
use crate::pki::ocsp::{NotAStaple, Staple};

/// A private key and its certificate chain: leaf first, each certificate followed by its issuer, without roots and
/// duplicates; perhaps with an OCSP response to staple. Clones share everything.
#[derive(Clone)]
pub struct KeyPair {
    parts: Arc<Parts>,
    stapled: Option<Arc<Stapled>>,
}

struct Stapled {
    staple: Staple,
    payload: OnceLock<Payload>,
}

struct Parts {
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKey,
    leaf: Certificate,
    /// Encoded once, for all names that serve it.
    payload: OnceLock<Payload>,
    /// Encoded for the Workload API at the first use: few key pairs need it.
    svid: OnceLock<Result<Box<Svid>, NotAnSvid>>,
    not_after: SystemTime,
}

/// Why a chain and a key are not a key pair.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotAKeyPair {
    #[error("the certificate chain is empty")]
    Empty,
    #[error(transparent)]
    Certificate(#[from] NotACertificate),
    #[error("private key: {0}")]
    Key(#[from] NotAKey),
    #[error(
        "the private key does not match the certificate of {leaf} (serial {serial}): the two are of different renewals; replace \
         both files together"
    )]
    Foreign {
        /// Names of the first certificate of the chain.
        leaf: String,
        /// Serial number of that certificate.
        serial: String,
    },
    #[error(
        "the private key matches certificate {position} of the chain, not the first: the leaf must come first"
    )]
    NotFirst {
        /// Counted from 1.
        position: usize,
    },
}

impl KeyPair {
    /// Combines a key with its chain (leaf first). Drops roots and duplicates after the leaf, and sorts the rest: each
    /// certificate before its issuer, and those that issued none of the others last.
    pub fn new(chain: Vec<CertificateDer<'static>>, key: PrivateKey) -> Result<Self, NotAKeyPair> {
        let parse = |der: CertificateDer<'static>| Certificate::parse(&der).map(|facts| (der, facts));
        let mut chain = chain.into_iter().map(parse).collect::<Result<Vec<_>, _>>()?;
        if chain.is_empty() {
            return Err(NotAKeyPair::Empty);
        }
        let public_key = key.public_key()?;
        let matches_key = |(_, facts): &(_, Certificate)| facts.public_key == public_key;
        let (first, leaf) = match chain.iter().position(matches_key) {
            Some(0) => chain.remove(0),
            Some(index) => return Err(NotAKeyPair::NotFirst { position: index + 1 }),
            None => {
                let (_, leaf) = chain.remove(0);
                return Err(NotAKeyPair::Foreign { leaf: leaf.names(), serial: leaf.serial });
            }
        };
        let mut not_after = leaf.not_after;
        let mut issuer = leaf.issuer.clone();
        let mut sorted = vec![first];
        chain.retain(|(der, _)| is_self_issued(der) != Ok(true));
        while !chain.is_empty() {
            let next = chain.iter().position(|(_, facts)| facts.subject == issuer).unwrap_or_default();
            let (der, facts) = chain.remove(next);
            if !sorted.contains(&der) {
                not_after = not_after.min(facts.not_after);
                issuer = facts.issuer;
                sorted.push(der);
            }
        }
        let parts =
            Parts { chain: sorted, key, leaf, payload: OnceLock::new(), svid: OnceLock::new(), not_after };
        Ok(Self { parts: Arc::new(parts), stapled: None })
    }

    /// The same key pair with an OCSP response for its leaf.
    pub fn with_staple(&self, staple: Staple) -> Result<Self, NotAStaple> {
        staple.check(self.leaf())?;
        let stapled = Stapled { staple, payload: OnceLock::new() };
        Ok(Self { parts: Arc::clone(&self.parts), stapled: Some(Arc::new(stapled)) })
    }

    /// The same key pair without its OCSP response.
    pub fn without_staple(&self) -> Self {
        Self { parts: Arc::clone(&self.parts), stapled: None }
    }

    pub fn staple(&self) -> Option<&Staple> {
        self.stapled.as_ref().map(|stapled| &stapled.staple)
    }

    /// Encoded by `encode` at the first call.
    pub(super) fn payload(&self, encode: impl FnOnce() -> Payload) -> Payload {
        let payload = self.stapled.as_ref().map_or(&self.parts.payload, |stapled| &stapled.payload);
        payload.get_or_init(encode).clone()
    }

    /// Leaf first.
    pub fn chain(&self) -> &[CertificateDer<'static>] {
        &self.parts.chain
    }

    pub fn key(&self) -> &PrivateKey {
        &self.parts.key
    }

    pub fn leaf(&self) -> &Certificate {
        &self.parts.leaf
    }

    /// The leaf's SPIFFE ID, if it has one.
    pub fn spiffe_id(&self) -> Option<SpiffeId> {
        self.parts.leaf.spiffe_id()
    }

    /// The key pair as the Workload API sends it, encoded at the first call.
    pub fn svid(&self) -> Result<&Svid, NotAnSvid> {
        let svid = self.parts.svid.get_or_init(|| Svid::encode(self).map(Box::new));
        svid.as_deref().map_err(|error| *error)
    }

    /// When the first certificate of the chain expires.
    pub fn not_after(&self) -> SystemTime {
        self.parts.not_after
    }
}

impl fmt::Debug for KeyPair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KeyPair({}, serial {}, key hidden)", self.leaf().names(), self.leaf().serial)
    }
}

#[cfg(test)]
impl crate::pki::crl::testing::Authority {
    /// The key pair of a new leaf.
    pub(crate) fn key_pair(&self) -> KeyPair {
        let (chain, key) = self.issue();
        KeyPair::new(chain, key).unwrap()
    }
}

#[cfg(test)]
mod tests {
    use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa};

    use super::*;
    use crate::pki::key::{KeyType, SigningKey};

    fn params(name: &str, is_ca: bool) -> CertificateParams {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(rcgen::DnType::CommonName, name);
        if is_ca {
            params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        }
        params
    }

    fn key() -> SigningKey {
        SigningKey::generate(KeyType::EcdsaP256).unwrap()
    }

    #[test]
    fn a_chain_is_sorted_without_roots_and_duplicates() {
        let root = CertifiedIssuer::self_signed(params("root", true), key()).unwrap();
        let upper = CertifiedIssuer::signed_by(params("upper", true), key(), &root).unwrap();
        let lower = CertifiedIssuer::signed_by(params("lower", true), key(), &upper).unwrap();
        let unrelated = CertifiedIssuer::signed_by(params("unrelated", true), key(), &root).unwrap();
        let leaf_key = key();
        let leaf = params("leaf", false).signed_by(&leaf_key, &lower).unwrap().der().clone();
        let [root, upper, lower, unrelated] =
            [&root, &upper, &lower, &unrelated].map(|issuer| issuer.as_ref().der().clone());
        let sorted = [&leaf, &lower, &upper].map(Clone::clone);

        let pair = |chain: &[&CertificateDer<'static>]| {
            let chain = chain.iter().map(|der| (*der).clone()).collect();
            KeyPair::new(chain, leaf_key.to_private_key())
        };
        for chain in [
            vec![&leaf, &lower, &upper],
            vec![&leaf, &lower, &upper, &root],
            vec![&leaf, &root, &upper, &lower, &upper, &leaf],
        ] {
            assert_eq!(pair(&chain).unwrap().chain(), sorted);
        }
        let with_unrelated = pair(&[&leaf, &unrelated, &upper, &lower]).unwrap();
        assert_eq!(with_unrelated.chain(), [&sorted[..], &[unrelated]].concat());

        let error = pair(&[&lower, &upper, &leaf]).unwrap_err();
        assert_eq!(error, NotAKeyPair::NotFirst { position: 3 });
        assert!(matches!(pair(&[&lower, &upper]), Err(NotAKeyPair::Foreign { .. })));
        assert_eq!(pair(&[]).unwrap_err(), NotAKeyPair::Empty);
    }
}
