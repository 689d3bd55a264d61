//! What readiness, status and metrics show of the program.

use std::time::SystemTime;

use tokio::time::Instant;

use super::events::{Epoch, Phase, Why};
use super::{Context, Supervisor};
use crate::store::health::{CommandState, EpochHealth};

impl Supervisor {
    pub(super) fn count(&self, why: Why) {
        self.context.components.report_command(|health| match why {
            Why::First => {}
            Why::FilesChanged => health.restarts.files += 1,
            Why::Crash => health.restarts.crash += 1,
        });
    }

    /// Reports the state as it is now.
    pub(super) fn report(&self) {
        let Context { components, clock, .. } = &self.context;
        let (now, wall) = (Instant::now(), clock.now());
        let moment = |at: Instant| match at.checked_duration_since(now) {
            Some(ahead) => wall + ahead,
            None => wall - now.duration_since(at),
        };
        let shown: Vec<_> =
            self.epochs.epochs().iter().filter_map(|epoch| self.shown(epoch, &moment)).collect();
        let state = self.state();
        let node = self.running.values().rev().find_map(|running| running.admin.as_ref());
        let node = node.map(|admin| admin.node.clone()).filter(|node| !node.is_empty());
        let before = components.command().unwrap_or_default();
        let next_start = self.epochs.next_start().filter(|_| state == CommandState::BackingOff).map(moment);
        let is_same = before.state == state
            && same(&before.epochs, &shown)
            && before.node == node
            && before.next_start.is_some() == next_start.is_some()
            && before.restart_failure == self.restart_failure
            && before.files_failure == self.files_failure;
        if is_same {
            return;
        }
        components.report_command(|health| {
            health.state = state;
            health.epochs = shown;
            health.node = node;
            health.next_start = next_start;
            health.restart_failure.clone_from(&self.restart_failure);
            health.files_failure.clone_from(&self.files_failure);
        });
    }

    fn shown(&self, epoch: &Epoch, moment: &impl Fn(Instant) -> SystemTime) -> Option<EpochHealth> {
        let running = self.running.get(&epoch.run)?;
        let (pid, state) = (running.process.id(), epoch.phase.word());
        Some(EpochHealth { epoch: epoch.number, pid, state, since: moment(epoch.since) })
    }

    fn state(&self) -> CommandState {
        let has = |phases: &[Phase]| self.epochs.epochs().iter().any(|epoch| phases.contains(&epoch.phase));
        match () {
            () if self.epochs.is_stopping() => CommandState::Stopping,
            () if !self.has_begun => CommandState::Waiting,
            () if has(&[Phase::Live]) => CommandState::Live,
            () if has(&[Phase::Starting]) => CommandState::Starting,
            () if has(&[Phase::Leaving, Phase::Stopping, Phase::Killed]) => CommandState::Restarting,
            () => CommandState::BackingOff,
        }
    }
}

/// Moments differ by how they are calculated.
fn same(before: &[EpochHealth], now: &[EpochHealth]) -> bool {
    let key = |epoch: &EpochHealth| (epoch.epoch, epoch.pid, epoch.state);
    before.iter().map(key).eq(now.iter().map(key))
}
