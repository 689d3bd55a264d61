//! Names that sources serve only when a stream asks for them, and which source serves which kind.

use std::collections::HashMap;
use std::fmt;

use tokio::sync::mpsc;

use super::cache::Cache;
use super::entry::Key;
use super::workload::Workload;
use crate::base::limits;
use crate::secret::{NameKind, SecretName};

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
    /// Its source never serves it.
    #[error("{0}")]
    Forbidden(&'static str),
}

impl NotServed {
    /// Its label in metrics.
    pub fn label(self) -> &'static str {
        match self {
            Self::NoSource => "no_source",
            Self::TooMany => "too_many_names",
            Self::Forbidden(_) => "forbidden",
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
pub struct Demand(mpsc::UnboundedReceiver<Event>);

/// What a source learns of a name on demand.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A stream asks for it, and it has no entry yet; or there is room now for its value, which had none.
    Wanted(Key),
    /// Another stream asks for it. Not for files, which are looked at whenever they change.
    Asked(Key),
    /// The last of its streams has left.
    Deserted(Key),
}

impl Demand {
    /// What happens next. None once the workload was removed.
    pub async fn next(&mut self) -> Option<Event> {
        self.0.recv().await
    }

    #[cfg(test)]
    pub(crate) fn try_next(&mut self) -> Option<Key> {
        let events = std::iter::from_fn(|| self.0.try_recv().ok());
        events.into_iter().find_map(|event| match event {
            Event::Wanted(key) => Some(key),
            Event::Asked(_) | Event::Deserted(_) => None,
        })
    }
}

/// Tells the source of a name that no stream is left.
#[derive(Debug)]
pub(super) struct Desertion(mpsc::UnboundedSender<Event>);

impl Desertion {
    pub(super) fn report(&self, key: &Key) {
        // Fails when the source has ended.
        let _ = self.0.send(Event::Deserted(key.clone()));
    }

    /// Another stream asks for the name.
    pub(super) fn ask(&self, key: &Key) {
        if key.name.kind() != Some(NameKind::File) {
            let _ = self.0.send(Event::Asked(key.clone()));
        }
    }
}

/// Why a source never serves a name, decided from its text alone.
pub trait Admission: Fn(&SecretName) -> Result<(), &'static str> + Send + Sync + 'static {}

impl<F: Fn(&SecretName) -> Result<(), &'static str> + Send + Sync + 'static> Admission for F {}

/// Where demand goes.
#[derive(Debug, Default)]
pub(super) struct Routes(HashMap<(NameKind, Scope), Route>);

struct Route {
    sender: mpsc::UnboundedSender<Event>,
    admission: Box<dyn Admission>,
}

impl fmt::Debug for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Route").finish_non_exhaustive()
    }
}

impl Routes {
    fn take(
        &mut self,
        kind: NameKind,
        scope: Scope,
        admission: Box<dyn Admission>,
    ) -> Result<Demand, AlreadyTaken> {
        if self.0.get(&(kind, scope)).is_some_and(|route| !route.sender.is_closed()) {
            return Err(AlreadyTaken(kind));
        }
        // The number of entries is bounded. Each one is wanted when it is made and when there is room for a value that waited,
        // and deserted each time its last stream leaves: a source only notes that, and soon takes the next event.
        let (sender, receiver) = mpsc::unbounded_channel();
        self.0.insert((kind, scope), Route { sender, admission });
        Ok(Demand(receiver))
    }

    /// Passes `key` on to the source of its kind: the workload's own one, else the one for every workload.
    pub(super) fn send(&self, key: &Key) -> Result<Desertion, NotServed> {
        let sender = self.source(key)?.sender.clone();
        sender.send(Event::Wanted(key.clone())).map_err(|_| NotServed::NoSource)?;
        Ok(Desertion(sender))
    }

    /// Whether a source may serve `key`.
    pub(super) fn admit(&self, key: &Key) -> Result<(), NotServed> {
        (self.source(key)?.admission)(&key.name).map_err(NotServed::Forbidden)
    }

    fn source(&self, key: &Key) -> Result<&Route, NotServed> {
        let kind = key.name.kind().ok_or(NotServed::NoSource)?;
        let scopes = [Scope::Workload(key.workload), Scope::Every];
        let mut routes = scopes.iter().filter_map(|scope| self.0.get(&(kind, *scope)));
        let none = match kind {
            NameKind::File => NotServed::NoSource,
            NameKind::Mint => NotServed::Forbidden("it is served only with --mint-suffix"),
            NameKind::Kubernetes => NotServed::Forbidden("it is served only with --kubernetes-secrets"),
        };
        routes.find(|route| !route.sender.is_closed()).ok_or(none)
    }

    pub(super) fn forget(&mut self, workload: Workload) {
        self.0.retain(|(_, scope), _| *scope != Scope::Workload(workload));
    }
}

impl Cache {
    /// Registers the source of the names of `kind` in `scope`. A kind has one source in a scope. A name that `admission`
    /// refuses gets no entry, and the source does not learn of it.
    pub fn demand(
        &self,
        kind: NameKind,
        scope: Scope,
        admission: impl Admission,
    ) -> Result<Demand, AlreadyTaken> {
        self.lock().routes.take(kind, scope, Box::new(admission))
    }
}

#[cfg(test)]
mod tests;
