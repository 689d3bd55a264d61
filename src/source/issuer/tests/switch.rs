//! The CA changes its root.

use super::*;
use crate::store::Subscription;

/// An office whose CA has issued a certificate, and a stream that has accepted the roots.
struct Switch {
    office: Office,
    new: DevelopmentCa,
    stream: Subscription,
}

impl Switch {
    async fn open(settings: IssuerSettings) -> Self {
        let office = Office::open_and_issue(settings).await;
        let new = office.other_ca("new");
        let mut stream = office.cache.subscribe(&ROOTS).unwrap();
        stream.accepted(office.entry_of(&ROOTS).good.unwrap().resource.version.clone());
        Self { office, new, stream }
    }

    /// The CA answers the next call with a leaf of its new root. Returns when the new roots are published.
    async fn answer(&mut self) {
        let call = self.office.call().await;
        let mut roots = self.office.cache.watch(&ROOTS).unwrap();
        roots.mark_unchanged();
        call.answer.send(Ok(answer_of(&self.new, &call.request))).unwrap();
        roots.changed().await.unwrap();
    }

    fn roots(&self) -> Vec<CertificateDer<'static>> {
        let good = self.office.entry_of(&ROOTS).good.unwrap();
        let Secret::TrustBundle(bundle) = &good.secret else { panic!("not a bundle") };
        bundle.roots().to_vec()
    }

    fn served(&self) -> Version {
        self.office.entry_of(&ROOTS).good.unwrap().resource.version.clone()
    }

    /// How long it takes from here on until the new leaf is served.
    async fn leaf_comes_after(&self, old: &Version) -> Duration {
        let began = Instant::now();
        self.office.served(|entry| entry.good.as_ref().unwrap().resource.version != *old).await;
        began.elapsed()
    }
}

#[tokio::test(start_paused = true)]
async fn the_leaf_waits_until_every_stream_has_accepted_both_roots() {
    let mut switch = Switch::open(settings()).await;
    let mut late = switch.office.cache.subscribe(&ROOTS).unwrap();
    let old = switch.office.version();
    switch.answer().await;
    let [old_root, new_root] = [&switch.office.ca, &switch.new].map(|ca| ca.chain()[1].clone());
    let roots = switch.roots();
    assert!(roots.len() == 2 && roots.contains(&old_root) && roots.contains(&new_root));
    let both = switch.served();
    switch.stream.accepted(both.clone());
    tokio::time::sleep(SECOND).await;
    assert_eq!(switch.office.version(), old, "the other stream has not accepted them");
    late.accepted(both);
    assert_eq!(switch.leaf_comes_after(&old).await, Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn the_leaf_does_not_wait_for_ever() {
    // No stream answers.
    let mut switch = Switch::open(settings()).await;
    let old = switch.office.version();
    switch.answer().await;
    assert_eq!(switch.leaf_comes_after(&old).await, 5 * SECOND);

    // A rejection: waiting is of no use.
    let mut switch = Switch::open(settings()).await;
    let old = switch.office.version();
    switch.answer().await;
    switch.stream.rejected(switch.served(), "no room");
    assert_eq!(switch.leaf_comes_after(&old).await, Duration::ZERO);

    // A stream that is closed is not waited for.
    let mut switch = Switch::open(settings()).await;
    let old = switch.office.version();
    switch.answer().await;
    switch.stream = switch.office.cache.subscribe(&KEY_PAIR).unwrap();
    assert_eq!(switch.leaf_comes_after(&old).await, Duration::ZERO);

    // Of 10 s, 5 are left at the renewal: it waits half of that at most.
    let mut switch = Switch::open(IssuerSettings { ttl: 10 * SECOND, ..settings() }).await;
    let old = switch.office.version();
    switch.answer().await;
    let waited = switch.leaf_comes_after(&old).await;
    assert!(SECOND < waited && waited <= 3 * SECOND, "{waited:?}");
}

#[tokio::test(start_paused = true)]
async fn the_old_root_stays_for_one_lifetime_after_the_switch() {
    let mut switch = Switch::open(settings()).await;
    drop(std::mem::replace(&mut switch.stream, switch.office.cache.subscribe(&KEY_PAIR).unwrap()));
    let old = switch.office.version();
    switch.answer().await;
    assert_eq!(switch.leaf_comes_after(&old).await, Duration::ZERO, "no stream is subscribed to the roots");
    let switched = switch.office.clock.now();
    let new_root = switch.new.chain()[1].clone();
    while switch.roots().len() == 2 {
        let mut roots = switch.office.cache.watch(&ROOTS).unwrap();
        roots.mark_unchanged();
        tokio::select! {
            call = switch.office.call() => {
                assert!(switch.office.clock.now() < switched + 25 * HOUR, "the old root is not dropped");
                call.answer.send(Ok(answer_of(&switch.new, &call.request))).unwrap();
            }
            _ = roots.changed() => {}
        }
    }
    assert_eq!(switch.roots(), [new_root]);
    let stayed = switch.office.clock.now().duration_since(switched).unwrap();
    assert!((DAY - 2 * SECOND..=DAY + STEP).contains(&stayed), "{stayed:?}");
}

#[tokio::test(start_paused = true)]
async fn a_root_that_was_announced_needs_no_waiting() {
    let mut switch = Switch::open(settings()).await;
    // Still the old CA's leaf, and both roots.
    let call = switch.office.call().await;
    let mut answer = switch.office.answer(&call.request);
    answer.roots.push(switch.new.chain()[1].clone());
    let (old, mut roots) = (switch.office.version(), switch.office.cache.watch(&ROOTS).unwrap());
    roots.mark_unchanged();
    call.answer.send(Ok(answer)).unwrap();
    roots.changed().await.unwrap();
    assert_eq!(switch.roots().len(), 2);
    switch.stream.accepted(switch.served());
    switch.leaf_comes_after(&old).await;
    let (old, both) = (switch.office.version(), switch.served());
    let call = switch.office.call().await;
    call.answer.send(Ok(answer_of(&switch.new, &call.request))).unwrap();
    assert_eq!(switch.leaf_comes_after(&old).await, Duration::ZERO);
    assert_eq!(switch.served(), both, "the bundle is the same");
}

#[tokio::test(start_paused = true)]
async fn in_an_emergency_the_old_root_is_dropped_at_once() {
    let mut switch = Switch::open(IssuerSettings { drops_old_roots: true, ..settings() }).await;
    switch.answer().await;
    assert_eq!(switch.roots(), [switch.new.chain()[1].clone()]);
}

#[tokio::test(start_paused = true)]
async fn a_certificate_that_begins_in_a_moment_is_served_then() {
    let mut office = Office::open_and_issue(settings()).await;
    let old = office.version();
    let call = office.call().await;
    // notBefore is 2 minutes before the CA's time, as istiod does it.
    let ahead = |by: Duration| {
        DevelopmentCa::open(office.dir.path(), Clock::starting_at(office.clock.now() + by)).unwrap()
    };
    let (few, many) = (ahead(5 * MINUTE), ahead(20 * MINUTE));
    let began = Instant::now();
    call.answer.send(Ok(answer_of(&few, &call.request))).unwrap();
    let failed = office.served(|entry| entry.failure().is_some()).await;
    assert!(failed.failure().unwrap().contains("valid only from"), "{:?}", failed.failure());
    assert_eq!(office.version(), old);
    office.served(|entry| entry.good.as_ref().unwrap().resource.version != old).await;
    let waited = began.elapsed();
    assert!((3 * MINUTE - SECOND..=3 * MINUTE + STEP).contains(&waited), "{waited:?}");
    assert_eq!((office.entry().failure(), office.count("ok")), (None, 2));

    // More than the tolerated skew.
    let call = office.call().await;
    call.answer.send(Ok(answer_of(&many, &call.request))).unwrap();
    office.served(|entry| entry.failure().is_some()).await;
    office.call().await;
    assert_eq!(office.count("not_yet_valid"), 1);
}
