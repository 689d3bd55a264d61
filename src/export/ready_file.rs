//! The file that is there while the agent is ready: for whoever waits for it, and can't ask.

use std::fs::{self, File, Permissions, TryLockError};
use std::io::{self, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

use crate::base::backoff::Backoff;
use crate::base::failure_log::FailureLog;
use crate::fs::file::{self, folder_of};
use crate::store::health::Standing;

/// How the file begins. What begins otherwise is somebody else's, and is left alone.
const WORDS: &[u8] = b"attache is ready";
/// More than an agent writes.
const LIMIT: u64 = 256;
const BACKOFF: Backoff = Backoff { base: Duration::from_secs(1), cap: Duration::from_secs(60) };

/// The file's path; the file goes when this is dropped.
#[derive(Debug)]
pub struct ReadyFile {
    path: PathBuf,
    /// Open and locked while it is there: so others see that we live.
    file: Option<Arc<File>>,
    repeats: FailureLog,
}

/// Why there can be no such file.
#[derive(Debug, thiserror::Error)]
pub enum ReadyFileError {
    #[error(
        "the folder of the ready file {path} can't be used: {source}; create or mount it, or choose another path with --ready-file"
    )]
    Folder { path: PathBuf, source: io::Error },
    #[error(
        "{path} is there and is no ready file of an agent's: remove it, or choose another path with --ready-file"
    )]
    Foreign { path: PathBuf },
    #[error("the ready file {path} is {holder}: stop that one, or choose another path with --ready-file")]
    Taken { path: PathBuf, holder: String },
    #[error(
        "the ready file {path} of an earlier run can't be removed: {source}; {}choose another path with --ready-file",
        file::way_out(source)
    )]
    Stale { path: PathBuf, source: io::Error },
}

impl ReadyFile {
    /// Takes `path`: what a run that was killed has left there is removed, a live agent's is left.
    pub fn claim(path: PathBuf) -> Result<Self, ReadyFileError> {
        if Self::is_stale(&path)?
            && let Err(source) = fs::remove_file(&path)
        {
            return Err(ReadyFileError::Stale { path, source });
        }
        Ok(Self { path, file: None, repeats: FailureLog::default() })
    }

    /// Whether a run that was killed has left its file at `path`. What is somebody else's is an error.
    pub fn is_stale(path: &Path) -> Result<bool, ReadyFileError> {
        let owned = || path.to_owned();
        if let Err(source) = fs::read_dir(folder_of(path)) {
            return Err(ReadyFileError::Folder { path: owned(), source });
        }
        match file::read(path, LIMIT) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            // An empty one is what a power cut leaves of it.
            Ok(content) if content.is_empty() || content.starts_with(WORDS) => match holder(path) {
                Some(holder) => Err(ReadyFileError::Taken { path: owned(), holder }),
                None => Ok(true),
            },
            Err(source) if source.kind() == io::ErrorKind::PermissionDenied => {
                Err(ReadyFileError::Stale { path: owned(), source })
            }
            Ok(_) | Err(_) => Err(ReadyFileError::Foreign { path: owned() }),
        }
    }

    /// Where it is written.
    pub fn folder(&self) -> &Path {
        folder_of(&self.path)
    }

    /// Keeps the file as `standing` has it, until nobody tells of that any more.
    pub async fn run(mut self, mut standing: watch::Receiver<Standing>) {
        let mut failures = 0;
        loop {
            let is_ready = standing.borrow_and_update().is_ready();
            let is_behind = is_ready != self.file.is_some() && !self.put(is_ready).await;
            failures = if is_behind { failures + 1 } else { 0 };
            let again = BACKOFF.delay(failures, fastrand::f64());
            tokio::select! {
                changed = standing.changed() => if changed.is_err() { return },
                () = tokio::time::sleep(again), if is_behind => {}
            }
        }
    }

    /// Makes the file where it is not, or removes it where it is, beside the runtime's thread: a disk may take its time.
    /// Whether it succeeded.
    async fn put(&mut self, is_ready: bool) -> bool {
        let (path, ours) = (self.path.clone(), self.file.clone());
        let work = move || match ours {
            Some(ours) => remove(&path, &ours).map(|()| None),
            None => write(&path).map(|file| Some(Arc::new(file))),
        };
        let outcome = tokio::task::spawn_blocking(work).await.map_err(io::Error::other).flatten();
        let path = self.path.display();
        match outcome {
            Ok(file) => {
                self.file = file;
                if self.repeats.recovered() {
                    tracing::info!(%path, "the ready file is as it should be again");
                }
            }
            Err(error) if self.repeats.is_new(&error.to_string()) => {
                let doing = if is_ready { "written" } else { "removed" };
                let way_out = file::way_out(&error);
                tracing::warn!(
                    %path,
                    %error,
                    "the ready file can't be {doing}; {way_out}choose another path with --ready-file. It is tried again"
                );
            }
            Err(_) => {}
        }
        self.file.is_some() == is_ready
    }
}

impl Drop for ReadyFile {
    fn drop(&mut self) {
        if let Some(file) = &self.file
            && let Err(error) = remove(&self.path, file)
        {
            tracing::warn!(path = %self.path.display(), %error, "the ready file could not be removed");
        }
    }
}

/// Whose the file is, if an agent that lives has it.
fn holder(path: &Path) -> Option<String> {
    let file = file::open(path).ok()?;
    // Shared: those who look don't take each other for its owner.
    if !matches!(file.try_lock_shared(), Err(TryLockError::WouldBlock)) {
        return None;
    }
    let content = file::read(path, LIMIT).ok();
    let text = content.as_ref().and_then(|content| std::str::from_utf8(content).ok()).unwrap_or_default();
    let pid = text.split_once("(process ").and_then(|(_, rest)| rest.split_once(')'));
    let pid = pid.and_then(|(pid, _)| pid.parse::<u32>().ok());
    Some(format!("a live agent's{}", pid.map(|pid| format!(" (process {pid})")).unwrap_or_default()))
}

/// Puts the file there whole, and locked: nobody sees a half of it, or takes it for a dead agent's.
fn write(path: &Path) -> io::Result<File> {
    if let Some(holder) = holder(path) {
        return Err(io::Error::new(io::ErrorKind::ResourceBusy, format!("it is {holder}")));
    }
    let mut new = path.as_os_str().to_owned();
    new.push(".new");
    let new = PathBuf::from(new);
    match fs::remove_file(&new) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let text = format!("{} (process {})\n", String::from_utf8_lossy(WORDS), std::process::id());
    let mut file = File::options().write(true).create_new(true).mode(0o644).open(&new)?;
    // Whatever the umask is.
    let written =
        file.write_all(text.as_bytes()).and_then(|()| file.set_permissions(Permissions::from_mode(0o644)));
    // Some file systems know no locks.
    let _ = file.try_lock();
    let put = written.and_then(|()| fs::rename(&new, path));
    if put.is_err() {
        let _ = fs::remove_file(&new);
    }
    put.map(|()| file)
}

/// Removes `ours`, unless something else is in its place.
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
    fn only_an_agents_own_file_is_taken_over() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ready");
        drop(write(&path).unwrap());
        assert!(fs::read(&path).unwrap().starts_with(WORDS));
        for stale in [true, false] {
            assert_eq!(path.exists(), stale);
            ReadyFile::claim(path.clone()).unwrap();
        }
        fs::write(&path, "precious").unwrap();
        let error = ReadyFile::claim(path.clone()).unwrap_err().to_string();
        assert!(error.contains("--ready-file") && path.exists(), "{error}");
        let error = ReadyFile::claim(folder.path().to_owned()).unwrap_err().to_string();
        assert!(error.contains("no ready file of an agent's"), "{error}");
        let error = ReadyFile::claim(path.join("ready")).unwrap_err().to_string();
        assert!(error.contains("create or mount"), "{error}");
    }

    #[tokio::test]
    async fn a_live_agents_file_is_neither_taken_over_nor_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ready");
        // Both start while none is there.
        let mut first = ReadyFile::claim(path.clone()).unwrap();
        let mut second = ReadyFile::claim(path.clone()).unwrap();
        assert!(first.put(true).await && !second.put(true).await && !second.put(true).await);
        let pid = std::process::id();
        for error in
            [ReadyFile::claim(path.clone()).unwrap_err().to_string(), write(&path).unwrap_err().to_string()]
        {
            assert!(error.contains(&format!("a live agent's (process {pid})")), "{error}");
        }
        drop(second);
        assert!(path.exists());
        // What has come into its place is not ours.
        fs::remove_file(&path).unwrap();
        let _theirs = write(&path).unwrap();
        assert!(first.put(false).await && path.exists());
        drop(first);
        assert!(path.exists());
    }
}
