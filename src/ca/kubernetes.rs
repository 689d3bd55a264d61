//! Kubernetes' certificates API (`certificates.k8s.io/v1`): the API server stores the request, a person or controller
//! approves it, a signer signs it.
//!
//! That can take hours. A call that ends earlier leaves its request there, and the next call with the same CSR resumes it.
//! The request's name is derived from the CSR, so none is ever made twice, even if an answer was lost.

#[cfg(any(test, fuzzing))]
pub mod fuzz;
pub mod options;

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use http::{Method, StatusCode};
use rustls::pki_types::CertificateDer;
use serde_json::{Value, json};

use super::{CaError, CertificateAuthority, InvalidResponse, IssuedChain, Pending, SigningRequest};
use crate::auth::token_file::TokenFile;
use crate::base::backoff::Backoff;
use crate::base::clock::Clock;
use crate::base::limits;
use crate::base::text;
use crate::fs::disk::Disk;
use crate::kube::{Cluster, ClusterConfig, Credential, KubeError};
use crate::net::endpoint::Endpoint;
use crate::pki::key::KeyType;
use crate::pki::{csr, pem};

/// The minimum of the API.
pub const SHORTEST_TTL: Duration = Duration::from_secs(600);

/// The poll interval of a waiting request. With a controller as approver it is signed within a second; with a person many
/// agents may wait at the same time.
const PACE: Backoff = Backoff { base: Duration::from_millis(100), cap: Duration::from_secs(5) };

const REQUESTS: Resource =
    Resource { version: "v1", plural: "certificatesigningrequests", verbs: "create, get, delete" };
const BUNDLES: Resource = Resource { version: "v1beta1", plural: "clustertrustbundles", verbs: "list" };

/// A client of Kubernetes' certificates API.
#[derive(Debug)]
pub struct Kubernetes {
    /// The API server.
    pub endpoint: Endpoint,
    /// A service account's token.
    pub token: TokenFile,
    pub signer: SignerName,
    /// The roots of its certificates: the API's answers do not contain them.
    pub roots: SignerRoots,
    /// The kind of key in the requests.
    pub key_type: KeyType,
    /// Decides whether a refused token has expired.
    pub clock: Clock,
    pub disk: Disk,
    /// The agent's requests at the API server.
    pub requests: Mutex<Requests>,
}

/// A signer's name, like `example.com/spiffe`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SignerName(String);

impl std::str::FromStr for SignerName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let is_part = |part: &str| {
            let known = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
            !part.is_empty() && part.chars().all(known)
        };
        match text.split_once('/') {
            Some((domain, path)) if is_part(domain) && is_part(path) => Ok(Self(text.to_owned())),
            _ => Err(format!("{text:?} is not a signer's name; the shape is example.com/name")),
        }
    }
}

/// The source of a signer's roots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SignerRoots {
    /// A PEM file, read for each certificate.
    File(PathBuf),
    /// The cluster's ClusterTrustBundles that name the signer.
    Cluster,
}

/// The requests of this agent that still matter.
#[derive(Debug, Default)]
pub struct Requests {
    /// The request without an outcome.
    open: Option<Open>,
    /// The names of requests that can be deleted.
    settled: Vec<String>,
    /// The client of the last call: the deletion goes over the same connection.
    client: Option<Cluster>,
}

#[derive(Clone, Debug)]
struct Open {
    name: String,
    /// None until this call has read it.
    stage: Option<Stage>,
}

/// The step that an open request waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Approval,
    Signature,
}

/// The state of a request at the API server.
#[derive(Debug, PartialEq, Eq)]
enum Progress {
    Waits(Stage),
    /// PEM.
    Signed(Vec<u8>),
    /// `Denied` or `Failed`, with the reason.
    Rejected(String),
}

#[tonic::async_trait]
impl CertificateAuthority for Kubernetes {
    fn name(&self) -> &'static str {
        "kubernetes"
    }

    async fn sign(&self, request: &SigningRequest) -> Result<IssuedChain, CaError> {
        let name = name_of(&request.csr);
        let is_known = self.open(&name);
        let api = self.client();
        // First: without roots a certificate that a person approves could not be used.
        let roots = self.roots(&api).await?;
        let found = if is_known { self.read(&api, &name).await? } else { None };
        let mut object = match found {
            Some(object) => object,
            None => self.create(&api, &name, request).await?,
        };
        let mut polls = 0;
        loop {
            match progress(&object, &name)? {
                Progress::Signed(chain) => {
                    self.settle(&name);
                    let chain = pem::certificates(&chain).map_err(|error| {
                        InvalidResponse::Unreadable(format!("status.certificate: {error}"))
                    })?;
                    let count = chain.len() + roots.len();
                    if count > IssuedChain::LONGEST {
                        return Err(InvalidResponse::TooLong(count).into());
                    }
                    return Ok(IssuedChain { chain, roots });
                }
                Progress::Rejected(reason) => {
                    self.settle(&name);
                    return Err(CaError::Rejected { address: self.address(), reason });
                }
                Progress::Waits(stage) => self.note(&name, stage),
            }
            polls += 1;
            tokio::time::sleep(PACE.delay(polls, fastrand::f64())).await;
            object = self.read(&api, &name).await?.ok_or_else(|| {
                self.forget();
                CaError::Pending(format!(
                    "the certificate request {name} was deleted at {} before it was signed; the next attempt makes a new one",
                    self.address()
                ))
            })?;
        }
    }

    fn remedy(&self, answer: &InvalidResponse) -> Option<&'static str> {
        match (answer, &self.roots) {
            (InvalidResponse::MissingNames { .. }, _) => {
                Some("the signer of --kubernetes-signer decides which names of a request it issues")
            }
            (InvalidResponse::Unchained(_), SignerRoots::File(_)) => {
                Some("the roots are those in the file of --kubernetes-root: do they belong to this signer?")
            }
            (InvalidResponse::Unchained(_), SignerRoots::Cluster) => {
                Some("the roots are those in the signer's ClusterTrustBundles: does it sign with them?")
            }
            _ => None,
        }
    }

    fn apart(&self) -> Option<Arc<dyn CertificateAuthority>> {
        Some(Arc::new(Self {
            endpoint: self.endpoint.clone(),
            token: self.token.clone(),
            signer: self.signer.clone(),
            roots: self.roots.clone(),
            key_type: self.key_type,
            clock: self.clock.clone(),
            disk: self.disk.clone(),
            requests: Mutex::default(),
        }))
    }

    fn pending(&self) -> Option<Pending> {
        let open = self.lock().open.clone()?;
        let (name, SignerName(signer), address) = (&open.name, &self.signer, self.address());
        let waits_for = open.stage.map(|stage| match stage {
            Stage::Approval => format!(
                "the certificate request {name} waits for approval at {address}: approve it with `kubectl certificate \
                 approve {name}`, or check why the approver for the signer {signer} does not"
            ),
            Stage::Signature => format!(
                "the certificate request {name} is approved at {address}, and waits for the signer {signer}: is it \
                 running, and is --kubernetes-signer right?"
            ),
        });
        Some(Pending { waits_for })
    }

    async fn tidy(&self) {
        let (settled, client) = {
            let mut requests = self.lock();
            (std::mem::take(&mut requests.settled), requests.client.take())
        };
        let Some(api) = client else { return };
        for name in settled {
            // Best effort: the cluster removes old requests itself.
            let path = REQUESTS.path(Some(&name));
            match self.call(&api, &REQUESTS, Method::DELETE, &path, None).await {
                Ok(_) => {}
                Err(CaError::Status { status: StatusCode::NOT_FOUND, .. }) => {}
                Err(error) => tracing::debug!(name, %error, "certificate request not deleted"),
            }
        }
    }
}

impl Kubernetes {
    fn address(&self) -> String {
        self.endpoint.address.to_string()
    }

    fn lock(&self) -> MutexGuard<'_, Requests> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a call for the request `name`; true if the API server may have it already.
    fn open(&self, name: &str) -> bool {
        let mut requests = self.lock();
        let open = Open { name: name.to_owned(), stage: None };
        match requests.open.replace(open) {
            Some(before) if before.name == name => true,
            Some(before) => {
                requests.settled.push(before.name);
                false
            }
            None => false,
        }
    }

    fn note(&self, name: &str, stage: Stage) {
        self.lock().open = Some(Open { name: name.to_owned(), stage: Some(stage) });
    }

    fn settle(&self, name: &str) {
        let mut requests = self.lock();
        requests.open = None;
        requests.settled.push(name.to_owned());
    }

    fn forget(&self) {
        self.lock().open = None;
    }

    /// The client of a new call: its requests share a connection, which ends with `tidy`.
    fn client(&self) -> Cluster {
        let credential = Credential::TokenFile(self.token.clone());
        let config = ClusterConfig::new(self.endpoint.clone(), credential);
        let client = Cluster::without_deadline(config, self.disk.clone(), self.clock.clone());
        self.lock().client = Some(client.clone());
        client
    }

    /// Reads the request; none if it does not exist.
    async fn read(&self, api: &Cluster, name: &str) -> Result<Option<Value>, CaError> {
        match self.call(api, &REQUESTS, Method::GET, &REQUESTS.path(Some(name)), None).await {
            Ok(object) => Ok(Some(object)),
            Err(CaError::Status { status: StatusCode::NOT_FOUND, .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    async fn create(&self, api: &Cluster, name: &str, request: &SigningRequest) -> Result<Value, CaError> {
        let body = self.body(name, request);
        let created = self.call(api, &REQUESTS, Method::POST, &REQUESTS.path(None), Some(&body)).await;
        // After any other failure the request may exist.
        if matches!(&created, Err(CaError::Status { status, .. }) if status.is_client_error()) {
            self.forget();
        }
        created
    }

    fn body(&self, name: &str, request: &SigningRequest) -> Value {
        let mut usages = vec!["digital signature", "client auth", "server auth"];
        if self.key_type.is_rsa() {
            usages.push("key encipherment");
        }
        let SignerName(signer) = &self.signer;
        let seconds = request.ttl.max(SHORTEST_TTL).as_secs();
        json!({
            "apiVersion": "certificates.k8s.io/v1",
            "kind": "CertificateSigningRequest",
            "metadata": {
                "name": name,
                // For the approver.
                "labels": { "app.kubernetes.io/managed-by": "attache" },
                "annotations": request.identity.iter().map(|id| ("spiffe-id", id.as_str())).collect::<Value>(),
            },
            "spec": {
                "request": STANDARD.encode(csr::to_pem(&request.csr)),
                "signerName": signer,
                "expirationSeconds": i32::try_from(seconds).unwrap_or(i32::MAX),
                "usages": usages,
            },
        })
    }

    async fn roots(&self, api: &Cluster) -> Result<Vec<CertificateDer<'static>>, CaError> {
        const REMEDY: &str = "set --kubernetes-root to a file with the signer's roots";
        let SignerName(signer) = &self.signer;
        let path = match &self.roots {
            SignerRoots::File(path) => path,
            SignerRoots::Cluster => {
                let selector = format!("?fieldSelector=spec.signerName%3D{}", signer.replace('/', "%2F"));
                let path = BUNDLES.path(None) + &selector;
                let list = self.call(api, &BUNDLES, Method::GET, &path, None).await?;
                let texts = bundles(&list, signer);
                if texts.is_empty() {
                    return Err(CaError::Roots(format!(
                        "the cluster has no ClusterTrustBundle of the signer {signer}; create one, or {REMEDY}"
                    )));
                }
                let roots = pem::certificates(texts.join("\n").as_bytes()).map_err(|error| {
                    CaError::Roots(format!("the ClusterTrustBundles of the signer {signer}: {error}"))
                });
                return roots;
            }
        };
        let unreadable = |error: String| CaError::Roots(format!("{}: {error}; {REMEDY}", path.display()));
        let text = self.disk.read(path, limits::FILE_BYTES).await?;
        let text = text.map_err(|error| unreadable(error.to_string()))?;
        pem::certificates(&text).map_err(|error| unreadable(error.to_string()))
    }

    /// Makes one call, and returns the object in the answer.
    async fn call(
        &self,
        api: &Cluster,
        resource: &Resource,
        method: Method,
        path: &str,
        body: Option<&Value>,
    ) -> Result<Value, CaError> {
        api.call(method, path, body).await.map_err(|error| self.failed(resource, error))
    }

    fn failed(&self, resource: &Resource, error: KubeError) -> CaError {
        let mut error = CaError::from_kube(error, &self.endpoint);
        let Resource { version, plural, verbs } = resource;
        if let CaError::Status { status, message, .. } = &mut error {
            match *status {
                // RBAC's message; webhooks that refuse have others.
                StatusCode::FORBIDDEN if message.contains("cannot") => {
                    *message += &format!(
                        "; the service account needs a ClusterRole with {{apiGroups: [certificates.k8s.io], resources: \
                         [{plural}], verbs: [{verbs}]}}"
                    );
                }
                StatusCode::NOT_FOUND => {
                    *message += &format!(
                        "; is this an API server, and does it serve {plural} in certificates.k8s.io/{version}?"
                    );
                }
                _ => {}
            }
        }
        error
    }
}

/// A kind of object.
struct Resource {
    version: &'static str,
    plural: &'static str,
    /// RBAC's verbs for the agent's calls.
    verbs: &'static str,
}

impl Resource {
    fn path(&self, name: Option<&str>) -> String {
        let Self { version, plural, .. } = self;
        let all = format!("/apis/certificates.k8s.io/{version}/{plural}");
        name.map_or(all.clone(), |name| format!("{all}/{name}"))
    }
}

/// The name for a CSR. It is unique, since each CSR has its own key.
fn name_of(csr: &[u8]) -> String {
    let digest = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, csr);
    let digits: String = digest.as_ref().iter().take(10).map(|byte| format!("{byte:02x}")).collect();
    format!("attache-{digits}")
}

fn progress(object: &Value, name: &str) -> Result<Progress, InvalidResponse> {
    let text = |path: &str| object.pointer(path).and_then(Value::as_str).unwrap_or_default();
    if text("/metadata/name") != name {
        return Err(InvalidResponse::Unreadable(format!("it is not the CertificateSigningRequest {name}")));
    }
    let conditions = object.pointer("/status/conditions").and_then(Value::as_array);
    let condition = |kind: &str| {
        let text = |condition: &Value, field: &str| {
            condition.get(field).and_then(Value::as_str).unwrap_or_default().to_owned()
        };
        let mut all = conditions.into_iter().flatten();
        // The API server accepts only True for these; old versions may omit it.
        let found =
            all.find(|condition| text(condition, "type") == kind && text(condition, "status") != "False");
        found.map(|condition| (text(condition, "reason"), text(condition, "message")))
    };
    for (kind, outcome) in [("Denied", "it was denied"), ("Failed", "the signer failed")] {
        if let Some((reason, message)) = condition(kind) {
            let reason = text::sanitize_for_log(&format!("{reason}: {message}"));
            return Ok(Progress::Rejected(format!("{outcome} ({reason})")));
        }
    }
    if condition("Approved").is_none() {
        return Ok(Progress::Waits(Stage::Approval));
    }
    match text("/status/certificate") {
        "" => Ok(Progress::Waits(Stage::Signature)),
        base64 => STANDARD.decode(base64).map(Progress::Signed).map_err(|error| {
            InvalidResponse::Unreadable(format!("its status.certificate is not base64 ({error})"))
        }),
    }
}

/// The texts of the bundles of `signer` in `list`.
fn bundles<'a>(list: &'a Value, signer: &str) -> Vec<&'a str> {
    let items = list.get("items").and_then(Value::as_array).into_iter().flatten();
    let text = |item: &'a Value, path: &str| item.pointer(path).and_then(Value::as_str);
    let of_signer = items.filter(|item| text(item, "/spec/signerName") == Some(signer));
    of_signer.filter_map(|item| text(item, "/spec/trustBundle")).collect()
}

#[cfg(test)]
mod tests;
