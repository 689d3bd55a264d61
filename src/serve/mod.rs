//! The SDS socket, its peers and the secret discovery service.

pub mod listener;
pub mod peer;
pub mod sds;
