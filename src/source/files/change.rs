//! A change of files that are read together: when it is taken, and how long the next look waits.

use std::convert::Infallible;
use std::time::Duration;

use tokio::time::Instant;

use crate::fs::watch::{Activity, OPEN_PATIENCE};

/// The pause after a look that published nothing; it doubles up to a tenth of the debounce window.
const PAUSE: Duration = Duration::from_millis(1);

/// A change that may not be complete yet, and the rhythm of the looks.
#[derive(Debug)]
pub(super) struct PendingChange {
    debounce: Duration,
    since: Option<Instant>,
    /// Nothing has happened since.
    quiet_since: Option<Instant>,
    /// Nothing has happened for a whole window.
    is_settled: bool,
    /// The failure was published that the files don't come to rest.
    is_reported: bool,
    pause: Duration,
    /// When a new secret was published last.
    published: Option<Instant>,
}

impl PendingChange {
    pub(super) fn new(debounce: Duration) -> Self {
        Self {
            debounce,
            since: None,
            quiet_since: None,
            is_settled: false,
            is_reported: false,
            pause: PAUSE,
            published: None,
        }
    }

    /// Whether to take what the look at `looked` found, good or not, instead of waiting for the rest of the change.
    pub(super) fn is_complete(
        &self,
        activity: Activity,
        looked: Instant,
        is_whole: impl FnOnce() -> bool,
    ) -> bool {
        match activity {
            // A file that is read while it is written may be half of what it will be.
            Activity::Change => false,
            Activity::Open => self.quiet_since.is_some_and(|since| looked - since > OPEN_PATIENCE),
            Activity::None => self.is_settled || self.lasts(looked, 10 * self.debounce) || is_whole(),
        }
    }

    /// The files were taken as they are; if `is_new`, a new secret was published.
    pub(super) fn end(&mut self, is_new: bool) {
        let (pause, published) = match is_new {
            true => (PAUSE, Some(Instant::now())),
            false => (self.pause, self.published),
        };
        *self = Self { pause, published, ..Self::new(self.debounce) };
    }

    /// Whether to report that the files don't come to rest: once, when the change goes on and gets no better.
    pub(super) fn is_restless(&mut self, looked: Instant) -> bool {
        self.lasts(looked, OPEN_PATIENCE) && !std::mem::replace(&mut self.is_reported, true)
    }

    /// Waits for the rest of the change, one window at most: if nothing completes it by then, it is reported.
    pub(super) async fn wait_for_rest(&mut self, looked: Instant, changed: impl Future) {
        self.since.get_or_insert(looked);
        self.is_settled = tokio::time::timeout(self.debounce, changed).await.is_err();
        self.quiet_since = match self.is_settled {
            true => self.quiet_since.or_else(|| Some(Instant::now())),
            false => None,
        };
    }

    /// Waits until the window of the last publish is over: later changes are folded into the next one.
    pub(super) async fn wait_for_window(&self, meanwhile: impl Future<Output = Infallible>) {
        let Some(published) = self.published else { return };
        let window = self.debounce.saturating_sub(published.elapsed());
        if !window.is_zero() {
            let _ = tokio::time::timeout(window, meanwhile).await;
        }
    }

    /// Waits a little longer after each look: files that change all the time, and never to good ones, must not keep the
    /// agent busy.
    pub(super) async fn pause(&mut self, looked: Instant) {
        let rest = self.pause.saturating_sub(looked.elapsed());
        if !rest.is_zero() {
            tokio::time::sleep(rest).await;
        }
        self.pause = (2 * self.pause).min(self.debounce / 10);
    }

    /// Whether the change had begun more than `patience` before `now`.
    fn lasts(&self, now: Instant, patience: Duration) -> bool {
        self.since.is_some_and(|since| now - since > patience)
    }
}
