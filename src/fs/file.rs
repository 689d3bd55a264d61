//! Files and directories that other programs control: no operation here blocks without limit, or reads without bound.

use std::fs::{File, Metadata};
use std::io::{self, Read as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::OFlags;
use zeroize::Zeroizing;

/// The content of the regular file at `path`, of `limit` bytes at most, in memory that is wiped.
///
/// A FIFO, a device or a directory in its place is refused at once: opening one could block the agent without limit.
pub fn read(path: &Path, limit: u64) -> io::Result<Zeroizing<Vec<u8>>> {
    content(open(path)?, limit)
}

/// Whether the file at `path` lies in one of `directories`, after all links.
pub fn is_within(path: &Path, directories: &[PathBuf]) -> bool {
    // Usually there are none, and nothing to look up.
    !directories.is_empty() && path.canonicalize().is_ok_and(|real| starts_with_any(&real, directories))
}

fn starts_with_any(real: &Path, directories: &[PathBuf]) -> bool {
    without_links(directories).iter().any(|it| real.starts_with(it))
}

/// Where `directories` are, as far as they exist.
pub(super) fn without_links(directories: &[PathBuf]) -> Vec<PathBuf> {
    directories.iter().filter_map(|directory| directory.canonicalize().ok()).collect()
}

/// Like [`read`], for a file that must lie in one of `directories` after all links; anywhere if there are none.
///
/// A path that leads elsewhere gets the same error whether or not the file exists.
pub fn read_within(path: &Path, limit: u64, directories: &[PathBuf]) -> io::Result<Zeroizing<Vec<u8>>> {
    if directories.is_empty() {
        return read(path, limit);
    }
    // Before anything is opened: opening a device has effects.
    let absolute = std::path::absolute(path)?;
    let existing = absolute.ancestors().find_map(|ancestor| ancestor.canonicalize().ok());
    if !existing.is_some_and(|existing| starts_with_any(&existing, directories)) {
        return Err(outside());
    }
    let file = open(path)?;
    // Where the open file really lies: the path may have been swapped in between.
    let real = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
    if starts_with_any(&real, directories) { content(file, limit) } else { Err(outside()) }
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

fn content(file: File, limit: u64) -> io::Result<Zeroizing<Vec<u8>>> {
    let metadata = file.metadata()?;
    if metadata.len() > limit {
        return Err(too_large(limit));
    }
    // Sized beforehand: a buffer that grows leaves copies of a key in memory.
    let size = usize::try_from(metadata.len()).unwrap_or_default();
    let mut content = Zeroizing::new(Vec::with_capacity(size + 1));
    file.take(limit + 1).read_to_end(&mut content)?;
    if content.len() as u64 > limit {
        return Err(too_large(limit));
    }
    Ok(content)
}

pub(super) fn outside() -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, "outside the directories that --file-prefix allows")
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
pub fn remedy(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => "free some space there, or ",
        io::ErrorKind::PermissionDenied => "give the agent's user write permission there, or ",
        io::ErrorKind::ReadOnlyFilesystem => "mount it writable, or ",
        io::ErrorKind::ResourceBusy => "stop the process that uses it, or ",
        // Nothing can be created there at all: in /proc, for example.
        io::ErrorKind::NotFound => "",
        _ => "check that disk, or ",
    }
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

    #[test]
    fn links_do_not_lead_out_of_a_prefix() {
        use std::os::unix::fs::symlink;
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        for name in ["inside/..data", "outside/secret", "inside-too"] {
            std::fs::create_dir_all(path(name)).unwrap();
            std::fs::write(path(name).join("file"), name).unwrap();
        }
        symlink("..data/file", path("inside/file")).unwrap();
        symlink("../outside/secret/file", path("inside/escape")).unwrap();
        symlink("inside", path("link-in")).unwrap();
        symlink("inside", path("prefix")).unwrap();
        // The prefix itself may be a link.
        let allowed = [path("prefix"), path("nowhere")];
        let read = |name: &str| read_within(&path(name), 1 << 10, &allowed);
        for name in ["inside/file", "link-in/file", "inside/../inside/..data/file"] {
            assert_eq!(*read(name).unwrap(), b"inside/..data", "{name}");
        }
        for name in [
            "outside/secret/file",
            "outside/secret/missing",
            "outside/nowhere/missing",
            "inside/escape",
            "inside/../outside/secret/file",
            // A prefix is a directory, not the beginning of a name.
            "inside-too/file",
        ] {
            let error = read(name).unwrap_err();
            assert!(error.to_string().contains("--file-prefix"), "{name}: {error}");
        }
        assert_eq!(read("inside/missing").unwrap_err().kind(), io::ErrorKind::NotFound);
        assert_eq!(*read_within(&path("inside/escape"), 1 << 10, &[]).unwrap(), b"outside/secret");
    }
}
