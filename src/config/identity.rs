//! The options that say who the workload is.

use super::args::RunArgs;
use super::choice::{Credentials, ProviderName};
use super::reader::{Level, Reader};
use crate::base::spiffe_id::{ServiceAccount, SpiffeId};
use crate::source::issuer::IdentitySource;

/// Who the workload is.
pub(super) fn identity(
    r: &mut Reader<'_>,
    args: &RunArgs,
    credentials: &Credentials,
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
        return IdentitySource::Unknown;
    }
    let trust_domain = domain.or("cluster.local");
    let (mut namespace, mut account) = (namespace.value, account.value);
    if provider == Some(ProviderName::Embedded) {
        namespace = namespace.or(Some("default".to_owned()));
        account = account.or(Some("default".to_owned()));
    }
    // Said now, because later it would only show as a certificate that nobody asked for.
    let probe = ServiceAccount {
        namespace: namespace.clone().unwrap_or("namespace".to_owned()),
        name: account.clone().unwrap_or("account".to_owned()),
    };
    match SpiffeId::for_service_account(&trust_domain, &probe) {
        Ok(identity) if namespace.is_some() && account.is_some() => return IdentitySource::Fixed(identity),
        Ok(_) => {}
        Err(error) => r.mistake(format!("--trust-domain, --namespace and --service-account: {error}")),
    }
    IdentitySource::Token {
        file: credentials.token.clone(),
        client_cert: credentials.client_cert.clone(),
        trust_domain,
        namespace,
        service_account: account,
    }
}
