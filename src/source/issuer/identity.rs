//! The workload's SPIFFE ID.

use crate::auth::client_cert::ClientCertDir;
use crate::auth::token_file::TokenFile;
use crate::base::clock::Clock;
use crate::base::spiffe_id::{ServiceAccount, SpiffeId};
use crate::fs::disk::Disk;

/// Where the workload's SPIFFE ID comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum IdentitySource {
    Fixed(SpiffeId),
    /// Only the CA knows it.
    Unknown,
    /// From the token's `sub`, or from the client certificate that is used instead. Configured parts take precedence.
    Token {
        file: TokenFile,
        client_cert: Option<ClientCertDir>,
        trust_domain: String,
        /// Instead of the credential's.
        namespace: Option<String>,
        /// Instead of the credential's.
        service_account: Option<String>,
    },
}

impl IdentitySource {
    /// The identity as far as it is known now: none without a credential, or where the credential does not contain it.
    pub async fn resolve(&self, clock: &Clock, disk: &Disk) -> Option<SpiffeId> {
        match self {
            Self::Fixed(identity) => Some(identity.clone()),
            Self::Unknown => None,
            Self::Token { file, client_cert, trust_domain, namespace, service_account } => {
                let with_configured = |domain: &str, account: Option<ServiceAccount>| {
                    let (own_namespace, own_name) = account.map(|own| (own.namespace, own.name)).unzip();
                    let account = ServiceAccount {
                        namespace: namespace.clone().or(own_namespace)?,
                        name: service_account.clone().or(own_name)?,
                    };
                    SpiffeId::for_service_account(domain, &account).ok()
                };
                let certificate = match client_cert {
                    Some(dir) => dir.read(clock, disk).await.ok(),
                    None => None,
                };
                if let Some(own) = certificate.and_then(|certificate| certificate.pair.spiffe_id()) {
                    return Some(with_configured(own.trust_domain(), own.service_account()).unwrap_or(own));
                }
                let own = file.read(disk).await.ok().and_then(|token| token.service_account());
                with_configured(trust_domain, own)
            }
        }
    }
}
