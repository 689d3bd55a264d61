//! What was typed and what the environment says, made into a [`Config`] that holds only valid values.
//!
//! Every option is looked for on three levels: the flag, `ATTACHE_<FLAG>`, and the variable that Istio's agent
//! reads. The highest level that has it wins, and every mistake goes into one report.

mod args;
mod cfssl;
mod exec;
mod key;
mod google_cas;
mod kubernetes;
mod reader;
mod token;
mod vault;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tonic::metadata::{Ascii, MetadataValue};
use tracing_subscriber::filter::Targets;

pub use self::args::RunArgs;
pub use self::reader::{Environment, Mistakes, parse_duration};
use self::reader::{Level, Reader};
use crate::ca::cfssl as cfssl_ca;
use crate::ca::citadel::Header;
use crate::ca::client_cert::ClientCertFolder;
use crate::ca::endpoint::{Address, Endpoint, Roots};
use crate::ca::google_cas as google_cas_ca;
use crate::ca::kubernetes::{SignerName, SignerRoots};
use crate::ca::token as ca_token;
use crate::ca::vault as vault_ca;
use crate::command::ShellCommand;
use crate::credential::TokenFile;
use crate::generation::Place;
use crate::identity::SpiffeId;
use crate::output::{self, Hook};
use crate::pki::key::KeyType;
use crate::sds::listener::ListenError;
use crate::sds::peers::Allowed;
use crate::source::crl::CrlFile;
use crate::source::files;
use crate::source::workload::{Grace, IdentitySource, Settings, StateFolder};
use crate::telemetry::{LogConfig, parse_filter};

/// Where Istio's proxies look for a socket that is not their agent's.
pub const DEFAULT_SOCKET: &str = "/var/run/secrets/workload-spiffe-uds/socket";
/// The admin socket's name, beside the SDS socket.
pub const ADMIN_SOCKET: &str = "admin.sock";
/// Where mounted files are, unless somebody says otherwise.
const CERT_DIR: &str = "/etc/certs";
/// Where the CA's root is, unless somebody says otherwise or it came with the client certificate.
const DEFAULT_ROOTS: [&str; 2] = ["/var/run/secrets/istio/root-cert.pem", "/etc/certs/root-cert.pem"];
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
    pub workload: Settings,
    /// Which files are served.
    pub files: files::Settings,
    /// The CRLs for the trust bundle.
    pub crl: CrlFile,
    /// The files for other programs, if there are to be any.
    pub output: Option<output::Settings>,
    /// Where people's commands come in; none to have none.
    pub admin_socket: Option<AdminSocket>,
    /// Where probes and metrics are; none to have none.
    pub status_address: Option<SocketAddr>,
    /// How long open calls may take to end after SIGTERM.
    pub drain_timeout: Duration,
    /// What is logged.
    pub log: LogConfig,
    /// What a person should know about the options, though they are valid.
    pub notes: Vec<String>,
}

/// Where people's commands come in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdminSocket {
    /// The socket's path.
    pub path: PathBuf,
    /// Somebody named it: without it the agent does not start.
    pub is_named: bool,
}

/// The CA client to use.
#[derive(Clone, Debug)]
pub enum Provider {
    /// Istio's CA protocol.
    Citadel {
        /// Where the CA is.
        endpoint: Endpoint,
        /// Where the workload's credential comes from.
        token: ca_token::Settings,
        /// Instead of the token, where it is good.
        client_cert: Option<ClientCertFolder>,
        /// Sent with each call.
        cluster_id: MetadataValue<Ascii>,
        /// Further headers.
        headers: Vec<Header>,
        /// Which of its signers is asked for.
        cert_signer: Option<String>,
        /// How long one call may take.
        timeout: Duration,
    },
    /// HashiCorp Vault or OpenBao.
    Vault {
        /// Where it is.
        endpoint: Endpoint,
        /// What is asked of it, and how to get in.
        settings: vault_ca::Settings,
        /// Further headers.
        headers: Vec<Header>,
    },
    /// Kubernetes' API for certificates.
    Kubernetes {
        /// The API server.
        endpoint: Endpoint,
        /// A service account's token.
        token: TokenFile,
        /// Who is to sign.
        signer: SignerName,
        /// What its certificates chain to.
        roots: SignerRoots,
        /// The kind of key that is signed.
        key_type: KeyType,
    },
    /// cfssl.
    Cfssl {
        /// Where it is.
        endpoint: Endpoint,
        /// Which of its profiles.
        profile: Option<String>,
        /// Which of its signers.
        label: Option<String>,
        /// The file with the key for requests.
        auth_key: Option<PathBuf>,
        /// The file with its roots.
        bundle: Option<PathBuf>,
        /// Further headers.
        headers: Vec<Header>,
    },
    /// Google's Certificate Authority Service.
    GoogleCas {
        /// Where it is.
        endpoint: Endpoint,
        /// What is asked of it.
        settings: google_cas_ca::Settings,
        /// Where the access token comes from.
        token: ca_token::Settings,
        /// Further headers.
        headers: Vec<Header>,
    },
    /// A command.
    Exec {
        /// Reads a CSR, prints a chain.
        sign: ShellCommand,
        /// Prints the roots, where the chain does not end in them.
        roots: Option<ShellCommand>,
    },
    /// The development CA.
    Embedded {
        /// Its folder.
        folder: PathBuf,
    },
}

impl Provider {
    /// What tells it from others of its kind.
    pub fn name(&self) -> String {
        match self {
            Self::Citadel { endpoint, .. }
            | Self::Vault { endpoint, .. }
            | Self::Kubernetes { endpoint, .. }
            | Self::GoogleCas { endpoint, .. }
            | Self::Cfssl { endpoint, .. } => endpoint.address.to_string(),
            Self::Exec { .. } => "exec".to_owned(),
            Self::Embedded { .. } => "embedded".to_owned(),
        }
    }
}

/// The providers by the names that `--ca` takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ProviderName {
    Citadel,
    Vault,
    Kubernetes,
    Cfssl,
    GoogleCas,
    Exec,
    Embedded,
    None,
}

impl ProviderName {
    /// Whether it is somewhere on the network.
    fn has_address(self) -> bool {
        matches!(self, Self::Citadel | Self::Vault | Self::Kubernetes | Self::Cfssl | Self::GoogleCas)
    }

    /// `text` as the address of such a CA.
    fn address(self, text: &str) -> Result<Address, String> {
        match self {
            Self::Vault => Address::with_ports(text, vault_ca::PORT, vault_ca::PORT),
            Self::Kubernetes | Self::GoogleCas => Address::with_ports(text, 443, 80),
            Self::Cfssl => Address::with_ports(text, cfssl_ca::PORT, cfssl_ca::PORT),
            _ => text.parse(),
        }
    }
}

const PROVIDERS: &str = "citadel (Istio's CA protocol; give --ca-address), vault (HashiCorp Vault or OpenBao), \
                         kubernetes (its API for certificates; give --kubernetes-signer and --kubernetes-root), \
                         cfssl (give --ca-address), \
                         google-cas (Google's Certificate Authority Service; give --google-cas-pool), \
                         exec (a command; give --ca-exec), \
                         embedded (a CA of its own, for development), \
                         none (files in --cert-dir alone)";

impl Config {
    /// Puts flags and environment together.
    pub fn new(args: &RunArgs, environment: &Environment) -> Result<Self, Mistakes> {
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
        let files_alone = r.switch("file-mounted-certs", args.file_mounted_certs, &["FILE_MOUNTED_CERTS"]);

        let ca = r.parsed("ca", &args.ca, &["CA_PROVIDER"], parse_provider);
        // Istio's variables tell of Istio's CA.
        let is_kubernetes = ca.value == Some(ProviderName::Kubernetes);
        let is_google_cas = ca.value == Some(ProviderName::GoogleCas);
        let istios =
            |names: &'static [&'static str]| if is_kubernetes || is_google_cas { &[] } else { names };
        let mut addresses =
            addresses(r, args, ca.value.unwrap_or(ProviderName::Citadel), istios(&["CA_ADDR"]));
        if is_kubernetes && addresses.value.is_none() && !addresses.was_wrong {
            addresses.value = kubernetes::in_cluster(r).map(|address| vec![address]);
        }
        if is_google_cas && addresses.value.is_none() && !addresses.was_wrong {
            addresses.value =
                ProviderName::GoogleCas.address(google_cas_ca::HOST).ok().map(|address| vec![address]);
        }
        let ca_dir = r.text("ca-dir", &args.ca_dir, &[]);
        let cert_dir = r.text("cert-dir", &args.cert_dir, &[]);
        let client_cert = r.text("ca-client-cert-dir", &args.ca_client_cert_dir, &["PROV_CERT"]);
        let mut own = Vec::new();
        if let Some(output) = &output {
            own.push((output.folder.as_path(), "that is where the agent writes its own"));
        }
        if let Some(state) = &state {
            own.push((state.path(), "that is where the agent keeps its state"));
        }
        // Without a CA, no folder is that of a client certificate for it.
        let without_ca = mounted(&cert_dir, &own, &mut Vec::new());
        let level = ca.level;
        let (name, provider_reason) =
            choose(r, ca, &files_alone, &addresses, &ca_dir, &client_cert, &without_ca).unzip();
        let chosen = Chosen { name, level };
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
        let client_cert = client_cert_folder(r, client_cert, name, &addresses, &mut notes);
        let exec = exec::options(r, args, chosen);
        let cfssl = cfssl::Options::new(r, args, chosen);

        let default_token = match r.variable("JWT_POLICY") {
            _ if name == Some(ProviderName::Kubernetes) => format!("{SERVICE_ACCOUNT_FOLDER}/token"),
            Some("first-party-jwt") => format!("{SERVICE_ACCOUNT_FOLDER}/token"),
            _ => "/var/run/secrets/tokens/istio-token".to_owned(),
        };
        let token = r.text("token-file", &args.token_file, &[]);
        let is_token_named = token.value.is_some();
        let token = TokenFile::new(token.or(default_token));
        let identity = identity(r, args, &token, &client_cert, name);
        let google_cas = google_cas::settings(r, args, chosen);

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
        let token_settings = token::settings(r, args, chosen, (&token, is_token_named), timeout, &mut notes);
        let vault = vault::settings(r, args, chosen, &token_settings);
        let workload = Settings {
            identity,
            key_type,
            key_format,
            ttl: ttl.or(Duration::from_secs(24 * 3600)),
            grace,
            timeout,
            drops_old_roots: r.switch("drop-old-roots", args.drop_old_roots, &[]).or(false),
            state,
        };

        let server_name = r.text("ca-server-name", &args.ca_server_name, istios(&["ISTIOD_SAN"])).value;
        let roots = roots(r, args, &client_cert, name);
        let kubernetes = kubernetes::options(r, args, chosen, &workload, &mut notes);
        let headers = headers(r, args);
        let cluster_id: MetadataValue<Ascii> = r
            .parsed("cluster-id", &args.cluster_id, &["ISTIO_META_CLUSTER_ID"], |text| {
                text.parse().map_err(|_| format!("{text:?} can't be sent in a header"))
            })
            .or(MetadataValue::from_static("Kubernetes"));
        let cert_signer = r.text("cert-signer", &args.cert_signer, &["ISTIO_META_CERT_SIGNER"]);
        // Istio sets it for a whole mesh, whatever a workload gets its certificates from.
        if cert_signer.level > Some(Level::Istio) {
            chosen.is(r, (ProviderName::Citadel, "citadel"), &[cert_signer.set()]);
        }
        let endpoint = |address| Endpoint { address, roots: roots.clone(), server_name: server_name.clone() };
        let in_plain_text = |what: &str, address: &Address, notes: &mut Vec<String>| {
            if address.plaintext {
                notes.push(format!("{what} to {address} in plain text"));
            }
        };
        let mut providers = Vec::new();
        // Where a choice or an address is missing, that is among the mistakes.
        let with_address = addresses.value.filter(|_| name.is_some_and(ProviderName::has_address));
        for address in with_address.unwrap_or_default() {
            let provider = match name {
                Some(ProviderName::Citadel) => {
                    in_plain_text("the workload's token goes", &address, &mut notes);
                    Some(Provider::Citadel {
                        endpoint: endpoint(address),
                        token: token_settings.clone(),
                        client_cert: client_cert.clone(),
                        cluster_id: cluster_id.clone(),
                        headers: headers.clone(),
                        cert_signer: cert_signer.value.clone(),
                        timeout: workload.timeout,
                    })
                }
                Some(ProviderName::Vault) => {
                    in_plain_text("the workload's token and Vault's go", &address, &mut notes);
                    vault.clone().map(|settings| Provider::Vault {
                        endpoint: endpoint(address),
                        settings,
                        headers: headers.clone(),
                    })
                }
                Some(ProviderName::Kubernetes) => {
                    in_plain_text("the service account's token goes", &address, &mut notes);
                    kubernetes.clone().map(|(signer, roots)| Provider::Kubernetes {
                        endpoint: endpoint(address),
                        token: token.clone(),
                        signer,
                        roots,
                        key_type,
                    })
                }
                Some(ProviderName::Cfssl) => {
                    let cfssl::Options { profile, label, auth_key, bundle } = cfssl.clone();
                    if address.plaintext && bundle.is_none() {
                        notes.push(format!(
                            "what {address} says in plain text is trusted: whoever is on the way there can be anybody's CA; use https://, or name the roots with --cfssl-bundle"
                        ));
                    }
                    let endpoint = endpoint(address);
                    Some(Provider::Cfssl {
                        endpoint,
                        profile,
                        label,
                        auth_key,
                        bundle,
                        headers: headers.clone(),
                    })
                }
                Some(ProviderName::GoogleCas) => {
                    in_plain_text("the access token goes", &address, &mut notes);
                    google_cas.clone().map(|settings| Provider::GoogleCas {
                        endpoint: endpoint(address),
                        settings,
                        token: token_settings.clone(),
                        headers: headers.clone(),
                    })
                }
                _ => None,
            };
            providers.extend(provider);
        }
        match name {
            Some(ProviderName::Exec) => providers.extend(exec),
            Some(ProviderName::Embedded) => {
                providers.push(Provider::Embedded { folder: ca_dir.or("./attache-ca").into() });
            }
            _ => {}
        }
        if let Some(state) = workload.state.as_ref().filter(|_| name == Some(ProviderName::None)) {
            let folder = state.path().display();
            notes.push(format!("--state-dir {folder} is not used: without a CA there is nothing to keep"));
        }

        let admin_socket = admin_socket(r, args, &socket);
        let status_address = r
            .parsed("status-address", &args.status_address, &[], parse_status_address)
            .or(Some(SocketAddr::from(([127, 0, 0, 1], 15055))));
        let drain_timeout =
            r.duration("drain-timeout", &args.drain_timeout, &[], Duration::ZERO).or(Duration::from_secs(5));
        let filter = r.parsed("log-level", &args.log_level, &["ATTACHE_LOG"], parse_filter);
        let json = r.parsed("log-format", &args.log_format, &[], parse_format).or(false);
        let info = Targets::new().with_default(tracing::Level::INFO);
        let log = LogConfig { filter: filter.or(info), json };

        let own_folders = output.iter().map(|output| output.folder.as_path());
        let own_folders = own_folders.chain(workload.state.iter().map(StateFolder::path));
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
            status_address,
            drain_timeout,
            log,
            notes,
        })
    }
}

/// The CAs that stand in for each other, in order; in the environment with "," between them.
fn addresses(
    r: &mut Reader<'_>,
    args: &RunArgs,
    provider: ProviderName,
    others: &[&str],
) -> reader::Found<Vec<Address>> {
    let typed = (!args.ca_address.is_empty()).then(|| args.ca_address.join(","));
    r.parsed("ca-address", &typed, others, |text| {
        let mut addresses = Vec::new();
        for one in text.split(',') {
            let address = provider.address(one.trim())?;
            if addresses.contains(&address) {
                return Err(format!("{address} is there twice; name each CA once"));
            }
            addresses.push(address);
        }
        Ok(addresses)
    })
}

/// User or group ids.
fn numbers(r: &mut Reader<'_>, flag: &str, typed: &[String]) -> Vec<u32> {
    let typed = (!typed.is_empty()).then(|| typed.join(","));
    let found = r.parsed(flag, &typed, &[], |text| {
        let number = |one: &str| one.trim().parse().map_err(|_| format!("{one:?} is not a number"));
        text.split(',').map(number).collect::<Result<Vec<u32>, _>>()
    });
    found.value.unwrap_or_default()
}

/// The folder for what is kept across restarts.
fn state(r: &mut Reader<'_>, args: &RunArgs) -> Option<StateFolder> {
    let folder = r.text("state-dir", &args.state_dir, &[]).value?;
    Some(StateFolder::new(std::path::absolute(&folder).unwrap_or_else(|_| folder.into())))
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

fn grace(r: &mut Reader<'_>, ratio: reader::Found<f64>, jitter: reader::Found<f64>) -> Grace {
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

/// Which provider the options ask for, and why. None where they ask for none that makes sense: that is a mistake then.
fn choose(
    r: &mut Reader<'_>,
    ca: reader::Found<ProviderName>,
    files_alone: &reader::Found<bool>,
    addresses: &reader::Found<Vec<Address>>,
    ca_dir: &reader::Found<String>,
    client_cert: &reader::Found<String>,
    mounted: &[Place],
) -> Option<(ProviderName, String)> {
    let only_files = files_alone.value == Some(true);
    let Some(name) = ca.value else {
        if ca.was_wrong || addresses.was_wrong || files_alone.was_wrong {
            return None;
        }
        if only_files {
            return Some((ProviderName::None, files_alone.from.clone()));
        }
        if addresses.value.is_some() {
            return Some((ProviderName::Citadel, addresses.from.clone()));
        }
        if client_cert.value.is_some() {
            r.mistake(format!("{} needs the CA's address: --ca-address HOST:PORT", client_cert.from));
            return None;
        }
        if let Some(folder) = mounted.iter().find(|place| place.holds_key_pair()).and_then(Place::home) {
            let reason = format!("no CA is configured, and {} holds a key pair", folder.display());
            return Some((ProviderName::None, reason));
        }
        let folder = mounted.first().and_then(Place::home).unwrap_or(Path::new("--cert-dir"));
        r.mistake(format!(
            "no CA is configured, and {} holds no key pair: choose with --ca one of {PROVIDERS}",
            folder.display()
        ));
        return None;
    };
    let clash = |level: Option<Level>| level.is_some() && level == ca.level;
    if only_files && name != ProviderName::None {
        if clash(files_alone.level) {
            r.mistake(format!(
                "{} and {} contradict each other: with the first no CA is used; drop one of them",
                files_alone.from, ca.from
            ));
        }
        if files_alone.level >= ca.level {
            return Some((ProviderName::None, files_alone.from.clone()));
        }
    }
    if !name.has_address() && clash(addresses.level) {
        r.mistake(format!(
            "{} and {} contradict each other: the first has no address; drop one of them",
            ca.from, addresses.from
        ));
    }
    if name != ProviderName::Citadel && clash(client_cert.level) {
        r.mistake(format!(
            "{} and {} contradict each other: only citadel takes a client certificate; drop one of them",
            ca.from, client_cert.from
        ));
    }
    if name != ProviderName::Embedded && clash(ca_dir.level) {
        r.mistake(format!(
            "{} and {} contradict each other: only embedded has a folder; drop one of them",
            ca.from, ca_dir.from
        ));
    }
    if name.has_address() && addresses.value.is_none() && !addresses.was_wrong {
        r.mistake(format!("{} needs the CA's address: --ca-address HOST:PORT", ca.from));
    }
    Some((name, ca.from))
}

/// Which CA was chosen, and on which level `--ca` was.
#[derive(Clone, Copy)]
struct Chosen {
    name: Option<ProviderName>,
    level: Option<Level>,
}

impl Chosen {
    /// Whether it is `own`, whose options these are. With another CA they are mistakes, unless that comes from a higher
    /// level.
    fn is(self, r: &mut Reader<'_>, own: (ProviderName, &str), options: &[(Option<Level>, &str)]) -> bool {
        // Where there is none, the report says so already.
        let Some(name) = self.name else { return false };
        if name == own.0 {
            return true;
        }
        let set = options.iter().filter(|(level, _)| level.is_some() && *level >= self.level);
        for (_, from) in set {
            r.mistake(format!("{from} is for --ca {} alone: add that, or drop it", own.1));
        }
        false
    }
}

/// Where mounted files are looked for. A folder of the agent's own files, links resolved, is none of these places: what
/// it writes must not come back as what it reads.
fn mounted(cert_dir: &reader::Found<String>, own: &[(&Path, &str)], notes: &mut Vec<String>) -> Vec<Place> {
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
    let typed = args.file_prefix.iter().map(String::as_str);
    let inherited = r.variable("ATTACHE_FILE_PREFIX").into_iter().flat_map(|all| all.split(':'));
    let prefixes: Vec<_> = if args.file_prefix.is_empty() { inherited.collect() } else { typed.collect() };
    if prefixes.iter().any(|prefix| prefix.is_empty()) {
        // An empty one would not limit anything, and that is not what somebody wants who sets it.
        r.mistake("--file-prefix is empty: name a folder, or leave it out to allow every path".to_owned());
    }
    prefixes.into_iter().map(PathBuf::from).collect()
}

/// Where the client certificate is, if it can be presented.
fn client_cert_folder(
    r: &mut Reader<'_>,
    client_cert: reader::Found<String>,
    provider: Option<ProviderName>,
    addresses: &reader::Found<Vec<Address>>,
    notes: &mut Vec<String>,
) -> Option<ClientCertFolder> {
    let folder = client_cert.value.filter(|_| provider == Some(ProviderName::Citadel))?;
    if !addresses.value.as_ref().is_some_and(|all| all.iter().all(|address| address.plaintext)) {
        return Some(ClientCertFolder::new(folder));
    }
    let words =
        format!("without TLS no client certificate can be presented, and {} is without", addresses.from);
    if client_cert.level == addresses.level {
        r.mistake(format!("{}: {words}; drop one of them", client_cert.from));
    } else {
        notes.push(format!("{} is not used: {words}", client_cert.from));
    }
    None
}

fn identity(
    r: &mut Reader<'_>,
    args: &RunArgs,
    token: &TokenFile,
    client_cert: &Option<ClientCertFolder>,
    provider: Option<ProviderName>,
) -> IdentitySource {
    let whole = r.parsed("spiffe-id", &args.spiffe_id, &[], str::parse::<SpiffeId>);
    let domain = r.text("trust-domain", &args.trust_domain, &["TRUST_DOMAIN"]);
    let namespace = r.text("namespace", &args.namespace, &["POD_NAMESPACE"]);
    let account = r.text("service-account", &args.service_account, &["SERVICE_ACCOUNT"]);
    for part in [&domain, &namespace, &account] {
        if whole.level.is_some() && whole.level == part.level {
            r.mistake(format!(
                "{} and {} contradict each other: the first is the whole identity; drop one of them",
                whole.from, part.from
            ));
        }
    }
    let is_named = domain.level.max(namespace.level).max(account.level);
    if let Some(identity) = whole.value.filter(|_| whole.level >= is_named) {
        return IdentitySource::Fixed(identity);
    }
    if provider == Some(ProviderName::GoogleCas) && domain.value.is_none() {
        // The service takes the name from the caller, in a trust domain that nobody knows here.
        for part in [&namespace, &account].into_iter().filter(|part| part.level > Some(Level::Istio)) {
            r.mistake(format!(
                "{} is not enough with --ca google-cas: add --trust-domain PROJECT.svc.id.goog, or drop it",
                part.from
            ));
        }
        return IdentitySource::Token {
            file: token.clone(),
            client_cert: None,
            // No identity follows without one.
            trust_domain: String::new(),
            namespace: None,
            service_account: None,
        };
    }
    let trust_domain = domain.or("cluster.local");
    let (mut namespace, mut account) = (namespace.value, account.value);
    if provider == Some(ProviderName::Embedded) {
        namespace = namespace.or(Some("default".to_owned()));
        account = account.or(Some("default".to_owned()));
    }
    // Said now, because later it would only show as a certificate that nobody asked for.
    let probe = crate::identity::ServiceAccount {
        namespace: namespace.clone().unwrap_or("namespace".to_owned()),
        name: account.clone().unwrap_or("account".to_owned()),
    };
    match SpiffeId::for_service_account(&trust_domain, &probe) {
        Ok(identity) if namespace.is_some() && account.is_some() => return IdentitySource::Fixed(identity),
        Ok(_) => {}
        Err(error) => r.mistake(format!("--trust-domain, --namespace and --service-account: {error}")),
    }
    IdentitySource::Token {
        file: token.clone(),
        client_cert: client_cert.clone(),
        trust_domain,
        namespace,
        service_account: account,
    }
}

fn roots(
    r: &mut Reader<'_>,
    args: &RunArgs,
    client_cert: &Option<ClientCertFolder>,
    provider: Option<ProviderName>,
) -> Roots {
    let is_kubernetes = provider == Some(ProviderName::Kubernetes);
    let is_google_cas = provider == Some(ProviderName::GoogleCas);
    let istios: &[&str] = if is_kubernetes || is_google_cas { &[] } else { &["CA_ROOT_CA"] };
    match r.text("ca-root", &args.ca_root, istios).value {
        Some(text) if text.eq_ignore_ascii_case("system") => Roots::System,
        Some(path) => Roots::File(path.into()),
        None if is_google_cas => Roots::System,
        None if is_kubernetes || r.variable("PILOT_CERT_PROVIDER") == Some("kubernetes") => {
            Roots::File(format!("{SERVICE_ACCOUNT_FOLDER}/ca.crt").into())
        }
        None => {
            let mut places: Vec<_> = client_cert.iter().map(ClientCertFolder::root_file).collect();
            places.extend(DEFAULT_ROOTS.map(PathBuf::from));
            Roots::FirstOf(places)
        }
    }
}

/// Flags `--ca-header K=V`, then variables `CA_HEADER_K`; the first of a name wins.
fn headers(r: &mut Reader<'_>, args: &RunArgs) -> Vec<Header> {
    const PREFIX: &str = "CA_HEADER_";
    let split = |from: &str, text: &'_ str| {
        let (name, value) = text.split_once('=').unwrap_or((text, ""));
        // The value may be a secret, and without "=" nobody knows where it starts.
        let shown = name.split([':', ' ']).next().unwrap_or_default();
        (format!("{from} {shown}"), name.to_owned(), value.to_owned())
    };
    let typed = args.ca_header.iter().map(|text| split("--ca-header", text));
    let own = r.variable("ATTACHE_CA_HEADER").map(|text| split("ATTACHE_CA_HEADER", text));
    let inherited = r.with_prefix(PREFIX).filter(|(_, value)| !value.is_empty());
    let inherited = inherited.map(|(variable, value)| {
        let name = variable.strip_prefix(PREFIX).unwrap_or(variable);
        (variable.to_owned(), name.to_owned(), value.to_owned())
    });
    let mut headers: Vec<Header> = Vec::new();
    for (from, name, value) in typed.chain(own).chain(inherited) {
        match (name.to_ascii_lowercase().parse(), value.parse::<MetadataValue<Ascii>>()) {
            (Ok(name), Ok(mut value)) if !value.is_empty() => {
                value.set_sensitive(true);
                if headers.iter().all(|(known, _)| *known != name) {
                    headers.push((name, value));
                }
            }
            _ => r.mistake(format!("{from}: the shape is NAME=VALUE, in ASCII, and not for a -bin name")),
        }
    }
    headers
}

fn parse_provider(text: &str) -> Result<ProviderName, String> {
    match text.to_ascii_lowercase().as_str() {
        "citadel" => Ok(ProviderName::Citadel),
        "vault" => Ok(ProviderName::Vault),
        "kubernetes" => Ok(ProviderName::Kubernetes),
        "cfssl" => Ok(ProviderName::Cfssl),
        // The second is Istio's spelling.
        "google-cas" | "googlecas" => Ok(ProviderName::GoogleCas),
        "exec" => Ok(ProviderName::Exec),
        "embedded" => Ok(ProviderName::Embedded),
        "none" => Ok(ProviderName::None),
        _ => Err(format!("{text:?} is not a CA of this agent; choose one of {PROVIDERS}")),
    }
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

fn parse_status_address(text: &str) -> Result<Option<SocketAddr>, String> {
    if text == "none" {
        return Ok(None);
    }
    let address = text.parse().map(Some);
    address.map_err(|_| format!("{text:?} is not an address; the shape is 127.0.0.1:15055, or none"))
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
