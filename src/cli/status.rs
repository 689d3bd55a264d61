//! `attache status`: the state of a running agent, for people.

use std::fmt::Write as _;
use std::io::{IsTerminal as _, Write as _};
use std::time::{Duration, SystemTime};

use anyhow::Context as _;
use http::Method;
use serde_json::Value;

use super::admin::AdminArgs;
use super::{note, paint};
use crate::base::clock::{Clock, rfc3339, span};
use crate::base::limits;

/// How often `--watch` looks.
const PERIOD: Duration = Duration::from_secs(1);

/// Show each secret of a running agent: whose it is, when it ends and renews, who holds which version, what failed last.
///
/// Exits with 1 if the agent is not ready: a secret is missing or has expired.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct StatusArgs {
    /// What to print: a table, or JSON (its shape is described in docs/status.md)
    #[arg(long, value_name = "FORMAT", value_enum, default_value_t = Output::Table)]
    output: Output,
    /// Print it anew each second, until interrupted; an agent that is gone is waited for
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

/// Asks, and prints to standard output.
pub(super) fn run(args: &StatusArgs) -> anyhow::Result<()> {
    let is_terminal = std::io::stdout().is_terminal();
    super::block_on(async {
        let mut is_known = false;
        let mut gone = None;
        loop {
            let answered = args.agent.call(Method::GET, "/v1/status", Duration::from_secs(10)).await;
            let report = match answered {
                Ok(report) => report,
                // One that was never there is most likely another one's path.
                Err(error) if !is_known => return Err(error),
                Err(error) => {
                    let why = super::told(&error);
                    if gone.as_ref() != Some(&why) {
                        note(&format!("the agent is gone: {why}; it is waited for"));
                    }
                    gone = Some(why);
                    tokio::time::sleep(PERIOD).await;
                    continue;
                }
            };
            is_known = args.watch;
            gone = None;
            let text = match args.output {
                Output::Table => table(&report, Clock::system().now(), is_terminal),
                Output::Json => format!("{report:#}\n"),
            };
            let mut out = std::io::stdout();
            if args.watch && is_terminal {
                // To the corner, and what is below it is cleared.
                write!(out, "\x1b[H\x1b[2J").context("writing the answer failed")?;
            }
            out.write_all(text.as_bytes()).and_then(|()| out.flush()).context("writing the answer failed")?;
            if args.watch {
                tokio::time::sleep(PERIOD).await;
                continue;
            }
            if report.get("ready").and_then(Value::as_bool) == Some(true) {
                return Ok(());
            }
            anyhow::bail!("the agent is not ready: {}", missing(&report));
        }
    })
}

fn missing(report: &Value) -> String {
    let each = report.get("missing").and_then(Value::as_array).into_iter().flatten();
    let each = each.map(|one| format!("{}: {}", text(one, "name"), text(one, "reason")));
    each.collect::<Vec<_>>().join("; ")
}

fn text<'a>(value: &'a Value, field: &str) -> &'a str {
    value.get(field).and_then(Value::as_str).unwrap_or_default()
}

fn moment(value: &Value, field: &str) -> Option<SystemTime> {
    humantime::parse_rfc3339(value.get(field)?.as_str()?).ok()
}

/// The table. With `colours` for a terminal.
pub(super) fn table(report: &Value, now: SystemTime, colours: bool) -> String {
    let mut out = String::new();
    let started = moment(report, "started").and_then(|at| now.duration_since(at).ok()).unwrap_or_default();
    let ca = report.get("ca").unwrap_or(&Value::Null);
    let addresses = ca.get("addresses").and_then(Value::as_array).into_iter().flatten();
    // A CA without an address is called as its provider is.
    let addresses = addresses.filter_map(Value::as_str).filter(|name| *name != text(ca, "provider"));
    let addresses: Vec<_> = addresses.collect();
    let at = if addresses.is_empty() { String::new() } else { format!(" at {}", addresses.join(", ")) };
    let is_ready = report.get("ready").and_then(Value::as_bool) == Some(true);
    // Writing to a String does not fail.
    let _ = writeln!(
        out,
        "attache {}, process {}, up {}, {}; CA: {}{at}",
        text(report, "version"),
        report.get("pid").unwrap_or(&Value::Null),
        span(started),
        if is_ready { paint("ready", true, colours) } else { paint("NOT READY", false, colours) },
        text(ca, "provider"),
    );
    let has_crl_file = report.get("crls").is_some_and(|crls| !crls.is_null());
    for secret in report.get("secrets").and_then(Value::as_array).into_iter().flatten() {
        let _ = writeln!(out);
        write_secret(&mut out, secret, has_crl_file, now, colours);
    }
    if let Some(output) = report.get("output").filter(|output| !output.is_null()) {
        let until = moment(output, "not_after").map_or("nothing written yet".to_owned(), |at| left(at, now));
        let _ = writeln!(out, "\noutput folder  {until}");
        let is = |field| output.get(field).and_then(Value::as_bool) == Some(true);
        let error = output.get("error").and_then(Value::as_str);
        let rows = [
            ("last error", error),
            ("disk", is("hanging").then_some("does not answer")),
            ("hook", is("hook_failing").then_some("fails: the log has its words")),
        ];
        for (label, words) in rows.iter().filter_map(|(label, words)| Some((label, (*words)?))) {
            let _ = writeln!(out, "    {label:<12} {words}");
        }
    }
    let error = |field| report.get(field).and_then(|it| it.get("error")).and_then(Value::as_str);
    let rows = [
        ("CRL file", error("crls")),
        ("state", error("state")),
        ("last refusal", report.get("refusal").and_then(Value::as_str)),
    ];
    for (label, words) in rows.iter().filter_map(|(label, words)| Some((label, (*words)?))) {
        let _ = writeln!(out, "\n{label}: {words}");
    }
    out
}

fn write_secret(out: &mut String, secret: &Value, has_crl_file: bool, now: SystemTime, colours: bool) {
    let state = text(secret, "state");
    let origin =
        secret.get("origin").and_then(Value::as_str).map_or(String::new(), |from| format!(", from {from}"));
    let _ = writeln!(out, "{}: {}{origin}", text(secret, "name"), paint(state, state == "ok", colours));
    let mut row = |label: &str, value: &str| {
        let _ = writeln!(out, "    {label:<12} {value}");
    };
    if let Some(pair) = secret.get("key_pair").filter(|pair| !pair.is_null()) {
        row("identity", text(pair, "names"));
        row(
            "certificate",
            &format!(
                "serial {}, {}, by {}",
                text(pair, "serial"),
                text(pair, "key_type"),
                text(pair, "issuer")
            ),
        );
    }
    if let Some(bundle) = secret.get("trust_bundle").filter(|bundle| !bundle.is_null()) {
        for root in bundle.get("roots").and_then(Value::as_array).into_iter().flatten() {
            let until = moment(root, "not_after").map_or(String::new(), |at| left(at, now));
            row("root", &format!("{} (serial {}): {until}", text(root, "subject"), text(root, "serial")));
        }
        // Where CRLs are wanted, that there are none means: revoked certificates are accepted.
        match bundle.get("crls").and_then(Value::as_u64) {
            Some(0) if has_crl_file => row("CRLs", "0: revoked certificates are accepted"),
            None | Some(0) => {}
            Some(count) => row("CRLs", &count.to_string()),
        }
    }
    if let Some(at) = moment(secret, "not_after") {
        row("valid", &left(at, now));
    }
    if let Some(at) = moment(secret, "renews") {
        let when = match at.duration_since(now) {
            Ok(ahead) => format!("in {}", span(ahead)),
            Err(late) => format!("due for {}", span(late.duration())),
        };
        row("renewal", &format!("{} ({when})", rfc3339(at)));
    }
    if !text(secret, "version").is_empty() {
        row("version", text(secret, "version"));
    }
    let streams = secret.get("streams").and_then(Value::as_u64).unwrap_or_default();
    row("streams", &streams_text(secret, streams));
    if let Some(rejection) = secret.get("rejection").filter(|rejection| !rejection.is_null()) {
        let (version, node) = (text(rejection, "version"), text(rejection, "node"));
        row("rejected", &format!("version {version} by {node}: {}", text(rejection, "reason")));
    }
    if let Some(error) = secret.get("error").and_then(Value::as_str) {
        row("last error", error);
    }
}

fn streams_text(secret: &Value, streams: u64) -> String {
    let current = text(secret, "version");
    let holding = secret.get("holding").and_then(Value::as_array).into_iter().flatten();
    let mut told = 0;
    let mut parts = Vec::new();
    for one in holding {
        let count = one.get("streams").and_then(Value::as_u64).unwrap_or_default();
        told += count;
        let nodes = one.get("nodes").and_then(Value::as_array).into_iter().flatten();
        let nodes: Vec<_> = nodes.filter_map(Value::as_str).collect();
        let nodes =
            if nodes.is_empty() { String::new() } else { format!(" ({})", limits::listed(&nodes, ", ")) };
        match text(one, "version") {
            version if version == current => parts.insert(0, format!("{count} with this version{nodes}")),
            version => parts.push(format!("{count} with {version}{nodes}")),
        }
    }
    if streams > told {
        parts.push(format!("{} with none", streams - told));
    }
    if parts.is_empty() { "0".to_owned() } else { format!("{streams}: {}", parts.join(", ")) }
}

/// A moment in the future with the time until then, or EXPIRED.
fn left(at: SystemTime, now: SystemTime) -> String {
    let shown = rfc3339(at);
    match at.duration_since(now) {
        Ok(left) => format!("until {shown} ({} left)", span(left)),
        Err(past) => format!("until {shown} (EXPIRED {} ago)", span(past.duration())),
    }
}
