//! One workload, several CAs.

use super::*;

/// An office with two CAs, each with a root of its own.
pub(super) struct Two {
    pub(super) office: Office,
    pub(super) second: mpsc::UnboundedReceiver<Call>,
    other: DevelopmentCa,
}

impl Two {
    pub(super) fn open(settings: IssuerSettings) -> Self {
        let (office, first) = Office::new();
        let (sender, second) = mpsc::unbounded_channel();
        let cas = vec![Member::new("first", first), Member::new("second", ChannelCa(sender))];
        tokio::spawn(office.issuer(cas, settings).run());
        let other = office.other_ca("other");
        Self { office, second, other }
    }

    pub(super) async fn first(&mut self) -> Call {
        self.office.call().await
    }

    pub(super) async fn second(&mut self) -> Call {
        let call = tokio::time::timeout(3 * DAY, self.second.recv()).await;
        call.expect("the second CA to be asked").expect("the issuer to run")
    }

    /// The second CA signs.
    pub(super) async fn issue_second(&self, call: Call) {
        let before = self.office.entry().good.map(|good| good.resource.version.clone());
        call.answer.send(Ok(answer_of(&self.other, &call.request))).unwrap();
        let is_new = |entry: &Entry| entry.good.as_ref().map(|good| good.resource.version.clone()) != before;
        self.office.served(is_new).await;
    }

    fn roots(&self) -> usize {
        let entry = self.office.cache.watch(&ROOTS).unwrap().borrow().clone();
        let Secret::TrustBundle(bundle) = &entry.good.unwrap().secret else { panic!("not a bundle") };
        bundle.roots().len()
    }

    fn no_ca_is_asked(&mut self) -> bool {
        self.office.calls.try_recv().is_err() && self.second.try_recv().is_err()
    }
}

#[tokio::test(start_paused = true)]
async fn the_next_one_is_asked_at_once_and_the_first_again_at_the_next_renewal() {
    let mut two = Two::open(settings());
    let began = Instant::now();
    let first = two.first().await;
    let asked_first = first.request.clone();
    first.answer.send(Err(unavailable())).unwrap();
    let second = two.second().await;
    assert_ne!(second.request.csr, asked_first.csr, "another key: the first CA may have signed the request");
    assert_eq!(began.elapsed(), Duration::ZERO, "without a delay");
    two.issue_second(second).await;
    assert_eq!((two.office.count("refused"), two.office.count("ok"), two.roots()), (1, 1, 1));
    assert_eq!(two.office.entry().failure(), None);

    let first = two.first().await;
    assert!(began.elapsed() > 11 * HOUR);
    two.office.issue(first).await;
    assert_eq!(two.roots(), 2, "peers may hold leaves of both");
    // The first CA has recovered: the second one is no longer asked.
    for _ in 0..4 {
        let first = two.first().await;
        two.office.issue(first).await;
    }
    assert!(two.no_ca_is_asked());
    assert_eq!(two.roots(), 2);
}

#[tokio::test(start_paused = true)]
async fn one_call_at_a_time_even_where_the_first_ca_hangs_or_answers_wrongly() {
    let mut two = Two::open(settings());
    let hanging = two.first().await;
    let began = Instant::now();
    let second = two.second().await;
    assert_eq!(began.elapsed(), 10 * SECOND, "after the timeout of the first call");
    assert!(hanging.answer.is_closed(), "the first call is over");
    two.issue_second(second).await;

    let wrong = two.first().await;
    let stranger = SigningKey::generate(KeyType::EcdsaP256).unwrap();
    let csr = csr::request(&stranger, Some(&web()), &csr::Names::default()).unwrap();
    let answer = two.office.answer(&SigningRequest { csr, ..wrong.request.clone() });
    wrong.answer.send(Ok(answer)).unwrap();
    let second = two.second().await;
    two.issue_second(second).await;
    assert_eq!(
        (two.office.count("timeout"), two.office.count("foreign_key"), two.office.count("ok")),
        (1, 1, 2)
    );
    assert!(two.no_ca_is_asked());
}

#[tokio::test(start_paused = true)]
async fn a_ca_that_fails_often_is_not_asked_first_each_time() {
    // Renewals every 5 s.
    let mut two = Two::open(IssuerSettings { ttl: 10 * SECOND, ..settings() });
    let (mut first_calls, mut second_calls) = (0, 0);
    let began = Instant::now();
    while began.elapsed() < HOUR {
        tokio::select! {
            biased;
            Some(first) = two.office.calls.recv() => {
                first_calls += 1;
                first.answer.send(Err(unavailable())).unwrap();
            }
            Some(second) = two.second.recv() => {
                second_calls += 1;
                two.issue_second(second).await;
            }
        }
    }
    // The pauses grow, up to 5 minutes.
    assert!((12..40).contains(&first_calls), "{first_calls}");
    assert!(second_calls > 600, "{second_calls}");
    let first = two.first().await;
    two.office.issue(first).await;
    let first = two.first().await;
    two.office.issue(first).await;
}

#[tokio::test(start_paused = true)]
async fn when_all_fail_they_are_asked_in_rounds_with_a_growing_pause() {
    let mut two = Two::open(settings());
    let mut pauses = Vec::new();
    for _ in 0..6 {
        let round = Instant::now();
        two.first().await.answer.send(Err(refused(tonic::Code::PermissionDenied))).unwrap();
        pauses.push(round.elapsed());
        two.second().await.answer.send(Err(unavailable())).unwrap();
        let failed = two.office.served(|entry| entry.failure().is_some()).await.failure().unwrap();
        assert!(failed.contains("PermissionDenied") && failed.contains("Unavailable"), "{failed}");
    }
    assert!(pauses.iter().skip(1).all(|pause| !pause.is_zero()), "{pauses:?}");
    let first = two.first().await;
    two.office.issue(first).await;
}

#[tokio::test(start_paused = true)]
async fn while_a_request_waits_for_approval_no_other_ca_is_asked() {
    let mut two = Two::open(settings());
    for _ in 0..3 {
        two.first().await.answer.send(Err(CaError::Pending("it waits".to_owned()))).unwrap();
    }
    let first = two.first().await;
    assert!(two.no_ca_is_asked());
    first.answer.send(Err(unavailable())).unwrap();
    two.second().await;
}
