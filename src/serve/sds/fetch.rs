//! `FetchSecrets`: one request, one response.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::task::Context;
use std::time::Duration;

use tokio::time::Instant;
use tonic::Status;

use super::Peer;
use super::dialect::{self, Refusal};
use super::followed::{Followed, Look, Node, NotFollowed};
use super::message::Message;
use super::session::{NameId, PushItem};
use super::turns::{AT_ONCE, Turn};
use super::version::Combined;
use crate::base::limits;
use crate::base::text;
use crate::proto::envoy::service::discovery::v3::DiscoveryRequest;
use crate::secret::Resource;
use crate::store::{NotServed, Subscriber};

/// How long `FetchSecrets` waits for secrets that are not available yet, if the client sets no deadline.
const PATIENCE: Duration = Duration::from_secs(5);
/// The longest that it waits, whatever the client's deadline.
const LONGEST_PATIENCE: Duration = Duration::from_secs(600);
/// How many problems of a request are reported; they are sent to the client in a header.
const REPORTED: usize = 3;
/// The part of a client's deadline that is reserved for sending the response.
const RESPONSE_TIME: Duration = Duration::from_millis(100);

/// How long to wait for a client with this deadline.
pub(super) fn patience(deadline: Option<Duration>) -> Duration {
    deadline.map_or(PATIENCE, |deadline| deadline.saturating_sub(RESPONSE_TIME).min(LONGEST_PATIENCE))
}

/// Responds with the available secrets. If there are none, waits until `deadline` at most.
pub(super) async fn fetch(
    peer: &Peer,
    request: DiscoveryRequest,
    deadline: Instant,
) -> Result<Message, Status> {
    let refuse = |refusal: Refusal| {
        peer.service.refuse(refusal.label(), &refusal);
        Status::from(refusal)
    };
    dialect::check_type(&request.type_url).map_err(refuse)?;
    let count = request.resource_names.len();
    if count > limits::NAMES_PER_STREAM {
        return Err(refuse(Refusal::TooManyNames(count)));
    }
    let bytes = request.resource_names.iter().map(String::len).sum::<usize>();
    let _charge = peer.charge(count * limits::NAME_MEMORY + bytes)?;

    let node = Node::of(peer.service.naming(), request.node.as_ref().map(|node| &*node.metadata));
    let mut fetch = Fetch { peer, subscriber: Subscriber::new(peer.connection), node, names: Vec::new() };
    fetch.subscribe(request.resource_names).await;
    // An available secret does not wait for a name that fails. If none is available, a CA may still respond, but a file is
    // unlikely to be repaired meanwhile.
    while fetch.is_undecided() || (fetch.found().next().is_none() && fetch.may_come()) {
        let changes = std::future::poll_fn(|cx: &mut Context<'_>| fetch.subscriber.poll_changes(cx));
        let Ok(changed) = tokio::time::timeout_at(deadline, changes).await else { break };
        fetch.look(changed.into_iter().map(|number| number as usize)).await;
    }
    fetch.response()
}

/// One call.
struct Fetch<'a> {
    peer: &'a Peer,
    subscriber: Subscriber,
    node: Node,
    /// Sorted, each once.
    names: Vec<Requested>,
}

/// One name of the request.
struct Requested {
    text: Arc<str>,
    is_on_demand: bool,
    /// It can't be served now, but it may be later: there is no room for it.
    lacks_room: bool,
    /// None where the name is not served.
    followed: Option<Followed>,
    outcome: Outcome,
}

enum Outcome {
    /// Its source has neither delivered nor failed.
    Open,
    Failed(String),
    Found(Resource),
}

impl Fetch<'_> {
    async fn subscribe(&mut self, names: Vec<String>) {
        let mut turn = Turn::new(self.peer.service.turns.clone());
        let names: BTreeSet<_> = names.into_iter().collect();
        let is_long = names.len() > AT_ONCE;
        self.names.reserve_exact(names.len());
        for text in names {
            if is_long && self.names.len().is_multiple_of(AT_ONCE) {
                turn.end();
                turn.take().await;
            }
            let name = self.requested(text.into());
            self.names.push(name);
            self.look_at(self.names.len() - 1);
        }
        turn.end();
    }

    fn requested(&self, text: Arc<str>) -> Requested {
        let service = &self.peer.service;
        let number = u32::try_from(self.names.len()).unwrap_or(u32::MAX);
        let (label, reason, lacks_room) =
            match Followed::new(service, &text, &self.node, &self.subscriber, number) {
                Ok(followed) => {
                    let (is_on_demand, outcome) = (followed.is_on_demand(), Outcome::Open);
                    return Requested {
                        text,
                        is_on_demand,
                        lacks_room: false,
                        followed: Some(followed),
                        outcome,
                    };
                }
                Err(NotFollowed::NotServed(_, error)) => {
                    (error.label(), error.to_string(), error == NotServed::TooMany)
                }
                Err(NotFollowed::Unknown(unknown)) => ("unknown_name", unknown.to_string(), false),
            };
        service.refuse(label, &reason);
        let outcome = Outcome::Failed(reason);
        Requested { text, is_on_demand: false, lacks_room, followed: None, outcome }
    }

    async fn look(&mut self, changed: impl ExactSizeIterator<Item = usize>) {
        let mut turn = Turn::new(self.peer.service.turns.clone());
        let is_long = changed.len() > AT_ONCE;
        for (count, index) in changed.enumerate() {
            if is_long && count.is_multiple_of(AT_ONCE) {
                turn.end();
                turn.take().await;
            }
            self.look_at(index);
        }
        turn.end();
    }

    fn look_at(&mut self, index: usize) {
        let Some(requested) = self.names.get_mut(index) else { return };
        let Some(followed) = &mut requested.followed else { return };
        if matches!(requested.outcome, Outcome::Found(_)) {
            return;
        }
        requested.outcome = match followed.look(&self.peer.service) {
            Look::Found(resource) => Outcome::Found(resource),
            Look::Missing { reason: Some(reason), .. } => Outcome::Failed(reason),
            Look::Missing { reason: None, .. } => Outcome::Open,
            Look::Unknown(reason) => {
                requested.followed = None;
                self.peer.service.refuse("unknown_name", &reason);
                Outcome::Failed(reason.to_string())
            }
        };
    }

    fn is_undecided(&self) -> bool {
        self.names.iter().any(|name| matches!(name.outcome, Outcome::Open))
    }

    /// Whether a name that has failed may still be served.
    fn may_come(&self) -> bool {
        self.names.iter().any(|name| name.followed.is_some() && !name.is_on_demand)
    }

    fn found(&self) -> impl Iterator<Item = PushItem> {
        self.names.iter().enumerate().filter_map(|(index, name)| match &name.outcome {
            Outcome::Found(resource) => Some(PushItem {
                id: NameId::from_index(index),
                name: Arc::clone(&name.text),
                resource: resource.clone(),
            }),
            _ => None,
        })
    }

    fn response(&self) -> Result<Message, Status> {
        let found: Vec<_> = self.found().collect();
        if found.is_empty() {
            return Err(self.nothing_found());
        }
        for item in &found {
            let followed = self.names.get(item.id.index()).and_then(|name| name.followed.as_ref());
            followed.inspect(|followed| followed.pushed());
        }
        let version: Combined = found.iter().map(|item| (&*item.name, &item.resource.version)).collect();
        Ok(dialect::response(&version.to_string(), "", &found))
    }

    fn nothing_found(&self) -> Status {
        let problem = |name: &Requested| {
            let reason = match &name.outcome {
                Outcome::Failed(reason) => reason,
                _ => "not available yet",
            };
            // Short enough for a header, even several times.
            format!("no secret {:?}: {}", text::sanitize_for_log(&name.text), text::sanitize_for_log(reason))
        };
        let mut reported: Vec<_> = self.names.iter().take(REPORTED).map(problem).collect();
        if self.names.len() > REPORTED {
            reported.push(format!("and {} more", self.names.len() - REPORTED));
        }
        match reported.as_slice() {
            [] => Status::invalid_argument("the request has no resource names"),
            // Not "not found": a client may take that for the last word.
            reported if self.names.iter().any(|name| name.lacks_room) => {
                Status::resource_exhausted(reported.join("; "))
            }
            reported if self.names.iter().all(|name| name.followed.is_none()) => {
                Status::not_found(reported.join("; "))
            }
            reported => Status::unavailable(reported.join("; ")),
        }
    }
}
