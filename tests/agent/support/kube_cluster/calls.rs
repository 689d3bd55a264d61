//! What was asked, as it arrived.

use std::collections::BTreeMap;
use std::time::Instant;

use serde_json::Value;

/// One request.
#[derive(Clone, Debug)]
pub struct Call {
    pub method: String,
    /// Kubernetes' verb, like `get`, `list` or `watch`; empty for paths without objects.
    pub verb: String,
    pub path: String,
    pub query: BTreeMap<String, String>,
    /// Empty where the credential is refused.
    pub user: String,
    /// HTTP/2 or HTTP/1.1.
    pub is_http2: bool,
    pub body: Value,
    pub at: Instant,
}

impl Call {
    /// A get, list or watch of one object: by its path, or by a field selector.
    pub fn names(&self, name: &str) -> bool {
        let selector = format!("metadata.name={name}");
        self.path.rsplit('/').next() == Some(name) || self.query.get("fieldSelector") == Some(&selector)
    }

    pub fn is(&self, verb: &str, plural: &str) -> bool {
        self.verb == verb && self.path.split('/').any(|part| part == plural)
    }
}
