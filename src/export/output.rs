//! Files for other programs: the secrets of a workload, written as one generation, and a hook that runs after each swap.
//!
//! A subscriber of the store like a stream: it follows the newest value, and needs no connected client.

pub mod directory;
pub mod hook;
mod progress;

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use zeroize::Zeroizing;

use self::directory::{Condition, GRACE, OutputDirectory, OutputDirectoryError, OutputFile, Written};
pub use self::hook::Hook;
use self::hook::HookError;
use self::progress::{Progress, is_due};
use crate::base::clock::{Clock, millis, rfc3339};
use crate::fs::disk::Disk;
use crate::fs::generation::{CHAIN_FILE, KEY_FILE, ROOT_FILE};
use crate::fs::watch::{Watch, Watcher};
use crate::metrics::{ByResult, Metrics};
use crate::pki::pem;
use crate::secret::{Secret, SecretName, Version};
use crate::store::health::{Components, Failing, HookFailing, OutputHealth};
use crate::store::{Cache, Entry, Good, Key, Origin, Workload};

/// How often the files are inspected where inotify is unavailable.
const POLL: Duration = Duration::from_secs(60);
/// A disk that takes longer is reported.
const PATIENCE: Duration = Duration::from_secs(10);

#[derive(Clone, Debug)]
pub struct OutputSettings {
    /// Created if it does not exist.
    pub directory: PathBuf,
    /// Permissions of the key file.
    pub key_mode: u32,
    /// Permissions of the certificate files.
    pub cert_mode: u32,
    /// Runs after each swap.
    pub hook: Option<Hook>,
}

/// Writes a workload's secrets into a directory, and follows every change.
#[derive(Debug)]
pub struct Output {
    settings: OutputSettings,
    directory: Arc<Mutex<OutputDirectory>>,
    /// Watches the written files. None while it is being armed.
    watch: Option<Watch>,
    cache: Cache,
    pair: watch::Receiver<Entry>,
    roots: watch::Receiver<Entry>,
    disk: Disk,
    clock: Clock,
    metrics: Metrics,
    components: Components,
}

/// A key pair and roots that are valid together.
#[derive(Clone, Debug)]
struct Set {
    pair: Arc<Good>,
    roots: Arc<Good>,
}

impl Set {
    /// The identity of the set. Only what is written counts, so a change of CRLs does not change it.
    fn versions(&self) -> [Version; 2] {
        let roots = match &self.roots.secret {
            Secret::TrustBundle(bundle) => Version::of(&pem::of_certificates(bundle.roots())),
            Secret::KeyPair(_) => self.roots.resource.version.clone(),
        };
        [self.pair.resource.version.clone(), roots]
    }

    /// Whether the two belong together. A CA's roots come before its certificate, and with `--drop-old-roots` the ones served
    /// meanwhile are none that the old certificate chains to. Files may pair the roots of one CA with a certificate of
    /// another.
    fn is_one_generation(&self) -> bool {
        let is_issued = |good: &Good| good.origin == Origin::CA;
        match (&self.pair.secret, &self.roots.secret) {
            (Secret::KeyPair(pair), Secret::TrustBundle(roots))
                if is_issued(&self.pair) && is_issued(&self.roots) =>
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

impl Output {
    /// Writes the secrets of `workload` in `cache`.
    pub fn new(
        settings: OutputSettings,
        cache: &Cache,
        workload: Workload,
        watcher: &Watcher,
        disk: Disk,
        clock: Clock,
        metrics: Metrics,
    ) -> Self {
        let follow = |name| cache.follow(Key { workload, name });
        let directory = OutputDirectory::new(settings.directory.clone());
        let watch = Some(watcher.watch(directory.names()));
        let directory = Arc::new(Mutex::new(directory));
        let (pair, roots) = (follow(SecretName::Workload), follow(SecretName::Roots));
        let components = cache.components(workload);
        Self {
            settings,
            directory,
            watch,
            cache: cache.clone(),
            pair,
            roots,
            disk,
            clock,
            metrics,
            components,
        }
    }

    /// Follows every change until `stop`. A swap or a hook that is under way is finished.
    pub async fn run(mut self, stop: CancellationToken) {
        let mut progress = Progress::default();
        if let Err(error) = self.on_disk(|directory| directory.check()).await {
            // It may take a while until there is something to write, and the problem should be known before.
            let reason = error.to_string();
            progress.writes.log.is_new(&reason);
            tracing::warn!(reason, "output directory not writable; retrying when there are files to write");
            self.report_failure(reason, None);
        }
        while !stop.is_cancelled() {
            progress.failed.take_if(|(_, retry_at)| is_due(*retry_at));
            if let Some(set) = self.current_set()
                && progress.needs_write(&set)
                && set.is_one_generation()
            {
                self.write(set, &mut progress).await;
            }
            if progress.inspect_at.is_some_and(is_due) {
                self.inspect(&mut progress).await;
                if progress.written.is_none() {
                    // Repair the files before the hook runs.
                    continue;
                }
            }
            // Nothing is swapped while the hook runs: if it reads a file twice, it sees the same content.
            if progress.hook_at.is_some_and(is_due) {
                self.run_hook(&mut progress).await;
            }
            if progress.sweep_at.is_some_and(is_due) {
                self.sweep(&mut progress).await;
            }
            tokio::select! {
                Ok(()) = self.pair.changed() => {}
                Ok(()) = self.roots.changed() => {}
                () = progress.due() => {}
                () = files_changed(self.watch.as_ref()), if progress.inspect_at.is_none() => progress.files_changed(),
                () = stop.cancelled() => {}
            }
        }
    }

    /// The set to write: none while the key pair or the roots are missing or expired.
    fn current_set(&mut self) -> Option<Set> {
        let now = self.clock.now();
        let _together = self.cache.together();
        let [pair, roots] = [&mut self.pair, &mut self.roots].map(|entry| {
            let entry = entry.borrow_and_update();
            entry.good.clone().filter(|_| entry.valid_at(now).is_ok())
        });
        Some(Set { pair: pair?, roots: roots? })
    }

    async fn write(&self, set: Set, progress: &mut Progress) {
        let Some(files) = self.files(&set) else { return };
        let (is_replaced, outcome) =
            self.on_disk(move |directory| (directory.is_replaced(), directory.write(&files))).await;
        if is_replaced {
            self.log_conflict(progress);
        }
        progress.sweep_at = Some(Instant::now() + GRACE);
        match outcome {
            Ok(written) => self.write_succeeded(&set, written, progress).await,
            Err(error) => self.write_failed(&set, &error, progress),
        }
    }

    /// The files of `set`; none where its secrets are of other kinds.
    fn files(&self, set: &Set) -> Option<[OutputFile; 3]> {
        let (Secret::KeyPair(pair), Secret::TrustBundle(roots)) = (&set.pair.secret, &set.roots.secret)
        else {
            return None;
        };
        let file = |name, mode, content| OutputFile { name, mode, content };
        let cert_mode = self.settings.cert_mode;
        Some([
            file(KEY_FILE, self.settings.key_mode, pair.key().to_pem()),
            file(CHAIN_FILE, cert_mode, Zeroizing::new(pem::of_certificates(pair.chain()))),
            file(ROOT_FILE, cert_mode, Zeroizing::new(pem::of_certificates(roots.roots()))),
        ])
    }

    async fn write_succeeded(&self, set: &Set, written: Written, progress: &mut Progress) {
        let now = Instant::now();
        let directory = self.settings.directory.display();
        if progress.writes.reset() {
            tracing::info!(%directory, "output directory writable again");
        }
        progress.failed = None;
        progress.written = Some(set.versions());
        self.update_health(|health| {
            health.failure = None;
            health.not_after = Some(set.not_after());
        });
        progress.inspect_at = Some(if progress.repairs == 0 { now } else { now + progress.pause() });
        let what = set.pair.secret.to_string();
        let not_after = rfc3339(set.pair.secret.not_after());
        match written {
            Written::Unchanged => {
                tracing::info!(%directory, what, %not_after, "output files already up to date");
                // The agent that wrote them may have exited before the hook succeeded.
                if self.settings.hook.is_some()
                    && progress.hook_at.is_none()
                    && !self.on_disk(|directory| directory.hook_is_done()).await
                {
                    progress.hook_at = Some(now);
                }
            }
            Written::Swapped => {
                self.metrics.output_writes.get_or_create(&ByResult { outcome: "ok" }).inc();
                tracing::info!(%directory, what, %not_after, "output files written");
                progress.hook_at = self.settings.hook.is_some().then_some(now);
                progress.hooks.count = 0;
            }
        }
    }

    fn write_failed(&self, set: &Set, error: &OutputDirectoryError, progress: &mut Progress) {
        self.metrics.output_writes.get_or_create(&ByResult { outcome: "failed" }).inc();
        let retry_in = progress.writes.add();
        let reason = error.to_string();
        if progress.writes.log.is_new(&reason) {
            tracing::warn!(
                reason,
                retry_in_ms = millis(retry_in),
                "output write failed, existing files unchanged"
            );
        } else {
            tracing::debug!(reason, retry_in_ms = millis(retry_in), "output write failed again");
        }
        self.report_failure(reason, Some(retry_in));
        progress.failed = Some((set.versions(), Instant::now() + retry_in));
    }

    /// Removes old generations.
    async fn sweep(&self, progress: &mut Progress) {
        let outcome = self.on_disk(|directory| directory.sweep()).await;
        let now = Instant::now();
        match outcome {
            Ok(is_some_left) => {
                progress.sweep_at = is_some_left.then(|| now + GRACE);
                if progress.sweeps.reset() {
                    let directory = self.settings.directory.display();
                    tracing::info!(%directory, "removal of old output generations working again");
                }
            }
            Err(error) => {
                let retry_in = progress.sweeps.add();
                progress.sweep_at = Some(now + retry_in);
                let reason = error.to_string();
                if progress.sweeps.log.is_new(&reason) {
                    tracing::warn!(
                        reason,
                        retry_in_ms = millis(retry_in),
                        "old output generation not removed; its private key stays on the disk"
                    );
                } else {
                    tracing::debug!(
                        reason,
                        retry_in_ms = millis(retry_in),
                        "old output generation still not removed"
                    );
                }
            }
        }
    }

    /// Checks whether the written files are intact, and schedules a repair if not. From here on, inotify reports changes.
    async fn inspect(&mut self, progress: &mut Progress) {
        progress.inspect_at = None;
        if progress.written.is_none() {
            return;
        }
        let watch = self.watch.take();
        let (condition, watch) = self
            .on_disk(move |directory| {
                let armed = watch.map(|mut watch| {
                    watch.arm();
                    watch
                });
                (directory.inspect(), armed)
            })
            .await;
        if watch.as_ref().is_some_and(Watch::polls) {
            progress.inspect_at = Some(Instant::now() + POLL);
        }
        self.watch = watch;
        match condition {
            Condition::Intact => {}
            // No repair here: two agents on one directory would repair each other's files forever.
            Condition::Replaced => self.log_conflict(progress),
            Condition::Damaged(damage) => {
                let directory = self.settings.directory.display();
                tracing::warn!(%directory, damage, "output files damaged, rewriting them");
                self.update_health(|health| health.not_after = None);
                self.report_failure(damage, None);
                progress.written = None;
                progress.inspect_at = None;
                progress.repairs = progress.repairs.saturating_add(1);
                progress.repaired = Some(Instant::now());
            }
        }
    }

    /// Logs once that another process writes to the same directory.
    fn log_conflict(&self, progress: &mut Progress) {
        if !std::mem::replace(&mut progress.conflict_is_logged, true) {
            let directory = self.settings.directory.display();
            tracing::warn!(%directory, "another agent writes to the output directory; give each agent an --output-dir of its own");
        }
    }

    async fn run_hook(&self, progress: &mut Progress) {
        let Some(hook) = &self.settings.hook else { return };
        let started = Instant::now();
        self.update_health(|health| health.is_hook_running = true);
        let outcome = hook.run(&self.settings.directory).await;
        self.update_health(|health| {
            health.is_hook_running = false;
            if outcome.is_ok() {
                health.hook_failure = None;
            }
        });
        let took = started.elapsed();
        let label = outcome.as_ref().map_or_else(HookError::label, |_| "ok");
        self.metrics.output_hooks.get_or_create(&ByResult { outcome: label }).inc();
        match outcome {
            Ok(output) => {
                progress.hook_at = None;
                if let Err(error) = self.on_disk(|directory| directory.record_hook_done()).await {
                    let reason = error.to_string();
                    tracing::warn!(
                        reason,
                        "output hook run not recorded; the hook runs again at the next start"
                    );
                }
                if progress.hooks.reset() {
                    tracing::info!(took_ms = millis(took), "output hook working again");
                }
                tracing::debug!(took_ms = millis(took), output, "output hook finished");
            }
            Err(error) => {
                let retry_in = progress.hooks.add();
                progress.hook_at = Some(Instant::now() + retry_in);
                let (reason, output) = (error.to_string(), error.output());
                self.report_hook_failure(&error, retry_in);
                let (took_ms, retry_in_ms) = (millis(took), millis(retry_in));
                if progress.hooks.log.is_new(&reason) {
                    tracing::warn!(reason, output, took_ms, retry_in_ms, "output hook failed");
                } else {
                    tracing::debug!(reason, output, took_ms, retry_in_ms, "output hook failed again");
                }
            }
        }
    }

    /// Reports that nothing newer can be written.
    fn report_failure(&self, reason: String, retry_in: Option<Duration>) {
        let now = self.clock.now();
        let next_try = retry_in.map(|delay| now + delay);
        self.update_health(|health| {
            health.failure = Some(Failing::after(health.failure.as_ref(), reason, now, next_try));
        });
    }

    fn report_hook_failure(&self, error: &HookError, retry_in: Duration) {
        let now = self.clock.now();
        let (reason, last_lines) = (error.to_string(), error.last_lines().to_vec());
        self.update_health(|health| {
            let before = health.hook_failure.as_ref().map(|before| &before.failing);
            let failing = Failing::after(before, reason, now, Some(now + retry_in));
            health.hook_failure = Some(HookFailing { failing, last_lines });
        });
    }

    /// The one place where the output's health is written, for readiness and status.
    fn update_health(&self, change: impl FnOnce(&mut OutputHealth)) {
        self.components.report_output(change);
    }

    /// Does `work` on a thread where a slow disk delays nothing else.
    async fn on_disk<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut OutputDirectory) -> T + Send + 'static,
    ) -> T {
        let directory = Arc::clone(&self.directory);
        let done = self.disk.spawn(&self.settings.directory, move || {
            work(&mut directory.lock().unwrap_or_else(PoisonError::into_inner))
        });
        let report_hang = || {
            let directory = self.settings.directory.display();
            let after_ms = millis(PATIENCE);
            tracing::warn!(%directory, after_ms, "output directory not responding; is its disk or file server reachable?");
            self.update_health(|health| health.is_hanging = true);
        };
        let done = or_report(done, report_hang).await;
        self.update_health(|health| health.is_hanging = false);
        match done.map_err(tokio::task::JoinError::try_into_panic) {
            Ok(done) => done,
            Err(Ok(panic)) => std::panic::resume_unwind(panic),
            // The runtime is shutting down, and this task with it.
            Err(Err(_)) => std::future::pending().await,
        }
    }
}

/// Waits for `work`, and calls `report` once if that takes longer than [`PATIENCE`].
async fn or_report<T>(work: impl Future<Output = T>, report: impl FnOnce()) -> T {
    let mut work = std::pin::pin!(work);
    tokio::select! {
        done = work.as_mut() => return done,
        () = tokio::time::sleep(PATIENCE) => report(),
    }
    work.await
}

/// Returns when the written files may have changed. Does not touch the disk, which may hang.
async fn files_changed(watch: Option<&Watch>) {
    match watch {
        Some(watch) if !watch.polls() => drop(watch.changed().await),
        _ => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests;
