//! An Istio CA that can misbehave in every way, and records its calls.

use std::future::Future;
use std::net::SocketAddr;
use std::path::Path;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::{Duration, Instant, SystemTime};

use attache::base::clock::Clock;
use attache::base::spiffe_id::SpiffeId;
use attache::ca::embedded::DevelopmentCa;
use attache::pki::certificate::Certificate;
use attache::pki::key::{KeyType, SigningKey};
use attache::pki::{csr, pem};
use attache::proto::google::{protobuf, rpc};
use attache::proto::istio::v1::auth::istio_certificate_service_server::{
    IstioCertificateService, IstioCertificateServiceServer,
};
use attache::proto::istio::v1::auth::{IstioCertificateRequest, IstioCertificateResponse};
use prost::Message as _;
use rustls::RootCertStore;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, CertificateSigningRequestDer};
use rustls::server::WebPkiClientVerifier;
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tonic::body::Body;
use tonic::metadata::MetadataMap;
use tonic::{Code, Request, Response, Status};

use super::fake_vault::names;
use super::rough_h2::{Rough, be_rough};

/// How the CA handles the next calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mood {
    Good,
    /// Good, after this delay.
    Slow(Duration),
    /// Never answers.
    Hang,
    /// Text instead of certificates.
    Junk,
    /// A certificate for another key.
    ForeignKey,
    /// A certificate that expired an hour ago.
    Expired,
    /// A certificate that becomes valid in an hour.
    NotYetValid,
    /// A certificate with another identity.
    OtherIdentity,
    /// A certificate that its own root did not sign.
    Unchained,
    Refuse(Code),
    /// Refuses as unavailable and asks for a delay: of so many seconds in the status, of so many milliseconds as
    /// pushback.
    Busy {
        seconds: i64,
        pushback: &'static str,
    },
    /// A good certificate, written in another way.
    Shape(Shape),
    /// More than any client needs.
    Huge,
    /// Ends the next call with RST_STREAM for this reason, and is good afterwards.
    ResetOnce(h2::Reason),
    /// Not gRPC, or incomplete.
    Rough(Rough),
}

/// How the certificates of a response are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// All in one string.
    One,
    /// Several in the last string.
    TwoInTheLast,
    /// Like istiod with an intermediate: the root comes twice.
    OneTwoOne,
    /// With Windows line ends, comments, and text between the blocks.
    Decorated,
    /// Only the leaf.
    NoRoot,
    /// No string at all.
    Nothing,
    /// A truncated block.
    CutOff,
    /// More than any real CA sends.
    Many,
}

/// What the CA requires of its clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tls {
    /// Accepts a client certificate of its own, or none.
    Optional,
    /// Requests no client certificate.
    Never,
    /// Refuses clients without a certificate.
    Required,
    /// Like `Optional`, with TLS 1.2: the client sees a refusal in the handshake.
    Old,
}

/// One call, as it arrived.
#[derive(Clone, Debug)]
pub struct Call {
    pub metadata: tonic::metadata::MetadataMap,
    pub request: IstioCertificateRequest,
    /// The certificate that the client presented.
    pub client: Option<Certificate>,
    /// From its arrival to its answer, if it was answered.
    pub time: (Instant, Option<Instant>),
}

impl Call {
    /// Whether it came with a token.
    pub fn has_token(&self) -> bool {
        self.metadata.contains_key("authorization")
    }
}

/// A running fake. It stops with the test's runtime.
pub struct FakeCa {
    pub address: SocketAddr,
    scheme: &'static str,
    service: Service,
}

#[derive(Clone)]
struct Service {
    state: Arc<State>,
    client: Option<Certificate>,
}

/// Resets calls that must not reach the service.
#[derive(Clone)]
struct Resetting(IstioCertificateServiceServer<Service>, Arc<State>);

struct State {
    mood: Mutex<Mood>,
    /// Ends the open connections.
    stop: Mutex<CancellationToken>,
    connected: AtomicUsize,
    open: AtomicUsize,
    calls: Mutex<Vec<Call>>,
    /// The CA that signs, and the CAs whose roots are announced.
    issuing: Mutex<Issuing>,
    ca: Arc<DevelopmentCa>,
    /// The same CA more than an hour ago.
    past: DevelopmentCa,
    /// The same CA in an hour.
    future: DevelopmentCa,
    stranger: DevelopmentCa,
    identity: SpiffeId,
    /// Runs during the next call.
    meanwhile: Mutex<Option<Box<dyn FnOnce() + Send>>>,
}

#[derive(Clone)]
struct Issuing {
    signer: Arc<DevelopmentCa>,
    announced: Vec<Arc<DevelopmentCa>>,
}

impl FakeCa {
    /// A CA without TLS that issues `identity`, with its files in `directory`.
    pub async fn start(directory: &Path, identity: &str) -> Self {
        Self::start_with(directory, identity, None).await
    }

    /// The same with TLS. Its root is `fake-ca/root-cert.pem`.
    pub async fn start_tls(directory: &Path, identity: &str, tls: Tls) -> Self {
        Self::start_with(directory, identity, Some(tls)).await
    }

    async fn start_with(directory: &Path, identity: &str, tls: Option<Tls>) -> Self {
        Self::start_at(directory, identity, tls, "127.0.0.1:0".parse().unwrap()).await
    }

    /// The same at this address.
    pub async fn start_at(directory: &Path, identity: &str, tls: Option<Tls>, listen: SocketAddr) -> Self {
        let listener = TcpListener::bind(listen).await.unwrap();
        let address = listener.local_addr().unwrap();
        let open = |name: &str, clock| DevelopmentCa::open(&directory.join(name), clock).unwrap();
        #[expect(clippy::disallowed_methods, reason = "hours from the agent's own clock")]
        let now = SystemTime::now();
        let hour = Duration::from_secs(3600);
        let ca = Arc::new(open("fake-ca", Clock::system()));
        let state = State {
            mood: Mutex::new(Mood::Good),
            stop: Mutex::default(),
            connected: AtomicUsize::new(0),
            open: AtomicUsize::new(0),
            calls: Mutex::default(),
            issuing: Mutex::new(Issuing { signer: Arc::clone(&ca), announced: vec![Arc::clone(&ca)] }),
            ca,
            past: open("fake-ca", Clock::starting_at(now - 2 * hour)),
            future: open("fake-ca", Clock::starting_at(now + hour)),
            stranger: open("stranger", Clock::system()),
            identity: identity.parse().unwrap(),
            meanwhile: Mutex::default(),
        };
        let acceptor = tls.map(|tls| acceptor(&state.ca, tls));
        let service = Service { state: Arc::new(state), client: None };
        let scheme = if tls.is_some() { "https" } else { "http" };
        let state = Arc::clone(&service.state);
        tokio::spawn(async move {
            let stop = CancellationToken::new();
            let serve = |io| drop(tokio::spawn(serve(io, acceptor.clone(), Arc::clone(&state))));
            attache::net::http2::accept("the fake CA", |cx| listener.poll_accept(cx), serve, &stop).await;
        });
        Self { address, scheme, service }
    }

    /// Open connections would not see a rough mood, so they are ended.
    pub fn set(&self, mood: Mood) {
        *self.service.state.mood.lock().unwrap() = mood;
        if matches!(mood, Mood::Rough(_)) {
            self.end_connections();
        }
    }

    /// Ends the open connections with GOAWAY, like a server that stops.
    pub fn end_connections(&self) {
        std::mem::take(&mut *self.service.state.stop.lock().unwrap()).cancel();
    }

    /// The number of connections so far.
    pub fn connected(&self) -> usize {
        self.service.state.connected.load(Ordering::SeqCst)
    }

    /// The number of open connections.
    pub fn open(&self) -> usize {
        self.service.state.open.load(Ordering::SeqCst)
    }

    /// From now on `signer` signs, and the responses contain the roots of `announced`.
    pub fn switch(&self, signer: &Arc<DevelopmentCa>, announced: &[&Arc<DevelopmentCa>]) {
        let announced = announced.iter().copied().map(Arc::clone).collect();
        *self.service.state.issuing.lock().unwrap() = Issuing { signer: Arc::clone(signer), announced };
    }

    /// Runs `run` during the next call. Afterwards the CA is good.
    pub fn during_next_call(&self, run: impl FnOnce() + Send + 'static) {
        *self.service.state.meanwhile.lock().unwrap() = Some(Box::new(run));
    }

    pub fn calls(&self) -> Vec<Call> {
        self.service.state.calls.lock().unwrap().clone()
    }

    /// The agent's options for this CA, with a token in `directory`.
    pub fn client(&self, directory: &Path) -> Vec<String> {
        let token = directory.join("token");
        super::files::write_token(&token, &super::files::token("web", "istio-ca", 3600));
        let address = format!("{}://{}", self.scheme, self.address);
        ["--ca-address", &address, "--token-file", token.to_str().unwrap()].map(str::to_owned).to_vec()
    }
}

fn acceptor(ca: &DevelopmentCa, tls: Tls) -> TlsAcceptor {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let [_, root] = ca.chain();
    let mut roots = RootCertStore::empty();
    roots.add(root.clone()).unwrap();
    let clients = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider));
    let clients = match tls {
        Tls::Optional | Tls::Old => clients.allow_unauthenticated().build().unwrap(),
        Tls::Never => WebPkiClientVerifier::no_client_auth(),
        Tls::Required => clients.build().unwrap(),
    };
    let versions = match tls {
        Tls::Old => &[&rustls::version::TLS12][..],
        _ => rustls::ALL_VERSIONS,
    };
    let (chain, key) = ca.issue_server(&[], &[[127, 0, 0, 1].into()]).unwrap();
    let config = rustls::ServerConfig::builder_with_provider(provider).with_protocol_versions(versions);
    let config = config.unwrap().with_client_cert_verifier(clients);
    let mut config = config.with_single_cert(chain, key.der().clone_key()).unwrap();
    config.alpn_protocols = vec![b"h2".to_vec()];
    TlsAcceptor::from(Arc::new(config))
}

async fn serve(io: TcpStream, acceptor: Option<TlsAcceptor>, state: Arc<State>) {
    state.connected.fetch_add(1, Ordering::SeqCst);
    state.open.fetch_add(1, Ordering::SeqCst);
    serve_counted(io, acceptor, &state).await;
    state.open.fetch_sub(1, Ordering::SeqCst);
}

async fn serve_counted(io: TcpStream, acceptor: Option<TlsAcceptor>, state: &Arc<State>) {
    let service = |client| {
        let service = IstioCertificateServiceServer::new(Service { state: Arc::clone(state), client });
        Resetting(service, Arc::clone(state))
    };
    let stop = state.stop.lock().unwrap().clone();
    let mood = *state.mood.lock().unwrap();
    if let Mood::Rough(rough) = mood {
        return be_rough(io, rough).await;
    }
    let Some(acceptor) = acceptor else { return attache::net::http2::serve(io, service(None), stop).await };
    let Ok(io) = acceptor.accept(io).await else { return };
    let client = io.get_ref().1.peer_certificates().map(|chain| Certificate::parse(&chain[0]).unwrap());
    attache::net::http2::serve(io, service(client), stop).await;
}

impl tower_service::Service<http::Request<hyper::body::Incoming>> for Resetting {
    type Response = http::Response<Body>;
    type Error = Box<dyn std::error::Error + Send + Sync>;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<hyper::body::Incoming>) -> Self::Future {
        let mut mood = self.1.mood.lock().unwrap();
        if let Mood::ResetOnce(reason) = *mood {
            *mood = Mood::Good;
            return Box::pin(async move { Err(h2::Error::from(reason).into()) });
        }
        let answered = self.0.call(request);
        Box::pin(async move { Ok(answered.await?) })
    }
}

/// A refusal that asks for a delay.
fn busy(seconds: i64, pushback: &str) -> Status {
    let delay = protobuf::Duration { seconds, nanos: 0 };
    let info = rpc::RetryInfo { retry_delay: Some(delay) }.encode_to_vec();
    let detail =
        protobuf::Any { type_url: "type.googleapis.com/google.rpc.RetryInfo".to_owned(), value: info.into() };
    let details = rpc::Status { code: 14, message: String::new(), details: vec![detail] }.encode_to_vec();
    let mut metadata = MetadataMap::new();
    metadata.insert("grpc-retry-pushback-ms", pushback.parse().unwrap());
    Status::with_details_and_metadata(Code::Unavailable, "too many requests", details.into(), metadata)
}

impl Shape {
    fn write(self, leaf: &str, intermediate: &str, root: &str) -> Vec<String> {
        match self {
            Self::One => vec![[leaf, intermediate, root].concat()],
            Self::TwoInTheLast => vec![leaf.to_owned(), [intermediate, root].concat()],
            Self::OneTwoOne => vec![leaf.to_owned(), [intermediate, root].concat(), root.to_owned()],
            Self::Decorated => [leaf, intermediate, root]
                .map(|pem| {
                    format!(
                        "# of the CA\r\nsubject=x\r\n\r\n{}\r\nthe end {{}}<\r\n",
                        pem.replace('\n', "\r\n")
                    )
                })
                .to_vec(),
            Self::NoRoot => vec![leaf.to_owned()],
            Self::Nothing => vec![],
            Self::CutOff => vec![leaf[..leaf.len() / 2].to_owned(), root.to_owned()],
            Self::Many => vec![leaf.to_owned(), root.repeat(64)],
        }
    }
}

#[tonic::async_trait]
impl IstioCertificateService for Service {
    async fn create_certificate(
        &self,
        request: Request<IstioCertificateRequest>,
    ) -> Result<Response<IstioCertificateResponse>, Status> {
        let State { ca, past, future, stranger, identity, .. } = &*self.state;
        let (metadata, _, request) = request.into_parts();
        let call = Call {
            metadata,
            request: request.clone(),
            client: self.client.clone(),
            time: (Instant::now(), None),
        };
        let number = {
            let mut calls = self.state.calls.lock().unwrap();
            calls.push(call);
            calls.len() - 1
        };
        let answered = || self.state.calls.lock().unwrap()[number].time.1 = Some(Instant::now());
        let mood = *self.state.mood.lock().unwrap();
        let Issuing { signer, announced } = self.state.issuing.lock().unwrap().clone();
        let meanwhile = self.state.meanwhile.lock().unwrap().take();
        if let Some(run) = meanwhile {
            run();
            *self.state.mood.lock().unwrap() = Mood::Good;
        }
        let ttl = Duration::from_secs(request.validity_duration.try_into().unwrap());
        let asked = CertificateSigningRequestDer::from_pem_slice(request.csr.as_bytes()).unwrap();
        // What passes every version of istiod: an empty subject, and one URI at most.
        let (names, common_name) = names(&asked);
        assert!(names.len() <= 1 && common_name.is_none(), "{names:?}, {common_name:?}");
        let leaf = match mood {
            Mood::Hang => std::future::pending().await,
            Mood::Refuse(code) => {
                answered();
                return Err(Status::new(code, "as the test wants it"));
            }
            Mood::Busy { seconds, pushback } => return Err(busy(seconds, pushback)),
            Mood::Huge => {
                let cert_chain = vec!["x".repeat(2 << 20)];
                return Ok(Response::new(IstioCertificateResponse { cert_chain }));
            }
            Mood::Junk => {
                return Ok(Response::new(IstioCertificateResponse { cert_chain: vec!["<html>".to_owned()] }));
            }
            Mood::ForeignKey => {
                let key = SigningKey::generate(KeyType::EcdsaP256).unwrap();
                ca.issue(&csr::request(&key, None, &csr::Names::default()).unwrap(), identity, ttl)
            }
            Mood::Expired => past.issue(&asked, identity, ttl),
            Mood::NotYetValid => future.issue(&asked, identity, ttl),
            Mood::OtherIdentity => {
                ca.issue(&asked, &"spiffe://cluster.local/ns/x/sa/thief".parse().unwrap(), ttl)
            }
            Mood::Unchained => stranger.issue(&asked, identity, ttl),
            Mood::Slow(time) => {
                tokio::time::sleep(time).await;
                signer.issue(&asked, identity, ttl)
            }
            // A rough mood comes too late for a connection that is already open.
            Mood::Good | Mood::Shape(_) | Mood::ResetOnce(_) | Mood::Rough(_) => {
                signer.issue(&asked, identity, ttl)
            }
        };
        let text = |certificates: &[&CertificateDer<'static>]| {
            String::from_utf8(pem::of_certificates(certificates.iter().copied())).unwrap()
        };
        // Like an istiod whose `root-cert.pem` holds several roots.
        let roots: Vec<_> = announced.iter().map(|ca| ca.chain()[1]).collect();
        let [leaf, intermediate, roots] = [&[&leaf.unwrap()][..], &[signer.chain()[0]], &roots].map(text);
        let cert_chain = match mood {
            Mood::Shape(shape) => shape.write(&leaf, &intermediate, &roots),
            _ => vec![leaf, intermediate, roots],
        };
        answered();
        Ok(Response::new(IstioCertificateResponse { cert_chain }))
    }
}
