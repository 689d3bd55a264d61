//! The rules of Kubernetes that the fake API server keeps, and that the agent relies on.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http::{Method, Request, Response};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::client::conn::http2::SendRequest;
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, RootCertStore};
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use crate::support::kube_cluster::resource::Key;
use crate::support::kube_cluster::{Draft, Fault, KubeCluster, Options, Rule};

const SECRETS: &str = "/api/v1/namespaces/shop/secrets";
const REVIEWS: &str = "/apis/authorization.k8s.io/v1/subjectaccessreviews";

/// A client of one connection.
struct Client {
    sender: SendRequest<Full<Bytes>>,
    token: String,
}

/// The lines of a watch.
struct Lines {
    body: Incoming,
    rest: Vec<u8>,
}

impl Client {
    async fn connect(cluster: &KubeCluster, token: &str) -> Self {
        let mut roots = RootCertStore::empty();
        for root in attache::pki::pem::certificates(cluster.root()).unwrap() {
            roots.add(root).unwrap();
        }
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
        let mut config = config.unwrap().with_root_certificates(roots).with_no_client_auth();
        config.alpn_protocols = vec![b"h2".to_vec()];
        let tcp = TcpStream::connect(cluster.address).await.unwrap();
        let name = ServerName::from(cluster.address.ip());
        let io = TlsConnector::from(Arc::new(config)).connect(name, tcp).await.unwrap();
        let handshake = hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(io));
        let (sender, connection) = handshake.await.unwrap();
        tokio::spawn(connection);
        Self { sender, token: token.to_owned() }
    }

    async fn send(&self, method: Method, path: &str, kind: &str, body: &Value) -> Response<Incoming> {
        self.try_send(method, path, kind, body).await.unwrap()
    }

    async fn try_send(
        &self,
        method: Method,
        path: &str,
        kind: &str,
        body: &Value,
    ) -> hyper::Result<Response<Incoming>> {
        let body = if body.is_null() { Bytes::new() } else { body.to_string().into() };
        let request = Request::builder().method(method).uri(format!("https://cluster{path}"));
        let request =
            request.header("user-agent", "test").header("authorization", format!("Bearer {}", self.token));
        let request = if body.is_empty() { request } else { request.header("content-type", kind) };
        self.sender.clone().send_request(request.body(Full::new(body)).unwrap()).await
    }

    async fn call(&self, method: Method, path: &str, body: Value) -> (u16, Value) {
        read(self.send(method, path, "application/json", &body).await).await
    }

    async fn get(&self, path: &str) -> (u16, Value) {
        self.call(Method::GET, path, Value::Null).await
    }

    async fn watch(&self, path: &str) -> Lines {
        let answer = self.send(Method::GET, path, "", &Value::Null).await;
        assert_eq!(answer.status(), 200, "{path}");
        Lines { body: answer.into_body(), rest: Vec::new() }
    }
}

async fn read(answer: Response<Incoming>) -> (u16, Value) {
    let code = answer.status().as_u16();
    let body = answer.into_body().collect().await.unwrap().to_bytes();
    (code, serde_json::from_slice(&body).unwrap_or_else(|_| json!(String::from_utf8_lossy(&body))))
}

impl Lines {
    /// The next event: its type, the object's name, and its version.
    async fn next(&mut self) -> Option<(String, String, u64)> {
        let event = self.event().await?;
        let text = |path: &str| event.pointer(path).and_then(Value::as_str).unwrap_or_default().to_owned();
        let version = text("/object/metadata/resourceVersion").parse().unwrap_or_default();
        Some((text("/type"), text("/object/metadata/name"), version))
    }

    async fn event(&mut self) -> Option<Value> {
        loop {
            if let Some(end) = self.rest.iter().position(|byte| *byte == b'\n') {
                let line = self.rest.drain(..=end).collect::<Vec<_>>();
                return Some(serde_json::from_slice(&line).unwrap());
            }
            let frame = timeout(Duration::from_secs(60), self.body.frame()).await.unwrap();
            self.rest.extend(frame?.unwrap().into_data().unwrap());
        }
    }
}

fn event(kind: &str, name: &str, version: u64) -> Option<(String, String, u64)> {
    Some((kind.to_owned(), name.to_owned(), version))
}

fn secret(name: &str) -> Draft {
    Draft::secret("shop", name)
}

fn message(answer: &Value) -> &str {
    answer["message"].as_str().unwrap_or_default()
}

async fn cluster(directory: &Path) -> (KubeCluster, Client) {
    let cluster = KubeCluster::start(directory, "east").await;
    let client = Client::connect(&cluster, &cluster.admin()).await;
    (cluster, client)
}

#[tokio::test]
async fn a_watch_without_a_version_begins_with_what_there_is() {
    let directory = tempfile::tempdir().unwrap();
    let (cluster, client) = cluster(directory.path()).await;
    let first = cluster.put(&secret("web").entry("a", b"1"));
    for version in ["", "&resourceVersion=0"] {
        let mut watch =
            client.watch(&format!("{SECRETS}?watch=1&fieldSelector=metadata.name%3Dweb{version}")).await;
        assert_eq!(watch.next().await.unwrap().0, "ADDED");
        assert_eq!(cluster.watches(Some("web")), 1);
        cluster.put(&secret("other"));
        let changed = cluster.put(&secret("web").entry("a", b"2"));
        assert_eq!(watch.next().await, event("MODIFIED", "web", changed));
        cluster.delete_secret("shop", "web");
        assert_eq!(watch.next().await, event("DELETED", "web", changed + 1));
        cluster.end_watches();
        assert_eq!(watch.next().await, None);
        cluster.wait_watches(Some("web"), 0).await;
        assert!(cluster.put(&secret("web")) > first);
    }
}

#[tokio::test]
async fn a_bookmark_ends_the_initial_events() {
    let directory = tempfile::tempdir().unwrap();
    let (cluster, client) = cluster(directory.path()).await;
    cluster.put(&secret("web"));
    let version = cluster.version();
    for (name, count) in [("web", 1), ("other", 0)] {
        let selector = format!("fieldSelector=metadata.name%3D{name}");
        let mut watch = client.watch(&format!("{SECRETS}?watch=1&allowWatchBookmarks=1&{selector}")).await;
        for _ in 0..count {
            assert_eq!(watch.next().await.unwrap().0, "ADDED");
        }
        assert_eq!(watch.next().await, event("BOOKMARK", "", version));
    }
}

#[tokio::test]
async fn a_watch_from_a_version_misses_nothing_or_gets_410() {
    let directory = tempfile::tempdir().unwrap();
    let (cluster, client) = cluster(directory.path()).await;
    cluster.put(&secret("web"));
    let (_, list) = client.get(SECRETS).await;
    let version = list["metadata"]["resourceVersion"].as_str().unwrap().to_owned();
    let changed = cluster.put(&secret("web").label("a", "b"));
    let path = format!("{SECRETS}?watch=true&allowWatchBookmarks=true&resourceVersion={version}");
    let mut watch = client.watch(&path).await;
    assert_eq!(watch.next().await, event("MODIFIED", "web", changed));
    cluster.pass(7);
    cluster.send_bookmarks();
    assert_eq!(watch.next().await, event("BOOKMARK", "", changed + 7));
    cluster.forget_history();
    let mut late = client.watch(&path).await;
    let error = late.event().await.unwrap();
    assert_eq!(error["type"], "ERROR");
    assert_eq!((&error["object"]["code"], &error["object"]["reason"]), (&json!(410), &json!("Expired")));
    assert_eq!(late.next().await, None);
}

#[tokio::test]
async fn an_object_that_leaves_a_selection_is_deleted_for_its_watch() {
    let directory = tempfile::tempdir().unwrap();
    let (cluster, client) = cluster(directory.path()).await;
    let labelled = |name: &str| secret(name).label("istio/multiCluster", "true");
    let added = cluster.put(&labelled("east"));
    let selector = "labelSelector=istio%2FmultiCluster%3Dtrue";
    let mut watch = client.watch(&format!("{SECRETS}?watch=1&{selector}")).await;
    assert_eq!(watch.next().await, event("ADDED", "east", added));
    let left = cluster.put(&secret("east"));
    assert_eq!(watch.next().await, event("DELETED", "east", left));
    let back = cluster.put(&labelled("east"));
    assert_eq!(watch.next().await, event("ADDED", "east", back));
    let (_, list) = client.get(&format!("{SECRETS}?{selector}")).await;
    assert_eq!(list["items"].as_array().unwrap().len(), 1);
}

#[tokio::test]
async fn the_pages_of_a_list_are_of_one_version() {
    let directory = tempfile::tempdir().unwrap();
    let (cluster, client) = cluster(directory.path()).await;
    for name in ["a", "b", "c"] {
        cluster.put(&secret(name));
    }
    let version = cluster.version().to_string();
    let (_, page) = client.get(&format!("{SECRETS}?limit=2")).await;
    assert_eq!(page["metadata"]["remainingItemCount"], 1);
    assert!(page["items"][0].get("kind").is_none(), "items of lists have no kind");
    cluster.delete_secret("shop", "c");
    let next = format!("{SECRETS}?limit=2&continue={}", page["metadata"]["continue"].as_str().unwrap());
    let (_, rest) = client.get(&next).await;
    assert_eq!(rest["items"][0]["metadata"]["name"], "c");
    assert_eq!(rest["metadata"], json!({ "resourceVersion": version }));
    cluster.forget_history();
    let (code, error) = client.get(&next).await;
    assert_eq!((code, &error["reason"]), (410, &json!("Expired")));
}

#[tokio::test]
async fn a_right_on_one_name_allows_watches_of_that_name_only() {
    let directory = tempfile::tempdir().unwrap();
    let (cluster, _) = cluster(directory.path()).await;
    let token = cluster.account("shop", "gateway");
    cluster.allow_account(
        "shop",
        "gateway",
        Rule::to(&["get", "watch"], "secrets").within("shop").named(&["web"]),
    );
    cluster.put(&secret("web"));
    let client = Client::connect(&cluster, &token).await;
    assert_eq!(client.get(&format!("{SECRETS}/web")).await.0, 200);
    client.watch(&format!("{SECRETS}?watch=1&fieldSelector=metadata.name%3Dweb")).await;
    let user = "system:serviceaccount:shop:gateway";
    for (path, words) in [
        (
            format!("{SECRETS}/other"),
            format!(
                "secrets \"other\" is forbidden: User \"{user}\" cannot get resource \"secrets\" in API group \"\" in the namespace \"shop\""
            ),
        ),
        (
            format!("{SECRETS}?watch=1"),
            format!(
                "secrets is forbidden: User \"{user}\" cannot watch resource \"secrets\" in API group \"\" in the namespace \"shop\""
            ),
        ),
        (
            format!("{SECRETS}?fieldSelector=metadata.name%3Dweb"),
            format!(
                "secrets \"web\" is forbidden: User \"{user}\" cannot list resource \"secrets\" in API group \"\" in the namespace \"shop\""
            ),
        ),
        (
            "/api/v1/secrets".to_owned(),
            format!(
                "secrets is forbidden: User \"{user}\" cannot list resource \"secrets\" in API group \"\" at the cluster scope"
            ),
        ),
    ] {
        let (code, error) = client.get(&path).await;
        assert_eq!((code, message(&error)), (403, words.as_str()), "{path}");
    }
    cluster.revoke_token(&token);
    for path in [format!("{SECRETS}/web"), "/version".to_owned()] {
        let (code, error) = client.get(&path).await;
        assert_eq!((code, message(&error)), (401, "Unauthorized"), "{path}");
    }
}

#[tokio::test]
async fn stored_roles_count_in_requests_and_reviews() {
    let directory = tempfile::tempdir().unwrap();
    let (cluster, admin) = cluster(directory.path()).await;
    let token = cluster.account("shop", "gateway");
    let client = Client::connect(&cluster, &token).await;
    let review = json!({
        "kind": "SubjectAccessReview", "apiVersion": "authorization.k8s.io/v1",
        "spec": {
            "user": "system:serviceaccount:shop:gateway",
            "resourceAttributes": { "verb": "get", "resource": "secrets", "namespace": "shop", "name": "web" },
        },
    });
    let (code, answer) = admin.call(Method::POST, REVIEWS, review.clone()).await;
    assert_eq!((code, &answer["status"]), (201, &json!({ "allowed": false })));
    let rules =
        json!([{ "apiGroups": [""], "resources": ["secrets"], "verbs": ["get"], "resourceNames": ["web"] }]);
    cluster.put(&Draft::of("roles", "shop", "reader").with("rules", rules));
    let subjects = json!([{ "kind": "ServiceAccount", "namespace": "shop", "name": "gateway" }]);
    let role = json!({ "apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "reader" });
    cluster
        .put(&Draft::of("rolebindings", "shop", "reader").with("subjects", subjects).with("roleRef", role));
    let (_, answer) = admin.call(Method::POST, REVIEWS, review.clone()).await;
    assert_eq!(answer["status"]["allowed"], true);
    let (code, error) = client.get(&format!("{SECRETS}/web")).await;
    assert_eq!((code, message(&error)), (404, "secrets \"web\" not found"));
    let (code, error) = client.call(Method::POST, REVIEWS, review).await;
    assert_eq!(code, 403);
    assert!(
        message(&error).starts_with("subjectaccessreviews.authorization.k8s.io is forbidden: User"),
        "{error}"
    );
}

#[tokio::test]
async fn a_token_secret_is_filled_and_its_token_ends_with_the_account() {
    let directory = tempfile::tempdir().unwrap();
    let (cluster, client) = cluster(directory.path()).await;
    let accounts = "/api/v1/namespaces/shop/serviceaccounts";
    cluster.put(&secret("any"));
    let account = json!({ "apiVersion": "v1", "kind": "ServiceAccount", "metadata": { "name": "reader" } });
    assert_eq!(client.call(Method::POST, accounts, account.clone()).await.0, 201);
    assert_eq!(client.call(Method::POST, accounts, account).await.0, 409);
    let body = json!({
        "apiVersion": "v1", "kind": "Secret", "type": "kubernetes.io/service-account-token",
        "metadata": { "name": "reader-token", "annotations": { "kubernetes.io/service-account.name": "reader" } },
    });
    let mut watch =
        client.watch(&format!("{SECRETS}?watch=1&fieldSelector=metadata.name%3Dreader-token")).await;
    let path = format!("{SECRETS}/reader-token?fieldManager=test");
    let created = client.send(Method::PATCH, &path, "application/apply-patch+yaml", &body).await;
    assert_eq!(read(created).await.0, 201);
    assert_eq!(watch.next().await.unwrap().0, "ADDED");
    let filled = watch.event().await.unwrap();
    let data = |name: &str| STANDARD.decode(filled["object"]["data"][name].as_str().unwrap()).unwrap();
    assert_eq!((data("namespace"), data("ca.crt")), (b"shop".to_vec(), cluster.root().to_vec()));
    // Applying the same again leaves what the controller has written.
    let applied = client.send(Method::PATCH, &path, "application/apply-patch+yaml", &body).await;
    assert_eq!(read(applied).await.1["data"], filled["object"]["data"]);
    let own = Client::connect(&cluster, &String::from_utf8(data("token")).unwrap()).await;
    assert_eq!(own.get("/version").await.0, 200);
    assert_eq!(client.call(Method::DELETE, &format!("{accounts}/reader"), Value::Null).await.0, 200);
    assert_eq!(own.get("/version").await.0, 401);
    assert_eq!(client.get(&format!("{SECRETS}/reader-token")).await.0, 404);
}

#[tokio::test]
async fn each_fault_is_what_it_says() {
    let directory = tempfile::tempdir().unwrap();
    let mut cluster = KubeCluster::start_with(
        directory.path(),
        "west",
        Options { has_gateway_api: false, ..Options::default() },
    )
    .await;
    let client = Client::connect(&cluster, &cluster.admin()).await;
    cluster.put(&secret("web"));
    let path = format!("{SECRETS}/web");
    cluster.fault_on(Fault::TooMany(3), 1, |call| call.names("web"));
    let answer = client.send(Method::GET, &path, "", &Value::Null).await;
    assert_eq!((answer.status().as_u16(), &answer.headers()["retry-after"]), (429, &"3".parse().unwrap()));
    assert_eq!(client.get(&path).await.0, 200);
    cluster.fault(Fault::Truncate);
    assert!(client.get(&path).await.1.is_string(), "half of an object is no JSON");
    cluster.clear_faults();
    cluster.fault_on(Fault::Lose, 1, |call| call.verb == "delete");
    cluster.put(&secret("lost"));
    let other = Client::connect(&cluster, &cluster.admin()).await;
    let lost = other.try_send(Method::DELETE, &format!("{SECRETS}/lost"), "", &Value::Null).await;
    assert!(lost.is_err() && cluster.object(&Key::new("secrets", "shop", "lost")).is_none(), "{lost:?}");
    let grants = "/apis/gateway.networking.k8s.io/v1/namespaces/shop/referencegrants";
    assert_eq!(client.get(grants).await, (404, json!("404 page not found\n")));
    let stranger = Client::connect(&cluster, &cluster.account("shop", "none")).await;
    assert_eq!(stranger.get(grants).await.0, 403, "rights come first");
    cluster.set_gateway_api(true);
    assert_eq!(client.get(grants).await.0, 200);

    // What is silenced comes later; what is asked to go goes on.
    let mut watch = client.watch(&format!("{SECRETS}?watch=1")).await;
    assert_eq!(watch.next().await.unwrap().0, "ADDED");
    cluster.go_away();
    cluster.silence_watches();
    let changed = cluster.put(&secret("web").label("a", "b"));
    let silence = timeout(Duration::from_millis(100), watch.next()).await;
    assert!(silence.is_err(), "{silence:?}");
    cluster.release_watches();
    assert_eq!(watch.next().await, event("MODIFIED", "web", changed));

    cluster.restart().await;
    cluster.wait_all_watches(0).await;
    let client = Client::connect(&cluster, &cluster.admin()).await;
    let mut late = client.watch(&format!("{SECRETS}?watch=1&resourceVersion={changed}")).await;
    assert_eq!(late.next().await.unwrap().0, "ERROR");
    cluster.pretend_deleted(&Key::new("secrets", "shop", "web"));
    assert_eq!(client.get(&path).await.0, 200);

    cluster.freeze();
    let frozen = timeout(Duration::from_millis(100), client.get(&path)).await;
    assert!(frozen.is_err(), "{frozen:?}");
    cluster.thaw();
    assert_eq!(client.get(&path).await.0, 200);
}

#[tokio::test]
async fn a_request_that_the_api_does_not_have_is_a_violation() {
    let directory = tempfile::tempdir().unwrap();
    let (cluster, client) = cluster(directory.path()).await;
    for path in [
        format!("{SECRETS}?watch=1&limit=5"),
        format!("{SECRETS}?fieldSelector=data.a%3Db"),
        "/api/v1/namespaces/shop/pods".to_owned(),
    ] {
        client.send(Method::GET, &path, "", &Value::Null).await;
        let violations = cluster.take_violations();
        assert_eq!(violations.len(), 1, "{path}: {violations:#?}");
    }
}
