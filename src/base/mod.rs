//! Time, text and limits for every other room; no I/O.

pub mod backoff;
pub mod budget;
pub mod clock;
pub mod failure_log;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
pub mod limits;
pub mod log_limit;
pub mod offload;
pub mod retry;
pub mod spiffe_id;
pub mod text;
