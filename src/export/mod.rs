//! Secrets for other programs, and the ready file.

pub mod output;
pub mod ready_file;
