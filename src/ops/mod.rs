//! What people and probes see.

pub mod admin;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
mod host;
pub mod page;
pub mod report;
pub mod status;
pub mod telemetry;
