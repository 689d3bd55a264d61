//! `attache check`: whether what an agent needs is there.

use std::fmt::Write as _;
use std::io::{IsTerminal as _, Write as _};

use anyhow::Context as _;
use serde_json::Value;

use super::{paint, run};
use crate::check::{self, Finding, Scope, State};
use crate::config::{RunArgs, is_in_pod};

/// Check what an agent with these options would need, without serving: the options, the socket's folder, mounted files,
/// CRLs, the token (whom it is for, when it ends), whether the CA is there and its TLS certificate good, what the kernel
/// has room for.
///
/// It takes the options and variables of attache run, so that in the agent's container it needs none. Each line says ok,
/// warning or error, and what to do.
///
/// Exit codes: 0 no errors, 1 errors, 2 mistakes in the options.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct CheckArgs {
    /// Ask the CA for a certificate, too, as the agent would. It is thrown away
    #[arg(long, help_heading = "Check")]
    issue: bool,
    /// What to print: a table, or JSON (an array of objects with state, about and text)
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

/// Checks, and prints to standard output. `unknown` are options that do not exist.
pub(super) fn run(args: &CheckArgs, unknown: Vec<String>) -> anyhow::Result<()> {
    let (environment, unknown) = run::environment(unknown);
    let config = run::config(&args.run, unknown, &environment)?;
    let scope = Scope { issues: args.issue, is_in_pod: is_in_pod(&environment) };
    let findings = super::block_on(async { Ok(check::check(config, scope).await) })?;
    let mut out = std::io::stdout();
    let text = match args.output {
        Output::Table => table(&findings, out.is_terminal()),
        Output::Json => format!("{:#}\n", Value::Array(findings.iter().map(Finding::json).collect())),
    };
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).context("writing the answer failed")?;
    match findings.iter().filter(|finding| finding.state == State::Error).count() {
        0 => Ok(()),
        1 => anyhow::bail!("there is an error"),
        count => anyhow::bail!("there are {count} errors"),
    }
}

fn table(findings: &[Finding], colours: bool) -> String {
    let mut out = String::new();
    for Finding { state, about, text } in findings {
        let word = paint(&format!("{:<8}", state.word()), *state == State::Ok, colours);
        // Writing to a String does not fail.
        let _ = writeln!(out, "{word}{about:<19} {text}");
    }
    out
}
