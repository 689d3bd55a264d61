//! Writes one directory, and keeps it as it was written.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::{OwnedRwLockReadGuard, RwLock, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::board::Board;
use super::directory::{Condition, GRACE, OutputDirectory, OutputDirectoryError, Written};
use super::format::DirectorySettings;
use super::progress::{Progress, is_due};
use super::{Set, Target};
use crate::base::clock::{Clock, millis, rfc3339};
use crate::base::limits;
use crate::fs::disk::{Disk, Unresponsive};
use crate::fs::watch::{Watch, Watcher};
use crate::metrics::{ByResult, Metrics};
use crate::pki::keystore::{KeystoreError, NotAPassword, Password};
use crate::store::health::{Components, DirectoryHealth, Failing};

/// How often the files are inspected where inotify is unavailable.
const POLL: Duration = Duration::from_secs(60);
/// A disk that takes longer is reported, and the hook no longer waits for it.
const PATIENCE: Duration = Duration::from_secs(10);

/// Writes the newest target into one directory.
#[derive(Debug)]
pub struct DirectoryWriter {
    pub(super) settings: Arc<DirectorySettings>,
    /// Its line of the board.
    index: usize,
    directory: Arc<Mutex<OutputDirectory>>,
    /// Watches the written files. None while it is being armed.
    watch: Option<Watch>,
    target: watch::Receiver<Target>,
    board: Board,
    /// Held exclusively while the hook runs.
    gate: Arc<RwLock<()>>,
    shared: Context,
}

/// What all directories share.
#[derive(Clone, Debug)]
pub(super) struct Context {
    pub(super) disk: Disk,
    pub(super) clock: Clock,
    pub(super) metrics: Metrics,
    pub(super) components: Components,
    pub(super) has_hook: bool,
}

/// Why a set was not written.
#[derive(Debug, thiserror::Error)]
enum WriteError {
    #[error(transparent)]
    Directory(#[from] OutputDirectoryError),
    #[error("reading the password file {path} failed: {source}; correct password-file, or leave it out")]
    PasswordFile { path: PathBuf, source: std::io::Error },
    #[error("the password file {path} can't be used: {source}")]
    Password { path: PathBuf, source: NotAPassword },
    #[error(transparent)]
    Unresponsive(#[from] Unresponsive),
    #[error("writing the keystores of {directory} failed: {source}")]
    Keystore { directory: PathBuf, source: KeystoreError },
}

impl DirectoryWriter {
    pub(super) fn new(
        settings: DirectorySettings,
        index: usize,
        watcher: &Watcher,
        target: watch::Receiver<Target>,
        board: Board,
        gate: Arc<RwLock<()>>,
        shared: Context,
    ) -> Self {
        let directory = OutputDirectory::new(settings.layout());
        let watch = Some(watcher.watch(directory.names()));
        let directory = Arc::new(Mutex::new(directory));
        Self { settings: Arc::new(settings), index, directory, watch, target, board, gate, shared }
    }

    fn path(&self) -> &Path {
        &self.settings.directory
    }

    /// Writes every target until `stop`. A write that is under way is finished.
    pub async fn run(mut self, stop: CancellationToken) {
        let mut progress = Progress::default();
        let mut changes = self.board.changes();
        if let Err(error) = self.on_disk(None, |directory| directory.check()).await {
            // It may take a while until there is something to write, and the problem should be known before.
            let reason = error.to_string();
            progress.writes.log.is_new(&reason);
            tracing::warn!(reason, "output directory not writable; retrying when there are files to write");
            self.report_failure(reason, None);
        }
        while !stop.is_cancelled() {
            progress.failed.take_if(|(_, retry_at)| is_due(*retry_at));
            let target = self.target.borrow_and_update().clone();
            if let Some(set) = target {
                if progress.needs_write(&set) && set.not_after() > self.shared.clock.now() {
                    self.write(&set, &mut progress).await;
                }
                self.board.settle(self.index, &set.versions);
            }
            if progress.inspect_at.is_some_and(is_due) {
                self.inspect(&mut progress).await;
                if progress.written.is_none() {
                    // Repair the files before anything else.
                    continue;
                }
            }
            if progress.sweep_at.is_some_and(is_due) {
                self.sweep(&mut progress).await;
            }
            self.record_hook(&mut progress).await;
            tokio::select! {
                Ok(()) = self.target.changed() => {}
                Ok(()) = changes.changed() => {}
                () = progress.due() => {}
                () = files_changed(self.watch.as_ref()), if progress.inspect_at.is_none() => progress.files_changed(),
                () = stop.cancelled() => {}
            }
        }
        // A hook that is running is finished.
        while self.target.changed().await.is_ok() {}
        self.record_hook(&mut progress).await;
    }

    async fn write(&self, set: &Arc<Set>, progress: &mut Progress) {
        // Nothing is swapped while the hook runs: if it reads a file twice, it sees the same content.
        let gate = Arc::clone(&self.gate).read_owned().await;
        let outcome = match self.password().await {
            Ok(password) => {
                let (settings, set) = (Arc::clone(&self.settings), Arc::clone(set));
                let work = move |directory: &mut OutputDirectory| {
                    let is_replaced = directory.is_replaced();
                    (is_replaced, write(directory, &settings, &set, &password))
                };
                let (is_replaced, outcome) = self.on_disk(Some(gate), work).await;
                if is_replaced {
                    self.log_conflict(progress);
                }
                outcome
            }
            Err(error) => Err(error),
        };
        progress.sweep_at = Some(Instant::now() + GRACE);
        match outcome {
            Ok(written) => self.write_succeeded(set, written, progress).await,
            Err(error) => self.write_failed(set, &error, progress),
        }
    }

    /// The password of keystores.
    async fn password(&self) -> Result<Password, WriteError> {
        let Some(path) = self.settings.format.password_file() else { return Ok(Password::default()) };
        let content = self.shared.disk.read(path, limits::PASSWORD_FILE_BYTES).await?;
        let content = content.map_err(|source| WriteError::PasswordFile { path: path.clone(), source })?;
        Password::from_file(&content).map_err(|source| WriteError::Password { path: path.clone(), source })
    }

    async fn write_succeeded(&self, set: &Set, written: Written, progress: &mut Progress) {
        let now = Instant::now();
        let directory = self.path().display();
        if progress.writes.reset() {
            tracing::info!(%directory, "output directory writable again");
        }
        progress.failed = None;
        progress.written = Some(set.versions.clone());
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
                if self.shared.has_hook
                    && !self.board.awaits_hook(self.index)
                    && !self.on_disk(None, |directory| directory.hook_is_done()).await
                {
                    self.request_hook(progress);
                }
            }
            Written::Swapped => {
                self.shared.metrics.output_writes.get_or_create(&ByResult { outcome: "ok" }).inc();
                tracing::info!(%directory, what, %not_after, "output files written");
                if self.shared.has_hook {
                    self.request_hook(progress);
                }
            }
        }
    }

    fn write_failed(&self, set: &Set, error: &WriteError, progress: &mut Progress) {
        self.shared.metrics.output_writes.get_or_create(&ByResult { outcome: "failed" }).inc();
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
        progress.failed = Some((set.versions.clone(), Instant::now() + retry_in));
    }

    fn request_hook(&self, progress: &mut Progress) {
        progress.awaits_hook = true;
        self.board.request_hook(self.index);
    }

    /// Records in the directory that the hook has succeeded, once it has.
    async fn record_hook(&self, progress: &mut Progress) {
        if !progress.awaits_hook || self.board.awaits_hook(self.index) {
            return;
        }
        progress.awaits_hook = false;
        if let Err(error) = self.on_disk(None, |directory| directory.record_hook_done()).await {
            let reason = error.to_string();
            tracing::warn!(reason, "output hook run not recorded; the hook runs again at the next start");
        }
    }

    /// Removes old generations.
    async fn sweep(&self, progress: &mut Progress) {
        // The hook may be reading one.
        let gate = Arc::clone(&self.gate).read_owned().await;
        let outcome = self.on_disk(Some(gate), |directory| directory.sweep()).await;
        let now = Instant::now();
        match outcome {
            Ok(is_some_left) => {
                progress.sweep_at = is_some_left.then(|| now + GRACE);
                if progress.sweeps.reset() {
                    let directory = self.path().display();
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
            .on_disk(None, move |directory| {
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
                let directory = self.path().display();
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
            let (directory, option) = (self.path().display(), self.settings.option);
            tracing::warn!(%directory, "another agent writes to the output directory; give each agent an {option} of its own");
        }
    }

    /// Reports that nothing newer can be written.
    fn report_failure(&self, reason: String, retry_in: Option<Duration>) {
        let now = self.shared.clock.now();
        let next_try = retry_in.map(|delay| now + delay);
        self.update_health(|health| {
            health.failure = Some(Failing::after(health.failure.as_ref(), reason, now, next_try));
        });
    }

    /// The one place where the directory's health is written, for readiness and status.
    fn update_health(&self, change: impl FnOnce(&mut DirectoryHealth)) {
        self.shared.components.report_output(|output| change(output.directory(self.path())));
    }

    /// Does `work` on a thread where a slow disk delays nothing else. `gate` is held until it is done, or is known to hang.
    async fn on_disk<T: Send + 'static>(
        &self,
        gate: Option<OwnedRwLockReadGuard<()>>,
        work: impl FnOnce(&mut OutputDirectory) -> T + Send + 'static,
    ) -> T {
        let directory = Arc::clone(&self.directory);
        let done = self
            .shared
            .disk
            .spawn(self.path(), move || work(&mut directory.lock().unwrap_or_else(PoisonError::into_inner)));
        let report_hang = || {
            let (directory, after_ms) = (self.path().display(), millis(PATIENCE));
            tracing::warn!(%directory, after_ms, "output directory not responding; is its disk or file server reachable?");
            self.set_hanging(true);
            drop(gate);
        };
        let done = or_report(done, report_hang).await;
        self.set_hanging(false);
        match done.map_err(tokio::task::JoinError::try_into_panic) {
            Ok(done) => done,
            Err(Ok(panic)) => std::panic::resume_unwind(panic),
            // The runtime is shutting down, and this task with it.
            Err(Err(_)) => std::future::pending().await,
        }
    }

    fn set_hanging(&self, is_hanging: bool) {
        self.update_health(|health| health.is_hanging = is_hanging);
        self.board.set_hanging(self.index, is_hanging);
    }
}

fn write(
    directory: &mut OutputDirectory,
    settings: &DirectorySettings,
    set: &Set,
    password: &Password,
) -> Result<Written, WriteError> {
    let files = settings.files(set, password);
    let files =
        files.map_err(|source| WriteError::Keystore { directory: settings.directory.clone(), source })?;
    Ok(directory.write(&files)?)
}

/// Waits for `work`, and calls `report` once if that takes longer than [`PATIENCE`].
pub(super) async fn or_report<T>(work: impl Future<Output = T>, report: impl FnOnce()) -> T {
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
