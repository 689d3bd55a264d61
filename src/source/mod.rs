//! Sources of secrets: the issuer (through a CA), mounted files, CRL files, Kubernetes.

pub mod crl;
pub mod files;
pub mod issuer;
pub mod kubernetes;
pub mod mint;
pub mod spiffe;
