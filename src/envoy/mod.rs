//! Envoy's own configuration.

pub mod bootstrap;
