//! Why the kernel denies a permission, for error messages: the mode and owner of a file, and the ids of this process.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use rustix::process::{getegid, geteuid, getgroups};

use crate::base::text;

/// Mode and owner of what denies access to `path`, on the way or there, and the ids of this process.
pub fn denial(path: &Path) -> String {
    let (user, group) = (geteuid().as_raw(), getegid().as_raw());
    let groups = getgroups().unwrap_or_default();
    let mut others: Vec<_> =
        groups.into_iter().map(|other| other.as_raw()).filter(|other| *other != group).collect();
    others.sort_unstable();
    let others =
        if others.is_empty() { String::new() } else { format!(", also {}", text::listed(others, ", ")) };
    let caller = format!("this process is user {user}, group {group}{others}");
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    // A directory that can't be searched hides what is beneath it.
    let found = path.ancestors().find_map(|place| Some((place, fs::metadata(place).ok()?)));
    let Some((place, found)) = found else { return caller };
    let (mode, owner, owners) = (found.mode() & 0o7777, found.uid(), found.gid());
    format!("{} has mode {mode:04o}, user {owner} and group {owners}, and {caller}", place.display())
}

/// The remedy where no file can be created in `directory`, to be followed by another remedy.
pub fn directory_remedy(directory: &Path, error: &io::Error) -> String {
    let shown = directory.display();
    match (error.kind(), fs::metadata(directory)) {
        (io::ErrorKind::PermissionDenied, _) => {
            format!("{}: give it write permission on the directory", denial(directory))
        }
        (io::ErrorKind::ReadOnlyFilesystem, _) => format!("mount {shown} writable"),
        (_, Ok(found)) if !found.is_dir() => format!("{shown} is not a directory: move it away"),
        _ => format!("create or mount {shown}"),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn a_denial_names_mode_owner_and_the_callers_ids() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("socket");
        fs::write(&socket, "").unwrap();
        fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o700)).unwrap();
        fs::set_permissions(&socket, fs::Permissions::from_mode(0o640)).unwrap();
        let (user, group) = (geteuid().as_raw(), getegid().as_raw());
        let words = denial(&socket);
        let expected = format!(
            "{} has mode 0640, user {user} and group {group}, and this process is user {user}",
            socket.display()
        );
        assert!(words.starts_with(&expected), "{words}");
        // What can't be looked at is hidden by the directory above.
        let hidden = denial(&directory.path().join("hidden/socket"));
        assert!(hidden.starts_with(&format!("{} has mode 0700", directory.path().display())), "{hidden}");
    }

    #[test]
    fn each_unusable_directory_has_its_remedy() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("file");
        fs::write(&file, "").unwrap();
        let cases = [
            (directory.path().to_owned(), io::ErrorKind::PermissionDenied, "give it write permission"),
            (directory.path().to_owned(), io::ErrorKind::ReadOnlyFilesystem, "writable"),
            (file, io::ErrorKind::NotADirectory, "is not a directory: move it away"),
            (directory.path().join("no"), io::ErrorKind::NotFound, "create or mount"),
        ];
        for (path, kind, words) in cases {
            let remedy = directory_remedy(&path, &kind.into());
            assert!(remedy.contains(words), "{remedy}");
        }
    }
}
