//! The work of one call on a volume.

use std::sync::Arc;

use tokio::net::UnixListener;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Status};

use super::{FIRST_WAIT, LATER_WAIT, PATIENCE, State, Turn, is_final, not_removed, unresponsive};
use crate::auth::token_file::Token;
use crate::csi::directory::{NotPrepared, prepare};
use crate::csi::publication::{Publication, Request, copy};
use crate::csi::record::{self, Record};
use crate::csi::target::Target;
use crate::csi::{VolumeFiles, VolumeWorkload};

impl Turn {
    /// The kubelet looks after a volume that it has. Whatever goes wrong, the volume stays, and the kubelet is not told to give
    /// it up: its Pod runs.
    pub(super) async fn republish(&self, record: &Arc<Record>, request: &Request) -> Result<(), Status> {
        let Self { volumes, id, slot, .. } = self;
        if request.target() != record.target.path() {
            let reason = format!("the volume is published at {}", record.target.path().display());
            return Err(Status::already_exists(reason));
        }
        let token = match request.token(&record.pod, volumes.settings()) {
            Ok(token) => token,
            Err(status) => {
                slot.report(id, "token of a volume not renewed", status.message());
                let is_running = slot.state().is_running;
                return if is_running { Ok(()) } else { Err(Status::unavailable(status.message())) };
            }
        };
        let renewed = self.set_up(record, token).await;
        if let Err(status) = renewed {
            slot.report(id, "published volume not served", status.message());
            return Err(Status::unavailable(status.message()));
        }
        self.record(record).await;
        slot.report_success(record);
        Ok(())
    }

    /// Makes the volume and starts its workload, unless both is done. After a failure nothing is left.
    pub(super) async fn begin(self, request: &Request) -> (Self, Result<Arc<Record>, Status>) {
        let settings = self.volumes.settings();
        let checked = request.record(settings).and_then(|record| {
            let token = request.token(&record.pod, settings)?;
            Ok(Publication { record, token })
        });
        let begun = match checked {
            Ok(Publication { record, token }) => {
                let record = Arc::new(record);
                let before = self.slot.state().record.replace(Arc::clone(&record));
                // Only a caller other than the kubelet has another place for the same volume.
                let moved =
                    before.map(|before| before.target.clone()).filter(|before| *before != record.target);
                match moved {
                    Some(target) => self.remove(Some(target)).await.and_then(|()| {
                        Err(Status::aborted("the volume had another target_path, and is removed there"))
                    }),
                    None => self.set_up(&record, token).await.map(|()| record),
                }
            }
            Err(status) => Err(status),
        };
        let begun = match begun {
            Err(status) if is_final(status.code()) && self.slot.state().record.is_some() => {
                match self.remove(None).await {
                    Ok(()) => Err(status),
                    // The kubelet's next call removes the rest.
                    Err(left) => {
                        Err(Status::new(left.code(), format!("{}; {}", status.message(), left.message())))
                    }
                }
            }
            begun => begun,
        };
        (self, begun)
    }

    /// Gives a running workload its token; makes the volume and starts the workload if it does not run.
    pub(super) async fn set_up(&self, record: &Arc<Record>, token: Option<Token>) -> Result<(), Status> {
        let Self { volumes, id, slot, .. } = self;
        if slot.state().is_running {
            let is_running = match &token {
                Some(token) => volumes.runner().renew_token(id, copy(token)).await,
                None => true,
            };
            if is_running {
                return Ok(());
            }
            slot.state().is_running = false;
        }
        let path = record.target.path();
        let prepared = {
            let (record, driver) = (Arc::clone(record), volumes.settings().driver_name.clone());
            // The text of an error looks at the disk, too.
            let explain = |error: NotPrepared| Status::new(error.code(), error.to_string());
            volumes.disk().run(path, move || prepare(&record, driver.as_str()).map_err(explain)).await
        };
        let socket = prepared.map_err(unresponsive)??;
        let socket = UnixListener::from_std(socket).map_err(|error| {
            Status::unavailable(format!("the socket of the volume can't be listened on: {error}"))
        })?;
        let Record { pod, attributes, group, .. } = &**record;
        let files = attributes.files.then(|| VolumeFiles { directory: path.to_owned(), group: *group });
        let workload = VolumeWorkload {
            id: id.clone(),
            pod: pod.clone(),
            attributes: attributes.clone(),
            socket,
            directory: path.to_owned(),
            files,
            token,
        };
        volumes.runner().start(workload).await.map_err(|error| {
            let code = if error.is_retryable { Code::Unavailable } else { Code::FailedPrecondition };
            Status::new(code, error.reason)
        })?;
        slot.state().is_running = true;
        Ok(())
    }

    /// Waits for the first certificate.
    pub(super) async fn wait(&self, record: &Record, removed: &CancellationToken) -> Result<(), Status> {
        if !record.attributes.wait {
            return Ok(());
        }
        let Self { volumes, id, slot, .. } = self;
        let runner = volumes.runner();
        let patience = {
            let mut state = slot.state();
            state.waits = state.waits.saturating_add(1);
            if state.waits == 1 { FIRST_WAIT } else { LATER_WAIT }
        };
        tokio::select! {
            biased;
            () = runner.issued(id) => Ok(()),
            () = removed.cancelled() => Err(Status::aborted("the volume is being removed")),
            () = volumes.0.closing.cancelled() => Err(Status::unavailable("the agent is stopping; its successor continues")),
            () = tokio::time::sleep(patience) => Err(match runner.failure(id) {
                Some(reason) => Status::unavailable(format!("{} has no certificate yet: {reason}", record.pod)),
                None => Status::deadline_exceeded(format!(
                    "{} has no certificate yet, {}s after it was requested",
                    record.pod,
                    patience.as_secs()
                )),
            }),
        }
    }

    /// Writes the record. Without it, a volume is served after a restart only once the kubelet comes by.
    pub(super) async fn record(&self, record: &Arc<Record>) {
        let Self { volumes, id, slot, .. } = self;
        if slot.state().is_recorded {
            return;
        }
        let directory = volumes.settings().records.clone();
        let path = record::path_of(&directory, id);
        let written = {
            let record = Arc::clone(record);
            volumes.disk().run(&path, move || record.write(&directory)).await
        };
        let error = match written {
            Ok(Ok(())) => {
                slot.state().is_recorded = true;
                return;
            }
            Ok(Err(error)) => format!("{error}choose another --state-dir"),
            Err(error) => error.to_string(),
        };
        slot.report(id, "volume published, but not recorded for a restart", &error);
    }

    /// Ends the workload, and removes the volume at `target`, and where it was made.
    pub(super) async fn remove(&self, target: Option<Target>) -> Result<(), Status> {
        let Self { volumes, id, slot, .. } = self;
        if timeout(PATIENCE, volumes.runner().stop(id)).await.is_err() {
            return Err(Status::unavailable("the workload of the volume does not end"));
        }
        slot.state().is_running = false;
        let made = slot.state().record.as_ref().map(|record| record.target.clone());
        let other = made.filter(|made| target.as_ref() != Some(made));
        for target in target.into_iter().chain(other) {
            volumes.remove_target(id, target).await?;
        }
        let path = record::path_of(&volumes.settings().records, id);
        let removed = {
            let path = path.clone();
            volumes.disk().run(&path.clone(), move || record::remove(&path)).await
        };
        removed.map_err(unresponsive)?.map_err(|error| not_removed(&path, &error))?;
        *slot.state() = State::default();
        Ok(())
    }
}
