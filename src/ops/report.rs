//! Everything a person can see of a workload in a running agent, as JSON. `docs/status.md` describes its shape: fields may
//! be added, existing ones stay.

mod command;
mod node;

use std::sync::{Arc, OnceLock};
use std::time::SystemTime;

use serde_json::{Value, json};

pub use self::node::{Member, NodeReporter, Roster, SocketView, Subject};
use crate::base::clock::{Clock, rfc3339_millis};
use crate::base::limits;
use crate::fs::pending::{Hanging, PendingOperations};
use crate::secret::{KeyPair, Secret, SecretName, TrustBundle};
use crate::source::kubernetes::Clusters;
use crate::source::kubernetes::cluster::ClusterStatus;
use crate::store::health::{
    CaHealth, ComponentHealth, DirectoryHealth, Failing, OutputHealth, RenewalHealth,
};
use crate::store::history::{Change, Event, History};
use crate::store::{Cache, Good, Key, Snapshot, Workload};

/// Version of this shape.
const SCHEMA: u32 = 1;

/// What does not change while the agent runs.
#[derive(Clone, Debug)]
pub struct About {
    pub started: SystemTime,
    /// The workload's SDS socket, and device and inode of its file, by which clients recognize it.
    pub socket: std::path::PathBuf,
    pub socket_file: Option<String>,
    /// The same of further sockets.
    pub other_sockets: Vec<(std::path::PathBuf, Option<String>)>,
    /// The provider's name, as `--ca` takes it.
    pub provider: &'static str,
    /// The CAs' addresses, in order.
    pub cas: Vec<String>,
}

#[cfg(any(test, fuzzing))]
impl About {
    /// Of an agent without a CA.
    pub(super) fn without_a_ca() -> Self {
        Self {
            started: std::time::UNIX_EPOCH,
            socket: "/run/sds.sock".into(),
            socket_file: None,
            other_sockets: Vec::new(),
            provider: "none",
            cas: Vec::new(),
        }
    }
}

/// Reports the state of one workload. Clones report the same.
#[derive(Clone, Debug)]
pub struct Reporter {
    pub cache: Cache,
    pub workload: Workload,
    pub history: History,
    pub pending: PendingOperations,
    pub clusters: Arc<OnceLock<Clusters>>,
    pub about: About,
    pub clock: Clock,
}

impl Reporter {
    /// The state at this moment.
    pub fn report(&self) -> Value {
        let Self { cache, workload, history, pending, clusters, about, clock } = self;
        let now = clock.now();
        let missing = cache.health_of(*workload, now).missing;
        let missing: Vec<_> =
            missing.iter().map(|one| json!({ "name": one.name, "reason": one.reason })).collect();
        let reports = cache.components(*workload).reports();
        let mut report = json!({
            "schema": SCHEMA,
            "version": env!("CARGO_PKG_VERSION"),
            "pid": std::process::id(),
            "now": moment(now),
            "started": moment(about.started),
            "socket": about.socket.display().to_string(),
            "socket_file": about.socket_file,
            "ca": self.ca(&reports.renewal),
            "ready": missing.is_empty(),
            "missing": missing,
            "secrets": self.secrets(now, reports.renewal.next_try),
            "hanging": pending.hanging().iter().map(|one| hanging(one, clock)).collect::<Vec<_>>(),
            "refusal": reports.refusal,
            "crls": health(reports.crls),
            "state": health(reports.state),
            "output": reports.output.as_ref().map(output),
            "events": history.events(*workload).iter().map(event).collect::<Vec<_>>(),
        });
        let name = cache.name_of(*workload);
        if let Some(fields) = report.as_object_mut() {
            if !name.is_empty() {
                fields.insert("workload".to_owned(), json!(&*name));
            }
            if let Some(command) = &reports.command {
                let secrets = cache.snapshot_of(*workload);
                fields.insert("command".to_owned(), command::command(command, &secrets));
            }
            if let Some(clusters) = clusters.get() {
                let clusters: Vec<_> = clusters.status().iter().map(cluster).collect();
                fields.insert("clusters".to_owned(), json!(clusters));
            }
            if !about.other_sockets.is_empty() {
                let other = |(path, file): &(std::path::PathBuf, Option<String>)| json!({ "socket": path.display().to_string(), "socket_file": file });
                let others: Vec<_> = about.other_sockets.iter().map(other).collect();
                fields.insert("other_sockets".to_owned(), json!(others));
            }
        }
        report
    }

    fn secrets(&self, now: SystemTime, next_try: Option<SystemTime>) -> Vec<Value> {
        let snapshots = self.cache.snapshot_of(self.workload);
        let of = |one: &Snapshot| {
            // The issuer renews both of the workload's own.
            let next_try = next_try.filter(|_| one.key.name.is_own());
            secret(one, now, next_try)
        };
        snapshots.iter().map(of).collect()
    }

    fn ca(&self, renewal: &RenewalHealth) -> Value {
        let key = Key { workload: self.workload, name: SecretName::Workload };
        let served = self.cache.watch(&key).and_then(|entry| entry.borrow().good.clone());
        let signed_by = renewal.issuer.as_ref().filter(|_| served.is_some_and(|it| it.origin.is_issued()));
        json!({
            "provider": self.about.provider,
            "addresses": self.about.cas,
            "signed_by": signed_by.map(|name| &**name),
            "members": renewal.cas.iter().map(ca_health).collect::<Vec<_>>(),
            "failed_rounds": renewal.failed_rounds,
            "next_try": renewal.next_try.map(moment),
        })
    }
}

fn cluster(status: &ClusterStatus) -> Value {
    json!({
        "name": status.id.to_string(),
        "reachable_since": status.reachable_since.map(moment),
        "names": status.names,
        "last_error": status.last_error,
        "calls": status.calls,
        "errors": status.errors,
    })
}

fn ca_health(ca: &CaHealth) -> Value {
    let failure = ca.failure.as_ref();
    json!({
        "address": &*ca.name,
        "issued": ca.issued.map(moment),
        "error": failure.map(|failure| &failure.reason),
        "failing_since": failure.map(|failure| moment(failure.since)),
        "last_call": failure.map(|failure| moment(failure.last_call)),
    })
}

fn moment(moment: SystemTime) -> String {
    rfc3339_millis(moment).to_string()
}

fn secret(snapshot: &Snapshot, now: SystemTime, next_try: Option<SystemTime>) -> Value {
    let Snapshot { key, entry, observed, .. } = snapshot;
    let good = entry.good.as_deref();
    let verdicts = observed.verdicts();
    let holding = verdicts.acknowledged();
    let nodes = |version| {
        let holders = verdicts.acked_by.keys().filter(|(held, _)| held == version);
        let mut nodes: Vec<_> = holders.map(|(_, node)| &**node).collect();
        nodes.sort_unstable();
        nodes.truncate(limits::NODES_SHOWN);
        nodes
    };
    let holding = holding.iter().map(|(version, streams)| {
        json!({ "version": version.to_string(), "streams": streams, "nodes": nodes(version) })
    });
    let rejection = verdicts.rejection.as_ref();
    json!({
        "name": key.name.as_str(),
        "state": state(snapshot, now),
        "origin": good.map(|good| good.origin.to_string()),
        "version": good.map(|good| good.resource.version.to_string()),
        "received": good.map(|good| moment(good.received)),
        "not_after": good.map(|good| moment(good.secret.not_after())),
        "renews": good.and_then(|good| good.renews).map(moment),
        "key_pair": good.and_then(key_pair),
        "trust_bundle": good.and_then(trust_bundle),
        "error": entry.failure(),
        "failing_since": entry.failing_since().map(|since| moment(now - since.elapsed())),
        "next_try": next_try.filter(|_| entry.failing_since().is_some()).map(moment),
        "streams": observed.streams,
        "holding": holding.collect::<Vec<_>>(),
        "rejection": rejection.map(|it| {
            json!({ "version": it.version.to_string(), "node": &*it.node, "reason": it.reason })
        }),
    })
}

/// The worst of its states, in one word.
fn state(snapshot: &Snapshot, now: SystemTime) -> &'static str {
    match &snapshot.entry.good {
        None => "missing",
        Some(good) if good.secret.not_after() <= now => "expired",
        Some(_) if snapshot.observed.verdicts().rejection.is_some() => "rejected",
        Some(_) if snapshot.entry.failure().is_some() => "failing",
        Some(_) => "ok",
    }
}

fn key_pair(good: &Good) -> Option<Value> {
    let Secret::KeyPair(pair) = &good.secret else { return None };
    Some(json!({
        "identity": pair.spiffe_id().map(|id| id.to_string()),
        "names": pair.leaf().names(),
        "serial": pair.leaf().serial,
        "issuer": pair.leaf().issuer,
        "key_type": pair.leaf().key_type,
        "not_before": moment(pair.leaf().not_before),
        "not_after": moment(KeyPair::not_after(pair)),
        "chain": pair.chain().len(),
    }))
}

fn trust_bundle(good: &Good) -> Option<Value> {
    let Secret::TrustBundle(bundle) = &good.secret else { return None };
    let roots = TrustBundle::facts(bundle).iter().map(|root| {
        json!({
            "subject": root.subject,
            "serial": root.serial,
            "key_type": root.key_type,
            "not_before": moment(root.not_before),
            "not_after": moment(root.not_after),
        })
    });
    Some(json!({ "roots": roots.collect::<Vec<_>>(), "crls": bundle.crls().len() }))
}

fn hanging(one: &Hanging, clock: &Clock) -> Value {
    json!({ "path": one.path.display().to_string(), "since": moment(one.since(clock)) })
}

fn health(health: ComponentHealth) -> Option<Value> {
    health.map(|health| json!({ "error": health.err() }))
}

fn output(output: &OutputHealth) -> Value {
    let directory = |directory: &DirectoryHealth| {
        let report = json!({
            "path": directory.path.display().to_string(),
            "not_after": directory.not_after.map(moment),
            "hanging": directory.is_hanging,
        });
        with_failure(report, directory.failure.as_ref())
    };
    let hook = output.hook_failure.as_ref();
    let report = json!({
        "not_after": output.not_after().map(moment),
        "hanging": output.is_hanging(),
        "hook_running": output.is_hook_running,
        "hook_failing": hook.is_some(),
        "hook": hook.map(|hook| with_failure(json!({}), Some(&hook.failing))),
        "hook_last_lines": hook.map(|hook| &hook.last_lines),
        "directories": output.directories.iter().map(directory).collect::<Vec<_>>(),
    });
    with_failure(report, output.failure().as_ref())
}

/// `report` of what fails, if it does.
fn with_failure(mut report: Value, failing: Option<&Failing>) -> Value {
    if let Some(report) = report.as_object_mut() {
        report.extend([
            ("error".to_owned(), json!(failing.map(|it| &it.reason))),
            ("failing_since".to_owned(), json!(failing.map(|it| moment(it.since)))),
            ("next_try".to_owned(), json!(failing.and_then(|it| it.next_try).map(moment))),
        ]);
    }
    report
}

fn event(event: &Event) -> Value {
    let (at, name) = (moment(event.at), event.name.as_str());
    match &event.change {
        Change::Served { version, origin, text, not_before, not_after } => json!({
            "at": at,
            "name": name,
            "what": "served",
            "version": version.to_string(),
            "origin": origin.to_string(),
            "text": text,
            "not_before": not_before.map(moment),
            "not_after": moment(*not_after),
        }),
        Change::Failing(reason) => json!({ "at": at, "name": name, "what": "failing", "text": reason }),
        Change::Recovered => json!({ "at": at, "name": name, "what": "recovered", "text": "" }),
    }
}
