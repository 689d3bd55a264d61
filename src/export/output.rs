//! Files for other programs: the secrets of a workload, written as one generation into one or more directories, and a hook
//! that runs after each swap.
//!
//! A subscriber of the store like a stream: it follows the newest value, and needs no connected client. One task
//! ([`Outputs`]) chooses the set that all directories are to have, and runs the hook once they have it. Each directory has a
//! task of its own ([`DirectoryWriter`]): one that is full or does not answer delays no other.

mod board;
pub mod directory;
pub mod format;
pub mod hook;
mod progress;
mod writer;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::sync::{RwLock, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use self::board::Board;
pub use self::directory::Owner;
use self::directory::{OutputDirectory, OutputDirectoryError};
pub use self::format::{DirectorySettings, Format, Keystore, KeystoreKind};
pub use self::hook::Hook;
use self::hook::HookError;
use self::progress::HookProgress;
use self::writer::Context;
pub use self::writer::DirectoryWriter;
use crate::base::clock::{Clock, millis};
use crate::fs::disk::Disk;
use crate::fs::watch::Watcher;
use crate::metrics::{ByResult, Metrics};
use crate::pki::pem;
use crate::secret::{Secret, SecretName, Version};
use crate::store::health::{Components, Failing, HookFailing};
use crate::store::{Cache, Entry, Good, Key, Workload};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutputSettings {
    /// At least one.
    pub directories: Vec<DirectorySettings>,
    /// Runs after each swap.
    pub hook: Option<Hook>,
}

impl OutputSettings {
    /// Removes the files in all directories, when their workload is gone. Touches the disk.
    pub fn clear(&self) -> Result<(), OutputDirectoryError> {
        self.directories.iter().try_for_each(|settings| OutputDirectory::new(settings.layout()).clear())
    }

    pub fn paths(&self) -> impl Iterator<Item = &PathBuf> {
        self.directories.iter().map(|directory| &directory.directory)
    }
}

/// Chooses what the directories are to have, and runs the hook when they have it.
#[derive(Debug)]
pub struct Outputs {
    hook: Option<Hook>,
    directories: Vec<PathBuf>,
    target: watch::Sender<Target>,
    board: Board,
    /// Held exclusively while the hook runs, and shared by each write.
    gate: Arc<RwLock<()>>,
    cache: Cache,
    pair: watch::Receiver<Entry>,
    roots: watch::Receiver<Entry>,
    clock: Clock,
    metrics: Metrics,
    components: Components,
}

/// What all directories are to have: none while the key pair or the roots are missing or expired.
type Target = Option<Arc<Set>>;

/// The identity of a set. Only what is written counts, so a change of CRLs does not change it.
type Versions = [Version; 2];

/// A key pair and roots that are valid together.
#[derive(Clone, Debug)]
struct Set {
    pair: Arc<Good>,
    roots: Arc<Good>,
    versions: Versions,
}

impl Set {
    fn new(pair: Arc<Good>, roots: Arc<Good>) -> Self {
        let written_roots = match &roots.secret {
            Secret::TrustBundle(bundle) => Version::of(&pem::of_certificates(bundle.roots())),
            Secret::KeyPair(_) => roots.resource.version.clone(),
        };
        let versions = [pair.resource.version.clone(), written_roots];
        Self { pair, roots, versions }
    }

    /// Whether the two belong together. A CA's roots come before its certificate, and with `--drop-old-roots` the ones served
    /// meanwhile are none that the old certificate chains to. Files may pair the roots of one CA with a certificate of
    /// another.
    fn is_one_generation(&self) -> bool {
        match (&self.pair.secret, &self.roots.secret) {
            (Secret::KeyPair(pair), Secret::TrustBundle(roots))
                if self.pair.origin.is_issued() && self.pair.origin == self.roots.origin =>
            {
                // The moment at which it was valid: whether it still is does not matter here.
                roots.verify(pair, self.pair.received).is_ok()
            }
            _ => true,
        }
    }

    fn not_after(&self) -> SystemTime {
        self.pair.secret.not_after().min(self.roots.secret.not_after())
    }
}

impl Outputs {
    /// The tasks that write the secrets of `workload` in `cache`.
    pub fn new(
        settings: OutputSettings,
        cache: &Cache,
        workload: Workload,
        watcher: &Watcher,
        disk: Disk,
        clock: Clock,
        metrics: Metrics,
    ) -> (Self, Vec<DirectoryWriter>) {
        let follow = |name| cache.follow(Key { workload, name });
        let components = cache.components(workload);
        let directories: Vec<_> = settings.paths().cloned().collect();
        components.report_output(|output| output.expect(&directories));
        let (target, targets) = watch::channel(None);
        let (board, gate) = (Board::new(directories.len()), Arc::default());
        let shared = Context {
            disk,
            clock: clock.clone(),
            metrics: metrics.clone(),
            components: components.clone(),
            has_hook: settings.hook.is_some(),
        };
        let writer = |(index, directory)| {
            let (board, gate) = (Board::clone(&board), Arc::clone(&gate));
            DirectoryWriter::new(directory, index, watcher, targets.clone(), board, gate, shared.clone())
        };
        let writers = settings.directories.into_iter().enumerate().map(writer).collect();
        let (pair, roots) = (follow(SecretName::Workload), follow(SecretName::Roots));
        let (cache, hook) = (cache.clone(), settings.hook);
        let outputs =
            Self { hook, directories, target, board, gate, cache, pair, roots, clock, metrics, components };
        (outputs, writers)
    }

    /// Follows every change until `stop`. A hook that is running is finished.
    pub async fn run(mut self, stop: CancellationToken) {
        let mut progress = HookProgress::default();
        let mut changes = self.board.changes();
        while !stop.is_cancelled() {
            // One generation after the other, with the hook in between.
            let is_settled = self.is_settled();
            if is_settled {
                if let Some(hook) = &self.hook
                    && progress.is_due(&self.board)
                {
                    self.run_hook(hook, &mut progress).await;
                    continue;
                }
                if self.choose() {
                    continue;
                }
            }
            tokio::select! {
                Ok(()) = self.pair.changed() => {}
                Ok(()) = self.roots.changed() => {}
                Ok(()) = changes.changed() => {}
                () = progress.due(&self.board), if is_settled && self.hook.is_some() => {}
                () = stop.cancelled() => {}
            }
        }
    }

    fn is_settled(&self) -> bool {
        self.target.borrow().as_ref().is_none_or(|set| self.board.is_settled(&set.versions))
    }

    /// Makes the newest set the target. Returns true if it is another one.
    fn choose(&mut self) -> bool {
        let set = self.current_set().map(|(pair, roots)| Arc::new(Set::new(pair, roots)));
        self.target.send_if_modified(|target| {
            let versions = |target: &Target| target.as_ref().map(|set| set.versions.clone());
            let is_new = versions(target) != versions(&set);
            let is_whole = set.as_ref().is_none_or(|set| set.is_one_generation());
            let is_changed = is_new && is_whole;
            if is_changed {
                *target = set;
            }
            is_changed
        })
    }

    fn current_set(&mut self) -> Option<(Arc<Good>, Arc<Good>)> {
        let now = self.clock.now();
        let _together = self.cache.together();
        let [pair, roots] = [&mut self.pair, &mut self.roots].map(|entry| {
            let entry = entry.borrow_and_update();
            entry.good.clone().filter(|_| entry.valid_at(now).is_ok())
        });
        Some((pair?, roots?))
    }

    async fn run_hook(&self, hook: &Hook, progress: &mut HookProgress) {
        let _gate = self.gate.write().await;
        let Some(generations) = self.board.pending() else { return };
        progress.begin(&generations);
        let started = Instant::now();
        self.components.report_output(|output| output.is_hook_running = true);
        let outcome = hook.run(&self.directories).await;
        self.components.report_output(|output| {
            output.is_hook_running = false;
            if outcome.is_ok() {
                output.hook_failure = None;
            }
        });
        let took = started.elapsed();
        let label = outcome.as_ref().map_or_else(HookError::label, |_| "ok");
        self.metrics.output_hooks.get_or_create(&ByResult { outcome: label }).inc();
        match outcome {
            Ok(output) => {
                self.board.hook_succeeded(&generations);
                if progress.failures.reset() {
                    tracing::info!(took_ms = millis(took), "output hook working again");
                }
                tracing::debug!(took_ms = millis(took), output, "output hook finished");
            }
            Err(error) => {
                let retry_in = progress.retry();
                let (reason, output) = (error.to_string(), error.output());
                self.report_failure(&error, retry_in);
                let (took_ms, retry_in_ms) = (millis(took), millis(retry_in));
                if progress.failures.log.is_new(&reason) {
                    tracing::warn!(reason, output, took_ms, retry_in_ms, "output hook failed");
                } else {
                    tracing::debug!(reason, output, took_ms, retry_in_ms, "output hook failed again");
                }
            }
        }
    }

    fn report_failure(&self, error: &HookError, retry_in: Duration) {
        let now = self.clock.now();
        let (reason, last_lines) = (error.to_string(), error.last_lines().to_vec());
        self.components.report_output(|output| {
            let before = output.hook_failure.as_ref().map(|before| &before.failing);
            let failing = Failing::after(before, reason, now, Some(now + retry_in));
            output.hook_failure = Some(HookFailing { failing, last_lines });
        });
    }
}

#[cfg(test)]
mod tests;
