//! CRLs from a mounted file, put into the trust bundle as long as they refuse nobody but the revoked.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::time::Instant;

use super::watch::{Watch, Watcher};
use crate::backoff::Repeats;
use crate::cache::{Cache, Key, Workload};
use crate::clock::Clock;
use crate::metrics::{BySource, Metrics};
use crate::pki::crl::{self, Crl, NotCrls};
use crate::secret::{Gap, SecretName, Uncovered, Version};
use crate::{limits, plain_file};

/// A file that is longer takes more than a millisecond to parse.
const LONG: usize = 64 << 10;

/// Where CRLs may be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CrlFile {
    /// The file.
    pub path: PathBuf,
    /// Somebody asked for it: it is odd if it is not there.
    pub is_named: bool,
}

/// Why a file's CRLs are not taken.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "each variant's message is its documentation")]
pub enum CrlError {
    #[error("{path}: {source}")]
    Unreadable { path: PathBuf, source: io::Error },
    #[error("{path}: {source}")]
    NotCrls { path: PathBuf, source: NotCrls },
    #[error("{path}: reading it was given up")]
    Stopped { path: PathBuf },
}

impl CrlError {
    fn label(&self) -> &'static str {
        match self {
            Self::Unreadable { .. } | Self::Stopped { .. } => "unreadable",
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
    /// The last good ones.
    crls: Vec<Arc<Crl>>,
    /// The content that was read last, good or not.
    seen: Option<Version>,
    is_first_look: bool,
    repeats: Repeats,
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
            crls: Vec::new(),
            seen: None,
            is_first_look: true,
            repeats: Repeats::default(),
            told: None,
        }
    }

    /// Takes what is there now, so that the first trust bundle has its CRLs already.
    pub fn amend_once(&mut self) {
        if let Some(content) = self.look() {
            self.take(parse(&self.file, &content));
        }
        self.amend();
    }

    /// Follows the file, the roots, the key pair's chain and the CRLs' own times for ever.
    pub async fn run(mut self) {
        let entries = (self.cache.watch(&self.roots), self.cache.watch(&self.key_pair));
        let (Some(mut roots), Some(mut key_pair)) = entries else {
            // Nobody publishes a trust bundle: there is nothing to put CRLs into.
            return std::future::pending().await;
        };
        // When the first of some changes came, and when the file is to be read for them.
        let mut changes: Option<(Instant, Instant)> = Some((Instant::now(), Instant::now()));
        let mut next_change = None;
        loop {
            tokio::select! {
                () = self.watch.changed() => {
                    // Half of a file may be a whole list of fewer CRLs: it is read when it rests, or never does.
                    let now = Instant::now();
                    let since = changes.map_or(now, |(since, _)| since);
                    changes = Some((since, (now + self.debounce).min(since + 10 * self.debounce)));
                    continue;
                }
                () = at(changes.map(|(_, due)| due)) => {
                    changes = None;
                    self.watch.arm();
                    self.read().await;
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
    async fn read(&mut self) {
        let Some(content) = self.look() else { return };
        let file = self.file.clone();
        let crls = if content.len() < LONG {
            parse(&file, &content)
        } else {
            let path = file.path.clone();
            let parsed = tokio::task::spawn_blocking(move || parse(&file, &content)).await;
            parsed.unwrap_or(Err(CrlError::Stopped { path }))
        };
        self.take(crls);
    }

    /// The file's content, where it is there and not known yet.
    fn look(&mut self) -> Option<zeroize::Zeroizing<Vec<u8>>> {
        let is_first_look = std::mem::take(&mut self.is_first_look);
        let file = self.file.path.display();
        match plain_file::read(&self.file.path, limits::FILE_BYTES) {
            Ok(content) => {
                let version = Version::of(&content);
                let is_new = self.seen.as_ref() != Some(&version);
                self.seen = Some(version);
                is_new.then_some(content)
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                if self.seen.take().is_some() {
                    tracing::warn!(%file, "the CRL file is gone; what it held is used until it expires");
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
        match crls {
            Ok(crls) => {
                if self.repeats.recovered() {
                    tracing::info!(file = %self.file.path.display(), "the CRL file can be used again");
                }
                self.crls = crls;
            }
            Err(error) => {
                self.count(error.label());
                let reason = error.to_string();
                if self.repeats.is_news(&reason) {
                    tracing::warn!(reason, "the CRL file is not used; the CRLs that were good before stay");
                }
            }
        }
    }

    /// Puts the CRLs into the trust bundle that is served, or takes them out; returns when that is to be done again.
    fn amend(&mut self) -> Option<SystemTime> {
        if self.crls.is_empty() {
            return None;
        }
        let amended = self.cache.amend(&self.roots, &self.crls, self.clock.now())?;
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
    }

    fn count(&self, reason: &'static str) {
        self.metrics.source_failures.get_or_create(&BySource { source: "crl", reason }).inc();
    }
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

fn parse(file: &CrlFile, content: &[u8]) -> Result<Vec<Arc<Crl>>, CrlError> {
    let crls =
        crl::from_pem(content).map_err(|source| CrlError::NotCrls { path: file.path.clone(), source })?;
    Ok(crls.into_iter().map(Arc::new).collect())
}

#[cfg(test)]
mod tests;
