//! What the fakes of CAs answer with: certificates that are good, or lie in one way.

use std::path::Path;
use std::time::{Duration, SystemTime};

use attache::ca::embedded::DevelopmentCa;
use attache::clock::Clock;
use attache::pki::csr;
use attache::pki::key::{KeyType, SigningKey};
use rcgen::{CertificateSigningRequestParams, SanType};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, CertificateSigningRequestDer};

/// What is wrong with a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lie {
    None,
    /// It is for another key.
    ForeignKey,
    /// It ended an hour ago.
    Expired,
    /// It is somebody else's.
    OtherIdentity,
    /// The roots are another CA's.
    Unchained,
}

/// Each lie, what the agent says of it, and its word in the metrics.
pub const LIES: [(Lie, &str, &str); 4] = [
    (Lie::ForeignKey, "for another key", "foreign_key"),
    (Lie::Expired, "expired at", "expired"),
    (Lie::OtherIdentity, "names spiffe://cluster.local/ns/x/sa/thief, not", "wrong_identity"),
    (Lie::Unchained, "does not chain to a root", "unchained"),
];

/// A CA that takes the identity from the CSR.
pub struct Issuer {
    ca: DevelopmentCa,
    /// The same CA an hour and more ago.
    past: DevelopmentCa,
    stranger: DevelopmentCa,
}

impl Issuer {
    /// A CA with its files in `folder`.
    pub fn new(folder: &Path) -> Self {
        let open = |name: &str, clock| DevelopmentCa::open(&folder.join(name), clock).unwrap();
        #[expect(clippy::disallowed_methods, reason = "an hour before the agent's own clock")]
        let past = SystemTime::now() - Duration::from_secs(2 * 3600);
        Self {
            ca: open("issuer", Clock::system()),
            past: open("issuer", Clock::starting_at(past)),
            stranger: open("stranger", Clock::system()),
        }
    }

    /// A certificate for a PEM CSR.
    pub fn issue(&self, request: &str, ttl: Duration, lie: Lie) -> CertificateDer<'static> {
        let asked = CertificateSigningRequestDer::from_pem_slice(request.as_bytes()).unwrap();
        let params = CertificateSigningRequestParams::from_der(&asked).unwrap().params;
        let [SanType::URI(uri)] = params.subject_alt_names.as_slice() else {
            panic!("not one URI: {params:?}")
        };
        let identity = uri.as_str().parse().unwrap();
        let issued = match lie {
            Lie::ForeignKey => {
                let key = SigningKey::generate(KeyType::EcdsaP256).unwrap();
                self.ca.issue(&csr::request(&key, None).unwrap(), &identity, ttl)
            }
            Lie::Expired => self.past.issue(&asked, &identity, ttl),
            Lie::OtherIdentity => {
                self.ca.issue(&asked, &"spiffe://cluster.local/ns/x/sa/thief".parse().unwrap(), ttl)
            }
            Lie::None | Lie::Unchained => self.ca.issue(&asked, &identity, ttl),
        };
        issued.unwrap()
    }

    /// Intermediate and root.
    pub fn chain(&self, lie: Lie) -> [&CertificateDer<'static>; 2] {
        if lie == Lie::Unchained { self.stranger.chain() } else { self.ca.chain() }
    }
}
