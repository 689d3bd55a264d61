//! A development CA inside the agent: a root and an intermediate in a directory that several agents can share.
//!
//! It issues any identity that is requested. That is convenient on a laptop, and the reason for the warning at start that it
//! is for development.

pub mod options;
pub mod server;
pub mod token;

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::net::IpAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyUsagePurpose, PublicKeyData, SanType, SerialNumber,
};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer};

use tokio::sync::OnceCell;

use super::{CaError, CertificateAuthority, IssuedChain, SigningRequest};
use crate::base::clock::{Clock, rfc3339};
use crate::base::limits;
use crate::base::spiffe_id::SpiffeId;
use crate::fs::disk::Disk;
use crate::fs::file;
use crate::pki::certificate::Certificate;
use crate::pki::csr::Names;
use crate::pki::key::{KeyType, PrivateKey, SigningKey};
use crate::pki::pem;

/// The root's file in the CA's directory. The names are those of Istio's plug-in CA.
pub const ROOT_FILE: &str = "root-cert.pem";
const INTERMEDIATE_FILE: &str = "ca-cert.pem";
/// The file of the signing key.
pub const KEY_FILE: &str = "ca-key.pem";

const DAY: Duration = Duration::from_secs(24 * 3600);
/// The lifetime of both CA certificates.
const CA_LIFETIME: Duration = Duration::from_secs(3650 * 24 * 3600);
/// How far certificates are backdated, like istiod's, for clocks that are behind.
const BACKDATE: Duration = Duration::from_secs(120);

/// The development CA: a root whose key was discarded, and an intermediate that signs.
#[derive(Debug)]
pub struct DevelopmentCa {
    root: CertificateDer<'static>,
    intermediate: CertificateDer<'static>,
    issuer: Issuer<'static, SigningKey>,
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
        "the development CA's file {path} can't be used: {reason}; choose another directory with --ca-dir, or delete {directory} if it is a development CA's"
    )]
    File { path: PathBuf, directory: PathBuf, reason: String },
    #[error(
        "{path} exists without {KEY_FILE}: {directory} may be another CA's; choose another directory with --ca-dir, or delete it if it is a development CA's"
    )]
    NoKey { path: PathBuf, directory: PathBuf },
    #[error("creating the development CA failed: {0}")]
    Make(#[from] rcgen::Error),
}

impl DevelopmentCa {
    /// Opens the CA in `directory`, or creates one there. Agents that do so at the same time get the same CA.
    pub fn open(directory: &Path, clock: Clock) -> Result<Self, OpenError> {
        let unusable = |source| OpenError::Directory { directory: directory.to_owned(), source };
        fs::create_dir_all(directory).map_err(unusable)?;
        let _guard = file::lock_directory(directory).map_err(unusable)?;
        if directory.join(KEY_FILE).exists() {
            return Self::load(directory, clock);
        }
        // Another CA whose key is elsewhere must not lose its certificates.
        if let Some(name) =
            [ROOT_FILE, INTERMEDIATE_FILE].into_iter().find(|name| directory.join(name).exists())
        {
            return Err(OpenError::NoKey { path: directory.join(name), directory: directory.to_owned() });
        }
        Self::make(directory, clock.now())?;
        Self::load(directory, clock)
    }

    fn make(directory: &Path, now: SystemTime) -> Result<(), OpenError> {
        let root_key = SigningKey::generate(KeyType::EcdsaP256)?;
        let root_params = ca_params("Attache development root", now)?;
        let root = root_params.self_signed(&root_key)?;
        let key = SigningKey::generate(KeyType::EcdsaP256)?;
        let params = ca_params("Attache development CA", now)?;
        let intermediate = params.signed_by(&key, &Issuer::from_params(&root_params, &root_key))?;
        let (root, intermediate) =
            (pem::of_certificates([root.der()]), pem::of_certificates([intermediate.der()]));
        let key = key.to_private_key().to_pem();
        let files: [(&str, u32, &[u8]); 3] =
            [(ROOT_FILE, 0o644, &root), (INTERMEDIATE_FILE, 0o644, &intermediate), (KEY_FILE, 0o600, &key)];
        write_all(directory, &files)
            .map_err(|source| OpenError::Directory { directory: directory.to_owned(), source })
    }

    fn load(directory: &Path, clock: Clock) -> Result<Self, OpenError> {
        let bad = |name: &str, reason: String| OpenError::File {
            path: directory.join(name),
            directory: directory.to_owned(),
            reason,
        };
        let read = |name: &str| {
            file::read(&directory.join(name), limits::FILE_BYTES)
                .map_err(|error| bad(name, error.to_string()))
        };
        let certificate = |name: &str| {
            let text = read(name)?;
            let der = CertificateDer::from_pem_slice(&text).map_err(|error| bad(name, error.to_string()))?;
            let facts = Certificate::parse(&der).map_err(|error| bad(name, error.to_string()))?;
            if facts.not_after <= clock.now() {
                let at = rfc3339(facts.not_after);
                return Err(bad(name, format!("it expired at {at}")));
            }
            Ok((der, facts))
        };
        let (root, _) = certificate(ROOT_FILE)?;
        let (intermediate, facts) = certificate(INTERMEDIATE_FILE)?;
        let key = PrivatePkcs8KeyDer::from_pem_slice(&read(KEY_FILE)?)
            .map_err(|error| bad(KEY_FILE, format!("it holds no PKCS#8 key ({error})")))?;
        let key = SigningKey::from_pkcs8(&key).map_err(|error| bad(KEY_FILE, error.to_string()))?;
        if key.subject_public_key_info() != facts.public_key {
            return Err(bad(KEY_FILE, format!("it is not the key of {INTERMEDIATE_FILE}")));
        }
        let issuer = Issuer::from_ca_cert_der(&intermediate, key)?;
        Ok(Self { root, intermediate, issuer, directory: directory.to_owned(), clock })
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
    ) -> Result<CertificateDer<'static>, rcgen::Error> {
        self.issue_with_names(csr, identity, &Names::default(), ttl)
    }

    /// The same, with `names` besides the identity.
    pub fn issue_with_names(
        &self,
        csr: &[u8],
        identity: &SpiffeId,
        names: &Names,
        ttl: Duration,
    ) -> Result<CertificateDer<'static>, rcgen::Error> {
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
    ) -> Result<(Vec<CertificateDer<'static>>, PrivateKey), rcgen::Error> {
        let names = dns_names.iter().map(|name| (*name).try_into().map(SanType::DnsName));
        let mut san = names.collect::<Result<Vec<_>, _>>()?;
        san.extend(addresses.iter().copied().map(SanType::IpAddress));
        let key = SigningKey::generate(KeyType::EcdsaP256)?;
        let leaf = self.leaf_params(san, 30 * DAY)?.signed_by(&key, &self.issuer)?;
        Ok((vec![leaf.der().clone(), self.intermediate.clone()], key.to_private_key()))
    }

    /// Intermediate and root.
    pub fn chain(&self) -> [&CertificateDer<'static>; 2] {
        [&self.intermediate, &self.root]
    }

    fn leaf_params(&self, names: Vec<SanType>, ttl: Duration) -> Result<CertificateParams, rcgen::Error> {
        let now = self.clock.now();
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        params.subject_alt_names = names;
        params.not_before = (now - BACKDATE).into();
        params.not_after = (now + ttl.min(CA_LIFETIME)).into();
        params.serial_number = Some(serial()?);
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature, KeyUsagePurpose::KeyEncipherment];
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        params.use_authority_key_identifier_extension = true;
        Ok(params)
    }
}

fn root_file(directory: &Path) -> PathBuf {
    let file = directory.join(ROOT_FILE);
    std::path::absolute(&file).unwrap_or(file)
}

fn ca_params(name: &str, now: SystemTime) -> Result<CertificateParams, rcgen::Error> {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, name);
    params.not_before = (now - DAY).into();
    params.not_after = (now + CA_LIFETIME).into();
    params.serial_number = Some(serial()?);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
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

/// Writes all files under temporary names first: a full disk leaves no partial set, and readers see no partial file.
fn write_all(directory: &Path, files: &[(&str, u32, &[u8])]) -> io::Result<()> {
    let temporary = |name: &str| directory.join(format!(".{name}.new"));
    for (name, mode, content) in files {
        let _ = fs::remove_file(temporary(name));
        let mut file = File::options().create_new(true).write(true).mode(*mode).open(temporary(name))?;
        file.write_all(content)?;
    }
    files.iter().try_for_each(|(name, ..)| fs::rename(temporary(name), directory.join(name)))
}

/// The development CA as a CA client: no server, no network.
#[derive(Debug)]
pub struct Embedded {
    /// Empty until the directory could be read.
    opened: OnceCell<DevelopmentCa>,
    directory: PathBuf,
    clock: Clock,
    disk: Disk,
}

impl Embedded {
    /// Opens the CA in `directory` as [`DevelopmentCa::open`] does; with the first call, if the disk does not answer now.
    pub fn open(directory: &Path, clock: &Clock, disk: &Disk) -> Result<Self, OpenError> {
        let embedded = Self {
            opened: OnceCell::new(),
            directory: directory.to_owned(),
            clock: clock.clone(),
            disk: disk.clone(),
        };
        let opened = disk.attempt(directory, embedded.opening()).transpose()?;
        Ok(Self { opened: OnceCell::new_with(opened), ..embedded })
    }

    fn opening(&self) -> impl FnOnce() -> Result<DevelopmentCa, OpenError> + Send + 'static {
        let (directory, clock) = (self.directory.clone(), self.clock.clone());
        move || DevelopmentCa::open(&directory, clock)
    }

    async fn ca(&self) -> Result<&DevelopmentCa, CaError> {
        let open = async || {
            let opened = self.disk.run(&self.directory, self.opening()).await?;
            opened.map_err(|error| CaError::Local(error.to_string()))
        };
        self.opened.get_or_try_init(open).await
    }
}

impl From<DevelopmentCa> for Embedded {
    fn from(ca: DevelopmentCa) -> Self {
        let (directory, clock) = (ca.directory.clone(), ca.clock.clone());
        Self { opened: OnceCell::new_with(Some(ca)), directory, clock, disk: Disk::default() }
    }
}

#[tonic::async_trait]
impl CertificateAuthority for Embedded {
    fn name(&self) -> &'static str {
        "embedded"
    }

    async fn sign(&self, request: &SigningRequest) -> Result<IssuedChain, CaError> {
        let identity = request.identity.as_ref().ok_or_else(|| {
            CaError::Local("the development CA needs an identity: set --spiffe-id".to_owned())
        })?;
        let ca = self.ca().await?;
        let issued = ca.issue_with_names(&request.csr, identity, &request.names, request.ttl);
        let leaf = issued.map_err(|error| CaError::Local(error.to_string()))?;
        let [intermediate, root] = ca.chain();
        Ok(IssuedChain { chain: vec![leaf, intermediate.clone()], roots: vec![root.clone()] })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
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
        }
    }

    #[test]
    fn a_damaged_directory_is_named_with_a_remedy() {
        let directory = tempfile::tempdir().unwrap();
        DevelopmentCa::open(directory.path(), Clock::system()).unwrap();
        fs::write(directory.path().join(INTERMEDIATE_FILE), "junk").unwrap();
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
