//! The options for Secrets and ConfigMaps of Kubernetes.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::args::RunArgs;
use crate::base::limits;
use crate::kube::config::{ClusterConfig, SERVICE_ACCOUNT_DIR};
use crate::kube::kubeconfig::Risk;
use crate::kube::{Account, ClusterId};
use crate::options::{Reader, Setting};
use crate::serve::sds::Naming;
use crate::source::issuer::IdentitySource;
use crate::source::kubernetes::{Authorize, KubernetesSettings};

/// The option whose values are what kubeconfigs of remote clusters may do.
pub const CLUSTERS_ALLOW: &str = "--clusters-allow";

/// Which clusters the agent reads, and for which workload.
#[derive(Clone, Debug)]
pub struct KubernetesConfig {
    pub api_server: ApiServer,
    /// The name of the agent's own cluster.
    pub cluster: ClusterId,
    pub settings: KubernetesSettings,
    pub naming: Naming,
    pub remote: RemoteClusters,
}

/// Where the agent's own cluster is.
#[derive(Clone, Debug)]
pub enum ApiServer {
    /// As the kubelet sets it in each Pod.
    InCluster(Box<ClusterConfig>),
    Kubeconfig {
        path: PathBuf,
        /// The current one if none.
        context: Option<String>,
    },
}

/// Where remote clusters are found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RemoteClusters {
    /// The namespace of labelled Secrets, if they are used.
    pub namespace: Option<Arc<str>>,
    /// A directory of kubeconfigs.
    pub directory: Option<PathBuf>,
    /// What their kubeconfigs may do.
    pub allows: Vec<Risk>,
}

impl RemoteClusters {
    fn is_used(&self) -> bool {
        self.namespace.is_some() || self.directory.is_some()
    }
}

/// Whether Secrets of Kubernetes are served. Read before the CA is chosen: they need none.
pub(super) fn is_enabled(r: &mut Reader<'_>, args: &RunArgs) -> bool {
    r.switch("kubernetes-secrets", args.kubernetes_secrets, &[]).or(false)
}

/// None where Secrets of Kubernetes are not served.
pub(super) fn kubernetes(
    r: &mut Reader<'_>,
    args: &RunArgs,
    identity: &IdentitySource,
    is_enabled: bool,
) -> Option<KubernetesConfig> {
    let file = r.text("kubeconfig", &args.kubeconfig, &[]);
    let context = r.text("kube-context", &args.kube_context, &[]);
    let bare = r.switch("kubernetes-bare-names", args.kubernetes_bare_names, &[]);
    let from_secrets = r.switch("remote-clusters", args.remote_clusters, &[]);
    let uses_secrets = from_secrets.value == Some(true);
    let namespace = r.parsed("system-namespace", &args.system_namespace, &[], parse_namespace);
    let directory = r.text("clusters-dir", &args.clusters_dir, &[]);
    let allows = r.list("clusters-allow", &args.clusters_allow, &[], ',', parse_risk);
    let authorize = r.parsed("authorize", &args.authorize, &[], parse_authorize);
    if !is_enabled {
        let set = [&file, &context, &directory].map(Setting::set_by);
        let set = set.into_iter().chain([bare.set_by(), from_secrets.set_by(), authorize.set_by()]);
        let others = [namespace.set_by(), allows.set_by()];
        for (level, from) in set.chain(others) {
            if level.is_some() {
                r.mistake(format!("{from} needs --kubernetes-secrets: add that, or drop it"));
            }
        }
        return None;
    }
    if context.value.is_some() && file.value.is_none() {
        r.mistake(format!("{} needs the kubeconfig that has it: add --kubeconfig FILE", context.from));
    }
    if namespace.level.is_some() && !uses_secrets {
        r.mistake(format!("{} is where --remote-clusters are found: add that, or drop it", namespace.from));
    }
    let api_server = match file.value {
        Some(path) => Some(ApiServer::Kubeconfig { path: path.into(), context: context.value }),
        None => match ClusterConfig::in_cluster(|name| r.variable(name), Path::new(SERVICE_ACCOUNT_DIR)) {
            Ok(config) => Some(ApiServer::InCluster(Box::new(config))),
            Err(error) => {
                r.mistake(format!("--kubernetes-secrets: {error} with --kubeconfig FILE"));
                None
            }
        },
    };
    let remote = RemoteClusters {
        namespace: uses_secrets.then(|| namespace.or("istio-system")),
        directory: directory.value.map(PathBuf::from),
        allows: allows.value.unwrap_or_default(),
    };
    let authorize = authorize.or(Authorize::Own);
    let (namespace, account) = workload(r, args, identity);
    let naming = Naming {
        has_bare_names: bare.value == Some(true),
        // With other modes a review in another cluster than the workload's would be another workload's right.
        trusts_clusters: remote.is_used() && authorize == Authorize::Own,
        ..Naming::default()
    };
    Some(KubernetesConfig {
        api_server: api_server?,
        cluster: cluster_id(r, args),
        settings: KubernetesSettings { authorize, namespace, account },
        naming,
        remote,
    })
}

/// The workload's namespace and service account, as far as options say. Otherwise its certificate does.
fn workload(
    r: &mut Reader<'_>,
    args: &RunArgs,
    identity: &IdentitySource,
) -> (Option<Arc<str>>, Option<Account>) {
    let namespace = r.text("namespace", &args.namespace, &["POD_NAMESPACE"]).value;
    let account = r.text("service-account", &args.service_account, &["SERVICE_ACCOUNT"]).value;
    let is_whole = r.text("spiffe-id", &args.spiffe_id, &[]).value.is_some();
    let whole = match identity {
        IdentitySource::Fixed(identity) if is_whole => identity.service_account(),
        _ => None,
    };
    let (of_whole, account_of_whole) = whole.map(|it| (it.namespace, it.name)).unzip();
    let namespace: Option<Arc<str>> = of_whole.or(namespace).map(Into::into);
    let name = account_of_whole.or(account).map(Into::into);
    let account = namespace.clone().zip(name).map(|(namespace, name)| Account { namespace, name });
    (namespace, account)
}

/// The agent's own cluster, by the name that Istio's CA gets too.
fn cluster_id(r: &mut Reader<'_>, args: &RunArgs) -> ClusterId {
    let parse = |text: &str| match text.len() {
        1..=limits::CLUSTER_ID_BYTES => Ok(ClusterId(text.into())),
        _ => Err(format!("a cluster's name has 1 to {} bytes", limits::CLUSTER_ID_BYTES)),
    };
    let id = r.parsed("cluster-id", &args.providers.citadel.cluster_id, &["ISTIO_META_CLUSTER_ID"], parse);
    id.or(ClusterId("Kubernetes".into()))
}

fn parse_namespace(text: &str) -> Result<Arc<str>, String> {
    let is_known = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    match (1..=63).contains(&text.len()) && text.bytes().all(is_known) {
        true => Ok(text.into()),
        false => Err(format!("{text:?} is not a namespace's name: lower-case letters, digits and \"-\"")),
    }
}

fn parse_risk(text: &str) -> Result<Risk, String> {
    let known = Risk::ALL.into_iter().find(|risk| risk.name() == text);
    known.ok_or_else(|| {
        let names = Risk::ALL.map(Risk::name).join(" and ");
        format!("{text:?} is nothing that kubeconfigs of remote clusters can be allowed; there are {names}")
    })
}

fn parse_authorize(text: &str) -> Result<Authorize, String> {
    match text {
        "own" => Ok(Authorize::Own),
        "namespace" => Ok(Authorize::Namespace),
        "rbac" => Ok(Authorize::Rbac),
        "istio" => Ok(Authorize::Istio),
        _ => Err(format!("{text:?} is no rule; choose own, namespace, rbac or istio")),
    }
}
