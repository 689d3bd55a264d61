//! The service account of a cluster, and the Secret with its token.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail};
use http::{Method, StatusCode};
use serde_json::json;
use tokio::time::{Instant, sleep};
use zeroize::Zeroizing;

use crate::base::backoff::Backoff;
use crate::kube::{Api as _, Cluster, Kind, KubeError, Object, ObjectId};

/// The annotation with the account of a token.
const ACCOUNT: &str = "kubernetes.io/service-account.name";
/// How long the cluster may take to fill the Secret.
const PATIENCE: Duration = Duration::from_secs(20);
const PACE: Backoff = Backoff { base: Duration::from_millis(100), cap: Duration::from_secs(1) };

/// The Secret with the token of a service account.
pub(super) struct TokenSecret<'a> {
    namespace: &'a str,
    account: &'a str,
}

/// What it holds.
pub(super) struct AccountSecret {
    /// PEM.
    pub(super) roots: Zeroizing<Vec<u8>>,
    pub(super) token: Zeroizing<String>,
}

impl fmt::Display for TokenSecret<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name())
    }
}

impl<'a> TokenSecret<'a> {
    pub(super) fn new(namespace: &'a str, account: &'a str) -> Self {
        Self { namespace, account }
    }

    fn name(&self) -> String {
        format!("{}-istio-remote-secret-token", self.account)
    }

    pub(super) fn path(&self) -> String {
        format!("/api/v1/namespaces/{}/secrets/{}", self.namespace, self.name())
    }

    /// Reads token and roots, once the cluster has filled the Secret. It is created if it is missing.
    pub(super) async fn read(&self, cluster: &Cluster) -> anyhow::Result<AccountSecret> {
        self.check_account(cluster).await?;
        let id = ObjectId {
            kind: Kind::Secret,
            namespace: Arc::from(self.namespace),
            name: Arc::from(self.name()),
        };
        let (begun, mut polls) = (Instant::now(), 0);
        loop {
            let found = cluster.get(&id).await.with_context(|| format!("reading Secret {self} failed"))?;
            let Some(object) = found else {
                self.create(cluster).await?;
                continue;
            };
            if let Some(secret) = self.content(object)? {
                return Ok(secret);
            }
            if begun.elapsed() > PATIENCE {
                bail!(
                    "Secret {self} at {} has no token after {PATIENCE:?}: is its type \
                     kubernetes.io/service-account-token, and is kube-controller-manager running?",
                    cluster.address()
                );
            }
            polls += 1;
            sleep(PACE.delay(polls, 1.0)).await;
        }
    }

    async fn check_account(&self, cluster: &Cluster) -> anyhow::Result<()> {
        let path = format!("/api/v1/namespaces/{}/serviceaccounts/{}", self.namespace, self.account);
        match cluster.call(Method::GET, &path, None).await {
            Ok(_) => Ok(()),
            Err(KubeError::Status { status: StatusCode::NOT_FOUND, .. }) => bail!(
                "the cluster at {} has no service account {}/{}: create it with the ClusterRole attache-remote-reader in \
                 docs/multicluster.md, which has the rights that an agent needs, or name another with --service-account",
                cluster.address(),
                self.namespace,
                self.account
            ),
            Err(error) => Err(error).with_context(|| {
                format!("reading the service account {}/{} failed", self.namespace, self.account)
            }),
        }
    }

    async fn create(&self, cluster: &Cluster) -> anyhow::Result<()> {
        let secret = json!({
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": { "name": self.name(), "annotations": { ACCOUNT: self.account } },
            "type": "kubernetes.io/service-account-token",
        });
        let path = format!("/api/v1/namespaces/{}/secrets", self.namespace);
        match cluster.call(Method::POST, &path, Some(&secret)).await {
            // Another process was faster.
            Ok(_) | Err(KubeError::Status { status: StatusCode::CONFLICT, .. }) => Ok(()),
            Err(error) => Err(error).with_context(|| format!("creating Secret {self} failed")),
        }
    }

    /// None until the cluster has filled it.
    fn content(&self, mut object: Object) -> anyhow::Result<Option<AccountSecret>> {
        let account = object.annotations.get(ACCOUNT).map(|account| &**account);
        if account != Some(self.account) {
            bail!(
                "Secret {self} is for the service account {}, not {}: delete it, or name another with --service-account",
                account.unwrap_or("none"),
                self.account
            );
        }
        let (Some(token), Some(roots)) = (object.data.remove("token"), object.data.remove("ca.crt")) else {
            return Ok(None);
        };
        let token =
            std::str::from_utf8(&token).with_context(|| format!("the token in Secret {self} is not text"))?;
        let is_token = |c: char| c.is_ascii_alphanumeric() || "-._~+/=".contains(c);
        if token.is_empty() || !token.chars().all(is_token) {
            bail!("the token in Secret {self} is none");
        }
        Ok(Some(AccountSecret { roots, token: Zeroizing::new(token.to_owned()) }))
    }
}
