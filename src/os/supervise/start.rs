//! Starts an epoch, and finds out when it serves.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::AbortHandle;
use tokio::time::sleep;

use super::events::{Event, Exit, RunId, Why};
use super::line::{ForEnvoy, Restarts};
use super::log_lines::Lines;
use super::process::Process;
use super::tasks::Done;
use super::{Running, Settings, Supervisor, admin};
use crate::fs::disk::Disk;

/// A program that is no Envoy counts as live when it has run for this long.
const RUNS: Duration = Duration::from_secs(1);
/// Bytes of the file with Envoy's base id.
const BASE_ID_BYTES: u64 = 64;

/// The files that a starting Envoy writes.
struct Written {
    admin: PathBuf,
    /// Only where it chooses its base id.
    base_id: Option<PathBuf>,
}

impl Supervisor {
    /// Starts an epoch. Returns what has happened if that is impossible.
    pub(super) async fn start(&mut self, run: RunId, epoch: u32, why: Why) -> Option<Event> {
        let Settings { line, drain_seconds, parent_shutdown_seconds, .. } = &self.settings;
        let files = &self.context.files;
        let words = line.start(&ForEnvoy {
            epoch,
            files,
            base_id: self.base_id.as_deref(),
            drain_seconds: *drain_seconds,
            parent_shutdown_seconds: *parent_shutdown_seconds,
        });
        let is_first_of_base_id = line.chooses_base_id() && epoch == 0;
        let written = Written {
            admin: line.admin_file(files).to_owned(),
            base_id: is_first_of_base_id.then(|| line.base_id_file(files).to_owned()),
        };
        let program = line.name().to_owned();
        if line.is_envoy() {
            // That of an earlier one. Signals and exits wait meanwhile: not for long.
            let (stale, disk) = (written.admin.clone(), self.context.disk.at_the_edges());
            let _ = disk.run(&written.admin, move || std::fs::remove_file(stale)).await;
        }
        let lines = self.context.output.clone();
        let lines =
            lines.map(|output| Lines::new(output, program.clone(), epoch, self.context.clock.clone()));
        let (lines, writer) = lines.and_then(Result::ok).unzip();
        let (process, mut child) = match Process::start(&words, writer) {
            Ok(started) => started,
            Err(error) => {
                tracing::error!(program, %error, "command not started");
                // The agent's own launcher could not be started: the system is short of something.
                return Some(Event::Exited(run, Exit::Code(1)));
            }
        };
        let because = match why {
            Why::First => "first start",
            Why::FilesChanged => "files have changed",
            Why::Crash => "it has exited",
        };
        tracing::info!(program, epoch, pid = process.id(), because, "command started");
        self.count(why);
        if let Some(lines) = lines {
            self.printing += 1;
            self.tasks.spawn(async move {
                lines.run().await;
                Done::Printed
            });
        }
        self.tasks.spawn(async move { Done::Exited(run, child.wait().await) });
        let task = Some(self.await_live(run, epoch, written));
        self.running.insert(run, Running { process, epoch, admin: None, left: Arc::default(), task });
        None
    }

    fn await_live(&mut self, run: RunId, epoch: u32, written: Written) -> AbortHandle {
        let line = &self.settings.line;
        if !line.is_envoy() {
            return self.tasks.spawn(async move {
                sleep(RUNS).await;
                Done::Live(run, None, None)
            });
        }
        let number = (line.restarts() == Restarts::Hot).then_some(epoch);
        let disk = self.context.disk.clone();
        self.tasks.spawn(async move {
            let admin = admin::until_live(&written.admin, number, &disk).await;
            let base_id = match written.base_id {
                Some(file) => read_base_id(&file, &disk).await,
                None => None,
            };
            Done::Live(run, admin, base_id)
        })
    }
}

async fn read_base_id(file: &std::path::Path, disk: &Disk) -> Option<String> {
    let text = disk.read(file, BASE_ID_BYTES).await.ok()?.ok()?;
    Some(String::from_utf8_lossy(&text).trim().to_owned())
}
