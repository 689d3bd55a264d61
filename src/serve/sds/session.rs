//! One conversation about secrets, without I/O, clock or runtime: what came in goes in, what to send comes out.
//!
//! The session knows names, versions and nonces. How they are said on the wire is the dialect's business
//! ([`super::dialect`]); the bytes behind a version are the stream's.

use std::collections::{BTreeMap, VecDeque};

use crate::secret::Version;

/// How many rejected versions of a name are remembered. A client that rejects more than these in a row has other
/// troubles than to be sent one of them again.
const REJECTED: usize = 16;

/// How many responses may wait for their verdict. Who answers later than that is not heard.
const OUTSTANDING: usize = 64;

/// The state of one stream.
#[derive(Debug, Default)]
pub struct Session {
    names: BTreeMap<String, Subscribed>,
    /// The nonce of the last response.
    nonce: u64,
    /// What waits for a verdict, by nonce.
    outstanding: VecDeque<(u64, Vec<(String, Version)>)>,
}

/// Where one subscribed name stands.
#[derive(Debug)]
struct Subscribed {
    /// The last nonce before it was subscribed: verdicts up to this one are not about this subscription.
    since: u64,
    /// The client asked for it and got no answer yet.
    is_asked: bool,
    /// The newest version there is.
    offered: Option<Version>,
    /// What the client was sent last, or said it holds. It stays so when the client refuses it: Envoy goes on with what
    /// it had, but keeps the refused secret for its next listener. What was there before must be sent again to replace it.
    sent: Option<Version>,
    /// What the client refused, the newest last.
    rejected: VecDeque<Version>,
    fate: Fate,
}

/// Whether a name can ever be served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    /// It can, now or later.
    Served,
    /// It can't, and the client is to be told.
    Refused,
    /// It can't, and the client knows.
    Told,
}

impl Subscribed {
    fn since(nonce: u64) -> Self {
        Self {
            since: nonce,
            is_asked: true,
            offered: None,
            sent: None,
            rejected: VecDeque::new(),
            fate: Fate::Served,
        }
    }

    /// The version to send now, if any.
    fn due(&self) -> Option<&Version> {
        let is_news =
            |offered: &Version| self.sent.as_ref() != Some(offered) && !self.rejected.contains(offered);
        let is_due = |offered: &&Version| self.is_asked || is_news(offered);
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

/// Names and versions that go into one response, and the nonce that stands for it.
#[derive(Debug, PartialEq, Eq)]
pub struct Push {
    /// Unique on its stream.
    pub nonce: String,
    /// What is sent, sorted by name.
    pub items: Vec<(String, Version)>,
    /// Names that can never be served.
    pub removed: Vec<String>,
}

impl Session {
    /// The client wants `name`. True if it was not subscribed. Asking again is answered again.
    pub fn subscribe(&mut self, name: &str) -> bool {
        if let Some(subscribed) = self.names.get_mut(name) {
            subscribed.is_asked = true;
            if subscribed.fate == Fate::Told {
                subscribed.fate = Fate::Refused;
            }
            return false;
        }
        self.names.insert(name.to_owned(), Subscribed::since(self.nonce));
        true
    }

    /// Whether `name` is subscribed.
    pub fn is_subscribed(&self, name: &str) -> bool {
        self.names.contains_key(name)
    }

    /// `name` can never be served, and the client is to hear it.
    pub fn refuse(&mut self, name: &str) {
        if let Some(subscribed) = self.names.get_mut(name) {
            subscribed.fate = Fate::Refused;
        }
    }

    /// The client no longer wants `name`: nothing more is sent for it. True if it was subscribed.
    pub fn unsubscribe(&mut self, name: &str) -> bool {
        self.names.remove(name).is_some()
    }

    /// The client says that it holds `version` of `name` from an earlier stream: it need not be sent again.
    pub fn holds(&mut self, name: &str, version: Version) {
        if let Some(subscribed) = self.names.get_mut(name) {
            subscribed.is_asked = false;
            subscribed.sent = Some(version);
        }
    }

    /// `version` is the newest value of `name`.
    pub fn offer(&mut self, name: &str, version: Version) {
        if let Some(subscribed) = self.names.get_mut(name) {
            subscribed.offered = Some(version);
        }
    }

    /// The client took the response with `nonce`. Gives what it took; nothing for a nonce that does not wait.
    pub fn accept(&mut self, nonce: &str) -> Vec<(String, Version)> {
        self.settle(nonce, Subscribed::accept)
    }

    /// The client refused the response with `nonce`, and keeps what it has. Gives what it refused; nothing for a
    /// nonce that does not wait. These versions are not sent again, unless they are asked for or taken after all.
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

    /// Whether `nonce` is that of the last response.
    pub fn is_last(&self, nonce: &str) -> bool {
        self.nonce > 0 && nonce == self.nonce.to_string()
    }

    /// What to send now.
    pub fn push(&mut self) -> Option<Push> {
        let (mut items, mut removed) = (Vec::new(), Vec::new());
        let nonce = self.nonce + 1;
        for (name, subscribed) in &mut self.names {
            if subscribed.fate == Fate::Refused {
                subscribed.fate = Fate::Told;
                removed.push(name.clone());
            } else if let Some(version) = subscribed.due().cloned() {
                subscribed.is_asked = false;
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

    /// Every subscribed name.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.names.keys().map(String::as_str)
    }

    /// What the client was sent last of each name, or said it holds.
    pub fn held(&self) -> impl Iterator<Item = (&str, &Version)> {
        self.names.iter().filter_map(|(name, at)| Some((name.as_str(), at.sent.as_ref()?)))
    }

    /// The newest version of every name that has one.
    pub fn offered(&self) -> impl Iterator<Item = (&str, &Version)> {
        self.names.iter().filter_map(|(name, at)| Some((name.as_str(), at.offered.as_ref()?)))
    }
}
