//! Rights: `SubjectAccessReview` and `ReferenceGrant`.

use serde_json::{Value, json};

use super::{Access, Account, Grant, Kind};
use crate::base::text;

pub(super) const PATH: &str = "/apis/authorization.k8s.io/v1/subjectaccessreviews";
/// Those that serve the same objects: the older one first, which more clusters have.
pub(super) const GRANT_VERSIONS: [&str; 2] = ["v1beta1", "v1"];
const GATEWAY_API: &str = "gateway.networking.k8s.io";

/// Why a review says neither yes nor no.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum NoDecision {
    Unreadable,
    Failed(String),
}

/// The review of a service account's right.
pub(super) fn request(account: &Account, access: &Access) -> Value {
    let Account { namespace, name } = account;
    let Access { verb, kind, .. } = access;
    let mut attributes = json!({
        "verb": verb, "group": "", "version": "v1", "resource": kind.plural(), "namespace": &*access.namespace,
    });
    if let (Some(name), Value::Object(attributes)) = (&access.name, &mut attributes) {
        attributes.insert("name".to_owned(), Value::from(&**name));
    }
    json!({
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {
            "user": format!("system:serviceaccount:{namespace}:{name}"),
            "groups": [
                "system:serviceaccounts",
                format!("system:serviceaccounts:{namespace}"),
                "system:authenticated",
            ],
            "resourceAttributes": attributes,
        },
    })
}

/// The decision in an answer. Without a yes, an `evaluationError` means that an authorizer could not say: the API server
/// answers such a request itself with 500, not 403. RBAC reports missing roles as a reason, not as an error.
pub(super) fn decision(answer: &Value) -> Result<bool, NoDecision> {
    let status = answer.get("status").ok_or(NoDecision::Unreadable)?;
    let flag = |name: &str| status.get(name).and_then(Value::as_bool);
    let is_allowed = flag("allowed").ok_or(NoDecision::Unreadable)?;
    let is_denied = flag("denied") == Some(true);
    match status.get("evaluationError").and_then(Value::as_str).unwrap_or_default() {
        error if !error.is_empty() && !is_allowed && !is_denied => {
            Err(NoDecision::Failed(text::sanitize_for_log(error)))
        }
        _ => Ok(is_allowed && !is_denied),
    }
}

/// The rules for Gateways in a list of grants.
pub(super) fn grants(list: &Value) -> Vec<Grant> {
    let items = list.get("items").and_then(Value::as_array).into_iter().flatten();
    items.flat_map(rules).collect()
}

/// The rules of a grant: each of its origins may refer to each of its targets.
fn rules(grant: &Value) -> Vec<Grant> {
    fn all<'a>(grant: &'a Value, path: &str) -> impl Iterator<Item = &'a Value> + Clone {
        grant.pointer(path).and_then(Value::as_array).map_or(&[][..], Vec::as_slice).iter()
    }
    let text =
        |rule: &'static str| move |value: &Value| value.get(rule).and_then(Value::as_str).map(Box::from);
    let is =
        |value: &Value, field: &str, wanted: &str| value.get(field).and_then(Value::as_str) == Some(wanted);
    let targets = all(grant, "/spec/to").filter(|to| is(to, "group", "")).filter_map(|to| {
        let kind =
            [Kind::Secret, Kind::ConfigMap].into_iter().find(|kind| is(to, "kind", &kind.to_string()))?;
        Some((kind, text("name")(to)))
    });
    let origins = all(grant, "/spec/from")
        .filter(|from| is(from, "group", GATEWAY_API) && is(from, "kind", "Gateway"))
        .filter_map(text("namespace"));
    origins
        .flat_map(|from: Box<str>| {
            let targets = targets.clone();
            targets.map(move |(to, name)| Grant { from: from.clone(), to, name })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_clear_yes_is_a_yes_and_an_error_is_no_decision() {
        let cases = [
            (json!({ "allowed": true }), Ok(true)),
            (json!({ "allowed": false, "reason": "RBAC: role not found" }), Ok(false)),
            (json!({ "allowed": true, "denied": true }), Ok(false)),
            (json!({ "allowed": true, "evaluationError": "one webhook failed" }), Ok(true)),
            (json!({ "allowed": false, "denied": true, "evaluationError": "x" }), Ok(false)),
            (
                json!({ "allowed": false, "evaluationError": "the webhook\ntimed out" }),
                Err(NoDecision::Failed("the webhook\u{fffd}timed out".to_owned())),
            ),
            (json!({}), Err(NoDecision::Unreadable)),
            (json!({ "allowed": "true" }), Err(NoDecision::Unreadable)),
        ];
        for (status, expected) in cases {
            assert_eq!(decision(&json!({ "status": status })), expected, "{status}");
        }
        assert_eq!(decision(&json!([])), Err(NoDecision::Unreadable));
    }

    #[test]
    fn a_review_names_the_account_its_groups_and_the_object() {
        let account = Account { namespace: "gw".into(), name: "web".into() };
        let mut access =
            Access { verb: "get", kind: Kind::Secret, namespace: "shop".into(), name: Some("tls".into()) };
        let spec = request(&account, &access)["spec"].clone();
        assert_eq!(spec["user"], "system:serviceaccount:gw:web");
        let groups = ["system:serviceaccounts", "system:serviceaccounts:gw", "system:authenticated"];
        assert_eq!(spec["groups"], json!(groups));
        assert_eq!(spec["resourceAttributes"]["resource"], "secrets");
        assert_eq!(spec["resourceAttributes"]["name"], "tls");
        access.name = None;
        assert!(request(&account, &access)["spec"]["resourceAttributes"].get("name").is_none());
    }

    #[test]
    fn only_grants_to_gateways_for_secrets_and_configmaps_count() {
        let from = |group: &str, kind: &str, namespace: &str| json!({ "group": group, "kind": kind, "namespace": namespace });
        let list = json!({ "items": [
            { "spec": {
                "from": [from(GATEWAY_API, "Gateway", "a"), from(GATEWAY_API, "HTTPRoute", "b"), from("", "Gateway", "c"), 7],
                "to": [
                    { "group": "", "kind": "Secret", "name": "tls" }, { "group": "", "kind": "ConfigMap" },
                    { "group": "", "kind": "Service" }, { "group": "x", "kind": "Secret" }, { "kind": "Secret" },
                ],
            } },
            { "spec": null }, 7,
        ] });
        let grant = |to, name: Option<&str>| Grant { from: "a".into(), to, name: name.map(Box::from) };
        assert_eq!(grants(&list), [grant(Kind::Secret, Some("tls")), grant(Kind::ConfigMap, None)]);
        assert!(grants(&json!({ "items": {} })).is_empty());
    }
}
