//! Who may read what, and several clusters.

use super::*;
use crate::kube::Grant;

fn reviewed() -> KubernetesSettings {
    let account = Account { namespace: "shop".into(), name: "gateway".into() };
    KubernetesSettings { authorize: Authorize::Rbac, account: Some(account), ..settings() }
}

#[tokio::test(start_paused = true)]
async fn a_secret_is_served_to_an_account_that_may_get_it_and_a_refusal_does_not_tell_whether_it_exists() {
    let agent = Agent::with(reviewed());
    for name in ["allowed", "refused"] {
        put_pair(&agent.api, &secret("shop", name));
    }
    agent.api.lock().rights.insert("gateway get shop/allowed".to_owned());
    let names = ["kubernetes://allowed", "kubernetes://refused", "kubernetes://absent"];
    let _streams = names.map(|name| agent.open(name));
    agent.until_served("kubernetes://allowed").await;
    agent.until("the refusals", |agent| names[1..].iter().all(|name| agent.entry(name).is_withdrawn)).await;
    let [refused, absent] = [names[1], names[2]].map(|name| agent.entry(name).failure().unwrap());
    assert_eq!(refused, absent);
    assert!(refused.contains("may not read it") && agent.failures("refused") == 2, "{refused}");
}

#[tokio::test(start_paused = true)]
async fn a_right_that_is_granted_later_is_noticed_within_a_minute_without_another_stream() {
    let agent = Agent::with(reviewed());
    put_pair(&agent.api, &secret("shop", "web"));
    let _stream = agent.open("kubernetes://web");
    agent.until("the refusal", |agent| agent.entry("kubernetes://web").is_withdrawn).await;
    rest(600).await;
    let reviews = agent.api.count("review");
    assert!((10..=20).contains(&reviews), "{reviews} reviews in ten minutes");
    agent.api.lock().rights.insert("gateway get shop/web".to_owned());
    rest(60).await;
    assert!(agent.leaf("kubernetes://web").is_some());
}

#[tokio::test(start_paused = true)]
async fn a_review_that_fails_is_no_refusal_and_is_repeated() {
    let agent = Agent::with(reviewed());
    put_pair(&agent.api, &secret("shop", "web"));
    agent.api.lock().rights.insert("gateway get shop/web".to_owned());
    agent.api.lock().reviews_fail = true;
    let stream = agent.open("kubernetes://web");
    agent.until("the reason", |agent| agent.entry("kubernetes://web").failure().is_some()).await;
    assert!(!agent.entry("kubernetes://web").is_withdrawn);
    agent.api.lock().reviews_fail = false;
    let leaf = agent.until_served("kubernetes://web").await;
    // Later failures take nothing away; another stream makes the agent ask again.
    agent.api.lock().reviews_fail = true;
    rest(120).await;
    let reviews = agent.api.count("review");
    let _other = agent.open("kubernetes://web");
    agent.until("another review", |agent| agent.api.count("review") > reviews).await;
    rest(60).await;
    assert_eq!(agent.leaf("kubernetes://web"), Some(leaf));
    // A definite no does.
    agent.api.lock().reviews_fail = false;
    agent.api.lock().rights.clear();
    drop(stream);
    let _third = agent.open("kubernetes://web");
    agent.until("it is withdrawn", |agent| agent.entry("kubernetes://web").is_withdrawn).await;
}

#[tokio::test(start_paused = true)]
async fn in_another_namespace_a_reference_grant_is_enough() {
    let agent = Agent::with(reviewed());
    for name in ["web", "other"] {
        put_pair(&agent.api, &secret("vault", name));
    }
    let grant = |from: &str| Grant { from: from.into(), to: Kind::Secret, name: Some("web".into()) };
    agent.api.lock().grants = vec![grant("elsewhere"), grant("shop")];
    let _streams = ["kubernetes://vault/web", "kubernetes://vault/other"].map(|name| agent.open(name));
    agent.until_served("kubernetes://vault/web").await;
    agent.until("the refusal", |agent| agent.entry("kubernetes://vault/other").is_withdrawn).await;
    let own = Agent::with(KubernetesSettings { authorize: Authorize::Namespace, ..settings() });
    put_pair(&own.api, &secret("vault", "web"));
    let _stream = own.open("kubernetes://vault/web");
    own.until("the refusal", |agent| agent.entry("kubernetes://vault/web").is_withdrawn).await;
    assert_eq!(own.api.count("get"), 0, "decided without a call");
}

#[tokio::test(start_paused = true)]
async fn without_an_identity_no_secret_is_served_until_the_workloads_certificate_has_one() {
    let agent = Agent::with(KubernetesSettings { account: None, ..reviewed() });
    put_pair(&agent.api, &secret("shop", "web"));
    agent.api.lock().rights.insert("gateway get shop/web".to_owned());
    let _stream = agent.open("kubernetes://web");
    agent.until("the reason", |agent| agent.entry("kubernetes://web").failure().is_some()).await;
    rest(30).await;
    assert_eq!(agent.api.lock().calls.len(), 0);
    assert!(!agent.entry("kubernetes://web").is_withdrawn, "it may have an identity soon");
    let own = agent.cache.publisher(agent.key("default"), crate::store::Origin::CA);
    let pair = |id: &str| {
        let key = crate::pki::key::SigningKey::generate(crate::pki::key::KeyType::EcdsaP256).unwrap();
        let mut params = rcgen::CertificateParams::default();
        params.subject_alt_names.push(rcgen::SanType::URI(id.try_into().unwrap()));
        let leaf = params.self_signed(&key).unwrap().der().clone();
        Secret::KeyPair(crate::secret::KeyPair::new(vec![leaf], key.to_private_key()).unwrap())
    };
    own.publish(pair("spiffe://cluster.local/ns/shop/sa/other"), UNIX_EPOCH, None);
    agent.until("a review", |agent| agent.api.count("review other get shop/web") > 0).await;
    own.publish(pair("spiffe://cluster.local/ns/shop/sa/gateway"), UNIX_EPOCH, None);
    agent.until_served("kubernetes://web").await;
}

#[tokio::test(start_paused = true)]
async fn what_the_agent_itself_may_not_read_is_refused_and_noticed_once_it_may() {
    let agent = Agent::start();
    put_pair(&agent.api, &secret("shop", "web"));
    agent.api.lock().forbidden.insert("get");
    let _stream = agent.open("kubernetes://web");
    agent.until("the refusal", |agent| agent.entry("kubernetes://web").is_withdrawn).await;
    agent.api.lock().forbidden.clear();
    rest(60).await;
    let leaf = agent.leaf("kubernetes://web").unwrap();
    // A role that is removed takes nothing away.
    agent.api.lock().forbidden.extend(["get", "watch", "list"]);
    agent.api.disconnect();
    rest(120).await;
    assert_eq!(agent.leaf("kubernetes://web"), Some(leaf));
    assert!(agent.entry("kubernetes://web").failure().is_some());
}

#[tokio::test(start_paused = true)]
async fn a_name_is_read_from_the_cluster_of_its_client_which_may_come_later_and_stays_served_when_it_goes() {
    let agent = Agent::start();
    let (web, east) = (secret("shop", "web"), FakeApi::default());
    put_pair(&agent.api, &web);
    let SecretName::Kubernetes(name) = agent.key("kubernetes://web").name else { panic!() };
    let key = Key { workload: agent.workload, name: SecretName::Kubernetes(name.in_cluster("east".into())) };
    let _streams = [agent.cache.subscribe(&key).unwrap(), agent.open("kubernetes-gateway://shop/web")];
    let leaf = |agent: &Agent| {
        let all = agent.cache.snapshot();
        let entry = all.into_iter().find(|one| one.key == key).unwrap().entry;
        match &entry.good?.secret {
            Secret::KeyPair(pair) => Some(pair.leaf().serial.clone()),
            Secret::TrustBundle(_) => None,
        }
    };
    let local = agent.until_served("kubernetes-gateway://shop/web").await;
    assert_eq!(leaf(&agent), None);
    put_pair(&east, &web);
    agent.clusters.add(Cluster::new(ClusterId("east".into()), Arc::new(east.clone()), None, clock()));
    agent.until("the remote one", |agent| leaf(agent).is_some()).await;
    let remote = leaf(&agent).unwrap();
    assert_ne!(remote, local);
    agent.clusters.remove(&ClusterId("east".into()));
    rest(60).await;
    assert_eq!(leaf(&agent), Some(remote.clone()), "never from another cluster");
    // The cluster comes back with another connection.
    let again = FakeApi::default();
    put_pair(&again, &web);
    agent.clusters.add(Cluster::new(ClusterId("east".into()), Arc::new(again), None, clock()));
    agent.until("the new one", |agent| leaf(agent) != Some(remote.clone())).await;
}

#[tokio::test(start_paused = true)]
async fn a_dead_cluster_delays_no_other() {
    let agent = Agent::start();
    let east = FakeApi::default();
    east.lock().is_away = true;
    agent.clusters.add(Cluster::new(ClusterId("east".into()), Arc::new(east), None, clock()));
    let keys: Vec<_> = (0..200).map(|number| agent.key(&format!("kubernetes://name-{number}"))).collect();
    let of_east = keys.iter().map(|key| {
        let SecretName::Kubernetes(name) = key.name.clone() else { panic!() };
        let name = SecretName::Kubernetes(name.in_cluster("east".into()));
        agent.cache.subscribe(&Key { name, ..key.clone() }).unwrap()
    });
    let _of_east: Vec<_> = of_east.collect();
    rest(5).await;
    put_pair(&agent.api, &secret("shop", "web"));
    let _stream = agent.open("kubernetes://web");
    let before = tokio::time::Instant::now();
    agent.until_served("kubernetes://web").await;
    assert!(before.elapsed() < Duration::from_millis(50));
}

#[tokio::test(start_paused = true)]
async fn a_remote_cluster_that_comes_back_is_read_whatever_was_known_of_it() {
    let agent = Agent::start();
    let (web, absent) = (secret("shop", "web"), secret("shop", "absent"));
    let names = ["kubernetes://web", "sds://web", "sds://web-cacert", "kubernetes://absent"];
    let of_east = |name: &str| {
        let SecretName::Kubernetes(name) = agent.key(name).name else { panic!() };
        Key { workload: agent.workload, name: SecretName::Kubernetes(name.in_cluster("east".into())) }
    };
    let keys = names.map(of_east);
    let _streams = keys.clone().map(|key| agent.cache.subscribe(&key).unwrap());
    let entry = |key: &Key| agent.cache.snapshot().into_iter().find(|one| one.key == *key).unwrap().entry;
    agent.until("the reasons", |_| keys.iter().all(|key| entry(key).failure().is_some())).await;
    assert!(keys.iter().all(|key| !entry(key).is_withdrawn), "the remote clusters are not known yet");
    agent.clusters.complete();
    agent.until("the refusals", |_| keys.iter().all(|key| entry(key).is_withdrawn)).await;

    let (chain, key) = pair_of("ca");
    let data = [("tls.crt", &*chain), ("tls.key", &*key), ("ca.crt", &*root_of("one"))];
    let east = |api: &FakeApi| Cluster::new(ClusterId("east".into()), Arc::new(api.clone()), None, clock());
    let first = FakeApi::default();
    first.put(&web, &data);
    agent.clusters.add(east(&first));
    agent.until("they are served", |_| keys[..3].iter().all(|key| entry(key).good.is_some())).await;
    agent.until("the absence", |_| entry(&keys[3]).is_withdrawn).await;
    agent.clusters.remove(&ClusterId("east".into()));
    rest(5).await;
    let second = FakeApi::default();
    put_pair(&second, &absent);
    let (chain, key) = pair_of("ca");
    second.put(&web, &[("tls.crt", &*chain), ("tls.key", &*key), ("ca.crt", &*root_of("two"))]);
    agent.clusters.add(east(&second));
    agent.until("what was absent", |_| entry(&keys[3]).good.is_some()).await;
    let root = |key: &Key| match &entry(key).good.unwrap().secret {
        Secret::TrustBundle(bundle) => bundle.facts()[0].names(),
        Secret::KeyPair(pair) => pair.leaf().serial.clone(),
    };
    agent.until("the new roots", |_| root(&keys[2]).contains("two")).await;
    agent.until("one pair", |_| root(&keys[0]) == root(&keys[1])).await;
    agent.until("no watch is left", |_| first.watches().is_empty()).await;
}
