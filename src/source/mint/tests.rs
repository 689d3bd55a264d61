use std::sync::Mutex;
use std::time::{Duration, UNIX_EPOCH};

use super::*;
use crate::base::clock::Clock;
use crate::ca::embedded::{DevelopmentCa, Embedded};
use crate::ca::failover::Member;
use crate::ca::{CaError, CertificateAuthority, IssuedChain, SigningRequest};
use crate::fs::disk::Disk;
use crate::metrics::Metrics;
use crate::pki::key::{KeyFormat, KeyType};
use crate::secret::{KeyPair, Secret};
use crate::source::issuer::{Grace, IdentitySource};
use crate::store::{Entry, NotServed, Subscription};

const HOUR: Duration = Duration::from_secs(3600);
const IDENTITY: &str = "spiffe://cluster.local/ns/default/sa/gateway";

/// A CA that counts, and fails for a reason while there is one.
#[derive(Clone, Debug)]
struct Counting {
    ca: Arc<Embedded>,
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    /// The DNS names of each request.
    requests: Vec<String>,
    failure: Option<&'static str>,
    /// How long a call takes.
    takes: Duration,
    /// Calls at this moment, and at the busiest one.
    open: usize,
    most: usize,
}

#[tonic::async_trait]
impl CertificateAuthority for Counting {
    fn name(&self) -> &'static str {
        "counting"
    }

    async fn sign(&self, request: &SigningRequest) -> Result<IssuedChain, CaError> {
        let takes = {
            let mut state = self.state.lock().unwrap();
            state.requests.push(request.names.dns_list());
            if let Some(reason) = state.failure {
                return Err(CaError::Local(reason.to_owned()));
            }
            state.open += 1;
            state.most = state.most.max(state.open);
            state.takes
        };
        tokio::time::sleep(takes).await;
        self.state.lock().unwrap().open -= 1;
        self.ca.sign(request).await
    }
}

/// A source that runs.
struct Mint {
    cache: Cache,
    workload: Workload,
    clock: Clock,
    state: Arc<Mutex<State>>,
    _dir: tempfile::TempDir,
}

impl Mint {
    fn open(suffixes: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let clock = Clock::starting_at(UNIX_EPOCH + Duration::from_secs(1_782_000_000));
        let (cache, workload) = Cache::with_workload("");
        let ca = Arc::new(Embedded::from(DevelopmentCa::open(dir.path(), clock.clone()).unwrap()));
        let state = Arc::new(Mutex::new(State::default()));
        let cas = Failover::new(vec![Member::new("counting", Counting { ca, state: Arc::clone(&state) })]);
        let issuer = IssuerSettings {
            identity: IdentitySource::Fixed(IDENTITY.parse().unwrap()),
            names: Names { dns: vec!["own.example".parse().unwrap()], common_name: None },
            key_type: KeyType::EcdsaP256,
            key_format: KeyFormat::Pkcs8,
            ttl: 2 * HOUR,
            grace: Grace { ratio: 0.5, jitter: 0.0 },
            timeout: Duration::from_secs(10),
            drops_old_roots: false,
            state: None,
        };
        let context = IssuerContext {
            clock: clock.clone(),
            metrics: Metrics::default(),
            queue: IssuanceQueue::default(),
            disk: Disk::default(),
        };
        let settings = MintSettings { suffixes: suffixes.iter().map(|text| text.parse().unwrap()).collect() };
        tokio::spawn(MintSource::new(settings, cas, issuer, &cache, workload, context).run());
        Self { cache, workload, clock, state, _dir: dir }
    }

    fn key(&self, host: &str) -> Key {
        Key { workload: self.workload, name: format!("mint://{host}").parse().unwrap() }
    }

    fn subscribe(&self, host: &str) -> Result<Subscription, NotServed> {
        self.cache.subscribe(&self.key(host))
    }

    /// The entry of `host` once `is_wanted`.
    async fn entry(&self, host: &str, is_wanted: impl FnMut(&Entry) -> bool) -> Entry {
        let mut entry = self.cache.watch(&self.key(host)).unwrap();
        let found = tokio::time::timeout(1000 * HOUR, entry.wait_for(is_wanted)).await;
        found.expect("the entry to change").unwrap().clone()
    }

    async fn pair(&self, host: &str) -> KeyPair {
        pair_of(&self.entry(host, |entry| entry.good.is_some()).await)
    }

    fn fail(&self, reason: Option<&'static str>) {
        self.state.lock().unwrap().failure = reason;
    }

    fn requests(&self) -> Vec<String> {
        std::mem::take(&mut self.state.lock().unwrap().requests)
    }
}

fn pair_of(entry: &Entry) -> KeyPair {
    match &entry.good.as_ref().unwrap().secret {
        Secret::KeyPair(pair) => pair.clone(),
        Secret::TrustBundle(_) => panic!("a trust bundle"),
    }
}

#[test]
fn a_suffix_ends_at_a_label() {
    let suffix = |text: &str| text.parse::<Suffix>();
    for (text, covered, others) in [
        (
            ".example.com",
            &["a.example.com", "a.b.example.com"][..],
            &["example.com", "aexample.com", "a.example.co"][..],
        ),
        ("Example.com", &["example.com", "a.example.com"], &["notexample.com", "com", "example.com.evil"]),
        ("test", &["test", "a.test"], &["atest"]),
    ] {
        let suffix = suffix(text).unwrap();
        assert_eq!(suffix.to_string(), text.to_ascii_lowercase());
        assert!(covered.iter().all(|host| suffix.covers(host)), "{text}");
        assert!(!others.iter().any(|host| suffix.covers(host)), "{text}");
    }
    for text in ["", ".", "*.example.com", "a b", "..example.com", "example.com."] {
        assert!(suffix(text).unwrap_err().contains("the shape is .example.com"), "{text}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_host_has_a_certificate_with_its_name_and_the_workloads_identity_which_is_renewed_while_it_is_in_use()
 {
    let mint = Mint::open(&[".example.com"]);
    let stream = mint.subscribe("Web.Example.com").unwrap();
    let first = mint.pair("Web.Example.com").await;
    assert_eq!(first.leaf().dns_names, ["web.example.com"]);
    assert_eq!(first.spiffe_id().unwrap().to_string(), IDENTITY);
    let renews = mint.entry("Web.Example.com", |_| true).await.good.as_ref().unwrap().renews.unwrap();
    assert_eq!(renews.duration_since(mint.clock.now()).unwrap().as_secs() / 60, 60, "half of two hours");
    let serial = first.leaf().serial.clone();
    let is_next = |entry: &Entry| pair_of(entry).leaf().serial != serial;
    let next = pair_of(&mint.entry("Web.Example.com", is_next).await);
    assert!(next.not_after() > first.not_after());
    assert_eq!(mint.requests(), ["web.example.com"; 2]);

    // Without streams it is no longer renewed, and its key is wiped.
    drop(stream);
    tokio::time::sleep(10 * HOUR).await;
    assert_eq!(mint.requests(), [""; 0]);
    assert!(mint.cache.snapshot().is_empty());
    let _stream = mint.subscribe("Web.Example.com").unwrap();
    mint.pair("Web.Example.com").await;
    assert_eq!(mint.requests(), ["web.example.com"]);
}

#[tokio::test(start_paused = true)]
async fn hosts_beneath_no_suffix_are_refused_and_never_requested() {
    let mint = Mint::open(&[".example.com", "other.test"]);
    for host in ["example.com", "evilexample.com", "a.example.com.evil", "test"] {
        assert_eq!(
            mint.subscribe(host).unwrap_err(),
            NotServed::Forbidden("its host is beneath no --mint-suffix")
        );
    }
    let _streams = ["a.example.com", "other.test"].map(|host| mint.subscribe(host).unwrap());
    mint.pair("a.example.com").await;
    mint.pair("other.test").await;
    let mut requests = mint.requests();
    requests.sort_unstable();
    assert_eq!(requests, ["a.example.com", "other.test"]);
}

#[tokio::test(start_paused = true)]
async fn a_failure_keeps_the_good_certificate_and_is_retried() {
    let mint = Mint::open(&[".example.com"]);
    let _stream = mint.subscribe("a.example.com").unwrap();
    let first = mint.pair("a.example.com").await;
    mint.fail(Some("no ink"));
    let failed = mint.entry("a.example.com", |entry| entry.failure().is_some()).await;
    assert!(failed.failure().unwrap().contains("no ink"));
    assert_eq!(pair_of(&failed).leaf().serial, first.leaf().serial);
    // Another host has no certificate, and no other failure.
    let _other = mint.subscribe("b.example.com").unwrap();
    let other = mint.entry("b.example.com", |entry| entry.failure().is_some()).await;
    assert!(other.good.is_none());
    mint.fail(None);
    let now = mint.clock.now();
    mint.pair("b.example.com").await;
    let is_next = |entry: &Entry| pair_of(entry).leaf().serial != first.leaf().serial;
    let next = mint.entry("a.example.com", is_next).await;
    assert!(next.failure().is_none() && next.not_after() > Some(now));
    let waited: Duration = mint.clock.now().duration_since(now).unwrap_or_default();
    assert!(waited < HOUR, "{waited:?}");
}

#[tokio::test(start_paused = true)]
async fn the_number_of_hosts_is_bounded_and_a_host_that_waits_comes_after_one_that_is_released() {
    let mint = Mint::open(&["test"]);
    let mut streams: Vec<_> =
        (0..limits::HOSTS_MINTED).map(|host| mint.subscribe(&format!("{host}.test")).unwrap()).collect();
    for host in 0..limits::HOSTS_MINTED {
        mint.pair(&format!("{host}.test")).await;
    }
    let waiting = [mint.subscribe("first.test").unwrap(), mint.subscribe("second.test").unwrap()];
    let refused = mint.entry("second.test", |entry| entry.failure().is_some()).await;
    assert!(
        refused.failure().unwrap().starts_with("1000 hosts have certificates"),
        "{:?}",
        refused.failure()
    );
    assert_eq!(mint.requests().len(), limits::HOSTS_MINTED);
    // At once, although a host without streams keeps its certificate for a while otherwise.
    drop(streams.pop());
    let now = mint.clock.now();
    mint.pair("first.test").await;
    assert!(mint.clock.now().duration_since(now).unwrap() < Duration::from_secs(1));
    assert_eq!(mint.requests(), ["first.test"]);
    // One that has left while it waited is not requested.
    drop(waiting);
    drop(streams.pop());
    let _third = mint.subscribe("third.test").unwrap();
    mint.pair("third.test").await;
    assert_eq!(mint.requests(), ["third.test"]);
    assert!(mint.cache.watch(&mint.key("second.test")).is_none());
}

#[tokio::test(start_paused = true)]
async fn hosts_leave_half_of_the_calls_to_workloads() {
    let mint = Mint::open(&["test"]);
    mint.state.lock().unwrap().takes = Duration::from_secs(5);
    let _streams: Vec<_> = (0..20).map(|host| mint.subscribe(&format!("{host}.test")).unwrap()).collect();
    for host in 0..20 {
        mint.pair(&format!("{host}.test")).await;
    }
    assert_eq!(mint.requests().len(), 20);
    assert_eq!(mint.state.lock().unwrap().most, PERMITS);
}
