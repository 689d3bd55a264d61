//! Chooses the CRLs of a trust bundle: either CRLs that reject only revoked certificates, or none.
//!
//! As soon as a bundle has one CRL, Envoy rejects every peer that has an issuer, up to the root, without a signed and current
//! CRL (`tests/agent/crl.rs` shows it). So the bundle gets a complete set of CRLs or none.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rustls::pki_types::CertificateDer;

use super::{KeyPair, TrustBundle};
use crate::base::clock::rfc3339;
use crate::base::text;
use crate::pki::certificate::{Certificate, folded};
use crate::pki::crl::Crl;

/// How long before it expires a CRL is no longer used: by then Envoy must already have the bundle without it.
const MARGIN: Duration = Duration::from_secs(2);

/// CRLs, and the known issuers other than a bundle's roots.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Revocation {
    /// Those of a file.
    crls: Vec<Arc<Crl>>,
    /// Those that came with the roots.
    brought: Vec<Arc<Crl>>,
    /// The workload's own chain above the leaf, because peers have similar chains. `None` until there is a chain.
    above: Option<Vec<CertificateDer<'static>>>,
}

/// Why an issuer in use has no CRL that Envoy can use.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Gap {
    #[error("no key pair yet: its chain shows which CAs are in use")]
    NoKeyPair,
    #[error("there is no CRL of {issuer}: add it")]
    Missing { issuer: String },
    #[error(
        "the CRL of {issuer} is out of date (nextUpdate {at}): publish the next one, or if that CA is no longer in use, remove its CRL"
    )]
    Expired { issuer: String, at: String },
    #[error("the CRL of {issuer} is not valid before {at}: check this machine's clock")]
    NotYetValid { issuer: String, at: String },
    #[error(
        "a CRL that names {issuer} is not signed with its key: remove it, or if it belongs to another CA of that name, create it with an authority key identifier"
    )]
    Unsigned { issuer: String },
    #[error(
        "the certificate of {issuer} does not allow it to sign CRLs (cRLSign), so Envoy accepts none from it: it needs another certificate"
    )]
    MayNotSign { issuer: String },
    #[error(
        "two CAs with different keys are named {name}, and Envoy can't tell which of them issued a CRL: they need different names"
    )]
    SameName { name: String },
    #[error("{name} is trusted but is not a root: add the root above it to the trust bundle")]
    Rootless { name: String },
}

/// Why a bundle has no CRLs: every gap.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct Uncovered(pub Vec<Gap>);

impl fmt::Display for Uncovered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(gaps) = self;
        f.write_str(&text::listed(gaps, "; "))
    }
}

impl Revocation {
    pub fn set_crls(&mut self, crls: &[Arc<Crl>]) {
        self.crls = crls.to_vec();
    }

    /// Sets the CRLs that came with the roots, which those of a file stand beside.
    pub fn set_brought(&mut self, crls: Vec<Arc<Crl>>) {
        self.brought = crls;
    }

    fn all(&self) -> impl Iterator<Item = &Arc<Crl>> {
        self.crls.iter().chain(&self.brought)
    }

    /// Takes the intermediates from this pair's chain. True if they differ from those before.
    pub fn set_chain(&mut self, pair: &KeyPair) -> bool {
        let above = Some(pair.chain().iter().skip(1).cloned().collect());
        let is_new = self.above != above;
        self.above = above;
        is_new
    }

    /// The CAs of the workload's own chain.
    fn intermediates(&self) -> Option<Vec<Certificate>> {
        let above = self.above.as_ref()?.iter().filter_map(|one| Certificate::parse(one).ok());
        Some(above.filter(|one| one.is_ca).collect())
    }

    pub fn is_empty(&self) -> bool {
        self.crls.is_empty() && self.brought.is_empty()
    }

    /// The CRLs for `bundle` at `now`: the newest of every issuer in use, and of every other issuer that has one,
    /// because peers may have certificates from it.
    pub fn cover(&self, bundle: &TrustBundle, now: SystemTime) -> Result<Vec<Arc<Crl>>, Uncovered> {
        if self.is_empty() {
            return Ok(Vec::new());
        }
        let Some(intermediates) = self.intermediates() else {
            return Err(Uncovered(vec![Gap::NoKeyPair]));
        };
        let mut by_name: BTreeMap<String, Namesakes<'_>> = BTreeMap::new();
        // No peer is accepted by an expired root, whether or not it has a CRL.
        let roots =
            || bundle.facts().iter().zip(bundle.self_issued()).filter(|(root, _)| root.not_after > now);
        for one in roots().map(|(root, _)| root).chain(&intermediates) {
            by_name.entry(folded(&one.subject)).or_default().known.push(one);
        }
        for crl in self.all() {
            by_name.entry(folded(&crl.issuer)).or_default().crls.push(crl);
        }
        let mut coverage = Coverage { now, chosen: Vec::new(), gaps: Vec::new() };
        // Envoy looks for a CRL of every certificate's issuer, so the chain must continue up to a self-issued one.
        let ends: BTreeSet<_> =
            roots().filter(|(_, is_end)| **is_end).map(|(end, _)| folded(&end.subject)).collect();
        for (one, is_end) in roots() {
            if !is_end && !ends.contains(&folded(&one.issuer)) {
                coverage.gaps.push(Gap::Rootless { name: one.subject.clone() });
            }
        }
        by_name.values().for_each(|namesakes| coverage.add(namesakes));
        let Coverage { mut chosen, mut gaps, .. } = coverage;
        if !gaps.is_empty() {
            gaps.dedup();
            return Err(Uncovered(gaps));
        }
        chosen.sort_unstable_by(|a, b| a.der().as_ref().cmp(b.der().as_ref()));
        chosen.dedup();
        Ok(chosen)
    }

    /// When next a CRL becomes valid or goes out of use, or a root of `bundle` expires and no longer needs a CRL.
    pub fn next_change(&self, bundle: &TrustBundle, now: SystemTime) -> Option<SystemTime> {
        if self.is_empty() {
            return None;
        }
        let moments = self.all().flat_map(|crl| [Some(crl.this_update), end_of_use(crl)]).flatten();
        let ends = bundle.facts().iter().map(|root| root.not_after);
        moments.chain(ends).filter(|moment| *moment > now).min()
    }
}

/// The known CAs of one name, as Envoy compares names, and the CRLs with this issuer name.
#[derive(Debug, Default)]
struct Namesakes<'a> {
    known: Vec<&'a Certificate>,
    crls: Vec<&'a Arc<Crl>>,
}

/// The chosen CRLs and the gaps so far.
#[derive(Debug)]
struct Coverage {
    now: SystemTime,
    chosen: Vec<Arc<Crl>>,
    gaps: Vec<Gap>,
}

impl Coverage {
    fn add(&mut self, Namesakes { known, crls }: &Namesakes<'_>) {
        // One CA may have several certificates. With several CAs of one name, signatures would not help.
        let mut signed = Vec::new();
        if let Some((one, others)) = known.split_first() {
            if others.iter().any(|other| other.public_key != one.public_key) {
                return self.gaps.push(Gap::SameName { name: one.subject.clone() });
            }
            signed = crls.iter().map(|crl| crl.is_signed_by(one)).collect();
        }
        for one in known {
            if !one.signs_crls {
                self.gaps.push(Gap::MayNotSign { issuer: one.subject.clone() });
                continue;
            }
            let its_crls: Vec<_> = crls
                .iter()
                .zip(&signed)
                .filter(|(crl, is_signed)| **is_signed && crl.may_be_of(one))
                .map(|(crl, _)| *crl)
                .collect();
            self.choose(&its_crls, || Some(Gap::Missing { issuer: one.subject.clone() }));
        }
        let mut others: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for (index, crl) in crls.iter().enumerate() {
            if !known.iter().any(|one| crl.may_be_of(one)) {
                others.entry(crl.authority()).or_default().push(*crl);
            } else if signed.get(index) != Some(&true) {
                self.gaps.push(Gap::Unsigned { issuer: crl.issuer.clone() });
            }
        }
        others.into_values().for_each(|crls| self.choose(&crls, || None));
    }

    /// Adds the CRL that Envoy would use of one issuer's `crls`.
    fn choose(&mut self, crls: &[&Arc<Crl>], without: impl FnOnce() -> Option<Gap>) {
        match newest_valid(crls, self.now) {
            Ok(crl) => self.chosen.push(crl),
            Err(gap) => self.gaps.extend(gap.or_else(without)),
        }
    }
}

/// When `crl` is no longer used.
fn end_of_use(crl: &Crl) -> Option<SystemTime> {
    crl.next_update.and_then(|at| at.checked_sub(MARGIN))
}

/// The CRL that Envoy would use of one issuer's `crls`. The error is the problem of the newest, if there is one.
fn newest_valid(crls: &[&Arc<Crl>], now: SystemTime) -> Result<Arc<Crl>, Option<Gap>> {
    let mut crls: Vec<_> = crls.to_vec();
    crls.sort_by_key(|crl| Reverse(crl.age_rank()));
    let has_begun = |crl: &Crl| crl.this_update <= now;
    let valid = crls.iter().find(|crl| has_begun(crl) && end_of_use(crl).is_none_or(|end| now < end));
    if let Some(crl) = valid {
        return Ok(Arc::clone(crl));
    }
    let show = |at| rfc3339(at).to_string();
    let newest = crls.first().ok_or(None)?;
    let issuer = newest.issuer.clone();
    Err(Some(match newest.next_update {
        Some(at) if has_begun(newest) => Gap::Expired { issuer, at: show(at) },
        _ => Gap::NotYetValid { issuer, at: show(newest.this_update) },
    }))
}

#[cfg(test)]
mod tests;
