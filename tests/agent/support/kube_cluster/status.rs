//! Errors as Kubernetes writes them.

use serde_json::{Value, json};

use super::rbac::Access;
use super::resource::{Key, Resource};

/// An answer that is no object: its code, and its `Status` or text.
#[derive(Clone, Debug)]
pub struct Failure {
    pub code: u16,
    pub body: Value,
}

pub fn failure(code: u16, reason: &str, message: &str, details: Option<Value>) -> Failure {
    let mut body = json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "message": message, "reason": reason,
    });
    if let Some(details) = details {
        body["details"] = details;
    }
    body["code"] = json!(code);
    Failure { code, body }
}

fn details(plural: &str, name: &str) -> Value {
    let resource = Resource::of(plural);
    let mut details = json!({ "name": name, "kind": plural });
    if !resource.group.is_empty() {
        details["group"] = json!(resource.group);
    }
    details
}

pub fn unauthorized() -> Failure {
    failure(401, "Unauthorized", "Unauthorized", None)
}

pub fn not_found(key: &Key) -> Failure {
    let message = format!("{} \"{}\" not found", Resource::of(key.plural).qualified(), key.name);
    failure(404, "NotFound", &message, Some(details(key.plural, &key.name)))
}

/// A path that the server does not serve: no `Status`.
pub fn no_such_path() -> Failure {
    Failure { code: 404, body: Value::String("404 page not found\n".to_owned()) }
}

pub fn already_exists(key: &Key) -> Failure {
    let message = format!("{} \"{}\" already exists", Resource::of(key.plural).qualified(), key.name);
    failure(409, "AlreadyExists", &message, Some(details(key.plural, &key.name)))
}

pub fn conflict(key: &Key) -> Failure {
    let message = format!(
        "Operation cannot be fulfilled on {} \"{}\": the object has been modified; please apply your changes to the latest version and try again",
        Resource::of(key.plural).qualified(),
        key.name
    );
    failure(409, "Conflict", &message, Some(details(key.plural, &key.name)))
}

pub fn invalid(kind: &str, name: &str, why: &str) -> Failure {
    let message = format!("{kind} \"{name}\" is invalid: {why}");
    failure(422, "Invalid", &message, Some(json!({ "name": name, "kind": kind })))
}

pub fn bad_request(message: &str) -> Failure {
    failure(400, "BadRequest", message, None)
}

pub fn unsupported_media_type() -> Failure {
    let message = "the body of the request was in an unknown format - accepted media types include: application/json, application/yaml, application/vnd.kubernetes.protobuf";
    failure(415, "UnsupportedMediaType", message, None)
}

/// The versions to start from are compacted.
pub fn expired(message: &str) -> Failure {
    failure(410, "Expired", message, None)
}

pub fn internal() -> Failure {
    let message = "Internal error occurred: etcdserver: request timed out";
    let causes = json!({ "causes": [{ "message": "etcdserver: request timed out" }] });
    failure(500, "InternalError", message, Some(causes))
}

pub fn unavailable() -> Failure {
    let message = "the server is currently unable to handle the request";
    failure(503, "ServiceUnavailable", message, None)
}

pub fn forbidden(user: &str, access: &Access) -> Failure {
    let Access { verb, group, resource, namespace, name } = access;
    let (plural, _) = resource.split_once('/').unwrap_or((resource, ""));
    let qualified = if group.is_empty() { plural.to_owned() } else { format!("{plural}.{group}") };
    let object = if name.is_empty() { qualified } else { format!("{qualified} \"{name}\"") };
    let place = if namespace.is_empty() {
        "at the cluster scope".to_owned()
    } else {
        format!("in the namespace \"{namespace}\"")
    };
    let message = format!(
        "{object} is forbidden: User \"{user}\" cannot {verb} resource \"{resource}\" in API group \"{group}\" {place}"
    );
    let mut details = json!({ "kind": plural });
    if !name.is_empty() {
        details = json!({ "name": name, "kind": plural });
    }
    if !group.is_empty() {
        details["group"] = json!(group);
    }
    failure(403, "Forbidden", &message, Some(details))
}

/// The answer to a deletion.
pub fn deleted(key: &Key, uid: &str) -> Value {
    let mut details = details(key.plural, &key.name);
    details["uid"] = json!(uid);
    json!({ "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details })
}
