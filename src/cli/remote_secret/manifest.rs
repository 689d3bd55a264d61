//! The Secret for a cluster, as agents and istiod read it.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use zeroize::Zeroizing;

use super::account::AccountSecret;

/// Marks the Secrets of clusters.
const LABEL_NAME: &str = "istio/multiCluster";
pub(super) const LABEL: &str = "istio/multiCluster=true";
/// Names the cluster.
const ANNOTATION: &str = "networking.istio.io/cluster";

/// The name of the Secret for `cluster`.
pub(super) fn secret_name(cluster: &str) -> String {
    format!("istio-remote-secret-{cluster}")
}

pub(super) fn is_labelled(secret: &Value) -> bool {
    let labels = secret.pointer("/metadata/labels");
    labels.and_then(|labels| labels.get(LABEL_NAME)).and_then(Value::as_str) == Some("true")
}

/// What goes into the Secret. All texts are checked: none needs an escape in YAML.
pub(super) struct Manifest<'a> {
    /// The cluster's id.
    pub(super) cluster: &'a str,
    pub(super) namespace: &'a str,
    /// The URL of its API server.
    pub(super) server: &'a str,
    pub(super) account: &'a AccountSecret,
}

impl Manifest<'_> {
    /// The kubeconfig for the cluster.
    fn kubeconfig(&self) -> Zeroizing<String> {
        let Self { cluster, server, account: AccountSecret { roots, token }, .. } = self;
        let (roots, token) = (STANDARD.encode(roots), &**token);
        Zeroizing::new(format!(
            "apiVersion: v1
kind: Config
clusters:
- name: \"{cluster}\"
  cluster:
    certificate-authority-data: {roots}
    server: \"{server}\"
contexts:
- name: \"{cluster}\"
  context:
    cluster: \"{cluster}\"
    user: \"{cluster}\"
current-context: \"{cluster}\"
preferences: {{}}
users:
- name: \"{cluster}\"
  user:
    token: \"{token}\"
"
        ))
    }

    /// The Secret for people and `kubectl apply`.
    pub(super) fn yaml(&self) -> Zeroizing<String> {
        let (cluster, name, namespace) = (self.cluster, secret_name(self.cluster), self.namespace);
        let kubeconfig = self.kubeconfig();
        let mut yaml = Zeroizing::new(format!(
            "# The cluster {cluster}, for agents with --remote-clusters and for istiod. It holds a token: keep it secret.
apiVersion: v1
kind: Secret
metadata:
  name: \"{name}\"
  namespace: \"{namespace}\"
  labels:
    {LABEL_NAME}: \"true\"
  annotations:
    {ANNOTATION}: \"{cluster}\"
stringData:
  \"{cluster}\": |
"
        ));
        // A text that grows leaves copies of the token behind.
        yaml.reserve(kubeconfig.len() + 4 * kubeconfig.lines().count());
        for line in kubeconfig.lines() {
            yaml.extend(["    ", line, "\n"]);
        }
        yaml
    }

    /// The Secret for server-side apply.
    pub(super) fn json(&self) -> Value {
        json!({
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {
                "name": secret_name(self.cluster),
                "namespace": self.namespace,
                "labels": { LABEL_NAME: "true" },
                "annotations": { ANNOTATION: self.cluster },
            },
            "data": { self.cluster: STANDARD.encode(self.kubeconfig().as_bytes()) },
        })
    }
}
