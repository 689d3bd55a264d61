//! What SIGHUP and SIGUSR1 request: reading again what can be read again, and the status in the log.

use std::fmt;
use std::sync::Arc;
use std::time::SystemTime;

use rustix::process::Signal;
use serde_json::Value;
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::oneshot;

use super::signals::RequestSignals;
use super::workloads::{Shared, Workloads};
use crate::config::{Config, ConfigErrors};
use crate::ops::report::Subject;
use crate::ops::telemetry::{Log, LogConfig};
use crate::options::OptionsFile;
use crate::os::supervise::Request;
use crate::secret::SecretName;
use crate::store::{Cache, Key, Workload};

/// The only option that a reload applies.
const LOG_LEVEL: &str = "log-level";

/// What the command provides for requests by signals.
pub struct Requests {
    pub signals: RequestSignals,
    /// Reads all options again. Touches the disk.
    pub load: Arc<Load>,
    /// A report at this moment, as `attache status` shows it.
    pub table: fn(&Value, SystemTime) -> String,
}

/// Reads the options that a reload may apply.
pub type Load = dyn Fn() -> Result<Reloaded, ConfigErrors> + Send + Sync;

/// What a reload reads.
#[derive(Debug)]
pub struct Reloaded {
    pub log: LogConfig,
    pub options_file: Option<OptionsFile>,
}

impl From<Config> for Reloaded {
    fn from(Config { log, options_file, .. }: Config) -> Self {
        Self { log, options_file }
    }
}

impl fmt::Debug for Requests {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Requests").field("signals", &self.signals).finish_non_exhaustive()
    }
}

impl Requests {
    /// Handles requests until the agent stops. `file` is the options file that it was started with. The program that is kept
    /// running learns of them by `command`.
    pub(super) fn serve(
        self,
        workloads: &mut Workloads,
        shared: &Shared,
        file: Option<OptionsFile>,
        subject: &Subject,
        log: &Log,
        command: Option<UnboundedSender<Request>>,
    ) {
        let Self { signals: RequestSignals { mut reload, mut status }, load, table } = self;
        let subject = subject.clone();
        let mut reloader = Reloader { load, in_force: file, log: log.clone(), shared: shared.clone() };
        let to_command = command.clone();
        workloads.spawn(&shared.stop, async move {
            while reload.recv().await.is_some() {
                reloader.reload().await;
                pass(&to_command, Request::Reload);
            }
        });
        workloads.spawn(&shared.stop, async move {
            while status.recv().await.is_some() {
                pass(&command, Request::Pass(Signal::USR1));
                let table = table(&subject.report(), subject.clock().now());
                tracing::info!("status requested by SIGUSR1\n{}", table.trim_end());
            }
        });
    }
}

/// To the program that the agent keeps running, if there is one.
fn pass(command: &Option<UnboundedSender<Request>>, request: Request) {
    if let Some(command) = command {
        let _ = command.send(request);
    }
}

/// Reads again what can be read again.
struct Reloader {
    load: Arc<Load>,
    /// The options file as far as it is applied: a reload applies the log level alone.
    in_force: Option<OptionsFile>,
    log: Log,
    shared: Shared,
}

impl Reloader {
    async fn reload(&mut self) {
        tracing::info!(signal = "SIGHUP", "reload requested, reading mounted files and CRLs again");
        self.shared.watcher.look_again();
        for (workload, _) in self.shared.cache.workloads() {
            retry_renewal(&self.shared.cache, workload).await;
        }
        if let Some(in_force) = self.in_force.take() {
            self.in_force = Some(self.reload_options(in_force).await);
        }
    }

    /// Reads the options file again, applies the log level, and names what has to wait for a restart. Returns what is in
    /// force now.
    async fn reload_options(&self, mut in_force: OptionsFile) -> OptionsFile {
        let file = in_force.path().display().to_string();
        let (filter, read) = match load(Arc::clone(&self.load)).await {
            Ok(Reloaded { log, options_file: Some(read) }) => (log.filter, read),
            Ok(_) => return in_force,
            Err(ConfigErrors(mistakes)) => {
                for reason in mistakes {
                    tracing::warn!(file, reason, "options file not used, the options stay as they are");
                }
                return in_force;
            }
        };
        let mut changed = in_force.differences(&read);
        if changed.is_empty() {
            tracing::info!(file, "options file unchanged");
        }
        if changed.remove(LOG_LEVEL) {
            match self.log.set_filter(filter) {
                Ok(()) => tracing::warn!(level = self.log.get(), file, "log level set"),
                Err(reason) => tracing::warn!(file, reason, "log level not set"),
            }
            in_force.adopt(LOG_LEVEL, &read);
        }
        if !changed.is_empty() {
            let options = changed.into_iter().collect::<Vec<_>>().join(", ");
            tracing::warn!(file, options, "options changed, restart the agent to apply them");
        }
        in_force
    }
}

/// All options again, read on a thread of its own.
async fn load(load: Arc<Load>) -> Result<Reloaded, ConfigErrors> {
    let failed = |reason: String| ConfigErrors(vec![format!("reading the options failed: {reason}")]);
    let (done, loaded) = oneshot::channel();
    let run = move || drop(done.send(load()));
    let thread = std::thread::Builder::new().name("reload".to_owned()).spawn(run);
    thread.map_err(|error| failed(error.to_string()))?;
    loaded.await.unwrap_or_else(|_| Err(failed("the thread ended".to_owned())))
}

/// Has a CA that failed called at once: what it needs, a token say, is read for each call.
async fn retry_renewal(cache: &Cache, workload: Workload) {
    let key = Key { workload, name: SecretName::Workload };
    let is_failing =
        cache.snapshot_of(workload).iter().any(|one| one.key == key && one.entry.failure().is_some());
    if !is_failing {
        return;
    }
    // The request is made by the first poll. Its outcome is logged by the source.
    tokio::select! {
        biased;
        refused = cache.renew(&key) => drop(refused),
        () = std::future::ready(()) => tracing::info!("renewal requested"),
    }
}
