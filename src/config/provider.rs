//! What the client of each CA is told.

use std::path::{Path, PathBuf};
use std::time::Duration;

use tonic::metadata::{Ascii, MetadataValue};

use super::args::RunArgs;
use super::choice::{Chosen, Credentials, ProviderName, Wishes};
use super::reader::{Level, Reader};
use super::{SERVICE_ACCOUNT_FOLDER, cfssl, exec, google_cas, kubernetes, token, vault};
use crate::auth::client_cert::ClientCertFolder;
use crate::auth::token as ca_token;
use crate::auth::token_file::TokenFile;
use crate::ca::citadel::Header;
use crate::ca::google_cas as google_cas_ca;
use crate::ca::kubernetes::{SignerName, SignerRoots};
use crate::ca::vault as vault_ca;
use crate::net::endpoint::{Address, CA_OPTIONS, Endpoint, Protocol, Roots};
use crate::os::command::ShellCommand;
use crate::pki::key::KeyType;
use crate::source::issuer::IssuerSettings;

/// Where the CA's root is, unless somebody says otherwise or it came with the client certificate.
pub(super) const DEFAULT_ROOTS: [&str; 2] =
    ["/var/run/secrets/istio/root-cert.pem", "/etc/certs/root-cert.pem"];

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
        /// How long one call may take.
        timeout: Duration,
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

    /// Where it is on the network, and what is spoken there.
    pub fn endpoint(&self) -> Option<(&Endpoint, Protocol)> {
        match self {
            Self::Citadel { endpoint, .. } | Self::GoogleCas { endpoint, .. } => {
                Some((endpoint, Protocol::Http2))
            }
            Self::Vault { endpoint, .. }
            | Self::Kubernetes { endpoint, .. }
            | Self::Cfssl { endpoint, .. } => Some((endpoint, Protocol::Http1)),
            Self::Exec { .. } | Self::Embedded { .. } => None,
        }
    }

    /// Where the token for its calls comes from, where it takes one.
    pub fn token(&self) -> Option<ca_token::Settings> {
        match self {
            Self::Citadel { token, .. } | Self::GoogleCas { token, .. } => Some(token.clone()),
            Self::Kubernetes { token, .. } => Some(token.clone().into()),
            Self::Vault { settings, .. } => match &settings.access {
                vault_ca::Access::Login { jwt, .. } => Some(jwt.clone()),
                vault_ca::Access::Token(_) => None,
            },
            Self::Cfssl { .. } | Self::Exec { .. } | Self::Embedded { .. } => None,
        }
    }

    /// The client certificate that is presented where the CA asks for one.
    pub fn client_cert(&self) -> Option<&ClientCertFolder> {
        match self {
            Self::Citadel { client_cert, .. } => client_cert.as_ref(),
            _ => None,
        }
    }

    /// Further files that are read for each call.
    pub fn files(&self) -> Vec<ProviderFile<'_>> {
        let key = |option, path| ProviderFile { option, path, is_pem: false };
        let roots = |option, path| ProviderFile { option, path, is_pem: true };
        let mut files = Vec::new();
        match self {
            Self::Vault { settings, .. } => {
                if let vault_ca::Access::Token(file) = &settings.access {
                    files.push(key("--vault-token-file", file.path()));
                }
                files.extend(settings.roots.as_deref().map(|path| roots("--vault-root", path)));
            }
            Self::Kubernetes { roots: SignerRoots::File(path), .. } => {
                files.push(roots("--kubernetes-root", path));
            }
            Self::Cfssl { auth_key, bundle, .. } => {
                files.extend(auth_key.as_deref().map(|path| key("--cfssl-auth-key-file", path)));
                files.extend(bundle.as_deref().map(|path| roots("--cfssl-bundle", path)));
            }
            _ => {}
        }
        files
    }
}

/// A file that a client of a CA reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProviderFile<'a> {
    /// The option that names it.
    pub option: &'static str,
    /// Where it is.
    pub path: &'a Path,
    /// It holds certificates.
    pub is_pem: bool,
}

/// The clients of the CAs, in order. Where a choice, or what the chosen one needs, is missing, that is among the mistakes.
pub(super) fn providers(
    r: &mut Reader<'_>,
    args: &RunArgs,
    chosen: Chosen,
    wishes: Wishes,
    credentials: &Credentials,
    workload: &IssuerSettings,
    notes: &mut Vec<String>,
) -> Vec<Provider> {
    let exec = exec::options(r, args, chosen);
    let cfssl = cfssl::Options::new(r, args, chosen);
    let google_cas = google_cas::settings(r, args, chosen);
    let Credentials { token, client_cert, .. } = credentials;
    let token_settings = token::settings(r, args, chosen, credentials, workload.timeout, notes);
    let vault = vault::settings(r, args, chosen, &token_settings);
    let kubernetes = kubernetes::options(r, args, chosen, workload, notes);
    let name = chosen.name.unwrap_or(ProviderName::None);
    let roots = roots(r, args, client_cert, name);
    let server_name = r.text("ca-server-name", &args.ca_server_name, name.istios(&["ISTIOD_SAN"])).value;
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
    match name {
        ProviderName::Exec => return exec.into_iter().collect(),
        ProviderName::Embedded => {
            return vec![Provider::Embedded { folder: wishes.ca_dir.or("./attache-ca").into() }];
        }
        ProviderName::None => return Vec::new(),
        _ => {}
    }
    let client = |address: Address| {
        let is_plain = address.plaintext;
        let mut in_plain_text = |what: &str| {
            if is_plain {
                notes.push(format!("{what} to {address} in plain text"));
            }
        };
        match name {
            ProviderName::Citadel => in_plain_text("the workload's token goes"),
            ProviderName::Vault => in_plain_text("the workload's token and Vault's go"),
            ProviderName::Kubernetes => in_plain_text("the service account's token goes"),
            ProviderName::GoogleCas => in_plain_text("the access token goes"),
            ProviderName::Cfssl if is_plain && cfssl.bundle.is_none() => notes.push(format!(
                "what {address} says in plain text is trusted: whoever is on the way there can be anybody's CA; use \
                 https://, or name the roots with --cfssl-bundle"
            )),
            _ => {}
        }
        let (roots, server_name, headers) = (roots.clone(), server_name.clone(), headers.clone());
        let endpoint = Endpoint { address, roots, server_name, options: CA_OPTIONS };
        match name {
            ProviderName::Citadel => Some(Provider::Citadel {
                endpoint,
                token: token_settings.clone(),
                client_cert: client_cert.clone(),
                cluster_id: cluster_id.clone(),
                headers,
                cert_signer: cert_signer.value.clone(),
                timeout: workload.timeout,
            }),
            ProviderName::Vault => {
                vault.clone().map(|settings| Provider::Vault { endpoint, settings, headers })
            }
            ProviderName::Kubernetes => kubernetes.clone().map(|(signer, roots)| Provider::Kubernetes {
                endpoint,
                token: token.clone(),
                signer,
                roots,
                key_type: workload.key_type,
            }),
            ProviderName::Cfssl => {
                let cfssl::Options { profile, label, auth_key, bundle } = cfssl.clone();
                Some(Provider::Cfssl { endpoint, profile, label, auth_key, bundle, headers })
            }
            ProviderName::GoogleCas => google_cas.clone().map(|settings| Provider::GoogleCas {
                endpoint,
                settings,
                token: token_settings.clone(),
                headers,
                timeout: workload.timeout,
            }),
            ProviderName::Exec | ProviderName::Embedded | ProviderName::None => None,
        }
    };
    wishes.addresses.value.unwrap_or_default().into_iter().filter_map(client).collect()
}

fn roots(
    r: &mut Reader<'_>,
    args: &RunArgs,
    client_cert: &Option<ClientCertFolder>,
    provider: ProviderName,
) -> Roots {
    match r.text("ca-root", &args.ca_root, provider.istios(&["CA_ROOT_CA"])).value {
        Some(text) if text.eq_ignore_ascii_case("system") => Roots::System,
        Some(path) => Roots::File(path.into()),
        None if provider == ProviderName::GoogleCas => Roots::System,
        None if provider == ProviderName::Kubernetes
            || r.variable("PILOT_CERT_PROVIDER") == Some("kubernetes") =>
        {
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
