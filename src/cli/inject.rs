//! `attache inject`: the agent's sidecar in manifests of Kubernetes.

use std::ffi::OsString;
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use serde_json::json;

use super::RunLine;
use crate::auth::token;
use crate::base::limits;
use crate::ca::citadel::options::CitadelProvider;
use crate::ca::provider::TokenUse;
use crate::config::{Config, ConfigErrors, Environment, Provider, RunArgs};
use crate::inject::{Purpose, Sidecar, Volume, inject};
use crate::net::endpoint::Roots;

/// Where the kubelet's probes come: the default is the loopback address.
const STATUS_ADDRESS: &str = "0.0.0.0:15055";
/// Kubernetes puts a token there by itself.
const SERVICE_ACCOUNT_FOLDER: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

/// Add the agent's sidecar to manifests of Kubernetes, and print them.
///
/// Pods, Deployments, StatefulSets, DaemonSets, ReplicaSets, Jobs and CronJobs get it, in Lists too. Everything else stays as it
/// is, to the last byte: other objects, comments, order, quotes. What has the sidecar already is brought up to date.
///
/// What stands behind -- is for attache run, and is checked as attache run would. Volumes come with it: for the socket, for a
/// token and the CA's root (the ConfigMap istio-ca-root-cert) where it uses those of the default places, and for the folders
/// that it is to write to.
#[derive(Clone, Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  Secrets from istiod:
    attache inject --image attache:1 web.yaml -- \\
        --ca-address istiod.istio-system.svc:15012 | kubectl apply -f -
  Secrets from Vault, whose own root is in a volume of the Pod:
    attache inject --image attache:1 --token-audience vault --mount vault-root=/vault web.yaml -- \\
        --ca vault --ca-address vault.example:8200 --ca-root /vault/ca.pem --spiffe-id spiffe://td/web \\
        --vault-role web --vault-auth-role web")]
pub(super) struct InjectArgs {
    /// Manifests, YAML or JSON; - is the standard input
    #[arg(value_name = "FILE", default_value = "-")]
    files: Vec<PathBuf>,
    /// The image of the agent; built by the Dockerfile, it has the agent for its entry point
    #[arg(long, value_name = "IMAGE", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    image: String,
    /// The sidecar's name. It is found again by this name, and its volumes by NAME-socket and the like
    #[arg(long, value_name = "NAME", default_value = "attache", value_parser = name)]
    name: String,
    /// Be a native sidecar, which starts before Envoy and lets Jobs end; Kubernetes has them since 1.29. With false,
    /// an ordinary container
    #[arg(
        long,
        value_name = "BOOL",
        num_args = 0..=1,
        require_equals = true,
        default_value_t = true,
        default_missing_value = "true",
        action = clap::ArgAction::Set
    )]
    native: bool,
    /// A container that gets the socket; repeatable [default: istio-proxy and those with envoy in their name or image; where
    /// there are none, all]
    #[arg(long, value_name = "NAME")]
    container: Vec<String>,
    /// The sidecar's user and group: those of Envoy, which could not open the socket otherwise; none where the platform
    /// gives them out (OpenShift)
    #[arg(long, value_name = "ID", default_value = "1337", value_parser = user)]
    run_as: User,
    /// Whom the workload's token is for
    #[arg(long, value_name = "AUDIENCE", default_value = "istio-ca")]
    token_audience: String,
    /// A volume that the Pods have, and the folder where the agent is to find it, to read; repeatable
    #[arg(long, value_name = "VOLUME=DIR", value_parser = mount)]
    mount: Vec<(String, String)>,
    /// Options of attache run
    #[arg(last = true, value_name = "OPTION")]
    options: Vec<String>,
}

/// A name that Kubernetes takes for containers, with room for what the names of volumes end with.
fn name(text: &str) -> Result<String, &'static str> {
    let is_good = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    let is_name =
        !text.is_empty() && text.chars().all(is_good) && !text.starts_with('-') && !text.ends_with('-');
    if is_name && text.len() <= 50 {
        Ok(text.to_owned())
    } else {
        Err("a container's name has a-z, 0-9 and - in it, and 50 of them at most here")
    }
}

/// None where the platform decides.
#[derive(Clone, Copy, Debug)]
struct User(Option<u32>);

fn user(text: &str) -> Result<User, &'static str> {
    match text.parse() {
        _ if text == "none" => Ok(User(None)),
        Ok(id @ 1_u32..) => Ok(User(Some(id))),
        _ => Err("a number that is not 0 (root), or none"),
    }
}

fn mount(text: &str) -> Result<(String, String), &'static str> {
    let parts = text.split_once('=').filter(|(volume, folder)| !volume.is_empty() && folder.starts_with('/'));
    let (volume, folder) = parts.ok_or("the shape is VOLUME=DIR, like vault-root=/vault")?;
    Ok((volume.to_owned(), folder.to_owned()))
}

/// Reads all, then prints all: nothing is printed when something is wrong.
pub(super) fn run(args: &InjectArgs) -> anyhow::Result<()> {
    let sidecar = sidecar(args)?;
    let mut out = String::new();
    let mut workloads = 0;
    let mut warnings = Vec::new();
    for file in &args.files {
        let shown =
            if file == Path::new("-") { "standard input".to_owned() } else { file.display().to_string() };
        let manifests = read(file).with_context(|| format!("reading {shown} failed"))?;
        let injected = inject(&manifests, &sidecar).with_context(|| shown.clone())?;
        workloads += injected.workloads;
        warnings.extend(injected.warnings.iter().map(|warning| format!("{shown}: {warning}")));
        if !out.is_empty() && !out.ends_with('\n') {
            out.push('\n');
        }
        if !out.is_empty() {
            out.push_str(between(&injected.text));
        }
        out.push_str(&injected.text);
    }
    for warning in warnings {
        super::note(&warning);
    }
    if workloads == 0 {
        // It may well be meant so, in a pipe that is made for everything.
        super::note("there is no Pod in these manifests: nothing is injected");
    }
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(out.as_bytes()).and_then(|()| stdout.flush()).context("writing the manifests failed")
}

/// What has to stand between other documents and these.
fn between(text: &str) -> &'static str {
    let first =
        text.lines().find(|line| !line.trim().is_empty() && !line.starts_with('#')).unwrap_or_default();
    if first.starts_with('%') {
        // A directive comes where the document before it has an end.
        "...\n"
    } else if text.starts_with("---") {
        ""
    } else {
        "---\n"
    }
}

fn read(file: &Path) -> anyhow::Result<String> {
    let mut bytes = Vec::new();
    let most = limits::MANIFESTS as u64 + 1;
    if file == Path::new("-") {
        std::io::stdin().lock().take(most).read_to_end(&mut bytes)?;
    } else {
        std::fs::File::open(file)?.take(most).read_to_end(&mut bytes)?;
    }
    if bytes.len() > limits::MANIFESTS {
        bail!("it has more than {} MB; inject into parts of it", limits::MANIFESTS >> 20);
    }
    String::from_utf8(bytes).context("it is not UTF-8: save it as UTF-8")
}

/// The sidecar for these options, if `attache run` takes them.
fn sidecar(args: &InjectArgs) -> anyhow::Result<Sidecar> {
    let run_args: Vec<String> =
        std::iter::once("run".to_owned()).chain(args.options.iter().cloned()).collect();
    let (run, unknown) = match super::parse::<RunLine>(run_args.iter().map(OsString::from).collect()) {
        Ok((line, unknown)) => (line.args, unknown),
        Err(error) => {
            let text = error.to_string();
            let text = text.trim_start_matches("error: ").lines().next().unwrap_or_default().to_owned();
            return Err(ConfigErrors(vec![format!("behind --: {text}")]).into());
        }
    };
    let config = config(&run, unknown)?;
    let mut mistakes = Vec::new();
    let mut absolute = |option: &str, path: &Path| {
        let text = path.to_string_lossy().into_owned();
        if !path.is_absolute() {
            mistakes.push(format!("{option} {text} is relative; a container needs the whole path"));
        }
        text
    };
    let socket = absolute("--socket", &config.socket);
    let admin_socket = config.admin_socket.as_ref().filter(|admin| admin.is_named);
    let admin_socket = admin_socket.map(|admin| ("--admin-socket", absolute("--admin-socket", &admin.path)));
    let ready_file = config.ready_file.as_ref().map(|path| ("--ready-file", absolute("--ready-file", path)));
    let socket_folder = folder(&socket).to_owned();

    let mut volumes = Vec::new();
    // Keys are no matter for disks.
    let memory = |size: &str| json!({ "emptyDir": { "medium": "Memory", "sizeLimit": size } });
    // As they were typed: the configuration has made them absolute, with a folder of this machine.
    if let Some(state) = &run.state_dir {
        let path = absolute("--state-dir", Path::new(state));
        volumes.push(Volume { purpose: Purpose::State, source: memory("1Mi"), path });
    }
    if let Some(output) = &run.output_dir {
        let path = absolute("--output-dir", Path::new(output));
        volumes.push(Volume { purpose: Purpose::Output, source: memory("8Mi"), path });
    }
    if let Some(folder) = config.providers.first().and_then(|provider| provider.directory()) {
        let path = absolute("--ca-dir", folder);
        volumes.push(Volume { purpose: Purpose::Ca, source: memory("1Mi"), path });
    }
    volumes.extend(token_volume(&config, &run, args));
    volumes.extend(root_volume(&config, args));

    let mut run_args = run_args;
    let status = match (config.status_address, &run.status_address) {
        (Some(_), None) => {
            run_args.push(format!("--status-address={STATUS_ADDRESS}"));
            STATUS_ADDRESS.parse().ok()
        }
        (status, _) => status,
    };
    if let Some(address) = status.filter(|address| address.ip().is_loopback() || address.port() == 0) {
        mistakes.push(format!(
            "--status-address {address} can't be reached by the kubelet's probes; leave it out for {STATUS_ADDRESS}, or say none"
        ));
    }
    let sidecar = Sidecar {
        name: args.name.clone(),
        image: args.image.clone(),
        args: run_args,
        is_native: args.native,
        run_as: args.run_as.0,
        socket_folder,
        socket,
        is_open: config.socket_mode & 0o002 != 0,
        admin_socket: config.admin_socket.map(|admin| admin.path.to_string_lossy().into_owned()),
        status_port: status.map(|address| address.port()),
        containers: args.container.clone(),
        volumes,
        mounts: args.mount.clone(),
    };
    mistakes.extend(mount_mistakes(&sidecar, admin_socket.into_iter().chain(ready_file)));
    if mistakes.is_empty() { Ok(sidecar) } else { Err(ConfigErrors(mistakes).into()) }
}

/// The configuration, whatever there is on the machine where manifests are made.
fn config(run: &RunArgs, unknown: Vec<String>) -> Result<Config, ConfigErrors> {
    // The environment is that of the container, which has no variable of ours.
    let config = super::run::config(run, unknown, &Environment::new());
    let is_chosen = run.ca.is_some() || run.file_mounted_certs || !run.ca_address.is_empty();
    if is_chosen || run.ca_client_cert_dir.is_some() {
        return config;
    }
    // This machine's files have been looked into, which say nothing about the container's.
    let mut mistakes = config.map_or_else(|ConfigErrors(all)| all, |_| Vec::new());
    mistakes.retain(|mistake| !mistake.starts_with("no CA is configured"));
    mistakes.push(
        "no CA is configured: name one with --ca-address or --ca; for mounted files say --ca none".to_owned(),
    );
    Err(ConfigErrors(mistakes))
}

fn folder(path: &str) -> &str {
    Path::new(path).parent().and_then(Path::to_str).unwrap_or_default()
}

/// What Kubernetes would refuse, or the agent when it starts. `files` are options with files that it makes.
fn mount_mistakes(sidecar: &Sidecar, files: impl Iterator<Item = (&'static str, String)>) -> Vec<String> {
    let mut mistakes = Vec::new();
    let volumes = sidecar.volumes.iter().map(|volume| (volume.purpose, volume.path.as_str()));
    let volumes: Vec<_> =
        std::iter::once((Purpose::Socket, sidecar.socket_folder.as_str())).chain(volumes).collect();
    let own = volumes.iter().map(|(purpose, path)| (purpose.words().to_owned(), *path));
    let further = sidecar.mounts.iter().map(|(name, path)| (format!("--mount {name}"), path.as_str()));
    let mut known: Vec<(String, &str)> = Vec::new();
    for (words, path) in own.chain(further) {
        let path = path.trim_end_matches('/');
        match known.iter().find(|(_, known)| *known == path) {
            Some((first, _)) => mistakes.push(format!(
                "{path} is {first} and {words}: a folder holds one volume; give one of them another"
            )),
            None => known.push((words, path)),
        }
    }
    for (option, file) in files {
        let folder = folder(&file).trim_end_matches('/');
        let is_volume =
            |(purpose, path): &(Purpose, &str)| purpose.is_writable() && path.trim_end_matches('/') == folder;
        if file.starts_with('/') && !volumes.iter().any(is_volume) {
            let folders: Vec<_> = volumes.iter().filter(|(purpose, _)| purpose.is_writable()).collect();
            mistakes.push(format!(
                "{option} {file}: the container can't write there; its folders are {}",
                limits::listed(folders.iter().map(|(_, path)| *path), ", ")
            ));
        }
    }
    for (name, _) in sidecar.mounts.iter().filter(|(name, _)| sidecar.purpose(name).is_some()) {
        mistakes.push(format!(
            "--mount {name}: that is the name of a volume that comes with the sidecar; rename yours"
        ));
    }
    mistakes
}

/// The workload's token, where a file with it is used that nobody else mounts.
fn token_volume(config: &Config, run: &RunArgs, args: &InjectArgs) -> Option<Volume> {
    let provider = config.providers.first()?;
    if !matches!(provider.kind().token, TokenUse::Source { .. }) {
        return None;
    }
    let settings = provider.token()?;
    if matches!(settings, token::Settings::Service { service: token::Service::Metadata(_), .. }) {
        return None;
    }
    let path = run.token_file.as_deref().unwrap_or("/var/run/secrets/tokens/istio-token");
    let (folder, file) = path.rsplit_once('/').filter(|(folder, _)| folder.starts_with('/'))?;
    if is_mounted(args, folder) || folder == SERVICE_ACCOUNT_FOLDER {
        return None;
    }
    let token = json!({ "path": file, "audience": args.token_audience, "expirationSeconds": 43200 });
    let source = json!({ "projected": { "sources": [{ "serviceAccountToken": token }] } });
    Some(Volume { purpose: Purpose::Token, source, path: folder.to_owned() })
}

/// istiod's root, where the default places are looked into, and nobody else mounts it.
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

fn is_mounted(args: &InjectArgs, folder: &str) -> bool {
    args.mount.iter().any(|(_, mounted)| folder == mounted.trim_end_matches('/'))
}
