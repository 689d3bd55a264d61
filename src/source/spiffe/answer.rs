//! An answer of a Workload API: decoded, checked, and turned into secrets.

use std::sync::Arc;
use std::time::SystemTime;

use bytes::Bytes;
use prost::Message as _;

use super::Wanted;
use super::federation::Foreign;
use crate::base::limits;
use crate::base::spiffe_id::SpiffeId;
use crate::base::text;
use crate::ca::{InvalidResponse, IssuedChain};
use crate::pki::certificate::{NotACertificate, is_self_issued, split};
use crate::pki::crl::Crl;
use crate::pki::csr::Names;
use crate::pki::key::{KeyFormat, PrivateKey};
use crate::proto::{X509svid, X509svidResponse};
use crate::secret::{KeyPair, TrustBundle};

/// What an answer holds for the workload. All of it has passed every check.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) pair: KeyPair,
    /// Of the workload's own trust domain.
    pub(super) bundle: TrustBundle,
    /// An error costs the CRLs alone.
    pub(super) crls: Result<Vec<Arc<Crl>>, String>,
    pub(super) foreign: Foreign,
    /// The further identities, which are not served.
    pub(super) others: Vec<String>,
}

/// Why an answer is not published.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum InvalidAnswer {
    #[error("it is not an X509SVIDResponse")]
    NotAMessage,
    #[error("it holds no SVID")]
    Empty,
    #[error("{wanted} is not among its SVIDs ({found}); correct the option, or the registration entries")]
    NotAmong { wanted: String, found: String },
    #[error(
        "the SVID {id} is not in the trust domain {wanted}; correct --trust-domain, or the registration entries"
    )]
    WrongTrustDomain { id: String, wanted: String },
    #[error("{text:?} is not a SPIFFE ID")]
    NotASpiffeId { text: String },
    #[error("the SVID of {said} has a certificate that names {got}")]
    OtherLeaf { said: String, got: String },
    #[error("the SVID of {id} has a certificate that can't be read: {reason}")]
    Certificate { id: String, reason: String },
    #[error("the SVID of {id} has a bundle that can't be read: {reason}")]
    Bundle { id: String, reason: String },
    #[error("the SVID of {id} has a key that can't be used: {reason}")]
    Key { id: String, reason: String },
    #[error("the key of the SVID of {id} does not belong to its certificate")]
    ForeignKey { id: String },
    #[error("the SVID of {id} comes without a bundle, so peers could not be verified")]
    NoBundle { id: String },
    #[error("the SVID of {id}: {reason}")]
    Unusable { id: String, reason: InvalidResponse },
}

impl InvalidAnswer {
    /// The label value in metrics.
    pub(super) fn label(&self) -> &'static str {
        match self {
            Self::NotAMessage
            | Self::Empty
            | Self::Certificate { .. }
            | Self::Bundle { .. }
            | Self::Key { .. } => "junk",
            Self::NotAmong { .. }
            | Self::WrongTrustDomain { .. }
            | Self::NotASpiffeId { .. }
            | Self::OtherLeaf { .. } => "wrong_identity",
            Self::ForeignKey { .. } => "foreign_key",
            Self::NoBundle { .. } => "no_root",
            Self::Unusable { reason, .. } => reason.label(),
        }
    }
}

/// Reads an answer. It holds keys: none of them is kept but the one in the result.
pub(super) fn read(
    message: Bytes,
    wanted: &Wanted,
    format: KeyFormat,
    now: SystemTime,
) -> Result<Answer, InvalidAnswer> {
    let X509svidResponse { mut svids, crl, federated_bundles } =
        X509svidResponse::decode(message).map_err(|_| InvalidAnswer::NotAMessage)?;
    let index = chosen(&svids, wanted)?;
    let svid = svids.remove(index);
    let shown = |svid: &X509svid| text::sanitize_for_log(&svid.spiffe_id);
    let others = svids.iter().map(shown).collect();
    let id = identity(&svid)?;
    if let Some(domain) = wanted.trust_domain.as_deref().filter(|domain| *domain != id.trust_domain()) {
        let (id, wanted) = (id.to_string(), domain.to_owned());
        return Err(InvalidAnswer::WrongTrustDomain { id, wanted });
    }
    let (pair, bundle) = checked(&svid, &id, format, now)?;
    let foreign = Foreign::read(&federated_bundles, id.trust_domain());
    Ok(Answer { pair, bundle, crls: crls(&crl), foreign, others })
}

/// The place of the SVID that is served: of several, the first, as the standard has it.
fn chosen(svids: &[X509svid], wanted: &Wanted) -> Result<usize, InvalidAnswer> {
    if svids.is_empty() {
        return Err(InvalidAnswer::Empty);
    }
    let Wanted { id, hint, .. } = wanted;
    let is_wanted = |svid: &X509svid| {
        let has_id = id.as_ref().is_none_or(|id| id.as_str() == svid.spiffe_id);
        has_id && hint.as_ref().is_none_or(|hint| *hint == svid.hint)
    };
    svids.iter().position(is_wanted).ok_or_else(|| {
        let id = id.as_ref().map(|id| format!("--spiffe-id {id}"));
        let hint = hint.as_ref().map(|hint| format!("--spiffe-hint {hint}"));
        let described = |svid: &X509svid| match (&*svid.spiffe_id, &*svid.hint) {
            (id, "") => text::sanitize_for_log(id),
            (id, hint) => text::sanitize_for_log(&format!("{id} with hint {hint}")),
        };
        let wanted: Vec<_> = id.into_iter().chain(hint).collect();
        InvalidAnswer::NotAmong {
            wanted: wanted.join(" and "),
            found: text::listed(svids.iter().map(described), ", "),
        }
    })
}

fn identity(svid: &X509svid) -> Result<SpiffeId, InvalidAnswer> {
    let text = || text::sanitize_for_log(&svid.spiffe_id);
    svid.spiffe_id.parse().map_err(|_| InvalidAnswer::NotASpiffeId { text: text() })
}

/// The secrets of an SVID, if they pass the checks of a CA's answer.
fn checked(
    svid: &X509svid,
    id: &SpiffeId,
    format: KeyFormat,
    now: SystemTime,
) -> Result<(KeyPair, TrustBundle), InvalidAnswer> {
    let shown = || id.to_string();
    let certificate =
        |error: NotACertificate| InvalidAnswer::Certificate { id: shown(), reason: error.to_string() };
    let bundle = |error: NotACertificate| InvalidAnswer::Bundle { id: shown(), reason: error.to_string() };
    let key = |reason: String| InvalidAnswer::Key { id: shown(), reason };
    let private_key = PrivateKey::from_pkcs8(&svid.x509_svid_key).map_err(|error| key(error.to_string()))?;
    let private_key = private_key.in_format(format).map_err(|error| key(error.to_string()))?;
    let mut chain = Vec::new();
    for one in split(&svid.x509_svid, IssuedChain::LONGEST).map_err(certificate)? {
        // A root in the chain is not one of the bundle: it makes nothing trusted.
        if chain.is_empty() || !is_self_issued(&one).map_err(certificate)? {
            chain.push(one);
        }
    }
    let roots = split(&svid.bundle, limits::CERTIFICATES).map_err(bundle)?;
    let answer = IssuedChain { chain, roots };
    answer.check(private_key, Some(id), &Names::default(), now).map_err(|error| match error {
        InvalidResponse::WrongIdentity { got, .. } => InvalidAnswer::OtherLeaf { said: shown(), got },
        InvalidResponse::NoIdentity { names } => InvalidAnswer::OtherLeaf { said: shown(), got: names },
        InvalidResponse::ForeignKey { .. } => InvalidAnswer::ForeignKey { id: shown() },
        InvalidResponse::NoRoot => InvalidAnswer::NoBundle { id: shown() },
        InvalidResponse::Empty => {
            InvalidAnswer::Certificate { id: shown(), reason: "there is none".to_owned() }
        }
        reason => InvalidAnswer::Unusable { id: shown(), reason },
    })
}

fn crls(crls: &[Bytes]) -> Result<Vec<Arc<Crl>>, String> {
    if crls.len() > limits::CRLS {
        return Err(format!("there are {} of them, more than {}", crls.len(), limits::CRLS));
    }
    crls.iter().map(|der| Crl::from_der(der).map(Arc::new)).collect()
}
