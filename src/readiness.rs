//! Ready means: the workload's own secrets are there and valid, and so are the files that are written of them, where
//! there are to be any. What streams ask for by name has no part in it: anybody can ask for what is not there.

use std::fmt;
use std::time::SystemTime;

use tokio::sync::watch;
use tokio_stream::wrappers::WatchStream;
use tokio_stream::{StreamExt as _, StreamMap};

use crate::cache::{Cache, Snapshot};
use crate::clock::Clock;

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
            Some(at) => format!("expired at {}; {why}", humantime::format_rfc3339_seconds(at)),
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

/// Returns when nothing is missing any more.
pub async fn ready(cache: &Cache, mut output: watch::Receiver<Option<Output>>, clock: &Clock) {
    loop {
        let snapshots = cache.snapshot();
        let missing = |snapshots: &[Snapshot], output: &Option<Output>| {
            missing(snapshots, output.as_ref(), clock.now()).into_iter().next()
        };
        let Some(first) = missing(&snapshots, &output.borrow_and_update()) else { return };
        let key = snapshots.iter().map(|one| &one.key).find(|key| key.name.as_str() == first.name);
        let Some(mut entry) = key.and_then(|key| cache.watch(key)) else {
            if output.changed().await.is_err() {
                return;
            }
            continue;
        };
        // Between the snapshot and here it may have come.
        if missing(&cache.snapshot(), &output.borrow()).is_none_or(|still| still.name != first.name) {
            continue;
        }
        if entry.changed().await.is_err() {
            return;
        }
    }
}

/// Returns what is missing or has expired, as soon as something is.
pub async fn lost(cache: &Cache, mut output: watch::Receiver<Option<Output>>, clock: &Clock) -> Vec<Missing> {
    loop {
        let own = || cache.snapshot().into_iter().filter(|one| !one.key.name.is_on_demand());
        let changes =
            |one: Snapshot| Some((one.key.name.clone(), WatchStream::from_changes(cache.watch(&one.key)?)));
        // Watched before it is looked at: what comes between the two is not missed.
        let mut changes: StreamMap<_, _> = own().filter_map(changes).collect();
        let (snapshots, files) = (own().collect::<Vec<_>>(), output.borrow_and_update().clone());
        let missing = missing(&snapshots, files.as_ref(), clock.now());
        if !missing.is_empty() {
            return missing;
        }
        let ends = snapshots.iter().filter_map(|one| Some(one.entry.good.as_ref()?.secret.not_after()));
        let end = ends.chain(files.and_then(|files| files.not_after)).min();
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
