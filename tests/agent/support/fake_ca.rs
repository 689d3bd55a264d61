//! An Istio CA that can misbehave in every way, and records what it is asked.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

use attache::ca::embedded::DevelopmentCa;
use attache::clock::Clock;
use attache::identity::SpiffeId;
use attache::pki::certificate::Certificate;
use attache::pki::key::{KeyType, SigningKey};
use attache::pki::{csr, pem};
use attache::proto::istio::v1::auth::istio_certificate_service_server::{
    IstioCertificateService, IstioCertificateServiceServer,
};
use attache::proto::istio::v1::auth::{IstioCertificateRequest, IstioCertificateResponse};
use rustls::RootCertStore;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, CertificateSigningRequestDer};
use rustls::server::WebPkiClientVerifier;
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Request, Response, Status};

/// What the CA does with the next calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mood {
    Good,
    /// Good, after this time.
    Slow(Duration),
    /// Takes the call and never answers.
    Hang,
    /// Text instead of certificates.
    Junk,
    /// A certificate for another key.
    ForeignKey,
    /// One that ended an hour ago.
    Expired,
    /// One of somebody else.
    OtherIdentity,
    /// One that its own root did not sign.
    Unchained,
    Refuse(Code),
}

/// What the CA wants of its clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tls {
    /// Takes a certificate of its own, or none.
    Optional,
    /// Asks for none.
    Never,
    /// Takes nobody without one.
    Required,
    /// As `Optional`, with TLS 1.2: the client hears of a refusal in the handshake.
    Old,
}

/// One call, as it arrived.
#[derive(Clone, Debug)]
pub struct Call {
    pub metadata: tonic::metadata::MetadataMap,
    pub request: IstioCertificateRequest,
    /// The certificate that the client presented.
    pub client: Option<Certificate>,
    /// From its arrival to its answer; none if it got none.
    pub time: (Instant, Option<Instant>),
}

impl Call {
    /// Whether it came with a token.
    pub fn has_token(&self) -> bool {
        self.metadata.contains_key("authorization")
    }
}

/// A running fake. It ends with the test's runtime.
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

struct State {
    mood: Mutex<Mood>,
    calls: Mutex<Vec<Call>>,
    /// Who signs, and whose roots are named.
    office: Mutex<Office>,
    ca: Arc<DevelopmentCa>,
    /// The same CA an hour and more ago.
    past: DevelopmentCa,
    stranger: DevelopmentCa,
    identity: SpiffeId,
}

#[derive(Clone)]
struct Office {
    signer: Arc<DevelopmentCa>,
    named: Vec<Arc<DevelopmentCa>>,
}

impl FakeCa {
    /// A CA without TLS that issues `identity`, with its files in `folder`.
    pub async fn start(folder: &Path, identity: &str) -> Self {
        Self::start_with(folder, identity, None).await
    }

    /// The same with TLS. Its root is `fake-ca/root-cert.pem`.
    pub async fn start_tls(folder: &Path, identity: &str, tls: Tls) -> Self {
        Self::start_with(folder, identity, Some(tls)).await
    }

    async fn start_with(folder: &Path, identity: &str, tls: Option<Tls>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let open = |name: &str, clock| DevelopmentCa::open(&folder.join(name), clock).unwrap();
        #[expect(clippy::disallowed_methods, reason = "an hour before the agent's own clock")]
        let past = SystemTime::now() - Duration::from_secs(2 * 3600);
        let ca = Arc::new(open("fake-ca", Clock::system()));
        let state = State {
            mood: Mutex::new(Mood::Good),
            calls: Mutex::default(),
            office: Mutex::new(Office { signer: Arc::clone(&ca), named: vec![Arc::clone(&ca)] }),
            ca,
            past: open("fake-ca", Clock::starting_at(past)),
            stranger: open("stranger", Clock::system()),
            identity: identity.parse().unwrap(),
        };
        let acceptor = tls.map(|tls| acceptor(&state.ca, tls));
        let service = Service { state: Arc::new(state), client: None };
        let scheme = if tls.is_some() { "https" } else { "http" };
        let state = Arc::clone(&service.state);
        tokio::spawn(async move {
            let stop = CancellationToken::new();
            let serve = |io| drop(tokio::spawn(serve(io, acceptor.clone(), Arc::clone(&state))));
            attache::rpc::accept("the fake CA", |cx| listener.poll_accept(cx), serve, &stop).await;
        });
        Self { address, scheme, service }
    }

    pub fn set(&self, mood: Mood) {
        *self.service.state.mood.lock().unwrap() = mood;
    }

    /// From now on `signer` signs, and the roots of `named` are those that the answers name.
    pub fn switch(&self, signer: &Arc<DevelopmentCa>, named: &[&Arc<DevelopmentCa>]) {
        let named = named.iter().copied().map(Arc::clone).collect();
        *self.service.state.office.lock().unwrap() = Office { signer: Arc::clone(signer), named };
    }

    pub fn calls(&self) -> Vec<Call> {
        self.service.state.calls.lock().unwrap().clone()
    }

    /// The options with which an agent uses it, with a token in `folder`.
    pub fn client(&self, folder: &Path) -> Vec<String> {
        let token = folder.join("token");
        std::fs::write(&token, super::files::token("web", "istio-ca", 3600)).unwrap();
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
    let service = |client| IstioCertificateServiceServer::new(Service { state, client });
    let stop = CancellationToken::new();
    let Some(acceptor) = acceptor else { return attache::rpc::serve(io, service(None), stop).await };
    let Ok(io) = acceptor.accept(io).await else { return };
    let client = io.get_ref().1.peer_certificates().map(|chain| Certificate::parse(&chain[0]).unwrap());
    attache::rpc::serve(io, service(client), stop).await;
}

#[tonic::async_trait]
impl IstioCertificateService for Service {
    async fn create_certificate(
        &self,
        request: Request<IstioCertificateRequest>,
    ) -> Result<Response<IstioCertificateResponse>, Status> {
        let State { ca, past, stranger, identity, .. } = &*self.state;
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
        let Office { signer, named } = self.state.office.lock().unwrap().clone();
        let ttl = Duration::from_secs(request.validity_duration.try_into().unwrap());
        let asked = CertificateSigningRequestDer::from_pem_slice(request.csr.as_bytes()).unwrap();
        let leaf = match mood {
            Mood::Hang => std::future::pending().await,
            Mood::Refuse(code) => {
                answered();
                return Err(Status::new(code, "as the test wants it"));
            }
            Mood::Junk => {
                return Ok(Response::new(IstioCertificateResponse { cert_chain: vec!["<html>".to_owned()] }));
            }
            Mood::ForeignKey => {
                let key = SigningKey::generate(KeyType::EcdsaP256).unwrap();
                ca.issue(&csr::request(&key, None).unwrap(), identity, ttl)
            }
            Mood::Expired => past.issue(&asked, identity, ttl),
            Mood::OtherIdentity => {
                ca.issue(&asked, &"spiffe://cluster.local/ns/x/sa/thief".parse().unwrap(), ttl)
            }
            Mood::Unchained => stranger.issue(&asked, identity, ttl),
            Mood::Good => signer.issue(&asked, identity, ttl),
            Mood::Slow(time) => {
                tokio::time::sleep(time).await;
                signer.issue(&asked, identity, ttl)
            }
        };
        let text = |certificates: &[&CertificateDer<'static>]| {
            String::from_utf8(pem::of_certificates(certificates.iter().copied())).unwrap()
        };
        // As an istiod whose `root-cert.pem` holds several.
        let roots: Vec<_> = named.iter().map(|ca| ca.chain()[1]).collect();
        let cert_chain = vec![text(&[&leaf.unwrap()]), text(&[signer.chain()[0]]), text(&roots)];
        answered();
        Ok(Response::new(IstioCertificateResponse { cert_chain }))
    }
}
