//! What every provider of certificates has in common, whatever its CA does. What is particular to one is in `ca_*.rs`.

use std::collections::HashSet;
use std::time::Duration;

use attache::pki::certificate::Certificate;
use attache::pki::pem;

use crate::support::cfssl::FakeCfssl;
use crate::support::fake_ca::FakeCa;
use crate::support::fake_vault::FakeVault;
use crate::support::issuer::Lie;
use crate::support::kube_api::KubeApi;
use crate::support::pipes::Pipes;
use crate::support::provider::{Behaviour, Embedded, Provider, Site};
use crate::support::sds::{Stream, content, on_connection, secrets, served_serial};

const NO_CERTIFICATE: &[Behaviour] =
    &[Behaviour::Refuses, Behaviour::Hangs, Behaviour::Junk, Behaviour::Down, Behaviour::Cut];

const BAD_CERTIFICATE: &[Behaviour] = &[
    Behaviour::Lies(Lie::ForeignKey),
    Behaviour::Lies(Lie::Expired),
    Behaviour::Lies(Lie::NotYetValid),
    Behaviour::Lies(Lie::OtherIdentity),
    Behaviour::Lies(Lie::Unchained),
];

/// Of one provider, with a stream that is open all the time: whatever the CA does before a renewal, the last good
/// certificate is served, the failure is told once, and the next good answer is pushed.
async fn conforms<P: Provider>() {
    // All at once: most of it is waiting.
    tokio::join!(outlives_all::<P>(NO_CERTIFICATE), outlives_all::<P>(BAD_CERTIFICATE));
}

async fn outlives_all<P: Provider>(behaviours: &[Behaviour]) {
    // Renewal is due 400 ms after each certificate, long before its end.
    let ratio = (1.0 - 0.4 / P::LIFETIME as f64).to_string();
    let more = ["--grace-ratio", &ratio, "--grace-jitter", "0", "--ca-timeout", "2s"];
    let mut site = Site::<P>::start(Behaviour::Signs, P::LIFETIME, &more).await;
    site.agent.process.wait_log("ready").await;
    on_connection(&site.agent.socket.clone(), async |client| {
        let mut open = Open::new(Stream::open(&client, &["default"]).await.unwrap());
        open.next().await;
        for behaviour in behaviours {
            if P::told(*behaviour).is_some() {
                outlives(&mut site, &mut open, *behaviour).await;
            }
        }
        let before = site.agent.process.count("WARN");
        site.set(Behaviour::Slow);
        for _ in 0..2 {
            site.agent.process.wait_next_log("certificate issued").await;
        }
        assert_eq!(site.agent.process.count("WARN"), before, "{}:\n{}", P::NAME, site.agent.process.log());
        let newest = site.agent.serials();
        open.until(|serial| !newest[..newest.len() - 1].contains(serial)).await;
    })
    .await;
    assert_eq!(site.agent.process.count("panicked"), 0);
    let issued = site.agent.serials().len() as f64;
    assert!(site.count("ok").await >= issued, "{}", P::NAME);
    assert!(site.proxy.is_none_or(|proxy| proxy.most_open() == 1), "{}: calls at the same time", P::NAME);
    assert!(!site.provider.has_overlapped(), "{}: calls at the same time", P::NAME);
}

async fn outlives<P: Provider>(site: &mut Site<P>, open: &mut Open, behaviour: Behaviour) {
    let case = format!("{} {behaviour:?}", P::NAME);
    let told = P::told(behaviour).unwrap();
    let (known, before) = (site.agent.process.count(told.words[0]), site.count(told.outcome).await);
    site.set(behaviour);
    let (_, line) = site.agent.process.wait_log_times(told.words[0], known + 1).await;
    let address = site.proxy.as_ref().filter(|_| told.has_address).map(|proxy| proxy.address.to_string());
    let common = ["WARN", "no new certificate", "the certificate that is served is valid until", "retry="];
    let words = common.into_iter().chain(told.words.iter().copied()).chain(address.as_deref());
    for word in words {
        assert!(line.contains(word), "{case}: {word:?} is not in {line}");
    }
    let good = site.agent.serials();
    let last = good.last().unwrap();
    // The CA is called again, and nothing new is to be said.
    while site.count(told.outcome).await < before + 2.0 {
        assert_eq!(served_serial(&site.agent.socket).await, *last, "{case}");
        assert_eq!(site.agent.status("/readyz").await.0, 200, "{case}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    site.assert_told_once();

    site.set(Behaviour::Signs);
    site.agent.process.wait_next_log("the CA signs again").await;
    open.until(|serial| !good.contains(serial)).await;
}

/// A stream, and what came on it.
struct Open {
    stream: Stream,
    serials: HashSet<String>,
    keys: HashSet<String>,
}

impl Open {
    fn new(stream: Stream) -> Self {
        Self { stream, serials: HashSet::new(), keys: HashSet::new() }
    }

    /// Takes the next certificate, which has a key of its own.
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

    /// Takes what comes until it is as wanted.
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
        conforms::<Pipes>(),
        conforms::<Embedded>(),
    );
}
