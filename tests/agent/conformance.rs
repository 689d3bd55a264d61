//! What all CA providers have in common, whatever the CA does. Particulars of one provider are in `ca_*.rs`.

use std::collections::HashSet;

use attache::pki::certificate::Certificate;
use attache::pki::pem;

use crate::support::cfssl::FakeCfssl;
use crate::support::fake_ca::FakeCa;
use crate::support::fake_google_cas::FakeGoogleCas;
use crate::support::fake_vault::FakeVault;
use crate::support::issuer::Lie;
use crate::support::kube_api::KubeApi;
use crate::support::pipes::Pipes;
use crate::support::provider::{Behaviour, Embedded, Provider, Site};
use crate::support::sds::{Stream, content, on_connection, secrets, served_serial};

const NO_CERTIFICATE: &[Behaviour] =
    &[Behaviour::Slow, Behaviour::Refuses, Behaviour::Junk, Behaviour::Down, Behaviour::Cut];

const BAD_CERTIFICATE: &[Behaviour] = &[
    Behaviour::Lies(Lie::ForeignKey),
    Behaviour::Lies(Lie::Expired),
    Behaviour::Lies(Lie::NotYetValid),
    Behaviour::Lies(Lie::OtherIdentity),
    Behaviour::Lies(Lie::Unchained),
];

/// For one provider, with one stream open all the time: whatever the CA does before a renewal, the last good
/// certificate is served, the failure is reported once, and the next good answer is pushed.
async fn conforms<P: Provider>() {
    // Concurrently, since the cases mostly wait.
    tokio::join!(
        outlives_all::<P>(NO_CERTIFICATE, "10s"),
        outlives_all::<P>(BAD_CERTIFICATE, "10s"),
        outlives_all::<P>(&[Behaviour::Hangs], "4s"),
    );
}

async fn outlives_all<P: Provider>(behaviours: &[Behaviour], timeout: &str) {
    // Renewal is due 400 ms after each certificate, long before expiry.
    let ratio = (1.0 - 0.4 / P::LIFETIME as f64).to_string();
    let schedule = ["--grace-ratio", &ratio, "--grace-jitter", "0", "--ca-timeout", timeout];
    let more = [&schedule[..], &["--log-level", "attache=debug"]].concat();
    let mut site = Site::<P>::start(Behaviour::Signs, P::LIFETIME, &more).await;
    site.agent.process.wait_log("ready").await;
    on_connection(&site.agent.socket.clone(), async |client| {
        let mut open = Open::new(Stream::open(&client, &["default"]).await.unwrap());
        open.next().await;
        for behaviour in behaviours {
            if *behaviour == Behaviour::Slow {
                waits_for(&mut site, &mut open).await;
            } else if P::expected_log(*behaviour).is_some() {
                outlives(&mut site, &mut open, *behaviour).await;
            }
        }
    })
    .await;
    assert_eq!(site.agent.process.count("panicked"), 0);
    let issued = site.agent.serials().len() as f64;
    assert!(site.count("ok").await >= issued, "{}", P::NAME);
    // The agent must not call a CA whose files are gone.
    site.agent.process.kill().await;
    assert!(site.proxy.is_none_or(|proxy| proxy.most_open() == 1), "{}: calls at the same time", P::NAME);
    assert!(!site.provider.has_overlapped(), "{}: calls at the same time", P::NAME);
}

/// A slow CA is not a failure.
async fn waits_for<P: Provider>(site: &mut Site<P>, open: &mut Open) {
    site.set(Behaviour::Slow);
    // The first call may have been in progress already.
    for _ in 0..2 {
        site.agent.process.wait_next_log("certificate issued").await;
    }
    let issued = site.agent.serials();
    let (_, older) = issued.split_last().unwrap();
    open.until(|serial| !older.contains(serial)).await;
    site.set(Behaviour::Signs);
}

async fn outlives<P: Provider>(site: &mut Site<P>, open: &mut Open, behaviour: Behaviour) {
    let case = format!("{} {behaviour:?}", P::NAME);
    let expected = P::expected_log(behaviour).unwrap();
    // In this order: a call may fail in between.
    let before = site.count(expected.outcome).await;
    let known = site.failures(expected.words[0]).len();
    site.set(behaviour);
    let line = site.wait_failure(expected.words[0], known).await;
    let address = site.proxy.as_ref().filter(|_| expected.has_address).map(|proxy| proxy.address.to_string());
    let common = ["the served certificate is valid until", "retry_in_ms="];
    let words = common.into_iter().chain(expected.words.iter().copied()).chain(address.as_deref());
    for word in words {
        assert!(line.contains(word), "{case}: {word:?} is not in {line}");
    }
    let good = site.agent.serials();
    let last = good.last().unwrap();
    assert_eq!(served_serial(&site.agent.socket).await, *last, "{case}");
    assert_eq!(site.agent.status("/readyz").await.0, 200, "{case}");
    // The CA is called again, and there is nothing new to report.
    site.wait_failure(expected.words[0], known + 1).await;
    assert!(site.count(expected.outcome).await >= before + 2.0, "{case}");
    site.assert_logged_once(expected.words[0]);

    site.set(Behaviour::Signs);
    site.agent.process.wait_next_log("the CA signs again").await;
    open.until(|serial| !good.contains(serial)).await;
}

/// A stream, and what it received.
struct Open {
    stream: Stream,
    serials: HashSet<String>,
    keys: HashSet<String>,
}

impl Open {
    fn new(stream: Stream) -> Self {
        Self { stream, serials: HashSet::new(), keys: HashSet::new() }
    }

    /// Accepts the next certificate, which has a key of its own.
    async fn next(&mut self) -> String {
        let response = self.stream.next().await.unwrap();
        self.stream.accept(&response).await;
        let [secret] = secrets(&response).try_into().unwrap();
        let (chain, key) = content(secret);
        let serial = Certificate::parse(&pem::certificates(chain.as_bytes()).unwrap()[0]).unwrap().serial;
        assert!(self.serials.insert(serial.clone()), "{serial} is pushed twice");
        assert!(self.keys.insert(key.unwrap()), "the key of {serial} was there before");
        serial
    }

    /// Accepts certificates until one is as wanted.
    async fn until(&mut self, is_wanted: impl Fn(&String) -> bool) {
        while !is_wanted(&self.next().await) {}
    }
}

#[tokio::test]
async fn whatever_a_ca_does_the_good_certificate_is_served_and_the_next_good_answer_is_pushed() {
    tokio::join!(
        conforms::<FakeCa>(),
        conforms::<FakeVault>(),
        conforms::<KubeApi>(),
        conforms::<FakeCfssl>(),
        conforms::<FakeGoogleCas>(),
        conforms::<Pipes>(),
        conforms::<Embedded>(),
    );
}
