//! CRLs from a mounted file, put into the trust bundle as long as they refuse nobody but the revoked.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::time::Instant;
use zeroize::Zeroizing;

use crate::base::clock::Clock;
use crate::base::failure_log::FailureLog;
use crate::base::limits;
use crate::fs::file;
use crate::fs::watch::{Activity, Watch, Watcher};
use crate::metrics::{BySource, Metrics};
use crate::pki::crl::{self, Crl, NotCrls};
use crate::secret::{Gap, SecretName, Uncovered, Version};
use crate::store::{Cache, Key, Workload};

/// A file that is longer takes more than a millisecond to parse.
const LONG: usize = 64 << 10;
/// How long an empty file is waited for that somebody has written to and keeps open.
const OPEN_PATIENCE: Duration = Duration::from_secs(5);

/// Where CRLs may be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CrlFile {
    /// The file.
    pub path: PathBuf,
    /// Somebody asked for it: it is odd if it is not there.
    pub is_named: bool,
}

impl CrlFile {
    /// The CRLs that are in it now; none where it is not there.
    pub fn read(&self) -> Result<Option<Vec<Arc<Crl>>>, CrlError> {
        match file::read(&self.path, limits::FILE_BYTES) {
            Ok(content) => parse(self, &content).map(Some),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(CrlError::Unreadable { path: self.path.clone(), source }),
        }
    }
}

/// Why a file's CRLs are not taken.
#[derive(Debug, thiserror::Error)]
pub enum CrlError {
    #[error("{path}: {source}")]
    Unreadable { path: PathBuf, source: io::Error },
    #[error("{path}: {source}")]
    NotCrls { path: PathBuf, source: NotCrls },
}

impl CrlError {
    fn label(&self) -> &'static str {
        match self {
            Self::Unreadable { .. } => "unreadable",
            Self::NotCrls { .. } => "not_parsed",
        }
    }
}

/// What was said last of the CRLs in the trust bundle.
#[derive(Debug, PartialEq, Eq)]
enum Told {
    Served(usize),
    Waiting,
    LeftOut(String),
}

/// Keeps the CRLs of one file in `ROOTCA`, whoever publishes the roots. It can't fail anybody else: what is wrong
/// with the file, or does not fit the roots, costs the CRLs alone.
#[derive(Debug)]
pub struct CrlSource {
    file: CrlFile,
    watch: Watch,
    debounce: Duration,
    cache: Cache,
    roots: Key,
    key_pair: Key,
    clock: Clock,
    metrics: Metrics,
    /// The last good ones, if there ever were any. A file that is empty on purpose holds good ones: none.
    crls: Option<Vec<Arc<Crl>>>,
    /// The content that was read last, good or not.
    seen: Option<Version>,
    is_first_look: bool,
    repeats: FailureLog,
    /// Why the file can't be used as it is.
    broken: Option<String>,
    told: Option<Told>,
}

impl CrlSource {
    /// A source that amends the trust bundle of `workload` in `cache`.
    pub fn new(
        file: CrlFile,
        debounce: Duration,
        cache: &Cache,
        workload: Workload,
        watcher: &Watcher,
        clock: Clock,
        metrics: Metrics,
    ) -> Self {
        Self {
            watch: watcher.watch(vec![file.path.clone()]),
            file,
            debounce,
            cache: cache.clone(),
            roots: Key { workload, name: SecretName::Roots },
            key_pair: Key { workload, name: SecretName::Workload },
            clock,
            metrics,
            crls: None,
            seen: None,
            is_first_look: true,
            repeats: FailureLog::default(),
            broken: None,
            told: None,
        }
    }

    /// Takes what is there now, so that the first trust bundle has its CRLs already.
    pub async fn amend_once(&mut self) {
        if let Some(content) = self.look() {
            self.take(parsed(&self.file, content).await);
        }
        self.amend();
    }

    /// Follows the file, the roots, the key pair's chain and the CRLs' own times for ever.
    pub async fn run(mut self) {
        let mut roots = self.cache.follow(self.roots.clone());
        let mut key_pair = self.cache.follow(self.key_pair.clone());
        let mut changes = Some(Changes::now());
        let mut next_change = None;
        loop {
            tokio::select! {
                () = self.watch.changed() => {
                    changes = Some(Changes::after(changes, self.debounce));
                    continue;
                }
                () = at(changes.as_ref().map(|changes| changes.due)) => {
                    self.watch.arm();
                    let now = changes.take().unwrap_or_else(Changes::now);
                    if self.read(&now).await == Read::TooSoon {
                        changes = Some(Changes { due: Instant::now() + self.debounce, ..now });
                    }
                }
                // The senders live as long as `self.cache`, so `changed` does not fail.
                _ = roots.changed() => {}
                _ = key_pair.changed() => {}
                () = at_time(&self.clock, next_change) => {}
            }
            roots.mark_unchanged();
            key_pair.mark_unchanged();
            next_change = self.amend();
        }
    }

    /// Reads the file, where it is not as it was.
    async fn read(&mut self, changes: &Changes) -> Read {
        let Some(content) = self.look() else { return Read::Done };
        // Whoever writes a file anew empties it first.
        let is_loss = self.holds_crls() && crl::is_blank(&content);
        if is_loss && !changes.are_over(self.debounce, self.watch.activity() == Activity::None) {
            self.seen = None;
            return Read::TooSoon;
        }
        self.take(parsed(&self.file, content).await);
        Read::Done
    }

    fn holds_crls(&self) -> bool {
        self.crls.as_ref().is_some_and(|crls| !crls.is_empty())
    }

    /// The file's content, where it is there and not known yet.
    fn look(&mut self) -> Option<Zeroizing<Vec<u8>>> {
        let is_first_look = std::mem::take(&mut self.is_first_look);
        let file = self.file.path.display();
        match file::read(&self.file.path, limits::FILE_BYTES) {
            Ok(content) => {
                let version = Version::of(&content);
                let is_new = self.seen.as_ref() != Some(&version);
                self.seen = Some(version);
                is_new.then_some(content)
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let was_there = self.seen.take().is_some();
                if was_there && self.holds_crls() {
                    tracing::warn!(%file, "the CRL file is gone; what it held is used until it expires");
                } else if was_there {
                    tracing::warn!(%file, "the CRL file is gone; revoked certificates are accepted");
                } else if is_first_look && self.file.is_named {
                    tracing::warn!(%file, "there is no CRL file; one that appears there is used");
                } else if is_first_look {
                    tracing::debug!(%file, "there is no CRL file; one that appears there is used");
                }
                None
            }
            Err(source) => {
                self.seen = None;
                self.take(Err(CrlError::Unreadable { path: self.file.path.clone(), source }));
                None
            }
        }
    }

    fn take(&mut self, crls: Result<Vec<Arc<Crl>>, CrlError>) {
        self.broken = crls.as_ref().err().map(ToString::to_string);
        match crls {
            Ok(crls) => {
                if self.repeats.recovered() {
                    tracing::info!(file = %self.file.path.display(), "the CRL file can be used again");
                }
                self.crls = Some(crls);
            }
            Err(error) => {
                self.count(error.label());
                let reason = error.to_string();
                let what = match self.holds_crls() {
                    true => "the CRL file is not used; the CRLs that were good before stay",
                    false => {
                        "the CRL file is not used, and there are no CRLs from before: revoked certificates are accepted"
                    }
                };
                if self.repeats.is_new(&reason) {
                    tracing::warn!(reason, "{what}");
                }
            }
        }
        self.note();
    }

    /// Puts the CRLs into the trust bundle that is served, or takes them out; returns when that is to be done again.
    fn amend(&mut self) -> Option<SystemTime> {
        let amended = self.cache.amend(&self.roots, self.crls.as_ref()?, self.clock.now())?;
        self.tell(amended.covered);
        amended.next_change
    }

    fn tell(&mut self, covered: Result<usize, Uncovered>) {
        let told = Some(match covered {
            Ok(crls) => Told::Served(crls),
            Err(Uncovered(gaps)) if gaps == [Gap::NoKeyPair] => Told::Waiting,
            Err(gaps) => Told::LeftOut(gaps.to_string()),
        });
        if self.told == told {
            return;
        }
        let file = self.file.path.display();
        match &told {
            Some(Told::Served(0)) => {
                tracing::info!(%file, "the CRL file holds no CRLs: revoked certificates are accepted");
            }
            Some(Told::Served(crls)) => tracing::info!(%file, crls, "the trust bundle is served with CRLs"),
            Some(Told::Waiting) => {
                tracing::info!(%file, "the CRLs wait for a key pair: its chain shows which CAs are in use");
            }
            Some(Told::LeftOut(reason)) => {
                self.count("not_covered");
                tracing::warn!(
                    %file,
                    reason,
                    "the trust bundle is served without CRLs, and revoked certificates are accepted: with these \
                     CRLs Envoy would refuse good ones"
                );
            }
            None => {}
        }
        self.told = told;
        self.note();
    }

    fn note(&self) {
        let health = match (&self.broken, &self.told) {
            (Some(reason), _) | (None, Some(Told::LeftOut(reason))) => Err(reason.clone()),
            _ => Ok(()),
        };
        self.metrics.crls.send_replace(Some(health));
    }

    fn count(&self, reason: &'static str) {
        self.metrics.source_failures.get_or_create(&BySource { source: "crl", reason }).inc();
    }
}

/// Changes of the file that are not looked at yet.
#[derive(Debug)]
struct Changes {
    since: Instant,
    last: Instant,
    /// When the file is to be read for them.
    due: Instant,
}

impl Changes {
    fn now() -> Self {
        let now = Instant::now();
        Self { since: now, last: now, due: now }
    }

    /// One more. Half of a file may be a whole list of fewer CRLs: it is read when it rests, or never does.
    fn after(before: Option<Self>, debounce: Duration) -> Self {
        let last = Instant::now();
        let since = before.map_or(last, |before| before.since);
        Self { since, last, due: (last + debounce).min(since + 10 * debounce) }
    }

    /// Whether the file has come to rest, and nobody is about to write to it.
    fn are_over(&self, debounce: Duration, is_still: bool) -> bool {
        self.last.elapsed() >= debounce && (is_still || self.since.elapsed() > OPEN_PATIENCE)
    }
}

/// What came of reading the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Read {
    Done,
    /// It may be half of a change: it is to be read again.
    TooSoon,
}

async fn at(moment: Option<Instant>) {
    match moment {
        Some(moment) => tokio::time::sleep(moment.saturating_duration_since(Instant::now())).await,
        None => std::future::pending().await,
    }
}

async fn at_time(clock: &Clock, moment: Option<SystemTime>) {
    match moment {
        Some(moment) => clock.sleep_until(moment).await,
        None => std::future::pending().await,
    }
}

/// The CRLs in `content`; of a long one on another thread.
async fn parsed(file: &CrlFile, content: Zeroizing<Vec<u8>>) -> Result<Vec<Arc<Crl>>, CrlError> {
    if content.len() < LONG {
        return parse(file, &content);
    }
    let file = file.clone();
    let parsed = tokio::task::spawn_blocking(move || parse(&file, &content)).await;
    match parsed.map_err(tokio::task::JoinError::try_into_panic) {
        Ok(parsed) => parsed,
        Err(Ok(panic)) => std::panic::resume_unwind(panic),
        // The runtime is going away, and this with it.
        Err(Err(_)) => std::future::pending().await,
    }
}

fn parse(file: &CrlFile, content: &[u8]) -> Result<Vec<Arc<Crl>>, CrlError> {
    if crl::is_blank(content) {
        return Ok(Vec::new());
    }
    let crls =
        crl::from_pem(content).map_err(|source| CrlError::NotCrls { path: file.path.clone(), source })?;
    Ok(crls.into_iter().map(Arc::new).collect())
}

#[cfg(test)]
mod tests;
