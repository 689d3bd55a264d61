//! The protocol logic of one stream, without I/O, clock or runtime: requests and versions in, responses out.
//!
//! The session knows names, versions and nonces. The dialect encodes them ([`super::dialect`]); the stream holds the content
//! of each version.

use std::collections::{BTreeMap, VecDeque};

use crate::secret::Version;

/// How many rejected versions of a name are remembered. A client that rejects more than these in a row has bigger problems
/// than receiving one of them again.
const REJECTED: usize = 16;

/// How many responses may wait for an ACK or NACK. Verdicts on older responses are ignored.
const OUTSTANDING: usize = 64;

/// The state of one stream.
#[derive(Debug, Default)]
pub struct Session {
    names: BTreeMap<String, Subscribed>,
    /// The nonce of the last response.
    nonce: u64,
    /// Responses that wait for a verdict, by nonce.
    outstanding: VecDeque<(u64, Vec<(String, Version)>)>,
}

/// The state of one subscribed name.
#[derive(Debug)]
struct Subscribed {
    /// The last nonce before the name was subscribed: verdicts up to this one don't apply to this subscription.
    since: u64,
    /// The client requested the name and has no response yet.
    is_requested: bool,
    /// The newest version.
    offered: Option<Version>,
    /// The version that the client was sent last, or said it holds. A NACK does not change it: Envoy keeps using the previous
    /// version, but keeps the rejected one for its next listener. To replace it, the previous version must be sent again.
    sent: Option<Version>,
    /// Versions that the client rejected, the newest last.
    rejected: VecDeque<Version>,
    fate: Fate,
}

/// Whether a name can ever be served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    /// Now or later.
    Servable,
    /// Never, and the client does not know yet.
    Refused,
    /// Never, and the client was sent the refusal.
    RefusalSent,
}

impl Subscribed {
    fn since(nonce: u64) -> Self {
        Self {
            since: nonce,
            is_requested: true,
            offered: None,
            sent: None,
            rejected: VecDeque::new(),
            fate: Fate::Servable,
        }
    }

    /// The version to send now, if any.
    fn due(&self) -> Option<&Version> {
        let is_new =
            |offered: &Version| self.sent.as_ref() != Some(offered) && !self.rejected.contains(offered);
        let is_due = |offered: &&Version| self.is_requested || is_new(offered);
        self.offered.as_ref().filter(is_due)
    }

    fn accept(&mut self, version: &Version) {
        self.rejected.retain(|rejected| rejected != version);
    }

    fn reject(&mut self, version: &Version) {
        self.rejected.retain(|rejected| rejected != version);
        if self.rejected.len() == REJECTED {
            self.rejected.pop_front();
        }
        self.rejected.push_back(version.clone());
    }
}

/// The content of one response: names and versions.
#[derive(Debug, PartialEq, Eq)]
pub struct Push {
    /// Unique on the stream.
    pub nonce: String,
    /// Sorted by name.
    pub items: Vec<(String, Version)>,
    /// Names that can never be served.
    pub removed: Vec<String>,
}

impl Session {
    /// Subscribes to `name`. True if it was not subscribed. If it was, it is sent again.
    pub fn subscribe(&mut self, name: &str) -> bool {
        if let Some(subscribed) = self.names.get_mut(name) {
            subscribed.is_requested = true;
            if subscribed.fate == Fate::RefusalSent {
                subscribed.fate = Fate::Refused;
            }
            return false;
        }
        self.names.insert(name.to_owned(), Subscribed::since(self.nonce));
        true
    }

    pub fn is_subscribed(&self, name: &str) -> bool {
        self.names.contains_key(name)
    }

    /// `name` can never be served: the next response removes it.
    pub fn refuse(&mut self, name: &str) {
        if let Some(subscribed) = self.names.get_mut(name) {
            subscribed.fate = Fate::Refused;
        }
    }

    /// Unsubscribes from `name`: nothing more is sent for it. True if it was subscribed.
    pub fn unsubscribe(&mut self, name: &str) -> bool {
        self.names.remove(name).is_some()
    }

    /// The client holds `version` of `name` from an earlier stream: it need not be sent again.
    pub fn holds(&mut self, name: &str, version: Version) {
        if let Some(subscribed) = self.names.get_mut(name) {
            subscribed.is_requested = false;
            subscribed.sent = Some(version);
        }
    }

    /// `version` is the newest version of `name`.
    pub fn offer(&mut self, name: &str, version: Version) {
        if let Some(subscribed) = self.names.get_mut(name) {
            subscribed.offered = Some(version);
        }
    }

    /// The client acknowledged the response with `nonce`. Returns its items, or nothing for a nonce that has no waiting response.
    pub fn accept(&mut self, nonce: &str) -> Vec<(String, Version)> {
        self.settle(nonce, Subscribed::accept)
    }

    /// The client rejected the response with `nonce`, and keeps what it has. Returns its items, or nothing for a nonce that has
    /// no waiting response. These versions are not sent again, unless the client requests or accepts them later.
    pub fn reject(&mut self, nonce: &str) -> Vec<(String, Version)> {
        self.settle(nonce, Subscribed::reject)
    }

    fn settle(&mut self, nonce: &str, verdict: fn(&mut Subscribed, &Version)) -> Vec<(String, Version)> {
        let at = self.outstanding.iter().position(|(waiting, _)| waiting.to_string() == nonce);
        let Some((nonce, items)) = at.and_then(|at| self.outstanding.remove(at)) else { return Vec::new() };
        for (name, version) in &items {
            if let Some(subscribed) = self.names.get_mut(name).filter(|subscribed| subscribed.since < nonce) {
                verdict(subscribed, version);
            }
        }
        items
    }

    /// Whether `nonce` belongs to the last response.
    pub fn is_last(&self, nonce: &str) -> bool {
        self.nonce > 0 && nonce == self.nonce.to_string()
    }

    /// What to send now, if anything.
    pub fn push(&mut self) -> Option<Push> {
        let (mut items, mut removed) = (Vec::new(), Vec::new());
        let nonce = self.nonce + 1;
        for (name, subscribed) in &mut self.names {
            if subscribed.fate == Fate::Refused {
                subscribed.fate = Fate::RefusalSent;
                removed.push(name.clone());
            } else if let Some(version) = subscribed.due().cloned() {
                subscribed.is_requested = false;
                subscribed.sent = Some(version.clone());
                items.push((name.clone(), version));
            }
        }
        if items.is_empty() && removed.is_empty() {
            return None;
        }
        self.nonce = nonce;
        if !items.is_empty() {
            if self.outstanding.len() == OUTSTANDING {
                self.outstanding.pop_front();
            }
            self.outstanding.push_back((nonce, items.clone()));
        }
        Some(Push { nonce: nonce.to_string(), items, removed })
    }

    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.names.keys().map(String::as_str)
    }

    /// The version of each name that the client was sent last, or said it holds.
    pub fn held(&self) -> impl Iterator<Item = (&str, &Version)> {
        self.names.iter().filter_map(|(name, at)| Some((name.as_str(), at.sent.as_ref()?)))
    }

    /// The newest version of every name that has one.
    pub fn offered(&self) -> impl Iterator<Item = (&str, &Version)> {
        self.names.iter().filter_map(|(name, at)| Some((name.as_str(), at.offered.as_ref()?)))
    }
}
