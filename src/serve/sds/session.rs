//! The protocol logic of one stream, without I/O, clock or runtime: requests and versions in, responses out.
//!
//! The session knows names, versions and nonces, and holds the newest content of each name. The dialect encodes them
//! ([`super::dialect`]). What a change of one name costs does not depend on how many names there are.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use super::version::Combined;
use crate::secret::{Resource, Version};

/// How many rejected versions of a name are remembered. A client that rejects more than these in a row has bigger problems
/// than receiving one of them again.
const REJECTED: usize = 16;

/// How many responses may wait for an ACK or NACK. Verdicts on older responses are ignored.
const OUTSTANDING: usize = 64;

/// The names of a response, each with its version.
pub type Versions = Vec<(Arc<str>, Version)>;

/// The session's own short name of a subscribed name. It is given to another name after the name is unsubscribed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NameId(u32);

impl NameId {
    pub fn index(self) -> usize {
        self.0 as usize
    }

    pub fn from_index(index: usize) -> Self {
        Self(u32::try_from(index).unwrap_or(u32::MAX))
    }
}

/// The state of one stream.
#[derive(Debug, Default)]
pub struct Session {
    ids: HashMap<Arc<str>, NameId>,
    /// By [`NameId`].
    names: Vec<Option<Subscribed>>,
    free: Vec<NameId>,
    /// Bytes of all subscribed names.
    name_bytes: usize,
    /// Names that may have something to send. May hold a name twice, or one that is no longer subscribed.
    marked: Vec<NameId>,
    /// How many names have a version.
    offered: usize,
    /// The version of all names that were sent. Kept only once there were several.
    sent: Option<Combined>,
    /// Versions that the client held before this stream, and that are the newest.
    confirmed: Versions,
    /// The number of the last list of names.
    list: u32,
    /// The nonce of the last response.
    nonce: u64,
    /// Responses that wait for a verdict, by nonce.
    outstanding: VecDeque<(u64, Versions)>,
}

/// The state of one subscribed name.
#[derive(Debug)]
struct Subscribed {
    name: Arc<str>,
    /// The last nonce before the name was subscribed: verdicts up to this one don't apply to this subscription.
    since: u64,
    /// The last list that the name is in.
    list: u32,
    /// The client requested the name and has no response yet.
    is_requested: bool,
    is_marked: bool,
    /// `sent` is what the client says it holds, not confirmed yet.
    is_claimed: bool,
    fate: Fate,
    /// The newest version.
    offered: Option<Resource>,
    /// The version that the client was sent last, or said it holds. A NACK does not change it: Envoy keeps using the previous
    /// version, but keeps the rejected one for its next listener. To replace it, the previous version must be sent again.
    sent: Option<Version>,
    /// Versions that the client rejected, the newest last.
    #[allow(clippy::box_collection, reason = "few names have any, and a stream has thousands of names")]
    rejected: Option<Box<Vec<Version>>>,
}

/// Whether a name is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    /// Now, or as soon as there is a value.
    Servable,
    /// Not now, and maybe never. The client does not know yet.
    Refused,
    /// The same, and the client was sent that it is removed.
    RefusalSent,
}

impl Subscribed {
    /// The version to send now, if any.
    fn due(&self) -> Option<&Resource> {
        let is_new = |offered: &Version| self.sent.as_ref() != Some(offered) && !self.has_rejected(offered);
        self.offered.as_ref().filter(|offered| self.is_requested || is_new(&offered.version))
    }

    /// The client holds `version`, if that is the newest one.
    fn confirm(&mut self) -> Option<Version> {
        let offered = self.offered.as_ref().map(|offered| &offered.version);
        let is_confirmed = self.is_claimed && offered.is_some() && offered == self.sent.as_ref();
        self.is_claimed &= !is_confirmed;
        self.sent.clone().filter(|_| is_confirmed)
    }

    fn has_rejected(&self, version: &Version) -> bool {
        self.rejected.as_ref().is_some_and(|rejected| rejected.contains(version))
    }

    fn accept(&mut self, version: &Version) {
        if let Some(rejected) = &mut self.rejected {
            rejected.retain(|rejected| rejected != version);
        }
    }

    fn reject(&mut self, version: &Version) {
        self.accept(version);
        let rejected = self.rejected.get_or_insert_default();
        if rejected.len() == REJECTED {
            rejected.remove(0);
        }
        rejected.push(version.clone());
    }
}

/// The content of one response.
#[derive(Debug)]
pub struct Push {
    /// Unique on the stream.
    pub nonce: u64,
    /// Sorted by name.
    pub items: Vec<PushItem>,
    /// Names that are not served, sorted.
    pub removed: Vec<Arc<str>>,
}

/// One name of a response.
#[derive(Debug)]
pub struct PushItem {
    pub id: NameId,
    pub name: Arc<str>,
    pub resource: Resource,
}

impl Session {
    /// Gives back the memory that is left over once `added` names were subscribed: with 10,000 names nearly half.
    pub fn trim(&mut self, added: usize) {
        if added > self.names.len() / 8 {
            self.names.shrink_to_fit();
        }
    }

    /// Subscribes to `name`. Returns its id if it was not subscribed. If it was, it is sent again.
    pub fn subscribe(&mut self, name: &str) -> Option<NameId> {
        if let Some(id) = self.ids.get(name).copied() {
            if let Some(subscribed) = self.at(id) {
                subscribed.is_requested = true;
                if subscribed.fate == Fate::RefusalSent {
                    subscribed.fate = Fate::Refused;
                }
            }
            self.mark(id);
            return None;
        }
        let name: Arc<str> = name.into();
        let id = self.free.pop().unwrap_or_else(|| {
            self.names.push(None);
            NameId::from_index(self.names.len() - 1)
        });
        let place = self.names.get_mut(id.index())?;
        *place = Some(Subscribed {
            name: Arc::clone(&name),
            since: self.nonce,
            list: self.list,
            is_requested: true,
            is_marked: false,
            is_claimed: false,
            fate: Fate::Servable,
            offered: None,
            sent: None,
            rejected: None,
        });
        self.name_bytes += name.len();
        self.ids.insert(name, id);
        Some(id)
    }

    /// There is nothing more to send for `id`. What the client has, it keeps.
    pub fn retract(&mut self, id: NameId) {
        let Some(subscribed) = self.at(id) else { return };
        let was_offered = subscribed.offered.take().is_some();
        self.offered -= usize::from(was_offered);
    }

    /// There is nothing to serve as `id`: the next response removes it from the client, once.
    pub fn withdraw(&mut self, id: NameId) {
        self.retract(id);
        let Self { names, sent, .. } = self;
        let Some(subscribed) = names.get_mut(id.index()).and_then(Option::as_mut) else { return };
        if let (Some(version), Some(sum)) = (subscribed.sent.take(), sent) {
            sum.remove(&subscribed.name, &version);
        }
        if subscribed.fate == Fate::Servable {
            self.refuse(id);
        }
    }

    /// `id` can never be served: the next response removes it.
    pub fn refuse(&mut self, id: NameId) {
        if let Some(subscribed) = self.at(id) {
            subscribed.fate = Fate::Refused;
            self.mark(id);
        }
    }

    /// Unsubscribes from `name`: nothing more is sent for it. Returns its id if it was subscribed.
    pub fn unsubscribe(&mut self, name: &str) -> Option<(NameId, Arc<str>)> {
        let (name, id) = self.ids.remove_entry(name)?;
        self.name_bytes -= name.len();
        if let Some(gone) = self.names.get_mut(id.index()).and_then(Option::take) {
            self.offered -= usize::from(gone.offered.is_some());
            if let (Some(sum), Some(version)) = (&mut self.sent, &gone.sent) {
                sum.remove(&name, version);
            }
        }
        self.free.push(id);
        if self.ids.is_empty() {
            // A stream that had many names and has none needs no memory for them.
            (self.ids, self.names, self.free) = Default::default();
            (self.marked, self.sent) = Default::default();
        }
        Some((id, name))
    }

    /// Begins a list of all names: those that are not listed from now on are
    /// [unlisted](Self::unlisted).
    pub fn begin_list(&mut self) {
        self.list = self.list.wrapping_add(1);
    }

    /// Adds `name` to the list if it is subscribed. None if it is not, else whether it was not in the list yet.
    pub fn list(&mut self, name: &str) -> Option<bool> {
        let (id, list) = (self.ids.get(name).copied()?, self.list);
        let subscribed = self.at(id)?;
        let is_new = subscribed.list != list;
        subscribed.list = list;
        Some(is_new)
    }

    /// The names that the list does not have.
    pub fn unlisted(&self) -> Vec<Arc<str>> {
        let names = self.names.iter().flatten().filter(|subscribed| subscribed.list != self.list);
        names.map(|subscribed| Arc::clone(&subscribed.name)).collect()
    }

    /// The client holds `version` of `name` from an earlier stream: it need not be sent again.
    pub fn holds(&mut self, name: &str, version: Version) {
        let Some(id) = self.ids.get(name).copied() else { return };
        self.set_sent(id, version);
        let Some(subscribed) = self.at(id) else { return };
        subscribed.is_requested = false;
        subscribed.is_claimed = true;
        self.confirm(id);
        self.mark(id);
    }

    /// `resource` is the newest version of `id`.
    pub fn offer(&mut self, id: NameId, resource: Resource) {
        let Some(subscribed) = self.at(id) else { return };
        let is_first = subscribed.offered.replace(resource).is_none();
        subscribed.fate = Fate::Servable;
        self.offered += usize::from(is_first);
        self.confirm(id);
        self.mark(id);
    }

    /// The versions that the client held before this stream and that are the newest: it has accepted them. Each once.
    pub fn take_confirmed(&mut self) -> Versions {
        std::mem::take(&mut self.confirmed)
    }

    fn confirm(&mut self, id: NameId) {
        let Some(subscribed) = self.at(id) else { return };
        if let Some(version) = subscribed.confirm() {
            let name = Arc::clone(&subscribed.name);
            self.confirmed.push((name, version));
        }
    }

    /// The client acknowledged the response with `nonce`. Returns its items, or nothing for a nonce that has no waiting response.
    pub fn accept(&mut self, nonce: &str) -> Versions {
        self.settle(nonce, Subscribed::accept)
    }

    /// The client rejected the response with `nonce`, and keeps what it has. Returns its items, or nothing for a nonce that has
    /// no waiting response. These versions are not sent again, unless the client requests or accepts them later.
    pub fn reject(&mut self, nonce: &str) -> Versions {
        self.settle(nonce, Subscribed::reject)
    }

    fn settle(&mut self, nonce: &str, verdict: fn(&mut Subscribed, &Version)) -> Versions {
        let number = parse_nonce(nonce);
        let at = self.outstanding.iter().position(|(waiting, _)| Some(*waiting) == number);
        let Some((nonce, items)) = at.and_then(|at| self.outstanding.remove(at)) else { return Vec::new() };
        for (name, version) in &items {
            let Some(id) = self.ids.get(name).copied() else { continue };
            if let Some(subscribed) = self.at(id).filter(|subscribed| subscribed.since < nonce) {
                verdict(subscribed, version);
                self.mark(id);
            }
        }
        if self.outstanding.is_empty() {
            self.outstanding = VecDeque::new();
        }
        items
    }

    /// Whether `nonce` belongs to the last response.
    pub fn is_last(&self, nonce: &str) -> bool {
        self.nonce > 0 && parse_nonce(nonce) == Some(self.nonce)
    }

    /// What to send now, if anything.
    pub fn push(&mut self) -> Option<Push> {
        let (mut items, mut removed) = (Vec::new(), Vec::new());
        for id in std::mem::take(&mut self.marked) {
            let Some(subscribed) = self.at(id) else { continue };
            subscribed.is_marked = false;
            if subscribed.fate == Fate::Refused {
                subscribed.fate = Fate::RefusalSent;
                removed.push(Arc::clone(&subscribed.name));
            } else if let Some(resource) = subscribed.due().cloned() {
                subscribed.is_requested = false;
                subscribed.is_claimed = false;
                let name = Arc::clone(&subscribed.name);
                self.set_sent(id, resource.version.clone());
                items.push(PushItem { id, name, resource });
            }
        }
        if items.is_empty() && removed.is_empty() {
            return None;
        }
        items.sort_unstable_by(|one, other| one.name.cmp(&other.name));
        removed.sort_unstable();
        self.nonce += 1;
        if !items.is_empty() {
            if self.outstanding.len() == OUTSTANDING {
                self.outstanding.pop_front();
            }
            let waiting = items.iter().map(|item| (Arc::clone(&item.name), item.resource.version.clone()));
            self.outstanding.push_back((self.nonce, waiting.collect()));
        }
        Some(Push { nonce: self.nonce, items, removed })
    }

    /// How many names are subscribed.
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// Bytes of all subscribed names.
    pub fn name_bytes(&self) -> usize {
        self.name_bytes
    }

    pub fn name(&self, id: NameId) -> Option<&Arc<str>> {
        self.names.get(id.index())?.as_ref().map(|subscribed| &subscribed.name)
    }

    pub fn id(&self, name: &str) -> Option<NameId> {
        self.ids.get(name).copied()
    }

    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.names.iter().flatten().map(|subscribed| &*subscribed.name)
    }

    /// One version for all names that were sent, or that the client said it holds.
    pub fn held_version(&mut self) -> String {
        if let [Some(only)] = self.names.as_slice() {
            // Most streams have one name.
            return only.sent.as_ref().map_or_else(String::new, Version::to_string);
        }
        let held = || self.names.iter().flatten().filter_map(|at| Some((&*at.name, at.sent.as_ref()?)));
        self.sent.get_or_insert_with(|| held().collect()).to_string()
    }

    /// One version for the newest versions of all names that have one; none where no name has.
    pub fn offered_version(&self) -> Option<String> {
        (self.offered > 0).then(|| self.offers().collect::<Combined>().to_string())
    }

    /// The client holds the newest version of every name that has one.
    pub fn holds_all(&mut self) {
        let held: Vec<_> = self.offers().map(|(name, version)| (name.to_owned(), version.clone())).collect();
        for (name, version) in held {
            self.holds(&name, version);
        }
    }

    fn offers(&self) -> impl Iterator<Item = (&str, &Version)> {
        self.names.iter().flatten().filter_map(|at| Some((&*at.name, &at.offered.as_ref()?.version)))
    }

    fn at(&mut self, id: NameId) -> Option<&mut Subscribed> {
        self.names.get_mut(id.index())?.as_mut()
    }

    fn set_sent(&mut self, id: NameId, version: Version) {
        let Self { names, sent, .. } = self;
        let Some(subscribed) = names.get_mut(id.index()).and_then(Option::as_mut) else { return };
        if let Some(sum) = sent {
            if let Some(before) = &subscribed.sent {
                sum.remove(&subscribed.name, before);
            }
            sum.add(&subscribed.name, &version);
        }
        subscribed.sent = Some(version);
    }

    fn mark(&mut self, id: NameId) {
        if let Some(subscribed) = self.at(id)
            && !std::mem::replace(&mut subscribed.is_marked, true)
        {
            self.marked.push(id);
        }
    }
}

/// The number of a nonce that a session may have given out.
fn parse_nonce(nonce: &str) -> Option<u64> {
    let is_plain = nonce.bytes().all(|byte| byte.is_ascii_digit()) && !nonce.starts_with('0');
    nonce.parse().ok().filter(|_| is_plain)
}
