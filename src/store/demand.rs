//! Names that sources serve only when a stream asks for them, and which source serves which kind.

use std::collections::HashMap;

use tokio::sync::mpsc;

use super::cache::Cache;
use super::entry::Key;
use super::workload::Workload;
use crate::base::limits;
use crate::secret::NameKind;

/// Why a name is not served.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotServed {
    /// No source ever publishes it.
    #[error("this agent has no source for it")]
    NoSource,
    /// Now: it is served as soon as there is room.
    #[error("no room for another name on demand: it waits until others are released (at most {max} in all, \
             and for each connection as many as are free for others)", max = limits::NAMES_ON_DEMAND)]
    TooMany,
}

impl NotServed {
    /// Its label in metrics.
    pub fn label(self) -> &'static str {
        match self {
            Self::NoSource => "no_source",
            Self::TooMany => "too_many_names",
        }
    }
}

/// Another source takes the demand for this kind of name already.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("another source serves names of the kind {0:?} already; a kind of name has one source")]
pub struct AlreadyTaken(pub NameKind);

/// Whose names a source serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scope {
    /// Those of every workload that has no source of its own for the kind.
    Every,
    Workload(Workload),
}

/// The names of one kind that streams ask for and no source publishes yet. A source that takes one makes its publisher
/// and drops the entry with [`Cache::retire`] once it is [deserted](super::Publisher::deserted). When the source drops
/// this, the kind no longer has a source.
#[derive(Debug)]
pub struct Demand(mpsc::UnboundedReceiver<Key>);

impl Demand {
    pub async fn next(&mut self) -> Option<Key> {
        self.0.recv().await
    }

    #[cfg(test)]
    pub(crate) fn try_next(&mut self) -> Option<Key> {
        self.0.try_recv().ok()
    }
}

/// Where demand goes.
#[derive(Debug, Default)]
pub(super) struct Routes(HashMap<(NameKind, Scope), mpsc::UnboundedSender<Key>>);

impl Routes {
    fn take(&mut self, kind: NameKind, scope: Scope) -> Result<Demand, AlreadyTaken> {
        if self.0.get(&(kind, scope)).is_some_and(|sender| !sender.is_closed()) {
            return Err(AlreadyTaken(kind));
        }
        // Each name is sent once while its entry lives, and the number of entries is bounded.
        let (sender, receiver) = mpsc::unbounded_channel();
        self.0.insert((kind, scope), sender);
        Ok(Demand(receiver))
    }

    /// Passes `key` on to the source of its kind: the workload's own one, else the one for every workload.
    pub(super) fn send(&self, key: &Key) -> Result<(), NotServed> {
        let source = self.source(key).ok_or(NotServed::NoSource)?;
        source.send(key.clone()).map_err(|_| NotServed::NoSource)
    }

    /// Whether there is a source for `key`.
    pub(super) fn serves(&self, key: &Key) -> bool {
        self.source(key).is_some()
    }

    fn source(&self, key: &Key) -> Option<&mpsc::UnboundedSender<Key>> {
        let kind = key.name.kind()?;
        let scopes = [Scope::Workload(key.workload), Scope::Every];
        let senders = scopes.iter().filter_map(|scope| self.0.get(&(kind, *scope)));
        senders.into_iter().find(|sender| !sender.is_closed())
    }

    pub(super) fn forget(&mut self, workload: Workload) {
        self.0.retain(|(_, scope), _| *scope != Scope::Workload(workload));
    }
}

impl Cache {
    /// Registers the source of the names of `kind` in `scope`. A kind has one source in a scope.
    pub fn demand(&self, kind: NameKind, scope: Scope) -> Result<Demand, AlreadyTaken> {
        self.lock().routes.take(kind, scope)
    }
}

#[cfg(test)]
mod tests;
