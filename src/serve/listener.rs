//! The Unix socket: taken over from a dead agent, never from a live one, and removed on exit.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use tokio::net::{UnixListener, UnixSocket};

use crate::base::limits::SOCKET_PATH_BYTES;
use crate::fs::file;

/// Connections that wait to be accepted. The kernel cuts it to `net.core.somaxconn`.
const BACKLOG: u32 = 1024;

/// A listening socket whose file goes when it is dropped, if we have made it.
#[derive(Debug)]
pub struct Listener {
    socket: UnixListener,
    path: PathBuf,
    file: Option<SocketFile>,
}

/// A listening socket that somebody else has opened; its file is theirs, and stays.
#[derive(Debug)]
pub struct Passed {
    /// The socket, which does not block.
    pub listener: std::os::unix::net::UnixListener,
    /// Where it is.
    pub path: PathBuf,
}

/// The path of a socket of ours.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    /// Device and inode: another agent may have put its own socket there since.
    id: (u64, u64),
}

/// Why there is no socket.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    #[error(
        "the path of the socket {path} has {length} bytes: Unix sockets take {SOCKET_PATH_BYTES} at most; choose a shorter one with {option}"
    )]
    PathTooLong { path: PathBuf, length: usize, option: &'static str },
    #[error(
        "the folder of the socket {path} can't be used: {source}; create or mount {folder}, or choose another path with {option}"
    )]
    Folder { path: PathBuf, folder: PathBuf, source: io::Error, option: &'static str },
    #[error(
        "the socket {path} belongs to a live agent{}: stop that one, or choose another path with {option}",
        pid.map(|pid| format!(" (process {pid})")).unwrap_or_default()
    )]
    Taken { path: PathBuf, pid: Option<i32>, option: &'static str },
    #[error(
        "user {uid} may not connect to the socket {path}, so that nobody can tell whether an agent lives there: stop that \
         agent, or remove the file if there is none, or choose another path with {option}"
    )]
    Closed { path: PathBuf, uid: u32, option: &'static str },
    #[error("{path} is there and is not a socket: remove it, or choose another path with {option}")]
    NotASocket { path: PathBuf, option: &'static str },
    #[error(
        "listening on the socket {path} failed: {source}; mend that, or choose another path with {option}"
    )]
    Io { path: PathBuf, source: io::Error, option: &'static str },
}

impl ListenError {
    /// Refuses a path that no socket can have.
    pub fn check_path(path: &Path, option: &'static str) -> Result<(), Self> {
        let length = path.as_os_str().as_bytes().len();
        if length > SOCKET_PATH_BYTES {
            return Err(Self::PathTooLong { path: path.to_owned(), length, option });
        }
        Ok(())
    }
}

impl Listener {
    /// Listens on `path`, which `option` names, and whose file gets `mode`. A dead agent's socket is replaced.
    pub fn bind(path: &Path, mode: u32, option: &'static str) -> Result<Self, ListenError> {
        ListenError::check_path(path, option)?;
        let failed = |source| ListenError::Io { path: path.to_owned(), source, option };
        let folder = file::directory_of(path);
        let no_folder =
            |source| ListenError::Folder { path: path.to_owned(), folder: folder.to_owned(), source, option };
        // Two agents that start together must not both take the place of a dead one: one looks after the other.
        let _guard = file::lock_directory(folder).map_err(no_folder)?;
        clear(path, option)?;
        let socket = UnixSocket::new_stream().map_err(failed)?;
        socket.bind(path).map_err(no_folder)?;
        let metadata = fs::symlink_metadata(path).map_err(failed)?;
        let file = SocketFile { path: path.to_owned(), id: (metadata.dev(), metadata.ino()) };
        // Nobody can connect before `listen`, so there is no moment with a wider mode.
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).map_err(failed)?;
        let socket = socket.listen(BACKLOG).map_err(failed)?;
        Ok(Self { socket, path: path.to_owned(), file: Some(file) })
    }

    /// A socket that somebody else has opened. Its file is theirs.
    pub fn passed(passed: Passed) -> io::Result<Self> {
        Ok(Self { socket: UnixListener::from_std(passed.listener)?, path: passed.path, file: None })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The folder in which the socket is to be removed; none if that is not for us to do.
    pub fn own_folder(&self) -> Option<&Path> {
        self.file.as_ref().map(|file| file::directory_of(&file.path))
    }

    /// The socket, and the guard that removes its file when dropped.
    pub fn into_parts(self) -> (UnixListener, Option<SocketFile>) {
        (self.socket, self.file)
    }
}

/// Who has the path of a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Occupant {
    /// Nothing is there.
    Nobody,
    /// An agent that is gone has left its socket.
    Dead,
    /// Somebody listens: this process, where the kernel tells.
    Live(Option<i32>),
}

/// Who has `path`, which `option` names. What is no socket is an error.
pub fn occupant(path: &Path, option: &'static str) -> Result<Occupant, ListenError> {
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Occupant::Nobody),
        Err(source) => return Err(ListenError::Io { path: path.to_owned(), source, option }),
        Ok(metadata) if !metadata.file_type().is_socket() => {
            return Err(ListenError::NotASocket { path: path.to_owned(), option });
        }
        Ok(_) => {}
    }
    match try_connect(path) {
        Ok(live) => {
            let pid = rustix::net::sockopt::socket_peercred(&live).ok();
            Ok(Occupant::Live(pid.map(|peer| peer.pid.as_raw_nonzero().get())))
        }
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => Ok(Occupant::Dead),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Occupant::Nobody),
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            let uid = rustix::process::getuid().as_raw();
            Err(ListenError::Closed { path: path.to_owned(), uid, option })
        }
        // A full backlog: somebody is there.
        Err(_) => Ok(Occupant::Live(None)),
    }
}

/// Makes `path` free, unless somebody listens there.
fn clear(path: &Path, option: &'static str) -> Result<(), ListenError> {
    match occupant(path, option)? {
        Occupant::Nobody => Ok(()),
        Occupant::Live(pid) => Err(ListenError::Taken { path: path.to_owned(), pid, option }),
        Occupant::Dead => {
            tracing::info!(path = %path.display(), "a dead agent's socket is replaced");
            fs::remove_file(path).map_err(|source| ListenError::Io { path: path.to_owned(), source, option })
        }
    }
}

/// Connects without waiting: an agent that is stopped, or whose backlog is full, would keep us.
fn try_connect(path: &Path) -> io::Result<OwnedFd> {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let is_ours =
            fs::symlink_metadata(&self.path).is_ok_and(|found| (found.dev(), found.ino()) == self.id);
        if is_ours && let Err(error) = fs::remove_file(&self.path) {
            tracing::warn!(path = %self.path.display(), %error, "the socket could not be removed");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_dead_agents_socket_is_replaced_and_a_live_ones_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        let live = Listener::bind(&path, 0o600, "--socket").unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        let error = Listener::bind(&path, 0o600, "--socket").unwrap_err();
        let pid = i32::try_from(std::process::id()).unwrap();
        assert!(matches!(error, ListenError::Taken { pid: Some(found), .. } if found == pid), "{error}");
        drop(live);
        assert!(!path.exists());
    }

    #[tokio::test]
    async fn a_socket_that_somebody_else_put_there_is_left() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let ours = Listener::bind(&path, 0o600, "--socket").unwrap();
        fs::remove_file(&path).unwrap();
        let _theirs = std::os::unix::net::UnixListener::bind(&path).unwrap();
        drop(ours);
        assert!(path.exists());
    }

    #[tokio::test]
    async fn what_can_not_be_a_socket_is_named_with_the_way_out() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, "precious").unwrap();
        let long = folder.path().join("x".repeat(100));
        let missing = folder.path().join("no/socket");
        for (path, words) in [(&file, "not a socket"), (&long, "107"), (&missing, "create or mount")] {
            let error = Listener::bind(path, 0o600, "--socket").unwrap_err().to_string();
            assert!(error.contains(words) && error.contains("--socket"), "{error}");
        }
        assert_eq!(fs::read_to_string(&file).unwrap(), "precious");
    }
}
