//! The options of a SPIFFE Workload API as the source of the identity (`--ca spiffe`).

use std::path::{Path, PathBuf};

use super::args::RunArgs;
use super::files::resolved;
use super::node::Subject;
use crate::ca::provider::{Choice, Selection};
use crate::options::{Reader, Setting};
use crate::serve::listener::ListenError;
use crate::source::issuer::{IdentitySource, IssuerSettings};
use crate::source::spiffe::{SpiffeSettings, Wanted};

/// Where programs look for the endpoint of a Workload API.
const VARIABLE: &str = "SPIFFE_ENDPOINT_SOCKET";

/// The options that set what a CA is asked for, or how.
fn of_cas(args: &RunArgs) -> [(&'static str, Vec<String>); 13] {
    let one = |value: &Option<String>| value.iter().cloned().collect();
    [
        ("key-type", one(&args.key_type)),
        ("cert-ttl", one(&args.cert_ttl)),
        ("grace-ratio", one(&args.grace_ratio)),
        ("grace-jitter", one(&args.grace_jitter)),
        ("dns-san", args.dns_san.clone()),
        ("common-name", one(&args.common_name)),
        ("namespace", one(&args.namespace)),
        ("service-account", one(&args.service_account)),
        ("token-file", one(&args.token_file)),
        ("ca-root", one(&args.ca_root)),
        ("ca-server-name", one(&args.ca_server_name)),
        ("ca-header", args.ca_header.clone()),
        ("state-dir", one(&args.state_dir)),
    ]
}

/// The endpoint, if it is selected. `sockets` are those that the agent serves.
pub(super) fn spiffe(
    r: &mut Reader<'_>,
    args: &RunArgs,
    selection: &Selection,
    issuer: &IssuerSettings,
    sockets: &[&Path],
    has_kubernetes_secrets: bool,
    subject: Subject<'_>,
) -> Option<Box<SpiffeSettings>> {
    let is_selected = selection.choice == Some(Choice::WorkloadApi);
    let others: &[&str] = if is_selected { &[VARIABLE] } else { &[] };
    let endpoint = r.parsed("spiffe-endpoint", &args.spiffe_endpoint, others, parse_endpoint);
    let hint = r.text("spiffe-hint", &args.spiffe_hint, &[]);
    if !is_selected {
        // If nothing valid is selected, the report says so already.
        for (_, from) in [endpoint.set_by(), hint.set_by()]
            .into_iter()
            .filter(|(level, _)| selection.choice.is_some() && selection.judges(*level))
        {
            r.mistake(format!("{from} is for --ca spiffe alone: add that, or drop it"));
        }
        return None;
    }
    let ca = selection.named.as_deref().unwrap_or("--ca spiffe");
    if !matches!(subject, Subject::Sidecar) {
        if matches!(subject, Subject::Node { .. }) {
            r.mistake(format!(
                "{ca} is not for attache node: a Workload API gives the identity of the process that calls it, so every \
                 workload would get the agent's own; choose a CA, or run an agent for each workload"
            ));
        }
        return None;
    }
    refuse_options_of_cas(r, args, selection, ca, has_kubernetes_secrets);
    if endpoint.is_missing() {
        r.mistake(format!("{ca} needs the endpoint: --spiffe-endpoint unix:///PATH ({VARIABLE} works, too)"));
    }
    check_own(r, &endpoint, sockets);
    Some(Box::new(SpiffeSettings {
        socket: endpoint.value?,
        wanted: Wanted { hint: hint.value, ..wanted(r, args, &issuer.identity) },
        key_format: issuer.key_format,
        timeout: issuer.timeout,
        drops_old_roots: issuer.drops_old_roots,
    }))
}

/// Reports options without a meaning where the endpoint decides.
fn refuse_options_of_cas(
    r: &mut Reader<'_>,
    args: &RunArgs,
    selection: &Selection,
    ca: &str,
    has_kubernetes_secrets: bool,
) {
    for (option, typed) in of_cas(args) {
        // The Secrets of Kubernetes are those of a namespace, and are kept.
        if has_kubernetes_secrets && matches!(option, "namespace" | "service-account" | "state-dir") {
            continue;
        }
        let set: Setting<Vec<String>> =
            r.list(option, &typed, &[], ',', |text| Ok::<_, String>(text.to_owned()));
        if !set.is_own() || !selection.judges(set.level) {
            continue;
        }
        let why = match option {
            "namespace" | "service-account" => {
                "the endpoint decides on the identity, and --spiffe-id says which one is expected"
            }
            "state-dir" => "the endpoint is on this machine and delivers the identity at each start",
            "token-file" | "ca-root" | "ca-server-name" | "ca-header" => "the first has no CA",
            _ => "the endpoint decides on key and certificate",
        };
        r.mistake(format!("{ca} and --{option} contradict each other: {why}; drop one of them"));
    }
}

/// An agent that waits for itself never has an identity.
fn check_own(r: &mut Reader<'_>, endpoint: &Setting<PathBuf>, sockets: &[&Path]) {
    let Some(path) = &endpoint.value else { return };
    let paths = resolved(std::iter::once(path.as_path()).chain(sockets.iter().copied()));
    let Some((own, others)) = paths.split_first() else { return };
    if others.contains(own) {
        r.mistake(format!(
            "{} is the socket of this agent itself (--socket): name that of SPIRE's agent, or of another one",
            endpoint.from
        ));
    }
}

/// What the options say of the identity. A whole one that follows from namespace and account is Istio's, not the endpoint's.
fn wanted(r: &mut Reader<'_>, args: &RunArgs, identity: &IdentitySource) -> Wanted {
    if let IdentitySource::Fixed(id) = identity
        && r.text("spiffe-id", &args.spiffe_id, &[]).value.as_deref() == Some(id.as_str())
    {
        return Wanted { id: Some(id.clone()), ..Wanted::default() };
    }
    let trust_domain = r.text("trust-domain", &args.trust_domain, &["TRUST_DOMAIN"]).value;
    Wanted { trust_domain, ..Wanted::default() }
}

/// The path in `unix:///PATH`.
fn parse_endpoint(text: &str) -> Result<PathBuf, String> {
    const SHAPE: &str = "the shape is unix:///PATH";
    if text.starts_with("tcp:") {
        return Err(format!(
            "{text:?}: over TCP the agent has no part of its own in what the endpoint knows of it, and the key would pass \
             in plain text; name the Unix socket: {SHAPE}"
        ));
    }
    let rest = text.strip_prefix("unix:").ok_or_else(|| format!("{text:?}: {SHAPE}"))?;
    let path = rest.strip_prefix("//").unwrap_or(rest);
    if !path.starts_with('/') || path.contains(['?', '#']) {
        return Err(format!("{text:?} has no absolute path: {SHAPE}"));
    }
    let path = PathBuf::from(path);
    ListenError::check_path(&path, "--spiffe-endpoint").map_err(|error| error.to_string())?;
    Ok(path)
}
