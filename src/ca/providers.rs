//! The providers. A new one is a file beside its client, a line in this table, a `pub mod` line in `mod.rs`, and a page
//! in `docs/`.

use std::ops::Deref;

use super::failover::Failover;
use super::provider::{
    Choice, ClientError, ConfiguredProvider, ProviderArgs, ProviderKind, SharedOptions, TokenUse,
};
use crate::base::clock::Clock;
use crate::fs::disk::Disk;
use crate::options::Reader;

/// Generates what depends on all providers from one line for each.
macro_rules! providers {
    ($($module:ident: $Variant:ident($Args:ident),)*) => {
        /// The command-line options of every provider.
        #[derive(clap::Args, Clone, Debug, Default)]
        pub struct AllProviderArgs {
            $(#[command(flatten)] pub $module: super::$module::options::$Args,)*
        }

        /// One configured CA.
        #[derive(Clone, Debug)]
        pub enum Provider {
            $($Variant(<super::$module::options::$Args as ProviderArgs>::Provider),)*
        }

        const KINDS: &[&ProviderKind] = &[$(super::$module::options::$Args::KIND,)*];

        impl AllProviderArgs {
            /// The CAs in order. Options of providers that are not selected are mistakes.
            pub fn read(&self, r: &mut Reader<'_>, shared: &SharedOptions) -> Vec<Provider> {
                let mut providers = Vec::new();
                $(providers.extend(self.$module.read(r, shared).into_iter().map(Provider::$Variant));)*
                providers
            }
        }

        impl Deref for Provider {
            type Target = dyn ConfiguredProvider;

            fn deref(&self) -> &Self::Target {
                match self {
                    $(Self::$Variant(provider) => provider,)*
                }
            }
        }
    };
}

// module: variant(arguments)
providers! {
    citadel: Citadel(CitadelArgs),
    vault: Vault(VaultArgs),
    kubernetes: Kubernetes(KubernetesArgs),
    cfssl: Cfssl(CfsslArgs),
    google_cas: GoogleCas(GoogleCasArgs),
    exec: Exec(ExecArgs),
    embedded: Embedded(EmbeddedArgs),
}

/// The default if there is an address, and whose rules an address follows while no provider is known.
pub const ISTIO: &ProviderKind = super::citadel::options::CitadelArgs::KIND;

/// What `--ca` names; the error lists the choices.
pub fn parse_choice(text: &str) -> Result<Choice, String> {
    let name = text.to_ascii_lowercase();
    let is_named = |kind: &&&ProviderKind| kind.name == name || kind.alias == Some(name.as_str());
    match KINDS.iter().find(is_named) {
        Some(kind) => Ok(Choice::Ca(kind)),
        None if name == "none" => Ok(Choice::Files),
        None if name == "spiffe" => Ok(Choice::WorkloadApi),
        None => Err(format!("{text:?} is not a CA of this agent; choose one of {}", choices())),
    }
}

/// The names for `--ca`, with what they stand for.
pub fn choices() -> String {
    let choices = KINDS.iter().map(|kind| format!("{} ({})", kind.name, kind.summary));
    let without = [
        "spiffe (no CA: identity and key come from SPIRE's agent or another Workload API)",
        "none (mounted files alone)",
    ];
    choices.chain(without.map(str::to_owned)).collect::<Vec<_>>().join(", ")
}

/// The names of the providers of which `is_meant` is true.
pub fn names(is_meant: impl Fn(&ProviderKind) -> bool) -> String {
    let names: Vec<_> = KINDS.iter().filter(|kind| is_meant(kind)).map(|kind| kind.name).collect();
    names.join(", ")
}

/// The names of the providers whose token `--token-source` selects.
pub fn names_of_token_takers() -> String {
    names(|kind| matches!(kind.token, TokenUse::Source { .. }))
}

/// The clients of all CAs, in order. They read their files by `disk`.
pub fn clients(providers: &[Provider], clock: &Clock, disk: &Disk) -> Result<Failover, ClientError> {
    let members = providers.iter().map(|provider| provider.client(clock, disk));
    Ok(Failover::new(members.collect::<Result<_, _>>()?))
}
