//! The options for the program that the agent keeps running.

use std::path::PathBuf;
use std::time::Duration;

use super::args::RunArgs;
use crate::options::{Reader, Setting};
use crate::os::supervise::{CommandLine, Policy, Restarts, Settings};

/// The program behind `--`, if there is one.
pub(super) fn command(r: &mut Reader<'_>, args: &RunArgs, drain_timeout: Duration) -> Option<Settings> {
    let restart_on = r.list("restart-on", &args.restart_on, &[], ':', |text| match text {
        "" => Err("it needs a path: give it a value, or leave it out".to_owned()),
        path => Ok(PathBuf::from(path)),
    });
    let debounce = r.duration("restart-debounce", &args.restart_debounce, &[], Duration::from_millis(10));
    let drain_time = r.parsed("drain-time", &args.drain_time, &[], parse_seconds);
    let is_cold = r.switch("no-hot-restart", args.no_hot_restart, &[]);
    let budget = r.parsed("restart-budget", &args.restart_budget, &[], |text| {
        text.parse::<u32>().map_err(|_| format!("{text:?} is not a number of restarts"))
    });
    let wait = r.duration("wait-timeout", &args.wait_timeout, &[], Duration::ZERO);
    if args.command.is_empty() {
        let meaningless = [
            ("restart-on", from(restart_on)),
            ("restart-debounce", from(debounce)),
            ("drain-time", from(drain_time)),
            ("no-hot-restart", from(is_cold)),
            ("restart-budget", from(budget)),
            ("wait-timeout", from(wait)),
        ];
        for (option, from) in meaningless {
            if let Some(from) = from {
                r.mistake(format!(
                    "{from}: without a COMMAND there is no program to start or restart; add -- COMMAND at the end, or leave \
                     out --{option}"
                ));
            }
        }
        return None;
    }
    let line = CommandLine::new(&args.command, is_cold.value == Some(true));
    let line = line.map_err(|mistakes| mistakes.into_iter().for_each(|mistake| r.mistake(mistake))).ok()?;
    if debounce.level.is_some() && restart_on.value.is_none() {
        r.mistake(format!(
            "{}: without --restart-on no file causes a restart; add that, or leave this out",
            debounce.from
        ));
    }
    if drain_time.level.is_some() && !line.is_envoy() {
        r.mistake(format!(
            "{}: {} is no Envoy, and takes no drain time; its time to exit is --drain-timeout",
            drain_time.from,
            line.name()
        ));
    }
    let from_arguments = line.drain_seconds();
    if let (Some(from), Some(seconds)) = (drain_time.level.map(|_| &drain_time.from), from_arguments) {
        r.mistake(format!(
            "{from} and --drain-time-s {seconds} in the COMMAND behind -- contradict each other: drop one of them"
        ));
    }
    let drain_seconds = from_arguments.or(drain_time.value).unwrap_or(45);
    // As Envoy's and Istio's defaults relate: the old epoch may finish what drains at the last moment.
    let parent_shutdown_seconds =
        line.parent_shutdown_seconds().unwrap_or(drain_seconds + drain_seconds.div_ceil(3).max(1));
    if parent_shutdown_seconds <= drain_seconds {
        r.mistake(format!(
            "--parent-shutdown-time-s {parent_shutdown_seconds} in the COMMAND behind -- ends an old Envoy before the drain time \
             ({drain_seconds} s) is over; make it longer, or leave it out"
        ));
    }
    let policy = Policy {
        is_hot: line.restarts() == Restarts::Hot,
        is_envoy: line.is_envoy(),
        debounce: debounce.or(Duration::from_millis(500)),
        budget: budget.or(10_u32),
        drain_timeout,
        parent_shutdown: Duration::from_secs(parent_shutdown_seconds),
    };
    Some(Settings {
        line,
        restart_on: restart_on.value.unwrap_or_default(),
        policy,
        drain_seconds,
        parent_shutdown_seconds,
        wait: wait.or(Duration::from_secs(30)),
    })
}

/// What sets an option, if it is set.
fn from<T>(setting: Setting<T>) -> Option<String> {
    setting.level.map(|_| setting.from)
}

/// Envoy counts whole seconds.
fn parse_seconds(text: &str) -> Result<u64, String> {
    let duration = crate::options::parse_duration(text)?;
    match (duration.as_secs(), duration.subsec_nanos()) {
        (seconds @ 1.., 0) => Ok(seconds),
        _ => Err(format!("{text:?} is not a whole number of seconds, 1 or more, which is what Envoy takes")),
    }
}
