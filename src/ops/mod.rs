//! What people and probes see.

pub mod admin;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
pub mod page;
pub mod report;
pub mod status;
pub mod telemetry;
