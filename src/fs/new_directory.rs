//! New directories of files that belong together: a directory appears with all its files, or not at all.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use super::create::{new_file, private_directories, private_directory};
use super::file;
use super::replace::{NotReplaced, failed};

/// A file of a new directory.
#[derive(Clone, Copy)]
pub struct NewFile<'a> {
    pub name: &'static str,
    /// Its permissions, whatever the umask.
    pub mode: u32,
    pub content: &'a [u8],
}

/// Why a directory was not created. The text names the remedy.
#[derive(Debug, thiserror::Error)]
pub enum NotCreated {
    #[error(
        "{path} exists, and is never overwritten; choose another directory, or delete {path} if it is not needed"
    )]
    Exists { path: PathBuf },
    #[error("{directory} is not empty (it has {name:?}); choose a new or an empty directory")]
    NotEmpty { directory: PathBuf, name: String },
    #[error("{directory} is the current directory, which can't be replaced; choose a directory below it")]
    Current { directory: PathBuf },
    #[error("{0}choose another directory")]
    Failed(#[from] NotReplaced),
}

/// Creates `directory` (mode 0700) with `files`. It may exist if it is empty. `precious` are the names of files that an
/// existing directory is refused for by name. Waits for the disk.
///
/// The files are written to a directory beside it, which is renamed. A call that is killed may leave that one behind, whose
/// name begins with a dot and ends in `.new`: it may hold a key, and no other call touches it.
pub fn create(directory: &Path, files: &[NewFile<'_>], precious: &[&str]) -> Result<(), NotCreated> {
    // A link to a directory stays, and so does a path that ends in `..`.
    let directory = fs::canonicalize(directory).unwrap_or_else(|_| directory.to_owned());
    refuse_used(&directory, precious)?;
    // Its shell would be left in a directory that has gone.
    if std::env::current_dir().is_ok_and(|current| current == directory) {
        return Err(NotCreated::Current { directory });
    }
    let name = directory.file_name().ok_or(io::ErrorKind::InvalidInput.into());
    let name = name.map_err(failed("creating", &directory))?;
    let parent = file::directory_of(&directory);
    private_directories(parent).map_err(failed("creating", parent))?;
    let new = parent.join(format!(".{}.{:016x}.new", name.display(), fastrand::u64(..)));
    if let Err(source) = write(&new, files) {
        // A half of it would only take room.
        let _ = fs::remove_dir_all(&new);
        return Err(failed("writing", &new)(source).into());
    }
    if let Err(source) = fs::rename(&new, &directory) {
        let _ = fs::remove_dir_all(&new);
        refuse_used(&directory, precious)?;
        return Err(failed("creating", &directory)(source).into());
    }
    let synced = File::open(parent).and_then(|parent| parent.sync_all());
    Ok(synced.map_err(failed("syncing", parent))?)
}

fn refuse_used(directory: &Path, precious: &[&str]) -> Result<(), NotCreated> {
    if let Some(path) =
        precious.iter().map(|name| directory.join(name)).find(|path| fs::symlink_metadata(path).is_ok())
    {
        return Err(NotCreated::Exists { path });
    }
    let entry = fs::read_dir(directory).ok().and_then(|mut entries| entries.next()?.ok());
    match entry {
        Some(entry) => {
            let name = entry.file_name().to_string_lossy().into_owned();
            Err(NotCreated::NotEmpty { directory: directory.to_owned(), name })
        }
        None => Ok(()),
    }
}

fn write(directory: &Path, files: &[NewFile<'_>]) -> io::Result<()> {
    private_directory(directory)?;
    for NewFile { name, mode, content } in files {
        let mut file = new_file(&directory.join(name), *mode)?;
        file.write_all(content)?;
        file.sync_all()?;
    }
    File::open(directory)?.sync_all()
}

/// Writes `files` (name, permissions, content) to an existing directory, under temporary names first: a full disk leaves no
/// partial set, and readers see no partial file.
pub fn write_into(directory: &Path, files: &[(&str, u32, &[u8])]) -> io::Result<()> {
    let temporary = |name: &str| directory.join(format!(".{name}.new"));
    for (name, mode, content) in files {
        let _ = fs::remove_file(temporary(name));
        new_file(&temporary(name), *mode)?.write_all(content)?;
    }
    files.iter().try_for_each(|(name, ..)| fs::rename(temporary(name), directory.join(name)))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    const KEY: NewFile<'_> = NewFile { name: "key", mode: 0o600, content: b"secret" };
    const ROOT: NewFile<'_> = NewFile { name: "root", mode: 0o644, content: b"public" };

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o777
    }

    #[test]
    fn a_new_directory_has_all_files_with_their_modes() {
        let place = tempfile::tempdir().unwrap();
        let directory = place.path().join("a/b");
        create(&directory, &[KEY, ROOT], &["key"]).unwrap();
        assert_eq!(mode(&directory), 0o700);
        assert_eq!((mode(&directory.join("key")), mode(&directory.join("root"))), (0o600, 0o644));
        assert_eq!(fs::read(directory.join("key")).unwrap(), b"secret");
        assert_eq!(fs::read_dir(place.path().join("a")).unwrap().count(), 1, "nothing else is left");
    }

    #[test]
    fn an_empty_directory_is_used_and_one_with_files_stays_as_it_is() {
        let place = tempfile::tempdir().unwrap();
        let [empty, keyed, other] = ["empty", "keyed", "other"].map(|name| place.path().join(name));
        for directory in [&empty, &keyed, &other] {
            fs::create_dir(directory).unwrap();
        }
        create(&empty, &[KEY], &["key"]).unwrap();
        assert_eq!(mode(&empty), 0o700);
        fs::write(keyed.join("key"), "precious").unwrap();
        let error = create(&keyed, &[KEY], &["key"]).unwrap_err().to_string();
        assert!(error.contains("keyed/key exists, and is never overwritten"), "{error}");
        assert_eq!(fs::read(keyed.join("key")).unwrap(), b"precious");
        fs::write(other.join("notes"), "").unwrap();
        let error = create(&other, &[KEY], &["key"]).unwrap_err().to_string();
        assert!(error.contains("other is not empty (it has \"notes\")"), "{error}");
    }

    #[test]
    fn what_another_call_has_left_is_not_touched_and_stops_nothing() {
        let place = tempfile::tempdir().unwrap();
        let left = place.path().join(".ca.new");
        fs::create_dir(&left).unwrap();
        fs::write(left.join("key"), "precious").unwrap();
        create(&place.path().join("ca"), &[KEY], &["key"]).unwrap();
        assert_eq!(fs::read(left.join("key")).unwrap(), b"precious");
    }

    #[test]
    fn missing_directories_above_belong_to_the_owner_alone() {
        let place = tempfile::tempdir().unwrap();
        create(&place.path().join("a/b/ca"), &[KEY], &["key"]).unwrap();
        assert_eq!([mode(&place.path().join("a")), mode(&place.path().join("a/b"))], [0o700, 0o700]);
    }
}
