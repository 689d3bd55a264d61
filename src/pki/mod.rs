//! Keys, signing requests, certificates, CRLs and keystores.

pub mod certificate;
pub mod crl;
pub mod csr;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
pub mod key;
pub mod keystore;
pub mod pem;
