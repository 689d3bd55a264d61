//! The source with a cluster in memory and virtual time.

mod access;
mod groups;
mod model;

use std::time::UNIX_EPOCH;

use super::cluster::Cluster;
use super::testing::{FakeApi, pair_from, pair_of, root_of, secret};
use super::*;
use crate::kube::{ClusterId, Kind, ObjectId};
use crate::pki::crl::testing::Authority;
use crate::pki::ocsp::testing::staple;
use crate::secret::{KubernetesName, Secret};
use crate::store::{Entry, Good, Key, NotServed, Subscription};

/// A source with one cluster, in virtual time.
struct Agent {
    api: FakeApi,
    clusters: Clusters,
    cache: Cache,
    workload: Workload,
    metrics: Metrics,
    _task: tokio::task::JoinHandle<()>,
}

fn settings() -> KubernetesSettings {
    KubernetesSettings { namespace: Some("shop".into()), ..KubernetesSettings::default() }
}

/// A moment at which the certificates of [`pair_of`] are valid.
fn clock() -> Clock {
    Clock::starting_at(UNIX_EPOCH + Duration::from_secs(1_800_000_000))
}

impl Agent {
    fn start() -> Self {
        Self::with(settings())
    }

    fn with(settings: KubernetesSettings) -> Self {
        let api = FakeApi::default();
        let local = Cluster::new(ClusterId("home".into()), Arc::new(api.clone()), None, clock());
        let clusters = Clusters::new(local);
        let (cache, workload) = Cache::with_workload("");
        let metrics = Metrics::default();
        let source =
            KubernetesSource::new(settings, clusters.clone(), &cache, workload, clock(), metrics.clone());
        let task = tokio::spawn(source.unwrap().run());
        Self { api, clusters, cache, workload, metrics, _task: task }
    }

    fn key(&self, name: &str) -> Key {
        let name = name.parse().or_else(|error| {
            let bare = KubernetesName::bare(&name.into()).map(SecretName::Kubernetes);
            bare.ok_or(error)
        });
        Key { workload: self.workload, name: name.unwrap() }
    }

    fn open(&self, name: &str) -> Subscription {
        self.cache.subscribe(&self.key(name)).unwrap()
    }

    fn entry(&self, name: &str) -> Entry {
        let all = self.cache.snapshot();
        let found = all.into_iter().find(|snapshot| snapshot.key.name.as_str() == name);
        found.map(|snapshot| snapshot.entry).unwrap_or_default()
    }

    /// What the leaf of a served key pair is called, with its serial number.
    fn leaf(&self, name: &str) -> Option<String> {
        match &self.entry(name).good?.secret {
            Secret::KeyPair(pair) => Some(pair.leaf().serial.clone()),
            Secret::TrustBundle(bundle) => {
                Some(bundle.facts().iter().map(|root| root.names()).collect::<Vec<_>>().join(" "))
            }
        }
    }

    async fn until(&self, what: &str, mut is_so: impl FnMut(&Self) -> bool) {
        for _ in 0..20_000 {
            if is_so(self) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let entries: Vec<_> =
            self.cache.snapshot().into_iter().map(|it| (it.key, it.entry.failure())).take(5).collect();
        panic!("{what}: {entries:?}");
    }

    async fn until_served(&self, name: &str) -> String {
        self.until(name, |agent| agent.leaf(name).is_some()).await;
        self.leaf(name).unwrap()
    }

    fn failures(&self, reason: &'static str) -> u64 {
        let label = crate::metrics::BySource { source: "kubernetes", reason };
        self.metrics.source_failures.get_or_create_owned(&label).get()
    }
}

fn put_pair(api: &FakeApi, id: &ObjectId) {
    let (chain, key) = pair_of("ca");
    api.put(id, &[("tls.crt", &chain), ("tls.key", &key)]);
}

async fn rest(seconds: u64) {
    tokio::time::sleep(Duration::from_secs(seconds)).await;
}

#[tokio::test(start_paused = true)]
async fn a_secret_is_served_changed_withdrawn_and_served_again() {
    let agent = Agent::start();
    let web = secret("shop", "web");
    put_pair(&agent.api, &web);
    let _stream = agent.open("kubernetes://web");
    let first = agent.until_served("kubernetes://web").await;
    rest(5).await;
    put_pair(&agent.api, &web);
    agent.until("the change", |agent| agent.leaf("kubernetes://web").is_some_and(|leaf| leaf != first)).await;
    agent.api.delete(&web);
    agent.until("the deletion", |agent| agent.entry("kubernetes://web").is_withdrawn).await;
    let reason = agent.entry("kubernetes://web").failure().unwrap();
    assert_eq!(reason, "Secret shop/web does not exist in cluster home");
    put_pair(&agent.api, &web);
    agent.until_served("kubernetes://web").await;
    assert!(!agent.entry("kubernetes://web").is_withdrawn);
}

#[tokio::test(start_paused = true)]
async fn a_deletion_that_the_api_server_does_not_confirm_takes_nothing_away() {
    let agent = Agent::start();
    let web = secret("shop", "web");
    put_pair(&agent.api, &web);
    let _stream = agent.open("kubernetes://web");
    let leaf = agent.until_served("kubernetes://web").await;
    rest(5).await;
    let gets = agent.api.count("get");
    agent.api.lie(&web);
    agent.until("it is read again", |agent| agent.api.count("get") > gets).await;
    rest(5).await;
    assert_eq!(agent.leaf("kubernetes://web"), Some(leaf));
}

#[tokio::test(start_paused = true)]
async fn an_object_has_one_watch_however_many_names_and_streams_and_none_some_minutes_after_the_last() {
    let agent = Agent::start();
    put_pair(&agent.api, &secret("shop", "web"));
    let names = ["kubernetes://web", "sds://web", "kubernetes://shop/web", "kubernetes-gateway://shop/web"];
    let streams: Vec<_> = names.iter().chain(&names).map(|name| agent.open(name)).collect();
    for name in names {
        agent.until_served(name).await;
    }
    rest(5).await;
    assert_eq!(agent.api.watches(), ["Secret shop/web"]);
    assert_eq!((agent.api.count("get"), agent.api.count("watch")), (1, 1));
    let shared: std::collections::HashSet<_> =
        names.map(|name| agent.entry(name).good.unwrap().resource.payload.bytes().as_ptr()).into();
    assert_eq!(shared.len(), 1, "equal content is stored once");
    drop(streams);
    rest(60).await;
    assert_eq!(agent.api.watches().len(), 1, "an Envoy that restarts finds it");
    rest(600).await;
    assert!(agent.api.watches().is_empty() && agent.cache.snapshot().is_empty());
}

#[tokio::test(start_paused = true)]
async fn an_api_server_that_is_away_takes_nothing_away_and_its_return_is_noticed() {
    let agent = Agent::start();
    let web = secret("shop", "web");
    put_pair(&agent.api, &web);
    let _stream = agent.open("kubernetes://web");
    let leaf = agent.until_served("kubernetes://web").await;
    rest(5).await;
    agent.api.lock().is_away = true;
    agent.api.disconnect();
    let _other = agent.open("kubernetes://other");
    agent.until("the reason", |agent| agent.entry("kubernetes://other").failure().is_some()).await;
    let reason = agent.entry("kubernetes://other").failure().unwrap();
    assert!(reason.contains("did not answer"), "{reason}");
    assert!(!agent.entry("kubernetes://other").is_withdrawn);
    rest(3600).await;
    assert_eq!(agent.leaf("kubernetes://web"), Some(leaf.clone()));
    assert!(agent.clusters.status()[0].reachable_since.is_none());
    let calls = agent.api.lock().calls.len();
    assert!(calls < 900, "an hour without an answer took {calls} calls");
    put_pair(&agent.api, &web);
    put_pair(&agent.api, &secret("shop", "other"));
    agent.api.lock().is_away = false;
    agent.until_served("kubernetes://other").await;
    agent.until("the change", |agent| agent.leaf("kubernetes://web").is_some_and(|now| now != leaf)).await;
    assert!(agent.clusters.status()[0].reachable_since.is_some());
}

#[tokio::test(start_paused = true)]
async fn what_happened_while_a_watch_was_broken_is_noticed_also_where_the_history_is_gone() {
    for is_compacted in [false, true] {
        let agent = Agent::start();
        let (web, gone) = (secret("shop", "web"), secret("shop", "gone"));
        put_pair(&agent.api, &web);
        put_pair(&agent.api, &gone);
        let _streams = [agent.open("kubernetes://web"), agent.open("kubernetes://gone")];
        let leaf = agent.until_served("kubernetes://web").await;
        agent.until_served("kubernetes://gone").await;
        rest(5).await;
        agent.api.lock().is_away = true;
        agent.api.disconnect();
        rest(1).await;
        put_pair(&agent.api, &web);
        agent.api.delete(&gone);
        if is_compacted {
            agent.api.compact();
        }
        agent.api.lock().is_away = false;
        agent
            .until("the change", |agent| agent.leaf("kubernetes://web").is_some_and(|now| now != leaf))
            .await;
        agent.until("the deletion", |agent| agent.entry("kubernetes://gone").is_withdrawn).await;
    }
}

#[tokio::test(start_paused = true)]
async fn roots_come_from_the_secret_with_the_suffix_else_from_the_base_name() {
    let agent = Agent::start();
    let (base, suffixed) = (secret("shop", "web"), secret("shop", "web-cacert"));
    let (chain, key) = pair_of("ca");
    agent.api.put(&base, &[("tls.crt", &chain), ("tls.key", &key), ("ca.crt", &root_of("base"))]);
    let _streams = [agent.open("sds://web-cacert"), agent.open("sds://web")];
    assert!(agent.until_served("sds://web-cacert").await.contains("base"));
    agent.until_served("sds://web").await;
    agent.api.put(&suffixed, &[("cacert", &root_of("suffixed"))]);
    agent.until("its own", |agent| agent.leaf("sds://web-cacert").unwrap().contains("suffixed")).await;
    agent.api.delete(&suffixed);
    agent.until("base again", |agent| agent.leaf("sds://web-cacert").unwrap().contains("base")).await;
    let roots = ObjectId { kind: Kind::ConfigMap, ..secret("mesh", "roots") };
    agent.api.put(&roots, &[("ca.crt", &root_of("mapped"))]);
    let _stream = agent.open("configmap://mesh/roots");
    assert!(agent.until_served("configmap://mesh/roots").await.contains("mapped"));
}

#[tokio::test(start_paused = true)]
async fn an_unusable_secret_costs_nothing_and_its_repair_is_served() {
    let agent = Agent::start();
    let web = secret("shop", "web");
    put_pair(&agent.api, &web);
    let _stream = agent.open("kubernetes://web");
    let leaf = agent.until_served("kubernetes://web").await;
    rest(5).await;
    let (chain, _) = pair_of("ca");
    let (_, key) = pair_of("ca");
    agent.api.put(&web, &[("tls.crt", &chain), ("tls.key", &key)]);
    agent.until("the reason", |agent| agent.entry("kubernetes://web").failure().is_some()).await;
    let reason = agent.entry("kubernetes://web").failure().unwrap();
    assert!(
        reason.starts_with("Secret shop/web: tls.crt and tls.key: the private key does not match"),
        "{reason}"
    );
    assert_eq!((agent.leaf("kubernetes://web"), agent.failures("mismatch")), (Some(leaf.clone()), 1));
    put_pair(&agent.api, &web);
    agent.until("the repair", |agent| agent.leaf("kubernetes://web").is_some_and(|now| now != leaf)).await;
    assert_eq!(agent.entry("kubernetes://web").failure(), None);
}

#[tokio::test(start_paused = true)]
async fn a_staple_is_served_with_its_certificate_until_it_expires() {
    let agent = Agent::start();
    let web = secret("shop", "web");
    let (chain, key) = pair_of("ca");
    let put = |staple: &[u8]| {
        let pair = [("tls.crt", chain.as_bytes()), ("tls.key", key.as_bytes())];
        agent.api.put(&web, &[&pair[..], &[("tls.ocsp-staple", staple)]].concat());
    };
    let until_served = async |staple: Option<&[u8]>| {
        let is_served = |agent: &Agent| match agent.entry("kubernetes://web").good.as_deref() {
            Some(Good { secret: Secret::KeyPair(pair), .. }) => {
                pair.staple().map(|staple| staple.der()) == staple
            }
            _ => false,
        };
        agent.until("the staple", is_served).await;
    };
    let _stream = agent.open("kubernetes://web");
    // Neither is usable, and the key pair is served all the same.
    put(b"junk");
    until_served(None).await;
    let serial = agent.leaf("kubernetes://web").unwrap();
    let begin = UNIX_EPOCH + Duration::from_secs(1_800_000_000);
    put(&staple("1234", begin, begin + Duration::from_secs(3600)));
    agent.until("the reason", |agent| agent.failures("ocsp_staple") == 2).await;
    until_served(None).await;
    assert_eq!(agent.entry("kubernetes://web").failure(), None);

    let first = staple(&serial, begin, begin + Duration::from_secs(3600));
    put(&first);
    until_served(Some(&first)).await;
    let second = staple(&serial, begin, begin + Duration::from_secs(7200));
    put(&second);
    until_served(Some(&second)).await;
    rest(7000).await;
    until_served(Some(&second)).await;
    rest(300).await;
    until_served(None).await;
    assert_eq!(agent.failures("ocsp_staple"), 3);
    assert_eq!(agent.leaf("kubernetes://web"), Some(serial));
}

#[tokio::test(start_paused = true)]
async fn a_generation_is_taken_whole() {
    let agent = Agent::start();
    let web = secret("shop", "web");
    let (old, new) = (Authority::root("old"), Authority::root("new"));
    let root =
        |ca: &Authority| String::from_utf8(crate::pki::pem::of_certificates([&ca.certificate])).unwrap();
    let (chain, key) = pair_from(&old);
    agent.api.put(&web, &[("tls.crt", &chain), ("tls.key", &key), ("ca.crt", &root(&old))]);
    let _streams = [agent.open("sds://web"), agent.open("sds://web-cacert")];
    let leaf = agent.until_served("sds://web").await;
    agent.until_served("sds://web-cacert").await;
    rest(5).await;
    // The key is still the old one.
    let (chain, new_key) = pair_from(&new);
    agent.api.put(&web, &[("tls.crt", &chain), ("tls.key", &key), ("ca.crt", &root(&new))]);
    agent.until("the reason", |agent| agent.entry("sds://web-cacert").failure().is_some()).await;
    assert!(agent.leaf("sds://web-cacert").unwrap().contains("old"));
    assert_eq!(agent.leaf("sds://web"), Some(leaf));
    agent.api.put(&web, &[("tls.crt", &chain), ("tls.key", &new_key), ("ca.crt", &root(&new))]);
    agent.until("the new roots", |agent| agent.leaf("sds://web-cacert").unwrap().contains("new")).await;
    assert_eq!(agent.entry("sds://web").failure(), None);
}

#[tokio::test(start_paused = true)]
async fn names_are_refused_without_the_source_and_without_a_namespace() {
    let (cache, workload) = Cache::with_workload("");
    let key = Key { workload, name: "kubernetes://web".parse().unwrap() };
    assert!(
        matches!(cache.subscribe(&key), Err(NotServed::Forbidden(reason)) if reason.contains("--kubernetes-secrets"))
    );
    let agent = Agent::with(KubernetesSettings::default());
    put_pair(&agent.api, &secret("shop", "web"));
    let _streams = [agent.open("kubernetes://web"), agent.open("kubernetes://shop/web")];
    agent.until_served("kubernetes://shop/web").await;
    let reason = agent.entry("kubernetes://web").failure().unwrap();
    assert!(reason.contains("--namespace"), "{reason}");
}

#[tokio::test(start_paused = true)]
async fn a_throttled_cluster_is_left_alone_for_as_long_as_it_asks() {
    let agent = Agent::start();
    put_pair(&agent.api, &secret("shop", "web"));
    agent.api.lock().throttles = Some(Duration::from_secs(30));
    let _stream = agent.open("kubernetes://web");
    rest(25).await;
    assert_eq!(agent.api.lock().calls.len(), 1);
    agent.api.lock().throttles = None;
    agent.until_served("kubernetes://web").await;
}

#[tokio::test(start_paused = true)]
async fn roots_follow_the_base_name_although_the_watch_of_the_other_failed_once() {
    let agent = Agent::start();
    let base = secret("shop", "web");
    let (chain, key) = pair_of("ca");
    let put = |root: &str| {
        agent.api.put(&base, &[("tls.crt", &chain), ("tls.key", &key), ("ca.crt", &root_of(root))]);
    };
    put("one");
    let _stream = agent.open("sds://web-cacert");
    agent.until_served("sds://web-cacert").await;
    rest(10).await;
    agent.api.lock().throttles = Some(Duration::from_secs(1));
    agent.api.disconnect();
    rest(3).await;
    agent.api.lock().throttles = None;
    rest(30).await;
    put("two");
    agent.until("the new roots", |agent| agent.leaf("sds://web-cacert").unwrap().contains("two")).await;
}

#[tokio::test(start_paused = true)]
async fn streams_that_come_and_go_leave_nothing_behind() {
    let agent = Agent::start();
    put_pair(&agent.api, &secret("shop", "web"));
    let first = agent.open("kubernetes://web");
    agent.until_served("kubernetes://web").await;
    drop(first);
    let alive = || tokio::runtime::Handle::current().metrics().num_alive_tasks();
    rest(1).await;
    let before = alive();
    for _ in 0..100 {
        drop(agent.open("kubernetes://web"));
        rest(1).await;
    }
    assert!(alive() <= before, "{} tasks, {before} before", alive());
    rest(900).await;
    assert!(agent.cache.snapshot().is_empty() && agent.api.watches().is_empty());
}

#[tokio::test(start_paused = true)]
async fn one_object_that_the_api_server_can_not_read_stops_no_other() {
    let agent = Agent::start();
    put_pair(&agent.api, &secret("shop", "web"));
    agent.api.lock().broken.insert("Secret shop/broken".to_owned());
    let _streams = [agent.open("kubernetes://broken"), agent.open("kubernetes://web")];
    agent.until_served("kubernetes://web").await;
    rest(300).await;
    assert!(agent.clusters.status()[0].reachable_since.is_some());
    assert_eq!(agent.api.count("probe"), 0);
    let gets = agent.api.count("get Secret shop/broken");
    assert!(gets < 20, "{gets} calls in five minutes");
}
