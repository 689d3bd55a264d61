//! Flags, environment and options file, made into a [`Config`] that holds only valid values.
//!
//! Each feature reads its own options, and each CA provider its own (`ca/*/options.rs`); contradictions across features
//! are judged here. All mistakes go into one report.

mod args;
mod certificate;
mod command;
mod csi;
mod files;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
mod identity;
mod key;
pub mod kubernetes;
mod mint;
mod node;
mod operation;
mod options_file;
mod output;
mod selection;
mod shared;
mod spiffe;
mod token;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

pub use self::args::RunArgs;
use self::certificate::CertificateOptions;
use self::files::{FileOptions, OwnDir, holds_key_pair, resolved};
pub use self::kubernetes::KubernetesConfig;
use self::node::Subject;
pub use self::node::{
    Description, NodeArgs, NodeConfig, SharedArgs, WorkloadTemplate, parse_description, read_description,
};
pub use self::options_file::agents_option;
use self::selection::ProviderOptions;
use self::shared::Credentials;
use crate::auth::token_file::BroughtToken;
use crate::ca::provider::{Choice, Selection, SharedOptions};
pub use crate::ca::providers::Provider;
use crate::export::output::{self as export, DirectorySettings};
use crate::fs::generation::Place;
use crate::ops::telemetry::LogConfig;
pub use crate::options::{ConfigErrors, Environment, parse_duration};
use crate::options::{OptionsFile, Reader};
use crate::os::supervise;
use crate::serve::peer::Allowed;
use crate::serve::sds::SpiffeValidator;
use crate::source::crl::CrlFile;
use crate::source::files as mounted;
use crate::source::issuer::{self, StateDir};
use crate::source::mint::MintSettings;
use crate::source::spiffe::SpiffeSettings;

/// Where Istio's proxies look for the socket of another agent than their own.
pub const DEFAULT_SOCKET: &str = "/var/run/secrets/workload-spiffe-uds/socket";

/// The admin socket of a node's agent, unless an option names another.
pub const NODES_ADMIN_SOCKET: &str = "/run/attache/admin.sock";

/// The admin socket of the agent with the SDS socket `sds`, unless an option names another: no two agents share it.
pub fn default_admin_socket(sds: &Path) -> PathBuf {
    let mut path = sds.as_os_str().to_owned();
    path.push(".admin");
    path.into()
}

/// A valid configuration of `attache run`.
#[derive(Clone, Debug)]
pub struct Config {
    /// The socket that Envoy connects to; of several, the first, by which admin commands find the agent.
    pub socket: PathBuf,
    /// Further ones, which serve the same.
    pub other_sockets: Vec<PathBuf>,
    /// The mode of each socket.
    pub socket_mode: u32,
    /// The users and groups that may connect.
    pub allowed: Allowed,
    /// The CAs, which stand in for each other in this order; none with mounted files alone.
    pub providers: Vec<Provider>,
    /// The option that selected them, for logs.
    pub provider_reason: String,
    pub workload: issuer::IssuerSettings,
    /// The Workload API that delivers the identity instead of a CA.
    pub spiffe: Option<Box<SpiffeSettings>>,
    /// Where the token is kept that clients bring, if they are to.
    pub token_from_request: Option<BroughtToken>,
    /// Certificates for hosts.
    pub mint: Option<MintSettings>,
    /// Where Secrets of Kubernetes are served from.
    pub kubernetes: Option<KubernetesConfig>,
    pub files: mounted::FileSettings,
    /// Which trust bundles have the form of Envoy's SPIFFE validator.
    pub spiffe_validator: SpiffeValidator,
    /// The CRLs for the trust bundle.
    pub crl: CrlFile,
    /// The files for other programs.
    pub output: Option<export::OutputSettings>,
    pub admin_socket: Option<AdminSocket>,
    /// The address of the status page.
    pub admin_address: Option<SocketAddr>,
    /// The address of probes and metrics.
    pub status_address: Option<SocketAddr>,
    /// The file that exists while the agent is ready.
    pub ready_file: Option<PathBuf>,
    /// Whether the kernel confines the agent to its directories.
    pub landlock: bool,
    /// How long open calls may take to end after SIGTERM.
    pub drain_timeout: Duration,
    /// The program that the agent keeps running.
    pub command: Option<Box<supervise::Settings>>,
    pub log: LogConfig,
    /// The options file, with what no flag and no variable overrides.
    pub options_file: Option<OptionsFile>,
    /// Warnings about options that are valid.
    pub notes: Vec<String>,
}

/// Whether this environment is that of a container in a Pod of Kubernetes.
pub fn is_in_pod(environment: &Environment) -> bool {
    environment.contains_key("KUBERNETES_SERVICE_HOST")
}

/// The socket of admin commands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdminSocket {
    pub path: PathBuf,
    /// Whether an option names it: the agent does not start without it then.
    pub is_named: bool,
}

impl Config {
    /// Every SDS socket, in the order of the options.
    pub fn sockets(&self) -> impl Iterator<Item = &Path> {
        std::iter::once(&self.socket).chain(&self.other_sockets).map(PathBuf::as_path)
    }

    /// Reads all options: from flags, environment, and the options file that these name.
    pub fn load(args: &RunArgs, environment: &Environment) -> Result<Self, ConfigErrors> {
        match options_file::read(args, environment)? {
            Some((file, mistakes)) => {
                Self::with_file(args, environment, Some(&file), mistakes, Subject::Sidecar)
            }
            None => Self::new(args, environment),
        }
    }

    /// Reads all options from flags and environment.
    pub fn new(args: &RunArgs, environment: &Environment) -> Result<Self, ConfigErrors> {
        Self::with_file(args, environment, None, Vec::new(), Subject::Sidecar)
    }

    /// `mistakes` are those in the options file.
    fn with_file(
        args: &RunArgs,
        environment: &Environment,
        file: Option<&OptionsFile>,
        mistakes: Vec<String>,
        subject: Subject<'_>,
    ) -> Result<Self, ConfigErrors> {
        let mut reader = Reader::new(environment, file).for_workload(subject.description());
        let r = &mut reader;
        mistakes.into_iter().for_each(|mistake| r.mistake(mistake));
        let (socket, other_sockets) = operation::sockets(r, args);
        let socket_mode = r.parsed("socket-mode", &args.socket_mode, &[], parse_mode).or(0o660_u32);
        let allowed = Allowed {
            uids: numbers(r, "allow-uid", &args.allow_uid),
            gids: numbers(r, "allow-gid", &args.allow_gid),
        };
        let files = FileOptions::new(r, args);
        let crl = files::crl(r, args);
        let output = output::output(r, args);
        let state = output::state(r, args);

        let has_kubernetes_secrets = kubernetes::is_enabled(r, args);
        let options = ProviderOptions::new(r, args);
        let mut own = own_dirs(output.as_ref(), state.as_ref());
        let places = if subject.has_mounted_files() { files.places(&own).0 } else { Vec::new() };
        let selection = options.select(r, &places, has_kubernetes_secrets);
        let mut mounted = mounted_files(r, &files, &mut own, &options, &selection);
        if selection.reason == selection::SECRETS_ALONE || !subject.has_mounted_files() {
            // It is ready without files.
            mounted.clear();
        }
        let mut private: Vec<PathBuf> = own.iter().map(|(path, _)| (*path).to_owned()).collect();
        check_output(r, &files, output.as_ref(), &selection, &mounted);
        let (workload, providers, token_from_request) =
            workload_and_providers(r, args, options, &selection, state, has_kubernetes_secrets, subject);

        let sockets: Vec<_> = std::iter::once(&socket).chain(&other_sockets).map(PathBuf::as_path).collect();
        let spiffe =
            spiffe::spiffe(r, args, &selection, &workload, &sockets, has_kubernetes_secrets, subject);
        let is_alone = providers.is_empty() && spiffe.is_none();
        if matches!(subject, Subject::Sidecar) && !providers.is_empty() {
            files::check_federated(r, &files, &workload.identity);
        }
        let mint = mint::mint(r, args, &selection, &workload.identity);
        let kubernetes = kubernetes::kubernetes(r, args, &workload.identity, has_kubernetes_secrets);
        let admin_socket = match subject {
            Subject::Sidecar => operation::admin_socket(r, args, &socket, &other_sockets),
            Subject::Node { .. } => operation::nodes_admin_socket(r, args),
            Subject::Workload { .. } => None,
        };
        let status_address = operation::status_address(r, args);
        let admin_address = operation::admin_address(r, args, status_address);
        let drain_timeout = r.duration("drain-timeout", &args.drain_timeout, &[], Duration::ZERO);
        let drain_timeout = drain_timeout.or(Duration::from_secs(5));
        let command = command::command(r, args, drain_timeout).map(Box::new);
        let landlock = operation::landlock(r, args, &providers, output.as_ref());
        private.extend(ca_directories(r, args, &providers));
        let own = own_dirs(output.as_ref(), workload.state.as_ref());
        let own = own.into_iter().map(|(path, _)| path.to_owned()).collect();
        let config = Self {
            socket,
            other_sockets,
            socket_mode,
            allowed,
            files: files.into_settings(mounted, own, absolute(private), is_alone, subject),
            spiffe_validator: r
                .parsed("spiffe-validator", &args.spiffe_validator, &[], spiffe_validator)
                .or(SpiffeValidator::default()),
            providers,
            provider_reason: selection.reason,
            workload,
            spiffe,
            token_from_request,
            mint,
            kubernetes,
            crl,
            output,
            admin_socket,
            admin_address,
            status_address,
            ready_file: r.text("ready-file", &args.ready_file, &[]).value.map(PathBuf::from),
            landlock,
            drain_timeout,
            command,
            log: operation::log(r, args),
            options_file: r.file_in_force(),
            notes: r.take_notes(),
        };
        reader.finish(config)
    }
}

/// The directories that the agent writes to, which are no source of mounted files.
fn own_dirs<'a>(output: Option<&'a export::OutputSettings>, state: Option<&'a StateDir>) -> Vec<OwnDir<'a>> {
    let outputs = output.into_iter().flat_map(|output| output.paths());
    let outputs = outputs.map(|path| (path.as_path(), "the agent writes its own files there"));
    let state = state.map(|state| (state.path(), "the agent keeps its state there"));
    outputs.chain(state).collect()
}

/// The directories of keys of CAs. One that is configured for another agent of this machine counts as well.
fn ca_directories(r: &Reader<'_>, args: &RunArgs, providers: &[Provider]) -> Vec<PathBuf> {
    let used = providers.iter().filter_map(|provider| provider.directory()).map(Path::to_owned);
    let in_file = || r.in_file("ca-dir").and_then(|(_, values)| values.first()).map(String::as_str);
    let embedded = args.providers.embedded.ca_dir.as_deref().or_else(|| r.variable("ATTACHE_CA_DIR"));
    let embedded = embedded.or_else(in_file);
    used.chain(embedded.map(PathBuf::from)).collect()
}

fn absolute(paths: Vec<PathBuf>) -> Vec<PathBuf> {
    let mut paths: Vec<_> =
        paths.into_iter().map(|path| std::path::absolute(&path).unwrap_or(path)).collect();
    paths.sort_unstable();
    paths.dedup();
    paths
}

/// The places of mounted files, now that the CA is known: its client certificate's directory is none of them.
fn mounted_files<'a>(
    r: &mut Reader<'_>,
    files: &FileOptions,
    own: &mut Vec<OwnDir<'a>>,
    options: &'a ProviderOptions,
    selection: &Selection,
) -> Vec<Place> {
    if selection.ca().is_some_and(|kind| kind.takes_client_cert) {
        let directory = options.client_cert.value.as_deref().map(Path::new);
        own.extend(directory.map(|path| (path, "they are the client certificate for calls to the CA")));
    }
    let (places, notes) = files.places(own);
    for note in notes {
        r.note(note);
    }
    places
}

/// With mounted files alone, output into their own directory would have no source.
fn check_output(
    r: &mut Reader<'_>,
    files: &FileOptions,
    output: Option<&export::OutputSettings>,
    selection: &Selection,
    mounted: &[Place],
) {
    let Some(output) = output.filter(|_| selection.choice == Some(Choice::Files)) else { return };
    for DirectorySettings { option, directory, .. } in &output.directories {
        let is_same = resolved([files.cert_dir()]) == resolved([directory.as_path()]);
        if is_same && !mounted.iter().any(|place| holds_key_pair(place) == Some(true)) {
            r.mistake(format!(
                "{option} and --cert-dir are both {}, and no CA is used: there are no other files to write; name two \
                 directories, or choose a CA with --ca",
                directory.display()
            ));
        }
    }
}

/// The settings of the certificate's source, and the CAs that it calls.
fn workload_and_providers(
    r: &mut Reader<'_>,
    args: &RunArgs,
    options: ProviderOptions,
    selection: &Selection,
    state: Option<StateDir>,
    has_other_source: bool,
    subject: Subject<'_>,
) -> (issuer::IssuerSettings, Vec<Provider>, Option<BroughtToken>) {
    let from_request = token::from_request(r, args, selection, subject);
    let brought = subject.token().or(from_request.as_ref());
    let credentials = Credentials::new(r, args, &options, selection, brought);
    let identity = identity::identity(r, args, &credentials, selection.ca());
    node::check_token(r, args, selection.ca(), subject, from_request.is_some());
    let names = identity::names(r, args, &identity, selection.ca());
    let certificate = CertificateOptions::new(r, args);
    let drops_old_roots = r.switch("drop-old-roots", args.drop_old_roots, &[]).or(false);
    let shared = shared_options(r, args, options, selection, credentials, &certificate, subject);
    let providers = args.providers.read(r, &shared);
    if let Some(state) =
        state.as_ref().filter(|_| selection.choice == Some(Choice::Files) && !has_other_source)
    {
        let directory = state.path().display();
        r.note(format!("--state-dir {directory} is not used: without a CA there is nothing to keep"));
    }
    let CertificateOptions { key_type, key_format, ttl, timeout, grace, .. } = certificate;
    let workload = issuer::IssuerSettings {
        identity,
        names,
        key_type,
        key_format,
        ttl,
        grace,
        timeout,
        drops_old_roots,
        state,
    };
    (workload, providers, from_request)
}

fn shared_options(
    r: &mut Reader<'_>,
    args: &RunArgs,
    options: ProviderOptions,
    selection: &Selection,
    credentials: Credentials,
    certificate: &CertificateOptions,
    subject: Subject<'_>,
) -> SharedOptions {
    let kind = selection.ca();
    SharedOptions {
        selection: selection.clone(),
        addresses: options.addresses.value.unwrap_or_default(),
        token: token::source(r, args, selection, &credentials, certificate.timeout),
        roots: shared::roots(r, args, credentials.client_cert.as_ref(), kind),
        server_name: {
            let istios = selection::istios(kind, &["ISTIOD_SAN"]);
            r.text("ca-server-name", &args.ca_server_name, istios).value
        },
        headers: shared::headers(r, args),
        token_file: credentials.token,
        client_cert: credentials.client_cert,
        impersonates: subject.impersonates(),
        timeout: certificate.timeout,
        key_type: certificate.key_type,
        ttl: certificate.ttl,
        ttl_option: certificate.ttl_option.clone(),
    }
}

/// User or group ids.
fn numbers(r: &mut Reader<'_>, flag: &str, typed: &[String]) -> Vec<u32> {
    let number = |text: &str| text.parse().map_err(|_| format!("{text:?} is not a number"));
    r.list(flag, typed, &[], ',', number).value.unwrap_or_default()
}

fn spiffe_validator(text: &str) -> Result<SpiffeValidator, String> {
    let known = SpiffeValidator::NAMES.into_iter().find(|(name, _)| *name == text);
    known.map(|(_, validator)| validator).ok_or_else(|| {
        let names = SpiffeValidator::NAMES.map(|(name, _)| name);
        format!("{text:?} is none of {}", names.join(", "))
    })
}

fn parse_mode(text: &str) -> Result<u32, String> {
    let mode = u32::from_str_radix(text, 8).ok().filter(|mode| *mode <= 0o777);
    mode.ok_or_else(|| format!("{text:?} is not a file mode; the shape is octal, like 0660"))
}

#[cfg(test)]
mod tests;
