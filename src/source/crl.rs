//! CRLs from a mounted file, added to the trust bundle while they make Envoy reject revoked certificates only.

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
use crate::fs::walk::{FoundFile, Look};
use crate::fs::watch::{Activity, OPEN_PATIENCE, Watch, Watcher};
use crate::metrics::{BySource, Metrics};
use crate::pki::crl::{self, Crl, NotCrls};
use crate::secret::{Gap, SecretName, Uncovered, Version};
use crate::store::{Cache, Key, Workload};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CrlFile {
    pub path: PathBuf,
    /// An option names it: a missing file is worth a warning.
    pub is_named: bool,
}

impl CrlFile {
    /// The CRLs that the file holds now, if it exists.
    pub fn read(&self) -> Result<Option<Vec<Arc<Crl>>>, CrlError> {
        match file::read(&self.path, limits::FILE_BYTES) {
            Ok(content) => parse(self, &content).map(Some),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(CrlError::Unreadable { path: self.path.clone(), source }),
        }
    }
}

/// Why a file's CRLs are not used.
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

/// The CRLs in the trust bundle, as they were logged last.
#[derive(Debug, PartialEq, Eq)]
enum Coverage {
    /// This number of CRLs is served.
    Served(usize),
    /// There is no key pair yet.
    Waiting,
    /// The CRLs are left out for this reason.
    LeftOut(String),
}

/// Keeps the CRLs of one file in `ROOTCA`, from whichever source its roots come. Other parts can't fail because of it:
/// a bad file, or one that doesn't fit the roots, costs the CRLs alone.
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
    /// The last good CRLs, if there ever were any. An intentionally empty file holds good ones: none.
    crls: Option<Vec<Arc<Crl>>>,
    /// The version of the content that was read last, good or not.
    seen: Option<Version>,
    is_first_look: bool,
    failures: FailureLog,
    /// Why the file can't be used now.
    broken: Option<String>,
    logged: Option<Coverage>,
}

impl CrlSource {
    /// A source that adds CRLs to the trust bundle of `workload` in `cache`.
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
            failures: FailureLog::default(),
            broken: None,
            logged: None,
        }
    }

    /// Reads the file once, so that the first trust bundle already has its CRLs.
    pub fn amend_once(&mut self) {
        let found = self.watch.look(limits::FILE_BYTES, |_| None).files.pop();
        if let Some(content) = self.content(found) {
            self.take(parse(&self.file, &content));
        }
        self.amend();
    }

    /// Follows the file, the roots, the key pair's chain and the CRLs' own times. Does not return.
    pub async fn run(mut self) {
        let mut roots = self.cache.follow(self.roots.clone());
        let mut key_pair = self.cache.follow(self.key_pair.clone());
        let mut changes = Some(Changes::now());
        let mut next_change = None;
        loop {
            tokio::select! {
                _ = self.watch.changed() => {
                    changes = Some(Changes::after(changes, self.debounce));
                    continue;
                }
                () = at(changes.as_ref().map(|changes| changes.due)) => {
                    let now = changes.take().unwrap_or_else(Changes::now);
                    if self.read(&now) == Read::TooSoon {
                        changes = Some(Changes { due: Instant::now() + self.debounce, ..now });
                    }
                }
                // The senders live as long as `self.cache`, so `changed` does not fail.
                _ = roots.changed() => {}
                _ = key_pair.changed() => {}
                () = self.clock.sleep_until_any(next_change) => {}
            }
            roots.mark_unchanged();
            key_pair.mark_unchanged();
            next_change = self.amend();
        }
    }

    /// Reads the file, if it has changed.
    fn read(&mut self, changes: &Changes) -> Read {
        let Look { mut files, lookups, .. } = self.watch.look(limits::FILE_BYTES, |_| None);
        let activity = self.watch.activity(&lookups);
        self.watch.follow(lookups);
        let Some(content) = self.content(files.pop()) else { return Read::Done };
        // A writer that overwrites a file empties it first.
        let is_loss = self.holds_crls() && crl::is_blank(&content);
        if is_loss && !changes.are_over(self.debounce, activity == Activity::None) {
            self.seen = None;
            return Read::TooSoon;
        }
        self.take(parse(&self.file, &content));
        Read::Done
    }

    fn holds_crls(&self) -> bool {
        self.crls.as_ref().is_some_and(|crls| !crls.is_empty())
    }

    /// The file's content, if it exists and is new.
    fn content(&mut self, found: Option<FoundFile>) -> Option<Zeroizing<Vec<u8>>> {
        let is_first_look = std::mem::take(&mut self.is_first_look);
        let file = self.file.path.display();
        match found?.content {
            Ok(content) => {
                let version = Version::of(&content);
                let is_new = self.seen.as_ref() != Some(&version);
                self.seen = Some(version);
                is_new.then_some(content)
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let was_there = self.seen.take().is_some();
                if was_there && self.holds_crls() {
                    tracing::warn!(%file, "CRL file removed; its CRLs are used until they expire");
                } else if was_there {
                    tracing::warn!(%file, "CRL file removed; revoked certificates are accepted");
                } else if is_first_look && self.file.is_named {
                    tracing::warn!(%file, "CRL file missing; it is used as soon as it exists");
                } else if is_first_look {
                    tracing::debug!(%file, "CRL file missing; it is used as soon as it exists");
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
                if self.failures.recovered() {
                    tracing::info!(file = %self.file.path.display(), "CRL file usable again");
                }
                self.crls = Some(crls);
            }
            Err(error) => {
                self.count(error.label());
                let reason = error.to_string();
                let what = match self.holds_crls() {
                    true => "CRL file not used; the previous CRLs stay",
                    false => {
                        "CRL file not used, and there are no previous CRLs: revoked certificates are accepted"
                    }
                };
                if self.failures.is_new(&reason) {
                    tracing::warn!(reason, "{what}");
                }
            }
        }
        self.report_health();
    }

    /// Adds the CRLs to the trust bundle that is served, or removes them. Returns when to do so again.
    fn amend(&mut self) -> Option<SystemTime> {
        let amended = self.cache.set_crls(&self.roots, self.crls.as_ref()?, self.clock.now())?;
        self.log_coverage(amended.covered);
        amended.next_change
    }

    fn log_coverage(&mut self, covered: Result<usize, Uncovered>) {
        let coverage = Some(match covered {
            Ok(crls) => Coverage::Served(crls),
            Err(Uncovered(gaps)) if gaps == [Gap::NoKeyPair] => Coverage::Waiting,
            Err(gaps) => Coverage::LeftOut(gaps.to_string()),
        });
        if self.logged == coverage {
            return;
        }
        let file = self.file.path.display();
        match &coverage {
            Some(Coverage::Served(0)) => {
                tracing::info!(%file, "CRL file holds no CRLs: revoked certificates are accepted");
            }
            Some(Coverage::Served(crls)) => tracing::info!(%file, crls, "CRLs added to the trust bundle"),
            Some(Coverage::Waiting) => {
                tracing::info!(%file, "CRLs wait for a key pair: its chain shows which CAs are in use");
            }
            Some(Coverage::LeftOut(reason)) => {
                self.count("not_covered");
                tracing::warn!(
                    %file,
                    reason,
                    "trust bundle served without CRLs, revoked certificates are accepted: with these CRLs Envoy \
                     would reject good ones"
                );
            }
            None => {}
        }
        self.logged = coverage;
        self.report_health();
    }

    fn report_health(&self) {
        let health = match (&self.broken, &self.logged) {
            (Some(reason), _) | (None, Some(Coverage::LeftOut(reason))) => Err(reason.clone()),
            _ => Ok(()),
        };
        self.cache.components(self.roots.workload).report_crls(health);
    }

    fn count(&self, reason: &'static str) {
        self.metrics.source_failures.get_or_create(&BySource { source: "crl", reason }).inc();
    }
}

/// Changes of the file since it was last read.
#[derive(Debug)]
struct Changes {
    since: Instant,
    last: Instant,
    /// When to read the file.
    due: Instant,
}

impl Changes {
    fn now() -> Self {
        let now = Instant::now();
        Self { since: now, last: now, due: now }
    }

    /// Adds a change. Half of a file may be a whole list of fewer CRLs: the file is read once it no longer changes, or
    /// after ten windows of changes.
    fn after(before: Option<Self>, debounce: Duration) -> Self {
        let last = Instant::now();
        let since = before.map_or(last, |before| before.since);
        Self { since, last, due: (last + debounce).min(since + 10 * debounce) }
    }

    /// Whether the file no longer changes, and no writer has it open (`is_still`).
    fn are_over(&self, debounce: Duration, is_still: bool) -> bool {
        self.last.elapsed() >= debounce && (is_still || self.since.elapsed() > OPEN_PATIENCE)
    }
}

/// The outcome of reading the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Read {
    Done,
    /// The content may be half of a change: read it again.
    TooSoon,
}

async fn at(moment: Option<Instant>) {
    match moment {
        Some(moment) => tokio::time::sleep(moment.saturating_duration_since(Instant::now())).await,
        None => std::future::pending().await,
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
