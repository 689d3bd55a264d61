//! `attache inject`: adds the agent's sidecar to Kubernetes manifests.

mod files;
mod hints;
mod node;
mod sidecar;

use std::io::Read as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};

pub(super) use self::hints::before_the_dashes;
use crate::base::limits;
use crate::inject::{Injected, inject};

/// Add the agent's sidecar to Kubernetes manifests, and print them.
///
/// Pods, Deployments, StatefulSets, DaemonSets, ReplicaSets, Jobs and CronJobs get the sidecar, in Lists too. Everything else
/// stays unchanged, to the last byte: other objects, comments, order, quotes. An existing sidecar is updated.
///
/// The options after -- are those of attache run, and are checked in the same way. Volumes are added with the sidecar: for the
/// socket, for the workload's token, for istiod's root (the ConfigMap istio-ca-root-cert) if the agent looks for it in the
/// default places, and for the directories that the agent writes to. Every other file that the options name must be in a
/// volume of --mount.
///
/// Standard error gets a line for each workload, and warnings.
#[derive(Clone, Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  Secrets from istiod:
    attache inject --image attache:1 web.yaml -- \\
        --ca-address istiod.istio-system.svc:15012 | kubectl apply -f -
  Secrets from Vault, with the root of its TLS certificate in a volume of the Pod:
    attache inject --image attache:1 --mount vault-root=/vault web.yaml -- \\
        --ca vault --ca-address vault.example:8200 --ca-root /vault/ca.pem \\
        --spiffe-id spiffe://td/web --vault-role web --vault-auth-role web
  Secrets from the agent of the node:
    attache inject --node web.yaml | kubectl apply -f -")]
pub(super) struct InjectArgs {
    /// Manifests in YAML or JSON; - is standard input
    #[arg(value_name = "FILE", default_value = "-")]
    files: Vec<PathBuf>,
    /// The agent's image, with the agent as its entry point, as the Dockerfile builds it
    #[arg(
        long,
        value_name = "IMAGE",
        value_parser = clap::builder::NonEmptyStringValueParser::new(),
        required_unless_present = "node"
    )]
    image: Option<String>,
    /// Add no container, but the volume of the node's agent (attache node), read-only at /var/run/secrets/workload-spiffe-uds;
    /// a sidecar that is there already goes. Options of the sidecar have no place beside it
    #[arg(long)]
    node: bool,
    /// With --node: the name of the CSI driver
    #[arg(long, value_name = "NAME", default_value = "csi.attache.dev")]
    csi_driver_name: String,
    /// With --node: an attribute of the volume, like key-type=ecdsa-p384 (see docs/node.md); repeatable
    #[arg(long, value_name = "NAME=VALUE", value_parser = attribute)]
    csi_attribute: Vec<(String, String)>,
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
    /// A container that gets the socket; repeatable [default: the Envoys: istio-proxy, envoy, and those whose image has envoy
    /// in its name]
    #[arg(long, value_name = "NAME")]
    container: Vec<String>,
    /// The sidecar's user and group: those of Envoy, which can't open the socket otherwise; none where the platform
    /// assigns them (OpenShift)
    #[arg(long, value_name = "ID", default_value = "1337", value_parser = user)]
    run_as: User,
    /// The audience of the workload's token [default: istio-ca with --ca citadel, vault with --ca vault, the identity
    /// provider of --token-exchange-audience with Google's token service]
    #[arg(long, value_name = "AUDIENCE", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    token_audience: Option<String>,
    /// A volume of the Pods, and the directory where the agent mounts it read-only; repeatable
    #[arg(long, value_name = "VOLUME=DIR", value_parser = mount)]
    mount: Vec<(String, String)>,
    /// A file or directory that the agent's image has, for options that need it: /bin/sh for hooks, or / for a whole
    /// distribution; repeatable [default: nothing but the agent, as the Dockerfile builds it]
    #[arg(long, value_name = "PATH", value_parser = image_path)]
    image_has: Vec<PathBuf>,
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

fn attribute(text: &str) -> Result<(String, String), &'static str> {
    let (name, value) = text.split_once('=').ok_or("the shape is NAME=VALUE, like key-type=ecdsa-p384")?;
    Ok((name.to_owned(), value.to_owned()))
}

fn image_path(text: &str) -> Result<PathBuf, &'static str> {
    if text.starts_with('/') { Ok(text.into()) } else { Err("an absolute path is needed, like /bin/sh") }
}

/// Reads all files, then prints all: after an error, nothing is printed.
pub(super) fn run(args: &InjectArgs) -> anyhow::Result<()> {
    let sidecar = sidecar::sidecar(args)?;
    let mut out = String::new();
    let mut report = Report::default();
    for file in &args.files {
        let shown =
            if file == Path::new("-") { "standard input".to_owned() } else { file.display().to_string() };
        let manifests = read(file).with_context(|| format!("reading {shown} failed"))?;
        let injected = inject(&manifests, &sidecar).with_context(|| shown.clone())?;
        report.add(&shown, &injected);
        if !out.is_empty() && !out.ends_with('\n') {
            out.push('\n');
        }
        if !out.is_empty() {
            out.push_str(separator(&injected.text));
        }
        out.push_str(&injected.text);
    }
    report.print();
    super::print(out)
}

/// What was done, for standard error.
#[derive(Default)]
struct Report {
    workloads: Vec<String>,
    others: usize,
    warnings: Vec<String>,
}

impl Report {
    /// Adds the result for the file that is `shown` so.
    fn add(&mut self, shown: &str, injected: &Injected) {
        let Injected { workloads, others, warnings, .. } = injected;
        self.workloads.extend(workloads.iter().map(|outcome| format!("{shown}: {outcome}")));
        self.others += others;
        self.warnings.extend(warnings.iter().map(|warning| format!("{shown}: {warning}")));
    }

    /// Warnings come last: they must not be overlooked.
    fn print(self) {
        let Self { workloads, others, warnings } = self;
        workloads.iter().for_each(|line| super::note(line));
        if workloads.is_empty() {
            // Not an error: a pipeline may handle all kinds of manifests.
            super::note("no Pod in these manifests: nothing injected");
        } else if others > 0 {
            let objects = if others == 1 { "object" } else { "objects" };
            super::note(&format!("{others} other {objects} without Pods: unchanged"));
        }
        warnings.iter().for_each(|line| super::note(line));
    }
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
