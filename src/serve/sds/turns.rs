//! Turns at work that takes long: whatever peers request, at most one of them gets a quarter of a millisecond or so before
//! the agent looks at everything else again.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

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
    Requested(Pin<Box<dyn Future<Output = Option<OwnedSemaphorePermit>> + Send>>),
    Taken(OwnedSemaphorePermit),
}

impl Turn {
    pub fn new(turns: Turns) -> Self {
        Self { turns, state: State::None }
    }

    /// Ready when it is this one's turn, until [`end`](Self::end).
    pub fn poll_take(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            match &mut self.state {
                State::None => {
                    let turns = Arc::clone(&self.turns.0);
                    let permit = async { turns.acquire_owned().await.ok() };
                    self.state = State::Requested(Box::pin(permit));
                }
                State::Requested(permit) => {
                    // The semaphore is never closed.
                    self.state = match ready!(permit.as_mut().poll(cx)) {
                        Some(permit) => State::Taken(permit),
                        None => State::None,
                    };
                }
                State::Taken(_) => return Poll::Ready(()),
            }
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
        // Without a runtime nobody waits.
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
