//! Which CRLs go into a trust bundle: those that refuse nobody but the revoked, or none.
//!
//! As soon as there is one CRL in a bundle, Envoy refuses every peer above whom, up to the root, it finds an issuer
//! without one that is signed and in time (`tests/agent/crl.rs` shows it). So they are taken as a whole.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use super::KeyPair;
use crate::base::clock::rfc3339;
use crate::base::text;
use crate::pki::certificate::{Certificate, folded};
use crate::pki::crl::Crl;

/// A CRL is out of use so long before its end: at the end Envoy must have the bundle without it already.
const MARGIN: Duration = Duration::from_secs(2);

/// CRLs, and the issuers that are known beside a bundle's roots.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Revocation {
    crls: Vec<Arc<Crl>>,
    /// The CAs of our own chain: peers hold chains like ours. None as long as there is no chain.
    intermediates: Option<Vec<Certificate>>,
}

/// An issuer in use without a CRL that Envoy could use.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Gap {
    #[error("there is no key pair yet, whose chain shows which CAs are in use")]
    NoKeyPair,
    #[error("there is no CRL of {issuer}: add it")]
    Missing { issuer: String },
    #[error(
        "the CRL of {issuer} was to be replaced by {at}: put the next one there, or if that CA is no longer in use, leave its CRL out"
    )]
    Expired { issuer: String, at: String },
    #[error("the CRL of {issuer} begins only at {at}: is this machine's clock right?")]
    NotYetValid { issuer: String, at: String },
    #[error(
        "a CRL that names {issuer} is not signed with its key: leave it out, or if it is of another CA of that name, make it with an authority key identifier"
    )]
    Unsigned { issuer: String },
    #[error(
        "the certificate of {issuer} does not let it sign CRLs (cRLSign), so Envoy takes none of it: it needs another certificate"
    )]
    MayNotSign { issuer: String },
    #[error(
        "two CAs with different keys are named {name}, and Envoy can't tell whose a CRL is: they need different names"
    )]
    SameName { name: String },
    #[error("{name} is trusted without being a root: put the root above it into the trust bundle too")]
    Rootless { name: String },
}

/// Everything that keeps CRLs out of a bundle.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct Uncovered(pub Vec<Gap>);

impl fmt::Display for Uncovered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(gaps) = self;
        f.write_str(&text::listed(gaps, "; "))
    }
}

impl Revocation {
    /// These CRLs, instead of those before.
    pub fn set_crls(&mut self, crls: &[Arc<Crl>]) {
        self.crls = crls.to_vec();
    }

    /// The CAs of this pair's chain, instead of those before. True if they are others.
    pub fn set_chain(&mut self, pair: &KeyPair) -> bool {
        let above = pair.chain().iter().skip(1).filter_map(|one| Certificate::parse(one).ok());
        let intermediates = Some(above.filter(|one| one.is_ca).collect());
        let is_new = self.intermediates != intermediates;
        self.intermediates = intermediates;
        is_new
    }

    /// Whether there are no CRLs.
    pub fn is_empty(&self) -> bool {
        self.crls.is_empty()
    }

    /// What goes into a bundle of `roots` at `now`: of every issuer in use its newest CRL, and so of every other
    /// issuer that has one here, because some peer may come from there.
    pub fn cover(&self, roots: &[Certificate], now: SystemTime) -> Result<Vec<Arc<Crl>>, Uncovered> {
        if self.is_empty() {
            return Ok(Vec::new());
        }
        let Some(intermediates) = &self.intermediates else {
            return Err(Uncovered(vec![Gap::NoKeyPair]));
        };
        let mut by_name: BTreeMap<String, Namesakes<'_>> = BTreeMap::new();
        // Nobody gets through by an expired root, whatever its CRL.
        let roots = || roots.iter().filter(|root| root.not_after > now);
        for one in roots().chain(intermediates) {
            by_name.entry(folded(&one.subject)).or_default().known.push(one);
        }
        for crl in &self.crls {
            by_name.entry(folded(&crl.issuer)).or_default().crls.push(crl);
        }
        let mut covered = Covered { now, chosen: Vec::new(), gaps: Vec::new() };
        // Envoy looks for a CRL of every certificate's issuer: the chain must go on to one that is its own.
        for one in roots().filter(|one| !one.is_self_issued) {
            let above = by_name.get(&folded(&one.issuer));
            if !above.is_some_and(|above| above.known.iter().any(|root| root.is_self_issued)) {
                covered.gaps.push(Gap::Rootless { name: one.subject.clone() });
            }
        }
        by_name.values().for_each(|namesakes| covered.judge(namesakes));
        let Covered { mut chosen, mut gaps, .. } = covered;
        if !gaps.is_empty() {
            gaps.dedup();
            return Err(Uncovered(gaps));
        }
        chosen.sort_unstable_by(|a, b| a.der().as_ref().cmp(b.der().as_ref()));
        chosen.dedup();
        Ok(chosen)
    }

    /// The next moment at which a CRL comes into use or goes out of it, or one of `roots` needs none any more.
    pub fn next_change(&self, roots: &[Certificate], now: SystemTime) -> Option<SystemTime> {
        if self.is_empty() {
            return None;
        }
        let moments = self.crls.iter().flat_map(|crl| [Some(crl.this_update), end(crl)]).flatten();
        let ends = roots.iter().map(|root| root.not_after);
        moments.chain(ends).filter(|moment| *moment > now).min()
    }
}

/// The known CAs of one name, as Envoy compares names, and the CRLs that carry it.
#[derive(Debug, Default)]
struct Namesakes<'a> {
    known: Vec<&'a Certificate>,
    crls: Vec<&'a Arc<Crl>>,
}

/// What there is for a bundle, and what is not.
#[derive(Debug)]
struct Covered {
    now: SystemTime,
    chosen: Vec<Arc<Crl>>,
    gaps: Vec<Gap>,
}

impl Covered {
    fn judge(&mut self, Namesakes { known, crls }: &Namesakes<'_>) {
        // The same CA may have several certificates. Of several CAs no signature is looked at: it would not help.
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
            let its = crls.iter().zip(&signed).filter(|(crl, is_signed)| **is_signed && crl.may_be_of(one));
            let its: Vec<_> = its.map(|(crl, _)| *crl).collect();
            self.choose(&its, || Some(Gap::Missing { issuer: one.subject.clone() }));
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

    /// Takes the one of an issuer's CRLs that Envoy would use.
    fn choose(&mut self, crls: &[&Arc<Crl>], without: impl FnOnce() -> Option<Gap>) {
        match newest_in_time(crls, self.now) {
            Ok(crl) => self.chosen.push(crl),
            Err(gap) => self.gaps.extend(gap.or_else(without)),
        }
    }
}

/// When `crl` goes out of use.
fn end(crl: &Crl) -> Option<SystemTime> {
    crl.next_update.and_then(|at| at.checked_sub(MARGIN))
}

/// The one of an issuer's CRLs that Envoy would use. The error says what is wrong with the newest, where there is one.
fn newest_in_time(crls: &[&Arc<Crl>], now: SystemTime) -> Result<Arc<Crl>, Option<Gap>> {
    let mut crls: Vec<_> = crls.to_vec();
    crls.sort_by_key(|crl| Reverse(crl.age_rank()));
    let has_begun = |crl: &Crl| crl.this_update <= now;
    let in_time = crls.iter().find(|crl| has_begun(crl) && end(crl).is_none_or(|end| now < end));
    if let Some(crl) = in_time {
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
