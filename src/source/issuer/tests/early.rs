//! Certificates that begin only in a moment, because the CA's clock is ahead.

use super::failover::Two;
use super::*;

/// Renewed with 2 minutes left.
fn short_lived() -> IssuerSettings {
    IssuerSettings { ttl: 4 * MINUTE, ..settings() }
}

impl Two {
    /// Two CAs, the first of which has issued the served certificate.
    async fn open_and_issue(settings: IssuerSettings) -> Self {
        let mut two = Self::open(settings);
        let call = two.first().await;
        two.office.issue(call).await;
        two
    }

    /// The first CA signs, and its clock is ahead by `ahead`. It sets notBefore 2 minutes back, as istiod does.
    fn sign_ahead(&self, call: Call, ahead: Duration) {
        let clock = Clock::starting_at(self.office.clock.now() + ahead);
        let ca = DevelopmentCa::open(self.office.dir.path(), clock).unwrap();
        call.answer.send(Ok(answer_of(&ca, &call.request))).unwrap();
    }

    /// How long it takes from here on until another certificate than `old` is served. The second CA is away.
    async fn served_after(&mut self, old: &Version) -> (Duration, usize) {
        let (began, mut calls) = (Instant::now(), 0);
        let mut entries = self.office.watch();
        loop {
            if entries.borrow_and_update().good.as_ref().unwrap().resource.version != *old {
                return (began.elapsed(), calls);
            }
            tokio::select! {
                biased;
                _ = entries.changed() => {}
                Some(_) = self.office.calls.recv() => panic!("the CA whose certificate is waited for is asked again"),
                Some(call) = self.second.recv() => {
                    call.answer.send(Err(unavailable())).unwrap();
                    calls += 1;
                }
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn where_the_served_certificate_expires_before_the_new_one_begins_the_next_ca_is_asked() {
    let mut two = Two::open_and_issue(short_lived()).await;
    let old = two.office.version();
    let call = two.first().await;
    let began = Instant::now();
    two.sign_ahead(call, 5 * MINUTE);
    let second = two.second().await;
    assert_eq!(began.elapsed(), Duration::ZERO, "without a delay");
    two.issue_second(second).await;
    assert_ne!(two.office.version(), old);
    assert_eq!((two.office.count("not_yet_valid"), two.office.count("ok")), (1, 2));
    assert_eq!(two.office.entry().failure(), None);
}

#[tokio::test(start_paused = true)]
async fn where_no_other_ca_signs_the_new_certificate_is_served_when_it_begins() {
    let mut two = Two::open_and_issue(short_lived()).await;
    let old = two.office.version();
    let call = two.first().await;
    two.sign_ahead(call, 5 * MINUTE);
    let (waited, calls) = two.served_after(&old).await;
    assert!((3 * MINUTE - SECOND..=3 * MINUTE + STEP).contains(&waited), "{waited:?}");
    assert!(calls > 5, "the other CA is asked again meanwhile: {calls} calls");
    assert_eq!(two.office.entry().failure(), None);
    // Both are asked again at the next renewal.
    let call = two.first().await;
    two.office.issue(call).await;
}

#[tokio::test(start_paused = true)]
async fn where_the_served_certificate_lasts_no_other_ca_is_asked() {
    let mut two = Two::open_and_issue(settings()).await;
    let old = two.office.version();
    let call = two.first().await;
    two.sign_ahead(call, 5 * MINUTE);
    let (waited, calls) = two.served_after(&old).await;
    assert!((3 * MINUTE - SECOND..=3 * MINUTE + STEP).contains(&waited), "{waited:?}");
    assert_eq!((calls, two.office.count("ok")), (0, 2));
}

#[tokio::test(start_paused = true)]
async fn of_several_that_begin_later_the_first_to_begin_is_waited_for() {
    let mut two = Two::open_and_issue(short_lived()).await;
    let old = two.office.version();
    let call = two.first().await;
    two.sign_ahead(call, 7 * MINUTE);
    let call = two.second().await;
    let clock = Clock::starting_at(two.office.clock.now() + 5 * MINUTE);
    let other = DevelopmentCa::open(&two.office.dir.path().join("other"), clock).unwrap();
    call.answer.send(Ok(answer_of(&other, &call.request))).unwrap();
    let (waited, calls) = two.served_after(&old).await;
    assert!((3 * MINUTE - SECOND..=3 * MINUTE + STEP).contains(&waited), "{waited:?}");
    assert_eq!(calls, 0, "no CA is left that could be asked");
}

#[tokio::test(start_paused = true)]
async fn a_clock_that_is_set_back_meanwhile_ends_the_wait() {
    let mut office = Office::open(settings());
    let call = office.call().await;
    let ahead = Clock::starting_at(office.clock.now() + 5 * MINUTE);
    let ca = DevelopmentCa::open(office.dir.path(), ahead).unwrap();
    call.answer.send(Ok(answer_of(&ca, &call.request))).unwrap();
    office.served(|entry| entry.failure().is_some()).await;
    office.clock.set_by(-3_600_000);
    let set = Instant::now();
    office.call().await;
    assert!(set.elapsed() <= MINUTE, "{:?}", set.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_wrong_certificate_that_begins_later_is_not_waited_for() {
    let mut office = Office::open(settings());
    let call = office.call().await;
    let ahead = Clock::starting_at(office.clock.now() + 5 * MINUTE);
    let ca = DevelopmentCa::open(office.dir.path(), ahead).unwrap();
    let answer = IssuedChain { roots: vec![], ..answer_of(&ca, &call.request) };
    call.answer.send(Ok(answer)).unwrap();
    let answered = Instant::now();
    office.call().await;
    assert!(answered.elapsed() <= 2 * SECOND, "{:?}", answered.elapsed());
    assert_eq!(office.count("no_root"), 1);
}
