//! Who may read what: decided from the name alone, or by a review at the API server.

use std::sync::Arc;

use super::cluster::Cluster;
use crate::kube::{Access, Account, Kind, KubeError, ObjectId};
use crate::secret::{KubernetesName, Scheme};

/// How it is decided which workload may read what.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Authorize {
    /// Whatever the agent's own rights allow.
    #[default]
    Own,
    /// Only objects in the workload's own namespace.
    Namespace,
    /// The API server is asked whether the workload's service account may `get` the object. In another namespace, a
    /// `ReferenceGrant` for Gateways of the workload's namespace is enough.
    Rbac,
    /// As istiod decides: in the own namespace each account that may `list` Secrets there, in others each that has a `ReferenceGrant`.
    Istio,
}

/// What has to be found out before objects may be served to a workload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Check {
    /// Nothing: it may.
    Allowed,
    /// Nothing: it may not, for this reason.
    Refused(&'static str),
    /// It can't be found out yet, for this reason.
    Unknown(&'static str),
    Ask(Questions),
}

/// What an API server is asked about the objects of a name. One yes is enough for each object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Questions {
    account: Account,
    /// For each object, the right to be reviewed; none where only a grant counts.
    objects: Vec<(ObjectId, Option<Access>)>,
    /// A `ReferenceGrant` for Gateways in the account's namespace counts too.
    grants: bool,
}

const NO_IDENTITY: &str =
    "--authorize needs to know whose Secrets these are, and the workload has no identity yet";
const OTHER_NAMESPACE: &str = "it is in another namespace than the workload (see --authorize)";

/// What has to be found out before `account` is served the objects of `name`, in the order in which they count.
pub(super) fn check(
    authorize: Authorize,
    name: &KubernetesName,
    objects: &[ObjectId],
    account: Option<&Account>,
    own_namespace: Option<&str>,
) -> Check {
    if authorize == Authorize::Own {
        return Check::Allowed;
    }
    let Some(object) = objects.first() else { return Check::Allowed };
    let is_own = own_namespace == Some(&*object.namespace);
    if authorize == Authorize::Namespace {
        return if is_own { Check::Allowed } else { Check::Refused(OTHER_NAMESPACE) };
    }
    let Some(account) = account.cloned() else { return Check::Unknown(NO_IDENTITY) };
    let access = |verb, object: &ObjectId, name| Access {
        verb,
        kind: object.kind,
        namespace: Arc::clone(&object.namespace),
        name,
    };
    let each = |access: &dyn Fn(&ObjectId) -> Option<Access>| {
        objects.iter().map(|object| (object.clone(), access(object))).collect()
    };
    if authorize == Authorize::Rbac {
        let get = |object: &ObjectId| Some(access("get", object, Some(Arc::clone(&object.name))));
        return Check::Ask(Questions { account, objects: each(&get), grants: !is_own });
    }
    // istiod's rules.
    match (name.scheme(), is_own) {
        (Scheme::ConfigMap, true) => Check::Allowed,
        (Scheme::Own | Scheme::Bare, true) if name.is_roots() => Check::Allowed,
        (_, true) => {
            let list = |object: &ObjectId| Some(access("list", object, None));
            Check::Ask(Questions { account, objects: each(&list), grants: false })
        }
        (Scheme::Gateway | Scheme::ConfigMap, false) => {
            Check::Ask(Questions { account, objects: each(&|_| None), grants: true })
        }
        (Scheme::Own | Scheme::Bare, false) => Check::Refused(OTHER_NAMESPACE),
    }
}

impl Questions {
    /// Asks the API server of `cluster`: which of the objects may be read.
    pub(super) async fn ask(&self, cluster: &Cluster) -> Result<Vec<ObjectId>, KubeError> {
        let mut allowed = Vec::new();
        for (object, access) in &self.objects {
            let has_right = match access {
                Some(access) => cluster.may(&self.account, access).await?,
                None => false,
            };
            if has_right || (self.grants && self.is_granted(cluster, object).await?) {
                allowed.push(object.clone());
            }
        }
        Ok(allowed)
    }

    async fn is_granted(&self, cluster: &Cluster, object: &ObjectId) -> Result<bool, KubeError> {
        let grants = match cluster.grants(&object.namespace).await {
            // An agent that may not read them knows of none.
            Err(error) if error.is_forbidden() => return Ok(false),
            grants => grants?,
        };
        let fits = |kind: Kind, name: Option<&str>| {
            kind == object.kind && name.is_none_or(|name| *name == *object.name)
        };
        Ok(grants
            .iter()
            .any(|grant| *grant.from == *self.account.namespace && fits(grant.to, grant.name.as_deref())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check_of(authorize: Authorize, text: &str) -> Check {
        let Ok(crate::secret::SecretName::Kubernetes(name)) = text.parse() else { panic!("{text}") };
        let kind = if text.starts_with("configmap") { Kind::ConfigMap } else { Kind::Secret };
        let namespace: Arc<str> = name.namespace().unwrap_or("shop").into();
        let object = ObjectId { kind, namespace, name: name.name().into() };
        let account = Account { namespace: "shop".into(), name: "gateway".into() };
        check(authorize, &name, &[object], Some(&account), Some("shop"))
    }

    #[test]
    fn each_mode_asks_for_the_right_that_it_documents() {
        use Authorize::{Istio, Namespace, Own, Rbac};
        let asked = |check: Check| match check {
            Check::Allowed => "allowed".to_owned(),
            Check::Refused(_) | Check::Unknown(_) => "refused".to_owned(),
            Check::Ask(Questions { objects, grants, .. }) => {
                let verb = objects[0].1.as_ref().map_or("nothing", |access| access.verb);
                let whole = objects[0].1.as_ref().is_some_and(|access| access.name.is_none());
                format!("{verb}{}{}", if whole { " all" } else { "" }, if grants { " or grant" } else { "" })
            }
        };
        for (text, expected) in [
            ("kubernetes://web", ["allowed", "allowed", "get", "list all"]),
            ("kubernetes://web-cacert", ["allowed", "allowed", "get", "allowed"]),
            ("sds://other/web", ["allowed", "refused", "get or grant", "refused"]),
            ("kubernetes-gateway://shop/web", ["allowed", "allowed", "get", "list all"]),
            ("kubernetes-gateway://other/web", ["allowed", "refused", "get or grant", "nothing or grant"]),
            ("configmap://shop/roots", ["allowed", "allowed", "get", "allowed"]),
            ("configmap://other/roots", ["allowed", "refused", "get or grant", "nothing or grant"]),
        ] {
            let found = [Own, Namespace, Rbac, Istio].map(|mode| asked(check_of(mode, text)));
            assert_eq!(found, expected, "{text}");
        }
    }

    #[test]
    fn without_an_identity_nothing_is_reviewed() {
        let Ok(crate::secret::SecretName::Kubernetes(name)) = "kubernetes://shop/web".parse() else {
            panic!()
        };
        let object = ObjectId { kind: Kind::Secret, namespace: "shop".into(), name: "web".into() };
        for mode in [Authorize::Rbac, Authorize::Istio] {
            let check = check(mode, &name, std::slice::from_ref(&object), None, Some("shop"));
            assert_eq!(check, Check::Unknown(NO_IDENTITY));
        }
    }
}
