//! SPIFFE IDs, as the SPIFFE ID standard (section 2) defines them.

use std::fmt;
use std::str::FromStr;

/// A valid SPIFFE ID, `spiffe://TRUST_DOMAIN/PATH`: the identity of a workload.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SpiffeId(String);

/// Why a text is not a SPIFFE ID.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a SPIFFE ID: {reason} (the form is spiffe://cluster.local/ns/NAMESPACE/sa/ACCOUNT)")]
pub struct NotASpiffeId {
    text: String,
    reason: &'static str,
}

impl NotASpiffeId {
    /// A path stands where only a trust domain may.
    pub fn path(text: &str) -> Self {
        Self { text: text.chars().take(100).collect(), reason: "a trust domain has no path" }
    }
}

impl SpiffeId {
    const LONGEST: usize = 2048;

    /// `spiffe://TRUST_DOMAIN/ns/NAMESPACE/sa/ACCOUNT`: Istio's form for Kubernetes workloads.
    pub fn for_service_account(trust_domain: &str, account: &ServiceAccount) -> Result<Self, NotASpiffeId> {
        format!("spiffe://{trust_domain}/ns/{}/sa/{}", account.namespace, account.name).parse()
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The part between `spiffe://` and the path.
    pub fn trust_domain(&self) -> &str {
        let rest = self.0.strip_prefix("spiffe://").unwrap_or_default();
        rest.split('/').next().unwrap_or_default()
    }

    /// The service account, if the ID has Istio's form.
    pub fn service_account(&self) -> Option<ServiceAccount> {
        let rest = self.0.strip_prefix("spiffe://")?.strip_prefix(self.trust_domain())?;
        let (namespace, name) = rest.strip_prefix("/ns/")?.split_once("/sa/")?;
        let account = ServiceAccount { namespace: namespace.to_owned(), name: name.to_owned() };
        [namespace, name].iter().all(|part| !part.contains('/')).then_some(account)
    }
}

impl fmt::Display for SpiffeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for SpiffeId {
    type Err = NotASpiffeId;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let refuse = |reason| Err(NotASpiffeId { text: text.chars().take(100).collect(), reason });
        if text.len() > Self::LONGEST {
            return refuse("it is longer than 2048 bytes");
        }
        let Some(rest) = text.strip_prefix("spiffe://") else {
            return refuse("it does not start with spiffe://");
        };
        let (domain, path) = rest.split_once('/').map_or((rest, None), |(domain, path)| (domain, Some(path)));
        if domain.is_empty() {
            return refuse("the trust domain is empty");
        }
        let in_domain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "-._".contains(c);
        if !domain.chars().all(in_domain) {
            return refuse(
                "a trust domain has only lower-case letters, digits, dots, dashes and underscores",
            );
        }
        let in_path = |c: char| c.is_ascii_alphanumeric() || "-._".contains(c);
        for segment in path.iter().flat_map(|path| path.split('/')) {
            if segment.is_empty() || segment == "." || segment == ".." {
                return refuse("a path segment is empty, \".\" or \"..\"");
            }
            if !segment.chars().all(in_path) {
                return refuse("a path has only letters, digits, dots, dashes and underscores");
            }
        }
        Ok(Self(text.to_owned()))
    }
}

/// A Kubernetes service account, as named in the `sub` claim of its tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceAccount {
    pub namespace: String,
    pub name: String,
}

impl ServiceAccount {
    /// Parses `system:serviceaccount:NAMESPACE:NAME`.
    pub fn from_subject(subject: &str) -> Option<Self> {
        let (namespace, name) = subject.strip_prefix("system:serviceaccount:")?.split_once(':')?;
        Some(Self { namespace: namespace.to_owned(), name: name.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_service_account_survives_the_round_trip() {
        let account = ServiceAccount { namespace: "shop".to_owned(), name: "cart".to_owned() };
        assert_eq!(SpiffeId::for_service_account("td", &account).unwrap().service_account(), Some(account));
        for text in ["spiffe://td", "spiffe://td/ns/a", "spiffe://td/ns/a/b/sa/c", "spiffe://td/x/ns/a/sa/b"]
        {
            assert_eq!(text.parse::<SpiffeId>().unwrap().service_account(), None, "{text}");
        }
    }

    #[test]
    fn only_valid_spiffe_ids_are_parsed() {
        let long = format!("spiffe://td/{}", "a".repeat(2048));
        let cases = [
            ("spiffe://cluster.local/ns/default/sa/web", true),
            ("spiffe://td", true),
            ("spiffe://td/A-b_c.1", true),
            ("spiffe://", false),
            ("spiffe:///path", false),
            ("https://td/a", false),
            ("spiffe://TD/a", false),
            ("spiffe://td:80/a", false),
            ("spiffe://user@td/a", false),
            ("spiffe://td/", false),
            ("spiffe://td/a//b", false),
            ("spiffe://td/a/../b", false),
            ("spiffe://td/a?b", false),
            ("spiffe://td/ä", false),
            (&long, false),
        ];
        for (text, valid) in cases {
            assert_eq!(text.parse::<SpiffeId>().is_ok(), valid, "{text}");
        }
    }

    #[test]
    fn the_id_of_a_service_account_has_istios_form() {
        let account = ServiceAccount::from_subject("system:serviceaccount:shop:cart").unwrap();
        let id = SpiffeId::for_service_account("cluster.local", &account).unwrap();
        assert_eq!(id.as_str(), "spiffe://cluster.local/ns/shop/sa/cart");
        assert_eq!(id.trust_domain(), "cluster.local");
        assert_eq!(ServiceAccount::from_subject("system:node:x"), None);
    }
}
