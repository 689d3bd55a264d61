//! What produces secrets.

pub mod files;
pub mod workload;
pub mod watch;
