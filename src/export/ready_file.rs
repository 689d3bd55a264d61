//! A file that exists while the agent is ready, for programs that can wait for a file but can't call the agent.

use std::fs::{self, File, Permissions, TryLockError};
use std::io::{self, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

use crate::base::backoff::Backoff;
use crate::base::failure_log::FailureLog;
use crate::fs::disk::Disk;
use crate::fs::file::{self, directory_of};
use crate::store::health::Health;

/// The beginning of the file's content. A file that begins differently is not the agent's, and is left alone.
const MARK: &[u8] = b"attache is ready";
/// More bytes than an agent writes.
const LIMIT: u64 = 256;
const BACKOFF: Backoff = Backoff { base: Duration::from_secs(1), cap: Duration::from_secs(60) };

/// The ready file at a path. The file is removed when this is dropped.
#[derive(Debug)]
pub struct ReadyFile {
    path: PathBuf,
    /// Open and locked while the file exists, so that other agents see that its owner is alive.
    file: Option<Arc<File>>,
    failures: FailureLog,
    disk: Disk,
}

/// Why the path can't be used.
#[derive(Debug, thiserror::Error)]
pub enum ReadyFileError {
    #[error(
        "opening the directory of the ready file {path} failed: {source}; create or mount it, or choose another path with --ready-file"
    )]
    Directory { path: PathBuf, source: io::Error },
    #[error(
        "{path} exists and is not the ready file of an agent: remove it, or choose another path with --ready-file"
    )]
    Foreign { path: PathBuf },
    #[error(
        "the ready file {path} belongs to {owner}: stop that agent, or choose another path with --ready-file"
    )]
    Taken { path: PathBuf, owner: String },
    #[error(
        "removing the stale ready file {path} failed: {source}; {}choose another path with --ready-file",
        file::remedy(source)
    )]
    Stale { path: PathBuf, source: io::Error },
}

impl ReadyFile {
    /// Claims `path`. A file left by a killed agent is removed; that of a running agent is an error. If the disk does not
    /// answer now, this happens when the file is written.
    pub fn claim(path: PathBuf, disk: &Disk) -> Result<Self, ReadyFileError> {
        let file = path.clone();
        let clear = move || match Self::is_stale(&file)?.then(|| fs::remove_file(&file)) {
            Some(Err(source)) => Err(ReadyFileError::Stale { path: file, source }),
            _ => Ok(()),
        };
        disk.attempt(&path, clear).transpose()?;
        Ok(Self { path, file: None, failures: FailureLog::default(), disk: disk.clone() })
    }

    /// Whether a killed agent has left its file at `path`. Any other file there is an error.
    pub fn is_stale(path: &Path) -> Result<bool, ReadyFileError> {
        let path_buf = || path.to_owned();
        if let Err(source) = fs::read_dir(directory_of(path)) {
            return Err(ReadyFileError::Directory { path: path_buf(), source });
        }
        match file::read(path, LIMIT) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            // A power failure leaves an empty file.
            Ok(content) if content.is_empty() || content.starts_with(MARK) => match owner(path) {
                Some(owner) => Err(ReadyFileError::Taken { path: path_buf(), owner }),
                None => Ok(true),
            },
            Err(source) if source.kind() == io::ErrorKind::PermissionDenied => {
                Err(ReadyFileError::Stale { path: path_buf(), source })
            }
            Ok(_) | Err(_) => Err(ReadyFileError::Foreign { path: path_buf() }),
        }
    }

    pub fn directory(&self) -> &Path {
        directory_of(&self.path)
    }

    /// Keeps the file in line with `health`, until its sender is dropped.
    pub async fn run(mut self, mut health: watch::Receiver<Health>) {
        let mut failures = 0;
        loop {
            let is_ready = health.borrow_and_update().is_ready();
            let must_retry = is_ready != self.file.is_some() && !self.update(is_ready).await;
            failures = if must_retry { failures + 1 } else { 0 };
            let retry_in = BACKOFF.delay(failures, fastrand::f64());
            tokio::select! {
                changed = health.changed() => if changed.is_err() { break },
                () = tokio::time::sleep(retry_in), if must_retry => {}
            }
        }
        if self.file.is_some() {
            self.update(false).await;
        }
    }

    /// Creates the file if it does not exist, or removes it if it does. Returns whether the file's existence matches `is_ready`.
    async fn update(&mut self, is_ready: bool) -> bool {
        let (path, ours) = (self.path.clone(), self.file.clone());
        let work = move || match ours {
            Some(ours) => remove(&path, &ours).map(|()| None),
            None => write(&path).map(|file| Some(Arc::new(file))),
        };
        let outcome = self.disk.spawn(&self.path, work).await.map_err(io::Error::other).flatten();
        let path = self.path.display();
        match outcome {
            Ok(file) => {
                self.file = file;
                if self.failures.recovered() {
                    tracing::info!(%path, "ready file up to date again");
                }
            }
            Err(error) if self.failures.is_new(&error.to_string()) => {
                let action = if is_ready { "written" } else { "removed" };
                let remedy = file::remedy(&error);
                tracing::warn!(
                    %path,
                    %error,
                    "ready file not {action}, retrying; {remedy}choose another path with --ready-file"
                );
            }
            Err(_) => {}
        }
        self.file.is_some() == is_ready
    }
}

impl Drop for ReadyFile {
    fn drop(&mut self) {
        let Some(file) = self.file.take() else { return };
        let path = self.path.clone();
        if let Some(Err(error)) = self.disk.attempt(&self.path, move || remove(&path, &file)) {
            tracing::warn!(path = %self.path.display(), %error, "ready file not removed");
        }
    }
}

/// The running agent that owns the file at `path`, if there is one.
fn owner(path: &Path) -> Option<String> {
    let file = file::open(path).ok()?;
    // A shared lock, so that two processes that check at the same time don't take each other for the owner.
    if !matches!(file.try_lock_shared(), Err(TryLockError::WouldBlock)) {
        return None;
    }
    let content = file::read(path, LIMIT).ok();
    let text = content.as_ref().and_then(|content| std::str::from_utf8(content).ok()).unwrap_or_default();
    let pid = text.split_once("(process ").and_then(|(_, rest)| rest.split_once(')'));
    let pid = pid.and_then(|(pid, _)| pid.parse::<u32>().ok());
    Some(format!("a running agent{}", pid.map(|pid| format!(" (process {pid})")).unwrap_or_default()))
}

/// Creates the file by a rename, complete and locked: a reader never sees part of it, and no agent takes it for stale.
fn write(path: &Path) -> io::Result<File> {
    if let Some(owner) = owner(path) {
        return Err(io::Error::new(io::ErrorKind::ResourceBusy, format!("it belongs to {owner}")));
    }
    let mut new = path.as_os_str().to_owned();
    new.push(".new");
    let new = PathBuf::from(new);
    match fs::remove_file(&new) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let text = format!("{} (process {})\n", String::from_utf8_lossy(MARK), std::process::id());
    let mut file = File::options().write(true).create_new(true).mode(0o644).open(&new)?;
    // Regardless of the umask.
    let written =
        file.write_all(text.as_bytes()).and_then(|()| file.set_permissions(Permissions::from_mode(0o644)));
    // Some file systems don't support locks.
    let _ = file.try_lock();
    let renamed = written.and_then(|()| fs::rename(&new, path));
    if renamed.is_err() {
        let _ = fs::remove_file(&new);
    }
    renamed.map(|()| file)
}

/// Removes `ours`, unless another file has taken its place.
fn remove(path: &Path, ours: &File) -> io::Result<()> {
    let id = |found: fs::Metadata| (found.dev(), found.ino());
    match fs::symlink_metadata(path).map(id) {
        Ok(there) if there == id(ours.metadata()?) => fs::remove_file(path),
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_agents_own_stale_file_is_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("ready");
        drop(write(&path).unwrap());
        assert!(fs::read(&path).unwrap().starts_with(MARK));
        for stale in [true, false] {
            assert_eq!(path.exists(), stale);
            ReadyFile::claim(path.clone(), &Disk::default()).unwrap();
        }
        fs::write(&path, "precious").unwrap();
        let error = ReadyFile::claim(path.clone(), &Disk::default()).unwrap_err().to_string();
        assert!(error.contains("--ready-file") && path.exists(), "{error}");
        let error = ReadyFile::claim(directory.path().to_owned(), &Disk::default()).unwrap_err().to_string();
        assert!(error.contains("not the ready file of an agent"), "{error}");
        let error = ReadyFile::claim(path.join("ready"), &Disk::default()).unwrap_err().to_string();
        assert!(error.contains("create or mount"), "{error}");
    }

    #[tokio::test]
    async fn a_running_agents_file_is_neither_replaced_nor_removed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("ready");
        // Both start while the file does not exist.
        let mut first = ReadyFile::claim(path.clone(), &Disk::default()).unwrap();
        let mut second = ReadyFile::claim(path.clone(), &Disk::default()).unwrap();
        assert!(first.update(true).await && !second.update(true).await && !second.update(true).await);
        let pid = std::process::id();
        for error in [
            ReadyFile::claim(path.clone(), &Disk::default()).unwrap_err().to_string(),
            write(&path).unwrap_err().to_string(),
        ] {
            assert!(error.contains(&format!("a running agent (process {pid})")), "{error}");
        }
        drop(second);
        assert!(path.exists());
        // Another file has taken its place.
        fs::remove_file(&path).unwrap();
        let _theirs = write(&path).unwrap();
        assert!(first.update(false).await && path.exists());
        drop(first);
        assert!(path.exists());
    }
}
