//! gRPC's reflection service, in both of its versions: what the socket serves, for tools like grpcurl.

use std::sync::Arc;

use bytes::Bytes;
use hyper::body::Incoming;
use prost::Message as _;
use tokio_stream::StreamExt as _;
use tonic::{Code, Status};

use super::others::{self, Responses, Step};
use super::sds::Peer;
use super::sds::message::Message;
use super::sds::requests::Requests;
use crate::base::budget::Charge;
use crate::base::limits;
// The messages of the two versions are the same.
use crate::proto::grpc::reflection::v1::server_reflection_request::MessageRequest;
use crate::proto::grpc::reflection::v1::server_reflection_response::MessageResponse;
use crate::proto::grpc::reflection::v1::{
    ErrorResponse, FileDescriptorResponse, ListServiceResponse, ServerReflectionRequest,
    ServerReflectionResponse, ServiceResponse,
};

/// A file that defines what is served.
struct File {
    name: &'static str,
    /// The full names of what it defines.
    symbols: &'static [&'static str],
    /// Encoded.
    descriptor: &'static [u8],
}

// Written by build.rs.
include!(concat!(env!("OUT_DIR"), "/descriptors.rs"));

/// Whether the socket serves `service`.
pub(super) fn is_served(service: &str) -> bool {
    SERVICES.contains(&service)
}

/// Whether `service` is one of this file.
pub(super) fn is_service(service: &str) -> bool {
    service.starts_with("grpc.reflection.") && is_served(service)
}

/// Answers a call of `method`.
pub(super) fn open(
    peer: Arc<Peer>,
    method: &str,
    request: http::Request<Incoming>,
) -> Result<Responses, Status> {
    if method != "ServerReflectionInfo" {
        return Err(Status::unimplemented("the reflection service has ServerReflectionInfo"));
    }
    let charge = peer.charge(limits::STREAM_MEMORY)?;
    let requests = Requests::new(request.into_body(), Arc::clone(&peer));
    Ok(others::responses(Reflection { peer, requests, _charge: charge }, Reflection::next))
}

/// One call.
struct Reflection {
    peer: Arc<Peer>,
    requests: Requests<Incoming, ServerReflectionRequest>,
    _charge: Charge,
}

impl Reflection {
    async fn next(mut self) -> Step<Self> {
        let service = Arc::clone(&self.peer.service);
        let request = tokio::select! {
            biased;
            () = service.draining.cancelled() => Some(Err(service.stopping())),
            request = self.requests.next() => request,
        };
        let Some(request) = request.transpose()? else { return Ok(None) };
        Ok(Some((Message::of(answer(request).encode_to_vec().into()), self)))
    }
}

fn answer(request: ServerReflectionRequest) -> ServerReflectionResponse {
    let file = |file: Option<&File>| match file {
        Some(file) => MessageResponse::FileDescriptorResponse(FileDescriptorResponse {
            file_descriptor_proto: vec![Bytes::from_static(file.descriptor)],
        }),
        None => refused(Code::NotFound, "this socket serves nothing of that name"),
    };
    let response = match &request.message_request {
        Some(MessageRequest::FileByFilename(name)) => file(FILES.iter().find(|file| file.name == name)),
        Some(MessageRequest::FileContainingSymbol(name)) => {
            let name = name.strip_prefix('.').unwrap_or(name);
            file(FILES.iter().find(|file| file.symbols.contains(&name)))
        }
        Some(MessageRequest::ListServices(_)) => {
            let service = |name: &&str| ServiceResponse { name: (*name).to_owned() };
            let service = SERVICES.iter().map(service).collect();
            MessageResponse::ListServicesResponse(ListServiceResponse { service })
        }
        Some(MessageRequest::FileContainingExtension(_) | MessageRequest::AllExtensionNumbersOfType(_)) => {
            refused(Code::NotFound, "nothing here has extensions")
        }
        None => refused(Code::InvalidArgument, "the request asks for nothing"),
    };
    ServerReflectionResponse {
        valid_host: request.host.clone(),
        original_request: Some(request),
        message_response: Some(response),
    }
}

fn refused(code: Code, message: &str) -> MessageResponse {
    MessageResponse::ErrorResponse(ErrorResponse {
        error_code: code.into(),
        error_message: message.to_owned(),
    })
}
