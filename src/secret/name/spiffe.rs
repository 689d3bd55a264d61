//! Names of SPIFFE: those that SPIRE's agent serves to Envoy beside `default` and `ROOTCA`.

use std::sync::Arc;

use crate::base::spiffe_id::{NotASpiffeId, SpiffeId};

const SCHEME: &str = "spiffe://";

/// `spiffe://DOMAIN` of another trust domain: the name of its trust bundle in the store.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FederatedName(Arc<str>);

impl FederatedName {
    /// `domain` is the name of a trust domain, with or without `spiffe://`.
    pub fn new(domain: &str) -> Result<Self, NotASpiffeId> {
        let domain = domain.strip_prefix(SCHEME).unwrap_or(domain);
        let id: SpiffeId = format!("{SCHEME}{domain}").parse()?;
        match id.trust_domain() == domain {
            true => Ok(Self(id.as_str().into())),
            false => Err(NotASpiffeId::path(domain)),
        }
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }

    pub fn domain(&self) -> &str {
        self.0.strip_prefix(SCHEME).unwrap_or_default()
    }
}

/// A name that means a part of the workload's own identity. Which one is known once there is a certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SpiffeName {
    /// `spiffe://DOMAIN/PATH`: the key pair of that identity.
    Identity(SpiffeId),
    /// `spiffe://DOMAIN`: the trust bundle of that trust domain.
    Bundle(SpiffeId),
    /// `ALL`: the trust bundles of all trust domains.
    AllBundles,
}

impl SpiffeName {
    /// None if `text` is no name of this kind.
    pub fn parse(text: &str) -> Option<Self> {
        if text == "ALL" {
            return Some(Self::AllBundles);
        }
        let id: SpiffeId = text.parse().ok()?;
        let has_path = text.len() > SCHEME.len() + id.trust_domain().len();
        Some(if has_path { Self::Identity(id) } else { Self::Bundle(id) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_federated_name_is_that_of_a_trust_domain() {
        for text in ["two.example", "spiffe://two.example"] {
            let name = FederatedName::new(text).unwrap();
            assert_eq!((name.as_str(), name.domain()), ("spiffe://two.example", "two.example"));
        }
        for text in ["", "TWO", "two.example/", "spiffe://two.example/web", "https://two"] {
            assert!(FederatedName::new(text).is_err(), "{text}");
        }
    }

    #[test]
    fn identities_and_trust_domains_are_distinguished() {
        let id = |text: &str| text.parse::<SpiffeId>().unwrap();
        assert_eq!(SpiffeName::parse("ALL"), Some(SpiffeName::AllBundles));
        assert_eq!(SpiffeName::parse("spiffe://td"), Some(SpiffeName::Bundle(id("spiffe://td"))));
        assert_eq!(SpiffeName::parse("spiffe://td/a"), Some(SpiffeName::Identity(id("spiffe://td/a"))));
        for text in ["all", "default", "spiffe://", "spiffe://TD", "spiffe://td/", "td"] {
            assert_eq!(SpiffeName::parse(text), None, "{text}");
        }
    }
}
