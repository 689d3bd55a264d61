//! The volumes of the agent, and what the kubelet's calls do with them.
//!
//! The kubelet decides by codes: after CANCELLED, DEADLINE_EXCEEDED, UNAVAILABLE, RESOURCE_EXHAUSTED and ABORTED it removes the
//! volume some time, after any other one never. So whatever ends with another code leaves nothing behind.

mod turn;

use std::collections::HashMap;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::{Code, Status};

use super::directory::{Removed, remove};
use super::identifiers::VolumeId;
use super::publication::Request;
use super::record::Record;
use super::target::Target;
use super::{DriverSettings, Runner};
use crate::base::failure_log::FailureLog;
use crate::base::limits;
use crate::fs::disk::{Disk, Unresponsive};
use crate::metrics::CsiCounts;

/// How long the first call for a volume waits for its certificate: after that `kubectl describe pod` shows why there is none.
const FIRST_WAIT: Duration = Duration::from_secs(10);
/// How long later calls wait. The kubelet gives each two minutes.
const LATER_WAIT: Duration = Duration::from_secs(100);
/// How long the end of a volume waits for another call about it, and for the end of its workload.
const PATIENCE: Duration = Duration::from_secs(10);

/// What the log says of a volume of an agent before that is not served yet.
pub(super) const NOT_RESTORED: &str = "volume not restored; it is served once the kubelet comes by";

/// All volumes. Clones are the same.
#[derive(Clone, Debug)]
pub(super) struct Volumes(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    settings: DriverSettings,
    runner: Arc<dyn Runner>,
    disk: Disk,
    counts: CsiCounts,
    slots: Mutex<HashMap<VolumeId, Arc<Slot>>>,
    /// What has begun is not left half done when the kubelet gives its call up.
    tasks: TaskTracker,
    /// Cancelled when the agent stops.
    closing: CancellationToken,
}

/// A volume: one call at a time.
#[derive(Debug)]
struct Slot {
    turn: Arc<Semaphore>,
    /// Cancelled when the kubelet removes the volume: the call that waits now ends.
    removed: Mutex<CancellationToken>,
    state: Mutex<State>,
    failures: Mutex<FailureLog>,
}

#[derive(Debug, Default)]
struct State {
    /// None before its directory is made.
    record: Option<Arc<Record>>,
    /// The workload was started.
    is_running: bool,
    /// The kubelet was answered that the volume is there: from now on it is never taken away but by the kubelet.
    is_published: bool,
    is_recorded: bool,
    /// How many calls have waited for the certificate.
    waits: u32,
}

/// The right to work on a volume. Dropping it lets the next call in, and forgets a volume of which there is nothing.
#[derive(Debug)]
pub(super) struct Turn {
    volumes: Volumes,
    id: VolumeId,
    slot: Arc<Slot>,
    permit: Option<OwnedSemaphorePermit>,
}

impl Drop for Turn {
    fn drop(&mut self) {
        drop(self.permit.take());
        let mut slots = self.volumes.slots();
        let is_empty = self.slot.state().record.is_none();
        // Those that have it besides this turn: the map, and no other call.
        if is_empty && Arc::strong_count(&self.slot) <= 2 {
            slots.remove(&self.id);
            self.volumes.count_slots(&slots);
        }
    }
}

impl Slot {
    fn new() -> Self {
        let turn = Arc::new(Semaphore::new(1));
        Self { turn, removed: Mutex::default(), state: Mutex::default(), failures: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the kubelet was answered to be there.
    fn published(&self) -> Option<Arc<Record>> {
        let state = self.state();
        state.record.clone().filter(|_| state.is_published)
    }

    fn removed(&self) -> MutexGuard<'_, CancellationToken> {
        self.removed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Logs a failure, once until there is another one. `what` says what has failed.
    fn report(&self, id: &VolumeId, what: &'static str, reason: &str) {
        let mut failures = self.failures.lock().unwrap_or_else(PoisonError::into_inner);
        if failures.is_new(reason) {
            tracing::warn!(volume = %id, reason, "{what}");
        } else {
            tracing::debug!(volume = %id, reason, "{what}");
        }
    }

    /// Logs a success, at a higher level after a failure.
    fn report_success(&self, record: &Record) {
        let (volume, pod) = (&record.id, &record.pod);
        if self.failures.lock().unwrap_or_else(PoisonError::into_inner).recovered() {
            tracing::info!(%volume, %pod, "volume published");
        } else {
            tracing::debug!(%volume, %pod, "volume published");
        }
    }
}

impl Volumes {
    pub(super) fn new(
        settings: DriverSettings,
        runner: Arc<dyn Runner>,
        disk: Disk,
        counts: CsiCounts,
    ) -> Self {
        let (slots, tasks, closing) = (Mutex::default(), TaskTracker::new(), CancellationToken::new());
        Self(Arc::new(Inner { settings, runner, disk, counts, slots, tasks, closing }))
    }

    pub(super) fn settings(&self) -> &DriverSettings {
        &self.0.settings
    }

    pub(super) fn counts(&self) -> &CsiCounts {
        &self.0.counts
    }

    pub(super) fn disk(&self) -> &Disk {
        &self.0.disk
    }

    pub(super) fn runner(&self) -> &dyn Runner {
        &*self.0.runner
    }

    /// How many volumes there are.
    pub(super) fn count(&self) -> usize {
        self.slots().len()
    }

    /// Ends the calls that wait, and returns when what has begun is done. The volumes stay as they are.
    pub(super) async fn close(&self) {
        self.0.closing.cancel();
        self.0.tasks.close();
        self.0.tasks.wait().await;
    }

    fn slots(&self) -> MutexGuard<'_, HashMap<VolumeId, Arc<Slot>>> {
        self.0.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn count_slots(&self, slots: &HashMap<VolumeId, Arc<Slot>>) {
        self.0.counts.volumes.set(i64::try_from(slots.len()).unwrap_or(i64::MAX));
    }

    fn slot(&self, id: &VolumeId, limit: usize) -> Result<Arc<Slot>, Status> {
        let mut slots = self.slots();
        if let Some(slot) = slots.get(id) {
            return Ok(Arc::clone(slot));
        }
        if slots.len() >= limit {
            return Err(Status::resource_exhausted(format!(
                "the agent serves {limit} volumes, which is its limit"
            )));
        }
        let slot = Arc::new(Slot::new());
        slots.insert(id.clone(), Arc::clone(&slot));
        self.count_slots(&slots);
        Ok(slot)
    }

    #[cfg(test)]
    pub(super) fn hold(&self, id: &VolumeId) {
        self.slot(id, usize::MAX).unwrap();
    }

    /// The turn of a call that does not wait for others.
    fn turn(&self, id: &VolumeId) -> Result<(Turn, CancellationToken), Status> {
        let slot = self.slot(id, limits::VOLUMES)?;
        let permit = Arc::clone(&slot.turn).try_acquire_owned();
        let permit = permit.map_err(|_| Status::aborted("another call about this volume is under way"))?;
        let removed = CancellationToken::new();
        *slot.removed() = removed.clone();
        Ok((Turn { volumes: self.clone(), id: id.clone(), slot, permit: Some(permit) }, removed))
    }

    /// The turn of a call that ends the one before.
    async fn last_turn(&self, id: &VolumeId) -> Result<Turn, Status> {
        let slot = self.slot(id, usize::MAX)?;
        let mut turn = Turn { volumes: self.clone(), id: id.clone(), slot, permit: None };
        turn.slot.removed().cancel();
        let permit = timeout(PATIENCE, Arc::clone(&turn.slot.turn).acquire_owned()).await;
        let permit = permit.ok().and_then(Result::ok);
        turn.permit =
            Some(permit.ok_or_else(|| Status::aborted("another call about this volume is under way"))?);
        Ok(turn)
    }

    /// Runs `work` to its end, also if its caller no longer waits.
    async fn finish<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Result<T, Status> {
        let done = self.0.tasks.spawn(work).await;
        done.map_err(|_| Status::unavailable("the agent is stopping"))
    }

    /// The volume that the kubelet asks for is there when this returns, and has a certificate unless its Pod does not wait.
    pub(super) async fn publish(&self, request: Request) -> Result<(), Status> {
        let id = request.id()?;
        let (turn, removed) = self.turn(&id)?;
        if let Some(record) = turn.slot.published() {
            return self.finish(async move { turn.republish(&record, &request).await }).await?;
        }
        let (turn, begun) = self.finish(async move { turn.begin(&request).await }).await?;
        let waited = match begun {
            Ok(record) => {
                let since = Instant::now();
                let waited = turn.wait(&record, &removed).await;
                self.0.counts.publish_wait.observe(since.elapsed().as_secs_f64());
                waited.map(|()| record)
            }
            Err(status) => Err(status),
        };
        match waited {
            Ok(record) => {
                turn.record(&record).await;
                turn.slot.state().is_published = true;
                turn.slot.report_success(&record);
                Ok(())
            }
            Err(status) => {
                turn.slot.report(&id, "volume not published", status.message());
                Err(status)
            }
        }
    }

    /// Nothing of the volume is left when this returns, whether it was there or not.
    pub(super) async fn unpublish(&self, id: &str, target: &str) -> Result<(), Status> {
        let id: VolumeId = id.parse().map_err(Status::invalid_argument)?;
        if target.is_empty() {
            return Err(Status::invalid_argument("target_path is missing"));
        }
        let parsed = Target::parse(target, &self.settings().kubelet_dir);
        if let Err(reason) = &parsed {
            tracing::warn!(volume = %id, reason, "target of a volume left alone");
        }
        let turn = self.last_turn(&id).await?;
        self.finish(async move { turn.remove(parsed.ok()).await }).await?
    }

    /// Serves a volume that an agent before has published.
    pub(super) async fn restore(&self, record: Record) {
        let Ok((turn, _)) = self.turn(&record.id) else { return };
        let record = Arc::new(record);
        {
            let mut state = turn.slot.state();
            *state = State {
                record: Some(Arc::clone(&record)),
                is_published: true,
                is_recorded: true,
                ..State::default()
            };
        }
        if let Err(status) = turn.set_up(&record, None).await {
            turn.slot.report(&record.id, NOT_RESTORED, status.message());
        }
    }

    /// Removes what is left of a volume that the kubelet no longer knows.
    pub(super) async fn discard(&self, id: &VolumeId, target: Option<Target>) -> Result<(), Status> {
        self.last_turn(id).await?.remove(target).await
    }

    /// Removes a volume from the disk.
    pub(super) async fn remove_target(&self, id: &VolumeId, target: Target) -> Result<(), Status> {
        let path = target.path().to_owned();
        let removed = self.disk().run(&path, move || remove(&target)).await;
        match removed.map_err(unresponsive)? {
            Ok(Removed::Wholly) => Ok(()),
            Ok(Removed::Partly) => {
                tracing::warn!(volume = %id, path = %path.display(), "volume removed, except for what is not the agent's");
                Ok(())
            }
            Err(error) => Err(not_removed(&path, &error)),
        }
    }
}

/// Whether the kubelet takes an answer with this code for the end: it never removes the volume then.
fn is_final(code: Code) -> bool {
    !matches!(
        code,
        Code::Cancelled
            | Code::DeadlineExceeded
            | Code::Unavailable
            | Code::ResourceExhausted
            | Code::Aborted
    )
}

fn unresponsive(error: Unresponsive) -> Status {
    Status::unavailable(error.to_string())
}

fn not_removed(path: &Path, error: &io::Error) -> Status {
    let remedy = match error.kind() {
        io::ErrorKind::PermissionDenied => {
            "; a volume with files takes the agent's privileged manifest to remove, too"
        }
        _ => "",
    };
    let message = format!("{} can't be removed: {error}{remedy}", path.display());
    tracing::warn!(reason = %message, "volume not removed");
    Status::unavailable(message)
}
