//! `attache run` and `attache node`: the agent.

use std::pin::Pin;
use std::sync::Arc;

use clap::{Command, CommandFactory as _};
use tokio::runtime::Runtime;

use super::{NodeLine, RunLine, report_table, variables};
use crate::agent::{self, Load, RequestSignals, Requests};
use crate::config::{Config, ConfigErrors, Environment, NodeArgs, NodeConfig, RunArgs, is_in_pod};
use crate::ops::telemetry::{self, Log};
use crate::os::systemd::{StartError, Started};

/// The agent's process, before its options are read.
pub(super) struct Process {
    environment: Environment,
    /// Mistakes in the environment.
    errors: Vec<String>,
    started: Result<Started, StartError>,
    runtime: Runtime,
    signals: RequestSignals,
}

impl Process {
    /// From now on no request by a signal ends the process: so this comes before all that takes time.
    pub(super) fn new() -> anyhow::Result<Self> {
        let (environment, errors) = environment(Vec::new());
        // First, before the numbers of the passed file descriptors are reused.
        let started = Started::new(&environment);
        let runtime = super::runtime()?;
        let signals = {
            let _context = runtime.enter();
            RequestSignals::new()?
        };
        Ok(Self { environment, errors, started, runtime, signals })
    }

    /// Runs the agent. `unknown` holds the unknown options.
    pub(super) fn run(self, args: RunArgs, mut unknown: Vec<String>) -> anyhow::Result<()> {
        let Self { environment, errors, started, runtime, signals } = self;
        unknown.extend(errors);
        let started = Started { is_in_pod: is_in_pod(&environment), ..started? };
        let config = load(&args, unknown, &environment)?;
        let log = telemetry::init(&config.log);
        if config.landlock {
            log.hold();
        }
        let load = Arc::new(move || Config::load(&args, &environment).map(Into::into));
        let requests = requests(signals, load);
        // In a box: the whole agent is in this future, which would be copied on the stack.
        finish(runtime, &log, Box::pin(agent::run(config, log.clone(), started, requests)))
    }

    /// Runs the agent of a node. `unknown` holds the unknown options.
    pub(super) fn run_node(self, args: NodeArgs, mut unknown: Vec<String>) -> anyhow::Result<()> {
        let Self { environment, errors, started, runtime, signals } = self;
        unknown.extend(errors);
        let started = Started { is_in_pod: is_in_pod(&environment), ..started? };
        let config = load_node(&args, unknown, &environment)?;
        let log = telemetry::init(&config.shared.log);
        let load = move || NodeConfig::load(&args, &environment).map(|config| config.shared.into());
        let requests = requests(signals, Arc::new(load));
        finish(runtime, &log, Box::pin(agent::run_node(config, log.clone(), started, requests)))
    }
}

fn requests(signals: RequestSignals, load: Arc<Load>) -> Requests {
    Requests { signals, load, table: |report, now| report_table::table(report, now, false) }
}

/// Runs the agent to its end.
fn finish(
    runtime: Runtime,
    log: &Log,
    agent: Pin<Box<impl Future<Output = anyhow::Result<()>>>>,
) -> anyhow::Result<()> {
    let outcome = runtime.block_on(agent);
    // An unresponsive name server must not delay the exit.
    runtime.shutdown_background();
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

/// The configuration of this process's agent, or all errors in it.
pub(super) fn load(
    args: &RunArgs,
    unknown: Vec<String>,
    environment: &Environment,
) -> Result<Config, ConfigErrors> {
    with_unknown(Config::load(args, environment), unknown, environment, RunLine::command)
}

/// The same of `attache node`.
pub(super) fn load_node(
    args: &NodeArgs,
    unknown: Vec<String>,
    environment: &Environment,
) -> Result<NodeConfig, ConfigErrors> {
    with_unknown(NodeConfig::load(args, environment), unknown, environment, NodeLine::command)
}

/// The same without the options file.
pub(super) fn config(
    args: &RunArgs,
    unknown: Vec<String>,
    environment: &Environment,
) -> Result<Config, ConfigErrors> {
    with_unknown(Config::new(args, environment), unknown, environment, RunLine::command)
}

/// `config`, or all errors, the unknown options and variables of `command` first.
fn with_unknown<C>(
    config: Result<C, ConfigErrors>,
    unknown: Vec<String>,
    environment: &Environment,
    command: fn() -> Command,
) -> Result<C, ConfigErrors> {
    let unknown = [unknown, variables::mistakes(environment, command)].concat();
    match (config, unknown.is_empty()) {
        (Ok(config), true) => Ok(config),
        (Ok(_), false) => Err(ConfigErrors(unknown)),
        (Err(ConfigErrors(all)), _) => Err(ConfigErrors(unknown.into_iter().chain(all).collect())),
    }
}
