//! Attaché: a node-local Secret Discovery Service agent for Envoy.
//!
//! The modules in the order of their dependencies: each may use what stands above it, never below.

// ground
pub mod backoff;
pub mod clock;
pub mod identity;
pub mod limits;
pub mod pki;
pub mod plain_file;
pub mod command;
pub mod hardening;
pub mod proto;
pub mod secret;
pub mod generation;
pub mod rpc;
// state
pub mod cache;
pub mod readiness;
pub mod history;
pub mod metrics;
// inputs
pub mod credential;
pub mod ca;
pub mod source;
// outputs
pub mod sds;
pub mod output;
pub mod http1;
pub mod status;
pub mod report;
pub mod telemetry;
pub mod admin;
pub mod page;
pub mod ready_file;
// wiring
pub mod config;
pub mod systemd;
pub mod exposure;
pub mod inject;
pub mod app;
pub mod check;
pub mod cli;
