//! Which CA is used, and what it is called with.

use std::path::Path;

use super::args::RunArgs;
use super::reader::{Found, Level, Reader};
use super::{SERVICE_ACCOUNT_FOLDER, kubernetes};
use crate::auth::client_cert::ClientCertFolder;
use crate::auth::token_file::TokenFile;
use crate::ca::{cfssl as cfssl_ca, citadel as citadel_ca, google_cas as google_cas_ca, vault as vault_ca};
use crate::fs::generation::Place;
use crate::net::endpoint::Address;

/// The providers by the names that `--ca` takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ProviderName {
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
            _ => citadel_ca::address(text),
        }
    }

    /// Those of `variables`, Istio's, that tell of this CA, too: they are about Istio's.
    pub(super) fn istios(self, variables: &'static [&'static str]) -> &'static [&'static str] {
        if matches!(self, Self::Kubernetes | Self::GoogleCas) { &[] } else { variables }
    }

    /// Where it is, unless somebody says otherwise.
    fn default_address(self, r: &Reader<'_>) -> Option<Address> {
        match self {
            Self::Kubernetes => kubernetes::in_cluster(r),
            Self::GoogleCas => self.address(google_cas_ca::HOST).ok(),
            _ => None,
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

/// The options that decide which CA is used.
pub(super) struct Wishes {
    pub(super) ca: Found<ProviderName>,
    pub(super) files_alone: Found<bool>,
    pub(super) addresses: Found<Vec<Address>>,
    pub(super) ca_dir: Found<String>,
    pub(super) client_cert: Found<String>,
}

impl Wishes {
    pub(super) fn new(r: &mut Reader<'_>, args: &RunArgs) -> Self {
        let files_alone = r.switch("file-mounted-certs", args.file_mounted_certs, &["FILE_MOUNTED_CERTS"]);
        let ca = r.parsed("ca", &args.ca, &["CA_PROVIDER"], parse_provider);
        Self {
            addresses: addresses(r, args, ca.value.unwrap_or(ProviderName::Citadel)),
            ca_dir: r.text("ca-dir", &args.ca_dir, &[]),
            client_cert: r.text("ca-client-cert-dir", &args.ca_client_cert_dir, &["PROV_CERT"]),
            ca,
            files_alone,
        }
    }

    /// Which provider they ask for, and why. None where they ask for none that makes sense: that is a mistake then.
    pub(super) fn choose(&self, r: &mut Reader<'_>, mounted: &[Place]) -> Option<(ProviderName, String)> {
        let Self { ca, files_alone, addresses, ca_dir, client_cert } = self;
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
        Some((name, ca.from.clone()))
    }
}

/// Which CA was chosen, and on which level `--ca` was.
#[derive(Clone, Copy)]
pub(super) struct Chosen {
    pub(super) name: Option<ProviderName>,
    pub(super) level: Option<Level>,
}

impl Chosen {
    /// Whether it is `own`, whose options these are. With another CA they are mistakes, unless that comes from a higher
    /// level.
    pub(super) fn is(
        self,
        r: &mut Reader<'_>,
        own: (ProviderName, &str),
        options: &[(Option<Level>, &str)],
    ) -> bool {
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

/// The CAs that stand in for each other, in order; in the environment with "," between them.
fn addresses(r: &mut Reader<'_>, args: &RunArgs, provider: ProviderName) -> Found<Vec<Address>> {
    let mut seen = Vec::new();
    let mut addresses = r.list("ca-address", &args.ca_address, provider.istios(&["CA_ADDR"]), ',', |text| {
        let address = provider.address(text)?;
        if seen.contains(&address) {
            return Err(format!("{address} is there twice; name each CA once"));
        }
        seen.push(address.clone());
        Ok(address)
    });
    if addresses.value.is_none() && !addresses.was_wrong {
        addresses.value = provider.default_address(r).map(|address| vec![address]);
    }
    addresses
}

/// What a CA is called with.
pub(super) struct Credentials {
    pub(super) token: TokenFile,
    /// Somebody named it.
    pub(super) is_token_named: bool,
    pub(super) client_cert: Option<ClientCertFolder>,
}

impl Credentials {
    pub(super) fn new(
        r: &mut Reader<'_>,
        args: &RunArgs,
        wishes: &Wishes,
        provider: Option<ProviderName>,
        notes: &mut Vec<String>,
    ) -> Self {
        let is_kubernetes = provider == Some(ProviderName::Kubernetes);
        let default = if is_kubernetes || r.variable("JWT_POLICY") == Some("first-party-jwt") {
            format!("{SERVICE_ACCOUNT_FOLDER}/token")
        } else {
            "/var/run/secrets/tokens/istio-token".to_owned()
        };
        let token = r.text("token-file", &args.token_file, &[]);
        Self {
            is_token_named: token.value.is_some(),
            token: TokenFile::new(token.or(default)),
            client_cert: client_cert_folder(r, wishes, provider, notes),
        }
    }
}

/// Where the client certificate is, if it can be presented.
fn client_cert_folder(
    r: &mut Reader<'_>,
    wishes: &Wishes,
    provider: Option<ProviderName>,
    notes: &mut Vec<String>,
) -> Option<ClientCertFolder> {
    let Wishes { client_cert, addresses, .. } = wishes;
    let folder = client_cert.value.as_ref().filter(|_| provider == Some(ProviderName::Citadel))?;
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
