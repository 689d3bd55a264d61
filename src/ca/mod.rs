//! Clients of CAs.

mod error;
mod response;
mod transport;
pub mod cfssl;
pub mod citadel;
pub mod embedded;
pub mod google_cas;
pub mod kubernetes;
pub mod exec;
pub mod failover;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
pub mod provider;
pub mod providers;
pub mod vault;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

pub use self::error::CaError;
pub use self::response::{InvalidResponse, IssuedChain};
pub use self::transport::{ClientAuth, connect};
pub use crate::base::retry::Class;
use crate::base::spiffe_id::SpiffeId;
use crate::pki::csr::Names;

/// A client of one CA. `providers.rs` says what a new one takes.
#[tonic::async_trait]
pub trait CertificateAuthority: fmt::Debug + Send + Sync {
    /// The provider's name, as `--ca` takes it.
    fn name(&self) -> &'static str;

    /// Has `request` signed. The caller sets the deadline, and checks the chain.
    async fn sign(&self, request: &SigningRequest) -> Result<IssuedChain, CaError>;

    /// The remedy for a response that did not pass the check, where it depends on the provider.
    fn remedy(&self, _response: &InvalidResponse) -> Option<&'static str> {
        None
    }

    /// The unfinished request at a CA that signs asynchronously: after a call that failed or timed out, `sign` resumes it
    /// when it gets the same request again.
    fn pending(&self) -> Option<Pending> {
        None
    }

    /// A client of the same CA that may have another request open at the same time; none if this client has no such limit.
    fn apart(&self) -> Option<Arc<dyn CertificateAuthority>> {
        None
    }

    /// Removes obsolete requests that calls have left at the CA, as far as possible. Runs after each `sign`, once its
    /// outcome is known; the caller sets the deadline.
    async fn tidy(&self) {}
}

/// A request that the CA may still sign.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pending {
    /// What the CA waits for, as it said in the last call, and the remedy.
    pub waits_for: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SigningRequest {
    /// DER.
    pub csr: Vec<u8>,
    /// The identity in the certificate, where it is known.
    pub identity: Option<SpiffeId>,
    /// Its other names.
    pub names: Names,
    /// The requested lifetime.
    pub ttl: Duration,
}
