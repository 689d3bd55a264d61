//! One conversation about secrets, without I/O, clock or runtime: what came in goes in, what to send comes out.
//!
//! The session knows names, versions and nonces. How they are said on the wire is the dialect's business
//! ([`super::dialect`]); the bytes behind a version are the stream's.

use std::collections::{BTreeMap, VecDeque};

use crate::secret::Version;

/// How many rejected versions of a name are remembered. A client that rejects more than these in a row has other
/// troubles than to be sent one of them again.
const REJECTED: usize = 16;

/// The state of one stream.
#[derive(Debug, Default)]
pub struct Session {
    names: BTreeMap<String, Subscribed>,
    nonces: u64,
    outstanding: Option<Push>,
}

/// Where one subscribed name stands.
#[derive(Debug, Default)]
struct Subscribed {
    /// The newest version there is.
    offered: Option<Version>,
    /// What the client was sent last, or said it holds.
    sent: Option<Version>,
    /// What the client refused, the newest last.
    rejected: VecDeque<Version>,
    /// The client asked and was not answered yet: it is answered even with what it may hold.
    owed: bool,
}

impl Subscribed {
    /// The version to send now, if any.
    fn due(&self) -> Option<&Version> {
        let is_news =
            |offered: &&Version| self.sent.as_ref() != Some(*offered) && !self.rejected.contains(offered);
        self.offered.as_ref().filter(|offered| self.owed || is_news(offered))
    }
}

/// Names and versions that go into one response, and the nonce that stands for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Push {
    /// Unique on its stream.
    pub nonce: String,
    /// Sorted by name. Never empty.
    pub items: Vec<(String, Version)>,
}

impl Session {
    /// The client wants `name`. True if it was not subscribed; then the answer is owed.
    pub fn subscribe(&mut self, name: &str) -> bool {
        if self.names.contains_key(name) {
            return false;
        }
        self.names.insert(name.to_owned(), Subscribed { owed: true, ..Subscribed::default() });
        true
    }

    /// The client no longer wants `name`: nothing more is sent for it. True if it was subscribed.
    pub fn unsubscribe(&mut self, name: &str) -> bool {
        self.names.remove(name).is_some()
    }

    /// The client says that it holds `version` of `name` from an earlier stream: it need not be sent again.
    pub fn holds(&mut self, name: &str, version: Version) {
        if let Some(subscribed) = self.names.get_mut(name) {
            subscribed.owed = false;
            subscribed.sent = Some(version);
        }
    }

    /// `version` is the newest value of `name`.
    pub fn offer(&mut self, name: &str, version: Version) {
        if let Some(subscribed) = self.names.get_mut(name) {
            subscribed.offered = Some(version);
        }
    }

    /// The client took the response with `nonce`. Gives what it took; nothing for a nonce that is not the last.
    pub fn accept(&mut self, nonce: &str) -> Vec<(String, Version)> {
        self.settle(nonce)
    }

    /// The client refused the response with `nonce`. Gives what it refused; nothing for a nonce that is not
    /// the last. These versions are not sent again.
    pub fn reject(&mut self, nonce: &str) -> Vec<(String, Version)> {
        let items = self.settle(nonce);
        for (name, version) in &items {
            let Some(subscribed) = self.names.get_mut(name) else { continue };
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
        match self.outstanding.take_if(|push| push.nonce == nonce) {
            Some(push) => push.items,
            None => Vec::new(),
        }
    }

    /// What to send now. A later push replaces an unanswered one: its nonce is the one that counts.
    pub fn push(&mut self) -> Option<Push> {
        let mut items = Vec::new();
        for (name, subscribed) in &mut self.names {
            if let Some(version) = subscribed.due().cloned() {
                subscribed.owed = false;
                subscribed.sent = Some(version.clone());
                items.push((name.clone(), version));
            }
        }
        if items.is_empty() {
            return None;
        }
        self.nonces += 1;
        let push = Push { nonce: self.nonces.to_string(), items };
        self.outstanding = Some(push.clone());
        Some(push)
    }

    /// The names in the last push, until the client has answered it.
    pub fn last_pushed(&self) -> impl Iterator<Item = &str> {
        self.outstanding.iter().flat_map(|push| push.items.iter().map(|(name, _)| name.as_str()))
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
