//! What tasks have found, and what happens by that.

use std::io;
use std::process::ExitStatus;

use tokio::task::AbortHandle;

use super::Supervisor;
use super::admin::Admin;
use super::events::{Event, Exit, RunId};
use super::files::RestartFiles;
use super::restarts::Digest;

/// What a task has found.
#[derive(Debug)]
pub(super) enum Done {
    Exited(RunId, io::Result<ExitStatus>),
    Live(RunId, Option<Admin>, Option<String>),
    Validated(Result<Result<(), String>, String>),
    Drained(RunId, Result<(), String>),
    Looked(RestartFiles, Result<Digest, String>),
    /// The program starts, whether or not the files have been read.
    LookedLongEnough,
    /// The program has closed its standard error.
    Printed,
}

impl Supervisor {
    pub(super) fn done(&mut self, done: Done) -> Vec<Event> {
        let event = match done {
            Done::Exited(run, status) => self.exited(run, status),
            Done::Live(run, admin, base_id) => return self.live(run, admin, base_id),
            Done::Validated(Ok(verdict)) => Some(Event::Validated(verdict)),
            Done::Validated(Err(reason)) => Some(Event::NotValidated(reason)),
            Done::Drained(run, outcome) => {
                if let Err(reason) = outcome {
                    self.drained_badly = true;
                    tracing::warn!(%reason, "connections not drained, stopping: Envoy's admin endpoint failed");
                }
                Some(Event::Drained(run))
            }
            Done::Looked(files, looked) => {
                let looked = self.looked(files, looked);
                // Later looks are compared with this one: the program may start.
                return looked.into_iter().chain(self.begin()).collect();
            }
            Done::LookedLongEnough => self.begin(),
            Done::Printed => {
                self.printing -= 1;
                None
            }
        };
        event.into_iter().collect()
    }

    fn exited(&mut self, run: RunId, status: io::Result<ExitStatus>) -> Option<Event> {
        let running = self.running.remove(&run)?;
        running.task.inspect(AbortHandle::abort);
        // What it has left behind of its group.
        running.process.kill();
        Some(Event::Exited(run, exit_of(status)))
    }

    fn live(&mut self, run: RunId, admin: Option<Admin>, base_id: Option<String>) -> Vec<Event> {
        let Some(running) = self.running.get_mut(&run) else { return Vec::new() };
        let line = &self.settings.line;
        if admin.is_none() && line.is_envoy() {
            tracing::warn!(
                "Envoy has no admin endpoint, or can't write its address beside the socket: whether it is live is a guess, \
                 and its connections are cut when the agent stops; add admin: to its configuration"
            );
        }
        running.admin = admin;
        self.base_id = base_id.or(self.base_id.take());
        let is_unknown = line.chooses_base_id() && self.base_id.is_none();
        // Without the base id that Envoy has chosen no epoch can start beside it.
        let locked = is_unknown.then_some(Event::Locked);
        [Event::Live(run)].into_iter().chain(locked).collect()
    }

    fn looked(&mut self, files: RestartFiles, looked: Result<Digest, String>) -> Option<Event> {
        self.look(files);
        let failure = looked.as_ref().err().cloned();
        if failure != self.files_failure {
            match &failure {
                Some(reason) => {
                    tracing::warn!(%reason, "files of --restart-on not read, changes have no effect");
                }
                None => tracing::info!("files of --restart-on readable again"),
            }
            self.files_failure = failure;
        }
        looked.ok().map(Event::Looked)
    }
}

fn exit_of(status: io::Result<ExitStatus>) -> Exit {
    use std::os::unix::process::ExitStatusExt as _;
    let Ok(status) = status else { return Exit::Code(1) };
    match (status.code(), status.signal()) {
        (Some(code), _) => Exit::Code(code),
        (None, signal) => Exit::Signal(signal.unwrap_or_default()),
    }
}
