//! Attaché: a node-local Secret Discovery Service agent for Envoy.
//!
//! The rooms in the order of their dependencies: each one uses only those above it. A test holds that.

// no I/O
pub mod base;
pub mod pki;
pub mod proto;
pub mod secret;
// the disk
pub mod fs;
// the network
pub mod net;
pub mod auth;
// the secrets
pub mod store;
pub mod metrics;
// the operating system
pub mod os;
// the three levels of an option; no I/O
pub mod options;
// Kubernetes' API
pub mod kube;
// what produces secrets
pub mod ca;
pub mod source;
// what consumes them
pub mod serve;
pub mod export;
pub mod ops;
// a node's Pods
pub mod csi;
// wiring
pub mod config;
pub mod agent;
// commands
pub mod inject;
pub mod envoy;
pub mod check;
pub mod cli;
