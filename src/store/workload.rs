//! The workloads that the agent serves. A sidecar has one; a node's agent adds and removes them at run time.

use std::fmt;

use super::subscription::Verdicts;
use crate::secret::SecretName;

/// The agent's own handle on one workload. [`Cache::add_workload`](super::Cache::add_workload) gives it out and never
/// gives the same one out twice. The SPIFFE ID is part of the workload's secrets, since it may be unknown until a
/// credential appears.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Workload(pub(super) u32);

impl Workload {
    /// Stands for every workload, as the owner of trust bundles of other trust domains that all of them share.
    pub const EVERY: Self = Self(u32::MAX);
}

impl fmt::Debug for Workload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Workload({})", self.0)
    }
}

/// What the clients of several workloads were sent: of their key pairs, and of their trust bundles.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    pub key_pairs: Counts,
    pub trust_bundles: Counts,
}

/// What clients were sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    pub pushes: u64,
    pub acks: u64,
    pub nacks: u64,
}

impl Totals {
    /// Adds what was sent of the secret `name`. Names on demand do not count.
    pub fn add(&mut self, name: &SecretName, verdicts: &Verdicts) {
        let counts = match name {
            SecretName::Workload => &mut self.key_pairs,
            SecretName::Roots => &mut self.trust_bundles,
            _ => return,
        };
        counts.pushes += verdicts.pushes;
        counts.acks += verdicts.acks;
        counts.nacks += verdicts.nacks;
    }
}

#[cfg(test)]
impl Workload {
    /// The first workload of a cache, for tests' constants.
    pub(crate) const FIRST: Self = Self(0);
}
