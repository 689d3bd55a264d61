//! The options of `--ca cfssl`.

use std::path::PathBuf;

use super::args::RunArgs;
use super::choice::{Chosen, ProviderName};
use super::reader::Reader;

/// What cfssl is told beside the address.
#[derive(Clone)]
pub(super) struct Options {
    pub(super) profile: Option<String>,
    pub(super) label: Option<String>,
    pub(super) auth_key: Option<PathBuf>,
    pub(super) bundle: Option<PathBuf>,
}

impl Options {
    pub(super) fn new(r: &mut Reader<'_>, args: &RunArgs, chosen: Chosen) -> Self {
        let [profile, label, auth_key, bundle] = [
            ("cfssl-profile", &args.cfssl_profile),
            ("cfssl-label", &args.cfssl_label),
            ("cfssl-auth-key-file", &args.cfssl_auth_key_file),
            ("cfssl-bundle", &args.cfssl_bundle),
        ]
        .map(|(flag, typed)| r.text(flag, typed, &[]));
        let all = [profile.set(), label.set(), auth_key.set(), bundle.set()];
        chosen.is(r, (ProviderName::Cfssl, "cfssl"), &all);
        Self {
            profile: profile.value,
            label: label.value,
            auth_key: auth_key.value.map(PathBuf::from),
            bundle: bundle.value.map(PathBuf::from),
        }
    }
}
