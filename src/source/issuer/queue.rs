//! Bounds how many issuances are in progress at a time, across all workloads: a CA that comes back after an outage is
//! not flooded, and an Envoy without a certificate does not wait behind those that still have one.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::Instant;

/// Issuances at a time.
const PERMITS: usize = 8;

/// Hands out a fixed number of permits, the most urgent waiter first. Clones are the same queue.
///
/// A waiter's rank is the moment at which its certificate expires. Without a valid certificate (there never was one, or
/// it has expired) that is the moment at which it began to wait. The earliest rank is next; equal ranks are served
/// in the order of arrival. So an Envoy without a certificate comes before all that still have one, and then
/// whichever certificate expires first. A rank never changes and nothing overtakes it for ever: a workload
/// whose issuance fails again and again can't starve another one. Ranks are measured on the monotonic clock, so
/// they stay comparable when the wall clock is set.
#[derive(Clone, Debug)]
pub struct IssuanceQueue(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    /// Permits that nothing holds. While there are any, nothing waits.
    free: usize,
    waiting: BTreeMap<Rank, oneshot::Sender<Permit>>,
    arrivals: u64,
}

/// When the waiter is, or was first, without a valid certificate; and its number in the order of arrival.
type Rank = (Instant, u64);

/// The right to call the CA. Dropping it wakes the most urgent waiter.
#[derive(Debug)]
pub struct Permit(IssuanceQueue);

/// A place in the queue, given up when dropped.
struct Waiter<'a> {
    queue: &'a IssuanceQueue,
    rank: Rank,
    granted: oneshot::Receiver<Permit>,
}

impl Default for IssuanceQueue {
    fn default() -> Self {
        Self::new(PERMITS)
    }
}

impl IssuanceQueue {
    pub fn new(permits: usize) -> Self {
        Self(Arc::new(Mutex::new(State { free: permits, waiting: BTreeMap::new(), arrivals: 0 })))
    }

    /// Waits for a permit. `left` is how long the workload's certificate is still valid: zero if there is none, or
    /// if it has expired. Where that changes meanwhile (the clock was set), drop the future and acquire again.
    pub async fn acquire(&self, left: Duration) -> Permit {
        loop {
            let mut waiter = match self.enter(left) {
                Ok(permit) => return permit,
                Err(waiter) => waiter,
            };
            // A sender leaves the queue only with a permit.
            if let Ok(permit) = (&mut waiter.granted).await {
                return permit;
            }
        }
    }

    fn enter(&self, left: Duration) -> Result<Permit, Waiter<'_>> {
        let mut state = self.lock();
        if state.free > 0 {
            state.free -= 1;
            return Ok(Permit(self.clone()));
        }
        let rank = (Instant::now() + left, state.arrivals);
        let (sender, granted) = oneshot::channel();
        state.arrivals += 1;
        state.waiting.insert(rank, sender);
        Err(Waiter { queue: self, rank, granted })
    }

    /// No code panics while it holds this lock, and the state is whole between any two statements.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let next = {
            let mut state = self.0.lock();
            let next = state.waiting.pop_first();
            if next.is_none() {
                state.free += 1;
            }
            next
        };
        if let Some((_, waiter)) = next {
            // A waiter that has just left gives it back, and the next one gets it: outside of the lock.
            drop(waiter.send(Permit(self.0.clone())));
        }
    }
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        // A permit that was granted but not received is dropped with the receiver.
        self.queue.lock().waiting.remove(&self.rank);
    }
}

#[cfg(test)]
mod tests;
