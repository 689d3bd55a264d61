//! CsiSocket that take the place of others: bound under another name, and renamed over theirs, so that clients always find one.

use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd as _, OwnedFd};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, FileType, Gid, Mode, OFlags, Stat};
use rustix::fs::{chownat, fstat, openat, renameat, unlinkat};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with};

use super::target::DIRECTORY;

/// Connections that may wait to be accepted. The kernel limits it to `net.core.somaxconn`.
const BACKLOG: i32 = 1024;
/// The socket's name until it listens. The kubelet ignores names that begin with a dot.
const NEW: &str = ".socket.new";

/// A file of ours: another process may have put its own in its place.
#[derive(Clone, Debug)]
pub(super) struct OwnFile {
    path: PathBuf,
    device: u64,
    inode: u64,
}

/// What is at the path of a file of ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found {
    Ours,
    Nothing,
    Another,
}

impl OwnFile {
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn look(&self) -> io::Result<Found> {
        match fs::symlink_metadata(&self.path) {
            Ok(found) if (found.dev(), found.ino()) == (self.device, self.inode) => Ok(Found::Ours),
            Ok(_) => Ok(Found::Another),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Found::Nothing),
            Err(error) => Err(error),
        }
    }

    /// Removes it, unless it is another's by now.
    pub(super) fn remove(&self) -> io::Result<()> {
        match self.look()? {
            Found::Ours => fs::remove_file(&self.path),
            Found::Nothing | Found::Another => Ok(()),
        }
    }
}

/// Listens on `path`, with mode 0600, in the place of what is there.
pub(super) fn replace(path: &Path) -> io::Result<(UnixListener, OwnFile)> {
    let directory = path.parent().unwrap_or(Path::new("/"));
    let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?;
    let directory = openat(CWD, directory, DIRECTORY.difference(OFlags::NOFOLLOW), Mode::empty())?;
    let Bound { socket, stat } = bind_over(&directory, Path::new(name), 0o600, None)?;
    Ok((socket, OwnFile { path: path.to_owned(), device: stat.st_dev, inode: stat.st_ino }))
}

pub(super) struct Bound {
    pub(super) socket: UnixListener,
    stat: Stat,
}

/// Listens on `name` in `directory`, in the place of what is there. How long the directory's path is makes no difference.
pub(super) fn bind_over(
    directory: impl AsFd,
    name: &Path,
    mode: u32,
    group: Option<u32>,
) -> io::Result<Bound> {
    let directory = directory.as_fd();
    let new = PathBuf::from(format!("/proc/self/fd/{}/{NEW}", directory.as_raw_fd()));
    unlink(directory, Path::new(NEW))?;
    let socket = socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        None,
    )?;
    bind(&socket, &SocketAddrUnix::new(&new)?)?;
    let prepared = prepare(directory, mode, group).and_then(|stat| {
        // No client can connect before, so a wider mode is never in effect.
        listen(&socket, BACKLOG)?;
        renameat(directory, NEW, directory, name)?;
        Ok(stat)
    });
    if prepared.is_err() {
        let _ = unlink(directory, Path::new(NEW));
    }
    Ok(Bound { socket: UnixListener::from(socket), stat: prepared? })
}

/// Gives the new socket its mode and group. A Pod may be able to write to the directory, and swap files there: what is changed
/// is certainly a socket, and reached through no link.
fn prepare(directory: impl AsFd, mode: u32, group: Option<u32>) -> io::Result<Stat> {
    let file: OwnedFd =
        openat(directory, NEW, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
    let stat = fstat(&file)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::Socket {
        return Err(io::Error::other("another process replaces the socket at the same time"));
    }
    if let Some(group) = group {
        chownat(&file, "", None, Some(Gid::from_raw(group)), AtFlags::EMPTY_PATH)?;
    }
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    fs::set_permissions(path, fs::Permissions::from_mode(mode))?;
    Ok(stat)
}

/// Removes a file that need not exist.
pub(super) fn unlink(directory: impl AsFd, name: &Path) -> io::Result<()> {
    match unlinkat(directory, name, AtFlags::empty()) {
        Ok(()) | Err(rustix::io::Errno::NOENT) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn a_socket_takes_the_place_of_a_live_one_without_a_gap() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("reg.sock");
        let (old, old_file) = replace(&path).unwrap();
        let (new, new_file) = replace(&path).unwrap();
        UnixStream::connect(&path).unwrap();
        new.accept().unwrap();
        assert_eq!(old.accept().unwrap_err().kind(), io::ErrorKind::WouldBlock);
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1, "no other name is left");
        // The old process does not remove the new one's.
        assert_eq!((old_file.look().unwrap(), new_file.look().unwrap()), (Found::Another, Found::Ours));
        old_file.remove().unwrap();
        assert!(path.exists());
        new_file.remove().unwrap();
        assert!(!path.exists());
        assert_eq!(new_file.look().unwrap(), Found::Nothing);
        new_file.remove().unwrap();
    }

    #[test]
    fn a_path_longer_than_a_sockets_name_is_no_obstacle() {
        let place = tempfile::tempdir().unwrap();
        let long = place.path().join("x".repeat(200));
        fs::create_dir(&long).unwrap();
        let directory = openat(CWD, &long, DIRECTORY, Mode::empty()).unwrap();
        let bound = bind_over(&directory, Path::new("socket"), 0o666, None).unwrap();
        assert_eq!(fs::metadata(long.join("socket")).unwrap().mode() & 0o777, 0o666);
        UnixStream::connect(format!("/proc/self/fd/{}/socket", directory.as_raw_fd())).unwrap();
        bound.socket.accept().unwrap();
    }
}
