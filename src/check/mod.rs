//! Whether what an agent needs is there and good, before it serves: what `attache check` tells.
//!
//! Nothing is changed, and no certificate is asked for unless somebody wants it. What the agent does itself (files, tokens,
//! connections) is done here by the same code.

mod ca;
mod sockets;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use rustix::fs::Access;
use rustix::process::{Resource, getrlimit, getuid};
use serde_json::{Value, json};

use crate::base::clock::{Clock, rfc3339, span};
use crate::config::Config;
use crate::export::ready_file::{ReadyFile, ReadyFileError};
use crate::fs::file;
use crate::fs::generation::Place;
use crate::fs::watch::Watcher;
use crate::metrics::Metrics;
use crate::os::permissions;
use crate::source::files::FileSource;
use crate::store::{Cache, Workload};

/// As many descriptors as a small gateway needs: each connection takes one.
const FEW_DESCRIPTORS: u64 = 1024;

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
    for concern in permissions::concerns(&config, &config.socket, admin, scope.is_in_pod) {
        f.note(State::Warning, "modes", concern);
    }
    f.folders(&config, is_running);
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
        let cas: Vec<_> = config.providers.iter().map(|provider| provider.name()).collect();
        let cas = if cas.is_empty() { "no CA: mounted files alone".to_owned() } else { cas.join(", ") };
        self.note(State::Ok, "options", format!("{cas} (because of {})", config.provider_reason));
        for note in &config.notes {
            self.note(State::Warning, "options", note);
        }
    }

    /// Folders that are written to, later.
    fn folders(&mut self, config: &Config, is_running: bool) {
        let output = config.output.as_ref().map(|output| ("--output-dir", output.folder.as_path()));
        let state = config.workload.state.as_ref().map(|state| ("--state-dir", state.path()));
        if let Some(file) = &config.ready_file {
            let writable = writable_folder(file::folder_of(file));
            let shown = file.display();
            match (ReadyFile::is_stale(file), writable) {
                (Err(ReadyFileError::Taken { .. }), _) if is_running => {
                    self.note(State::Ok, "folders", format!("--ready-file {shown} is there"));
                }
                (Err(error), _) => self.note(State::Error, "folders", error.to_string()),
                (_, Err(words)) => self.note(
                    State::Error,
                    "folders",
                    format!("--ready-file {shown}: {words}; choose another path"),
                ),
                (Ok(_), Ok(())) => {
                    self.note(State::Ok, "folders", format!("--ready-file {shown} can be written"))
                }
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

    fn until(&self, end: SystemTime) -> String {
        let shown = rfc3339(end);
        match end.duration_since(self.clock.now()) {
            Ok(left) => format!("valid until {shown} ({} left)", span(left)),
            Err(past) => format!("EXPIRED at {shown} ({} ago)", span(past.duration())),
        }
    }
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
