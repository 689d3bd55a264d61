//! How epochs stop: as the agent is asked to, for a successor, or because the end is decided.

use tokio::time::Instant;

use super::Epochs;
use crate::os::supervise::events::{Action, Epoch, Outcome, Phase, RunId};

impl Epochs {
    pub(super) fn stop(&mut self, now: Instant, actions: &mut Vec<Action>) {
        self.stops += 1;
        self.ending.get_or_insert(Outcome::Done);
        self.stopped_at.get_or_insert(now);
        (self.planned, self.validating) = (None, None);
        let has = |phase| self.epochs.iter().any(|epoch| epoch.phase == phase);
        // The connections are with the parent, whose admin endpoint the new epoch has taken over.
        let is_taking_over = has(Phase::Starting) && has(Phase::Live);
        let serving =
            self.epochs.iter().rev().find(|epoch| epoch.phase == Phase::Live).map(|epoch| epoch.run);
        match (self.stops, serving.filter(|_| !is_taking_over)) {
            // Older epochs drain as well until then.
            (1, Some(run)) => {
                self.leave(run, now, actions);
                if self.epochs.iter().all(|epoch| epoch.phase != Phase::Leaving) {
                    self.terminate_all(now, actions);
                }
            }
            (1, None) if is_taking_over || has(Phase::Leaving) => {}
            (1, None) => self.terminate_all(now, actions),
            (2, _) if !self.epochs.iter().all(is_stopping) => self.terminate_all(now, actions),
            _ => {
                for Epoch { run, .. } in self.epochs.clone() {
                    actions.push(Action::Kill(run));
                    self.set_phase(run, Phase::Killed, now);
                }
            }
        }
    }

    pub(super) fn end(&mut self, outcome: Outcome, now: Instant, actions: &mut Vec<Action>) {
        self.ending = Some(outcome);
        (self.planned, self.validating) = (None, None);
        self.terminate_all(now, actions);
    }

    pub(super) fn leave(&mut self, run: RunId, now: Instant, actions: &mut Vec<Action>) {
        if self.policy.is_envoy && !self.policy.drain_timeout.is_zero() {
            actions.push(Action::Drain(run));
            self.set_phase(run, Phase::Leaving, now);
        } else {
            self.terminate(run, now, actions);
        }
    }

    pub(super) fn drained(&mut self, run: RunId, now: Instant, actions: &mut Vec<Action>) {
        let is_over = |epoch: &&Epoch| matches!(epoch.phase, Phase::Leaving | Phase::Draining);
        if self.epochs.iter().find(|epoch| epoch.run == run).filter(is_over).is_none() {
            return;
        }
        if self.ending.is_some() {
            self.terminate_all(now, actions);
        } else {
            self.terminate(run, now, actions);
        }
    }

    pub(super) fn terminate(&mut self, run: RunId, now: Instant, actions: &mut Vec<Action>) {
        actions.push(Action::Terminate(run));
        self.set_phase(run, Phase::Stopping, now);
    }

    pub(super) fn terminate_all(&mut self, now: Instant, actions: &mut Vec<Action>) {
        for epoch in self.epochs.clone().into_iter().filter(|epoch| !is_stopping(epoch)) {
            self.terminate(epoch.run, now, actions);
        }
    }
}

fn is_stopping(epoch: &Epoch) -> bool {
    matches!(epoch.phase, Phase::Stopping | Phase::Killed)
}
