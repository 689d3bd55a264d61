//! One look at the files of a name, on a thread that may hang.

use std::collections::HashMap;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::SystemTime;

use tokio::sync::oneshot;
use zeroize::Zeroizing;

use super::Shared;
use crate::base::limits;
use crate::fs::file;
use crate::fs::find::{Blocked, Bounds, Failed, find};
use crate::fs::generation::{Found, Generation, Places};
use crate::fs::pool::{Entrance, Work};
use crate::fs::walk::FoundFile;
use crate::fs::watch::{Activity, Watch};
use crate::secret::Secret;

/// How often a file is looked up again that is replaced while it is opened.
const ATTEMPTS: usize = 3;
/// How often the files are read again when they change while they are being read.
const READS: usize = 5;

/// The files of a name, as a thread that looks at them needs them.
#[derive(Debug)]
pub(super) struct WatchedFiles {
    pub(super) places: Arc<Places>,
    pub(super) watch: Watch,
}

/// What a look found.
#[derive(Debug)]
pub(super) struct Seen {
    pub(super) found: Found<Secret>,
    /// Keeps what was parsed for other names with the same content.
    pub(super) content: Option<Arc<Content>>,
    pub(super) activity: Activity,
}

/// A secret with the digest of the files that hold it.
#[derive(Debug)]
pub(super) struct Content {
    digest: [u8; 32],
    secret: Secret,
    rank: usize,
}

/// What is parsed and still in use, by the digest of its files: equal content is parsed and stored once, however many
/// names lead to it.
#[derive(Debug, Default)]
pub(super) struct Contents(Mutex<HashMap<[u8; 32], Weak<Content>>>);

impl Contents {
    fn get(&self, digest: &[u8; 32]) -> Option<Arc<Content>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get(digest)?.upgrade()
    }

    fn insert(&self, content: &Arc<Content>) {
        let mut contents = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if contents.len() == contents.capacity() {
            contents.retain(|_, content| content.strong_count() > 0);
        }
        contents.insert(content.digest, Arc::downgrade(content));
    }
}

/// A look that is to be made.
pub(super) struct Look {
    pub(super) shared: Arc<Shared>,
    /// Present until the look is made.
    pub(super) files: Option<WatchedFiles>,
    /// Taken when the look is made.
    pub(super) reply: Option<oneshot::Sender<(WatchedFiles, Seen)>>,
}

impl Work for Look {
    fn is_wanted(&self) -> bool {
        self.reply.as_ref().is_some_and(|reply| !reply.is_closed())
    }

    fn run(&mut self, entrance: &Entrance) -> Result<(), Blocked> {
        let Some(mut files) = self.files.take() else { return Ok(()) };
        let seen = files.look(&self.shared, entrance);
        match (seen, self.reply.take()) {
            (Ok(seen), Some(reply)) => {
                // The name may have been given up meanwhile: then this drops the watch.
                let _ = reply.send((files, seen));
                Ok(())
            }
            (Ok(_), None) => Ok(()),
            (Err(blocked), reply) => {
                (self.files, self.reply) = (Some(files), reply);
                Err(blocked)
            }
        }
    }
}

impl WatchedFiles {
    fn look(&mut self, shared: &Shared, entrance: &Entrance) -> Result<Seen, Blocked> {
        let paths = self.places.paths();
        let bounds: Vec<_> = paths.iter().map(|path| shared.bounds(path)).collect();
        // A device that hangs is met here, before anything else looks something up on it.
        for (path, bounds) in paths.iter().zip(&bounds) {
            if let Err(Failed::Blocked(blocked)) = find(path, bounds, entrance) {
                return Err(blocked);
            }
        }
        // A device that hangs from now on is met by the next look, which closes it.
        entrance.leave();
        // What is read is what was checked, through its descriptor: the watch only learns where the paths lead.
        let mut reads = 0;
        let (lookups, files, is_restless) = loop {
            let refuse = |_: &Path| Some(io::ErrorKind::PermissionDenied.into());
            let lookups = self.watch.look(limits::FILE_BYTES, refuse).lookups;
            let mut files = Vec::new();
            for (path, bounds) in paths.iter().zip(&bounds) {
                files.push(FoundFile { real: path.clone(), content: read(path, bounds, entrance)? });
            }
            entrance.leave();
            reads += 1;
            let is_current = lookups.are_current();
            if is_current || reads == READS {
                break (lookups, files, !is_current);
            }
        };
        let activity = self.watch.activity(&lookups);
        let activity = if self.watch.follow(lookups) { activity } else { Activity::Change };
        let (found, content) = shared.parse(&self.places, files, is_restless);
        Ok(Seen { found, content, activity })
    }
}

/// The content of a file within `bounds`.
fn read(
    path: &Path,
    bounds: &Bounds,
    entrance: &Entrance,
) -> Result<io::Result<Zeroizing<Vec<u8>>>, Blocked> {
    let mut content = Err(io::ErrorKind::NotFound.into());
    for _ in 0..ATTEMPTS {
        let opened = match find(path, bounds, entrance) {
            Ok(found) => found.open(),
            Err(Failed::Blocked(blocked)) => return Err(blocked),
            Err(Failed::Missing(_)) => return Ok(Err(io::ErrorKind::NotFound.into())),
            Err(Failed::Io(error)) => return Ok(Err(error)),
        };
        content = opened.and_then(|file| file::content(&file, limits::FILE_BYTES));
        if !matches!(&content, Err(error) if error.kind() == io::ErrorKind::NotFound) {
            break;
        }
    }
    Ok(content)
}

impl Shared {
    pub(super) fn bounds(&self, path: &Path) -> Bounds {
        let private = self.private.lock().unwrap_or_else(PoisonError::into_inner).clone();
        Bounds { prefix: self.prefixes.length(path), private }
    }

    /// Parses files, unless other names have led to the same content.
    fn parse(
        &self,
        places: &Places,
        files: Vec<FoundFile>,
        is_restless: bool,
    ) -> (Found<Secret>, Option<Arc<Content>>) {
        let contents = places.contents(files, is_restless);
        let digest = contents.digest();
        let now = self.clock.now();
        if let Some(content) = self.contents.get(&digest).filter(|content| is_valid(&content.secret, now)) {
            let found = Found { secret: Ok(Some(content.secret.clone())), rank: content.rank };
            return (found, Some(content));
        }
        let Generation { key_pair, roots, .. } = contents.parse(places, None, now);
        let is_pair = places.ranked.iter().any(|place| place.key_pair.is_some());
        let found = if is_pair { key_pair.map(Secret::KeyPair) } else { roots.map(Secret::TrustBundle) };
        let content = found.good().map(|secret| {
            let content = Arc::new(Content { digest, secret: secret.clone(), rank: found.rank });
            self.contents.insert(&content);
            content
        });
        (found, content)
    }
}

/// As the check of a parsed file has it.
fn is_valid(secret: &Secret, now: SystemTime) -> bool {
    let has_begun = match secret {
        Secret::KeyPair(pair) => pair.leaf().not_before <= now,
        Secret::TrustBundle(_) => true,
    };
    has_begun && secret.not_after() > now
}
