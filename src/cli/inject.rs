//! `attache inject`: the agent's sidecar in manifests of Kubernetes.

use std::ffi::OsString;
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use serde_json::json;

use super::RunLine;
use crate::ca::endpoint::Roots;
use crate::ca::token;
use crate::ca::vault::{self, Access};
use crate::config::{Config, Environment, Mistakes, Provider, RunArgs};
use crate::inject::{Purpose, Sidecar, Volume, inject};
use crate::limits;

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
    /// The sidecar's user and group: those of Envoy, which could not open the socket otherwise
    #[arg(long, value_name = "ID", default_value_t = 1337, value_parser = clap::value_parser!(u32).range(1..))]
    run_as: u32,
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
    for file in &args.files {
        let shown =
            if file == Path::new("-") { "standard input".to_owned() } else { file.display().to_string() };
        let manifests = read(file).with_context(|| format!("reading {shown} failed"))?;
        let (injected, count) = inject(&manifests, &sidecar).with_context(|| shown.clone())?;
        workloads += count;
        if !out.is_empty() && !out.ends_with('\n') {
            out.push('\n');
        }
        if !out.is_empty() && !injected.starts_with("---") {
            out.push_str("---\n");
        }
        out.push_str(&injected);
    }
    if workloads == 0 {
        // It may well be meant so, in a pipe that is made for everything.
        let _ =
            writeln!(std::io::stderr(), "attache: there is no Pod in these manifests: nothing is injected");
    }
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(out.as_bytes()).and_then(|()| stdout.flush()).context("writing the manifests failed")
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
    String::from_utf8(bytes).context("it is not UTF-8")
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
            return Err(Mistakes(vec![format!("behind --: {text}")]).into());
        }
    };
    // The environment is that of the container, which has no variable of ours.
    let config = super::run::config(&run, unknown, &Environment::new())?;
    let mut mistakes = Vec::new();
    let mut absolute = |option: &str, path: &Path| {
        let text = path.to_string_lossy().into_owned();
        if !path.is_absolute() {
            mistakes.push(format!("{option} {text} is relative; a container needs the whole path"));
        }
        text
    };
    let socket = absolute("--socket", &config.socket);
    let folder = |path: &str| Path::new(path).parent().map(|path| path.to_string_lossy().into_owned());
    let socket_folder = folder(&socket).unwrap_or_default();

    let mut volumes = Vec::new();
    let empty = || json!({ "emptyDir": {} });
    if let Some(state) = &config.workload.state {
        let path = absolute("--state-dir", state.path());
        volumes.push(Volume { purpose: Purpose::State, source: empty(), path });
    }
    if let Some(output) = &config.output {
        let path = absolute("--output-dir", &output.folder);
        // Keys are no matter for disks.
        let source = json!({ "emptyDir": { "medium": "Memory", "sizeLimit": "8Mi" } });
        volumes.push(Volume { purpose: Purpose::Output, source, path });
    }
    if let Some(Provider::Embedded { folder }) = config.providers.first() {
        let path = absolute("--ca-dir", folder);
        volumes.push(Volume { purpose: Purpose::Ca, source: empty(), path });
    }
    volumes.extend(token_volume(&config, &run, args));
    volumes.extend(root_volume(&config));

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
    if !mistakes.is_empty() {
        return Err(Mistakes(mistakes).into());
    }
    Ok(Sidecar {
        name: args.name.clone(),
        image: args.image.clone(),
        args: run_args,
        is_native: args.native,
        run_as: args.run_as,
        socket_folder,
        socket,
        status_port: status.map(|address| address.port()),
        containers: args.container.clone(),
        volumes,
        mounts: args.mount.clone(),
    })
}

/// The workload's token, where a file with it is used that nobody else mounts.
fn token_volume(config: &Config, run: &RunArgs, args: &InjectArgs) -> Option<Volume> {
    let settings = match config.providers.first()? {
        Provider::Citadel { token, .. } | Provider::GoogleCas { token, .. } => token,
        Provider::Vault { settings: vault::Settings { access: Access::Login { jwt, .. }, .. }, .. } => jwt,
        _ => return None,
    };
    if matches!(settings, token::Settings::Service { service: token::Service::Metadata(_), .. }) {
        return None;
    }
    let path = run.token_file.as_deref().unwrap_or("/var/run/secrets/tokens/istio-token");
    let (folder, file) = path.rsplit_once('/').filter(|(folder, _)| folder.starts_with('/'))?;
    let is_mounted = args.mount.iter().any(|(_, mounted)| folder == mounted.trim_end_matches('/'));
    if is_mounted || folder == SERVICE_ACCOUNT_FOLDER {
        return None;
    }
    let token = json!({ "path": file, "audience": args.token_audience, "expirationSeconds": 43200 });
    let source = json!({ "projected": { "sources": [{ "serviceAccountToken": token }] } });
    Some(Volume { purpose: Purpose::Token, source, path: folder.to_owned() })
}

/// istiod's root, where the default places are looked into.
fn root_volume(config: &Config) -> Option<Volume> {
    let Some(Provider::Citadel { endpoint, client_cert: None, .. }) = config.providers.first() else {
        return None;
    };
    let is_default = matches!(endpoint.roots, Roots::FirstOf(_)) && !endpoint.address.plaintext;
    let source = json!({ "configMap": { "name": "istio-ca-root-cert" } });
    is_default.then(|| Volume { purpose: Purpose::CaRoot, source, path: "/var/run/secrets/istio".to_owned() })
}
