//! The directory with a file for each workload: what it holds, whenever that changes.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::sleep;

use crate::base::limits;
use crate::base::offload;
use crate::fs::disk::Disk;
use crate::fs::file;
use crate::fs::watch::Watcher;
use crate::fs::watch::directory::{self, DirectoryWatch};

/// What the files' names end with.
const SUFFIX: &str = "toml";
/// Between two looks, whatever happens in between.
const PAUSE: Duration = Duration::from_millis(100);

/// The files by the names of their workloads, or why there is no list of them.
pub(super) type Found = io::Result<BTreeMap<Arc<str>, WorkloadFile>>;

/// A file that describes a workload.
#[derive(Debug)]
pub(super) struct WorkloadFile {
    pub(super) path: PathBuf,
    pub(super) content: io::Result<Vec<u8>>,
}

/// Follows the directory.
#[derive(Debug)]
pub(super) struct WorkloadFiles {
    directory: PathBuf,
    watcher: Watcher,
    disk: Disk,
    watch: Option<DirectoryWatch>,
}

impl WorkloadFiles {
    /// Touches no disk yet.
    pub(super) fn new(directory: PathBuf, watcher: Watcher, disk: Disk) -> Self {
        Self { directory, watcher, disk, watch: None }
    }

    pub(super) fn directory(&self) -> &Path {
        &self.directory
    }

    /// Waits until something may have changed, and reads all files. The first time at once. A disk that does not answer is
    /// waited for.
    pub(super) async fn next(mut self) -> (Self, Found) {
        if let Some(watch) = &self.watch {
            watch.changed().await;
            sleep(PAUSE).await;
        }
        let (directory, watcher, before) = (self.directory.clone(), self.watcher.clone(), self.watch.take());
        let looking = self.disk.spawn(&self.directory, move || {
            let watch = DirectoryWatch::new(&directory, &watcher);
            // Only now, so that what both watch stays watched.
            drop(before);
            (watch, read_all(&directory))
        });
        let Some((watch, found)) = offload::finished(looking.await) else {
            return std::future::pending().await;
        };
        self.watch = Some(watch);
        (self, found)
    }
}

fn read_all(directory: &Path) -> Found {
    let mut found = BTreeMap::new();
    for path in directory::files(directory)? {
        let is_description = path.extension().is_some_and(|suffix| suffix == SUFFIX);
        let Some(name) = path.file_stem().and_then(|name| name.to_str()).filter(|_| is_description) else {
            continue;
        };
        let name = name.into();
        match file::read(&path, limits::OPTIONS_FILE_BYTES) {
            // It was removed meanwhile.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            read => {
                let content = read.map(|content| content.to_vec());
                found.insert(name, WorkloadFile { path, content });
            }
        }
    }
    Ok(found)
}
