//! A CA's response: parsed, checked, and turned into a key pair and a trust bundle.

use std::time::SystemTime;

use rustls::pki_types::CertificateDer;

use crate::base::clock::rfc3339;
use crate::base::offload;
use crate::base::spiffe_id::SpiffeId;
use crate::pki::certificate::{NotACertificate, is_self_issued};
use crate::pki::csr::Names;
use crate::pki::key::PrivateKey;
use crate::secret::{KeyPair, NotAKeyPair, NotATrustBundle, TrustBundle, Unchained};

/// The certificates in a CA's response, sorted but not yet checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IssuedChain {
    /// Leaf first, then intermediates.
    pub chain: Vec<CertificateDer<'static>>,
    /// Every root in the response.
    pub roots: Vec<CertificateDer<'static>>,
}

/// Why a CA's response is not published.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidResponse {
    #[error("the response holds no certificate")]
    Empty,
    #[error("the response can't be read: {0}")]
    Unreadable(String),
    #[error("the response holds {0} certificates, more than {max}", max = IssuedChain::LONGEST)]
    TooLong(usize),
    #[error(
        "the response names no root, so peers could not verify the certificate: the CA must send its root last"
    )]
    NoRoot,
    #[error("the response names no root above {issuer}, so peers could not verify the certificate: {remedy}")]
    NoRootAbove { issuer: String, remedy: &'static str },
    #[error(
        "the certificate is for another key than the one in the request (it names {names}): the CA, or a cache in \
         front of it, returned the response to another request"
    )]
    ForeignKey { names: String },
    #[error(
        "the certificate names {got}, not {asked}: either the CA knows this workload by another name \
         (pass it with --spiffe-id, or --trust-domain) or the token belongs to another workload"
    )]
    WrongIdentity { asked: SpiffeId, got: String },
    #[error(
        "the certificate names no SPIFFE ID (it names {names}): the CA must copy the URI name of the request into the certificate"
    )]
    NoIdentity { names: String },
    #[error(
        "the certificate lacks {missing} (it names {names}): the CA must allow what --dns-san and --common-name request"
    )]
    MissingNames { missing: String, names: String },
    #[error("the certificate expired at {at}: the CA's clock or this machine's clock is wrong")]
    Expired { at: String },
    #[error("the certificate is valid only from {from}: the CA's clock or this machine's clock is wrong")]
    NotYetValid { from: String },
    #[error(transparent)]
    Unchained(#[from] Unchained),
}

impl InvalidResponse {
    /// The label value in metrics.
    pub fn label(&self) -> &'static str {
        match self {
            Self::Empty | Self::Unreadable(_) | Self::TooLong(_) => "junk",
            Self::NoRoot | Self::NoRootAbove { .. } => "no_root",
            Self::ForeignKey { .. } => "foreign_key",
            Self::WrongIdentity { .. } | Self::NoIdentity { .. } => "wrong_identity",
            Self::MissingNames { .. } => "missing_names",
            Self::Expired { .. } => "expired",
            Self::NotYetValid { .. } => "not_yet_valid",
            Self::Unchained(_) => "unchained",
        }
    }
}

impl From<NotACertificate> for InvalidResponse {
    fn from(error: NotACertificate) -> Self {
        Self::Unreadable(error.to_string())
    }
}

impl IssuedChain {
    /// The maximum number of certificates in a response.
    pub const LONGEST: usize = 64;

    /// Sorts the groups of certificates in a response (Istio's: strings of PEM, leaf first, root last). Self-issued
    /// certificates are roots in any position. If there are none, the last group is taken as the roots, because "root
    /// last" is Istio's contract and a trust anchor need not be self-signed.
    pub fn from_groups(groups: Vec<Vec<CertificateDer<'static>>>) -> Result<Self, InvalidResponse> {
        let count = groups.iter().map(Vec::len).sum();
        if count > Self::LONGEST {
            return Err(InvalidResponse::TooLong(count));
        }
        let (mut chain, mut roots) = (Vec::new(), Vec::new());
        let last = groups.len().saturating_sub(1);
        for (index, group) in groups.into_iter().enumerate() {
            let mut own_roots = Vec::new();
            let mut others = Vec::new();
            for certificate in group {
                let is_root = is_self_issued(&certificate)?;
                // The very first certificate is the leaf, even if it is self-issued.
                let is_leaf = index == 0 && others.is_empty() && own_roots.is_empty();
                if is_root && !is_leaf { own_roots.push(certificate) } else { others.push(certificate) }
            }
            let is_anchor_group = index > 0 && index == last && own_roots.is_empty() && roots.is_empty();
            if is_anchor_group {
                roots.append(&mut others)
            } else {
                chain.append(&mut others)
            }
            roots.append(&mut own_roots);
        }
        Ok(Self { chain, roots })
    }

    /// A chain, and certificates from elsewhere: roots, and intermediates that complete the chain. Only self-issued ones
    /// of these are roots: Envoy refuses every chain that ends in another. Self-issued certificates in the chain are
    /// dropped, except the leaf.
    pub fn with_others(
        chain: Vec<CertificateDer<'static>>,
        others: Vec<CertificateDer<'static>>,
    ) -> Result<Self, InvalidResponse> {
        let count = chain.len() + others.len();
        if count > Self::LONGEST {
            return Err(InvalidResponse::TooLong(count));
        }
        let (mut kept, mut roots) = (Vec::new(), Vec::new());
        for certificate in chain {
            if kept.is_empty() || !is_self_issued(&certificate)? {
                kept.push(certificate);
            }
        }
        for certificate in others {
            if is_self_issued(&certificate)? { roots.push(certificate) } else { kept.push(certificate) }
        }
        Ok(Self { chain: kept, roots })
    }

    /// As [`from_groups`](Self::from_groups); many certificates are read on another thread.
    pub async fn read_groups(groups: Vec<Vec<CertificateDer<'static>>>) -> Result<Self, InvalidResponse> {
        let size = groups.iter().map(|group| bytes(group)).sum();
        offload::large(size, move || Self::from_groups(groups)).await
    }

    /// As [`with_others`](Self::with_others); many certificates are read on another thread.
    pub async fn read_with_others(
        chain: Vec<CertificateDer<'static>>,
        others: Vec<CertificateDer<'static>>,
    ) -> Result<Self, InvalidResponse> {
        offload::large(bytes(&chain) + bytes(&others), move || Self::with_others(chain, others)).await
    }

    /// Bytes of all certificates.
    pub fn bytes(&self) -> usize {
        bytes(&self.chain) + bytes(&self.roots)
    }

    /// Turns it into publishable secrets, if it parses, carries our key, names the requested identity and the requested names, is
    /// valid at `now`,
    /// and chains to a root of the same response.
    pub fn check(
        self,
        key: PrivateKey,
        identity: Option<&SpiffeId>,
        names: &Names,
        now: SystemTime,
    ) -> Result<(KeyPair, TrustBundle), InvalidResponse> {
        let bundle = TrustBundle::new(self.roots).map_err(|error| match error {
            NotATrustBundle::Empty => InvalidResponse::NoRoot,
            NotATrustBundle::Certificate(error) => error.into(),
        })?;
        let pair = KeyPair::new(self.chain, key).map_err(|error| match error {
            NotAKeyPair::Empty => InvalidResponse::Empty,
            NotAKeyPair::Foreign { leaf, .. } => InvalidResponse::ForeignKey { names: leaf },
            other => InvalidResponse::Unreadable(other.to_string()),
        })?;
        let leaf = pair.leaf();
        match (identity, leaf.spiffe_id()) {
            (_, None) => return Err(InvalidResponse::NoIdentity { names: leaf.names() }),
            (Some(asked), Some(got)) if *asked != got => {
                return Err(InvalidResponse::WrongIdentity { asked: asked.clone(), got: got.to_string() });
            }
            _ => {}
        }
        let missing = names.missing(leaf);
        if !missing.is_empty() {
            return Err(InvalidResponse::MissingNames { missing: missing.join(", "), names: leaf.names() });
        }
        check_time(&pair, now)?;
        bundle.verify(&pair, now)?;
        Ok((pair, bundle))
    }
}

fn bytes(certificates: &[CertificateDer<'_>]) -> usize {
    certificates.iter().map(|der| der.len()).sum()
}

/// Checks that the leaf is valid at `now`, and that no certificate of the served chain has expired.
fn check_time(pair: &KeyPair, now: SystemTime) -> Result<(), InvalidResponse> {
    let show = |moment| rfc3339(moment).to_string();
    if now < pair.leaf().not_before {
        return Err(InvalidResponse::NotYetValid { from: show(pair.leaf().not_before) });
    }
    if now >= pair.not_after() {
        return Err(InvalidResponse::Expired { at: show(pair.not_after()) });
    }
    Ok(())
}

#[cfg(test)]
mod tests;
