//! Files and directories that other programs control: no operation here blocks without limit, or reads without bound.

use std::fs::{File, Metadata};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::time::Duration;

use rustix::fs::OFlags;
use rustix::process::{getgid, getuid};
use zeroize::Zeroizing;

/// The content of the regular file at `path`, of `limit` bytes at most, in memory that is wiped.
///
/// A FIFO, a device or a directory in its place is refused at once: opening one could block the agent without limit.
pub fn read(path: &Path, limit: u64) -> io::Result<Zeroizing<Vec<u8>>> {
    content(&open(path)?, limit)
}

/// The directory of `path`: `.` for a bare name.
pub fn directory_of(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Opens the regular file at `path` to read it; anything else is refused, as by [`read`].
pub fn open(path: &Path) -> io::Result<File> {
    // The kubelet swaps the link on the way (`..data`) and deletes its old target: a look in between finds nothing.
    let is_swapped = |error: &io::Error| error.kind() == io::ErrorKind::NotFound && path.is_symlink();
    open_once(path).or_else(|error| if is_swapped(&error) { open_once(path) } else { Err(error) })
}

fn open_once(path: &Path) -> io::Result<File> {
    let check = |metadata: Metadata| match metadata.is_file() {
        true => Ok(()),
        false => Err(not_regular()),
    };
    // Checked before it is opened, because opening some devices has effects, and again afterwards.
    check(std::fs::metadata(path)?)?;
    let file = File::options().read(true).custom_flags(bits(OFlags::NONBLOCK)).open(path)?;
    check(file.metadata()?)?;
    Ok(file)
}

fn bits(flags: OFlags) -> i32 {
    i32::try_from(flags.bits()).unwrap_or_default()
}

/// The content of an open file, of `limit` bytes at most.
pub fn content(file: &File, limit: u64) -> io::Result<Zeroizing<Vec<u8>>> {
    let size = file.metadata()?.len();
    if size > limit { Err(too_large(limit)) } else { content_of(file, size, limit) }
}

/// Reads a file that had this `size` a moment ago. A buffer that grows would leave copies of a key in memory.
pub(super) fn content_of(file: impl AsFd, size: u64, limit: u64) -> io::Result<Zeroizing<Vec<u8>>> {
    let size = usize::try_from(size).unwrap_or_default();
    let limit_in_memory = usize::try_from(limit).unwrap_or(usize::MAX);
    let mut content = Zeroizing::new(vec![0; size + 1]);
    let mut filled = 0;
    loop {
        let read = rustix::io::retry_on_intr(|| {
            rustix::io::read(&file, content.get_mut(filled..).unwrap_or_default())
        })?;
        filled += read;
        if filled > limit_in_memory {
            return Err(too_large(limit));
        }
        // A regular file is read up to its end at once.
        if read == 0 || filled == size && size > 0 {
            break;
        }
        if filled == content.len() {
            // Larger than it claimed to be, as files in /proc are.
            let mut larger = Zeroizing::new(vec![0; (2 * filled).max(4096).min(limit_in_memory + 1)]);
            larger.get_mut(..filled).unwrap_or_default().copy_from_slice(&content);
            content = larger;
        }
    }
    content.truncate(filled);
    Ok(content)
}

pub(super) fn not_regular() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, "not a regular file")
}

pub(super) fn too_large(limit: u64) -> io::Error {
    io::Error::new(io::ErrorKind::FileTooLarge, format!("larger than {}", size(limit)))
}

fn size(bytes: u64) -> String {
    if bytes >= 1 << 20 { format!("{} MiB", bytes >> 20) } else { format!("{} KiB", bytes >> 10) }
}

/// Locks the directory at `path` against other callers of this function, until the file is dropped.
///
/// Any process that can read a directory can lock it, so this gives up after 5 s. It blocks: call it at the start, when
/// nothing is served yet, or on a thread on which nothing else waits.
pub fn lock_directory(path: &Path) -> io::Result<File> {
    const STEP: Duration = Duration::from_millis(20);
    // Anything else in its place is refused at once: opening a FIFO could block without limit.
    let flags = OFlags::DIRECTORY | OFlags::NONBLOCK;
    let directory = File::options().read(true).custom_flags(bits(flags)).open(path)?;
    for _ in 0..250 {
        match directory.try_lock() {
            Ok(()) => return Ok(directory),
            Err(std::fs::TryLockError::Error(error)) => return Err(error),
            Err(std::fs::TryLockError::WouldBlock) => {}
        }
        #[expect(clippy::disallowed_methods, reason = "nothing is served yet, or not by this thread")]
        std::thread::sleep(STEP);
    }
    Err(io::Error::new(io::ErrorKind::WouldBlock, "another process holds its lock (flock)"))
}

/// The remedy for a failed write, to be followed by another remedy.
pub fn remedy(error: &io::Error) -> String {
    let remedy = match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => "free some space there, or ",
        io::ErrorKind::PermissionDenied => {
            let (user, group) = (getuid().as_raw(), getgid().as_raw());
            return format!("give the agent (user {user}, group {group}) write permission there, or ");
        }
        io::ErrorKind::ReadOnlyFilesystem => "mount it writable, or ",
        io::ErrorKind::ResourceBusy => "stop the process that uses it, or ",
        // Nothing can be created there at all: in /proc, for example.
        io::ErrorKind::NotFound => "",
        _ => "check that disk, or ",
    };
    remedy.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_regular_files_of_a_bounded_size_are_read() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("file");
        std::fs::write(&file, "0123456789").unwrap();
        assert_eq!(*read(&file, 10).unwrap(), b"0123456789");
        std::fs::write(directory.path().join("empty"), "").unwrap();
        assert_eq!(*read(&directory.path().join("empty"), 10).unwrap(), b"");
        let status = read(Path::new("/proc/self/status"), 1 << 20).unwrap();
        assert!(status.ends_with(b"\n") && status.starts_with(b"Name:"));
        let fifo = directory.path().join("fifo");
        rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
        let cases = [
            (file.as_path(), io::ErrorKind::FileTooLarge),
            (directory.path(), io::ErrorKind::InvalidInput),
            (&fifo, io::ErrorKind::InvalidInput),
            (Path::new("/dev/zero"), io::ErrorKind::InvalidInput),
            (Path::new("/proc/self/maps"), io::ErrorKind::FileTooLarge),
            (Path::new("/nowhere"), io::ErrorKind::NotFound),
        ];
        for (path, kind) in cases {
            assert_eq!(read(path, 9).unwrap_err().kind(), kind, "{}", path.display());
        }
    }

    #[test]
    fn only_a_directory_is_locked() {
        let directory = tempfile::tempdir().unwrap();
        let fifo = directory.path().join("fifo");
        rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
        assert_eq!(lock_directory(&fifo).unwrap_err().kind(), io::ErrorKind::NotADirectory);
        lock_directory(directory.path()).unwrap();
    }
}
