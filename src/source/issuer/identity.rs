//! Who the workload is.

use crate::auth::client_cert::ClientCertFolder;
use crate::auth::token_file::TokenFile;
use crate::base::clock::Clock;
use crate::base::spiffe_id::{ServiceAccount, SpiffeId};

/// How the workload's SPIFFE ID is found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum IdentitySource {
    /// It was configured.
    Fixed(SpiffeId),
    /// Only the CA knows it.
    Unknown,
    /// It follows from the token's `sub`, or from the client certificate that is used instead, less what was configured.
    Token {
        /// The token.
        file: TokenFile,
        /// The client certificate.
        client_cert: Option<ClientCertFolder>,
        /// The trust domain.
        trust_domain: String,
        /// Instead of the token's.
        namespace: Option<String>,
        /// Instead of the token's.
        service_account: Option<String>,
    },
}

impl IdentitySource {
    /// The identity as far as it is known now: none without a credential, or where it does not tell.
    pub async fn resolve(&self, clock: &Clock) -> Option<SpiffeId> {
        match self {
            Self::Fixed(identity) => Some(identity.clone()),
            Self::Unknown => None,
            Self::Token { file, client_cert, trust_domain, namespace, service_account } => {
                let with_configured = |domain: &str, told: Option<ServiceAccount>| {
                    let (told_namespace, told_name) = told.map(|told| (told.namespace, told.name)).unzip();
                    let account = ServiceAccount {
                        namespace: namespace.clone().or(told_namespace)?,
                        name: service_account.clone().or(told_name)?,
                    };
                    SpiffeId::for_service_account(domain, &account).ok()
                };
                let certificate = match client_cert {
                    Some(folder) => folder.read(clock).await.ok(),
                    None => None,
                };
                if let Some(own) = certificate.and_then(|certificate| certificate.pair.spiffe_id()) {
                    return Some(with_configured(own.trust_domain(), own.service_account()).unwrap_or(own));
                }
                let told = file.read().ok().and_then(|token| token.service_account());
                with_configured(trust_domain, told)
            }
        }
    }
}
