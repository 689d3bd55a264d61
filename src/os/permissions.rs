//! What everybody on this machine could read or replace, because of the modes of files and folders. It is told at the start
//! and refused nowhere: who may get at what is the user's to decide.
//!
//! In a pod nothing is told of what is a mount of its own, or lies directly in one, and nowhere of the kubelet's volumes: they
//! are open to everybody (an emptyDir has the mode 0777, a projected token 0644), and what keeps others out is that they are
//! mounted into no other container. Elsewhere mounts say nothing of that kind: `/run` is one, and so are the folders that a
//! unit of systemd may write to.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, StatxAttributes, StatxFlags, statx};

use crate::auth::token;
use crate::auth::token_file::TokenFile;
use crate::ca::embedded;
use crate::config::{Config, Provider};
use crate::fs::file;
use crate::fs::generation::{KEY_FILE, Place};
use crate::net::endpoint::Roots;
use crate::source::issuer::StateDir;

/// The right of everybody to read.
const READ: u32 = 0o004;
/// The right of everybody to write, which with a socket is that to connect.
const WRITE: u32 = 0o002;
/// The right of everybody to go through a folder.
const PASS: u32 = 0o001;
const STICKY: u32 = 0o1000;

/// What a person should know of the agent's files, and of its sockets at `sds` and `admin`: a sentence for each.
pub fn concerns(config: &Config, sds: &Path, admin: Option<&Path>, is_in_pod: bool) -> Vec<String> {
    let mut concerns = Vec::new();
    let is_limited = !config.allowed.uids.is_empty() || !config.allowed.gids.is_empty();
    if !is_limited && is_open(sds, WRITE, is_in_pod) {
        concerns.push(format!(
            "everybody on this machine can connect to {} and gets the workload's key: give it --socket-mode 0660 \
             (SocketMode= in a .socket unit), or name who may connect with --allow-uid or --allow-gid",
            sds.display()
        ));
    }
    if let Some(admin) = admin.filter(|admin| is_open(admin, WRITE, is_in_pod)) {
        concerns.push(format!(
            "everybody on this machine can use the admin socket {}: give it the mode 0600 (SocketMode= in a .socket unit)",
            admin.display()
        ));
    }
    // One folder may be on the way to several: it is told of once.
    let mut told = BTreeSet::new();
    for (folder, what) in folders(config, sds, admin) {
        let Some(open) = writable(&folder, is_in_pod).filter(|open| told.insert(open.clone())) else {
            continue;
        };
        let lies = if folder.canonicalize().is_ok_and(|real| real == open) { "" } else { "on the way to " };
        concerns.push(format!(
            "everybody on this machine can write to {}, {lies}{what}, and replace what is there: take that right away \
             (chmod o-w), or let each remove only what is their own (chmod +t)",
            open.display()
        ));
    }
    for (file, what) in secrets(config) {
        if is_open(&file, READ, is_in_pod) {
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
fn folders(config: &Config, sds: &Path, admin: Option<&Path>) -> Vec<(PathBuf, &'static str)> {
    let of = |file: &Path, what: &'static str| (file::folder_of(file).to_owned(), what);
    let sockets = std::iter::once(sds).chain(admin);
    let mut folders: Vec<_> = sockets.map(|socket| of(socket, "the folder of the socket")).collect();
    folders.extend(config.workload.state.iter().map(|state| (state.path().to_owned(), "the --state-dir")));
    folders.extend(config.output.iter().map(|output| (output.folder.clone(), "the --output-dir")));
    for provider in &config.providers {
        if let Provider::Embedded { folder } = provider {
            folders.push((folder.clone(), "the --ca-dir"));
        }
        let roots = match provider.endpoint().map(|(endpoint, _)| &endpoint.roots) {
            Some(Roots::File(file)) => Some(file),
            Some(Roots::FirstOf(files)) => files.iter().find(|file| file.exists()),
            Some(Roots::System) | None => None,
        };
        folders.extend(roots.map(|file| of(file, "the folder of the CA's root")));
        folders.extend(
            credentials(provider).iter().map(|file| of(file, "the folder of a credential for the CA")),
        );
        let certificate = provider.client_cert();
        folders.extend(certificate.map(|folder| (folder.path().to_owned(), "the --ca-client-cert-dir")));
    }
    let mounted = config.files.mounted.iter().filter_map(Place::home);
    folders.extend(mounted.map(|folder| (folder.to_owned(), "a folder whose certificates are served")));
    folders
}

/// The files with what `provider` is called with, but for a client certificate.
fn credentials(provider: &Provider) -> Vec<PathBuf> {
    let token = provider.token();
    let token = token.as_ref().and_then(token::Settings::file).map(TokenFile::path);
    let others = provider.files().into_iter().filter(|file| !file.is_pem).map(|file| file.path);
    token.into_iter().chain(others).map(Path::to_owned).collect()
}

/// Files that nobody else should read.
fn secrets(config: &Config) -> BTreeMap<PathBuf, &'static str> {
    let mut secrets = BTreeMap::new();
    for provider in &config.providers {
        secrets.extend(
            credentials(provider).into_iter().map(|file| (file, "which holds a credential for the CA")),
        );
        let certificate = provider.client_cert();
        secrets.extend(certificate.map(|folder| (folder.path().join(KEY_FILE), "a private key")));
        if let Provider::Embedded { folder } = provider {
            secrets.insert(folder.join(embedded::KEY_FILE), "the embedded CA's key");
        }
    }
    let keys = config.files.mounted.iter().filter_map(|place| place.key_pair.as_ref());
    secrets.extend(keys.map(|(_, key)| (key.clone(), "a private key")));
    secrets.extend(
        config.workload.state.iter().map(|state| (StateDir::file(state), "which holds the last key")),
    );
    secrets
}

/// Whether everybody has `right` to the file, and can get there.
fn is_open(path: &Path, right: u32, is_in_pod: bool) -> bool {
    mode(path).is_some_and(|mode| mode & right != 0) && is_reachable(path) && !is_mounted(path, is_in_pod)
}

/// The first folder on the way to `folder`, or that itself, where everybody can put something in the place of what others
/// have.
fn writable(folder: &Path, is_in_pod: bool) -> Option<PathBuf> {
    let real = folder.canonicalize().ok()?;
    let mut way: Vec<_> = real.ancestors().collect();
    way.reverse();
    for folder in way {
        let mode = mode(folder)?;
        // Nobody else gets in, or further.
        if mode & PASS == 0 {
            return None;
        }
        if mode & WRITE != 0 && mode & STICKY == 0 && !(is_in_pod && is_mount(folder)) {
            return Some(folder.to_owned());
        }
    }
    None
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

/// Whether the file lies in a volume that the kubelet keeps, behind `..data`, or in a pod is a mount or directly in one.
fn is_mounted(path: &Path, is_in_pod: bool) -> bool {
    let Ok(real) = path.canonicalize() else { return false };
    let is_kubelets = |part: &OsStr| part.as_encoded_bytes().starts_with(b"..");
    let is_pods = is_in_pod && (is_mount(&real) || real.parent().is_some_and(is_mount));
    is_pods || real.iter().any(is_kubelets)
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
        // Of the place, the folder, the file; what others can write to on the way to the folder, and whether they can read
        // the file.
        let cases = [
            (0o755, 0o755, 0o600, None, false),
            (0o755, 0o777, 0o644, Some("folder"), true),
            (0o755, 0o1777, 0o640, None, false),
            (0o755, 0o770, 0o644, None, false),
            (0o700, 0o777, 0o644, None, false),
            // Who can replace a folder can replace what is in it.
            (0o777, 0o755, 0o600, Some(""), false),
            (0o777, 0o700, 0o600, Some(""), false),
            (0o1777, 0o755, 0o600, None, false),
            (0o776, 0o755, 0o644, None, false),
        ];
        for (outer, inner, mode, open_folder, is_file_open) in cases {
            let case = format!("{outer:o} {inner:o} {mode:o}");
            chmod(&file, mode);
            chmod(&folder, inner);
            chmod(place.path(), outer);
            let open_folder = open_folder.map(|name| place.path().canonicalize().unwrap().join(name));
            assert_eq!(
                (writable(&folder, false), is_open(&file, READ, false)),
                (open_folder, is_file_open),
                "{case}"
            );
        }
        let nowhere = place.path().join("nowhere");
        assert!(writable(&nowhere, false).is_none() && !is_open(&nowhere, READ, false));
    }

    #[test]
    fn a_pods_mounts_and_the_kubelets_volumes_are_others_to_decide_on() {
        assert!(is_mount(Path::new("/proc")) && !is_mount(Path::new("/proc/self")));
        // Elsewhere much lies directly in a mount: in /run, in /dev/shm, in what a unit may write to.
        for is_in_pod in [false, true] {
            assert_eq!(is_open(Path::new("/proc/version"), READ, is_in_pod), !is_in_pod);
            assert!(is_open(Path::new("/proc/sys/kernel/ostype"), READ, is_in_pod));
        }
        let place = tempfile::tempdir().unwrap();
        chmod(place.path(), 0o755);
        fs::create_dir(place.path().join("..2026_11")).unwrap();
        fs::write(place.path().join("..2026_11/token"), "").unwrap();
        std::os::unix::fs::symlink("..2026_11", place.path().join("..data")).unwrap();
        std::os::unix::fs::symlink("..data/token", place.path().join("token")).unwrap();
        chmod(&place.path().join("..2026_11/token"), 0o644);
        assert!(!is_open(&place.path().join("token"), READ, false));
        fs::write(place.path().join("other"), "").unwrap();
        chmod(&place.path().join("other"), 0o644);
        assert!(is_open(&place.path().join("other"), READ, false));
    }
}
