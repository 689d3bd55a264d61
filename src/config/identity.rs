//! The options for the workload's identity.

use super::args::RunArgs;
use super::shared::Credentials;
use crate::base::spiffe_id::{ServiceAccount, SpiffeId};
use crate::ca::provider::{IdentityDefault, NameUse, ProviderKind};
use crate::options::{Level, Reader};
use crate::pki::csr::{CommonName, DnsName, Names};
use crate::source::issuer::IdentitySource;

pub(super) fn identity(
    r: &mut Reader<'_>,
    args: &RunArgs,
    credentials: &Credentials,
    kind: Option<&ProviderKind>,
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
    if whole.level == Some(Level::File) {
        let stronger = [&domain, &namespace, &account].into_iter().find(|part| part.level > whole.level);
        r.note_overridden("spiffe-id", stronger.map(|part| part.from.as_str()).unwrap_or_default());
    }
    let default = kind.map_or(IdentityDefault::Token, |kind| kind.identity);
    if let IdentityDefault::Caller { trust_domain } = default
        && domain.value.is_none()
    {
        for part in [&namespace, &account].into_iter().filter(|part| part.is_own()) {
            r.mistake(format!(
                "{} is not enough with --ca {}: add --trust-domain {trust_domain}, or drop it",
                part.from,
                kind.map(|kind| kind.name).unwrap_or_default()
            ));
        }
        return IdentitySource::Unknown;
    }
    let trust_domain = domain.or("cluster.local");
    let (mut namespace, mut account) = (namespace.value, account.value);
    if let IdentityDefault::Account { namespace: default, name } = default {
        namespace = namespace.or(Some(default.to_owned()));
        account = account.or(Some(name.to_owned()));
    }
    // Checked now: later it would only show as a certificate for the wrong identity.
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

/// The names that are requested besides `identity`; none from a CA that does not issue them.
pub(super) fn names(
    r: &mut Reader<'_>,
    args: &RunArgs,
    identity: &IdentitySource,
    kind: Option<&ProviderKind>,
) -> Names {
    let mut seen = Vec::new();
    let dns = r.list("dns-san", &args.dns_san, &[], ',', |text| {
        let name: DnsName = text.parse()?;
        if seen.contains(&name) {
            return Err(format!("{name} is named twice; name it once"));
        }
        seen.push(name.clone());
        Ok(name)
    });
    let common_name = r.parsed("common-name", &args.common_name, &[], str::parse::<CommonName>);
    let set: Vec<_> = [&dns.from, &common_name.from].into_iter().filter(|from| !from.is_empty()).collect();
    let set = set.into_iter().map(String::as_str).collect::<Vec<_>>().join(" and ");
    let names = Names { dns: dns.value.unwrap_or_default(), common_name: common_name.value };
    if names.is_empty() {
        return names;
    }
    match kind.map(|kind| (kind.names, kind.name)) {
        Some((NameUse::Requested, _)) => names,
        Some((NameUse::WithIdentity, ca)) => {
            if *identity == IdentitySource::Unknown {
                r.mistake(format!(
                    "{set} needs --spiffe-id with --ca {ca}: the CA takes all names from the request then, or none"
                ));
            }
            names
        }
        Some((NameUse::Ignored { why }, ca)) => {
            r.note(format!("{set} is not used with --ca {ca}: {why}"));
            Names::default()
        }
        None => {
            r.note(format!("{set} is not used: without a CA there is no certificate to request"));
            Names::default()
        }
    }
}
