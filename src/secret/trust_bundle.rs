//! The roots that peers are checked against, with their CRLs.

use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use rustls::pki_types::{CertificateDer, TrustAnchor, UnixTime};
use webpki::{EndEntityCert, KeyUsage};

use super::{KeyPair, Payload, Revocation, Uncovered};
use crate::base::text;
use crate::pki::certificate::{Certificate, NotACertificate, is_self_issued};
use crate::pki::crl::Crl;

/// Roots, never empty and without duplicates, and CRLs that cover them. Clones share both.
#[derive(Clone)]
pub struct TrustBundle {
    roots: Arc<Roots>,
    crls: Vec<Arc<Crl>>,
    not_after: SystemTime,
}

/// Shared by the bundles that differ only in their CRLs.
struct Roots {
    ders: Vec<CertificateDer<'static>>,
    /// The parsed roots, filled at the first use: few bundles need them.
    facts: OnceLock<Vec<Certificate>>,
    /// Filled at the first use: only CRLs need it.
    self_issued: OnceLock<Vec<bool>>,
    /// Encoded without CRLs, once for all names that serve them.
    payload: OnceLock<Payload>,
    /// The roots one after the other, filled at the first use: only the Workload API needs it.
    joined: OnceLock<Bytes>,
}

/// Why certificates are not a trust bundle.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotATrustBundle {
    #[error("it holds no root certificate")]
    Empty,
    #[error(transparent)]
    Certificate(#[from] NotACertificate),
}

impl TrustBundle {
    /// A bundle of `roots`. They are sorted, so that their order makes no difference.
    pub fn new(roots: Vec<CertificateDer<'static>>) -> Result<Self, NotATrustBundle> {
        Self::of(roots, None)
    }

    /// A bundle of `roots`: `before`, with what is known about it, if that has the same.
    pub fn of(
        mut roots: Vec<CertificateDer<'static>>,
        before: Option<&Self>,
    ) -> Result<Self, NotATrustBundle> {
        roots.sort_unstable_by(|a, b| a.as_ref().cmp(b.as_ref()));
        roots.dedup();
        if let Some(before) = before.filter(|before| before.roots() == roots) {
            return Ok(before.clone());
        }
        let mut not_after = None;
        for root in &roots {
            not_after = not_after.max(Some(Certificate::parse(root)?.not_after));
        }
        let not_after = not_after.ok_or(NotATrustBundle::Empty)?;
        let roots = Arc::new(Roots {
            ders: roots,
            facts: OnceLock::new(),
            self_issued: OnceLock::new(),
            payload: OnceLock::new(),
            joined: OnceLock::new(),
        });
        Ok(Self { roots, crls: Vec::new(), not_after })
    }

    /// Encoded by `encode`: at the first call, as long as there are no CRLs.
    pub(super) fn payload(&self, encode: impl FnOnce() -> Payload) -> Payload {
        match self.crls.as_slice() {
            [] => self.roots.payload.get_or_init(encode).clone(),
            _ => encode(),
        }
    }

    pub fn roots(&self) -> &[CertificateDer<'static>] {
        &self.roots.ders
    }

    /// The roots one after the other, as the Workload API sends them. All callers share the bytes.
    pub fn joined(&self) -> Bytes {
        let join = || self.roots().iter().map(AsRef::as_ref).collect::<Vec<&[u8]>>().concat().into();
        self.roots.joined.get_or_init(join).clone()
    }

    /// The parsed roots, in the same order.
    pub fn facts(&self) -> &[Certificate] {
        let parse = || self.roots().iter().filter_map(|root| Certificate::parse(root).ok()).collect();
        self.roots.facts.get_or_init(parse)
    }

    /// Whether each root is its own issuer, in the same order. An anchor need not be.
    pub fn self_issued(&self) -> &[bool] {
        let check = || self.roots().iter().map(|root| is_self_issued(root) == Ok(true)).collect();
        self.roots.self_issued.get_or_init(check)
    }

    /// A usable CRL of every issuer in use, or none at all.
    pub fn crls(&self) -> &[Arc<Crl>] {
        &self.crls
    }

    /// The same roots with the CRLs of `revocation` that are usable at `now`, instead of the present ones. Also returns the
    /// number of CRLs, or why there are none.
    pub fn with_revocation(
        &self,
        revocation: &Revocation,
        now: SystemTime,
    ) -> (Self, Result<usize, Uncovered>) {
        let covered = if revocation.is_empty() { Ok(Vec::new()) } else { revocation.cover(self, now) };
        let (crls, covered) = match covered {
            Ok(crls) => (crls.clone(), Ok(crls.len())),
            Err(gaps) => (Vec::new(), Err(gaps)),
        };
        (Self { roots: Arc::clone(&self.roots), crls, not_after: self.not_after }, covered)
    }

    /// When the last root expires.
    pub fn not_after(&self) -> SystemTime {
        self.not_after
    }

    /// Checks that `pair`'s leaf reaches one of the roots at `now`.
    pub fn verify(&self, pair: &KeyPair, now: SystemTime) -> Result<(), Unchained> {
        let unchained = |error: webpki::Error| Unchained {
            issuer: pair.leaf().issuer.clone(),
            roots: self.subjects(),
            reason: explain(&error),
        };
        let anchors = self
            .roots()
            .iter()
            .map(webpki::anchor_from_trusted_cert)
            .collect::<Result<Vec<TrustAnchor<'_>>, _>>()
            .map_err(unchained)?;
        let (leaf, intermediates) =
            pair.chain().split_first().ok_or_else(|| unchained(webpki::Error::BadDer))?;
        let leaf = EndEntityCert::try_from(leaf).map_err(unchained)?;
        let since_epoch = now.duration_since(UNIX_EPOCH).unwrap_or_default();
        let verify = |usage| {
            let time = UnixTime::since_unix_epoch(since_epoch);
            let algorithms = webpki::ALL_VERIFICATION_ALGS;
            leaf.verify_for_usage(algorithms, &anchors, intermediates, time, usage, None, None).map(drop)
        };
        // A workload is client and server; a certificate for only one of them is unusual, but usable.
        verify(KeyUsage::client_auth()).or_else(|_| verify(KeyUsage::server_auth())).map_err(unchained)
    }

    fn subjects(&self) -> String {
        text::listed(self.facts().iter().map(|root| &root.subject), "; ")
    }
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the certificate, issued by {issuer}, does not chain to a root that came with it ({roots}): {reason}"
)]
pub struct Unchained {
    issuer: String,
    roots: String,
    reason: String,
}

/// Describes the usual errors; webpki has only names for them.
fn explain(error: &webpki::Error) -> String {
    match error {
        webpki::Error::UnknownIssuer => "there is no path from one to the other".to_owned(),
        webpki::Error::InvalidSignatureForPublicKey => {
            "a CA has the issuer's name, but another key".to_owned()
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
