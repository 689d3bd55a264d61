//! The option for certificates of hosts.

use super::args::RunArgs;
use crate::ca::provider::{Choice, NameUse, Selection};
use crate::options::Reader;
use crate::source::issuer::IdentitySource;
use crate::source::mint::{MintSettings, Suffix};

/// The hosts that get certificates. A CA that issues no DNS names is a mistake.
pub(super) fn mint(
    r: &mut Reader<'_>,
    args: &RunArgs,
    selection: &Selection,
    identity: &IdentitySource,
) -> Option<MintSettings> {
    let suffixes = r.list("mint-suffix", &args.mint_suffix, &[], ',', str::parse::<Suffix>);
    if suffixes.is_missing() {
        return None;
    }
    let from = &suffixes.from;
    match selection.choice {
        Some(Choice::Files) => r.mistake(format!(
            "{from}: without a CA there are no certificates for hosts; choose one with --ca, or drop it"
        )),
        Some(Choice::WorkloadApi) => r.mistake(format!(
            "{from}: a SPIFFE endpoint issues no certificates for hosts; choose a CA with --ca, or drop it"
        )),
        Some(Choice::Ca(kind)) => match kind.names {
            NameUse::Requested => {}
            NameUse::WithIdentity if *identity == IdentitySource::Unknown => r.mistake(format!(
                "{from} needs --spiffe-id with --ca {}: the CA takes all names from the request then, or none",
                kind.name
            )),
            NameUse::WithIdentity => {}
            NameUse::Ignored { why } => r.mistake(format!(
                "{from} is not possible with --ca {}: {why}; drop it, or choose another CA",
                kind.name
            )),
        },
        // Which is in the report already.
        None => {}
    }
    suffixes.value.map(|suffixes| MintSettings { suffixes })
}
