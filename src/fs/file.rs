//! Files and folders that others put there: nothing here waits for ever, or takes in without a bound.

use std::fs::{File, Metadata};
use std::io::{self, Read as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::OFlags;
use zeroize::Zeroizing;

/// The content of the plain file at `path`, of `limit` bytes at most, in memory that is wiped.
///
/// A FIFO, a device or a folder in its place is refused at once: opening one could stop the agent for ever.
pub fn read(path: &Path, limit: u64) -> io::Result<Zeroizing<Vec<u8>>> {
    content(open(path)?, limit)
}

/// Whether the file at `path` lies in one of `folders`, after all links.
pub fn lies_in(path: &Path, folders: &[PathBuf]) -> bool {
    let real = |path: &Path| path.canonicalize().ok();
    // Most often there is none, and nothing to look up.
    !folders.is_empty()
        && real(path).is_some_and(|path| {
            folders.iter().filter_map(|folder| real(folder)).any(|it| path.starts_with(it))
        })
}

/// The same, if the file lies in one of the folders `inside`, after all links. Where none is named, anywhere.
///
/// What lies elsewhere gets the same error whether or not it is there.
pub fn read_inside(path: &Path, limit: u64, inside: &[PathBuf]) -> io::Result<Zeroizing<Vec<u8>>> {
    if inside.is_empty() {
        return read(path, limit);
    }
    let is_inside = |real: &Path| {
        inside.iter().any(|folder| {
            let folder = folder.canonicalize();
            folder.is_ok_and(|folder| real.starts_with(folder))
        })
    };
    let outside = || {
        io::Error::new(
            io::ErrorKind::PermissionDenied,
            "it is outside of the folders that --file-prefix allows",
        )
    };
    // Before anything is opened: opening a device does something.
    let absolute = std::path::absolute(path)?;
    let there = absolute.ancestors().find_map(|ancestor| ancestor.canonicalize().ok());
    if !there.is_some_and(|there| is_inside(&there)) {
        return Err(outside());
    }
    let file = open(path)?;
    // Where the open file really lies; a path may have been swapped in between.
    let real = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
    if is_inside(&real) { content(file, limit) } else { Err(outside()) }
}

/// The folder in which `path` is a name.
pub fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Opens the plain file at `path` to read it; anything else is refused, as by [`read`].
pub fn open(path: &Path) -> io::Result<File> {
    // The kubelet swaps the link on the way (`..data`) and deletes what it led to: a look in between finds nothing.
    let is_swapped = |error: &io::Error| error.kind() == io::ErrorKind::NotFound && path.is_symlink();
    open_once(path).or_else(|error| if is_swapped(&error) { open_once(path) } else { Err(error) })
}

fn open_once(path: &Path) -> io::Result<File> {
    let check = |metadata: Metadata| match metadata.is_file() {
        true => Ok(()),
        false => Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a plain file")),
    };
    // Looked at before it is opened, because to open some devices is to use them, and again afterwards.
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
    let too_large =
        || io::Error::new(io::ErrorKind::FileTooLarge, format!("it is larger than {}", size(limit)));
    if metadata.len() > limit {
        return Err(too_large());
    }
    // Sized beforehand: a buffer that grows leaves copies of a key behind.
    let size = usize::try_from(metadata.len()).unwrap_or_default();
    let mut content = Zeroizing::new(Vec::with_capacity(size + 1));
    file.take(limit + 1).read_to_end(&mut content)?;
    if content.len() as u64 > limit {
        return Err(too_large());
    }
    Ok(content)
}

fn size(bytes: u64) -> String {
    if bytes >= 1 << 20 { format!("{} MiB", bytes >> 20) } else { format!("{} KiB", bytes >> 10) }
}

/// What tells two states of a file or a link apart: device and inode, size, and the times of the last changes. None where
/// there is nothing.
pub type Stamp = Option<((u64, u64), u64, (i64, i64), (i64, i64))>;

/// The stamp of what was found.
pub fn stamp(found: io::Result<Metadata>) -> Stamp {
    let found = found.ok()?;
    let (modified, changed) = ((found.mtime(), found.mtime_nsec()), (found.ctime(), found.ctime_nsec()));
    Some(((found.dev(), found.ino()), found.size(), modified, changed))
}

/// Locks the folder at `path` against others that do the same, as long as the file lives.
///
/// Whoever can read a folder can lock it, so this gives up after 5 s. It is for the start, when nothing is served yet,
/// and for threads on which nothing else waits.
pub fn lock_folder(path: &Path) -> io::Result<File> {
    const STEP: Duration = Duration::from_millis(20);
    // Anything else in its place is refused at once: to open a FIFO could take for ever.
    let flags = OFlags::DIRECTORY | OFlags::NONBLOCK;
    let folder = File::options().read(true).custom_flags(bits(flags)).open(path)?;
    for _ in 0..250 {
        match folder.try_lock() {
            Ok(()) => return Ok(folder),
            Err(std::fs::TryLockError::Error(error)) => return Err(error),
            Err(std::fs::TryLockError::WouldBlock) => {}
        }
        #[expect(clippy::disallowed_methods, reason = "nothing is served yet, or not by this thread")]
        std::thread::sleep(STEP);
    }
    Err(io::Error::new(io::ErrorKind::WouldBlock, "somebody holds a lock on it (flock) and does not let go"))
}

/// What somebody can do about a disk that does not take what is to be written, to go before another way out.
pub fn way_out(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => "make room there, or ",
        io::ErrorKind::PermissionDenied => "let this agent's user write there, or ",
        io::ErrorKind::ReadOnlyFilesystem => "mount it writable, or ",
        io::ErrorKind::ResourceBusy => "stop what uses it, or ",
        // Nothing can be made there at all: in /proc, say.
        io::ErrorKind::NotFound => "",
        _ => "see what is wrong with that disk, or ",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_files_of_a_bounded_size_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        std::fs::write(&file, "0123456789").unwrap();
        assert_eq!(*read(&file, 10).unwrap(), b"0123456789");
        let fifo = folder.path().join("fifo");
        rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
        let cases = [
            (file.as_path(), io::ErrorKind::FileTooLarge),
            (folder.path(), io::ErrorKind::InvalidInput),
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
    fn only_a_folder_is_locked() {
        let place = tempfile::tempdir().unwrap();
        let fifo = place.path().join("fifo");
        rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
        assert_eq!(lock_folder(&fifo).unwrap_err().kind(), io::ErrorKind::NotADirectory);
        lock_folder(place.path()).unwrap();
    }

    #[test]
    fn a_prefix_holds_whatever_the_links_say() {
        use std::os::unix::fs::symlink;
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
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
        let read = |name: &str| read_inside(&path(name), 1 << 10, &allowed);
        for name in ["inside/file", "link-in/file", "inside/../inside/..data/file"] {
            assert_eq!(*read(name).unwrap(), b"inside/..data", "{name}");
        }
        for name in [
            "outside/secret/file",
            "outside/secret/missing",
            "outside/nowhere/missing",
            "inside/escape",
            "inside/../outside/secret/file",
            // A prefix is a folder, not the beginning of a name.
            "inside-too/file",
        ] {
            let error = read(name).unwrap_err();
            assert!(error.to_string().contains("--file-prefix"), "{name}: {error}");
        }
        assert_eq!(read("inside/missing").unwrap_err().kind(), io::ErrorKind::NotFound);
        assert_eq!(*read_inside(&path("inside/escape"), 1 << 10, &[]).unwrap(), b"outside/secret");
    }
}
