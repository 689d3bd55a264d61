//! Files for other programs: what the cache holds, written as one generation, and a command that is told of it.
//!
//! A subscriber of the cache like a stream: it follows the newest state, and needs nobody to be connected.

pub mod folder;
pub mod hook;

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use zeroize::Zeroizing;

use self::folder::{File, Folder, FolderError, GRACE, Look, Written};
pub use self::hook::Hook;
use crate::base::backoff::Backoff;
use crate::base::clock::{Clock, rfc3339};
use crate::base::failure_log::FailureLog;
use crate::fs::generation::{CHAIN_FILE, KEY_FILE, ROOT_FILE};
use crate::fs::watch::{Watch, Watcher};
use crate::metrics::{ByResult, Metrics};
use crate::pki::pem;
use crate::secret::{Secret, SecretName, Version};
use crate::store::health::Output as State;
use crate::store::{Cache, Entry, Good, Key, Workload};

/// Delays after a write or a hook that failed, and after something was mended.
const BACKOFF: Backoff = Backoff { base: Duration::from_secs(1), cap: Duration::from_secs(60) };

/// How often the folder is looked at where the kernel does not tell of changes.
const POLL: Duration = Duration::from_secs(60);
/// A disk that takes longer is told of.
const PATIENCE: Duration = Duration::from_secs(10);
/// Damage after such a time has nothing to do with the one before.
const CALM: Duration = Duration::from_secs(600);

/// What is written, and where.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The folder; it is made if there is none.
    pub folder: PathBuf,
    /// Permissions of the key.
    pub key_mode: u32,
    /// Permissions of the certificates.
    pub cert_mode: u32,
    /// Run after each swap.
    pub hook: Option<Hook>,
}

/// Writes a workload's secrets into a folder, and follows every change.
#[derive(Debug)]
pub struct Output {
    settings: Settings,
    folder: Arc<Mutex<Folder>>,
    /// Follows what was written. Elsewhere while it is armed.
    watch: Option<Watch>,
    pair: watch::Receiver<Entry>,
    roots: watch::Receiver<Entry>,
    clock: Clock,
    metrics: Metrics,
}

/// A key pair and roots that are valid together.
#[derive(Clone, Debug)]
struct Set {
    pair: Arc<Good>,
    roots: Arc<Good>,
}

impl Set {
    /// What tells it from another one: of what is written, so that a change of CRLs is none.
    fn versions(&self) -> [Version; 2] {
        let roots = match &self.roots.secret {
            Secret::TrustBundle(bundle) => Version::of(&pem::of_certificates(bundle.roots())),
            Secret::KeyPair(_) => self.roots.resource.version.clone(),
        };
        [self.pair.resource.version.clone(), roots]
    }

    fn not_after(&self) -> SystemTime {
        self.pair.secret.not_after().min(self.roots.secret.not_after())
    }
}

/// What is done already, and what is to be done when.
#[derive(Debug, Default)]
struct Progress {
    /// What the folder holds for certain.
    written: Option<[Version; 2]>,
    /// What could not be written last, and when it is tried again.
    refused: Option<([Version; 2], Instant)>,
    write_failures: u32,
    write_repeats: FailureLog,
    /// When the hook is to run.
    hook: Option<Instant>,
    hook_failures: u32,
    hook_repeats: FailureLog,
    /// When old generations are to be removed.
    sweep: Option<Instant>,
    sweep_failures: u32,
    sweep_repeats: FailureLog,
    /// When to look at what was written: somebody may have done something to it.
    look: Option<Instant>,
    /// How often it was mended in a row, and when last.
    mends: u32,
    mended: Option<Instant>,
    /// It was told that somebody else writes there.
    is_shared: bool,
}

impl Output {
    /// Writes what `cache` holds of `workload`.
    pub fn new(
        settings: Settings,
        cache: &Cache,
        workload: Workload,
        watcher: &Watcher,
        clock: Clock,
        metrics: Metrics,
    ) -> Self {
        let follow = |name| cache.follow(Key { workload, name });
        let folder = Folder::new(settings.folder.clone());
        let watch = Some(watcher.watch(folder.names()));
        let folder = Arc::new(Mutex::new(folder));
        let (pair, roots) = (follow(SecretName::Workload), follow(SecretName::Roots));
        Self { settings, folder, watch, pair, roots, clock, metrics }
    }

    /// Follows every change until `stop`. A swap and a hook that are under way come to their end.
    pub async fn run(mut self, stop: CancellationToken) {
        let mut progress = Progress::default();
        if let Err(error) = self.on_disk(Folder::check).await {
            // There may be nothing to write for a while, and a person is to know already.
            let reason = error.to_string();
            progress.write_repeats.is_new(&reason);
            tracing::warn!(reason, "files can't be written; it is tried again as soon as there are some");
            self.note(|state| state.failure = Some(reason));
        }
        while !stop.is_cancelled() {
            progress.refused.take_if(|(_, again)| is_over(*again));
            if let Some(set) = self.wanted()
                && progress.may_write(&set)
            {
                self.write(set, &mut progress).await;
            }
            if progress.look.is_some_and(is_over) {
                self.look(&mut progress).await;
                if progress.written.is_none() {
                    // It is mended before anybody is told of it.
                    continue;
                }
            }
            // Nothing is swapped while it runs: what it reads twice is the same.
            if progress.hook.is_some_and(is_over) {
                self.run_hook(&mut progress).await;
            }
            if progress.sweep.is_some_and(is_over) {
                self.sweep(&mut progress).await;
            }
            tokio::select! {
                Ok(()) = self.pair.changed() => {}
                Ok(()) = self.roots.changed() => {}
                () = progress.next() => {}
                () = disturbed(self.watch.as_ref()), if progress.look.is_none() => progress.disturbed(),
                () = stop.cancelled() => {}
            }
        }
    }

    /// What is to be written now: nothing as long as one of both is missing or has expired.
    fn wanted(&mut self) -> Option<Set> {
        let now = self.clock.now();
        // Sources publish both without a pause in between: here they are never halfway.
        let [pair, roots] = [&mut self.pair, &mut self.roots].map(|entry| {
            let entry = entry.borrow_and_update();
            entry.good.clone().filter(|_| entry.valid_at(now).is_ok())
        });
        Some(Set { pair: pair?, roots: roots? })
    }

    async fn write(&self, set: Set, progress: &mut Progress) {
        let (Secret::KeyPair(pair), Secret::TrustBundle(roots)) = (&set.pair.secret, &set.roots.secret)
        else {
            return;
        };
        let file = |name, mode, content| File { name, mode, content };
        let cert_mode = self.settings.cert_mode;
        let files = [
            file(KEY_FILE, self.settings.key_mode, pair.key().to_pem()),
            file(CHAIN_FILE, cert_mode, Zeroizing::new(pem::of_certificates(pair.chain()))),
            file(ROOT_FILE, cert_mode, Zeroizing::new(pem::of_certificates(roots.roots()))),
        ];
        let (is_taken, outcome) = self.on_disk(move |folder| (folder.is_taken(), folder.write(&files))).await;
        self.note_sharing(progress, is_taken);
        let now = Instant::now();
        progress.sweep = Some(now + GRACE);
        let written = match outcome {
            Ok(written) => written,
            Err(error) => {
                let delay = self.refused(progress, &error);
                progress.refused = Some((set.versions(), now + delay));
                return;
            }
        };
        let folder = self.settings.folder.display();
        if progress.write_repeats.recovered() {
            tracing::info!(%folder, "the output folder can be written again");
        }
        progress.write_failures = 0;
        progress.refused = None;
        progress.written = Some(set.versions());
        self.note(|state| {
            state.failure = None;
            state.not_after = Some(set.not_after());
        });
        progress.look = Some(if progress.mends == 0 { now } else { now + progress.pause() });
        let what = set.pair.secret.to_string();
        let not_after = rfc3339(set.pair.secret.not_after());
        match written {
            Written::Same => {
                tracing::info!(%folder, what, %not_after, "the files are there already");
                // Whoever wrote them may have ended before the hook did.
                if self.settings.hook.is_some()
                    && progress.hook.is_none()
                    && !self.on_disk(|folder| folder.is_told()).await
                {
                    progress.hook = Some(now);
                }
            }
            Written::Swapped => {
                self.metrics.output_writes.get_or_create(&ByResult { outcome: "ok" }).inc();
                tracing::info!(%folder, what, %not_after, "files written");
                progress.hook = self.settings.hook.is_some().then_some(now);
                progress.hook_failures = 0;
            }
        }
    }

    async fn sweep(&self, progress: &mut Progress) {
        let swept = self.on_disk(Folder::sweep).await;
        let now = Instant::now();
        let error = match swept {
            Ok(is_some_left) => {
                progress.sweep = is_some_left.then(|| now + GRACE);
                progress.sweep_failures = 0;
                if progress.sweep_repeats.recovered() {
                    let folder = self.settings.folder.display();
                    tracing::info!(%folder, "old generations are removed again");
                }
                return;
            }
            Err(error) => error,
        };
        progress.sweep_failures = progress.sweep_failures.saturating_add(1);
        let retry_in = BACKOFF.delay(progress.sweep_failures, fastrand::f64());
        progress.sweep = Some(now + retry_in);
        let reason = error.to_string();
        if progress.sweep_repeats.is_new(&reason) {
            tracing::warn!(reason, ?retry_in, "an old private key stays on the disk");
        } else {
            tracing::debug!(reason, ?retry_in, "an old private key still stays on the disk");
        }
    }

    /// Looks whether what was written is still there; if not, it is written again. Changes from here on are noticed.
    async fn look(&mut self, progress: &mut Progress) {
        progress.look = None;
        if progress.written.is_none() {
            return;
        }
        let watch = self.watch.take();
        let (look, watch) = self
            .on_disk(move |folder| {
                let armed = watch.map(|mut watch| {
                    watch.arm();
                    watch
                });
                (folder.look(), armed)
            })
            .await;
        if watch.as_ref().is_some_and(Watch::polls) {
            progress.look = Some(Instant::now() + POLL);
        }
        self.watch = watch;
        // Of two agents on one folder both would mend for ever what the other has written.
        self.note_sharing(progress, look == Look::Taken);
        if let Look::Damaged(found) = look {
            let folder = self.settings.folder.display();
            tracing::warn!(%folder, found, "somebody has damaged what was written; it is written again");
            self.note(|state| (state.not_after, state.failure) = (None, Some(found)));
            progress.written = None;
            progress.look = None;
            progress.mends = progress.mends.saturating_add(1);
            progress.mended = Some(Instant::now());
        }
    }

    fn note_sharing(&self, progress: &mut Progress, is_shared: bool) {
        if is_shared && !std::mem::replace(&mut progress.is_shared, true) {
            let folder = self.settings.folder.display();
            tracing::warn!(%folder, "somebody else writes here; give each agent an --output-dir of its own");
        }
    }

    /// Tells of a failure, and says how long to wait.
    fn refused(&self, progress: &mut Progress, error: &FolderError) -> Duration {
        self.metrics.output_writes.get_or_create(&ByResult { outcome: "failed" }).inc();
        progress.write_failures = progress.write_failures.saturating_add(1);
        let retry_in = BACKOFF.delay(progress.write_failures, fastrand::f64());
        let reason = error.to_string();
        if progress.write_repeats.is_new(&reason) {
            tracing::warn!(reason, ?retry_in, "files can't be written; what lies there stays as it is");
        } else {
            tracing::debug!(reason, ?retry_in, "files still can't be written");
        }
        self.note(|state| state.failure = Some(reason));
        retry_in
    }

    async fn run_hook(&self, progress: &mut Progress) {
        let Some(hook) = &self.settings.hook else { return };
        let started = Instant::now();
        self.note(|state| state.is_hook_running = true);
        let outcome = hook.run(&self.settings.folder).await;
        self.note(|state| (state.is_hook_running, state.is_hook_failing) = (false, outcome.is_err()));
        let took = started.elapsed();
        let label = outcome.as_ref().map_or_else(|error| error.label(), |_| "ok");
        self.metrics.output_hooks.get_or_create(&ByResult { outcome: label }).inc();
        match outcome {
            Ok(output) => {
                progress.hook = None;
                progress.hook_failures = 0;
                if let Err(error) = self.on_disk(Folder::note_told).await {
                    let reason = error.to_string();
                    tracing::warn!(
                        reason,
                        "that the hook was run can't be noted; the next start runs it again"
                    );
                }
                if progress.hook_repeats.recovered() {
                    tracing::info!(?took, "the output hook works again");
                }
                tracing::debug!(?took, output, "the output hook was run");
            }
            Err(error) => {
                progress.hook_failures = progress.hook_failures.saturating_add(1);
                let retry_in = BACKOFF.delay(progress.hook_failures, fastrand::f64());
                progress.hook = Some(Instant::now() + retry_in);
                let (reason, output) = (error.to_string(), error.output());
                if progress.hook_repeats.is_new(&reason) {
                    tracing::warn!(reason, output, ?took, ?retry_in, "the output hook failed");
                } else {
                    tracing::debug!(reason, output, ?took, ?retry_in, "the output hook failed again");
                }
            }
        }
    }

    /// For readiness and metrics.
    fn note(&self, change: impl FnOnce(&mut State)) {
        self.metrics.output.send_modify(|state| change(state.get_or_insert_default()));
    }

    /// Does `work` where a slow disk stops nobody else.
    async fn on_disk<T: Send + 'static>(&self, work: impl FnOnce(&mut Folder) -> T + Send + 'static) -> T {
        let folder = Arc::clone(&self.folder);
        let done = tokio::task::spawn_blocking(move || {
            work(&mut folder.lock().unwrap_or_else(PoisonError::into_inner))
        });
        let folder = self.settings.folder.display();
        let late = || {
            tracing::warn!("writing {folder} has taken {PATIENCE:?}; is the disk there?");
            self.note(|state| state.is_hanging = true);
        };
        let done = told_if_late(done, late).await;
        self.note(|state| state.is_hanging = false);
        match done.map_err(tokio::task::JoinError::try_into_panic) {
            Ok(done) => done,
            Err(Ok(panic)) => std::panic::resume_unwind(panic),
            // The runtime is going away, and this with it.
            Err(Err(_)) => std::future::pending().await,
        }
    }
}

impl Progress {
    /// Whether `set` is news: not written yet, nor refused a moment ago.
    fn may_write(&self, set: &Set) -> bool {
        let versions = set.versions();
        self.written.as_ref() != Some(&versions)
            && self.refused.as_ref().is_none_or(|(refused, _)| *refused != versions)
    }

    /// Something may have happened to what was written. Whoever is at it is let finish.
    fn disturbed(&mut self) {
        if self.mended.is_some_and(|last| last.elapsed() > CALM) {
            self.mends = 0;
        }
        self.look = Some(Instant::now() + self.pause());
    }

    /// The longer, the more often somebody undoes what is mended.
    fn pause(&self) -> Duration {
        BACKOFF.delay(self.mends.saturating_add(1), fastrand::f64())
    }

    /// Returns when something is to be done that no change tells of.
    async fn next(&self) {
        let again = self.refused.as_ref().map(|(_, again)| *again);
        match [again, self.hook, self.sweep, self.look].into_iter().flatten().min() {
            Some(moment) => tokio::time::sleep(moment.saturating_duration_since(Instant::now())).await,
            None => std::future::pending().await,
        }
    }
}

/// Waits for `work` to end, and calls `late` when that takes long.
async fn told_if_late<T>(work: impl Future<Output = T>, late: impl FnOnce()) -> T {
    let mut work = std::pin::pin!(work);
    tokio::select! {
        done = work.as_mut() => return done,
        () = tokio::time::sleep(PATIENCE) => late(),
    }
    work.await
}

/// Returns when something may have happened to what was written. Nothing here touches the disk, which may hang.
async fn disturbed(watch: Option<&Watch>) {
    match watch {
        Some(watch) if !watch.polls() => watch.changed().await,
        _ => std::future::pending().await,
    }
}

fn is_over(moment: Instant) -> bool {
    moment <= Instant::now()
}

#[cfg(test)]
mod tests;
