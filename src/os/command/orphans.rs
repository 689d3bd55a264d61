//! Children that the agent has not started: processes whose parent has ended. As process 1 of a container, or as their
//! subreaper, the agent has to wait for them, or each leaves a zombie.
//!
//! The runtime waits for the children that the agent starts. Waiting for any child would take their exit status away: so
//! those are known by their numbers.

use std::collections::BTreeSet;
use std::fs;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::process::{Pid, WaitOptions, getpid, set_child_subreaper, waitpid};
use tokio::process::Child;

static OWN: Mutex<BTreeSet<u32>> = Mutex::new(BTreeSet::new());

fn own() -> MutexGuard<'static, BTreeSet<u32>> {
    OWN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A child that the runtime waits for, until this is dropped.
#[derive(Debug)]
pub struct OwnChild(Option<u32>);

impl OwnChild {
    /// To be called by the thread that reaps, before it does anything else: so no orphan is looked for in between.
    pub fn new(child: &Child) -> Self {
        let id = child.id();
        own().extend(id);
        Self(id)
    }
}

impl Drop for OwnChild {
    fn drop(&mut self) {
        if let Some(id) = self.0 {
            own().remove(&id);
        }
    }
}

/// Has orphans of this process's descendants become its children.
pub fn adopt() {
    // Process 1 has them anyway.
    if let Err(error) = set_child_subreaper(Some(getpid())) {
        tracing::debug!(%error, "orphans are left to process 1");
    }
}

/// Waits for the orphans that have ended. Returns how many there were.
pub fn reap() -> usize {
    let all = children();
    // Held until the end: what is added meanwhile is not among these.
    let own = own();
    let orphans = all.into_iter().filter(|id| !own.contains(id));
    let orphans = orphans.filter_map(|id| Pid::from_raw(id.try_into().ok()?));
    orphans.filter(|orphan| matches!(waitpid(Some(*orphan), WaitOptions::NOHANG), Ok(Some(_)))).count()
}

/// The children of all threads; none where the kernel doesn't list them.
fn children() -> Vec<u32> {
    let mut all = Vec::new();
    for thread in fs::read_dir("/proc/self/task").into_iter().flatten().flatten() {
        let listed = fs::read_to_string(thread.path().join("children")).unwrap_or_default();
        all.extend(listed.split_whitespace().filter_map(|id| id.parse::<u32>().ok()));
    }
    all
}
