//! The output directory on disk, laid out as the kubelet does it: a directory per generation, and one link to the newest.
//!
//! ```text
//! ..attache-4f1c…/key.pem, cert-chain.pem, root-cert.pem    or the files of another format
//! ..data         -> ..attache-4f1c…     swapped by a rename
//! key.pem        -> ..data/key.pem      permanent, as the other two
//! ```
//!
//! A reader that resolves `..data` once reads one generation. Everything whose name begins with `..attache-` belongs to the
//! agent, so leftovers of a crash are found by that name and removed.

mod survey;
mod swap;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt;
use std::fs::{self, DirBuilder, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _, lchown, symlink};
use std::path::{Component, Path, PathBuf};
use std::time::{Duration, Instant};

use zeroize::Zeroizing;

pub use self::survey::Condition;
use crate::base::limits;
use crate::fs::file;
use crate::secret::Version;

/// The link to the current generation.
const DATA: &str = "..data";
/// The prefix of everything that belongs to the agent.
const OURS: &str = "..attache-";
/// A directory that exists to be locked. Other users can't open it: a lock on the output directory itself, which every
/// user may read, could be held against the agent by any of them.
const LOCK: &str = "..attache-lock";
/// A link within [`LOCK`], where no other program looks: it names the generation for which the hook succeeded.
const HOOK_DONE: &str = "told";

/// How long a generation stays after the swap: programs that resolved the link before may still be reading it.
pub const GRACE: Duration = Duration::from_secs(1);

/// Where files are written, and for which user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// The option that names the directory, for messages.
    pub option: &'static str,
    /// Created if it does not exist.
    pub path: PathBuf,
    /// The names of the files.
    pub names: Vec<String>,
    pub owner: Owner,
}

/// The user and group that files are given to; where none is set, the agent's own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Owner {
    pub user: Option<u32>,
    pub group: Option<u32>,
}

impl Owner {
    fn is_set(self) -> bool {
        self != Self::default()
    }

    /// Whether a file of `user` and `group` needs no change.
    fn is(self, user: u32, group: u32) -> bool {
        self.user.is_none_or(|wanted| wanted == user) && self.group.is_none_or(|wanted| wanted == group)
    }
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let user = self.user.map(|user| format!("user {user}"));
        let group = self.group.map(|group| format!("group {group}"));
        f.write_str(&user.into_iter().chain(group).collect::<Vec<_>>().join(" and "))
    }
}

/// One file of a generation.
pub struct OutputFile {
    pub name: String,
    /// Permissions, regardless of the umask.
    pub mode: u32,
    pub content: Zeroizing<Vec<u8>>,
}

/// The result of [`OutputDirectory::write`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Written {
    /// Readers see a new generation.
    Swapped,
    /// The current generation already has these files.
    Unchanged,
}

/// Why files were not written. What readers see has not changed.
#[derive(Debug, thiserror::Error)]
pub enum OutputDirectoryError {
    #[error("{path} is {what}: move it away, or choose another {option}")]
    Foreign { path: PathBuf, what: &'static str, option: &'static str },
    #[error("locking {directory} failed: {source}; give each agent an {option} of its own")]
    Locked { directory: PathBuf, source: io::Error, option: &'static str },
    #[error("{operation} {path} failed: {source}; {}choose another {option}", file::remedy(source))]
    Failed { operation: &'static str, path: PathBuf, source: io::Error, option: &'static str },
    #[error(
        "giving files in {directory} to {owner} failed: {source}; run the agent as root or with CAP_CHOWN, or leave owner and group \
         out and run it as that user"
    )]
    Owner { directory: PathBuf, owner: Owner, source: io::Error },
}

/// A directory that is written for other programs.
#[derive(Debug)]
pub struct OutputDirectory {
    path: PathBuf,
    option: &'static str,
    names: Vec<String>,
    owner: Owner,
    /// The generation that this process wrote last, or found to be up to date.
    made: Option<Made>,
    /// The agent's entries that are no longer in use, with the time at which that was noticed.
    old: BTreeMap<OsString, Instant>,
    #[cfg(test)]
    fault: tests::Fault,
}

/// A generation and its content.
#[derive(Debug)]
struct Made {
    name: OsString,
    /// Digests, so that the key need not stay in memory for the comparison.
    contents: Vec<(String, Version)>,
}

impl OutputDirectory {
    /// The directory of `layout`, which need not exist yet.
    pub fn new(layout: Layout) -> Self {
        let Layout { option, path, names, owner } = layout;
        Self {
            path,
            option,
            names,
            owner,
            made: None,
            old: BTreeMap::new(),
            #[cfg(test)]
            fault: tests::Fault::default(),
        }
    }

    /// The paths that other programs read.
    pub fn names(&self) -> Vec<PathBuf> {
        self.names.iter().map(|name| self.path.join(name)).collect()
    }

    /// Checks that the directory can be written, without changing what readers see.
    pub fn check(&mut self) -> Result<(), OutputDirectoryError> {
        let _lock = self.enter()?;
        self.survey()?;
        let probe = self.unused_path();
        self.change("writing to", &self.path, || fs::create_dir(&probe))?;
        let given = self.give(&probe);
        self.change("writing to", &self.path, || fs::remove_dir(&probe))?;
        given
    }

    /// Gives the file at `path` to its owner.
    fn give(&self, path: &Path) -> Result<(), OutputDirectoryError> {
        if !self.owner.is_set() {
            return Ok(());
        }
        lchown(path, self.owner.user, self.owner.group).map_err(|source| OutputDirectoryError::Owner {
            directory: self.path.clone(),
            owner: self.owner,
            source,
        })
    }

    /// Makes `files` the current generation, unless they are that already.
    pub fn write(&mut self, files: &[OutputFile]) -> Result<Written, OutputDirectoryError> {
        let _lock = self.enter()?;
        let outcome = self.swap(files);
        // The sweep comes next, and reports what can't be removed.
        let _ = self.remove_old();
        let (written, name) = outcome?;
        let contents = files.iter().map(|file| (file.name.clone(), Version::of(&file.content))).collect();
        self.made = Some(Made { name, contents });
        Ok(written)
    }

    /// Whether the hook has succeeded for the current generation, in this process or in an earlier one.
    pub fn hook_is_done(&self) -> bool {
        let done = fs::read_link(self.path.join(LOCK).join(HOOK_DONE)).map(PathBuf::into_os_string).ok();
        done.is_some() && done.as_ref() == self.made.as_ref().map(|made| &made.name)
    }

    /// Records that the hook has succeeded for the current generation. If the agent dies before this reaches the disk, the
    /// hook runs once more rather than not at all.
    pub fn record_hook_done(&mut self) -> Result<(), OutputDirectoryError> {
        let Some(made) = &self.made else { return Ok(()) };
        let done = self.path.join(LOCK).join(HOOK_DONE);
        let new = done.with_extension("new");
        self.change("linking", &done, || {
            // A crash may have left it.
            let _ = fs::remove_file(&new);
            symlink(&made.name, &new)?;
            fs::rename(&new, &done)
        })
    }

    /// Removes generations that are no longer in use. Returns true if some are still within [`GRACE`]. One that can't be
    /// removed is retried by the next sweep.
    pub fn sweep(&mut self) -> Result<bool, OutputDirectoryError> {
        // A directory that a person has removed must not come back empty.
        if !self.path.join(LOCK).is_dir() {
            return Ok(false);
        }
        let _lock = self.enter()?;
        self.remove_old()
    }

    /// Removes all files that the agent has written, which belong to a workload that is gone. Files of others stay.
    pub fn clear(&self) -> Result<(), OutputDirectoryError> {
        if !self.path.is_dir() {
            return Ok(());
        }
        let lock = self.enter()?;
        let is_link_of_ours = |path: &Path| fs::read_link(path).is_ok_and(|to| to.starts_with(DATA));
        for path in self.names().into_iter().filter(|path| is_link_of_ours(path)) {
            self.change("removing", &path, || remove(&path))?;
        }
        let data = self.path.join(DATA);
        if fs::read_link(&data).is_ok_and(|to| is_ours(&to)) {
            self.change("removing", &data, || remove(&data))?;
        }
        let entries =
            fs::read_dir(&self.path).map_err(|source| self.failed("listing", &self.path, source))?;
        let own = entries.flatten().map(|entry| entry.file_name()).filter(|name| is_ours(Path::new(name)));
        for name in own {
            let path = self.path.join(name);
            self.change("removing", &path, || remove(&path))?;
        }
        drop(lock);
        let lock = self.path.join(LOCK);
        self.change("removing", &lock, || remove(&lock))
    }

    /// Creates the directory if needed, and locks other agents out as long as the returned file is open.
    fn enter(&self) -> Result<fs::File, OutputDirectoryError> {
        self.create()?;
        let lock = self.path.join(LOCK);
        match fs::symlink_metadata(&lock) {
            // Not a link either: another user could hold the lock on its target.
            Ok(found) if !found.is_dir() => {
                return Err(self.foreign(&lock, "not a directory"));
            }
            Ok(_) => {}
            Err(_) => {
                self.change("writing to", &self.path, || {
                    match DirBuilder::new().mode(0o700).create(&lock) {
                        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
                        created => created,
                    }
                })?;
            }
        }
        file::lock_directory(&lock).map_err(|source| OutputDirectoryError::Locked {
            directory: self.path.clone(),
            source,
            option: self.option,
        })
    }

    /// Creates the directory, unless it exists.
    fn create(&self) -> Result<(), OutputDirectoryError> {
        let foreign = |what| self.foreign(&self.path, what);
        match fs::metadata(&self.path) {
            Ok(found) if found.is_dir() => Ok(()),
            Ok(_) => Err(foreign("not a directory")),
            Err(error) if error.kind() == io::ErrorKind::NotFound && self.path.is_symlink() => {
                Err(foreign("a dangling link"))
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                self.change("creating", &self.path, || create(&self.path))
            }
            Err(source) => Err(self.failed("opening", &self.path, source)),
        }
    }

    /// Removes the agent's entries that have been out of use for [`GRACE`], and the oldest ones sooner where there are too
    /// many. Returns true if younger ones are left.
    fn remove_old(&mut self) -> Result<bool, OutputDirectoryError> {
        let now = Instant::now();
        self.find_old(now)?;
        let mut by_age: Vec<_> = self.old.iter().map(|(name, since)| (*since, name.clone())).collect();
        by_age.sort();
        let excess = by_age.len().saturating_sub(limits::OUTPUT_GENERATIONS);
        let mut first_failure = None;
        for (count, (since, name)) in by_age.into_iter().enumerate() {
            if count < excess || now.duration_since(since) >= GRACE {
                let path = self.path.join(&name);
                match self.change("removing", &path, || remove(&path)) {
                    Ok(()) => drop(self.old.remove(&name)),
                    Err(error) => drop(first_failure.get_or_insert(error)),
                }
            }
        }
        first_failure.map_or(Ok(!self.old.is_empty()), Err)
    }

    /// Brings `old` up to date with the directory.
    fn find_old(&mut self, now: Instant) -> Result<(), OutputDirectoryError> {
        let current = fs::read_link(self.path.join(DATA)).map(PathBuf::into_os_string).ok();
        let entries =
            fs::read_dir(&self.path).map_err(|source| self.failed("listing", &self.path, source))?;
        let unused = entries
            .flatten()
            .map(|entry| entry.file_name())
            .filter(|name| is_ours(Path::new(name)) && Some(name) != current.as_ref());
        let with_time = |name: OsString| {
            let since = self.old.get(&name).copied().unwrap_or(now);
            (name, since)
        };
        self.old = unused.map(with_time).collect();
        Ok(())
    }

    /// A path that does not exist yet, for a generation or for a link before its rename.
    fn unused_path(&self) -> PathBuf {
        self.path.join(format!("{OURS}{:016x}", fastrand::u64(..)))
    }

    /// Does one step of a write. Tests can fail each step.
    fn change(
        &self,
        operation: &'static str,
        path: &Path,
        work: impl FnOnce() -> io::Result<()>,
    ) -> Result<(), OutputDirectoryError> {
        #[cfg(test)]
        let work = || self.fault.step().and_then(|()| work());
        work().map_err(|source| self.failed(operation, path, source))
    }

    fn failed(&self, operation: &'static str, path: &Path, source: io::Error) -> OutputDirectoryError {
        OutputDirectoryError::Failed { operation, path: path.to_owned(), source, option: self.option }
    }

    fn foreign(&self, path: &Path, what: &'static str) -> OutputDirectoryError {
        OutputDirectoryError::Foreign { path: path.to_owned(), what, option: self.option }
    }
}

/// Creates an output directory: every user may list it, whatever the umask.
pub fn create(path: &Path) -> io::Result<()> {
    fs::create_dir_all(path)?;
    fs::set_permissions(path, Permissions::from_mode(0o755))
}

/// Removes the file, link or directory at `path`, if it exists.
fn remove(path: &Path) -> io::Result<()> {
    let is_directory = fs::symlink_metadata(path).is_ok_and(|found| found.is_dir());
    match if is_directory { fs::remove_dir_all(path) } else { fs::remove_file(path) } {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

/// Whether `name` is that of a generation, or of a link before its rename.
fn is_ours(name: &Path) -> bool {
    let mut components = name.components();
    match (components.next(), components.next()) {
        (Some(Component::Normal(name)), None) => {
            name.to_str().is_some_and(|name| name.starts_with(OURS) && name != LOCK)
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests;
