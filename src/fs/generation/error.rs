//! Why mounted or named files are not served.

use std::io;
use std::path::PathBuf;
use std::time::SystemTime;

use crate::base::clock::rfc3339;
use crate::pki::key::NotAKey;
use crate::pki::pem::NotPem;
use crate::secret::{NotAKeyPair, NotATrustBundle};

/// Why files are not served.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    #[error("{path}: {source}")]
    Unreadable { path: PathBuf, source: io::Error },
    #[error("{}", absent(paths))]
    Missing { paths: Vec<PathBuf> },
    #[error("{present} exists, but {absent} does not")]
    Half { present: PathBuf, absent: PathBuf },
    #[error("{path}: {source}")]
    Certificates { path: PathBuf, source: NotPem },
    #[error("{path}: {source}")]
    Key { path: PathBuf, source: NotAKey },
    #[error("{chain} and {key}: {source}")]
    Pair { chain: PathBuf, key: PathBuf, source: NotAKeyPair },
    #[error("{path}: {source}")]
    Bundle { path: PathBuf, source: NotATrustBundle },
    #[error("{path}: expired at {}", show(*at))]
    Expired { path: PathBuf, at: SystemTime },
    #[error("{path}: valid only from {}; check this machine's clock", show(*from))]
    NotYetValid { path: PathBuf, from: SystemTime },
    #[error("{} change faster than they can be read", display(paths))]
    Restless { paths: Vec<PathBuf> },
    #[error("{path} is not used beside {taken}: sets of file names are not mixed; name it with --root-file")]
    OtherSet { path: PathBuf, taken: PathBuf },
    #[error("the file system of {path} does not answer")]
    Unanswered { path: PathBuf },
    #[error(
        "{path}: held back until the key pair beside it can be used, since the certificate that is still served does not \
         chain to it"
    )]
    RootsHeldBack { path: PathBuf },
    #[error(
        "{path}: held back until the roots beside it can be used, since it does not chain to the roots that are still served"
    )]
    PairHeldBack { path: PathBuf },
}

impl FileError {
    /// Whether the files may be in the middle of a change.
    pub fn may_be_transient(&self) -> bool {
        match self {
            Self::Half { .. }
            | Self::Certificates { .. }
            | Self::Key { .. }
            | Self::Pair { .. }
            | Self::Bundle { .. }
            | Self::Restless { .. } => true,
            Self::Unreadable { .. }
            | Self::Missing { .. }
            | Self::OtherSet { .. }
            | Self::Expired { .. }
            | Self::NotYetValid { .. }
            | Self::Unanswered { .. }
            | Self::RootsHeldBack { .. }
            | Self::PairHeldBack { .. } => false,
        }
    }

    /// The metric label.
    pub fn label(&self) -> &'static str {
        match self {
            Self::Unreadable { .. } => "unreadable",
            Self::Missing { .. } | Self::OtherSet { .. } => "missing",
            Self::Half { .. } => "incomplete",
            Self::Certificates { .. } | Self::Key { .. } | Self::Bundle { .. } => "not_parsed",
            Self::Pair { .. } => "mismatch",
            Self::Expired { .. } | Self::NotYetValid { .. } => "not_valid",
            Self::Restless { .. } => "restless",
            Self::Unanswered { .. } => "unanswered",
            Self::RootsHeldBack { .. } | Self::PairHeldBack { .. } => "held_back",
        }
    }
}

fn display(paths: &[PathBuf]) -> String {
    paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ")
}

fn absent(paths: &[PathBuf]) -> String {
    match paths {
        [path] => format!("{} does not exist", path.display()),
        several => format!("none of {} exists", display(several)),
    }
}

fn show(moment: SystemTime) -> String {
    rfc3339(moment).to_string()
}
