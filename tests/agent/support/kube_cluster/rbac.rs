//! Users, and what RBAC allows them.

use serde_json::Value;

use super::resource::{Key, Resource};
use super::store::Store;

/// An authenticated user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct User {
    pub name: String,
    pub groups: Vec<String>,
}

impl User {
    /// The user that a service account is.
    pub fn account(namespace: &str, name: &str) -> Self {
        let groups = ["system:serviceaccounts".to_owned(), format!("system:serviceaccounts:{namespace}")];
        let groups = groups.into_iter().chain(["system:authenticated".to_owned()]).collect();
        Self { name: format!("system:serviceaccount:{namespace}:{name}"), groups }
    }

    /// Any other user, like `admin`.
    pub fn named(name: &str) -> Self {
        Self { name: name.to_owned(), groups: vec!["system:authenticated".to_owned()] }
    }

    /// The user of requests without a credential.
    pub fn anonymous() -> Self {
        Self { name: "system:anonymous".to_owned(), groups: vec!["system:unauthenticated".to_owned()] }
    }
}

/// What a request needs a right for. Empty: no namespace, no name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Access {
    pub verb: String,
    pub group: String,
    /// With the subresource, if any.
    pub resource: String,
    pub namespace: String,
    pub name: String,
}

/// A right of a user.
#[derive(Clone, Debug)]
pub struct Rule {
    verbs: Vec<String>,
    groups: Vec<String>,
    resources: Vec<String>,
    names: Vec<String>,
    namespace: Option<String>,
}

fn owned(texts: &[&str]) -> Vec<String> {
    texts.iter().map(|text| (*text).to_owned()).collect()
}

impl Rule {
    /// A right on all objects of a kind, in all namespaces.
    pub fn to(verbs: &[&str], plural: &str) -> Self {
        let group = Resource::of(plural).group.to_owned();
        let resources = vec![plural.to_owned()];
        Self { verbs: owned(verbs), groups: vec![group], resources, names: Vec::new(), namespace: None }
    }

    /// The right of `system:auth-delegator`: to ask for reviews.
    pub fn to_review() -> Self {
        Self {
            verbs: owned(&["create"]),
            groups: owned(&["authorization.k8s.io"]),
            resources: owned(&["subjectaccessreviews"]),
            names: Vec::new(),
            namespace: None,
        }
    }

    /// Every right.
    pub fn everything() -> Self {
        let all = owned(&["*"]);
        Self { verbs: all.clone(), groups: all.clone(), resources: all, names: Vec::new(), namespace: None }
    }

    /// In one namespace only.
    pub fn within(self, namespace: &str) -> Self {
        Self { namespace: Some(namespace.to_owned()), ..self }
    }

    /// On these objects only (`resourceNames`).
    pub fn named(self, names: &[&str]) -> Self {
        Self { names: owned(names), ..self }
    }

    /// A rule of a stored role.
    fn of_role(rule: &Value, namespace: Option<&str>) -> Self {
        let list = |name: &str| {
            let texts = rule[name].as_array().into_iter().flatten().filter_map(Value::as_str);
            texts.map(str::to_owned).collect()
        };
        Self {
            verbs: list("verbs"),
            groups: list("apiGroups"),
            resources: list("resources"),
            names: list("resourceNames"),
            namespace: namespace.map(str::to_owned),
        }
    }

    fn allows(&self, access: &Access) -> bool {
        let has = |list: &[String], value: &str| list.iter().any(|one| one == "*" || one == value);
        has(&self.verbs, &access.verb)
            && has(&self.groups, &access.group)
            && has(&self.resources, &access.resource)
            && (self.names.is_empty() || self.names.contains(&access.name))
            && self.namespace.as_ref().is_none_or(|own| *own == access.namespace)
    }
}

/// Whether `user` may, by the rules of the test or by the roles that are stored.
pub fn allows(rules: &[(String, Rule)], store: &Store, user: &User, access: &Access) -> bool {
    let own = rules.iter().filter(|(name, _)| *name == user.name);
    is_everyones(user, access)
        || own.map(|(_, rule)| rule).any(|rule| rule.allows(access))
        || bound(store, user).iter().any(|rule| rule.allows(access))
}

/// `system:basic-user`.
fn is_everyones(user: &User, access: &Access) -> bool {
    let reviews = ["selfsubjectaccessreviews", "selfsubjectrulesreviews", "selfsubjectreviews"];
    access.verb == "create"
        && reviews.contains(&access.resource.as_str())
        && user.groups.iter().any(|group| group == "system:authenticated")
}

/// The rules of the stored roles that are bound to `user`.
fn bound(store: &Store, user: &User) -> Vec<Rule> {
    let mut found = Vec::new();
    for plural in ["clusterrolebindings", "rolebindings"] {
        for binding in store.all(plural) {
            let value = &binding.value;
            let own = Some(binding.key.namespace.as_str()).filter(|namespace| !namespace.is_empty());
            if !value["subjects"].as_array().into_iter().flatten().any(|subject| is_subject(subject, user)) {
                continue;
            }
            let name = value["roleRef"]["name"].as_str().unwrap_or_default();
            let role = match value["roleRef"]["kind"].as_str() {
                Some("Role") => Key::new("roles", own.unwrap_or_default(), name),
                _ => Key::new("clusterroles", "", name),
            };
            let rules = store.object(&role).map(|role| role.value["rules"].clone());
            let rules = rules.as_ref().and_then(Value::as_array).into_iter().flatten();
            found.extend(rules.map(|rule| Rule::of_role(rule, own)));
        }
    }
    found
}

fn is_subject(subject: &Value, user: &User) -> bool {
    let text = |name: &str| subject[name].as_str().unwrap_or_default();
    match text("kind") {
        "ServiceAccount" => User::account(text("namespace"), text("name")).name == user.name,
        "Group" => user.groups.iter().any(|group| group == text("name")),
        _ => user.name == text("name"),
    }
}
