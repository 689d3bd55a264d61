//! The development CA as a CA client: no server, no network.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use super::{DevelopmentCa, OpenError};
use crate::base::clock::Clock;
use crate::base::failure_log::FailureLog;
use crate::ca::{CaError, CertificateAuthority, IssuedChain, SigningRequest};
use crate::fs::disk::Disk;

/// Signs with the CA in a directory, which is read for each request.
#[derive(Debug)]
pub struct Embedded {
    last_good: Mutex<LastGood>,
    directory: PathBuf,
    clock: Clock,
    /// None if the directory is not read again.
    disk: Option<Disk>,
}

#[derive(Debug, Default)]
struct LastGood {
    /// None until the directory could be read.
    ca: Option<Arc<DevelopmentCa>>,
    failures: FailureLog,
}

impl Embedded {
    /// Opens the CA in `directory` as [`DevelopmentCa::open`] does; with the first call, if the disk does not answer now.
    pub fn open(directory: &Path, clock: &Clock, disk: &Disk) -> Result<Self, OpenError> {
        let (path, its_clock) = (directory.to_owned(), clock.clone());
        let opened = disk.attempt(directory, move || DevelopmentCa::open(&path, its_clock)).transpose()?;
        let last_good = LastGood { ca: opened.map(Arc::new), failures: FailureLog::default() };
        let (directory, clock, disk) = (directory.to_owned(), clock.clone(), Some(disk.clone()));
        Ok(Self { last_good: Mutex::new(last_good), directory, clock, disk })
    }

    /// The CA in the directory, or the last good one.
    async fn ca(&self) -> Result<Arc<DevelopmentCa>, CaError> {
        let known = self.last_good(|last| last.ca.clone());
        let disk = match (&self.disk, &known) {
            (None, Some(known)) => return Ok(Arc::clone(known)),
            (None, None) => return Err(CaError::Local("the development CA is not open".to_owned())),
            (Some(disk), _) => disk,
        };
        let (directory, clock, is_open) = (self.directory.clone(), self.clock.clone(), known.is_some());
        let read = disk.run(&self.directory, move || match is_open {
            // A directory that has gone does not make another CA of this one.
            true => DevelopmentCa::load(&directory, clock),
            false => DevelopmentCa::open(&directory, clock),
        });
        match (read.await, known) {
            (Ok(Ok(ca)), _) => {
                let ca = Arc::new(ca);
                self.last_good(|last| {
                    last.ca = Some(Arc::clone(&ca));
                    if last.failures.recovered() {
                        tracing::info!(directory = %self.directory.display(), "CA directory usable again");
                    }
                });
                Ok(ca)
            }
            (Ok(Err(error)), Some(known)) => Ok(self.keep(known, &error.to_string())),
            (Err(error), Some(known)) => Ok(self.keep(known, &error.to_string())),
            (Ok(Err(error)), None) => Err(CaError::Local(error.to_string())),
            (Err(error), None) => Err(error.into()),
        }
    }

    fn keep(&self, known: Arc<DevelopmentCa>, error: &str) -> Arc<DevelopmentCa> {
        if self.last_good(|last| last.failures.is_new(error)) {
            tracing::warn!(error, "CA directory not usable, signing with the last good CA");
        }
        known
    }

    fn last_good<T>(&self, use_it: impl FnOnce(&mut LastGood) -> T) -> T {
        use_it(&mut self.last_good.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl From<DevelopmentCa> for Embedded {
    fn from(ca: DevelopmentCa) -> Self {
        let (directory, clock) = (ca.directory.clone(), ca.clock.clone());
        let last_good = LastGood { ca: Some(Arc::new(ca)), failures: FailureLog::default() };
        Self { last_good: Mutex::new(last_good), directory, clock, disk: None }
    }
}

#[tonic::async_trait]
impl CertificateAuthority for Embedded {
    fn name(&self) -> &'static str {
        "embedded"
    }

    async fn sign(&self, request: &SigningRequest) -> Result<IssuedChain, CaError> {
        let identity = request.identity.as_ref().ok_or_else(|| {
            CaError::Local("the development CA needs an identity: set --spiffe-id".to_owned())
        })?;
        let ca = self.ca().await?;
        let issued = ca.issue_with_names(&request.csr, identity, &request.names, request.ttl);
        let leaf = issued.map_err(|error| CaError::Local(error.to_string()))?;
        let chain = [&leaf].into_iter().chain(ca.intermediates()).cloned().collect();
        Ok(IssuedChain { chain, roots: ca.roots().to_vec() })
    }
}
