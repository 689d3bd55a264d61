//! Looks paths up as the kernel does, name by name, and reads the files where they lead.
//!
//! All paths of a [`Walk`] are looked up in one pass: a name that several of them share is looked up once, so they can't
//! lead into two generations of one volume. A directory in which files are looked up is opened once, and everything
//! beneath it is found through this descriptor.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, Statx, StatxAttributes, StatxFlags};
use rustix::io::Errno;
use zeroize::Zeroizing;

use super::file;
use super::lookup::{Inode, MAX_LINKS, inode_of, names_from_last};
use super::pending::Operation;

/// How often the files are read again when they change while they are being read.
const READS: usize = 5;

/// Distinguishes two states of a file: size, and the times of the last changes (mtime and ctime).
type Stamp = (u64, (i64, u32), (i64, u32));

/// What a name stands for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Step {
    Missing,
    Link(PathBuf),
    Directory(Inode),
    File(RegularFile),
    /// A device, a FIFO or a socket.
    Other(Inode),
    Failed(Errno),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RegularFile {
    pub(super) inode: Inode,
    stamp: Stamp,
    /// It has names elsewhere (hard links, or a mount of this one file), under which it can be written to.
    pub(super) has_several_names: bool,
}

/// What decides where a set of paths leads, links resolved.
#[derive(Debug, Default)]
pub struct Lookups {
    /// Every name that was looked up, with its directory.
    pub(super) names: BTreeMap<PathBuf, Step>,
    /// The directories in which names were looked up, as far as they exist.
    pub(super) directories: BTreeMap<PathBuf, Directory>,
    /// A file system failed. No event says when it works again.
    pub(super) is_broken: bool,
    /// The look's registration, which lasts until what it found is followed.
    pub(super) operation: Option<Operation>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Directory {
    pub(super) inode: Inode,
    /// A file is in it, or would be if it existed.
    pub(super) holds_files: bool,
}

impl Lookups {
    /// Every regular file that was found, by its path without links.
    pub(super) fn files(&self) -> impl Iterator<Item = (&PathBuf, &RegularFile)> {
        self.names.iter().filter_map(|(path, step)| match step {
            Step::File(file) => Some((path, file)),
            _ => None,
        })
    }

    /// Every name, by its directory's inode.
    pub(super) fn keys(&self) -> impl Iterator<Item = (Inode, &OsStr)> {
        self.names.keys().filter_map(|path| self.key(path))
    }

    /// The inode of the directory of `path`, and its name there.
    pub(super) fn key<'p>(&self, path: &'p Path) -> Option<(Inode, &'p OsStr)> {
        Some((self.directories.get(path.parent()?)?.inode, path.file_name()?))
    }

    /// Whether all names still stand for the same, and all files are unchanged.
    pub fn are_current(&self) -> bool {
        self.names.keys().all(|path| self.is_current(path))
    }

    /// Whether `path`, which is one of the names, still stands for the same.
    pub(super) fn is_current(&self, path: &Path) -> bool {
        self.names.get(path).is_none_or(|step| look_up(CWD, path, matches!(step, Step::Link(_))) == *step)
    }
}

/// Files that were read together.
#[derive(Debug)]
pub struct Look {
    /// For each path of the walk, in order.
    pub files: Vec<FoundFile>,
    pub lookups: Lookups,
    /// The files changed each time while they were being read.
    pub is_restless: bool,
}

/// What was found at a path.
#[derive(Debug)]
pub struct FoundFile {
    /// Where the path leads, without links, as far as it exists.
    pub real: PathBuf,
    pub content: io::Result<Zeroizing<Vec<u8>>>,
}

/// Paths that are looked up together, time and again.
#[derive(Debug, Default)]
pub struct Walk {
    paths: Vec<PathBuf>,
    /// How many of the first paths make the others needless if each of them is a file.
    decisive: Option<usize>,
    /// The names that were links at the last walk. That is probably what they are still.
    links: BTreeSet<PathBuf>,
    /// The root directory, which stays the same.
    root: Option<Step>,
}

impl Walk {
    pub fn new(paths: Vec<PathBuf>) -> Self {
        Self { paths, ..Self::default() }
    }

    /// Paths of which those behind the first `decisive` are looked up only if one of these is no file.
    pub(super) fn with_fallbacks(paths: Vec<PathBuf>, decisive: usize) -> Self {
        Self { decisive: Some(decisive), ..Self::new(paths) }
    }

    pub fn paths(&self) -> &[PathBuf] {
        &self.paths
    }

    /// Where the paths lead now.
    pub(super) fn look_up(&mut self) -> Lookups {
        let root = self.root.get_or_insert_with(root);
        let mut pass = Pass::new(&self.links, root);
        for path in &self.paths {
            pass.resolve(path);
        }
        let lookups = pass.into_lookups();
        self.links = links_of(&lookups);
        lookups
    }

    /// Reads all files, of `limit` bytes at most each, except for those that `refuse`, given their path without links,
    /// has an error for. Needless ones count as missing. Starts over if one of them changed meanwhile.
    pub fn read(&mut self, limit: u64, refuse: impl Fn(&Path) -> Option<io::Error>) -> Look {
        let root = self.root.get_or_insert_with(root);
        let mut reads = 0;
        loop {
            reads += 1;
            let mut pass = Pass::new(&self.links, root);
            let mut ends: Vec<End> = Vec::new();
            for path in &self.paths {
                let is_file = |end: &End| matches!(end.step, Step::File(_)) && refuse(&end.path).is_none();
                if self.decisive == Some(ends.len()) && ends.iter().all(is_file) {
                    break;
                }
                ends.push(pass.resolve(path));
            }
            let read = |end: &End| refuse(&end.path).map_or_else(|| pass.read(end, limit), Err);
            let contents: Vec<_> = ends.iter().map(read).collect();
            let is_current = pass.is_current(&ends);
            if is_current || reads == READS {
                let is_broken =
                    contents.iter().filter_map(|content| content.as_ref().err()).any(is_breakdown);
                let found = ends.into_iter().zip(contents);
                let found = found.map(|(end, content)| FoundFile { real: end.path, content });
                let missing =
                    |path: &PathBuf| FoundFile { real: path.clone(), content: Err(Errno::NOENT.into()) };
                let needless = self.paths.iter().skip(found.len()).map(missing);
                let files = found.chain(needless).collect();
                let mut lookups = pass.into_lookups();
                lookups.is_broken |= is_broken;
                self.links = links_of(&lookups);
                return Look { files, lookups, is_restless: !is_current };
            }
        }
    }
}

fn links_of(lookups: &Lookups) -> BTreeSet<PathBuf> {
    let links = lookups.names.iter().filter(|(_, step)| matches!(step, Step::Link(_)));
    links.map(|(path, _)| path.clone()).collect()
}

/// Where a path leads.
#[derive(Debug)]
struct End {
    path: PathBuf,
    step: Step,
    /// The last link on the way.
    link: Option<PathBuf>,
}

/// One pass over the paths of a [`Walk`].
#[derive(Debug)]
struct Pass<'a> {
    links: &'a BTreeSet<PathBuf>,
    root: &'a Step,
    steps: BTreeMap<PathBuf, Step>,
    /// Names at the end of a path: of files, if they exist.
    last: BTreeSet<PathBuf>,
    /// The directories in which a file is looked up.
    open: BTreeMap<PathBuf, Option<OwnedFd>>,
}

impl<'a> Pass<'a> {
    fn new(links: &'a BTreeSet<PathBuf>, root: &'a Step) -> Self {
        Self { links, root, steps: BTreeMap::new(), last: BTreeSet::new(), open: BTreeMap::new() }
    }

    /// Follows `path` to its end, or to the first name that doesn't exist: nothing behind it can appear before it does.
    fn resolve(&mut self, path: &Path) -> End {
        let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        let mut ahead: Vec<_> = names_from_last(&absolute).collect();
        let mut end = End { path: PathBuf::from("/"), step: Step::Missing, link: None };
        let mut links = 0;
        while let Some(name) = ahead.pop() {
            if name == ".." {
                end.path.pop();
                continue;
            }
            let is_last = ahead.is_empty();
            let path = end.path.join(&name);
            // A link leads to a file elsewhere.
            if is_last && !self.links.contains(&path) {
                self.open(&end.path);
            }
            end.path = path;
            end.step = self.step(&end.path);
            if is_last {
                self.last.insert(end.path.clone());
            }
            match &end.step {
                Step::Link(target) => {
                    links += 1;
                    if links > MAX_LINKS {
                        end.step = Step::Failed(Errno::LOOP);
                        break;
                    }
                    ahead.extend(names_from_last(target));
                    let directory = if target.is_absolute() { None } else { end.path.parent() };
                    let directory = directory.unwrap_or(Path::new("/")).to_owned();
                    end.link = Some(std::mem::replace(&mut end.path, directory));
                }
                Step::Directory(_) => {}
                Step::File(_) | Step::Other(_) if !ahead.is_empty() => {
                    end.step = Step::Failed(Errno::NOTDIR);
                    break;
                }
                _ => break,
            }
        }
        end
    }

    fn step(&mut self, path: &Path) -> Step {
        if let Some(step) = self.steps.get(path) {
            return step.clone();
        }
        let step = self.look_up_again(path);
        self.steps.insert(path.to_owned(), step.clone());
        step
    }

    fn look_up_again(&self, path: &Path) -> Step {
        let (directory, name) = self.place(path);
        look_up(directory, name, self.links.contains(path))
    }

    /// How to name `path` in a system call: relative to its directory if that is open.
    fn place<'p>(&self, path: &'p Path) -> (BorrowedFd<'_>, &'p Path) {
        let directory = path.parent().and_then(|directory| self.open.get(directory)?.as_ref());
        match (directory, path.file_name()) {
            (Some(directory), Some(name)) => (directory.as_fd(), Path::new(name)),
            _ => (CWD, path),
        }
    }

    /// Opens a directory, from its parent if that is open.
    fn open(&mut self, directory: &Path) {
        if self.open.contains_key(directory) {
            return;
        }
        let (parent, name) = self.place(directory);
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let opened = rustix::fs::openat(parent, name, flags, Mode::empty()).ok();
        self.open.insert(directory.to_owned(), opened);
    }

    /// The content of a regular file; anything else is refused before it is opened, which could have effects or block.
    fn read(&self, end: &End, limit: u64) -> io::Result<Zeroizing<Vec<u8>>> {
        let size = match &end.step {
            Step::File(RegularFile { stamp: (size, ..), .. }) => *size,
            Step::Missing => return Err(Errno::NOENT.into()),
            Step::Failed(error) => return Err((*error).into()),
            Step::Link(_) | Step::Directory(_) | Step::Other(_) => return Err(file::not_regular()),
        };
        if size > limit {
            return Err(file::too_large(limit));
        }
        let (directory, name) = self.place(&end.path);
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let opened = rustix::fs::openat(directory, name, flags, Mode::empty())?;
        file::content_of(&opened, size, limit)
    }

    /// Whether the files are still what they were, and what is missing is still missing.
    fn is_current(&self, ends: &[End]) -> bool {
        // The directory behind a link may have been deleted right after the link was swapped.
        let is_missing = |end: &&End| end.step == Step::Missing;
        let links: BTreeSet<_> = ends.iter().filter(is_missing).filter_map(|end| end.link.as_ref()).collect();
        links.into_iter().all(|link| self.steps.get(link) == Some(&self.look_up_again(link)))
            && ends
                .iter()
                .all(|end| !matches!(end.step, Step::File(_)) || self.look_up_again(&end.path) == end.step)
    }

    fn into_lookups(self) -> Lookups {
        let mut directories = BTreeMap::new();
        for path in self.steps.keys() {
            let Some(parent) = path.parent().filter(|parent| !directories.contains_key(*parent)) else {
                continue;
            };
            // Only the root is in no other directory.
            if let Step::Directory(inode) = self.steps.get(parent).unwrap_or(self.root) {
                directories.insert(parent.to_owned(), Directory { inode: *inode, holds_files: false });
            }
        }
        for path in &self.last {
            let is_file =
                matches!(self.steps.get(path), Some(Step::File(_) | Step::Missing | Step::Other(_)));
            let parent = path.parent().filter(|_| is_file);
            if let Some(directory) = parent.and_then(|parent| directories.get_mut(parent)) {
                directory.holds_files = true;
            }
        }
        let is_broken = self
            .steps
            .values()
            .any(|step| matches!(step, Step::Failed(error) if is_breakdown(&(*error).into())));
        Lookups { names: self.steps, directories, is_broken, operation: None }
    }
}

/// Whether the file system fails, and not the path.
fn is_breakdown(error: &io::Error) -> bool {
    let of_the_path =
        [Errno::NOENT, Errno::NOTDIR, Errno::LOOP, Errno::ACCESS, Errno::PERM, Errno::NAMETOOLONG];
    Errno::from_io_error(error).is_some_and(|error| !of_the_path.contains(&error))
}

fn root() -> Step {
    look_up(CWD, Path::new("/"), false)
}

/// What `name` in `directory` stands for. `is_link` is a guess that saves a system call where it is right.
fn look_up(directory: BorrowedFd<'_>, name: &Path, is_link: bool) -> Step {
    let link = || rustix::fs::readlinkat(directory, name, Vec::new());
    let target = |target: std::ffi::CString| Step::Link(OsString::from_vec(target.into_bytes()).into());
    if is_link && let Ok(found) = link() {
        return target(found);
    }
    let flags = StatxFlags::BASIC_STATS;
    match rustix::fs::statx(directory, name, AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT, flags) {
        Ok(status) => match FileType::from_raw_mode(status.stx_mode.into()) {
            FileType::Symlink => link().map_or_else(failed, target),
            FileType::Directory => Step::Directory(inode_of(&status)),
            FileType::RegularFile => Step::File(regular_file(&status)),
            _ => Step::Other(inode_of(&status)),
        },
        Err(error) => failed(error),
    }
}

fn failed(error: Errno) -> Step {
    if error == Errno::NOENT { Step::Missing } else { Step::Failed(error) }
}

fn regular_file(status: &Statx) -> RegularFile {
    let modified = (status.stx_mtime.tv_sec, status.stx_mtime.tv_nsec);
    let changed = (status.stx_ctime.tv_sec, status.stx_ctime.tv_nsec);
    RegularFile {
        inode: inode_of(status),
        stamp: (status.stx_size, modified, changed),
        has_several_names: status.stx_nlink > 1
            || status.stx_attributes.contains(StatxAttributes::MOUNT_ROOT),
    }
}

#[cfg(test)]
mod tests;
