//! `attache run`: the agent.

use crate::app;
use crate::config::{Config, Environment, Mistakes, RunArgs};
use crate::telemetry;

/// Runs the agent. `unknown` are options that do not exist.
pub(super) fn run(args: &RunArgs, unknown: Vec<String>) -> anyhow::Result<()> {
    let config = own_config(args, unknown)?;
    let log = telemetry::init(&config.log);
    super::block_on(app::run(config, log))
}

/// The configuration in this process's environment.
pub(super) fn own_config(args: &RunArgs, mut unknown: Vec<String>) -> Result<Config, Mistakes> {
    let mut environment = Environment::new();
    for (name, value) in std::env::vars_os() {
        match (name.into_string(), value.into_string()) {
            (Ok(name), Ok(value)) => drop(environment.insert(name, value)),
            (Ok(name), Err(_)) if name.starts_with("ATTACHE_") => {
                unknown.push(format!("{name} is not UTF-8"))
            }
            _ => {}
        }
    }
    config(args, unknown, &environment)
}

/// The configuration, or all that is wrong with it; what is unknown goes first.
pub(super) fn config(
    args: &RunArgs,
    unknown: Vec<String>,
    environment: &Environment,
) -> Result<Config, Mistakes> {
    match (Config::new(args, environment), unknown.is_empty()) {
        (Ok(config), true) => Ok(config),
        (Ok(_), false) => Err(Mistakes(unknown)),
        (Err(Mistakes(all)), _) => Err(Mistakes(unknown.into_iter().chain(all).collect())),
    }
}
