//! `attache inject`: adds the agent's sidecar to Kubernetes manifests.

mod sidecar;

use std::io::Read as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};

use crate::base::limits;
use crate::inject::inject;

/// Add the agent's sidecar to Kubernetes manifests, and print them.
///
/// Pods, Deployments, StatefulSets, DaemonSets, ReplicaSets, Jobs and CronJobs get the sidecar, in Lists too. Everything else
/// stays unchanged, to the last byte: other objects, comments, order, quotes. An existing sidecar is updated.
///
/// The options after -- are those of attache run, and are checked in the same way. Volumes are added with the sidecar: for the
/// socket, for the token and the CA's root (the ConfigMap istio-ca-root-cert) if the agent uses their default paths, and for
/// the directories that the agent writes to.
#[derive(Clone, Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  Secrets from istiod:
    attache inject --image attache:1 web.yaml -- \\
        --ca-address istiod.istio-system.svc:15012 | kubectl apply -f -
  Secrets from Vault, with the root of its TLS certificate in a volume of the Pod:
    attache inject --image attache:1 --token-audience vault \\
        --mount vault-root=/vault web.yaml -- \\
        --ca vault --ca-address vault.example:8200 --ca-root /vault/ca.pem \\
        --spiffe-id spiffe://td/web --vault-role web --vault-auth-role web")]
pub(super) struct InjectArgs {
    /// Manifests in YAML or JSON; - is standard input
    #[arg(value_name = "FILE", default_value = "-")]
    files: Vec<PathBuf>,
    /// The agent's image, with the agent as its entry point, as the Dockerfile builds it
    #[arg(long, value_name = "IMAGE", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    image: String,
    /// The sidecar's name. Updates find the sidecar by this name, and its volumes by NAME-socket and the like
    #[arg(long, value_name = "NAME", default_value = "attache", value_parser = name)]
    name: String,
    /// Add a native sidecar, which starts before Envoy and lets Jobs complete (Kubernetes 1.29 or later). With false, an
    /// ordinary container
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
    /// A container that gets the socket; repeatable [default: istio-proxy and those with envoy in their name or image; if
    /// there are none, all]
    #[arg(long, value_name = "NAME")]
    container: Vec<String>,
    /// The sidecar's user and group: those of Envoy, which can't open the socket otherwise; none where the platform
    /// assigns them (OpenShift)
    #[arg(long, value_name = "ID", default_value = "1337", value_parser = user)]
    run_as: User,
    /// The audience of the workload's token
    #[arg(long, value_name = "AUDIENCE", default_value = "istio-ca")]
    token_audience: String,
    /// A volume of the Pods, and the directory where the agent mounts it read-only; repeatable
    #[arg(long, value_name = "VOLUME=DIR", value_parser = mount)]
    mount: Vec<(String, String)>,
    /// Options of attache run
    #[arg(last = true, value_name = "OPTION")]
    options: Vec<String>,
}

/// A container's name that Kubernetes accepts, short enough for the suffixes of the volumes' names.
fn name(text: &str) -> Result<String, &'static str> {
    let is_good = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    let is_name =
        !text.is_empty() && text.chars().all(is_good) && !text.starts_with('-') && !text.ends_with('-');
    if is_name && text.len() <= 50 {
        Ok(text.to_owned())
    } else {
        Err("a container's name here has at most 50 of the characters a-z, 0-9 and -, and no - at its ends")
    }
}

/// The user and group; none where the platform assigns them.
#[derive(Clone, Copy, Debug)]
struct User(Option<u32>);

fn user(text: &str) -> Result<User, &'static str> {
    match text.parse() {
        _ if text == "none" => Ok(User(None)),
        Ok(id @ 1_u32..) => Ok(User(Some(id))),
        _ => Err("expected a number other than 0 (root), or none"),
    }
}

fn mount(text: &str) -> Result<(String, String), &'static str> {
    let parts = text.split_once('=').filter(|(volume, dir)| !volume.is_empty() && dir.starts_with('/'));
    let (volume, dir) = parts.ok_or("the shape is VOLUME=DIR, like vault-root=/vault")?;
    Ok((volume.to_owned(), dir.to_owned()))
}

/// Reads all files, then prints all: after an error, nothing is printed.
pub(super) fn run(args: &InjectArgs) -> anyhow::Result<()> {
    let sidecar = sidecar::sidecar(args)?;
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
            out.push_str(separator(&injected.text));
        }
        out.push_str(&injected.text);
    }
    for warning in warnings {
        super::note(&warning);
    }
    if workloads == 0 {
        // Not an error: a pipeline may handle all kinds of manifests.
        super::note("no Pod in these manifests: nothing injected");
    }
    super::print(out)
}

/// The separator between earlier documents and `text`.
fn separator(text: &str) -> &'static str {
    let first =
        text.lines().find(|line| !line.trim().is_empty() && !line.starts_with('#')).unwrap_or_default();
    if first.starts_with('%') {
        // A directive may stand only after an explicit document end.
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
        bail!("it is larger than {} MB; split it", limits::MANIFESTS >> 20);
    }
    String::from_utf8(bytes).context("it is not UTF-8: save it as UTF-8")
}
