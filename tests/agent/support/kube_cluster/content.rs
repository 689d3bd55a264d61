//! What objects hold: as tests write them, and with all that the real server adds.

use std::time::Duration;

use attache::base::clock::{Clock, rfc3339};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Map, Value, json};

use super::answer::uuid;
use super::resource::{Key, Resource};
use super::status::{self, Failure};
use super::store::Stored;

/// A key pair with its root, as PEM.
#[derive(Clone, Debug)]
pub struct Pair {
    pub chain: Vec<u8>,
    pub key: Vec<u8>,
    pub root: Vec<u8>,
}

/// An object as a user would write it.
#[derive(Clone, Debug)]
pub struct Draft {
    pub key: Key,
    pub body: Value,
}

impl Draft {
    /// An empty Secret of type `Opaque`.
    pub fn secret(namespace: &str, name: &str) -> Self {
        Self::of("secrets", namespace, name).with("type", json!("Opaque"))
    }

    pub fn config_map(namespace: &str, name: &str) -> Self {
        Self::of("configmaps", namespace, name)
    }

    /// Any other object.
    pub fn of(plural: &str, namespace: &str, name: &str) -> Self {
        Self { key: Key::new(Resource::of(plural).plural, namespace, name), body: json!({ "metadata": {} }) }
    }

    /// A field beside `metadata`.
    pub fn with(mut self, field: &str, value: Value) -> Self {
        self.body[field] = value;
        self
    }

    /// The pair as `tls.crt`, `tls.key` and `ca.crt`.
    pub fn tls(self, pair: &Pair) -> Self {
        let draft = self.with("type", json!("kubernetes.io/tls"));
        draft.entry("tls.crt", &pair.chain).entry("tls.key", &pair.key).entry("ca.crt", &pair.root)
    }

    /// The pair as `cert`, `key` and `cacert`.
    pub fn generic(self, pair: &Pair) -> Self {
        self.entry("cert", &pair.chain).entry("key", &pair.key).entry("cacert", &pair.root)
    }

    /// An entry of `data`.
    pub fn entry(mut self, name: &str, value: &[u8]) -> Self {
        self.body["data"][name] = match self.key.plural {
            "configmaps" => json!(String::from_utf8(value.to_vec()).unwrap()),
            _ => json!(STANDARD.encode(value)),
        };
        self
    }

    pub fn without(mut self, name: &str) -> Self {
        self.body["data"].as_object_mut().unwrap().remove(name);
        self
    }

    pub fn label(mut self, name: &str, value: &str) -> Self {
        self.body["metadata"]["labels"][name] = json!(value);
        self
    }

    pub fn annotation(mut self, name: &str, value: &str) -> Self {
        self.body["metadata"]["annotations"][name] = json!(value);
        self
    }
}

/// `body` as the server stores it: with all of its own metadata, which is as long as that of a real server.
pub fn stored(key: &Key, body: &Value, old: Option<&Stored>) -> Value {
    let mut new = body.clone();
    let fields = new.as_object_mut().unwrap();
    // `stringData` is written only.
    let texts = fields.remove("stringData");
    fields.remove("kind");
    fields.remove("apiVersion");
    for (name, text) in texts.as_ref().and_then(Value::as_object).into_iter().flatten() {
        new["data"][name] = json!(STANDARD.encode(text.as_str().unwrap()));
    }
    if key.plural == "secrets" && new.get("type").is_none() {
        new["type"] = old.map_or_else(|| json!("Opaque"), |old| old.value["type"].clone());
    }
    let mut metadata = json!({ "name": key.name });
    if !key.namespace.is_empty() {
        metadata["namespace"] = json!(key.namespace);
    }
    let now = rfc3339(Clock::system().now()).to_string();
    let kept = |name: &str| old.and_then(|old| old.text(&["metadata", name])).map(str::to_owned);
    metadata["uid"] = json!(kept("uid").unwrap_or_else(uuid));
    metadata["resourceVersion"] = Value::Null;
    metadata["creationTimestamp"] = json!(kept("creationTimestamp").unwrap_or_else(|| now.clone()));
    for name in ["labels", "annotations"] {
        if let Some(own) = body.pointer(&format!("/metadata/{name}")).filter(|own| !own.is_null()) {
            metadata[name] = own.clone();
        }
    }
    if key.plural == "namespaces" {
        metadata["labels"]["kubernetes.io/metadata.name"] = json!(key.name);
    }
    metadata["managedFields"] = json!([{
        "manager": "kubectl-client-side-apply", "operation": "Update",
        "apiVersion": Resource::of(key.plural).api_version("v1"), "time": now, "fieldsType": "FieldsV1",
        "fieldsV1": owned(&new),
    }]);
    new["metadata"] = metadata;
    new
}

/// The fields of an object as `managedFields` lists them.
fn owned(object: &Value) -> Value {
    let mut fields = Map::new();
    for (name, value) in object.as_object().into_iter().flatten() {
        let mut inner = match value {
            Value::Object(_) => owned(value),
            _ => json!({}),
        };
        if value.is_object() {
            inner["."] = json!({});
        }
        fields.insert(format!("f:{name}"), inner);
    }
    Value::Object(fields)
}

/// What the server refuses of a Secret.
pub fn validate(key: &Key, new: &Value, old: Option<&Stored>) -> Result<(), Failure> {
    let text = |value: &Value, name: &str| value[name].as_str().unwrap_or_default().to_owned();
    let kind = text(new, "type");
    if key.plural != "secrets" {
        return Ok(());
    }
    if let Some(was) = old.map(|old| text(&old.value, "type")).filter(|was| *was != kind) {
        let why = format!("type: Invalid value: \"{kind}\": field is immutable; it was {was}");
        return Err(status::invalid("Secret", &key.name, &why));
    }
    let needs: &[&str] = if kind == "kubernetes.io/tls" { &["tls.crt", "tls.key"] } else { &[] };
    if let Some(missing) = needs.iter().find(|name| new["data"].get(**name).is_none()) {
        return Err(status::invalid("Secret", &key.name, &format!("data[{missing}]: Required value")));
    }
    let values = new["data"].as_object().into_iter().flatten();
    let mut bytes = 0;
    for (name, value) in values {
        let decoded = value.as_str().and_then(|value| STANDARD.decode(value).ok());
        let Some(decoded) = decoded else {
            let why =
                format!("Secret in version \"v1\" cannot be handled as a Secret: data[{name}] is not base64");
            return Err(status::bad_request(&why));
        };
        bytes += decoded.len();
    }
    if bytes > 1 << 20 {
        let why = "data: Too long: may not be more than 1048576 bytes";
        return Err(status::invalid("Secret", &key.name, why));
    }
    Ok(())
}

/// Puts the fields of `patch` into `target`. With `removes`, null removes a field.
pub fn merge(target: &mut Value, patch: &Value, removes: bool) {
    let (Value::Object(into), Value::Object(from)) = (&mut *target, patch) else {
        *target = patch.clone();
        return;
    };
    for (name, value) in from {
        if value.is_null() && removes {
            into.remove(name);
        } else if value.is_object() {
            merge(into.entry(name.clone()).or_insert_with(|| json!({})), value, removes);
        } else {
            into.insert(name.clone(), value.clone());
        }
    }
}

/// Removes from `target` what is in `before` and not in `after`.
pub fn remove_missing(target: &mut Value, before: &Value, after: &Value) {
    for (name, old) in before.as_object().into_iter().flatten() {
        let Some(into) = target.as_object_mut() else { return };
        match after.get(name) {
            None => drop(into.remove(name)),
            Some(new) if old.is_object() => {
                if let Some(inner) = into.get_mut(name) {
                    remove_missing(inner, old, new);
                }
            }
            Some(_) => (),
        }
    }
}

/// A moment from now on, as Kubernetes writes it.
pub fn later(by: Duration) -> String {
    rfc3339(Clock::system().now() + by).to_string()
}
