//! Reviews: who a user is, and what it may.

use serde_json::{Value, json};

use super::Shared;
use super::rbac::{self, Access, User};
use super::status::{self, Failure};

/// The answer to a review; none where `path` is none.
pub fn answer(shared: &Shared, path: &str, body: &Value, user: &User) -> Option<Result<Value, Failure>> {
    let (group, kind) = match path {
        "/apis/authorization.k8s.io/v1/subjectaccessreviews" => {
            ("authorization.k8s.io", "SubjectAccessReview")
        }
        "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews" => {
            ("authorization.k8s.io", "SelfSubjectAccessReview")
        }
        "/apis/authentication.k8s.io/v1/selfsubjectreviews" => ("authentication.k8s.io", "SelfSubjectReview"),
        _ => return None,
    };
    Some(review(shared, group, kind, body, user))
}

fn review(shared: &Shared, group: &str, kind: &str, body: &Value, user: &User) -> Result<Value, Failure> {
    let state = shared.state.lock().unwrap();
    let access = Access {
        verb: "create".to_owned(),
        group: group.to_owned(),
        resource: format!("{}s", kind.to_lowercase()),
        namespace: String::new(),
        name: String::new(),
    };
    state.require(user, &access)?;
    let api = format!("{group}/v1");
    if body["kind"] != kind || body["apiVersion"] != api.as_str() {
        return Err(status::bad_request(&format!("the body is no {kind} of {api}")));
    }
    let mut answer = body.clone();
    answer["metadata"] = json!({});
    if kind == "SelfSubjectReview" {
        answer["status"] = json!({ "userInfo": { "username": user.name, "groups": user.groups } });
        return Ok(answer);
    }
    let spec = &body["spec"];
    let subject = if kind == "SubjectAccessReview" { subject(spec) } else { user.clone() };
    let wanted = &spec["resourceAttributes"];
    if (subject.name.is_empty() && subject.groups.is_empty()) || !wanted.is_object() {
        let why = "spec.resourceAttributes: Invalid value: exactly one of nonResourceAttributes or resourceAttributes must be specified, and at least one of user or group";
        return Err(status::invalid(&format!("{kind}.{group}"), "", why));
    }
    let text = |name: &str| wanted[name].as_str().unwrap_or_default().to_owned();
    let resource = match text("subresource").as_str() {
        "" => text("resource"),
        subresource => format!("{}/{subresource}", text("resource")),
    };
    let access = Access {
        verb: text("verb"),
        group: text("group"),
        resource,
        namespace: text("namespace"),
        name: text("name"),
    };
    let is_allowed = rbac::allows(&state.rules, &state.store, &subject, &access);
    answer["status"] = if is_allowed {
        json!({ "allowed": true, "reason": "RBAC: allowed by RoleBinding \"test\"" })
    } else {
        json!({ "allowed": false })
    };
    Ok(answer)
}

/// The user of a review. Groups count only where the review names them, as on the real server.
fn subject(spec: &Value) -> User {
    let groups = spec["groups"].as_array().into_iter().flatten().filter_map(Value::as_str);
    User {
        name: spec["user"].as_str().unwrap_or_default().to_owned(),
        groups: groups.map(str::to_owned).collect(),
    }
}
