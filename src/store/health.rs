//! Ready means: the workload's own secrets are there and valid, and so are the files that are written of them, where
//! there are to be any. What streams ask for by name has no part in it: anybody can ask for what is not there.

use std::fmt;
use std::time::SystemTime;

use tokio::sync::watch;
use tokio_stream::wrappers::WatchStream;
use tokio_stream::{StreamExt as _, StreamMap};

use crate::base::clock::{Clock, rfc3339};
use crate::store::{Cache, Snapshot};

/// What keeps the agent from being ready.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Missing {
    /// The secret's name, or `output`.
    pub name: String,
    /// Why, for people.
    pub reason: String,
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.name, self.reason)
    }
}

/// How it stands with the files for other programs.
#[derive(Clone, Debug, Default)]
pub struct Output {
    /// When what lies there ends; none as long as nothing is known to lie there.
    pub not_after: Option<SystemTime>,
    /// Why nothing newer can be written.
    pub failure: Option<String>,
    /// The disk does not answer.
    pub is_hanging: bool,
    /// The hook has not succeeded since it failed.
    pub is_hook_failing: bool,
    /// The hook is at work.
    pub is_hook_running: bool,
}

impl Output {
    fn missing(&self, now: SystemTime) -> Option<Missing> {
        let hangs = || self.is_hanging.then_some("the disk does not answer");
        let why = self.failure.as_deref().or_else(hangs).unwrap_or("there was nothing to write");
        let reason = match self.not_after {
            Some(at) if at > now => return None,
            Some(at) => format!("expired at {}; {why}", rfc3339(at)),
            None => format!("not written yet: {why}"),
        };
        Some(Missing { name: "output".to_owned(), reason })
    }
}

/// What is missing or expired at `now`.
pub fn missing(snapshots: &[Snapshot], output: Option<&Output>, now: SystemTime) -> Vec<Missing> {
    let check = |one: &Snapshot| {
        let reason = one.entry.valid_at(now).err()?;
        Some(Missing { name: one.key.name.to_string(), reason })
    };
    let secrets = snapshots.iter().filter(|one| !one.key.name.is_on_demand()).filter_map(check);
    secrets.chain(output.and_then(|output| output.missing(now))).collect()
}

/// All of `these` in one line.
pub fn told(these: &[Missing]) -> String {
    these.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

/// How it stands with all that the agent is there for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Standing {
    /// What keeps it from being ready.
    pub missing: Vec<Missing>,
    /// What is there, and can't be renewed at present.
    pub failing: Vec<Missing>,
}

impl Standing {
    /// Before anybody has looked: not ready.
    pub fn unknown() -> Self {
        let first = Missing { name: "default".to_owned(), reason: "not there yet".to_owned() };
        Self { missing: vec![first], failing: Vec::new() }
    }

    /// How it stands at `now`.
    fn at(now: SystemTime, snapshots: &[Snapshot], output: Option<&Output>) -> Self {
        let missing = missing(snapshots, output, now);
        let secrets = snapshots.iter().filter_map(|one| Some((one.key.name.as_str(), one.entry.failure()?)));
        let files = output.and_then(|output| Some(("output", output.failure.clone()?)));
        let is_there = |name: &str| missing.iter().all(|one| one.name != name);
        let failing = secrets.chain(files).filter(|(name, _)| is_there(name));
        let failing = failing.map(|(name, reason)| Missing { name: name.to_owned(), reason }).collect();
        Self { missing, failing }
    }

    /// Whether nothing is missing.
    pub fn is_ready(&self) -> bool {
        self.missing.is_empty()
    }
}

/// Follows how it stands.
#[derive(Debug)]
pub struct Follower {
    cache: Cache,
    output: watch::Receiver<Option<Output>>,
    clock: Clock,
    told: Option<Standing>,
}

impl Follower {
    /// Follows what `cache` holds by now, and `output`.
    pub fn new(cache: Cache, output: watch::Receiver<Option<Output>>, clock: Clock) -> Self {
        Self { cache, output, clock, told: None }
    }

    /// How it stands, as soon as that is not what was returned last.
    pub async fn next(&mut self) -> Standing {
        let Self { cache, output, clock, told } = self;
        loop {
            let own = || cache.snapshot().into_iter().filter(|one| !one.key.name.is_on_demand());
            let changes = |one: Snapshot| {
                Some((one.key.name.clone(), WatchStream::from_changes(cache.watch(&one.key)?)))
            };
            // Watched before it is looked at: what comes between the two is not missed.
            let mut changes: StreamMap<_, _> = own().filter_map(changes).collect();
            let (snapshots, files) = (own().collect::<Vec<_>>(), output.borrow_and_update().clone());
            let now = clock.now();
            let standing = Standing::at(now, &snapshots, files.as_ref());
            if told.as_ref() != Some(&standing) {
                *told = Some(standing.clone());
                return standing;
            }
            let ends = snapshots.iter().filter_map(|one| Some(one.entry.good.as_ref()?.secret.not_after()));
            let ends = ends.chain(files.and_then(|files| files.not_after));
            // What has ended is told already.
            let end = ends.filter(|end| *end > now).min();
            let at_the_end = async {
                match end {
                    Some(end) => clock.sleep_until(end).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = at_the_end => {}
                Some(_) = changes.next() => {}
                Ok(()) = output.changed() => {}
            }
        }
    }
}
