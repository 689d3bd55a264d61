//! Where the bearer token comes from.

use std::time::Duration;

use super::args::RunArgs;
use super::choice::{Chosen, Credentials, ProviderName};
use super::reader::Reader;
use crate::auth::exchange::{Exchange, GOOGLES_SCOPE, GOOGLES_URL, Url};
use crate::auth::metadata_server::{self, MetadataServer, Wanted};
use crate::auth::token::{Service, Settings};
use crate::ca::citadel;
use crate::net::endpoint::{Address, Roots};

/// `--token-source`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    File,
    Exchange,
    Gce,
}

/// Where the token comes from, for a CA that takes one.
pub(super) fn settings(
    r: &mut Reader<'_>,
    args: &RunArgs,
    chosen: Chosen,
    credentials: &Credentials,
    timeout: Duration,
    notes: &mut Vec<String>,
) -> Settings {
    let Credentials { token: file, is_token_named: is_named, .. } = credentials;
    let source = r.parsed("token-source", &args.token_source, &[], |text| match text {
        "file" => Ok(Kind::File),
        "exchange" => Ok(Kind::Exchange),
        "gce" => Ok(Kind::Gce),
        _ => Err(format!("{text:?} is not a source of tokens; choose file, exchange or gce")),
    });
    let url = r.parsed("token-exchange-url", &args.token_exchange_url, &[], str::parse::<Url>);
    let [audience, scope, root, gce_audience] = [
        ("token-exchange-audience", &args.token_exchange_audience),
        ("token-exchange-scope", &args.token_exchange_scope),
        ("token-exchange-root", &args.token_exchange_root),
        ("gce-audience", &args.gce_audience),
    ]
    .map(|(flag, typed)| r.text(flag, typed, &[]));
    let of_exchange = [url.set(), audience.set(), scope.set(), root.set()];

    let is_google_cas = chosen.name == Some(ProviderName::GoogleCas);
    if !matches!(chosen.name, Some(ProviderName::Citadel | ProviderName::Vault | ProviderName::GoogleCas)) {
        let own = [source.set(), gce_audience.set()];
        let all = of_exchange.iter().chain(&own).filter(|(level, _)| level.is_some());
        // Where no CA is chosen, the report says so already.
        for (_, from) in all.filter(|(level, _)| chosen.name.is_some() && *level >= chosen.level) {
            r.mistake(format!(
                "{from} is for CAs that take such a token (citadel, vault, google-cas): choose one with --ca, or drop it"
            ));
        }
        return file.clone().into();
    }
    let kind = match source.value {
        Some(kind) => kind,
        None if url.value.is_some() || url.was_wrong => Kind::Exchange,
        None if is_google_cas && !*is_named => Kind::Gce,
        None => Kind::File,
    };
    let alone = |own: Kind, name: &str, options: &[(Option<_>, &str)], r: &mut Reader<'_>| {
        let set = options.iter().filter(|(level, _)| level.is_some() && *level >= source.level);
        for (_, from) in set.filter(|_| kind != own && !source.was_wrong) {
            r.mistake(format!("{from} is for --token-source {name} alone: add that, or drop it"));
        }
    };
    alone(Kind::Exchange, "exchange", &of_exchange, r);
    alone(Kind::Gce, "gce", &[gce_audience.set()], r);

    let service = match kind {
        Kind::File => return file.clone().into(),
        Kind::Exchange => {
            let is_wrong = url.was_wrong;
            let url = url.value.or_else(|| GOOGLES_URL.parse().ok().filter(|_| is_google_cas));
            let Some(url) = url else {
                if !is_wrong {
                    r.mistake(
                        "--token-source exchange needs the token service: --token-exchange-url URL"
                            .to_owned(),
                    );
                }
                return file.clone().into();
            };
            if url.address.plaintext {
                notes.push(format!("the workload's token goes to {} in plain text", url.address));
            }
            let roots = match root.value {
                Some(text) if !text.eq_ignore_ascii_case("system") => Roots::File(text.into()),
                _ => Roots::System,
            };
            let scope = scope.value.or_else(|| is_google_cas.then(|| GOOGLES_SCOPE.to_owned()));
            let subject = file.clone();
            Service::Exchange(Exchange { url, roots, subject, audience: audience.value, scope })
        }
        Kind::Gce => {
            let host = r.variable("GCE_METADATA_HOST").unwrap_or(metadata_server::HOST);
            let address = match Address::with_ports(&format!("http://{host}"), 80, 80) {
                Ok(address) => address,
                Err(_) => {
                    r.mistake(format!("GCE_METADATA_HOST {host:?}: the shape is HOST or HOST:PORT"));
                    return file.clone().into();
                }
            };
            let istios =
                || (chosen.name == Some(ProviderName::Citadel)).then(|| citadel::AUDIENCE.to_owned());
            if let (true, Some(_)) = (is_google_cas, &gce_audience.value) {
                notes.push(format!("{} is not used: google-cas gets an access token", gce_audience.from));
            }
            let wanted = match gce_audience.value.or_else(istios) {
                _ if is_google_cas => Wanted::Access,
                Some(audience) => Wanted::Identity { audience },
                None => {
                    r.mistake(
                        "--token-source gce needs to know whom the identity token is for: --gce-audience AUDIENCE"
                            .to_owned(),
                    );
                    return file.clone().into();
                }
            };
            Service::Metadata(MetadataServer { address, wanted })
        }
    };
    Settings::Service { service, patience: timeout / 2 }
}
