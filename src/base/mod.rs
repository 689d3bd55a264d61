//! What everything rests on; no I/O.

pub mod backoff;
pub mod clock;
pub mod failure_log;
pub mod limits;
pub mod spiffe_id;
