//! Kubernetes' certificates API with a signer: an API server with the approvers and the signer that a test wants.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use attache::pki::pem;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use rustls::pki_types::CertificateSigningRequestDer;
use rustls::pki_types::pem::PemObject as _;
use serde_json::{Value, json};

use super::issuer::{Issuer, Lie};
use super::kube_cluster::resource::Key;
use super::kube_cluster::signers::Signers;
use super::kube_cluster::{Call, Draft, Fault, KubeCluster, Rule, User};
use super::process::flags;

pub const SIGNER: &str = "example.com/spiffe";
const REQUESTS: &str = "certificatesigningrequests";
const BUNDLES: &str = "clustertrustbundles";

/// How the next requests are handled.
#[derive(Clone, Debug)]
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
    /// Good, but refuses deletions.
    KeepAll,
    /// The account has no right.
    NoRights,
    /// The API server itself misbehaves.
    Fault(Fault),
    /// New connections get these bytes instead of HTTP; without any they close at once.
    Raw(Vec<u8>),
}

/// A running API server. It stops with the test's runtime, or when it is dropped.
pub struct KubeApi {
    pub address: SocketAddr,
    pub directory: PathBuf,
    pub cluster: KubeCluster,
    user: User,
    mood: Arc<Mutex<Mood>>,
}

impl Drop for KubeApi {
    fn drop(&mut self) {
        let is_http2 = self.calls().iter().all(|call| call.is_http2);
        assert!(is_http2 || std::thread::panicking(), "not all calls used HTTP/2");
    }
}

impl KubeApi {
    /// An API server with TLS, with its files in `directory`: the token, and the roots of TLS and of the signer.
    pub async fn start(directory: &Path) -> Self {
        let file = directory.join("token");
        if !file.exists() {
            let text = super::files::token("web", "https://kubernetes.default.svc", 3600);
            super::files::write_token(&file, &text);
        }
        let cluster = KubeCluster::start(directory, "cluster").await;
        let user = User::account("default", "web");
        cluster.add_token(std::fs::read_to_string(&file).unwrap().trim(), user.clone());
        let issuer = Issuer::of(directory, &directory.join("signer"));
        for (name, lie) in [("v1", Lie::None), ("v2", Lie::Unchained)] {
            let [_, root] = issuer.chain(lie);
            let text = String::from_utf8(pem::of_certificates([root])).unwrap();
            let spec = json!({ "signerName": SIGNER, "trustBundle": text });
            cluster.put(&Draft::of(BUNDLES, "", &format!("example.com:spiffe:{name}")).with("spec", spec));
        }
        let other = json!({ "signerName": "example.com/other", "trustBundle": "" });
        cluster.put(&Draft::of(BUNDLES, "", "example.com:other:v1").with("spec", other));
        let mood = Arc::new(Mutex::new(Mood::Good));
        cluster.set_signers(Signer { issuer, mood: Arc::clone(&mood) });
        let api = Self { address: cluster.address, directory: directory.to_owned(), cluster, user, mood };
        api.set(Mood::Good);
        api
    }

    /// Accepts no connections for a while; its objects stay.
    pub async fn stop(&mut self) {
        self.cluster.stop().await;
    }

    pub async fn resume(&mut self) {
        self.cluster.resume().await;
    }

    /// The agent's options for it.
    pub fn client(&self) -> Vec<String> {
        let file = |name: &str| self.directory.join(name).display().to_string();
        let options = [
            ("--ca", "kubernetes".to_owned()),
            ("--ca-address", self.address.to_string()),
            ("--ca-root", file("cluster/cluster-ca/root-cert.pem")),
            ("--token-file", file("token")),
            ("--kubernetes-signer", SIGNER.to_owned()),
            ("--kubernetes-root", file("signer/root-cert.pem")),
        ];
        flags(options)
    }

    pub fn set(&self, mood: Mood) {
        self.cluster.forbid(&self.user.name);
        let verbs: &[&str] = match &mood {
            Mood::NoRights => &[],
            Mood::KeepAll => &["create", "get"],
            _ => &["create", "get", "delete"],
        };
        self.cluster.allow(&self.user.name, Rule::to(verbs, REQUESTS));
        self.cluster.allow(&self.user.name, Rule::to(&["list"], BUNDLES));
        self.cluster.clear_faults();
        if let Mood::Fault(fault) = &mood {
            self.cluster.fault(fault.clone());
        }
        self.cluster.set_raw(match &mood {
            Mood::Raw(bytes) => Some(bytes.clone()),
            _ => None,
        });
        *self.mood.lock().unwrap() = mood;
    }

    pub fn calls(&self) -> Vec<Call> {
        self.cluster.calls()
    }

    /// The names of the existing requests.
    pub fn names(&self) -> Vec<String> {
        self.cluster.names(REQUESTS)
    }

    /// Deletes every request, like an administrator.
    pub fn delete_all(&self) {
        for name in self.names() {
            self.cluster.delete(&Key::new(REQUESTS, "", &name));
        }
    }

    /// Waits for a call that is as wanted, after the first `known`.
    pub async fn wait_call(&self, known: usize, is_wanted: impl Fn(&Call) -> bool) -> Call {
        self.cluster.wait_call(known, is_wanted).await
    }
}

struct Signer {
    issuer: Issuer,
    mood: Arc<Mutex<Mood>>,
}

impl Signers for Signer {
    fn check(&self, request: &Value) -> Result<(), String> {
        check(request)
    }

    fn act(&self, object: &mut Value) -> bool {
        let mood = self.mood.lock().unwrap();
        let condition = |kind: &str, reason: &str, message: &str| {
            json!({
                "type": kind, "status": "True", "reason": reason, "message": message,
                "lastUpdateTime": "2026-11-20T20:08:14Z", "lastTransitionTime": "2026-11-20T20:08:14Z",
            })
        };
        if object["status"].get("certificate").is_some() || matches!(*mood, Mood::Unapproved) {
            return false;
        }
        if matches!(*mood, Mood::Denied) {
            let denied =
                condition("Denied", "KubectlDeny", "This CSR was denied by kubectl certificate deny.");
            object["status"]["conditions"] = json!([denied]);
            return true;
        }
        let approved =
            condition("Approved", "KubectlApprove", "This CSR was approved by kubectl certificate approve.");
        let failed = condition("Failed", "SignerValidationFailure", "the signer knows no such workload");
        object["status"]["conditions"] = match *mood {
            Mood::Failed => json!([approved, failed]),
            _ => json!([approved]),
        };
        let asked = STANDARD.decode(object["spec"]["request"].as_str().unwrap()).unwrap();
        let asked = String::from_utf8(asked).unwrap();
        let ttl = Duration::from_secs(object["spec"]["expirationSeconds"].as_u64().unwrap());
        let (leaf, lie) = match *mood {
            Mood::Failed | Mood::Unsigned => return true,
            Mood::JunkCertificate => {
                object["status"]["certificate"] = json!(STANDARD.encode("<html>"));
                return true;
            }
            Mood::Lie(Lie::Unchained) => (self.issuer.by_a_stranger(&asked, ttl), Lie::Unchained),
            Mood::Lie(lie) => (self.issuer.issue(&asked, ttl, lie), lie),
            _ => (self.issuer.issue(&asked, ttl, Lie::None), Lie::None),
        };
        let [intermediate, _] = self.issuer.chain(lie);
        object["status"]["certificate"] = json!(STANDARD.encode(pem::of_certificates([&leaf, intermediate])));
        true
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
