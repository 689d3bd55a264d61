//! The program that the agent keeps running, as JSON.

use serde_json::{Value, json};

use super::moment;
use crate::store::Snapshot;
use crate::store::health::{CommandHealth, EpochHealth};

pub(super) fn command(command: &CommandHealth, secrets: &[Snapshot]) -> Value {
    let epoch = |epoch: &EpochHealth| json!({ "epoch": epoch.epoch, "pid": epoch.pid, "state": epoch.state, "since": moment(epoch.since) });
    let exit = command.last_exit.as_ref();
    json!({
        "program": command.program,
        "state": command.state.word(),
        "epochs": command.epochs.iter().map(epoch).collect::<Vec<_>>(),
        "restarts": {
            "files": command.restarts.files,
            "crash": command.restarts.crash,
            "failed": command.restarts.failed,
        },
        "last_exit": exit.map(|it| json!({ "at": moment(it.at), "epoch": it.epoch, "reason": it.reason })),
        "next_start": command.next_start.map(moment),
        "error": command.restart_failure,
        "files_error": command.files_failure,
        "node": command.node,
        "secrets": command.node.as_ref().map(|node| held(node, secrets)),
    })
}

/// What the Envoy with this node id has of each secret that it, or another client, subscribes to.
fn held(node: &str, secrets: &[Snapshot]) -> Vec<Value> {
    let of = |one: &Snapshot| {
        let verdicts = one.observed.verdicts();
        let current = one.entry.good.as_ref().map(|good| &good.resource.version);
        let held = verdicts.acked_by.keys().filter(|(_, holder)| **holder == *node);
        let held: Vec<_> = held.map(|(version, _)| version).collect();
        let has = match current {
            Some(current) if held.contains(&current) => "current",
            _ if held.is_empty() => "none",
            _ => "older",
        };
        json!({ "name": one.key.name.as_str(), "has": has })
    };
    secrets.iter().filter(|one| one.observed.streams > 0).map(of).collect()
}
