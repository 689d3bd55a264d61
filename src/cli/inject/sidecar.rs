//! The sidecar for the options of `attache inject`, checked before any manifest is changed.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::Path;

use clap::error::ErrorKind;
use serde_json::json;

use super::InjectArgs;
use super::files::{self, Files};
use super::hints;
use super::node;
use crate::base::text;
use crate::cli::{self, RunLine};
use crate::config::{Config, ConfigErrors, Environment, RunArgs};
use crate::export::output::DirectorySettings;
use crate::inject::{Purpose, Sidecar, Volume};

/// Variables that the kubelet sets in each container, with values that it may set.
const KUBELETS_VARIABLES: [(&str, &str); 2] =
    [("KUBERNETES_SERVICE_HOST", "kubernetes.default.svc"), ("KUBERNETES_SERVICE_PORT", "443")];
/// The status address for the kubelet's probes; the agent's default is a loopback address.
const STATUS_ADDRESS: &str = "0.0.0.0:15055";

/// The sidecar for these options, if `attache run` accepts them.
pub(super) fn sidecar(args: &InjectArgs) -> anyhow::Result<Sidecar> {
    if args.node {
        return node::sidecar(args);
    }
    let mut run_args = vec!["run".to_owned()];
    run_args.extend(args.options.iter().cloned());
    let (run, unknown) = parse(&run_args)?;
    let config = config(&run, unknown)?;

    let mut paths = Paths::default();
    let sockets: Vec<_> = config.sockets().map(|path| paths.absolute("--socket", path)).collect();
    let mut socket_dirs: Vec<String> = Vec::new();
    for dir in sockets.iter().map(|socket| parent(socket).to_owned()) {
        let is_known =
            socket_dirs.iter().any(|known| known.trim_end_matches('/') == dir.trim_end_matches('/'));
        socket_dirs.extend((!is_known).then_some(dir));
    }
    let admin_socket = config.admin_socket.as_ref().filter(|admin| admin.is_named);
    let admin_socket =
        admin_socket.map(|admin| ("--admin-socket", paths.absolute("--admin-socket", &admin.path)));
    let ready_file =
        config.ready_file.as_ref().map(|path| ("--ready-file", paths.absolute("--ready-file", path)));
    let volumes = writable_volumes(&config, &run, &mut paths);
    let files = Files::new(args, &run, &config, volumes);
    let reads_service_account = files.reads_service_account();
    let Files { volumes, errors, .. } = files;
    let mut errors: Vec<_> = paths.errors.into_iter().chain(errors).collect();

    if config.status_address.is_some() && run.status_address.is_none() {
        run_args.push(format!("--status-address={STATUS_ADDRESS}"));
    }
    errors.extend(given_away(&config, args.run_as.0));
    errors.extend(config.command.is_some().then(|| {
        "a sidecar runs beside its Envoy and keeps no COMMAND running: leave out what is behind the second --".to_owned()
    }));
    let status = status_address(&config, &run);
    errors.extend(status.and_then(unreachable_status));
    let sidecar = Sidecar {
        name: args.name.clone(),
        image: args.image.clone().unwrap_or_default(),
        args: run_args,
        is_native: args.native,
        run_as: args.run_as.0,
        socket_dirs,
        socket: sockets.into_iter().next().unwrap_or_default(),
        is_open: config.socket_mode & 0o002 != 0,
        admin_socket: config.admin_socket.map(|admin| admin.path.to_string_lossy().into_owned()),
        status_port: status.map(|address| address.port()),
        containers: args.container.clone(),
        volumes,
        mounts: args.mount.clone(),
        reads_service_account,
        node: None,
    };
    errors.extend(shared_directories(&sidecar));
    errors.extend(unwritable_files(&sidecar, admin_socket.into_iter().chain(ready_file)));
    errors.extend(taken_names(&sidecar));
    if errors.is_empty() { Ok(sidecar) } else { Err(ConfigErrors(errors).into()) }
}

/// Parses the options of `attache run`; also returns the unknown ones.
fn parse(run_args: &[String]) -> Result<(RunArgs, Vec<String>), ConfigErrors> {
    match cli::parse::<RunLine>(run_args.iter().map(OsString::from).collect()) {
        Ok((line, unknown)) => Ok((line.args, hints::behind_the_dashes(unknown))),
        Err(cli::NotParsed { error, .. }) => {
            let text = error.to_string();
            let text = text.trim_start_matches("error: ").lines().next().unwrap_or_default();
            let is_stray = error.kind() == ErrorKind::UnknownArgument;
            let hint = if is_stray { "; manifests stand before --" } else { "" };
            Err(ConfigErrors(vec![format!("after --: {text}{hint}")]))
        }
    }
}

/// The configuration, independent of the machine where the manifests are made.
fn config(run: &RunArgs, unknown: Vec<String>) -> Result<Config, ConfigErrors> {
    if run.config.is_some() {
        let error =
            "--config names a file of the container, which inject can't read: give its options after --";
        return Err(ConfigErrors(vec![error.to_owned()]));
    }
    // The environment is that of the container: it has none of the agent's variables, and the kubelet's.
    let environment: Environment = KUBELETS_VARIABLES.map(|(name, value)| (name.into(), value.into())).into();
    let config = cli::run::config(run, unknown, &environment);
    let is_chosen = run.ca.is_some() || run.file_mounted_certs || !run.ca_address.is_empty();
    if is_chosen || run.ca_client_cert_dir.is_some() || run.kubernetes_secrets {
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
            self.errors.push(files::relative(option, &text));
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
    let directory = run.output_dir.iter().map(|directory| ("--output-dir", directory.as_str()));
    let outputs = run.output.iter().map(|output| ("--output", output.split(',').next().unwrap_or_default()));
    for (index, (option, directory)) in directory.chain(outputs).enumerate() {
        let path = paths.absolute(option, Path::new(directory));
        volumes.push(Volume { purpose: Purpose::Output(index), source: memory("8Mi"), path });
    }
    if let Some(directory) = config.providers.first().and_then(|provider| provider.directory()) {
        let path = paths.absolute("--ca-dir", directory);
        volumes.push(Volume { purpose: Purpose::Ca, source: memory("1Mi"), path });
    }
    volumes
}

/// Outputs whose files the agent would have to give to another user: the container has no capabilities.
fn given_away(config: &Config, run_as: Option<u32>) -> Vec<String> {
    let directories = config.output.iter().flat_map(|output| &output.directories);
    let is_own = |user: &u32| run_as.is_none_or(|id| id == *user);
    let given =
        directories.filter_map(|it| it.owner.user.filter(|user| !is_own(user)).map(|user| (it, user)));
    let error = |(it, user): (&DirectorySettings, u32)| {
        let id = run_as.unwrap_or_default();
        let dir = it.directory.display();
        format!(
            "{} {dir}: the agent runs as user {id} without the right to give files to user {user}: drop owner, or give --run-as {user}",
            it.option
        )
    };
    given.map(error).collect()
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

/// The directories of all volumes that are added, the sockets' first.
fn directories(sidecar: &Sidecar) -> impl Iterator<Item = (Purpose, &str)> {
    let volumes = sidecar.volumes.iter().map(|volume| (volume.purpose, volume.path.as_str()));
    let sockets = sidecar.socket_dirs.iter().enumerate();
    sockets.map(|(index, dir)| (Purpose::Socket(index), dir.as_str())).chain(volumes)
}

/// Directories of two volumes, which Kubernetes would refuse.
fn shared_directories(sidecar: &Sidecar) -> Vec<String> {
    let own = directories(sidecar).map(|(purpose, path)| (purpose.description().to_owned(), path));
    let mounts = sidecar.mounts.iter().map(|(name, path)| (format!("--mount {name}"), path.as_str()));
    let mut errors = Vec::new();
    let mut known: Vec<(String, &str)> = Vec::new();
    for (user, path) in own.chain(mounts) {
        let path = path.trim_end_matches('/');
        if path.is_empty() {
            errors.push(format!("{user} would be mounted at /: choose a path in another directory"));
            continue;
        }
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
