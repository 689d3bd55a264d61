//! Delta: requests list only changes, each resource has its own version, each response has its own ACK or NACK, and a name
//! that can never be served is sent as removed.

use std::collections::HashMap;
use std::sync::Arc;

use super::{
    Dialect, Received, Refusal, check_names, check_node, check_type, combined, control_plane, verdict,
};
use crate::proto::SECRET_TYPE_URL;
use crate::proto::envoy::service::discovery::v3::{
    DeltaDiscoveryRequest, DeltaDiscoveryResponse, Resource as WireResource,
};
use crate::secret::{Resource, Version};
use crate::serve::sds::session::{Push, Session};

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
        let removed = request.resource_names_unsubscribe.into_iter();
        received.removed = removed.filter(|name| session.unsubscribe(name)).collect();
        for name in request.resource_names_subscribe {
            if session.subscribe(&name) {
                received.added.push(name);
            }
        }
        if !received.added.is_empty() {
            check_names(session.names())?;
        }
        if is_first {
            // Versions that the client holds from an earlier stream; only newer ones need to be sent.
            for (name, version) in request.initial_resource_versions {
                if let Some(version) = Version::claimed(version) {
                    session.holds(&name, version);
                }
            }
        }
        Ok(received)
    }

    /// Only a name that this agent can never serve is removed: removing a known name that is only not available yet would take
    /// it from a running Envoy.
    fn refuse(&self, session: &mut Session, name: &str) {
        session.refuse(name);
    }

    fn respond(
        &mut self,
        session: &mut Session,
        resources: &HashMap<String, Resource>,
    ) -> Option<(Push, DeltaDiscoveryResponse)> {
        let push = session.push()?;
        let resource = |(name, version): &(String, Version)| {
            let any = resources.get(name)?.any.clone();
            Some(WireResource { version: version.to_string(), resource: Some(any), name: name.clone() })
        };
        let response = DeltaDiscoveryResponse {
            system_version_info: combined(session.held()),
            resources: push.items.iter().filter_map(resource).collect(),
            type_url: SECRET_TYPE_URL.to_owned(),
            nonce: push.nonce.clone(),
            removed_resources: push.removed.clone(),
            control_plane: control_plane(),
        };
        Some((push, response))
    }
}
