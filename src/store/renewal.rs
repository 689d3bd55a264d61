//! Renewals that a person requests before they are due.

use std::sync::Arc;

use tokio::sync::watch;

use super::cache::{Cache, Slot};
use super::entry::{Key, Origin};

/// Why a secret was not renewed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotRenewed {
    /// No source renews it.
    #[error("no CA is configured (--ca none): the secret comes from mounted files alone")]
    NoSource,
    /// A source of higher rank than the one that renews holds the entry.
    #[error("the secret comes from mounted files, which are read as soon as they change")]
    Files,
    /// The source tried.
    #[error("{0}")]
    Failed(String),
}

/// Where a source takes requests for renewals.
#[derive(Debug)]
pub(super) struct RenewalDesk {
    origin: Origin,
    requests: watch::Sender<Requests>,
}

/// How many renewals were requested, and how many of these the source has tried.
#[derive(Clone, Copy, Debug, Default)]
struct Requests {
    made: u64,
    settled: u64,
}

impl RenewalDesk {
    pub(super) fn new(origin: Origin) -> Self {
        Self { origin, requests: watch::Sender::default() }
    }
}

impl Cache {
    /// Has the source of `key` renew it now, and returns when it has tried.
    pub async fn renew(&self, key: &Key) -> Result<(), NotRenewed> {
        let slot = self.slot(key).ok_or(NotRenewed::NoSource)?;
        let desk = slot.renewal();
        let is_outranked = slot.entry().holder > Some(desk.map_or(Origin::CA, |desk| desk.origin));
        if is_outranked {
            return Err(NotRenewed::Files);
        }
        let requests = &desk.ok_or(NotRenewed::NoSource)?.requests;
        let mut mine = 0;
        requests.send_modify(|requests| {
            requests.made += 1;
            mine = requests.made;
        });
        let settled = requests.subscribe().wait_for(|requests| requests.settled >= mine).await.map(drop);
        settled.map_err(|_| NotRenewed::NoSource)?;
        let failure = slot.entry().failure();
        failure.map_or(Ok(()), |reason| Err(NotRenewed::Failed(reason)))
    }
}

impl Cache {
    /// Has the source of `key` try now, if it serves nothing or its last attempt failed. Does not wait for it.
    pub fn renew_if_needed(&self, key: &Key) {
        let Some(slot) = self.slot(key) else { return };
        let is_needed = {
            let entry = slot.entry();
            entry.good.is_none() || entry.failure().is_some()
        };
        if let Some(desk) = slot.renewal().filter(|_| is_needed) {
            desk.requests.send_modify(|requests| requests.made += 1);
        }
    }
}

/// A source's side of the requests.
#[derive(Debug)]
pub struct Renewals(pub(super) Arc<Slot>);

impl Renewals {
    /// Returns when a renewal was requested and the source hasn't tried since.
    pub async fn wanted(&self) {
        let Some(desk) = self.0.renewal() else { return std::future::pending().await };
        // The sender lives in the slot.
        let _ = desk.requests.subscribe().wait_for(|requests| requests.made > requests.settled).await;
    }

    /// The source has tried: all requests until now are answered with the state of the entry.
    pub fn settle(&self) {
        if let Some(desk) = self.0.renewal() {
            desk.requests.send_if_modified(|requests| {
                let has_open = requests.settled != requests.made;
                requests.settled = requests.made;
                has_open
            });
        }
    }
}
