//! What the output directory contains, and whether it is still what the agent wrote.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use super::{DATA, OutputDirectory, OutputDirectoryError, OutputFile, Owner, is_ours};
use crate::base::limits;
use crate::fs::file;
use crate::secret::Version;

/// The condition of the generation that this process wrote last.
#[derive(Debug, PartialEq, Eq)]
pub enum Condition {
    /// Readers see what was written.
    Intact,
    /// A file is missing or has different content; the text names it. Permissions don't count: the hook may change them.
    Damaged(String),
    /// Readers see a generation that another agent has written.
    Replaced,
}

/// What one of the names is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Entry {
    Absent,
    /// A link through `..data`.
    Linked,
    /// A file that another program left.
    Plain,
}

/// The directory as found.
#[derive(Debug)]
pub(super) struct Survey {
    /// The target of `..data`.
    pub(super) current: Option<PathBuf>,
    pub(super) entries: Vec<(String, Entry)>,
}

impl Survey {
    /// The names that are `entry`.
    pub(super) fn names(&self, entry: Entry) -> impl Iterator<Item = &str> {
        self.entries.iter().filter(move |(_, found)| *found == entry).map(|(name, _)| name.as_str())
    }

    /// Whether readers see exactly `files`, which are `owner`'s.
    pub(super) fn shows(&self, files: &[OutputFile], owner: Owner) -> bool {
        let Some(current) = &self.current else { return false };
        let is_current = |file: &OutputFile| {
            let path = current.join(&file.name);
            fs::symlink_metadata(&path)
                .is_ok_and(|it| it.mode() & 0o777 == file.mode && owner.is(it.uid(), it.gid()))
                && file::read(&path, limits::FILE_BYTES).is_ok_and(|found| found == file.content)
        };
        self.entries.iter().all(|(_, entry)| *entry == Entry::Linked) && files.iter().all(is_current)
    }
}

impl OutputDirectory {
    /// Finds out what each name is. Anything that the agent must not replace is an error.
    pub(super) fn survey(&self) -> Result<Survey, OutputDirectoryError> {
        let current = self.current()?;
        let entries = self.names.iter().map(|name| Ok((name.clone(), self.entry(name)?)));
        Ok(Survey { current, entries: entries.collect::<Result<_, _>>()? })
    }

    /// The generation that `..data` leads to.
    fn current(&self) -> Result<Option<PathBuf>, OutputDirectoryError> {
        let data = self.path.join(DATA);
        match fs::read_link(&data) {
            Ok(to) if is_ours(&to) => Ok(Some(self.path.join(to))),
            Ok(_) => Err(self.foreign(&data, "a link that this agent did not make")),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
                Err(self.foreign(&data, "not a link"))
            }
            Err(error) => Err(self.failed("opening", &data, error)),
        }
    }

    fn entry(&self, name: &str) -> Result<Entry, OutputDirectoryError> {
        let path = self.path.join(name);
        match fs::symlink_metadata(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Entry::Absent),
            Err(error) => return Err(self.failed("opening", &path, error)),
            Ok(found) if found.is_file() => return Ok(Entry::Plain),
            Ok(found) if !found.is_symlink() => return Err(self.foreign(&path, "not a regular file")),
            Ok(_) => {}
        }
        match fs::read_link(&path) {
            Ok(to) if to == Path::new(DATA).join(name) => Ok(Entry::Linked),
            Ok(_) => Err(self.foreign(&path, "a link that this agent did not make")),
            Err(error) => Err(self.failed("opening", &path, error)),
        }
    }

    /// Whether `..data` leads to a generation that another agent has written since this one's last write.
    pub fn is_replaced(&self) -> bool {
        let Some(made) = &self.made else { return false };
        let current = fs::read_link(self.path.join(DATA)).ok().filter(|to| is_ours(to));
        current.is_some_and(|to| to.as_os_str() != made.name && self.path.join(to).is_dir())
    }

    /// The condition of the generation that was written last.
    pub fn inspect(&self) -> Condition {
        if self.is_replaced() {
            return Condition::Replaced;
        }
        match self.damage() {
            Some(what) => Condition::Damaged(what),
            None => Condition::Intact,
        }
    }

    fn damage(&self) -> Option<String> {
        let made = self.made.as_ref()?;
        if !self.path.is_dir() {
            return Some("the directory is missing".to_owned());
        }
        let found = match self.survey() {
            Ok(found) => found,
            Err(error) => return Some(error.to_string()),
        };
        if found.current.as_deref().and_then(Path::file_name) != Some(&made.name) {
            return Some(format!("{DATA} is missing or dangling"));
        }
        for (name, entry) in found.entries {
            match entry {
                Entry::Linked => {}
                Entry::Absent => return Some(format!("{name} is missing")),
                Entry::Plain => return Some(format!("{name} is a file instead of a link")),
            }
        }
        made.contents.iter().find_map(|(name, content)| {
            match file::read(&self.path.join(&made.name).join(name), limits::FILE_BYTES) {
                Ok(found) if Version::of(&found) == *content => None,
                Ok(_) => Some(format!("{name} has different content")),
                Err(error) => Some(format!("reading {name} failed: {error}")),
            }
        })
    }
}
