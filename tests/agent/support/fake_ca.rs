//! An Istio CA that can misbehave in every way, and records what it is asked.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use attache::ca::embedded::DevelopmentCa;
use attache::clock::Clock;
use attache::identity::SpiffeId;
use attache::pki::key::{KeyType, SigningKey};
use attache::pki::{csr, pem};
use attache::proto::istio::v1::auth::istio_certificate_service_server::{
    IstioCertificateService, IstioCertificateServiceServer,
};
use attache::proto::istio::v1::auth::{IstioCertificateRequest, IstioCertificateResponse};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, CertificateSigningRequestDer};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Request, Response, Status};

/// What the CA does with the next calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mood {
    Good,
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

/// One call, as it arrived.
#[derive(Clone, Debug)]
pub struct Call {
    pub metadata: tonic::metadata::MetadataMap,
    pub request: IstioCertificateRequest,
}

/// A running fake. It ends with the test's runtime.
pub struct FakeCa {
    pub address: SocketAddr,
    service: Service,
}

#[derive(Clone)]
struct Service(Arc<State>);

struct State {
    mood: Mutex<Mood>,
    calls: Mutex<Vec<Call>>,
    ca: DevelopmentCa,
    /// The same CA an hour and more ago.
    past: DevelopmentCa,
    stranger: DevelopmentCa,
    identity: SpiffeId,
}

impl FakeCa {
    /// A CA that issues `identity`, with its files in `folder`.
    pub async fn start(folder: &Path, identity: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let open = |name: &str, clock| DevelopmentCa::open(&folder.join(name), clock).unwrap();
        #[expect(clippy::disallowed_methods, reason = "an hour before the agent's own clock")]
        let past = SystemTime::now() - Duration::from_secs(2 * 3600);
        let state = State {
            mood: Mutex::new(Mood::Good),
            calls: Mutex::default(),
            ca: open("fake-ca", Clock::system()),
            past: open("fake-ca", Clock::starting_at(past)),
            stranger: open("stranger", Clock::system()),
            identity: identity.parse().unwrap(),
        };
        let service = Service(Arc::new(state));
        let server = IstioCertificateServiceServer::new(service.clone());
        tokio::spawn(async move {
            let stop = CancellationToken::new();
            let serve = |io| drop(tokio::spawn(attache::rpc::serve(io, server.clone(), stop.clone())));
            attache::rpc::accept("the fake CA", |cx| listener.poll_accept(cx), serve, &stop).await;
        });
        Self { address, service }
    }

    pub fn set(&self, mood: Mood) {
        *self.service.0.mood.lock().unwrap() = mood;
    }

    pub fn calls(&self) -> Vec<Call> {
        self.service.0.calls.lock().unwrap().clone()
    }

    /// The options with which an agent uses it, with a token in `folder`.
    pub fn client(&self, folder: &Path) -> Vec<String> {
        let token = folder.join("token");
        std::fs::write(&token, super::files::token("web", "istio-ca", 3600)).unwrap();
        let address = format!("http://{}", self.address);
        ["--ca-address", &address, "--token-file", token.to_str().unwrap()].map(str::to_owned).to_vec()
    }
}

#[tonic::async_trait]
impl IstioCertificateService for Service {
    async fn create_certificate(
        &self,
        request: Request<IstioCertificateRequest>,
    ) -> Result<Response<IstioCertificateResponse>, Status> {
        let State { ca, past, stranger, identity, .. } = &*self.0;
        let (metadata, _, request) = request.into_parts();
        self.0.calls.lock().unwrap().push(Call { metadata, request: request.clone() });
        let mood = *self.0.mood.lock().unwrap();
        let ttl = Duration::from_secs(request.validity_duration.try_into().unwrap());
        let asked = CertificateSigningRequestDer::from_pem_slice(request.csr.as_bytes()).unwrap();
        let leaf = match mood {
            Mood::Hang => std::future::pending().await,
            Mood::Refuse(code) => return Err(Status::new(code, "as the test wants it")),
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
            Mood::Good => ca.issue(&asked, identity, ttl),
        };
        let [intermediate, root] = ca.chain();
        let text = |certificate: &CertificateDer<'static>| {
            String::from_utf8(pem::of_certificates([certificate])).unwrap()
        };
        let cert_chain = vec![text(&leaf.unwrap()), text(intermediate), text(root)];
        Ok(Response::new(IstioCertificateResponse { cert_chain }))
    }
}
