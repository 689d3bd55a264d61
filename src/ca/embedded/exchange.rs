//! Another directory of a CA takes the place of the one that is served: at no moment there is none.

use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use rustix::fs::{CWD, RenameFlags, renameat_with};

use super::{Files, OpenError};
use crate::base::clock::rfc3339;
use crate::fs::file;
use crate::pki::certificate::Certificate;

/// Why two directories were not exchanged. Both are as they were.
#[derive(Debug, thiserror::Error)]
pub enum ExchangeError {
    #[error(transparent)]
    Unusable(#[from] OpenError),
    #[error(
        "exchanging {directory} and {with} failed: {source}; both must be directories of one file system, and neither a mount \
         point"
    )]
    Failed { directory: PathBuf, with: PathBuf, source: io::Error },
}

/// What signs from now on.
#[derive(Debug)]
pub struct Exchanged {
    pub subject: String,
    pub not_after: String,
}

/// Exchanges `directory` and `with`, in one step. What is in `with` must be able to sign at `now`. Waits for the disk.
pub fn exchange(directory: &Path, with: &Path, now: SystemTime) -> Result<Exchanged, ExchangeError> {
    let failed = |source: io::Error| {
        let (directory, with) = (directory.to_owned(), with.to_owned());
        ExchangeError::Failed { directory, with, source }
    };
    // Against commands that change the roots of the one that goes.
    let _guard = file::lock_directory(directory).map_err(failed)?;
    let authority = Files::read(with)?.check(with, now)?;
    let facts = Certificate::parse(&authority.signer).map_err(|error| failed(io::Error::other(error)))?;
    renameat_with(CWD, directory, CWD, with, RenameFlags::EXCHANGE).map_err(|error| failed(error.into()))?;
    let parent = file::directory_of(directory);
    std::fs::File::open(parent).and_then(|parent| parent.sync_all()).map_err(failed)?;
    Ok(Exchanged { subject: facts.subject, not_after: rfc3339(facts.not_after).to_string() })
}
