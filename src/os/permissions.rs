//! What every local user could read or replace, because of the modes of files and directories. Logged at the start and never
//! an error: access is the user's decision.
//!
//! In a Pod, a mount and what lies directly in it are not reported, and the kubelet's volumes are reported nowhere: they are open
//! to every user (an emptyDir has mode 0777, a projected token 0644), and what keeps others out is that no other container
//! mounts them. Outside Pods, a mount is no such protection: `/run` is one, and so are the directories that a systemd unit may
//! write to.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, StatxAttributes, StatxFlags, statx};

use crate::fs::pending::PendingOperations;

const OTHERS_READ: u32 = 0o004;
/// For a socket, the right to connect.
const OTHERS_WRITE: u32 = 0o002;
const GROUP_WRITE: u32 = 0o020;
/// For a directory, the right to pass through it.
const OTHERS_SEARCH: u32 = 0o001;
const STICKY: u32 = 0o1000;

/// Paths that should not be open to every user.
#[derive(Debug, Default)]
pub struct Inventory {
    pub sockets: Vec<Socket>,
    /// Directories in which other users should not replace anything, each with its description.
    pub directories: Vec<(PathBuf, &'static str)>,
    /// Files that other users should not read, each with its description.
    pub secrets: BTreeMap<PathBuf, &'static str>,
    /// Files that other users should not change, each with its description.
    pub settings: BTreeMap<PathBuf, &'static str>,
    /// Directories to which keys are written, each with the mode of the key.
    pub exported_keys: Vec<(PathBuf, u32)>,
}

/// A socket to which not every user should connect.
#[derive(Debug)]
pub struct Socket {
    pub path: PathBuf,
    /// Its description, and what a connection gives away.
    pub what: &'static str,
    pub remedy: &'static str,
}

/// What a person should know about the modes of these paths: one message each.
pub fn concerns(inventory: &Inventory, is_in_pod: bool, pending: &PendingOperations) -> Vec<String> {
    let mut concerns = Vec::new();
    for Socket { path, what, remedy } in &inventory.sockets {
        let _operation = pending.begin(path);
        if is_open(path, OTHERS_WRITE, is_in_pod) {
            concerns.push(format!("every local user can connect to {}, {what}: {remedy}", path.display()));
        }
    }
    // One directory may be on the path to several: it is reported once.
    let mut reported = BTreeSet::new();
    for (directory, what) in &inventory.directories {
        let _operation = pending.begin(directory);
        let open = writable_ancestor(directory, is_in_pod);
        let Some(open) = open.filter(|open| reported.insert(open.clone())) else { continue };
        let above =
            if directory.canonicalize().is_ok_and(|real| real == open) { "" } else { "on the path to " };
        concerns.push(format!(
            "every local user can write to {}, {above}{what}, and replace what is there: remove that right (chmod o-w), or \
             let users remove only their own files (chmod +t)",
            open.display()
        ));
    }
    for (file, what) in &inventory.secrets {
        let _operation = pending.begin(file);
        if is_open(file, OTHERS_READ, is_in_pod) {
            concerns.push(format!(
                "every local user can read {}, {what}: remove that right (chmod o-r)",
                file.display()
            ));
        }
    }
    for (file, what) in &inventory.settings {
        let _operation = pending.begin(file);
        if let Some(who) = writers(file, is_in_pod) {
            concerns.push(format!(
                "{who} can write to {}, {what}: remove that right (chmod go-w)",
                file.display()
            ));
        }
    }
    for (directory, mode) in &inventory.exported_keys {
        let _operation = pending.begin(directory);
        if mode & OTHERS_READ != 0 && is_reachable(directory) {
            concerns.push(format!(
                "every local user can read the key in {}: choose another --output-key-mode (or mode of --output), or close the directory to other \
                 users (chmod o-x)",
                directory.display()
            ));
        }
    }
    concerns
}

/// Whether every user has `right` to the file and can reach it.
fn is_open(path: &Path, right: u32, is_in_pod: bool) -> bool {
    mode(path).is_some_and(|mode| mode & right != 0) && is_reachable(path) && !is_mounted(path, is_in_pod)
}

/// Who else than the owner has the right to write to the file.
fn writers(path: &Path, is_in_pod: bool) -> Option<String> {
    if is_open(path, OTHERS_WRITE, is_in_pod) {
        return Some("every local user".to_owned());
    }
    let found = fs::metadata(path).ok()?;
    let group = writing_group(found.mode(), found.uid(), found.gid())?;
    (!is_mounted(path, is_in_pod)).then(|| format!("group {group}"))
}

/// The group that may write, unless that is root's, or the user's own.
fn writing_group(mode: u32, user: u32, group: u32) -> Option<u32> {
    // A group for each user has the user's number, and no other members.
    (mode & GROUP_WRITE != 0 && group != 0 && group != user).then_some(group)
}

/// The first directory on the path to `directory`, or that itself, where every user can replace entries of others.
fn writable_ancestor(directory: &Path, is_in_pod: bool) -> Option<PathBuf> {
    let real = directory.canonicalize().ok()?;
    let mut path: Vec<_> = real.ancestors().collect();
    path.reverse();
    for directory in path {
        let mode = mode(directory)?;
        // Other users can't get in or further.
        if mode & OTHERS_SEARCH == 0 {
            return None;
        }
        if mode & OTHERS_WRITE != 0 && mode & STICKY == 0 && !(is_in_pod && is_mount(directory)) {
            return Some(directory.to_owned());
        }
    }
    None
}

fn mode(path: &Path) -> Option<u32> {
    Some(fs::metadata(path).ok()?.permissions().mode())
}

/// Whether every user can pass through each directory on the path.
fn is_reachable(path: &Path) -> bool {
    let real = path.canonicalize();
    real.is_ok_and(|real| {
        let mut directories = real.ancestors().skip(1);
        directories.all(|directory| mode(directory).is_some_and(|mode| mode & OTHERS_SEARCH != 0))
    })
}

/// Whether the file lies in a volume of the kubelet, behind `..data`, or, in a Pod, is a mount or lies directly in one.
fn is_mounted(path: &Path, is_in_pod: bool) -> bool {
    let Ok(real) = path.canonicalize() else { return false };
    let is_kubelets = |part: &OsStr| part.as_encoded_bytes().starts_with(b"..");
    let is_pods = is_in_pod && (is_mount(&real) || real.parent().is_some_and(is_mount));
    is_pods || real.iter().any(is_kubelets)
}

/// Whether the path is a mount point. Kernels before 5.8 don't report this and count as no.
fn is_mount(path: &Path) -> bool {
    let attributes = statx(CWD, path, AtFlags::empty(), StatxFlags::empty());
    attributes.is_ok_and(|found| found.stx_attributes.contains(StatxAttributes::MOUNT_ROOT))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chmod(path: &Path, mode: u32) {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn an_open_mode_counts_only_where_every_user_can_reach_it() {
        let place = tempfile::tempdir().unwrap();
        let (directory, file) = (place.path().join("directory"), place.path().join("directory/file"));
        fs::create_dir(&directory).unwrap();
        fs::write(&file, "").unwrap();
        // Modes of the place, the directory and the file; what other users can write to on the path to the directory, and
        // whether they can read the file.
        let cases = [
            (0o755, 0o755, 0o600, None, false),
            (0o755, 0o777, 0o644, Some("directory"), true),
            (0o755, 0o1777, 0o640, None, false),
            (0o755, 0o770, 0o644, None, false),
            (0o700, 0o777, 0o644, None, false),
            // A user who can replace a directory can replace what is in it.
            (0o777, 0o755, 0o600, Some(""), false),
            (0o777, 0o700, 0o600, Some(""), false),
            (0o1777, 0o755, 0o600, None, false),
            (0o776, 0o755, 0o644, None, false),
        ];
        for (outer, inner, mode, open_directory, is_file_open) in cases {
            let case = format!("{outer:o} {inner:o} {mode:o}");
            chmod(&file, mode);
            chmod(&directory, inner);
            chmod(place.path(), outer);
            let open_directory = open_directory.map(|name| place.path().canonicalize().unwrap().join(name));
            assert_eq!(
                (writable_ancestor(&directory, false), is_open(&file, OTHERS_READ, false)),
                (open_directory, is_file_open),
                "{case}"
            );
        }
        let nowhere = place.path().join("nowhere");
        assert!(writable_ancestor(&nowhere, false).is_none() && !is_open(&nowhere, OTHERS_READ, false));
    }

    #[test]
    fn who_else_can_change_a_file_is_named() {
        let cases = [
            (0o664, 1000, 100, Some(100)),
            (0o664, 1000, 1000, None),
            (0o664, 1000, 0, None),
            (0o644, 1000, 100, None),
        ];
        for (mode, user, group, expected) in cases {
            assert_eq!(writing_group(mode, user, group), expected, "{mode:o} {user} {group}");
        }
        let place = tempfile::tempdir().unwrap();
        chmod(place.path(), 0o755);
        let file = place.path().join("options");
        fs::write(&file, "").unwrap();
        for (mode, expected) in [(0o646, Some("every local user")), (0o644, None)] {
            chmod(&file, mode);
            assert_eq!(writers(&file, false).as_deref(), expected);
        }
        assert_eq!(writers(&place.path().join("nowhere"), false), None);
    }

    #[test]
    fn a_pods_mounts_and_the_kubelets_volumes_are_not_reported() {
        assert!(is_mount(Path::new("/proc")) && !is_mount(Path::new("/proc/self")));
        // Outside Pods much lies directly in a mount: in /run, in /dev/shm, in what a unit may write to.
        for is_in_pod in [false, true] {
            assert_eq!(is_open(Path::new("/proc/version"), OTHERS_READ, is_in_pod), !is_in_pod);
            assert!(is_open(Path::new("/proc/sys/kernel/ostype"), OTHERS_READ, is_in_pod));
        }
        let place = tempfile::tempdir().unwrap();
        chmod(place.path(), 0o755);
        fs::create_dir(place.path().join("..2026_11")).unwrap();
        fs::write(place.path().join("..2026_11/token"), "").unwrap();
        std::os::unix::fs::symlink("..2026_11", place.path().join("..data")).unwrap();
        std::os::unix::fs::symlink("..data/token", place.path().join("token")).unwrap();
        chmod(&place.path().join("..2026_11/token"), 0o644);
        assert!(!is_open(&place.path().join("token"), OTHERS_READ, false));
        fs::write(place.path().join("other"), "").unwrap();
        chmod(&place.path().join("other"), 0o644);
        assert!(is_open(&place.path().join("other"), OTHERS_READ, false));
    }
}
