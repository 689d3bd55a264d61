//! Replaces small files as a whole: a reader sees the old content or the new one, also after a power cut.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use zeroize::Zeroizing;

use super::create::{new_file, private_directories};
use super::file;

/// The step of a replacement that failed. The text ends with a remedy and a comma, or with a semicolon: the caller adds its own.
#[derive(Debug, thiserror::Error)]
#[error("{doing} {path} failed: {source}; {}", file::remedy(source))]
pub struct NotReplaced {
    /// Like `writing`.
    pub doing: &'static str,
    pub path: PathBuf,
    pub source: io::Error,
}

/// Replaces the file `name` in `directory`, which is created if it is missing, by one that only the agent's user may read.
/// `content` is called as late as possible and its result dropped as early as possible, because there is a key in it; with
/// none nothing is replaced. Waits for the disk.
pub fn replace(
    directory: &Path,
    name: &str,
    content: impl FnOnce() -> Option<Zeroizing<Vec<u8>>>,
) -> Result<(), NotReplaced> {
    private_directories(directory).map_err(failed("creating", directory))?;
    put(&directory.join(format!("{name}.new")), &directory.join(name), 0o600, content)
}

/// Replaces the file at `path` by one with `content` and the same permissions; a new one gets 0644. Waits for the disk.
pub fn replace_public(path: &Path, content: &[u8]) -> Result<(), NotReplaced> {
    let name = path.file_name().unwrap_or_default();
    let new = file::directory_of(path).join(format!(".{}.new", name.display()));
    let mode = fs::metadata(path).map_or(0o644, |metadata| metadata.permissions().mode() & 0o777);
    put(&new, path, mode, || Some(content))
}

/// Writes `content` to the file `new`, and renames that to `path` in the same directory.
fn put<C: AsRef<[u8]>>(
    new: &Path,
    path: &Path,
    mode: u32,
    content: impl FnOnce() -> Option<C>,
) -> Result<(), NotReplaced> {
    match fs::remove_file(new) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed("removing", new)(error)),
        _ => {}
    }
    let mut opened = new_file(new, mode).map_err(failed("writing", new))?;
    let Some(content) = content() else {
        let _ = fs::remove_file(new);
        return Ok(());
    };
    let written = opened.write_all(content.as_ref());
    drop(content);
    if let Err(error) = written.and_then(|()| opened.sync_all()) {
        // A half of it would only take room.
        let _ = fs::remove_file(new);
        return Err(failed("writing", new)(error));
    }
    fs::rename(new, path).map_err(failed("replacing", path))?;
    let directory = file::directory_of(path);
    File::open(directory).and_then(|dir| dir.sync_all()).map_err(failed("syncing", directory))
}

/// Names the step that failed.
pub(super) fn failed(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> NotReplaced {
    let path = path.to_owned();
    move |source| NotReplaced { doing, path, source }
}
