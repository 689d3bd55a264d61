//! `attache check`: checks the prerequisites of an agent.

use std::fmt::Write as _;
use std::io::IsTerminal as _;

use serde_json::Value;

use super::{paint, run};
use crate::check::{self, Finding, Scope, Severity};
use crate::config::{RunArgs, is_in_pod};

/// Check the prerequisites of an agent with these options
///
/// Nothing is served. Checked are the options, the socket's directory, mounted files, CRLs, the token (its audience and expiry),
/// whether the CA is reachable and its TLS certificate valid, the kernel's limits.
///
/// The options and variables are those of attache run, so in the agent's container the command needs none. Each line is ok,
/// warning or error, with the remedy.
///
/// Exit codes: 0 no errors, 1 errors, 2 invalid options.
#[derive(Clone, Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  The options of the agent in this container, without a certificate:
    attache check
  The same, and request a certificate:
    attache check --issue")]
pub(super) struct CheckArgs {
    /// Also request a certificate from the CA, as the agent does, and discard it
    #[arg(long, help_heading = "Check")]
    issue: bool,
    /// The format: a table, or JSON (an array of objects with state, about and text)
    #[arg(long, value_name = "FORMAT", value_enum, default_value_t = Output::Table, help_heading = "Check")]
    output: Output,
    #[command(flatten)]
    run: RunArgs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Output {
    Table,
    Json,
}

/// `unknown` holds the unknown options.
pub(super) fn run(args: &CheckArgs, unknown: Vec<String>) -> anyhow::Result<()> {
    let (environment, unknown) = run::environment(unknown);
    let config = run::config(&args.run, unknown, &environment)?;
    let scope = Scope { issues: args.issue, is_in_pod: is_in_pod(&environment) };
    let findings = super::block_on(async { Ok(check::check(config, scope).await) })?;
    let text = match args.output {
        Output::Table => table(&findings, std::io::stdout().is_terminal()),
        Output::Json => format!("{:#}\n", Value::Array(findings.iter().map(Finding::json).collect())),
    };
    super::print(text)?;
    match findings.iter().filter(|finding| finding.state == Severity::Error).count() {
        0 => Ok(()),
        1 => anyhow::bail!("1 error"),
        count => anyhow::bail!("{count} errors"),
    }
}

fn table(findings: &[Finding], colours: bool) -> String {
    let mut out = String::new();
    for Finding { state, about, text } in findings {
        let word = paint(&format!("{:<8}", state.word()), *state == Severity::Ok, colours);
        // Writing to a String does not fail.
        let _ = writeln!(out, "{word}{about:<19} {text}");
    }
    out
}
