//! A Vault that accepts only what Vault's API documentation describes, answers in the same format, and can misbehave.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use attache::base::clock::Clock;
use attache::ca::embedded::DevelopmentCa;
use attache::pki::{certificate, pem};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, CertificateSigningRequestDer};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use x509_parser::certification_request::X509CertificationRequest;
use x509_parser::extensions::{GeneralName, ParsedExtension};
use x509_parser::prelude::FromDer as _;

use super::issuer::{Issuer, Lie};
use super::tls::{Connection, accept, acceptor};
use super::violations::Violations;

/// How the next calls of one kind are handled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mood {
    Good,
    /// Never answers.
    Hang,
    /// One byte every ten milliseconds.
    Slow,
    /// Closes the connection instead of answering.
    Cut,
    /// A Content-Length above the body's length.
    Short,
    /// More than any client should read.
    Huge,
    /// Another server's page.
    Html,
    /// 200, with JSON that is not Vault's.
    OtherJson,
    /// Text instead of certificates.
    Junk,
    /// Something about the certificate is wrong.
    Lie(Lie),
    Refuse(u16, &'static str),
}

/// This Vault's configuration, and what it requires of its callers.
pub struct Rules {
    pub sign: Mood,
    pub login: Mood,
    pub renew: Mood,
    pub namespace: Option<&'static str>,
    /// Further headers that requests must have.
    pub headers: Vec<(&'static str, &'static str)>,
    /// The lifetime that requests must have.
    pub ttl: &'static str,
    /// The lease of a login and of a renewal, in seconds.
    pub lease: (u64, u64),
    pub is_renewable: bool,
    /// Whether its engine has the root above its intermediate.
    pub knows_root: bool,
    pub warnings: Value,
}

/// A running Vault. It stops with the test's runtime.
pub struct FakeVault {
    pub address: SocketAddr,
    pub jwt: String,
    scheme: &'static str,
    state: Arc<State>,
}

struct State {
    rules: Mutex<Rules>,
    /// The path of each documented call.
    calls: Mutex<Vec<String>>,
    /// The other calls.
    violations: Violations,
    /// The valid tokens.
    tokens: Mutex<Vec<String>>,
    jwt: String,
    issuer: Issuer,
}

struct Request {
    method: String,
    path: String,
    headers: BTreeMap<String, String>,
    body: Value,
}

impl FakeVault {
    pub async fn start(directory: &Path) -> Self {
        Self::start_at(directory, "127.0.0.1:0".parse().unwrap(), true).await
    }

    /// Starts it with its files in `directory`; its root is `fake-vault/root-cert.pem`.
    pub async fn start_at(directory: &Path, address: SocketAddr, has_tls: bool) -> Self {
        let listener = TcpListener::bind(address).await.unwrap();
        let address = listener.local_addr().unwrap();
        let files = directory.join("fake-vault");
        let rules = Rules {
            sign: Mood::Good,
            login: Mood::Good,
            renew: Mood::Good,
            namespace: None,
            headers: Vec::new(),
            ttl: "86400s",
            lease: (3600, 3600),
            is_renewable: true,
            knows_root: true,
            warnings: Value::Null,
        };
        // A second server in the same directory accepts the same token from the workload.
        let jwt = std::fs::read_to_string(directory.join("jwt"));
        let jwt = jwt.unwrap_or_else(|_| super::files::token("web", "vault", 3600));
        let state = Arc::new(State {
            rules: Mutex::new(rules),
            calls: Mutex::default(),
            violations: Violations::default(),
            tokens: Mutex::default(),
            jwt: jwt.clone(),
            issuer: Issuer::of(directory, &files),
        });
        let acceptor = has_tls.then(|| acceptor(&DevelopmentCa::open(&files, Clock::system()).unwrap()));
        tokio::spawn({
            let state = Arc::clone(&state);
            let serve = move |io| serve(io, Arc::clone(&state));
            accept(listener, acceptor, serve)
        });
        Self { address, jwt, scheme: if has_tls { "https" } else { "http" }, state }
    }

    pub fn change(&self, change: impl FnOnce(&mut Rules)) {
        change(&mut self.state.rules.lock().unwrap());
    }

    /// The paths of all calls.
    pub fn calls(&self) -> Vec<String> {
        self.state.calls.lock().unwrap().clone()
    }

    /// How many calls were made to `path`.
    pub fn count(&self, path: &str) -> usize {
        self.calls().iter().filter(|call| *call == path).count()
    }

    /// Accepts `token` as one of its own.
    pub fn admit(&self, token: &str) {
        self.state.tokens.lock().unwrap().push(token.to_owned());
    }

    /// No longer accepts any of its tokens.
    pub fn revoke(&self) {
        self.state.tokens.lock().unwrap().clear();
    }

    pub fn tokens(&self) -> Vec<String> {
        self.state.tokens.lock().unwrap().clone()
    }

    pub fn origin(&self) -> String {
        format!("{}://{}", self.scheme, self.address)
    }

    /// The agent's options to log in to it, with its token in `directory`.
    pub fn client(&self, directory: &Path) -> Vec<String> {
        let jwt = directory.join("jwt");
        std::fs::write(&jwt, &self.jwt).unwrap();
        let (jwt, root) =
            (jwt.display().to_string(), directory.join("fake-vault/root-cert.pem").display().to_string());
        let origin = self.origin();
        let options = ["--ca", "vault", "--ca-address", &origin, "--ca-root", &root, "--vault-role", "web"]
            .into_iter()
            .chain(["--vault-pki-mount", "mesh/pki", "--vault-auth-role", "app", "--token-file", &jwt]);
        options.map(str::to_owned).collect()
    }
}

impl Drop for FakeVault {
    fn drop(&mut self) {
        self.state.violations.assert_none("Vault's API");
    }
}

async fn serve(mut io: Connection, state: Arc<State>) {
    let Some(request) = read(&mut io).await else { return };
    let path = request.path.clone();
    let (mood, good) = match state.judge(&request) {
        Ok(judged) => judged,
        Err(violation) => {
            state.violations.add(format!("{path}: {violation}"));
            (Mood::Refuse(400, "not as documented"), Value::Null)
        }
    };
    state.calls.lock().unwrap().push(path);
    let (status, body) = match mood {
        Mood::Hang => std::future::pending().await,
        Mood::Cut => return,
        Mood::Refuse(status, words) => {
            let errors = if words.is_empty() { json!([]) } else { json!([words]) };
            (status, json!({ "errors": errors }).to_string())
        }
        Mood::Html => (200, "<html><body>Welcome</body></html>".to_owned()),
        Mood::OtherJson => (200, json!({ "kind": "Status", "data": [1] }).to_string()),
        Mood::Huge => (200, "7".repeat(4 << 20)),
        _ => (200, good.to_string()),
    };
    let kind = if mood == Mood::Html { "text/html" } else { "application/json" };
    let announced = body.len() + if mood == Mood::Short { 100 } else { 0 };
    let head = format!(
        "HTTP/1.1 {status} \r\nCache-Control: no-store\r\nContent-Type: {kind}\r\n\
         Strict-Transport-Security: max-age=31536000; includeSubDomains\r\nRetry-After: 1\r\n\
         Content-Length: {announced}\r\n\r\n"
    );
    if mood == Mood::Slow {
        for byte in format!("{head}{body}").bytes() {
            if io.write_all(&[byte]).await.is_err() {
                return;
            }
            let _ = io.flush().await;
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
    let _ = io.write_all(format!("{head}{body}").as_bytes()).await;
    let _ = io.flush().await;
    if mood != Mood::Short {
        // The client closes the connection.
        let _ = io.read(&mut [0; 1]).await;
    }
}

async fn read(io: &mut Connection) -> Option<Request> {
    let mut bytes = Vec::new();
    let end = loop {
        if let Some(end) = bytes.windows(4).position(|window| window == b"\r\n\r\n") {
            break end;
        }
        if io.read_buf(&mut bytes).await.ok()? == 0 {
            return None;
        }
    };
    let head = String::from_utf8(bytes[..end].to_vec()).unwrap();
    let mut lines = head.split("\r\n");
    let mut first = lines.next()?.split(' ').map(str::to_owned);
    let (method, path) = (first.next()?, first.next()?);
    let headers: BTreeMap<_, _> = lines
        .map(|line| line.split_once(':').unwrap())
        .map(|(name, value)| (name.to_ascii_lowercase(), value.trim().to_owned()))
        .collect();
    let length: usize = headers.get("content-length").map_or(0, |length| length.parse().unwrap());
    while bytes.len() < end + 4 + length {
        if io.read_buf(&mut bytes).await.ok()? == 0 {
            return None;
        }
    }
    let body = serde_json::from_slice(&bytes[end + 4..]).unwrap_or(Value::Null);
    Some(Request { method, path, headers, body })
}

/// Vault's envelope around `data` and `auth`.
fn envelope(data: Value, auth: Value, warnings: &Value) -> Value {
    json!({
        "request_id": "6b3b5e1c-2c5a-4f2f-a2a8-ffb0a8b9a3ee",
        "lease_id": "",
        "renewable": false,
        "lease_duration": 0,
        "data": data,
        "wrap_info": null,
        "warnings": warnings,
        "auth": auth,
    })
}

impl State {
    /// The outcome of a call, if the documentation describes it.
    fn judge(&self, request: &Request) -> Result<(Mood, Value), String> {
        let rules = self.rules.lock().unwrap();
        if request.method != "POST" {
            return Err(format!("method {}", request.method));
        }
        let needs_token = request.path != "/v1/auth/kubernetes/login";
        let token = request.headers.get("x-vault-token");
        let mut wanted =
            BTreeMap::from([("accept", "application/json"), ("content-type", "application/json")]);
        wanted.insert("x-vault-request", "true");
        wanted.extend(rules.namespace.map(|namespace| ("x-vault-namespace", namespace)));
        wanted.extend(rules.headers.iter().copied());
        let mut got: BTreeMap<_, _> =
            request.headers.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        for name in ["host", "content-length"] {
            got.remove(name).ok_or(format!("no {name}"))?;
        }
        if got.remove("x-vault-token").is_some() != needs_token {
            return Err("a token where none is wanted, or none where one is".to_owned());
        }
        if got != wanted {
            return Err(format!("headers {got:?}, not {wanted:?}"));
        }
        let is_known = token.is_some_and(|token| self.tokens.lock().unwrap().contains(token));
        if needs_token && !is_known {
            return Ok((Mood::Refuse(403, "permission denied"), Value::Null));
        }
        match request.path.as_str() {
            "/v1/auth/kubernetes/login" => {
                let body = json!({ "role": "app", "jwt": self.jwt });
                if request.body != body {
                    return Err(format!("body {}", request.body));
                }
                let mut tokens = self.tokens.lock().unwrap();
                let token = format!("hvs.CAESI{}{}", tokens.len(), fastrand::u64(..));
                if rules.login == Mood::Good {
                    tokens.push(token.clone());
                }
                Ok((rules.login, envelope(Value::Null, auth(&rules, &token, rules.lease.0), &Value::Null)))
            }
            "/v1/auth/token/renew-self" => {
                if request.body != json!({}) {
                    return Err(format!("body {}", request.body));
                }
                let auth = auth(&rules, token.unwrap(), rules.lease.1);
                Ok((rules.renew, envelope(Value::Null, auth, &Value::Null)))
            }
            "/v1/mesh/pki/sign/web" => Ok((rules.sign, self.sign(&rules, &request.body)?)),
            other => Err(format!("path {other}")),
        }
    }

    fn sign(&self, rules: &Rules, body: &Value) -> Result<Value, String> {
        let csr = body["csr"].as_str().ok_or("no csr")?.to_owned();
        let name = body["uri_sans"].as_str().ok_or("no uri_sans")?;
        let asked = CertificateSigningRequestDer::from_pem_slice(csr.as_bytes())
            .map_err(|error| error.to_string())?;
        let (asked, common_name) = names(&asked);
        let Some((identity, dns)) = asked.split_first().filter(|(identity, _)| *identity == name) else {
            return Err(format!("the CSR asks for {asked:?}, the call for {name}"));
        };
        let mut documented = json!({
            "csr": csr,
            "format": "pem",
            "ttl": rules.ttl,
            "uri_sans": identity,
            "exclude_cn_from_sans": true,
        });
        if !dns.is_empty() {
            documented["alt_names"] = dns.join(",").into();
        }
        if let Some(name) = common_name {
            documented["common_name"] = name.into();
        }
        if *body != documented {
            return Err(format!("body {body}"));
        }
        let ttl = Duration::from_secs(rules.ttl.trim_end_matches('s').parse().unwrap());
        let lie = if let Mood::Lie(lie) = rules.sign { lie } else { Lie::None };
        let leaf = self.issuer.issue(&csr, ttl, lie);
        let [intermediate, root] = self.issuer.chain(lie);
        // Vault's PEM has no line end at its end.
        let text = |der: &CertificateDer<'static>| {
            String::from_utf8(pem::of_certificates([der])).unwrap().trim_end().to_owned()
        };
        let mut chain = vec![text(intermediate)];
        chain.extend(rules.knows_root.then(|| text(root)));
        let leaf_facts = certificate::Certificate::parse(&leaf).unwrap();
        let expiration = leaf_facts.not_after.duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs();
        let data = json!({
            "ca_chain": chain,
            "certificate": if rules.sign == Mood::Junk { "<certificate>".to_owned() } else { text(&leaf) },
            "expiration": expiration,
            "issuing_ca": text(intermediate),
            "serial_number": leaf_facts.serial,
        });
        Ok(envelope(data, Value::Null, &rules.warnings))
    }
}

fn auth(rules: &Rules, token: &str, lease: u64) -> Value {
    json!({
        "client_token": token,
        "accessor": "afa306d0-be3d-c8d2-b0d7-2676e1c0d9b4",
        "policies": ["default", "mesh"],
        "token_policies": ["default", "mesh"],
        "metadata": { "role": "app", "service_account_name": "web", "service_account_namespace": "default" },
        "lease_duration": lease,
        "renewable": rules.is_renewable,
        "entity_id": "",
        "token_type": "service",
        "orphan": true,
        "mfa_requirement": null,
        "num_uses": 0,
    })
}

/// The alternative names in a CSR, and its common name.
pub fn names(der: &[u8]) -> (Vec<String>, Option<String>) {
    let (_, csr) = X509CertificationRequest::from_der(der).unwrap();
    let extensions = csr.requested_extensions().into_iter().flatten();
    let names = extensions.filter_map(|extension| match extension {
        ParsedExtension::SubjectAlternativeName(names) => Some(&names.general_names),
        _ => None,
    });
    let name = |name: &GeneralName<'_>| match name {
        GeneralName::URI(name) | GeneralName::DNSName(name) => (*name).to_owned(),
        other => panic!("a name that is none of ours: {other:?}"),
    };
    let subject = &csr.certification_request_info.subject;
    let common_name = subject.iter_common_name().next().map(|name| name.as_str().unwrap().to_owned());
    (names.flatten().map(name).collect(), common_name)
}
