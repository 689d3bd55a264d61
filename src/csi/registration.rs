//! The registration with the kubelet: a socket in its directory, which it finds, and asks what the driver is.
//!
//! The kubelet forgets a driver whose socket goes, so one socket takes the place of another. Kubelets before 1.36 do not retry
//! what has failed: a new socket makes them.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::net::UnixListener;
use tokio::sync::{Mutex, mpsc};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::driver::{Server, listener, remove};
use super::services::Verdict;
use super::socket::{Found, OwnFile, replace};
use super::volumes::Volumes;
use crate::base::backoff::Backoff;
use crate::base::failure_log::FailureLog;
use crate::fs::disk::Disk;
use crate::metrics::CsiCounts;
use crate::os::denial::directory_remedy;

/// How long the kubelet has for a registration, after which there is a new socket; the longest, if that fails, too.
const BACKOFF: Backoff = Backoff { base: Duration::from_secs(30), cap: Duration::from_secs(300) };
/// How long until a registration that the kubelet has refused, or a socket that can't be opened, is attempted again.
const RETRY: Backoff = Backoff { base: Duration::from_secs(2), cap: Duration::from_secs(60) };
/// How often the agent looks whether its socket is there.
const LOOK: Duration = Duration::from_secs(30);

/// Keeps the driver registered.
#[derive(Debug)]
pub(super) struct Registrar {
    path: PathBuf,
    driver: String,
    disk: Disk,
    counts: CsiCounts,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    verdicts: mpsc::Receiver<Verdict>,
    failures: FailureLog,
    /// Attempts in a row that have failed.
    failed: u32,
}

impl Registrar {
    pub(super) fn new(volumes: &Volumes, verdicts: mpsc::Receiver<Verdict>) -> Self {
        let (settings, disk, counts) = (volumes.settings(), volumes.disk().clone(), volumes.counts().clone());
        let driver = settings.driver_name.to_string();
        let path = settings.registration_dir.join(format!("{driver}-reg.sock"));
        let failures = FailureLog::default();
        let state = Mutex::new(State { verdicts, failures, failed: 0 });
        Self { path, driver, disk, counts, state }
    }

    /// Registers the driver, and again whenever that is needed, until `stop` is cancelled. Then its socket is removed.
    pub(super) async fn run(&self, server: &Server, stop: &CancellationToken) {
        let mut state = self.state.lock().await;
        let mut open = None;
        while !stop.is_cancelled() {
            match self.open().await {
                // The one before is closed only now: the kubelet finds a socket at any time.
                Ok(opened) => open = Some(opened),
                Err(error) => {
                    state.failed = state.failed.saturating_add(1);
                    if state.failures.is_new(&error) {
                        tracing::warn!(path = %self.path.display(), error, "driver not registered: its socket can't be made");
                    }
                }
            }
            match &open {
                Some((socket, file)) => tokio::select! {
                    () = server.serve("the registration socket", socket) => {}
                    () = state.follow(self, file) => {}
                },
                None => tokio::select! {
                    () = tokio::time::sleep(RETRY.delay(state.failed, fastrand::f64())) => {}
                    () = stop.cancelled() => {}
                },
            }
        }
        if let Some((_, file)) = open {
            remove(&self.disk, file).await;
        }
    }

    /// The error has a remedy, for which it looks at the disk.
    async fn open(&self) -> Result<(UnixListener, OwnFile), String> {
        let path = self.path.clone();
        let explain = |path: &Path, error: io::Error| {
            format!("{error}; {}", directory_remedy(path.parent().unwrap_or(path), &error))
        };
        let opened = self.disk.run(&self.path, move || replace(&path).map_err(|error| explain(&path, error)));
        let opened = opened.await.map_err(|error| error.to_string()).flatten()?;
        listener(opened).map_err(|error| error.to_string())
    }

    async fn look(&self, file: &OwnFile) -> io::Result<Found> {
        let file = file.clone();
        self.disk.run(&self.path, move || file.look()).await.map_err(io::Error::other).flatten()
    }
}

impl State {
    /// Returns when the driver needs a new socket to be registered.
    async fn follow(&mut self, registrar: &Registrar, file: &OwnFile) {
        let path = registrar.path.display();
        let (mut is_registered, mut is_refused, mut is_replaced) = (false, false, false);
        let mut until = Instant::now() + BACKOFF.longest(self.failed + 1);
        let mut looks = tokio::time::interval(LOOK);
        looks.reset();
        loop {
            let left = until.saturating_duration_since(Instant::now());
            tokio::select! {
                verdict = self.verdicts.recv() => match verdict {
                    Some(Verdict::Registered) => {
                        self.report_success(registrar, !is_registered);
                        is_registered = true;
                    }
                    Some(Verdict::Refused(reason)) => {
                        self.report_refusal(registrar, &reason);
                        (is_registered, is_refused) = (false, true);
                        until = Instant::now() + RETRY.delay(self.failed, fastrand::f64());
                    }
                    None => std::future::pending().await,
                },
                () = tokio::time::sleep(left), if !is_registered && !is_replaced => {
                    if !is_refused {
                        self.report_silence(registrar);
                    }
                    return;
                }
                _ = looks.tick() => match registrar.look(file).await {
                    Ok(Found::Nothing) => {
                        registrar.counts.registered.set(0);
                        tracing::info!(%path, "registration socket missing, made again");
                        return;
                    }
                    Ok(Found::Another) if !is_replaced => {
                        is_replaced = true;
                        tracing::info!(%path, "registration socket replaced by another agent");
                    }
                    Ok(_) => {}
                    Err(error) => tracing::debug!(%path, %error, "registration socket not found"),
                },
            }
        }
    }

    fn report_success(&mut self, registrar: &Registrar, is_news: bool) {
        self.failed = 0;
        registrar.counts.registered.set(1);
        self.failures.recovered();
        if is_news {
            tracing::info!(driver = registrar.driver, "driver registered");
        } else {
            tracing::debug!(driver = registrar.driver, "driver registered again");
        }
    }

    fn report_refusal(&mut self, registrar: &Registrar, reason: &str) {
        registrar.counts.registered.set(0);
        self.failed = self.failed.saturating_add(1);
        if self.failures.is_new(reason) {
            tracing::warn!(
                driver = registrar.driver,
                reason,
                "driver not registered: the kubelet refuses it"
            );
        }
    }

    fn report_silence(&mut self, registrar: &Registrar) {
        registrar.counts.registered.set(0);
        self.failed = self.failed.saturating_add(1);
        if self.failures.is_new("silence") {
            tracing::warn!(
                path = %registrar.path.display(),
                "driver not registered: the kubelet has not asked for it; is --csi-registration-dir its plugins_registry, \
                 mounted here?"
            );
        }
    }
}
