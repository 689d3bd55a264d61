use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use super::*;

const SECOND: Duration = Duration::from_secs(1);

type Acquiring = Pin<Box<dyn Future<Output = Permit>>>;

fn acquiring(queue: &IssuanceQueue, left: Duration) -> Acquiring {
    let queue = queue.clone();
    Box::pin(async move { queue.acquire(left).await })
}

fn poll(acquiring: &mut Acquiring) -> Option<Permit> {
    match acquiring.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(permit) => Some(permit),
        Poll::Pending => None,
    }
}

/// Lets waiters with these arrival times and remaining lives (in seconds) into a queue whose only permit is taken, then
/// returns the order in which they get it.
async fn order(waiters: &[(u64, u64)]) -> Vec<usize> {
    let queue = IssuanceQueue::new(1);
    let first = queue.acquire(Duration::ZERO).await;
    let began = Instant::now();
    let mut waiting = Vec::new();
    for (index, (arrival, left)) in waiters.iter().enumerate() {
        tokio::time::sleep(*arrival as u32 * SECOND - began.elapsed()).await;
        let mut waiter = acquiring(&queue, *left as u32 * SECOND);
        assert!(poll(&mut waiter).is_none(), "two permits of one");
        waiting.push((index, waiter));
    }
    let mut order = Vec::new();
    drop(first);
    while !waiting.is_empty() {
        let mut granted = None;
        waiting.retain_mut(|(index, waiter)| match poll(waiter) {
            Some(permit) => {
                order.push(*index);
                assert!(granted.replace(permit).is_none(), "two permits of one");
                false
            }
            None => true,
        });
        assert!(granted.is_some(), "the permit is lost");
    }
    order
}

/// Arrival and remaining life of each waiter, in seconds; the order in which they are served.
type Case = (&'static [(u64, u64)], &'static [usize]);

#[tokio::test(start_paused = true)]
async fn the_envoy_without_a_certificate_comes_first_then_what_expires_first() {
    let cases: [Case; 6] = [
        (&[(0, 30), (0, 10), (0, 20)], &[1, 2, 0]),
        // Without a certificate: in the order of arrival, before all others.
        (&[(0, 30), (0, 0), (0, 1), (0, 0)], &[1, 3, 2, 0]),
        (&[(0, 3600), (1, 0), (2, 0)], &[1, 2, 0]),
        // Equals: in the order of arrival.
        (&[(0, 5), (0, 5), (0, 5), (0, 5)], &[0, 1, 2, 3]),
        // The second one expires at 6 s, before the first one does at 10 s.
        (&[(0, 10), (4, 2)], &[1, 0]),
        // It expired at 5 s, while it waited: newcomers without a certificate don't overtake it.
        (&[(0, 5), (4, 0), (6, 0), (7, 0)], &[1, 0, 2, 3]),
    ];
    for (waiters, expected) in cases {
        assert_eq!(order(waiters).await, expected, "{waiters:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_free_permit_is_granted_at_once_without_a_timer() {
    let queue = IssuanceQueue::default();
    let permits: Vec<_> = (0..PERMITS).map(|_| poll(&mut acquiring(&queue, SECOND)).unwrap()).collect();
    assert!(poll(&mut acquiring(&queue, Duration::ZERO)).is_none());
    drop(permits);
    assert_eq!(queue.lock().free, PERMITS);
}

#[tokio::test(start_paused = true)]
async fn a_dropped_waiter_leaves_the_queue_even_with_a_permit_on_its_way() {
    let queue = IssuanceQueue::new(1);
    let permit = queue.acquire(SECOND).await;
    let [mut a, mut b, mut c] = [1, 2, 3].map(|left| acquiring(&queue, left * SECOND));
    assert!([&mut a, &mut b, &mut c].into_iter().all(|waiter| poll(waiter).is_none()));
    drop(a);
    assert_eq!(queue.lock().waiting.len(), 2);
    // Granted to b, which does not receive it.
    drop(permit);
    drop(b);
    let permit = poll(&mut c).expect("the permit to reach the last waiter");
    drop((permit, c));
    let state = queue.lock();
    assert_eq!((state.free, state.waiting.len()), (1, 0));
}

#[tokio::test(start_paused = true)]
async fn a_waiter_is_woken_by_a_dropped_permit() {
    let queue = IssuanceQueue::new(1);
    let permit = queue.acquire(SECOND).await;
    let waiting = queue.clone();
    let waiter = tokio::spawn(async move { waiting.acquire(Duration::ZERO).await });
    tokio::task::yield_now().await;
    assert!(!waiter.is_finished());
    drop(permit);
    tokio::time::timeout(SECOND, waiter).await.expect("the waiter to be woken").unwrap();
}

/// A waiter of the model. A granted permit is received at the next poll.
struct Modelled {
    rank: Rank,
    future: Acquiring,
    is_granted: bool,
}

/// What the queue is compared with.
struct Model {
    queue: IssuanceQueue,
    permits: usize,
    held: Vec<Permit>,
    waiting: Vec<Modelled>,
    arrivals: u64,
}

impl Model {
    fn new(permits: usize) -> Self {
        let queue = IssuanceQueue::new(permits);
        Self { queue, permits, held: Vec::new(), waiting: Vec::new(), arrivals: 0 }
    }

    /// Permits that are held, or granted and not yet received.
    fn out(&self) -> usize {
        self.held.len() + self.waiting.iter().filter(|waiter| waiter.is_granted).count()
    }

    fn enter(&mut self, left: Duration) {
        let mut future = acquiring(&self.queue, left);
        let has_free = self.out() < self.permits;
        let permit = poll(&mut future);
        assert_eq!(permit.is_some(), has_free, "{} of {} permits are out", self.out(), self.permits);
        match permit {
            Some(permit) => self.held.push(permit),
            None => {
                let rank = (Instant::now() + left, self.arrivals);
                self.waiting.push(Modelled { rank, future, is_granted: false });
            }
        }
        self.arrivals += 1;
    }

    /// A permit came back: it belongs to the most urgent waiter now.
    fn grant(&mut self) {
        let waiting = self.waiting.iter_mut().filter(|waiter| !waiter.is_granted);
        if let Some(next) = waiting.min_by_key(|waiter| waiter.rank) {
            next.is_granted = true;
        }
    }

    fn release(&mut self, index: usize) {
        drop(self.held.swap_remove(index));
        self.grant();
    }

    fn cancel(&mut self, index: usize) {
        let had_permit = self.waiting.swap_remove(index).is_granted;
        if had_permit {
            self.grant();
        }
    }

    /// Every waiter is polled: those, and only those, to which the model has granted a permit receive one.
    fn receive(&mut self) {
        let held = &mut self.held;
        self.waiting.retain_mut(|waiter| {
            let permit = poll(&mut waiter.future);
            assert_eq!(permit.is_some(), waiter.is_granted, "a permit for another waiter than the next");
            held.extend(permit);
            !waiter.is_granted
        });
    }

    fn check(&self) {
        assert!(self.out() <= self.permits, "{} of {} permits are out", self.out(), self.permits);
        let state = self.queue.lock();
        assert_eq!(state.free + self.out(), self.permits, "a permit is lost");
        let waiting = self.waiting.iter().filter(|waiter| !waiter.is_granted).count();
        assert_eq!(state.waiting.len(), waiting);
        assert!(state.free == 0 || waiting == 0, "a permit is free while something waits");
    }
}

#[tokio::test(start_paused = true)]
async fn whatever_comes_and_goes_no_permit_is_lost_and_the_most_urgent_is_next() {
    for seed in 0..200 {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut model = Model::new(random.usize(1..=4));
        for _ in 0..200 {
            match random.u8(0..10) {
                0..4 => model.enter(random.u32(0..4) * SECOND),
                4..6 if !model.held.is_empty() => model.release(random.usize(0..model.held.len())),
                6 if !model.waiting.is_empty() => model.cancel(random.usize(0..model.waiting.len())),
                7 => tokio::time::advance(random.u32(0..3) * SECOND).await,
                _ => model.receive(),
            }
            model.check();
        }
        model.waiting.clear();
        model.held.clear();
        assert_eq!(model.queue.lock().free, model.permits, "seed {seed}");
    }
}
