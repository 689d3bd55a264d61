//! The checks of an agent with many workloads: their files, the kubelet's directories, and the credential for all of them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::{Finding, Findings, Scope, Severity, check_writable};
use crate::agent::inventory;
use crate::auth::token::TokenSource;
use crate::base::clock::Clock;
use crate::base::limits;
use crate::ca::providers::ISTIO;
use crate::config::{Config, ConfigErrors, Description, NodeConfig, read_description};
use crate::csi::{DriverSettings, TokenSource as Place};
use crate::export::output::OutputSettings;
use crate::fs::disk::Disk;
use crate::fs::file;
use crate::fs::pending::PendingOperations;
use crate::fs::watch::directory;
use crate::os::permissions;

/// All findings about `config`.
pub async fn check_node(config: NodeConfig, scope: Scope) -> Vec<Finding> {
    let mut findings = Findings { all: Vec::new(), clock: Clock::system(), disk: Disk::default() };
    let f = &mut findings;
    let shared = &config.shared;
    f.options(shared);
    let admin = shared.admin_socket.as_ref().map(|socket| socket.path.as_path());
    let is_running = match admin {
        Some(path) => f.place("admin socket", "--admin-socket", path).await,
        None => false,
    };
    f.addresses(shared, scope, is_running);
    let inventory = inventory(shared, &[], admin);
    for concern in permissions::concerns(&inventory, scope.is_in_pod, &PendingOperations::default()) {
        f.note(Severity::Warning, "modes", concern);
    }
    f.directories(shared, is_running);
    f.limits(shared);
    let has_own_credential =
        config.template.impersonates() || shared.providers.iter().any(|provider| provider.kind() != ISTIO);
    if let Some(provider) = shared.providers.first().filter(|_| has_own_credential) {
        f.credentials(provider, shared).await;
    }
    if config.template.impersonates() {
        f.impersonation(shared).await;
    }
    for provider in &shared.providers {
        f.provider(provider, shared).await;
    }
    if let Some(driver) = &config.csi {
        f.driver(driver).await;
    }
    if let Some(directory) = &config.workloads {
        f.workloads(directory, &config).await;
    }
    findings.all
}

impl Findings {
    /// Whether the agent's token is one that may name other identities.
    async fn impersonation(&mut self, config: &Config) {
        let Some(settings) = config.providers.first().and_then(|provider| provider.token()) else { return };
        let source =
            TokenSource::new(settings, self.clock.clone(), self.disk.within(config.workload.timeout));
        // Its absence is reported with the credentials.
        let Ok(token) = source.token().await else { return };
        match token.claims().and_then(|claims| claims.pod_uid.as_ref()) {
            Some(_) => self.note(Severity::Ok, "impersonation", "the agent's token is bound to its Pod"),
            None => self.note(
                Severity::Warning,
                "impersonation",
                "the agent's token is not bound to a Pod, and istiod refuses to issue other identities to it: use a projected \
                 token of the agent's Pod",
            ),
        }
    }

    /// The CSI driver's directories.
    async fn driver(&mut self, driver: &DriverSettings) {
        let is_running = self.place("CSI socket", "--csi-socket", &driver.csi_socket).await;
        let shown = driver.registration_dir.display();
        match check_writable(&driver.registration_dir) {
            Ok(()) => {
                let text = format!("{shown} is writable: the kubelet looks for drivers there");
                self.note(Severity::Ok, "registration", text);
            }
            Err(words) => self.note(
                Severity::Error,
                "registration",
                format!(
                    "{words}; mount the kubelet's plugins_registry there, or name it with --csi-registration-dir"
                ),
            ),
        }
        let pods = driver.kubelet_dir.join("pods");
        match check_writable(&pods) {
            Ok(()) => {
                let text = format!("{} is writable: volumes are made there", pods.display());
                self.note(Severity::Ok, "kubelet", text);
            }
            Err(words) => self.note(
                Severity::Error,
                "kubelet",
                format!(
                    "{words}; mount the kubelet's directory at the path that it has on the node, or name it with --kubelet-dir"
                ),
            ),
        }
        let tokens = match (driver.impersonates, driver.token_source) {
            (true, _) => "no token of its own for a Pod: --ca-impersonate",
            (false, Place::VolumeContext) => {
                "tokens of Pods in the volume context: the CSIDriver has tokenRequests and no serviceAccountTokenInSecrets"
            }
            (false, Place::Secrets) => {
                "tokens of Pods among the secrets: the CSIDriver has tokenRequests and serviceAccountTokenInSecrets: true"
            }
        };
        let running = if is_running { ", and an agent serves it" } else { "" };
        let text = format!("{} on node {}{running}; {tokens}", driver.driver_name, driver.node_id);
        self.note(Severity::Ok, "CSI driver", text);
    }

    /// Each file of `--workloads`.
    async fn workloads(&mut self, directory: &Path, config: &NodeConfig) {
        let files = match directory::files(directory) {
            Ok(files) => files,
            Err(error) => {
                let text = format!(
                    "reading the directory of --workloads {} failed: {error}; create it, or name another one",
                    directory.display()
                );
                return self.note(Severity::Error, "workloads", text);
            }
        };
        // By what only one of them may have: the file that has it.
        let mut taken: BTreeMap<PathBuf, PathBuf> = BTreeMap::new();
        let mut good = 0_usize;
        for path in files {
            let name = path.file_stem().and_then(|name| name.to_str()).map(str::to_owned);
            let Some(name) = name.filter(|_| path.extension().is_some_and(|it| it == "toml")) else {
                continue;
            };
            let (description, workload) = match read(&path, &name, config) {
                Ok(read) => read,
                Err(mistakes) => {
                    for mistake in mistakes {
                        self.note(Severity::Error, "workload", format!("{name}: {mistake}"));
                    }
                    continue;
                }
            };
            let outputs = workload.output.iter().flat_map(OutputSettings::paths).cloned();
            let own: Vec<_> = std::iter::once(workload.socket.clone()).chain(outputs).collect();
            let conflict = own.iter().find_map(|own| Some((own, taken.get(own)?)));
            if let Some((own, other)) = conflict {
                let text = format!(
                    "{name}: {} names {}, as {} does already: give each its own",
                    path.display(),
                    own.display(),
                    other.display()
                );
                self.note(Severity::Error, "workload", text);
                continue;
            }
            taken.extend(own.into_iter().map(|own| (own, path.clone())));
            good += 1;
            self.member(&name, &description, workload).await;
        }
        let text = format!("{good} in {}", directory.display());
        self.note(if good == 0 { Severity::Warning } else { Severity::Ok }, "workloads", text);
    }

    /// What one workload needs beside the options of all.
    async fn member(&mut self, name: &str, description: &Description, mut config: Config) {
        for note in &config.notes {
            self.note(Severity::Warning, "workload", format!("{name}: {note}"));
        }
        self.place("socket", "socket", &config.socket).await;
        // They are the agent's.
        config.workload.state = None;
        config.ready_file = None;
        self.directories(&config, false);
        self.passwords(&config);
        let has_its_own = description.options.get("token-file").is_some();
        if let Some(provider) = config.providers.first().filter(|_| has_its_own) {
            self.credentials(provider, &config).await;
        }
    }
}

/// What a file says, or all mistakes in it.
fn read(path: &Path, name: &str, config: &NodeConfig) -> Result<(Description, Config), Vec<String>> {
    let content = file::read(path, limits::OPTIONS_FILE_BYTES).map_err(|error| {
        vec![format!("reading {} failed: {error}; make it readable for the agent's user", path.display())]
    })?;
    let (description, mut mistakes) =
        read_description(path, &content).map_err(|ConfigErrors(mistakes)| mistakes)?;
    match config.template.workload(name, &description) {
        Ok(workload) if mistakes.is_empty() => Ok((description, workload)),
        Ok(_) => Err(mistakes),
        Err(ConfigErrors(others)) => {
            mistakes.extend(others);
            Err(mistakes)
        }
    }
}
