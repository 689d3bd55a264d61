//! Names of Kubernetes' Secrets and ConfigMaps.

use std::sync::Arc;

/// A valid name of a Secret or ConfigMap: `kubernetes://[NAMESPACE/]NAME[-cacert]`, `sds://…` with the same meaning,
/// `kubernetes-gateway://NAMESPACE/NAME[-cacert]`, `configmap://NAMESPACE/NAME`, or a bare NAME. Clones share it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct KubernetesName(Arc<Parts>);

#[derive(Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Parts {
    text: Arc<str>,
    /// The cluster that the client says it runs in, where that is taken from it.
    cluster: Option<Arc<str>>,
    scheme: Scheme,
    /// The text in lower case, where it is another.
    folded: Option<Box<str>>,
}

/// What is before the namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Scheme {
    /// `kubernetes://` or `sds://`.
    Own,
    /// `kubernetes-gateway://`: always of the config cluster, which is the agent's own.
    Gateway,
    /// `configmap://`, of the same cluster.
    ConfigMap,
    /// Nothing: Istio's names for old gateways, and Envoy's for the host that a client asks for.
    Bare,
}

/// Each scheme, and whether a name needs a namespace.
const SCHEMES: [(&str, Scheme, bool); 4] = [
    ("kubernetes://", Scheme::Own, false),
    ("sds://", Scheme::Own, false),
    ("kubernetes-gateway://", Scheme::Gateway, true),
    ("configmap://", Scheme::ConfigMap, true),
];

/// The end of a name that asks for trust roots.
const ROOTS_SUFFIX: &str = "-cacert";

/// Why a text with one of the schemes is not a name.
pub(super) const MALFORMED: &str = "after kubernetes:// and sds:// comes [NAMESPACE/]NAME, after kubernetes-gateway:// and \
    configmap:// NAMESPACE/NAME; NAMESPACE and NAME are names as Kubernetes has them: lower-case letters, digits, \"-\" and, \
    in NAME, \".\"";

impl KubernetesName {
    /// None for a text without one of the schemes; an error for one that is not valid after it.
    pub(super) fn parse(text: &str, shared: impl FnOnce() -> Arc<str>) -> Option<Result<Self, &'static str>> {
        let (prefix, scheme, needs_namespace) =
            SCHEMES.into_iter().find(|(prefix, ..)| text.starts_with(prefix))?;
        let rest = text.get(prefix.len()..).unwrap_or_default();
        let (namespace, name) = match rest.split_once('/') {
            Some((namespace, name)) => (Some(namespace), name),
            None => (None, rest),
        };
        let is_valid = namespace.map_or(!needs_namespace, is_label) && is_subdomain(name);
        Some(if is_valid { Ok(Self::new(shared(), scheme)) } else { Err(MALFORMED) })
    }

    /// A name without a scheme, if `text` in lower case can be the name of a Secret: Envoy asks for a host as its client
    /// spelled it.
    pub fn bare(text: &Arc<str>) -> Option<Self> {
        let is_upper = |c: char| c.is_ascii_uppercase();
        let folded = text.contains(is_upper).then(|| text.to_ascii_lowercase().into_boxed_str());
        is_subdomain(folded.as_deref().unwrap_or(text)).then(|| {
            Self(Arc::new(Parts { text: Arc::clone(text), cluster: None, scheme: Scheme::Bare, folded }))
        })
    }

    fn new(text: Arc<str>, scheme: Scheme) -> Self {
        Self(Arc::new(Parts { text, cluster: None, scheme, folded: None }))
    }

    /// The same name, asked for by a client that says it runs in `cluster`.
    pub fn in_cluster(self, cluster: Arc<str>) -> Self {
        match self.0.scheme {
            // The text names the cluster.
            Scheme::Gateway | Scheme::ConfigMap => self,
            scheme => {
                let (text, folded) = (Arc::clone(&self.0.text), self.0.folded.clone());
                Self(Arc::new(Parts { text, cluster: Some(cluster), scheme, folded }))
            }
        }
    }

    pub fn as_str(&self) -> &str {
        &self.0.text
    }

    pub fn cluster(&self) -> Option<&Arc<str>> {
        self.0.cluster.as_ref()
    }

    pub fn scheme(&self) -> Scheme {
        self.0.scheme
    }

    /// None for the workload's own.
    pub fn namespace(&self) -> Option<&str> {
        self.rest().split_once('/').map(|(namespace, _)| namespace)
    }

    /// The name of the object, with `-cacert`.
    pub fn name(&self) -> &str {
        let rest = self.rest();
        rest.split_once('/').map_or(rest, |(_, name)| name)
    }

    /// The name without `-cacert`, if it has that.
    pub fn base(&self) -> Option<&str> {
        self.name().strip_suffix(ROOTS_SUFFIX).filter(|base| is_subdomain(base))
    }

    /// Whether it asks for trust roots, and not for a key pair.
    pub fn is_roots(&self) -> bool {
        self.0.scheme == Scheme::ConfigMap || self.base().is_some()
    }

    fn rest(&self) -> &str {
        match self.0.scheme {
            Scheme::Bare => self.0.folded.as_deref().unwrap_or(&self.0.text),
            _ => self.as_str().split_once("://").map_or("", |(_, rest)| rest),
        }
    }
}

/// A DNS label, as namespaces are.
fn is_label(text: &str) -> bool {
    (1..=63).contains(&text.len()) && is_part(text)
}

/// A DNS subdomain, as objects' names are.
fn is_subdomain(text: &str) -> bool {
    (1..=253).contains(&text.len()) && text.split('.').all(is_part)
}

fn is_part(text: &str) -> bool {
    let is_known = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    !text.is_empty() && text.bytes().all(is_known) && !text.starts_with('-') && !text.ends_with('-')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Option<Result<KubernetesName, &'static str>> {
        KubernetesName::parse(text, || text.into())
    }

    #[test]
    fn a_name_says_which_object_of_which_namespace() {
        for (text, namespace, name, base) in [
            ("kubernetes://web", None, "web", None),
            ("kubernetes://shop/web.example.com", Some("shop"), "web.example.com", None),
            ("kubernetes://shop/web-cacert", Some("shop"), "web-cacert", Some("web")),
            ("sds://web-cacert", None, "web-cacert", Some("web")),
            ("sds://-cacert", None, "", None),
            ("kubernetes-gateway://shop/web", Some("shop"), "web", None),
            ("configmap://shop/roots", Some("shop"), "roots", None),
        ] {
            let Some(Ok(parsed)) = parse(text) else {
                assert_eq!(text, "sds://-cacert");
                continue;
            };
            assert_eq!((parsed.namespace(), parsed.name(), parsed.base()), (namespace, name, base), "{text}");
            assert_eq!(parsed.is_roots(), base.is_some() || text.starts_with("configmap"), "{text}");
            assert_eq!(parsed.as_str(), text);
        }
        let bare = KubernetesName::bare(&"www.example.com-cacert".into()).unwrap();
        assert_eq!((bare.namespace(), bare.base()), (None, Some("www.example.com")));
        let shouted = KubernetesName::bare(&"WWW.Example.com".into()).unwrap();
        assert_eq!((shouted.as_str(), shouted.name()), ("WWW.Example.com", "www.example.com"));
        for text in ["", "a_b", "a/b", "a..b", "-a", "*.example.com", &"a".repeat(254)] {
            assert!(KubernetesName::bare(&text.into()).is_none(), "{text}");
        }
    }

    #[test]
    fn what_kubernetes_can_not_have_is_malformed() {
        for text in [
            "kubernetes://",
            "kubernetes:///web",
            "kubernetes://shop/",
            "kubernetes://shop/web/x",
            "kubernetes://Shop/web",
            "kubernetes://shop.one/web",
            "kubernetes://a b",
            "kubernetes-gateway://web",
            "configmap://roots",
            "sds://..",
        ] {
            assert_eq!(parse(text), Some(Err(MALFORMED)), "{text}");
        }
        assert_eq!(parse("kubernetes:web"), None);
    }

    #[test]
    fn the_cluster_of_the_client_makes_another_name_except_for_the_config_cluster() {
        let of = |text: &str| parse(text).unwrap().unwrap();
        let name = of("kubernetes://shop/web");
        assert_ne!(name.clone().in_cluster("east".into()), name);
        assert_eq!(name.clone().in_cluster("east".into()).as_str(), name.as_str());
        let gateway = of("kubernetes-gateway://shop/web");
        assert_eq!(gateway.clone().in_cluster("east".into()), gateway);
    }
}
