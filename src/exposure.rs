//! What everybody on this machine could read or replace, because of the modes of files and folders. It is told at the start
//! and refused nowhere: who may get at what is the user's to decide.
//!
//! Nothing is told of what is a mount of its own, or lies directly in one, nor of the kubelet's volumes. In a pod all volumes
//! are open to everybody (an emptyDir has the mode 0777, a projected token 0644), and what keeps others out is that they are
//! mounted into no other container. On a machine without containers few things lie so, and those were put there on
//! purpose.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, StatxAttributes, StatxFlags, statx};

use crate::ca::embedded;
use crate::ca::vault::Access;
use crate::config::{Config, Provider};
use crate::plain_file;
use crate::source::workload::StateFolder;

/// The right of everybody to read.
const READ: u32 = 0o004;
/// The right of everybody to write, which with a socket is that to connect.
const WRITE: u32 = 0o002;
/// The right of everybody to go through a folder.
const PASS: u32 = 0o001;
const STICKY: u32 = 0o1000;

/// What a person should know of the agent's files, and of its sockets at `sds` and `admin`: a sentence for each.
pub fn concerns(config: &Config, sds: &Path, admin: Option<&Path>) -> Vec<String> {
    let mut concerns = Vec::new();
    let is_limited = !config.allowed.uids.is_empty() || !config.allowed.gids.is_empty();
    if !is_limited && is_open(sds, WRITE) {
        concerns.push(format!(
            "everybody on this machine can connect to {} and gets the workload's key: give it --socket-mode 0660 \
             (SocketMode= in a .socket unit), or name who may connect with --allow-uid or --allow-gid",
            sds.display()
        ));
    }
    if let Some(admin) = admin.filter(|admin| is_open(admin, WRITE)) {
        concerns.push(format!(
            "everybody on this machine can use the admin socket {}: give it the mode 0600 (SocketMode= in a .socket unit)",
            admin.display()
        ));
    }
    for (folder, what) in folders(config, sds, admin) {
        if is_writable(&folder) {
            concerns.push(format!(
                "everybody on this machine can write to {}, {what}, and replace what is there: take that right away \
                 (chmod o-w), or let each remove only what is their own (chmod +t)",
                folder.display()
            ));
        }
    }
    for (file, what) in secrets(config) {
        if is_open(&file, READ) {
            concerns.push(format!(
                "everybody on this machine can read {}, {what}: take that right away (chmod o-r)",
                file.display()
            ));
        }
    }
    if let Some(output) = config.output.as_ref().filter(|output| output.key_mode & READ != 0)
        && is_reachable(&output.folder)
    {
        concerns.push(format!(
            "everybody on this machine can read the key in {}: choose another --output-key-mode, or close the folder to \
             others (chmod o-x)",
            output.folder.display()
        ));
    }
    concerns
}

/// Folders in which others should change nothing.
fn folders(config: &Config, sds: &Path, admin: Option<&Path>) -> BTreeMap<PathBuf, &'static str> {
    let mut folders = BTreeMap::new();
    for socket in std::iter::once(sds).chain(admin) {
        folders.insert(plain_file::folder_of(socket).to_owned(), "the folder of the socket");
    }
    folders.extend(config.workload.state.iter().map(|state| (state.path().to_owned(), "the --state-dir")));
    folders.extend(config.output.iter().map(|output| (output.folder.clone(), "the --output-dir")));
    for provider in &config.providers {
        if let Provider::Embedded { folder } = provider {
            folders.insert(folder.clone(), "the --ca-dir");
        }
    }
    folders
}

/// Files that nobody else should read.
fn secrets(config: &Config) -> BTreeMap<PathBuf, &'static str> {
    let mut secrets = BTreeMap::new();
    let token = "which holds a token";
    for provider in &config.providers {
        match provider {
            Provider::Citadel { token: settings, .. } | Provider::GoogleCas { token: settings, .. } => {
                secrets.extend(settings.file().map(|file| (file.path().to_owned(), token)));
            }
            Provider::Vault { settings, .. } => {
                let file = match &settings.access {
                    Access::Token(file) => Some(file),
                    Access::Login { jwt, .. } => jwt.file(),
                };
                secrets.extend(file.map(|file| (file.path().to_owned(), token)));
            }
            Provider::Kubernetes { token: file, .. } => {
                secrets.insert(file.path().to_owned(), token);
            }
            Provider::Cfssl { auth_key, .. } => {
                secrets.extend(auth_key.iter().map(|file| (file.clone(), "which holds cfssl's auth_key")));
            }
            Provider::Embedded { folder } => {
                secrets.insert(folder.join(embedded::KEY_FILE), "the embedded CA's key");
            }
            Provider::Exec { .. } => {}
        }
    }
    let keys = config.files.mounted.iter().filter_map(|place| place.key_pair.as_ref());
    secrets.extend(keys.map(|(_, key)| (key.clone(), "a private key")));
    secrets.extend(
        config.workload.state.iter().map(|state| (StateFolder::file(state), "which holds the last key")),
    );
    secrets
}

/// Whether everybody has `right` to the file, and can get there.
fn is_open(path: &Path, right: u32) -> bool {
    mode(path).is_some_and(|mode| mode & right != 0) && is_reachable(path) && !is_mounted(path)
}

/// Whether everybody can put something in the place of what others have in the folder.
fn is_writable(folder: &Path) -> bool {
    let mode = mode(folder).unwrap_or_default();
    mode & WRITE != 0 && mode & STICKY == 0 && is_reachable(folder) && !is_mount(folder)
}

fn mode(path: &Path) -> Option<u32> {
    Some(fs::metadata(path).ok()?.permissions().mode())
}

/// Whether each folder on the way lets everybody through.
fn is_reachable(path: &Path) -> bool {
    let real = path.canonicalize();
    real.is_ok_and(|real| {
        real.ancestors().skip(1).all(|folder| mode(folder).is_some_and(|mode| mode & PASS != 0))
    })
}

/// Whether the file is a mount, lies in the folder of one, or in a volume that the kubelet keeps: behind `..data`.
fn is_mounted(path: &Path) -> bool {
    let Ok(real) = path.canonicalize() else { return false };
    let is_kubelets = |part: &OsStr| part.as_encoded_bytes().starts_with(b"..");
    is_mount(&real) || real.parent().is_some_and(is_mount) || real.iter().any(is_kubelets)
}

/// Whether something is mounted there. A kernel that can't tell (before 5.8) says no.
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
    fn what_is_open_to_everybody_is_so_only_where_they_can_get_to() {
        let place = tempfile::tempdir().unwrap();
        let (folder, file) = (place.path().join("folder"), place.path().join("folder/file"));
        fs::create_dir(&folder).unwrap();
        fs::write(&file, "").unwrap();
        // Of the place, the folder, the file; whether others can write to the folder, and read the file.
        let cases = [
            (0o755, 0o755, 0o600, false, false),
            (0o755, 0o777, 0o644, true, true),
            (0o755, 0o1777, 0o640, false, false),
            (0o755, 0o770, 0o644, false, false),
            (0o700, 0o777, 0o644, false, false),
        ];
        for (outer, inner, mode, is_folder_open, is_file_open) in cases {
            let case = format!("{outer:o} {inner:o} {mode:o}");
            chmod(&file, mode);
            chmod(&folder, inner);
            chmod(place.path(), outer);
            assert_eq!(
                (is_writable(&folder), is_open(&file, READ)),
                (is_folder_open, is_file_open),
                "{case}"
            );
        }
        assert!(!is_writable(&place.path().join("nowhere")) && !is_open(&place.path().join("nowhere"), READ));
    }

    #[test]
    fn mounts_and_the_kubelets_volumes_are_others_to_decide_on() {
        assert!(is_mount(Path::new("/proc")) && !is_mount(Path::new("/proc/self")));
        assert!(is_mounted(Path::new("/proc/version")) && !is_mounted(Path::new("/proc/sys/kernel/ostype")));
        let place = tempfile::tempdir().unwrap();
        chmod(place.path(), 0o755);
        fs::create_dir(place.path().join("..2026_11")).unwrap();
        fs::write(place.path().join("..2026_11/token"), "").unwrap();
        std::os::unix::fs::symlink("..2026_11", place.path().join("..data")).unwrap();
        std::os::unix::fs::symlink("..data/token", place.path().join("token")).unwrap();
        chmod(&place.path().join("..2026_11/token"), 0o644);
        assert!(!is_open(&place.path().join("token"), READ));
        fs::write(place.path().join("other"), "").unwrap();
        chmod(&place.path().join("other"), 0o644);
        assert!(is_open(&place.path().join("other"), READ));
    }
}
