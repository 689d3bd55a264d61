use std::collections::HashSet;
use std::time::Duration;

use prost::Message as _;
use rcgen::{CertificateParams, SanType};
use tokio_util::sync::CancellationToken;

use super::*;
use crate::base::clock::Clock;
use crate::metrics::Metrics;
use crate::pki::crl::{self, testing::Authority};
use crate::pki::key::{KeyType, SigningKey};
use crate::pki::pem;
use crate::proto::envoy::config::core::v3::{DataSource, data_source::Specifier};
use crate::proto::envoy::extensions::transport_sockets::tls::v3 as tls;
use crate::proto::google::protobuf::{Struct, Value, value::Kind};
use crate::secret::{FederatedName, KeyPair};
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
        self.key_pair.publish(Secret::KeyPair(pair), Clock::system().now(), None);
    }

    fn renew_roots(&self) {
        self.roots.publish(bundle(), Clock::system().now(), None);
    }

    /// A source of the trust bundle of another trust domain.
    fn federate(&self, domain: &str) -> Publisher {
        let name = SecretName::Federated(FederatedName::new(domain).unwrap());
        let key = Key { workload: self.service.0.workload, name };
        let publisher = self.cache.publisher(key, Origin::FILES);
        publisher.publish(bundle(), Clock::system().now(), None);
        publisher
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

/// New roots.
fn bundle() -> Secret {
    Secret::TrustBundle(TrustBundle::new(vec![Authority::root("root").certificate]).unwrap())
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

/// The trust domains of a validator, each with its PEM file.
fn domains(secret: tls::secret::Type) -> Vec<(String, Option<DataSource>)> {
    let config = context(secret).custom_validator_config.unwrap().typed_config.unwrap();
    let config = tls::SpiffeCertValidatorConfig::decode(config.value).unwrap();
    config.trust_domains.into_iter().map(|domain| (domain.name, domain.trust_bundle)).collect()
}

fn names(secret: tls::secret::Type) -> Vec<String> {
    domains(secret).into_iter().map(|(name, _)| name).collect()
}

#[test]
fn bundles_of_other_trust_domains_are_served_by_their_names_and_in_all() {
    let agent = Agent::new();
    agent.renew("spiffe://one.example/web");
    agent.renew_roots();
    let plain = Node::default();
    assert!(!agent.knows("spiffe://two.example"));
    let (two, three) = (agent.federate("two.example"), agent.federate("three.example"));
    assert_eq!(names(agent.serves("spiffe://two.example", &plain)), ["two.example"]);
    assert_eq!(names(agent.serves("spiffe://one.example", &plain)), ["one.example"]);
    let all = domains(agent.serves("ALL", &plain));
    assert_eq!(
        all.iter().map(|(name, _)| &**name).collect::<Vec<_>>(),
        ["one.example", "three.example", "two.example"]
    );
    let distinct: HashSet<_> =
        all.iter().map(|(_, pem)| pem.as_ref().map(DataSource::encode_to_vec)).collect();
    assert_eq!(distinct.len(), 3, "each trust domain has its own roots");
    let foreign = context(agent.serves("spiffe://two.example", &without_validator()));
    assert!(foreign.trusted_ca.is_some() && foreign.custom_validator_config.is_none());
    // A withdrawn one is no longer among them; a bundle of the own domain is never that of another source.
    two.withdraw("no longer federated".to_owned());
    let own = agent.federate("one.example");
    assert_eq!(names(agent.serves("ALL", &plain)), ["one.example", "three.example"]);
    assert_eq!(domains(agent.serves("spiffe://one.example", &plain)), all[..1]);
    drop((own, three));
}

#[test]
fn a_stream_is_sent_a_changed_bundle_of_another_trust_domain() {
    let agent = Agent::new();
    agent.renew("spiffe://one.example/web");
    agent.renew_roots();
    let two = agent.federate("two.example");
    for name in ["ALL", "spiffe://two.example"] {
        let subscriber = Subscriber::new(Connection::distinct());
        let mut followed =
            Followed::new(&agent.service.0, &name.into(), &Node::default(), &subscriber, 3).ok().unwrap();
        let before = agent.look(&mut followed).unwrap();
        two.publish(bundle(), Clock::system().now(), None);
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        let std::task::Poll::Ready(changed) = subscriber.poll_changes(&mut context) else { panic!("{name}") };
        assert!(changed.contains(&3), "{name}");
        assert_ne!(agent.look(&mut followed).unwrap().version, before.version, "{name}");
    }
}

#[test]
fn the_option_chooses_which_names_get_the_validator() {
    let agent = Agent::new();
    agent.renew("spiffe://one.example/web");
    agent.renew_roots();
    let _two = agent.federate("two.example");
    let node = |validator| Node::of(Naming { validator, ..Naming::default() }, None);
    let all = node(SpiffeValidator::All);
    assert_eq!(names(agent.serves("ROOTCA", &all)), ["one.example", "two.example"]);
    let off = node(SpiffeValidator::Off);
    assert!(context(agent.serves("spiffe://one.example", &off)).trusted_ca.is_some());
    assert!(matches!(agent.follow("ALL", &off), Err(NotFollowed::Unknown(_))));
    let disabled = Naming { validator: SpiffeValidator::All, ..Naming::default() };
    let disabled = Node { validator: without_validator().validator, ..Node::of(disabled, None) };
    assert!(context(agent.serves("ROOTCA", &disabled)).trusted_ca.is_some());
}

#[test]
fn crls_stand_among_the_roots_of_their_trust_domain_where_the_validator_reads_them() {
    let agent = Agent::new();
    agent.renew("spiffe://one.example/web");
    let authority = Authority::root("root");
    let roots = TrustBundle::new(vec![authority.certificate.clone()]).unwrap();
    let now = Clock::system().now();
    agent.roots.publish(Secret::TrustBundle(roots), now, None);
    let hour = Duration::from_secs(3600);
    let crls = crl::from_pem(authority.crl(now - hour, now + hour, &[]).as_bytes()).unwrap();
    let crls: Vec<_> = crls.into_iter().map(Arc::new).collect();
    agent.cache.set_crls(agent.roots.key(), &crls, now).unwrap().covered.unwrap();
    for name in ["ALL", "spiffe://one.example"] {
        let secret = agent.serves(name, &Node::default());
        assert_eq!(context(secret.clone()).crl, None);
        let Some(Specifier::InlineBytes(pem)) = domains(secret).remove(0).1.unwrap().specifier else {
            panic!("no bytes")
        };
        assert_eq!(pem::certificates(&pem).unwrap(), std::slice::from_ref(&authority.certificate), "{name}");
        assert_eq!(crl::from_pem(&pem).unwrap().len(), 1, "{name}");
    }
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
