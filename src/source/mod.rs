//! Sources of secrets: the issuer (through a CA), mounted files, CRL files.

pub mod crl;
pub mod files;
pub mod issuer;
pub mod mint;
