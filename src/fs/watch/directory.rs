//! Follows the files of a directory: changes, and names that appear or disappear.

use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio::sync::Notify;

use super::{NameListener, Watch, Watcher};

/// A name that no file has: looking it up has the directory watched.
const NEVER: &str = ".attache-never";

/// A directory that is followed.
#[derive(Debug)]
pub struct DirectoryWatch {
    watch: Watch,
    appeared: Arc<Appeared>,
}

/// Notified when a name appears or disappears.
#[derive(Debug, Default)]
struct Appeared(Notify);

impl NameListener for Appeared {
    fn changed(&self, _: &OsStr) {
        self.0.notify_one();
    }
}

impl DirectoryWatch {
    /// Follows `directory`. Whatever happens after this call is noticed. Touches the disk.
    pub fn new(directory: &Path, watcher: &Watcher) -> Self {
        /// A directory in which files come and go all the time is looked at again anyway.
        const ATTEMPTS: usize = 5;
        let appeared = Arc::<Appeared>::default();
        let mut attempts = 0;
        loop {
            attempts += 1;
            let files = files(directory).unwrap_or_default();
            let mut names = files.clone();
            names.push(directory.join(NEVER));
            let mut watch = watcher.watch(names);
            watch.arm();
            watch.listen(OsStr::new(NEVER), Arc::clone(&appeared) as _);
            if attempts == ATTEMPTS || self::files(directory).unwrap_or_default() == files {
                return Self { watch, appeared };
            }
        }
    }

    /// Returns once something may have changed.
    pub async fn changed(&self) {
        tokio::select! {
            _ = self.watch.changed() => {}
            () = self.appeared.0.notified() => {}
        }
    }
}

/// The regular files of a directory, links followed, sorted. Names that begin with a dot are none: editors' and the
/// kubelet's own.
pub fn files(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(directory)? {
        let entry = entry?;
        let is_hidden = entry.file_name().as_bytes().starts_with(b".");
        if !is_hidden && entry.path().is_file() {
            files.push(entry.path());
        }
    }
    files.sort_unstable();
    Ok(files)
}
