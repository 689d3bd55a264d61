//! Google's Certificate Authority Service as documented: every field and header is checked, requests with the same id
//! are one request, and it can misbehave.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use api::certificate::CertificateConfig;
use api::certificate_authority_service_server::{
    CertificateAuthorityService, CertificateAuthorityServiceServer,
};
use api::fetch_ca_certs_response::CertChain;
use attache::base::clock::Clock;
use attache::base::spiffe_id::SpiffeId;
use attache::ca::embedded::DevelopmentCa;
use attache::pki::pem;
use attache::proto::google::cloud::security::privateca::v1 as api;
use attache::proto::google::protobuf;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, CertificateSigningRequestDer};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tonic::metadata::MetadataMap;
use tonic::{Code, Request, Response, Status};

use super::fake_vault::names;
use super::issuer::{Issuer, Lie};
use super::tls::{accept, acceptor};
use super::violations::Violations;

pub const POOL: &str = "projects/my-project/locations/europe-west1/caPools/mesh";
/// The identity of callers with a token from the token service.
pub const CALLER: &str = "spiffe://my-project.svc.id.goog/ns/default/sa/web";

/// How the next calls for a certificate are handled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mood {
    Good,
    /// Never answers.
    Hang,
    /// Issues a certificate, and loses the answer.
    Lost,
    /// Text instead of certificates.
    Junk,
    /// Nothing instead of certificates.
    Empty,
    Lie(Lie),
    Refuse(Code),
    /// Answers after half a second.
    Slow,
}

#[derive(Clone, Copy)]
pub struct Rules {
    pub mood: Mood,
    /// The outcome of calls for the roots.
    pub roots: Result<(), Code>,
    /// The CA that requests must name.
    pub ca: &'static str,
    /// The lifetime that requests must have, in seconds.
    pub lifetime: i64,
    /// A further header that requests must have.
    pub header: Option<(&'static str, &'static str)>,
}

/// A running fake. It stops with the test's runtime.
pub struct FakeGoogleCas {
    pub address: SocketAddr,
    state: Arc<State>,
}

struct State {
    rules: Mutex<Rules>,
    /// The id of each request for a certificate.
    requests: Mutex<Vec<String>>,
    violations: Violations,
    /// By the id of the request.
    issued: Mutex<BTreeMap<String, api::Certificate>>,
    /// The valid tokens.
    tokens: Mutex<Vec<String>>,
    issuer: Issuer,
    /// A CA of the pool that does not sign yet.
    staged: DevelopmentCa,
    /// The CA of its TLS certificate.
    web: DevelopmentCa,
}

#[derive(Clone)]
struct Service(Arc<State>);

impl FakeGoogleCas {
    /// Starts it with its files in `directory`.
    pub async fn start(directory: &Path) -> Self {
        Self::start_at(directory, "127.0.0.1:0".parse().unwrap()).await
    }

    pub async fn start_at(directory: &Path, address: SocketAddr) -> Self {
        let listener = TcpListener::bind(address).await.unwrap();
        let address = listener.local_addr().unwrap();
        let open = |name: &str| DevelopmentCa::open(&directory.join(name), Clock::system()).unwrap();
        let rules = Rules { mood: Mood::Good, roots: Ok(()), ca: "", lifetime: 86_400, header: None };
        let state = Arc::new(State {
            rules: Mutex::new(rules),
            requests: Mutex::default(),
            violations: Violations::default(),
            issued: Mutex::default(),
            tokens: Mutex::default(),
            issuer: Issuer::new(directory),
            staged: open("staged"),
            web: open("web"),
        });
        let acceptor = acceptor(&state.web);
        tokio::spawn({
            let state = Arc::clone(&state);
            let serve = move |io| {
                let service = CertificateAuthorityServiceServer::new(Service(Arc::clone(&state)));
                attache::net::http2::serve(io, service, CancellationToken::new())
            };
            accept(listener, Some(acceptor), serve)
        });
        Self { address, state }
    }

    pub fn change(&self, change: impl FnOnce(&mut Rules)) {
        change(&mut self.state.rules.lock().unwrap());
    }

    pub fn set(&self, mood: Mood) {
        self.change(|rules| rules.mood = mood);
    }

    /// The ids of all requests for a certificate, in order.
    pub fn requests(&self) -> Vec<String> {
        self.state.requests.lock().unwrap().clone()
    }

    /// The number of certificates issued.
    pub fn issued(&self) -> usize {
        self.state.issued.lock().unwrap().len()
    }

    /// Accepts `token`, too.
    pub fn admit(&self, token: &str) {
        self.state.tokens.lock().unwrap().push(token.to_owned());
    }

    /// No longer accepts any token.
    pub fn revoke(&self) {
        self.state.tokens.lock().unwrap().clear();
    }

    /// The agent's options for it, without those of the token.
    pub fn client(&self, directory: &Path) -> Vec<String> {
        let address = format!("https://{}", self.address);
        let root = directory.join("web/root-cert.pem").display().to_string();
        let options = ["--ca", "google-cas", "--ca-address", &address, "--ca-root", &root];
        options.into_iter().chain(["--google-cas-pool", POOL]).map(str::to_owned).collect()
    }
}

impl Drop for FakeGoogleCas {
    fn drop(&mut self) {
        self.state.violations.assert_none("Google's API");
    }
}

impl State {
    /// Checks a call's headers against the documentation, and its token. `field` names the pool.
    fn judge(&self, metadata: &MetadataMap, field: &str) -> Result<Rules, Status> {
        let rules = *self.rules.lock().unwrap();
        let header = |name: &str| metadata.get(name).map(|value| value.to_str().unwrap());
        let routing = format!("{field}={}", POOL.replace('/', "%2F"));
        if header("x-goog-request-params") != Some(&routing) {
            return Err(self.violation(format!("headers {metadata:?}, without {routing}")));
        }
        if let Some((name, value)) = rules.header
            && header(name) != Some(value)
        {
            return Err(self.violation(format!("headers {metadata:?}, without {name}")));
        }
        let Some(token) = header("authorization").and_then(|value| value.strip_prefix("Bearer ")) else {
            return Err(self.violation("no bearer token".to_owned()));
        };
        if !self.tokens.lock().unwrap().iter().any(|good| good == token) {
            // Google's service does not quote the token; others do.
            return Err(Status::unauthenticated(format!("invalid authentication credentials: {token}")));
        }
        Ok(rules)
    }

    fn violation(&self, what: String) -> Status {
        self.violations.add(what);
        Status::invalid_argument("not as documented")
    }

    fn issue(&self, request: &api::CreateCertificateRequest, lie: Lie) -> api::Certificate {
        let certificate = request.certificate.as_ref().unwrap();
        let Some(CertificateConfig::PemCsr(csr)) = &certificate.certificate_config else { unreachable!() };
        let asked = CertificateSigningRequestDer::from_pem_slice(csr.as_bytes()).unwrap();
        let caller: SpiffeId = CALLER.parse().unwrap();
        let ttl = Duration::from_secs(certificate.lifetime.unwrap().seconds.try_into().unwrap());
        // With the default mode the names come from the CSR, otherwise from the caller.
        let leaf = match certificate.subject_mode() {
            api::SubjectRequestMode::Default => self.issuer.issue(csr, ttl, lie),
            _ => self.issuer.issue_to(&asked, &caller, ttl, lie),
        };
        api::Certificate {
            name: format!("{POOL}/certificates/{}", request.certificate_id),
            pem_certificate: text(&leaf),
            pem_certificate_chain: self.issuer.chain(lie).map(text).to_vec(),
            ..certificate.clone()
        }
    }
}

/// The mode that the names in the CSR need.
fn subject_mode(csr: Option<&CertificateConfig>) -> api::SubjectRequestMode {
    let Some(CertificateConfig::PemCsr(csr)) = csr else { return api::SubjectRequestMode::Unspecified };
    match names(&CertificateSigningRequestDer::from_pem_slice(csr.as_bytes()).unwrap()) {
        (names, None) if names.len() < 2 => api::SubjectRequestMode::ReflectedSpiffe,
        _ => api::SubjectRequestMode::Default,
    }
}

fn text(der: &CertificateDer<'static>) -> String {
    String::from_utf8(pem::of_certificates([der])).unwrap()
}

#[tonic::async_trait]
impl CertificateAuthorityService for Service {
    async fn fetch_ca_certs(
        &self,
        request: Request<api::FetchCaCertsRequest>,
    ) -> Result<Response<api::FetchCaCertsResponse>, Status> {
        let Self(state) = self;
        let rules = state.judge(request.metadata(), "ca_pool")?;
        if request.into_inner() != (api::FetchCaCertsRequest { ca_pool: POOL.to_owned() }) {
            return Err(state.violation("another pool".to_owned()));
        }
        rules.roots.map_err(|code| Status::new(code, "as the test wants it"))?;
        let chain = |certificates: [&CertificateDer<'static>; 2]| CertChain {
            certificates: certificates.map(text).to_vec(),
        };
        let ca_certs = vec![chain(state.issuer.chain(Lie::None)), chain(state.staged.chain())];
        Ok(Response::new(api::FetchCaCertsResponse { ca_certs }))
    }

    async fn create_certificate(
        &self,
        request: Request<api::CreateCertificateRequest>,
    ) -> Result<Response<api::Certificate>, Status> {
        let Self(state) = self;
        let rules = state.judge(request.metadata(), "parent")?;
        let request = request.into_inner();
        let id = request.request_id.clone();
        state.requests.lock().unwrap().push(id.clone());
        let csr = request.certificate.as_ref().and_then(|certificate| certificate.certificate_config.clone());
        let documented = api::CreateCertificateRequest {
            parent: POOL.to_owned(),
            certificate_id: format!("attache-{id}"),
            certificate: Some(api::Certificate {
                name: String::new(),
                certificate_config: csr.clone(),
                lifetime: Some(protobuf::Duration { seconds: rules.lifetime, nanos: 0 }),
                subject_mode: subject_mode(csr.as_ref()).into(),
                pem_certificate: String::new(),
                pem_certificate_chain: Vec::new(),
            }),
            request_id: id.clone(),
            issuing_certificate_authority_id: rules.ca.to_owned(),
        };
        if request != documented || csr.is_none() || !is_uuid(&id) {
            return Err(state.violation(format!("{request:?}")));
        }
        let lie = match rules.mood {
            Mood::Hang => std::future::pending().await,
            Mood::Refuse(code) => return Err(Status::new(code, "as the test wants it")),
            Mood::Lie(lie) => lie,
            _ => Lie::None,
        };
        let mut certificate = {
            let mut issued = state.issued.lock().unwrap();
            issued.entry(id).or_insert_with(|| state.issue(&request, lie)).clone()
        };
        match rules.mood {
            Mood::Lost => std::future::pending().await,
            Mood::Slow => tokio::time::sleep(Duration::from_millis(500)).await,
            Mood::Junk => certificate.pem_certificate = "<html>".to_owned(),
            Mood::Empty => certificate = api::Certificate::default(),
            _ => {}
        }
        Ok(Response::new(certificate))
    }
}

fn is_uuid(text: &str) -> bool {
    let parts: Vec<_> = text.split('-').collect();
    let lengths: Vec<_> = parts.iter().map(|part| part.len()).collect();
    let is_hex = |part: &&str| part.bytes().all(|byte| byte.is_ascii_hexdigit());
    lengths == [8, 4, 4, 4, 12] && parts.iter().all(is_hex) && parts.concat().bytes().any(|byte| byte != b'0')
}
