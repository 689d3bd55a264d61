//! Writes the state beside the issuer's own work: a disk that hangs delays no renewal.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio_util::task::AbortOnDropHandle;
use zeroize::Zeroizing;

use super::state::StateDir;
use crate::base::backoff::Backoff;
use crate::base::failure_log::FailureLog;
use crate::fs::disk::Disk;
use crate::store::health::Components;

/// How long a disk may take before the issuer goes on.
const PATIENCE: Duration = Duration::from_secs(5);

/// After a failed write.
const BACKOFF: Backoff = Backoff { base: Duration::from_secs(1), cap: Duration::from_secs(60) };

#[derive(Debug)]
pub(super) struct StateWriter {
    job: Job,
    running: Option<AbortOnDropHandle<()>>,
}

/// One write after the other: an old state must not replace a newer one.
#[derive(Clone, Debug)]
struct Job {
    dir: StateDir,
    disk: Disk,
    /// The newest content that is not written yet.
    content: Content,
    /// There is a newer one.
    changed: Arc<Notify>,
    /// A write has ended.
    tried: Arc<Notify>,
    /// Whether the last write succeeded.
    components: Components,
}

/// Content for the thread that writes: it takes it when the file is open. The lock is never held across I/O.
#[derive(Clone, Default)]
struct Content(Arc<Mutex<Option<Zeroizing<Vec<u8>>>>>);

impl Content {
    fn lock(&self) -> MutexGuard<'_, Option<Zeroizing<Vec<u8>>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, content: Zeroizing<Vec<u8>>) {
        *self.lock() = Some(content);
    }

    fn is_some(&self) -> bool {
        self.lock().is_some()
    }

    fn take(&self) -> Option<Zeroizing<Vec<u8>>> {
        self.lock().take()
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
        let (content, changed, tried) = (Content::default(), Arc::default(), Arc::default());
        Self { job: Job { dir, disk, content, changed, tried, components }, running: None }
    }

    pub(super) fn dir(&self) -> &StateDir {
        &self.job.dir
    }

    /// Writes `content`; if that can't be done soon, once it can. A failure is logged.
    pub(super) async fn write(&mut self, content: Zeroizing<Vec<u8>>) {
        let tried = self.job.tried.notified();
        self.job.content.set(content);
        self.job.changed.notify_one();
        self.running.get_or_insert_with(|| AbortOnDropHandle::new(tokio::spawn(self.job.clone().run())));
        let _ = tokio::time::timeout(PATIENCE, tried).await;
    }
}

impl Job {
    async fn run(self) {
        let (mut log, mut failures) = (FailureLog::default(), 0_u32);
        loop {
            while !self.content.is_some() {
                self.changed.notified().await;
            }
            let outcome = self.write(&mut log).await;
            failures = if outcome.is_ok() { 0 } else { failures.saturating_add(1) };
            self.report(&mut log, outcome);
            self.tried.notify_waiters();
            if failures > 0 {
                tokio::select! {
                    () = tokio::time::sleep(BACKOFF.delay(failures, fastrand::f64())) => {}
                    () = self.changed.notified() => {}
                }
            }
        }
    }

    async fn write(&self, log: &mut FailureLog) -> Result<(), String> {
        let (dir, content) = (self.dir.clone(), self.content.clone());
        let mut write = self.disk.spawn(self.dir.path(), move || dir.write(|| content.take()));
        let written = match tokio::time::timeout(PATIENCE, &mut write).await {
            Ok(written) => written,
            Err(_) => {
                let path = self.dir.path().display();
                let reason = format!(
                    "{path}: the disk has not answered within {PATIENCE:?}; repair it, or choose another --state-dir"
                );
                self.report(log, Err(reason));
                write.await
            }
        };
        let written = written.map_err(|error| error.to_string())?;
        written.map_err(|error| error.to_string())
    }

    fn report(&self, log: &mut FailureLog, outcome: Result<(), String>) {
        match &outcome {
            Ok(()) if log.recovered() => {
                tracing::info!(file = %self.dir.file().display(), "state saved again");
            }
            Err(reason) if log.is_new(reason) => tracing::warn!(
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
        while !file.exists() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        assert_eq!(std::fs::read(&file).unwrap(), b"newest");
    }

    #[test]
    fn no_key_is_shown() {
        let content = Content::default();
        content.set(Zeroizing::new(b"key".to_vec()));
        assert_eq!(format!("{content:?}"), "Content");
    }
}
