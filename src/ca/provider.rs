//! What a CA provider consists of besides its client: facts, options, checks, and how the client is built. Each
//! provider's stand in one file beside its client (`vault/options.rs`), and one line of the table in `providers.rs`
//! names it.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::failover::Member;
use crate::auth::client_cert::ClientCertDir;
use crate::auth::token;
use crate::auth::token_file::{Token, TokenFile};
use crate::base::clock::Clock;
use crate::fs::disk::Disk;
use crate::net::Header;
use crate::net::address::Address;
use crate::net::endpoint::{Endpoint, Protocol};
use crate::net::tls::Roots;
use crate::options::{Level, Reader, SetBy, Setting};
use crate::pki::key::KeyType;

/// Headers of every call to a CA.
pub type Headers = Vec<Header>;

/// The facts about a provider that options shared by all providers depend on.
#[derive(Debug)]
pub struct ProviderKind {
    /// The name that `--ca` takes.
    pub name: &'static str,
    /// Another spelling of the name, Istio's.
    pub alias: Option<&'static str>,
    /// What follows the name in the list of choices.
    pub summary: &'static str,
    /// How the CA is found on the network; none if it is not on the network.
    pub network: Option<CaNetwork>,
    pub token: TokenUse,
    pub identity: IdentityDefault,
    pub takes_client_cert: bool,
    pub names: NameUse,
}

impl PartialEq for ProviderKind {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

/// How a CA is found on the network, and trusted.
#[derive(Debug)]
pub struct CaNetwork {
    /// Parses `--ca-address`: providers differ in their default ports.
    pub parse_address: fn(&str) -> Result<Address, String>,
    /// The address without `--ca-address`.
    pub default_address: fn(&Reader<'_>) -> Option<Address>,
    /// Whether Istio's `CA_ADDR`, `CA_ROOT_CA` and `ISTIOD_SAN` describe this CA, too.
    pub has_istio_variables: bool,
    pub default_roots: DefaultRoots,
}

/// The roots for the CA's TLS certificate without `--ca-root`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DefaultRoots {
    /// `root-cert.pem` of the client certificate directory, then the places where Istio mounts it.
    Istio,
    /// `ca.crt` of the service-account mount.
    ServiceAccount,
    System,
}

/// The bearer token that calls carry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenUse {
    None,
    /// The token of the service-account mount, or of `--token-file`.
    ServiceAccount,
    /// What `--token-source` selects.
    Source {
        /// URL and scope of the token service, where none are given.
        exchange: Option<(&'static str, &'static str)>,
        metadata: MetadataToken,
        /// Audience of a service account's token that the CA itself takes, as its page in the documentation sets it up.
        audience: Option<&'static str>,
    },
}

/// The token that is requested from Google's metadata server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetadataToken {
    /// An access token. It is also the default source if there is no `--token-file`.
    Access,
    /// An identity token, with its audience where `--gce-audience` is not set.
    Identity { audience: Option<&'static str> },
}

/// The identity if neither the options nor a token name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IdentityDefault {
    /// Namespace and service account come from the token.
    Token,
    /// This namespace and this service account.
    Account { namespace: &'static str, name: &'static str },
    /// The CA takes the identity from the caller, in a trust domain that the agent does not know.
    Caller {
        /// The shape of its trust domains.
        trust_domain: &'static str,
    },
}

/// What becomes of names that are requested besides the identity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NameUse {
    /// The CA can issue them.
    Requested,
    /// The CA can issue them, but no longer names the caller by itself then: the options must name the identity.
    WithIdentity,
    /// The CA ignores them, or refuses a CSR with them.
    Ignored {
        /// Why, for the user.
        why: &'static str,
    },
}

/// Where certificates come from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Choice {
    /// Mounted files alone: `--ca none`.
    Files,
    /// A SPIFFE Workload API, with their keys: `--ca spiffe`.
    WorkloadApi,
    Ca(&'static ProviderKind),
}

/// The provider that the options select.
#[derive(Clone, Debug)]
pub struct Selection {
    /// None if the options select nothing valid, which is in the report already.
    pub choice: Option<Choice>,
    /// The level of the option that decided: `--ca`, or a stronger `--file-mounted-certs`.
    pub level: Option<Level>,
    /// `--ca` as it was set, if that was decisive.
    pub named: Option<String>,
    /// The option or fact that was decisive, for logs.
    pub reason: String,
}

impl Selection {
    /// The selected CA.
    pub fn ca(&self) -> Option<&'static ProviderKind> {
        match self.choice? {
            Choice::Files | Choice::WorkloadApi => None,
            Choice::Ca(kind) => Some(kind),
        }
    }

    /// Whether `kind` is selected, whose options these are. With another one they are mistakes, unless the selection
    /// comes from a higher level.
    pub fn is(&self, kind: &ProviderKind, r: &mut Reader<'_>, options: &[SetBy<'_>]) -> bool {
        if self.choice.is_none() {
            return false;
        }
        let is_selected = self.ca() == Some(kind);
        for (_, from) in options.iter().filter(|(level, _)| !is_selected && self.judges(*level)) {
            r.mistake(format!("{from} is for --ca {} alone: add that, or drop it", kind.name));
        }
        is_selected
    }

    /// Whether an option of this level is judged against the selection: a lower one is silenced by it.
    pub fn judges(&self, level: Option<Level>) -> bool {
        level.is_some() && level >= self.level
    }

    /// Reports an option of the same level as `--ca` that contradicts it; `why` continues the sentence.
    pub fn contradict(&self, r: &mut Reader<'_>, (level, from): SetBy<'_>, why: &str) {
        if let Some(ca) = self.named.as_ref().filter(|_| level.is_some() && level == self.level) {
            r.mistake(format!("{ca} and {from} contradict each other: {why}; drop one of them"));
        }
    }
}

/// The options that all providers share.
#[derive(Clone, Debug)]
pub struct SharedOptions {
    pub selection: Selection,
    /// CAs that stand in for each other, in order.
    pub addresses: Vec<Address>,
    pub roots: Roots,
    pub server_name: Option<String>,
    pub headers: Headers,
    /// The source of the bearer token.
    pub token: token::TokenSettings,
    /// The file of the bearer token.
    pub token_file: TokenFile,
    pub client_cert: Option<ClientCertDir>,
    /// Whether a node's agent requests the certificates of all workloads with its own credential (`--ca-impersonate`).
    pub impersonates: bool,
    /// How long one call may take.
    pub timeout: Duration,
    pub key_type: KeyType,
    /// The lifetime that is requested.
    pub ttl: Duration,
    /// `--cert-ttl`, if it is not Istio's variable that sets it.
    pub ttl_option: Option<String>,
}

impl SharedOptions {
    pub fn endpoints(&self) -> impl Iterator<Item = Endpoint> {
        self.addresses.iter().map(|address| Endpoint {
            address: address.clone(),
            roots: self.roots.clone(),
            server_name: self.server_name.clone(),
        })
    }

    pub fn plaintext_addresses(&self) -> impl Iterator<Item = &Address> {
        self.addresses.iter().filter(|address| address.plaintext)
    }

    /// Warns that `credential` is sent without TLS.
    pub fn note_plaintext(&self, r: &mut Reader<'_>, credential: &str) {
        for address in self.plaintext_addresses() {
            r.note(format!("{credential} to {address} in plain text"));
        }
    }
}

/// The command-line options of one provider (a [`clap::Args`]), and what they are read into.
pub trait ProviderArgs {
    type Provider: ConfiguredProvider;
    const KIND: &'static ProviderKind;

    /// The CAs that the options name, in order. If another provider is selected, there are none, and its own options
    /// may be mistakes.
    fn read(&self, r: &mut Reader<'_>, shared: &SharedOptions) -> Vec<Self::Provider>;
}

/// One configured CA.
pub trait ConfiguredProvider: fmt::Debug {
    fn kind(&self) -> &'static ProviderKind;

    /// The name in logs, metrics and status, which tells CAs of one kind apart.
    fn name(&self) -> String {
        let address = self.endpoint().map(|(endpoint, _)| endpoint.address.to_string());
        address.unwrap_or_else(|| self.kind().name.to_owned())
    }

    /// The client, which reads its files by `disk`.
    fn client(&self, clock: &Clock, disk: &Disk) -> Result<Member, ClientError>;

    fn endpoint(&self) -> Option<(&Endpoint, Protocol)> {
        None
    }

    /// The source of the bearer token, if calls carry one.
    fn token(&self) -> Option<token::TokenSettings> {
        None
    }

    /// A likely reason for the CA to refuse this token, for `attache check`.
    fn token_hint(&self, _token: &Token) -> &'static str {
        ""
    }

    /// The client certificate that is presented if the CA requests one.
    fn client_cert(&self) -> Option<&ClientCertDir> {
        None
    }

    /// Further files that the client reads for each call.
    fn files(&self) -> Vec<ProviderFile<'_>> {
        Vec::new()
    }

    /// The directory that the client writes to.
    fn directory(&self) -> Option<&Path> {
        None
    }

    /// Whether the client runs commands.
    fn runs_commands(&self) -> bool {
        false
    }

    /// What `attache check` says of a CA that is not on the network, or an error. `writable` says why files can't be
    /// created in a directory.
    fn check(
        &self,
        _clock: &Clock,
        _writable: fn(&Path) -> Result<(), String>,
    ) -> Option<Result<String, String>> {
        None
    }
}

/// Why a client can't be built.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct ClientError(pub String);

/// A file that a client reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProviderFile<'a> {
    /// The option that names it.
    pub option: &'static str,
    pub path: &'a Path,
    /// Certificates in PEM, rather than a credential.
    pub is_pem: bool,
}

impl<'a> ProviderFile<'a> {
    pub fn credential(option: &'static str, path: &'a Path) -> Self {
        Self { option, path, is_pem: false }
    }

    pub fn certificates(option: &'static str, path: &'a Path) -> Self {
        Self { option, path, is_pem: true }
    }
}

/// The path in `setting`.
pub fn path(setting: Setting<String>) -> Option<PathBuf> {
    setting.value.map(PathBuf::from)
}
