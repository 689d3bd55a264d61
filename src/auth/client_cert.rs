//! The client certificate for calls to a CA: a directory that another process rotates, read for each call.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustls::pki_types::CertificateDer;

use crate::base::clock::{Clock, rfc3339};
use crate::fs::disk::{Disk, Unresponsive};
use crate::fs::generation::{CHAIN_FILE, FileError, KEY_FILE, Place, Places, ROOT_FILE};
use crate::secret::KeyPair;

/// Reads of the directory while it may contain half of a change.
const READS: usize = 10;
/// The pause between two reads.
const PAUSE: Duration = Duration::from_millis(10);

/// A directory with `cert-chain.pem`, `key.pem` and `root-cert.pem`: Istio's `PROV_CERT`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientCertDir {
    path: PathBuf,
}

/// A certificate that can be presented: its key matches, and it was valid when it was read.
#[derive(Debug)]
pub struct ClientCertificate {
    pub pair: KeyPair,
    directory: PathBuf,
}

/// Why no client certificate is presented.
#[derive(Debug, thiserror::Error)]
pub enum NoClientCert {
    #[error("{directory} holds neither {CHAIN_FILE} nor {KEY_FILE}")]
    Missing { directory: PathBuf },
    #[error(transparent)]
    Files(#[from] FileError),
    #[error(transparent)]
    Unresponsive(#[from] Unresponsive),
    #[error("the CA asks for no client certificate")]
    NotAsked,
    #[error("the CA refused it: {certificate}; replace it, and the next call presents the new one")]
    Refused { certificate: String },
}

impl ClientCertDir {
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into() }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The file with the CA's root, beside the certificate.
    pub fn root_file(&self) -> PathBuf {
        self.path.join(ROOT_FILE)
    }

    /// Reads the certificate. While the files look like half of a change, waits for the other half, for at most a tenth
    /// of a second.
    pub async fn read(&self, clock: &Clock, disk: &Disk) -> Result<ClientCertificate, NoClientCert> {
        let read = || {
            let key_pair = Some((self.path.join(CHAIN_FILE), self.path.join(KEY_FILE)));
            let (places, now) = (Places::new(vec![Place { key_pair, ..Place::default() }]), clock.now());
            disk.run(&self.path, move || places.look(now).key_pair.secret)
        };
        let mut outcome = read().await?;
        for _ in 1..READS {
            if !outcome.as_ref().is_err_and(FileError::may_be_transient) {
                break;
            }
            tokio::time::sleep(PAUSE).await;
            outcome = read().await?;
        }
        let pair = outcome?.ok_or_else(|| NoClientCert::Missing { directory: self.path.clone() })?;
        Ok(ClientCertificate { pair, directory: self.path.clone() })
    }
}

impl ClientCertificate {
    pub fn leaf(&self) -> Option<&CertificateDer<'static>> {
        self.pair.chain().first()
    }
}

/// Identifies the certificate and its directory, for messages about a CA that refuses it.
impl fmt::Display for ClientCertificate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let leaf = self.pair.leaf();
        let (directory, names, serial) = (self.directory.display(), leaf.names(), &leaf.serial);
        write!(f, "in {directory} ({names}, serial {serial}, valid until {})", rfc3339(self.pair.not_after()))
    }
}

#[cfg(test)]
mod tests;
