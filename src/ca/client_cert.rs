//! The client certificate for calls to a CA: a folder that somebody else rotates, read anew for each call.

use std::fmt;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use zeroize::Zeroizing;

use crate::clock::Clock;
use crate::pki::key::{NotAKey, PrivateKey};
use crate::pki::pem::{self, NotPem};
use crate::secret::{KeyPair, NotAKeyPair};
use crate::{limits, plain_file};

const CHAIN_FILE: &str = "cert-chain.pem";
const KEY_FILE: &str = "key.pem";
const ROOT_FILE: &str = "root-cert.pem";

/// How often the folder is looked at where half of a change may be in it.
const LOOKS: usize = 10;
/// The pause between two looks.
const PAUSE: Duration = Duration::from_millis(10);

/// A folder with `cert-chain.pem`, `key.pem` and `root-cert.pem`: Istio's `PROV_CERT`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientCertFolder {
    path: PathBuf,
}

/// A certificate that can be presented: its key fits, and it was valid when it was read.
#[derive(Debug)]
pub struct ClientCertificate {
    /// Certificate and key.
    pub pair: KeyPair,
    folder: PathBuf,
}

/// Why no client certificate is presented.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "each variant's message is its documentation")]
pub enum NoClientCert {
    #[error("{folder} holds neither {CHAIN_FILE} nor {KEY_FILE}")]
    Missing { folder: PathBuf },
    #[error("{present} is there, but {absent} is not")]
    Half { present: PathBuf, absent: PathBuf },
    #[error("{path}: {source}")]
    Unreadable { path: PathBuf, source: io::Error },
    #[error("{path}: {source}")]
    Certificates { path: PathBuf, source: NotPem },
    #[error("{path}: {source}")]
    Key { path: PathBuf, source: NotAKey },
    #[error("{folder}: {source}")]
    Pair { folder: PathBuf, source: NotAKeyPair },
    #[error("{path}: it expired at {at}")]
    Expired { path: PathBuf, at: String },
    #[error("{path}: it is valid only from {from}; is this machine's clock right?")]
    NotYetValid { path: PathBuf, from: String },
    #[error("{folder} changes faster than it can be read")]
    Restless { folder: PathBuf },
    #[error("the CA asks for no client certificate")]
    NotAsked,
}

impl NoClientCert {
    /// Whether it may be half of a change that somebody is making.
    fn may_pass(&self) -> bool {
        match self {
            Self::Half { .. }
            | Self::Certificates { .. }
            | Self::Key { .. }
            | Self::Pair { .. }
            | Self::Restless { .. } => true,
            Self::Missing { .. }
            | Self::Unreadable { .. }
            | Self::Expired { .. }
            | Self::NotYetValid { .. }
            | Self::NotAsked => false,
        }
    }
}

impl ClientCertFolder {
    /// The client certificate in the folder at `path`.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into() }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The root that came with it.
    pub fn root_file(&self) -> PathBuf {
        self.path.join(ROOT_FILE)
    }

    /// Reads the certificate as it is now. Where it looks like half of a change, the other half is waited for,
    /// a tenth of a second.
    pub async fn read(&self, clock: &Clock) -> Result<ClientCertificate, NoClientCert> {
        let mut looked = self.look();
        for _ in 1..LOOKS {
            if !looked.as_ref().is_err_and(NoClientCert::may_pass) {
                break;
            }
            tokio::time::sleep(PAUSE).await;
            looked = self.look();
        }
        let pair = looked?;
        self.check_time(&pair, clock.now())?;
        Ok(ClientCertificate { pair, folder: self.path.clone() })
    }

    fn look(&self) -> Result<KeyPair, NoClientCert> {
        let (chain_path, key_path) = (self.path.join(CHAIN_FILE), self.path.join(KEY_FILE));
        let stamps = || (stamp(&chain_path), stamp(&key_path));
        let before = stamps();
        let (chain, key) = (read_file(&chain_path), read_file(&key_path));
        // A chain that is half written may fit the key, and lack what the CA needs.
        if before != stamps() {
            return Err(NoClientCert::Restless { folder: self.path.clone() });
        }
        let (chain, key) = match (chain?, key?) {
            (Some(chain), Some(key)) => (chain, key),
            (Some(_), None) => return Err(NoClientCert::Half { present: chain_path, absent: key_path }),
            (None, Some(_)) => return Err(NoClientCert::Half { present: key_path, absent: chain_path }),
            (None, None) => return Err(NoClientCert::Missing { folder: self.path.clone() }),
        };
        let chain = pem::certificates(&chain)
            .map_err(|source| NoClientCert::Certificates { path: chain_path, source })?;
        let key =
            PrivateKey::from_pem(&key).map_err(|source| NoClientCert::Key { path: key_path, source })?;
        KeyPair::new(chain, key).map_err(|source| NoClientCert::Pair { folder: self.path.clone(), source })
    }

    fn check_time(&self, pair: &KeyPair, now: SystemTime) -> Result<(), NoClientCert> {
        let path = || self.path.join(CHAIN_FILE);
        if pair.not_after() <= now {
            return Err(NoClientCert::Expired { path: path(), at: show(pair.not_after()) });
        }
        if pair.leaf().not_before > now {
            return Err(NoClientCert::NotYetValid { path: path(), from: show(pair.leaf().not_before) });
        }
        Ok(())
    }
}

/// What it is and where it is, for somebody whose CA refuses it.
impl fmt::Display for ClientCertificate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let leaf = self.pair.leaf();
        let (folder, names, serial) = (self.folder.display(), leaf.names(), &leaf.serial);
        write!(f, "in {folder} ({names}, serial {serial}, valid until {})", show(self.pair.not_after()))
    }
}

fn show(moment: SystemTime) -> String {
    humantime::format_rfc3339_seconds(moment).to_string()
}

/// What tells two states of a file apart.
fn stamp(path: &Path) -> Option<(u64, u64, u64, [i64; 4])> {
    let found = std::fs::metadata(path).ok()?;
    let times = [found.mtime(), found.mtime_nsec(), found.ctime(), found.ctime_nsec()];
    Some((found.dev(), found.ino(), found.size(), times))
}

/// The content of a file; none where there is no file.
fn read_file(path: &Path) -> Result<Option<Zeroizing<Vec<u8>>>, NoClientCert> {
    match plain_file::read(path, limits::FILE_BYTES) {
        Ok(content) => Ok(Some(content)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(NoClientCert::Unreadable { path: path.to_owned(), source }),
    }
}

#[cfg(test)]
mod tests;
