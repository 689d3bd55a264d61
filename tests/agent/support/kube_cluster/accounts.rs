//! Service accounts and their tokens: what the real server's controllers do.

use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use serde_json::{Value, json};
use tokio::time::sleep;

use super::content::{self, later};
use super::rbac::User;
use super::resource::Key;
use super::store::Stored;
use super::{Shared, State};

const TOKEN: &str = "kubernetes.io/service-account-token";
const ACCOUNT: &str = "kubernetes.io/service-account.name";

/// A new token of a service account, which the server takes from now on. Its signature is none.
pub fn new_token(state: &mut State, namespace: &str, account: &str, lifetime: Option<Duration>) -> String {
    let user = User::account(namespace, account);
    state.numbers += 1;
    let mut claims = json!({
        "iss": "kubernetes/serviceaccount",
        "kubernetes.io/serviceaccount/namespace": namespace,
        "kubernetes.io/serviceaccount/service-account.name": account,
        "sub": user.name,
        "jti": state.numbers,
    });
    if let Some(lifetime) = lifetime {
        let expires = attache::base::clock::Clock::system().now() + lifetime;
        claims["exp"] = json!(expires.duration_since(std::time::UNIX_EPOCH).unwrap().as_secs());
    }
    let part = |value: Value| URL_SAFE_NO_PAD.encode(value.to_string());
    let token = format!("{}.{}.c2lnbmF0dXJl", part(json!({ "alg": "RS256" })), part(claims));
    state.tokens.insert(token.clone(), user);
    token
}

/// The answer to a `TokenRequest`.
pub fn request_token(state: &mut State, key: &Key, body: &Value) -> Value {
    let seconds = body.pointer("/spec/expirationSeconds").and_then(Value::as_u64).unwrap_or(3600);
    let lifetime = Duration::from_secs(seconds);
    let token = new_token(state, &key.namespace, &key.name, Some(lifetime));
    let mut answer = body.clone();
    answer["metadata"] = json!({ "name": key.name, "namespace": key.namespace });
    answer["status"] = json!({ "token": token, "expirationTimestamp": later(lifetime) });
    answer
}

/// Fills a Secret for a token, or deletes it where there is no such account; a little later.
pub fn written(shared: &Arc<Shared>, stored: &Arc<Stored>) {
    let is_token = stored.key.plural == "secrets" && stored.text(&["type"]) == Some(TOKEN);
    let Some(account) = stored.text(&["metadata", "annotations", ACCOUNT]).filter(|_| is_token) else {
        return;
    };
    if stored.text(&["data", "token"]).is_some() {
        return;
    }
    let (shared, key, account) = (Arc::clone(shared), stored.key.clone(), account.to_owned());
    tokio::spawn(async move {
        sleep(shared.token_delay).await;
        let mut state = shared.state.lock().unwrap();
        let Some(old) = state.store.object(&key) else { return };
        let Some(owner) = state.store.object(&Key::new("serviceaccounts", &key.namespace, &account)) else {
            state.store.delete(&key);
            return;
        };
        let mut body = old.value.clone();
        let token = new_token(&mut state, &key.namespace, &account, None);
        for (name, value) in
            [("token", token.as_bytes()), ("ca.crt", &shared.root), ("namespace", key.namespace.as_bytes())]
        {
            body["data"][name] = json!(STANDARD.encode(value));
        }
        body["metadata"]["annotations"]["kubernetes.io/service-account.uid"] =
            owner.value["metadata"]["uid"].clone();
        let new = content::stored(&key, &body, Some(&old));
        state.store.write(key, new);
    });
}

/// Tokens end with their Secret, and with their account, which takes its Secrets with it.
pub fn deleted(state: &mut State, old: &Stored) {
    let key = &old.key;
    if key.plural == "secrets" && old.text(&["type"]) == Some(TOKEN) {
        let token = STANDARD.decode(old.text(&["data", "token"]).unwrap_or_default()).unwrap();
        state.tokens.remove(String::from_utf8(token).unwrap().as_str());
    }
    if key.plural == "serviceaccounts" {
        let user = User::account(&key.namespace, &key.name);
        state.tokens.retain(|_, other| *other != user);
        let is_own = |secret: &Stored| {
            secret.key.namespace == key.namespace
                && secret.text(&["type"]) == Some(TOKEN)
                && secret.text(&["metadata", "annotations", ACCOUNT]) == Some(&key.name)
        };
        let own = state.store.all("secrets").filter(|secret| is_own(secret)).map(|secret| secret.key.clone());
        for secret in own.collect::<Vec<_>>() {
            state.store.delete(&secret);
        }
    }
}
