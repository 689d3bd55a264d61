//! The file that is there while the agent is ready: for whoever waits for it, and can't ask.

use std::fs::{self, File, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::sync::watch;

use crate::backoff::{Backoff, Repeats};
use crate::plain_file::{self, folder_of};
use crate::readiness::Standing;

/// How the file begins. What begins otherwise is somebody else's, and is left alone.
const WORDS: &[u8] = b"attache is ready";
/// More than an agent writes.
const LIMIT: u64 = 256;
const BACKOFF: Backoff = Backoff { base: Duration::from_secs(1), cap: Duration::from_secs(60) };

/// The file's path; the file goes when this is dropped.
#[derive(Debug)]
pub struct ReadyFile {
    path: PathBuf,
    is_there: bool,
    repeats: Repeats,
}

/// Why there can be no such file.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "each variant's message is its documentation")]
pub enum ReadyFileError {
    #[error(
        "the folder of the ready file {path} can't be used: {source}; create or mount it, or choose another path with --ready-file"
    )]
    Folder { path: PathBuf, source: io::Error },
    #[error(
        "{path} is there and is no ready file of an agent's: remove it, or choose another path with --ready-file"
    )]
    Foreign { path: PathBuf },
    #[error(
        "the ready file {path} of an earlier run can't be removed: {source}; {}choose another path with --ready-file",
        plain_file::way_out(source)
    )]
    Stale { path: PathBuf, source: io::Error },
}

impl ReadyFile {
    /// Takes `path`: what a run that was killed has left there is removed.
    pub fn claim(path: PathBuf) -> Result<Self, ReadyFileError> {
        if let Err(source) = fs::read_dir(folder_of(&path)) {
            return Err(ReadyFileError::Folder { path, source });
        }
        match plain_file::read(&path, LIMIT) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            // An empty one is what a power cut leaves of it.
            Ok(content) if content.is_empty() || content.starts_with(WORDS) => {
                if let Err(source) = fs::remove_file(&path) {
                    return Err(ReadyFileError::Stale { path, source });
                }
            }
            Err(source) if source.kind() == io::ErrorKind::PermissionDenied => {
                return Err(ReadyFileError::Stale { path, source });
            }
            Ok(_) | Err(_) => return Err(ReadyFileError::Foreign { path }),
        }
        Ok(Self { path, is_there: false, repeats: Repeats::default() })
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
            let is_behind = is_ready != self.is_there && !self.put(is_ready).await;
            failures = if is_behind { failures + 1 } else { 0 };
            let again = BACKOFF.delay(failures, fastrand::f64());
            tokio::select! {
                changed = standing.changed() => if changed.is_err() { return },
                () = tokio::time::sleep(again), if is_behind => {}
            }
        }
    }

    /// Makes the file, or removes it, beside the runtime's thread: a disk may take its time. Whether it succeeded.
    async fn put(&mut self, is_ready: bool) -> bool {
        let path = self.path.clone();
        let work = move || if is_ready { write(&path) } else { remove(&path) };
        let outcome = tokio::task::spawn_blocking(work).await.map_err(io::Error::other).flatten();
        let path = self.path.display();
        match outcome {
            Ok(()) => {
                self.is_there = is_ready;
                if self.repeats.recovered() {
                    tracing::info!(%path, "the ready file is as it should be again");
                }
            }
            Err(error) if self.repeats.is_news(&error.to_string()) => {
                let doing = if is_ready { "written" } else { "removed" };
                let way_out = plain_file::way_out(&error);
                tracing::warn!(
                    %path,
                    %error,
                    "the ready file can't be {doing}; {way_out}choose another path with --ready-file. It is tried again"
                );
            }
            Err(_) => {}
        }
        self.is_there == is_ready
    }
}

impl Drop for ReadyFile {
    fn drop(&mut self) {
        if self.is_there
            && let Err(error) = remove(&self.path)
        {
            tracing::warn!(path = %self.path.display(), %error, "the ready file could not be removed");
        }
    }
}

/// Puts the file there whole: nobody sees a half of it.
fn write(path: &Path) -> io::Result<()> {
    let mut new = path.as_os_str().to_owned();
    new.push(".new");
    let new = PathBuf::from(new);
    remove(&new)?;
    let text = format!("{} (process {})\n", String::from_utf8_lossy(WORDS), std::process::id());
    let mut file = File::options().write(true).create_new(true).mode(0o644).open(&new)?;
    // Whatever the umask is.
    let written =
        file.write_all(text.as_bytes()).and_then(|()| file.set_permissions(Permissions::from_mode(0o644)));
    let put = written.and_then(|()| fs::rename(&new, path));
    if put.is_err() {
        let _ = fs::remove_file(&new);
    }
    put
}

fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
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
        write(&path).unwrap();
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
}
