//! Whether what an agent needs is there and good, before it serves: what `attache check` tells.
//!
//! Nothing is changed, and no certificate is asked for unless somebody wants it. What the agent does itself (files, tokens,
//! connections) is done here by the same code.

use std::fs;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use rustix::fs::Access;
use rustix::process::{Resource, getgid, getrlimit, getuid};
use serde_json::{Value, json};
use tokio::net::UnixStream;
use tokio::time::timeout;

use crate::app;
use crate::ca::citadel;
use crate::ca::embedded::{self, DevelopmentCa};
use crate::ca::failover::Failover;
use crate::ca::token::{self, TokenSource};
use crate::cache::{Cache, Key, Workload};
use crate::clock::{Clock, rfc3339, span};
use crate::config::{Config, Provider, ProviderFile};
use crate::credential::Token;
use crate::exposure;
use crate::generation::Place;
use crate::metrics::Metrics;
use crate::pki::pem;
use crate::proto::SECRET_TYPE_URL;
use crate::proto::envoy::config::core::v3::Node;
use crate::proto::envoy::service::discovery::v3::DiscoveryRequest;
use crate::proto::envoy::service::secret::v3::secret_discovery_service_client::SecretDiscoveryServiceClient;
use crate::sds::listener::{Occupant, occupant};
use crate::sds::peers::Allowed;
use crate::secret::SecretName;
use crate::source::files::FileSource;
use crate::source::watch::Watcher;
use crate::source::workload::WorkloadSource;
use crate::{limits, plain_file, rpc};

/// The user and group of Istio's proxy.
const ISTIO_PROXY: u32 = 1337;
/// As many descriptors as a small gateway needs: each connection takes one.
const FEW_DESCRIPTORS: u64 = 1024;

/// How long an agent that runs may take to answer.
const PATIENCE: Duration = Duration::from_secs(2);
/// The bit in a folder's mode that gives its group to what is made there.
const SET_GROUP_ID: u32 = 0o2000;

const WORKLOAD: Workload = Workload(0);

/// How it stands with one thing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum State {
    /// As it should be.
    Ok,
    /// The agent will serve, but somebody should look at it.
    Warning,
    /// Something will not work.
    Error,
}

impl State {
    /// The word for it.
    pub fn word(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warning => "warning",
            Self::Error => "error",
        }
    }
}

/// What was found out of one thing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// How it stands.
    pub state: State,
    /// Of what.
    pub about: &'static str,
    /// The facts; where it is not as it should be, with what to do.
    pub text: String,
}

impl Finding {
    /// As JSON: `state`, `about`, `text`.
    pub fn json(&self) -> Value {
        json!({ "state": self.state.word(), "about": self.about, "text": self.text })
    }
}

/// What is checked besides the options.
#[derive(Clone, Copy, Debug)]
pub struct Scope {
    /// Ask the CA for a certificate.
    pub issues: bool,
    /// This runs in a Pod: the kubelet probes, and Envoy is in another container.
    pub is_in_pod: bool,
}

#[derive(Debug)]
struct Findings {
    all: Vec<Finding>,
    clock: Clock,
}

/// Everything that there is to say of `config`.
pub async fn check(config: Config, scope: Scope) -> Vec<Finding> {
    let mut findings = Findings { all: Vec::new(), clock: Clock::system() };
    let f = &mut findings;
    f.options(&config);
    let is_running = f.socket(&config, scope).await;
    f.addresses(&config, scope, is_running);
    let admin = config.admin_socket.as_ref().map(|socket| socket.path.as_path());
    for concern in exposure::concerns(&config, &config.socket, admin) {
        f.note(State::Warning, "modes", concern);
    }
    f.folders(&config);
    f.mounted(&config);
    f.crls(&config);
    f.limits(&config);
    // All CAs are called with the same.
    if let Some(provider) = config.providers.first() {
        f.credentials(provider, &config).await;
    }
    for provider in &config.providers {
        f.provider(provider, &config).await;
    }
    if !config.providers.is_empty() {
        f.identity(&config).await;
    }
    if scope.issues {
        f.issuance(config).await;
    }
    findings.all
}

impl Findings {
    fn note(&mut self, state: State, about: &'static str, text: impl Into<String>) {
        self.all.push(Finding { state, about, text: text.into() });
    }

    fn options(&mut self, config: &Config) {
        let cas: Vec<_> = config.providers.iter().map(Provider::name).collect();
        let cas = if cas.is_empty() { "no CA: mounted files alone".to_owned() } else { cas.join(", ") };
        self.note(State::Ok, "options", format!("{cas} (because of {})", config.provider_reason));
        for note in &config.notes {
            self.note(State::Warning, "options", note);
        }
    }

    /// True if an agent serves there.
    async fn socket(&mut self, config: &Config, scope: Scope) -> bool {
        if let Some(admin) = config.admin_socket.as_ref().filter(|admin| admin.is_named) {
            self.place("admin socket", "--admin-socket", &admin.path).await;
        }
        let is_running = self.place("socket", "--socket", &config.socket).await;
        self.peers(config, scope);
        is_running
    }

    /// Whether a socket can be made at `path`. True if an agent serves there.
    async fn place(&mut self, about: &'static str, option: &'static str, path: &Path) -> bool {
        let shown = path.display();
        if let Err(words) = writable_folder(plain_file::folder_of(path)) {
            let way_out = format!("create or mount it, or choose another path with {option}");
            self.note(State::Error, about, format!("{shown}: {words}; {way_out}"));
            return false;
        }
        let process = |pid: Option<i32>| match pid {
            Some(pid) => format!("process {pid}"),
            None => "somebody".to_owned(),
        };
        match occupant(path, option) {
            Err(error) => self.note(State::Error, about, error.to_string()),
            Ok(Occupant::Live(pid)) => {
                // The admin socket speaks HTTP/1.1, and belongs to the same process.
                let is_agent = if option == "--socket" { is_agent(path).await } else { Some(true) };
                let process = process(pid);
                let (state, text) = match is_agent {
                    Some(true) => (State::Ok, format!("an agent serves there now, {process}")),
                    Some(false) => (
                        State::Error,
                        format!(
                            "{process} listens there, and does not answer as attache does: stop it, or choose another path \
                             with {option}"
                        ),
                    ),
                    None => (
                        State::Warning,
                        format!(
                            "{process} listens there, and has not answered within {PATIENCE:?}: does the agent hang?"
                        ),
                    ),
                };
                self.note(state, about, format!("{shown}: {text}"));
                return is_agent != Some(false);
            }
            Ok(Occupant::Nobody | Occupant::Dead) => {
                self.note(State::Ok, about, format!("{shown}: its folder is there, and nobody serves"));
            }
        }
        false
    }

    /// Whom the socket's mode lets connect, and the options besides.
    fn peers(&mut self, config: &Config, scope: Scope) {
        let (uid, mut gid) = (getuid().as_raw(), getgid().as_raw());
        // In such a folder files get its group: so are a Pod's volumes with an fsGroup.
        if let Ok(folder) = fs::metadata(plain_file::folder_of(&config.socket))
            && folder.mode() & SET_GROUP_ID != 0
        {
            gid = folder.gid();
        }
        let Allowed { uids, gids } = &config.allowed;
        let is_limited = !uids.is_empty() || !gids.is_empty();
        let (is_groups, is_everybodys) = (config.socket_mode & 0o020 != 0, config.socket_mode & 0o002 != 0);
        let mode = format!("mode {:04o} (--socket-mode)", config.socket_mode);
        let (who, is_proxy_let_in) = match (is_everybodys, is_groups) {
            (true, _) => ("every user".to_owned(), true),
            (_, true) => (format!("user {uid} and group {gid}"), uid == ISTIO_PROXY || gid == ISTIO_PROXY),
            _ => (format!("user {uid}"), uid == ISTIO_PROXY),
        };
        let is_proxy_allowed =
            !is_limited || uid == ISTIO_PROXY || uids.contains(&ISTIO_PROXY) || gids.contains(&ISTIO_PROXY);
        let limit = if is_limited {
            format!(
                ", and --allow-uid and --allow-gid only users [{}] and groups [{}]",
                limits::listed(uids, ", "),
                limits::listed(gids, ", ")
            )
        } else {
            String::new()
        };
        if scope.is_in_pod && !(is_proxy_let_in && is_proxy_allowed) {
            self.note(
                State::Warning,
                "peers",
                format!(
                    "{mode} lets {who} connect{limit}, and Istio's proxy is user and group {ISTIO_PROXY}: run Envoy and \
                     this agent with one runAsUser or runAsGroup (securityContext), and name it in --allow-uid where \
                     there is such"
                ),
            );
        } else if is_everybodys && !is_limited {
            self.note(
                State::Warning,
                "peers",
                format!("{mode} lets every user connect, who gets the workload's key: --socket-mode 0660 or --allow-uid limits that"),
            );
        } else {
            self.note(
                State::Ok,
                "peers",
                format!("{mode} lets {who} connect{limit}: Envoy must be among them"),
            );
        }
    }

    /// Where probes and browsers come: both at a time, as the agent has them.
    fn addresses(&mut self, config: &Config, scope: Scope, is_running: bool) {
        let mut taken = Vec::new();
        let mut listen = |address: SocketAddr, option: &str| match TcpListener::bind(address) {
            Ok(listener) => {
                taken.push(listener);
                Ok(())
            }
            // The running one has it.
            Err(_) if is_running => Ok(()),
            Err(error) => {
                Err(format!("listening on {address} failed: {error}; choose another {option}, or none"))
            }
        };
        let status = config.status_address.map(|address| (address, listen(address, "--status-address")));
        let page = config.admin_address.map(|address| (address, listen(address, "--admin-address")));
        match status {
            None => self.note(State::Ok, "status address", "none: there are no probes and no metrics"),
            Some((_, Err(words))) => self.note(State::Error, "status address", words),
            Some((address, Ok(()))) if scope.is_in_pod && address.ip().is_loopback() => self.note(
                State::Warning,
                "status address",
                format!(
                    "{address} can't be reached by the kubelet's probes, nor by Prometheus: --status-address 0.0.0.0:{} \
                     opens it to them",
                    address.port()
                ),
            ),
            Some((address, Ok(()))) => self.note(State::Ok, "status address", address.to_string()),
        }
        match page {
            None => {}
            Some((_, Err(words))) => self.note(State::Error, "status page", words),
            Some((address, Ok(()))) => self.note(State::Ok, "status page", address.to_string()),
        }
    }

    /// Folders that are written to, later.
    fn folders(&mut self, config: &Config) {
        let output = config.output.as_ref().map(|output| ("--output-dir", output.folder.as_path()));
        let state = config.workload.state.as_ref().map(|state| ("--state-dir", state.path()));
        if let Some(file) = &config.ready_file {
            // This one is not made.
            match writable_folder(plain_file::folder_of(file)) {
                Ok(()) => self.note(State::Ok, "folders", format!("--ready-file {}", file.display())),
                Err(words) => self.note(
                    State::Error,
                    "folders",
                    format!(
                        "--ready-file {}: {words}; create or mount it, or choose another path",
                        file.display()
                    ),
                ),
            }
        }
        for (option, folder) in output.into_iter().chain(state) {
            // It is made when there is something to write.
            let there = folder.ancestors().find(|folder| folder.exists()).unwrap_or(folder);
            match writable_folder(there) {
                Ok(()) => {
                    self.note(State::Ok, "folders", format!("{option} {} is writable", folder.display()))
                }
                Err(words) => self.note(
                    State::Error,
                    "folders",
                    format!("{option} {}: {words}; mend that, or choose another folder", folder.display()),
                ),
            }
        }
    }

    fn mounted(&mut self, config: &Config) {
        let cache = Cache::default();
        let (clock, metrics) = (self.clock.clone(), Metrics::default());
        let watcher = Watcher::new();
        let mut files = FileSource::new(config.files.clone(), &cache, WORKLOAD, watcher, clock, metrics);
        files.publish_once();
        for one in cache.snapshot() {
            let name = one.key.name.as_str();
            match (&one.entry.good, one.entry.failure()) {
                (_, Some(reason)) => {
                    self.note(State::Error, "mounted files", format!("{name}: {reason}"));
                }
                (Some(good), None) => {
                    let text = format!("{name}: {}, {}", good.secret, self.until(good.secret.not_after()));
                    self.note(State::Ok, "mounted files", text);
                }
                (None, None) => {}
            }
        }
        let homes = config.files.mounted.iter().filter_map(Place::home);
        if cache.snapshot().iter().all(|one| one.entry.good.is_none() && one.entry.failure().is_none()) {
            let mut homes: Vec<_> = homes.map(|home| home.display().to_string()).collect();
            homes.dedup();
            let text = format!("none in {}: the CA gives all", homes.join(", "));
            self.note(State::Ok, "mounted files", text);
        }
    }

    fn crls(&mut self, config: &Config) {
        match config.crl.read() {
            Ok(Some(crls)) => {
                let now = self.clock.now();
                let ended = crls.iter().find(|crl| crl.next_update.is_some_and(|at| at <= now));
                let file = config.crl.path.display();
                match ended {
                    None => self.note(State::Ok, "CRLs", format!("{file}: {} CRL(s)", crls.len())),
                    Some(crl) => self.note(
                        State::Warning,
                        "CRLs",
                        format!(
                            "{file}: that of {} was to be replaced at {}: none is served, and revoked certificates are \
                             accepted; get a new one",
                            crl.issuer,
                            crl.next_update.map(rfc3339).map(|at| at.to_string()).unwrap_or_default()
                        ),
                    ),
                }
            }
            Ok(None) if config.crl.is_named => self.note(
                State::Warning,
                "CRLs",
                format!("{} is not there: revoked certificates are accepted", config.crl.path.display()),
            ),
            Ok(None) => {}
            Err(error) => self.note(State::Error, "CRLs", error.to_string()),
        }
    }

    /// What the kernel has room for.
    fn limits(&mut self, config: &Config) {
        let paths: Vec<PathBuf> =
            config.files.mounted.iter().filter_map(Place::home).map(Path::to_owned).collect();
        let mut watch = Watcher::new().watch(paths);
        watch.arm();
        let limit = |name: &str| {
            let read = fs::read_to_string(format!("/proc/sys/fs/inotify/{name}"));
            read.map_or_else(|_| "unknown".to_owned(), |text| text.trim().to_owned())
        };
        let limits = format!(
            "fs.inotify.max_user_instances is {}, max_user_watches {}",
            limit("max_user_instances"),
            limit("max_user_watches")
        );
        if watch.polls() {
            self.note(
                State::Warning,
                "inotify",
                format!(
                    "the kernel does not tell of changes of the mounted files: they are looked at every two seconds; \
                     {limits}: raise what is used up"
                ),
            );
        } else {
            self.note(State::Ok, "inotify", format!("the kernel tells of changes; {limits}"));
        }
        match getrlimit(Resource::Nofile).maximum {
            Some(most) if most < FEW_DESCRIPTORS => self.note(
                State::Warning,
                "descriptors",
                format!("{most} at most: each connection takes one; raise the limit (ulimit -n)"),
            ),
            most => {
                let most = most.map_or("no limit".to_owned(), |most| format!("{most} at most"));
                self.note(State::Ok, "descriptors", most);
            }
        }
    }

    async fn credentials(&mut self, provider: &Provider, config: &Config) {
        let mut has_certificate = false;
        if let Some(folder) = provider.client_cert() {
            match folder.read(&self.clock).await {
                Ok(certificate) => {
                    has_certificate = true;
                    self.note(State::Ok, "client certificate", certificate.to_string());
                }
                Err(why) => self.note(
                    State::Warning,
                    "client certificate",
                    format!("{why}; until there is one the CA is called with the token"),
                ),
            }
        }
        for ProviderFile { option, path, is_pem } in provider.files() {
            let read = plain_file::read(path, limits::FILE_BYTES).map_err(|error| error.to_string());
            let good = read.and_then(|text| match is_pem {
                true => pem::certificates(&text).map(drop).map_err(|error| error.to_string()),
                false => Ok(()),
            });
            let shown = path.display();
            match good {
                Ok(()) => self.note(State::Ok, "files", format!("{option} {shown}")),
                Err(reason) => {
                    self.note(
                        State::Error,
                        "files",
                        format!("{option} {shown} can't be used: {reason}; replace it"),
                    );
                }
            }
        }
        let Some(settings) = provider.token() else { return };
        let source = TokenSource::new(settings.clone(), self.clock.clone());
        let token = match timeout(config.workload.timeout, source.token()).await {
            Ok(Ok(token)) => token,
            outcome => {
                let words = outcome.map_or_else(
                    |_| format!("no token within {:?} (--ca-timeout)", config.workload.timeout),
                    |none| none.err().map(|error| error.to_string()).unwrap_or_default(),
                );
                // With a certificate the CA can do without.
                let state = if has_certificate { State::Warning } else { State::Error };
                self.note(state, "token", words);
                return;
            }
        };
        let described = source.describe(&token);
        let (state, words) = self.judge(&token, matches!(provider, Provider::Citadel { .. }));
        let about = if matches!(settings, token::Settings::File(_)) { "token" } else { "token service" };
        self.note(state, about, format!("{described}{words}"));
    }

    fn judge(&self, token: &Token, is_for_istio: bool) -> (State, &'static str) {
        let now = self.clock.now();
        let Some(claims) = token.claims() else { return (State::Ok, "") };
        if claims.expires.is_some_and(|at| at <= now) {
            return (State::Error, ": the CA will refuse it; who is to rotate it?");
        }
        if claims.not_before.is_some_and(|at| at > now) {
            return (State::Error, ": the CA will refuse it; is this machine's clock right?");
        }
        match citadel::audience_hint(token) {
            hint if is_for_istio && !hint.is_empty() => (State::Warning, hint),
            _ => (State::Ok, ""),
        }
    }

    /// Whether the CA is there, as far as that can be seen without a certificate being spent.
    async fn provider(&mut self, provider: &Provider, config: &Config) {
        let Some((endpoint, protocol)) = provider.endpoint() else {
            let text = match provider {
                Provider::Embedded { folder } => match development_ca(folder, &self.clock) {
                    Ok(text) => text,
                    Err(words) => return self.note(State::Error, "CA", words),
                },
                _ => "a command signs; --issue runs it".to_owned(),
            };
            return self.note(State::Ok, "CA", text);
        };
        let certificate = match provider.client_cert() {
            Some(folder) => folder.read(&self.clock).await.ok(),
            None => None,
        };
        let address = endpoint.address.to_string();
        let connect = endpoint.connect(certificate.as_ref(), protocol);
        match timeout(config.workload.timeout, connect).await {
            Ok(Ok(_)) if endpoint.address.plaintext => {
                self.note(State::Ok, "CA", format!("{address} takes connections, in plain text"));
            }
            Ok(Ok(_)) => self.note(State::Ok, "CA", format!("{address} is there, and its certificate is good")),
            Ok(Err(error)) => {
                let at = if error.names_its_ca() { String::new() } else { format!("{address}: ") };
                self.note(State::Error, "CA", format!("{at}{error}"));
            }
            Err(_) => self.note(
                State::Error,
                "CA",
                format!(
                    "{address} has not answered within {:?} (--ca-timeout): does a firewall drop what is sent?",
                    config.workload.timeout
                ),
            ),
        }
    }

    async fn identity(&mut self, config: &Config) {
        match config.workload.identity.resolve(&self.clock).await {
            Some(identity) => self.note(State::Ok, "identity", identity.to_string()),
            None => self.note(
                State::Warning,
                "identity",
                "neither the options nor a credential tell it: what the CA says is taken. --spiffe-id sets it",
            ),
        }
    }

    async fn issuance(&mut self, config: Config) {
        if config.providers.is_empty() {
            return self.note(State::Ok, "issuance", "there is no CA to ask");
        }
        let clock = self.clock.clone();
        let cas = config.providers.into_iter().map(|provider| app::certificate_authority(provider, &clock));
        let cas = match cas.collect::<Result<Vec<_>, _>>() {
            Ok(cas) => Failover::new(cas),
            Err(error) => return self.note(State::Error, "issuance", error.to_string()),
        };
        let cache = Cache::default();
        let mut settings = config.workload;
        // It belongs to the agent.
        settings.state = None;
        let mut entry = cache.follow(Key { workload: WORKLOAD, name: SecretName::Workload });
        let source = WorkloadSource::new(cas, settings, &cache, WORKLOAD, clock, Metrics::default());
        let settled = async {
            let has_settled = entry.wait_for(|entry| entry.good.is_some() || entry.failure().is_some());
            has_settled.await.map(|entry| entry.clone())
        };
        let entry = tokio::select! {
            entry = settled => entry,
            // It never ends.
            () = source.run() => return,
        };
        let Ok(entry) = entry else { return };
        match (&entry.good, entry.failure()) {
            (Some(good), _) => {
                let text = format!("{}, {}", good.secret, self.until(good.secret.not_after()));
                self.note(State::Ok, "issuance", text);
            }
            (None, reason) => self.note(State::Error, "issuance", reason.unwrap_or_default()),
        }
    }

    fn until(&self, end: SystemTime) -> String {
        let shown = rfc3339(end);
        match end.duration_since(self.clock.now()) {
            Ok(left) => format!("valid until {shown} ({} left)", span(left)),
            Err(past) => format!("EXPIRED at {shown} ({} ago)", span(past.duration())),
        }
    }
}

/// Whether what listens on the SDS socket at `path` speaks SDS; none where it says nothing.
async fn is_agent(path: &Path) -> Option<bool> {
    let ask = async {
        let io = UnixStream::connect(path).await.ok()?;
        let request = DiscoveryRequest {
            node: Some(Node { id: "attache-check".to_owned(), ..Node::default() }),
            resource_names: vec!["ROOTCA".to_owned()],
            type_url: SECRET_TYPE_URL.to_owned(),
            ..DiscoveryRequest::default()
        };
        let origin = http::Uri::from_static("http://attache");
        let talk = async |connection| {
            SecretDiscoveryServiceClient::with_origin(connection, origin).fetch_secrets(request).await
        };
        rpc::with_connection(io, talk).await.ok()
    };
    Some(match timeout(PATIENCE, ask).await.ok()? {
        // What it has to say against it are its own words, and not those of a broken connection.
        Some(Err(status)) => std::error::Error::source(&status).is_none(),
        answer => answer.is_some(),
    })
}

/// The development CA in `folder`, or that one can be made there.
fn development_ca(folder: &Path, clock: &Clock) -> Result<String, String> {
    let shown = folder.display();
    if folder.join(embedded::KEY_FILE).exists() {
        let opened = DevelopmentCa::open(folder, clock.clone());
        return opened.map(|_| format!("the development CA in {shown}")).map_err(|error| error.to_string());
    }
    let there = folder.ancestors().find(|folder| folder.exists()).unwrap_or(Path::new("."));
    writable_folder(there).map_err(|words| format!("--ca-dir {shown}: {words}; choose another one"))?;
    Ok(format!("a new development CA in {shown}"))
}

/// Whether files can be made in `folder`; if not, why.
fn writable_folder(folder: &Path) -> Result<(), String> {
    let shown = folder.display();
    match fs::metadata(folder) {
        Err(error) => return Err(format!("the folder {shown} can't be used: {error}")),
        Ok(found) if !found.is_dir() => return Err(format!("{shown} is not a folder")),
        Ok(_) => {}
    }
    let denied = |error| format!("user {} can't write to the folder {shown}: {error}", getuid().as_raw());
    rustix::fs::access(folder, Access::WRITE_OK | Access::EXEC_OK).map_err(denied)
}
