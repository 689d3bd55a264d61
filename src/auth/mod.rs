//! What the agent shows to others.

pub mod client_cert;
pub mod exchange;
pub mod metadata_server;
pub mod token;
pub mod token_file;
