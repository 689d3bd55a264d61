//! Names of SPIFFE: those that SPIRE's agent serves to Envoy beside `default` and `ROOTCA`.

use crate::base::spiffe_id::SpiffeId;

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
        let has_path = text.len() > "spiffe://".len() + id.trust_domain().len();
        Some(if has_path { Self::Identity(id) } else { Self::Bundle(id) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
