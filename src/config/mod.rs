//! What was typed and what the environment says, made into a [`Config`] that holds only valid values.
//!
//! Every option is looked for on three levels: the flag, `ATTACHE_<FLAG>`, and the variable that Istio's agent
//! reads. The highest level that has it wins, and every mistake goes into one report.

mod args;
mod cfssl;
mod choice;
mod exec;
mod google_cas;
mod identity;
mod key;
mod kubernetes;
mod provider;
mod reader;
mod token;
mod vault;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tracing_subscriber::filter::Targets;

pub use self::args::RunArgs;
use self::choice::{Chosen, Credentials, ProviderName, Wishes};
use self::identity::identity;
use self::provider::providers;
pub use self::provider::{Provider, ProviderFile};
pub use self::reader::{ConfigErrors, Environment, parse_duration};
use self::reader::{Found, Level, Reader};
use crate::export::output::{self, Hook};
use crate::fs::generation::Place;
use crate::ops::telemetry::{LogConfig, parse_filter};
use crate::serve::listener::ListenError;
use crate::serve::peers::Allowed;
use crate::source::crl::CrlFile;
use crate::source::files;
use crate::source::issuer::{Grace, IssuerSettings, StateDir};

/// Where Istio's proxies look for a socket that is not their agent's.
pub const DEFAULT_SOCKET: &str = "/var/run/secrets/workload-spiffe-uds/socket";
/// The admin socket's name, beside the SDS socket.
pub const ADMIN_SOCKET: &str = "admin.sock";
/// Where mounted files are, unless somebody says otherwise.
const CERT_DIR: &str = "/etc/certs";
/// Where Istio mounts the CRLs of its CAs.
const ISTIO_CRL: &str = "/var/run/secrets/istio/crl/ca-crl.pem";
const SERVICE_ACCOUNT_FOLDER: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

/// A valid configuration of `attache run`.
#[derive(Clone, Debug)]
pub struct Config {
    /// Where Envoy connects.
    pub socket: PathBuf,
    /// The socket file's permissions.
    pub socket_mode: u32,
    /// Who may connect.
    pub allowed: Allowed,
    /// Who signs: several stand in for each other, in this order; none where mounted files are all there is.
    pub providers: Vec<Provider>,
    /// What decided that, for people.
    pub provider_reason: String,
    /// What is asked of it.
    pub workload: IssuerSettings,
    /// Which files are served.
    pub files: files::Settings,
    /// The CRLs for the trust bundle.
    pub crl: CrlFile,
    /// The files for other programs, if there are to be any.
    pub output: Option<output::Settings>,
    /// Where people's commands come in; none to have none.
    pub admin_socket: Option<AdminSocket>,
    /// Where the status page is; none to have none.
    pub admin_address: Option<SocketAddr>,
    /// Where probes and metrics are; none to have none.
    pub status_address: Option<SocketAddr>,
    /// The file that is there while the agent is ready, if there is to be one.
    pub ready_file: Option<PathBuf>,
    /// Whether the kernel is to keep the agent in its folders.
    pub landlock: bool,
    /// How long open calls may take to end after SIGTERM.
    pub drain_timeout: Duration,
    /// What is logged.
    pub log: LogConfig,
    /// What a person should know about the options, though they are valid.
    pub notes: Vec<String>,
}

/// Whether this environment is that of a container in a Pod of Kubernetes.
pub fn is_in_pod(environment: &Environment) -> bool {
    environment.contains_key("KUBERNETES_SERVICE_HOST")
}

/// Where people's commands come in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdminSocket {
    /// The socket's path.
    pub path: PathBuf,
    /// Somebody named it: without it the agent does not start.
    pub is_named: bool,
}

impl Config {
    /// Puts flags and environment together.
    pub fn new(args: &RunArgs, environment: &Environment) -> Result<Self, ConfigErrors> {
        let mut reader = Reader::new(environment);
        let r = &mut reader;
        let mut notes = Vec::new();

        let socket = PathBuf::from(r.text("socket", &args.socket, &[]).or(DEFAULT_SOCKET));
        if let Err(error) = ListenError::check_path(&socket, "--socket") {
            r.mistake(error.to_string());
        }
        let socket_mode = r.parsed("socket-mode", &args.socket_mode, &[], parse_mode).or(0o660_u32);

        let allowed = Allowed {
            uids: numbers(r, "allow-uid", &args.allow_uid),
            gids: numbers(r, "allow-gid", &args.allow_gid),
        };

        let prefixes = file_prefixes(r, args);
        let system_roots = r.variable("SSL_CERT_FILE").map(PathBuf::from);
        let file_debounce =
            r.duration("file-debounce", &args.file_debounce, &["FILE_DEBOUNCE_DURATION"], Duration::ZERO);
        let file_debounce = file_debounce.or(Duration::from_millis(100));
        let crl = r.text("crl", &args.crl, &[]);
        let crl = CrlFile { is_named: crl.value.is_some(), path: crl.or(ISTIO_CRL).into() };
        let output = output(r, args);
        let state = state(r, args);
        let wishes = Wishes::new(r, args);
        let cert_dir = r.text("cert-dir", &args.cert_dir, &[]);
        let mut own = Vec::new();
        if let Some(output) = &output {
            own.push((output.folder.as_path(), "that is where the agent writes its own"));
        }
        if let Some(state) = &state {
            own.push((state.path(), "that is where the agent keeps its state"));
        }
        // Without a CA, no folder is that of a client certificate for it.
        let without_ca = mounted(&cert_dir, &own, &mut Vec::new());
        let (name, provider_reason) = wishes.choose(r, &without_ca).unzip();
        let chosen = Chosen { name, level: wishes.ca.level };
        let client_cert = &wishes.client_cert;
        if let Some(folder) = client_cert.value.as_deref().filter(|_| name == Some(ProviderName::Citadel)) {
            own.push((Path::new(folder), "they are the client certificate for calls to the CA"));
        }
        let mounted = mounted(&cert_dir, &own, &mut notes);
        if let Some(output) = &output
            && name == Some(ProviderName::None)
            && resolved(Path::new(cert_dir.value.as_deref().unwrap_or(CERT_DIR))) == resolved(&output.folder)
            && !mounted.iter().any(Place::holds_key_pair)
        {
            r.mistake(format!(
                "--output-dir and --cert-dir are both {}, and no CA is used: nothing is left that could be written \
                 there; name two folders, or choose a CA with --ca",
                output.folder.display()
            ));
        }
        let credentials = Credentials::new(r, args, &wishes, name, &mut notes);

        let identity = identity(r, args, &credentials, name);

        let (key_type, key_format) = key::options(r, args, &mut notes);
        let second = Duration::from_secs(1);
        let ttl = r.duration("cert-ttl", &args.cert_ttl, &["SECRET_TTL"], second);
        if name == Some(ProviderName::Cfssl) && ttl.level > Some(Level::Istio) {
            notes.push(format!("{} is not used: the profile of cfssl decides on lifetimes", ttl.from));
        }
        let timeout = r.duration("ca-timeout", &args.ca_timeout, &[], Duration::from_millis(100));
        let ratio = r.parsed("grace-ratio", &args.grace_ratio, &["SECRET_GRACE_PERIOD_RATIO"], parse_ratio);
        let jitter =
            r.parsed("grace-jitter", &args.grace_jitter, &["SECRET_GRACE_PERIOD_RATIO_JITTER"], parse_jitter);
        let grace = grace(r, ratio, jitter);
        let timeout = timeout.or(Duration::from_secs(10));
        let workload = IssuerSettings {
            identity,
            key_type,
            key_format,
            ttl: ttl.or(Duration::from_secs(24 * 3600)),
            grace,
            timeout,
            drops_old_roots: r.switch("drop-old-roots", args.drop_old_roots, &[]).or(false),
            state,
        };

        let providers = providers(r, args, chosen, wishes, &credentials, &workload, &mut notes);
        if let Some(state) = workload.state.as_ref().filter(|_| name == Some(ProviderName::None)) {
            let folder = state.path().display();
            notes.push(format!("--state-dir {folder} is not used: without a CA there is nothing to keep"));
        }

        let admin_socket = admin_socket(r, args, &socket);
        let status_address = r
            .parsed("status-address", &args.status_address, &[], |text| {
                parse_address(text, "127.0.0.1:15055")
            })
            .or(Some(SocketAddr::from(([127, 0, 0, 1], 15055))));
        let admin_address = admin_address(r, args, status_address, &mut notes);
        let landlock = landlock(r, args, &providers, output.as_ref());
        let ready_file = r.text("ready-file", &args.ready_file, &[]).value.map(PathBuf::from);
        let drain_timeout =
            r.duration("drain-timeout", &args.drain_timeout, &[], Duration::ZERO).or(Duration::from_secs(5));
        let filter = r.parsed("log-level", &args.log_level, &["ATTACHE_LOG"], parse_filter);
        let json = r.parsed("log-format", &args.log_format, &[], parse_format).or(false);
        let info = Targets::new().with_default(tracing::Level::INFO);
        let log = LogConfig { filter: filter.or(info), json };

        let own_folders = output.iter().map(|output| output.folder.as_path());
        let own_folders = own_folders.chain(workload.state.iter().map(StateDir::path));
        let files = files::Settings {
            mounted,
            own: own_folders.map(Path::to_owned).collect(),
            is_alone: providers.is_empty(),
            debounce: file_debounce,
            prefixes,
            system_roots,
        };
        reader.finish(Self {
            socket,
            socket_mode,
            allowed,
            providers,
            provider_reason: provider_reason.unwrap_or_default(),
            workload,
            files,
            crl,
            output,
            admin_socket,
            admin_address,
            status_address,
            ready_file,
            landlock,
            drain_timeout,
            log,
            notes,
        })
    }
}

/// User or group ids.
fn numbers(r: &mut Reader<'_>, flag: &str, typed: &[String]) -> Vec<u32> {
    let number = |text: &str| text.parse().map_err(|_| format!("{text:?} is not a number"));
    r.list(flag, typed, &[], ',', number).value.unwrap_or_default()
}

/// The folder for what is kept across restarts.
fn state(r: &mut Reader<'_>, args: &RunArgs) -> Option<StateDir> {
    let folder = r.text("state-dir", &args.state_dir, &[]).value?;
    Some(StateDir::new(std::path::absolute(&folder).unwrap_or_else(|_| folder.into())))
}

/// Beside the SDS socket, unless it is somewhere else.
fn admin_socket(r: &mut Reader<'_>, args: &RunArgs, socket: &Path) -> Option<AdminSocket> {
    let path = r.text("admin-socket", &args.admin_socket, &[]);
    let is_named = path.value.is_some();
    let path = match path.value {
        Some(text) if text == "none" => return None,
        Some(path) => PathBuf::from(path),
        None => socket.with_file_name(ADMIN_SOCKET),
    };
    if path == socket {
        r.mistake(format!(
            "{} is the SDS socket, too: give the admin socket a path of its own",
            path.display()
        ));
    }
    match ListenError::check_path(&path, "--admin-socket") {
        Err(error) if is_named => r.mistake(error.to_string()),
        Err(_) => return None,
        Ok(()) => {}
    }
    Some(AdminSocket { path, is_named })
}

/// Where the status page is.
fn admin_address(
    r: &mut Reader<'_>,
    args: &RunArgs,
    status: Option<SocketAddr>,
    notes: &mut Vec<String>,
) -> Option<SocketAddr> {
    let found = r.parsed("admin-address", &args.admin_address, &[], |text| match text.parse() {
        Ok(port) => Ok(Some(SocketAddr::from(([127, 0, 0, 1], port)))),
        Err(_) => parse_address(text, "127.0.0.1:15056, 15056"),
    });
    let address = found.value??;
    // With port 0 each gets a free one. Who listens on all addresses leaves none of them.
    let clashes = |status: SocketAddr| {
        let is_same = status.ip() == address.ip();
        status.port() == address.port()
            && (is_same || status.ip().is_unspecified() || address.ip().is_unspecified())
    };
    if address.port() != 0 && status.is_some_and(clashes) {
        r.mistake(format!(
            "{}: --status-address is the same; give the status page a port of its own",
            found.from
        ));
    }
    if !address.ip().is_loopback() {
        notes.push(format!(
            "{}: whoever can reach it sees the names of secrets, identities, and when they end; 127.0.0.1 keeps it to \
             this machine",
            found.from
        ));
    }
    Some(address)
}

/// Whether to confine the agent; not where it is to start commands.
fn landlock(
    r: &mut Reader<'_>,
    args: &RunArgs,
    providers: &[Provider],
    output: Option<&output::Settings>,
) -> bool {
    let landlock = r.switch("landlock", args.landlock, &[]);
    let hook = output.and_then(|output| output.hook.as_ref()).map(|_| "--output-hook");
    let exec =
        providers.iter().any(|provider| matches!(provider, Provider::Exec { .. })).then_some("--ca exec");
    let is_wanted = landlock.value == Some(true);
    for command in hook.into_iter().chain(exec).filter(|_| is_wanted) {
        r.mistake(format!(
            "{} and {command} contradict each other: with the first no command can be run; drop one of them",
            landlock.from
        ));
    }
    is_wanted
}

/// What is written for other programs.
fn output(r: &mut Reader<'_>, args: &RunArgs) -> Option<output::Settings> {
    let folder = r.text("output-dir", &args.output_dir, &["OUTPUT_CERTS"]);
    let key_mode = r.parsed("output-key-mode", &args.output_key_mode, &[], parse_mode);
    let cert_mode = r.parsed("output-cert-mode", &args.output_cert_mode, &[], parse_mode);
    let command = r.text("output-hook", &args.output_hook, &[]);
    let least = Duration::from_millis(100);
    let timeout = r.duration("output-hook-timeout", &args.output_hook_timeout, &[], least);
    let Some(folder) = folder.value else {
        if command.value.is_some() && !folder.was_wrong {
            r.mistake(format!("{} needs a folder to be written: --output-dir DIR", command.from));
        }
        return None;
    };
    let timeout = timeout.or(Duration::from_secs(30));
    Some(output::Settings {
        // The hook may look from elsewhere.
        folder: std::path::absolute(&folder).unwrap_or_else(|_| folder.into()),
        key_mode: key_mode.or(0o600_u32),
        cert_mode: cert_mode.or(0o644_u32),
        hook: command.value.map(|command| Hook { command: command.into(), timeout }),
    })
}

/// `path` with its links resolved, as far as it exists.
fn resolved(path: &Path) -> PathBuf {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    match (path.canonicalize(), path.parent(), path.file_name()) {
        (Ok(path), ..) => path,
        (Err(_), Some(parent), Some(name)) => resolved(parent).join(name),
        _ => path,
    }
}

fn grace(r: &mut Reader<'_>, ratio: Found<f64>, jitter: Found<f64>) -> Grace {
    let from = jitter.from.clone();
    let ratio = ratio.or(0.5);
    match jitter.value {
        // More would renew some certificates when they have ended, or as soon as they have come.
        Some(jitter) if jitter >= ratio.min(1.0 - ratio) => {
            r.mistake(format!("{from} is too much for a grace ratio of {ratio}: it must be less than the ratio, and than what the ratio leaves"));
            Grace { ratio, jitter: 0.0 }
        }
        Some(jitter) => Grace { ratio, jitter },
        None => Grace { ratio, jitter: 0.01_f64.min(ratio / 2.0).min((1.0 - ratio) / 2.0) },
    }
}

/// Where mounted files are looked for. A folder of the agent's own files, links resolved, is none of these places: what
/// it writes must not come back as what it reads.
fn mounted(cert_dir: &Found<String>, own: &[(&Path, &str)], notes: &mut Vec<String>) -> Vec<Place> {
    let typed = cert_dir.value.as_deref().map(Path::new);
    let mut places = Vec::new();
    for folder in [typed.unwrap_or(Path::new(CERT_DIR)), Path::new(files::PLATFORM_FOLDER)] {
        match own.iter().find(|(own, _)| resolved(own) == resolved(folder)) {
            None => places.extend(files::places(folder)),
            Some((_, why)) if typed == Some(folder) => {
                notes.push(format!("the files in {} are not served: {why}", folder.display()));
            }
            Some(_) => {}
        }
    }
    places
}

/// Folders in which named files must lie; in the environment with ":" between them, as in PATH.
fn file_prefixes(r: &mut Reader<'_>, args: &RunArgs) -> Vec<PathBuf> {
    // An empty one would not limit anything, and that is not what somebody wants who sets it.
    let folder = |text: &str| match text {
        "" => Err("it is empty: name a folder, or leave it out to allow every path"),
        folder => Ok(PathBuf::from(folder)),
    };
    r.list("file-prefix", &args.file_prefix, &[], ':', folder).value.unwrap_or_default()
}

fn parse_mode(text: &str) -> Result<u32, String> {
    let mode = u32::from_str_radix(text, 8).ok().filter(|mode| *mode <= 0o777);
    mode.ok_or_else(|| format!("{text:?} is not a file mode; the shape is octal, like 0660"))
}

fn parse_ratio(text: &str) -> Result<f64, String> {
    let ratio = text.parse().ok().filter(|ratio| *ratio > 0.0 && *ratio < 1.0);
    ratio.ok_or_else(|| format!("{text:?} is not between 0 and 1; 0.2 renews with 20 % of the lifetime left"))
}

fn parse_jitter(text: &str) -> Result<f64, String> {
    let jitter = text.parse().ok().filter(|jitter| (0.0..1.0).contains(jitter));
    jitter.ok_or_else(|| {
        format!("{text:?} is not from 0 to below 1; 0.01 spreads renewals by ±1 % of the lifetime")
    })
}

/// `shapes` are examples of it.
fn parse_address(text: &str, shapes: &str) -> Result<Option<SocketAddr>, String> {
    if text == "none" {
        return Ok(None);
    }
    let address = text.parse().map(Some);
    address.map_err(|_| format!("{text:?} is not an address; the shape is {shapes}, or none"))
}

/// True for JSON.
fn parse_format(text: &str) -> Result<bool, String> {
    match text {
        "text" => Ok(false),
        "json" => Ok(true),
        _ => Err(format!("{text:?} is not a log format; choose text or json")),
    }
}

#[cfg(test)]
mod tests;
