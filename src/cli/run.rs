//! `attache run`: the agent.

use crate::app;
use crate::config::{Config, Environment, Mistakes, RunArgs};
use crate::telemetry;

/// Runs the agent. `unknown` are options that do not exist.
pub(super) fn run(args: &RunArgs, unknown: Vec<String>) -> anyhow::Result<()> {
    let config = config(args, unknown)?;
    let log = telemetry::init(&config.log);
    super::block_on(app::run(config, log))
}

/// The options and the environment, together. `unknown` go into the report with the other mistakes.
pub(super) fn config(args: &RunArgs, unknown: Vec<String>) -> Result<Config, Mistakes> {
    let mut unknown = unknown;
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
    let config = Config::new(args, &environment);
    match (config, unknown.is_empty()) {
        (Ok(config), true) => Ok(config),
        (Ok(_), false) => Err(Mistakes(unknown)),
        (Err(Mistakes(all)), _) => Err(Mistakes(unknown.into_iter().chain(all).collect())),
    }
}
