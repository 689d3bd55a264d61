//! A development CA inside the agent: a root and an intermediate in a directory that several agents can share.
//!
//! It issues any identity that is requested. That is convenient on a laptop, and the reason for the warning at start that it
//! is for development.

mod client;
pub mod directory;
pub mod exchange;
pub mod follow;
pub mod make;
pub mod options;
pub mod roots;
pub mod server;
pub mod token;

use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyUsagePurpose, SanType, SerialNumber,
};
use rustls::pki_types::CertificateDer;

pub use self::client::Embedded;
use self::directory::{Authority, Files};
pub use self::directory::{KEY_FILE, ROOT_FILE};
use self::directory::{ROOT_KEY_FILE, SIGNER_FILE};
use crate::base::clock::{Clock, rfc3339};
use crate::base::spiffe_id::SpiffeId;
use crate::fs::create::readable_directories;
use crate::fs::file;
use crate::fs::new_directory;
use crate::pki::csr::Names;
use crate::pki::key::{KeyType, PrivateKey, SigningKey};
use crate::pki::pem;
use crate::secret::Version;

const DAY: Duration = Duration::from_secs(24 * 3600);
/// The lifetime of both certificates of a CA that the agent makes by itself.
const CA_LIFETIME: Duration = Duration::from_secs(3650 * 24 * 3600);
/// How far certificates are backdated, like istiod's, for clocks that are behind.
const BACKDATE: Duration = Duration::from_secs(120);

/// A CA that signs with the key in its directory.
#[derive(Debug)]
pub struct DevelopmentCa {
    signer: CertificateDer<'static>,
    intermediates: Vec<CertificateDer<'static>>,
    root: CertificateDer<'static>,
    roots: Vec<CertificateDer<'static>>,
    not_after: SystemTime,
    issuer: Issuer<'static, SigningKey>,
    version: Version,
    directory: PathBuf,
    clock: Clock,
}

/// Why the development CA can't be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error(
        "the development CA's directory {directory} can't be used: {source}; choose another with --ca-dir"
    )]
    Directory { directory: PathBuf, source: io::Error },
    #[error(
        "the development CA's file {path} can't be used: {reason}; repair it, or choose another directory with --ca-dir"
    )]
    File { path: PathBuf, reason: String },
    #[error(
        "{path} exists without {KEY_FILE}: {directory} may be another CA's; choose another directory with --ca-dir, or delete it if it is a development CA's"
    )]
    NoKey { path: PathBuf, directory: PathBuf },
    #[error(
        "{directory} is the directory of a root, whose key signs no workloads; make an intermediate with `attache ca intermediate --root {directory}`, and name its directory with --ca-dir"
    )]
    RootOnly { directory: PathBuf },
    #[error("creating the development CA failed: {0}")]
    Make(#[from] rcgen::Error),
}

/// Why no certificate is issued.
#[derive(Debug, thiserror::Error)]
pub enum IssueError {
    #[error(
        "the CA certificate in {directory}, or one above it, expired at {at}; make a new one with `attache ca intermediate`"
    )]
    Expired { directory: PathBuf, at: String },
    #[error(transparent)]
    Refused(#[from] rcgen::Error),
}

impl DevelopmentCa {
    /// Opens the CA in `directory`, or creates one there. Agents that do so at the same time get the same CA.
    ///
    /// A missing directory gets mode 0755 less the umask: agents of other users may read the root, and only the key is the
    /// owner's alone.
    pub fn open(directory: &Path, clock: Clock) -> Result<Self, OpenError> {
        let unusable = |source| OpenError::Directory { directory: directory.to_owned(), source };
        readable_directories(directory).map_err(unusable)?;
        let _guard = file::lock_directory(directory).map_err(unusable)?;
        if directory.join(KEY_FILE).exists() {
            return Self::load(directory, clock);
        }
        if directory.join(ROOT_KEY_FILE).exists() {
            return Err(OpenError::RootOnly { directory: directory.to_owned() });
        }
        // Another CA whose key is elsewhere must not lose its certificates.
        if let Some(name) = [ROOT_FILE, SIGNER_FILE].into_iter().find(|name| directory.join(name).exists()) {
            return Err(OpenError::NoKey { path: directory.join(name), directory: directory.to_owned() });
        }
        Self::make(directory, clock.now())?;
        Self::load(directory, clock)
    }

    fn make(directory: &Path, now: SystemTime) -> Result<(), OpenError> {
        let root_key = SigningKey::generate(KeyType::EcdsaP256)?;
        let root_params = own_params("Attache development root", now)?;
        let root = root_params.self_signed(&root_key)?;
        let key = SigningKey::generate(KeyType::EcdsaP256)?;
        let params = own_params("Attache development CA", now)?;
        let intermediate = params.signed_by(&key, &Issuer::from_params(&root_params, &root_key))?;
        let (root, intermediate) =
            (pem::of_certificates([root.der()]), pem::of_certificates([intermediate.der()]));
        let key = key.to_private_key().to_pem();
        let files: [(&str, u32, &[u8]); 3] =
            [(ROOT_FILE, 0o644, &root), (SIGNER_FILE, 0o644, &intermediate), (KEY_FILE, 0o600, &key)];
        new_directory::write_into(directory, &files)
            .map_err(|source| OpenError::Directory { directory: directory.to_owned(), source })
    }

    /// Opens the CA in `directory`, which must exist. Waits for the disk.
    fn load(directory: &Path, clock: Clock) -> Result<Self, OpenError> {
        Self::from_files(&Files::read(directory)?, directory, clock)
    }

    fn from_files(files: &Files, directory: &Path, clock: Clock) -> Result<Self, OpenError> {
        let authority = files.check(directory, clock.now())?;
        let Authority { signer, key, intermediates, root, roots, not_after } = authority;
        let issuer = Issuer::from_ca_cert_der(&signer, key)?;
        let (version, directory) = (files.version(), directory.to_owned());
        Ok(Self { signer, intermediates, root, roots, not_after, issuer, version, directory, clock })
    }

    pub fn root_file(&self) -> PathBuf {
        root_file(&self.directory)
    }

    /// Signs a DER CSR for `identity`, regardless of the names in the CSR (as istiod does).
    pub fn issue(
        &self,
        csr: &[u8],
        identity: &SpiffeId,
        ttl: Duration,
    ) -> Result<CertificateDer<'static>, IssueError> {
        self.issue_with_names(csr, identity, &Names::default(), ttl)
    }

    /// The same, with `names` besides the identity.
    pub fn issue_with_names(
        &self,
        csr: &[u8],
        identity: &SpiffeId,
        names: &Names,
        ttl: Duration,
    ) -> Result<CertificateDer<'static>, IssueError> {
        let request = rcgen::CertificateSigningRequestParams::from_der(&csr.into())?;
        let san = SanType::URI(identity.as_str().try_into()?);
        let mut params = self.leaf_params(vec![san], ttl)?;
        names.put_into(&mut params)?;
        Ok(params.signed_by(&request.public_key, &self.issuer)?.der().clone())
    }

    /// A certificate (with its chain) and key for the CA's own TLS server, valid for 30 days.
    pub fn issue_server(
        &self,
        dns_names: &[&str],
        addresses: &[IpAddr],
    ) -> Result<(Vec<CertificateDer<'static>>, PrivateKey), IssueError> {
        let names = dns_names.iter().map(|name| (*name).try_into().map(SanType::DnsName));
        let mut san = names.collect::<Result<Vec<_>, _>>()?;
        san.extend(addresses.iter().copied().map(SanType::IpAddress));
        let key = SigningKey::generate(KeyType::EcdsaP256)?;
        let leaf = self.leaf_params(san, 30 * DAY)?.signed_by(&key, &self.issuer)?;
        let chain = [leaf.der()].into_iter().chain(&self.intermediates).cloned().collect();
        Ok((chain, key.to_private_key()))
    }

    /// The certificate that signs, and its root.
    pub fn chain(&self) -> [&CertificateDer<'static>; 2] {
        [&self.signer, &self.root]
    }

    /// The certificates behind a leaf, without the root: none if the root itself signs.
    pub fn intermediates(&self) -> &[CertificateDer<'static>] {
        &self.intermediates
    }

    /// All roots, in the order of their file: that of this CA, and announced ones.
    pub fn roots(&self) -> &[CertificateDer<'static>] {
        &self.roots
    }

    /// The parameters of a leaf. Like istiod's, it does not outlive the CA's own certificates.
    fn leaf_params(&self, names: Vec<SanType>, ttl: Duration) -> Result<CertificateParams, IssueError> {
        let now = self.clock.now();
        if self.not_after <= now {
            let at = rfc3339(self.not_after).to_string();
            return Err(IssueError::Expired { directory: self.directory.clone(), at });
        }
        let not_after = now.checked_add(ttl).map_or(self.not_after, |end| end.min(self.not_after));
        Ok(leaf_params(names, now, not_after)?)
    }
}

fn leaf_params(
    names: Vec<SanType>,
    now: SystemTime,
    not_after: SystemTime,
) -> Result<CertificateParams, rcgen::Error> {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.subject_alt_names = names;
    params.not_before = (now - BACKDATE).into();
    params.not_after = not_after.into();
    params.serial_number = Some(serial()?);
    // Clients of the SPIFFE Workload API refuse a leaf that does not say so.
    params.is_ca = IsCa::ExplicitNoCa;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature, KeyUsagePurpose::KeyEncipherment];
    params.extended_key_usages =
        vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
    params.use_authority_key_identifier_extension = true;
    Ok(params)
}

fn root_file(directory: &Path) -> PathBuf {
    let file = directory.join(ROOT_FILE);
    std::path::absolute(&file).unwrap_or(file)
}

/// The parameters of a certificate of a CA that the agent makes by itself.
fn own_params(name: &str, now: SystemTime) -> Result<CertificateParams, rcgen::Error> {
    let mut subject = DistinguishedName::new();
    subject.push(DnType::CommonName, name);
    ca_params(subject, [now - DAY, now + CA_LIFETIME], BasicConstraints::Unconstrained)
}

fn ca_params(
    subject: DistinguishedName,
    [not_before, not_after]: [SystemTime; 2],
    constraints: BasicConstraints,
) -> Result<CertificateParams, rcgen::Error> {
    let mut params = CertificateParams::default();
    params.distinguished_name = subject;
    params.not_before = not_before.into();
    params.not_after = not_after.into();
    params.serial_number = Some(serial()?);
    params.is_ca = IsCa::Ca(constraints);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params.use_authority_key_identifier_extension = true;
    Ok(params)
}

/// 127 random bits: unique, and positive as X.509 requires.
fn serial() -> Result<SerialNumber, rcgen::Error> {
    let mut bytes = [0; 16];
    aws_lc_rs::rand::fill(&mut bytes).map_err(|_| rcgen::Error::RingUnspecified)?;
    let [first, ..] = &mut bytes;
    *first &= 0x7f;
    Ok(SerialNumber::from_slice(&bytes))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::ca::{CertificateAuthority as _, SigningRequest};
    use crate::fs::disk::Disk;
    use crate::pki::csr;

    fn identity() -> SpiffeId {
        "spiffe://cluster.local/ns/default/sa/web".parse().unwrap()
    }

    #[test]
    fn agents_that_share_a_directory_share_a_root() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("ca");
        let open = || DevelopmentCa::open(&path, Clock::system()).unwrap().chain().map(Clone::clone);
        let together: Vec<_> = std::thread::scope(|scope| {
            let agents: Vec<_> = (0..4).map(|_| scope.spawn(open)).collect();
            agents.into_iter().map(|agent| agent.join().unwrap()).collect()
        });
        assert!(together.iter().all(|chain| *chain == open()));
    }

    #[tokio::test]
    async fn issued_certificates_pass_the_agents_own_checks() {
        let directory = tempfile::tempdir().unwrap();
        let clock = Clock::system();
        let ca = Embedded::from(DevelopmentCa::open(directory.path(), clock.clone()).unwrap());
        for key_type in [KeyType::EcdsaP256, KeyType::EcdsaP384, KeyType::Rsa2048, KeyType::Ed25519] {
            let key = SigningKey::generate(key_type).unwrap();
            let names = Names { dns: vec!["web.example".parse().unwrap()], common_name: "web".parse().ok() };
            let csr = csr::request(&key, Some(&identity()), &names).unwrap();
            let ttl = Duration::from_secs(10);
            let request = SigningRequest { csr, identity: Some(identity()), names: names.clone(), ttl };
            let answer = ca.sign(&request).await.unwrap();
            let checked = answer.check(key.to_private_key(), Some(&identity()), &names, clock.now());
            let (pair, bundle) = checked.unwrap();
            assert_eq!((pair.chain().len(), bundle.roots().len()), (2, 1), "{key_type:?}");
            assert!(pair.not_after() <= clock.now() + ttl);
            let (_, leaf) = x509_parser::parse_x509_certificate(&pair.chain()[0]).unwrap();
            let constraints = leaf.basic_constraints().unwrap().unwrap();
            assert!(!constraints.value.ca, "clients of the SPIFFE Workload API require it");
        }
    }

    #[tokio::test]
    async fn a_directory_that_breaks_or_goes_leaves_the_last_good_ca_signing() {
        let place = tempfile::tempdir().unwrap();
        let [path, moved] = ["ca", "moved"].map(|name| place.path().join(name));
        let ca = Embedded::open(&path, &Clock::system(), &Disk::default()).unwrap();
        let key = SigningKey::generate(KeyType::EcdsaP256).unwrap();
        let (names, ttl) = (Names::default(), DAY);
        let csr = csr::request(&key, Some(&identity()), &names).unwrap();
        let request = SigningRequest { csr, identity: Some(identity()), names, ttl };
        let before = ca.sign(&request).await.unwrap();
        fs::rename(&path, &moved).unwrap();
        assert_eq!(ca.sign(&request).await.unwrap().roots, before.roots);
        assert!(!path.exists(), "no other CA is made");
        let other = DevelopmentCa::open(&path, Clock::system()).unwrap();
        let key = fs::read(path.join(KEY_FILE)).unwrap();
        fs::copy(moved.join(KEY_FILE), path.join(KEY_FILE)).unwrap();
        assert_eq!(ca.sign(&request).await.unwrap().roots, before.roots);
        fs::write(path.join(KEY_FILE), key).unwrap();
        assert_eq!(ca.sign(&request).await.unwrap().roots, other.roots());
    }

    #[test]
    fn a_damaged_directory_is_named_with_a_remedy() {
        let directory = tempfile::tempdir().unwrap();
        DevelopmentCa::open(directory.path(), Clock::system()).unwrap();
        fs::write(directory.path().join(SIGNER_FILE), "junk").unwrap();
        let error = DevelopmentCa::open(directory.path(), Clock::system()).unwrap_err().to_string();
        assert!(error.contains("ca-cert.pem") && error.contains("--ca-dir"), "{error}");
    }

    #[test]
    fn another_cas_root_is_not_overwritten() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path().join(ROOT_FILE);
        fs::write(&root, "precious").unwrap();
        let error = DevelopmentCa::open(directory.path(), Clock::system()).unwrap_err().to_string();
        assert!(error.contains("root-cert.pem") && error.contains("--ca-dir"), "{error}");
        assert_eq!(fs::read_to_string(&root).unwrap(), "precious");
    }

    #[test]
    fn only_the_owner_can_read_the_key() {
        use std::os::unix::fs::PermissionsExt;
        let directory = tempfile::tempdir().unwrap();
        DevelopmentCa::open(directory.path(), Clock::system()).unwrap();
        let mode = fs::metadata(directory.path().join(KEY_FILE)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }
}
