//! Sources of tokens: a token service that accepts only the form that RFC 8693 and Google's documentation describe, and
//! the metadata server of Google's machines. Both record their calls, and can misbehave.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use attache::base::clock::Clock;
use attache::ca::embedded::DevelopmentCa;
use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt as _, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use percent_encoding::percent_decode_str;
use serde_json::json;
use tokio::net::TcpListener;
use tokio_stream::StreamExt as _;

use super::files;
use super::tls::{Connection, accept, acceptor};
use super::violations::Violations;

const DEFAULT_ACCOUNT: &str = "/computeMetadata/v1/instance/service-accounts/default";

/// How the next calls are handled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mood {
    Good,
    /// Never answers.
    Hang,
    /// One byte every ten milliseconds.
    Slow,
    /// Closes the connection instead of answering.
    Cut,
    /// More than any client should read.
    Huge,
    /// Another server's page.
    Html,
    /// JSON without a token.
    OtherJson,
    /// A token that is not valid in a header.
    TwoLines,
    /// A token that requires the caller to sign each call.
    DPoP,
    /// RFC 6749's error, with its description.
    Refuse(u16, &'static str, &'static str),
    /// Another body.
    Say(u16, &'static str),
    /// Another server's answer at the metadata server's name.
    NoFlavor,
}

pub struct Rules {
    pub mood: Mood,
    /// The issued token; a new one each time if none.
    pub gives: Option<String>,
    /// Its `expires_in`.
    pub lifetime: u64,
    /// What the form must contain beside the fixed fields.
    pub asked: Vec<(&'static str, &'static str)>,
    /// The token that is exchanged.
    pub subject: String,
}

/// A running token service. It stops with the test's runtime.
pub struct TokenService {
    pub address: SocketAddr,
    state: Arc<State>,
}

struct State {
    rules: Mutex<Rules>,
    /// The path of each call.
    calls: Mutex<Vec<String>>,
    violations: Violations,
    given: Mutex<Vec<String>>,
}

impl TokenService {
    /// Starts it without TLS.
    pub async fn start() -> Self {
        Self::start_at("127.0.0.1:0".parse().unwrap(), None).await
    }

    /// Starts it with a TLS certificate of the CA in this directory, if there is one.
    pub async fn start_at(address: SocketAddr, ca: Option<&Path>) -> Self {
        let listener = TcpListener::bind(address).await.unwrap();
        let address = listener.local_addr().unwrap();
        let acceptor =
            ca.map(|directory| acceptor(&DevelopmentCa::open(directory, Clock::system()).unwrap()));
        let rules = Rules {
            mood: Mood::Good,
            gives: None,
            lifetime: 3600,
            asked: Vec::new(),
            subject: files::token("web", "sts", 3600),
        };
        let state = Arc::new(State {
            rules: Mutex::new(rules),
            calls: Mutex::default(),
            violations: Violations::default(),
            given: Mutex::default(),
        });
        tokio::spawn({
            let state = Arc::clone(&state);
            let serve = move |io| serve(io, Arc::clone(&state));
            accept(listener, acceptor, serve)
        });
        Self { address, state }
    }

    pub fn change(&self, change: impl FnOnce(&mut Rules)) {
        change(&mut self.state.rules.lock().unwrap());
    }

    pub fn set(&self, mood: Mood) {
        self.change(|rules| rules.mood = mood);
    }

    /// The paths of all calls.
    pub fn calls(&self) -> Vec<String> {
        self.state.calls.lock().unwrap().clone()
    }

    /// The issued tokens, in order.
    pub fn given(&self) -> Vec<String> {
        self.state.given.lock().unwrap().clone()
    }

    /// The token that it exchanges.
    pub fn subject(&self) -> String {
        self.state.rules.lock().unwrap().subject.clone()
    }

    /// Writes that token into `directory`, and returns the file's path.
    pub fn subject_file(&self, directory: &Path) -> String {
        let file = directory.join("subject-token");
        std::fs::write(&file, self.subject()).unwrap();
        file.display().to_string()
    }
}

impl Drop for TokenService {
    fn drop(&mut self) {
        self.state.violations.assert_none("the token service or the metadata server");
    }
}

async fn serve(io: Connection, state: Arc<State>) {
    let service = service_fn(|request| answer(request, Arc::clone(&state)));
    let _ = hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(io), service).await;
}

async fn answer(
    request: Request<Incoming>,
    state: Arc<State>,
) -> Result<Response<BoxBody<Bytes, Infallible>>, std::io::Error> {
    let (head, body) = request.into_parts();
    let body = body.collect().await.unwrap().to_bytes();
    let path = head.uri.to_string();
    let judged = state.judge(&head, &body);
    state.calls.lock().unwrap().push(path.clone());
    let (mood, good) = judged.unwrap_or_else(|violation| {
        state.violations.add(format!("{path}: {violation}"));
        (Mood::Refuse(400, "invalid_request", "not as documented"), String::new())
    });
    let (status, body) = match mood {
        Mood::Hang => std::future::pending().await,
        Mood::Cut => return Err(std::io::Error::other("cut")),
        Mood::Huge => (200, "7".repeat(4 << 20)),
        Mood::Html => (200, "<html><body>Welcome</body></html>".to_owned()),
        Mood::OtherJson => (200, json!({ "kind": "Status" }).to_string()),
        Mood::TwoLines => (200, json!({ "access_token": "two\nlines" }).to_string()),
        Mood::DPoP => (200, json!({ "access_token": "a", "token_type": "DPoP" }).to_string()),
        Mood::Refuse(status, error, "") => (status, json!({ "error": error }).to_string()),
        Mood::Refuse(status, error, description) => {
            (status, json!({ "error": error, "error_description": description }).to_string())
        }
        Mood::Say(status, body) => (status, body.to_owned()),
        Mood::Good | Mood::Slow | Mood::NoFlavor => (200, good),
    };
    let mut response = Response::new(match mood {
        Mood::Slow => {
            let bytes = tokio_stream::iter(body.into_bytes());
            let frames = bytes.then(async |byte| {
                tokio::time::sleep(Duration::from_millis(10)).await;
                Ok(Frame::data(Bytes::copy_from_slice(&[byte])))
            });
            StreamBody::new(frames).boxed()
        }
        _ => Full::new(Bytes::from(body)).boxed(),
    });
    *response.status_mut() = StatusCode::from_u16(status).unwrap();
    if path.starts_with("/computeMetadata/") && mood != Mood::NoFlavor {
        response.headers_mut().insert("metadata-flavor", "Google".parse().unwrap());
    }
    Ok(response)
}

impl State {
    /// The outcome of a call, if it is documented.
    fn judge(&self, head: &http::request::Parts, body: &[u8]) -> Result<(Mood, String), String> {
        let rules = self.rules.lock().unwrap();
        let header = |name: &str| head.headers.get(name).map(|value| value.to_str().unwrap());
        header("host").ok_or("no host")?;
        if head.headers.contains_key("authorization") {
            return Err("it authenticates, which it must not".to_owned());
        }
        let path = head.uri.path();
        if let Some(what) = path.strip_prefix(DEFAULT_ACCOUNT) {
            if head.method != "GET" || header("metadata-flavor") != Some("Google") || !body.is_empty() {
                return Err(format!("{} {:?} {body:?}", head.method, head.headers));
            }
            return match (what, head.uri.query()) {
                ("/token", None) => Ok((rules.mood, self.access_token(&rules))),
                ("/identity", Some(query)) => {
                    let query = form(query);
                    let [("audience", audience), ("format", "full")] = pairs(&query)[..] else {
                        return Err(format!("query {query:?}"));
                    };
                    let jwt = files::token("web", audience, 3600);
                    self.given.lock().unwrap().push(jwt.clone());
                    Ok((rules.mood, jwt))
                }
                other => Err(format!("{other:?}")),
            };
        }
        if head.method != "POST"
            || head.uri != "/v1/token"
            || header("content-type") != Some("application/x-www-form-urlencoded")
            || header("accept") != Some("application/json")
        {
            return Err(format!("{} {} {:?}", head.method, head.uri, head.headers));
        }
        let form = form(std::str::from_utf8(body).map_err(|error| error.to_string())?);
        let mut wanted = BTreeMap::from([
            ("grant_type", "urn:ietf:params:oauth:grant-type:token-exchange"),
            ("requested_token_type", "urn:ietf:params:oauth:token-type:access_token"),
            ("subject_token_type", "urn:ietf:params:oauth:token-type:jwt"),
            ("subject_token", &rules.subject),
        ]);
        wanted.extend(rules.asked.iter().copied());
        if pairs(&form) != wanted.into_iter().collect::<Vec<_>>() {
            return Err(format!("form {form:?}"));
        }
        Ok((rules.mood, self.access_token(&rules)))
    }

    fn access_token(&self, rules: &Rules) -> String {
        let mut given = self.given.lock().unwrap();
        let fresh = || format!("ya29.{}-{:x}", given.len(), fastrand::u128(..));
        let token = rules.gives.clone().unwrap_or_else(fresh);
        if rules.mood == Mood::Good {
            given.push(token.clone());
        }
        let answer = json!({
            "access_token": token,
            "issued_token_type": "urn:ietf:params:oauth:token-type:access_token",
            "token_type": "Bearer",
            "expires_in": rules.lifetime,
        });
        answer.to_string()
    }
}

/// Names and values, sorted; repeated names are kept.
fn form(text: &str) -> Vec<(String, String)> {
    let decode = |part: &str| percent_decode_str(&part.replace('+', " ")).decode_utf8().unwrap().into_owned();
    let pairs = text.split('&').map(|pair| pair.split_once('=').unwrap());
    let mut pairs: Vec<_> = pairs.map(|(name, value)| (decode(name), decode(value))).collect();
    pairs.sort();
    pairs
}

fn pairs(form: &[(String, String)]) -> Vec<(&str, &str)> {
    form.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect()
}
