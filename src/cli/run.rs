//! `attache run`: the agent.

use crate::app;
use crate::config::{Config, Environment, Mistakes, RunArgs};
use crate::telemetry;

/// Runs the agent. `unknown` are options that do not exist: they go into the report with the other mistakes.
pub(super) fn run(args: &RunArgs, unknown: Vec<String>) -> anyhow::Result<()> {
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
    let config = match (config, unknown.is_empty()) {
        (Ok(config), true) => config,
        (Ok(_), false) => return Err(Mistakes(unknown).into()),
        (Err(Mistakes(all)), _) => return Err(Mistakes(unknown.into_iter().chain(all).collect()).into()),
    };
    let log = telemetry::init(&config.log);
    super::block_on(app::run(config, log))
}
