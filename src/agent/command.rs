//! The program that the agent keeps running: when it may start, which signals it gets, and how the agent stops with it.

use std::future::Future;
use std::path::Path;
use std::pin::Pin;

use rustix::process::Signal;
use tokio::sync::mpsc::{self, UnboundedSender};
use tokio::time::timeout;

use super::signals::{self, Signals};
use super::workloads::{Running, Shared, Workloads};
use crate::base::clock::millis;
use crate::config::Config;
use crate::ops::telemetry::Log;
use crate::os::supervise::{CommandFailed, Context, OwnFiles, Request, Settings, Supervisor};
use crate::store::health::{self, HealthWatcher};

/// A program that is kept running while this is polled.
pub(super) struct Command {
    running: Pin<Box<dyn Future<Output = Result<(), CommandFailed>> + Send>>,
    requests: UnboundedSender<Request>,
}

impl Command {
    /// The program that the options name, if they name one.
    pub(super) fn of(
        config: &Config,
        socket: &Path,
        workloads: &mut Workloads,
        shared: &Shared,
        running: &Running,
        log: &Log,
    ) -> anyhow::Result<Option<Self>> {
        let Some(settings) = config.command.clone() else { return Ok(None) };
        let context = Context {
            files: OwnFiles::beside(socket),
            // One watcher of its own would be two threads: beside a disk that does not answer, mounted files are polled.
            watcher: shared.watcher.clone(),
            disk: shared.disk.clone(),
            components: shared.cache.components(running.workload),
            clock: shared.clock.clone(),
            output: config.log.json.then(|| log.output()),
        };
        Self::new(*settings, context, workloads, shared).map(Some)
    }

    /// Nothing is started before this is polled, and either the agent's secrets are there or it has waited for them.
    fn new(
        settings: Settings,
        context: Context,
        workloads: &mut Workloads,
        shared: &Shared,
    ) -> anyhow::Result<Self> {
        let (requests, received) = mpsc::unbounded_channel();
        let (begin, pass, wait) = (requests.clone(), requests.clone(), settings.wait);
        let supervisor = Supervisor::new(settings, context);
        let mut health = HealthWatcher::new(shared.cache.clone(), shared.clock.clone());
        workloads.spawn(&shared.stop, async move {
            let mut missing = Vec::new();
            let ready = async {
                loop {
                    missing = health.next().await.missing_for_command();
                    if missing.is_empty() {
                        break;
                    }
                }
            };
            if timeout(wait, ready).await.is_err() {
                tracing::warn!(
                    waited_ms = millis(wait),
                    missing = health::listed(&missing),
                    "command is started without secrets that are missing"
                );
            }
            let _ = begin.send(Request::Begin);
            std::future::pending().await
        });
        let mut for_command = signals::for_command()?;
        workloads.spawn(&shared.stop, async move {
            while for_command.recv().await.is_some() {
                let _ = pass.send(Request::Pass(Signal::USR2));
            }
        });
        Ok(Self { running: Box::pin(supervisor.run(received)), requests })
    }

    /// Where others say what they want of it.
    pub(super) fn requests(&self) -> UnboundedSender<Request> {
        self.requests.clone()
    }

    /// Stops the program: its connections end, then it does. Each further signal is a hurry.
    async fn stop(mut self, signals: &mut Signals, is_hurried: bool) {
        let _ = self.requests.send(Request::Stop);
        if is_hurried {
            let _ = self.requests.send(Request::Stop);
        }
        loop {
            tokio::select! {
                _ = &mut self.running => return,
                name = signals.next() => {
                    tracing::warn!(signal = name, "stopping the command at once");
                    let _ = self.requests.send(Request::Stop);
                }
            }
        }
    }
}

/// Returns when the program has ended by itself. Without one, it does not return.
pub(super) async fn ended(command: &mut Option<Command>) -> anyhow::Result<()> {
    let Some(running) = command else { return std::future::pending().await };
    let outcome = (&mut running.running).await;
    *command = None;
    if outcome.is_ok() {
        tracing::info!("command exited with status 0, stopping");
    }
    Ok(outcome?)
}

/// Stops the program, if it still runs.
pub(super) async fn stop(command: Option<Command>, signals: &mut Signals, is_hurried: bool) {
    if let Some(command) = command {
        command.stop(signals, is_hurried).await;
    }
}
