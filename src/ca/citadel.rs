//! Istio's CA protocol (`istio.v1.auth.IstioCertificateService`): Citadel, istiod, istio-csr, `attache ca`.

#[cfg(any(test, fuzzing))]
pub mod fuzz;
pub mod options;

use std::sync::Mutex;

use http::header::AUTHORIZATION;
use rustls::pki_types::CertificateDer;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::{Code, Request, Status};

use super::{CaError, CertificateAuthority, ClientAuth, InvalidResponse, IssuedChain, SigningRequest};
use crate::auth::client_cert::{ClientCertDir, ClientCertificate, NoClientCert};
use crate::auth::token::{Bearer, TokenSource};
use crate::auth::token_file::Token;
use crate::base::clock::Clock;
use crate::base::failure_log::FailureLog;
use crate::base::limits;
use crate::base::offload;
use crate::base::text;
use crate::fs::disk::Disk;
use crate::net::Header;
use crate::net::address::Address;
use crate::net::endpoint::Endpoint;
use crate::net::grpc::{Channel, Connections};
use crate::pki::{csr, pem};
use crate::proto::google::protobuf::{Struct, Value, value::Kind};
use crate::proto::istio::v1::auth::istio_certificate_service_client::IstioCertificateServiceClient;
use crate::proto::istio::v1::auth::{IstioCertificateRequest, IstioCertificateResponse};

/// The usual audience of tokens for Istio's CA.
pub const AUDIENCE: &str = "istio-ca";

const TLS_PORT: u16 = 15012;
const PLAINTEXT_PORT: u16 = 15010;

/// Parses the address of a CA. Without a scheme it is TLS, except on Istio's plaintext port.
pub fn address(text: &str) -> Result<Address, String> {
    let mut address = Address::with_ports(text, TLS_PORT, PLAINTEXT_PORT)?;
    address.plaintext |= address.port() == PLAINTEXT_PORT && !text.contains("://");
    Ok(address)
}

/// A client of Istio's CA protocol. Certificate, token and roots are read for each call. Each call has a new connection,
/// unless calls follow each other closely and none of these files has changed.
#[derive(Debug)]
pub struct Citadel {
    pub endpoint: Endpoint,
    pub token: TokenSource,
    /// Presented instead of the token, if it is valid and the CA asks for one.
    pub client_cert: Option<ClientCertDir>,
    /// Logs each reason once why the client certificate is not used.
    pub repeats: Mutex<FailureLog>,
    /// The client certificate that the CA refused last. If there is a token, it is not presented again.
    pub refused: Mutex<Option<CertificateDer<'static>>>,
    /// Sent as `clusterid`; istiod refuses unknown clusters.
    pub cluster_id: MetadataValue<Ascii>,
    /// Additional headers.
    pub headers: Vec<Header>,
    /// The signer that istiod should use.
    pub cert_signer: Option<String>,
    /// Whether the agent's own credential requests certificates for other workloads of its node.
    pub impersonates: bool,
    pub connections: Connections,
    /// Decides whether a certificate or a refused token has expired.
    pub clock: Clock,
    pub disk: Disk,
}

/// The credential of a call. Never both: a CA that accepts the certificate does not get the token.
#[derive(Debug)]
enum Credential {
    Certificate(ClientCertificate),
    Token(Bearer),
}

#[tonic::async_trait]
impl CertificateAuthority for Citadel {
    fn name(&self) -> &'static str {
        "citadel"
    }

    async fn sign(&self, request: &SigningRequest) -> Result<IssuedChain, CaError> {
        let message = IstioCertificateRequest {
            csr: csr::to_pem(&request.csr),
            validity_duration: i64::try_from(request.ttl.as_secs()).unwrap_or(i64::MAX),
            metadata: self.metadata(request)?,
        };
        let address = self.endpoint.address.to_string();
        let origin = self.endpoint.address.origin().parse();
        let origin: http::Uri = origin.map_err(|_| CaError::Local(format!("{address} is no URI")))?;
        let mut other_token = None;
        let (channel, answered) = loop {
            let (channel, credential) = match other_token.take() {
                Some(token) => self.connect_with(token).await?,
                None => self.connect().await?,
            };
            let certificate = credential.certificate();
            let call = self.call(message.clone(), &credential)?;
            let answered = IstioCertificateServiceClient::with_origin(channel.service(), origin.clone())
                .max_decoding_message_size(limits::ANSWER_BYTES)
                .create_certificate(call)
                .await;
            match answered {
                Ok(answered) => break (channel, answered),
                // The idle connection had been closed. The next one is new.
                Err(status) if channel.is_reused && channel.is_unprocessed(&status) => {}
                Err(status) => {
                    other_token = self.other_token(&status, &credential).await;
                    if other_token.is_some() {
                        continue;
                    }
                    let error = self.failure(&channel, &status, &credential);
                    return Err(self.remember_refusal(error, certificate));
                }
            }
        };
        self.connections.keep(channel);
        let answer = answered.into_inner();
        let size = answer.cert_chain.iter().map(String::len).sum();
        Ok(offload::large(size, move || issued(&answer)).await?)
    }
}

impl Citadel {
    /// A connection and the credential for the call on it. Without a credential there is no call.
    async fn connect(&self) -> Result<(Channel, Credential), CaError> {
        let certificate = match &self.client_cert {
            Some(directory) => directory.read(&self.clock, &self.disk).await,
            None => return self.connect_with(self.token.token().await?).await,
        };
        let certificate = match certificate {
            Ok(certificate) if self.was_refused(&certificate) => {
                let why = NoClientCert::Refused { certificate: certificate.to_string() };
                match self.token_instead(why).await {
                    Ok(token) => return self.connect_with(token).await,
                    // There is no other credential, and the CA may accept this one by now.
                    Err(_) => certificate,
                }
            }
            Ok(certificate) => certificate,
            Err(why) => return self.connect_with(self.token_instead(why).await?).await,
        };
        let channel = self.channel(Some(&certificate)).await?;
        if !channel.has_presented {
            let token = self.token_instead(NoClientCert::NotAsked).await?;
            return Ok((channel, Credential::Token(token)));
        }
        if self.repeats.lock().is_ok_and(|mut repeats| repeats.recovered()) {
            tracing::info!(%certificate, "client certificate used, without the token");
        }
        Ok((channel, Credential::Certificate(certificate)))
    }

    /// The token for an immediate retry when the CA refuses the token.
    async fn other_token(&self, status: &Status, credential: &Credential) -> Option<Bearer> {
        match credential {
            Credential::Token(token) if status.code() == Code::Unauthenticated => {
                self.token.another(token).await
            }
            _ => None,
        }
    }

    async fn connect_with(&self, token: Bearer) -> Result<(Channel, Credential), CaError> {
        Ok((self.channel(None).await?, Credential::Token(token)))
    }

    async fn channel(&self, certificate: Option<&ClientCertificate>) -> Result<Channel, CaError> {
        let pair = certificate.map(|certificate| &certificate.pair);
        let channel = self.connections.channel(&self.endpoint, pair).await;
        let client = ClientAuth::Certificate(certificate);
        channel.map_err(|error| {
            self.remember_refusal(CaError::from_transport(error, &self.endpoint, client), certificate)
        })
    }

    fn was_refused(&self, certificate: &ClientCertificate) -> bool {
        self.refused.lock().is_ok_and(|refused| refused.is_some() && refused.as_ref() == certificate.leaf())
    }

    /// Remembers from a failed call that the CA refuses the client certificate. If it refuses the token too, the two
    /// alternate: either may become valid again.
    fn remember_refusal(&self, error: CaError, presented: Option<&ClientCertificate>) -> CaError {
        let refused = match (&error, presented) {
            (CaError::ClientCertificate { .. }, Some(certificate)) => certificate.leaf().cloned(),
            (CaError::Tls { .. }, None) => None,
            (CaError::Refused { code: Code::Unauthenticated | Code::PermissionDenied, .. }, None) => None,
            _ => return error,
        };
        if let Ok(mut known) = self.refused.lock() {
            *known = refused;
        }
        error
    }

    async fn token_instead(&self, why: NoClientCert) -> Result<Bearer, CaError> {
        let token = match self.token.token().await {
            Ok(token) => token,
            Err(token) => return Err(CaError::NoCredential { certificate: Box::new(why), token }),
        };
        let reason = why.to_string();
        if self.repeats.lock().is_ok_and(|mut repeats| repeats.is_new(&reason)) {
            match why {
                // Normal until the first certificate is written.
                NoClientCert::Missing { .. } => {
                    tracing::info!(reason, "no client certificate, token used instead");
                }
                _ => tracing::warn!(reason, "client certificate not used, token used instead"),
            }
        }
        Ok(token)
    }

    /// The signer and the workload, in the format of Istio's agents; none where the CA needs neither.
    fn metadata(&self, request: &SigningRequest) -> Result<Option<Struct>, CaError> {
        let identity = request.identity.as_ref().filter(|_| self.impersonates);
        if self.impersonates && identity.is_none() {
            return Err(CaError::Local(
                "the workload's identity is not known, and can't be requested".to_owned(),
            ));
        }
        let identity = identity.map(|identity| ("ImpersonatedIdentity", identity.to_string()));
        let signer = self.cert_signer.clone().map(|signer| ("CertSigner", signer));
        let value = |text| Value { kind: Some(Kind::StringValue(text)) };
        let fields: std::collections::BTreeMap<_, _> =
            identity.into_iter().chain(signer).map(|(name, text)| (name.to_owned(), value(text))).collect();
        Ok((!fields.is_empty()).then(|| Struct { fields: fields.into_iter().collect() }))
    }

    fn call(
        &self,
        message: IstioCertificateRequest,
        credential: &Credential,
    ) -> Result<Request<IstioCertificateRequest>, CaError> {
        let mut call = Request::new(message);
        let metadata = call.metadata_mut();
        for (name, value) in &self.headers {
            metadata.as_mut().insert(name.clone(), value.clone());
        }
        metadata.insert("clusterid", self.cluster_id.clone());
        if let Credential::Token(token) = credential {
            metadata.as_mut().insert(AUTHORIZATION, token.bearer_header()?);
        }
        Ok(call)
    }

    /// The meaning of a failed call. istiod says no more than "request authenticate failure", so the likely causes are
    /// added here.
    fn failure(&self, channel: &Channel, status: &Status, credential: &Credential) -> CaError {
        let client = ClientAuth::Certificate(credential.certificate());
        let error = CaError::from_transport(channel.explain(status), &self.endpoint, client);
        match (error, credential) {
            (CaError::Refused { address, code, retry_after, .. }, _) => {
                let message = self.refusal(status, credential);
                CaError::Refused { address, code, message, retry_after }
            }
            // Some servers only close the connection.
            (CaError::Broken { address, source }, Credential::Certificate(certificate)) => {
                let reason = format!("{source}; perhaps the CA refuses the client certificate {certificate}");
                CaError::Broken { address, source: std::io::Error::other(reason) }
            }
            (error, _) => error,
        }
    }

    fn refusal(&self, status: &Status, credential: &Credential) -> String {
        let message = match credential {
            Credential::Token(token) => token.redact(status.message()),
            Credential::Certificate(_) => text::sanitize_for_log(status.message()),
        };
        if status.code() != Code::Unauthenticated {
            return message;
        }
        if self.impersonates && message.contains("impersonation") {
            return format!(
                "{message} (it issues certificates for other workloads only to the accounts in istiod's \
                 CA_TRUSTED_NODE_ACCOUNTS, and only for Pods of the agent's own node; a new Pod it may not have heard of yet)"
            );
        }
        let cluster = &self.cluster_id;
        let with = match credential {
            Credential::Token(token) => format!("{}{}", self.token.describe(token), audience_hint(token)),
            Credential::Certificate(certificate) => {
                format!("the call used the client certificate {certificate}, without the token")
            }
        };
        format!("{message} ({with}; the cluster id is {cluster:?})")
    }
}

/// The chain in an answer.
fn issued(answer: &IstioCertificateResponse) -> Result<IssuedChain, InvalidResponse> {
    let groups = answer.cert_chain.iter().map(|text| pem::certificates(text.as_bytes()));
    let groups = groups.collect::<Result<Vec<_>, _>>();
    IssuedChain::from_groups(groups.map_err(|error| InvalidResponse::Unreadable(error.to_string()))?)
}

/// A hint where the token is for another audience than Istio's CA.
pub fn audience_hint(token: &Token) -> &'static str {
    match token.claims() {
        Some(claims) if !claims.audiences.iter().any(|audience| audience == AUDIENCE) => {
            "; istiod usually wants a token for the audience istio-ca"
        }
        _ => "",
    }
}

impl Credential {
    fn certificate(&self) -> Option<&ClientCertificate> {
        match self {
            Self::Certificate(certificate) => Some(certificate),
            Self::Token(_) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_has_istios_ports_and_the_plaintext_port_needs_no_scheme() {
        let cases = [
            ("istiod.istio-system.svc:15012", "https://istiod.istio-system.svc:15012"),
            ("istiod:15010", "http://istiod:15010"),
            ("https://istiod:15010", "https://istiod:15010"),
            ("https://ca.example", "https://ca.example:15012"),
            ("http://127.0.0.1", "http://127.0.0.1:15010"),
        ];
        for (text, expected) in cases {
            assert_eq!(address(text).unwrap().origin(), expected, "{text}");
        }
    }
}
