//! What people learn of the program, in the log.

use super::Supervisor;
use super::events::{Note, Role, Why};
use crate::base::clock::millis;
use crate::store::health::LastExit;

impl Supervisor {
    pub(super) fn log(&mut self, note: Note) {
        let program = self.settings.line.name();
        match note {
            Note::Live { epoch, took, .. } => {
                self.restart_failure = None;
                tracing::info!(program, epoch, after_ms = millis(took), "command live");
            }
            Note::Exited { epoch, exit, role: Role::Current, .. } => {
                let reason = exit.to_string();
                tracing::warn!(program, epoch, reason, "command exited");
                let at = self.context.clock.now();
                let last = LastExit { at, epoch, reason };
                self.context.components.report_command(|health| health.last_exit = Some(last));
            }
            Note::Exited { epoch, exit, role: Role::Old, .. } => {
                tracing::info!(program, epoch, reason = %exit, "old epoch drained and exited");
            }
            Note::Exited { epoch, exit, role: Role::Stopped, .. } => {
                tracing::info!(program, epoch, reason = %exit, "command stopped");
            }
            Note::BackingOff { delay, crashes, budget } => {
                tracing::warn!(
                    program,
                    delay_ms = millis(delay),
                    crashes,
                    budget,
                    "command is started again"
                );
            }
            Note::Waiting { epoch } => {
                tracing::info!(
                    program,
                    draining = epoch,
                    "files have changed, the restart waits until the old epoch has drained"
                );
            }
            Note::Refused { words } => {
                tracing::error!(
                    program,
                    reason = words,
                    "new configuration refused, Envoy is not restarted for it; correct the file, or send SIGHUP to have it \
                     checked again"
                );
                self.failed(format!("the new configuration is refused: {words}"));
            }
            Note::NotChecked { reason } => {
                tracing::error!(
                    program,
                    reason,
                    "new configuration not checked, Envoy is not restarted for it; SIGHUP has it checked again"
                );
                self.failed(format!("the new configuration could not be checked: {reason}"));
            }
            Note::RestartFailed { epoch, exit } => {
                tracing::error!(
                    program,
                    epoch,
                    reason = %exit,
                    "new epoch failed, the old one serves on; SIGHUP repeats the restart"
                );
                self.failed(format!("the new epoch ended before it was live: {exit}"));
            }
            Note::Stuck { epoch, why } => {
                let reason = match why {
                    Why::FilesChanged => "files have changed since its start",
                    Why::First | Why::Crash => "the epoch before it has exited",
                };
                tracing::warn!(program, epoch, reason, "epoch not live after a minute, stopped");
            }
            Note::Killed { epoch } => {
                tracing::warn!(program, epoch, "command still running after SIGTERM, killed");
            }
        }
    }

    fn failed(&mut self, reason: String) {
        self.restart_failure = Some(reason);
        self.context.components.report_command(|health| health.restarts.failed += 1);
    }
}
