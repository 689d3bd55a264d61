//! `attache check`: whether everything an agent needs is there and valid, before it serves.
//!
//! Nothing is changed, and no certificate is requested without `--issue`. Files, tokens and connections are checked by the
//! agent's own code.

mod ca;
mod command;
mod kubernetes;
mod node;
mod sockets;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

pub use self::node::check_node;
use rustix::fs::Access;
use rustix::process::{Resource, getrlimit};
use serde_json::{Value, json};

use crate::agent::inventory;
use crate::base::clock::{Clock, rfc3339, span};
use crate::base::limits;
use crate::config::Config;
use crate::export::ready_file::{ReadyFile, ReadyFileError};
use crate::fs::disk::Disk;
use crate::fs::file;
use crate::fs::generation::Place;
use crate::fs::pending::PendingOperations;
use crate::fs::watch::Watcher;
use crate::metrics::Metrics;
use crate::os::denial::denial;
use crate::os::permissions;
use crate::pki::keystore::Password;
use crate::source::files::FileSource;
use crate::store::Cache;

/// What a small gateway needs: each connection takes one descriptor.
const FEW_DESCRIPTORS: u64 = 1024;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    Ok,
    /// The agent will serve, but a person should look at it.
    Warning,
    /// Something will not work.
    Error,
}

impl Severity {
    pub fn word(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warning => "warning",
            Self::Error => "error",
        }
    }
}

/// The result of one check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    pub state: Severity,
    /// The subject of the check.
    pub about: &'static str,
    /// The facts, and a remedy unless `state` is `Ok`.
    pub text: String,
}

impl Finding {
    pub fn json(&self) -> Value {
        json!({ "state": self.state.word(), "about": self.about, "text": self.text })
    }
}

/// What to check besides the options.
#[derive(Clone, Copy, Debug)]
pub struct Scope {
    /// Request a certificate from the CA.
    pub issues: bool,
    /// The agent runs in a Pod: the kubelet probes it, and Envoy is in another container.
    pub is_in_pod: bool,
}

#[derive(Debug)]
struct Findings {
    all: Vec<Finding>,
    clock: Clock,
    disk: Disk,
}

/// All findings about `config`.
pub async fn check(config: Config, scope: Scope) -> Vec<Finding> {
    let mut findings = Findings { all: Vec::new(), clock: Clock::system(), disk: Disk::default() };
    let f = &mut findings;
    f.options(&config);
    let is_running = f.socket(&config, scope).await;
    f.addresses(&config, scope, is_running);
    let admin = config.admin_socket.as_ref().map(|socket| socket.path.as_path());
    let sockets: Vec<_> = config.sockets().map(Path::to_owned).collect();
    let inventory = inventory(&config, &sockets, admin);
    for concern in permissions::concerns(&inventory, scope.is_in_pod, &PendingOperations::default()) {
        f.note(Severity::Warning, "modes", concern);
    }
    f.directories(&config, is_running);
    f.command(&config).await;
    f.passwords(&config);
    f.mounted(&config);
    f.crls(&config);
    f.limits(&config);
    // All CAs share the same credentials.
    if let Some(provider) = config.providers.first() {
        f.credentials(provider, &config).await;
    }
    for provider in &config.providers {
        f.provider(provider, &config).await;
    }
    if !config.providers.is_empty() {
        f.identity(&config).await;
    }
    f.spiffe(&config).await;
    f.kubernetes(&config).await;
    if scope.issues {
        f.issuance(config).await;
    }
    findings.all
}

impl Findings {
    fn note(&mut self, state: Severity, about: &'static str, text: impl Into<String>) {
        let finding = Finding { state, about, text: text.into() };
        // The same may be true of several sockets.
        if !self.all.contains(&finding) {
            self.all.push(finding);
        }
    }

    fn options(&mut self, config: &Config) {
        let cas: Vec<_> = config.providers.iter().map(|provider| provider.name()).collect();
        let cas = match cas.is_empty() {
            true if config.spiffe.is_some() => "no CA: a SPIFFE Workload API".to_owned(),
            true if config.files.mounted.is_empty() => "no CA: Secrets of Kubernetes alone".to_owned(),
            true => "no CA: mounted files alone".to_owned(),
            false => cas.join(", "),
        };
        self.note(Severity::Ok, "options", format!("{cas} (because of {})", config.provider_reason));
        if let Some(file) = &config.options_file {
            let options: Vec<_> = file.names().collect();
            let options = if options.is_empty() { "none".to_owned() } else { options.join(", ") };
            self.note(Severity::Ok, "options", format!("in force from {}: {options}", file.path().display()));
        }
        for note in &config.notes {
            self.note(Severity::Warning, "options", note);
        }
    }

    /// Directories that the agent will write to.
    fn directories(&mut self, config: &Config, is_running: bool) {
        let outputs = config.output.iter().flat_map(|output| &output.directories);
        let outputs = outputs.map(|output| (output.option, output.directory.as_path()));
        let state = config.workload.state.as_ref().map(|state| ("--state-dir", state.path()));
        if let Some(file) = &config.ready_file {
            let writable = check_writable(file::directory_of(file));
            let shown = file.display();
            match (ReadyFile::is_stale(file), writable) {
                (Err(ReadyFileError::Taken { .. }), _) if is_running => {
                    self.note(Severity::Ok, "directories", format!("--ready-file {shown} exists"));
                }
                (Err(error), _) => self.note(Severity::Error, "directories", error.to_string()),
                (_, Err(words)) => self.note(
                    Severity::Error,
                    "directories",
                    format!("--ready-file {shown}: {words}; choose another path"),
                ),
                (Ok(_), Ok(())) => {
                    self.note(Severity::Ok, "directories", format!("--ready-file {shown} is writable"))
                }
            }
        }
        for (option, directory) in outputs.chain(state) {
            // The agent creates it when there is something to write.
            let existing = directory.ancestors().find(|path| path.exists()).unwrap_or(directory);
            match check_writable(existing) {
                Ok(()) => self.note(
                    Severity::Ok,
                    "directories",
                    format!("{option} {} is writable", directory.display()),
                ),
                Err(words) => self.note(
                    Severity::Error,
                    "directories",
                    format!(
                        "{option} {}: {words}; fix that, or choose another directory",
                        directory.display()
                    ),
                ),
            }
        }
    }

    /// The passwords of keystores that the agent will write.
    fn passwords(&mut self, config: &Config) {
        for output in config.output.iter().flat_map(|output| &output.directories) {
            let Some(file) = output.format.password_file() else { continue };
            let read = file::read(file, limits::PASSWORD_FILE_BYTES).map_err(|error| error.to_string());
            let password = read.and_then(|it| Password::from_file(&it).map_err(|error| error.to_string()));
            let shown = format!("password-file of {} {}", output.option, output.directory.display());
            match password {
                Ok(_) => self.note(Severity::Ok, "directories", format!("{shown}: it holds a password")),
                Err(words) => {
                    let text = format!("{shown}: {}: {words}; correct it", file.display());
                    self.note(Severity::Error, "directories", text);
                }
            }
        }
    }

    fn mounted(&mut self, config: &Config) {
        if config.files.mounted.is_empty() {
            // Only Secrets of Kubernetes are served.
            return;
        }
        let (cache, workload) = Cache::with_workload("");
        let (clock, metrics) = (self.clock.clone(), Metrics::default());
        let watcher = Watcher::new(PendingOperations::default());
        let mut files = FileSource::new(config.files.clone(), &cache, workload, watcher, clock, metrics);
        files.publish_once();
        for one in cache.snapshot() {
            let name = one.key.name.as_str();
            match (&one.entry.good, one.entry.failure()) {
                (_, Some(reason)) => {
                    self.note(Severity::Error, "mounted files", format!("{name}: {reason}"));
                }
                (Some(good), None) => {
                    let text = format!("{name}: {}, {}", good.secret, self.until(good.secret.not_after()));
                    self.note(Severity::Ok, "mounted files", text);
                }
                (None, None) => {}
            }
        }
        let homes = config.files.mounted.iter().filter_map(Place::home);
        if cache.snapshot().iter().all(|one| one.entry.good.is_none() && one.entry.failure().is_none()) {
            let mut homes: Vec<_> = homes.map(|home| home.display().to_string()).collect();
            homes.dedup();
            let source = if config.spiffe.is_some() { "SPIFFE endpoint" } else { "CA" };
            let text = format!("none in {}: all secrets come from the {source}", homes.join(", "));
            self.note(Severity::Ok, "mounted files", text);
        }
    }

    fn crls(&mut self, config: &Config) {
        match config.crl.read() {
            Ok(Some(crls)) => {
                let now = self.clock.now();
                let expired = crls.iter().find(|crl| crl.next_update.is_some_and(|at| at <= now));
                let file = config.crl.path.display();
                match expired {
                    None => self.note(Severity::Ok, "CRLs", format!("{file}: {} CRL(s)", crls.len())),
                    Some(crl) => self.note(
                        Severity::Warning,
                        "CRLs",
                        format!(
                            "{file}: the CRL of {} expired at {}: no CRL is served, and revoked certificates are accepted; \
                             replace it",
                            crl.issuer,
                            crl.next_update.map(rfc3339).map(|at| at.to_string()).unwrap_or_default()
                        ),
                    ),
                }
            }
            Ok(None) if config.crl.is_named => self.note(
                Severity::Warning,
                "CRLs",
                format!("{} does not exist: revoked certificates are accepted", config.crl.path.display()),
            ),
            Ok(None) => {}
            Err(error) => self.note(Severity::Error, "CRLs", error.to_string()),
        }
    }

    /// Limits of the kernel.
    fn limits(&mut self, config: &Config) {
        let paths: Vec<PathBuf> =
            config.files.mounted.iter().filter_map(Place::home).map(Path::to_owned).collect();
        let mut watch = Watcher::new(PendingOperations::default()).watch(paths);
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
                Severity::Warning,
                "inotify",
                format!(
                    "not available: the mounted files are polled every two seconds; {limits}: raise the limit that is \
                     reached"
                ),
            );
        } else {
            self.note(Severity::Ok, "inotify", format!("available; {limits}"));
        }
        match getrlimit(Resource::Nofile).maximum {
            Some(limit) if limit < FEW_DESCRIPTORS => self.note(
                Severity::Warning,
                "descriptors",
                format!("{limit} at most: each connection takes one; raise the limit (ulimit -n)"),
            ),
            limit => {
                let text = limit.map_or("no limit".to_owned(), |limit| format!("{limit} at most"));
                self.note(Severity::Ok, "descriptors", text);
            }
        }
    }

    fn until(&self, not_after: SystemTime) -> String {
        let shown = rfc3339(not_after);
        match not_after.duration_since(self.clock.now()) {
            Ok(left) => format!("valid until {shown} ({} left)", span(left)),
            Err(past) => format!("EXPIRED at {shown} ({} ago)", span(past.duration())),
        }
    }
}

/// Checks that files can be created in `directory`. An error is for people, without a remedy.
fn check_writable(directory: &Path) -> Result<(), String> {
    let shown = directory.display();
    match fs::metadata(directory) {
        Err(error) => return Err(format!("opening the directory {shown} failed: {error}")),
        Ok(found) if !found.is_dir() => return Err(format!("{shown} is not a directory")),
        Ok(_) => {}
    }
    let denied = |error| format!("can't write to the directory {shown}: {error}; {}", denial(directory));
    rustix::fs::access(directory, Access::WRITE_OK | Access::EXEC_OK).map_err(denied)
}
