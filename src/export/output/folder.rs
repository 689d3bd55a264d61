//! The folder on disk, in the kubelet's way: a folder for each generation, and one link that leads to the newest.
//!
//! ```text
//! ..attache-4f1c…/key.pem, cert-chain.pem, root-cert.pem
//! ..data         -> ..attache-4f1c…     swapped by a rename
//! key.pem        -> ..data/key.pem      stays for ever, as the other two
//! ```
//!
//! Whoever resolves `..data` once reads one generation. All that begins with `..attache-` is the agent's; whatever a
//! crash leaves of it is found by that name and removed.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{self, DirBuilder, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _, symlink};
use std::path::{Component, Path, PathBuf};
use std::time::{Duration, Instant};

use zeroize::Zeroizing;

use crate::base::limits;
use crate::fs::file;
use crate::fs::generation::NAMES;
use crate::secret::Version;

/// The link to the generation that is read.
const DATA: &str = "..data";
/// What begins so is ours.
const OURS: &str = "..attache-";
/// A folder that is there to be locked. Others can't open it: a lock on the folder itself, which everybody may read,
/// could be held against us by anybody.
const LOCK: &str = "..attache-lock";
/// In that folder, where nobody else looks: a link that names the generation that the hook was told of.
const TOLD: &str = "told";

/// How long a generation stays when no link leads to it any more: whoever has resolved the link is reading it.
pub const GRACE: Duration = Duration::from_secs(1);

/// One file of a generation.
pub struct File {
    /// Its name.
    pub name: &'static str,
    /// Its permissions, whatever the umask.
    pub mode: u32,
    /// What is in it.
    pub content: Zeroizing<Vec<u8>>,
}

/// What became of [`Folder::write`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Written {
    /// Readers see a new generation.
    Swapped,
    /// All of it was there already.
    Same,
}

/// Why files were not written. What readers see is what they saw before.
#[derive(Debug, thiserror::Error)]
pub enum FolderError {
    #[error("{path} is {what}: move it away, or choose another --output-dir")]
    Foreign { path: PathBuf, what: &'static str },
    #[error("{folder} can't be locked: {source}; give each agent an --output-dir of its own")]
    Locked { folder: PathBuf, source: io::Error },
    #[error("{doing} {path} failed: {source}; {}choose another --output-dir", file::remedy(source))]
    Failed { doing: &'static str, path: PathBuf, source: io::Error },
}

/// A folder that is written for others.
#[derive(Debug)]
pub struct Folder {
    path: PathBuf,
    /// What this process made last, or found to be what it was to make.
    made: Option<Made>,
    /// What is ours and not in use, and since when we know.
    old: BTreeMap<OsString, Instant>,
    #[cfg(test)]
    fault: tests::Fault,
}

/// A generation, and what it holds.
#[derive(Debug)]
struct Made {
    name: OsString,
    /// Digests, so that no key has to stay in memory for this.
    contents: [(&'static str, Version); 3],
}

/// What became of a generation since it was written.
#[derive(Debug, PartialEq, Eq)]
pub enum Look {
    /// Readers see what was written.
    Whole,
    /// Something is missing, or holds something else: what, for people. Permissions may be changed: by the hook, say.
    Damaged(String),
    /// Readers see what somebody else has made.
    Taken,
}

/// What is at one of the three names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Absent,
    /// A link through `..data`.
    Linked,
    /// A file that somebody else left there.
    Plain,
}

/// The folder as it was found.
#[derive(Debug)]
struct Survey {
    /// The generation that `..data` leads to.
    current: Option<PathBuf>,
    places: [(&'static str, Place); 3],
}

impl Folder {
    /// The folder at `path`, which need not be there yet.
    pub fn new(path: PathBuf) -> Self {
        Self {
            path,
            made: None,
            old: BTreeMap::new(),
            #[cfg(test)]
            fault: tests::Fault::default(),
        }
    }

    /// Finds out whether it can be written, and changes nothing that is read.
    pub fn check(&mut self) -> Result<(), FolderError> {
        let _lock = self.enter()?;
        self.survey()?;
        let probe = self.fresh();
        self.change("writing to", &self.path, || {
            fs::create_dir(&probe)?;
            fs::remove_dir(&probe)
        })
    }

    /// Makes `files` the generation that is read, unless it is that already.
    pub fn write(&mut self, files: &[File; 3]) -> Result<Written, FolderError> {
        let _lock = self.enter()?;
        let outcome = self.swap(files);
        // What can't be removed is told by the sweep, which comes next.
        let _ = self.remove_old();
        let (written, name) = outcome?;
        let contents = files.each_ref().map(|file| (file.name, Version::of(&file.content)));
        self.made = Some(Made { name, contents });
        Ok(written)
    }

    /// Whether the hook was told of the generation that was written last, by this process or by one before it.
    pub fn is_told(&mut self) -> bool {
        let told = fs::read_link(self.path.join(LOCK).join(TOLD)).map(PathBuf::into_os_string).ok();
        told.is_some() && told.as_ref() == self.made.as_ref().map(|made| &made.name)
    }

    /// Notes that it was: what ends before this comes to the disk has the hook run once more, never not at all.
    pub fn note_told(&mut self) -> Result<(), FolderError> {
        let Some(made) = &self.made else { return Ok(()) };
        let told = self.path.join(LOCK).join(TOLD);
        let new = told.with_extension("new");
        self.change("linking", &told, || {
            // A crash may have left it.
            let _ = fs::remove_file(&new);
            symlink(&made.name, &new)?;
            fs::rename(&new, &told)
        })
    }

    /// The paths that are read.
    pub fn names(&self) -> Vec<PathBuf> {
        NAMES.map(|name| self.path.join(name)).to_vec()
    }

    /// Whether readers are led to a generation that another agent has made since this one wrote its last.
    pub fn is_taken(&mut self) -> bool {
        let Some(made) = &self.made else { return false };
        let current = fs::read_link(self.path.join(DATA)).ok().filter(|to| is_ours(to));
        current.is_some_and(|to| to.as_os_str() != made.name && self.path.join(to).is_dir())
    }

    /// What became of what was written last.
    pub fn look(&mut self) -> Look {
        if self.is_taken() {
            return Look::Taken;
        }
        match self.damage() {
            Some(what) => Look::Damaged(what),
            None => Look::Whole,
        }
    }

    fn damage(&self) -> Option<String> {
        let made = self.made.as_ref()?;
        if !self.path.is_dir() {
            return Some("the folder is gone".to_owned());
        }
        let found = match self.survey() {
            Ok(found) => found,
            Err(error) => return Some(error.to_string()),
        };
        if found.current.as_deref().and_then(Path::file_name) != Some(&made.name) {
            return Some(format!("{DATA} is gone, or leads to nowhere"));
        }
        for (name, place) in found.places {
            match place {
                Place::Linked => {}
                Place::Absent => return Some(format!("{name} is gone")),
                Place::Plain => return Some(format!("{name} is no link any more, but a file")),
            }
        }
        made.contents.iter().find_map(|(name, content)| {
            match file::read(&self.path.join(&made.name).join(name), limits::FILE_BYTES) {
                Ok(found) if Version::of(&found) == *content => None,
                Ok(_) => Some(format!("{name} holds something else")),
                Err(error) => Some(format!("{name} can't be read: {error}")),
            }
        })
    }

    /// Removes generations that nobody reads any more. True if some are still too young for that. One that can't be
    /// removed is kept in mind for the next time.
    pub fn sweep(&mut self) -> Result<bool, FolderError> {
        // Whoever has removed the folder does not want it back empty.
        if !self.path.join(LOCK).is_dir() {
            return Ok(false);
        }
        let _lock = self.enter()?;
        self.remove_old()
    }

    /// Says also which generation is read then.
    fn swap(&self, files: &[File; 3]) -> Result<(Written, OsString), FolderError> {
        let found = self.survey()?;
        if let Some(current) = found.current.as_deref().and_then(Path::file_name)
            && self.holds(&found, files)
        {
            return Ok((Written::Same, current.to_owned()));
        }
        if found.places.iter().any(|(_, place)| *place == Place::Plain) {
            self.migrate(&found)?;
        }
        let made = self.install(|folder| {
            for file in files {
                self.put(folder, file)?;
            }
            // They lead nowhere until all is there: the first generation appears at once, as the later ones do.
            for (name, _) in found.places.iter().filter(|(_, place)| *place == Place::Absent) {
                let link = self.path.join(name);
                self.change("linking", &link, || symlink(Path::new(DATA).join(name), &link))?;
            }
            Ok(())
        })?;
        Ok((Written::Swapped, made))
    }

    /// Puts links in the place of plain files. Before the first of them stands there, it leads to what the files
    /// hold, so that a reader sees the old set until the new one is swapped in.
    fn migrate(&self, found: &Survey) -> Result<(), FolderError> {
        self.install(|folder| {
            for (name, place) in &found.places {
                match (place, &found.current) {
                    (Place::Plain, _) => self.take_over(&self.path.join(name), folder, name)?,
                    // Some names may be links already: a crash can have come in between.
                    (Place::Linked, Some(current)) if current.join(name).exists() => {
                        self.take_over(&current.join(name), folder, name)?;
                    }
                    _ => {}
                }
            }
            Ok(())
        })?;
        for (name, _) in found.places.iter().filter(|(_, place)| *place == Place::Plain) {
            self.put_link(&Path::new(DATA).join(name), &self.path.join(name))?;
        }
        Ok(())
    }

    /// Gives the file at `path` a second name in `folder`; where that is not possible, a copy.
    fn take_over(&self, path: &Path, folder: &Path, name: &'static str) -> Result<(), FolderError> {
        if self.change("linking", path, || fs::hard_link(path, folder.join(name))).is_ok() {
            return Ok(());
        }
        let failed = |source| FolderError::Failed { doing: "reading", path: path.to_owned(), source };
        let mode = fs::metadata(path).map_err(failed)?.permissions().mode() & 0o777;
        let content = file::read(path, limits::FILE_BYTES).map_err(failed)?;
        self.put(folder, &File { name, mode, content })
    }

    /// Makes a new generation, has it filled, and leads readers there: its name. One that does not come so far is
    /// removed.
    fn install(&self, fill: impl FnOnce(&Path) -> Result<(), FolderError>) -> Result<OsString, FolderError> {
        let folder = self.fresh();
        self.change("writing to", &self.path, || DirBuilder::new().mode(0o700).create(&folder))?;
        let name = folder.strip_prefix(&self.path).unwrap_or(&folder);
        let installed = fill(&folder).and_then(|()| {
            self.change("writing to", &self.path, || {
                fs::set_permissions(&folder, Permissions::from_mode(0o755))?;
                sync_folder(&folder)
            })?;
            self.put_link(name, &self.path.join(DATA))
        });
        if installed.is_err() {
            let _ = fs::remove_dir_all(&folder);
        }
        installed.map(|()| name.as_os_str().to_owned())
    }

    /// Puts a link at `place`, in one step with the removal of what is there. After a power cut one or the other is
    /// there, and what it leads to.
    fn put_link(&self, to: &Path, place: &Path) -> Result<(), FolderError> {
        let new = self.fresh();
        self.change("linking", place, || symlink(to, &new))?;
        let put = self.change("linking", place, || {
            sync_folder(&self.path)?;
            fs::rename(&new, place)
        });
        match put {
            // It is done, and readers see it. Should this fail, only a power cut could undo it.
            Ok(()) => drop(sync_folder(&self.path)),
            Err(_) => drop(fs::remove_file(&new)),
        }
        put
    }

    fn put(&self, folder: &Path, file: &File) -> Result<(), FolderError> {
        self.change("writing", &self.path.join(file.name), || {
            let path = folder.join(file.name);
            let mut new = fs::File::options().write(true).create_new(true).mode(0o600).open(path)?;
            new.set_permissions(Permissions::from_mode(file.mode))?;
            new.write_all(&file.content)?;
            new.sync_all()
        })
    }

    /// Makes the folder if there is none, and keeps other agents out as long as the file lives.
    fn enter(&self) -> Result<fs::File, FolderError> {
        match fs::metadata(&self.path) {
            Ok(found) if found.is_dir() => {}
            Ok(_) => return Err(FolderError::Foreign { path: self.path.clone(), what: "not a folder" }),
            Err(error) if error.kind() == io::ErrorKind::NotFound && self.path.is_symlink() => {
                return Err(FolderError::Foreign { path: self.path.clone(), what: "a link to nowhere" });
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                self.change("creating", &self.path, || {
                    fs::create_dir_all(&self.path)?;
                    fs::set_permissions(&self.path, Permissions::from_mode(0o755))
                })?;
            }
            Err(source) => {
                return Err(FolderError::Failed { doing: "opening", path: self.path.clone(), source });
            }
        }
        let lock = self.path.join(LOCK);
        let is_there = |found: fs::Metadata| match found.is_dir() {
            true => Ok(()),
            // No link either: somebody else could hold the lock on what it leads to.
            false => Err(FolderError::Foreign { path: lock.clone(), what: "not a folder" }),
        };
        match fs::symlink_metadata(&lock) {
            Ok(found) => is_there(found)?,
            Err(_) => {
                self.change("writing to", &self.path, || {
                    match DirBuilder::new().mode(0o700).create(&lock) {
                        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
                        made => made,
                    }
                })?;
            }
        }
        file::lock_directory(&lock)
            .map_err(|source| FolderError::Locked { folder: self.path.clone(), source })
    }

    fn survey(&self) -> Result<Survey, FolderError> {
        let foreign = |path: &Path, what| FolderError::Foreign { path: path.to_owned(), what };
        let failed =
            |path: &Path, source| FolderError::Failed { doing: "opening", path: path.to_owned(), source };
        let data = self.path.join(DATA);
        let current = match fs::read_link(&data) {
            Ok(to) if is_ours(&to) => Some(self.path.join(to)),
            Ok(_) => return Err(foreign(&data, "a link that this agent did not make")),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
                return Err(foreign(&data, "not a link of this agent's"));
            }
            Err(error) => return Err(failed(&data, error)),
        };
        let mut places = NAMES.map(|name| (name, Place::Absent));
        for (name, place) in &mut places {
            let path = self.path.join(*name);
            *place = match fs::symlink_metadata(&path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => Place::Absent,
                Err(error) => return Err(failed(&path, error)),
                Ok(found) if found.is_file() => Place::Plain,
                Ok(found) if !found.is_symlink() => return Err(foreign(&path, "not a plain file")),
                Ok(_) => match fs::read_link(&path) {
                    Ok(to) if to == Path::new(DATA).join(*name) => Place::Linked,
                    Ok(_) => return Err(foreign(&path, "a link that this agent did not make")),
                    Err(error) => return Err(failed(&path, error)),
                },
            };
        }
        Ok(Survey { current, places })
    }

    /// Whether readers see exactly `files`.
    fn holds(&self, found: &Survey, files: &[File; 3]) -> bool {
        let Some(current) = &found.current else { return false };
        let is_there = |file: &File| {
            let path = current.join(file.name);
            let mode = fs::symlink_metadata(&path).map(|found| found.permissions().mode() & 0o777);
            mode.is_ok_and(|mode| mode == file.mode)
                && file::read(&path, limits::FILE_BYTES).is_ok_and(|found| found == file.content)
        };
        found.places.iter().all(|(_, place)| *place == Place::Linked) && files.iter().all(is_there)
    }

    /// Removes what is ours and has not been in use for [`GRACE`]; the oldest sooner, where there are too many. True
    /// if something younger is left.
    fn remove_old(&mut self) -> Result<bool, FolderError> {
        let now = Instant::now();
        let current = fs::read_link(self.path.join(DATA)).map(PathBuf::into_os_string).ok();
        let entries = fs::read_dir(&self.path).map_err(|source| FolderError::Failed {
            doing: "listing",
            path: self.path.clone(),
            source,
        })?;
        let unused = entries
            .flatten()
            .map(|entry| entry.file_name())
            .filter(|name| is_ours(Path::new(name)) && Some(name) != current.as_ref());
        let since = |name: OsString| {
            let since = self.old.get(&name).copied().unwrap_or(now);
            (name, since)
        };
        self.old = unused.map(since).collect();
        let mut by_age: Vec<_> = self.old.iter().map(|(name, since)| (*since, name.clone())).collect();
        by_age.sort();
        let too_many = by_age.len().saturating_sub(limits::OUTPUT_GENERATIONS);
        let mut first_failure = None;
        for (count, (since, name)) in by_age.into_iter().enumerate() {
            if count < too_many || now.duration_since(since) >= GRACE {
                let path = self.path.join(&name);
                let is_folder = fs::symlink_metadata(&path).is_ok_and(|found| found.is_dir());
                let remove =
                    || match if is_folder { fs::remove_dir_all(&path) } else { fs::remove_file(&path) } {
                        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
                        removed => removed,
                    };
                match self.change("removing", &path, remove) {
                    Ok(()) => drop(self.old.remove(&name)),
                    Err(error) => drop(first_failure.get_or_insert(error)),
                }
            }
        }
        first_failure.map_or(Ok(!self.old.is_empty()), Err)
    }

    /// A path that nothing has yet, for a generation or for a link before its rename.
    fn fresh(&self) -> PathBuf {
        self.path.join(format!("{OURS}{:016x}", fastrand::u64(..)))
    }

    /// Does one step of a write. Tests end a write before any of them.
    fn change(
        &self,
        doing: &'static str,
        path: &Path,
        work: impl FnOnce() -> io::Result<()>,
    ) -> Result<(), FolderError> {
        #[cfg(test)]
        let work = || self.fault.step().and_then(|()| work());
        work().map_err(|source| FolderError::Failed { doing, path: path.to_owned(), source })
    }
}

/// Whether `name` is that of a generation, or of a link that was to be renamed.
fn is_ours(name: &Path) -> bool {
    let mut components = name.components();
    match (components.next(), components.next()) {
        (Some(Component::Normal(name)), None) => {
            name.to_str().is_some_and(|name| name.starts_with(OURS) && name != LOCK)
        }
        _ => false,
    }
}

/// Has the kernel write a folder's entries to the disk.
fn sync_folder(path: &Path) -> io::Result<()> {
    match fs::File::open(path)?.sync_all() {
        // Some file systems know no such thing for folders.
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => Ok(()),
        synced => synced,
    }
}

#[cfg(test)]
mod tests;
