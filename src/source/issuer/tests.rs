//! A workload's secrets over years of virtual time, from a CA whose answers the test sends through a channel.

mod clock;
mod early;
mod failover;
mod several;
mod state;
mod switch;

use std::collections::HashSet;
use std::sync::{Arc, Mutex};
use std::task::{Context, Wake, Waker};
use std::time::{SystemTime, UNIX_EPOCH};

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use rustls::pki_types::CertificateDer;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;

use super::*;
use crate::auth::client_cert::ClientCertDir;
use crate::auth::token_file::TokenFile;
use crate::base::spiffe_id::SpiffeId;
use crate::ca::embedded::{DevelopmentCa, Embedded};
use crate::ca::failover::Member;
use crate::ca::{CaError, CertificateAuthority, IssuedChain, Pending, SigningRequest};
use crate::fs::disk::Disk;
use crate::metrics::ByOutcome;
use crate::pki::key::SigningKey;
use crate::pki::{csr, pem};
use crate::secret::{Secret, Version};
use crate::store::health::RenewalHealth;
use crate::store::{Entry, Good};

const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);
const HOUR: Duration = Duration::from_secs(3600);
const DAY: Duration = Duration::from_secs(24 * 3600);
const TTL: Duration = DAY;
/// The longest delay of a renewal after the clock was set.
const STEP: Duration = Duration::from_secs(30);

const KEY_PAIR: Key = Key { workload: Workload::FIRST, name: SecretName::Workload };
const ROOTS: Key = Key { workload: Workload::FIRST, name: SecretName::Roots };

/// Summer of 2026.
fn start() -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(1_782_000_000)
}

fn web() -> SpiffeId {
    "spiffe://cluster.local/ns/default/sa/web".parse().unwrap()
}

fn settings() -> IssuerSettings {
    IssuerSettings {
        identity: IdentitySource::Fixed(web()),
        names: Names::default(),
        key_type: KeyType::EcdsaP256,
        key_format: KeyFormat::Pkcs8,
        ttl: TTL,
        grace: Grace { ratio: 0.5, jitter: 0.01 },
        timeout: 10 * SECOND,
        drops_old_roots: false,
        state: None,
    }
}

/// A CA for which the test answers.
#[derive(Debug)]
struct ChannelCa(mpsc::UnboundedSender<Call>);

#[derive(Debug)]
struct Call {
    request: SigningRequest,
    answer: oneshot::Sender<Result<IssuedChain, CaError>>,
}

#[tonic::async_trait]
impl CertificateAuthority for ChannelCa {
    fn name(&self) -> &'static str {
        "channel"
    }

    async fn sign(&self, request: &SigningRequest) -> Result<IssuedChain, CaError> {
        let (answer, answered) = oneshot::channel();
        self.0.send(Call { request: request.clone(), answer }).expect("the test to receive calls");
        answered.await.expect("an answer")
    }
}

fn unavailable() -> CaError {
    refused(tonic::Code::Unavailable)
}

fn refused(code: tonic::Code) -> CaError {
    CaError::Refused {
        address: "ca:15012".to_owned(),
        code,
        message: "not now".to_owned(),
        retry_after: None,
    }
}

fn answer_of(ca: &DevelopmentCa, request: &SigningRequest) -> IssuedChain {
    let leaf = ca.issue(&request.csr, &web(), request.ttl).unwrap();
    let [intermediate, root] = ca.chain();
    IssuedChain { chain: vec![leaf, intermediate.clone()], roots: vec![root.clone()] }
}

/// An issuer that runs, and everything around it.
struct Office {
    clock: Clock,
    cache: Cache,
    metrics: Metrics,
    calls: mpsc::UnboundedReceiver<Call>,
    /// It has a clock of its own, which stays right when the agent's is set.
    ca: DevelopmentCa,
    dir: tempfile::TempDir,
}

impl Office {
    /// Before the issuer starts.
    fn new() -> (Self, ChannelCa) {
        let dir = tempfile::tempdir().unwrap();
        let (sender, calls) = mpsc::unbounded_channel();
        let ca = DevelopmentCa::open(dir.path(), Clock::starting_at(start())).unwrap();
        let (clock, cache, metrics) =
            (Clock::starting_at(start()), Cache::with_workload("").0, Metrics::default());
        (Self { clock, cache, metrics, calls, ca, dir }, ChannelCa(sender))
    }

    fn issuer(&self, cas: Vec<Member>, settings: IssuerSettings) -> Issuer {
        let (clock, metrics) = (self.clock.clone(), self.metrics.clone());
        let queue = IssuanceQueue::default();
        let context = IssuerContext { clock, metrics, queue, disk: Disk::default() };
        Issuer::new(Failover::new(cas), settings, &self.cache, Workload::FIRST, context)
    }

    fn renewal(&self) -> RenewalHealth {
        self.cache.components(Workload::FIRST).reports().renewal
    }

    fn run(&self, ca: impl CertificateAuthority + 'static, settings: IssuerSettings) {
        tokio::spawn(self.issuer(vec![Member::new("channel", ca)], settings).run());
    }

    /// An issuer that has just started.
    fn open(settings: IssuerSettings) -> Self {
        let (office, ca) = Self::new();
        office.run(ca, settings);
        office
    }

    /// An issuer that has its first certificate.
    async fn open_and_issue(settings: IssuerSettings) -> Self {
        let mut office = Self::open(settings);
        let call = office.call().await;
        office.issue(call).await;
        office
    }

    async fn call(&mut self) -> Call {
        let call = tokio::time::timeout(3 * DAY, self.calls.recv()).await;
        call.expect("the CA to be asked").expect("the issuer to run")
    }

    async fn is_not_asked_for(&mut self, time: Duration) -> bool {
        tokio::time::timeout(time, self.calls.recv()).await.is_err()
    }

    fn answer(&self, request: &SigningRequest) -> IssuedChain {
        answer_of(&self.ca, request)
    }

    /// A CA with a root of its own.
    fn other_ca(&self, name: &str) -> DevelopmentCa {
        DevelopmentCa::open(&self.dir.path().join(name), Clock::starting_at(self.clock.now())).unwrap()
    }

    /// Answers as a CA should, and waits until the certificate is served.
    async fn issue(&self, call: Call) -> Arc<Good> {
        let before = self.entry().good.map(|good| good.resource.version.clone());
        let answer = self.answer(&call.request);
        call.answer.send(Ok(answer)).unwrap();
        let served = self.served(|entry| {
            let version = entry.good.as_ref().map(|good| good.resource.version.clone());
            version.is_some() && version != before
        });
        let good = served.await.good.unwrap();
        assert_eq!(self.entry().failure(), None);
        good
    }

    fn watch(&self) -> watch::Receiver<Entry> {
        self.cache.watch(&KEY_PAIR).unwrap()
    }

    /// The key pair's entry once it is as `expected`.
    async fn served(&self, expected: impl FnMut(&Entry) -> bool) -> Entry {
        let mut entries = self.watch();
        let entry = tokio::time::timeout(HOUR, entries.wait_for(expected)).await;
        entry.expect("the expected entry").unwrap().clone()
    }

    fn entry_of(&self, key: &Key) -> Entry {
        self.cache.watch(key).unwrap().borrow().clone()
    }

    fn entry(&self) -> Entry {
        self.watch().borrow().clone()
    }

    fn version(&self) -> Version {
        self.entry().good.unwrap().resource.version.clone()
    }

    fn count(&self, outcome: &'static str) -> u64 {
        let label = ByOutcome { provider: "channel", outcome };
        self.metrics.ca_requests.get_or_create_owned(&label).get()
    }

    /// How long ago `moment` was (negative if it is yet to come), in seconds.
    fn late(&self, moment: SystemTime) -> f64 {
        match self.clock.now().duration_since(moment) {
            Ok(late) => late.as_secs_f64(),
            Err(early) => -early.duration().as_secs_f64(),
        }
    }

    /// Secrets as files would contain them.
    fn generation(&self) -> (Secret, Secret) {
        let key = SigningKey::generate(KeyType::EcdsaP256).unwrap();
        let csr = csr::request(&key, Some(&web()), &csr::Names::default()).unwrap();
        let request = SigningRequest { csr, identity: Some(web()), names: csr::Names::default(), ttl: TTL };
        let answer = self.answer(&request);
        let (pair, bundle) =
            answer.check(key.to_private_key(), Some(&web()), &Names::default(), self.clock.now()).unwrap();
        (Secret::KeyPair(pair), Secret::TrustBundle(bundle))
    }
}

#[test]
fn the_moment_of_renewal_is_istios() {
    // In seconds after the moment of arrival: notBefore, notAfter; then ratio, jitter, draw; then the renewal.
    let cases: [(i64, u64, f64, f64, f64, u64); 13] = [
        // A fifth of the lifetime is left.
        (0, 1000, 0.2, 0.0, 0.0, 800),
        (0, 1000, 0.5, 0.0, 0.0, 500),
        // notBefore in the past: the time before the arrival does not count.
        (-120, 1000, 0.5, 0.0, 0.0, 500),
        (-86_400, 1000, 0.5, 0.0, 0.0, 500),
        // The agent's clock is behind: the lifetime counts from notBefore.
        (200, 1000, 0.5, 0.0, 0.0, 600),
        // Short lifetimes.
        (-120, 10, 0.5, 0.0, 0.0, 5),
        (0, 1, 0.5, 0.0, 0.0, 0),
        // Jitter is a share of the lifetime, in both directions.
        (0, 1000, 0.5, 0.1, 1.0, 400),
        (0, 1000, 0.5, 0.1, -1.0, 600),
        (0, 1000, 0.5, 0.1, 0.5, 450),
        // It never leaves the lifetime.
        (0, 1000, 1.0, 0.5, 1.0, 0),
        (0, 1000, 0.0, 0.5, -1.0, 1000),
        // Without grace it is the moment of expiry.
        (0, 1000, 0.0, 0.0, 0.0, 1000),
    ];
    let received = start();
    for (not_before, not_after, ratio, jitter, draw, expected) in cases {
        let distance = Duration::from_secs(not_before.unsigned_abs());
        let nb = if not_before < 0 { received - distance } else { received + distance };
        let na = received + Duration::from_secs(not_after);
        let moment = Grace { ratio, jitter }.renewal(nb, na, received, draw);
        let after = moment.duration_since(received).unwrap();
        let off = after.as_secs_f64() - expected as f64;
        // Half of a second is no whole number of seconds.
        assert!(off.abs() <= 0.5, "{not_before} {not_after} {ratio}±{jitter}·{draw}: {after:?}");
    }
    // A certificate that arrives expired is renewed at once: its notAfter is past.
    let moment = Grace { ratio: 0.5, jitter: 0.0 }.renewal(start() - DAY, start() - HOUR, start(), 0.0);
    assert_eq!(moment, start() - HOUR);
}

#[tokio::test(start_paused = true)]
async fn a_year_of_renewals_is_on_time_with_one_call_and_a_fresh_key_each() {
    let mut office = Office::open(settings());
    let (mut keys, mut serials, mut rounds) = (HashSet::new(), HashSet::new(), 0);
    let mut due = start();
    while office.clock.now() < start() + 365 * DAY {
        let call = office.call().await;
        let late = office.late(due);
        assert!((0.0..1.0).contains(&late), "renewal {rounds} is {late} s late");
        assert_eq!(call.request.identity, Some(web()));
        let good = office.issue(call).await;
        let Secret::KeyPair(pair) = &good.secret else { panic!("not a key pair") };
        assert!(keys.insert(pair.leaf().public_key.clone()), "renewal {rounds} reuses a key");
        assert!(serials.insert(pair.leaf().serial.clone()));
        rounds += 1;
        due = good.renews.unwrap();
        let share = pair.not_after().duration_since(due).unwrap().as_secs_f64() / TTL.as_secs_f64();
        // notAfter is a whole second.
        let second = 1.0 / TTL.as_secs_f64();
        assert!((0.49 - second..=0.51 + second).contains(&share), "{share} of the lifetime is left");
    }
    assert!((720..=745).contains(&rounds), "{rounds} renewals");
    assert_eq!(office.count("ok"), rounds);
    assert!(office.calls.try_recv().is_err(), "a call too many");
}

#[tokio::test(start_paused = true)]
async fn certificates_of_ten_seconds_never_expire_unrenewed() {
    let mut office = Office::open(IssuerSettings { ttl: 10 * SECOND, ..settings() });
    let mut ends = None;
    for _ in 0..50 {
        let call = office.call().await;
        assert!(ends.is_none_or(|ends| office.clock.now() < ends), "it expired");
        ends = Some(office.issue(call).await.secret.not_after());
    }
    let took = office.clock.now().duration_since(start()).unwrap();
    assert!(took > 200 * SECOND, "50 renewals in {took:?}");
}

#[tokio::test(start_paused = true)]
async fn however_many_streams_there_are_there_is_one_call() {
    let mut office = Office::open(settings());
    let subscriptions: Vec<_> = (0..100).map(|_| office.cache.subscribe(&KEY_PAIR).unwrap()).collect();
    let call = office.call().await;
    assert!(office.is_not_asked_for(9 * SECOND).await, "a second call while the first is open");
    let version = office.issue(call).await.resource.version.clone();
    for subscription in &subscriptions {
        let served = subscription.entry(|entry| entry.good.as_ref().unwrap().resource.version.clone());
        assert_eq!(served, version);
    }
    assert!(office.is_not_asked_for(11 * HOUR).await);
}

#[tokio::test(start_paused = true)]
async fn a_failed_renewal_keeps_the_old_certificate_past_its_expiry_and_recovers() {
    for code in [tonic::Code::Unavailable, tonic::Code::PermissionDenied] {
        let mut office = Office::open_and_issue(settings()).await;
        let old = office.entry().good.unwrap();
        let (version, ends) = (old.resource.version.clone(), old.secret.not_after());
        let mut last_call = None;
        let (mut failures, mut near_expiry) = (0, 0);
        while office.clock.now() < ends + HOUR {
            let call = office.call().await;
            let now = office.clock.now();
            let since_last = last_call.replace(now).map(|last| now.duration_since(last).unwrap());
            if let Some(since_last) = since_last {
                assert!(since_last >= 250 * Duration::from_millis(1), "a tight loop: {since_last:?}");
                if (ends - 20 * SECOND..ends).contains(&now) {
                    near_expiry += 1;
                    assert!(since_last <= 2 * SECOND, "{since_last:?} near expiry");
                }
            }
            call.answer.send(Err(refused(code))).unwrap();
            office.served(|entry| entry.failure().is_some()).await;
            assert_eq!(office.version(), version);
            failures += 1;
        }
        assert!(near_expiry >= 10, "{near_expiry} calls in the last 20 s");
        let failure = office.entry().failure().unwrap();
        assert!(failure.contains("not now"), "{}", failure);
        let call = office.call().await;
        assert_ne!(office.issue(call).await.resource.version, version);
        assert_eq!((office.count("refused"), office.count("ok")), (failures, 2));
        assert_eq!(office.cache.watch(&ROOTS).unwrap().borrow().failure(), None);
    }
}

#[tokio::test(start_paused = true)]
async fn a_hanging_ca_is_cut_off_and_asked_again() {
    // The lifetime, and how long a call may hang at the first renewal.
    for (ttl, limit) in [(TTL, 10 * SECOND), (24 * SECOND, 3 * SECOND), (10 * SECOND, 2 * SECOND)] {
        let mut office = Office::open_and_issue(IssuerSettings { ttl, ..settings() }).await;
        let version = office.version();
        let mut call = office.call().await;
        let started = Instant::now();
        call.answer.closed().await;
        let hung = started.elapsed();
        assert!(hung.abs_diff(limit) < 200 * Duration::from_millis(1), "{ttl:?}: cut off after {hung:?}");
        let call = office.call().await;
        assert!(started.elapsed() - hung <= SECOND, "{ttl:?}: asked again after {:?}", started.elapsed());
        let failure = office.entry().failure().unwrap();
        assert!(failure.contains("no answer within"), "{}", failure);
        assert_eq!((office.version(), office.count("timeout")), (version, 1));
        office.issue(call).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_ca_that_hangs_at_the_first_call_is_asked_again() {
    let mut office = Office::open(settings());
    let mut call = office.call().await;
    call.answer.closed().await;
    let call = office.call().await;
    assert!(office.late(start()) < 12.0);
    office.issue(call).await;
}

/// A wrong answer: its title, the answer, a part of the reason, the metric's label.
type Wrong = (&'static str, fn(&Office, &SigningRequest) -> IssuedChain, &'static str, &'static str);

const WRONG: [Wrong; 9] = [
    (
        "another key's certificate",
        |office, request| {
            let key = SigningKey::generate(KeyType::EcdsaP256).unwrap();
            let csr = csr::request(&key, Some(&web()), &csr::Names::default()).unwrap();
            office.answer(&SigningRequest { csr, ..request.clone() })
        },
        "for another key",
        "foreign_key",
    ),
    (
        "another workload's certificate",
        |office, request| {
            let other = "spiffe://cluster.local/ns/default/sa/other".parse().unwrap();
            let mut answer = office.answer(request);
            answer.chain[0] = office.ca.issue(&request.csr, &other, request.ttl).unwrap();
            answer
        },
        "names spiffe://cluster.local/ns/default/sa/other, not spiffe://cluster.local/ns/default/sa/web",
        "wrong_identity",
    ),
    (
        "an expired certificate",
        |office, request| issued_at(office, request, start() - 2 * DAY),
        "expired at",
        "expired",
    ),
    (
        "a certificate of the future",
        |office, request| issued_at(office, request, start() + 30 * DAY),
        "valid only from",
        "not_yet_valid",
    ),
    (
        "a certificate of another CA",
        |office, request| {
            let dir = tempfile::tempdir().unwrap();
            let other = DevelopmentCa::open(dir.path(), Clock::starting_at(start())).unwrap();
            let leaf = other.issue(&request.csr, &web(), request.ttl).unwrap();
            IssuedChain { chain: vec![leaf, other.chain()[0].clone()], ..office.answer(request) }
        },
        "does not chain to a root that came with it",
        "unchained",
    ),
    (
        "a chain with a gap",
        |office, request| {
            let mut answer = office.answer(request);
            answer.chain.truncate(1);
            answer
        },
        "does not chain to a root that came with it",
        "unchained",
    ),
    (
        "no root",
        |office, request| IssuedChain { roots: Vec::new(), ..office.answer(request) },
        "names no root",
        "no_root",
    ),
    (
        "no certificate",
        |office, request| IssuedChain { chain: Vec::new(), ..office.answer(request) },
        "holds no certificate",
        "junk",
    ),
    (
        "junk instead of a certificate",
        |office, request| {
            let mut answer = office.answer(request);
            answer.chain[0] = CertificateDer::from(b"hello".to_vec());
            answer
        },
        "can't be read",
        "junk",
    ),
];

/// The same CA's answer, with the CA's clock at `moment`.
fn issued_at(office: &Office, request: &SigningRequest, moment: SystemTime) -> IssuedChain {
    let ca = DevelopmentCa::open(office.dir.path(), Clock::starting_at(moment)).unwrap();
    let leaf = ca.issue(&request.csr, &web(), request.ttl).unwrap();
    IssuedChain { chain: vec![leaf, ca.chain()[0].clone()], roots: vec![ca.chain()[1].clone()] }
}

#[tokio::test(start_paused = true)]
async fn a_wrong_answer_is_reported_and_not_served() {
    for (title, wrong, words, label) in WRONG {
        let mut office = Office::open_and_issue(settings()).await;
        let version = office.version();
        let call = office.call().await;
        let answer = wrong(&office, &call.request);
        call.answer.send(Ok(answer)).unwrap();
        let entry = office.served(|entry| entry.failure().is_some()).await;
        let reason = &entry.failure().unwrap();
        assert!(
            reason.contains("the CA's response is invalid") && reason.contains(words),
            "{title}: {reason}"
        );
        assert_eq!(office.version(), version, "{title}");
        assert_eq!((office.count(label), office.count("ok")), (1, 1), "{title}");
        let roots = office.cache.watch(&ROOTS).unwrap().borrow().clone();
        assert!(roots.good.is_some() && roots.failure().is_some(), "{title}");
        let call = office.call().await;
        assert_ne!(office.issue(call).await.resource.version, version, "{title}");
    }
}

/// Notes, when it is woken, whether there is a key pair.
struct Witness {
    key_pair: watch::Receiver<Entry>,
    saw: Mutex<Vec<bool>>,
}

impl Wake for Witness {
    fn wake(self: Arc<Self>) {
        self.saw.lock().unwrap().push(self.key_pair.borrow().good.is_some());
    }
}

#[tokio::test(start_paused = true)]
async fn the_roots_are_published_before_the_key_pair() {
    let mut office = Office::open(settings());
    let call = office.call().await;
    let witness = Arc::new(Witness { key_pair: office.watch(), saw: Mutex::default() });
    let mut roots = office.cache.watch(&ROOTS).unwrap();
    let mut changed = std::pin::pin!(roots.changed());
    let waker = Waker::from(Arc::clone(&witness));
    assert!(changed.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
    office.issue(call).await;
    assert_eq!(*witness.saw.lock().unwrap(), [false], "the key pair was published before the roots");
}

#[tokio::test(start_paused = true)]
async fn the_ca_is_not_asked_for_what_files_hold_until_they_are_gone() {
    let (mut office, ca) = Office::new();
    let files = [KEY_PAIR, ROOTS].map(|key| office.cache.publisher(key, Origin::FILES));
    let (pair, roots) = office.generation();
    files[0].publish(pair, office.clock.now(), None);
    files[1].publish(roots, office.clock.now(), None);
    office.run(ca, settings());
    assert!(office.is_not_asked_for(HOUR).await);
    let version = office.version();
    files.iter().for_each(|files| files.release(None));
    // The CA takes over when it would renew a certificate of its own: with half of the day left.
    let call = office.call().await;
    let late = office.late(start() + 12 * HOUR);
    assert!((0.0..1.0).contains(&late), "{late} s after half of the lifetime");
    assert_eq!(office.version(), version, "the files' certificate is served until then");
    assert_eq!(office.issue(call).await.origin, Origin::CA);
}

#[tokio::test(start_paused = true)]
async fn the_ca_is_not_asked_for_an_expired_pair_that_files_hold() {
    let (mut office, ca) = Office::new();
    let files = [KEY_PAIR, ROOTS].map(|key| office.cache.publisher(key, Origin::FILES));
    let (pair, roots) = office.generation();
    files[0].publish(pair, office.clock.now(), None);
    files[1].publish(roots, office.clock.now(), None);
    office.run(ca, settings());
    assert!(office.is_not_asked_for(2 * TTL).await);
    files.iter().for_each(|files| files.release(None));
    office.call().await;
    assert!(office.late(start() + 2 * TTL) < 1.0, "released after its expiry, it is replaced at once");
}

#[tokio::test(start_paused = true)]
async fn files_that_take_over_during_the_backoff_end_it() {
    let mut office = Office::open(settings());
    for _ in 0..5 {
        office.call().await.answer.send(Err(unavailable())).unwrap();
        office.served(|entry| entry.failure().is_some()).await;
    }
    assert!(office.renewal().failed_rounds > 0);
    let files = [KEY_PAIR, ROOTS].map(|key| office.cache.publisher(key, Origin::FILES));
    let (pair, roots) = office.generation();
    files[0].publish(pair, office.clock.now(), None);
    files[1].publish(roots, office.clock.now(), None);
    assert!(office.is_not_asked_for(TTL).await);
    assert_eq!((office.entry().failure(), office.renewal().failed_rounds), (None, 0));
}

#[tokio::test(start_paused = true)]
async fn a_failing_ca_is_not_asked_in_a_tight_loop_for_the_roots_that_files_lack() {
    let (mut office, ca) = Office::new();
    let files = office.cache.publisher(KEY_PAIR, Origin::FILES);
    let (pair, _) = office.generation();
    files.publish(pair, office.clock.now(), None);
    office.run(ca, settings());
    let mut calls = 0;
    while office.clock.now() < start() + MINUTE {
        office.call().await.answer.send(Err(unavailable())).unwrap();
        calls += 1;
        assert!(calls < 100, "{calls} calls in {} s", office.late(start()));
    }
    // The roots come from the CA, the pair stays the files'.
    let call = office.call().await;
    call.answer.send(Ok(office.answer(&call.request))).unwrap();
    let mut roots = office.cache.watch(&ROOTS).unwrap();
    roots.wait_for(|entry| entry.good.is_some()).await.unwrap();
    assert_eq!(office.entry().holder, Some(Origin::FILES));
}

#[tokio::test(start_paused = true)]
async fn a_clock_that_is_set_by_an_hour_moves_the_renewal_with_it() {
    for millis in [3_600_000, -3_600_000] {
        let mut office = Office::open_and_issue(settings()).await;
        let due = office.entry().good.unwrap().renews.unwrap();
        tokio::time::sleep(HOUR).await;
        office.clock.set_by(millis);
        let call = office.call().await;
        let late = office.late(due);
        assert!((0.0..=STEP.as_secs_f64()).contains(&late), "{late} s late after {millis} ms");
        call.answer.send(Ok(office.answer(&call.request))).unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn a_machine_that_slept_renews_within_half_a_minute() {
    let mut office = Office::open_and_issue(settings()).await;
    tokio::time::sleep(HOUR).await;
    office.clock.set_by(20 * 3_600_000);
    let woke = Instant::now();
    office.call().await;
    assert!(woke.elapsed() <= STEP, "{:?}", woke.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_clock_that_is_ten_years_ahead_costs_calls_but_not_the_certificate() {
    let mut office = Office::open_and_issue(settings()).await;
    let (version, due) = (office.version(), office.entry().good.unwrap().renews.unwrap());
    let years = 3650 * 86_400_000;
    office.clock.set_by(years);
    let mut calls = 0;
    let wrong = Instant::now();
    while wrong.elapsed() < HOUR {
        // The CA's clock is right, so its certificates look expired.
        let call = office.call().await;
        call.answer.send(Ok(office.answer(&call.request))).unwrap();
        calls += 1;
        while office.count("expired") < calls {
            tokio::task::yield_now().await;
        }
    }
    assert!((60..600).contains(&calls), "{calls} calls in an hour");
    assert_eq!(office.version(), version);
    office.clock.set_by(-years);
    let call = office.call().await;
    let late = office.late(due);
    assert!((0.0..=STEP.as_secs_f64()).contains(&late), "{late} s late once the clock is right again");
    assert_ne!(office.issue(call).await.resource.version, version);
}

#[tokio::test(start_paused = true)]
async fn a_clock_that_was_ten_years_behind_for_an_hour_costs_calls_but_not_the_certificate() {
    let mut office = Office::open_and_issue(settings()).await;
    let (version, due) = (office.version(), office.entry().good.unwrap().renews.unwrap());
    let years = 3650 * 86_400_000;
    office.clock.set_by(-years);
    // By this clock neither the certificate nor those of the CA, whose clock is right, have begun.
    let began = Instant::now();
    let mut calls = 0;
    while began.elapsed() < HOUR {
        let call = office.call().await;
        let answer = office.answer(&call.request);
        call.answer.send(Ok(answer)).unwrap();
        calls += 1;
    }
    assert!(calls < 40, "{calls} calls in an hour");
    // The last answer is also checked against the wrong clock.
    tokio::time::sleep(SECOND).await;
    assert_eq!(office.version(), version);
    office.clock.set_by(years);
    office.call().await;
    let late = office.late(due);
    assert!((0.0..=STEP.as_secs_f64()).contains(&late), "{late} s late");
}

fn token(namespace: &str, name: &str) -> String {
    let payload = format!(r#"{{"sub":"system:serviceaccount:{namespace}:{name}"}}"#);
    format!("{}.{}.c2ln", URL_SAFE_NO_PAD.encode("{}"), URL_SAFE_NO_PAD.encode(payload))
}

#[tokio::test]
async fn configured_parts_of_the_identity_take_precedence_over_the_tokens() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("token");
    let resolve = async |namespace: Option<&str>, service_account: Option<&str>| {
        let identity = IdentitySource::Token {
            file: TokenFile::new(&path),
            client_cert: Some(ClientCertDir::new(dir.path())),
            trust_domain: "td".to_owned(),
            namespace: namespace.map(str::to_owned),
            service_account: service_account.map(str::to_owned),
        };
        identity.resolve(&Clock::system(), &Disk::default()).await.map(|identity| identity.to_string())
    };
    let configured = Some("spiffe://td/ns/here/sa/me".to_owned());
    assert_eq!(resolve(None, None).await, None, "no token");
    assert_eq!(resolve(Some("here"), Some("me")).await, configured, "no token is needed");
    std::fs::write(&path, "opaque").unwrap();
    assert_eq!(resolve(None, Some("me")).await, None, "an opaque token");
    std::fs::write(&path, token("shop", "cart")).unwrap();
    assert_eq!(resolve(None, None).await.unwrap(), "spiffe://td/ns/shop/sa/cart");
    assert_eq!(resolve(Some("here"), None).await.unwrap(), "spiffe://td/ns/here/sa/cart");
    assert_eq!(resolve(None, Some("me")).await.unwrap(), "spiffe://td/ns/shop/sa/me");
    std::fs::write(&path, token("sh op", "cart")).unwrap();
    assert_eq!(resolve(None, None).await, None, "a token whose names make no SPIFFE ID");

    // With a client certificate the CA is called with that instead.
    let ca = DevelopmentCa::open(&dir.path().join("ca"), Clock::system()).unwrap();
    let key = SigningKey::generate(KeyType::default()).unwrap();
    let csr = csr::request(&key, None, &csr::Names::default()).unwrap();
    let leaf = ca.issue(&csr, &"spiffe://other/ns/shop/sa/till".parse().unwrap(), MINUTE).unwrap();
    std::fs::write(dir.path().join("cert-chain.pem"), pem::of_certificates([&leaf])).unwrap();
    std::fs::write(dir.path().join("key.pem"), key.to_private_key().to_pem()).unwrap();
    assert_eq!(resolve(None, None).await.unwrap(), "spiffe://other/ns/shop/sa/till");
    assert_eq!(resolve(Some("here"), None).await.unwrap(), "spiffe://other/ns/here/sa/till");
}

#[tokio::test(start_paused = true)]
async fn a_token_that_appears_later_is_used_at_the_next_retry() {
    let (office, _) = Office::new();
    let file = office.dir.path().join("token");
    let identity = IdentitySource::Token {
        file: TokenFile::new(&file),
        client_cert: None,
        trust_domain: "cluster.local".to_owned(),
        namespace: None,
        service_account: None,
    };
    let ca = DevelopmentCa::open(office.dir.path(), office.clock.clone()).unwrap();
    office.run(Embedded::from(ca), IssuerSettings { identity, ..settings() });
    let failed = office.served(|entry| entry.failure().is_some()).await;
    assert!(failed.failure().unwrap().contains("needs an identity") && failed.good.is_none());
    tokio::time::sleep(10 * MINUTE).await;
    std::fs::write(&file, token("shop", "cart")).unwrap();
    let appeared = Instant::now();
    let good = office.served(|entry| entry.good.is_some()).await.good.unwrap();
    assert!(appeared.elapsed() <= STEP, "{:?}", appeared.elapsed());
    let Secret::KeyPair(pair) = &good.secret else { panic!("not a key pair") };
    assert_eq!(pair.spiffe_id().unwrap().as_str(), "spiffe://cluster.local/ns/shop/sa/cart");
}

#[tokio::test(start_paused = true)]
async fn an_rsa_key_is_generated_and_certified() {
    let key_format = KeyFormat::Traditional;
    let mut office = Office::open(IssuerSettings { key_type: KeyType::Rsa2048, key_format, ..settings() });
    let call = office.call().await;
    let good = office.issue(call).await;
    let Secret::KeyPair(pair) = &good.secret else { panic!("not a key pair") };
    assert_eq!(pair.leaf().key_type, "RSA 2048");
    assert!(pair.key().to_pem().starts_with(b"-----BEGIN RSA PRIVATE KEY-----"));
}

/// A CA that leaves requests pending, as the test says.
#[derive(Debug)]
struct SlowCa {
    office: ChannelCa,
    pending: Arc<Mutex<Option<Pending>>>,
    tidied: mpsc::UnboundedSender<()>,
}

#[tonic::async_trait]
impl CertificateAuthority for SlowCa {
    fn name(&self) -> &'static str {
        "channel"
    }

    async fn sign(&self, request: &SigningRequest) -> Result<IssuedChain, CaError> {
        self.office.sign(request).await
    }

    fn pending(&self) -> Option<Pending> {
        self.pending.lock().unwrap().clone()
    }

    async fn tidy(&self) {
        let _ = self.tidied.send(());
        std::future::pending().await
    }
}

#[tokio::test(start_paused = true)]
async fn a_pending_request_is_repeated_with_the_same_key_until_it_is_settled() {
    let (mut office, ca) = Office::new();
    let pending: Arc<Mutex<Option<Pending>>> = Arc::default();
    let (tidied, mut tidyings) = mpsc::unbounded_channel();
    office.run(SlowCa { office: ca, pending: Arc::clone(&pending), tidied }, settings());
    let set = |state: Option<Option<&str>>| {
        let state = state.map(|words| Pending { waits_for: words.map(str::to_owned) });
        *pending.lock().unwrap() = state;
    };
    let is_failure = |words: &'static str| {
        move |entry: &Entry| entry.failure().is_some_and(|failure| failure.contains(words))
    };
    // Cut off while it waits, cut off without a message, and failed: it is the same request each time.
    let first = office.call().await;
    set(Some(Some("waits for approval")));
    office.served(is_failure("waits for approval")).await;
    let second = office.call().await;
    assert_eq!(second.request, first.request);
    set(Some(None));
    office.served(is_failure("no answer within 10s")).await;
    let third = office.call().await;
    assert_eq!(third.request, first.request);
    third.answer.send(Err(unavailable())).unwrap();
    let fourth = office.call().await;
    assert_eq!(fourth.request, first.request);
    // Nothing of it is pending: the next request is another one.
    set(None);
    fourth.answer.send(Err(refused(tonic::Code::PermissionDenied))).unwrap();
    let fifth = office.call().await;
    assert_ne!(fifth.request, first.request);
    // An answer that is not used settles it, even if the client still reports it as pending.
    set(Some(None));
    let stranger = office.answer(&first.request);
    fifth.answer.send(Ok(stranger)).unwrap();
    let sixth = office.call().await;
    assert_ne!(sixth.request, first.request);
    office.issue(sixth).await;
    assert_eq!((office.count("pending"), office.count("timeout"), office.count("foreign_key")), (1, 1, 1));
    // The client cleans up each time, and a CA that hangs then delays the next call by no more than a call's time.
    for _ in 0..6 {
        tidyings.recv().await.unwrap();
    }
    assert!(tidyings.try_recv().is_err());
}
