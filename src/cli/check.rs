//! `attache check`: checks the prerequisites of an agent.

use std::fmt::Write as _;
use std::io::IsTerminal as _;

use serde_json::Value;

use super::{paint, run};
use crate::check::{self, Finding, Scope, Severity};
use crate::config::{NodeArgs, RunArgs, is_in_pod};

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
    attache check --issue
  The options of a node's agent, and each of its workloads:
    attache check node --ca embedded --workloads /etc/attache/workloads")]
#[command(args_conflicts_with_subcommands = true)]
pub(super) struct CheckArgs {
    #[command(subcommand)]
    subject: Option<Subject>,

    /// Also request a certificate from the CA, as the agent does, and discard it
    #[arg(long, help_heading = "Check")]
    issue: bool,
    #[command(flatten)]
    run: RunArgs,
}

#[derive(Clone, Debug, clap::Subcommand)]
enum Subject {
    Node(Box<NodeCheckArgs>),
}

/// Check the prerequisites of a node's agent with these options, and each of its workloads
///
/// The options and variables are those of attache node. Checked are the options, each file of --workloads (its keys, its
/// socket's directory, its token), the state directory, the agent's own credential, whether the CA is reachable, the directories
/// of the CSI sockets and of the kubelet, and with --ca-impersonate whether the agent's token is bound to its Pod. --output json
/// prints the same as JSON.
///
/// Exit codes: 0 no errors, 1 errors, 2 invalid options.
#[derive(Clone, Debug, clap::Args)]
struct NodeCheckArgs {
    #[command(flatten)]
    node: NodeArgs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Output {
    Table,
    Json,
}

/// The format of the report, and the options of the agent, whose outputs are directories.
fn split(args: &CheckArgs) -> (Output, RunArgs) {
    let mut run = args.run.clone();
    let format = take_format(&mut run.output);
    (format, run)
}

/// Takes the format of the report out of `outputs`.
fn take_format(outputs: &mut Vec<String>) -> Output {
    let mut format = Output::Table;
    outputs.retain(|output| {
        match output.as_str() {
            "json" => format = Output::Json,
            "table" => format = Output::Table,
            _ => return true,
        }
        false
    });
    format
}

/// `unknown` holds the unknown options.
pub(super) fn run(args: &CheckArgs, unknown: Vec<String>) -> anyhow::Result<()> {
    let (environment, unknown) = run::environment(unknown);
    let scope = Scope { issues: args.issue, is_in_pod: is_in_pod(&environment) };
    let (format, findings) = match &args.subject {
        Some(Subject::Node(of_node)) => {
            let mut node = of_node.node.clone();
            let mut format = Output::Table;
            node.change_output(|outputs| format = take_format(outputs));
            let config = run::load_node(&node, unknown, &environment)?;
            (format, super::block_on(async { Ok(check::check_node(config, scope).await) })?)
        }
        None => {
            let (format, run) = split(args);
            let config = run::load(&run, unknown, &environment)?;
            (format, super::block_on(async { Ok(check::check(config, scope).await) })?)
        }
    };
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
            let (format, run) = split(&CheckArgs {
                subject: None,
                issue: false,
                run: RunArgs { output, ..RunArgs::default() },
            });
            (format, run.output)
        };
        assert_eq!(split(&[]), (Output::Table, vec![]));
        assert_eq!(split(&["json"]), (Output::Json, vec![]));
        let outputs = ["/run/a,format=jks", "json", "/run/b"];
        assert_eq!(split(&outputs), (Output::Json, vec![outputs[0].to_owned(), outputs[2].to_owned()]));
        assert_eq!(split(&["json", "table"]), (Output::Table, vec![]));
    }
}
