//! A private key with its certificate chain.

use std::fmt;
use std::time::SystemTime;

use rustls::pki_types::CertificateDer;

use crate::base::spiffe_id::SpiffeId;
use crate::pki::certificate::{Certificate, NotACertificate};
use crate::pki::key::{NotAKey, PrivateKey};

/// A private key and the chain that speaks for it: leaf first, each followed by its issuer, without roots, without
/// duplicates.
pub struct KeyPair {
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKey,
    leaf: Certificate,
    not_after: SystemTime,
}

/// Why a chain and a key are not a key pair.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotAKeyPair {
    /// A chain without certificates.
    #[error("the chain is empty")]
    Empty,
    /// One of the chain's certificates.
    #[error(transparent)]
    Certificate(#[from] NotACertificate),
    /// The key can't be used.
    #[error("the key: {0}")]
    Key(#[from] NotAKey),
    /// Another key's certificate.
    #[error("the private key does not fit the certificate of {leaf} (serial {serial})")]
    Foreign {
        /// The names of the chain's first certificate.
        leaf: String,
        /// Its serial number.
        serial: String,
    },
    /// The leaf is there, but not where it must be.
    #[error(
        "the private key fits certificate {position} of the chain, not the first: the leaf must come first"
    )]
    NotFirst {
        /// Where it is, from 1.
        position: usize,
    },
}

impl KeyPair {
    /// Puts a key and its chain (leaf first) together. Roots and duplicates behind the leaf are left out, and what is
    /// left is put in order: each certificate before its issuer. Those that issued none of the others come last.
    pub fn new(chain: Vec<CertificateDer<'static>>, key: PrivateKey) -> Result<Self, NotAKeyPair> {
        let parse = |der: CertificateDer<'static>| Certificate::parse(&der).map(|facts| (der, facts));
        let mut chain = chain.into_iter().map(parse).collect::<Result<Vec<_>, _>>()?;
        if chain.is_empty() {
            return Err(NotAKeyPair::Empty);
        }
        let public_key = key.public_key()?;
        let fits = |(_, facts): &(_, Certificate)| facts.public_key == public_key;
        let (first, leaf) = match chain.iter().position(fits) {
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
        chain.retain(|(_, facts)| !facts.is_self_issued);
        while !chain.is_empty() {
            let next = chain.iter().position(|(_, facts)| facts.subject == issuer).unwrap_or_default();
            let (der, facts) = chain.remove(next);
            if !sorted.contains(&der) {
                not_after = not_after.min(facts.not_after);
                issuer = facts.issuer;
                sorted.push(der);
            }
        }
        Ok(Self { chain: sorted, key, leaf, not_after })
    }

    /// The certificates, leaf first.
    pub fn chain(&self) -> &[CertificateDer<'static>] {
        &self.chain
    }

    /// The private key.
    pub fn key(&self) -> &PrivateKey {
        &self.key
    }

    /// What the leaf says.
    pub fn leaf(&self) -> &Certificate {
        &self.leaf
    }

    /// The leaf's SPIFFE ID, where it has one.
    pub fn spiffe_id(&self) -> Option<SpiffeId> {
        self.leaf.spiffe_id()
    }

    /// The first moment at which a certificate of the chain is no longer valid.
    pub fn not_after(&self) -> SystemTime {
        self.not_after
    }
}

impl fmt::Debug for KeyPair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KeyPair({}, serial {}, key hidden)", self.leaf.names(), self.leaf.serial)
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
    fn a_chain_is_put_in_order_without_roots_and_duplicates() {
        let root = CertifiedIssuer::self_signed(params("root", true), key()).unwrap();
        let upper = CertifiedIssuer::signed_by(params("upper", true), key(), &root).unwrap();
        let lower = CertifiedIssuer::signed_by(params("lower", true), key(), &upper).unwrap();
        let stranger = CertifiedIssuer::signed_by(params("stranger", true), key(), &root).unwrap();
        let leaf_key = key();
        let leaf = params("leaf", false).signed_by(&leaf_key, &lower).unwrap().der().clone();
        let [root, upper, lower, stranger] =
            [&root, &upper, &lower, &stranger].map(|issuer| issuer.as_ref().der().clone());
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
        let with_stranger = pair(&[&leaf, &stranger, &upper, &lower]).unwrap();
        assert_eq!(with_stranger.chain(), [&sorted[..], &[stranger]].concat());

        let error = pair(&[&lower, &upper, &leaf]).unwrap_err();
        assert_eq!(error, NotAKeyPair::NotFirst { position: 3 });
        assert!(matches!(pair(&[&lower, &upper]), Err(NotAKeyPair::Foreign { .. })));
        assert_eq!(pair(&[]).unwrap_err(), NotAKeyPair::Empty);
    }
}
