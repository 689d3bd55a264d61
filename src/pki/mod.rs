//! Keys, signing requests, certificates, CRLs, OCSP staples and keystores.

pub mod certificate;
pub mod crl;
pub mod csr;
mod der;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
pub mod key;
pub mod keystore;
pub mod ocsp;
pub mod pem;
