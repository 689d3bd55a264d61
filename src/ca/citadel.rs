//! Istio's CA protocol (`istio.v1.auth.IstioCertificateService`): Citadel, istiod, istio-csr, `attache ca`.

use tonic::metadata::{Ascii, MetadataKey, MetadataValue};
use tonic::{Code, Request, Status};

use super::endpoint::Endpoint;
use super::{Answer, BadAnswer, CaError, CertificateAuthority, SigningRequest};
use crate::clock::Clock;
use crate::credential::{Token, TokenFile};
use crate::limits;
use crate::pki::{csr, pem};
use crate::proto::istio::v1::auth::IstioCertificateRequest;
use crate::proto::istio::v1::auth::istio_certificate_service_client::IstioCertificateServiceClient;
use crate::rpc;

/// A header that goes with every call.
pub type Header = (MetadataKey<Ascii>, MetadataValue<Ascii>);

/// A client of Istio's CA protocol. It connects anew for each call: a renewal is hours apart from the next, and
/// token and roots may have been replaced since.
#[derive(Debug)]
pub struct Citadel {
    /// Where the CA is.
    pub endpoint: Endpoint,
    /// The workload's credential.
    pub token: TokenFile,
    /// Sent as `clusterid`; istiod refuses a cluster that it does not know.
    pub cluster_id: MetadataValue<Ascii>,
    /// Further headers.
    pub headers: Vec<Header>,
    /// For telling whether a refused token has expired.
    pub clock: Clock,
}

#[tonic::async_trait]
impl CertificateAuthority for Citadel {
    fn name(&self) -> &'static str {
        "citadel"
    }

    async fn sign(&self, request: &SigningRequest) -> Result<Answer, CaError> {
        let token = self.token.read()?;
        let message = IstioCertificateRequest {
            csr: csr::to_pem(&request.csr),
            validity_duration: i64::try_from(request.ttl.as_secs()).unwrap_or(i64::MAX),
            metadata: None,
        };
        let call = self.call(message, &token)?;
        let address = || self.endpoint.address.to_string();
        let origin = self.endpoint.address.origin().parse();
        let origin: http::Uri = origin.map_err(|_| CaError::Local(format!("{} is no URI", address())))?;
        let io = self.endpoint.connect().await?;
        let answered = rpc::with_connection(io, async |connection| {
            IstioCertificateServiceClient::with_origin(connection, origin)
                .max_decoding_message_size(limits::CA_ANSWER_BYTES)
                .create_certificate(call)
                .await
        });
        let answered = answered.await.map_err(|error| CaError::Unreachable {
            address: address(),
            source: std::io::Error::other(error),
        })?;
        let chain = answered.map_err(|status| self.refused(&status, &token))?.into_inner().cert_chain;
        let groups = chain.iter().map(|text| pem::certificates(text.as_bytes()));
        let groups = groups.collect::<Result<Vec<_>, _>>();
        let groups = groups.map_err(|error| BadAnswer::Unreadable(error.to_string()))?;
        Ok(Answer::from_groups(groups)?)
    }
}

impl Citadel {
    fn call(
        &self,
        message: IstioCertificateRequest,
        token: &Token,
    ) -> Result<Request<IstioCertificateRequest>, CaError> {
        let mut call = Request::new(message);
        let metadata = call.metadata_mut();
        for (name, value) in &self.headers {
            metadata.insert(name.clone(), value.clone());
        }
        metadata.insert("clusterid", self.cluster_id.clone());
        let mut bearer: MetadataValue<Ascii> = format!("Bearer {}", token.secret())
            .parse()
            .map_err(|_| CaError::Local("the token can't be sent in a header".to_owned()))?;
        bearer.set_sensitive(true);
        metadata.insert("authorization", bearer);
        Ok(call)
    }

    /// istiod says no more than "request authenticate failure", so the likely causes are looked up here.
    fn refused(&self, status: &Status, token: &Token) -> CaError {
        // Some servers quote the token that they refuse.
        let mut message = limits::foreign(&status.message().replace(token.secret(), "(the token)"));
        if status.code() == Code::Unauthenticated {
            let token = token.describe(self.clock.now());
            let path = self.token.path().display();
            let cluster = &self.cluster_id;
            message = format!("{message} ({token}; it is read from {path}; the cluster id is {cluster:?})");
        }
        if let Some(source) = std::error::Error::source(status) {
            message = format!("{message}: {source}");
        }
        CaError::Refused { address: self.endpoint.address.to_string(), code: status.code(), message }
    }
}
