//! Resource names as Envoy requests them.

mod kubernetes;
mod spiffe;

use std::fmt;
use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;

pub use self::kubernetes::{KubernetesName, Scheme};
pub use self::spiffe::{FederatedName, SpiffeName};
use crate::base::limits;
use crate::pki::csr::DnsName;

/// The resource name of a secret that this agent can serve. Clones share the text.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum SecretName {
    /// `default`: the workload's key pair.
    Workload,
    /// `ROOTCA`: the workload's trust bundle.
    Roots,
    /// `spiffe://DOMAIN`: the trust bundle of another trust domain.
    Federated(FederatedName),
    /// `file-cert:CHAIN~KEY`: a key pair from two files.
    FileKeyPair(PairName),
    /// `file-root:PATH`: a trust bundle from a file.
    FileRoots(RootsName),
    /// `file-root:system`: the roots of the operating system.
    SystemRoots,
    /// A key pair or trust bundle from a Secret or ConfigMap of Kubernetes.
    Kubernetes(KubernetesName),
    /// `mint://DNSNAME`: a key pair for that host, from the agent's CA.
    Minted(MintName),
}

/// The kinds of names on demand. Demand for a name goes to the source of its kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NameKind {
    /// Mounted files, and the roots of the operating system.
    File,
    /// Kubernetes' Secrets and ConfigMaps.
    Kubernetes,
    /// Key pairs for hosts, from the agent's CA.
    Mint,
}

/// A valid `file-cert:CHAIN~KEY`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PairName(Arc<str>);

/// A valid `file-root:PATH`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RootsName(Arc<str>);

/// A valid `mint://DNSNAME`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MintName(Arc<str>);

/// Why this agent does not serve a name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadName {
    #[error(
        "unknown resource name {0:?}: this agent serves \"default\" (key pair), \"ROOTCA\" (trust bundle), \
         file-cert:CHAIN~KEY, file-root:PATH, file-root:system, its spiffe://ID, spiffe://TRUST-DOMAIN, ALL, with \
         --kubernetes-secrets kubernetes://[NAMESPACE/]NAME, and with --mint-suffix mint://HOST"
    )]
    Unknown(String),
    #[error("resource name {name:?}: {reason}")]
    Malformed {
        /// May be truncated.
        name: String,
        reason: &'static str,
    },
}

const KEY_PAIR: &str = "file-cert:";
const ROOTS: &str = "file-root:";
const SYSTEM: &str = "file-root:system";
const MINT: &str = "mint://";
/// Separates the two files of a key pair.
const SEPARATOR: char = '~';

impl PairName {
    pub fn chain(&self) -> &Path {
        Path::new(self.files().0)
    }

    pub fn key(&self) -> &Path {
        Path::new(self.files().1)
    }

    fn files(&self) -> (&str, &str) {
        self.0.strip_prefix(KEY_PAIR).and_then(|files| files.split_once(SEPARATOR)).unwrap_or_default()
    }
}

impl RootsName {
    pub fn path(&self) -> &Path {
        Path::new(self.0.strip_prefix(ROOTS).unwrap_or_default())
    }
}

impl MintName {
    /// The host as it is written.
    pub fn host(&self) -> &str {
        self.0.strip_prefix(MINT).unwrap_or_default()
    }
}

impl SecretName {
    /// The names that are served without demand.
    pub const OWN: [Self; 2] = [Self::Workload, Self::Roots];

    pub fn as_str(&self) -> &str {
        match self {
            Self::Workload => "default",
            Self::Roots => "ROOTCA",
            Self::Federated(name) => name.as_str(),
            Self::FileKeyPair(name) => &name.0,
            Self::FileRoots(name) => &name.0,
            Self::SystemRoots => SYSTEM,
            Self::Kubernetes(name) => name.as_str(),
            Self::Minted(name) => &name.0,
        }
    }

    /// The kind of a name on demand; none for the workload's own names and federated bundles, whose sources need no demand.
    pub fn kind(&self) -> Option<NameKind> {
        match self {
            Self::Workload | Self::Roots | Self::Federated(_) => None,
            Self::FileKeyPair(_) | Self::FileRoots(_) | Self::SystemRoots => Some(NameKind::File),
            Self::Kubernetes(_) => Some(NameKind::Kubernetes),
            Self::Minted(_) => Some(NameKind::Mint),
        }
    }

    /// Whether it is that of a Secret, without a scheme.
    pub fn is_bare(&self) -> bool {
        matches!(self, Self::Kubernetes(name) if name.scheme() == Scheme::Bare)
    }

    /// Whether it is part of the workload's identity, on which readiness depends.
    pub fn is_own(&self) -> bool {
        matches!(self, Self::Workload | Self::Roots)
    }

    /// Whether a source serves it only once a stream asks for it: such names can't be listed beforehand.
    pub fn is_on_demand(&self) -> bool {
        self.kind().is_some()
    }
}

impl fmt::Display for SecretName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for SecretName {
    type Err = BadName;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::parse(text, || text.into())
    }
}

impl SecretName {
    /// The name that `text` is, sharing it.
    pub fn from_shared(text: &Arc<str>) -> Result<Self, BadName> {
        Self::parse(text, || Arc::clone(text))
    }

    fn parse(text: &str, shared: impl Fn() -> Arc<str>) -> Result<Self, BadName> {
        // The text comes from a client and is logged: it is cut to the length of a usual name.
        let start = || text.chars().take(200).collect();
        let malformed = |reason| Err(BadName::Malformed { name: start(), reason });
        if let Some(own) = Self::OWN.into_iter().find(|name| name.as_str() == text) {
            return Ok(own);
        }
        if text == SYSTEM {
            return Ok(Self::SystemRoots);
        }
        if let Some(host) = text.strip_prefix(MINT) {
            return match host.parse::<DnsName>() {
                Ok(name) if !name.is_wildcard() => Ok(Self::Minted(MintName(shared()))),
                _ => malformed(
                    "mint:// must be followed by the DNS name of one host, like mint://web.example.com",
                ),
            };
        }
        let is_path =
            |path: &str| (1..=limits::PATH_BYTES).contains(&path.len()) && !path.contains(char::is_control);
        if let Some(path) = text.strip_prefix(ROOTS) {
            return match is_path(path) {
                true => Ok(Self::FileRoots(RootsName(shared()))),
                false => malformed(
                    "file-root: must be followed by a path of at most 4095 bytes without control characters",
                ),
            };
        }
        if let Some(name) = KubernetesName::parse(text, &shared) {
            return name.map(Self::Kubernetes).or_else(malformed);
        }
        let Some(files) = text.strip_prefix(KEY_PAIR) else { return Err(BadName::Unknown(start())) };
        match files.split_once(SEPARATOR) {
            Some((chain, key)) if is_path(chain) && is_path(key) && !key.contains(SEPARATOR) => {
                Ok(Self::FileKeyPair(PairName(shared())))
            }
            _ => malformed(
                "it must be file-cert:CHAIN~KEY: two paths of at most 4095 bytes with one \"~\" between them, without \
                 control characters",
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_parsed_name_keeps_its_text() {
        let names = [
            "default",
            "ROOTCA",
            "file-root:system",
            "file-root:./system",
            "file-root:/etc/certs/root-cert.pem",
            "file-cert:/etc/certs/cert-chain.pem~/etc/certs/key.pem",
            "file-cert:a b~c",
            "mint://web.example.com",
            "mint://WEB",
        ];
        for text in names {
            let name: SecretName = text.parse().unwrap();
            assert_eq!(name.as_str(), text);
            let is_on_demand = text.starts_with("file-") || text.starts_with("mint:");
            assert_eq!(name.is_on_demand(), is_on_demand, "{text}");
        }
        let SecretName::FileKeyPair(pair) = "file-cert:a/b~../c".parse().unwrap() else { panic!("no pair") };
        assert_eq!((pair.chain(), pair.key()), (Path::new("a/b"), Path::new("../c")));
        let SecretName::FileRoots(roots) = "file-root:r~1".parse().unwrap() else { panic!("no roots") };
        assert_eq!(roots.path(), Path::new("r~1"));
    }

    #[test]
    fn unknown_and_malformed_names_are_distinguished() {
        for text in ["", "Default", "rootca", "kubernetes:x", "file-cert", "file:/etc/passwd"] {
            assert!(matches!(text.parse::<SecretName>(), Err(BadName::Unknown(_))), "{text}");
        }
        for text in [
            "file-cert:",
            "file-cert:/a",
            "file-cert:~/a",
            "file-cert:/a~",
            "file-cert:/a~/b~/c",
            "file-cert:/a\n~/b",
            "file-root:",
            "file-root:/a\0b",
            "mint://",
            "mint://*.example.com",
            "mint://10.0.0.1",
            "mint://a/b",
            "mint://web.",
        ] {
            assert!(matches!(text.parse::<SecretName>(), Err(BadName::Malformed { .. })), "{text}");
        }
        let long = "x".repeat(10_000);
        for prefix in ["", "file-root:", "file-cert:/a~", "mint://"] {
            let error = format!("{prefix}{long}").parse::<SecretName>().unwrap_err();
            assert!(error.to_string().len() < 500, "{error}");
        }
    }
}
