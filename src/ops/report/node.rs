//! The report of an agent with many workloads: how many there are, what each lacks, and any one of them in full.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::SystemTime;

use serde_json::{Value, json};

use super::{About, Reporter, SCHEMA, hanging, moment, state};
use crate::base::clock::Clock;
use crate::fs::pending::PendingOperations;
use crate::secret::{KeyPair, Secret, SecretName};
use crate::source::kubernetes::Clusters;
use crate::store::history::History;
use crate::store::{Cache, Snapshot, Workload};

/// The workloads of a node, and what is wrong with the files that describe them. Clones are the same list.
#[derive(Clone, Debug, Default)]
pub struct Roster(Arc<Mutex<Listed>>);

#[derive(Debug, Default)]
struct Listed {
    members: BTreeMap<Arc<str>, Member>,
    /// By the workload's name.
    mistakes: BTreeMap<Arc<str>, Vec<String>>,
    directory_failure: Option<String>,
}

/// One workload.
#[derive(Clone, Debug)]
pub struct Member {
    pub workload: Workload,
    pub socket: Arc<dyn SocketView>,
    /// The file that describes it.
    pub file: Option<PathBuf>,
}

/// What is reported of a workload's socket.
pub trait SocketView: fmt::Debug + Send + Sync {
    fn path(&self) -> PathBuf;

    /// Whether clients can connect.
    fn is_bound(&self) -> bool;

    /// Device and inode of its file, where they are known.
    fn id(&self) -> Option<String>;

    /// Why it is not bound.
    fn failure(&self) -> Option<String>;
}

impl Roster {
    pub fn add(&self, name: &Arc<str>, member: Member) {
        self.lock().members.insert(Arc::clone(name), member);
    }

    pub fn remove(&self, name: &str) {
        self.lock().members.remove(name);
    }

    /// What is wrong with the file of the workload `name`; nothing if it is applied.
    pub fn set_mistakes(&self, name: &Arc<str>, mistakes: Vec<String>) {
        let mut listed = self.lock();
        match mistakes.is_empty() {
            true => drop(listed.mistakes.remove(name)),
            false => drop(listed.mistakes.insert(Arc::clone(name), mistakes)),
        }
    }

    /// Forgets the mistakes in files that no longer exist.
    pub fn retain_mistakes(&self, exists: impl Fn(&str) -> bool) {
        self.lock().mistakes.retain(|name, _| exists(name));
    }

    /// Why the directory with the files can't be read.
    pub fn set_directory_failure(&self, failure: Option<String>) {
        self.lock().directory_failure = failure;
    }

    fn member(&self, name: &str) -> Option<Member> {
        self.lock().members.get(name).cloned()
    }

    /// No code panics while it holds this lock.
    fn lock(&self) -> MutexGuard<'_, Listed> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Reports the state of all workloads. Clones report the same.
#[derive(Clone, Debug)]
pub struct NodeReporter {
    pub cache: Cache,
    pub history: History,
    pub pending: PendingOperations,
    pub roster: Roster,
    pub started: SystemTime,
    /// The provider's name, as `--ca` takes it.
    pub provider: &'static str,
    /// The CAs' addresses, in order.
    pub cas: Vec<String>,
    pub clock: Clock,
}

impl NodeReporter {
    /// The state at this moment, with a short entry for each workload.
    pub fn report(&self) -> Value {
        let now = self.clock.now();
        let (members, mistakes, directory_failure) = {
            let listed = self.roster.lock();
            (listed.members.clone(), listed.mistakes.clone(), listed.directory_failure.clone())
        };
        let mut snapshots: BTreeMap<Workload, Vec<Snapshot>> = BTreeMap::new();
        for one in self.cache.snapshot() {
            snapshots.entry(one.key.workload).or_default().push(one);
        }
        let workloads: Vec<_> = members
            .iter()
            .map(|(name, member)| {
                let own = snapshots.remove(&member.workload).unwrap_or_default();
                self.member(name, member, &own, now)
            })
            .collect();
        let is_ready = |workload: &&Value| workload.get("ready") == Some(&Value::Bool(true));
        let ready = workloads.iter().filter(is_ready).count();
        let mistakes: Vec<_> = mistakes
            .iter()
            .map(|(name, mistakes)| json!({ "workload": &**name, "errors": mistakes }))
            .collect();
        let hangs = self.pending.hanging();
        json!({
            "schema": SCHEMA,
            "version": env!("CARGO_PKG_VERSION"),
            "pid": std::process::id(),
            "now": moment(now),
            "started": moment(self.started),
            "ca": { "provider": self.provider, "addresses": self.cas },
            "ready": ready == workloads.len() && mistakes.is_empty() && directory_failure.is_none(),
            "workload_count": workloads.len(),
            "ready_count": ready,
            "workloads": workloads,
            "mistakes": mistakes,
            "directory_error": directory_failure,
            "hanging": hangs.iter().map(|one| hanging(one, &self.clock)).collect::<Vec<_>>(),
        })
    }

    fn member(&self, name: &str, member: &Member, own: &[Snapshot], now: SystemTime) -> Value {
        let key_pair = own.iter().find(|one| one.key.name == SecretName::Workload);
        let good = key_pair.and_then(|one| one.entry.good.as_deref());
        let identity = good.and_then(|good| match &good.secret {
            Secret::KeyPair(pair) => KeyPair::spiffe_id(pair).map(|id| id.to_string()),
            Secret::TrustBundle(_) => None,
        });
        let missing = self.cache.health_of(member.workload, now).missing;
        let renewal = self.cache.components(member.workload).reports().renewal;
        let socket_failure = member.socket.failure();
        let error = socket_failure.clone().or_else(|| Some(key_pair?.entry.failure()?.to_string()));
        let failing_since = key_pair.and_then(|one| one.entry.failing_since());
        json!({
            "workload": name,
            "ready": missing.is_empty() && member.socket.is_bound(),
            "state": key_pair.map_or("missing", |one| state(one, now)),
            "identity": identity,
            "not_after": good.map(|good| moment(good.secret.not_after())),
            "renews": good.and_then(|good| good.renews).map(moment),
            "overdue": good.is_some_and(|good| good.is_overdue(now)),
            "streams": own.iter().map(|one| one.observed.streams).sum::<usize>(),
            "error": error,
            "failing_since": failing_since.map(|since| moment(now - since.elapsed())),
            "next_try": renewal.next_try.map(moment),
            "socket": member.socket.path().display().to_string(),
            "socket_file": member.socket.id(),
            "file": member.file.as_ref().map(|file| file.display().to_string()),
        })
    }

    /// What reports the workload `name` in full, if there is one.
    pub fn of(&self, name: &str) -> Option<Reporter> {
        let member = self.roster.member(name)?;
        let Self { cache, history, pending, started, provider, cas, clock, .. } = self.clone();
        Some(Reporter {
            cache,
            workload: member.workload,
            history,
            pending,
            clusters: Arc::new(OnceLock::<Clusters>::new()),
            about: About {
                started,
                socket: member.socket.path(),
                socket_file: member.socket.id(),
                other_sockets: Vec::new(),
                provider,
                cas,
            },
            clock,
        })
    }
}

/// What the agent reports: its only workload, or many.
#[derive(Clone, Debug)]
pub enum Subject {
    One(Reporter),
    Node(NodeReporter),
}

impl Subject {
    /// The state at this moment.
    pub fn report(&self) -> Value {
        match self {
            Self::One(reporter) => reporter.report(),
            Self::Node(reporter) => reporter.report(),
        }
    }

    /// What reports the workload `name`; empty where a client names none. The error is for people.
    pub fn of(&self, name: &str) -> Result<Reporter, String> {
        match self {
            Self::One(reporter) if name.is_empty() => Ok(reporter.clone()),
            Self::One(_) => {
                Err(format!("this agent serves one workload, which has no name: leave --workload {name} out"))
            }
            Self::Node(_) if name.is_empty() => {
                Err("this agent serves several workloads: name one with --workload".to_owned())
            }
            Self::Node(reporter) => reporter.of(name).ok_or_else(|| {
                format!("this agent has no workload {name:?}; attache status lists those that it has")
            }),
        }
    }

    pub fn clock(&self) -> &Clock {
        match self {
            Self::One(reporter) => &reporter.clock,
            Self::Node(reporter) => &reporter.clock,
        }
    }
}
