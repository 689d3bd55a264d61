//! The client's side of both dialects, for tests: requests and responses in a common form.

use bytes::Buf as _;
use prost::Message as _;

use super::{Delta, Dialect, StateOfTheWorld};
use crate::proto::envoy::config::core::v3::{DataSource, Node, data_source::Specifier};
use crate::proto::envoy::extensions::transport_sockets::tls::v3::{
    CertificateValidationContext, Secret, secret::Type,
};
use crate::proto::envoy::service::discovery::v3::{
    DeltaDiscoveryRequest, DeltaDiscoveryResponse, DiscoveryRequest, DiscoveryResponse,
};
use crate::proto::google::protobuf::Any;
use crate::proto::google::rpc;
use crate::secret::Payload;
use crate::serve::sds::message::Message;

/// The fields of a request. Each dialect uses those that it has.
#[derive(Clone, Debug, Default)]
pub(crate) struct RequestFields {
    pub node: Option<Node>,
    pub type_url: String,
    pub nonce: String,
    /// The reason of a NACK.
    pub rejection: Option<String>,
    /// All subscribed names (state of the world).
    pub names: Vec<String>,
    /// The accepted version of all of them (state of the world).
    pub version: String,
    /// Delta.
    pub subscribe: Vec<String>,
    /// Delta.
    pub unsubscribe: Vec<String>,
    /// Names and versions from an earlier stream (delta).
    pub held: Vec<(String, String)>,
}

impl RequestFields {
    /// The node of the first request.
    pub(crate) fn node() -> Option<Node> {
        Some(Node { id: "envoy".to_owned(), ..Node::default() })
    }

    fn error_detail(&self) -> Option<rpc::Status> {
        self.rejection.clone().map(|message| rpc::Status { code: 13, message, details: Vec::new() })
    }
}

/// The fields of a response.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ResponseFields {
    pub nonce: String,
    pub type_url: String,
    pub version: String,
    pub resources: Vec<Any>,
    /// Name and version of each resource, if the dialect has them.
    pub labels: Option<Vec<(String, String)>>,
    pub removed: Vec<String>,
}

/// A dialect with its client side.
pub(crate) trait ClientDialect: Dialect + Unpin {
    const IS_DELTA: bool;

    fn request(fields: RequestFields) -> Self::Request;
    fn response(response: Message) -> ResponseFields;
}

/// A message as the client decodes it.
fn decoded<R: prost::Message + Default>(mut message: Message) -> R {
    message.advance(5);
    R::decode(message).unwrap()
}

/// The payload of a secret that holds `text`.
pub(crate) fn payload(text: &str) -> Payload {
    let trusted_ca = Some(DataSource { specifier: Some(Specifier::InlineString(text.to_owned())) });
    let context = CertificateValidationContext { trusted_ca, ..Default::default() };
    let secret = Secret { name: String::new(), r#type: Some(Type::ValidationContext(context)) };
    Payload::from_bytes(secret.encode_to_vec().into())
}

/// The text that a secret of [`payload`] holds.
pub(crate) fn value(secret: Secret) -> String {
    let Some(Type::ValidationContext(context)) = secret.r#type else { panic!("not a trust bundle") };
    match context.trusted_ca.unwrap().specifier.unwrap() {
        Specifier::InlineString(text) => text,
        _ => panic!("not a text"),
    }
}

impl ClientDialect for StateOfTheWorld {
    const IS_DELTA: bool = false;

    fn request(fields: RequestFields) -> DiscoveryRequest {
        DiscoveryRequest {
            error_detail: fields.error_detail(),
            node: fields.node,
            type_url: fields.type_url,
            response_nonce: fields.nonce,
            resource_names: fields.names,
            version_info: fields.version,
        }
    }

    fn response(response: Message) -> ResponseFields {
        let response: DiscoveryResponse = decoded(response);
        ResponseFields {
            nonce: response.nonce,
            type_url: response.type_url,
            version: response.version_info,
            resources: response.resources,
            labels: None,
            removed: Vec::new(),
        }
    }
}

impl ClientDialect for Delta {
    const IS_DELTA: bool = true;

    fn request(fields: RequestFields) -> DeltaDiscoveryRequest {
        DeltaDiscoveryRequest {
            error_detail: fields.error_detail(),
            node: fields.node,
            type_url: fields.type_url,
            response_nonce: fields.nonce,
            resource_names_subscribe: fields.subscribe,
            resource_names_unsubscribe: fields.unsubscribe,
            initial_resource_versions: fields.held.into_iter().collect(),
        }
    }

    fn response(response: Message) -> ResponseFields {
        let response: DeltaDiscoveryResponse = decoded(response);
        let labels = response.resources.iter().map(|one| (one.name.clone(), one.version.clone())).collect();
        let resources = response.resources.into_iter().map(|one| one.resource.expect("bytes")).collect();
        ResponseFields {
            nonce: response.nonce,
            type_url: response.type_url,
            version: response.system_version_info,
            resources,
            labels: Some(labels),
            removed: response.removed_resources,
        }
    }
}
