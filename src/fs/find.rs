//! A path as the kernel would look it up, but step by step: the device of a directory is known, and may be refused,
//! before anything is looked up in it. A device that does not answer would keep the thread.
//!
//! Names that a peer chooses are looked up this way, and what they lead to is checked on its open descriptor.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd as _, OwnedFd};
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, Statx, StatxFlags, openat, readlinkat, statx};
use rustix::io::Errno;

pub use super::lookup::Inode;
use super::lookup::{MAX_LINKS, inode_of, names_from_last};

const DIRECTORY: OFlags =
    OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
const ANYTHING: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// Decides whether to go on to a device.
pub trait Gate {
    /// Nothing has been looked up on `device` yet by this walk, or since it was last elsewhere.
    fn enter(&self, device: u64) -> Result<(), Blocked>;
}

/// Other work hangs on this device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Blocked(pub u64);

/// What a path leads to.
#[derive(Debug)]
pub struct Found {
    /// The directory in which it was looked up, links followed.
    directory: OwnedFd,
    name: OsString,
    /// Opened with `O_PATH`.
    file: OwnedFd,
    inode: Inode,
    kind: FileType,
    /// It lies under the path's own last name, which is no link.
    is_direct: bool,
}

/// Why a path leads to nothing.
#[derive(Debug)]
pub enum Failed {
    Blocked(Blocked),
    /// A name does not exist. If it is one of the path itself, and not of the target of a link on the way: how many
    /// components of the path do exist.
    Missing(Option<usize>),
    Io(io::Error),
}

impl From<Blocked> for Failed {
    fn from(blocked: Blocked) -> Self {
        Self::Blocked(blocked)
    }
}

impl From<Errno> for Failed {
    fn from(error: Errno) -> Self {
        Self::Io(error.into())
    }
}

/// Where a file may lie that a peer names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Bounds {
    /// How many components of the path name the directory that it must not lead out of.
    pub prefix: Option<usize>,
    /// Directories in which it must not lie.
    pub private: Vec<Private>,
}

/// Why a file is not served that is not beneath a prefix.
pub const OUTSIDE: &str = "outside the directories that --file-prefix allows: start the agent with --file-prefix DIR for \
                           each directory with files that Envoy names";

/// A directory whose files are not for peers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Private {
    /// Links resolved, as far as it exists.
    pub path: PathBuf,
    /// If it exists. It has the same one where it is mounted again.
    pub inode: Option<Inode>,
}

/// A file is not within its [`Bounds`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OutOfBounds {
    /// The same error whether or not the file exists.
    #[error("{OUTSIDE}")]
    Prefix,
    #[error("it lies in {directory}, whose files are the agent's own and not served by name")]
    Private { directory: PathBuf },
}

impl OutOfBounds {
    fn denied(self) -> Failed {
        Failed::Io(io::Error::new(io::ErrorKind::PermissionDenied, self))
    }
}

/// One step that is still to be made.
struct Step {
    name: OsString,
    /// It is a component of the path itself.
    is_given: bool,
}

struct Walk<'a> {
    gate: &'a dyn Gate,
    /// What is ahead, the next step last.
    ahead: Vec<Step>,
    directory: OwnedFd,
    inode: Inode,
    links: usize,
}

/// Finds what the absolute `path` leads to within `bounds`.
pub fn find(path: &Path, bounds: &Bounds, gate: &dyn Gate) -> Result<Found, Failed> {
    let mut walk = Walk::new(path, gate)?;
    let given = walk.ahead.len();
    let mut prefix = None;
    let found = loop {
        let left = walk.ahead.iter().filter(|step| step.is_given).count();
        if prefix.is_none() && bounds.prefix == Some(given - left) && walk.is_at_given() {
            prefix = Some(real_path(&walk.directory)?);
        }
        match walk.step() {
            Ok(None) => {}
            Ok(Some(found)) => break Ok(found),
            Err(failed) => {
                let left = walk.ahead.iter().filter(|step| step.is_given).count();
                break Err(match failed {
                    Failed::Missing(Some(_)) => Failed::Missing(Some(given - left - 1)),
                    failed => failed,
                });
            }
        }
    };
    if bounds.prefix.is_some() && !matches!(found, Err(Failed::Blocked(_))) {
        // Where a name does not exist, too: no peer learns what exists elsewhere.
        let reached = found.as_ref().map_or(&walk.directory, |found| &found.file);
        let is_inside = match &prefix {
            Some(prefix) => real_path(reached)?.starts_with(prefix),
            // The prefix does not exist, so nothing beneath it does.
            None => true,
        };
        if !is_inside {
            return Err(OutOfBounds::Prefix.denied());
        }
    }
    let found = found?;
    if let Some(private) = private_directory(&found, &bounds.private)? {
        return Err(OutOfBounds::Private { directory: private.path.clone() }.denied());
    }
    Ok(found)
}

/// The directory at `path`, links followed; if it does not exist, its path with the links of what exists resolved.
pub fn private(path: &Path, gate: &dyn Gate) -> Result<Private, Blocked> {
    match find(path, &Bounds::default(), gate) {
        Ok(found) => {
            let real = real_path(&found.file).unwrap_or_else(|_| path.to_owned());
            Ok(Private { path: real, inode: Some(found.inode) })
        }
        Err(Failed::Blocked(blocked)) => Err(blocked),
        Err(_) => match (path.parent(), path.file_name()) {
            (Some(parent), Some(name)) => {
                let parent = private(parent, gate)?;
                Ok(Private { path: parent.path.join(name), inode: None })
            }
            _ => Ok(Private { path: path.to_owned(), inode: None }),
        },
    }
}

impl Found {
    /// Whether its last name is no link: it appears and disappears in the path's own directory.
    pub fn is_direct(&self) -> bool {
        self.is_direct
    }

    pub fn is_file(&self) -> bool {
        self.kind == FileType::RegularFile
    }

    /// Opens the regular file to read it. Anything else is refused: opening a FIFO or a device could block, or have
    /// effects.
    pub fn open(&self) -> io::Result<File> {
        if !self.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
        }
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = openat(&self.directory, &self.name, flags, Mode::empty())?;
        // What was checked is the descriptor, not the name.
        if inode_of(&status(&file)?) != self.inode {
            return Err(io::Error::new(io::ErrorKind::NotFound, "replaced while it was opened"));
        }
        Ok(file.into())
    }
}

impl<'a> Walk<'a> {
    fn new(path: &Path, gate: &'a dyn Gate) -> Result<Self, Failed> {
        let directory = root()?;
        let inode = inode_of(&status(&directory)?);
        gate.enter(inode.0)?;
        let mut walk = Self { gate, ahead: Vec::new(), directory, inode, links: 0 };
        walk.push(path, true);
        Ok(walk)
    }

    fn push(&mut self, path: &Path, is_given: bool) {
        self.ahead.extend(names_from_last(path).map(|name| Step { name, is_given }));
    }

    /// Whether no link is being followed.
    fn is_at_given(&self) -> bool {
        self.ahead.last().is_none_or(|step| step.is_given)
    }

    fn enter(&mut self, directory: OwnedFd, inode: Inode) -> Result<(), Failed> {
        if inode.0 != self.inode.0 {
            self.gate.enter(inode.0)?;
        }
        (self.directory, self.inode) = (directory, inode);
        Ok(())
    }

    /// Makes one step. Returns what the path leads to if it was the last.
    fn step(&mut self) -> Result<Option<Found>, Failed> {
        let Some(Step { name, is_given }) = self.ahead.pop() else {
            // The path is the root directory, or ends with a link to one.
            let (directory, file) = (self.directory.try_clone(), self.directory.try_clone());
            let (directory, file) = (directory.map_err(Failed::Io)?, file.map_err(Failed::Io)?);
            let (inode, kind) = (self.inode, FileType::Directory);
            return Ok(Some(Found { directory, name: ".".into(), file, inode, kind, is_direct: false }));
        };
        match openat(&self.directory, &name, DIRECTORY, Mode::empty()) {
            Ok(directory) => {
                let inode = inode_of(&status(&directory)?);
                self.enter(directory, inode)?;
                return Ok(None);
            }
            Err(Errno::NOTDIR | Errno::LOOP) => {}
            Err(Errno::NOENT) => {
                return Err(Failed::Missing(is_given.then_some(0)));
            }
            Err(error) => return Err(error.into()),
        }
        let file = match openat(&self.directory, &name, ANYTHING, Mode::empty()) {
            Err(Errno::NOENT) => return Err(Failed::Missing(is_given.then_some(0))),
            file => file?,
        };
        let status = status(&file)?;
        let (inode, kind) = (inode_of(&status), FileType::from_raw_mode(status.stx_mode.into()));
        if kind == FileType::Symlink {
            self.links += 1;
            if self.links > MAX_LINKS {
                return Err(Errno::LOOP.into());
            }
            let target = readlinkat(&file, c"", Vec::new())?;
            let target = PathBuf::from(OsString::from_vec(target.into_bytes()));
            if target.is_absolute() {
                let root = root()?;
                let inode = inode_of(&self::status(&root)?);
                self.enter(root, inode)?;
            }
            self.push(&target, false);
            return Ok(None);
        }
        if !self.ahead.is_empty() {
            return Err(Errno::NOTDIR.into());
        }
        // A file may be mounted by itself.
        if inode.0 != self.inode.0 {
            self.gate.enter(inode.0)?;
        }
        let directory = self.directory.try_clone().map_err(Failed::Io)?;
        Ok(Some(Found { directory, name, file, inode, kind, is_direct: is_given }))
    }
}

fn root() -> Result<OwnedFd, Errno> {
    openat(CWD, "/", DIRECTORY, Mode::empty())
}

/// As the kernel knows it: no file system is asked.
fn status(file: impl AsFd) -> Result<Statx, Errno> {
    let wanted = StatxFlags::TYPE | StatxFlags::INO;
    statx(file, c"", AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC, wanted)
}

/// Where an open file really lies.
fn real_path(file: &OwnedFd) -> Result<PathBuf, Failed> {
    let link = format!("/proc/self/fd/{}", file.as_raw_fd());
    std::fs::read_link(link).map_err(|error| {
        Failed::Io(io::Error::new(error.kind(), format!("where it lies is unknown without /proc: {error}")))
    })
}

/// The one of `private` that holds `found`.
fn private_directory<'a>(found: &Found, private: &'a [Private]) -> Result<Option<&'a Private>, Failed> {
    if private.is_empty() {
        return Ok(None);
    }
    let real = real_path(&found.file)?;
    if let Some(holder) = private.iter().find(|private| real.starts_with(&private.path)) {
        return Ok(Some(holder));
    }
    // A directory that is mounted a second time has another path there.
    let mut directory = found.directory.try_clone().map_err(Failed::Io)?;
    let mut inode = inode_of(&status(&directory)?);
    loop {
        if let Some(holder) = private.iter().find(|private| private.inode == Some(inode)) {
            return Ok(Some(holder));
        }
        directory = openat(&directory, c"..", DIRECTORY, Mode::empty())?;
        let above = inode_of(&status(&directory)?);
        if std::mem::replace(&mut inode, above) == above {
            return Ok(None);
        }
    }
}

#[cfg(test)]
mod tests;
