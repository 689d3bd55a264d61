//! What people and probes see.

pub mod admin;
mod host;
pub mod page;
pub mod report;
pub mod status;
pub mod telemetry;
