//! Waiting for what can be observed, with a deadline that fails the test.

use std::time::Duration;

use tokio::time::{sleep, timeout};

use super::process::PATIENCE;

const POLL: Duration = Duration::from_millis(5);

/// Polls until `holds`; `what` is the sentence that becomes true.
pub async fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    wait_for(what, async || holds().then_some(())).await;
}

/// Polls until `find` returns something; `what` is the sentence that becomes true.
pub async fn wait_for<T>(what: &str, mut find: impl AsyncFnMut() -> Option<T>) -> T {
    let found = timeout(PATIENCE, async {
        loop {
            if let Some(found) = find().await {
                return found;
            }
            sleep(POLL).await;
        }
    });
    found.await.unwrap_or_else(|_| panic!("timed out after {PATIENCE:?} waiting until {what}"))
}
