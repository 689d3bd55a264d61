//! Keys, signing requests, certificates and CRLs.

pub mod certificate;
pub mod crl;
pub mod csr;
pub mod key;
pub mod pem;
