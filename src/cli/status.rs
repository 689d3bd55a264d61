//! `attache status`: prints the state of a running agent.

use std::io::IsTerminal as _;
use std::time::Duration;

use http::Method;
use serde_json::Value;

use super::admin::AdminArgs;
use super::{note, report_table};
use crate::base::clock::Clock;

/// The interval of `--watch`.
const PERIOD: Duration = Duration::from_secs(1);
const TIMEOUT: Duration = Duration::from_secs(10);

/// Show the state of a running agent
///
/// For each secret: its identity, when it expires and renews, which Envoys hold which version, the last error, since when it
/// fails, and when the next try is. Of several CAs: which one signed, and which ones fail.
///
/// Exits with 1 if the agent is not ready: a secret is missing or has expired.
#[derive(Clone, Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  The agent of one socket, once a second:
    attache status --socket /run/attache/sds.sock --watch
  For scripts:
    attache status --output json | jq .secrets")]
pub(super) struct StatusArgs {
    /// The format: a table, or JSON (its fields are described in docs/status.md)
    #[arg(long, value_name = "FORMAT", value_enum, default_value_t = Output::Table)]
    output: Output,
    /// Print the state every second until interrupted, or until the output is closed; if the agent becomes unreachable,
    /// wait for it
    #[arg(long)]
    watch: bool,
    #[command(flatten)]
    agent: AdminArgs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Output {
    Table,
    Json,
}

pub(super) fn run(args: &StatusArgs) -> anyhow::Result<()> {
    let is_terminal = std::io::stdout().is_terminal();
    super::block_on(async {
        if args.watch {
            return super::until_output_is_closed(watch(args, is_terminal)).await;
        }
        let report = fetch(args).await?;
        super::print(format(args, &report, is_terminal))?;
        if report.get("ready").and_then(Value::as_bool) == Some(true) {
            return Ok(());
        }
        anyhow::bail!("the agent is not ready: {}", missing(&report));
    })
}

/// Prints the state every second. The first call must succeed: an agent that never answered most likely has another socket.
async fn watch(args: &StatusArgs, is_terminal: bool) -> anyhow::Result<()> {
    let mut report = fetch(args).await?;
    loop {
        // On a terminal: to the corner, and clear what is below it.
        let clear = if is_terminal { "\x1b[H\x1b[2J" } else { "" };
        super::print(format!("{clear}{}", format(args, &report, is_terminal)))?;
        tokio::time::sleep(PERIOD).await;
        report = fetch_again(args).await;
    }
}

/// Fetches the report, and waits for the agent as long as it is unreachable.
async fn fetch_again(args: &StatusArgs) -> Value {
    let mut reported = None;
    loop {
        match fetch(args).await {
            Ok(report) => return report,
            Err(error) => {
                let reason = super::with_causes(&error);
                if reported.as_ref() != Some(&reason) {
                    note(&format!("agent unreachable: {reason}; waiting for it"));
                }
                reported = Some(reason);
            }
        }
        tokio::time::sleep(PERIOD).await;
    }
}

async fn fetch(args: &StatusArgs) -> anyhow::Result<Value> {
    args.agent.call(Method::GET, "/v1/status", TIMEOUT).await
}

fn format(args: &StatusArgs, report: &Value, colours: bool) -> String {
    match args.output {
        Output::Table => report_table::table(report, Clock::system().now(), colours),
        Output::Json => format!("{report:#}\n"),
    }
}

fn missing(report: &Value) -> String {
    if report.get("workloads").is_some() {
        let number = |field| report.get(field).and_then(Value::as_u64).unwrap_or_default();
        let (count, ready) = (number("workload_count"), number("ready_count"));
        return match count - ready.min(count) {
            0 => "not all files of workloads are used".to_owned(),
            missing => format!("{missing} of {count} workloads are not"),
        };
    }
    let text = |one: &Value, field| one.get(field).and_then(Value::as_str).unwrap_or_default().to_owned();
    let each = report.get("missing").and_then(Value::as_array).into_iter().flatten();
    let each = each.map(|one| format!("{}: {}", text(one, "name"), text(one, "reason")));
    each.collect::<Vec<_>>().join("; ")
}
