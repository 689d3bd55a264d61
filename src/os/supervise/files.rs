//! The files of `--restart-on`: a digest over their names and contents, and when to look again.

use std::ffi::OsStr;
use std::fmt;
use std::io::{self, Read as _};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use aws_lc_rs::digest::{Context, SHA256};
use tokio::sync::Notify;
use tokio::time::sleep;

use super::restarts::Digest;
use crate::base::offload;
use crate::fs::disk::Disk;
use crate::fs::file;
use crate::fs::watch::{NameListener, Watch, Watcher};

/// Files of one directory.
const FILES: usize = 1000;
/// Bytes of all files.
const BYTES: u64 = 64 << 20;
/// A name that no file of a directory has: looking it up has the directory watched.
const NEVER: &str = ".attache-never";
/// Between two looks, whatever happens in between.
const PAUSE: Duration = Duration::from_millis(50);

/// Follows the files.
#[derive(Debug)]
pub(super) struct RestartFiles {
    paths: Arc<[PathBuf]>,
    watcher: Watcher,
    disk: Disk,
    /// What is followed since the last look.
    watches: Vec<Watch>,
    appeared: Arc<Appeared>,
}

/// Notified when a name appears in a directory, or disappears.
#[derive(Debug, Default)]
struct Appeared(Notify);

impl NameListener for Appeared {
    fn changed(&self, _: &OsStr) {
        self.0.notify_one();
    }
}

/// What a look found.
type Looked = Result<Digest, String>;

impl RestartFiles {
    /// Touches no disk yet.
    pub(super) fn new(paths: Vec<PathBuf>, watcher: Watcher, disk: Disk) -> Self {
        Self { paths: paths.into(), watcher, disk, watches: Vec::new(), appeared: Arc::default() }
    }

    /// Waits until something may have changed, and looks. The first look is made at once. A disk that does not answer is
    /// waited for.
    pub(super) async fn next(mut self) -> (Self, Looked) {
        if !self.watches.is_empty() {
            self.changed().await;
            sleep(PAUSE).await;
        }
        let (paths, watcher, appeared) =
            (Arc::clone(&self.paths), self.watcher.clone(), Arc::clone(&self.appeared));
        let before = std::mem::take(&mut self.watches);
        let first = paths.first().map_or(Path::new("/"), PathBuf::as_path).to_owned();
        let looking = self.disk.spawn(&first, move || {
            let watches = follow(&paths, &watcher, &appeared);
            // Only now, so that what both watch stays watched.
            drop(before);
            (watches, digest(&paths).map_err(|error| error.to_string()))
        });
        match offload::finished(looking.await) {
            Some((watches, looked)) => {
                self.watches = watches;
                (self, looked)
            }
            // The runtime is shutting down.
            None => std::future::pending().await,
        }
    }

    async fn changed(&self) {
        let mut any: Vec<_> = self.watches.iter().map(|watch| Box::pin(watch.changed())).collect();
        let any = std::future::poll_fn(|cx| {
            let is_any = any.iter_mut().any(|watch| watch.as_mut().poll(cx).is_ready());
            if is_any { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
        });
        tokio::select! {
            () = any => {}
            () = self.appeared.0.notified() => {}
        }
    }
}

/// Watches the paths, and the files of those that are directories. Whatever happens after this call is noticed.
fn follow(paths: &[PathBuf], watcher: &Watcher, appeared: &Arc<Appeared>) -> Vec<Watch> {
    let mut all = watcher.watch(paths.to_vec());
    all.arm();
    let directories = paths.iter().filter(|path| path.is_dir());
    let inner = directories.map(|directory| follow_directory(directory, watcher, appeared));
    std::iter::once(all).chain(inner).collect()
}

fn follow_directory(directory: &Path, watcher: &Watcher, appeared: &Arc<Appeared>) -> Watch {
    /// A directory in which files come and go all the time is looked at again anyway.
    const ATTEMPTS: usize = 5;
    let mut attempts = 0;
    loop {
        attempts += 1;
        let files = listed(directory).unwrap_or_default();
        let mut names = files.clone();
        names.push(directory.join(NEVER));
        let mut watch = watcher.watch(names);
        watch.arm();
        watch.listen(OsStr::new(NEVER), Arc::clone(appeared) as _);
        if attempts == ATTEMPTS || listed(directory).unwrap_or_default() == files {
            return watch;
        }
    }
}

/// The regular files of a directory, links followed, sorted. Names that begin with a dot are none: editors' and the
/// kubelet's own.
fn listed(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(directory)? {
        let entry = entry?;
        let is_hidden = entry.file_name().as_bytes().starts_with(b".");
        if is_hidden || !entry.path().is_file() {
            continue;
        }
        if files.len() == FILES {
            return Err(io::Error::new(
                io::ErrorKind::QuotaExceeded,
                format!("it holds more than {FILES} files: name some of them"),
            ));
        }
        files.push(entry.path());
    }
    files.sort_unstable();
    Ok(files)
}

/// Why the files can't be compared.
#[derive(Debug)]
struct Failed<'a>(&'a Path, io::Error);

impl fmt::Display for Failed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "reading {} failed: {}", self.0.display(), self.1)
    }
}

fn digest(paths: &[PathBuf]) -> Result<Digest, Failed<'_>> {
    let mut sum = Context::new(&SHA256);
    let mut room = BYTES;
    for path in paths {
        if path.is_dir() {
            let files = listed(path).map_err(|error| Failed(path, error))?;
            add(&mut sum, b"directory", path.as_os_str().as_bytes());
            for file in files {
                add_file(&mut sum, &file, &mut room).map_err(|error| Failed(path, error))?;
            }
        } else {
            add_file(&mut sum, path, &mut room).map_err(|error| Failed(path, error))?;
        }
    }
    let mut digest = [0; 32];
    digest.copy_from_slice(sum.finish().as_ref());
    Ok(digest)
}

/// Each part has its length before it, so that no two sets of files look alike.
fn add(sum: &mut Context, kind: &[u8], bytes: &[u8]) {
    sum.update(kind);
    sum.update(&u64::try_from(bytes.len()).unwrap_or(u64::MAX).to_le_bytes());
    sum.update(bytes);
}

fn add_file(sum: &mut Context, path: &Path, room: &mut u64) -> io::Result<()> {
    add(sum, b"name", path.as_os_str().as_bytes());
    let mut file = match file::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            sum.update(b"missing");
            return Ok(());
        }
        Err(error) => return Err(error),
    };
    sum.update(b"content");
    let mut buffer = vec![0; 16 << 10];
    let mut length = 0_u64;
    loop {
        let count = file.read(&mut buffer)?;
        let Some(read) = buffer.get(..count).filter(|read| !read.is_empty()) else { break };
        length += u64::try_from(count).unwrap_or(u64::MAX);
        if length > *room {
            return Err(io::Error::new(
                io::ErrorKind::FileTooLarge,
                format!("all files of --restart-on together have more than {} MiB", BYTES >> 20),
            ));
        }
        sum.update(read);
    }
    *room -= length;
    sum.update(&length.to_le_bytes());
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn the_digest_depends_on_names_and_contents_alone() {
        let directory = tempfile::tempdir().unwrap();
        let (dir, file) = (directory.path().join("dir"), directory.path().join("file"));
        std::fs::create_dir(&dir).unwrap();
        let paths = [dir.clone(), file.clone()];
        let now = || digest(&paths).unwrap();
        let mut seen = vec![now()];
        let mut is_new = |digest: Digest| {
            let is_new = !seen.contains(&digest);
            seen.push(digest);
            is_new
        };
        std::fs::write(&file, "a").unwrap();
        assert!(is_new(now()), "a file appears");
        std::fs::write(dir.join("x"), "b").unwrap();
        assert!(is_new(now()), "a file appears in a directory");
        std::fs::write(dir.join("x"), "b").unwrap();
        assert!(!is_new(now()), "the same bytes");
        std::fs::rename(dir.join("x"), dir.join("y")).unwrap();
        assert!(is_new(now()), "another name");
        std::fs::write(dir.join(".y.swp"), "c").unwrap();
        std::fs::create_dir(dir.join("deeper")).unwrap();
        std::fs::write(dir.join("deeper/z"), "c").unwrap();
        assert!(!is_new(now()), "neither hidden files nor those of deeper directories count");
    }

    #[test]
    fn a_kubelets_swap_is_one_change_of_the_digest_and_none_if_the_bytes_are_equal() {
        let directory = tempfile::tempdir().unwrap();
        let dir = directory.path();
        let swap = |generation: &str, content: &str| {
            std::fs::create_dir(dir.join(generation)).unwrap();
            std::fs::write(dir.join(generation).join("envoy.yaml"), content).unwrap();
            symlink(generation, dir.join("..data_tmp")).unwrap();
            std::fs::rename(dir.join("..data_tmp"), dir.join("..data")).unwrap();
        };
        let paths = [dir.to_owned()];
        swap("..1", "a");
        symlink("..data/envoy.yaml", dir.join("envoy.yaml")).unwrap();
        let first = digest(&paths).unwrap();
        swap("..2", "a");
        assert_eq!(digest(&paths).unwrap(), first);
        std::fs::remove_dir_all(dir.join("..1")).unwrap();
        swap("..3", "b");
        assert_ne!(digest(&paths).unwrap(), first);
    }

    #[test]
    fn a_directory_with_too_many_files_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        for number in 0..=FILES {
            std::fs::write(directory.path().join(number.to_string()), "").unwrap();
        }
        let paths = [directory.path().to_owned()];
        let error = digest(&paths).unwrap_err().to_string();
        assert!(error.contains("more than 1000 files"), "{error}");
    }

    #[tokio::test]
    async fn a_new_file_in_a_directory_and_a_changed_one_are_noticed() {
        let directory = tempfile::tempdir().unwrap();
        let dir = directory.path().join("dir");
        std::fs::create_dir(&dir).unwrap();
        std::fs::write(dir.join("a"), "1").unwrap();
        let files = RestartFiles::new(vec![dir.clone()], Watcher::new(Default::default()), Disk::default());
        let (mut files, first) = files.next().await;
        let mut last = first.unwrap();
        let changes: [&dyn Fn(); 4] = [
            &|| std::fs::write(dir.join("b"), "1").unwrap(),
            &|| std::fs::write(dir.join("b"), "2").unwrap(),
            &|| std::fs::write(dir.join("a"), "2").unwrap(),
            &|| std::fs::remove_file(dir.join("a")).unwrap(),
        ];
        for (number, change) in changes.iter().enumerate() {
            change();
            loop {
                let looked;
                (files, looked) = tokio::time::timeout(Duration::from_secs(20), files.next())
                    .await
                    .unwrap_or_else(|_| panic!("change {number} is not noticed"));
                if looked.as_ref() != Ok(&last) {
                    last = looked.unwrap();
                    break;
                }
            }
        }
    }
}
