//! State of the world: each request lists all names, one `version_info` covers all, and a client acknowledges only the last
//! response.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use super::{
    Dialect, Received, Refusal, check_names, check_node, check_type, combined, control_plane, verdict,
};
use crate::proto::SECRET_TYPE_URL;
use crate::proto::envoy::service::discovery::v3::{DiscoveryRequest, DiscoveryResponse};
use crate::secret::{Resource, Version};
use crate::serve::sds::session::{Push, Session};

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

    fn receive(&mut self, session: &mut Session, request: DiscoveryRequest) -> Result<Received, Refusal> {
        check_type(&request.type_url)?;
        let names: BTreeSet<String> = request.resource_names.into_iter().collect();
        check_names(names.iter().map(String::as_str))?;
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
        received.removed = session.names().filter(|name| !names.contains(*name)).map(str::to_owned).collect();
        if !received.removed.is_empty() {
            // The claim covered other names. A name that is subscribed again is sent, even if the client held it before.
            self.claim = None;
        }
        for name in &received.removed {
            session.unsubscribe(name);
        }
        received.added = names.into_iter().filter(|name| !session.is_subscribed(name)).collect();
        for name in &received.added {
            session.subscribe(name);
        }
        Ok(received)
    }

    /// The name is only not sent: this protocol has no field for refusing a single name.
    fn refuse(&self, _: &mut Session, _: &str) {}

    fn respond(
        &mut self,
        session: &mut Session,
        resources: &HashMap<String, Resource>,
    ) -> Option<(Push, DiscoveryResponse)> {
        self.settle_claim(session);
        let push = session.push()?;
        let any = |(name, _): &(String, Version)| resources.get(name).map(|resource| resource.any.clone());
        let response = DiscoveryResponse {
            version_info: combined(session.held()),
            resources: push.items.iter().filter_map(any).collect(),
            type_url: SECRET_TYPE_URL.to_owned(),
            nonce: push.nonce.clone(),
            control_plane: control_plane(),
        };
        Some((push, response))
    }
}

impl StateOfTheWorld {
    /// A client that reconnects with the newest version is not sent it again: on a new stream, Envoy repeats the version that
    /// it accepted and keeps. A listener that is added later with the same sds_config shares the stream; with another
    /// sds_config it opens its own stream, without a version.
    fn settle_claim(&mut self, session: &mut Session) {
        if session.offered().next().is_none() {
            return;
        }
        let Some(claim) = self.claim.take() else { return };
        if combined(session.offered()) == claim {
            let held: Vec<_> =
                session.offered().map(|(name, version)| (name.to_owned(), version.clone())).collect();
            for (name, version) in held {
                session.holds(&name, version);
            }
        }
    }
}
