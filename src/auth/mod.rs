//! The credentials that the agent presents: tokens and the client certificate.

pub mod client_cert;
pub mod exchange;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
pub mod metadata_server;
pub mod token;
pub mod token_file;
