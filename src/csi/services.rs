//! CSI and the kubelet's registration of plugins, as gRPC services.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use hyper::body::Incoming;
use tokio::sync::mpsc;
use tonic::body::Body;
use tonic::{Code, Request, Response, Status};
use tower_service::Service;

use super::volumes::Volumes;
use crate::base::limits::CSI_REQUEST_BYTES;
use crate::base::text;
use crate::proto::csi::v1 as csi;
use crate::proto::csi::v1::identity_server::{Identity, IdentityServer, SERVICE_NAME as IDENTITY};
use crate::proto::csi::v1::node_server::{Node, NodeServer, SERVICE_NAME as NODE};
use crate::proto::csi::v1::node_service_capability::rpc::Type as Capability;
use crate::proto::csi::v1::node_service_capability::{Rpc, Type};
use crate::proto::google::protobuf::BoolValue;
use crate::proto::pluginregistration as plugin;
use crate::proto::pluginregistration::registration_server::{
    Registration, RegistrationServer, SERVICE_NAME as REGISTRATION,
};

/// The versions of CSI that the driver speaks.
const VERSIONS: [&str; 1] = ["1.0.0"];

/// What the kubelet says of the registration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Registered,
    /// The kubelet's reason.
    Refused(String),
}

/// Answers the kubelet.
#[derive(Clone, Debug)]
pub(super) struct Answers {
    volumes: Volumes,
    verdicts: mpsc::Sender<Verdict>,
}

/// All services, on each of the two sockets: a kubelet that is given no endpoint uses the registration socket.
#[derive(Clone, Debug)]
pub(super) struct Services {
    identity: IdentityServer<Answers>,
    node: NodeServer<Answers>,
    registration: RegistrationServer<Answers>,
}

impl Services {
    /// Verdicts that are not taken are dropped: only the newest counts.
    pub(super) fn new(volumes: Volumes, verdicts: mpsc::Sender<Verdict>) -> Self {
        let answers = Answers { volumes, verdicts };
        Self {
            identity: IdentityServer::new(answers.clone()).max_decoding_message_size(CSI_REQUEST_BYTES),
            node: NodeServer::new(answers.clone()).max_decoding_message_size(CSI_REQUEST_BYTES),
            registration: RegistrationServer::new(answers).max_decoding_message_size(CSI_REQUEST_BYTES),
        }
    }
}

impl Service<http::Request<Incoming>> for Services {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Incoming>) -> Self::Future {
        let service = request.uri().path().split('/').nth(1).unwrap_or_default();
        match service {
            IDENTITY => Box::pin(self.identity.call(request)),
            NODE => Box::pin(self.node.call(request)),
            REGISTRATION => Box::pin(self.registration.call(request)),
            _ => Box::pin(async { Ok(Status::unimplemented("the driver has no such service").into_http()) }),
        }
    }
}

/// One word for what the kubelet was answered.
fn outcome(answer: &Result<(), Status>) -> &'static str {
    match answer.as_ref().map_err(Status::code) {
        Ok(()) => "ok",
        Err(Code::InvalidArgument) => "invalid_argument",
        Err(Code::FailedPrecondition) => "failed_precondition",
        Err(Code::AlreadyExists) => "already_exists",
        Err(Code::DeadlineExceeded) => "deadline_exceeded",
        Err(Code::ResourceExhausted) => "resource_exhausted",
        Err(Code::Unavailable) => "unavailable",
        Err(Code::Aborted) => "aborted",
        Err(_) => "other",
    }
}

#[tonic::async_trait]
impl Identity for Answers {
    async fn get_plugin_info(
        &self,
        _: Request<csi::GetPluginInfoRequest>,
    ) -> Result<Response<csi::GetPluginInfoResponse>, Status> {
        Ok(Response::new(csi::GetPluginInfoResponse {
            name: self.volumes.settings().driver_name.to_string(),
            vendor_version: env!("CARGO_PKG_VERSION").to_owned(),
        }))
    }

    async fn get_plugin_capabilities(
        &self,
        _: Request<csi::GetPluginCapabilitiesRequest>,
    ) -> Result<Response<csi::GetPluginCapabilitiesResponse>, Status> {
        Ok(Response::new(csi::GetPluginCapabilitiesResponse {}))
    }

    async fn probe(&self, _: Request<csi::ProbeRequest>) -> Result<Response<csi::ProbeResponse>, Status> {
        Ok(Response::new(csi::ProbeResponse { ready: Some(BoolValue { value: true }) }))
    }
}

#[tonic::async_trait]
impl Node for Answers {
    async fn node_publish_volume(
        &self,
        request: Request<csi::NodePublishVolumeRequest>,
    ) -> Result<Response<csi::NodePublishVolumeResponse>, Status> {
        let published = self.volumes.publish(request.into_inner().into()).await;
        self.volumes.counts().publishes.count(outcome(&published));
        published?;
        Ok(Response::new(csi::NodePublishVolumeResponse {}))
    }

    async fn node_unpublish_volume(
        &self,
        request: Request<csi::NodeUnpublishVolumeRequest>,
    ) -> Result<Response<csi::NodeUnpublishVolumeResponse>, Status> {
        let csi::NodeUnpublishVolumeRequest { volume_id, target_path } = request.into_inner();
        let unpublished = self.volumes.unpublish(&volume_id, &target_path).await;
        self.volumes.counts().unpublishes.count(outcome(&unpublished));
        unpublished?;
        Ok(Response::new(csi::NodeUnpublishVolumeResponse {}))
    }

    async fn node_get_capabilities(
        &self,
        _: Request<csi::NodeGetCapabilitiesRequest>,
    ) -> Result<Response<csi::NodeGetCapabilitiesResponse>, Status> {
        let r#type = Some(Type::Rpc(Rpc { r#type: Capability::VolumeMountGroup.into() }));
        let capabilities = vec![csi::NodeServiceCapability { r#type }];
        Ok(Response::new(csi::NodeGetCapabilitiesResponse { capabilities }))
    }

    async fn node_get_info(
        &self,
        _: Request<csi::NodeGetInfoRequest>,
    ) -> Result<Response<csi::NodeGetInfoResponse>, Status> {
        let node_id = self.volumes.settings().node_id.clone();
        Ok(Response::new(csi::NodeGetInfoResponse { node_id }))
    }
}

#[tonic::async_trait]
impl Registration for Answers {
    async fn get_info(
        &self,
        _: Request<plugin::InfoRequest>,
    ) -> Result<Response<plugin::PluginInfo>, Status> {
        let settings = self.volumes.settings();
        let endpoint = settings.endpoint.as_ref().unwrap_or(&settings.csi_socket);
        Ok(Response::new(plugin::PluginInfo {
            r#type: "CSIPlugin".to_owned(),
            name: settings.driver_name.to_string(),
            endpoint: endpoint.display().to_string(),
            supported_versions: VERSIONS.map(str::to_owned).to_vec(),
        }))
    }

    async fn notify_registration_status(
        &self,
        request: Request<plugin::RegistrationStatus>,
    ) -> Result<Response<plugin::RegistrationStatusResponse>, Status> {
        let plugin::RegistrationStatus { plugin_registered, error } = request.into_inner();
        let verdict = match plugin_registered {
            true => Verdict::Registered,
            false => Verdict::Refused(text::sanitize_for_log(&error)),
        };
        let _ = self.verdicts.try_send(verdict);
        Ok(Response::new(plugin::RegistrationStatusResponse {}))
    }
}
