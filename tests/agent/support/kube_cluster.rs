//! The API server of a cluster, as far as the agent uses one: it keeps Kubernetes' rules on objects, versions, watches, rights
//! and reviews, records every request, and can misbehave in every way.
//!
//! What it answers is what kube-apiserver 1.36 answers: `examples/kubernetes/run` compares.

#![allow(dead_code, unused_imports, reason = "no program that includes this server uses all of it")]

mod accounts;
mod answer;
pub mod calls;
mod clients;
pub mod content;
mod control;
pub mod fault;
mod objects;
pub mod rbac;
pub mod resource;
mod reviews;
mod serve;
pub mod signers;
pub mod status;
pub mod store;
mod watch;

use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use attache::base::clock::Clock;
use attache::ca::embedded::DevelopmentCa;
use attache::pki::pem;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_rustls::TlsAcceptor;

pub use self::calls::Call;
use self::clients::ClientCa;
pub use self::content::{Draft, Pair};
pub use self::fault::Fault;
pub use self::rbac::{Rule, User};
use self::resource::Key;
use self::signers::Signers;
use self::store::Store;
use super::violations::Violations;

/// What a server is started with.
#[derive(Clone, Debug)]
pub struct Options {
    /// How many streams a connection may have at once (`SETTINGS_MAX_CONCURRENT_STREAMS`).
    pub streams: u32,
    /// The time between the bookmarks of a watch.
    pub bookmarks: Duration,
    /// Whether the initial events of a watch that takes bookmarks end with one, as of late: it says that there are no more.
    pub marks_initial: bool,
    /// The time in which the controller fills a Secret for a token.
    pub token_delay: Duration,
    pub has_gateway_api: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            streams: 100,
            bookmarks: Duration::from_secs(60),
            marks_initial: true,
            token_delay: Duration::from_millis(50),
            has_gateway_api: true,
        }
    }
}

/// A running API server. It stops when it is dropped, and then fails the test if a request was not one of the API's.
pub struct KubeCluster {
    pub name: String,
    pub address: SocketAddr,
    directory: PathBuf,
    ca: DevelopmentCa,
    clients: ClientCa,
    shared: Arc<Shared>,
    task: JoinHandle<()>,
}

struct Shared {
    state: Mutex<State>,
    /// Changes with each request, each watch that begins or ends, and each connection that closes.
    counted: tokio::sync::watch::Sender<usize>,
    violations: Violations,
    connections: serve::Connections,
    acceptor: TlsAcceptor,
    streams: Mutex<u32>,
    /// The time that each answer takes.
    latency: Mutex<Duration>,
    bookmarks: Duration,
    marks_initial: bool,
    token_delay: Duration,
    /// The roots of its TLS, as PEM.
    root: Vec<u8>,
}

#[derive(Default)]
struct State {
    store: Store,
    tokens: HashMap<String, User>,
    /// Users' names, and their rights.
    rules: Vec<(String, Rule)>,
    faults: Vec<fault::Placed>,
    calls: Vec<Call>,
    /// Requests that are being answered, watches not counted; and the most at one time.
    busy: usize,
    busiest: usize,
    /// As many at once; the others get 429.
    limit: Option<usize>,
    /// The last number of a token or of a fault.
    numbers: u64,
    /// What each manager applied last.
    applied: BTreeMap<(String, Key), Value>,
    has_gateway_api: bool,
    signers: Option<Box<dyn Signers>>,
}

impl Drop for KubeCluster {
    fn drop(&mut self) {
        self.task.abort();
        self.shared.connections.close();
        self.shared.violations.assert_none("Kubernetes' API");
    }
}

impl KubeCluster {
    /// A cluster of this name, with its files in `directory/NAME`.
    pub async fn start(directory: &Path, name: &str) -> Self {
        Self::start_with(directory, name, Options::default()).await
    }

    pub async fn start_with(directory: &Path, name: &str, options: Options) -> Self {
        let directory = directory.join(name);
        std::fs::create_dir_all(&directory).unwrap();
        let ca = DevelopmentCa::open(&directory.join("cluster-ca"), Clock::system()).unwrap();
        let clients = ClientCa::new();
        let root = pem::of_certificates([ca.chain()[1]]);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let state = State { has_gateway_api: options.has_gateway_api, ..State::default() };
        let shared = Arc::new(Shared {
            state: Mutex::new(state),
            counted: tokio::sync::watch::channel(0).0,
            violations: Violations::default(),
            connections: serve::Connections::default(),
            acceptor: clients.acceptor(&ca),
            streams: Mutex::new(options.streams),
            latency: Mutex::default(),
            bookmarks: options.bookmarks,
            marks_initial: options.marks_initial,
            token_delay: options.token_delay,
            root,
        });
        // Versions of a cluster that has been there for a while.
        shared.state.lock().unwrap().store.pass(1000);
        shared.state.lock().unwrap().store.forget_history();
        let task = tokio::spawn(serve::accept(listener, Arc::clone(&shared)));
        Self { name: name.to_owned(), address, directory, ca, clients, shared, task }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.shared.state.lock().unwrap()
    }

    // Who may what.

    /// A service account with a token, and without any right.
    pub fn account(&self, namespace: &str, name: &str) -> String {
        let key = Key::new("serviceaccounts", namespace, name);
        if self.state().store.object(&key).is_none() {
            self.put(&Draft::of("serviceaccounts", namespace, name));
        }
        accounts::new_token(&mut self.state(), namespace, name, None)
    }

    /// A user who may do everything, with a token.
    pub fn admin(&self) -> String {
        let token = format!("admin-of-{}", self.name);
        self.add_token(&token, User::named("admin"));
        self.allow("admin", Rule::everything());
        token
    }

    /// From now on `token` is this user's.
    pub fn add_token(&self, token: &str, user: User) {
        self.state().tokens.insert(token.to_owned(), user);
    }

    /// From now on `token` gets 401, as if it had expired.
    pub fn revoke_token(&self, token: &str) {
        self.state().tokens.remove(token);
    }

    pub fn allow(&self, user: &str, rule: Rule) {
        self.state().rules.push((user.to_owned(), rule));
    }

    /// The same for a service account.
    pub fn allow_account(&self, namespace: &str, name: &str, rule: Rule) {
        self.allow(&User::account(namespace, name).name, rule);
    }

    /// Takes all rights from a user. Open watches stay, as on the real server.
    pub fn forbid(&self, user: &str) {
        self.state().rules.retain(|(name, _)| name != user);
    }

    /// A kubeconfig with this token, as YAML that is JSON too.
    pub fn kubeconfig(&self, token: &str) -> String {
        self.kubeconfig_of(&json!({ "token": token }))
    }

    /// A kubeconfig with a client certificate of `user`.
    pub fn certificate_kubeconfig(&self, user: &str) -> String {
        let [certificate, key] = self.clients.issue(user).map(|pem| STANDARD.encode(pem));
        self.kubeconfig_of(&json!({ "client-certificate-data": certificate, "client-key-data": key }))
    }

    /// A kubeconfig with this `user`.
    pub fn kubeconfig_of(&self, credential: &Value) -> String {
        let (name, user) = (&self.name, format!("user-of-{}", self.name));
        let cluster = json!({
            "server": format!("https://{}", self.address),
            "certificate-authority-data": STANDARD.encode(&self.shared.root),
        });
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "preferences": {}, "current-context": name,
            "clusters": [{ "name": name, "cluster": cluster }],
            "contexts": [{ "name": name, "context": { "cluster": name, "user": user } }],
            "users": [{ "name": user, "user": credential }],
        });
        format!("{config:#}\n")
    }

    /// Writes the kubeconfig into the cluster's directory.
    pub fn write_kubeconfig(&self, token: &str) -> PathBuf {
        let path = self.directory.join("kubeconfig");
        super::files::write_token(&path, &self.kubeconfig(token));
        path
    }

    /// Writes what a Pod has of its service account: `token`, `ca.crt` and `namespace`.
    pub fn write_account(&self, token: &str, namespace: &str) -> PathBuf {
        let directory = self.directory.join("serviceaccount");
        std::fs::create_dir_all(&directory).unwrap();
        super::files::write_token(&directory.join("token"), token);
        std::fs::write(directory.join("ca.crt"), &self.shared.root).unwrap();
        std::fs::write(directory.join("namespace"), namespace).unwrap();
        directory
    }

    /// The roots of its TLS, as PEM.
    pub fn root(&self) -> &[u8] {
        &self.shared.root
    }

    // Objects.

    /// Creates or changes an object, and its namespace if there is none. Returns its version.
    pub fn put(&self, draft: &Draft) -> u64 {
        let mut state = self.state();
        let Draft { key, body } = draft;
        let namespace = Key::new("namespaces", "", &key.namespace);
        if !key.namespace.is_empty() && state.store.object(&namespace).is_none() {
            let object = content::stored(&namespace, &json!({}), None);
            state.store.write(namespace, object);
        }
        let old = state.store.object(key);
        let new = content::stored(key, body, old.as_deref());
        content::validate(key, &new, old.as_deref()).map_err(|error| error.body).unwrap();
        let stored = state.store.write(key.clone(), new);
        drop(state);
        accounts::written(&self.shared, &stored);
        stored.version
    }

    /// Deletes a Secret, which must exist.
    pub fn delete_secret(&self, namespace: &str, name: &str) {
        self.delete(&Key::new("secrets", namespace, name));
    }

    pub fn delete(&self, key: &Key) {
        let mut state = self.state();
        let old = state.store.delete(key).unwrap_or_else(|| panic!("there is no {key:?}"));
        accounts::deleted(&mut state, &old);
    }

    /// An object as it is stored.
    pub fn object(&self, key: &Key) -> Option<Value> {
        self.state().store.object(key).map(|object| object.value.clone())
    }

    /// The names of all objects of a kind.
    pub fn names(&self, plural: &'static str) -> Vec<String> {
        self.state().store.all(plural).map(|object| object.key.name.clone()).collect()
    }

    /// From now on these check, approve and sign requests for certificates.
    pub fn set_signers(&self, signers: impl Signers + 'static) {
        self.state().signers = Some(Box::new(signers));
    }

    /// A pair for this host, from the CA of the cluster.
    pub fn pair(&self, host: &str) -> Pair {
        let (chain, key) = self.ca.issue_server(&[host], &[]).unwrap();
        Pair {
            chain: pem::of_certificates(&chain),
            key: key.to_pem().to_vec(),
            root: self.shared.root.clone(),
        }
    }

    /// The current version.
    pub fn version(&self) -> u64 {
        self.state().store.version
    }
}
