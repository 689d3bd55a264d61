//! Kubernetes' API server, limited to certificates: it checks every request against the documented API, and can
//! misbehave in every way.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use attache::base::clock::Clock;
use attache::ca::embedded::DevelopmentCa;
use attache::pki::pem;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use rustls::pki_types::CertificateSigningRequestDer;
use rustls::pki_types::pem::PemObject as _;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;

use super::issuer::{Issuer, Lie};
use super::process::{PATIENCE, flags};
use super::tls::{Connection, accept, acceptor};
use super::violations::Violations;

pub const SIGNER: &str = "example.com/spiffe";
const REQUESTS: &str = "/apis/certificates.k8s.io/v1/certificatesigningrequests";
const BUNDLES: &str = "/apis/certificates.k8s.io/v1beta1/clustertrustbundles";

/// How the next requests are handled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Mood {
    Good,
    /// No approval.
    Unapproved,
    /// Approved, but not signed.
    Unsigned,
    Denied,
    Failed,
    /// Something about the certificate is wrong.
    Lie(Lie),
    /// A `status.certificate` that is not PEM.
    JunkCertificate,
    /// This answer to every request.
    Answer(u16, &'static str, String),
    /// These bytes to every request, then the connection closes.
    Raw(Vec<u8>),
    /// Never answers.
    Hang,
    /// Executes requests, and loses the answers.
    LoseAnswers,
    /// Good, but refuses deletions.
    KeepAll,
}

/// One call, as it arrived.
#[derive(Clone, Debug)]
pub struct Call {
    pub method: String,
    pub path: String,
    pub headers: BTreeMap<String, String>,
    pub body: Value,
}

/// A running API server. It stops with the test's runtime, or when it is dropped.
pub struct KubeApi {
    pub address: SocketAddr,
    pub directory: PathBuf,
    state: Arc<State>,
    acceptor: TlsAcceptor,
    task: JoinHandle<()>,
}

struct State {
    mood: Mutex<Mood>,
    calls: Mutex<Vec<Call>>,
    counted: watch::Sender<usize>,
    objects: Mutex<BTreeMap<String, Value>>,
    violations: Violations,
    token: PathBuf,
    issuer: Issuer,
}

impl Drop for KubeApi {
    fn drop(&mut self) {
        self.task.abort();
        self.state.violations.assert_none("Kubernetes' API");
    }
}

impl KubeApi {
    /// An API server with TLS, with its files in `directory`: the token, and the roots of TLS and of the signer.
    pub async fn start(directory: &Path) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let token = directory.join("token");
        if !token.exists() {
            let text = super::files::token("web", "https://kubernetes.default.svc", 3600);
            super::files::write_token(&token, &text);
        }
        let state = Arc::new(State {
            mood: Mutex::new(Mood::Good),
            calls: Mutex::default(),
            counted: watch::channel(0).0,
            objects: Mutex::default(),
            violations: Violations::default(),
            token,
            issuer: Issuer::of(directory, &directory.join("signer")),
        });
        let acceptor = acceptor(&DevelopmentCa::open(&directory.join("cluster"), Clock::system()).unwrap());
        let task = spawn(listener, &acceptor, &state);
        Self { address, directory: directory.to_owned(), state, acceptor, task }
    }

    /// Accepts no connections for a while; its objects stay.
    pub async fn stop(&mut self) {
        self.task.abort();
        let _ = (&mut self.task).await;
    }

    pub async fn resume(&mut self) {
        let listener = TcpListener::bind(self.address).await.unwrap();
        self.task = spawn(listener, &self.acceptor, &self.state);
    }

    /// The agent's options for it.
    pub fn client(&self) -> Vec<String> {
        let file = |name: &str| self.directory.join(name).display().to_string();
        let options = [
            ("--ca", "kubernetes".to_owned()),
            ("--ca-address", self.address.to_string()),
            ("--ca-root", file("cluster/root-cert.pem")),
            ("--token-file", file("token")),
            ("--kubernetes-signer", SIGNER.to_owned()),
            ("--kubernetes-root", file("signer/root-cert.pem")),
        ];
        flags(options)
    }

    pub fn set(&self, mood: Mood) {
        *self.state.mood.lock().unwrap() = mood;
    }

    pub fn calls(&self) -> Vec<Call> {
        self.state.calls.lock().unwrap().clone()
    }

    /// The names of the existing requests.
    pub fn names(&self) -> Vec<String> {
        self.state.objects.lock().unwrap().keys().cloned().collect()
    }

    /// Deletes every request, like an administrator.
    pub fn delete_all(&self) {
        self.state.objects.lock().unwrap().clear();
    }

    /// Waits for a call that is as wanted, after the first `known`.
    pub async fn wait_call(&self, known: usize, is_wanted: impl Fn(&Call) -> bool) -> Call {
        let mut counted = self.state.counted.subscribe();
        let found = timeout(PATIENCE, async {
            loop {
                if let Some(call) = self.calls().into_iter().skip(known).find(&is_wanted) {
                    return call;
                }
                counted.changed().await.unwrap();
            }
        });
        found
            .await
            .unwrap_or_else(|_| panic!("the call never comes; the last one: {:#?}", self.calls().last()))
    }
}

fn spawn(listener: TcpListener, acceptor: &TlsAcceptor, state: &Arc<State>) -> JoinHandle<()> {
    let state = Arc::clone(state);
    tokio::spawn(accept(listener, Some(acceptor.clone()), move |io| serve(io, Arc::clone(&state))))
}

async fn serve(mut io: Connection, state: Arc<State>) {
    let Connection::Right(tls) = &io else { unreachable!("every connection has TLS") };
    if tls.get_ref().1.alpn_protocol() != Some(b"http/1.1") {
        state.violations.add("HTTP/1.1 was not agreed on".to_owned());
    }
    let Some(call) = read(&mut io).await else { return };
    let mood = state.mood.lock().unwrap().clone();
    state.calls.lock().unwrap().push(call.clone());
    let (code, body) = state.answer(&call, &mood);
    state.counted.send_modify(|count| *count += 1);
    let bytes = match mood {
        Mood::Hang => return std::future::pending().await,
        Mood::LoseAnswers => return,
        Mood::Raw(bytes) => bytes,
        Mood::Answer(code, headers, body) => response(code, headers, &body),
        _ => response(code, "", &body.to_string()),
    };
    let _ = io.write_all(&bytes).await;
    let _ = io.shutdown().await;
}

pub fn response(code: u16, headers: &str, body: &str) -> Vec<u8> {
    let length = body.len();
    format!(
        "HTTP/1.1 {code} As It Is\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n{headers}\r\n{body}"
    )
    .into_bytes()
}

async fn read(io: &mut (impl tokio::io::AsyncRead + Unpin)) -> Option<Call> {
    let mut io = BufReader::new(io);
    let mut line = String::new();
    io.read_line(&mut line).await.ok().filter(|read| *read > 0)?;
    let [method, path, "HTTP/1.1"] = line.split_whitespace().collect::<Vec<_>>()[..] else {
        panic!("not a request line: {line:?}")
    };
    let (method, path) = (method.to_owned(), path.to_owned());
    let mut headers = BTreeMap::new();
    loop {
        let mut line = String::new();
        io.read_line(&mut line).await.ok()?;
        let Some((name, value)) = line.trim_end().split_once(": ") else { break };
        assert!(headers.insert(name.to_ascii_lowercase(), value.to_owned()).is_none(), "{name} is repeated");
    }
    let length = headers.get("content-length").map_or(0, |length| length.parse().unwrap());
    let mut body = vec![0; length];
    io.read_exact(&mut body).await.ok()?;
    let body = if body.is_empty() { Value::Null } else { serde_json::from_slice(&body).unwrap() };
    Some(Call { method, path, headers, body })
}

/// An error in the API server's format.
pub fn status(code: u16, reason: &str, message: &str) -> Value {
    json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "message": message, "reason": reason, "code": code,
    })
}

/// A refusal by RBAC.
pub fn forbidden(verb: &str) -> Value {
    let message = format!(
        "certificatesigningrequests.certificates.k8s.io is forbidden: User \"system:serviceaccount:default:web\" cannot \
         {verb} resource \"certificatesigningrequests\" in API group \"certificates.k8s.io\" at the cluster scope"
    );
    status(403, "Forbidden", &message)
}

impl State {
    fn answer(&self, call: &Call, mood: &Mood) -> (u16, Value) {
        let wrong = |what: String| self.violations.add(format!("{what}: {call:#?}"));
        let header = |name: &str| call.headers.get(name).map(String::as_str);
        let token = std::fs::read_to_string(&self.token).unwrap_or_default();
        let headers = call.headers.keys().map(String::as_str).collect::<Vec<_>>();
        let known = ["accept", "authorization", "content-length", "content-type", "host", "user-agent"];
        if let Some(other) = headers.iter().find(|name| !known.contains(name)) {
            wrong(format!("header {other}"));
        }
        for name in ["accept", "content-type"] {
            if header(name) != Some("application/json") {
                wrong(name.to_owned());
            }
        }
        if !header("user-agent").is_some_and(|agent| agent.starts_with("attache/")) {
            wrong("user-agent".to_owned());
        }
        if header("authorization") != Some(format!("Bearer {}", token.trim()).as_str()) {
            return (401, status(401, "Unauthorized", "Unauthorized"));
        }
        let mut objects = self.objects.lock().unwrap();
        let not_found = |name: &str| {
            let message = format!("certificatesigningrequests.certificates.k8s.io \"{name}\" not found");
            (404, status(404, "NotFound", &message))
        };
        let name = call.path.strip_prefix(REQUESTS).and_then(|rest| rest.strip_prefix('/'));
        match (call.method.as_str(), name) {
            ("POST", None) if call.path == REQUESTS => {
                let name = call.body.pointer("/metadata/name").and_then(Value::as_str).unwrap_or_default();
                if objects.contains_key(name) {
                    let message =
                        format!("certificatesigningrequests.certificates.k8s.io \"{name}\" already exists");
                    return (409, status(409, "AlreadyExists", &message));
                }
                if let Err(what) = check(&call.body) {
                    wrong(what.clone());
                    return (422, status(422, "Invalid", &what));
                }
                let mut object = call.body.clone();
                object["metadata"]["uid"] = json!("5f0c8e3a-1d3b-4a3c-9a44-6d2f3f0f8d10");
                object["metadata"]["resourceVersion"] = json!("1");
                object["spec"]["username"] = json!("system:serviceaccount:default:web");
                object["status"] = json!({});
                objects.insert(name.to_owned(), object.clone());
                (201, object)
            }
            ("GET", Some(name)) => {
                let Some(object) = objects.get_mut(name) else { return not_found(name) };
                self.advance(object, mood);
                (200, object.clone())
            }
            ("DELETE", Some(_)) if *mood == Mood::KeepAll => (403, forbidden("delete")),
            ("DELETE", Some(name)) => match objects.remove(name) {
                Some(_) => (200, json!({ "kind": "Status", "apiVersion": "v1", "status": "Success" })),
                None => not_found(name),
            },
            ("GET", None)
                if call.path == format!("{BUNDLES}?fieldSelector=spec.signerName%3Dexample.com%2Fspiffe") =>
            {
                let bundle = |lie| {
                    let [_, root] = self.issuer.chain(lie);
                    let text = String::from_utf8(pem::of_certificates([root])).unwrap();
                    json!({
                        "metadata": { "name": "example.com:spiffe:v1" },
                        "spec": { "signerName": SIGNER, "trustBundle": text },
                    })
                };
                let items = [bundle(Lie::None), bundle(Lie::Unchained)];
                let list = json!({
                    "kind": "ClusterTrustBundleList", "apiVersion": "certificates.k8s.io/v1beta1",
                    "metadata": { "resourceVersion": "7" }, "items": items,
                });
                (200, list)
            }
            _ => {
                wrong("no such path".to_owned());
                (404, status(404, "NotFound", "the server could not find the requested resource"))
            }
        }
    }

    /// Applies what approvers and signers have done since the last call.
    fn advance(&self, object: &mut Value, mood: &Mood) {
        let condition = |kind: &str, reason: &str, message: &str| {
            json!({
                "type": kind, "status": "True", "reason": reason, "message": message,
                "lastUpdateTime": "2026-11-20T20:08:14Z", "lastTransitionTime": "2026-11-20T20:08:14Z",
            })
        };
        if object["status"].get("certificate").is_some() || *mood == Mood::Unapproved {
            return;
        }
        if *mood == Mood::Denied {
            let denied =
                condition("Denied", "KubectlDeny", "This CSR was denied by kubectl certificate deny.");
            object["status"]["conditions"] = json!([denied]);
            return;
        }
        let approved =
            condition("Approved", "KubectlApprove", "This CSR was approved by kubectl certificate approve.");
        let failed = condition("Failed", "SignerValidationFailure", "the signer knows no such workload");
        object["status"]["conditions"] = match mood {
            Mood::Failed => json!([approved, failed]),
            _ => json!([approved]),
        };
        let asked = STANDARD.decode(object["spec"]["request"].as_str().unwrap()).unwrap();
        let asked = String::from_utf8(asked).unwrap();
        let ttl = Duration::from_secs(object["spec"]["expirationSeconds"].as_u64().unwrap());
        let (leaf, lie) = match mood {
            Mood::Good | Mood::KeepAll => (self.issuer.issue(&asked, ttl, Lie::None), Lie::None),
            Mood::Lie(Lie::Unchained) => (self.issuer.by_a_stranger(&asked, ttl), Lie::Unchained),
            Mood::Lie(lie) => (self.issuer.issue(&asked, ttl, *lie), *lie),
            Mood::JunkCertificate => {
                object["status"]["certificate"] = json!(STANDARD.encode("<html>"));
                return;
            }
            _ => return,
        };
        let [intermediate, _] = self.issuer.chain(lie);
        object["status"]["certificate"] = json!(STANDARD.encode(pem::of_certificates([&leaf, intermediate])));
    }
}

/// Checks a new request like the API server, and that it has no field that the API does not know.
fn check(body: &Value) -> Result<(), String> {
    let keys = |path: &str, wanted: &[&str]| {
        let object = body.pointer(path).and_then(Value::as_object).ok_or(format!("no {path}"))?;
        let keys: Vec<_> = object.keys().map(String::as_str).collect();
        if keys == wanted { Ok(()) } else { Err(format!("{path} has {keys:?}")) }
    };
    keys("", &["apiVersion", "kind", "metadata", "spec"])?;
    keys("/metadata", &["name", "labels", "annotations"])?;
    keys("/metadata/labels", &["app.kubernetes.io/managed-by"])?;
    keys("/metadata/annotations", &["spiffe-id"])?;
    keys("/spec", &["request", "signerName", "expirationSeconds", "usages"])?;
    let text = |path: &str| body.pointer(path).and_then(Value::as_str).unwrap_or_default();
    let is = |path: &str, wanted: &str| {
        if text(path) == wanted { Ok(()) } else { Err(format!("{path} is {:?}", text(path))) }
    };
    is("/apiVersion", "certificates.k8s.io/v1")?;
    is("/kind", "CertificateSigningRequest")?;
    is("/spec/signerName", SIGNER)?;
    let name = text("/metadata/name");
    if !name.starts_with("attache-")
        || name.contains(|c: char| !c.is_ascii_lowercase() && !c.is_ascii_digit() && c != '-')
    {
        return Err(format!("the name {name:?}"));
    }
    let seconds = body["spec"]["expirationSeconds"].as_i64().unwrap_or_default();
    if i32::try_from(seconds).is_err() || seconds < 600 {
        return Err(format!("expirationSeconds {seconds}: may not specify a duration less than 600 seconds"));
    }
    let request = STANDARD.decode(text("/spec/request")).map_err(|error| error.to_string())?;
    let request =
        CertificateSigningRequestDer::from_pem_slice(&request).map_err(|error| error.to_string())?;
    let mut usages = vec!["digital signature", "client auth", "server auth"];
    if is_rsa(&request) {
        usages.push("key encipherment");
    }
    if body["spec"]["usages"] == json!(usages) {
        Ok(())
    } else {
        Err(format!("usages {}", body["spec"]["usages"]))
    }
}

/// Whether `request` has an RSA key: it contains the algorithm's identifier.
fn is_rsa(request: &CertificateSigningRequestDer<'_>) -> bool {
    const RSA: [u8; 11] = [0x06, 0x09, 0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 0x01, 0x01, 0x01];
    request.windows(RSA.len()).any(|window| window == RSA)
}
