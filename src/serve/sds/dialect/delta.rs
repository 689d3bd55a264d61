//! Delta: requests list only changes, each resource has its own version, each response has its own ACK or NACK, and a name
//! that can never be served, or that its source has withdrawn, is sent as removed.

use std::sync::Arc;

use super::{CONTROL_PLANE, Dialect, Received, Refusal, check_names, check_node, check_type, verdict};
use crate::proto::SECRET_TYPE_URL;
use crate::proto::envoy::service::discovery::v3::{DeltaDiscoveryRequest, DeltaDiscoveryResponse};
use crate::secret::Version;
use crate::serve::sds::message::{Message, MessageWriter};
use crate::serve::sds::session::{NameId, Push, PushItem, Session};

/// The delta protocol of one stream.
#[derive(Debug, Default)]
pub struct Delta {
    /// `None` before the first request.
    node_id: Option<Arc<str>>,
}

impl Dialect for Delta {
    type Request = DeltaDiscoveryRequest;
    type Response = DeltaDiscoveryResponse;

    fn node_id(&self) -> Arc<str> {
        self.node_id.clone().unwrap_or_default()
    }

    fn metadata(request: &DeltaDiscoveryRequest) -> Option<&[u8]> {
        Some(&request.node.as_ref()?.metadata)
    }

    fn names(request: &DeltaDiscoveryRequest) -> usize {
        request.resource_names_subscribe.len()
            + request.resource_names_unsubscribe.len()
            + request.initial_resource_versions.len()
    }

    fn receive(
        &mut self,
        session: &mut Session,
        request: DeltaDiscoveryRequest,
    ) -> Result<Received, Refusal> {
        check_type(&request.type_url)?;
        let is_first = self.node_id.is_none();
        let mut received = Received::default();
        if is_first {
            self.node_id = Some(check_node(request.node)?);
        } else if !request.response_nonce.is_empty() {
            received.verdict = verdict(session, &request.response_nonce, request.error_detail);
        }
        let removed = request.resource_names_unsubscribe.iter();
        received.removed = removed.filter_map(|name| session.unsubscribe(name)).collect();
        for name in request.resource_names_subscribe {
            received.added.extend(session.subscribe(&name));
            check_names(session.len(), session.name_bytes())?;
        }
        session.trim(received.added.len());
        if is_first {
            // Versions that the client holds from an earlier stream; only newer ones need to be sent.
            for (name, version) in request.initial_resource_versions {
                if let Some(version) = Version::claimed(&version) {
                    session.holds(&name, version);
                }
            }
        }
        Ok(received)
    }

    /// Only a name that this agent can never serve is removed: removing a known name that is only not available yet would take
    /// it from a running Envoy.
    fn refuse(&self, session: &mut Session, name: NameId) {
        session.refuse(name);
    }

    fn withdraw(&self, session: &mut Session, name: NameId) {
        session.withdraw(name);
    }

    fn respond(&mut self, session: &mut Session) -> Option<(Push, Message)> {
        let push = session.push()?;
        let mut response = MessageWriter::default();
        response.text(1, &session.held_version());
        response.text(4, SECRET_TYPE_URL);
        response.text(5, &push.nonce.to_string());
        response.wrapped_text(7, CONTROL_PLANE);
        for name in &push.removed {
            response.item(6, name);
        }
        for PushItem { name, resource, .. } in &push.items {
            response.labelled_secret(2, name, &resource.version.to_string(), resource);
        }
        Some((push, response.finish()))
    }
}
