//! `attache renew`: a new certificate now.

use std::io::Write as _;
use std::time::Duration;

use anyhow::{Context as _, bail};
use http::Method;

use super::admin::AdminArgs;
use super::status;
use crate::base::clock::Clock;

/// Have a running agent ask its CA for a new certificate now, and wait for what comes of it.
///
/// Exits with 1 and the CA's reason if there is none; the old certificate is served as before.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct RenewArgs {
    /// default, or ROOTCA: both are renewed together
    #[arg(value_name = "NAME", default_value = "default")]
    name: String,
    #[command(flatten)]
    agent: AdminArgs,
}

/// Asks, and prints the state afterwards.
pub(super) fn run(args: &RenewArgs) -> anyhow::Result<()> {
    if !["default", "ROOTCA"].contains(&args.name.as_str()) {
        bail!(
            "{} is not renewed by a CA: files are read as soon as they change; renew default or ROOTCA",
            args.name
        );
    }
    let call = args.agent.call(Method::POST, "/v1/renew", Duration::from_secs(90));
    let report = super::block_on(call).context("no new certificate")?;
    let table = status::table(&report, Clock::system().now(), false);
    std::io::stdout().write_all(table.as_bytes()).context("writing the answer failed")
}
