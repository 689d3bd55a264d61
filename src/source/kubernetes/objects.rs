//! Which objects are followed, and how: one watch for each, or one for all of a namespace.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use smallvec::SmallVec;
use tokio::sync::mpsc;
use tokio::task::AbortHandle;
use tokio::time::Instant;

use super::cluster::{Cluster, FORBIDDEN};
use super::content::Wants;
use super::follow::{By, Follower, Group, Place, Reports, Seen};
use super::group::{GroupFollower, Wanted};
use crate::store::Key;

/// With more objects than this of one namespace, all are followed with one watch, where RBAC allows it.
const MANY: usize = 100;
/// How long it is remembered that an object does not exist, or must not be read, which is not asked for any longer.
const REMEMBERED: Duration = Duration::from_secs(10);
/// How many of these are remembered.
const MOST_REMEMBERED: usize = 10_000;
/// How long an object is left alone while its namespace is being listed: mostly the list has it.
const LISTING: Duration = Duration::from_millis(500);
/// How long a name waits while too many names that don't exist are asked for.
const POSTPONED: Duration = Duration::from_secs(10);

/// The objects of all clusters that names need.
pub(super) struct Objects {
    followed: HashMap<Place, Followed>,
    groups: HashMap<Group, Members>,
    /// Those without names, until they are forgotten; the oldest first.
    remembered: VecDeque<(Instant, Place)>,
    reports: Reports,
}

struct Followed {
    cluster: Arc<Cluster>,
    names: SmallVec<[Key; 1]>,
    wants: Wants,
    seen: Option<Seen>,
    /// Why nothing newer than what was seen can be read.
    trouble: Option<Arc<str>>,
    /// None where one watch follows the whole namespace, and where nothing does.
    task: Option<Task>,
}

/// Ends with this.
struct Task(AbortHandle);

impl Drop for Task {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// The objects of one namespace.
#[derive(Default)]
struct Members {
    count: usize,
    follower: Option<GroupTask>,
    /// The API server refused to list it: not tried again before.
    refused_until: Option<Instant>,
}

struct GroupTask {
    names: Arc<Wanted>,
    added: mpsc::UnboundedSender<Arc<str>>,
    /// It has listed the namespace, and follows all of its objects.
    is_ready: bool,
    _task: Task,
}

impl Objects {
    pub(super) fn new(reports: Reports) -> Self {
        let (followed, groups, remembered) = Default::default();
        Self { followed, groups, remembered, reports }
    }

    pub(super) fn seen(&self, place: &Place) -> Option<&Seen> {
        self.followed.get(place)?.seen.as_ref()
    }

    /// Why nothing newer than what was seen can be read.
    pub(super) fn trouble(&self, place: &Place) -> Option<Arc<str>> {
        self.followed.get(place)?.trouble.clone()
    }

    /// The names that need an object.
    pub(super) fn names(&self, place: &Place) -> SmallVec<[Key; 1]> {
        self.followed.get(place).map(|followed| followed.names.clone()).unwrap_or_default()
    }

    /// How many names need an object.
    pub(super) fn count(&self, place: &Place) -> usize {
        self.followed.get(place).map_or(0, |followed| followed.names.len())
    }

    /// `key` needs an object.
    /// What does not exist counts among the names that clients make up, if `is_counted`.
    pub(super) fn follow(
        &mut self,
        cluster: &Arc<Cluster>,
        place: &Place,
        key: &Key,
        wants: Wants,
        is_counted: bool,
    ) {
        let entry = self.followed.entry(place.clone()).or_insert_with(|| Followed {
            cluster: Arc::clone(cluster),
            names: SmallVec::new(),
            wants: Wants::default(),
            seen: None,
            trouble: None,
            task: None,
        });
        let was_idle = entry.names.is_empty();
        if !entry.names.contains(key) {
            entry.names.push(key.clone());
        }
        let had_all = entry.wants.covers(wants);
        entry.wants = entry.wants.or(wants);
        if was_idle {
            let group = Group::of(place);
            self.groups.entry(group.clone()).or_default().count += 1;
            cluster.add_name();
            self.start(place, is_counted, false);
            self.join(cluster, group);
        } else if !had_all {
            self.start(place, is_counted, false);
        }
    }

    /// Begins to follow an object that nothing follows, or of which more is wanted. Without a pause if it `was_followed`.
    fn start(&mut self, place: &Place, is_counted: bool, was_followed: bool) {
        let Some(followed) = self.followed.get_mut(place) else { return };
        let group = self.groups.get(&Group::of(place)).and_then(|members| members.follower.as_ref());
        if let Some(group) = group {
            group.names.want(Arc::clone(&place.object.name), followed.wants);
            if group.is_ready {
                // Fails when the group has ended, which is reported.
                let _ = group.added.send(Arc::clone(&place.object.name));
                return;
            }
        }
        let is_being_listed = group.is_some();
        let is_remembered = matches!(followed.seen, Some(Seen::Absent | Seen::Unknown { .. }));
        if matches!(followed.seen, Some(Seen::Postponed)) {
            followed.seen = None;
        }
        let mut pause = match (is_remembered, is_being_listed) {
            _ if was_followed => Duration::ZERO,
            (true, _) => REMEMBERED,
            (false, true) => LISTING,
            (false, false) => Duration::ZERO,
        };
        if followed.seen.is_none() && is_counted && !followed.cluster.may_miss() {
            followed.seen = Some(Seen::Postponed);
            pause = POSTPONED.mul_f64(0.5 + fastrand::f64());
        }
        let content = match &followed.seen {
            Some(Seen::Present(content)) if content.wants.covers(followed.wants) => Some(Arc::clone(content)),
            _ => None,
        };
        let follower = Box::new(Follower {
            cluster: Arc::clone(&followed.cluster),
            place: place.clone(),
            wants: followed.wants,
            reports: self.reports.clone(),
            content,
            may_load: !matches!(followed.seen, Some(Seen::Present(_))),
            is_counted,
            pause,
            connection: followed.cluster.connection(),
            is_unwatched: false,
            mismatches: 0,
            failures: 0,
        });
        followed.task = Some(Task(tokio::spawn(async { match follower.run().await {} }).abort_handle()));
    }

    /// Begins to follow a whole namespace if so many of its objects are needed that this is less work.
    fn join(&mut self, cluster: &Arc<Cluster>, group: Group) {
        let Some(members) = self.groups.get_mut(&group) else { return };
        let is_refused = members.refused_until.is_some_and(|until| until > Instant::now());
        if members.count <= MANY || members.follower.is_some() || is_refused {
            return;
        }
        let of_group =
            self.followed.iter().filter(|(place, it)| Group::of(place) == group && !it.names.is_empty());
        let names = Arc::new(Wanted::new());
        for (place, followed) in of_group {
            let name = &place.object.name;
            names.want(Arc::clone(name), followed.wants);
            if let Some(Seen::Present(content)) = &followed.seen {
                names.know(name, content);
            }
        }
        let (added, to_add) = mpsc::unbounded_channel();
        let follower =
            GroupFollower::new(Arc::clone(cluster), group, Arc::clone(&names), to_add, self.reports.clone());
        let task = Task(tokio::spawn(follower.run()).abort_handle());
        members.follower = Some(GroupTask { names, added, is_ready: false, _task: task });
    }

    /// One watch follows the objects of a namespace from now on.
    pub(super) fn taken(&mut self, group: &Group) {
        let Some(follower) = self.groups.get_mut(group).and_then(|members| members.follower.as_mut()) else {
            return;
        };
        follower.is_ready = true;
        for (place, followed) in &mut self.followed {
            if Group::of(place) != *group || followed.task.take().is_none() {
                continue;
            }
            let name = &place.object.name;
            // Asked for, or asked more of, since the list began.
            if !follower.names.is_followed(name) || !matches!(followed.seen, Some(Seen::Present(_))) {
                let _ = follower.added.send(Arc::clone(name));
            }
        }
    }

    /// The namespace could not be listed or watched now: what objects' own watches report counts again.
    pub(super) fn not_taken_yet(&mut self, group: &Group) {
        let Some(members) = self.groups.get_mut(group) else { return };
        let Some(follower) = members.follower.as_mut() else { return };
        let names = Arc::clone(&follower.names);
        // From now on its tasks are started again.
        follower.is_ready = false;
        let overtaken =
            self.needed(group, |place, it| it.task.is_none() || names.is_followed(&place.object.name));
        names.release();
        for place in overtaken {
            self.start(&place, false, true);
        }
    }

    /// A namespace can't be followed with one watch: each object keeps, or gets, its own.
    pub(super) fn not_taken(&mut self, group: &Group) {
        let Some(members) = self.groups.get_mut(group) else { return };
        members.refused_until = Some(Instant::now() + 10 * FORBIDDEN);
        let follower = members.follower.take();
        let is_followed =
            |place: &Place| follower.as_ref().is_some_and(|it| it.names.is_followed(&place.object.name));
        // Those that waited for the list wait no longer, and of what it had no other report counted.
        let is_alone =
            |place: &Place, it: &Followed| it.task.is_none() || it.seen.is_none() || is_followed(place);
        for place in self.needed(group, is_alone) {
            self.start(&place, false, true);
        }
    }

    /// Those objects of `group` that names need, and for which `is_meant` holds.
    fn needed(&self, group: &Group, is_meant: impl Fn(&Place, &Followed) -> bool) -> Vec<Place> {
        let of_group =
            self.followed.iter().filter(|(place, it)| Group::of(place) == *group && !it.names.is_empty());
        of_group.filter(|(place, it)| is_meant(place, it)).map(|(place, _)| place.clone()).collect()
    }

    /// Notes what was found out of an object. False if nothing needs it any longer.
    pub(super) fn note(&mut self, place: &Place, seen: Seen, by: By) -> bool {
        let Some(followed) = self.followed.get_mut(place) else { return false };
        let group = self.groups.get(&Group::of(place)).and_then(|members| members.follower.as_ref());
        if let (Some(group), By::Itself) = (group, by) {
            // The namespace's watch brings what is newer.
            if group.names.is_followed(&place.object.name) {
                return false;
            }
            if let Seen::Present(content) = &seen {
                group.names.know(&place.object.name, content);
            }
        }
        followed.trouble = None;
        match seen {
            Seen::Present(_) => followed.cluster.sample(&place.object),
            Seen::Absent => followed.cluster.forget_sample(&place.object),
            Seen::Unknown { .. } | Seen::Postponed => {}
        }
        match (&followed.seen, seen) {
            // What was known stays known while the API server does not say.
            (Some(Seen::Absent), Seen::Unknown { is_final: false, .. }) => {}
            (Some(Seen::Present(_)), Seen::Unknown { reason, is_final }) => {
                followed.trouble = Some(reason).filter(|_| is_final);
            }
            (_, seen) => followed.seen = Some(seen),
        }
        !followed.names.is_empty()
    }

    /// `key` no longer needs an object.
    pub(super) fn unfollow(&mut self, place: &Place, key: &Key) {
        let Some(followed) = self.followed.get_mut(place) else { return };
        let Some(at) = followed.names.iter().position(|name| name == key) else { return };
        followed.names.remove(at);
        if !followed.names.is_empty() {
            return;
        }
        followed.task = None;
        if matches!(&followed.seen, Some(Seen::Present(content)) if !content.is_kept()) {
            followed.cluster.keeper.as_ref().inspect(|keeper| keeper.forget(place));
        }
        followed.cluster.forget_sample(&place.object);
        followed.cluster.drop_name();
        let is_worth_knowing =
            matches!(followed.seen, Some(Seen::Absent | Seen::Unknown { is_final: true, .. }));
        if is_worth_knowing && self.remembered.len() < MOST_REMEMBERED {
            self.remembered.push_back((Instant::now() + REMEMBERED, place.clone()));
        } else {
            self.followed.remove(place);
        }
        let group = Group::of(place);
        if let Some(members) = self.groups.get_mut(&group) {
            members.count -= 1;
            if let Some(follower) = &members.follower {
                follower.names.forget(&place.object.name);
            }
            if members.count == 0 && members.refused_until.is_none_or(|until| until <= Instant::now()) {
                self.groups.remove(&group);
            }
        }
    }

    /// When the next object is to be forgotten.
    pub(super) fn next_to_forget(&self) -> Option<Instant> {
        self.remembered.front().map(|(until, _)| *until)
    }

    /// Forgets the objects whose time is over.
    pub(super) fn forget(&mut self) {
        let now = Instant::now();
        while let Some((_, place)) = self.remembered.pop_front_if(|(until, _)| *until <= now) {
            if self.followed.get(&place).is_some_and(|followed| followed.names.is_empty()) {
                self.followed.remove(&place);
            }
        }
    }
}
