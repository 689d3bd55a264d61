//! The report of an agent with many workloads as a table: a line for each, what is wrong first.

use std::cmp::Reverse;
use std::fmt::Write as _;
use std::time::SystemTime;

use serde_json::Value;

use super::{list, moment, row, text};
use crate::base::clock::{rfc3339, span};
use crate::cli::paint;

/// Whether the report is one of many workloads.
pub(super) fn is_of_a_node(report: &Value) -> bool {
    report.get("workloads").is_some()
}

pub(super) fn table(report: &Value, now: SystemTime, colours: bool) -> String {
    let number = |field| report.get(field).and_then(Value::as_u64).unwrap_or_default();
    let (count, ready) = (number("workload_count"), number("ready_count"));
    let up = moment(report, "started").and_then(|at| now.duration_since(at).ok()).unwrap_or_default();
    let ca = report.get("ca").unwrap_or(&Value::Null);
    let state = match count - ready.min(count) {
        0 => paint("all ready", true, colours),
        missing => paint(&format!("{missing} NOT READY"), false, colours),
    };
    let mut out = format!(
        "attache {}, process {}, up {}, {count} workloads: {state}; CA: {}\n",
        text(report, "version"),
        report.get("pid").unwrap_or(&Value::Null),
        span(up),
        text(ca, "provider"),
    );
    let mut workloads: Vec<_> = list(report, "workloads").collect();
    // What is wrong comes first, and then what expires first.
    let is_fine = |workload: &Value| text(workload, "state") == "ok" && is_ready(workload);
    workloads.sort_by_key(|workload| {
        (is_fine(workload), Reverse(!is_ready(workload)), moment(workload, "not_after"))
    });
    let widest = workloads.iter().map(|workload| text(workload, "workload").chars().count()).max();
    let width = widest.unwrap_or_default().max("WORKLOAD".len());
    if !workloads.is_empty() {
        let _ = writeln!(
            out,
            "\n{:<width$}  {:<8}  {:<20}  {:<20}  {:>7}  IDENTITY",
            "WORKLOAD", "STATE", "EXPIRES", "RENEWS", "STREAMS"
        );
    }
    for workload in workloads {
        write_workload(&mut out, workload, width, now, is_fine(workload), colours);
    }
    for mistake in list(report, "mistakes") {
        let _ = writeln!(out, "\nfile of {} not used:", text(mistake, "workload"));
        for error in list(mistake, "errors").filter_map(Value::as_str) {
            row(&mut out, "error", error);
        }
    }
    if let Some(error) = report.get("directory_error").and_then(Value::as_str) {
        let _ = writeln!(out, "\nworkloads stay as they are: {error}");
    }
    out
}

fn is_ready(workload: &Value) -> bool {
    workload.get("ready").and_then(Value::as_bool) == Some(true)
}

fn write_workload(
    out: &mut String,
    workload: &Value,
    width: usize,
    now: SystemTime,
    is_fine: bool,
    colours: bool,
) {
    let at = |field| moment(workload, field).map_or_else(|| "-".to_owned(), |at| rfc3339(at).to_string());
    let state = format!("{:<8}", text(workload, "state"));
    let streams = workload.get("streams").and_then(Value::as_u64).unwrap_or_default();
    let identity = workload.get("identity").and_then(Value::as_str).unwrap_or("-");
    // Writing to a String does not fail.
    let _ = writeln!(
        out,
        "{:<width$}  {}  {:<20}  {:<20}  {streams:>7}  {identity}",
        text(workload, "workload"),
        paint(&state, is_fine, colours),
        at("not_after"),
        at("renews"),
    );
    if let Some(error) = workload.get("error").and_then(Value::as_str) {
        let since = moment(workload, "failing_since").and_then(|at| now.duration_since(at).ok());
        let since = since.map_or_else(String::new, |since| format!(" (for {})", span(since)));
        row(out, "error", &format!("{error}{since}"));
    }
}
