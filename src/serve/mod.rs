//! The SDS socket and its peers; what it serves: the secret discovery service, the SPIFFE Workload API, health, reflection.

mod health;
pub mod listener;
mod others;
pub mod peer;
mod reflection;
pub mod sds;
pub mod workload_api;
