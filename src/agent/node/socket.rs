//! The socket of one of many workloads: bound as soon as its disk lets it be, handed on when the workload is replaced.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::net::UnixListener;
use tokio::time::sleep;

use crate::base::backoff::Backoff;
use crate::base::clock::millis;
use crate::base::failure_log::FailureLog;
use crate::fs::disk::Disk;
use crate::ops::report::SocketView;
use crate::serve::listener::{Listener, SocketFile};

/// Between two attempts to bind a socket.
const BACKOFF: Backoff = Backoff { base: Duration::from_secs(1), cap: Duration::from_secs(30) };

/// The socket of a workload. Clones are the same socket.
#[derive(Clone, Debug)]
pub(super) struct Socket {
    pub(super) path: PathBuf,
    pub(super) mode: u32,
    bound: Arc<Mutex<Bound>>,
}

#[derive(Debug, Default)]
struct Bound {
    listener: Option<Arc<UnixListener>>,
    file: Option<SocketFile>,
    /// Device and inode of its file.
    id: Option<String>,
    /// Why it is not bound.
    failure: Option<String>,
}

impl Socket {
    /// A socket that is not bound yet.
    pub(super) fn new(path: PathBuf, mode: u32) -> Self {
        Self { path, mode, bound: Arc::default() }
    }

    /// The guard that removes its file on drop, which touches the disk.
    pub(super) fn take_file(&self) -> Option<SocketFile> {
        let mut bound = self.lock();
        bound.listener = None;
        bound.file.take()
    }

    /// Binds it, unless it is bound. Retries for ever: another process may give the path up.
    pub(super) async fn listener(&self, disk: &Disk) -> Arc<UnixListener> {
        let (mut failures, mut log) = (0_u32, FailureLog::default());
        loop {
            if let Some(listener) = &self.lock().listener {
                return Arc::clone(listener);
            }
            let (path, mode) = (self.path.clone(), self.mode);
            let bound = disk.run(&self.path, move || Listener::bind(&path, mode, "socket")).await;
            let reason = match bound {
                Ok(Ok(listener)) => {
                    let id = listener.id().map(|id| id.to_string());
                    let (listener, file) = listener.into_parts();
                    let listener = Arc::new(listener);
                    *self.lock() = Bound { listener: Some(Arc::clone(&listener)), file, id, failure: None };
                    if log.recovered() {
                        tracing::info!(path = %self.path.display(), "socket bound");
                    }
                    return listener;
                }
                Ok(Err(error)) => error.to_string(),
                Err(unresponsive) => unresponsive.to_string(),
            };
            failures = failures.saturating_add(1);
            let delay = BACKOFF.delay(failures, fastrand::f64());
            if log.is_new(&reason) {
                let retry_in_ms = millis(delay);
                tracing::warn!(reason, retry_in_ms, "socket not bound, the workload is not served");
            }
            self.lock().failure = Some(reason);
            sleep(delay).await;
        }
    }

    /// No code panics while it holds this lock.
    fn lock(&self) -> MutexGuard<'_, Bound> {
        self.bound.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl SocketView for Socket {
    fn path(&self) -> PathBuf {
        self.path.clone()
    }

    fn is_bound(&self) -> bool {
        self.lock().listener.is_some()
    }

    fn id(&self) -> Option<String> {
        self.lock().id.clone()
    }

    fn failure(&self) -> Option<String> {
        self.lock().failure.clone()
    }
}
