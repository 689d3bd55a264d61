//! Time, text and limits for every other room; no I/O.

pub mod backoff;
pub mod budget;
pub mod clock;
pub mod failure_log;
pub mod limits;
pub mod retry;
pub mod spiffe_id;
pub mod text;
