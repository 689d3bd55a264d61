//! The mark in Envoy's shared memory that says that an epoch is starting. One that fails before it is live leaves it there,
//! and every later epoch of this base id then refuses to start.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

/// Where the system keeps shared memory.
const DIRECTORY: &str = "/dev/shm";
const INITIALIZING: u64 = 1;
/// The layout that is known: version 11, in use since Envoy 1.11 at least and until 1.40. Its length, the version, two
/// locks, and the flags at the end.
const VERSION: u64 = 11;
const LONGEST: u64 = 1 << 10;

/// The file of a base id, as Envoy names it.
fn file_of(base_id: &str) -> Option<PathBuf> {
    let base_id: u64 = base_id.trim().parse().ok()?;
    Some(Path::new(DIRECTORY).join(format!("envoy_shared_memory_{}", base_id.checked_mul(10)?)))
}

/// Removes the mark. The caller knows that the epoch that has set it is dead, and that no other one starts.
pub(super) fn remove(base_id: &str) -> io::Result<()> {
    let unknown = || io::Error::new(io::ErrorKind::InvalidInput, "the base id is not a number");
    remove_in(&file_of(base_id).ok_or_else(unknown)?)
}

fn remove_in(path: &Path) -> io::Result<()> {
    let foreign = || io::Error::new(io::ErrorKind::InvalidData, "unknown layout of Envoy's shared memory");
    let file = File::options().read(true).write(true).open(path)?;
    let number = |at: u64| {
        let mut bytes = [0; 8];
        file.read_exact_at(&mut bytes, at).map(|()| u64::from_ne_bytes(bytes))
    };
    let length = file.metadata()?.len();
    if !(24..=LONGEST).contains(&length) || number(0)? != length || number(8)? != VERSION {
        return Err(foreign());
    }
    let flags = length - 8;
    match number(flags)? {
        0 => Ok(()),
        INITIALIZING => file.write_all_at(&0_u64.to_ne_bytes(), flags),
        _ => Err(foreign()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_mark_in_the_known_layout_is_removed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("memory");
        let memory = |length: u64, version: u64, flags: u64| {
            let mut bytes = vec![7_u8; 104];
            bytes[..8].copy_from_slice(&length.to_ne_bytes());
            bytes[8..16].copy_from_slice(&version.to_ne_bytes());
            bytes[96..].copy_from_slice(&flags.to_ne_bytes());
            bytes
        };
        for (before, is_known) in [
            (memory(104, 11, 1), true),
            (memory(104, 11, 0), true),
            (memory(104, 11, 3), false),
            (memory(104, 12, 1), false),
            (memory(96, 11, 1), false),
            (Vec::new(), false),
        ] {
            std::fs::write(&path, &before).unwrap();
            assert_eq!(remove_in(&path).is_ok(), is_known);
            let after = std::fs::read(&path).unwrap();
            assert_eq!(after, if is_known { memory(104, 11, 0) } else { before });
        }
        assert_eq!(file_of("77\n").unwrap(), Path::new("/dev/shm/envoy_shared_memory_770"));
        assert_eq!(file_of("x"), None);
    }
}
