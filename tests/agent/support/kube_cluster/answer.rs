//! From a request to its answer.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use http::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, RETRY_AFTER, USER_AGENT};
use http::{HeaderMap, Method, Request, Response};
use http_body_util::{BodyExt as _, StreamBody};
use hyper::body::{Bytes, Frame, Incoming};
use percent_encoding::percent_decode_str;
use rustls::pki_types::CertificateDer;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::time::sleep;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;

use super::calls::Call;
use super::fault::{self, Fault};
use super::rbac::User;
use super::resource::Target;
use super::serve::{Body, whole};
use super::status::{self, Failure};
use super::{Shared, objects, reviews};

/// Counts the requests that are being answered; watches not.
struct Busy<'a>(&'a Shared);

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.0.state.lock().unwrap().busy -= 1;
    }
}

pub async fn answer(
    shared: &Arc<Shared>,
    request: Request<Incoming>,
    close: &CancellationToken,
    is_http2: bool,
    certificate: Option<&CertificateDer<'static>>,
) -> Result<Response<Body>, io::Error> {
    let (head, body) = request.into_parts();
    let body = body.collect().await.map_err(io::Error::other)?.to_bytes();
    let user = authenticate(shared, &head.headers, certificate);
    let target = Target::parse(head.uri.path());
    let query = parse_query(head.uri.query().unwrap_or_default());
    let call = Call {
        method: head.method.to_string(),
        verb: verb(&head.method, target.as_ref(), &query).to_owned(),
        path: head.uri.path().to_owned(),
        query,
        user: user.as_ref().map(|user| user.name.clone()).unwrap_or_default(),
        is_http2,
        body: serde_json::from_slice(&body).unwrap_or(Value::Null),
        at: Instant::now(),
    };
    check(shared, &call, &head.headers, &body);
    let (fault, is_over) = {
        let mut state = shared.state.lock().unwrap();
        state.calls.push(call.clone());
        let is_watch = call.verb == "watch";
        let is_over = !is_watch && state.limit.is_some_and(|limit| state.busy >= limit);
        state.busy += usize::from(!is_watch);
        state.busiest = state.busiest.max(state.busy);
        (fault::take(&mut state.faults, &call), is_over)
    };
    shared.counted.send_modify(|count| *count += 1);
    let _busy = (call.verb != "watch").then(|| Busy(shared));
    if is_over {
        return Ok(too_many(1));
    }
    if let Some(Fault::Delay(time)) = &fault {
        sleep(*time).await;
    }
    let delay = *shared.latency.lock().unwrap();
    if !delay.is_zero() {
        sleep(delay).await;
    }
    let proper = || match user {
        None => failed(&status::unauthorized()),
        Some(user) => route(shared, &call, &head.headers, target.as_ref(), &user),
    };
    match fault {
        None | Some(Fault::Delay(_)) => Ok(proper()),
        Some(Fault::TooMany(seconds)) => Ok(too_many(seconds)),
        Some(Fault::Internal) => Ok(failed(&status::internal())),
        Some(Fault::Unavailable) => Ok(failed(&status::unavailable())),
        Some(Fault::Proxy) => {
            Ok(response(504, "text/html", "<html><body><h1>504 Gateway Time-out</h1></body></html>"))
        }
        Some(Fault::Answer(code, body)) => Ok(response(code, "application/json", body)),
        Some(Fault::Junk) => Ok(response(200, "application/json", "<html>\0{")),
        Some(Fault::Silent) => std::future::pending().await,
        Some(Fault::Reset) => Err(io::Error::other("reset on request")),
        Some(Fault::Close) => {
            close.cancel();
            std::future::pending().await
        }
        Some(Fault::Lose) => {
            drop(proper());
            close.cancel();
            std::future::pending().await
        }
        Some(Fault::Truncate) => {
            let (head, body) = proper().into_parts();
            let bytes = body.collect().await?.to_bytes();
            Ok(Response::from_parts(head, whole(bytes.slice(..bytes.len() / 2))))
        }
        Some(Fault::Slow(bytes, pause)) => Ok(proper().map(|body| slow(body, bytes, pause))),
    }
}

/// The user of the bearer token or of the client certificate; none if the credential is refused.
fn authenticate(
    shared: &Shared,
    headers: &HeaderMap,
    certificate: Option<&CertificateDer<'static>>,
) -> Option<User> {
    let state = shared.state.lock().unwrap();
    if let Some(certificate) = certificate {
        let (_, parsed) = x509_parser::parse_x509_certificate(certificate).ok()?;
        let name = parsed.subject().iter_common_name().next()?.as_str().ok()?;
        return Some(User::named(name));
    }
    let Some(value) = headers.get(AUTHORIZATION) else { return Some(User::anonymous()) };
    let token = value.to_str().ok()?.strip_prefix("Bearer ")?;
    state.tokens.get(token).cloned()
}

fn parse_query(query: &str) -> BTreeMap<String, String> {
    let decode = |text: &str| percent_decode_str(&text.replace('+', " ")).decode_utf8_lossy().into_owned();
    let pairs = query.split('&').filter(|pair| !pair.is_empty());
    pairs
        .map(|pair| pair.split_once('=').unwrap_or((pair, "")))
        .map(|(name, value)| (decode(name), decode(value)))
        .collect()
}

pub fn is_true(query: &BTreeMap<String, String>, name: &str) -> bool {
    query.get(name).is_some_and(|value| ["1", "true"].contains(&value.as_str()))
}

fn verb(method: &Method, target: Option<&Target>, query: &BTreeMap<String, String>) -> &'static str {
    let Some(target) = target else { return "" };
    match *method {
        Method::GET if target.name.is_some() => "get",
        Method::GET if is_true(query, "watch") => "watch",
        Method::GET => "list",
        Method::POST => "create",
        Method::PUT => "update",
        Method::PATCH => "patch",
        Method::DELETE if target.name.is_some() => "delete",
        Method::DELETE => "deletecollection",
        _ => "",
    }
}

/// Parameters that each verb has.
fn parameters(verb: &str) -> &'static [&'static str] {
    match verb {
        "list" => &[
            "fieldSelector",
            "labelSelector",
            "limit",
            "continue",
            "resourceVersion",
            "resourceVersionMatch",
            "timeoutSeconds",
        ],
        "watch" => &[
            "watch",
            "fieldSelector",
            "labelSelector",
            "resourceVersion",
            "resourceVersionMatch",
            "timeoutSeconds",
            "allowWatchBookmarks",
            "sendInitialEvents",
        ],
        "create" | "update" => &["fieldManager", "fieldValidation", "dryRun"],
        "patch" => &["fieldManager", "fieldValidation", "dryRun", "force"],
        "delete" => &["gracePeriodSeconds", "propagationPolicy", "dryRun"],
        _ => &[],
    }
}

/// Records what no client of the API should send.
fn check(shared: &Shared, call: &Call, headers: &HeaderMap, body: &[u8]) {
    let wrong = |what: &str| shared.violations.add(format!("{what}: {call:#?}"));
    let known = parameters(&call.verb);
    for name in call.query.keys().filter(|name| !known.contains(&name.as_str())) {
        wrong(&format!("{name} is no parameter of {:?}", call.verb));
    }
    let header = |name| headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
    if !["", "*/*", "application/json"].contains(&header(ACCEPT)) {
        wrong("this server answers in JSON only");
    }
    if header(USER_AGENT).is_empty() {
        wrong("there is no user agent");
    }
    if !body.is_empty() && call.body.is_null() {
        wrong("the body is not JSON");
    }
    let is_patch = header(CONTENT_TYPE) == "application/apply-patch+yaml"
        || header(CONTENT_TYPE) == "application/merge-patch+json";
    let is_right = match call.method.as_str() {
        "POST" | "PUT" => header(CONTENT_TYPE) == "application/json" && !body.is_empty(),
        "PATCH" => is_patch && !body.is_empty(),
        "GET" => body.is_empty(),
        "DELETE" => true,
        _ => false,
    };
    if !is_right {
        wrong("the method, its content type and its body do not fit");
    }
}

fn route(
    shared: &Arc<Shared>,
    call: &Call,
    headers: &HeaderMap,
    target: Option<&Target>,
    user: &User,
) -> Response<Body> {
    if let Some(target) = target {
        return objects::answer(shared, call, headers, target, user).unwrap_or_else(|error| failed(&error));
    }
    let answered = match (call.method.as_str(), call.path.as_str()) {
        ("GET", "/version") => Ok(success(200, &version())),
        ("GET", "/healthz" | "/livez" | "/readyz") => Ok(response(200, "text/plain; charset=utf-8", "ok")),
        ("POST", path) => match reviews::answer(shared, path, &call.body, user) {
            Some(answered) => answered.map(|body| success(201, &body)),
            None => Err(status::no_such_path()),
        },
        _ => Err(status::no_such_path()),
    };
    if answered.as_ref().is_err_and(|error| error.code == 404) {
        shared.violations.add(format!("no such path: {call:#?}"));
    }
    answered.unwrap_or_else(|error| failed(&error))
}

fn version() -> Value {
    json!({
        "major": "1", "minor": "36", "gitVersion": "v1.36.3", "gitTreeState": "clean", "goVersion": "go1.26.8",
        "compiler": "gc", "platform": "linux/amd64",
    })
}

pub fn success(code: u16, body: &Value) -> Response<Body> {
    response(code, "application/json", body.to_string())
}

pub fn failed(failure: &Failure) -> Response<Body> {
    if let Value::String(text) = &failure.body {
        return response(failure.code, "text/plain; charset=utf-8", text.clone());
    }
    let mut answer = success(failure.code, &failure.body);
    if let Some(seconds) = failure.body.pointer("/details/retryAfterSeconds").and_then(Value::as_u64) {
        answer.headers_mut().insert(RETRY_AFTER, seconds.into());
    }
    answer
}

fn too_many(seconds: u64) -> Response<Body> {
    let text = "Too many requests, please try again later.\n";
    let mut answer = response(429, "text/plain; charset=utf-8", text);
    answer.headers_mut().insert(RETRY_AFTER, seconds.into());
    answer
}

pub fn response(code: u16, kind: &'static str, body: impl Into<Bytes>) -> Response<Body> {
    with_body(code, kind, whole(body))
}

pub fn with_body(code: u16, kind: &'static str, body: Body) -> Response<Body> {
    let answer = Response::builder().status(code).header(CONTENT_TYPE, kind);
    let answer = answer.header("audit-id", uuid()).header("cache-control", "no-cache, private");
    answer.body(body).unwrap()
}

/// A random number in the form of a UUID.
pub fn uuid() -> String {
    let [a, b] = [fastrand::u64(..), fastrand::u64(..)];
    format!(
        "{:08x}-{:04x}-4{:03x}-a{:03x}-{:012x}",
        a >> 32,
        a >> 16 & 0xffff,
        a & 0xfff,
        b >> 52,
        b & 0xffff_ffff_ffff
    )
}

fn slow(mut body: Body, bytes: usize, pause: Duration) -> Body {
    let (parts, received) = mpsc::channel(1);
    tokio::spawn(async move {
        while let Some(frame) = body.frame().await {
            let Some(mut rest) = frame.ok().and_then(|frame| frame.into_data().ok()) else { return };
            while !rest.is_empty() {
                let part = rest.split_to(bytes.min(rest.len()));
                sleep(pause).await;
                if parts.send(Ok(Frame::data(part))).await.is_err() {
                    return;
                }
            }
        }
    });
    StreamBody::new(ReceiverStream::new(received)).boxed_unsync()
}
