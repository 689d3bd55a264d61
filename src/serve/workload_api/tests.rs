//! The Workload API, health and reflection with a gRPC client and a real store.

use std::time::{Duration, SystemTime};

use http::uri::PathAndQuery;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, SanType};
use rustls::pki_types::CertificateDer;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Request, Status, Streaming};

use super::identity::splay;
use super::*;
use crate::base::clock::Clock;
use crate::metrics::{ByReason, Metrics};
use crate::net::http2::{self, Connection};
use crate::pki::crl;
use crate::pki::crl::testing::Authority;
use crate::pki::key::{KeyType, SigningKey};
use crate::proto::grpc::health::v1::health_check_response::ServingStatus;
use crate::proto::grpc::health::v1::health_client::HealthClient;
use crate::proto::grpc::health::v1::{HealthCheckRequest, HealthCheckResponse};
use crate::proto::grpc::reflection::v1::server_reflection_client::ServerReflectionClient;
use crate::proto::grpc::reflection::v1::server_reflection_request::MessageRequest;
use crate::proto::grpc::reflection::v1::server_reflection_response::MessageResponse;
use crate::proto::grpc::reflection::v1::{ServerReflectionRequest, ServerReflectionResponse};
use crate::proto::spiffe_workload_api_client::SpiffeWorkloadApiClient;
use crate::proto::{
    JwtBundlesRequest, X509BundlesRequest, X509BundlesResponse, X509svidRequest, X509svidResponse,
};
use crate::secret::{KeyPair, Secret, SecretName, TrustBundle};
use crate::serve::sds::{Capacity, SecretDiscovery};
use crate::store::{Cache, Key, Origin, Publisher, Workload};

const ID: &str = "spiffe://td/web";

/// A store with one source, and the service that uses it.
struct Agent {
    cache: Cache,
    workload: Workload,
    clock: Clock,
    metrics: Metrics,
    draining: CancellationToken,
    /// None where there is no source.
    source: Option<(Publisher, Publisher)>,
    service: SecretDiscovery,
}

/// A CA.
struct Ca(CertifiedIssuer<'static, SigningKey>);

impl Ca {
    fn new(name: &str) -> Self {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Self(CertifiedIssuer::self_signed(params, SigningKey::generate(KeyType::EcdsaP256).unwrap()).unwrap())
    }

    fn root(&self) -> CertificateDer<'static> {
        self.0.as_ref().der().clone()
    }

    fn issue(&self, id: &str, not_after: Option<SystemTime>) -> KeyPair {
        let key = SigningKey::generate(KeyType::EcdsaP256).unwrap();
        let mut params = CertificateParams::default();
        params.subject_alt_names = vec![SanType::URI(id.try_into().unwrap())];
        params.not_after = not_after.map_or(params.not_after, Into::into);
        let leaf = params.signed_by(&key, &self.0).unwrap();
        KeyPair::new(vec![leaf.der().clone()], key.to_private_key()).unwrap()
    }
}

impl Agent {
    fn new() -> Self {
        let mut agent = Self::without_source();
        let publisher = |name| agent.cache.publisher(Key { workload: agent.workload, name }, Origin::CA);
        agent.source = Some((publisher(SecretName::Workload), publisher(SecretName::Roots)));
        agent
    }

    fn without_source() -> Self {
        let (cache, workload) = Cache::with_workload("");
        let clock = Clock::starting_at(SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_000_000));
        let (metrics, draining) = (Metrics::default(), CancellationToken::new());
        let service = SecretDiscovery::new(
            cache.clone(),
            workload,
            metrics.clone(),
            clock.clone(),
            draining.clone(),
            Capacity::default(),
        );
        Self { cache, workload, clock, metrics, draining, source: None, service }
    }

    fn publish(&self, pair: &KeyPair, roots: &[&Ca]) {
        self.publish_roots(roots);
        let (key_pair, _) = self.source.as_ref().unwrap();
        key_pair.publish(Secret::KeyPair(pair.clone()), self.clock.now(), None);
    }

    fn publish_roots(&self, roots: &[&Ca]) {
        let bundle = TrustBundle::new(roots.iter().map(|ca| ca.root()).collect()).unwrap();
        let (_, publisher) = self.source.as_ref().unwrap();
        publisher.publish(Secret::TrustBundle(bundle), self.clock.now(), None);
    }

    async fn talk(&self, talk: impl AsyncFnOnce(Connection)) {
        let (client, server) = tokio::io::duplex(64 << 10);
        tokio::spawn(http2::serve(server, self.service.connection().unwrap(), CancellationToken::new()));
        http2::with_connection(client, talk).await.unwrap();
    }

    fn refusals(&self, reason: &'static str) -> u64 {
        self.metrics.refusals.get_or_create_owned(&ByReason { reason }).get()
    }
}

fn origin() -> http::Uri {
    http::Uri::from_static("http://localhost")
}

fn api(connection: &Connection) -> SpiffeWorkloadApiClient<Connection> {
    SpiffeWorkloadApiClient::with_origin(connection.clone(), origin())
}

fn request<T>(message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.metadata_mut().insert("workload.spiffe.io", "true".parse().unwrap());
    request
}

async fn svids(connection: &Connection) -> Result<Streaming<X509svidResponse>, Status> {
    Ok(api(connection).fetch_x509svid(request(X509svidRequest {})).await?.into_inner())
}

async fn bundles(connection: &Connection) -> Streaming<X509BundlesResponse> {
    api(connection).fetch_x509_bundles(request(X509BundlesRequest {})).await.unwrap().into_inner()
}

/// The first message, or how the call ends without one.
async fn first(connection: &Connection) -> Result<X509svidResponse, Status> {
    let message = svids(connection).await?.message().await?;
    Ok(message.expect("the stream ended with OK"))
}

#[tokio::test(start_paused = true)]
async fn each_stream_has_identity_or_bundles_and_stays_open() {
    let (agent, ca) = (Agent::new(), Ca::new("root"));
    let pair = ca.issue(ID, None);
    agent.publish(&pair, &[&ca]);
    agent
        .talk(async |connection| {
            let mut svid = svids(&connection).await.unwrap();
            let message = svid.message().await.unwrap().unwrap();
            let [one] = message.svids.as_slice() else { panic!("{message:?}") };
            assert_eq!(one.spiffe_id, ID);
            assert_eq!(one.x509_svid, pair.chain()[0].as_ref());
            assert_eq!(one.x509_svid_key, pair.key().to_pkcs8().unwrap().as_slice());
            assert_eq!(one.bundle, ca.root().as_ref());
            assert!(message.crl.is_empty() && message.federated_bundles.is_empty());

            let mut x509 = bundles(&connection).await;
            let message = x509.message().await.unwrap().unwrap();
            assert_eq!(message.bundles, [("spiffe://td".to_owned(), ca.root().to_vec().into())].into());

            let mut jwt =
                api(&connection).fetch_jwt_bundles(request(JwtBundlesRequest {})).await.unwrap().into_inner();
            let message = jwt.message().await.unwrap().unwrap();
            assert_eq!(message.bundles, [("spiffe://td".to_owned(), r#"{"keys":[]}"#.into())].into());

            let quiet = Duration::from_secs(24 * 3600);
            let more = async {
                tokio::select! {
                    message = svid.message() => format!("{message:?}"),
                    message = x509.message() => format!("{message:?}"),
                    message = jwt.message() => format!("{message:?}"),
                }
            };
            assert!(tokio::time::timeout(quiet, more).await.is_err());
        })
        .await;
}

#[tokio::test(start_paused = true)]
async fn a_renewal_and_new_roots_are_pushed_and_equal_bytes_are_not() {
    let (agent, ca, next) = (Agent::new(), Ca::new("root"), Ca::new("next"));
    let pair = ca.issue(ID, None);
    agent.publish(&pair, &[&ca]);
    agent
        .talk(async |connection| {
            let (mut svid, mut x509) = (svids(&connection).await.unwrap(), bundles(&connection).await);
            svid.message().await.unwrap().unwrap();
            x509.message().await.unwrap().unwrap();

            agent.publish(&pair, &[&ca]);
            let renewed = ca.issue(ID, None);
            agent.publish(&renewed, &[&ca]);
            let message = svid.message().await.unwrap().unwrap();
            assert_eq!(message.svids[0].x509_svid, renewed.chain()[0].as_ref());

            agent.publish_roots(&[&ca, &next]);
            let both = TrustBundle::new(vec![ca.root(), next.root()]).unwrap().joined();
            assert_eq!(svid.message().await.unwrap().unwrap().svids[0].bundle, both);
            let message = x509.message().await.unwrap().unwrap();
            assert_eq!(message.bundles["spiffe://td"], both, "the renewal was none of its business");
            let (_, roots) = agent.source.as_ref().unwrap();
            tokio::time::timeout(Duration::from_millis(10), roots.settled())
                .await
                .expect("all streams have them");
            assert_eq!(roots.observed().verdicts().pushes, 4);
        })
        .await;
}

#[tokio::test(start_paused = true)]
async fn crls_are_sent_with_the_roots_that_they_cover() {
    let (agent, authority) = (Agent::new(), Authority::root("root"));
    let now = agent.clock.now();
    let text = authority.crl(now - Duration::from_secs(60), now + Duration::from_secs(3600), &[7]);
    let crls: Vec<_> = crl::from_pem(text.as_bytes()).unwrap().into_iter().map(Arc::new).collect();
    let ca = Ca::new("unused");
    agent.publish(&ca.issue(ID, None), &[&ca]);
    let bundle = TrustBundle::new(vec![authority.certificate.clone()]).unwrap();
    let (_, roots) = agent.source.as_ref().unwrap();
    roots.publish(Secret::TrustBundle(bundle), now, None);
    agent
        .talk(async |connection| {
            let mut x509 = bundles(&connection).await;
            assert!(x509.message().await.unwrap().unwrap().crl.is_empty());
            let covered = agent.cache.set_crls(roots.key(), &crls, now).unwrap().covered;
            if covered.is_ok() {
                let crl = crls[0].der().as_ref();
                assert_eq!(x509.message().await.unwrap().unwrap().crl, [crl]);
                assert_eq!(first(&connection).await.unwrap().crl, [crl]);
            } else {
                panic!("{covered:?}");
            }
        })
        .await;
}

#[tokio::test(start_paused = true)]
async fn a_request_without_the_header_exactly_once_is_refused() {
    let (agent, ca) = (Agent::new(), Ca::new("root"));
    agent.publish(&ca.issue(ID, None), &[&ca]);
    let cases: [(&[&str], bool); 6] = [
        (&[], false),
        (&["true"], true),
        (&["false"], false),
        (&["True"], false),
        (&["true", "true"], false),
        (&["true,true"], false),
    ];
    agent
        .talk(async |connection| {
            for (values, is_served) in cases {
                let mut request = Request::new(X509svidRequest {});
                for value in values {
                    request.metadata_mut().append("workload.spiffe.io", value.parse().unwrap());
                }
                let outcome = api(&connection).fetch_x509svid(request).await;
                let code = outcome.map(drop).map_err(|status| status.code());
                assert_eq!(code, if is_served { Ok(()) } else { Err(Code::InvalidArgument) }, "{values:?}");
            }
        })
        .await;
    assert_eq!(agent.refusals("no_spiffe_header"), 5);
}

#[tokio::test(start_paused = true)]
async fn methods_that_are_not_served_are_unimplemented() {
    let agent = Agent::new();
    agent
        .talk(async |connection| {
            for method in ["FetchJWTSVID", "ValidateJWTSVID", "FetchWITSVID", "FetchWITBundles", "Other"] {
                let mut client = tonic::client::Grpc::with_origin(connection.clone(), origin());
                client.ready().await.unwrap();
                let path = PathAndQuery::try_from(format!("/SpiffeWorkloadAPI/{method}")).unwrap();
                let codec = tonic_prost::ProstCodec::<X509svidRequest, X509svidResponse>::default();
                let status = client.unary(request(X509svidRequest {}), path, codec).await.unwrap_err();
                assert_eq!(status.code(), Code::Unimplemented, "{method}");
            }
        })
        .await;
}

#[tokio::test(start_paused = true)]
async fn a_first_call_waits_for_the_certificate_and_then_has_the_reason() {
    let (agent, ca) = (Agent::new(), Ca::new("root"));
    let (key_pair, _) = agent.source.as_ref().unwrap();
    agent
        .talk(async |connection| {
            let began = Instant::now();
            assert_eq!(first(&connection).await.unwrap_err().code(), Code::Unavailable);
            assert_eq!(began.elapsed(), Duration::from_secs(10));

            key_pair.fail("CA unreachable: connection refused".to_owned());
            let status = first(&connection).await.unwrap_err();
            assert_eq!(status.code(), Code::Unavailable);
            assert!(status.message().contains("CA unreachable: connection refused"), "{status:?}");

            let began = Instant::now();
            let mut hurried = request(X509svidRequest {});
            hurried.metadata_mut().insert("grpc-timeout", "2S".parse().unwrap());
            let answer = api(&connection).fetch_x509svid(hurried).await.unwrap().into_inner().message().await;
            assert_eq!(answer.unwrap_err().code(), Code::Unavailable);
            assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());

            let began = Instant::now();
            let publish = async {
                tokio::time::sleep(Duration::from_secs(3)).await;
                agent.publish(&ca.issue(ID, None), &[&ca]);
            };
            let (message, ()) = tokio::join!(first(&connection), publish);
            assert_eq!(message.unwrap().svids[0].spiffe_id, ID);
            assert_eq!(began.elapsed(), Duration::from_secs(3), "the moment that it is there");
        })
        .await;
}

#[tokio::test(start_paused = true)]
async fn permission_is_denied_only_where_no_identity_will_come() {
    let ca = Ca::new("root");
    let without_id = Agent::new();
    without_id.publish(&ca.issue("https://td/web", None), &[&ca]);
    for agent in [Agent::without_source(), without_id] {
        agent
            .talk(async |connection| {
                let began = Instant::now();
                let status = first(&connection).await.unwrap_err();
                assert_eq!(status.code(), Code::PermissionDenied);
                assert!(status.message().starts_with("no identity issued"), "{status:?}");
                assert_eq!(began.elapsed(), Duration::ZERO);
            })
            .await;
        assert_eq!(agent.refusals("no_identity"), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn a_stream_ends_with_unavailable_whatever_ends_it() {
    type End = fn(&Agent);
    let ends: [(&str, End); 3] = [
        ("expired at", |_| {}),
        ("the agent is stopping", |agent| agent.draining.cancel()),
        ("no longer serves this workload", |agent| {
            agent.cache.remove_workload(agent.workload);
            agent.draining.cancel();
        }),
    ];
    for (reason, end) in ends {
        let (agent, ca) = (Agent::new(), Ca::new("root"));
        agent.publish(&ca.issue(ID, Some(agent.clock.now() + Duration::from_secs(3600))), &[&ca]);
        agent
            .talk(async |connection| {
                let mut stream = svids(&connection).await.unwrap();
                stream.message().await.unwrap().unwrap();
                end(&agent);
                let status = stream.message().await.unwrap_err();
                assert_eq!(status.code(), Code::Unavailable);
                assert!(status.message().contains(reason), "{status:?}");
            })
            .await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_stream_counts_as_one_of_its_secrets_until_it_ends() {
    let (agent, ca) = (Agent::new(), Ca::new("root"));
    agent.publish(&ca.issue(ID, None), &[&ca]);
    let (key_pair, roots) = agent.source.as_ref().unwrap();
    let streams = || (key_pair.observed().streams, roots.observed().streams);
    agent
        .talk(async |connection| {
            let mut stream = svids(&connection).await.unwrap();
            stream.message().await.unwrap().unwrap();
            assert_eq!(streams(), (1, 1));
            let verdicts = key_pair.observed().verdicts().clone();
            assert_eq!((verdicts.pushes, verdicts.acknowledged().len()), (1, 1));
            let _bundles = bundles(&connection).await;
            assert_eq!(streams(), (2, 2));
            drop(stream);
            while streams() != (1, 1) {
                tokio::task::yield_now().await;
            }
        })
        .await;
}

#[tokio::test(start_paused = true)]
async fn the_health_service_says_whether_the_certificate_is_there_and_valid() {
    let (agent, ca) = (Agent::new(), Ca::new("root"));
    let asked = |service: &str| HealthCheckRequest { service: service.to_owned() };
    let status = |message: Option<HealthCheckResponse>| message.unwrap().status();
    agent
        .talk(async |connection| {
            let mut health = HealthClient::with_origin(connection, origin());
            let mut watch = health.watch(asked("SpiffeWorkloadAPI")).await.unwrap().into_inner();
            assert_eq!(status(watch.message().await.unwrap()), ServingStatus::NotServing);
            let hour = agent.clock.now() + Duration::from_secs(3600);
            agent.publish(&ca.issue(ID, Some(hour)), &[&ca]);
            assert_eq!(status(watch.message().await.unwrap()), ServingStatus::Serving);
            for service in ["", "SpiffeWorkloadAPI", "envoy.service.secret.v3.SecretDiscoveryService"] {
                let answer = health.check(asked(service)).await.unwrap().into_inner();
                assert_eq!(answer.status(), ServingStatus::Serving, "{service}");
            }
            assert_eq!(health.check(asked("other")).await.unwrap_err().code(), Code::NotFound);
            let mut unknown = health.watch(asked("other")).await.unwrap().into_inner();
            assert_eq!(status(unknown.message().await.unwrap()), ServingStatus::ServiceUnknown);
            assert_eq!(status(watch.message().await.unwrap()), ServingStatus::NotServing, "it has expired");
            assert!(agent.clock.now() >= hour);
            agent.draining.cancel();
            assert_eq!(watch.message().await.unwrap_err().code(), Code::Unavailable);
            assert_eq!(unknown.message().await.unwrap_err().code(), Code::Unavailable);
        })
        .await;
}

#[tokio::test(start_paused = true)]
async fn reflection_lists_what_is_served_and_defines_it() {
    async fn ask(client: &mut ServerReflectionClient<Connection>, ask: MessageRequest) -> MessageResponse {
        let request = ServerReflectionRequest { host: String::new(), message_request: Some(ask) };
        let answers = client.server_reflection_info(tokio_stream::iter([request])).await.unwrap();
        let mut answers: Streaming<ServerReflectionResponse> = answers.into_inner();
        let answer = answers.message().await.unwrap().unwrap();
        assert!(answers.message().await.unwrap().is_none(), "it ends when the client does");
        answer.message_response.unwrap()
    }
    let agent = Agent::new();
    agent
        .talk(async |connection| {
            let mut client = ServerReflectionClient::with_origin(connection, origin());
            let MessageResponse::ListServicesResponse(list) =
                ask(&mut client, MessageRequest::ListServices(String::new())).await
            else {
                panic!("no list")
            };
            let mut services: Vec<_> = list.service.into_iter().map(|service| service.name).collect();
            services.sort();
            let expected = [
                "SpiffeWorkloadAPI",
                "envoy.service.secret.v3.SecretDiscoveryService",
                "grpc.health.v1.Health",
                "grpc.reflection.v1.ServerReflection",
                "grpc.reflection.v1alpha.ServerReflection",
            ];
            assert_eq!(services, expected);
            let found = |answer| matches!(answer, MessageResponse::FileDescriptorResponse(_));
            for name in expected.iter().copied().chain([
                "SpiffeWorkloadAPI.FetchX509SVID",
                "X509SVIDResponse.FederatedBundlesEntry",
                "grpc.health.v1.HealthCheckResponse.ServingStatus",
                "envoy.extensions.transport_sockets.tls.v3.Secret",
            ]) {
                let ask = ask(&mut client, MessageRequest::FileContainingSymbol(name.to_owned())).await;
                assert!(found(ask), "{name}");
            }
            let file = MessageRequest::FileByFilename("spiffe/workload.proto".to_owned());
            assert!(found(ask(&mut client, file).await));
            let none =
                MessageRequest::FileContainingSymbol("istio.v1.auth.IstioCertificateService".to_owned());
            assert!(!found(ask(&mut client, none).await), "a client is no server");
        })
        .await;
}

#[test]
fn many_streams_are_sent_a_change_one_after_the_other_within_a_second() {
    let cases = [(1, 1.0, 0), (8, 1.0, 0), (9, 1.0, 10), (9, 0.5, 5), (108, 0.25, 250), (100_000, 1.0, 1000)];
    for (streams, random, expected) in cases {
        assert_eq!(splay(streams, random), Duration::from_millis(expected), "{streams}");
    }
    assert_eq!(splay(usize::MAX, 0.0), Duration::ZERO);
}
