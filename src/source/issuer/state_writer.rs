//! Writes the state beside the issuer's own work: a disk that hangs delays no renewal.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio_util::task::AbortOnDropHandle;
use zeroize::Zeroizing;

use super::state::{StateDir, StateError};
use crate::base::failure_log::FailureLog;
use crate::fs::disk::Disk;
use crate::store::health::Components;

/// How long a disk may take before the issuer goes on.
const PATIENCE: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub(super) struct StateWriter {
    job: Job,
    /// Writes until there is nothing newer.
    running: Option<AbortOnDropHandle<()>>,
}

/// One write after the other: an old state must not replace a newer one.
#[derive(Clone, Debug)]
struct Job {
    dir: StateDir,
    disk: Disk,
    /// The newest content that is not written yet.
    content: Content,
    failures: Arc<Mutex<FailureLog>>,
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

    fn is_some(&self) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).is_some()
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
    pub(super) fn new(dir: StateDir, components: Components, disk: Disk) -> Self {
        components.report_state(Ok(()));
        let (content, failures) = (Content::default(), Arc::default());
        Self { job: Job { dir, disk, content, failures, components }, running: None }
    }

    pub(super) fn dir(&self) -> &StateDir {
        &self.job.dir
    }

    /// Writes `content`; if the disk hangs, once it answers again. A failure is logged.
    pub(super) async fn write(&mut self, content: Zeroizing<Vec<u8>>) {
        self.job.content.set(content);
        let wait = async {
            while self.job.content.is_some() {
                let job = || AbortOnDropHandle::new(tokio::spawn(self.job.clone().run()));
                let _ = self.running.get_or_insert_with(job).await;
                self.running = None;
            }
        };
        let _ = tokio::time::timeout(PATIENCE, wait).await;
    }
}

impl Job {
    async fn run(self) {
        while self.content.is_some() {
            let (dir, content) = (self.dir.clone(), self.content.clone());
            let mut write = self.disk.spawn(self.dir.path(), move || dir.write(|| content.take()));
            let outcome = match tokio::time::timeout(PATIENCE, &mut write).await {
                Ok(outcome) => outcome,
                Err(_) => {
                    let path = self.dir.path().display();
                    self.report(Err(format!(
                        "{path}: the disk has not answered within {PATIENCE:?}; repair it, or choose another --state-dir"
                    )));
                    write.await
                }
            };
            self.report(match outcome {
                Ok(written) => written.map_err(|error: StateError| error.to_string()),
                Err(error) => Err(error.to_string()),
            });
        }
    }

    fn report(&self, outcome: Result<(), String>) {
        let mut failures = self.failures.lock().unwrap_or_else(PoisonError::into_inner);
        match &outcome {
            Ok(()) if failures.recovered() => {
                tracing::info!(file = %self.dir.file().display(), "state saved again");
            }
            Err(reason) if failures.is_new(reason) => tracing::warn!(
                reason,
                "state not saved: after a restart there is no certificate until the CA has signed one"
            ),
            _ => {}
        }
        self.components.report_state(outcome);
    }
}

impl Drop for StateWriter {
    /// A thread that hangs on the disk outlives the issuer, but not with the key.
    fn drop(&mut self) {
        drop(self.job.content.take());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn writer(dir: &std::path::Path) -> StateWriter {
        let (cache, workload) = crate::store::Cache::with_workload("");
        StateWriter::new(StateDir::new(dir), cache.components(workload), Disk::default())
    }

    fn content(text: &str) -> Zeroizing<Vec<u8>> {
        Zeroizing::new(text.as_bytes().to_vec())
    }

    /// A write of which the writer does not know whether it will ever end.
    fn hang(writer: &mut StateWriter) -> std::sync::mpsc::Sender<()> {
        let (answer, disk) = std::sync::mpsc::channel::<()>();
        let (write, job) =
            (writer.job.disk.spawn(writer.dir().path(), move || disk.recv()), writer.job.clone());
        writer.running = Some(AbortOnDropHandle::new(tokio::spawn(async move {
            let _ = write.await;
            job.run().await;
        })));
        answer
    }

    #[tokio::test]
    async fn a_write_that_hangs_when_the_issuer_goes_keeps_no_key() {
        let temporary = tempfile::tempdir().unwrap();
        let dir = temporary.path().join("state");
        std::fs::create_dir(&dir).unwrap();
        let mut writer = writer(&dir);
        let answer = hang(&mut writer);
        // The thread never gets as far as to take it.
        writer.job.content.set(content("key"));
        let slot = writer.job.content.clone();
        drop(writer);
        assert!(slot.take().is_none());
        drop(answer);
        // What finds no content leaves nothing behind.
        StateDir::new(&dir).write(|| None).unwrap();
        assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 0);
    }

    #[tokio::test]
    async fn after_a_write_that_hung_the_newest_state_is_written() {
        let dir = tempfile::tempdir().unwrap();
        let mut writer = writer(dir.path());
        let answer = hang(&mut writer);
        for text in ["older", "newest"] {
            let written = tokio::time::timeout(Duration::from_millis(10), writer.write(content(text)));
            written.await.unwrap_err();
        }
        let file = writer.dir().file();
        assert!(!file.exists());
        drop(answer);
        writer.running.take().unwrap().await.unwrap();
        assert_eq!(std::fs::read(&file).unwrap(), b"newest");
    }

    #[test]
    fn no_key_is_shown() {
        let content = Content::default();
        content.set(Zeroizing::new(b"key".to_vec()));
        assert_eq!(format!("{content:?}"), "Content");
    }
}
