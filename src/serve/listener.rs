//! Listening Unix sockets. A dead agent's socket is replaced, a live agent's is not, and our own is removed on exit.

use std::fmt;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use tokio::net::{UnixListener, UnixSocket};

use crate::base::limits::SOCKET_PATH_BYTES;
use crate::fs::file;
use crate::os::denial::directory_remedy;
use crate::os::systemd::PassedSocket;

/// Connections that may wait to be accepted. The kernel limits it to `net.core.somaxconn`.
const BACKLOG: u32 = 1024;

/// A listening socket. If this agent created its file, the file is removed on drop.
#[derive(Debug)]
pub struct Listener {
    socket: UnixListener,
    path: PathBuf,
    /// Of its file; none where the service manager's file can't be looked up.
    id: Option<FileId>,
    file: Option<SocketFile>,
}

/// Device and inode of a socket's file, which are the same in every mount namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileId {
    device: u64,
    inode: u64,
}

impl FileId {
    /// The id of the file at `path`, with its links resolved.
    pub fn of(path: &Path) -> io::Result<Self> {
        fs::metadata(path).map(|metadata| Self::from(&metadata))
    }
}

impl From<&fs::Metadata> for FileId {
    fn from(metadata: &fs::Metadata) -> Self {
        Self { device: metadata.dev(), inode: metadata.ino() }
    }
}

impl fmt::Display for FileId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.device, self.inode)
    }
}

/// The file of a socket that this agent created; removed on drop.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    /// Another agent may have replaced the file.
    id: FileId,
}

impl SocketFile {
    pub fn path(&self) -> &Path {
        &self.path
    }
}

#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    #[error(
        "the path of the socket {path} has {length} bytes: Unix sockets take {SOCKET_PATH_BYTES} at most; choose a shorter one with {option}"
    )]
    PathTooLong { path: PathBuf, length: usize, option: &'static str },
    #[error(
        "the directory of the socket {path} can't be used: {source}; {}, or choose another path with {option}",
        directory_remedy(directory, source)
    )]
    Directory { path: PathBuf, directory: PathBuf, source: io::Error, option: &'static str },
    #[error(
        "the socket {path} belongs to a live agent{}: stop that one, or choose another path with {option}",
        pid.map(|pid| format!(" (process {pid})")).unwrap_or_default()
    )]
    Taken { path: PathBuf, pid: Option<i32>, option: &'static str },
    #[error(
        "the socket {path} may belong to a live agent: user {uid} has no permission to connect to it; stop that agent, or \
         remove the file if there is none, or choose another path with {option}"
    )]
    PermissionDenied { path: PathBuf, uid: u32, option: &'static str },
    #[error("{path} exists and is not a socket: remove it, or choose another path with {option}")]
    NotASocket { path: PathBuf, option: &'static str },
    #[error("can't listen on the socket {path}: {source}; fix that, or choose another path with {option}")]
    Io { path: PathBuf, source: io::Error, option: &'static str },
}

impl ListenError {
    /// Checks that `path` is not too long for a socket.
    pub fn check_path(path: &Path, option: &'static str) -> Result<(), Self> {
        let length = path.as_os_str().as_bytes().len();
        if length > SOCKET_PATH_BYTES {
            return Err(Self::PathTooLong { path: path.to_owned(), length, option });
        }
        Ok(())
    }
}

impl Listener {
    /// Listens on `path`, the value of `option`. Its file gets `mode`. A dead agent's socket is replaced.
    pub fn bind(path: &Path, mode: u32, option: &'static str) -> Result<Self, ListenError> {
        ListenError::check_path(path, option)?;
        let failed = |source| ListenError::Io { path: path.to_owned(), source, option };
        let directory = file::directory_of(path);
        let unusable = |source| ListenError::Directory {
            path: path.to_owned(),
            directory: directory.to_owned(),
            source,
            option,
        };
        // Two agents that start together must not both replace a dead agent's socket: the second one waits here.
        let _guard = file::lock_directory(directory).map_err(unusable)?;
        clear(path, option)?;
        let socket = UnixSocket::new_stream().map_err(failed)?;
        socket.bind(path).map_err(unusable)?;
        let metadata = fs::symlink_metadata(path).map_err(failed)?;
        let id = FileId::from(&metadata);
        let file = SocketFile { path: path.to_owned(), id };
        // No client can connect before `listen`, so a wider mode is never in effect.
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).map_err(failed)?;
        let socket = socket.listen(BACKLOG).map_err(failed)?;
        Ok(Self { socket, path: path.to_owned(), id: Some(id), file: Some(file) })
    }

    /// A socket that the service manager opened. Its file stays.
    pub fn passed(passed: PassedSocket) -> io::Result<Self> {
        let socket = UnixListener::from_std(passed.listener)?;
        Ok(Self { socket, id: FileId::of(&passed.path).ok(), path: passed.path, file: None })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn id(&self) -> Option<FileId> {
        self.id
    }

    /// The directory of the socket, if this agent removes the socket on exit.
    pub fn own_directory(&self) -> Option<&Path> {
        self.file.as_ref().map(|file| file::directory_of(&file.path))
    }

    /// The socket, and the guard that removes its file on drop.
    pub fn into_parts(self) -> (UnixListener, Option<SocketFile>) {
        (self.socket, self.file)
    }
}

/// What a socket path is in use by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Occupant {
    None,
    /// A process that no longer runs has left its socket.
    Dead,
    /// A process listens, with this id if the kernel reports it.
    Live(Option<i32>),
}

/// Checks what uses `path`, the value of `option`. A file that is not a socket is an error.
pub fn occupant(path: &Path, option: &'static str) -> Result<Occupant, ListenError> {
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Occupant::None),
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
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Occupant::None),
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            let uid = rustix::process::getuid().as_raw();
            Err(ListenError::PermissionDenied { path: path.to_owned(), uid, option })
        }
        // The backlog is full, so a process listens.
        Err(_) => Ok(Occupant::Live(None)),
    }
}

/// Removes a dead agent's socket at `path`; fails if a process listens there.
fn clear(path: &Path, option: &'static str) -> Result<(), ListenError> {
    match occupant(path, option)? {
        Occupant::None => Ok(()),
        Occupant::Live(pid) => Err(ListenError::Taken { path: path.to_owned(), pid, option }),
        Occupant::Dead => {
            tracing::info!(path = %path.display(), "socket of a dead agent replaced");
            fs::remove_file(path).map_err(|source| ListenError::Io { path: path.to_owned(), source, option })
        }
    }
}

/// Connects without blocking: an agent that is suspended, or whose backlog is full, would never answer.
fn try_connect(path: &Path) -> io::Result<OwnedFd> {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let is_ours = fs::symlink_metadata(&self.path).is_ok_and(|found| FileId::from(&found) == self.id);
        if is_ours && let Err(error) = fs::remove_file(&self.path) {
            tracing::warn!(path = %self.path.display(), %error, "socket not removed");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_dead_agents_socket_is_replaced_and_a_live_agents_is_not() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
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
    async fn a_socket_of_another_process_is_not_removed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let ours = Listener::bind(&path, 0o600, "--socket").unwrap();
        fs::remove_file(&path).unwrap();
        let _theirs = std::os::unix::net::UnixListener::bind(&path).unwrap();
        drop(ours);
        assert!(path.exists());
    }

    #[tokio::test]
    async fn an_unusable_path_is_refused_with_a_remedy() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("file");
        fs::write(&file, "precious").unwrap();
        let long = directory.path().join("x".repeat(100));
        let missing = directory.path().join("no/socket");
        for (path, words) in [(&file, "not a socket"), (&long, "107"), (&missing, "create or mount")] {
            let error = Listener::bind(path, 0o600, "--socket").unwrap_err().to_string();
            assert!(error.contains(words) && error.contains("--socket"), "{error}");
        }
        assert_eq!(fs::read_to_string(&file).unwrap(), "precious");
    }
}
