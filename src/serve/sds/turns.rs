//! Turns at work that takes long: whatever peers request, at most one of them gets a quarter of a millisecond or so before
//! the agent looks at everything else again.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::task::AbortOnDropHandle;

/// How many names are handled in one turn: about a quarter of a millisecond.
pub const AT_ONCE: usize = 100;

/// Gives out turns, in the order in which they are requested. Clones are the same.
#[derive(Clone, Debug)]
pub struct Turns(Arc<Semaphore>);

impl Default for Turns {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(1)))
    }
}

/// One who takes turns.
pub struct Turn {
    turns: Turns,
    state: State,
}

enum State {
    None,
    Requested(AbortOnDropHandle<Offer>),
    Taken(OwnedSemaphorePermit),
}

/// A turn for the one who is next. It passes to another one if it is not taken at once: the body of a response is not polled
/// while its client does not read, so a client could otherwise stop all work by what it does not do.
struct Offer(Arc<Mutex<Option<OwnedSemaphorePermit>>>);

impl Offer {
    async fn next(turns: Arc<Semaphore>) -> Self {
        // The semaphore is never closed.
        let offer = Arc::new(Mutex::new(turns.acquire_owned().await.ok()));
        let left = Arc::downgrade(&offer);
        tokio::spawn(async move {
            // All that is ready runs before this task runs again, also the one who gets the offer.
            tokio::task::yield_now().await;
            drop(left.upgrade().and_then(|offer| Self(offer).take()));
        });
        Self(offer)
    }

    fn take(&self) -> Option<OwnedSemaphorePermit> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl Turn {
    pub fn new(turns: Turns) -> Self {
        Self { turns, state: State::None }
    }

    /// Ready when it is this one's turn, until [`end`](Self::end).
    pub fn poll_take(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            self.state = match &mut self.state {
                State::None => {
                    let turns = Arc::clone(&self.turns.0);
                    match Arc::clone(&turns).try_acquire_owned() {
                        Ok(permit) => State::Taken(permit),
                        Err(_) => State::Requested(AbortOnDropHandle::new(tokio::spawn(Offer::next(turns)))),
                    }
                }
                State::Requested(offer) => match ready!(Pin::new(offer).poll(cx)) {
                    Ok(offer) => offer.take().map_or(State::None, State::Taken),
                    // The runtime stops.
                    Err(_) => {
                        self.state = State::None;
                        return Poll::Pending;
                    }
                },
                State::Taken(_) => return Poll::Ready(()),
            };
        }
    }

    pub fn is_taken(&self) -> bool {
        matches!(self.state, State::Taken(_))
    }

    pub async fn take(&mut self) {
        std::future::poll_fn(|cx| self.poll_take(cx)).await;
    }

    /// Ends the turn. The next one begins when the runtime has looked at all sockets and timers, and at all that is ready.
    pub fn end(&mut self) {
        if let State::Taken(permit) = std::mem::replace(&mut self.state, State::None) {
            tokio::spawn(async move {
                tokio::task::yield_now().await;
                drop(permit);
            });
        }
    }
}

impl Turns {
    /// Drops `all`, a few in each turn, and then `last`.
    pub fn drop_slowly<T: Send + 'static, L: Send + 'static>(
        &self,
        mut all: Vec<T>,
        at_once: usize,
        last: L,
    ) {
        // Without a runtime no task waits.
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        let mut turn = Turn::new(self.clone());
        runtime.spawn(async move {
            while !all.is_empty() {
                turn.take().await;
                all.truncate(all.len().saturating_sub(at_once));
                turn.end();
            }
            drop(last);
        });
    }
}

impl fmt::Debug for Turn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match &self.state {
            State::None => "none",
            State::Requested(_) => "requested",
            State::Taken(_) => "taken",
        };
        f.debug_tuple("Turn").field(&state).finish()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::timeout;

    use super::*;

    async fn is_requested(turn: &mut Turn) -> bool {
        std::future::poll_fn(|cx| Poll::Ready(turn.poll_take(cx).is_pending())).await
    }

    #[tokio::test(start_paused = true)]
    async fn one_who_does_not_take_its_turn_stops_no_other() {
        let turns = Turns::default();
        let mut first = Turn::new(turns.clone());
        first.take().await;
        let mut idle: Vec<_> = (0..100).map(|_| Turn::new(turns.clone())).collect();
        for turn in &mut idle {
            assert!(is_requested(turn).await);
        }
        let mut last = Turn::new(turns);
        assert!(is_requested(&mut last).await);
        first.end();
        let take = async |turn: &mut Turn| {
            timeout(Duration::from_secs(1), turn.take()).await.expect("another one keeps the turn");
        };
        take(&mut last).await;
        assert!(is_requested(&mut first).await);
        last.end();
        take(&mut first).await;
        first.end();
        // They only have to request it again.
        for turn in &mut idle {
            take(turn).await;
            turn.end();
        }
    }

    #[tokio::test(start_paused = true)]
    async fn turns_come_one_at_a_time_in_the_order_of_requests() {
        let (turns, taken) = (Turns::default(), Arc::new(Mutex::new(Vec::new())));
        let mut first = Turn::new(turns.clone());
        first.take().await;
        let tasks: Vec<_> = (0..5)
            .map(|number| {
                let (mut turn, taken) = (Turn::new(turns.clone()), Arc::clone(&taken));
                tokio::spawn(async move {
                    for _ in 0..20 {
                        turn.take().await;
                        assert_eq!(turn.turns.0.available_permits(), 0);
                        taken.lock().unwrap().push(number);
                        turn.end();
                    }
                })
            })
            .collect();
        tokio::task::yield_now().await;
        first.end();
        for task in tasks {
            timeout(Duration::from_secs(1), task).await.expect("nothing wakes it").unwrap();
        }
        assert_eq!(*taken.lock().unwrap(), [0, 1, 2, 3, 4].repeat(20));
    }
}
