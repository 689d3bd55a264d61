//! The client certificate for calls to a CA: a folder that somebody else rotates, read anew for each call.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustls::pki_types::CertificateDer;

use crate::base::clock::{Clock, rfc3339};
use crate::fs::generation::{CHAIN_FILE, FileError, KEY_FILE, Place, Places, ROOT_FILE};
use crate::secret::KeyPair;

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
pub enum NoClientCert {
    #[error("{folder} holds neither {CHAIN_FILE} nor {KEY_FILE}")]
    Missing { folder: PathBuf },
    #[error(transparent)]
    Files(#[from] FileError),
    #[error("the CA asks for no client certificate")]
    NotAsked,
    #[error("the CA refused it: {certificate}; another one there is used at once")]
    Refused { certificate: String },
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
        let key_pair = Some((self.path.join(CHAIN_FILE), self.path.join(KEY_FILE)));
        let places = Places::new(vec![Place { key_pair, roots: None }]);
        let look = || places.look(clock.now()).key_pair.secret;
        let mut looked = look();
        for _ in 1..LOOKS {
            if !looked.as_ref().is_err_and(FileError::may_be_transient) {
                break;
            }
            tokio::time::sleep(PAUSE).await;
            looked = look();
        }
        let pair = looked?.ok_or_else(|| NoClientCert::Missing { folder: self.path.clone() })?;
        Ok(ClientCertificate { pair, folder: self.path.clone() })
    }
}

impl ClientCertificate {
    /// The first of its chain.
    pub fn leaf(&self) -> Option<&CertificateDer<'static>> {
        self.pair.chain().first()
    }
}

/// What it is and where it is, for somebody whose CA refuses it.
impl fmt::Display for ClientCertificate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let leaf = self.pair.leaf();
        let (folder, names, serial) = (self.folder.display(), leaf.names(), &leaf.serial);
        write!(f, "in {folder} ({names}, serial {serial}, valid until {})", rfc3339(self.pair.not_after()))
    }
}

#[cfg(test)]
mod tests;
