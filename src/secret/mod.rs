//! Secrets: checked when they are made, so that whoever holds one can serve it.

mod name;
mod revocation;
mod wire;

use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::{SystemTime, UNIX_EPOCH};

use rustls::pki_types::{CertificateDer, TrustAnchor, UnixTime};
use webpki::{EndEntityCert, KeyUsage};

pub use self::name::{BadName, NameKind, PairName, RootsName, SecretName};
pub use self::revocation::{Gap, Revocation, Uncovered};
pub use self::wire::{Resource, Version};
use crate::base::limits;
use crate::base::spiffe_id::SpiffeId;
use crate::pki::certificate::{Certificate, NotACertificate};
use crate::pki::crl::Crl;
use crate::pki::key::{NotAKey, PrivateKey};

/// What a resource name stands for.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "it always lives behind an Arc, made once for each renewal")]
pub enum Secret {
    /// A private key and its certificate chain.
    KeyPair(KeyPair),
    /// The roots that peers are checked against.
    TrustBundle(TrustBundle),
}

impl Secret {
    /// When it ceases to be of use.
    pub fn not_after(&self) -> SystemTime {
        match self {
            Self::KeyPair(pair) => pair.not_after(),
            Self::TrustBundle(bundle) => bundle.not_after(),
        }
    }

    /// The same with the CRLs of `revocation` that are of use at `now`, where it is a trust bundle.
    pub fn with_revocation(self, revocation: &Revocation, now: SystemTime) -> Self {
        match self {
            Self::KeyPair(_) => self,
            Self::TrustBundle(bundle) => Self::TrustBundle(bundle.with_revocation(revocation, now).0),
        }
    }
}

impl fmt::Display for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::KeyPair(pair) => {
                write!(f, "key pair of {}, serial {}", pair.leaf.names(), pair.leaf.serial)
            }
            Self::TrustBundle(bundle) => write!(f, "trust bundle of {} root(s)", bundle.roots().len()),
        }
    }
}

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

/// The roots that peers' certificates are checked against, never empty and without duplicates, and CRLs that fit them.
pub struct TrustBundle {
    roots: Arc<Roots>,
    crls: Vec<Arc<Crl>>,
    not_after: SystemTime,
}

/// Shared by the bundles that differ in CRLs alone.
struct Roots {
    ders: Vec<CertificateDer<'static>>,
    /// What they say. Few bundles are asked for it, and only these keep it.
    facts: OnceLock<Vec<Certificate>>,
}

/// Why certificates are not a trust bundle.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotATrustBundle {
    /// No roots.
    #[error("there is no root certificate in it")]
    Empty,
    /// One of the roots.
    #[error(transparent)]
    Certificate(#[from] NotACertificate),
}

impl TrustBundle {
    /// A bundle of `roots`. Sorted, so that the same roots in another order are the same bundle.
    pub fn new(mut roots: Vec<CertificateDer<'static>>) -> Result<Self, NotATrustBundle> {
        roots.sort_unstable_by(|a, b| a.as_ref().cmp(b.as_ref()));
        roots.dedup();
        let mut not_after = None;
        for root in &roots {
            not_after = not_after.max(Some(Certificate::parse(root)?.not_after));
        }
        let not_after = not_after.ok_or(NotATrustBundle::Empty)?;
        let roots = Arc::new(Roots { ders: roots, facts: OnceLock::new() });
        Ok(Self { roots, crls: Vec::new(), not_after })
    }

    /// The roots.
    pub fn roots(&self) -> &[CertificateDer<'static>] {
        &self.roots.ders
    }

    /// What the roots say, in the same order.
    pub fn facts(&self) -> &[Certificate] {
        let parse = || self.roots().iter().filter_map(|root| Certificate::parse(root).ok()).collect();
        self.roots.facts.get_or_init(parse)
    }

    /// The CRLs: a usable one of every issuer in use, or none at all.
    pub fn crls(&self) -> &[Arc<Crl>] {
        &self.crls
    }

    /// The same roots with the CRLs of `revocation` that are of use at `now`, instead of those that it has; how many
    /// these are, or what keeps them out.
    pub fn with_revocation(
        &self,
        revocation: &Revocation,
        now: SystemTime,
    ) -> (Self, Result<usize, Uncovered>) {
        let covered =
            if revocation.is_empty() { Ok(Vec::new()) } else { revocation.cover(self.facts(), now) };
        let (crls, covered) = match covered {
            Ok(crls) => (crls.clone(), Ok(crls.len())),
            Err(gaps) => (Vec::new(), Err(gaps)),
        };
        (Self { roots: Arc::clone(&self.roots), crls, not_after: self.not_after }, covered)
    }

    /// When the last of the roots ends.
    pub fn not_after(&self) -> SystemTime {
        self.not_after
    }

    /// Checks that `pair`'s leaf reaches one of the roots at `now`.
    pub fn verify(&self, pair: &KeyPair, now: SystemTime) -> Result<(), Unchained> {
        let unchained = |error: webpki::Error| Unchained {
            issuer: pair.leaf.issuer.clone(),
            roots: self.subjects(),
            reason: in_words(&error),
        };
        let anchors = self
            .roots()
            .iter()
            .map(webpki::anchor_from_trusted_cert)
            .collect::<Result<Vec<TrustAnchor<'_>>, _>>()
            .map_err(unchained)?;
        let (leaf, intermediates) =
            pair.chain.split_first().ok_or_else(|| unchained(webpki::Error::BadDer))?;
        let leaf = EndEntityCert::try_from(leaf).map_err(unchained)?;
        let since_epoch = now.duration_since(UNIX_EPOCH).unwrap_or_default();
        let verify = |usage| {
            let time = UnixTime::since_unix_epoch(since_epoch);
            let algorithms = webpki::ALL_VERIFICATION_ALGS;
            leaf.verify_for_usage(algorithms, &anchors, intermediates, time, usage, None, None).map(drop)
        };
        // A workload is client and server; a certificate that is only one of them is odd, but usable.
        verify(KeyUsage::client_auth()).or_else(|_| verify(KeyUsage::server_auth())).map_err(unchained)
    }

    fn subjects(&self) -> String {
        limits::listed(self.facts().iter().map(|root| &root.subject), "; ")
    }
}

/// A leaf that reaches none of the roots.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the certificate, issued by {issuer}, does not chain to a root that came with it ({roots}): {reason}"
)]
pub struct Unchained {
    issuer: String,
    roots: String,
    reason: String,
}

/// What the usual outcomes of a check mean; webpki has names for them.
fn in_words(error: &webpki::Error) -> String {
    match error {
        webpki::Error::UnknownIssuer => "no way leads from one to the other".to_owned(),
        webpki::Error::InvalidSignatureForPublicKey => {
            "there is a CA of the issuer's name, but with another key".to_owned()
        }
        webpki::Error::CertExpired { .. } => "a CA certificate between them has expired".to_owned(),
        other => other.to_string(),
    }
}

impl fmt::Debug for TrustBundle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TrustBundle({} roots, {} CRLs)", self.roots().len(), self.crls.len())
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
