//! Secrets from mounted files: read as one generation, checked as exactly those bytes, published when they fit.

mod watch;

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use tokio::time::Instant;
use zeroize::Zeroizing;

use self::watch::Watch;
use crate::backoff::Repeats;
use crate::cache::{Cache, Key, Origin, Published, Publisher, Workload};
use crate::clock::Clock;
use crate::metrics::{BySource, Metrics};
use crate::pki::key::{NotAKey, PrivateKey};
use crate::pki::pem::{self, NotPem};
use crate::secret::{KeyPair, NotAKeyPair, NotATrustBundle, Secret, SecretName, TrustBundle};
use crate::{limits, plain_file};

const CHAIN_FILE: &str = "cert-chain.pem";
const KEY_FILE: &str = "key.pem";
const ROOT_FILE: &str = "root-cert.pem";

/// How often files are read again when they change while they are being read.
const READS: usize = 5;

/// Why mounted files are not served.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "each variant's message is its documentation")]
pub enum FileError {
    #[error("{path}: {source}")]
    Unreadable { path: PathBuf, source: io::Error },
    #[error("{present} is there, but {absent} is not")]
    Half { present: PathBuf, absent: PathBuf },
    #[error("{path}: {source}")]
    Certificates { path: PathBuf, source: NotPem },
    #[error("{path}: {source}")]
    Key { path: PathBuf, source: NotAKey },
    #[error("{chain} and {key}: {source}")]
    Pair { chain: PathBuf, key: PathBuf, source: NotAKeyPair },
    #[error("{path}: {source}")]
    Bundle { path: PathBuf, source: NotATrustBundle },
    #[error("{path}: it expired at {at}")]
    Expired { path: PathBuf, at: String },
    #[error("{path}: it is valid only from {from}; is this machine's clock right?")]
    NotYetValid { path: PathBuf, from: String },
    #[error("{folder} changes faster than it can be read")]
    Restless { folder: PathBuf },
}

impl FileError {
    fn label(&self) -> &'static str {
        match self {
            Self::Unreadable { .. } => "unreadable",
            Self::Half { .. } => "incomplete",
            Self::Certificates { .. } | Self::Key { .. } | Self::Bundle { .. } => "not_parsed",
            Self::Pair { .. } => "mismatch",
            Self::Expired { .. } | Self::NotYetValid { .. } => "not_valid",
            Self::Restless { .. } => "restless",
        }
    }
}

/// One look at the folder: each secret is there and good, or not there, or not good.
#[derive(Debug)]
struct Generation {
    key_pair: Result<Option<KeyPair>, FileError>,
    roots: Result<Option<TrustBundle>, FileError>,
}

/// Whether `folder` holds a key pair, good or not: whoever mounts one needs no CA.
pub fn holds_key_pair(folder: &Path) -> bool {
    [CHAIN_FILE, KEY_FILE].iter().all(|name| folder.join(name).exists())
}

/// Serves `default` from `cert-chain.pem` and `key.pem`, and `ROOTCA` from `root-cert.pem`, of one folder.
#[derive(Debug)]
pub struct FileSource {
    folder: PathBuf,
    debounce: Duration,
    key_pair: Feed,
    roots: Feed,
    clock: Clock,
    metrics: Metrics,
}

/// One secret's way into the cache, and what was said of it last.
#[derive(Debug)]
struct Feed {
    name: SecretName,
    publisher: Publisher,
    repeats: Repeats,
    was_there: bool,
    /// When its value changed last.
    published: Option<Instant>,
}

impl FileSource {
    /// A source that publishes what is in `folder` to `cache`, at most once in each `debounce`.
    pub fn new(
        folder: PathBuf,
        debounce: Duration,
        cache: &Cache,
        workload: Workload,
        clock: Clock,
        metrics: Metrics,
    ) -> Self {
        let feed = |name| Feed {
            name,
            publisher: cache.publisher(Key { workload, name }, Origin::Files),
            repeats: Repeats::default(),
            was_there: false,
            published: None,
        };
        let (key_pair, roots) = (feed(SecretName::Workload), feed(SecretName::Roots));
        Self { folder, debounce, key_pair, roots, clock, metrics }
    }

    /// Publishes what is there now, so that no CA is asked for what files give.
    pub fn publish_once(&mut self) {
        let generation = self.read();
        self.publish(generation, true);
    }

    /// Follows every change for ever.
    pub async fn run(mut self) {
        let files = [CHAIN_FILE, KEY_FILE, ROOT_FILE].map(|name| self.folder.join(name));
        let mut watch = Watch::new(files.to_vec());
        // The first look: the folder may have changed since `publish_once`, when nobody watched yet.
        let mut settled = true;
        let mut bad_since = None;
        loop {
            watch.arm();
            let generation = self.read();
            let read_at = Instant::now();
            let not_before =
                generation.key_pair.as_ref().ok().and_then(Option::as_ref).map(|pair| pair.leaf().not_before);
            let not_yet = not_before.filter(|from| *from > self.clock.now());
            let is_good = self.publish(generation, settled);
            if is_good {
                bad_since = None;
            }
            if is_good || settled {
                // A pair whose time is to come needs no change to become good.
                let its_time = async {
                    match not_yet {
                        Some(moment) => self.clock.sleep_until(moment).await,
                        None => std::future::pending().await,
                    }
                };
                tokio::select! {
                    () = watch.changed() => {}
                    () = its_time => {}
                }
                // At most one publish in each window; what comes in between is folded into the next. A look that found
                // nothing new starts no window, but many changes that are none must not keep us busy either.
                let published = [&self.roots, &self.key_pair].iter().filter_map(|feed| feed.published).max();
                let window = published.map(|at| self.debounce.saturating_sub(at.elapsed()));
                let pause = (self.debounce / 10).saturating_sub(read_at.elapsed());
                let rest = window.unwrap_or_default().max(pause);
                if !rest.is_zero() {
                    tokio::time::sleep(rest).await;
                }
                settled = false;
            } else {
                // Half of a change, most likely. If nothing completes it within the window, it is told; so it is if
                // it goes on changing and does not get any better.
                let since = *bad_since.get_or_insert(read_at);
                let is_quiet = tokio::time::timeout(self.debounce, watch.changed()).await.is_err();
                settled = is_quiet || since.elapsed() > 10 * self.debounce;
                tokio::time::sleep((self.debounce / 10).saturating_sub(read_at.elapsed())).await;
            }
        }
    }

    /// True if nothing was wrong with it. Otherwise the failure is made known only if `tell`.
    fn publish(&mut self, generation: Generation, tell: bool) -> bool {
        let now = self.clock.now();
        let key_pair = match generation.key_pair {
            Ok(Some(pair)) => {
                Self::check_time(&self.folder, &pair, now).map(|()| Some(Secret::KeyPair(pair)))
            }
            Ok(None) => Ok(None),
            Err(error) => Err(error),
        };
        let roots = generation.roots.map(|roots| roots.map(Secret::TrustBundle));
        // Roots first, as with a CA's answer.
        let roots = self.roots.take(roots, now, tell, &self.folder, &self.metrics);
        let key_pair = self.key_pair.take(key_pair, now, tell, &self.folder, &self.metrics);
        roots && key_pair
    }

    fn check_time(folder: &Path, pair: &KeyPair, now: SystemTime) -> Result<(), FileError> {
        let path = || folder.join(CHAIN_FILE);
        let show = |moment| humantime::format_rfc3339_seconds(moment).to_string();
        if pair.not_after() <= now {
            return Err(FileError::Expired { path: path(), at: show(pair.not_after()) });
        }
        if pair.leaf().not_before > now {
            return Err(FileError::NotYetValid { path: path(), from: show(pair.leaf().not_before) });
        }
        Ok(())
    }

    /// Reads all files together; again if any of them changed meanwhile.
    fn read(&self) -> Generation {
        let paths = [CHAIN_FILE, KEY_FILE, ROOT_FILE].map(|name| self.folder.join(name));
        for _ in 0..READS {
            let before = paths.each_ref().map(|path| stamp(path));
            let [chain, key, root] = paths.each_ref().map(|path| read_file(path));
            if before == paths.each_ref().map(|path| stamp(path)) {
                let [chain_path, key_path, root_path] = &paths;
                return Generation {
                    key_pair: parse_pair((chain_path, chain), (key_path, key)),
                    roots: parse_roots(root_path, root),
                };
            }
        }
        let restless = || FileError::Restless { folder: self.folder.clone() };
        Generation { key_pair: Err(restless()), roots: Err(restless()) }
    }
}

impl Feed {
    fn take(
        &mut self,
        secret: Result<Option<Secret>, FileError>,
        now: SystemTime,
        tell: bool,
        folder: &Path,
        metrics: &Metrics,
    ) -> bool {
        let (name, folder) = (self.name, folder.display());
        match secret {
            Ok(Some(secret)) => {
                let what = secret.to_string();
                let not_after = humantime::format_rfc3339_seconds(secret.not_after());
                self.repeats.recovered();
                self.was_there = true;
                if self.publisher.publish(secret, now, None) == Published::Changed {
                    self.published = Some(Instant::now());
                    tracing::info!(%name, %folder, what, %not_after, "served from files");
                }
                true
            }
            Ok(None) => {
                if std::mem::take(&mut self.was_there) {
                    tracing::warn!(%name, %folder, "the files are gone; what they held is served until it expires");
                    self.repeats.recovered();
                    self.publisher.release();
                } else if self.repeats.recovered() {
                    tracing::info!(%name, %folder, "the files that could not be used are gone");
                    self.publisher.release();
                }
                true
            }
            Err(error) => {
                if tell {
                    let reason = error.to_string();
                    let label = BySource { source: "files", reason: error.label() };
                    metrics.source_failures.get_or_create(&label).inc();
                    if self.repeats.is_news(&reason) {
                        tracing::warn!(%name, %folder, reason, "mounted files are not used; what was served before stays");
                    }
                    self.publisher.fail(reason);
                }
                false
            }
        }
    }
}

/// What tells two states of a file apart.
type Stamp = Option<(u64, u64, u64, i64, i64, i64, i64)>;

fn stamp(path: &Path) -> Stamp {
    let found = std::fs::metadata(path).ok()?;
    let (modified, changed) = ((found.mtime(), found.mtime_nsec()), (found.ctime(), found.ctime_nsec()));
    Some((found.dev(), found.ino(), found.size(), modified.0, modified.1, changed.0, changed.1))
}

/// The content of a file; none where there is no file.
fn read_file(path: &Path) -> Content {
    match plain_file::read(path, limits::FILE_BYTES) {
        Ok(content) => Ok(Some(content)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(FileError::Unreadable { path: path.to_owned(), source }),
    }
}

type Content = Result<Option<Zeroizing<Vec<u8>>>, FileError>;

fn parse_pair(chain: (&Path, Content), key: (&Path, Content)) -> Result<Option<KeyPair>, FileError> {
    let ((chain_path, chain), (key_path, key)) = (chain, key);
    let half = |present: &Path, absent: &Path| FileError::Half {
        present: present.to_owned(),
        absent: absent.to_owned(),
    };
    let (chain, key) = match (chain?, key?) {
        (None, None) => return Ok(None),
        (Some(_), None) => return Err(half(chain_path, key_path)),
        (None, Some(_)) => return Err(half(key_path, chain_path)),
        (Some(chain), Some(key)) => (chain, key),
    };
    let chain = pem::certificates(&chain)
        .map_err(|source| FileError::Certificates { path: chain_path.to_owned(), source })?;
    let key =
        PrivateKey::from_pem(&key).map_err(|source| FileError::Key { path: key_path.to_owned(), source })?;
    let pair = KeyPair::new(chain, key).map_err(|source| FileError::Pair {
        chain: chain_path.to_owned(),
        key: key_path.to_owned(),
        source,
    })?;
    Ok(Some(pair))
}

fn parse_roots(path: &Path, content: Content) -> Result<Option<TrustBundle>, FileError> {
    let Some(content) = content? else { return Ok(None) };
    let roots = pem::certificates(&content)
        .map_err(|source| FileError::Certificates { path: path.to_owned(), source })?;
    let bundle =
        TrustBundle::new(roots).map_err(|source| FileError::Bundle { path: path.to_owned(), source })?;
    Ok(Some(bundle))
}

#[cfg(test)]
mod tests;
