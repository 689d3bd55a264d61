//! Connects to the agent's own cluster, and starts what reads Secrets of Kubernetes.

use std::path::Path;
use std::sync::Arc;

use anyhow::Context as _;

use super::workloads::Shared;
use crate::config::KubernetesConfig;
use crate::config::kubernetes::{ApiServer, CLUSTERS_ALLOW};
use crate::fs::disk::Disk;
use crate::kube;
use crate::kube::ClusterConfig;
use crate::kube::config::SERVICE_ACCOUNT_DIR;
use crate::kube::kubeconfig::Kubeconfig;
use crate::source::kubernetes::cluster::Cluster;
use crate::source::kubernetes::kept::Keeper;
use crate::source::kubernetes::remote::{RemoteClusters, RemoteSettings};
use crate::source::kubernetes::{Clusters, KubernetesSettings};

/// What workloads need to serve Secrets of Kubernetes.
#[derive(Clone, Debug)]
pub struct KubernetesPlan {
    pub clusters: Clusters,
    pub settings: KubernetesSettings,
}

/// Makes the client of the agent's own cluster, and what finds remote ones. Nothing is called yet. Fails where a kubeconfig
/// is not usable.
pub(super) async fn start(
    config: KubernetesConfig,
    keeper: Option<Keeper>,
    shared: &Shared,
) -> anyhow::Result<(KubernetesPlan, Option<RemoteClusters>)> {
    let KubernetesConfig { api_server, cluster, mut settings, remote, .. } = config;
    let (connection, namespace) = connection(api_server, &shared.disk).await?;
    settings.namespace = settings.namespace.or(namespace);
    let client = kube::cluster::Cluster::new(connection, shared.disk.clone(), shared.clock.clone());
    let local = Cluster::new(cluster, Arc::new(client), keeper, shared.clock.clone());
    let clusters = Clusters::new(local);
    let has_remote = remote.namespace.is_some() || remote.directory.is_some();
    let remote = has_remote.then(|| {
        let settings = RemoteSettings {
            namespace: remote.namespace,
            directory: remote.directory,
            allows: remote.allows,
            option: CLUSTERS_ALLOW,
        };
        RemoteClusters::new(settings, clusters.clone(), shared.disk.clone(), shared.clock.clone())
    });
    Ok((KubernetesPlan { clusters, settings }, remote))
}

/// The API server, and the namespace of the account that calls it.
pub async fn connection(
    api_server: ApiServer,
    disk: &Disk,
) -> anyhow::Result<(ClusterConfig, Option<Arc<str>>)> {
    const NAMESPACE_BYTES: u64 = 256;
    match api_server {
        ApiServer::InCluster(config) => {
            let path = Path::new(SERVICE_ACCOUNT_DIR).join("namespace");
            // Without it, names need their namespace.
            let text = disk.at_the_edges().read(&path, NAMESPACE_BYTES).await.ok().and_then(Result::ok);
            let text = text.and_then(|text| String::from_utf8(text.to_vec()).ok());
            let namespace = text.map(|text| text.trim().into()).filter(|text: &Arc<str>| !text.is_empty());
            Ok((*config, namespace))
        }
        ApiServer::Kubeconfig { path, context } => {
            let read = Kubeconfig::read(&path, context.as_deref(), disk).await;
            let found = read.context("reading --kubeconfig failed")?;
            let address = &found.config.endpoint.address;
            if address.plaintext {
                let shown = path.display();
                tracing::warn!(
                    "the credential in --kubeconfig {shown} goes to {address}, and Secrets come from there, in plain text"
                );
            }
            Ok((found.config, found.namespace.map(Into::into)))
        }
    }
}
