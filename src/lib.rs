//! Attaché: a node-local Secret Discovery Service agent for Envoy.
//!
//! The modules in the order of their dependencies: each may use what stands above it, never below.

#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that can't go on panics"))]

// ground
pub mod backoff;
pub mod clock;
pub mod identity;
pub mod limits;
pub mod pki;
pub mod proto;
pub mod rpc;
pub mod secret;
// state
pub mod cache;
pub mod metrics;
pub mod readiness;
// inputs
pub mod ca;
pub mod credential;
pub mod source;
// outputs
pub mod sds;
pub mod status;
// wiring
pub mod app;
pub mod cli;
pub mod config;
pub mod telemetry;
