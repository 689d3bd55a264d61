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
    nonces: u64,
    outstanding: VecDeque<Push>,
}

/// Where one subscribed name stands.
#[derive(Debug, Default)]
struct Subscribed {
    /// The newest version there is.
    offered: Option<Version>,
    /// What the client was sent last and did not refuse, or said it holds. None while it waits for an answer.
    sent: Option<Version>,
    /// What the client took last.
    accepted: Option<Version>,
    /// What the client refused, the newest last.
    rejected: VecDeque<Version>,
    fate: Fate,
}

/// Whether a name can ever be served.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Fate {
    /// It can, now or later.
    #[default]
    Served,
    /// It can't, and the client is to be told.
    Refused,
    /// It can't, and the client knows.
    Told,
}

impl Subscribed {
    /// The version to send now, if any.
    fn due(&self) -> Option<&Version> {
        let is_news =
            |offered: &&Version| self.sent.as_ref() != Some(*offered) && !self.rejected.contains(offered);
        self.offered.as_ref().filter(is_news)
    }

    /// Forgets what the client got: it asks for it again.
    fn ask_again(&mut self) {
        self.sent = None;
        self.rejected.clear();
        if self.fate == Fate::Told {
            self.fate = Fate::Refused;
        }
    }
}

/// Names and versions that go into one response, and the nonce that stands for it.
#[derive(Clone, Debug, PartialEq, Eq)]
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
            subscribed.ask_again();
            return false;
        }
        self.names.insert(name.to_owned(), Subscribed::default());
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
            subscribed.accepted = Some(version.clone());
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
        let items = self.settle(nonce);
        for (name, version) in &items {
            let Some(subscribed) = self.names.get_mut(name) else { continue };
            subscribed.rejected.retain(|rejected| rejected != version);
            subscribed.accepted = Some(version.clone());
        }
        items
    }

    /// The client refused the response with `nonce`, and keeps what it has. Gives what it refused; nothing for a
    /// nonce that does not wait. These versions are not sent again.
    pub fn reject(&mut self, nonce: &str) -> Vec<(String, Version)> {
        let items = self.settle(nonce);
        for (name, version) in &items {
            let Some(subscribed) = self.names.get_mut(name) else { continue };
            if subscribed.sent.as_ref() == Some(version) {
                subscribed.sent.clone_from(&subscribed.accepted);
            }
            if subscribed.rejected.len() == REJECTED {
                subscribed.rejected.pop_front();
            }
            subscribed.rejected.push_back(version.clone());
        }
        items
    }

    /// Whether `nonce` is that of the last response.
    pub fn is_last(&self, nonce: &str) -> bool {
        self.nonces > 0 && nonce == self.nonces.to_string()
    }

    fn settle(&mut self, nonce: &str) -> Vec<(String, Version)> {
        let at = self.outstanding.iter().position(|push| push.nonce == nonce);
        at.and_then(|at| self.outstanding.remove(at)).map(|push| push.items).unwrap_or_default()
    }

    /// What to send now.
    pub fn push(&mut self) -> Option<Push> {
        let (mut items, mut removed) = (Vec::new(), Vec::new());
        for (name, subscribed) in &mut self.names {
            if subscribed.fate == Fate::Refused {
                subscribed.fate = Fate::Told;
                removed.push(name.clone());
            } else if let Some(version) = subscribed.due().cloned() {
                subscribed.sent = Some(version.clone());
                items.push((name.clone(), version));
            }
        }
        if items.is_empty() && removed.is_empty() {
            return None;
        }
        self.nonces += 1;
        let push = Push { nonce: self.nonces.to_string(), items, removed };
        if self.outstanding.len() == OUTSTANDING {
            self.outstanding.pop_front();
        }
        self.outstanding.push_back(push.clone());
        Some(push)
    }

    /// The names in the last push, until the client has answered it.
    pub fn last_pushed(&self) -> impl Iterator<Item = &str> {
        self.outstanding.back().into_iter().flat_map(|push| push.items.iter().map(|(name, _)| name.as_str()))
    }

    /// Every subscribed name.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.names.keys().map(String::as_str)
    }

    /// What the client holds once it has taken everything that was sent.
    pub fn sent(&self) -> impl Iterator<Item = (&str, &Version)> {
        self.names.iter().filter_map(|(name, at)| Some((name.as_str(), at.sent.as_ref()?)))
    }

    /// The newest version of every name that has one.
    pub fn offered(&self) -> impl Iterator<Item = (&str, &Version)> {
        self.names.iter().filter_map(|(name, at)| Some((name.as_str(), at.offered.as_ref()?)))
    }
}
