//! The hand-written subset in `proto/` against the full definitions: the same bytes have the same meaning.
//!
//! Our side of each pair is spelled out field by field, without `..Default::default()`: a field that is added to
//! `proto/` does not compile here until it is compared too.

use std::convert::Infallible;
use std::fmt::Debug;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};

use attache::proto::{self, SECRET_TYPE_URL};
use bytes::Bytes;
use envoy_types::pb as full;
use prost::{Message, Name};

use full::envoy::config::core::v3 as full_core;
use full::envoy::extensions::transport_sockets::tls::v3 as full_tls;
use full::envoy::service::discovery::v3 as full_discovery;
use full::google::protobuf as full_protobuf;
use proto::envoy::config::core::v3 as core;
use proto::envoy::extensions::transport_sockets::tls::v3 as tls;
use proto::envoy::service::discovery::v3 as discovery;
use proto::google::protobuf;

/// What either side writes, the other reads. Either would skip a field with another number, and misread or refuse one
/// of another type.
fn both_ways<Ours, Theirs>(ours: Ours, theirs: Theirs)
where
    Ours: Message + Default + PartialEq + Debug,
    Theirs: Message + Default + PartialEq + Debug,
{
    assert_ne!(ours, Ours::default(), "an empty message proves nothing");
    assert_eq!(Ours::decode(&*theirs.encode_to_vec()).unwrap(), ours, "read from theirs");
    assert_eq!(Theirs::decode(&*ours.encode_to_vec()).unwrap(), theirs, "read from ours");
}

fn data(specifier: core::data_source::Specifier) -> Option<core::DataSource> {
    Some(core::DataSource { specifier: Some(specifier) })
}

fn full_data(specifier: full_core::data_source::Specifier) -> Option<full_core::DataSource> {
    Some(full_core::DataSource { specifier: Some(specifier), ..Default::default() })
}

fn inline(bytes: &'static [u8]) -> Option<core::DataSource> {
    data(core::data_source::Specifier::InlineBytes(Bytes::from_static(bytes)))
}

fn full_inline(bytes: &[u8]) -> Option<full_core::DataSource> {
    full_data(full_core::data_source::Specifier::InlineBytes(bytes.to_vec()))
}

fn any(value: &'static [u8]) -> protobuf::Any {
    protobuf::Any { type_url: SECRET_TYPE_URL.into(), value: Bytes::from_static(value) }
}

fn full_any(value: &[u8]) -> full_protobuf::Any {
    full_protobuf::Any { type_url: full_tls::Secret::type_url(), value: value.to_vec() }
}

fn node() -> core::Node {
    core::Node {
        id: "sidecar~1".into(),
        cluster: "web".into(),
        metadata: full_metadata().encode_to_vec().into(),
    }
}

fn full_node() -> full_core::Node {
    let metadata = Some(full_metadata());
    full_core::Node { id: "sidecar~1".into(), cluster: "web".into(), metadata, ..Default::default() }
}

fn full_metadata() -> full_protobuf::Struct {
    let kind = Some(full_protobuf::value::Kind::StringValue("east".into()));
    full_protobuf::Struct { fields: [("CLUSTER_ID".to_owned(), full_protobuf::Value { kind })].into() }
}

fn status() -> proto::google::rpc::Status {
    proto::google::rpc::Status { code: 13, message: "no such key".into(), details: vec![any(b"detail")] }
}

fn full_status() -> full::google::rpc::Status {
    full::google::rpc::Status { code: 13, message: "no such key".into(), details: vec![full_any(b"detail")] }
}

fn request() -> discovery::DiscoveryRequest {
    discovery::DiscoveryRequest {
        version_info: "v1".into(),
        node: Some(node()),
        resource_names: vec!["default".into(), "ROOTCA".into()],
        type_url: SECRET_TYPE_URL.into(),
        response_nonce: "n1".into(),
        error_detail: Some(status()),
    }
}

fn full_request() -> full_discovery::DiscoveryRequest {
    full_discovery::DiscoveryRequest {
        version_info: "v1".into(),
        node: Some(full_node()),
        resource_names: vec!["default".into(), "ROOTCA".into()],
        type_url: full_tls::Secret::type_url(),
        response_nonce: "n1".into(),
        error_detail: Some(full_status()),
        ..Default::default()
    }
}

#[test]
fn discovery_messages_match_envoys() {
    both_ways(node(), full_node());
    both_ways(
        core::ControlPlane { identifier: "attache".into() },
        full_core::ControlPlane { identifier: "attache".into() },
    );
    both_ways(status(), full_status());
    both_ways(any(b"\x01\xff"), full_any(b"\x01\xff"));
    both_ways(request(), full_request());
    both_ways(
        discovery::DiscoveryResponse {
            version_info: "v2".into(),
            resources: vec![any(b"one"), any(b"two")],
            type_url: SECRET_TYPE_URL.into(),
            nonce: "n2".into(),
            control_plane: Some(core::ControlPlane { identifier: "attache".into() }),
        },
        full_discovery::DiscoveryResponse {
            version_info: "v2".into(),
            resources: vec![full_any(b"one"), full_any(b"two")],
            type_url: full_tls::Secret::type_url(),
            nonce: "n2".into(),
            control_plane: Some(full_core::ControlPlane { identifier: "attache".into() }),
            ..Default::default()
        },
    );
}

#[test]
fn delta_messages_match_envoys() {
    let versions = || [("default".to_owned(), "v1".to_owned())].into();
    both_ways(
        discovery::DeltaDiscoveryRequest {
            node: Some(node()),
            type_url: SECRET_TYPE_URL.into(),
            resource_names_subscribe: vec!["default".into(), "ROOTCA".into()],
            resource_names_unsubscribe: vec!["other".into()],
            initial_resource_versions: versions(),
            response_nonce: "n1".into(),
            error_detail: Some(status()),
        },
        full_discovery::DeltaDiscoveryRequest {
            node: Some(full_node()),
            type_url: full_tls::Secret::type_url(),
            resource_names_subscribe: vec!["default".into(), "ROOTCA".into()],
            resource_names_unsubscribe: vec!["other".into()],
            initial_resource_versions: versions(),
            response_nonce: "n1".into(),
            error_detail: Some(full_status()),
            ..Default::default()
        },
    );
    let ours =
        discovery::Resource { version: "v1".into(), resource: Some(any(b"one")), name: "default".into() };
    let theirs = full_discovery::Resource {
        version: "v1".into(),
        resource: Some(full_any(b"one")),
        name: "default".into(),
        ..Default::default()
    };
    both_ways(ours.clone(), theirs.clone());
    both_ways(
        discovery::DeltaDiscoveryResponse {
            system_version_info: "v2".into(),
            resources: vec![ours],
            type_url: SECRET_TYPE_URL.into(),
            nonce: "n2".into(),
            removed_resources: vec!["gone".into()],
            control_plane: Some(core::ControlPlane { identifier: "attache".into() }),
        },
        full_discovery::DeltaDiscoveryResponse {
            system_version_info: "v2".into(),
            resources: vec![theirs],
            type_url: full_tls::Secret::type_url(),
            nonce: "n2".into(),
            removed_resources: vec!["gone".into()],
            control_plane: Some(full_core::ControlPlane { identifier: "attache".into() }),
            ..Default::default()
        },
    );
}

#[test]
fn secrets_match_envoys() {
    use core::data_source::Specifier;
    use full_core::data_source::Specifier as FullSpecifier;
    for (ours, theirs) in [
        (Specifier::Filename("/a".into()), FullSpecifier::Filename("/a".into())),
        (
            Specifier::InlineBytes(Bytes::from_static(b"\x00\xff")),
            FullSpecifier::InlineBytes(b"\x00\xff".into()),
        ),
        (Specifier::InlineString("pem".into()), FullSpecifier::InlineString("pem".into())),
    ] {
        both_ways(data(ours).unwrap(), full_data(theirs).unwrap());
    }

    let certificate = tls::TlsCertificate {
        certificate_chain: inline(b"chain"),
        private_key: inline(b"key"),
        ocsp_staple: inline(b"staple"),
    };
    let full_certificate = full_tls::TlsCertificate {
        certificate_chain: full_inline(b"chain"),
        private_key: full_inline(b"key"),
        ocsp_staple: full_inline(b"staple"),
        ..Default::default()
    };
    let domain = tls::spiffe_cert_validator_config::TrustDomain {
        name: "example.org".into(),
        trust_bundle: inline(b"roots"),
    };
    let full_domain = full_tls::spiffe_cert_validator_config::TrustDomain {
        name: "example.org".into(),
        trust_bundle: full_inline(b"roots"),
        ..Default::default()
    };
    both_ways(
        tls::SpiffeCertValidatorConfig { trust_domains: vec![domain] },
        full_tls::SpiffeCertValidatorConfig { trust_domains: vec![full_domain], ..Default::default() },
    );
    let validator = core::TypedExtensionConfig { name: "spiffe".into(), typed_config: Some(any(b"it")) };
    let full_validator =
        full_core::TypedExtensionConfig { name: "spiffe".into(), typed_config: Some(full_any(b"it")) };
    let context = tls::CertificateValidationContext {
        trusted_ca: inline(b"roots"),
        crl: inline(b"revoked"),
        custom_validator_config: Some(validator),
    };
    let full_context = full_tls::CertificateValidationContext {
        trusted_ca: full_inline(b"roots"),
        crl: full_inline(b"revoked"),
        custom_validator_config: Some(full_validator),
        ..Default::default()
    };
    both_ways(certificate.clone(), full_certificate.clone());
    both_ways(context.clone(), full_context.clone());
    for (ours, theirs) in [
        (
            tls::secret::Type::TlsCertificate(certificate),
            full_tls::secret::Type::TlsCertificate(full_certificate),
        ),
        (
            tls::secret::Type::ValidationContext(context),
            full_tls::secret::Type::ValidationContext(full_context),
        ),
    ] {
        both_ways(
            tls::Secret { name: "default".into(), r#type: Some(ours) },
            full_tls::Secret { name: "default".into(), r#type: Some(theirs) },
        );
    }
    assert_eq!(SECRET_TYPE_URL, full_tls::Secret::type_url());
}

#[test]
fn structs_match_protobufs() {
    use full_protobuf::value::Kind as FullKind;
    use protobuf::value::Kind;
    let value = |kind| protobuf::Value { kind: Some(kind) };
    let full_value = |kind| full_protobuf::Value { kind: Some(kind) };
    let structure = |kind| protobuf::Struct { fields: [("key".to_owned(), value(kind))].into() };
    let full_structure =
        |kind| full_protobuf::Struct { fields: [("key".to_owned(), full_value(kind))].into() };
    for (ours, theirs) in [
        (Kind::NullValue(0), FullKind::NullValue(0)),
        (Kind::NumberValue(-0.5), FullKind::NumberValue(-0.5)),
        (Kind::StringValue("text".into()), FullKind::StringValue("text".into())),
        (Kind::BoolValue(true), FullKind::BoolValue(true)),
        (
            Kind::StructValue(structure(Kind::BoolValue(true))),
            FullKind::StructValue(full_structure(FullKind::BoolValue(true))),
        ),
        (
            Kind::ListValue(protobuf::ListValue { values: vec![value(Kind::NumberValue(1.0))] }),
            FullKind::ListValue(full_protobuf::ListValue {
                values: vec![full_value(FullKind::NumberValue(1.0))],
            }),
        ),
    ] {
        both_ways(structure(ours), full_structure(theirs));
    }
}

#[test]
fn fields_outside_the_subset_are_skipped() {
    let text = |text: &str| full_protobuf::Value {
        kind: Some(full_protobuf::value::Kind::StringValue(text.into())),
    };
    let metadata = Some(full_protobuf::Struct { fields: [("key".to_owned(), text("value"))].into() });
    let extension = |index| full_core::Extension {
        name: format!("envoy.filters.http.number_{index}"),
        category: "envoy.filters.http".into(),
        type_urls: vec!["type.googleapis.com/some.Message".into(); 3],
        ..Default::default()
    };
    let request = full_discovery::DiscoveryRequest {
        node: Some(full_core::Node {
            locality: Some(full_core::Locality { zone: "a".into(), ..Default::default() }),
            user_agent_name: "envoy".into(),
            user_agent_version_type: Some(full_core::node::UserAgentVersionType::UserAgentBuildVersion(
                full_core::BuildVersion { metadata, ..Default::default() },
            )),
            extensions: (0..516).map(extension).collect(),
            client_features: vec!["envoy.lb.does_not_support_overprovisioning".into()],
            dynamic_parameters: [("key".to_owned(), Default::default())].into(),
            ..full_node()
        }),
        resource_locators: vec![full_discovery::ResourceLocator {
            name: "xdstp://".into(),
            ..Default::default()
        }],
        ..full_request()
    };
    assert_eq!(discovery::DiscoveryRequest::decode(&*request.encode_to_vec()).unwrap(), self::request());

    let response = full_discovery::DiscoveryResponse {
        nonce: "n1".into(),
        canary: true,
        resource_errors: vec![full_discovery::ResourceError {
            error_detail: Some(full_status()),
            ..Default::default()
        }],
        ..Default::default()
    };
    let read = discovery::DiscoveryResponse::decode(&*response.encode_to_vec()).unwrap();
    assert_eq!(read, discovery::DiscoveryResponse { nonce: "n1".into(), ..Default::default() });

    let certificate = full_tls::TlsCertificate {
        private_key: full_inline(b"key"),
        password: full_inline(b"password"),
        watched_directory: Some(full_core::WatchedDirectory { path: "/certs".into(), ..Default::default() }),
        ..Default::default()
    };
    let read = tls::TlsCertificate::decode(&*certificate.encode_to_vec()).unwrap();
    assert_eq!(read, tls::TlsCertificate { private_key: inline(b"key"), ..Default::default() });

    let session_tickets = full_tls::Secret {
        name: "tickets".into(),
        r#type: Some(full_tls::secret::Type::SessionTicketKeys(full_tls::TlsSessionTicketKeys::default())),
    };
    let read = tls::Secret::decode(&*session_tickets.encode_to_vec()).unwrap();
    assert_eq!(read, tls::Secret { name: "tickets".into(), r#type: None });
}

/// A length-delimited field, as in the encoding's specification. Short enough for one-byte lengths.
fn delimited(number: u8, content: &[u8]) -> Vec<u8> {
    let length = u8::try_from(content.len()).ok().filter(|length| *length < 0x80).unwrap();
    [&[number << 3 | 2, length], content].concat()
}

/// No crate carries Istio's definitions, so their bytes are spelled out.
#[test]
fn certificate_requests_and_answers_match_istios() {
    use proto::istio::v1::auth::{IstioCertificateRequest, IstioCertificateResponse};

    let signer = |name: &str| protobuf::Value { kind: Some(protobuf::value::Kind::StringValue(name.into())) };
    let request = IstioCertificateRequest {
        csr: "PEM".into(),
        validity_duration: 86_400,
        metadata: Some(protobuf::Struct { fields: [("CertSigner".to_owned(), signer("x"))].into() }),
    };
    let entry = [delimited(1, b"CertSigner"), delimited(2, &delimited(3, b"x"))].concat();
    // 86,400 as a varint of field 3.
    let validity = vec![3 << 3, 0x80, 0xa3, 0x05];
    let bytes = [delimited(1, b"PEM"), validity, delimited(4, &delimited(1, &entry))].concat();
    assert_eq!(request.encode_to_vec(), bytes);
    assert_eq!(IstioCertificateRequest::decode(&*bytes).unwrap(), request);

    let response = IstioCertificateResponse { cert_chain: vec!["leaf".into(), "root".into()] };
    let bytes = [delimited(1, b"leaf"), delimited(1, b"root")].concat();
    assert_eq!(response.encode_to_vec(), bytes);
    let with_unknown = [bytes, delimited(2, b"later")].concat();
    assert_eq!(IstioCertificateResponse::decode(&*with_unknown).unwrap(), response);
}

/// The same for Google's definitions.
#[test]
fn certificate_requests_and_answers_match_googles() {
    use privateca::certificate::CertificateConfig;
    use privateca::fetch_ca_certs_response::CertChain;
    use proto::google::cloud::security::privateca::v1 as privateca;

    let asked = privateca::Certificate {
        name: String::new(),
        certificate_config: Some(CertificateConfig::PemCsr("PEM".into())),
        lifetime: Some(protobuf::Duration { seconds: 60, nanos: 0 }),
        subject_mode: privateca::SubjectRequestMode::ReflectedSpiffe.into(),
        pem_certificate: String::new(),
        pem_certificate_chain: Vec::new(),
    };
    let bytes = [delimited(2, b"PEM"), delimited(5, &[1 << 3, 60]), vec![7 << 3, 2]].concat();
    assert_eq!(asked.encode_to_vec(), bytes);
    let request = privateca::CreateCertificateRequest {
        parent: "pool".into(),
        certificate_id: "id".into(),
        certificate: Some(asked),
        request_id: "uuid".into(),
        issuing_certificate_authority_id: "ca".into(),
    };
    let fields = [(1, &b"pool"[..]), (2, b"id"), (3, &bytes), (4, b"uuid"), (6, b"ca")]
        .map(|(n, text)| delimited(n, text));
    assert_eq!(request.encode_to_vec(), fields.concat());

    let answer = [(1, &b"name"[..]), (4, b"unknown"), (9, b"leaf"), (11, b"issuer"), (11, b"root")];
    let answer = answer.map(|(number, text)| delimited(number, text)).concat();
    let answer = privateca::Certificate::decode(&*answer).unwrap();
    assert_eq!((answer.name.as_str(), answer.pem_certificate.as_str()), ("name", "leaf"));
    assert_eq!(answer.pem_certificate_chain, ["issuer", "root"]);

    let fetch = privateca::FetchCaCertsRequest { ca_pool: "pool".into() };
    assert_eq!(fetch.encode_to_vec(), delimited(1, b"pool"));
    let chain = CertChain { certificates: vec!["issuer".into(), "root".into()] };
    let fetched = privateca::FetchCaCertsResponse { ca_certs: vec![chain] };
    let chain = [delimited(1, b"issuer"), delimited(1, b"root")].concat();
    assert_eq!(fetched.encode_to_vec(), delimited(1, &chain));
}

/// The same for CSI's definitions (version 1) and the kubelet's.
#[test]
fn volumes_and_registrations_match_kubernetes() {
    use csi::node_service_capability::rpc::Type as Capability;
    use csi::node_service_capability::{Rpc, Type};
    use csi::volume_capability::{AccessType, BlockVolume, MountVolume};
    use proto::csi::v1 as csi;
    use proto::pluginregistration as plugin;

    let mount = AccessType::Mount(MountVolume { volume_mount_group: "2000".into() });
    let request = csi::NodePublishVolumeRequest {
        volume_id: "csi-1".into(),
        target_path: "/t".into(),
        volume_capability: Some(csi::VolumeCapability { access_type: Some(mount) }),
        readonly: true,
        secrets: [("s".into(), "secret".into())].into(),
        volume_context: [("c".into(), "context".into())].into(),
    };
    let entry = |name: &[u8], value: &[u8]| [delimited(1, name), delimited(2, value)].concat();
    let fields = [(1, b"csi-1".to_vec()), (4, b"/t".to_vec()), (5, delimited(2, &delimited(3, b"2000")))];
    let before = fields.map(|(number, content)| delimited(number, &content)).concat();
    let after = [delimited(7, &entry(b"s", b"secret")), delimited(8, &entry(b"c", b"context"))].concat();
    let bytes = [before, vec![6 << 3, 1], after].concat();
    assert_eq!(request.encode_to_vec(), bytes);
    // `staging_target_path`.
    let with_others = [delimited(3, b"/staging"), bytes].concat();
    assert_eq!(csi::NodePublishVolumeRequest::decode(&*with_others).unwrap(), request);
    assert!(!format!("{request:?}").contains("secret") && !format!("{request:?}").contains("context"));
    let block = csi::VolumeCapability { access_type: Some(AccessType::Block(BlockVolume {})) };
    assert_eq!(block.encode_to_vec(), delimited(1, b""));
    let request = csi::NodeUnpublishVolumeRequest { volume_id: "csi-1".into(), target_path: "/t".into() };
    assert_eq!(request.encode_to_vec(), [delimited(1, b"csi-1"), delimited(2, b"/t")].concat());

    let group = Some(Type::Rpc(Rpc { r#type: Capability::VolumeMountGroup.into() }));
    let capabilities = vec![csi::NodeServiceCapability { r#type: group }];
    let answer = csi::NodeGetCapabilitiesResponse { capabilities };
    assert_eq!(answer.encode_to_vec(), delimited(1, &delimited(1, &[1 << 3, 6])));
    let answer = csi::NodeGetInfoResponse { node_id: "n".into() };
    assert_eq!(answer.encode_to_vec(), delimited(1, b"n"));
    let answer = csi::GetPluginInfoResponse { name: "n".into(), vendor_version: "v".into() };
    assert_eq!(answer.encode_to_vec(), [delimited(1, b"n"), delimited(2, b"v")].concat());
    let answer = csi::ProbeResponse { ready: Some(protobuf::BoolValue { value: true }) };
    assert_eq!(answer.encode_to_vec(), delimited(1, &[1 << 3, 1]));

    let info = plugin::PluginInfo {
        r#type: "CSIPlugin".into(),
        name: "n".into(),
        endpoint: "/e".into(),
        supported_versions: vec!["1.0.0".into()],
    };
    let fields = [(1, &b"CSIPlugin"[..]), (2, b"n"), (3, b"/e"), (4, b"1.0.0")];
    assert_eq!(info.encode_to_vec(), fields.map(|(number, text)| delimited(number, text)).concat());
    let status = plugin::RegistrationStatus { plugin_registered: true, error: "e".into() };
    assert_eq!(status.encode_to_vec(), [vec![1 << 3, 1], delimited(2, b"e")].concat());
}

/// A gRPC service that refuses every call and records its path.
#[derive(Clone, Default)]
struct Paths(Arc<Mutex<Vec<String>>>);

impl Paths {
    fn taken(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().unwrap())
    }
}

impl tower_service::Service<http::Request<tonic::body::Body>> for Paths {
    type Response = http::Response<tonic::body::Body>;
    type Error = Infallible;
    type Future = std::future::Ready<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<tonic::body::Body>) -> Self::Future {
        self.0.lock().unwrap().push(request.uri().path().to_owned());
        std::future::ready(Ok(tonic::Status::unimplemented("only the path counts").into_http()))
    }
}

#[tokio::test]
async fn services_and_methods_have_the_original_paths() {
    use full::envoy::service::secret::v3 as full_secret;
    use proto::csi::v1 as csi;
    use proto::envoy::service::secret::v3 as secret;
    use proto::google::cloud::security::privateca::v1 as privateca;
    use proto::istio::v1::auth;
    use proto::pluginregistration as plugin;

    let paths = Paths::default();
    let mut ours = secret::secret_discovery_service_client::SecretDiscoveryServiceClient::new(paths.clone());
    ours.delta_secrets(tokio_stream::empty()).await.unwrap_err();
    ours.stream_secrets(tokio_stream::empty()).await.unwrap_err();
    ours.fetch_secrets(request()).await.unwrap_err();
    let called = paths.taken();
    let mut theirs =
        full_secret::secret_discovery_service_client::SecretDiscoveryServiceClient::new(paths.clone());
    theirs.delta_secrets(tokio_stream::empty()).await.unwrap_err();
    theirs.stream_secrets(tokio_stream::empty()).await.unwrap_err();
    theirs.fetch_secrets(full_request()).await.unwrap_err();
    assert_eq!(called, paths.taken());
    assert_eq!(
        secret::secret_discovery_service_server::SERVICE_NAME,
        full_secret::secret_discovery_service_server::SERVICE_NAME,
    );

    let mut ca = auth::istio_certificate_service_client::IstioCertificateServiceClient::new(paths.clone());
    ca.create_certificate(auth::IstioCertificateRequest::default()).await.unwrap_err();
    assert_eq!(paths.taken(), ["/istio.v1.auth.IstioCertificateService/CreateCertificate"]);
    assert_eq!(auth::istio_certificate_service_server::SERVICE_NAME, "istio.v1.auth.IstioCertificateService");

    let mut cas = privateca::certificate_authority_service_client::CertificateAuthorityServiceClient::new(
        paths.clone(),
    );
    cas.create_certificate(privateca::CreateCertificateRequest::default()).await.unwrap_err();
    cas.fetch_ca_certs(privateca::FetchCaCertsRequest::default()).await.unwrap_err();
    let service = "/google.cloud.security.privateca.v1.CertificateAuthorityService";
    assert_eq!(paths.taken(), [format!("{service}/CreateCertificate"), format!("{service}/FetchCaCerts")]);

    let mut identity = csi::identity_client::IdentityClient::new(paths.clone());
    identity.get_plugin_info(csi::GetPluginInfoRequest {}).await.unwrap_err();
    identity.get_plugin_capabilities(csi::GetPluginCapabilitiesRequest {}).await.unwrap_err();
    identity.probe(csi::ProbeRequest {}).await.unwrap_err();
    let methods = ["GetPluginInfo", "GetPluginCapabilities", "Probe"];
    assert_eq!(paths.taken(), methods.map(|method| format!("/csi.v1.Identity/{method}")));

    let mut node = csi::node_client::NodeClient::new(paths.clone());
    node.node_publish_volume(csi::NodePublishVolumeRequest::default()).await.unwrap_err();
    node.node_unpublish_volume(csi::NodeUnpublishVolumeRequest::default()).await.unwrap_err();
    node.node_get_capabilities(csi::NodeGetCapabilitiesRequest {}).await.unwrap_err();
    node.node_get_info(csi::NodeGetInfoRequest {}).await.unwrap_err();
    let methods = ["NodePublishVolume", "NodeUnpublishVolume", "NodeGetCapabilities", "NodeGetInfo"];
    assert_eq!(paths.taken(), methods.map(|method| format!("/csi.v1.Node/{method}")));

    let mut registration = plugin::registration_client::RegistrationClient::new(paths.clone());
    registration.get_info(plugin::InfoRequest {}).await.unwrap_err();
    registration.notify_registration_status(plugin::RegistrationStatus::default()).await.unwrap_err();
    let methods = ["GetInfo", "NotifyRegistrationStatus"];
    assert_eq!(paths.taken(), methods.map(|method| format!("/pluginregistration.Registration/{method}")));
}
