//! Requests to stored objects.

use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use http::header::CONTENT_TYPE;
use http::{HeaderMap, Response};
use serde_json::{Value, json};

use super::answer::{is_true, response, success, with_body};
use super::calls::Call;
use super::rbac::{self, Access, User};
use super::resource::{Key, Selection, Target};
use super::serve::Body;
use super::status::{self, Failure};
use super::store::Stored;
use super::watch::{self, Opened};
use super::{Shared, State, accounts, content, signers};

/// The time after which a watch ends that names none.
const LASTS: Duration = Duration::from_secs(45 * 60);

pub fn answer(
    shared: &Arc<Shared>,
    call: &Call,
    headers: &HeaderMap,
    target: &Target,
    user: &User,
) -> Result<Response<Body>, Failure> {
    let mut state = shared.state.lock().unwrap();
    let (resource, verb) = (target.resource, call.verb.as_str());
    let selection = match verb {
        "list" | "watch" => Some(Selection::parse(target, &call.query).map_err(|why| {
            shared.violations.add(format!("{why}: {call:#?}"));
            status::bad_request(&why)
        })?),
        _ => None,
    };
    let named = selection.as_ref().and_then(|selection| selection.name.as_deref()).or(target.name.as_deref());
    let mut access = Access {
        verb: verb.to_owned(),
        group: resource.group.to_owned(),
        resource: match &target.subresource {
            Some(subresource) => format!("{}/{subresource}", resource.plural),
            None => resource.plural.to_owned(),
        },
        namespace: target.namespace.clone().unwrap_or_default(),
        name: named.unwrap_or_default().to_owned(),
    };
    state.require(user, &access)?;
    if resource.is_custom && !state.has_gateway_api {
        return Err(status::no_such_path());
    }
    match (verb, selection, target.key()) {
        ("list", Some(selection), _) => list(&mut state, call, target, &selection),
        ("watch", Some(selection), _) => watch(shared, state, call, target, selection, user),
        ("get", _, Some(key)) => {
            signers::act(&mut state, &key);
            let object = state.store.object(&key).ok_or_else(|| status::not_found(&key))?;
            Ok(response(200, "application/json", object.json(target.version, false)))
        }
        ("create", _, Some(key)) if access.resource == "serviceaccounts/token" => {
            state.store.object(&key).ok_or_else(|| status::not_found(&key))?;
            Ok(success(201, &accounts::request_token(&mut state, &key, &call.body)))
        }
        ("create", _, None) => {
            let key = named_in(&call.body, target)?;
            state.require_namespace(&key)?;
            if state.store.object(&key).is_some() {
                return Err(status::already_exists(&key));
            }
            let body = signers::admit(shared, &state, &key, &call.body, user)?;
            write(shared, &mut state, &key, &body, target, 201)
        }
        ("update", _, Some(key)) => {
            let old = state.store.object(&key).ok_or_else(|| status::not_found(&key))?;
            let known = call.body.pointer("/metadata/resourceVersion").and_then(Value::as_str);
            if known.is_some_and(|known| known != old.version.to_string()) {
                return Err(status::conflict(&key));
            }
            write(shared, &mut state, &key, &call.body, target, 200)
        }
        ("patch", _, Some(key)) => {
            let old = state.store.object(&key);
            if old.is_none() {
                // The real server authorizes a creation without a name.
                access.verb = "create".to_owned();
                access.name = String::new();
                state.require(user, &access)?;
                state.require_namespace(&key)?;
            }
            let code = if old.is_some() { 200 } else { 201 };
            let new = patched(&mut state, call, headers, &key, old.as_deref())?;
            write(shared, &mut state, &key, &new, target, code)
        }
        ("delete", _, Some(key)) => {
            let old = state.store.delete(&key).ok_or_else(|| status::not_found(&key))?;
            accounts::deleted(&mut state, &old);
            Ok(success(200, &status::deleted(&key, old.text(&["metadata", "uid"]).unwrap_or_default())))
        }
        _ => {
            shared.violations.add(format!("this server has no such method: {call:#?}"));
            Err(status::failure(
                405,
                "MethodNotAllowed",
                "the server does not allow this method on the requested resource",
                None,
            ))
        }
    }
}

impl State {
    pub fn require(&self, user: &User, access: &Access) -> Result<(), Failure> {
        if rbac::allows(&self.rules, &self.store, user, access) {
            Ok(())
        } else {
            Err(status::forbidden(&user.name, access))
        }
    }

    fn require_namespace(&self, key: &Key) -> Result<(), Failure> {
        let namespace = Key::new("namespaces", "", &key.namespace);
        if key.namespace.is_empty() || self.store.object(&namespace).is_some() {
            Ok(())
        } else {
            Err(status::not_found(&namespace))
        }
    }
}

fn named_in(body: &Value, target: &Target) -> Result<Key, Failure> {
    let text = |name: &str| body["metadata"][name].as_str().unwrap_or_default();
    let namespace = target.namespace.as_deref().unwrap_or_default();
    if !["", namespace].contains(&text("namespace")) {
        let why = "the namespace of the provided object does not match the namespace sent on the request";
        return Err(status::bad_request(why));
    }
    let name = text("name");
    let is_valid = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || ['-', '.', ':'].contains(&c);
    if name.is_empty() || !name.chars().all(is_valid) {
        let why = format!(
            "metadata.name: Invalid value: \"{name}\": a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.'"
        );
        return Err(status::invalid(target.resource.kind, name, &why));
    }
    Ok(Key::new(target.resource.plural, namespace, name))
}

fn write(
    shared: &Arc<Shared>,
    state: &mut State,
    key: &Key,
    body: &Value,
    target: &Target,
    code: u16,
) -> Result<Response<Body>, Failure> {
    let kind = target.resource.kind;
    for (name, expected) in [("kind", kind), ("apiVersion", &target.resource.api_version(target.version))] {
        if body.get(name).is_some_and(|found| found != expected) {
            return Err(status::bad_request(&format!("{name} is {}, not {expected}", body[name])));
        }
    }
    let old = state.store.object(key);
    let new = content::stored(key, body, old.as_deref());
    content::validate(key, &new, old.as_deref())?;
    let stored = state.store.write(key.clone(), new);
    accounts::written(shared, &stored);
    Ok(response(code, "application/json", stored.json(target.version, false)))
}

/// The object after a patch.
fn patched(
    state: &mut State,
    call: &Call,
    headers: &HeaderMap,
    key: &Key,
    old: Option<&Stored>,
) -> Result<Value, Failure> {
    match headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok()) {
        Some("application/apply-patch+yaml") => apply(state, call, key),
        Some("application/merge-patch+json") => {
            let mut new = old.ok_or_else(|| status::not_found(key))?.value.clone();
            content::merge(&mut new, &call.body, true);
            Ok(new)
        }
        _ => Err(status::unsupported_media_type()),
    }
}

/// Server-side apply: fields that the manager applied before and does not now are removed; the others are merged.
fn apply(state: &mut State, call: &Call, key: &Key) -> Result<Value, Failure> {
    let Some(manager) = call.query.get("fieldManager").filter(|manager| !manager.is_empty()) else {
        let why = "fieldManager: Required value: is required for apply patch";
        return Err(status::invalid("PatchOptions.meta.k8s.io", "", why));
    };
    let name = call.body.pointer("/metadata/name").and_then(Value::as_str);
    if call.body.get("apiVersion").is_none() || call.body.get("kind").is_none() || name != Some(&key.name) {
        return Err(status::bad_request(
            "apiVersion, kind and metadata.name must be set, and be those of the path",
        ));
    }
    let mut new = state.store.object(key).map_or_else(|| json!({}), |old| old.value.clone());
    let place = (manager.clone(), key.clone());
    if let Some(before) = state.applied.insert(place, call.body.clone()) {
        content::remove_missing(&mut new, &before, &call.body);
    }
    content::merge(&mut new, &call.body, false);
    Ok(new)
}

fn list(
    state: &mut State,
    call: &Call,
    target: &Target,
    selection: &Selection,
) -> Result<Response<Body>, Failure> {
    let number = |name: &str| call.query.get(name).and_then(|text| text.parse::<u64>().ok());
    let limit = number("limit").filter(|limit| *limit > 0);
    let (version, mut objects) = match call.query.get("continue").filter(|text| !text.is_empty()) {
        None => {
            if let Some(future) = number("resourceVersion").filter(|version| *version > state.store.version) {
                return Err(too_large(future, state.store.version));
            }
            (state.store.version, state.store.select(selection))
        }
        Some(text) => {
            let bad = || status::bad_request("continue key is not valid: incorrect continue token");
            let decoded = URL_SAFE_NO_PAD.decode(text).map_err(|_| bad())?;
            let number =
                serde_json::from_slice::<Value>(&decoded).ok().and_then(|token| token["list"].as_u64());
            let (version, rest) = state.store.rest(number.ok_or_else(bad)?).ok_or_else(|| {
                status::expired("The provided continue parameter is too old to display a consistent list result. You can start a new list without the continue parameter, or use the continue token in this response to retrieve the remainder of the results. Continuing with the provided token results in an inconsistent list - objects that were created, modified, or deleted between the time the first chunk was returned and now may show up in the list.")
            })?;
            (version, rest)
        }
    };
    let mut metadata = json!({ "resourceVersion": version.to_string() });
    if let Some(limit) =
        limit.map(|limit| usize::try_from(limit).unwrap()).filter(|limit| *limit < objects.len())
    {
        let rest = objects.split_off(limit);
        if !selection.has_selector() {
            metadata["remainingItemCount"] = json!(rest.len());
        }
        let token = json!({ "v": "meta.k8s.io/v1", "rv": version, "list": state.store.keep(version, rest) });
        metadata["continue"] = json!(URL_SAFE_NO_PAD.encode(token.to_string()));
    }
    let api = target.resource.api_version(target.version);
    let mut text = format!(
        "{{\"kind\":\"{}List\",\"apiVersion\":\"{api}\",\"metadata\":{metadata},\"items\":[",
        target.resource.kind
    )
    .into_bytes();
    for (index, object) in objects.iter().enumerate() {
        if index > 0 {
            text.push(b',');
        }
        text.extend(object.json(target.version, true));
    }
    text.extend(b"]}\n");
    Ok(response(200, "application/json", text))
}

fn too_large(version: u64, current: u64) -> Failure {
    let message = format!("Timeout: Too large resource version: {version}, current: {current}");
    let causes = json!([{ "reason": "ResourceVersionTooLarge", "message": "Too large resource version" }]);
    status::failure(504, "Timeout", &message, Some(json!({ "causes": causes, "retryAfterSeconds": 1 })))
}

fn watch(
    shared: &Arc<Shared>,
    mut state: std::sync::MutexGuard<'_, State>,
    call: &Call,
    target: &Target,
    selection: Selection,
    user: &User,
) -> Result<Response<Body>, Failure> {
    let query = &call.query;
    let from = match query.get("resourceVersion").map(String::as_str) {
        None | Some("" | "0") => None,
        Some(text) => Some(text.parse::<u64>().map_err(|_| {
            shared.violations.add(format!("a version that the server never gave: {call:#?}"));
            let why =
                format!("Invalid value: \"{text}\": strconv.ParseUint: parsing \"{text}\": invalid syntax");
            status::failure(500, "", &format!("resourceVersion: {why}"), None)
        })?),
    };
    let sends_initial = is_true(query, "sendInitialEvents");
    let has_bookmarks = is_true(query, "allowWatchBookmarks");
    if sends_initial != query.contains_key("resourceVersionMatch") || (sends_initial && !has_bookmarks) {
        return Err(status::invalid(
            "ListOptions",
            "",
            "sendInitialEvents, resourceVersionMatch and allowWatchBookmarks go together",
        ));
    }
    let begin = state.store.watch(&selection, from, &user.name);
    let Some(begin) = begin else {
        let message =
            format!("too old resource version: {} ({})", from.unwrap_or_default(), state.store.version);
        return Ok(with_body(200, "application/json", watch::too_old(&status::expired(&message).body)));
    };
    // Without a version the initial events are marked although the client has not asked for it.
    let is_marked = sends_initial || (from.is_none() && has_bookmarks && shared.marks_initial);
    let initial = is_marked.then_some(state.store.version);
    drop(state);
    let seconds =
        query.get("timeoutSeconds").and_then(|text| text.parse().ok()).filter(|seconds| *seconds > 0);
    let lasts = seconds.map_or(LASTS, Duration::from_secs);
    let opened = Opened { selection, api: target.version, has_bookmarks, initial, lasts, begin };
    Ok(with_body(200, "application/json", watch::stream(shared, opened)))
}
