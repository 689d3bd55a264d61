//! What all ways of looking a path up have in common.

use std::ffi::{OsStr, OsString};
use std::path::{Component, Path};

use rustix::fs::{Statx, makedev};

/// As many links as the kernel follows in one path.
pub(super) const MAX_LINKS: usize = 40;

/// Device and inode number: one directory may have several paths, and a path may lead to another directory than before.
pub type Inode = (u64, u64);

pub(super) fn inode_of(status: &Statx) -> Inode {
    (makedev(status.stx_dev_major, status.stx_dev_minor), status.stx_ino)
}

/// The names of `path`, the last one first: what is ahead of a look-up is a stack.
pub(super) fn names_from_last(path: &Path) -> impl Iterator<Item = OsString> {
    path.components().rev().filter_map(|component| match component {
        Component::Normal(name) => Some(name.to_owned()),
        Component::ParentDir => Some(OsStr::new("..").to_owned()),
        _ => None,
    })
}
