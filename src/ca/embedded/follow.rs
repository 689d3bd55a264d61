//! A CA whose directory changes while it serves: a changed directory counts as a whole, or not at all.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

use super::{DevelopmentCa, Files};
use crate::base::clock::Clock;
use crate::base::failure_log::FailureLog;
use crate::base::text;
use crate::fs::disk::Disk;
use crate::pki::certificate::Certificate;
use crate::secret::Version;

/// How often the directory is read.
const INTERVAL: Duration = Duration::from_secs(1);
/// How long a change must have stood still: files are replaced one after the other.
const SETTLED: Duration = Duration::from_millis(300);

/// Reads the directory of a CA again and again.
#[derive(Debug)]
pub struct Follower {
    current: watch::Sender<Arc<DevelopmentCa>>,
    directory: PathBuf,
    clock: Clock,
    disk: Disk,
    failures: FailureLog,
}

/// One look at the directory.
type Look = Result<Version, String>;

impl Follower {
    /// Follows the directory of `ca`. The receiver has the newest CA whose files fit together.
    pub fn new(ca: DevelopmentCa, disk: Disk) -> (Self, watch::Receiver<Arc<DevelopmentCa>>) {
        let (directory, clock) = (ca.directory.clone(), ca.clock.clone());
        let (current, receiver) = watch::channel(Arc::new(ca));
        (Self { current, directory, clock, disk, failures: FailureLog::default() }, receiver)
    }

    /// Does not return.
    pub async fn run(mut self) {
        loop {
            tokio::time::sleep(INTERVAL).await;
            let look = self.look().await;
            let is_served = look.as_ref() == Ok(&self.current.borrow().version);
            if is_served {
                if self.failures.recovered() {
                    tracing::info!(directory = %self.directory.display(), "CA directory usable again");
                }
                continue;
            }
            tokio::time::sleep(SETTLED).await;
            if self.look().await == look {
                self.take().await;
            }
        }
    }

    async fn look(&self) -> Look {
        let directory = self.directory.clone();
        let read =
            self.disk.run(&self.directory, move || Files::read(&directory).map(|files| files.version()));
        match read.await {
            Ok(read) => read.map_err(|error| error.to_string()),
            Err(error) => Err(error.to_string()),
        }
    }

    async fn take(&mut self) {
        let (directory, clock) = (self.directory.clone(), self.clock.clone());
        let loaded = self.disk.run(&self.directory, move || DevelopmentCa::load(&directory, clock)).await;
        let error = match loaded {
            Ok(Ok(ca)) => return self.switch(ca),
            Ok(Err(error)) => error.to_string(),
            Err(error) => error.to_string(),
        };
        if self.failures.is_new(&error) {
            tracing::warn!(error, "changed CA directory not used, signing with the last good CA");
        }
    }

    fn switch(&mut self, ca: DevelopmentCa) {
        self.failures.recovered();
        let names = |certificates: &[_]| {
            let facts = certificates.iter().filter_map(|der| Certificate::parse(der).ok());
            let names: Vec<_> =
                facts.map(|facts| format!("{} (serial {})", facts.subject, facts.serial)).collect();
            text::listed(names.iter(), "; ")
        };
        let signer = names(std::slice::from_ref(&ca.signer));
        tracing::info!(signer, roots = names(&ca.roots), "CA certificates changed");
        self.current.send_replace(Arc::new(ca));
    }
}
