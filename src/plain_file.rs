//! Files and folders that others put there: nothing here waits for ever, or takes in without a bound.

use std::fs::File;
use std::io::{self, Read as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::time::Duration;

use zeroize::Zeroizing;

/// The content of the plain file at `path`, of `limit` bytes at most, in memory that is wiped.
///
/// A FIFO, a device or a folder in its place is refused at once: opening one could stop the agent for ever.
pub fn read(path: &Path, limit: u64) -> io::Result<Zeroizing<Vec<u8>>> {
    let flags = i32::try_from(rustix::fs::OFlags::NONBLOCK.bits()).unwrap_or_default();
    let file = File::options().read(true).custom_flags(flags).open(path)?;
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a plain file"));
    }
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

/// Locks the folder at `path` against others that do the same, as long as the file lives.
///
/// Whoever can read a folder can lock it, so this gives up after 5 s. It is for the start, when nothing is served yet.
pub fn lock_folder(path: &Path) -> io::Result<File> {
    const STEP: Duration = Duration::from_millis(20);
    let folder = File::open(path)?;
    for _ in 0..250 {
        match folder.try_lock() {
            Ok(()) => return Ok(folder),
            Err(std::fs::TryLockError::Error(error)) => return Err(error),
            Err(std::fs::TryLockError::WouldBlock) => {}
        }
        #[expect(
            clippy::disallowed_methods,
            reason = "nothing is served yet that could wait for this thread"
        )]
        std::thread::sleep(STEP);
    }
    Err(io::Error::new(io::ErrorKind::WouldBlock, "somebody holds a lock on it (flock) and does not let go"))
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
}
