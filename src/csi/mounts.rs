//! Mounts, as the kernel lists them, and file systems in memory for the files of volumes.

use std::ffi::{CString, OsString};
use std::io;
use std::os::fd::{AsFd, AsRawFd as _};
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Path, PathBuf};

use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

use crate::base::limits::{VOLUME_BYTES, VOLUME_INODES};

/// What files of Pods are labelled on SELinux hosts: containers may read it.
const SELINUX_CONTEXT: &str = "system_u:object_r:container_file_t:s0";
/// Is there where the kernel enforces SELinux.
const SELINUX: &str = "/sys/fs/selinux";

/// A line of `/proc/self/mountinfo`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Mount {
    id: u64,
    /// The part of its file system that it shows.
    root: PathBuf,
    pub(super) point: PathBuf,
    /// True if mounts beneath it appear in other namespaces.
    is_shared: bool,
    /// True if mounts beneath it appear in no other namespace, but theirs here.
    is_slave: bool,
    kind: String,
    source: String,
}

impl Mount {
    /// All mounts of this process.
    pub(super) fn all() -> io::Result<Vec<Self>> {
        let list = std::fs::read_to_string("/proc/self/mountinfo")?;
        Ok(list.lines().filter_map(Self::parse).collect())
    }

    /// The mount that a directory is in.
    pub(super) fn of(directory: impl AsFd) -> io::Result<Option<Self>> {
        let id = mount_id(directory)?;
        Ok(Self::all()?.into_iter().find(|mount| mount.id == id))
    }

    fn parse(line: &str) -> Option<Self> {
        let (before, after) = line.split_once(" - ")?;
        let mut before = before.split(' ');
        let (id, root) = (before.next()?.parse().ok()?, before.nth(2)?);
        let (point, _options) = (before.next()?, before.next()?);
        let (mut is_shared, mut is_slave) = (false, false);
        for field in before {
            is_shared |= field.starts_with("shared:");
            is_slave |= field.starts_with("master:");
        }
        let mut after = after.split(' ');
        let (kind, source) = (after.next()?.to_owned(), after.next()?.to_owned());
        Some(Self { id, root: unescaped(root), point: unescaped(point), is_shared, is_slave, kind, source })
    }

    /// Whether it is a file system in memory that the driver `name` mounted.
    pub(super) fn is_of(&self, name: &str) -> bool {
        self.kind == "tmpfs" && self.source == name
    }

    pub(super) fn is_in_memory(&self) -> bool {
        self.kind == "tmpfs"
    }

    /// Whether what is mounted beneath it is seen by Pods. A container without the right propagation has a mount of its own of
    /// the kubelet's directory, which hands nothing on.
    pub(super) fn reaches_pods(&self) -> bool {
        self.is_shared || !self.is_slave && self.root == Path::new("/")
    }
}

/// Undoes the escapes of the list: a backslash and three octal digits.
fn unescaped(text: &str) -> PathBuf {
    let mut bytes = Vec::with_capacity(text.len());
    let mut parts = text.split('\\');
    bytes.extend_from_slice(parts.next().unwrap_or_default().as_bytes());
    for part in parts {
        let code = part.get(..3).and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match (code, part.get(3..)) {
            (Some(byte), Some(rest)) => {
                bytes.push(byte);
                bytes.extend_from_slice(rest.as_bytes());
            }
            _ => bytes.extend_from_slice(part.as_bytes()),
        }
    }
    PathBuf::from(OsString::from_vec(bytes))
}

/// The number of the mount that a directory is in.
pub(super) fn mount_id(directory: impl AsFd) -> io::Result<u64> {
    let descriptor = directory.as_fd().as_raw_fd();
    let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{descriptor}"))?;
    let id = info.lines().find_map(|line| line.strip_prefix("mnt_id:")?.trim().parse().ok());
    id.ok_or_else(|| io::Error::other("the kernel does not report which mount a directory is in"))
}

/// Mounts a file system in memory on `directory`, under the name of the driver.
pub(super) fn mount_memory(directory: impl AsFd, name: &str) -> io::Result<()> {
    let path = format!("/proc/self/fd/{}", directory.as_fd().as_raw_fd());
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    let attempt = |options: String| -> io::Result<()> {
        let options = CString::new(options)?;
        Ok(mount(name, &path, "tmpfs", flags, options.as_c_str())?)
    };
    let options = options(Path::new(SELINUX).exists());
    match attempt(format!("{options},noswap")) {
        // Kernels before 6.4 do not know it, and only root of the whole machine may use it.
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => attempt(options),
        mounted => mounted,
    }
}

fn options(has_selinux: bool) -> String {
    let mut options = format!("size={VOLUME_BYTES},nr_inodes={VOLUME_INODES},mode=0755");
    if has_selinux {
        options.push_str(&format!(",context=\"{SELINUX_CONTEXT}\""));
    }
    options
}

/// Removes the newest mount from `name` in `directory`; processes that use it still do.
pub(super) fn unmount_newest(directory: impl AsFd, name: &Path) -> io::Result<()> {
    let path = Path::new("/proc/self/fd").join(directory.as_fd().as_raw_fd().to_string()).join(name);
    Ok(unmount(path, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_list_is_read() {
        let line = "36 35 98:0 /mnt1 /var/lib/ku\\040be shared:1 master:2";
        assert_eq!(Mount::parse(line), None);
        let mount = |fields: &str, root: &str| {
            let line = format!(
                "36 35 98:0 {root} /var/lib/ku\\040be\\134 rw,noatime {fields}- tmpfs csi.attache.dev rw"
            );
            Mount::parse(&line).unwrap()
        };
        let shared = mount("shared:1 ", "/");
        assert_eq!((shared.id, shared.point.as_path()), (36, Path::new("/var/lib/ku be\\")));
        assert!(shared.is_of("csi.attache.dev") && shared.is_in_memory() && !shared.is_of("other"));
        let cases = [
            ("shared:1 ", "/", true),
            ("shared:1 master:2 ", "/var/lib/kubelet", true),
            ("master:2 ", "/", false),
            ("", "/var/lib/kubelet", false),
            ("", "/", true),
        ];
        for (fields, root, reaches) in cases {
            assert_eq!(mount(fields, root).reaches_pods(), reaches, "{fields} {root}");
        }
        assert!(Mount::all().unwrap().iter().any(|mount| mount.point == Path::new("/proc")));
        let proc = std::fs::File::open("/proc").unwrap();
        assert_eq!(Mount::of(&proc).unwrap().unwrap().point, Path::new("/proc"));
    }

    #[test]
    fn a_file_system_is_labelled_where_there_is_selinux() {
        assert!(!options(false).contains("context"));
        assert!(options(true).ends_with(",context=\"system_u:object_r:container_file_t:s0\""));
    }
}
