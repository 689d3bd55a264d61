//! CRLs in a trust bundle: whichever source publishes the roots, roots and CRLs become one value under one lock.

use std::sync::Arc;
use std::time::SystemTime;

use super::cache::{Cache, Slot, lock};
use super::entry::{Good, Key};
use crate::pki::crl::Crl;
use crate::secret::{Resource, Revocation, Secret, SecretName, Uncovered};

/// How the CRLs of a trust bundle stand.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CrlCoverage {
    /// How many CRLs the bundle is served with, or why it is served without.
    pub covered: Result<usize, Uncovered>,
    /// When that may change.
    pub next_change: Option<SystemTime>,
}

impl Cache {
    /// Puts `crls` into the trust bundle of `key`, and into its successors, as long as they cover the bundle: new roots
    /// are never served with CRLs that don't cover them. None where there is no trust bundle yet.
    pub fn set_crls(&self, key: &Key, crls: &[Arc<Crl>], now: SystemTime) -> Option<CrlCoverage> {
        self.slot_of(key).set_revocation(&key.name, now, |revocation| {
            revocation.set_crls(crls);
            true
        })
    }

    /// The same for `crls` that came with the roots, which stand beside those.
    pub fn bring_crls(&self, key: &Key, crls: &[Arc<Crl>], now: SystemTime) -> Option<CrlCoverage> {
        self.slot_of(key).set_revocation(&key.name, now, |revocation| {
            revocation.set_brought(crls.to_vec());
            true
        })
    }
}

impl Slot {
    /// Applies `change` to what revokes certificates; if it returns true, the trust bundle follows.
    pub(super) fn set_revocation(
        &self,
        name: &SecretName,
        now: SystemTime,
        change: impl FnOnce(&mut Revocation) -> bool,
    ) -> Option<CrlCoverage> {
        let mut revocation = lock(&self.extras().revocation);
        if !change(&mut revocation) {
            return None;
        }
        // Signatures are checked and many bytes encoded while the entry can be read. Publishers wait for the same lock.
        let good = self.entry().good.clone()?;
        let Secret::TrustBundle(before) = &good.secret else { return None };
        let (bundle, covered) = before.with_revocation(&revocation, now);
        let next_change = revocation.next_change(before, now);
        if bundle.crls() != before.crls() {
            let secret = Secret::TrustBundle(bundle);
            let resource = Resource::encode(name, &secret);
            let Good { origin, received, renews, .. } = *good;
            self.modify(|entry| {
                entry.good = Some(Arc::new(Good { secret, resource, origin, received, renews }));
                true
            });
        }
        Some(CrlCoverage { covered, next_change })
    }
}
