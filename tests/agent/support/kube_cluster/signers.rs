//! Requests for certificates: who approves and signs them.

use serde_json::{Value, json};

use super::rbac::User;
use super::resource::Key;
use super::status::{self, Failure};
use super::{Shared, State};

const REQUESTS: &str = "certificatesigningrequests";

/// What an API server checks, and what approvers and signers do.
pub trait Signers: Send {
    /// What is wrong with a new request.
    fn check(&self, request: &Value) -> Result<(), String>;

    /// What approvers and signers have done to `request` since it was last read. True if that is anything.
    fn act(&self, request: &mut Value) -> bool;
}

/// A new object as it is stored: of a request, with what the server adds.
pub(super) fn admit(
    shared: &Shared,
    state: &State,
    key: &Key,
    body: &Value,
    user: &User,
) -> Result<Value, Failure> {
    let mut body = body.clone();
    if key.plural != REQUESTS {
        return Ok(body);
    }
    if let Some(Err(why)) = state.signers.as_ref().map(|signers| signers.check(&body)) {
        shared.violations.add(format!("{why}: {body:#}"));
        return Err(status::invalid("CertificateSigningRequest", &key.name, &why));
    }
    body["spec"]["username"] = json!(user.name);
    body["spec"]["groups"] = json!(user.groups);
    body["status"] = json!({});
    Ok(body)
}

/// Lets approvers and signers act before a request is read.
pub(super) fn act(state: &mut State, key: &Key) {
    let Some(old) = state.store.object(key).filter(|_| key.plural == REQUESTS) else { return };
    let mut request = old.value.clone();
    if state.signers.as_ref().is_some_and(|signers| signers.act(&mut request)) {
        state.store.write(key.clone(), request);
    }
}
