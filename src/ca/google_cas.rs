//! Google's Certificate Authority Service: a CA pool signs for the identity of the caller's token.
//!
//! A request has an id that is derived from its CSR. While its outcome is unknown, the same request is repeated, and the
//! service recognizes it: a lost answer does not cost a second certificate.

#[cfg(any(test, fuzzing))]
pub mod fuzz;
pub mod options;

use std::str::FromStr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use aws_lc_rs::digest::{SHA256, digest};
use http::header::AUTHORIZATION;
use rustls::pki_types::CertificateDer;
use tokio::time::Instant;
use tonic::{Code, Request, Status};

use super::{
    CaError, CertificateAuthority, ClientAuth, InvalidResponse, IssuedChain, Pending, SigningRequest,
};
use crate::auth::token::{Bearer, TokenSource};
use crate::base::limits;
use crate::base::offload;
use crate::net::Header;
use crate::net::endpoint::Endpoint;
use crate::net::grpc::{Calls, Channel, Connections};
use crate::net::rest;
use crate::pki::certificate::is_self_issued;
use crate::pki::csr::{self, Names};
use crate::pki::pem;
use crate::proto::google::cloud::security::privateca::v1 as api;
use crate::proto::google::protobuf;

type Client = api::certificate_authority_service_client::CertificateAuthorityServiceClient<Calls>;

/// The service's host.
pub const HOST: &str = "privateca.googleapis.com";

/// How long the service recognizes the id of a request: an hour, less a margin for clock differences.
const REMEMBERED: Duration = Duration::from_secs(55 * 60);
/// Attempts with one request. If the service fails because of the request, a new one is worth more than a certificate
/// that may be lost.
const TRIES: u32 = 5;

/// The full name of a CA pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CaPool(String);

impl FromStr for CaPool {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        // Like all of Google's names, it may have the service as a prefix.
        let name = text.strip_prefix("//privateca.googleapis.com/").unwrap_or(text);
        match *name.split('/').collect::<Vec<_>>() {
            ["projects", project, "locations", location, "caPools", pool]
                if [project, location, pool].into_iter().all(is_id) =>
            {
                Ok(Self(name.to_owned()))
            }
            _ => Err(format!(
                "{text:?} is not a CA pool; the shape is projects/PROJECT/locations/LOCATION/caPools/POOL"
            )),
        }
    }
}

/// The id of a CA of the pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CaId(String);

impl FromStr for CaId {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        // Google's tools print the full name.
        let id = text.rsplit_once("/certificateAuthorities/").map_or(text, |(_, id)| id);
        if is_id(id) {
            return Ok(Self(id.to_owned()));
        }
        Err(format!("{text:?} is not the id of a CA; the shape is mesh-root, or the CA's full name"))
    }
}

/// Projects of organizations have names like `example.com:project`.
fn is_id(text: &str) -> bool {
    !text.is_empty() && text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | ':'))
}

/// The pool and the CA that sign.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GoogleCasSettings {
    /// The pool that signs, and whose roots are trusted.
    pub pool: CaPool,
    /// The CA of the pool that signs; if none, the service chooses.
    pub ca: Option<CaId>,
}

/// A client of Google's Certificate Authority Service.
#[derive(Debug)]
pub struct GoogleCas {
    endpoint: Endpoint,
    settings: GoogleCasSettings,
    token: Arc<TokenSource>,
    headers: Vec<Header>,
    connections: Arc<Connections>,
    open: Mutex<Option<Open>>,
}

/// Why there is no certificate.
enum Failure {
    /// The method that failed, and its status.
    Call(&'static str, Status),
    Other(CaError),
}

impl<E: Into<CaError>> From<E> for Failure {
    fn from(error: E) -> Self {
        Self::Other(error.into())
    }
}

/// A request that the service may have granted although its answer was lost.
#[derive(Debug)]
struct Open {
    id: String,
    since: Instant,
    tries: u32,
}

#[tonic::async_trait]
impl CertificateAuthority for GoogleCas {
    fn name(&self) -> &'static str {
        "google-cas"
    }

    async fn sign(&self, request: &SigningRequest) -> Result<IssuedChain, CaError> {
        let id = request_id(&request.csr);
        self.open().take_if(|open| open.id != id);
        let address = self.endpoint.address.to_string();
        let origin = self.endpoint.address.origin().parse();
        let origin: http::Uri = origin.map_err(|_| CaError::Local(format!("{address} is no URI")))?;
        let mut bearer = self.token.token().await?;
        loop {
            let channel = self.connections.channel(&self.endpoint, None).await;
            let channel = channel
                .map_err(|error| CaError::from_transport(error, &self.endpoint, ClientAuth::Unsupported))?;
            let mut client = Client::with_origin(channel.service(), origin.clone())
                .max_decoding_message_size(limits::ANSWER_BYTES);
            let (method, status) = match self.sign_with(&mut client, request, &id, &bearer).await {
                Ok(answer) => {
                    self.connections.keep(channel);
                    return Ok(answer);
                }
                // The idle connection had been closed. The next one is new.
                Err(Failure::Call(_, status)) if channel.is_reused && channel.is_unprocessed(&status) => {
                    continue;
                }
                Err(Failure::Call(method, status)) => (method, status),
                Err(Failure::Other(error)) => return Err(error),
            };
            if status.code() == Code::Unauthenticated
                && let Some(other) = self.token.another(&bearer).await
            {
                bearer = other;
                continue;
            }
            return Err(self.failure(&channel, method, &status, &bearer));
        }
    }

    fn apart(&self) -> Option<Arc<dyn CertificateAuthority>> {
        Some(Arc::new(Self {
            endpoint: self.endpoint.clone(),
            settings: self.settings.clone(),
            token: Arc::clone(&self.token),
            headers: self.headers.clone(),
            connections: Arc::clone(&self.connections),
            open: Mutex::default(),
        }))
    }

    fn pending(&self) -> Option<Pending> {
        let is_repeatable = |open: &Open| open.tries < TRIES && open.since.elapsed() < REMEMBERED;
        self.open().as_ref().is_some_and(is_repeatable).then_some(Pending { waits_for: None })
    }

    fn remedy(&self, answer: &InvalidResponse) -> Option<&'static str> {
        match answer {
            InvalidResponse::WrongIdentity { .. } => Some(
                "Google's service takes the name from the caller, and --spiffe-id or --trust-domain set another one: \
                 correct them, or drop them to accept the caller's name",
            ),
            InvalidResponse::MissingNames { .. } => Some(
                "the pool's issuance policy must pass the subject and the alternative names of a request through",
            ),
            InvalidResponse::NoIdentity { .. } => Some(
                "is the caller an identity of a workload identity pool? No such name is documented for others",
            ),
            InvalidResponse::NoRoot => Some("the pool has no root of its own, nor a chain that ends in one"),
            _ => None,
        }
    }
}

/// The service names the caller by itself, and then ignores the names in the CSR.
fn subject_mode(names: &Names) -> api::SubjectRequestMode {
    match names.is_empty() {
        true => api::SubjectRequestMode::ReflectedSpiffe,
        false => api::SubjectRequestMode::Default,
    }
}

impl GoogleCas {
    /// `headers` go with each call.
    pub fn new(
        endpoint: Endpoint,
        settings: GoogleCasSettings,
        token: TokenSource,
        headers: Vec<Header>,
        connections: Connections,
    ) -> Self {
        let (token, connections) = (Arc::new(token), Arc::new(connections));
        Self { endpoint, settings, token, headers, connections, open: Mutex::default() }
    }

    async fn sign_with(
        &self,
        client: &mut Client,
        request: &SigningRequest,
        id: &str,
        bearer: &Bearer,
    ) -> Result<IssuedChain, Failure> {
        // First: without roots an issued certificate could not be used.
        let roots = self.roots(client, bearer).await?;
        let chain = self.create(client, request, id, bearer).await?;
        Ok(IssuedChain::read_with_others(chain, roots).await?)
    }

    /// The roots of all CAs of the pool, including those that do not sign yet, or no longer.
    async fn roots(
        &self,
        client: &mut Client,
        bearer: &Bearer,
    ) -> Result<Vec<CertificateDer<'static>>, Failure> {
        let CaPool(pool) = &self.settings.pool;
        let message = api::FetchCaCertsRequest { ca_pool: pool.clone() };
        let call = self.call(message, "ca_pool", bearer)?;
        let fetched = client.fetch_ca_certs(call).await;
        let fetched = fetched.map_err(|status| Failure::Call("FetchCaCerts", status))?.into_inner();
        let size = fetched.ca_certs.iter().flat_map(|chain| &chain.certificates).map(String::len).sum();
        Ok(offload::large(size, move || pool_roots(&fetched)).await?)
    }

    async fn create(
        &self,
        client: &mut Client,
        request: &SigningRequest,
        id: &str,
        bearer: &Bearer,
    ) -> Result<Vec<CertificateDer<'static>>, Failure> {
        let CaPool(pool) = &self.settings.pool;
        let lifetime = protobuf::Duration {
            seconds: i64::try_from(request.ttl.as_secs()).unwrap_or(i64::MAX),
            nanos: 0,
        };
        let certificate = api::Certificate {
            certificate_config: Some(api::certificate::CertificateConfig::PemCsr(csr::to_pem(&request.csr))),
            lifetime: Some(lifetime),
            subject_mode: subject_mode(&request.names).into(),
            ..api::Certificate::default()
        };
        let message = api::CreateCertificateRequest {
            parent: pool.clone(),
            // Pools of the Enterprise tier require it; others ignore it.
            certificate_id: format!("attache-{id}"),
            certificate: Some(certificate),
            request_id: id.to_owned(),
            issuing_certificate_authority_id: self.settings.ca.clone().map(|CaId(ca)| ca).unwrap_or_default(),
        };
        let call = self.call(message, "parent", bearer)?;
        let first = || Open { id: id.to_owned(), since: Instant::now(), tries: 0 };
        self.open().get_or_insert_with(first).tries += 1;
        let created = client.create_certificate(call).await;
        let code = created.as_ref().map_or_else(Status::code, |_| Code::Ok);
        self.open().take_if(|open| is_settled(code, open.tries));
        let created = created.map_err(|status| Failure::Call("CreateCertificate", status))?.into_inner();
        Ok(issued(&created)?)
    }

    /// A call whose field `field` names the pool.
    fn call<T>(&self, message: T, field: &str, bearer: &Bearer) -> Result<Request<T>, CaError> {
        let mut call = Request::new(message);
        let metadata = call.metadata_mut();
        for (name, value) in &self.headers {
            metadata.as_mut().insert(name.clone(), value.clone());
        }
        let CaPool(pool) = &self.settings.pool;
        // Google's front ends route by it.
        let routing = format!("{field}={}", rest::encoded(pool));
        let routing = routing.parse();
        let routing = routing.map_err(|_| CaError::Local("the pool can't be sent in a header".to_owned()))?;
        metadata.insert("x-goog-request-params", routing);
        metadata.as_mut().insert(AUTHORIZATION, bearer.bearer_header()?);
        Ok(call)
    }

    /// The meaning of a failed call of `method`.
    fn failure(&self, channel: &Channel, method: &str, status: &Status, bearer: &Bearer) -> CaError {
        match CaError::from_transport(channel.explain(status), &self.endpoint, ClientAuth::Unsupported) {
            CaError::Refused { address, code, retry_after, .. } => {
                let message = self.refusal(method, status, bearer);
                CaError::Refused { address, code, message, retry_after }
            }
            other => other,
        }
    }

    fn refusal(&self, method: &str, status: &Status, bearer: &Bearer) -> String {
        let CaPool(pool) = &self.settings.pool;
        let message = bearer.redact(status.message());
        let remedy = match status.code() {
            Code::Unauthenticated => format!("it does not accept the token ({})", self.token.describe(bearer)),
            Code::PermissionDenied => format!(
                "the caller needs the roles privateca.workloadCertificateRequester and privateca.poolReader on {pool}, \
                 and the project the API privateca.googleapis.com"
            ),
            Code::NotFound => format!(
                "there is no pool {pool}, or no such CA in it; are --google-cas-pool and --google-cas-ca right?"
            ),
            Code::FailedPrecondition => {
                "is a CA of the pool enabled, and does the pool allow requests with a CSR?".to_owned()
            }
            Code::InvalidArgument => {
                "does the pool's issuance policy allow the kind of key (--key-type), the lifetime (--cert-ttl) and \
                 requests with a CSR?"
                    .to_owned()
            }
            Code::ResourceExhausted => {
                "a quota of the project or the pool is exhausted: spread renewals (--grace-jitter), request longer \
                 lifetimes (--cert-ttl), or add CAs to the pool"
                    .to_owned()
            }
            Code::AlreadyExists => {
                "a certificate was issued, but the answer was lost; the next attempt makes a new request".to_owned()
            }
            _ => String::new(),
        };
        if remedy.is_empty() {
            format!("{method}: {message}")
        } else {
            format!("{method}: {message}: {remedy}")
        }
    }

    fn open(&self) -> MutexGuard<'_, Option<Open>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether a repetition of the request is pointless after `code` for the last of `tries` attempts.
fn is_settled(code: Code, tries: u32) -> bool {
    use Code::{Aborted, Cancelled, DeadlineExceeded, Internal, Unavailable, Unknown};
    match code {
        Aborted | Cancelled | DeadlineExceeded | Internal | Unavailable | Unknown => false,
        // Decided before the request is read: the outcome of earlier attempts is still unknown.
        Code::Unauthenticated | Code::PermissionDenied | Code::ResourceExhausted => tries == 1,
        _ => true,
    }
}

/// The roots in an answer of FetchCaCerts.
fn pool_roots(fetched: &api::FetchCaCertsResponse) -> Result<Vec<CertificateDer<'static>>, InvalidResponse> {
    let mut all: Vec<CertificateDer<'static>> = Vec::new();
    for text in fetched.ca_certs.iter().flat_map(|chain| &chain.certificates) {
        for der in certificates(text, "ca_certs")? {
            if !all.contains(&der) {
                all.push(der);
            }
        }
        // The signature of each one is checked.
        if all.len() > limits::CERTIFICATES {
            let max = limits::CERTIFICATES;
            return Err(InvalidResponse::Unreadable(format!("ca_certs: more than {max} certificates")));
        }
    }
    let mut roots = Vec::new();
    for der in all {
        // Each certificate comes with its intermediates; most of the pool's are not in its chain.
        if is_self_issued(&der)? {
            roots.push(der);
        }
    }
    if roots.is_empty() { Err(InvalidResponse::NoRoot) } else { Ok(roots) }
}

/// The chain in an answer of CreateCertificate.
fn issued(created: &api::Certificate) -> Result<Vec<CertificateDer<'static>>, InvalidResponse> {
    let mut chain = certificates(&created.pem_certificate, "pem_certificate")?;
    for text in &created.pem_certificate_chain {
        chain.extend(certificates(text, "pem_certificate_chain")?);
    }
    Ok(chain)
}

fn certificates(text: &str, field: &str) -> Result<Vec<CertificateDer<'static>>, InvalidResponse> {
    pem::certificates(text.as_bytes())
        .map_err(|error| InvalidResponse::Unreadable(format!("{field}: {error}")))
}

/// A UUID that is the same for the same CSR. A CSR has a fresh key, so the UUID is as unique as a random one.
fn request_id(csr: &[u8]) -> String {
    let hash = digest(&SHA256, csr);
    let bits = hash.as_ref().first_chunk().map_or(1, |bytes| u128::from_be_bytes(*bytes));
    let version_4 = bits & !(0xf << 76) | 4 << 76;
    let uuid = version_4 & !(0b11 << 62) | 0b10 << 62;
    let digits = format!("{uuid:032x}");
    let part = |from: usize, to: usize| digits.get(from..to).unwrap_or_default();
    [part(0, 8), part(8, 12), part(12, 16), part(16, 20), part(20, 32)].join("-")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_has_a_full_name() {
        let pool = "projects/p-1/locations/europe-west1/caPools/mesh";
        for text in
            [pool, &format!("//privateca.googleapis.com/{pool}"), "projects/a.b:c/locations/l/caPools/p_1"]
        {
            assert!(text.parse::<CaPool>().is_ok(), "{text}");
        }
        for text in [
            "",
            "mesh",
            "istiod:15012",
            &format!("{pool}/"),
            &format!("{pool}/x"),
            "projects//locations/l/caPools/p",
        ] {
            let error = text.parse::<CaPool>().unwrap_err();
            assert!(error.contains("the shape is projects/"), "{text}: {error}");
        }
        assert_eq!("ca-1".parse(), Ok(CaId("ca-1".to_owned())));
        assert_eq!(format!("{pool}/certificateAuthorities/ca-1").parse(), Ok(CaId("ca-1".to_owned())));
        assert!("a/b".parse::<CaId>().is_err() && "".parse::<CaId>().is_err());
    }

    #[test]
    fn the_id_of_a_request_is_a_uuid_derived_from_the_csr() {
        let id = request_id(b"csr");
        assert_eq!((request_id(b"csr"), id.len()), (id.clone(), 36));
        assert_ne!(request_id(b"other"), id);
        let parts: Vec<_> = id.split('-').collect();
        assert_eq!(parts.iter().map(|part| part.len()).collect::<Vec<_>>(), [8, 4, 4, 4, 12]);
        assert!(parts[2].starts_with('4') && "89ab".contains(&parts[3][..1]), "{id}");
    }

    #[test]
    fn only_a_request_with_an_unknown_outcome_is_repeated() {
        let cases = [
            (Code::Ok, true, true),
            (Code::NotFound, true, true),
            (Code::AlreadyExists, true, true),
            (Code::InvalidArgument, true, true),
            (Code::PermissionDenied, true, false),
            (Code::Unauthenticated, true, false),
            (Code::ResourceExhausted, true, false),
            (Code::Unavailable, false, false),
            (Code::DeadlineExceeded, false, false),
            (Code::Unknown, false, false),
        ];
        for (code, at_first, later) in cases {
            assert_eq!((is_settled(code, 1), is_settled(code, 2)), (at_first, later), "{code:?}");
        }
    }
}
