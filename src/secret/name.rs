//! Resource names, as they stand in requests.

use std::fmt;
use std::str::FromStr;

/// The name of a secret that this agent can serve.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum SecretName {
    /// `default`: the workload's key pair.
    Workload,
    /// `ROOTCA`: the workload's trust bundle.
    Roots,
}

/// A name that this agent does not serve.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "unknown resource name {0:?}: this agent serves \"default\" (key pair) and \"ROOTCA\" (trust bundle)"
)]
pub struct UnknownName(String);

impl SecretName {
    /// Every name that is served without being asked for.
    pub const ALL: [Self; 2] = [Self::Workload, Self::Roots];

    /// The name on the wire.
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Workload => "default",
            Self::Roots => "ROOTCA",
        }
    }
}

impl fmt::Display for SecretName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for SecretName {
    type Err = UnknownName;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let known = Self::ALL.into_iter().find(|name| name.as_str() == text);
        // Foreign text goes into logs: not more of it than a name needs.
        known.ok_or_else(|| UnknownName(text.chars().take(200).collect()))
    }
}
