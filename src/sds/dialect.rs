//! The words of the state-of-the-world protocol (`StreamSecrets`), translated to and from a [`Session`].

use std::collections::{BTreeSet, HashMap};

use super::session::Session;
use crate::limits;
use crate::proto::SECRET_TYPE_URL;
use crate::proto::envoy::config::core::v3::{ControlPlane, Node};
use crate::proto::envoy::service::discovery::v3::{DiscoveryRequest, DiscoveryResponse};
use crate::secret::{Resource, Version};

/// What a request changed.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Received {
    /// Names that are subscribed from now on.
    pub added: Vec<String>,
    /// Names that no longer are.
    pub removed: Vec<String>,
    /// What the client says of the last response.
    pub verdict: Option<Verdict>,
}

/// An ACK or a NACK.
#[derive(Debug, PartialEq, Eq)]
pub struct Verdict {
    /// What it is about.
    pub items: Vec<(String, Version)>,
    /// The client's reason, where it refused.
    pub rejection: Option<String>,
}

/// Why a request ends its stream.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The first request says nobody sent it.
    #[error(
        "the first request of a stream must carry a node id: set node.id in the bootstrap, or start Envoy with --service-node"
    )]
    NoNode,
    /// A request for something else than secrets.
    #[error("type_url {0:?} is not served here: this socket has {SECRET_TYPE_URL} alone")]
    ForeignType(String),
    /// More names than a stream may have.
    #[error("{0} resource names on one stream: at most {max} are served", max = limits::NAMES_PER_STREAM)]
    TooManyNames(usize),
}

impl Refusal {
    /// The one word for it in metrics.
    pub fn label(&self) -> &'static str {
        match self {
            Self::NoNode => "no_node",
            Self::ForeignType(_) => "foreign_type",
            Self::TooManyNames(_) => "too_many_names",
        }
    }
}

impl From<Refusal> for tonic::Status {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::TooManyNames(_) => tonic::Status::resource_exhausted(refusal.to_string()),
            _ => tonic::Status::invalid_argument(refusal.to_string()),
        }
    }
}

/// The state-of-the-world protocol's side of one stream.
#[derive(Debug, Default)]
pub struct StateOfTheWorld {
    node: Option<Node>,
    /// The version that a client came back with, until it is known whether that is still the newest.
    claim: Option<String>,
}

impl StateOfTheWorld {
    /// The node id of the first request; empty before it.
    pub fn node_id(&self) -> &str {
        self.node.as_ref().map_or("", |node| node.id.as_str())
    }

    /// Takes in one request.
    pub fn receive(&mut self, session: &mut Session, request: DiscoveryRequest) -> Result<Received, Refusal> {
        check_type(&request)?;
        let names: BTreeSet<String> = request.resource_names.into_iter().collect();
        if names.len() > limits::NAMES_PER_STREAM {
            return Err(Refusal::TooManyNames(names.len()));
        }
        let is_first = self.node.is_none();
        let mut received = Received::default();
        if is_first {
            let node = request.node.filter(|node| !node.id.is_empty()).ok_or(Refusal::NoNode)?;
            self.node = Some(node);
            self.claim = Some(request.version_info).filter(|version| !version.is_empty());
        } else if !request.response_nonce.is_empty() {
            let nonce = &request.response_nonce;
            let items = match &request.error_detail {
                None => session.accept(nonce),
                Some(_) => session.reject(nonce),
            };
            if items.is_empty() && !session.is_last(nonce) {
                // An answer to an older response. The client will answer the newer one too, with all its names.
                return Ok(received);
            }
            let rejection = request.error_detail.map(|status| limits::foreign(&status.message));
            if !items.is_empty() {
                received.verdict = Some(Verdict { items, rejection });
            }
        }
        received.removed = session.names().filter(|name| !names.contains(*name)).map(str::to_owned).collect();
        if !received.removed.is_empty() {
            // It spoke of other names. One that is asked for anew is answered, whatever was held of it before.
            self.claim = None;
        }
        for name in &received.removed {
            session.unsubscribe(name);
        }
        received.added = names.into_iter().filter(|name| session.subscribe(name)).collect();
        Ok(received)
    }

    /// What to send now, with the bytes of `resources` (by name).
    pub fn respond(
        &mut self,
        session: &mut Session,
        resources: &HashMap<String, Resource>,
    ) -> Option<DiscoveryResponse> {
        self.settle_claim(session);
        let push = session.push()?;
        let version_info = combined(session.sent());
        let any = |(name, _): &(String, Version)| resources.get(name).map(|resource| resource.any.clone());
        let resources = push.items.iter().filter_map(any).collect();
        Some(response(version_info, push.nonce, resources))
    }

    /// A client that comes back with the very version there is now is not sent it again: on a new stream Envoy
    /// repeats the version it accepted, and it keeps what it accepted. A listener that is added later with the
    /// same sds_config shares the stream; with another it opens one of its own, without a version.
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

/// Refuses a request for another kind of resource. An empty type is taken: the service has only one.
pub fn check_type(request: &DiscoveryRequest) -> Result<(), Refusal> {
    match request.type_url.as_str() {
        "" | SECRET_TYPE_URL => Ok(()),
        other => Err(Refusal::ForeignType(limits::foreign(other))),
    }
}

/// A response that carries `resources`.
pub fn response(
    version_info: String,
    nonce: String,
    resources: Vec<crate::proto::google::protobuf::Any>,
) -> DiscoveryResponse {
    let identifier = concat!("attache/", env!("CARGO_PKG_VERSION")).to_owned();
    DiscoveryResponse {
        version_info,
        resources,
        type_url: SECRET_TYPE_URL.to_owned(),
        nonce,
        control_plane: Some(ControlPlane { identifier }),
    }
}

/// The version of several names together. That of one name is its own.
pub fn combined<'a>(versions: impl Iterator<Item = (&'a str, &'a Version)>) -> String {
    let versions: Vec<_> = versions.collect();
    match versions.as_slice() {
        [(_, version)] => version.to_string(),
        all => {
            let lines: String = all.iter().map(|(name, version)| format!("{name}\n{version}\n")).collect();
            Version::of(lines.as_bytes()).to_string()
        }
    }
}

#[cfg(test)]
mod tests;
