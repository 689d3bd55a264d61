//! What everything rests on; no I/O.

pub mod backoff;
pub mod clock;
pub mod limits;
pub mod retry;
pub mod spiffe_id;
