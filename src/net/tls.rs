//! TLS as a client: the roots that a server's certificate must chain to, and the client certificate.

mod alert;

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustls::client::ResolvesClientCert;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::sign::CertifiedKey;
use rustls::{ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme};
use zeroize::Zeroizing;

pub use self::alert::Alert;
pub(super) use self::alert::Watched;
use crate::base::limits;
use crate::fs::disk::Disk;
use crate::fs::file;
use crate::net::error::RootsError;
use crate::pki::pem;
use crate::secret::KeyPair;

/// The system's roots are in several places, most of them here.
const SYSTEM_ROOTS: &str = "/etc/ssl";

/// The roots that a server's certificate must chain to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Roots {
    /// Those of the operating system.
    System,
    /// A PEM file, read for each connection.
    File(PathBuf),
    /// The first of these PEM files that exists.
    FirstOf(Vec<PathBuf>),
    /// Those that were read before.
    Given(Arc<Trusted>),
    /// None: any certificate passes, and anything on the way to the server can take its place.
    Unverified,
}

/// Roots as they were read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trusted {
    /// None where any certificate passes.
    roots: Option<Vec<CertificateDer<'static>>>,
    /// Where they were read.
    pub(super) place: String,
}

impl Trusted {
    /// `roots`, which `place` holds.
    pub fn new(roots: Vec<CertificateDer<'static>>, place: impl Into<String>) -> Self {
        Self { roots: Some(roots), place: place.into() }
    }
}

impl Roots {
    pub(super) async fn load(&self, disk: &Disk) -> Result<Trusted, RootsError> {
        match self {
            Self::System => {
                let load = || rustls_native_certs::load_native_certs().certs;
                let roots = disk.run(Path::new(SYSTEM_ROOTS), load).await?;
                if roots.is_empty() {
                    return Err(RootsError::NoSystemRoots);
                }
                Ok(Trusted::new(roots, "the system's roots"))
            }
            Self::Given(trusted) => Ok(Trusted::clone(trusted)),
            Self::Unverified => Ok(Trusted { roots: None, place: "any root".to_owned() }),
            Self::File(path) => parse(path, disk.read(path, limits::FILE_BYTES).await?),
            Self::FirstOf(paths) => {
                for path in paths {
                    let file = path.clone();
                    let read = move || exists(&file).then(|| file::read(&file, limits::FILE_BYTES));
                    if let Some(text) = disk.run(path, read).await? {
                        return parse(path, text);
                    }
                }
                Err(RootsError::NoFile { paths: paths.clone() })
            }
        }
    }
}

fn parse(path: &Path, text: io::Result<Zeroizing<Vec<u8>>>) -> Result<Trusted, RootsError> {
    let path = || path.to_owned();
    let text = text.map_err(|source| RootsError::Unreadable { path: path(), source })?;
    let roots = pem::certificates(&text).map_err(|source| RootsError::NotPem { path: path(), source })?;
    Ok(Trusted::new(roots, path().display().to_string()))
}

/// The target of a link may be replaced at this moment (the kubelet does so): a second look finds it.
fn exists(path: &Path) -> bool {
    path.exists() || (path.is_symlink() && path.exists())
}

/// The configuration of one connection.
pub(super) fn client_config(
    trusted: &Trusted,
    presenter: Option<Arc<Presenter>>,
    alpn: &[u8],
) -> Result<ClientConfig, rustls::Error> {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = ClientConfig::builder_with_provider(Arc::clone(&provider));
    let config = config.with_safe_default_protocol_versions()?;
    let config = match &trusted.roots {
        Some(roots) => {
            let mut store = RootCertStore::empty();
            store.add_parsable_certificates(roots.iter().cloned());
            config.with_root_certificates(store)
        }
        None => config.dangerous().with_custom_certificate_verifier(Arc::new(AnyServer(provider))),
    };
    let mut config = match presenter {
        Some(presenter) => config.with_client_cert_resolver(presenter),
        None => config.with_no_client_auth(),
    };
    config.alpn_protocols = vec![alpn.to_vec()];
    Ok(config)
}

/// Accepts any certificate, if the server has its key.
#[derive(Debug)]
struct AnyServer(Arc<CryptoProvider>);

impl ServerCertVerifier for AnyServer {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.0.signature_verification_algorithms;
        rustls::crypto::verify_tls12_signature(message, certificate, signature, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.0.signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, certificate, signature, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

/// Presents one client certificate where the server asks for one, and records that it did.
pub(super) struct Presenter {
    certified: Arc<CertifiedKey>,
    has_presented: AtomicBool,
}

impl Presenter {
    pub(super) fn new(pair: &KeyPair) -> Result<Self, rustls::Error> {
        let key = rustls::crypto::aws_lc_rs::sign::any_supported_type(pair.key().der())?;
        let certified = Arc::new(CertifiedKey::new(pair.chain().to_vec(), key));
        Ok(Self { certified, has_presented: AtomicBool::new(false) })
    }

    /// Whether the server has asked for the certificate, and got it.
    pub(super) fn has_presented(&self) -> bool {
        self.has_presented.load(Ordering::Relaxed)
    }
}

impl fmt::Debug for Presenter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Presenter(hidden)")
    }
}

impl ResolvesClientCert for Presenter {
    fn resolve(&self, _: &[&[u8]], schemes: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        // Without a scheme for this kind of key rustls would present nothing.
        self.certified.key.choose_scheme(schemes)?;
        self.has_presented.store(true, Ordering::Relaxed);
        Some(Arc::clone(&self.certified))
    }

    fn has_certs(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn missing_roots_are_named() {
        let missing = PathBuf::from("/nowhere/root-cert.pem");
        for roots in [Roots::File(missing.clone()), Roots::FirstOf(vec![missing])] {
            let error = roots.load(&Disk::default()).await.unwrap_err().to_string();
            assert!(error.contains("/nowhere/root-cert.pem"), "{error}");
        }
    }
}
