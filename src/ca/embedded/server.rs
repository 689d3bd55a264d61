//! The development CA as a server of Istio's CA protocol, for trying everything without Istio.
//!
//! It trusts the claims of a token without verifying its signature, and client certificates that it issued itself. It
//! refuses what istiod refuses.

use std::sync::Arc;
use std::time::Duration;

use rustls::pki_types::CertificateSigningRequestDer;
use rustls::pki_types::pem::PemObject;
use tokio::sync::watch;
use tonic::{Request, Response, Status};

use super::{DevelopmentCa, IssueError};
use crate::auth::token_file::Token;
use crate::base::clock::Clock;
use crate::base::spiffe_id::SpiffeId;
use crate::pki::certificate::Certificate;
use crate::pki::pem;
use crate::proto::istio::v1::auth::istio_certificate_service_server::IstioCertificateService;
use crate::proto::istio::v1::auth::{IstioCertificateRequest, IstioCertificateResponse};

/// The message for a refused token: istiod's.
const NOT_AUTHENTICATED: &str = "request authenticate failure";
/// The audience that istiod requires.
pub const AUDIENCE: &str = "istio-ca";
/// The TTL for requests with zero or less.
const DEFAULT_TTL: Duration = Duration::from_secs(24 * 3600);

/// Serves certificates of one development CA to the callers of one connection.
#[derive(Clone, Debug)]
pub struct CaServer {
    settings: Arc<CaServerSettings>,
    /// The client certificate of the connection, verified by TLS.
    caller: Option<Arc<Certificate>>,
}

#[derive(Debug)]
pub struct CaServerSettings {
    /// The CA that signs now.
    pub ca: watch::Receiver<Arc<DevelopmentCa>>,
    /// The identity of all callers; if none, that of the client certificate or the token's `sub`.
    pub identity: Option<SpiffeId>,
    /// The trust domain of identities from tokens.
    pub trust_domain: String,
    /// The only cluster id that is accepted; callers need not send one.
    pub cluster_id: String,
    /// Requests for longer lifetimes are refused.
    pub max_ttl: Duration,
    /// Decides whether tokens have expired.
    pub clock: Clock,
}

impl CaServer {
    pub fn new(settings: CaServerSettings) -> Self {
        Self { settings: Arc::new(settings), caller: None }
    }

    /// The same server for a connection whose client has proved possession of `certificate`.
    pub fn for_caller(&self, certificate: Certificate) -> Self {
        Self { caller: Some(Arc::new(certificate)), ..self.clone() }
    }
}

impl CaServerSettings {
    fn identify(
        &self,
        caller: Option<&Certificate>,
        request: &Request<IstioCertificateRequest>,
    ) -> Result<SpiffeId, Status> {
        let refuse = |why: &str| {
            tracing::warn!(why, "caller not authenticated");
            Status::unauthenticated(NOT_AUTHENTICATED)
        };
        // Before the token, like istiod: a proof counts more than a claim.
        if let Some((caller, own)) = caller.and_then(|caller| Some((caller, caller.spiffe_id()?))) {
            // A connection may outlive its client certificate.
            if caller.not_after <= self.clock.now() {
                return Err(refuse("the client certificate has expired"));
            }
            return Ok(self.identity.clone().unwrap_or(own));
        }
        let header = |name| request.metadata().get(name).and_then(|value| value.to_str().ok());
        let bearer = header("authorization").and_then(|value| value.strip_prefix("Bearer "));
        let token = Token::new(bearer.ok_or_else(|| {
            refuse(match caller {
                Some(_) => "the client certificate has no SPIFFE ID, and there is no bearer token",
                None => "there is no bearer token",
            })
        })?);
        if header("clusterid").is_some_and(|id| id != self.cluster_id) {
            return Err(refuse("another cluster id"));
        }
        if let Some(identity) = &self.identity {
            return Ok(identity.clone());
        }
        let claims = token
            .claims()
            .ok_or_else(|| refuse("the token is not a JWT; --spiffe-id makes one unnecessary"))?;
        if claims.expires.is_some_and(|at| at <= self.clock.now()) {
            return Err(refuse("the token has expired"));
        }
        if !claims.audiences.iter().any(|audience| audience == AUDIENCE) {
            return Err(refuse("the token's audience is not istio-ca"));
        }
        let account = token.service_account();
        let account = account
            .ok_or_else(|| refuse("the token's sub is not system:serviceaccount:NAMESPACE:ACCOUNT"))?;
        SpiffeId::for_service_account(&self.trust_domain, &account)
            .map_err(|error| refuse(&error.to_string()))
    }
}

/// A TTL that is refused: both times in one unit, the remedy in the units of options.
fn too_long(ttl: Duration, max: Duration) -> String {
    let (largest, name) = [(3600, "h"), (60, "m")]
        .into_iter()
        .find(|(unit, _)| [ttl, max].iter().all(|time| time.as_secs().is_multiple_of(*unit)))
        .unwrap_or((1, "s"));
    let show = |time: Duration| format!("{}{name}", time.as_secs() / largest);
    format!(
        "a TTL of {} is over the maximum of {}; request less (attache run --cert-ttl {}), or raise the CA's --max-ttl",
        show(ttl),
        show(max),
        show(max)
    )
}

#[tonic::async_trait]
impl IstioCertificateService for CaServer {
    async fn create_certificate(
        &self,
        request: Request<IstioCertificateRequest>,
    ) -> Result<Response<IstioCertificateResponse>, Status> {
        let Self { settings, caller } = self;
        let identity = settings.identify(caller.as_deref(), &request)?;
        let request = request.into_inner();
        let csr = CertificateSigningRequestDer::from_pem_slice(request.csr.as_bytes())
            .map_err(|_| Status::invalid_argument("the CSR is not PEM"))?;
        let ttl = match u64::try_from(request.validity_duration) {
            Ok(seconds @ 1..) => Duration::from_secs(seconds),
            _ => DEFAULT_TTL.min(settings.max_ttl),
        };
        if ttl > settings.max_ttl {
            return Err(Status::invalid_argument(too_long(ttl, settings.max_ttl)));
        }
        let ca = Arc::clone(&settings.ca.borrow());
        let leaf = ca.issue(&csr, &identity, ttl).map_err(|error| match error {
            IssueError::Expired { .. } => {
                tracing::error!(%error, "certificate not issued");
                Status::internal(error.to_string())
            }
            IssueError::Refused(error) => {
                Status::invalid_argument(format!("the CSR is not accepted: {error}"))
            }
        })?;
        tracing::info!(%identity, ttl_s = ttl.as_secs(), "certificate issued");
        // Like an istiod with a plugged-in intermediate: the leaf, cert-chain.pem, root-cert.pem.
        let text =
            |certificates: &[_]| String::from_utf8_lossy(&pem::of_certificates(certificates)).into_owned();
        let [_, root] = ca.chain();
        let mut cert_chain = vec![text(&[leaf])];
        if !ca.intermediates().is_empty() {
            cert_chain.push(text(&[ca.intermediates(), std::slice::from_ref(root)].concat()));
        }
        cert_chain.push(text(ca.roots()));
        Ok(Response::new(IstioCertificateResponse { cert_chain }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refused_ttl_and_the_maximum_have_one_unit() {
        let seconds = Duration::from_secs;
        for (ttl, max, words) in [
            (
                48 * 3600,
                24 * 3600,
                "a TTL of 48h is over the maximum of 24h; request less (attache run --cert-ttl 24h)",
            ),
            (90 * 60, 3600, "a TTL of 90m is over the maximum of 60m;"),
            (86_401, 86_400, "a TTL of 86401s is over the maximum of 86400s;"),
        ] {
            let error = too_long(seconds(ttl), seconds(max));
            assert!(error.starts_with(words), "{error}");
        }
    }
}
