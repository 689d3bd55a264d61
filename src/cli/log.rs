//! `attache log`: shows or sets the log level of a running agent.

use std::time::Duration;

use http::Method;
use serde_json::Value;

use super::admin::AdminArgs;

/// Show or set the log level of a running agent, until it restarts.
#[derive(Clone, Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  The level of one part of the agent, the others as before:
    attache log info,attache::source=debug --socket /run/attache/sds.sock
  The level at present:
    attache log")]
pub(super) struct LogArgs {
    /// error, warn, info, debug or trace; TARGET=LEVEL,… for parts of the agent [default: show the present level]
    #[arg(value_name = "LEVEL", value_parser = level)]
    level: Option<String>,
    #[command(flatten)]
    agent: AdminArgs,
}

fn level(text: &str) -> Result<String, String> {
    crate::ops::telemetry::parse_filter(text).map(|_| text.to_owned())
}

pub(super) fn run(args: &LogArgs) -> anyhow::Result<()> {
    let (method, target) = match &args.level {
        Some(level) => (Method::PUT, format!("/v1/log?level={level}")),
        None => (Method::GET, "/v1/log".to_owned()),
    };
    let answer = super::block_on(args.agent.call(method, &target, Duration::from_secs(10)))?;
    let level = answer.get("level").and_then(Value::as_str).unwrap_or("unknown");
    super::print(format!("{level}\n"))
}
