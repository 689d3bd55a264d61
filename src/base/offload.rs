//! Work that would keep the runtime's one thread from everything else.

use tokio::task::JoinError;

/// Certificates, or their text, of so many bytes take a thread of their own: an answer of a CA usually has 3 kB. The
/// signature of a P-521 root, which has 500 bytes, takes half a millisecond to check.
const LARGE: usize = 16 << 10;

/// Runs `work` on `size` bytes: on a thread of its own if these are many.
pub async fn large<T: Send + 'static>(size: usize, work: impl FnOnce() -> T + Send + 'static) -> T {
    if size <= LARGE {
        return work();
    }
    match finished(tokio::task::spawn_blocking(work).await) {
        Some(done) => done,
        // The runtime is shutting down, and the caller with it.
        None => std::future::pending().await,
    }
}

/// The result of a task; none if it was aborted. A panic of a task is one of the agent.
pub fn finished<T>(ended: Result<T, JoinError>) -> Option<T> {
    match ended {
        Ok(done) => Some(done),
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            Err(_) => None,
        },
    }
}

#[cfg(test)]
mod tests {
    use std::thread::current;

    use super::*;

    #[tokio::test]
    async fn large_work_runs_on_another_thread() {
        let here = current().id();
        assert_eq!(large(LARGE, || current().id()).await, here);
        assert_ne!(large(LARGE + 1, || current().id()).await, here);
    }
}
