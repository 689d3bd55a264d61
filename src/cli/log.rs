//! `attache log`: what a running agent logs.

use std::io::Write as _;
use std::time::Duration;

use anyhow::Context as _;
use http::Method;
use serde_json::Value;

use super::admin::AdminArgs;

/// Show or set what a running agent logs, until it restarts.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct LogArgs {
    /// error, warn, info, debug or trace; TARGET=LEVEL,… for parts [default: show what is logged now]
    #[arg(value_name = "LEVEL", value_parser = level)]
    level: Option<String>,
    #[command(flatten)]
    agent: AdminArgs,
}

fn level(text: &str) -> Result<String, String> {
    crate::ops::telemetry::parse_filter(text).map(|_| text.to_owned())
}

/// Asks or sets, and prints what is logged now.
pub(super) fn run(args: &LogArgs) -> anyhow::Result<()> {
    let (method, target) = match &args.level {
        Some(level) => (Method::PUT, format!("/v1/log?level={level}")),
        None => (Method::GET, "/v1/log".to_owned()),
    };
    let answer = super::block_on(args.agent.call(method, &target, Duration::from_secs(10)))?;
    let level = answer.get("level").and_then(Value::as_str).unwrap_or("unknown");
    writeln!(std::io::stdout(), "{level}").context("writing the answer failed")
}
