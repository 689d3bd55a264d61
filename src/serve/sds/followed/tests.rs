use std::time::SystemTime;

use prost::Message as _;
use rcgen::{CertificateParams, SanType};
use tokio_util::sync::CancellationToken;

use super::*;
use crate::base::clock::Clock;
use crate::metrics::Metrics;
use crate::pki::crl::testing::Authority;
use crate::pki::key::{KeyType, SigningKey};
use crate::proto::envoy::extensions::transport_sockets::tls::v3 as tls;
use crate::proto::google::protobuf::{Struct, Value, value::Kind};
use crate::secret::KeyPair;
use crate::serve::sds::{Capacity, SecretDiscovery};
use crate::store::{Cache, Connection, Origin, Publisher};

struct Agent {
    service: SecretDiscovery,
    cache: Cache,
    key_pair: Publisher,
    roots: Publisher,
}

impl Agent {
    fn new() -> Self {
        let (cache, workload) = Cache::with_workload("");
        let publisher = |name| cache.publisher(Key { workload, name }, Origin::CA);
        let (key_pair, roots) = (publisher(SecretName::Workload), publisher(SecretName::Roots));
        let (metrics, stop) = (Metrics::default(), CancellationToken::new());
        let service = SecretDiscovery::new(
            cache.clone(),
            workload,
            metrics,
            Clock::system(),
            stop,
            Capacity::default(),
        );
        Self { service, cache, key_pair, roots }
    }

    fn renew(&self, id: &str) {
        let key = SigningKey::generate(KeyType::EcdsaP256).unwrap();
        let mut params = CertificateParams::default();
        params.subject_alt_names = vec![SanType::URI(id.try_into().unwrap())];
        let leaf = params.self_signed(&key).unwrap().der().clone();
        let pair = KeyPair::new(vec![leaf], key.to_private_key()).unwrap();
        self.key_pair.publish(Secret::KeyPair(pair), SystemTime::now(), None);
    }

    fn renew_roots(&self) {
        let root = Authority::root("root").certificate;
        let bundle = TrustBundle::new(vec![root]).unwrap();
        self.roots.publish(Secret::TrustBundle(bundle), SystemTime::now(), None);
    }

    fn follow(&self, name: &str, node: &Node) -> Result<Followed, NotFollowed> {
        let subscriber = Subscriber::new(Connection::distinct());
        Followed::new(&self.service.0, &name.into(), node, &subscriber, 0)
    }

    fn look(&self, followed: &mut Followed) -> Option<Resource> {
        match followed.look(&self.service.0) {
            Look::Found(resource) => Some(resource),
            Look::Missing { reason: None, .. } => None,
            _ => panic!("neither there nor on its way"),
        }
    }

    /// What a client is sent for a name.
    fn serves(&self, name: &str, node: &Node) -> tls::secret::Type {
        let mut followed = self.follow(name, node).ok().unwrap();
        let resource = self.look(&mut followed).unwrap();
        tls::Secret::decode(resource.payload.bytes().clone()).unwrap().r#type.unwrap()
    }

    fn knows(&self, name: &str) -> bool {
        let mut followed = self.follow(name, &Node::default()).ok().unwrap();
        !matches!(followed.look(&self.service.0), Look::Unknown(_))
    }
}

fn context(secret: tls::secret::Type) -> tls::CertificateValidationContext {
    match secret {
        tls::secret::Type::ValidationContext(context) => context,
        tls::secret::Type::TlsCertificate(_) => panic!("a key pair"),
    }
}

/// A node whose metadata turns the validator off.
fn without_validator() -> Node {
    let value = Value { kind: Some(Kind::BoolValue(true)) };
    let fields = [("disable_spiffe_cert_validation".to_owned(), value)].into();
    Node::of(Naming::default(), Some(&Struct { fields }.encode_to_vec()))
}

#[test]
fn only_the_workloads_own_spiffe_id_and_trust_domain_are_served() {
    let agent = Agent::new();
    agent.renew("spiffe://one.example/web");
    agent.renew_roots();
    let plain = Node::default();
    let own = agent.serves("spiffe://one.example/web", &plain);
    assert!(matches!(&own, tls::secret::Type::TlsCertificate(_)));
    assert_eq!(own, agent.serves("default", &plain));
    assert!(agent.knows("spiffe://one.example") && agent.knows("ALL"));
    for foreign in ["spiffe://one.example/other", "spiffe://two.example/web", "spiffe://two.example"] {
        assert!(!agent.knows(foreign), "{foreign}");
    }
}

#[test]
fn a_name_waits_for_the_first_certificate_that_says_whether_it_is_served() {
    let agent = Agent::new();
    let names = ["spiffe://one.example/web", "spiffe://one.example", "ALL", "spiffe://two.example"];
    let mut all = names.map(|name| agent.follow(name, &Node::default()).ok().unwrap());
    agent.renew_roots();
    for followed in &mut all {
        assert!(agent.look(followed).is_none(), "the trust domain is unknown");
    }
    agent.renew("spiffe://one.example/web");
    let [own @ .., foreign] = &mut all;
    for followed in own {
        assert!(agent.look(followed).is_some());
    }
    assert!(matches!(foreign.look(&agent.service.0), Look::Unknown(_)));
}

#[test]
fn bundles_come_as_a_validator_unless_the_node_turns_it_off() {
    let agent = Agent::new();
    agent.renew("spiffe://one.example/web");
    agent.renew_roots();
    let plain = context(agent.serves("ROOTCA", &Node::default()));
    assert!(plain.trusted_ca.is_some() && plain.custom_validator_config.is_none());
    for name in ["spiffe://one.example", "ALL"] {
        let context = context(agent.serves(name, &Node::default()));
        assert_eq!(context.trusted_ca, None);
        let validator = context.custom_validator_config.unwrap();
        assert_eq!(validator.name, "envoy.tls.cert_validator.spiffe");
        let config = validator.typed_config.unwrap();
        assert!(config.type_url.ends_with(".SPIFFECertValidatorConfig"));
        let config = tls::SpiffeCertValidatorConfig::decode(config.value).unwrap();
        let [domain] = config.trust_domains.as_slice() else { panic!("one trust domain") };
        assert_eq!((&*domain.name, &domain.trust_bundle), ("one.example", &plain.trusted_ca));
    }
    assert_eq!(context(agent.serves("spiffe://one.example", &without_validator())), plain);
    let all = agent.follow("ALL", &without_validator());
    assert!(matches!(all, Err(NotFollowed::Unknown(_))), "the plain form can't say which roots are whose");
}

#[test]
fn a_verdict_on_a_name_of_spiffe_counts_for_the_entry_that_it_follows() {
    let agent = Agent::new();
    agent.renew("spiffe://one.example/web");
    agent.renew_roots();
    let mut followed = agent.follow("ALL", &Node::default()).ok().unwrap();
    let sent = agent.look(&mut followed).unwrap().version.clone();
    let of_entry = agent.roots.entry().good.unwrap().resource.version.clone();
    assert_ne!(sent, of_entry);
    followed.accepted(sent.clone());
    let verdicts = || {
        let all = agent.cache.snapshot().into_iter();
        let roots = all.filter(|one| one.key == *agent.roots.key()).map(|one| one.observed);
        roots.last().unwrap().verdicts().clone()
    };
    assert_eq!(verdicts().acknowledged(), [(of_entry.clone(), 1)].into());
    // A new certificate is no new bundle.
    agent.renew("spiffe://one.example/web");
    assert_eq!(agent.look(&mut followed).unwrap().version, sent);
    // An ACK of what was sent before a change is that of the entry's earlier version.
    agent.renew_roots();
    assert_ne!(agent.look(&mut followed).unwrap().version, sent);
    followed.rejected(sent, "no");
    assert_eq!(verdicts().rejection.unwrap().version, of_entry);
}
