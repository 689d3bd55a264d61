//! The kinds of objects that the server stores, and what a request asks of which of them.

use std::collections::BTreeMap;

/// A kind of object.
#[derive(Debug, PartialEq, Eq)]
pub struct Resource {
    pub group: &'static str,
    pub versions: &'static [&'static str],
    pub plural: &'static str,
    pub kind: &'static str,
    pub is_namespaced: bool,
    /// Items of lists name their kind: those of kinds that are not built in.
    pub is_custom: bool,
}

const fn built_in(
    group: &'static str,
    plural: &'static str,
    kind: &'static str,
    is_namespaced: bool,
) -> Resource {
    Resource { group, versions: &["v1"], plural, kind, is_namespaced, is_custom: false }
}

const RBAC: &str = "rbac.authorization.k8s.io";
pub const GATEWAY: &str = "gateway.networking.k8s.io";

pub const CERTIFICATES: &str = "certificates.k8s.io";

pub static RESOURCES: [Resource; 11] = [
    built_in("", "namespaces", "Namespace", false),
    built_in("", "secrets", "Secret", true),
    built_in("", "configmaps", "ConfigMap", true),
    built_in("", "serviceaccounts", "ServiceAccount", true),
    built_in(RBAC, "clusterroles", "ClusterRole", false),
    built_in(RBAC, "clusterrolebindings", "ClusterRoleBinding", false),
    built_in(RBAC, "roles", "Role", true),
    built_in(RBAC, "rolebindings", "RoleBinding", true),
    built_in(CERTIFICATES, "certificatesigningrequests", "CertificateSigningRequest", false),
    Resource {
        versions: &["v1beta1"],
        ..built_in(CERTIFICATES, "clustertrustbundles", "ClusterTrustBundle", false)
    },
    Resource {
        group: GATEWAY,
        versions: &["v1", "v1beta1"],
        plural: "referencegrants",
        kind: "ReferenceGrant",
        is_namespaced: true,
        is_custom: true,
    },
];

impl Resource {
    pub fn of(plural: &str) -> &'static Self {
        RESOURCES.iter().find(|resource| resource.plural == plural).unwrap()
    }

    pub fn of_kind(kind: &str) -> &'static Self {
        RESOURCES.iter().find(|resource| resource.kind == kind).unwrap()
    }

    /// `v1`, or `group/version`.
    pub fn api_version(&self, version: &str) -> String {
        if self.group.is_empty() { version.to_owned() } else { format!("{}/{version}", self.group) }
    }

    /// The name in messages: `secrets`, or `roles.rbac.authorization.k8s.io`.
    pub fn qualified(&self) -> String {
        if self.group.is_empty() { self.plural.to_owned() } else { format!("{}.{}", self.plural, self.group) }
    }
}

/// An object's place. Objects that are in no namespace have an empty one.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key {
    pub plural: &'static str,
    pub namespace: String,
    pub name: String,
}

impl Key {
    pub fn new(plural: &'static str, namespace: &str, name: &str) -> Self {
        Self { plural, namespace: namespace.to_owned(), name: name.to_owned() }
    }
}

/// The path of a request to stored objects.
#[derive(Clone, Debug)]
pub struct Target {
    pub resource: &'static Resource,
    pub version: &'static str,
    pub namespace: Option<String>,
    pub name: Option<String>,
    pub subresource: Option<String>,
}

impl Target {
    pub fn parse(path: &str) -> Option<Self> {
        let mut parts = path.strip_prefix('/')?.split('/').peekable();
        let group = match parts.next()? {
            "api" => "",
            "apis" => parts.next()?,
            _ => return None,
        };
        let version = parts.next()?;
        let mut namespace = None;
        if parts.peek() == Some(&"namespaces") {
            let mut ahead = parts.clone();
            ahead.next();
            let candidate = ahead.next();
            // `/api/v1/namespaces/NAME` is the namespace itself.
            if ahead.peek().is_some() {
                namespace = candidate.map(str::to_owned);
                parts = ahead;
            }
        }
        let plural = parts.next()?;
        let found = RESOURCES.iter().find(|one| one.group == group && one.plural == plural)?;
        let version = *found.versions.iter().find(|one| **one == version)?;
        let (name, subresource) = (parts.next().map(str::to_owned), parts.next().map(str::to_owned));
        let is_valid = parts.next().is_none() && (found.is_namespaced || namespace.is_none());
        is_valid.then_some(Self { resource: found, version, namespace, name, subresource })
    }

    /// The place of the named object.
    pub fn key(&self) -> Option<Key> {
        let namespace = self.namespace.as_deref().unwrap_or_default();
        self.name.as_deref().map(|name| Key::new(self.resource.plural, namespace, name))
    }
}

/// Which objects a list or a watch is for.
#[derive(Clone, Debug)]
pub struct Selection {
    pub plural: &'static str,
    pub namespace: Option<String>,
    pub name: Option<String>,
    secret_type: Option<String>,
    signer: Option<String>,
    /// Key, value (none: any), and whether the label must be so or must not.
    labels: Vec<(String, Option<String>, bool)>,
}

impl Selection {
    /// What the selectors of `query` select; else what the server does not support.
    pub fn parse(target: &Target, query: &BTreeMap<String, String>) -> Result<Self, String> {
        let mut selection = Self {
            plural: target.resource.plural,
            namespace: target.namespace.clone(),
            name: None,
            secret_type: None,
            signer: None,
            labels: Vec::new(),
        };
        for field in terms(query, "fieldSelector") {
            let (field, value) =
                field.split_once('=').ok_or_else(|| format!("invalid selector: {field:?}"))?;
            let value = Some(value.trim_start_matches('=').to_owned());
            match field {
                "metadata.name" => selection.name = value,
                "metadata.namespace" => selection.namespace = value,
                "type" if selection.plural == "secrets" => selection.secret_type = value,
                "spec.signerName" if target.resource.group == CERTIFICATES => selection.signer = value,
                _ => return Err(format!("field label not supported: {field}")),
            }
        }
        for label in terms(query, "labelSelector") {
            let term = match (label.split_once("!="), label.split_once('='), label.strip_prefix('!')) {
                (Some((key, value)), ..) => (key, Some(value), false),
                (None, Some((key, value)), _) => (key, Some(value.trim_start_matches('=')), true),
                (None, None, Some(key)) => (key, None, false),
                (None, None, None) => (label, None, true),
            };
            if term.0.contains([' ', '(', ')']) {
                return Err(format!("this server has no set-based selectors: {label}"));
            }
            selection.labels.push((term.0.to_owned(), term.1.map(str::to_owned), term.2));
        }
        Ok(selection)
    }

    pub fn has_selector(&self) -> bool {
        self.name.is_some() || self.secret_type.is_some() || self.signer.is_some() || !self.labels.is_empty()
    }

    pub fn has(&self, object: &super::store::Stored) -> bool {
        let key = &object.key;
        let is =
            |wanted: &Option<String>, value: &str| wanted.as_deref().is_none_or(|wanted| wanted == value);
        let label_is = |(label, value, expected): &(String, Option<String>, bool)| {
            let found = object.text(&["metadata", "labels", label]);
            (found.is_some() && (value.is_none() || found == value.as_deref())) == *expected
        };
        key.plural == self.plural
            && is(&self.namespace, &key.namespace)
            && is(&self.name, &key.name)
            && is(&self.secret_type, object.text(&["type"]).unwrap_or_default())
            && is(&self.signer, object.text(&["spec", "signerName"]).unwrap_or_default())
            && self.labels.iter().all(label_is)
    }
}

fn terms<'a>(query: &'a BTreeMap<String, String>, name: &str) -> impl Iterator<Item = &'a str> {
    query
        .get(name)
        .into_iter()
        .flat_map(|text| text.split(','))
        .map(str::trim)
        .filter(|term| !term.is_empty())
}
