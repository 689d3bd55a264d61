//! The program that the agent keeps running, in the table.

use std::fmt::Write as _;
use std::time::SystemTime;

use serde_json::Value;

use super::{ahead, list, moment, paint, past, row, text};

pub(super) fn write_command(out: &mut String, command: &Value, now: SystemTime, colours: bool) {
    let state = text(command, "state");
    let _ =
        writeln!(out, "\ncommand {}: {}", text(command, "program"), paint(state, state == "live", colours));
    for epoch in list(command, "epochs") {
        let number = |field| epoch.get(field).and_then(Value::as_u64).unwrap_or_default();
        let since = moment(epoch, "since").map_or(String::new(), |at| past(at, now));
        let (number, pid) = (number("epoch"), number("pid"));
        row(out, "epoch", &format!("{number}, process {pid}, {} since {since}", text(epoch, "state")));
    }
    let restarts = command.get("restarts").unwrap_or(&Value::Null);
    let count = |field| restarts.get(field).and_then(Value::as_u64).unwrap_or_default();
    let counts = [
        (count("files"), "for changed files"),
        (count("crash"), "after a crash"),
        (count("failed"), "failed"),
    ];
    let counts: Vec<_> =
        counts.iter().filter(|(count, _)| *count > 0).map(|(count, why)| format!("{count} {why}")).collect();
    if !counts.is_empty() {
        row(out, "restarts", &counts.join(", "));
    }
    if let Some(exit) = command.get("last_exit").filter(|exit| !exit.is_null()) {
        let at = moment(exit, "at").map_or(String::new(), |at| past(at, now));
        row(out, "last exit", &format!("{} at {at}", text(exit, "reason")));
    }
    if let Some(at) = moment(command, "next_start") {
        row(out, "next start", &ahead(at, now));
    }
    for (label, field) in [("last error", "error"), ("files", "files_error")] {
        if let Some(error) = command.get(field).and_then(Value::as_str) {
            row(out, label, error);
        }
    }
    let secrets: Vec<_> = list(command, "secrets").collect();
    if !secrets.is_empty() {
        let secrets = secrets.iter().map(|one| match text(one, "has") {
            "current" => text(one, "name").to_owned(),
            "older" => format!("{} (an older version)", text(one, "name")),
            _ => format!("{} (not yet)", text(one, "name")),
        });
        row(out, "has", &crate::base::text::listed(secrets, ", "));
    }
}
