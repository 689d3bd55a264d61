//! New directories and files with the permissions that they need.

use std::fs::{self, DirBuilder, File, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::Path;

/// Creates missing directories that only the agent's user may enter: who can write there can replace what is below.
pub fn private_directories(path: &Path) -> io::Result<()> {
    missing(path, private_directory)
}

/// Creates missing directories that others may enter as far as the umask allows it, and not write to.
pub fn readable_directories(path: &Path) -> io::Result<()> {
    missing(path, |path| DirBuilder::new().mode(0o755).create(path))
}

/// Creates a directory with mode 0700. The umask may take the owner's own rights.
pub(super) fn private_directory(path: &Path) -> io::Result<()> {
    DirBuilder::new().mode(0o700).create(path)?;
    fs::set_permissions(path, Permissions::from_mode(0o700))
}

fn missing(path: &Path, create: fn(&Path) -> io::Result<()>) -> io::Result<()> {
    if path.as_os_str().is_empty() || path.is_dir() {
        return Ok(());
    }
    if let Some(parent) = path.parent() {
        missing(parent, create)?;
    }
    match create(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => Ok(()),
        other => other,
    }
}

/// Creates a file with these permissions, whatever the umask. It must not exist.
pub(super) fn new_file(path: &Path, mode: u32) -> io::Result<File> {
    let file = File::options().create_new(true).write(true).mode(mode).open(path)?;
    file.set_permissions(Permissions::from_mode(mode))?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_of_others_are_never_writable_and_private_ones_are_the_owners() {
        let place = tempfile::tempdir().unwrap();
        let mode = |path: &str| fs::metadata(place.path().join(path)).unwrap().permissions().mode() & 0o777;
        readable_directories(&place.path().join("a/b")).unwrap();
        private_directories(&place.path().join("a/c/d")).unwrap();
        assert_eq!(["a", "a/b"].map(|path| mode(path) & 0o722), [0o700, 0o700]);
        assert_eq!(["a/c", "a/c/d"].map(mode), [0o700, 0o700]);
        private_directories(&place.path().join("a/b")).unwrap();
        assert_eq!(mode("a/b"), mode("a"), "what exists stays as it is");
    }
}
