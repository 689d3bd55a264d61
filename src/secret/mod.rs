//! Secrets: checked when they are made, so that whoever holds one can serve it.

mod key_pair;
mod name;
mod revocation;
mod trust_bundle;
mod wire;

use std::fmt;
use std::time::SystemTime;

pub use self::key_pair::{KeyPair, NotAKeyPair};
pub use self::name::{BadName, PairName, RootsName, SecretName};
pub use self::revocation::{Gap, Revocation, Uncovered};
pub use self::trust_bundle::{NotATrustBundle, TrustBundle, Unchained};
pub use self::wire::{Resource, Version};

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
                write!(f, "key pair of {}, serial {}", pair.leaf().names(), pair.leaf().serial)
            }
            Self::TrustBundle(bundle) => write!(f, "trust bundle of {} root(s)", bundle.roots().len()),
        }
    }
}
