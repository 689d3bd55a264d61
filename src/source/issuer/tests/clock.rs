//! What happens when the wall clock is set, or the machine sleeps, in each phase of a certificate's life.
//!
//! | phase | a jump changes | and not |
//! |---|---|---|
//! | before the first certificate | the delays after the next call | when the next call comes |
//! | during a call | whether the answer is valid now | how long the call may take |
//! | until the renewal | how long that is: an overdue renewal starts within half a minute | what is served |
//! | between two calls for it | whether it is still due | when the next call comes, if it is |
//!
//! There is some time between any two calls, whatever the clock does. Readiness and new streams follow the clock: an
//! expired certificate is not served, and is served again when the clock is set right.

use super::*;

/// More than any lifetime here.
const NIGHT: Duration = Duration::from_secs(3 * 24 * 3600);
const YEARS: i64 = 3650 * 86_400_000;
/// In milliseconds: an hour and ten years, in both directions.
const JUMPS: [i64; 4] = [3_600_000, -3_600_000, YEARS, -YEARS];
/// The longest delay between two calls.
const LONGEST: Duration = Duration::from_secs(600);

impl Office {
    /// The machine sleeps: the wall clock goes on, timers stand still. The CA's clock stands still too:
    /// [`Office::answer_now`] is the answer of a CA that stayed awake.
    fn sleeps(&self, time: Duration) {
        self.clock.set_by(time.as_millis().try_into().unwrap());
    }

    /// The answer of a CA whose clock shows the same as the agent's.
    fn answer_now(&self, request: &SigningRequest) -> IssuedChain {
        issued_at(self, request, self.clock.now())
    }

    /// Why the agent is not ready.
    fn missing(&self) -> Vec<String> {
        let missing = self.cache.health(self.clock.now()).missing;
        missing.into_iter().map(|missing| format!("{}: {}", missing.name, missing.reason)).collect()
    }

    /// Answers the next `count` calls with `answer`, none of which may come soon after the one before or later than after
    /// [`LONGEST`].
    async fn refuse(
        &mut self,
        count: usize,
        answer: impl Fn(&Self, &SigningRequest) -> Result<IssuedChain, CaError>,
    ) {
        for number in 0..count {
            let failures = self.failures();
            let waited = Instant::now();
            let call = self.call().await;
            let waited = waited.elapsed();
            assert!(waited <= LONGEST, "call {number} came after {waited:?}");
            assert!(number == 0 || waited >= Duration::from_millis(200), "a tight loop: {waited:?}");
            let answer = answer(self, &call.request);
            call.answer.send(answer).unwrap();
            while self.failures() == failures {
                tokio::task::yield_now().await;
            }
        }
    }

    fn failures(&self) -> u64 {
        ["refused", "expired", "not_yet_valid"].map(|outcome| self.count(outcome)).iter().sum()
    }

    /// The CA signs at the next call, and the agent is ready.
    async fn recovers(&mut self) -> Arc<Good> {
        let (waited, before) = (Instant::now(), self.entry().good.map(|good| good.resource.version.clone()));
        let call = self.call().await;
        assert!(waited.elapsed() <= LONGEST, "asked after {:?}", waited.elapsed());
        let answer = self.answer_now(&call.request);
        call.answer.send(Ok(answer)).unwrap();
        let version = |entry: &Entry| entry.good.as_ref().map(|good| good.resource.version.clone());
        let entry = self.served(|entry| version(entry) != before).await;
        assert_eq!((entry.failure(), self.missing()), (None, Vec::new()));
        entry.good.unwrap()
    }
}

#[tokio::test(start_paused = true)]
async fn before_the_first_certificate_a_clock_jump_delays_no_retry() {
    for code in [tonic::Code::Unavailable, tonic::Code::PermissionDenied] {
        for millis in JUMPS {
            let mut office = Office::open(settings());
            office.refuse(3, |_, _| Err(refused(code))).await;
            office.clock.set_by(millis);
            office.refuse(20, |_, _| Err(refused(code))).await;
            assert!(office.missing()[0].contains("not now"), "{:?}", office.missing());
            office.clock.set_by(-millis);
            office.recovers().await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn an_answer_is_checked_against_the_clock_at_its_arrival() {
    // The CA's clock is right, the agent's is wrong from the middle of its first call on.
    for (millis, outcome) in
        [(3_600_000, "ok"), (-3_600_000, "not_yet_valid"), (YEARS, "expired"), (-YEARS, "not_yet_valid")]
    {
        let mut office = Office::open(settings());
        let call = office.call().await;
        office.clock.set_by(millis);
        call.answer.send(Ok(office.answer(&call.request))).unwrap();
        let is_settled = |entry: &Entry| entry.good.is_some() || entry.failure().is_some();
        let entry = office.served(is_settled).await;
        assert_eq!(office.count(outcome), 1, "{millis}: {:?}", entry.failure());
        assert_eq!(entry.good.is_some(), outcome == "ok");
        if outcome != "ok" {
            office.refuse(20, |office, request| Ok(office.answer(request))).await;
            office.clock.set_by(-millis);
            office.recovers().await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_clock_jump_neither_shortens_nor_prolongs_a_call() {
    for millis in JUMPS {
        let mut office = Office::open(settings());
        let mut call = office.call().await;
        let started = Instant::now();
        tokio::time::sleep(3 * SECOND).await;
        office.clock.set_by(millis);
        call.answer.closed().await;
        let took = started.elapsed();
        assert!(took.abs_diff(10 * SECOND) < SECOND, "{millis}: cut off after {took:?}");
        office.clock.set_by(-millis);
        office.recovers().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_certificate_that_expired_while_the_machine_slept_is_renewed_at_once() {
    let mut office = Office::open_and_issue(settings()).await;
    let version = office.version();
    tokio::time::sleep(HOUR).await;
    office.sleeps(NIGHT);
    assert!(office.missing()[0].starts_with("default: expired at"), "{:?}", office.missing());
    assert_eq!(office.version(), version, "streams keep what they have");
    let woke = Instant::now();
    let good = office.recovers().await;
    assert!(woke.elapsed() <= STEP, "{:?}", woke.elapsed());
    assert_ne!(good.resource.version, version);
    assert!(office.is_not_asked_for(11 * HOUR).await, "once is enough");
}

#[tokio::test(start_paused = true)]
async fn after_sleeping_during_a_call_a_certificate_that_is_still_valid_is_served() {
    // The answer was on its way when the machine fell asleep; after the night it has expired.
    for (slept, is_good) in [(HOUR, true), (NIGHT, false)] {
        let mut office = Office::open_and_issue(settings()).await;
        let version = office.version();
        let call = office.call().await;
        let answer = office.answer_now(&call.request);
        office.sleeps(slept);
        call.answer.send(Ok(answer)).unwrap();
        let is_settled = |entry: &Entry| {
            entry.failure().is_some() || entry.good.as_ref().unwrap().resource.version != version
        };
        let entry = office.served(is_settled).await;
        assert_eq!(entry.failure().is_none(), is_good, "{slept:?}: {:?}", entry.failure());
        if !is_good {
            assert!(office.missing()[0].starts_with("default: expired at"), "{:?}", office.missing());
            office.recovers().await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn between_two_calls_a_clock_jump_or_sleep_costs_no_more_than_the_delay() {
    let night = i64::try_from(NIGHT.as_millis()).unwrap();
    for code in [tonic::Code::Unavailable, tonic::Code::PermissionDenied] {
        for millis in JUMPS.into_iter().chain([night]) {
            let mut office = Office::open_and_issue(settings()).await;
            let version = office.version();
            let call = office.call().await;
            call.answer.send(Err(refused(code))).unwrap();
            // Until the delays are at their longest.
            office.refuse(12, |_, _| Err(refused(code))).await;
            let due = office.entry().good.unwrap().renews.unwrap();
            office.clock.set_by(millis);
            // So far back that the certificate has not begun: peers refuse it.
            let is_future = millis < -12 * 3_600_000;
            match due.duration_since(office.clock.now()) {
                // It is no longer due, until the clock reaches its moment again.
                Ok(left) if !is_future => {
                    assert!(office.is_not_asked_for(left.min(HOUR) - SECOND).await, "{millis}")
                }
                _ => office.refuse(20, |_, _| Err(refused(code))).await,
            }
            let is_over = millis > 12 * 3_600_000;
            assert_eq!(!office.missing().is_empty(), is_over, "{millis}: {:?}", office.missing());
            assert_eq!(office.version(), version);
            if millis != night {
                office.clock.set_by(-millis);
                assert_eq!(office.missing(), [""; 0], "it was valid all the time");
            }
            office.recovers().await;
        }
    }
}

/// The clock of a machine that has just started may be far ahead, and the CA's with it: it is on the same machine.
#[tokio::test(start_paused = true)]
async fn a_certificate_of_the_future_is_replaced_when_the_clock_is_set_right() {
    const YEAR: i64 = 365 * 86_400_000;
    let (mut office, ca) = Office::new();
    office.clock.set_by(YEAR);
    office.run(ca, settings());
    let future = office.recovers().await.resource.version.clone();
    office.clock.set_by(-YEAR);
    let right = Instant::now();
    let good = office.recovers().await;
    assert!(right.elapsed() <= STEP, "{:?}", right.elapsed());
    assert_ne!(good.resource.version, future);
}
