//! The agent's report (`docs/status.md`) as a table.

mod command;
mod node;

use std::fmt::Write as _;
use std::time::SystemTime;

use serde_json::Value;

use super::paint;
use crate::base::clock::{rfc3339, span};
use crate::base::text;

/// A text field; empty where it is missing.
fn text<'a>(value: &'a Value, field: &str) -> &'a str {
    value.get(field).and_then(Value::as_str).unwrap_or_default()
}

/// The items of a list; none where it is missing.
fn list<'a>(value: &'a Value, field: &str) -> impl Iterator<Item = &'a Value> {
    value.get(field).and_then(Value::as_array).into_iter().flatten()
}

fn moment(value: &Value, field: &str) -> Option<SystemTime> {
    humantime::parse_rfc3339(value.get(field)?.as_str()?).ok()
}

/// The report as a table, with `colours` for a terminal.
pub(super) fn table(report: &Value, now: SystemTime, colours: bool) -> String {
    let mut out = match node::is_of_a_node(report) {
        true => node::table(report, now, colours),
        false => heading(report, now, colours),
    };
    let has_crl_file = report.get("crls").is_some_and(|crls| !crls.is_null());
    for secret in list(report, "secrets") {
        out.push('\n');
        write_secret(&mut out, secret, has_crl_file, now, colours);
    }
    if let Some(output) = report.get("output").filter(|output| !output.is_null()) {
        write_output(&mut out, output, now);
    }
    if let Some(command) = report.get("command") {
        command::write_command(&mut out, command, now, colours);
    }
    for cluster in list(report, "clusters") {
        write_cluster(&mut out, cluster, now);
    }
    for one in list(report, "hanging") {
        let since = moment(one, "since").map_or(String::new(), |at| rfc3339(at).to_string());
        let _ = writeln!(
            out,
            "\nno answer: the file system of {} does not answer since {since}",
            text(one, "path")
        );
    }
    let error = |field| report.get(field).and_then(|it| it.get("error")).and_then(Value::as_str);
    let rows = [
        ("CRL file", error("crls")),
        ("state", error("state")),
        ("last refusal", report.get("refusal").and_then(Value::as_str)),
    ];
    for (label, text) in rows.iter().filter_map(|(label, text)| Some((label, (*text)?))) {
        let _ = writeln!(out, "\n{label}: {text}");
    }
    out
}

fn write_cluster(out: &mut String, cluster: &Value, now: SystemTime) {
    let number = |field| cluster.get(field).and_then(Value::as_u64).unwrap_or_default();
    let since = moment(cluster, "reachable_since");
    let state = match since.map(|since| now.duration_since(since).unwrap_or_default()) {
        Some(for_this_long) => format!("reachable for {}", span(for_this_long)),
        None if number("calls") == 0 => "not called yet".to_owned(),
        None => "not reachable".to_owned(),
    };
    let (name, objects) = (text(cluster, "name"), number("names"));
    let _ = writeln!(out, "\ncluster {name}  {state}, {objects} Secrets and ConfigMaps followed");
    if let Some(error) = cluster.get("last_error").and_then(Value::as_str) {
        let label = if since.is_some() { "last error" } else { "error" };
        row(out, label, error);
    }
}

fn heading(report: &Value, now: SystemTime, colours: bool) -> String {
    let up = moment(report, "started").and_then(|at| now.duration_since(at).ok()).unwrap_or_default();
    let ca = report.get("ca").unwrap_or(&Value::Null);
    let addresses = list(ca, "addresses").filter_map(Value::as_str);
    // A CA without an address is listed under its provider's name.
    let addresses: Vec<_> = addresses.filter(|name| *name != text(ca, "provider")).collect();
    let at = if addresses.is_empty() { String::new() } else { format!(" at {}", addresses.join(", ")) };
    let is_ready = report.get("ready").and_then(Value::as_bool) == Some(true);
    let mut out = format!(
        "attache {} on {}, process {}, up {}, {}; CA: {}{at}\n",
        text(report, "version"),
        text(report, "socket"),
        report.get("pid").unwrap_or(&Value::Null),
        span(up),
        paint(if is_ready { "ready" } else { "NOT READY" }, is_ready, colours),
        text(ca, "provider"),
    );
    // Of a single CA, the secrets say why it fails.
    if addresses.len() > 1 {
        write_cas(&mut out, ca, now);
    }
    out
}

/// Which of several CAs signed, and which ones fail.
fn write_cas(out: &mut String, ca: &Value, now: SystemTime) {
    let signed_by = text(ca, "signed_by");
    for one in list(ca, "members") {
        let address = text(one, "address");
        let issued = moment(one, "issued").map_or(String::new(), |at| format!(" {}", past(at, now)));
        if !signed_by.is_empty() && address == signed_by {
            row(out, "signed by", &format!("{address}{issued}"));
        }
        if let (Some(error), Some(since)) =
            (one.get("error").and_then(Value::as_str), moment(one, "failing_since"))
        {
            row(out, "failing", &format!("{address} since {}: {error}", past(since, now)));
        }
    }
}

fn row(out: &mut String, label: &str, value: &str) {
    // Writing to a String does not fail.
    let _ = writeln!(out, "    {label:<12} {value}");
}

/// A moment, and how long ago it was.
fn past(at: SystemTime, now: SystemTime) -> String {
    format!("{} ({} ago)", rfc3339(at), span(now.duration_since(at).unwrap_or_default()))
}

fn write_output(out: &mut String, output: &Value, now: SystemTime) {
    let until = moment(output, "not_after").map_or("nothing written yet".to_owned(), |at| left(at, now));
    let _ = writeln!(out, "\noutput directory  {until}");
    let directories: Vec<_> = list(output, "directories").collect();
    if directories.len() > 1 {
        for directory in directories {
            let until = moment(directory, "not_after");
            let until = until.map_or("nothing written yet".to_owned(), |at| left(at, now));
            row(out, "directory", &format!("{}  {until}", text(directory, "path")));
            write_directory(out, directory, now);
        }
    } else {
        write_directory(out, output, now);
    }
    if let Some(hook) = output.get("hook").filter(|hook| !hook.is_null()) {
        write_failure(out, "hook", text(hook, "error"), hook, now);
        for (index, line) in list(output, "hook_last_lines").filter_map(Value::as_str).enumerate() {
            row(out, if index == 0 { "hook output" } else { "" }, line);
        }
    }
}

/// What is wrong with a directory, or with the only one.
fn write_directory(out: &mut String, directory: &Value, now: SystemTime) {
    if let Some(error) = directory.get("error").and_then(Value::as_str) {
        write_failure(out, "last error", error, directory, now);
    }
    if directory.get("hanging").and_then(Value::as_bool) == Some(true) {
        row(out, "disk", "does not respond");
    }
}

/// A failure, since when it lasts, and when the next try is.
fn write_failure(out: &mut String, label: &str, error: &str, failing: &Value, now: SystemTime) {
    row(out, label, error);
    if let Some(since) = moment(failing, "failing_since") {
        row(out, "since", &past(since, now));
    }
    if let Some(at) = moment(failing, "next_try") {
        row(out, "next try", &ahead(at, now));
    }
}

/// A moment that is planned, and how far away it is.
fn ahead(at: SystemTime, now: SystemTime) -> String {
    let when = match at.duration_since(now) {
        Ok(ahead) => format!("in {}", span(ahead)),
        Err(late) => format!("due for {}", span(late.duration())),
    };
    format!("{} ({when})", rfc3339(at))
}

fn write_secret(out: &mut String, secret: &Value, has_crl_file: bool, now: SystemTime, colours: bool) {
    let state = text(secret, "state");
    let origin =
        secret.get("origin").and_then(Value::as_str).map_or(String::new(), |from| format!(", from {from}"));
    let _ = writeln!(out, "{}: {}{origin}", text(secret, "name"), paint(state, state == "ok", colours));
    let mut row = |label: &str, value: &str| self::row(out, label, value);
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
        for root in list(bundle, "roots") {
            let until = moment(root, "not_after").map_or(String::new(), |at| left(at, now));
            row("root", &format!("{} (serial {}): {until}", text(root, "subject"), text(root, "serial")));
        }
        // With a CRL file but no CRLs, revoked certificates are accepted.
        match bundle.get("crls").and_then(Value::as_u64) {
            Some(0) if has_crl_file => row("CRLs", "0: revoked certificates are accepted"),
            None | Some(0) => {}
            Some(count) => row("CRLs", &count.to_string()),
        }
    }
    if let Some(at) = moment(secret, "not_after") {
        row("valid", &left(at, now));
    }
    match moment(secret, "renews") {
        Some(at) => row("renewal", &ahead(at, now)),
        None if text(secret, "origin") == "spiffe" => {
            row("renewal", "when the SPIFFE endpoint pushes a newer one")
        }
        None => {}
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
        write_failure(out, "last error", error, secret, now);
    }
}

fn streams_text(secret: &Value, streams: u64) -> String {
    let current = text(secret, "version");
    let mut counted = 0;
    let mut parts = Vec::new();
    for one in list(secret, "holding") {
        let count = one.get("streams").and_then(Value::as_u64).unwrap_or_default();
        counted += count;
        let nodes: Vec<_> = list(one, "nodes").filter_map(Value::as_str).collect();
        let nodes =
            if nodes.is_empty() { String::new() } else { format!(" ({})", text::listed(&nodes, ", ")) };
        match text(one, "version") {
            version if version == current => parts.insert(0, format!("{count} with this version{nodes}")),
            version => parts.push(format!("{count} with {version}{nodes}")),
        }
    }
    if streams > counted {
        parts.push(format!("{} with none", streams - counted));
    }
    if parts.is_empty() { "0".to_owned() } else { format!("{streams}: {}", parts.join(", ")) }
}

/// A time of expiry with the time left, or EXPIRED.
fn left(at: SystemTime, now: SystemTime) -> String {
    let shown = rfc3339(at);
    match at.duration_since(now) {
        Ok(left) => format!("until {shown} ({} left)", span(left)),
        Err(past) => format!("until {shown} (EXPIRED {} ago)", span(past.duration())),
    }
}
