//! The place of an API server, and the agent's credential for it.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use crate::auth::token_file::{Token, TokenFile};
use crate::net::address::Address;
use crate::net::endpoint::Endpoint;
use crate::net::tls::Roots;
use crate::secret::KeyPair;

/// The volume with the service account of a Pod, as the kubelet mounts it.
pub const SERVICE_ACCOUNT_DIR: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

/// One cluster's API server, and the credential for it.
#[derive(Clone, Debug)]
pub struct ClusterConfig {
    pub endpoint: Endpoint,
    /// The path below which the server has the API, without a slash at its end: empty, but for some proxies.
    pub path: String,
    pub credential: Credential,
}

/// Who the agent is to an API server.
#[derive(Clone)]
pub enum Credential {
    /// The API server sees an anonymous user.
    None,
    Token(Arc<Token>),
    /// A file with a token, which another process rotates.
    TokenFile(TokenFile),
    /// A client certificate with its key.
    Certificate(KeyPair),
}

/// Without the credential.
impl fmt::Debug for Credential {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("None"),
            Self::Token(_) => f.write_str("Token(hidden)"),
            Self::TokenFile(file) => f.debug_tuple("TokenFile").field(&file.path()).finish(),
            Self::Certificate(_) => f.write_str("Certificate(hidden)"),
        }
    }
}

/// This process does not run in a Pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT name no API server: the kubelet sets them in each Pod; elsewhere \
     name a kubeconfig"
)]
pub struct NotInCluster;

impl ClusterConfig {
    pub fn new(endpoint: Endpoint, credential: Credential) -> Self {
        Self { endpoint, path: String::new(), credential }
    }

    /// The API server of the cluster in which this Pod runs, and its service account, whose volume is mounted at `mount`
    /// (mostly [`SERVICE_ACCOUNT_DIR`]). Reads no file.
    pub fn in_cluster<'a>(
        variable: impl Fn(&str) -> Option<&'a str>,
        mount: &Path,
    ) -> Result<Self, NotInCluster> {
        let address = in_cluster_address(variable).ok_or(NotInCluster)?;
        let roots = Roots::File(mount.join("ca.crt"));
        let token = TokenFile::named_by("a kubeconfig", mount.join("token"));
        Ok(Self::new(Endpoint { address, roots, server_name: None }, Credential::TokenFile(token)))
    }
}

/// The API server's address as the kubelet sets it in each container.
pub fn in_cluster_address<'a>(variable: impl Fn(&str) -> Option<&'a str>) -> Option<Address> {
    let host = variable("KUBERNETES_SERVICE_HOST")?;
    let port = variable("KUBERNETES_SERVICE_PORT").unwrap_or("443");
    let host = if host.contains(':') { format!("[{host}]") } else { host.to_owned() };
    Address::with_ports(&format!("https://{host}:{port}"), 443, 80).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_finds_its_api_server_and_its_account() {
        let variables = |host: &'static str| {
            move |name: &str| match name {
                "KUBERNETES_SERVICE_HOST" => Some(host),
                "KUBERNETES_SERVICE_PORT" => Some("6443"),
                _ => None,
            }
        };
        for (host, address) in [("10.0.0.1", "https://10.0.0.1:6443"), ("fd00::1", "https://[fd00::1]:6443")]
        {
            let config = ClusterConfig::in_cluster(variables(host), Path::new("/sa")).unwrap();
            assert_eq!(config.endpoint.address.to_string(), address);
            assert_eq!(config.endpoint.roots, Roots::File("/sa/ca.crt".into()));
            assert!(
                matches!(&config.credential, Credential::TokenFile(file) if file.path() == Some(Path::new("/sa/token")))
            );
        }
        let error = ClusterConfig::in_cluster(|_| None, Path::new("/sa")).unwrap_err();
        assert!(error.to_string().contains("kubeconfig"), "{error}");
    }

    #[test]
    fn a_credential_is_not_shown() {
        let token = Credential::Token(Arc::new(Token::new("s3cr3t")));
        assert_eq!(format!("{token:?}"), "Token(hidden)");
    }
}
