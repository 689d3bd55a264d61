//! State of the world: each request lists all names, one `version_info` covers all, and a client acknowledges only the last
//! response.

use std::sync::Arc;

use super::{Dialect, Received, Refusal, check_names, check_node, check_type, response, verdict};
use crate::proto::envoy::service::discovery::v3::{DiscoveryRequest, DiscoveryResponse};
use crate::serve::sds::message::Message;
use crate::serve::sds::session::{NameId, Push, Session};

/// The state-of-the-world protocol of one stream.
#[derive(Debug, Default)]
pub struct StateOfTheWorld {
    /// `None` before the first request.
    node_id: Option<Arc<str>>,
    /// The version that a reconnecting client holds, until it is known whether that is still the newest.
    claim: Option<String>,
}

impl Dialect for StateOfTheWorld {
    type Request = DiscoveryRequest;
    type Response = DiscoveryResponse;

    fn node_id(&self) -> Arc<str> {
        self.node_id.clone().unwrap_or_default()
    }

    fn metadata(request: &DiscoveryRequest) -> Option<&[u8]> {
        Some(&request.node.as_ref()?.metadata)
    }

    fn names(request: &DiscoveryRequest) -> usize {
        request.resource_names.len()
    }

    fn receive(&mut self, session: &mut Session, request: DiscoveryRequest) -> Result<Received, Refusal> {
        check_type(&request.type_url)?;
        let List { added, kept } = List::new(session, request.resource_names)?;
        let is_first = self.node_id.is_none();
        let mut received = Received::default();
        if is_first {
            self.node_id = Some(check_node(request.node)?);
            self.claim = Some(request.version_info).filter(|version| !version.is_empty());
        } else if !request.response_nonce.is_empty() {
            if !session.is_last(&request.response_nonce) {
                // It answers an older response. The client will answer the newer one too, with all its names.
                return Ok(received);
            }
            received.verdict = verdict(session, &request.response_nonce, request.error_detail);
        }
        if kept < session.len() {
            // The claim covered other names. A name that is subscribed again is sent, even if the client held it before.
            self.claim = None;
            let unlisted = session.unlisted();
            received.removed = unlisted.iter().filter_map(|name| session.unsubscribe(name)).collect();
        }
        received.added = added.into_iter().filter_map(|name| session.subscribe(&name)).collect();
        session.trim(received.added.len());
        Ok(received)
    }

    /// The name is only not sent: this protocol has no field for refusing a single name.
    fn refuse(&self, _: &mut Session, _: NameId) {}

    fn withdraw(&self, session: &mut Session, name: NameId) {
        session.retract(name);
    }

    fn respond(&mut self, session: &mut Session) -> Option<(Push, Message)> {
        self.settle_claim(session);
        let push = session.push()?;
        let message = response(&session.held_version(), &push.nonce.to_string(), &push.items);
        Some((push, message))
    }
}

/// The names of a request.
struct List {
    /// Those that are not subscribed, sorted.
    added: Vec<String>,
    /// How many are subscribed.
    kept: usize,
}

impl List {
    /// Begins a list of the session's names. What it costs depends on the request alone.
    fn new(session: &mut Session, mut names: Vec<String>) -> Result<Self, Refusal> {
        session.begin_list();
        let (mut kept, mut bytes) = (0, 0);
        names.retain(|name| match session.list(name) {
            Some(is_new) => {
                kept += usize::from(is_new);
                bytes += if is_new { name.len() } else { 0 };
                false
            }
            None => true,
        });
        names.sort_unstable();
        names.dedup();
        bytes += names.iter().map(String::len).sum::<usize>();
        check_names(kept + names.len(), bytes)?;
        Ok(Self { added: names, kept })
    }
}

impl StateOfTheWorld {
    /// A client that reconnects with the newest version is not sent it again: on a new stream, Envoy repeats the version that
    /// it accepted and keeps. A listener that is added later with the same sds_config shares the stream; with another
    /// sds_config it opens its own stream, without a version.
    fn settle_claim(&mut self, session: &mut Session) {
        if self.claim.is_none() {
            return;
        }
        let Some(offered) = session.offered_version() else { return };
        if self.claim.take() == Some(offered) {
            session.holds_all();
        }
    }
}
