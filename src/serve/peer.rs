//! Who may connect to the SDS socket, and how often at a time.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::process::{Resource, getrlimit, getuid};
use tokio::net::UnixStream;

use crate::base::limits;
use crate::metrics::Metrics;

/// Who may connect, by what the kernel says of the process: any of these user ids, or any of these group ids (the
/// process's own group; it does not tell of further ones). Where there are none, everybody whom the file's mode lets in.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Allowed {
    /// User ids.
    pub uids: Vec<u32>,
    /// Group ids.
    pub gids: Vec<u32>,
}

/// The connections that are open. Clones count together.
#[derive(Clone, Debug)]
pub struct Peers(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    allowed: Allowed,
    own_uid: u32,
    /// Connections of one user at a time.
    most: usize,
    state: Mutex<State>,
    metrics: Metrics,
}

#[derive(Debug, Default)]
struct State {
    open: HashMap<u32, usize>,
    /// Whose refusal was told already: user, group and reason.
    told: BTreeSet<(u32, u32, &'static str)>,
}

/// One connection's place, given back when it is dropped.
#[derive(Debug)]
pub struct Place {
    peers: Peers,
    uid: u32,
}

impl Peers {
    /// Lets in whom `allowed` names, and this agent's own user: it could read the agent's memory.
    pub fn new(allowed: Allowed, metrics: Metrics) -> Self {
        // One user can't use up the descriptors that others need.
        let files = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let most = usize::try_from(files / 2).unwrap_or(usize::MAX).max(1);
        Self(Arc::new(Inner { allowed, own_uid: getuid().as_raw(), most, state: Mutex::default(), metrics }))
    }

    /// A place for the one behind `io`; none if it may not connect, which is told.
    pub fn admit(&self, io: &UnixStream) -> Option<Place> {
        let peer = io.peer_cred();
        let (uid, gid, pid) = match &peer {
            Ok(peer) => (peer.uid(), peer.gid(), peer.pid().unwrap_or_default()),
            Err(error) => {
                tracing::debug!(%error, "a connection has no peer any more");
                return None;
            }
        };
        let Inner { allowed, own_uid, most, metrics, .. } = &*self.0;
        let mut state = self.lock();
        let refused = |state: &mut State, reason: &'static str, words: &str| {
            metrics.refuse(reason, &format_args!("a connection of user {uid}: {words}"));
            // Once of each: they come again and again.
            if state.told.len() < limits::REFUSED_PEERS_LOGGED && state.told.insert((uid, gid, reason)) {
                tracing::warn!(uid, gid, pid, "a connection to the SDS socket is refused: {words}");
            }
            None
        };
        if !allowed.includes(uid, gid) && uid != *own_uid {
            return refused(
                &mut state,
                "peer",
                "neither its user id is in --allow-uid nor its group id in --allow-gid: add one of them if it may have this \
                 workload's key",
            );
        }
        let open = state.open.entry(uid).or_default();
        if *open >= *most {
            let words = format!("its user has {most} connections open already");
            return refused(&mut state, "connections", &words);
        }
        *open += 1;
        drop(state);
        metrics.connections.inc();
        Some(Place { peers: self.clone(), uid })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Allowed {
    fn includes(&self, uid: u32, gid: u32) -> bool {
        let is_open = self.uids.is_empty() && self.gids.is_empty();
        is_open || self.uids.contains(&uid) || self.gids.contains(&gid)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.peers.0.metrics.connections.dec();
        let mut state = self.peers.lock();
        if let Some(open) = state.open.get_mut(&self.uid) {
            *open -= 1;
            if *open == 0 {
                state.open.remove(&self.uid);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::ByReason;

    fn peers(allowed: Allowed, own_uid: u32, most: usize) -> Peers {
        let (state, metrics) = (Mutex::default(), Metrics::default());
        Peers(Arc::new(Inner { allowed, own_uid, most, state, metrics }))
    }

    fn refusals(peers: &Peers, reason: &'static str) -> u64 {
        peers.0.metrics.refusals.get_or_create_owned(&ByReason { reason }).get()
    }

    #[tokio::test]
    async fn only_those_who_are_named_and_the_agents_own_user_come_in() {
        let (here, _there) = UnixStream::pair().unwrap();
        let (uid, gid) = (getuid().as_raw(), rustix::process::getgid().as_raw());
        let (other_uid, other_gid) = (uid + 1, gid + 1);
        let cases = [
            (vec![], vec![], other_uid, true),
            (vec![other_uid], vec![], other_uid, false),
            (vec![other_uid, uid], vec![], other_uid, true),
            (vec![other_uid], vec![gid], other_uid, true),
            (vec![], vec![other_gid], other_uid, false),
            (vec![other_uid], vec![other_gid], uid, true),
        ];
        for (uids, gids, own_uid, is_let_in) in cases {
            let case = format!("{uids:?} {gids:?} {own_uid}");
            let peers = peers(Allowed { uids, gids }, own_uid, 10);
            assert_eq!(peers.admit(&here).is_some(), is_let_in, "{case}");
            assert_eq!(refusals(&peers, "peer"), u64::from(!is_let_in), "{case}");
            assert_eq!(peers.lock().told.contains(&(uid, gid, "peer")), !is_let_in, "{case}");
        }
    }

    #[tokio::test]
    async fn one_user_can_not_take_all_places() {
        let (here, _there) = UnixStream::pair().unwrap();
        let peers = peers(Allowed::default(), 0, 2);
        let places = [peers.admit(&here).unwrap(), peers.admit(&here).unwrap()];
        assert!(peers.admit(&here).is_none());
        assert_eq!(refusals(&peers, "connections"), 1);
        drop(places);
        assert!(peers.lock().open.is_empty());
        peers.admit(&here).unwrap();
    }
}
