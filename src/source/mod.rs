//! What produces secrets.

pub mod crl;
pub mod files;
pub mod issuer;
