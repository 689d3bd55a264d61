mod calls;
mod connections;
mod server;
mod tls;
mod watches;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use super::{Kind, ObjectId, Of, Selection};

/// A Secret as the API server writes it.
fn secret(name: &str, version: &str, data: &[(&str, &str)]) -> Value {
    let data: Value = data.iter().map(|(key, value)| (*key, STANDARD.encode(value))).collect();
    json!({
        "kind": "Secret", "apiVersion": "v1",
        "metadata": { "name": name, "namespace": "gw", "uid": "6a", "resourceVersion": version },
        "data": data, "type": "Opaque",
    })
}

fn status(code: u16, reason: &str, message: &str) -> Value {
    json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "message": message, "reason": reason, "code": code,
    })
}

fn id(name: &str) -> ObjectId {
    ObjectId { kind: Kind::Secret, namespace: "gw".into(), name: name.into() }
}

fn named(name: &str) -> Selection {
    Selection { kind: Kind::Secret, namespace: "gw".into(), of: Of::Name(name.into()) }
}

fn wanted(is_wanted: impl Fn(&str) -> bool + Send + Sync + 'static) -> Selection {
    Selection { kind: Kind::Secret, namespace: "gw".into(), of: Of::Wanted(std::sync::Arc::new(is_wanted)) }
}
