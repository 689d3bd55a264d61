//! Keys, requests and certificates: what they say and whether they fit together.

pub mod certificate;
pub mod crl;
pub mod csr;
pub mod key;
pub mod pem;
