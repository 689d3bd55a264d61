//! `attache run`: the agent.

use super::variables;
use crate::agent;
use crate::config::{Config, ConfigErrors, Environment, RunArgs, is_in_pod};
use crate::ops::telemetry;
use crate::os::systemd::Started;

/// Runs the agent. `unknown` holds the unknown options.
pub(super) fn run(args: &RunArgs, unknown: Vec<String>) -> anyhow::Result<()> {
    let (environment, unknown) = environment(unknown);
    // First, before the numbers of the passed file descriptors are reused.
    let started = Started { is_in_pod: is_in_pod(&environment), ..Started::new(&environment)? };
    let config = config(args, unknown, &environment)?;
    let log = telemetry::init(&config.log);
    if config.landlock {
        log.hold();
    }
    // In a box: the whole agent is in this future, which would be copied on the stack.
    let outcome = super::block_on(Box::pin(agent::run(config, log.clone(), started)));
    log.close(None);
    outcome
}

/// This process's environment. A variable that can't be read is added to `errors`.
pub(super) fn environment(mut errors: Vec<String>) -> (Environment, Vec<String>) {
    let mut environment = Environment::new();
    for (name, value) in std::env::vars_os() {
        match (name.into_string(), value.into_string()) {
            (Ok(name), Ok(value)) => drop(environment.insert(name, value)),
            (Ok(name), Err(_)) if name.starts_with("ATTACHE_") => errors.push(format!("{name} is not UTF-8")),
            _ => {}
        }
    }
    (environment, errors)
}

/// The configuration, or all errors in it, the unknown options and variables first.
pub(super) fn config(
    args: &RunArgs,
    unknown: Vec<String>,
    environment: &Environment,
) -> Result<Config, ConfigErrors> {
    let unknown = [unknown, variables::mistakes(environment)].concat();
    match (Config::new(args, environment), unknown.is_empty()) {
        (Ok(config), true) => Ok(config),
        (Ok(_), false) => Err(ConfigErrors(unknown)),
        (Err(ConfigErrors(all)), _) => Err(ConfigErrors(unknown.into_iter().chain(all).collect())),
    }
}
