//! Fuzz target: what an API server sends on a watch.

use std::sync::Arc;

use bytes::Bytes;
use http::StatusCode;
use serde_json::Value;

use super::call::Caller;
use super::watch::{Line, LineReader, Lines};
use super::{ClusterConfig, Credential, Event, Kind, KubeError, Of, Selection};
use crate::auth::token_file::Token;
use crate::base::clock::Clock;
use crate::base::fuzzing::{check_hidden_in_place, check_line};
use crate::fs::disk::Disk;
use crate::net::endpoint::Endpoint;

/// What stands before the secret of the samples.
const PLACE: &[u8] = b"\"data\":{\"tls.key\":\"";
const SECRET: &[u8] = b"LS0tLS1CRUdJTiBQUklWQVRFIEtFWS0tLS0tMTIzNDU2Nzg5";

/// The failure of a call with `token`, which `endpoint` refused with this answer.
pub fn refusal(endpoint: Endpoint, status: StatusCode, body: &[u8], token: Token) -> KubeError {
    let token = Arc::new(token);
    let config = ClusterConfig::new(endpoint, Credential::Token(Arc::clone(&token)));
    Caller::new(config, &Disk::default(), Clock::system()).refused(status, None, body, Some(&token))
}

/// The bytes of a watch of Secrets whose names begin with `tls`. True if they are events to the last.
pub fn events(bytes: &[u8]) -> bool {
    let of = Of::Wanted(Arc::new(|name| name.starts_with("tls")));
    let reader = LineReader { selection: Selection { kind: Kind::Secret, namespace: "gw".into(), of } };
    let whole = all(bytes, usize::MAX, &reader);
    for piece in [1, 7, 100] {
        assert_eq!(all(bytes, piece, &reader), whole, "differs in pieces of {piece}");
    }
    for line in bytes.split(|byte| *byte == b'\n').filter(|line| !line.trim_ascii().is_empty()) {
        check(line, &reader);
    }
    !whole.is_empty() && whole.iter().all(|shown| !shown.starts_with("Err"))
}

/// The events as they are shown, up to the first failure.
fn all(bytes: &[u8], piece: usize, reader: &LineReader) -> Vec<String> {
    let (mut shown, mut lines) = (Vec::new(), Lines::default());
    for part in bytes.chunks(piece.min(bytes.len()).max(1)) {
        if lines.add(Bytes::copy_from_slice(part)).is_err() {
            shown.push("Err(too long)".to_owned());
            return shown;
        }
        while let Some(read) = lines.next(|line| reader.read(line)) {
            let is_failure = read.is_err();
            shown.push(format!("{read:?}"));
            if is_failure {
                return shown;
            }
        }
    }
    if lines.is_in_line() {
        shown.push("Err(cut off)".to_owned());
    }
    shown
}

/// Whether the line means what a complete parser of JSON finds in it.
fn check(line: &[u8], reader: &LineReader) {
    let read = reader.read(line);
    if let Err(reason) = &read {
        check_line(reason);
        check_hidden_in_place(reason, line, PLACE, SECRET);
    }
    // The reader is lenient with what is no JSON, and of keys that come twice takes the first.
    let Ok(event) = serde_json::from_slice::<Value>(line) else { return };
    let is_single = |key: &str| String::from_utf8_lossy(line).matches(key).count() == 1;
    if ![
        "\"metadata\"",
        "\"name\"",
        "\"namespace\"",
        "\"resourceVersion\"",
        "\"type\":\"",
        "\"data\"",
        "\"object\"",
    ]
    .into_iter()
    .all(is_single)
    {
        return;
    }
    let text = |path: &str| event.pointer(path).and_then(Value::as_str).unwrap_or_default();
    match read {
        Ok(Line::Event(Event::Object(object))) => {
            assert_eq!(*object.name, *text("/object/metadata/name"));
            assert_eq!(*object.version.0, *text("/object/metadata/resourceVersion"));
            let data = event.pointer("/object/data").and_then(Value::as_object);
            assert_eq!(object.data.len(), data.map_or(0, serde_json::Map::len));
        }
        Ok(Line::Event(Event::Deleted { name, version })) => {
            assert_eq!(
                (&*name, &*version.0),
                (text("/object/metadata/name"), text("/object/metadata/resourceVersion"))
            );
        }
        Ok(Line::Event(Event::Version(version))) => {
            assert_eq!(*version.0, *text("/object/metadata/resourceVersion"));
        }
        Ok(Line::Failed(_)) => assert_eq!(text("/type"), "ERROR"),
        Err(_) => {}
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::base::fuzzing::{Shape, seeded};

    #[test]
    fn almost_valid_events_break_no_rule() {
        let object = |name: &str| {
            json!({
                "kind": "Secret",
                "metadata": { "name": name, "namespace": "gw", "resourceVersion": "7", "labels": { "a": "b" } },
                "data": { "tls.key": String::from_utf8_lossy(SECRET), "empty": "" },
            })
        };
        let event = |kind: &str, object: Value| format!("{}\n", json!({ "type": kind, "object": object }));
        let failed = json!({ "kind": "Status", "code": 410, "message": "too old" });
        let bookmark = json!({ "metadata": { "resourceVersion": "9" } });
        let samples = [
            event("ADDED", object("tls-1")) + &event("BOOKMARK", bookmark),
            event("MODIFIED", object("other")) + &event("DELETED", object("tls-2")),
            event("ADDED", object("tls-\u{1f680}\n\"")),
            event("ERROR", failed),
            format!(" \r\n\n{} ", event("ADDED", object("tls"))),
        ];
        let samples = samples.map(String::into_bytes);
        seeded("kube_watch", Shape::Bytes, 2_000, &samples, events);
    }
}
