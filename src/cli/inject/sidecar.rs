//! The sidecar for the options of `attache inject`, checked before any manifest is changed.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::Path;

use serde_json::json;

use super::InjectArgs;
use crate::auth::token;
use crate::base::text;
use crate::ca::citadel::options::CitadelProvider;
use crate::ca::provider::TokenUse;
use crate::cli::{self, RunLine};
use crate::config::{Config, ConfigErrors, Environment, Provider, RunArgs};
use crate::inject::{Purpose, Sidecar, Volume};
use crate::net::tls::Roots;

/// The status address for the kubelet's probes; the agent's default is a loopback address.
const STATUS_ADDRESS: &str = "0.0.0.0:15055";
/// Kubernetes itself mounts a token there.
const SERVICE_ACCOUNT_DIR: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

/// The sidecar for these options, if `attache run` accepts them.
pub(super) fn sidecar(args: &InjectArgs) -> anyhow::Result<Sidecar> {
    let mut run_args = vec!["run".to_owned()];
    run_args.extend(args.options.iter().cloned());
    let (run, unknown) = parse(&run_args)?;
    let config = config(&run, unknown)?;

    let mut paths = Paths::default();
    let socket = paths.absolute("--socket", &config.socket);
    let admin_socket = config.admin_socket.as_ref().filter(|admin| admin.is_named);
    let admin_socket =
        admin_socket.map(|admin| ("--admin-socket", paths.absolute("--admin-socket", &admin.path)));
    let ready_file =
        config.ready_file.as_ref().map(|path| ("--ready-file", paths.absolute("--ready-file", path)));
    let mut volumes = writable_volumes(&config, &run, &mut paths);
    volumes.extend(token_volume(&config, &run, args));
    volumes.extend(root_volume(&config, args));
    let mut errors = paths.errors;

    if config.status_address.is_some() && run.status_address.is_none() {
        run_args.push(format!("--status-address={STATUS_ADDRESS}"));
    }
    let status = status_address(&config, &run);
    errors.extend(status.and_then(unreachable_status));
    let sidecar = Sidecar {
        name: args.name.clone(),
        image: args.image.clone(),
        args: run_args,
        is_native: args.native,
        run_as: args.run_as.0,
        socket_dir: parent(&socket).to_owned(),
        socket,
        is_open: config.socket_mode & 0o002 != 0,
        admin_socket: config.admin_socket.map(|admin| admin.path.to_string_lossy().into_owned()),
        status_port: status.map(|address| address.port()),
        containers: args.container.clone(),
        volumes,
        mounts: args.mount.clone(),
    };
    errors.extend(shared_directories(&sidecar));
    errors.extend(unwritable_files(&sidecar, admin_socket.into_iter().chain(ready_file)));
    errors.extend(taken_names(&sidecar));
    if errors.is_empty() { Ok(sidecar) } else { Err(ConfigErrors(errors).into()) }
}

/// Parses the options of `attache run`; also returns the unknown ones.
fn parse(run_args: &[String]) -> Result<(RunArgs, Vec<String>), ConfigErrors> {
    match cli::parse::<RunLine>(run_args.iter().map(OsString::from).collect()) {
        Ok((line, unknown)) => Ok((line.args, unknown)),
        Err(cli::NotParsed { error, .. }) => {
            let text = error.to_string();
            let text = text.trim_start_matches("error: ").lines().next().unwrap_or_default();
            Err(ConfigErrors(vec![format!("after --: {text}")]))
        }
    }
}

/// The configuration, independent of the machine where the manifests are made.
fn config(run: &RunArgs, unknown: Vec<String>) -> Result<Config, ConfigErrors> {
    // The environment is that of the container, which has none of the agent's variables.
    let config = cli::run::config(run, unknown, &Environment::new());
    let is_chosen = run.ca.is_some() || run.file_mounted_certs || !run.ca_address.is_empty();
    if is_chosen || run.ca_client_cert_dir.is_some() {
        return config;
    }
    // The configuration looked at this machine's files, which tell nothing about the container's.
    let mut errors = config.map_or_else(|ConfigErrors(all)| all, |_| Vec::new());
    errors.retain(|error| !error.starts_with("no CA is configured"));
    errors.push(
        "no CA is configured: name one with --ca-address or --ca; for mounted files give --ca none"
            .to_owned(),
    );
    Err(ConfigErrors(errors))
}

/// Checks paths of the container, and collects the relative ones.
#[derive(Default)]
struct Paths {
    errors: Vec<String>,
}

impl Paths {
    fn absolute(&mut self, option: &str, path: &Path) -> String {
        let text = path.to_string_lossy().into_owned();
        if !path.is_absolute() {
            self.errors.push(format!("{option} {text} is relative; a container needs the absolute path"));
        }
        text
    }
}

/// Volumes for the directories that the agent writes to.
fn writable_volumes(config: &Config, run: &RunArgs, paths: &mut Paths) -> Vec<Volume> {
    // In memory: keys do not belong on disks.
    let memory = |size: &str| json!({ "emptyDir": { "medium": "Memory", "sizeLimit": size } });
    let mut volumes = Vec::new();
    // The options as given: the configuration made them absolute with a directory of this machine.
    if let Some(state) = &run.state_dir {
        let path = paths.absolute("--state-dir", Path::new(state));
        volumes.push(Volume { purpose: Purpose::State, source: memory("1Mi"), path });
    }
    if let Some(output) = &run.output_dir {
        let path = paths.absolute("--output-dir", Path::new(output));
        volumes.push(Volume { purpose: Purpose::Output, source: memory("8Mi"), path });
    }
    if let Some(directory) = config.providers.first().and_then(|provider| provider.directory()) {
        let path = paths.absolute("--ca-dir", directory);
        volumes.push(Volume { purpose: Purpose::Ca, source: memory("1Mi"), path });
    }
    volumes
}

/// The workload's token, if the agent reads it from a file that nothing else mounts.
fn token_volume(config: &Config, run: &RunArgs, args: &InjectArgs) -> Option<Volume> {
    let provider = config.providers.first()?;
    if !matches!(provider.kind().token, TokenUse::Source { .. }) {
        return None;
    }
    let settings = provider.token()?;
    if matches!(settings, token::TokenSettings::Service { service: token::Service::Metadata(_), .. }) {
        return None;
    }
    let path = run.token_file.as_deref().unwrap_or("/var/run/secrets/tokens/istio-token");
    let (dir, file) = path.rsplit_once('/').filter(|(dir, _)| dir.starts_with('/'))?;
    if is_mounted(args, dir) || dir == SERVICE_ACCOUNT_DIR {
        return None;
    }
    let token = json!({ "path": file, "audience": args.token_audience, "expirationSeconds": 43200 });
    let source = json!({ "projected": { "sources": [{ "serviceAccountToken": token }] } });
    Some(Volume { purpose: Purpose::Token, source, path: dir.to_owned() })
}

/// istiod's root, if the agent looks for it in the default places, and nothing else mounts it.
fn root_volume(config: &Config, args: &InjectArgs) -> Option<Volume> {
    let Some(Provider::Citadel(CitadelProvider { endpoint, client_cert: None, .. })) =
        config.providers.first()
    else {
        return None;
    };
    let path = "/var/run/secrets/istio";
    let is_default = matches!(endpoint.roots, Roots::FirstOf(_)) && !endpoint.address.plaintext;
    let source = json!({ "configMap": { "name": "istio-ca-root-cert" } });
    let is_wanted = is_default && !is_mounted(args, path);
    is_wanted.then(|| Volume { purpose: Purpose::CaRoot, source, path: path.to_owned() })
}

fn is_mounted(args: &InjectArgs, dir: &str) -> bool {
    args.mount.iter().any(|(_, mounted)| dir == mounted.trim_end_matches('/'))
}

/// The status address in the container; none if it is switched off.
fn status_address(config: &Config, run: &RunArgs) -> Option<SocketAddr> {
    match (config.status_address, &run.status_address) {
        (Some(_), None) => STATUS_ADDRESS.parse().ok(),
        (status, _) => status,
    }
}

fn unreachable_status(address: SocketAddr) -> Option<String> {
    (address.ip().is_loopback() || address.port() == 0).then(|| {
        format!(
            "--status-address {address} can't be reached by the kubelet's probes; leave it out for {STATUS_ADDRESS}, or give none"
        )
    })
}

fn parent(path: &str) -> &str {
    Path::new(path).parent().and_then(Path::to_str).unwrap_or_default()
}

/// The directories of all volumes that are added, the socket's first.
fn directories(sidecar: &Sidecar) -> impl Iterator<Item = (Purpose, &str)> {
    let volumes = sidecar.volumes.iter().map(|volume| (volume.purpose, volume.path.as_str()));
    std::iter::once((Purpose::Socket, sidecar.socket_dir.as_str())).chain(volumes)
}

/// Directories of two volumes, which Kubernetes would refuse.
fn shared_directories(sidecar: &Sidecar) -> Vec<String> {
    let own = directories(sidecar).map(|(purpose, path)| (purpose.description().to_owned(), path));
    let mounts = sidecar.mounts.iter().map(|(name, path)| (format!("--mount {name}"), path.as_str()));
    let mut errors = Vec::new();
    let mut known: Vec<(String, &str)> = Vec::new();
    for (user, path) in own.chain(mounts) {
        let path = path.trim_end_matches('/');
        match known.iter().find(|(_, known)| *known == path) {
            Some((first, _)) => errors.push(format!(
                "{path} is {first} and {user}: a directory holds one volume; choose another directory for one of them"
            )),
            None => known.push((user, path)),
        }
    }
    errors
}

/// Files that the agent could not create. `files` are options and their paths.
fn unwritable_files(sidecar: &Sidecar, files: impl Iterator<Item = (&'static str, String)>) -> Vec<String> {
    let writable: Vec<_> =
        directories(sidecar).filter(|(purpose, _)| purpose.is_writable()).map(|(_, path)| path).collect();
    let is_writable = |file: &str| {
        let dir = parent(file).trim_end_matches('/');
        writable.iter().any(|path| path.trim_end_matches('/') == dir)
    };
    let bad = files.filter(|(_, file)| file.starts_with('/') && !is_writable(file));
    let error = |(option, file)| {
        let dirs = text::listed(&writable, ", ");
        format!("{option} {file}: the container can't write there; its writable directories are {dirs}")
    };
    bad.map(error).collect()
}

/// Volumes of `--mount` with names of the sidecar's own volumes.
fn taken_names(sidecar: &Sidecar) -> impl Iterator<Item = String> {
    let taken = sidecar.mounts.iter().filter(|(name, _)| sidecar.purpose(name).is_some());
    taken.map(|(name, _)| {
        format!("--mount {name}: this is the name of one of the sidecar's own volumes; rename yours")
    })
}
