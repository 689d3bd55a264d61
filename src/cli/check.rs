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
/// whether the CA is reachable and its TLS certificate valid, the kernel's limits, and the COMMAND: Envoy's own check of its
/// configuration.
///
/// The options and variables are those of attache run, so in the agent's container the command needs none. Each line is ok,
/// warning or error, with the remedy. --output json prints an array of objects with state, about and text instead
/// (--output table is the default; other values of --output are directories, as of attache run).
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
    #[command(flatten)]
    run: RunArgs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Output {
    Table,
    Json,
}

/// The format of the report, and the options of the agent, whose outputs are directories.
fn split(args: &CheckArgs) -> (Output, RunArgs) {
    let mut run = args.run.clone();
    let mut format = Output::Table;
    run.output.retain(|output| {
        match output.as_str() {
            "json" => format = Output::Json,
            "table" => format = Output::Table,
            _ => return true,
        }
        false
    });
    (format, run)
}

/// `unknown` holds the unknown options.
pub(super) fn run(args: &CheckArgs, unknown: Vec<String>) -> anyhow::Result<()> {
    let (format, run) = split(args);
    let (environment, unknown) = run::environment(unknown);
    let config = run::load(&run, unknown, &environment)?;
    let scope = Scope { issues: args.issue, is_in_pod: is_in_pod(&environment) };
    let findings = super::block_on(async { Ok(check::check(config, scope).await) })?;
    let text = match format {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_of_an_agent_with_outputs_is_taken_and_the_report_has_its_format() {
        let split = |outputs: &[&str]| {
            let output = outputs.iter().map(|&output| output.to_owned()).collect();
            let (format, run) =
                split(&CheckArgs { issue: false, run: RunArgs { output, ..RunArgs::default() } });
            (format, run.output)
        };
        assert_eq!(split(&[]), (Output::Table, vec![]));
        assert_eq!(split(&["json"]), (Output::Json, vec![]));
        let outputs = ["/run/a,format=jks", "json", "/run/b"];
        assert_eq!(split(&outputs), (Output::Json, vec![outputs[0].to_owned(), outputs[2].to_owned()]));
        assert_eq!(split(&["json", "table"]), (Output::Table, vec![]));
    }
}
