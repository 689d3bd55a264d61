use super::*;

#[test]
fn a_stop_drains_terminates_and_kills() {
    let mut run = Run::live(HOT);
    assert_eq!(run.on(Event::Stop), [Action::Drain(RunId(1))]);
    assert_eq!(run.wait(DRAIN), [terminate(1)]);
    assert_eq!(run.wait(TERM_GRACE), [Action::Kill(RunId(1))]);
    assert_eq!(run.exit(1, CRASH), [end(Outcome::Done)]);
}

#[test]
fn a_stop_ends_the_drain_when_no_connection_is_left() {
    let mut run = Run::live(HOT);
    run.on(Event::Stop);
    assert_eq!(run.on(Event::Drained(RunId(1))), [terminate(1)]);
    assert_eq!(run.exit(1, Exit::Code(0)), [end(Outcome::Done)]);
}

#[test]
fn each_further_stop_is_a_hurry() {
    let mut run = Run::live(HOT);
    run.on(Event::Stop);
    assert_eq!(run.on(Event::Stop), [terminate(1)]);
    assert_eq!(run.on(Event::Stop), [Action::Kill(RunId(1))]);
}

#[test]
fn a_stop_ends_old_epochs_with_the_current_one() {
    let mut run = Run::restarted();
    assert_eq!(run.on(Event::Stop), [Action::Drain(RunId(2))]);
    assert_eq!(run.on(Event::Drained(RunId(2))), [terminate(1), terminate(2)]);
    run.exit(1, Exit::Code(0));
    assert_eq!(run.exit(2, Exit::Code(0)), [end(Outcome::Done)]);
}

#[test]
fn a_stop_while_nothing_runs_is_the_end() {
    assert_eq!(Run::new(HOT).on(Event::Stop), [end(Outcome::Done)]);
    let mut run = Run::live(HOT);
    run.exit(1, CRASH);
    assert_eq!(run.on(Event::Stop), [end(Outcome::Done)]);
    // A program that is only checked does not start later.
    let mut run = Run::live(HOT);
    run.change(1);
    run.on(Event::Stop);
    assert_eq!(run.on(Event::Validated(Ok(()))), []);
}

#[test]
fn a_program_that_drains_by_itself_has_the_drain_timeout() {
    let mut run = Run::live(Policy { drain_timeout: Duration::from_secs(20), ..ANY_PROGRAM });
    assert_eq!(run.on(Event::Stop), [terminate(1)]);
    assert_eq!(run.wait(Duration::from_secs(19)), []);
    assert_eq!(run.wait(Duration::from_secs(1)), [Action::Kill(RunId(1))]);
}

#[test]
fn a_stop_during_a_restart_waits_for_the_new_epoch_and_drains_it() {
    let mut run = Run::live(HOT);
    run.change(1);
    run.on(Event::Validated(Ok(())));
    assert_eq!(run.on(Event::Stop), []);
    assert_eq!(run.on(Event::Live(RunId(2))), [Action::Drain(RunId(2))]);
    assert_eq!(run.on(Event::Drained(RunId(2))), [terminate(1), terminate(2)]);
    run.exit(1, Exit::Code(0));
    assert_eq!(run.exit(2, Exit::Code(0)), [end(Outcome::Done)]);

    // It does not wait for ever, nor for one that has failed.
    for is_slow in [true, false] {
        let mut run = Run::live(HOT);
        run.change(1);
        run.on(Event::Validated(Ok(())));
        run.on(Event::Stop);
        let actions = if is_slow { run.wait(DRAIN) } else { run.exit(2, WRONG) };
        assert!(actions.contains(&terminate(1)), "{actions:?}");
    }
}

#[test]
fn a_stop_leaves_a_drain_alone_that_has_begun() {
    let mut run = Run::live(COLD);
    run.change(1);
    assert_eq!(run.on(Event::Validated(Ok(()))), [Action::Drain(RunId(1))]);
    assert_eq!(run.on(Event::Stop), []);
    assert_eq!(run.on(Event::Drained(RunId(1))), [terminate(1)]);
    assert_eq!(run.exit(1, Exit::Code(0)), [end(Outcome::Done)]);
}

#[test]
fn a_program_that_ignores_sigterm_is_killed_by_the_second_stop() {
    let mut run = Run::live(ANY_PROGRAM);
    assert_eq!(run.on(Event::Stop), [terminate(1)]);
    assert_eq!(run.on(Event::Stop), [Action::Kill(RunId(1))]);
}

#[test]
fn a_stop_ends_when_the_epoch_that_it_drains_crashes() {
    let mut run = Run::restarted();
    assert_eq!(run.on(Event::Stop), [Action::Drain(RunId(2))]);
    assert_eq!(run.exit(2, CRASH), [terminate(1)]);
    assert_eq!(run.exit(1, Exit::Code(0)), [end(Outcome::Done)]);
}

#[test]
fn a_stop_drains_the_epoch_that_serves_while_a_stuck_one_is_stopped() {
    let mut run = Run::live(HOT);
    run.change(1);
    run.on(Event::Validated(Ok(())));
    run.on(Event::Looked([2; 32]));
    assert_eq!(run.wait(START_PATIENCE), [terminate(2)]);
    assert_eq!(run.on(Event::Stop), [Action::Drain(RunId(1))]);
    assert_eq!(run.exit(2, Exit::Signal(15)), []);
    assert_eq!(run.on(Event::Drained(RunId(1))), [terminate(1)]);
}
