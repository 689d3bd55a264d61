//! Istio's CA protocol (`istio.v1.auth.IstioCertificateService`): Citadel, istiod, istio-csr, `attache ca`.

use std::sync::Mutex;

use rustls::pki_types::CertificateDer;
use tonic::metadata::{Ascii, MetadataKey, MetadataValue};
use tonic::{Code, Request, Status};

use super::{Answer, CaError, CertificateAuthority, InvalidResponse, SigningRequest};
use crate::auth::client_cert::{ClientCertFolder, ClientCertificate, NoClientCert};
use crate::auth::token::{Bearer, TokenSource};
use crate::auth::token_file::Token;
use crate::base::clock::Clock;
use crate::base::failure_log::FailureLog;
use crate::base::limits;
use crate::net::endpoint::Endpoint;
use crate::net::grpc::{Channel, Connections};
use crate::pki::{csr, pem};
use crate::proto::google::protobuf::{Struct, Value, value::Kind};
use crate::proto::istio::v1::auth::IstioCertificateRequest;
use crate::proto::istio::v1::auth::istio_certificate_service_client::IstioCertificateServiceClient;

/// Whom tokens for Istio's CA are usually for.
pub const AUDIENCE: &str = "istio-ca";

/// A header that goes with every call.
pub type Header = (MetadataKey<Ascii>, MetadataValue<Ascii>);

/// A client of Istio's CA protocol. Certificate, token and roots are read anew for each call, and it connects anew,
/// but where calls follow each other closely and nothing has been replaced.
#[derive(Debug)]
pub struct Citadel {
    /// Where the CA is.
    pub endpoint: Endpoint,
    /// Where the workload's credential comes from.
    pub token: TokenSource,
    /// Presented instead of the token, where it is good and the CA asks for it.
    pub client_cert: Option<ClientCertFolder>,
    /// What was said last of a client certificate that is not used.
    pub repeats: Mutex<FailureLog>,
    /// The client certificate that the CA refused last. Where there is a token, it is not presented again.
    pub refused: Mutex<Option<CertificateDer<'static>>>,
    /// Sent as `clusterid`; istiod refuses a cluster that it does not know.
    pub cluster_id: MetadataValue<Ascii>,
    /// Further headers.
    pub headers: Vec<Header>,
    /// Which of its signers istiod is asked to use.
    pub cert_signer: Option<String>,
    /// The connection between calls.
    pub connections: Connections,
    /// For telling whether a certificate or a refused token has expired.
    pub clock: Clock,
}

/// What a call is made with. Never both: a token is not given to a CA that can do without it.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "there is one, for the time of a call")]
enum Credential {
    Certificate(ClientCertificate),
    Token(Bearer),
}

#[tonic::async_trait]
impl CertificateAuthority for Citadel {
    fn name(&self) -> &'static str {
        "citadel"
    }

    async fn sign(&self, request: &SigningRequest) -> Result<Answer, CaError> {
        let message = IstioCertificateRequest {
            csr: csr::to_pem(&request.csr),
            validity_duration: i64::try_from(request.ttl.as_secs()).unwrap_or(i64::MAX),
            metadata: self.cert_signer.as_deref().map(metadata),
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
                .max_decoding_message_size(limits::CA_ANSWER_BYTES)
                .create_certificate(call)
                .await;
            match answered {
                Ok(answered) => break (channel, answered),
                // It had ended while it waited. The next one is new.
                Err(status) if channel.is_reused && channel.is_untouched(&status) => {}
                Err(status) => {
                    other_token = self.other_token(&status, &credential).await;
                    if other_token.is_some() {
                        continue;
                    }
                    let error = match channel.alert.explain(&address, certificate) {
                        Some(refused) => refused,
                        None => self.failed(&channel, &status, &credential),
                    };
                    return Err(self.noted(error, certificate));
                }
            }
        };
        self.connections.keep(channel);
        let chain = answered.into_inner().cert_chain;
        let groups = chain.iter().map(|text| pem::certificates(text.as_bytes()));
        let groups = groups.collect::<Result<Vec<_>, _>>();
        let groups = groups.map_err(|error| InvalidResponse::Unreadable(error.to_string()))?;
        Ok(Answer::from_groups(groups)?)
    }
}

impl Citadel {
    /// A connection, and what the call on it is made with. Without any credential nobody is called.
    async fn connect(&self) -> Result<(Channel, Credential), CaError> {
        let certificate = match &self.client_cert {
            Some(folder) => folder.read(&self.clock).await,
            None => return self.connect_with(self.token.token().await?).await,
        };
        let certificate = match certificate {
            Ok(certificate) if self.was_refused(&certificate) => {
                let why = NoClientCert::Refused { certificate: certificate.to_string() };
                match self.token_instead(why).await {
                    Ok(token) => return self.connect_with(token).await,
                    // There is nothing else to call with, and the CA may have been mended.
                    Err(_) => certificate,
                }
            }
            Ok(certificate) => certificate,
            Err(why) => return self.connect_with(self.token_instead(why).await?).await,
        };
        let channel = self.connections.channel(&self.endpoint, Some(&certificate)).await;
        let channel = channel.map_err(|error| self.noted(error, Some(&certificate)))?;
        if !channel.has_presented {
            let token = self.token_instead(NoClientCert::NotAsked).await?;
            return Ok((channel, Credential::Token(token)));
        }
        if self.repeats.lock().is_ok_and(|mut repeats| repeats.recovered()) {
            tracing::info!(%certificate, "the CA is called with the client certificate, and without the token");
        }
        Ok((channel, Credential::Certificate(certificate)))
    }

    /// What to try with at once, when the CA does not take the token.
    async fn other_token(&self, status: &Status, credential: &Credential) -> Option<Bearer> {
        match credential {
            Credential::Token(token) if status.code() == Code::Unauthenticated => {
                self.token.another(token).await
            }
            _ => None,
        }
    }

    async fn connect_with(&self, token: Bearer) -> Result<(Channel, Credential), CaError> {
        let channel = self.connections.channel(&self.endpoint, None).await;
        Ok((channel.map_err(|error| self.noted(error, None))?, Credential::Token(token)))
    }

    fn was_refused(&self, certificate: &ClientCertificate) -> bool {
        self.refused.lock().is_ok_and(|refused| refused.is_some() && refused.as_ref() == certificate.leaf())
    }

    /// Remembers from a failed call that the CA refuses what was presented. Where it does not take the token
    /// either, it gets both by turns: one of them may be good again.
    fn noted(&self, error: CaError, presented: Option<&ClientCertificate>) -> CaError {
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
                // So it is until the first certificate has come.
                NoClientCert::Missing { .. } => {
                    tracing::info!(reason, "there is no client certificate; the CA is called with the token");
                }
                _ => tracing::warn!(
                    reason,
                    "the client certificate is not used; the CA is called with the token"
                ),
            }
        }
        Ok(token)
    }

    fn call(
        &self,
        message: IstioCertificateRequest,
        credential: &Credential,
    ) -> Result<Request<IstioCertificateRequest>, CaError> {
        let mut call = Request::new(message);
        let metadata = call.metadata_mut();
        for (name, value) in &self.headers {
            metadata.insert(name.clone(), value.clone());
        }
        metadata.insert("clusterid", self.cluster_id.clone());
        if let Credential::Token(token) = credential {
            metadata.insert("authorization", token.header()?);
        }
        Ok(call)
    }

    /// What the failure of a call means. istiod says no more than "request authenticate failure", so the likely causes
    /// are looked up here.
    fn failed(&self, channel: &Channel, status: &Status, credential: &Credential) -> CaError {
        match (channel.explain(&self.endpoint, status), credential) {
            (CaError::Refused { address, code, retry_after, .. }, _) => {
                let message = self.refusal(status, credential);
                CaError::Refused { address, code, message, retry_after }
            }
            // Some servers just close the connection.
            (CaError::Broken { address, source }, Credential::Certificate(certificate)) => {
                let words = format!("{source}; perhaps the CA refuses the client certificate {certificate}");
                CaError::Broken { address, source: std::io::Error::other(words) }
            }
            (error, _) => error,
        }
    }

    fn refusal(&self, status: &Status, credential: &Credential) -> String {
        let message = match credential {
            // Some servers quote the token that they refuse.
            Credential::Token(token) => token.hidden_in(status.message()),
            Credential::Certificate(_) => limits::sanitize_for_log(status.message()),
        };
        if status.code() != Code::Unauthenticated {
            return message;
        }
        let cluster = &self.cluster_id;
        let with = match credential {
            Credential::Token(token) => format!("{}{}", self.token.describe(token), audience_hint(token)),
            Credential::Certificate(certificate) => {
                format!("it was called with the client certificate {certificate}, and without the token")
            }
        };
        format!("{message} ({with}; the cluster id is {cluster:?})")
    }
}

/// As Istio's agent names a signer.
fn metadata(cert_signer: &str) -> Struct {
    let signer = Value { kind: Some(Kind::StringValue(cert_signer.to_owned())) };
    Struct { fields: [("CertSigner".to_owned(), signer)].into() }
}

/// What Istio's CA wants, where the token is for somebody else.
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
