//! Decides when the program is started, restarted, stopped and given up. No I/O: events and moments are inputs, and what
//! to do is the output.
//!
//! An epoch is one process of the program. With hot restart two of them overlap: the new one takes over the listeners, and
//! the old one drains. Envoy imposes the rules. A new epoch must not start before the one before it is live. Its number is
//! that of the living one plus one, or 0 where none lives. When it starts, the one before has its own predecessor
//! terminated: so that one must have drained before.

mod stop;

use std::time::Duration;

use tokio::time::Instant;

use super::events::{Action, Epoch, Event, Exit, Note, Outcome, Phase, Policy, Role, RunId, Why};
use super::restarts::{Changes, Crashes, Digest};

/// How long a process may take to exit after SIGTERM.
const TERM_GRACE: Duration = Duration::from_secs(5);
/// An epoch that is not live after this time makes way for changed files.
const START_PATIENCE: Duration = Duration::from_secs(60);
/// What a shell, and the agent, exit with where a program can't be executed.
const NOT_EXECUTED: [i32; 2] = [126, 127];

/// A start that is planned.
#[derive(Clone, Copy, Debug)]
struct Planned {
    at: Instant,
    why: Why,
}

/// What is validated for what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Validating {
    /// The files have changed.
    Restart,
    /// The first epoch has exited: was it the configuration?
    FirstExit(Exit),
}

/// All epochs, and what is planned.
#[derive(Debug)]
pub(super) struct Epochs {
    policy: Policy,
    /// The oldest first.
    epochs: Vec<Epoch>,
    runs: u64,
    planned: Option<Planned>,
    validating: Option<Validating>,
    changes: Changes,
    crashes: Crashes,
    was_live: bool,
    /// Since when one epoch or another was live, without a crash in between.
    live_since: Option<Instant>,
    /// The newest files did not lead to a live epoch.
    has_failed: bool,
    /// A restart is wanted whatever the files are.
    is_wanted: bool,
    /// It is known that changed files wait for an old epoch.
    has_said_why: bool,
    /// Hot restart is impossible until a first epoch is started again.
    is_locked: bool,
    /// Set once the end is decided; what it will be.
    ending: Option<Outcome>,
    /// How often the agent was asked to stop, and when first.
    stops: u32,
    stopped_at: Option<Instant>,
    /// Drawn from 0..1 for each delay.
    jitter: fn() -> f64,
}

impl Epochs {
    pub(super) fn new(policy: Policy, jitter: fn() -> f64) -> Self {
        Self {
            epochs: Vec::new(),
            runs: 0,
            planned: None,
            validating: None,
            changes: Changes::new(policy.debounce),
            crashes: Crashes::new(policy.budget),
            was_live: false,
            live_since: None,
            has_failed: false,
            is_wanted: false,
            has_said_why: false,
            is_locked: false,
            ending: None,
            stops: 0,
            stopped_at: None,
            policy,
            jitter,
        }
    }

    pub(super) fn epochs(&self) -> &[Epoch] {
        &self.epochs
    }

    /// When the next start is, if one is planned.
    pub(super) fn next_start(&self) -> Option<Instant> {
        self.planned.map(|planned| planned.at)
    }

    pub(super) fn is_stopping(&self) -> bool {
        self.ending.is_some()
    }

    /// Whether the agent was asked more than once to stop.
    pub(super) fn is_hurried(&self) -> bool {
        self.stops > 1
    }

    /// What to do about `event`, and about the time.
    pub(super) fn on(&mut self, event: Event, now: Instant) -> Vec<Action> {
        let mut actions = Vec::new();
        match event {
            Event::Begin => self.planned = Some(Planned { at: now, why: Why::First }),
            Event::Looked(digest) => self.looked(digest, now, &mut actions),
            Event::Again => {
                // What is under way may fail for what was repaired meanwhile.
                let is_busy = self.validating.is_some() || self.starting().is_some();
                self.is_wanted |= self.has_failed || is_busy;
            }
            Event::Live(run) => self.live(run, now, &mut actions),
            Event::Validated(verdict) => self.validated(verdict, now, &mut actions),
            Event::NotValidated(reason) => self.not_validated(reason, now, &mut actions),
            Event::Drained(run) => self.drained(run, now, &mut actions),
            Event::Exited(run, exit) => self.exited(run, exit, now, &mut actions),
            Event::Locked => self.locked(now, &mut actions),
            Event::Stop => self.stop(now, &mut actions),
            Event::Time => {}
        }
        self.advance(now, &mut actions);
        actions
    }

    /// When to call [`Self::on`] although nothing has happened.
    pub(super) fn due(&self) -> Option<Instant> {
        let epochs = self.epochs.iter().filter_map(|epoch| self.deadline(epoch));
        if self.ending.is_some() {
            return epochs.min();
        }
        let is_busy = self.validating.is_some() || self.starting().is_some();
        let planned = self.planned.filter(|_| !is_busy && self.has_room()).map(|planned| planned.at);
        let changed = self.changes.due().filter(|_| self.may_restart() || planned.is_some());
        epochs.chain(planned).chain(changed).min()
    }

    /// When the phase of `epoch` has lasted too long.
    fn deadline(&self, epoch: &Epoch) -> Option<Instant> {
        let limit = match epoch.phase {
            Phase::Starting if self.ending.is_some() => self.stopped_at? + self.policy.drain_timeout,
            // It takes over from one that has gone meanwhile, and may wait for that.
            Phase::Starting if epoch.number > 0 && self.epochs.len() == 1 => epoch.since + START_PATIENCE,
            // Only if there is something newer to start.
            Phase::Starting => self.changes.due().map(|due| due.max(epoch.since + START_PATIENCE))?,
            Phase::Live | Phase::Killed => return None,
            // The child of a live epoch's parent sees to it. This is for one that has lost its child.
            Phase::Draining => {
                let child = self.epochs.iter().find(|it| it.phase == Phase::Live)?;
                epoch.since.max(child.since) + self.policy.parent_shutdown + TERM_GRACE
            }
            Phase::Leaving => epoch.since + self.policy.drain_timeout,
            Phase::Stopping => epoch.since + self.grace(),
        };
        Some(limit)
    }

    /// From SIGTERM to SIGKILL.
    fn grace(&self) -> Duration {
        if self.policy.is_envoy { TERM_GRACE } else { TERM_GRACE.max(self.policy.drain_timeout) }
    }

    fn starting(&self) -> Option<&Epoch> {
        self.epochs.iter().find(|epoch| epoch.phase == Phase::Starting)
    }

    /// The newest epoch, if it is live.
    fn current(&self) -> Option<&Epoch> {
        self.epochs.last().filter(|epoch| epoch.phase == Phase::Live)
    }

    /// Whether another process may start: beside one with hot restart, else alone.
    fn has_room(&self) -> bool {
        let is_leaving = |epoch: &Epoch| !matches!(epoch.phase, Phase::Live | Phase::Draining);
        match self.policy.is_hot && !self.is_locked {
            true => self.epochs.len() <= 1 && !self.epochs.iter().any(is_leaving),
            false => self.epochs.is_empty(),
        }
    }

    /// Whether changed files can be acted upon: one epoch is live and alone, and nothing else is under way. Until the
    /// older one has drained, its connections would be cut.
    fn may_restart(&self) -> bool {
        let is_idle = self.planned.is_none() && self.validating.is_none() && self.ending.is_none();
        is_idle && self.current().is_some() && self.epochs.len() == 1
    }

    fn set_phase(&mut self, run: RunId, phase: Phase, now: Instant) {
        if let Some(epoch) = self.epochs.iter_mut().find(|epoch| epoch.run == run) {
            (epoch.phase, epoch.since) = (phase, now);
        }
    }

    /// Does what is due.
    fn advance(&mut self, now: Instant, actions: &mut Vec<Action>) {
        for epoch in self.epochs.clone() {
            if self.deadline(&epoch).is_some_and(|deadline| deadline <= now) {
                self.overdue(&epoch, now, actions);
            }
        }
        if let Some(outcome) = &self.ending {
            if self.epochs.is_empty() {
                actions.push(Action::End(outcome.clone()));
            }
            return;
        }
        if self.validating.is_some() || self.starting().is_some() {
            return;
        }
        if let Some(Planned { at, why }) = self.planned {
            // Changed files may be the repair.
            let is_due = at <= now || self.changes.due().is_some_and(|due| due <= now);
            if is_due && self.has_room() {
                self.start(why, now, actions);
            }
        } else if self.may_restart() {
            let is_wanted = std::mem::take(&mut self.is_wanted);
            if self.changes.take(now) || is_wanted {
                self.restart(now, actions);
            }
        }
    }

    fn looked(&mut self, digest: Digest, now: Instant, actions: &mut Vec<Action>) {
        self.changes.look(digest, now);
        let draining = self.epochs.iter().find(|epoch| epoch.phase == Phase::Draining);
        let is_waiting = self.changes.due().is_some() && self.current().is_some();
        if let Some(&Epoch { number, .. }) = draining.filter(|_| is_waiting && !self.has_said_why) {
            self.has_said_why = true;
            actions.push(Action::Log(Note::Waiting { epoch: number }));
        }
    }

    fn overdue(&mut self, epoch: &Epoch, now: Instant, actions: &mut Vec<Action>) {
        match epoch.phase {
            Phase::Starting if self.ending.is_some() => self.terminate_all(now, actions),
            Phase::Starting => {
                actions.push(Action::Log(Note::Stuck { epoch: epoch.number, why: self.why_again() }));
                self.terminate(epoch.run, now, actions);
            }
            Phase::Leaving if self.ending.is_some() => self.terminate_all(now, actions),
            Phase::Draining | Phase::Leaving => self.terminate(epoch.run, now, actions),
            Phase::Stopping => {
                actions.push(Action::Log(Note::Killed { epoch: epoch.number }));
                actions.push(Action::Kill(epoch.run));
                self.set_phase(epoch.run, Phase::Killed, now);
            }
            Phase::Live | Phase::Killed => {}
        }
    }

    /// Why a stuck epoch makes way for another one: for changed files, or because the epoch before it has gone.
    fn why_again(&self) -> Why {
        if self.changes.due().is_some() { Why::FilesChanged } else { Why::Crash }
    }

    fn start(&mut self, why: Why, now: Instant, actions: &mut Vec<Action>) {
        (self.planned, self.has_said_why) = (None, false);
        // It reads the files as they are now.
        self.changes.apply();
        let is_coupled = self.policy.is_hot && !self.is_locked;
        let number = self.epochs.last().filter(|_| is_coupled).map_or(0, |parent| parent.number + 1);
        self.is_locked &= number > 0;
        self.runs += 1;
        let run = RunId(self.runs);
        self.epochs.push(Epoch { run, number, phase: Phase::Starting, was_live: false, since: now });
        actions.push(Action::Start { run, epoch: number, why });
    }

    /// The files have changed.
    fn restart(&mut self, now: Instant, actions: &mut Vec<Action>) {
        if self.policy.is_envoy {
            self.validating = Some(Validating::Restart);
            actions.push(Action::Validate);
        } else {
            self.replace(now, actions);
        }
    }

    /// Starts the successor of the live epoch: beside it, or once it has stopped.
    fn replace(&mut self, now: Instant, actions: &mut Vec<Action>) {
        self.planned = Some(Planned { at: now, why: Why::FilesChanged });
        if self.policy.is_hot && !self.is_locked {
            return;
        }
        if let Some(run) = self.current().map(|epoch| epoch.run) {
            self.leave(run, now, actions);
        }
    }

    fn live(&mut self, run: RunId, now: Instant, actions: &mut Vec<Action>) {
        let starting = self.starting().filter(|epoch| epoch.run == run);
        let Some(Epoch { number, since, .. }) = starting.copied() else { return };
        let took = now - since;
        actions.push(Action::Log(Note::Live { run, epoch: number, took }));
        self.set_phase(run, Phase::Live, now);
        self.epochs.iter_mut().filter(|epoch| epoch.run == run).for_each(|epoch| epoch.was_live = true);
        (self.was_live, self.has_failed, self.is_wanted) = (true, false, false);
        self.live_since.get_or_insert(now);
        let old: Vec<_> = self.epochs.iter().filter(|epoch| epoch.run != run).copied().collect();
        for epoch in old.into_iter().filter(|epoch| epoch.phase == Phase::Live) {
            self.set_phase(epoch.run, Phase::Draining, now);
        }
        if self.ending.is_some() {
            // The stop has waited for it: until now its parent had the connections, and could not be drained.
            self.leave(run, now, actions);
        }
    }

    fn validated(&mut self, verdict: Result<(), String>, now: Instant, actions: &mut Vec<Action>) {
        match (self.validating.take(), verdict) {
            _ if self.ending.is_some() => {}
            (None, _) => {}
            (Some(Validating::Restart), Ok(())) if self.epochs.is_empty() => {}
            (Some(Validating::Restart), Ok(())) => self.replace(now, actions),
            (Some(Validating::Restart), Err(words)) => {
                self.has_failed = true;
                actions.push(Action::Log(Note::Refused { words }));
            }
            (Some(Validating::FirstExit(exit)), Ok(())) => self.crashed(exit, now, actions),
            (Some(Validating::FirstExit(exit)), Err(words)) => {
                self.ending = Some(Outcome::Refused { exit, words });
            }
        }
    }

    /// That says nothing about the configuration.
    fn not_validated(&mut self, reason: String, now: Instant, actions: &mut Vec<Action>) {
        let validating = self.validating.take();
        if self.ending.is_some() {
            return;
        }
        match validating {
            Some(Validating::FirstExit(exit)) => self.crashed(exit, now, actions),
            Some(Validating::Restart) => {
                self.has_failed = true;
                actions.push(Action::Log(Note::NotChecked { reason }));
            }
            None => {}
        }
    }

    fn exited(&mut self, run: RunId, exit: Exit, now: Instant, actions: &mut Vec<Action>) {
        let Some(index) = self.epochs.iter().position(|epoch| epoch.run == run) else { return };
        let epoch = self.epochs.remove(index);
        let role = match epoch.phase {
            Phase::Starting | Phase::Live => Role::Current,
            Phase::Draining => Role::Old,
            Phase::Leaving | Phase::Stopping | Phase::Killed => Role::Stopped,
        };
        actions.push(Action::Log(Note::Exited { run, epoch: epoch.number, exit, role }));
        let has_parent = self.epochs.iter().any(|it| matches!(it.phase, Phase::Live | Phase::Draining));
        let may_have_locked =
            self.policy.is_hot && epoch.number > 0 && has_parent && !self.is_locked && !epoch.was_live;
        let is_awaited = |epoch: &Epoch| matches!(epoch.phase, Phase::Starting | Phase::Leaving);
        if self.ending.is_some() && !self.epochs.iter().any(is_awaited) {
            // Old ones drain no longer than the one that the end has waited for.
            self.terminate_all(now, actions);
        }
        if self.ending.is_some() || role == Role::Old {
            return;
        }
        if role == Role::Stopped {
            if may_have_locked {
                // It was stuck at its start.
                actions.push(Action::Unlock);
            }
            if self.epochs.is_empty() {
                let why = self.why_again();
                self.planned.get_or_insert(Planned { at: now, why });
            }
            return;
        }
        match epoch.phase {
            Phase::Starting if may_have_locked && self.current().is_some() => {
                // The old one serves on.
                self.has_failed = true;
                actions.push(Action::Unlock);
                actions.push(Action::Log(Note::RestartFailed { epoch: epoch.number, exit }));
            }
            // It goes on alone.
            Phase::Live if self.starting().is_some() => {}
            _ if exit.is_success() => self.end(Outcome::Done, now, actions),
            Phase::Starting if !self.was_live && NOT_EXECUTED.contains(&i32::from(exit.code())) => {
                self.end(Outcome::Refused { exit, words: String::new() }, now, actions);
            }
            Phase::Starting if !self.was_live && self.crashes.counted() == 0 && self.policy.is_envoy => {
                self.validating = Some(Validating::FirstExit(exit));
                actions.push(Action::Validate);
            }
            phase => {
                if may_have_locked && phase == Phase::Starting {
                    actions.push(Action::Unlock);
                }
                self.crashed(exit, now, actions);
            }
        }
    }

    /// The serving epoch has crashed.
    fn crashed(&mut self, exit: Exit, now: Instant, actions: &mut Vec<Action>) {
        let live = self.live_since.take().map_or(Duration::ZERO, |since| now - since);
        let Some(delay) = self.crashes.count(live, (self.jitter)()) else {
            let crashes = self.crashes.counted();
            return self.end(Outcome::GivenUp { exit, crashes }, now, actions);
        };
        // The one that drains has no listeners: without a successor no connection is accepted.
        let is_draining = self.epochs.iter().any(|epoch| epoch.phase == Phase::Draining);
        let delay = if is_draining && self.crashes.counted() == 1 { Duration::ZERO } else { delay };
        self.planned = Some(Planned { at: now + delay, why: Why::Crash });
        let (crashes, budget) = (self.crashes.counted(), self.policy.budget);
        actions.push(Action::Log(Note::BackingOff { delay, crashes, budget }));
    }

    /// The next epoch can't start beside an old one. One that drains has no other use.
    fn locked(&mut self, now: Instant, actions: &mut Vec<Action>) {
        self.is_locked = true;
        for epoch in self.epochs.clone().into_iter().filter(|epoch| epoch.phase == Phase::Draining) {
            self.terminate(epoch.run, now, actions);
        }
    }
}

#[cfg(test)]
mod tests;
