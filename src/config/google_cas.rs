//! The options of `--ca google-cas`.

use super::args::RunArgs;
use super::choice::{Chosen, ProviderName};
use super::reader::{Level, Reader};
use crate::ca::google_cas::{CaId, CaPool, Settings};

/// What to ask of the service; none where the provider is another one, or something is missing, which is among the
/// mistakes then.
pub(super) fn settings(r: &mut Reader<'_>, args: &RunArgs, chosen: Chosen) -> Option<Settings> {
    // Istio's agent takes the pool for an address. Where Istio's variables name another CA, it is not the pool's.
    let is_istios = chosen.name == Some(ProviderName::GoogleCas) && chosen.level == Some(Level::Istio);
    let istios: &[&str] = if is_istios { &["CA_ADDR"] } else { &[] };
    let pool = r.parsed("google-cas-pool", &args.google_cas_pool, istios, str::parse::<CaPool>);
    let ca = r.parsed("google-cas-ca", &args.google_cas_ca, &[], str::parse::<CaId>);
    if !chosen.is(r, (ProviderName::GoogleCas, "google-cas"), &[pool.set(), ca.set()]) {
        return None;
    }
    if pool.value.is_none() && !pool.was_wrong {
        r.mistake(
            "--ca google-cas needs the CA pool: --google-cas-pool projects/PROJECT/locations/LOCATION/caPools/POOL"
                .to_owned(),
        );
    }
    Some(Settings { pool: pool.value?, ca: ca.value })
}
