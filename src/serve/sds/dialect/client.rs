//! The client's end of both dialects, for tests: what it says and hears, in words that are the same for both.

use super::{Delta, Dialect, StateOfTheWorld};
use crate::proto::envoy::config::core::v3::Node;
use crate::proto::envoy::service::discovery::v3::{
    DeltaDiscoveryRequest, DeltaDiscoveryResponse, DiscoveryRequest, DiscoveryResponse,
};
use crate::proto::google::protobuf::Any;
use crate::proto::google::rpc;

/// What a request says. Each dialect takes the fields that it has words for.
#[derive(Clone, Debug, Default)]
pub(crate) struct Words {
    pub node: Option<Node>,
    pub type_url: String,
    pub nonce: String,
    /// The reason of a NACK.
    pub rejection: Option<String>,
    /// Every name that is wanted (state of the world).
    pub names: Vec<String>,
    /// The version of them all (state of the world).
    pub version: String,
    /// Names that are wanted from now on (delta).
    pub subscribe: Vec<String>,
    /// Names that no longer are (delta).
    pub unsubscribe: Vec<String>,
    /// What is kept from an earlier stream (delta).
    pub held: Vec<(String, String)>,
}

impl Words {
    /// Who opens a stream.
    pub(crate) fn node() -> Option<Node> {
        Some(Node { id: "envoy".to_owned(), ..Node::default() })
    }

    fn error_detail(&self) -> Option<rpc::Status> {
        self.rejection.clone().map(|message| rpc::Status { code: 13, message, details: Vec::new() })
    }
}

/// What a response says.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Answer {
    pub nonce: String,
    pub type_url: String,
    pub version: String,
    pub resources: Vec<Any>,
    /// Name and version of each resource, where the dialect tells them.
    pub labels: Option<Vec<(String, String)>>,
    pub removed: Vec<String>,
}

/// A dialect that a client of the tests can speak.
pub(crate) trait Wire: Dialect + Unpin {
    const IS_DELTA: bool;

    fn request(words: Words) -> Self::Request;
    fn answer(response: Self::Response) -> Answer;
}

impl Wire for StateOfTheWorld {
    const IS_DELTA: bool = false;

    fn request(words: Words) -> DiscoveryRequest {
        DiscoveryRequest {
            error_detail: words.error_detail(),
            node: words.node,
            type_url: words.type_url,
            response_nonce: words.nonce,
            resource_names: words.names,
            version_info: words.version,
        }
    }

    fn answer(response: DiscoveryResponse) -> Answer {
        Answer {
            nonce: response.nonce,
            type_url: response.type_url,
            version: response.version_info,
            resources: response.resources,
            labels: None,
            removed: Vec::new(),
        }
    }
}

impl Wire for Delta {
    const IS_DELTA: bool = true;

    fn request(words: Words) -> DeltaDiscoveryRequest {
        DeltaDiscoveryRequest {
            error_detail: words.error_detail(),
            node: words.node,
            type_url: words.type_url,
            response_nonce: words.nonce,
            resource_names_subscribe: words.subscribe,
            resource_names_unsubscribe: words.unsubscribe,
            initial_resource_versions: words.held.into_iter().collect(),
        }
    }

    fn answer(response: DeltaDiscoveryResponse) -> Answer {
        let labels = response.resources.iter().map(|one| (one.name.clone(), one.version.clone())).collect();
        let resources = response.resources.into_iter().map(|one| one.resource.expect("bytes")).collect();
        Answer {
            nonce: response.nonce,
            type_url: response.type_url,
            version: response.system_version_info,
            resources,
            labels: Some(labels),
            removed: response.removed_resources,
        }
    }
}
