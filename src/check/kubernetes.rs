//! The API servers from which Secrets are read.

use std::path::Path;
use std::sync::Arc;

use http::{Method, StatusCode};
use serde_json::{Value, json};

use super::{Findings, Severity};
use crate::agent::kubernetes::connection;
use crate::base::text;
use crate::config::kubernetes::CLUSTERS_ALLOW;
use crate::config::{Config, KubernetesConfig};
use crate::kube::cluster::Cluster;
use crate::kube::kubeconfig::{Kubeconfig, Policy, Risk};
use crate::kube::{Access, Account, Api as _, Kind, KubeError};
use crate::source::kubernetes::{Authorize, remote};

const API_SERVER: &str = "API server";
const REMOTE: &str = "remote clusters";
const REVIEWS: &str = "/apis/authentication.k8s.io/v1/selfsubjectreviews";
const ACCESS_REVIEWS: &str = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews";

impl Findings {
    /// What the agent needs to serve Secrets of Kubernetes.
    pub(super) async fn kubernetes(&mut self, config: &Config) {
        let Some(kubernetes) = &config.kubernetes else { return };
        let connected = connection(kubernetes.api_server.clone(), &self.disk).await;
        let (connection, namespace) = match connected {
            Ok(connected) => connected,
            Err(error) => return self.note(Severity::Error, API_SERVER, format!("{error:#}")),
        };
        let client = Cluster::new(connection, self.disk.clone(), self.clock.clone());
        self.workload(config, kubernetes, namespace.as_deref());
        let answers = match who(&client).await {
            Ok(user) => {
                let text = format!("{} answers, its certificate is valid; {user}", client.address());
                self.note(Severity::Ok, API_SERVER, text);
                true
            }
            Err(error) => {
                self.note(Severity::Error, API_SERVER, explained(&error));
                false
            }
        };
        if answers {
            self.reviews(&client, kubernetes).await;
        }
        if let (Some(namespace), true) = (&kubernetes.remote.namespace, answers) {
            self.labelled_secrets(&client, namespace, kubernetes).await;
        }
        if let Some(directory) = &kubernetes.remote.directory {
            self.kubeconfigs(directory, kubernetes).await;
        }
    }

    /// The namespace of names without one, and the account that is asked about.
    fn workload(&mut self, config: &Config, kubernetes: &KubernetesConfig, found: Option<&str>) {
        let settings = &kubernetes.settings;
        let has_ca = !config.providers.is_empty();
        match settings.namespace.as_deref().or(found) {
            Some(namespace) => {
                let text = format!("kubernetes://NAME is read from the namespace {namespace}");
                self.note(Severity::Ok, "Secrets", text);
            }
            None if has_ca => {
                let text = "kubernetes://NAME is read from the namespace in the workload's certificate";
                self.note(Severity::Ok, "Secrets", text);
            }
            None => self.note(
                Severity::Warning,
                "Secrets",
                "the workload's namespace is not known: kubernetes://NAME is refused, kubernetes://NAMESPACE/NAME is not; \
                 set --namespace",
            ),
        }
        let asks = matches!(settings.authorize, Authorize::Rbac | Authorize::Istio);
        if asks && settings.account.is_none() && !has_ca {
            self.note(
                Severity::Error,
                "Secrets",
                "--authorize asks for the rights of the workload's service account, which is not known: set --namespace \
                 and --service-account",
            );
        }
    }

    /// Whether the agent may ask for the rights of its workload.
    async fn reviews(&mut self, client: &Cluster, kubernetes: &KubernetesConfig) {
        let settings = &kubernetes.settings;
        if !matches!(settings.authorize, Authorize::Rbac | Authorize::Istio) {
            return;
        }
        let may = Right { verb: "create", group: "authorization.k8s.io", resource: "subjectaccessreviews" };
        let needed = "--authorize rbac and istio need create on subjectaccessreviews (docs/multicluster.md has the \
                      ClusterRole)";
        match may.is_granted(client, "").await {
            Ok(true) => {}
            Ok(false) => return self.note(Severity::Error, "Secrets", needed),
            Err(error) => return self.note(Severity::Error, "Secrets", explained(&error)),
        }
        let Some(account) = &settings.account else { return };
        let access = Access {
            verb: "list",
            kind: Kind::Secret,
            namespace: Arc::clone(&account.namespace),
            name: None,
        };
        let Account { namespace, name } = account;
        match client.may(account, &access).await {
            Ok(may_list) if settings.authorize == Authorize::Istio && !may_list => self.note(
                Severity::Warning,
                "Secrets",
                format!(
                    "{namespace}/{name} may not list Secrets in {namespace}, which --authorize istio asks for: its \
                     key pairs are refused; allow it, or choose --authorize rbac"
                ),
            ),
            Ok(_) => {
                let text = format!("the rights of {namespace}/{name} can be asked for");
                self.note(Severity::Ok, "Secrets", text);
            }
            Err(error) => self.note(Severity::Error, "Secrets", explained(&error)),
        }
    }

    /// The remote clusters of labelled Secrets.
    async fn labelled_secrets(&mut self, client: &Cluster, namespace: &Arc<str>, config: &KubernetesConfig) {
        for verb in ["list", "watch"] {
            let right = Right { verb, group: "", resource: "secrets" };
            match right.is_granted(client, namespace).await {
                Ok(true) => {}
                Ok(false) => {
                    let text = format!(
                        "--remote-clusters: the agent may not {verb} Secrets in {namespace}; allow list and watch on \
                         secrets there, or set --system-namespace"
                    );
                    return self.note(Severity::Error, REMOTE, text);
                }
                Err(error) => return self.note(Severity::Error, REMOTE, explained(&error)),
            }
        }
        let found = match client.list(&remote::selection(namespace)).await {
            Ok(list) => list.objects,
            Err(error) => return self.note(Severity::Error, REMOTE, explained(&error)),
        };
        let text = format!("--remote-clusters: {} labelled Secret(s) in {namespace}", found.len());
        self.note(Severity::Ok, REMOTE, text);
        for secret in found {
            for (cluster, kubeconfig) in secret.data {
                let from = format!("cluster {cluster} (Secret {namespace}/{})", secret.name);
                self.kubeconfig(&from, &kubeconfig, config, &cluster).await;
            }
        }
    }

    /// The remote clusters of a directory.
    async fn kubeconfigs(&mut self, directory: &Path, config: &KubernetesConfig) {
        let path = directory.to_owned();
        let read = self.disk.run(directory, move || remote::read_all(&path)).await;
        let read =
            read.map_err(|error| error.to_string()).and_then(|read| read.map_err(|error| error.to_string()));
        let shown = directory.display();
        match read {
            Ok(files) => {
                let text = format!("--clusters-dir {shown}: {} kubeconfig(s)", files.len());
                self.note(Severity::Ok, REMOTE, text);
                for (path, cluster, kubeconfig) in files {
                    let from = format!("cluster {} ({})", cluster.0, path.display());
                    self.kubeconfig(&from, &kubeconfig, config, &cluster.0).await;
                }
            }
            Err(reason) => {
                let text = format!("--clusters-dir {shown} can't be read: {reason}; correct that");
                self.note(Severity::Error, REMOTE, text);
            }
        }
    }

    /// The kubeconfig of a remote cluster, and its API server.
    async fn kubeconfig(&mut self, from: &str, text: &[u8], config: &KubernetesConfig, id: &str) {
        let from = text::sanitize_for_log(from);
        if *id == *config.cluster.0 {
            let text = format!("{from} is the agent's own (--cluster-id): its kubeconfig is ignored");
            return self.note(Severity::Warning, REMOTE, text);
        }
        let (text, allows): (Vec<u8>, Vec<Risk>) = (text.to_vec(), config.remote.allows.clone());
        let parsed = {
            let policy = Policy::Foreign { allows: &allows, option: CLUSTERS_ALLOW };
            Kubeconfig::parse(&zeroize::Zeroizing::new(text), None, &policy)
        };
        let kubeconfig = match parsed {
            Ok(kubeconfig) => kubeconfig,
            Err(error) => {
                let reason = text::sanitize_for_log(&error.to_string());
                return self.note(Severity::Error, REMOTE, format!("{from}: {reason}"));
            }
        };
        let client = Cluster::new(kubeconfig.config, self.disk.clone(), self.clock.clone());
        match who(&client).await {
            Ok(user) => {
                let text = format!("{from}: {} answers, its certificate is valid; {user}", client.address());
                self.note(Severity::Ok, REMOTE, text);
            }
            Err(error) => self.note(Severity::Error, REMOTE, format!("{from}: {}", explained(&error))),
        }
    }
}

/// Who the agent is to an API server: for people.
async fn who(client: &Cluster) -> Result<String, KubeError> {
    client.probe().await?;
    let body = json!({ "apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview" });
    match client.call(Method::POST, REVIEWS, Some(&body)).await {
        Ok(answer) => {
            let user = answer.pointer("/status/userInfo/username").and_then(Value::as_str);
            let user = user.map(text::sanitize_for_log);
            Ok(format!("it knows the agent as {}", user.as_deref().unwrap_or("a user without a name")))
        }
        // Before Kubernetes 1.28 there is no such review.
        Err(KubeError::Status { status: StatusCode::NOT_FOUND | StatusCode::FORBIDDEN, .. }) => {
            Ok("it takes the agent's credential".to_owned())
        }
        Err(error) => Err(error),
    }
}

/// A right of the agent itself.
struct Right {
    verb: &'static str,
    group: &'static str,
    resource: &'static str,
}

impl Right {
    async fn is_granted(&self, client: &Cluster, namespace: &str) -> Result<bool, KubeError> {
        let Self { verb, group, resource } = self;
        let attributes =
            json!({ "verb": verb, "group": group, "resource": resource, "namespace": namespace });
        let body = json!({
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": { "resourceAttributes": attributes },
        });
        let answer = client.call(Method::POST, ACCESS_REVIEWS, Some(&body)).await?;
        Ok(answer.pointer("/status/allowed").and_then(Value::as_bool) == Some(true))
    }
}

/// The error, with a remedy where the credential is refused.
fn explained(error: &KubeError) -> String {
    let hint = match error.is_unauthenticated() {
        true => "; the token or client certificate is expired, revoked, or of another cluster: replace it",
        false => "",
    };
    format!("{}{hint}", text::sanitize_for_log(&error.to_string()))
}
