//! How one generation replaces another, so that a reader never sees a mix and a crash at any step leaves a whole one.

use std::ffi::OsString;
use std::fs::{self, DirBuilder, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _, symlink};
use std::path::Path;

use super::survey::{Entry, Survey};
use super::{DATA, OutputDirectory, OutputDirectoryError, OutputFile, Written};
use crate::base::limits;
use crate::fs::file;

impl OutputDirectory {
    /// Makes `files` the current generation, and returns its name.
    pub(super) fn swap(&self, files: &[OutputFile]) -> Result<(Written, OsString), OutputDirectoryError> {
        let found = self.survey()?;
        if let Some(current) = found.current.as_deref().and_then(Path::file_name)
            && found.shows(files, self.owner)
        {
            return Ok((Written::Unchanged, current.to_owned()));
        }
        if found.names(Entry::Plain).next().is_some() {
            self.migrate(&found)?;
        }
        let made = self.install(|generation| {
            for file in files {
                self.put(generation, file)?;
                self.give(&generation.join(&file.name))?;
            }
            // These links dangle until `..data` exists: the first generation appears at once, as later ones do.
            for name in found.names(Entry::Absent) {
                let link = self.path.join(name);
                self.change("linking", &link, || symlink(Path::new(DATA).join(name), &link))?;
            }
            Ok(())
        })?;
        Ok((Written::Swapped, made))
    }

    /// Replaces plain files by links. First a generation with the content of these files is installed, so that a reader sees
    /// the old set until the new one is swapped in.
    fn migrate(&self, found: &Survey) -> Result<(), OutputDirectoryError> {
        self.install(|generation| {
            for (name, entry) in &found.entries {
                match (entry, &found.current) {
                    (Entry::Plain, _) => self.take_over(&self.path.join(name), generation, name)?,
                    // Some names may be links already, after a crash.
                    (Entry::Linked, Some(current)) if current.join(name).exists() => {
                        self.take_over(&current.join(name), generation, name)?;
                    }
                    _ => {}
                }
            }
            Ok(())
        })?;
        for name in found.names(Entry::Plain) {
            self.put_link(&Path::new(DATA).join(name), &self.path.join(name))?;
        }
        Ok(())
    }

    /// Hard-links the file at `path` into `generation`, or copies it where that is not possible.
    fn take_over(&self, path: &Path, generation: &Path, name: &str) -> Result<(), OutputDirectoryError> {
        if self.change("linking", path, || fs::hard_link(path, generation.join(name))).is_ok() {
            return Ok(());
        }
        let failed = |source| self.failed("reading", path, source);
        let mode = fs::metadata(path).map_err(failed)?.permissions().mode() & 0o777;
        let content = file::read(path, limits::FILE_BYTES).map_err(failed)?;
        self.put(generation, &OutputFile { name: name.to_owned(), mode, content })
    }

    /// Creates a generation, fills it, makes it the current one, and returns its name. If any step fails, it is removed.
    fn install(
        &self,
        fill: impl FnOnce(&Path) -> Result<(), OutputDirectoryError>,
    ) -> Result<OsString, OutputDirectoryError> {
        let generation = self.unused_path();
        self.change("writing to", &self.path, || DirBuilder::new().mode(0o700).create(&generation))?;
        let name = generation.strip_prefix(&self.path).unwrap_or(&generation);
        let installed = fill(&generation).and_then(|()| {
            self.change("writing to", &self.path, || {
                fs::set_permissions(&generation, Permissions::from_mode(0o755))?;
                sync_directory(&generation)
            })?;
            self.put_link(name, &self.path.join(DATA))
        });
        if installed.is_err() {
            let _ = fs::remove_dir_all(&generation);
        }
        installed.map(|()| name.as_os_str().to_owned())
    }

    /// Puts a link at `path`, atomically replacing what is there. After a power failure either of the two is there, with its
    /// target.
    fn put_link(&self, to: &Path, path: &Path) -> Result<(), OutputDirectoryError> {
        let new = self.unused_path();
        self.change("linking", path, || symlink(to, &new))?;
        let put = self.change("linking", path, || {
            sync_directory(&self.path)?;
            fs::rename(&new, path)
        });
        match put {
            // Readers see the link by now. If this sync fails, only a power failure could undo it.
            Ok(()) => drop(sync_directory(&self.path)),
            Err(_) => drop(fs::remove_file(&new)),
        }
        put
    }

    fn put(&self, generation: &Path, file: &OutputFile) -> Result<(), OutputDirectoryError> {
        self.change("writing", &self.path.join(&file.name), || {
            let path = generation.join(&file.name);
            let mut new = fs::File::options().write(true).create_new(true).mode(0o600).open(path)?;
            new.set_permissions(Permissions::from_mode(file.mode))?;
            new.write_all(&file.content)?;
            new.sync_all()
        })
    }
}

/// Has the kernel write a directory's entries to the disk.
fn sync_directory(path: &Path) -> io::Result<()> {
    match fs::File::open(path)?.sync_all() {
        // Some file systems don't support this for directories.
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => Ok(()),
        synced => synced,
    }
}
