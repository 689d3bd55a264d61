//! `attache renew`: makes a running agent renew its certificate.

use std::time::Duration;

use anyhow::{Context as _, bail};
use http::Method;

use super::admin::AdminArgs;
use super::report_table;
use crate::base::clock::Clock;

/// Make a running agent renew its certificate now
///
/// The agent requests it from its CA; the command waits for the outcome.
///
/// Exits with 1 and the CA's reason if the renewal fails; the agent continues to serve the old certificate.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct RenewArgs {
    /// default, or ROOTCA: both are renewed together
    #[arg(value_name = "NAME", default_value = "default")]
    name: String,
    #[command(flatten)]
    agent: AdminArgs,
}

/// Renews, and prints the new state.
pub(super) fn run(args: &RenewArgs) -> anyhow::Result<()> {
    if !["default", "ROOTCA"].contains(&args.name.as_str()) {
        bail!(
            "{} is not renewed by a CA: files are read as soon as they change; renew default or ROOTCA",
            args.name
        );
    }
    let call = args.agent.call(Method::POST, "/v1/renew", Duration::from_secs(90));
    let report = super::block_on(call).context("renewal failed")?;
    super::print(report_table::table(&report, Clock::system().now(), false))
}
