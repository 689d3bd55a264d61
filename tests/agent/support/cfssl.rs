//! cfssl: a fake that checks every request against the documented API and can misbehave, and the real one.

use std::net::SocketAddr;
use std::path::Path;
use std::process::Stdio;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use attache::pki::pem;
use aws_lc_rs::hmac;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, CertificateSigningRequestDer};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::{Child, Command};
use tokio::time::sleep;

use super::fake_vault::names;
use super::files::spiffe;
use super::installed::installed;
use super::issuer::{Issuer, Lie};
use super::wait::wait_for;

/// The auth_key of the profile `mesh`.
pub const KEY: &str = "00112233445566778899aabbccddeeff";

/// How the server handles the next signing requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Mood {
    Good,
    /// A good response whose certificate is wrong in this way.
    Lie(Lie),
    /// Never answers.
    Hang,
    /// A few bytes every few milliseconds.
    Slow,
    /// Closes the connection in the middle of the response.
    CutOff,
    /// A Content-Length below the body's length.
    TooShort,
    /// An endless response.
    Huge,
    /// The good response with another content type.
    OtherType,
    /// A status line with headers, and a body.
    Say(&'static str, String),
}

impl Mood {
    /// A refusal in cfssl's words.
    pub fn refuse(code: u32, message: &str) -> Self {
        let errors = [json!({ "code": code, "message": message })];
        let body = json!({ "success": false, "result": null, "errors": errors, "messages": [] });
        Self::Say("400 Bad Request\r\nContent-Type: text/plain; charset=utf-8", format!("{body}\n"))
    }
}

/// A checked signing request.
#[derive(Clone, Debug)]
pub struct Signed {
    pub endpoint: String,
    pub headers: Vec<String>,
    pub body: Value,
}

/// A running fake. It stops with the test's runtime.
pub struct FakeCfssl {
    pub address: SocketAddr,
    state: Arc<State>,
}

struct State {
    mood: Mutex<Mood>,
    signed: Mutex<Vec<Signed>>,
    issuer: Issuer,
}

impl FakeCfssl {
    /// A server that signs with `issuer`.
    pub async fn start(issuer: Issuer) -> Self {
        Self::start_at("127.0.0.1:0".parse().unwrap(), issuer).await
    }

    pub async fn start_at(address: SocketAddr, issuer: Issuer) -> Self {
        let listener = TcpListener::bind(address).await.unwrap();
        let address = listener.local_addr().unwrap();
        let state = Arc::new(State { mood: Mutex::new(Mood::Good), signed: Mutex::default(), issuer });
        tokio::spawn({
            let state = Arc::clone(&state);
            async move {
                loop {
                    let (io, _) = listener.accept().await.unwrap();
                    tokio::spawn(serve(io, Arc::clone(&state)));
                }
            }
        });
        Self { address, state }
    }

    pub fn set(&self, mood: Mood) {
        *self.state.mood.lock().unwrap() = mood;
    }

    pub fn signed(&self) -> Vec<Signed> {
        self.state.signed.lock().unwrap().clone()
    }
}

async fn serve(io: TcpStream, state: Arc<State>) {
    let mut io = BufReader::new(io);
    let mut lines = Vec::new();
    loop {
        let mut line = String::new();
        if io.read_line(&mut line).await.unwrap_or(0) == 0 {
            return;
        }
        match line.trim_end() {
            "" => break,
            line => lines.push(line.to_owned()),
        }
    }
    let (first, headers) = lines.split_first().unwrap();
    let endpoint = first.strip_prefix("POST /api/v1/cfssl/").and_then(|rest| rest.strip_suffix(" HTTP/1.1"));
    let endpoint = endpoint.unwrap_or_else(|| panic!("{first}")).to_owned();
    let mut headers: Vec<_> = headers.iter().map(|line| line.split_once(": ").unwrap()).collect();
    headers.sort_unstable();
    let header = |name: &str| headers.iter().find(|(key, _)| *key == name).map(|(_, value)| *value);
    // The port may be that of a proxy.
    assert!(header("host").unwrap().starts_with("127.0.0.1:"), "{headers:?}");
    assert_eq!(
        (header("accept"), header("content-type")),
        (Some("application/json"), Some("application/json"))
    );
    let mut body = vec![0; header("content-length").unwrap().parse().unwrap()];
    io.read_exact(&mut body).await.unwrap();
    let body = serde_json::from_slice(&body).unwrap();
    let known = ["host", "accept", "content-type", "content-length"];
    let others = headers.iter().filter(|(name, _)| !known.contains(name));
    let headers = others.map(|(name, value)| format!("{name}: {value}")).collect();
    state.answer(io.into_inner(), endpoint, headers, body).await;
}

/// The sorted keys of an object.
fn keys(value: &Value) -> Vec<&str> {
    let mut keys: Vec<_> = value.as_object().unwrap().keys().map(String::as_str).collect();
    keys.sort_unstable();
    keys
}

impl State {
    async fn answer(&self, io: TcpStream, endpoint: String, headers: Vec<String>, body: Value) {
        let text = |certificate: &CertificateDer<'static>| {
            String::from_utf8(pem::of_certificates([certificate])).unwrap()
        };
        if endpoint == "info" {
            assert_eq!(keys(&body), ["label", "profile"]);
            let signer = self.issuer.chain(Lie::None)[0];
            let certificate = text(signer).trim().to_owned();
            let usages = ["digital signature", "server auth", "client auth"];
            let result = json!({ "certificate": certificate, "usages": usages, "expiry": "2m" });
            return say(io, "200 OK\r\nContent-Type: application/json", &envelope(&result)).await;
        }
        let request = match endpoint.as_str() {
            "sign" => body,
            "authsign" => {
                assert_eq!(keys(&body), ["request", "token"]);
                let bytes = |name: &str| STANDARD.decode(body[name].as_str().unwrap()).unwrap();
                let key = [
                    0x00, 0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77, 0x88, 0x99, 0xaa, 0xbb, 0xcc, 0xdd, 0xee,
                    0xff,
                ];
                let key = hmac::Key::new(hmac::HMAC_SHA256, &key);
                hmac::verify(&key, &bytes("request"), &bytes("token"))
                    .expect("the token is not of this request");
                serde_json::from_slice(&bytes("request")).unwrap()
            }
            other => panic!("no endpoint {other}"),
        };
        assert_eq!(keys(&request), ["certificate_request", "hosts", "label", "profile"]);
        let csr = request["certificate_request"].as_str().unwrap().to_owned();
        let der = CertificateSigningRequestDer::from_pem_slice(csr.as_bytes()).unwrap();
        let asked = names(&der).0;
        assert_eq!((&request["hosts"], &asked[0]), (&json!(asked), &spiffe("web")));
        self.signed.lock().unwrap().push(Signed { endpoint, headers, body: request });

        let mood = self.mood.lock().unwrap().clone();
        let lie = if let Mood::Lie(lie) = mood { lie } else { Lie::None };
        let leaf = match lie {
            Lie::Unchained => self.issuer.by_a_stranger(&csr, Duration::from_secs(120)),
            lie => self.issuer.issue(&csr, Duration::from_secs(120), lie),
        };
        let good = envelope(&json!({ "certificate": text(&leaf) }));
        let json = "200 OK\r\nContent-Type: application/json";
        let half = good.len() / 2;
        let raw = |length: usize| format!("HTTP/1.1 {json}\r\nContent-Length: {length}\r\n\r\n");
        let mut io = io;
        // The agent may close the connection before it has read everything.
        let _ = match mood {
            Mood::Good | Mood::Lie(_) => return say(io, json, &good).await,
            Mood::OtherType => return say(io, "200 OK\r\nContent-Type: text/html", &good).await,
            Mood::Say(head, body) => return say(io, head, &body).await,
            Mood::Hang => std::future::pending().await,
            Mood::CutOff => io.write_all(format!("{}{}", raw(good.len()), &good[..half]).as_bytes()).await,
            Mood::TooShort => io.write_all(format!("{}{good}", raw(half)).as_bytes()).await,
            Mood::Slow => {
                for bytes in format!("{}{good}", raw(good.len())).as_bytes().chunks(16) {
                    io.write_all(bytes).await.unwrap();
                    sleep(Duration::from_millis(2)).await;
                }
                Ok(())
            }
            Mood::Huge => {
                let chunk = format!("10000\r\n{}\r\n", " ".repeat(0x10000));
                let mut sent = io
                    .write_all(format!("HTTP/1.1 {json}\r\nTransfer-Encoding: chunked\r\n\r\n").as_bytes())
                    .await;
                while sent.is_ok() {
                    sent = io.write_all(chunk.as_bytes()).await;
                }
                sent
            }
        };
    }
}

fn envelope(result: &Value) -> String {
    format!("{}\n", json!({ "success": true, "result": result, "errors": [], "messages": [] }))
}

async fn say(mut io: TcpStream, head: &str, body: &str) {
    let length = body.len();
    let answer = format!("HTTP/1.1 {head}\r\nContent-Length: {length}\r\n\r\n{body}");
    let _ = io.write_all(answer.as_bytes()).await;
}

/// A real `cfssl serve`; dropping it kills it.
pub struct Cfssl {
    pub address: SocketAddr,
    /// Whether this version omits URI names.
    pub is_old: bool,
    _child: Child,
}

impl Cfssl {
    /// Starts it with `ca-cert.pem` and `ca-key.pem` in `ca`, and over TLS if `directory` has `tls.pem` and `tls-key.pem`.
    pub async fn start(directory: &Path, ca: &Path) -> Self {
        let binary = installed("get-cfssl", &[]).await;
        let version = Command::new(&binary).arg("version").output().await.unwrap().stdout;
        let is_old = String::from_utf8(version).unwrap().contains("Version: 1.2");

        let usages = ["digital signature", "server auth", "client auth"];
        let configuration = json!({
            "signing": {
                "default": { "expiry": "10m", "usages": usages },
                "profiles": { "mesh": { "expiry": "10m", "usages": usages, "auth_key": "key" } },
            },
            "auth_keys": { "key": { "type": "standard", "key": KEY } },
        });
        let path = directory.join("cfssl.json");
        std::fs::write(&path, configuration.to_string()).unwrap();
        // It has no option for any free port.
        let free = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = free.local_addr().unwrap();
        drop(free);
        let mut command = Command::new(&binary);
        command.args(["serve", "-address", "127.0.0.1", "-port", &address.port().to_string()]);
        command.arg("-ca").arg(ca.join("ca-cert.pem")).arg("-ca-key").arg(ca.join("ca-key.pem"));
        command.arg("-config").arg(&path);
        if directory.join("tls.pem").exists() {
            command
                .arg("-tls-cert")
                .arg(directory.join("tls.pem"))
                .arg("-tls-key")
                .arg(directory.join("tls-key.pem"));
        }
        let log = directory.join("cfssl.log");
        command.stdout(Stdio::null()).stderr(std::fs::File::create(&log).unwrap()).kill_on_drop(true);
        let mut child = command.stdin(Stdio::null()).spawn().unwrap();
        wait_for("cfssl listens", async || {
            let log = || std::fs::read_to_string(&log).unwrap();
            assert!(child.try_wait().unwrap().is_none(), "cfssl has exited:\n{}", log());
            TcpStream::connect(address).await.ok()
        })
        .await;
        Self { address, is_old, _child: child }
    }
}
