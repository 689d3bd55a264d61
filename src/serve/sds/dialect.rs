//! The two SDS protocols of a [`Session`]: all names in each request (`StreamSecrets`), or only changes (`DeltaSecrets`).

mod delta;
mod sotw;

use std::sync::Arc;

pub use self::delta::Delta;
pub use self::sotw::StateOfTheWorld;

use super::message::{Message, MessageWriter};
use super::session::{NameId, Push, PushItem, Session, Versions};
use crate::base::limits;
use crate::base::text;
use crate::proto::SECRET_TYPE_URL;
use crate::proto::envoy::config::core::v3::Node;
use crate::proto::google::rpc;

/// The protocol of one stream.
pub trait Dialect: Default {
    type Request: Unpin;
    /// What a client decodes of a [`Message`].
    type Response;

    /// The metadata of the client's node, encoded; mostly only in the first request.
    fn metadata(request: &Self::Request) -> Option<&[u8]>;

    /// How many names are in a request.
    fn names(request: &Self::Request) -> usize;

    /// Handles one request.
    fn receive(&mut self, session: &mut Session, request: Self::Request) -> Result<Received, Refusal>;

    /// `name` can never be served: the client is informed if the protocol allows it.
    fn refuse(&self, session: &mut Session, name: NameId);

    /// `name` is withdrawn: the client is informed if the protocol allows it, and keeps what it has if not.
    fn withdraw(&self, session: &mut Session, name: NameId);

    /// What to send now.
    fn respond(&mut self, session: &mut Session) -> Option<(Push, Message)>;

    /// The node ID of the first request; empty before it.
    fn node_id(&self) -> Arc<str>;
}

/// What a request changed.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Received {
    /// Newly subscribed names. Their ids may be those of removed ones.
    pub added: Vec<NameId>,
    /// Unsubscribed names.
    pub removed: Vec<(NameId, Arc<str>)>,
    /// The client's verdict on a response.
    pub verdict: Option<Verdict>,
}

/// An ACK or a NACK.
#[derive(Debug, PartialEq, Eq)]
pub struct Verdict {
    /// The items of the response.
    pub items: Versions,
    /// The client's reason, if it is a NACK.
    pub rejection: Option<String>,
}

/// Why a request ends its stream.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error(
        "the first request of a stream must carry a node id: set node.id in the bootstrap, or start Envoy with --service-node"
    )]
    NoNode,
    #[error("unsupported type_url {0:?}: this socket serves only {SECRET_TYPE_URL}")]
    UnsupportedType(String),
    #[error("{0} resource names on one stream: at most {max} are allowed", max = limits::NAMES_PER_STREAM)]
    TooManyNames(usize),
    #[error("{0} bytes of resource names on one stream: at most {max} are allowed", max = limits::NAME_BYTES_PER_STREAM)]
    TooLongNames(usize),
}

impl Refusal {
    /// Its label in metrics.
    pub fn label(&self) -> &'static str {
        match self {
            Self::NoNode => "no_node",
            Self::UnsupportedType(_) => "foreign_type",
            Self::TooManyNames(_) | Self::TooLongNames(_) => "too_many_names",
        }
    }
}

impl From<Refusal> for tonic::Status {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::TooManyNames(_) | Refusal::TooLongNames(_) => {
                tonic::Status::resource_exhausted(refusal.to_string())
            }
            _ => tonic::Status::invalid_argument(refusal.to_string()),
        }
    }
}

/// Refuses a request for another type of resource. An empty type is accepted, because the service has only one.
pub fn check_type(type_url: &str) -> Result<(), Refusal> {
    match type_url {
        "" | SECRET_TYPE_URL => Ok(()),
        other => Err(Refusal::UnsupportedType(text::sanitize_for_log(other))),
    }
}

/// The node ID, safe to log; refuses a request without one.
fn check_node(node: Option<Node>) -> Result<Arc<str>, Refusal> {
    let id = node.map(|node| text::sanitize_for_log(&node.id)).filter(|id| !id.is_empty());
    id.map(Arc::from).ok_or(Refusal::NoNode)
}

/// Refuses more names than a stream may subscribe to.
fn check_names(count: usize, bytes: usize) -> Result<(), Refusal> {
    if count > limits::NAMES_PER_STREAM {
        return Err(Refusal::TooManyNames(count));
    }
    if bytes > limits::NAME_BYTES_PER_STREAM {
        return Err(Refusal::TooLongNames(bytes));
    }
    Ok(())
}

/// Settles the response with `nonce`. `None` if it does not wait for a verdict.
fn verdict(session: &mut Session, nonce: &str, error: Option<rpc::Status>) -> Option<Verdict> {
    let (items, rejection) = match error {
        None => (session.accept(nonce), None),
        Some(status) => (session.reject(nonce), Some(text::sanitize_for_log(&status.message))),
    };
    (!items.is_empty()).then_some(Verdict { items, rejection })
}

/// Identifies the agent in responses.
const CONTROL_PLANE: &str = concat!("attache/", env!("CARGO_PKG_VERSION"));

/// A state-of-the-world response.
pub(super) fn response(version_info: &str, nonce: &str, items: &[PushItem]) -> Message {
    let mut response = MessageWriter::default();
    response.text(1, version_info);
    response.text(4, SECRET_TYPE_URL);
    response.text(5, nonce);
    response.wrapped_text(6, CONTROL_PLANE);
    for PushItem { name, resource, .. } in items {
        response.secret(2, name, resource);
    }
    response.finish()
}

#[cfg(test)]
pub(super) mod client;
#[cfg(test)]
mod tests;
