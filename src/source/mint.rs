//! Key pairs for hosts (`mint://DNSNAME`), from the agent's CA, as long as streams ask for them.
//!
//! Each host has an issuer like the workload's, for a certificate with the workload's identity and the host's DNS name.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use tokio::sync::Notify;
use tokio::task::{AbortHandle, Id, JoinError, JoinSet};

use super::issuer::{IssuanceQueue, Issuer, IssuerContext, IssuerSettings, Minted};
use crate::base::limits;
use crate::ca::failover::Failover;
use crate::pki::csr::{DnsName, Names};
use crate::secret::{NameKind, SecretName};
use crate::store::{Cache, Demand, Event, Key, Origin, Scope, Workload};

/// Certificates for hosts that are requested at a time: half of what all workloads may request.
const PERMITS: usize = 4;

/// Which hosts get certificates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MintSettings {
    pub suffixes: Vec<Suffix>,
}

/// The end of hosts' names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Suffix {
    domain: DnsName,
    /// The host may be the domain itself.
    has_domain: bool,
}

impl FromStr for Suffix {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let domain = text.strip_prefix('.').unwrap_or(text).parse::<DnsName>();
        match domain {
            Ok(domain) if !domain.is_wildcard() => Ok(Self { domain, has_domain: !text.starts_with('.') }),
            _ => Err(format!(
                "{text:?} is not a domain; the shape is .example.com, or example.com to include it"
            )),
        }
    }
}

impl fmt::Display for Suffix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", if self.has_domain { "" } else { "." }, self.domain)
    }
}

impl Suffix {
    /// Whether `host`, in lower case, ends with this, as whole labels.
    fn covers(&self, host: &str) -> bool {
        match host.strip_suffix(self.domain.as_str()) {
            Some("") => self.has_domain,
            Some(before) => before.ends_with('.'),
            None => false,
        }
    }
}

/// Publishes key pairs for hosts.
#[derive(Debug)]
pub struct MintSource {
    demand: Option<Demand>,
    hosts: Hosts,
}

/// The hosts that streams ask for.
#[derive(Debug)]
struct Hosts {
    cas: Failover,
    settings: IssuerSettings,
    cache: Cache,
    context: IssuerContext,
    queue: IssuanceQueue,
    states: HashMap<Key, State>,
    /// Those without an issuer, in the order of their arrival.
    waiting: BTreeMap<u64, Key>,
    arrivals: u64,
    /// Those with an issuer whose last stream has left. One may have come back since.
    deserted: HashSet<Key>,
    /// The issuers. Each ends when its host is no longer asked for.
    tasks: JoinSet<Key>,
}

#[derive(Debug)]
enum State {
    /// There is no room for its issuer; by its number in the order of arrival.
    Waiting(u64),
    Minted {
        issuer: AbortHandle,
        room: Arc<Notify>,
    },
}

impl MintSource {
    /// A source of the hosts that streams of `workload` ask for. `issuer` is what the workload's own certificate is issued by.
    pub fn new(
        settings: MintSettings,
        cas: Failover,
        issuer: IssuerSettings,
        cache: &Cache,
        workload: Workload,
        context: IssuerContext,
    ) -> Self {
        let MintSettings { suffixes } = settings;
        let admission = move |name: &SecretName| {
            let host = host_of(name).ok_or("it names no host")?;
            match suffixes.iter().any(|suffix| suffix.covers(host.as_str())) {
                true => Ok(()),
                false => Err("its host is beneath no --mint-suffix"),
            }
        };
        let demand = cache.demand(NameKind::Mint, Scope::Workload(workload), admission);
        let demand = demand.inspect_err(|error| tracing::error!(%error, "no certificates for hosts")).ok();
        let hosts = Hosts {
            cas,
            settings: IssuerSettings { state: None, ..issuer },
            cache: cache.clone(),
            context,
            queue: IssuanceQueue::new(PERMITS),
            states: HashMap::new(),
            waiting: BTreeMap::new(),
            arrivals: 0,
            deserted: HashSet::new(),
            tasks: JoinSet::new(),
        };
        Self { demand, hosts }
    }

    /// Issues and renews certificates for the hosts that streams ask for. Does not return.
    pub async fn run(self) {
        let Self { demand, mut hosts } = self;
        let Some(mut demand) = demand else { return std::future::pending().await };
        loop {
            tokio::select! {
                event = demand.next() => match event {
                    Some(Event::Wanted(key)) => hosts.want(key),
                    Some(Event::Deserted(key)) => hosts.desert(key),
                    Some(Event::Asked(_)) => {}
                    // The workload was removed.
                    None => return std::future::pending().await,
                },
                Some(ended) = hosts.tasks.join_next_with_id() => hosts.end(ended),
            }
        }
    }
}

impl Hosts {
    /// A stream asks for a host, or there is room for its value.
    fn want(&mut self, key: Key) {
        match self.states.get(&key) {
            Some(State::Minted { room, .. }) => return room.notify_one(),
            Some(State::Waiting(_)) => return,
            None => {}
        }
        if self.has_room() || self.make_room() {
            return self.start(key);
        }
        self.cache.publisher(key.clone(), Origin::CA).fail(format!(
            "{} hosts have certificates, which is the most at a time: this one waits until another is released",
            limits::HOSTS_MINTED
        ));
        self.waiting.insert(self.arrivals, key.clone());
        self.states.insert(key, State::Waiting(self.arrivals));
        self.arrivals += 1;
    }

    fn has_room(&self) -> bool {
        self.states.len() - self.waiting.len() < limits::HOSTS_MINTED
    }

    /// Gives up a host without streams: one that a stream waits for goes before it. False if there is none.
    fn make_room(&mut self) -> bool {
        while let Some(key) = self.deserted.iter().next().cloned() {
            self.deserted.remove(&key);
            if self.retire(&key) {
                return true;
            }
        }
        false
    }

    fn start(&mut self, key: Key) {
        let Some(host) = host_of(&key.name) else { return };
        let room = Arc::new(Notify::new());
        let names = Names { dns: vec![host], common_name: None };
        let settings = IssuerSettings { names, ..self.settings.clone() };
        let minted = Minted { queue: self.queue.clone(), room: Arc::clone(&room) };
        let (cas, cache, context) = (self.cas.apart(), self.cache.clone(), self.context.clone());
        let own = key.clone();
        let issuer = self.tasks.spawn(async move {
            let publisher = cache.publisher(own.clone(), Origin::CA);
            let issuer = Issuer::minting(cas, settings, &cache, own.clone(), minted, context);
            let until_deserted = async {
                loop {
                    publisher.deserted().await;
                    if cache.retire(&own) {
                        return;
                    }
                }
            };
            tokio::select! {
                () = issuer.run() => {}
                () = until_deserted => {}
            }
            own
        });
        self.states.insert(key, State::Minted { issuer, room });
    }

    /// The last stream of a host has left.
    fn desert(&mut self, key: Key) {
        match self.states.get(&key) {
            Some(State::Minted { .. }) if self.waiting.is_empty() => drop(self.deserted.insert(key)),
            _ => {
                self.retire(&key);
                self.fill();
            }
        }
    }

    /// Forgets a host, unless a stream has come back.
    fn retire(&mut self, key: &Key) -> bool {
        let is_retired = self.cache.retire(key);
        if is_retired {
            self.forget(key);
        }
        is_retired
    }

    fn forget(&mut self, key: &Key) {
        self.deserted.remove(key);
        match self.states.remove(key) {
            Some(State::Minted { issuer, .. }) => {
                issuer.abort();
                tracing::debug!(name = %key.name, "no stream left, certificate no longer renewed");
            }
            Some(State::Waiting(number)) => drop(self.waiting.remove(&number)),
            None => {}
        }
    }

    /// The issuer of a host has ended: no stream was left.
    fn end(&mut self, ended: Result<(Id, Key), JoinError>) {
        match ended {
            Ok((id, key)) => {
                let state = self.states.get(&key);
                let is_current = matches!(state, Some(State::Minted { issuer, .. }) if issuer.id() == id);
                if !is_current {
                    return;
                }
                self.forget(&key);
                // A stream has asked for it meanwhile.
                if self.cache.watch(&key).is_some() {
                    self.want(key);
                }
                self.fill();
            }
            Err(error) if error.is_cancelled() => {}
            Err(error) => std::panic::resume_unwind(error.into_panic()),
        }
    }

    /// Starts issuers for hosts that wait for one.
    fn fill(&mut self) {
        while self.has_room()
            && let Some((_, key)) = self.waiting.pop_first()
        {
            self.states.remove(&key);
            // Its stream may have left.
            if !self.cache.retire(&key) {
                self.start(key);
            }
        }
    }
}

fn host_of(name: &SecretName) -> Option<DnsName> {
    match name {
        SecretName::Minted(name) => name.host().parse().ok(),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
