//! Certificates that the fake CAs issue: good ones, and ones that are wrong in one way.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use attache::base::clock::Clock;
use attache::base::spiffe_id::SpiffeId;
use attache::ca::embedded::DevelopmentCa;
use attache::pki::csr::{CommonName, DnsName, Names};
use attache::pki::key::{KeyType, SigningKey};
use attache::pki::{csr, pem};
use rcgen::{
    BasicConstraints, CertificateParams, CertificateSigningRequestParams, DnType, DnValue, IsCa,
    KeyUsagePurpose, SanType,
};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, CertificateSigningRequestDer};

/// What is wrong with a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lie {
    None,
    /// Issued for another key.
    ForeignKey,
    /// Expired an hour ago.
    Expired,
    /// Valid in an hour.
    NotYetValid,
    /// Issued for another identity.
    OtherIdentity,
    /// The roots belong to another CA.
    Unchained,
    /// It has the identity, and none of the other requested names.
    OtherNamesMissing,
}

/// Each lie, the agent's message with its remedy, and its label in the metrics.
pub const LIES: [(Lie, [&str; 2], &str); 5] = [
    (Lie::ForeignKey, ["for another key", "returned the response to another request"], "foreign_key"),
    (Lie::Expired, ["expired at", "this machine's clock is wrong"], "expired"),
    (Lie::NotYetValid, ["valid only from", "this machine's clock is wrong"], "not_yet_valid"),
    (
        Lie::OtherIdentity,
        ["names spiffe://cluster.local/ns/x/sa/thief, not", "pass it with --spiffe-id"],
        "wrong_identity",
    ),
    (Lie::Unchained, ["does not chain to a root", "has the issuer's name, but another key"], "unchained"),
];

/// Creates the files of a development CA whose root signs without an intermediate, in a new directory in `directory`.
pub fn root_alone(directory: &Path) -> PathBuf {
    let key = SigningKey::generate(KeyType::EcdsaP256).unwrap();
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, "Root alone");
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let root = pem::of_certificates([params.self_signed(&key).unwrap().der()]);
    let directory = directory.join("root-alone");
    std::fs::create_dir(&directory).unwrap();
    for name in ["root-cert.pem", "ca-cert.pem"] {
        std::fs::write(directory.join(name), &root).unwrap();
    }
    std::fs::write(directory.join("ca-key.pem"), key.to_private_key().to_pem()).unwrap();
    directory
}

fn dns_names(names: &[SanType]) -> Vec<DnsName> {
    let parsed = |name: &SanType| match name {
        SanType::DnsName(name) => name.as_str().parse().unwrap(),
        other => panic!("a name that is none of ours: {other:?}"),
    };
    names.iter().map(parsed).collect()
}

fn common_name(params: &CertificateParams) -> Option<CommonName> {
    match params.distinguished_name.get(&DnType::CommonName)? {
        DnValue::Utf8String(name) => Some(name.parse().unwrap()),
        other => panic!("a common name of another kind: {other:?}"),
    }
}

/// A CA that takes the identity and all other names from the CSR.
pub struct Issuer {
    ca: DevelopmentCa,
    /// The same CA more than an hour ago.
    past: DevelopmentCa,
    /// The same CA in an hour.
    future: DevelopmentCa,
    stranger: DevelopmentCa,
}

impl Issuer {
    /// A CA with its files in `directory/issuer`.
    pub fn new(directory: &Path) -> Self {
        Self::of(directory, &directory.join("issuer"))
    }

    /// A CA with its files in `ca`, and a second, unrelated one in `directory`.
    pub fn of(directory: &Path, ca: &Path) -> Self {
        let open = |directory: &Path, clock| DevelopmentCa::open(directory, clock).unwrap();
        #[expect(clippy::disallowed_methods, reason = "hours from the agent's own clock")]
        let now = SystemTime::now();
        let hour = Duration::from_secs(3600);
        Self {
            ca: open(ca, Clock::system()),
            past: open(ca, Clock::starting_at(now - 2 * hour)),
            future: open(ca, Clock::starting_at(now + hour)),
            stranger: open(&directory.join("stranger"), Clock::system()),
        }
    }

    /// A certificate for a PEM CSR.
    pub fn issue(&self, request: &str, ttl: Duration, lie: Lie) -> CertificateDer<'static> {
        let asked = CertificateSigningRequestDer::from_pem_slice(request.as_bytes()).unwrap();
        let params = CertificateSigningRequestParams::from_der(&asked).unwrap().params;
        let [SanType::URI(uri), others @ ..] = params.subject_alt_names.as_slice() else {
            panic!("no URI: {params:?}")
        };
        let identity = uri.as_str().parse().unwrap();
        if lie != Lie::None || (others.is_empty() && common_name(&params).is_none()) {
            return self.issue_to(&asked, &identity, ttl, lie);
        }
        let names = Names { dns: dns_names(others), common_name: common_name(&params) };
        self.ca.issue_with_names(&asked, &identity, &names, ttl).unwrap()
    }

    /// A certificate for `identity`, whatever the CSR asks for.
    pub fn issue_to(
        &self,
        asked: &CertificateSigningRequestDer<'_>,
        identity: &SpiffeId,
        ttl: Duration,
        lie: Lie,
    ) -> CertificateDer<'static> {
        let issued = match lie {
            Lie::ForeignKey => {
                let key = SigningKey::generate(KeyType::EcdsaP256).unwrap();
                self.ca.issue(&csr::request(&key, None, &csr::Names::default()).unwrap(), identity, ttl)
            }
            Lie::Expired => self.past.issue(asked, identity, ttl),
            Lie::NotYetValid => self.future.issue(asked, identity, ttl),
            Lie::OtherIdentity => {
                self.ca.issue(asked, &"spiffe://cluster.local/ns/x/sa/thief".parse().unwrap(), ttl)
            }
            Lie::None | Lie::Unchained | Lie::OtherNamesMissing => self.ca.issue(asked, identity, ttl),
        };
        issued.unwrap()
    }

    /// A certificate that another CA signed.
    pub fn by_a_stranger(&self, request: &str, ttl: Duration) -> CertificateDer<'static> {
        let asked = CertificateSigningRequestDer::from_pem_slice(request.as_bytes()).unwrap();
        let identity = super::files::spiffe("web").parse().unwrap();
        self.stranger.issue(&asked, &identity, ttl).unwrap()
    }

    /// Intermediate and root.
    pub fn chain(&self, lie: Lie) -> [&CertificateDer<'static>; 2] {
        if lie == Lie::Unchained { self.stranger.chain() } else { self.ca.chain() }
    }
}
