//! Writes the state beside the issuer's own work: a disk that hangs delays no renewal.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::task::JoinHandle;
use zeroize::Zeroizing;

use super::state::{StateDir, StateError};
use crate::base::failure_log::FailureLog;
use crate::store::health::Components;

/// How long a disk may take before the issuer goes on.
const PATIENCE: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub(super) struct StateWriter {
    dir: StateDir,
    /// The write that has not finished, as far as we know.
    writing: Option<JoinHandle<Result<(), StateError>>>,
    /// What that write has not taken yet.
    content: Content,
    failures: FailureLog,
    /// Whether the last write succeeded.
    components: Components,
}

/// Content for the thread that writes: it takes it when the file is open. The lock is never held across I/O.
#[derive(Clone, Default)]
struct Content(Arc<Mutex<Option<Zeroizing<Vec<u8>>>>>);

impl Content {
    fn set(&self, content: Zeroizing<Vec<u8>>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(content);
    }

    fn take(&self) -> Option<Zeroizing<Vec<u8>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// It holds a key.
impl std::fmt::Debug for Content {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Content")
    }
}

impl StateWriter {
    pub(super) fn new(dir: StateDir, components: Components) -> Self {
        components.report_state(Ok(()));
        let content = Content::default();
        Self { dir, writing: None, content, failures: FailureLog::default(), components }
    }

    pub(super) fn dir(&self) -> &StateDir {
        &self.dir
    }

    /// Writes `content`. A failure is logged.
    pub(super) async fn write(&mut self, content: Zeroizing<Vec<u8>>) {
        // One at a time: an old state must not replace a newer one. If the one before failed late, that is over now.
        let outcome = match self.finish().await {
            Some(_) => {
                let (dir, slot) = (self.dir.clone(), self.content.clone());
                slot.set(content);
                self.writing = Some(tokio::task::spawn_blocking(move || dir.write(|| slot.take())));
                self.finish().await
            }
            None => None,
        };
        let reason = match outcome {
            Some(Ok(())) => {
                self.components.report_state(Ok(()));
                if self.failures.recovered() {
                    tracing::info!(file = %self.dir.file().display(), "state saved again");
                }
                return;
            }
            Some(Err(reason)) => reason,
            None => format!(
                "{}: the disk has not answered within {PATIENCE:?}; repair it, or choose another --state-dir",
                self.dir.path().display(),
            ),
        };
        self.components.report_state(Err(reason.clone()));
        if self.failures.is_new(&reason) {
            tracing::warn!(
                reason,
                "state not saved: after a restart there is no certificate until the CA has signed one"
            );
        }
    }

    /// The outcome of the write in progress; none if it is still in progress.
    async fn finish(&mut self) -> Option<Result<(), String>> {
        let Some(writing) = &mut self.writing else { return Some(Ok(())) };
        let ended = tokio::time::timeout(PATIENCE, writing).await.ok()?;
        self.writing = None;
        Some(match ended {
            Ok(written) => written.map_err(|error| error.to_string()),
            Err(error) => Err(error.to_string()),
        })
    }
}

impl Drop for StateWriter {
    /// A thread that hangs on the disk outlives the issuer, but not with the key.
    fn drop(&mut self) {
        drop(self.content.take());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_write_that_hangs_when_the_issuer_goes_keeps_no_key() {
        let temporary = tempfile::tempdir().unwrap();
        let dir = temporary.path().join("state");
        std::fs::create_dir(&dir).unwrap();
        let (cache, workload) = crate::store::Cache::with_workload("");
        let mut writer = StateWriter::new(StateDir::new(&dir), cache.components(workload));
        // The thread never gets as far as to take it.
        writer.content.set(Zeroizing::new(b"key".to_vec()));
        let slot = writer.content.clone();
        let (answer, disk) = std::sync::mpsc::channel::<()>();
        writer.writing = Some(tokio::task::spawn_blocking(move || {
            let _ = disk.recv();
            Ok(())
        }));
        drop(writer);
        assert!(slot.take().is_none());
        drop(answer);
        // What finds no content leaves nothing behind.
        StateDir::new(&dir).write(|| None).unwrap();
        assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 0);
    }

    #[test]
    fn no_key_is_shown() {
        let content = Content::default();
        content.set(Zeroizing::new(b"key".to_vec()));
        assert_eq!(format!("{content:?}"), "Content");
    }
}
