//! What Envoy connects to.

pub mod listener;
pub mod peer;
pub mod sds;
