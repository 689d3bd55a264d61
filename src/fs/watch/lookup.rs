//! A path as the chain of look-ups that the kernel makes for it, links resolved.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Component, Path, PathBuf};

/// As many links as the kernel follows in one path.
pub(super) const MAX_LINKS: usize = 40;

/// Device and inode number: a new directory at the same path needs a new watch, and one directory may have several
/// paths.
pub(super) type Inode = (u64, u64);
/// What to watch, by path: directories, and files with several names.
pub(super) type Inodes = BTreeMap<PathBuf, Inode>;

/// What decides where a set of paths leads.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Lookups {
    /// Every name that is looked up, with its directory.
    pub(super) names: BTreeSet<PathBuf>,
    pub(super) inodes: Inodes,
}

impl Lookups {
    pub(super) fn of(paths: &[PathBuf]) -> Self {
        let chains: Vec<_> = paths.iter().map(|path| chain(path)).collect();
        let files = chains.iter().filter_map(|chain| file_with_several_names(chain.last()?));
        let names: BTreeSet<PathBuf> = chains.iter().flatten().cloned().collect();
        let inodes = names.iter().filter_map(|name| directory(name.parent()?)).chain(files).collect();
        Self { names, inodes }
    }
}

/// Every name that is looked up on the way to `path`, each with its directory, links resolved. The chain stops at the
/// first name that doesn't exist: nothing behind it can appear before it does.
fn chain(path: &Path) -> Vec<PathBuf> {
    let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let mut ahead: Vec<OsString> = Vec::new();
    let push_ahead = |ahead: &mut Vec<OsString>, path: &Path| {
        ahead.extend(path.components().rev().filter_map(|component| match component {
            Component::Normal(name) => Some(name.to_owned()),
            Component::ParentDir => Some(OsStr::new("..").to_owned()),
            _ => None,
        }));
    };
    push_ahead(&mut ahead, &absolute);
    let mut directory = PathBuf::from("/");
    let mut chain = Vec::new();
    let mut links = 0;
    while let Some(name) = ahead.pop() {
        if name == ".." {
            directory.pop();
            continue;
        }
        let step = directory.join(&name);
        chain.push(step.clone());
        match std::fs::read_link(&step) {
            Ok(target) if links < MAX_LINKS => {
                links += 1;
                if target.is_absolute() {
                    directory = PathBuf::from("/");
                }
                push_ahead(&mut ahead, &target);
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => break,
            _ => directory = step,
        }
    }
    chain
}

fn directory(path: &Path) -> Option<(PathBuf, Inode)> {
    let metadata = std::fs::metadata(path).ok().filter(std::fs::Metadata::is_dir)?;
    Some((path.to_owned(), (metadata.dev(), metadata.ino())))
}

/// The regular file at `path`, if it can be written to under another name.
fn file_with_several_names(path: &Path) -> Option<(PathBuf, Inode)> {
    use rustix::fs::{AtFlags, CWD, StatxAttributes, StatxFlags, statx};
    let metadata = std::fs::symlink_metadata(path).ok().filter(std::fs::Metadata::is_file)?;
    let is_mounted = || {
        let status = statx(CWD, path, AtFlags::SYMLINK_NOFOLLOW, StatxFlags::empty());
        status.is_ok_and(|status| status.stx_attributes.contains(StatxAttributes::MOUNT_ROOT))
    };
    (metadata.nlink() > 1 || is_mounted()).then(|| (path.to_owned(), (metadata.dev(), metadata.ino())))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn the_chain_of_a_mounted_file_contains_its_links() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path().canonicalize().unwrap();
        std::fs::create_dir_all(root.join("volume/..2026")).unwrap();
        symlink("..2026", root.join("volume/..data")).unwrap();
        symlink("..data/key.pem", root.join("volume/key.pem")).unwrap();
        symlink(root.join("volume"), root.join("mount")).unwrap();
        let names = chain(&root.join("mount/key.pem"));
        let names: Vec<_> =
            names.iter().filter_map(|path| path.strip_prefix(&root).ok()).filter_map(Path::to_str).collect();
        // Links appear under the names by which the kernel looks them up, in its order.
        assert_eq!(
            names,
            [
                "",
                "mount",
                "",
                "volume",
                "volume/key.pem",
                "volume/..data",
                "volume/..2026",
                "volume/..2026/key.pem"
            ]
        );
    }

    #[test]
    fn a_loop_of_links_is_left_after_as_many_as_the_kernel_follows() {
        let directory = tempfile::tempdir().unwrap();
        symlink("b", directory.path().join("a")).unwrap();
        symlink("a", directory.path().join("b")).unwrap();
        assert!(chain(&directory.path().join("a")).len() < 2 * MAX_LINKS + 20);
    }
}
