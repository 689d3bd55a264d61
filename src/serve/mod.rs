//! What Envoy connects to.

pub mod listener;
pub mod peers;
pub mod sds;
