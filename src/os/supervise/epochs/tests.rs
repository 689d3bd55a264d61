mod stop;

use super::*;

const DEBOUNCE: Duration = Duration::from_millis(500);
const PARENT: Duration = Duration::from_secs(60);
const DRAIN: Duration = Duration::from_secs(5);

const HOT: Policy = Policy {
    is_hot: true,
    is_envoy: true,
    debounce: DEBOUNCE,
    budget: 10,
    drain_timeout: DRAIN,
    parent_shutdown: PARENT,
};
const COLD: Policy = Policy { is_hot: false, ..HOT };
const ANY_PROGRAM: Policy = Policy { is_envoy: false, ..COLD };

const CRASH: Exit = Exit::Signal(9);
const WRONG: Exit = Exit::Code(1);

/// The machine at a virtual time.
struct Run {
    epochs: Epochs,
    start: Instant,
    now: Instant,
}

impl Run {
    fn new(policy: Policy) -> Self {
        let now = Instant::now();
        Self { epochs: Epochs::new(policy, || 1.0), start: now, now }
    }

    /// The first epoch is live, and the files are known.
    fn live(policy: Policy) -> Self {
        let mut run = Self::new(policy);
        run.on(Event::Looked([0; 32]));
        assert_eq!(run.on(Event::Begin), [start(1, 0, Why::First)]);
        assert_eq!(run.on(Event::Live(RunId(1))), []);
        run
    }

    /// A second epoch is live beside the first.
    fn restarted() -> Self {
        let mut run = Self::live(HOT);
        run.change(1);
        assert_eq!(run.on(Event::Validated(Ok(()))), [start(2, 1, Why::FilesChanged)]);
        assert_eq!(run.on(Event::Live(RunId(2))), []);
        run
    }

    /// What to do, without what is logged.
    fn on(&mut self, event: Event) -> Vec<Action> {
        let mut actions = self.epochs.on(event, self.now);
        actions.retain(|action| !matches!(action, Action::Log(_)));
        actions
    }

    fn exit(&mut self, run: u64, exit: Exit) -> Vec<Action> {
        self.on(Event::Exited(RunId(run), exit))
    }

    /// Time passes, and everything that is due happens when it is due.
    fn wait(&mut self, time: Duration) -> Vec<Action> {
        let until = self.now + time;
        let mut actions = Vec::new();
        while let Some(due) = self.epochs.due().filter(|due| *due <= until) {
            self.now = due.max(self.now);
            let done = self.on(Event::Time);
            assert!(
                !done.is_empty() || self.epochs.due() != Some(due),
                "due and nothing to do: {:?}",
                self.epochs
            );
            actions.extend(done);
        }
        self.now = until;
        actions
    }

    /// The files change, and stand still.
    fn change(&mut self, content: u8) {
        assert_eq!(self.on(Event::Looked([content; 32])), []);
        assert_eq!(self.wait(DEBOUNCE), [Action::Validate]);
    }
}

fn start(run: u64, epoch: u32, why: Why) -> Action {
    Action::Start { run: RunId(run), epoch, why }
}

fn terminate(run: u64) -> Action {
    Action::Terminate(RunId(run))
}

fn end(outcome: Outcome) -> Action {
    Action::End(outcome)
}

#[test]
fn changed_files_are_validated_and_then_a_new_epoch_takes_over() {
    let mut run = Run::restarted();
    let phases: Vec<_> = run.epochs.epochs().iter().map(|epoch| (epoch.number, epoch.phase)).collect();
    assert_eq!(phases, [(0, Phase::Draining), (1, Phase::Live)]);
    run.wait(PARENT);
    assert_eq!(run.exit(1, Exit::Code(0)), []);
    assert_eq!(run.epochs.epochs().len(), 1);
}

#[test]
fn no_epoch_starts_before_the_one_before_is_live() {
    let mut run = Run::new(HOT);
    run.on(Event::Looked([0; 32]));
    run.on(Event::Begin);
    run.on(Event::Looked([1; 32]));
    assert_eq!(run.wait(START_PATIENCE - Duration::from_secs(1)), []);
    run.on(Event::Live(RunId(1)));
    assert_eq!(run.wait(DEBOUNCE), [], "the change was there before it was live: it is validated at once");
}

#[test]
fn no_epoch_starts_while_the_one_before_the_last_drains() {
    let mut run = Run::restarted();
    run.on(Event::Looked([2; 32]));
    assert_eq!(run.wait(PARENT), [], "its connections would be cut");
    assert_eq!(run.exit(1, Exit::Code(0)), [Action::Validate]);
    assert_eq!(run.on(Event::Validated(Ok(()))), [start(3, 2, Why::FilesChanged)]);
}

#[test]
fn that_changed_files_wait_for_an_old_epoch_is_said_once() {
    let mut run = Run::restarted();
    let mut notes = Vec::new();
    for content in 2..5 {
        notes.extend(run.epochs.on(Event::Looked([content; 32]), run.now));
    }
    assert_eq!(notes, [Action::Log(Note::Waiting { epoch: 0 })]);
}

#[test]
fn an_old_epoch_that_does_not_go_is_stopped() {
    let mut run = Run::restarted();
    assert_eq!(run.wait(PARENT), []);
    assert_eq!(run.wait(TERM_GRACE), [terminate(1)]);
    assert_eq!(run.wait(TERM_GRACE), [Action::Kill(RunId(1))]);
    assert_eq!(run.exit(1, CRASH), []);
}

#[test]
fn a_configuration_that_envoy_refuses_leaves_the_old_epoch_serving_and_the_next_one_is_tried() {
    let mut run = Run::live(HOT);
    run.change(1);
    assert_eq!(run.on(Event::Validated(Err("no".to_owned()))), []);
    assert_eq!(run.wait(PARENT), []);
    // Back to what the old epoch has read: nothing to do.
    run.change(2);
    assert_eq!(run.on(Event::Validated(Ok(()))), [start(2, 1, Why::FilesChanged)]);
}

#[test]
fn a_new_epoch_that_fails_late_leaves_the_old_one_serving_and_its_number_is_used_again() {
    let mut run = Run::live(HOT);
    run.change(1);
    run.on(Event::Validated(Ok(())));
    assert_eq!(run.exit(2, WRONG), [Action::Unlock]);
    assert_eq!(run.wait(PARENT), []);
    run.change(2);
    assert_eq!(run.on(Event::Validated(Ok(()))), [start(3, 1, Why::FilesChanged)]);
}

#[test]
fn a_failed_restart_is_repeated_on_request_and_a_successful_one_is_not() {
    let mut run = Run::live(HOT);
    assert_eq!(run.on(Event::Again), []);
    run.change(1);
    run.on(Event::Validated(Err("no".to_owned())));
    assert_eq!(run.on(Event::Again), [Action::Validate]);
}

#[test]
fn a_base_id_that_stays_locked_costs_a_stop_before_the_next_start() {
    let mut run = Run::live(HOT);
    run.change(1);
    run.on(Event::Validated(Ok(())));
    run.exit(2, WRONG);
    run.on(Event::Locked);
    run.change(2);
    assert_eq!(run.on(Event::Validated(Ok(()))), [Action::Drain(RunId(1))]);
    assert_eq!(run.on(Event::Drained(RunId(1))), [terminate(1)]);
    assert_eq!(run.exit(1, Exit::Code(0)), [start(3, 0, Why::FilesChanged)]);
    run.on(Event::Live(RunId(3)));
    run.change(3);
    assert_eq!(run.on(Event::Validated(Ok(()))), [start(4, 1, Why::FilesChanged)], "unlocked again");
}

#[test]
fn a_new_epoch_that_dies_while_the_old_one_drains_is_started_again_at_once() {
    let mut run = Run::restarted();
    assert_eq!(run.exit(2, CRASH), [start(3, 1, Why::Crash)]);
    run.on(Event::Live(RunId(3)));
    // The second time it is a crash like others.
    assert_eq!(run.exit(3, CRASH), []);
    assert_eq!(run.wait(Duration::from_millis(400)), [start(4, 1, Why::Crash)]);
}

#[test]
fn without_a_living_parent_the_epoch_is_0() {
    let mut run = Run::restarted();
    run.exit(1, Exit::Code(0));
    assert_eq!(run.exit(2, CRASH), []);
    assert_eq!(run.wait(Duration::from_millis(200)), [start(3, 0, Why::Crash)]);
}

#[test]
fn an_epoch_that_loses_its_parent_while_it_starts_goes_on() {
    let mut run = Run::live(HOT);
    run.change(1);
    run.on(Event::Validated(Ok(())));
    assert_eq!(run.exit(1, CRASH), []);
    assert_eq!(run.on(Event::Live(RunId(2))), []);
    assert_eq!(run.exit(2, CRASH), []);
    assert_eq!(run.wait(Duration::from_millis(200)), [start(3, 0, Why::Crash)]);
}

#[test]
fn crashes_back_off_until_the_budget_is_spent_and_the_exit_status_is_the_last_one() {
    let mut run = Run::live(HOT);
    for number in 1..=10 {
        assert_eq!(run.exit(number, CRASH), []);
        let longest = Duration::from_secs(30);
        assert_eq!(run.wait(longest), [start(number + 1, 0, Why::Crash)]);
        if number % 2 == 0 {
            run.on(Event::Live(RunId(number + 1)));
        }
    }
    let given_up = Outcome::GivenUp { exit: CRASH, crashes: 11 };
    assert_eq!(run.exit(11, CRASH), [end(given_up)]);
    assert_eq!((CRASH.code(), Exit::Code(3).code()), (137, 3));
}

#[test]
fn files_that_change_during_the_back_off_end_it() {
    let mut run = Run::live(HOT);
    for number in 1..=8 {
        run.exit(number, CRASH);
        run.wait(Duration::from_secs(30));
    }
    run.exit(9, CRASH);
    run.on(Event::Looked([1; 32]));
    assert_eq!(run.wait(DEBOUNCE), [start(10, 0, Why::Crash)]);
    run.on(Event::Live(RunId(10)));
    assert_eq!(run.wait(PARENT), [], "it was started with them");
}

#[test]
fn exit_0_unasked_is_the_end() {
    for policy in [HOT, COLD, ANY_PROGRAM] {
        assert_eq!(Run::live(policy).exit(1, Exit::Code(0)), [end(Outcome::Done)]);
    }
    // The old epoch goes first.
    let mut run = Run::restarted();
    assert_eq!(run.exit(2, Exit::Code(0)), [terminate(1)]);
    assert_eq!(run.exit(1, Exit::Code(0)), [end(Outcome::Done)]);
}

#[test]
fn a_configuration_that_is_refused_at_the_first_start_is_the_end_and_a_crash_is_not() {
    let mut run = Run::new(HOT);
    run.on(Event::Begin);
    assert_eq!(run.exit(1, WRONG), [Action::Validate]);
    let refused = Outcome::Refused { exit: WRONG, words: "no".to_owned() };
    assert_eq!(run.on(Event::Validated(Err("no".to_owned()))), [end(refused)]);

    let mut run = Run::new(HOT);
    run.on(Event::Begin);
    assert_eq!(run.exit(1, CRASH), [Action::Validate]);
    assert_eq!(run.on(Event::Validated(Ok(()))), []);
    assert_eq!(run.wait(Duration::from_millis(200)), [start(2, 0, Why::Crash)]);
}

#[test]
fn a_program_that_can_not_be_executed_is_the_end() {
    let mut run = Run::new(ANY_PROGRAM);
    run.on(Event::Begin);
    let refused = Outcome::Refused { exit: Exit::Code(127), words: String::new() };
    assert_eq!(run.exit(1, Exit::Code(127)), [end(refused)]);
}

#[test]
fn without_hot_restart_the_old_process_stops_before_the_new_one_starts() {
    let mut run = Run::live(COLD);
    run.change(1);
    assert_eq!(run.on(Event::Validated(Ok(()))), [Action::Drain(RunId(1))]);
    assert_eq!(run.wait(DRAIN), [terminate(1)]);
    assert_eq!(run.exit(1, Exit::Code(0)), [start(2, 0, Why::FilesChanged)]);

    let mut run = Run::live(ANY_PROGRAM);
    run.on(Event::Looked([1; 32]));
    assert_eq!(run.wait(DEBOUNCE), [terminate(1)]);
    assert_eq!(run.exit(1, Exit::Signal(15)), [start(2, 0, Why::FilesChanged)]);
}

#[test]
fn an_epoch_that_never_gets_live_makes_way_for_changed_files() {
    let mut run = Run::live(HOT);
    run.change(1);
    run.on(Event::Validated(Ok(())));
    assert_eq!(run.wait(10 * START_PATIENCE), [], "nothing newer is there");
    run.on(Event::Looked([2; 32]));
    assert_eq!(run.wait(DEBOUNCE), [terminate(2)]);
    assert_eq!(run.exit(2, Exit::Code(0)), [Action::Unlock, Action::Validate]);
    assert_eq!(run.on(Event::Validated(Ok(()))), [start(3, 1, Why::FilesChanged)]);
    // The first one likewise.
    let mut run = Run::new(HOT);
    run.on(Event::Looked([0; 32]));
    run.on(Event::Begin);
    run.on(Event::Looked([1; 32]));
    assert_eq!(run.wait(START_PATIENCE), [terminate(1)]);
    assert_eq!(run.exit(1, Exit::Code(0)), [start(2, 0, Why::FilesChanged)]);
}

#[test]
fn files_that_never_rest_cause_a_restart_after_ten_debounce_times_and_never_two_at_once() {
    let mut run = Run::live(Policy { parent_shutdown: Duration::from_secs(2), ..HOT });
    let mut starts = Vec::new();
    let mut content = 0_u32;
    let mut exits: Vec<(Instant, u64)> = Vec::new();
    let mut events = Vec::new();
    while run.now < run.start + Duration::from_secs(60) {
        content += 1;
        let mut digest = [0; 32];
        digest[..4].copy_from_slice(&content.to_le_bytes());
        events.push(Event::Looked(digest));
        while let Some(event) = events.pop() {
            let actions = run.on(event);
            for action in actions {
                match action {
                    Action::Validate => events.push(Event::Validated(Ok(()))),
                    Action::Start { run: id, .. } => {
                        let starting = run.epochs.epochs().iter().filter(|it| it.phase == Phase::Starting);
                        assert_eq!(starting.count(), 1);
                        assert!(run.epochs.epochs().len() <= 2);
                        starts.push(run.now);
                        exits.push((run.now + Duration::from_secs(2), id.0 - 1));
                        events.push(Event::Live(id));
                    }
                    other => panic!("{other:?}"),
                }
            }
            if let Some(index) = exits.iter().position(|(at, _)| *at <= run.now) {
                let (_, id) = exits.remove(index);
                events.push(Event::Exited(RunId(id), Exit::Code(0)));
            }
        }
        run.now += Duration::from_millis(50);
    }
    assert!((10..=12).contains(&starts.len()), "{}", starts.len());
    assert!(starts.windows(2).all(|pair| pair[1] - pair[0] >= 10 * DEBOUNCE));
}

#[test]
fn restarts_do_not_keep_the_budget_from_being_restored() {
    let mut run = Run::live(Policy { budget: 1, ..HOT });
    for epoch in 1..=4_u8 {
        run.wait(Duration::from_secs(200));
        run.change(epoch);
        run.on(Event::Validated(Ok(())));
        let number = u64::from(epoch) + 1;
        run.on(Event::Live(RunId(number)));
        run.exit(number - 1, Exit::Code(0));
    }
    assert_eq!(run.exit(5, CRASH), []);
    let started = run.wait(Duration::from_secs(1));
    assert_eq!(started, [start(6, 0, Why::Crash)]);
    run.on(Event::Live(RunId(6)));
    run.wait(Duration::from_secs(601));
    assert_eq!(run.exit(6, CRASH), [], "ten minutes restore the budget");
    run.wait(Duration::from_secs(1));
    assert_eq!(run.exit(7, CRASH), [end(Outcome::GivenUp { exit: CRASH, crashes: 2 })]);
}

#[test]
fn a_restart_that_is_requested_while_another_one_fails_is_made() {
    let mut run = Run::live(HOT);
    run.change(1);
    assert_eq!(run.on(Event::Again), []);
    assert_eq!(run.on(Event::Validated(Err("wrong".to_owned()))), [Action::Validate]);
}

#[test]
fn a_check_that_could_not_be_made_is_no_verdict() {
    let mut run = Run::new(HOT);
    run.on(Event::Looked([0; 32]));
    run.on(Event::Begin);
    assert_eq!(run.exit(1, WRONG), [Action::Validate]);
    assert_eq!(run.on(Event::NotValidated("no process".to_owned())), []);
    assert_eq!(run.wait(Duration::from_secs(1)), [start(2, 0, Why::Crash)]);
    run.on(Event::Live(RunId(2)));
    run.change(1);
    assert_eq!(run.on(Event::NotValidated("no process".to_owned())), []);
    assert_eq!(run.on(Event::Again), [Action::Validate]);
}

#[test]
fn an_epoch_that_waits_for_a_parent_that_has_gone_makes_way_for_a_first_one() {
    let mut run = Run::live(HOT);
    run.change(1);
    run.on(Event::Validated(Ok(())));
    assert_eq!(run.exit(1, CRASH), []);
    run.now += START_PATIENCE;
    let actions = run.epochs.on(Event::Time, run.now);
    let stuck = Note::Stuck { epoch: 1, why: Why::Crash };
    assert_eq!(actions, [Action::Log(stuck), terminate(2)], "no file has changed");
    assert_eq!(run.exit(2, Exit::Signal(15)), [start(3, 0, Why::Crash)]);
}

#[test]
fn an_old_epoch_that_had_to_be_stopped_has_left_no_mark() {
    let mut run = Run::restarted();
    run.exit(1, Exit::Code(0));
    run.change(2);
    run.on(Event::Validated(Ok(())));
    run.on(Event::Live(RunId(3)));
    assert_eq!(run.wait(PARENT + TERM_GRACE), [terminate(2)]);
    assert_eq!(run.exit(2, Exit::Signal(15)), []);
}
