//! Secrets, their names and their encoding. A secret is checked when it is created, so it can always be served.

#[cfg(any(test, fuzzing))]
pub mod fuzz;
mod key_pair;
mod name;
mod revocation;
mod svid;
mod trust_bundle;
mod wire;

use std::fmt;
use std::time::SystemTime;

pub use self::key_pair::{KeyPair, NotAKeyPair};
pub use self::name::{
    BadName, FederatedName, KubernetesName, MintName, NameKind, PairName, RootsName, Scheme, SecretName,
    SpiffeName,
};
pub use self::revocation::{Gap, Revocation, Uncovered};
pub use self::svid::{NotAnSvid, Svid};
pub use self::trust_bundle::{NotATrustBundle, TrustBundle, Unchained};
pub use self::wire::{Payload, Resource, Version};

/// Clones share the content.
#[derive(Clone, Debug)]
pub enum Secret {
    KeyPair(KeyPair),
    TrustBundle(TrustBundle),
}

impl Secret {
    /// When the secret expires.
    pub fn not_after(&self) -> SystemTime {
        match self {
            Self::KeyPair(pair) => pair.not_after(),
            Self::TrustBundle(bundle) => bundle.not_after(),
        }
    }

    /// The same secret; a trust bundle gets the CRLs of `revocation` that are usable at `now`.
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
                write!(f, "key pair of {}, serial {}", pair.leaf().names(), pair.leaf().serial)
            }
            Self::TrustBundle(bundle) => write!(f, "trust bundle of {} root(s)", bundle.roots().len()),
        }
    }
}
