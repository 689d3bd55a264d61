//! Keys, signing requests, certificates and CRLs.

pub mod certificate;
pub mod crl;
pub mod csr;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
pub mod key;
pub mod pem;
