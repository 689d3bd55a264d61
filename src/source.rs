//! What produces secrets.

pub mod crl;
pub mod files;
pub mod workload;
pub mod watch;
