//! Replaces small files as a whole: a reader sees the old content or the new one, also after a power cut.

use std::fs::{self, File, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use zeroize::Zeroizing;

use super::create::private_directories;
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
    let (new, file) = (directory.join(format!("{name}.new")), directory.join(name));
    let failed = |doing: &'static str, path: &Path| {
        let path = path.to_owned();
        move |source| NotReplaced { doing, path, source }
    };
    private_directories(directory).map_err(failed("creating", directory))?;
    match fs::remove_file(&new) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed("removing", &new)(error)),
        _ => {}
    }
    let opened = File::options().write(true).create_new(true).mode(0o600).open(&new);
    let mut opened = opened.map_err(failed("writing", &new))?;
    let Some(content) = content() else {
        let _ = fs::remove_file(&new);
        return Ok(());
    };
    let written = opened.write_all(&content);
    drop(content);
    if let Err(error) = written.and_then(|()| opened.sync_all()) {
        // A half of it would only take room.
        let _ = fs::remove_file(&new);
        return Err(failed("writing", &new)(error));
    }
    fs::rename(&new, &file).map_err(failed("replacing", &file))?;
    File::open(directory).and_then(|dir| dir.sync_all()).map_err(failed("syncing", directory))
}

/// Replaces the file at `path` by one with `content` and the same permissions; a new one gets 0644. Waits for the disk.
pub fn replace_public(path: &Path, content: &[u8]) -> Result<(), NotReplaced> {
    let directory = file::directory_of(path);
    let name = path.file_name().unwrap_or_default();
    let new = directory.join(format!(".{}.new", name.display()));
    let failed = |doing: &'static str, path: &Path| {
        let path = path.to_owned();
        move |source| NotReplaced { doing, path, source }
    };
    let mode = fs::metadata(path).map_or(0o644, |metadata| metadata.permissions().mode() & 0o777);
    let write = || {
        let mut file = File::options().write(true).create(true).truncate(true).mode(mode).open(&new)?;
        file.set_permissions(Permissions::from_mode(mode))?;
        file.write_all(content)?;
        file.sync_all()
    };
    if let Err(source) = write() {
        let _ = fs::remove_file(&new);
        return Err(failed("writing", &new)(source));
    }
    fs::rename(&new, path).map_err(failed("replacing", path))?;
    File::open(directory).and_then(|dir| dir.sync_all()).map_err(failed("syncing", directory))
}
