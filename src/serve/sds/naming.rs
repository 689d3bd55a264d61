//! Which secret a client means by a name.

use std::sync::Arc;

use prost::Message as _;

use crate::base::limits;
use crate::proto::google::protobuf::{Struct, value::Kind};
use crate::secret::{BadName, KubernetesName, SecretName};

/// The node metadata that turns the SPIFFE validator off.
const DISABLE_SPIFFE_VALIDATOR: &str = "disable_spiffe_cert_validation";

/// Which trust bundles have the form of Envoy's SPIFFE validator.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SpiffeValidator {
    /// None.
    Off,
    /// Those of SPIFFE's names: `spiffe://DOMAIN` and `ALL`.
    #[default]
    SpiffeNames,
    /// `ROOTCA` too, which is the same as `ALL` then.
    All,
}

impl SpiffeValidator {
    pub const NAMES: [(&str, Self); 3] =
        [("off", Self::Off), ("spiffe-names", Self::SpiffeNames), ("all", Self::All)];
}

/// Which names clients may use beside those that every agent serves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Naming {
    /// A bare name that means nothing else is that of a Secret.
    pub has_bare_names: bool,
    /// Clients are trusted to say in which cluster they run.
    pub trusts_clusters: bool,
    pub validator: SpiffeValidator,
}

impl Naming {
    pub(super) fn name(self, text: &Arc<str>, cluster: Option<&Arc<str>>) -> Result<SecretName, BadName> {
        let name = SecretName::from_shared(text).or_else(|error| {
            let bare = KubernetesName::bare(text).filter(|_| self.has_bare_names);
            bare.map(SecretName::Kubernetes).ok_or(error)
        });
        Ok(match (name?, cluster) {
            (SecretName::Kubernetes(name), Some(cluster)) => {
                SecretName::Kubernetes(name.in_cluster(Arc::clone(cluster)))
            }
            (name, _) => name,
        })
    }

    /// Whether a node's encoded metadata asks for trust bundles in their plain form, as SPIRE's agent reads it.
    pub(super) fn is_spiffe_validator_disabled(metadata: Option<&[u8]>) -> bool {
        let Some(Ok(metadata)) = metadata.map(Struct::decode) else { return false };
        match metadata.fields.get(DISABLE_SPIFFE_VALIDATOR).and_then(|value| value.kind.as_ref()) {
            Some(Kind::BoolValue(is_disabled)) => *is_disabled,
            Some(Kind::StringValue(text)) => text == "true",
            _ => false,
        }
    }

    /// The cluster that a node says it runs in, in its encoded metadata.
    pub(super) fn cluster(self, metadata: Option<&[u8]>) -> Option<Arc<str>> {
        let metadata = metadata.filter(|metadata| self.trusts_clusters && !metadata.is_empty())?;
        let metadata = Struct::decode(metadata).ok()?;
        match metadata.fields.get("CLUSTER_ID")?.kind.as_ref()? {
            Kind::StringValue(id) if (1..=limits::CLUSTER_ID_BYTES).contains(&id.len()) => {
                Some(id.as_str().into())
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::google::protobuf::Value;

    fn metadata(id: Kind) -> Vec<u8> {
        let value = Value { kind: Some(id) };
        Struct { fields: [("CLUSTER_ID".to_owned(), value)].into() }.encode_to_vec()
    }

    #[test]
    fn a_bare_name_is_that_of_a_secret_where_that_is_allowed() {
        let all = Naming { has_bare_names: true, ..Naming::default() };
        for text in ["www.example.com", "default", "ROOTCA", "file-root:/a", "kubernetes://web"] {
            let name = all.name(&text.into(), None).unwrap();
            assert_eq!(name.as_str(), text);
            let plain = text.parse::<SecretName>();
            assert_eq!(plain.is_ok(), text != "www.example.com");
            assert_eq!(plain.unwrap_or(name.clone()), name);
        }
        assert!(Naming::default().name(&"www.example.com".into(), None).is_err());
        assert!(all.name(&"*.example.com".into(), None).is_err());
    }

    #[test]
    fn a_node_turns_the_spiffe_validator_off_with_a_boolean_or_a_text() {
        let is_disabled = |kind| {
            let value = Value { kind: Some(kind) };
            let fields = [(DISABLE_SPIFFE_VALIDATOR.to_owned(), value)].into();
            Naming::is_spiffe_validator_disabled(Some(&Struct { fields }.encode_to_vec()))
        };
        assert!(is_disabled(Kind::BoolValue(true)) && is_disabled(Kind::StringValue("true".to_owned())));
        assert!(!is_disabled(Kind::BoolValue(false)) && !is_disabled(Kind::StringValue("no".to_owned())));
        assert!(!Naming::is_spiffe_validator_disabled(None));
        assert!(!Naming::is_spiffe_validator_disabled(Some(b"junk")));
    }

    #[test]
    fn the_cluster_comes_from_the_node_where_that_is_trusted() {
        let naming = Naming { trusts_clusters: true, ..Naming::default() };
        let east = metadata(Kind::StringValue("east".to_owned()));
        let cluster = naming.cluster(Some(&east)).unwrap();
        assert_eq!(&*cluster, "east");
        let name = naming.name(&"kubernetes://web".into(), Some(&cluster)).unwrap();
        assert_ne!(name, naming.name(&"kubernetes://web".into(), None).unwrap());
        assert_eq!(naming.name(&"default".into(), Some(&cluster)).unwrap(), SecretName::Workload);
        assert_eq!(Naming::default().cluster(Some(&east)), None);
        let long = metadata(Kind::StringValue("x".repeat(300)));
        for useless in [&metadata(Kind::BoolValue(true)), &long, &b"junk".to_vec(), &Vec::new()] {
            assert_eq!(naming.cluster(Some(useless)), None);
        }
    }
}
