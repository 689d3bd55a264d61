//! Several workloads of one agent, which share the queue.

use tokio::task::JoinHandle;

use super::*;

/// Issuers of several workloads in front of one CA.
struct House {
    office: Office,
    ca: mpsc::UnboundedSender<Call>,
    queue: IssuanceQueue,
}

impl House {
    fn new(permits: usize) -> Self {
        let (office, ChannelCa(ca)) = Office::new();
        Self { office, ca, queue: IssuanceQueue::new(permits) }
    }

    fn add(&self, number: u16, settings: IssuerSettings) -> JoinHandle<()> {
        let settings = IssuerSettings { identity: IdentitySource::Fixed(identity(number)), ..settings };
        let cas = Failover::new(vec![Member::new("channel", ChannelCa(self.ca.clone()))]);
        let (clock, metrics) = (self.office.clock.clone(), self.office.metrics.clone());
        let (cache, queue) = (&self.office.cache, self.queue.clone());
        let workload = cache.add_workload(&format!("w{number}"));
        let context = IssuerContext { clock, metrics, queue, disk: Disk::default() };
        tokio::spawn(Issuer::new(cas, settings, cache, workload, context).run())
    }

    async fn call(&mut self, expected: u16) -> Call {
        let call = self.office.call().await;
        assert_eq!(call.request.identity, Some(identity(expected)));
        call
    }

    async fn is_silent(&mut self) -> bool {
        self.office.is_not_asked_for(Duration::from_millis(100)).await
    }

    /// The CA, whose clock is ahead by `ahead`, signs.
    fn sign(&self, call: Call, ahead: Duration) {
        let clock = Clock::starting_at(self.office.clock.now() + ahead);
        let ca = DevelopmentCa::open(self.office.dir.path(), clock).unwrap();
        let SigningRequest { csr, identity, ttl, .. } = &call.request;
        let leaf = ca.issue(csr, identity.as_ref().unwrap(), *ttl).unwrap();
        let [intermediate, root] = ca.chain();
        let answer = IssuedChain { chain: vec![leaf, intermediate.clone()], roots: vec![root.clone()] };
        call.answer.send(Ok(answer)).unwrap();
    }
}

fn identity(number: u16) -> SpiffeId {
    format!("spiffe://cluster.local/ns/default/sa/w{number}").parse().unwrap()
}

#[tokio::test(start_paused = true)]
async fn no_more_workloads_than_permits_call_the_ca_at_a_time() {
    let mut house = House::new(2);
    let _running: Vec<_> = (0..5).map(|number| house.add(number, settings())).collect();
    let first = house.call(0).await;
    let second = house.call(1).await;
    assert!(house.is_silent().await, "a third call");
    house.sign(second, Duration::ZERO);
    let third = house.call(2).await;
    assert!(house.is_silent().await, "a third call");
    house.sign(first, Duration::ZERO);
    let fourth = house.call(3).await;
    house.sign(third, Duration::ZERO);
    house.sign(fourth, Duration::ZERO);
    let fifth = house.call(4).await;
    house.sign(fifth, Duration::ZERO);
    assert!(house.office.is_not_asked_for(11 * HOUR).await);
}

#[tokio::test(start_paused = true)]
async fn a_workload_without_a_certificate_comes_before_a_renewal() {
    let mut house = House::new(1);
    let renewing = IssuerSettings { grace: Grace { ratio: 0.5, jitter: 0.0 }, ..settings() };
    let _renewing = house.add(1, renewing);
    let call = house.call(1).await;
    house.sign(call, Duration::ZERO);
    tokio::time::sleep(12 * HOUR - 2 * SECOND).await;
    let _hanging = house.add(2, settings());
    let hanging = house.call(2).await;
    // The renewal is due, and only then another workload comes.
    tokio::time::sleep(5 * SECOND).await;
    let _new = house.add(3, settings());
    assert!(house.is_silent().await);
    house.sign(hanging, Duration::ZERO);
    let new = house.call(3).await;
    house.sign(new, Duration::ZERO);
    house.call(1).await;
}

#[tokio::test(start_paused = true)]
async fn a_workload_that_is_removed_gives_its_permit_back() {
    let mut house = House::new(1);
    let running = house.add(0, settings());
    let mut call = house.call(0).await;
    let waiting = house.add(1, settings());
    let _last = house.add(2, settings());
    assert!(house.is_silent().await);
    waiting.abort();
    running.abort();
    call.answer.closed().await;
    house.call(2).await;
}

#[tokio::test(start_paused = true)]
async fn no_permit_is_held_between_calls() {
    let mut house = House::new(1);
    let _running: Vec<_> = (0..3).map(|number| house.add(number, settings())).collect();
    // One waits until its certificate begins, one for its approval.
    let call = house.call(0).await;
    house.sign(call, 5 * MINUTE);
    let call = house.call(1).await;
    call.answer.send(Err(CaError::Pending("it waits".to_owned()))).unwrap();
    house.call(2).await;
}
