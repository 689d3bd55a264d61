//! The directory of a volume: made, mounted on, and removed. All of it waits for the disk.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::UnixListener;
use std::path::Path;

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, chmodat, mkdirat, openat, unlinkat};
use rustix::io::Errno;
use tonic::Code;

use super::mounts::{Mount, mount_id, mount_memory, unmount_newest};
use super::record::Record;
use super::socket::bind_over;
use super::target::{DIRECTORY, Target};
use crate::os::denial::denial;

/// The name of the socket in a volume.
pub(super) const SOCKET: &str = "socket";
/// The mode of a volume's socket, unless its attributes name another: the Pod is the boundary.
const SOCKET_MODE: u32 = 0o666;
/// Mounts on one directory.
const MOUNTS: usize = 64;
/// Entries of a directory that are removed.
const ENTRIES: usize = 10_000;
/// A volume has files, and directories of files that belong together.
const DEPTH: u32 = 2;

/// Why a volume is not there. The text names the remedy.
#[derive(Debug, thiserror::Error)]
pub(super) enum NotPrepared {
    #[error(
        "{target} can't be reached: {source}; is --kubelet-dir the kubelet's directory, mounted at the same path?"
    )]
    Unreachable { target: String, source: io::Error },
    #[error("{target} can't be made: {source} ({})", denial(Path::new(target)))]
    NotMade { target: String, source: io::Error },
    #[error(
        "attribute files: {source}: files need a mount, and the agent has no right to mount; deploy its privileged manifest \
         (privileged: true, and mountPropagation: Bidirectional for the kubelet's directory), or leave out files"
    )]
    NoRightToMount { source: io::Error },
    #[error(
        "attribute files: what the agent mounts in the kubelet's directory is not seen by Pods; mount that directory with \
         mountPropagation: Bidirectional, as the agent's privileged manifest does, or leave out files"
    )]
    NotPropagated,
    #[error("attribute files: mounting a file system in memory on {target} failed: {source}")]
    NotMounted { target: String, source: io::Error },
    #[error("attribute files: something else is mounted on {target}; unmount it")]
    ForeignMount { target: String },
    #[error(
        "the socket in {target} can't get group {group}: {source}; the agent needs the capability CHOWN, or attribute \
         socket-mode a mode for all users, like 0666"
    )]
    NoGroup { target: String, group: u32, source: io::Error },
    #[error("the socket in {target} can't be made: {source}")]
    NoSocket { target: String, source: io::Error },
}

impl NotPrepared {
    /// What the kubelet is answered with. All of these are final: the kubelet calls again, but removes nothing.
    pub(super) fn code(&self) -> Code {
        match self {
            Self::NoRightToMount { .. }
            | Self::NotPropagated
            | Self::ForeignMount { .. }
            | Self::NoGroup { .. } => Code::FailedPrecondition,
            _ => Code::Internal,
        }
    }
}

/// Makes the directory of a volume, unless it is there, and mounts a file system on it where the volume has files. Listens
/// on the socket in it, in the place of an agent before. `driver` is the driver's name.
pub(super) fn prepare(record: &Record, driver: &str) -> Result<UnixListener, NotPrepared> {
    let path = || record.target.path().display().to_string();
    let name = Path::new(record.target.name());
    let unreachable = |source| NotPrepared::Unreachable { target: path(), source };
    let parent = record.target.open_parent().map_err(unreachable)?;
    let not_made = |source| NotPrepared::NotMade { target: path(), source };
    let mut directory = open_or_make(&parent, name).map_err(not_made)?;
    if record.attributes.files {
        directory = mounted(&parent, directory, &record.target, driver)?;
    }
    let mode = record.attributes.socket_mode.unwrap_or(SOCKET_MODE);
    // All users may connect: then the group makes no difference, and takes no right.
    let group = record.group.filter(|_| mode & 0o002 == 0);
    let bound = bind_over(&directory, Path::new(SOCKET), mode, group);
    let bound = bound.map_err(|source| match (group, source.kind()) {
        // In a user namespace without the group it is an invalid one.
        (Some(group), io::ErrorKind::PermissionDenied | io::ErrorKind::InvalidInput) => {
            NotPrepared::NoGroup { target: path(), group, source }
        }
        _ => NotPrepared::NoSocket { target: path(), source },
    })?;
    Ok(bound.socket)
}

/// A directory that is there stays: Pods that run see no other one.
fn open_or_make(parent: impl AsFd, name: &Path) -> io::Result<OwnedFd> {
    match openat(&parent, name, DIRECTORY, Mode::empty()) {
        Err(Errno::NOENT) => {}
        opened => return Ok(opened?),
    }
    let mode = Mode::from_raw_mode(0o755);
    match mkdirat(&parent, name, mode) {
        // The umask may have taken rights. No Pod sees the directory yet.
        Ok(()) => chmodat(&parent, name, mode, AtFlags::empty())?,
        Err(Errno::EXIST) => {}
        Err(error) => return Err(error.into()),
    }
    Ok(openat(&parent, name, DIRECTORY, Mode::empty())?)
}

/// The file system in memory on `directory`, which is `target` in `parent`.
fn mounted(
    parent: &OwnedFd,
    directory: OwnedFd,
    target: &Target,
    driver: &str,
) -> Result<OwnedFd, NotPrepared> {
    let path = || target.path().display().to_string();
    let failed = |source: io::Error| NotPrepared::NotMounted { target: path(), source };
    if mount_id(&directory).map_err(failed)? != mount_id(parent).map_err(failed)? {
        let is_ours = Mount::of(&directory).map_err(failed)?.is_some_and(|mount| mount.is_in_memory());
        return if is_ours { Ok(directory) } else { Err(NotPrepared::ForeignMount { target: path() }) };
    }
    if Mount::of(parent).map_err(failed)?.is_some_and(|mount| !mount.reaches_pods()) {
        return Err(NotPrepared::NotPropagated);
    }
    mount_memory(&directory, driver).map_err(|source| match source.kind() {
        io::ErrorKind::PermissionDenied => NotPrepared::NoRightToMount { source },
        _ => failed(source),
    })?;
    openat(parent, target.name(), DIRECTORY, Mode::empty()).map_err(|error| failed(error.into()))
}

/// What was left at the place of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Removed {
    Wholly,
    /// There is something that no volume of ours has.
    Partly,
}

/// Removes a volume: every mount on it, what a volume has, and its directory. All of that may be missing.
pub(super) fn remove(target: &Target) -> io::Result<Removed> {
    let name = Path::new(target.name());
    let parent = match target.open_parent() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Removed::Wholly),
        parent => parent?,
    };
    let own = mount_id(&parent)?;
    for _ in 0..MOUNTS {
        let directory = match openat(&parent, name, DIRECTORY, Mode::empty()) {
            Err(Errno::NOENT) => return Ok(Removed::Wholly),
            // A link, or a file.
            Err(Errno::NOTDIR | Errno::LOOP) => return Ok(Removed::Partly),
            directory => directory?,
        };
        let is_mounted = mount_id(&directory)? != own;
        // A mount may live on in a container: it has no key any longer.
        if !is_mounted || Mount::of(&directory)?.is_some_and(|mount| mount.is_in_memory()) {
            clear(&directory, DEPTH)?;
        }
        if is_mounted {
            drop(directory);
            unmount_newest(&parent, name)?;
            continue;
        }
        return match unlinkat(&parent, name, AtFlags::REMOVEDIR) {
            Ok(()) | Err(Errno::NOENT) => Ok(Removed::Wholly),
            Err(Errno::NOTEMPTY | Errno::EXIST | Errno::BUSY) => Ok(Removed::Partly),
            Err(error) => Err(error.into()),
        };
    }
    Ok(Removed::Partly)
}

/// Removes what a volume has: sockets, files, links, and directories of those. No mount is entered, and no link followed.
fn clear(directory: &OwnedFd, depth: u32) -> io::Result<()> {
    let own = mount_id(directory)?;
    let readable =
        openat(directory, ".", OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let mut names = Vec::new();
    for entry in Dir::read_from(readable)?.take(ENTRIES) {
        let entry = entry?;
        if ![&b"."[..], b".."].contains(&entry.file_name().to_bytes()) {
            names.push((entry.file_name().to_owned(), entry.file_type()));
        }
    }
    for (name, kind) in names {
        let path = Path::new(std::ffi::OsStr::from_bytes(name.to_bytes()));
        if kind != FileType::Directory {
            match unlinkat(directory, path, AtFlags::empty()) {
                Ok(()) | Err(Errno::NOENT | Errno::ISDIR | Errno::PERM) => {}
                Err(error) => return Err(error.into()),
            }
        } else if depth > 1
            && let Ok(inner) = openat(directory, path, DIRECTORY, Mode::empty())
            && mount_id(&inner)? == own
        {
            clear(&inner, depth - 1)?;
            // What is left in it is not a volume's.
            let _ = unlinkat(directory, path, AtFlags::REMOVEDIR);
        }
    }
    Ok(())
}
