//! Which CA is used, and why.

use std::path::Path;

use super::args::RunArgs;
use super::files::holds_key_pair;
use crate::ca::citadel;
use crate::ca::provider::{CaNetwork, Choice, ProviderKind, Selection};
use crate::ca::providers::{self, ISTIO, choices, parse_choice};
use crate::fs::generation::Place;
use crate::net::address::Address;
use crate::options::{Reader, Setting};

/// Why there is no CA, and no mounted file is expected.
pub(super) const SECRETS_ALONE: &str = "no CA is configured: only Secrets of Kubernetes are served";

/// The options that select the provider.
pub(super) struct ProviderOptions {
    ca: Setting<Choice>,
    files_only: Setting<bool>,
    pub(super) addresses: Setting<Vec<Address>>,
    pub(super) client_cert: Setting<String>,
}

impl ProviderOptions {
    pub(super) fn new(r: &mut Reader<'_>, args: &RunArgs) -> Self {
        let files_only = r.switch("file-mounted-certs", args.file_mounted_certs, &["FILE_MOUNTED_CERTS"]);
        let ca = r.parsed("ca", &args.ca, &["CA_PROVIDER"], parse_choice);
        let kind = match ca.value {
            None => Some(ISTIO),
            Some(Choice::Ca(kind)) => Some(kind),
            Some(Choice::Files | Choice::WorkloadApi) => None,
        };
        Self {
            addresses: addresses(r, args, kind),
            client_cert: r.text("ca-client-cert-dir", &args.ca_client_cert_dir, &["PROV_CERT"]),
            ca,
            files_only,
        }
    }

    /// The provider that these options select. If that is nothing valid, it is a mistake. `mounted` is where files are
    /// looked for. With another source of secrets, no CA is needed.
    pub(super) fn select(&self, r: &mut Reader<'_>, mounted: &[Place], has_other_source: bool) -> Selection {
        let level = self.ca.level;
        if let Some(choice) = self.ca.value {
            return self.judge(r, choice);
        }
        match self.infer(r, mounted, has_other_source) {
            Some((choice, reason)) => Selection { choice: Some(choice), level, named: None, reason },
            None => Selection { choice: None, level, named: None, reason: String::new() },
        }
    }

    /// The provider without a valid `--ca`, and why.
    fn infer(
        &self,
        r: &mut Reader<'_>,
        mounted: &[Place],
        has_other_source: bool,
    ) -> Option<(Choice, String)> {
        let Self { ca, files_only, addresses, client_cert } = self;
        if ca.is_invalid || addresses.is_invalid || files_only.is_invalid {
            return None;
        }
        if files_only.value == Some(true) && files_only.level >= addresses.level {
            return Some((Choice::Files, files_only.from.clone()));
        }
        if addresses.value.is_some() {
            return Some((Choice::Ca(ISTIO), addresses.from.clone()));
        }
        if client_cert.value.is_some() {
            r.mistake(format!("{} needs the CA's address: --ca-address HOST:PORT", client_cert.from));
            return None;
        }
        for place in mounted {
            let why = match holds_key_pair(place) {
                Some(true) => "holds a key pair",
                Some(false) => continue,
                None => "is on a file system that does not answer",
            };
            let directory = place.home().unwrap_or(Path::new("--cert-dir")).display();
            return Some((Choice::Files, format!("no CA is configured, and {directory} {why}")));
        }
        if has_other_source {
            return Some((Choice::Files, SECRETS_ALONE.to_owned()));
        }
        let directory = mounted.first().and_then(Place::home).unwrap_or(Path::new("--cert-dir"));
        r.mistake(format!(
            "no CA is configured, and {} holds no key pair: choose with --ca one of {}",
            directory.display(),
            choices()
        ));
        None
    }

    /// The provider with `--ca`, unless a stronger option overrides it.
    fn judge(&self, r: &mut Reader<'_>, choice: Choice) -> Selection {
        let Self { ca, files_only, addresses, client_cert } = self;
        if files_only.value == Some(true) && choice != Choice::Files {
            if files_only.level == ca.level {
                r.mistake(format!(
                    "{} and {} contradict each other: with the first no CA is used; drop one of them",
                    files_only.from, ca.from
                ));
            }
            if files_only.level >= ca.level {
                let (level, reason) = (files_only.level, files_only.from.clone());
                return Selection { choice: Some(Choice::Files), level, named: None, reason };
            }
        }
        let (named, reason) = (Some(ca.from.clone()), ca.from.clone());
        let selection = Selection { choice: Some(choice), level: ca.level, named, reason };
        let kind = selection.ca();
        let has_address = kind.is_some_and(|kind| kind.network.is_some());
        if !has_address {
            selection.contradict(r, addresses.set_by(), "the first has no address");
        }
        if !kind.is_some_and(|kind| kind.takes_client_cert) {
            let takers = providers::names(|kind| kind.takes_client_cert);
            let why = format!("only {takers} takes a client certificate");
            selection.contradict(r, client_cert.set_by(), &why);
        }
        if has_address && addresses.is_missing() {
            r.mistake(format!("{} needs the CA's address: --ca-address HOST:PORT", ca.from));
        }
        selection
    }
}

/// `variables` of Istio's, if they describe this CA, too.
pub(super) fn istios(
    kind: Option<&ProviderKind>,
    variables: &'static [&'static str],
) -> &'static [&'static str] {
    match kind.and_then(|kind| kind.network.as_ref()) {
        Some(CaNetwork { has_istio_variables: false, .. }) => &[],
        _ => variables,
    }
}

/// The CAs that stand in for each other, in order; in the environment separated by ",".
fn addresses(r: &mut Reader<'_>, args: &RunArgs, kind: Option<&ProviderKind>) -> Setting<Vec<Address>> {
    let network = kind.and_then(|kind| kind.network.as_ref());
    // Without a network they are only read to be refused.
    let parse = network.or(ISTIO.network.as_ref()).map(|network| network.parse_address);
    let mut seen = Vec::new();
    let mut addresses = r.list("ca-address", &args.ca_address, istios(kind, &["CA_ADDR"]), ',', |text| {
        let address = parse.map_or_else(|| citadel::address(text), |parse| parse(text))?;
        if seen.contains(&address) {
            return Err(format!("{address} is named twice; name each CA once"));
        }
        seen.push(address.clone());
        Ok(address)
    });
    if addresses.is_missing() {
        let default = network.and_then(|network| (network.default_address)(r));
        addresses.value = default.map(|address| vec![address]);
    }
    addresses
}
