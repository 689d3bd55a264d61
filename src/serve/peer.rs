//! Which processes may connect to the SDS socket, and how many connections each user may have.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::process::{Resource, getrlimit, getuid};
use tokio::net::UnixStream;

use crate::base::limits;
use crate::metrics::Metrics;
use crate::store::health::Components;

/// The processes that may connect: those with one of these user IDs or one of these group IDs, as the kernel reports them
/// (it reports only the primary group). If both lists are empty, every process that the file's mode allows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Allowed {
    pub uids: Vec<u32>,
    pub gids: Vec<u32>,
}

/// Admits connections and counts the open ones. Clones share the count.
#[derive(Clone, Debug)]
pub struct Peers(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    allowed: Allowed,
    own_uid: u32,
    /// Concurrent connections of one user.
    limit: usize,
    connections: Mutex<Connections>,
    metrics: Metrics,
    components: Components,
}

#[derive(Debug, Default)]
struct Connections {
    /// By user ID.
    open: HashMap<u32, usize>,
    /// Refusals that were logged: user, group and reason.
    logged: BTreeSet<(u32, u32, &'static str)>,
}

/// One open connection; no longer counted when dropped.
#[derive(Debug)]
pub struct Admitted {
    peers: Peers,
    uid: u32,
}

impl Peers {
    /// Admits `allowed` and the agent's own user, which could read the agent's memory anyway.
    pub fn new(allowed: Allowed, metrics: Metrics, components: Components) -> Self {
        // Half of the file descriptors, so that one user can't use up those that others need.
        let files = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let limit = usize::try_from(files / 2).unwrap_or(usize::MAX).max(1);
        let (own_uid, connections) = (getuid().as_raw(), Mutex::default());
        Self(Arc::new(Inner { allowed, own_uid, limit, connections, metrics, components }))
    }

    /// Admits the process behind `io`, or logs and counts the refusal.
    pub fn admit(&self, io: &UnixStream) -> Option<Admitted> {
        let peer = io.peer_cred();
        let (uid, gid, pid) = match &peer {
            Ok(peer) => (peer.uid(), peer.gid(), peer.pid().unwrap_or_default()),
            Err(error) => {
                tracing::debug!(%error, "peer credentials unavailable");
                return None;
            }
        };
        let Inner { allowed, own_uid, limit, metrics, components, .. } = &*self.0;
        let mut connections = self.lock();
        let refuse = |connections: &mut Connections, label: &'static str, reason: &str| {
            metrics.refuse(label);
            components.report_refusal(&format_args!("connection of user {uid}: {reason}"));
            // Each is logged once, because clients keep trying.
            if connections.logged.len() < limits::REFUSED_PEERS_LOGGED
                && connections.logged.insert((uid, gid, label))
            {
                tracing::warn!(uid, gid, pid, "SDS connection refused: {reason}");
            }
            None
        };
        if !allowed.includes(uid, gid) && uid != *own_uid {
            return refuse(
                &mut connections,
                "peer",
                "its user ID is not in --allow-uid, nor its group ID in --allow-gid: add one of them if it may have the \
                 workload's key",
            );
        }
        let open = connections.open.entry(uid).or_default();
        if *open >= *limit {
            let reason = format!("its user already has {limit} open connections");
            return refuse(&mut connections, "connections", &reason);
        }
        *open += 1;
        drop(connections);
        metrics.connections.inc();
        Some(Admitted { peers: self.clone(), uid })
    }

    fn lock(&self) -> MutexGuard<'_, Connections> {
        self.0.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Admits the agent's own user and root to the admin socket, as mode 0600 does. The mode of a socket that the service manager
/// opened is that one's setting.
#[derive(Debug)]
pub struct AdminPeers {
    own_uid: u32,
    metrics: Metrics,
    components: Components,
}

impl AdminPeers {
    pub fn new(metrics: Metrics, components: Components) -> Self {
        Self { own_uid: getuid().as_raw(), metrics, components }
    }

    /// Whether the process behind `io` is admitted. A refusal is logged and counted.
    pub fn admits(&self, io: &UnixStream) -> bool {
        let peer = match io.peer_cred() {
            Ok(peer) => peer,
            Err(error) => {
                tracing::debug!(%error, "peer credentials unavailable");
                return false;
            }
        };
        let (uid, pid) = (peer.uid(), peer.pid().unwrap_or_default());
        let is_admitted = may_administer(uid, self.own_uid);
        if !is_admitted {
            let reason = "only the agent's own user and root may use it";
            self.metrics.refuse("peer");
            self.components
                .report_refusal(&format_args!("connection of user {uid} to the admin socket: {reason}"));
            tracing::warn!(uid, pid, "admin connection refused: {reason}; run the command as one of them");
        }
        is_admitted
    }
}

/// Root could read the agent's memory anyway.
fn may_administer(uid: u32, own_uid: u32) -> bool {
    uid == 0 || uid == own_uid
}

impl Allowed {
    fn includes(&self, uid: u32, gid: u32) -> bool {
        let admits_all = self.uids.is_empty() && self.gids.is_empty();
        admits_all || self.uids.contains(&uid) || self.gids.contains(&gid)
    }
}

impl Drop for Admitted {
    fn drop(&mut self) {
        self.peers.0.metrics.connections.dec();
        let mut connections = self.peers.lock();
        if let Some(open) = connections.open.get_mut(&self.uid) {
            *open -= 1;
            if *open == 0 {
                connections.open.remove(&self.uid);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::ByReason;

    fn peers(allowed: Allowed, own_uid: u32, limit: usize) -> Peers {
        let (cache, workload) = crate::store::Cache::with_workload("");
        let (connections, metrics, components) =
            (Mutex::default(), Metrics::default(), cache.components(workload));
        Peers(Arc::new(Inner { allowed, own_uid, limit, connections, metrics, components }))
    }

    fn refusals(peers: &Peers, reason: &'static str) -> u64 {
        peers.0.metrics.refusals.get_or_create_owned(&ByReason { reason }).get()
    }

    #[tokio::test]
    async fn only_allowed_users_and_groups_and_the_agents_own_user_are_admitted() {
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
        for (uids, gids, own_uid, is_admitted) in cases {
            let case = format!("{uids:?} {gids:?} {own_uid}");
            let peers = peers(Allowed { uids, gids }, own_uid, 10);
            assert_eq!(peers.admit(&here).is_some(), is_admitted, "{case}");
            assert_eq!(refusals(&peers, "peer"), u64::from(!is_admitted), "{case}");
            assert_eq!(peers.lock().logged.contains(&(uid, gid, "peer")), !is_admitted, "{case}");
        }
    }

    #[tokio::test]
    async fn only_root_and_the_agents_own_user_are_admitted_to_the_admin_socket() {
        let cases = [(0, 1337), (1337, 1337), (1000, 1337), (1000, 0), (0, 0)];
        let admitted = cases.map(|(uid, own_uid)| may_administer(uid, own_uid));
        assert_eq!(admitted, [true, true, false, false, true]);
        let (here, _there) = UnixStream::pair().unwrap();
        let uid = getuid().as_raw();
        for (own_uid, is_admitted) in [(uid, true), (uid + 1, uid == 0)] {
            let peers = peers(Allowed::default(), 0, 1);
            let Inner { metrics, components, .. } = &*peers.0;
            let admin = AdminPeers { own_uid, metrics: metrics.clone(), components: components.clone() };
            assert_eq!(admin.admits(&here), is_admitted);
            assert_eq!(refusals(&peers, "peer"), u64::from(!is_admitted));
            assert_eq!(components.reports().refusal.is_some(), !is_admitted);
        }
    }

    #[tokio::test]
    async fn one_user_can_not_take_all_connections() {
        let (here, _there) = UnixStream::pair().unwrap();
        let peers = peers(Allowed::default(), 0, 2);
        let connections = [peers.admit(&here).unwrap(), peers.admit(&here).unwrap()];
        assert!(peers.admit(&here).is_none());
        assert_eq!(refusals(&peers, "connections"), 1);
        drop(connections);
        assert!(peers.lock().open.is_empty());
        peers.admit(&here).unwrap();
    }
}
