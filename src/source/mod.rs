//! Sources of secrets: the issuer (through a CA), a SPIFFE Workload API, mounted files, CRL files, Kubernetes.

pub mod crl;
pub mod files;
pub mod issuer;
pub mod kubernetes;
pub mod mint;
pub mod spiffe;
