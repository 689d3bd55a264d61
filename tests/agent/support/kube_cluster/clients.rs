//! Users with client certificates.

use std::sync::Arc;

use attache::ca::embedded::DevelopmentCa;
use attache::pki::pem;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair, KeyUsagePurpose};
use rustls::RootCertStore;
use rustls::server::WebPkiClientVerifier;
use tokio_rustls::TlsAcceptor;

/// The CA of client certificates.
pub struct ClientCa(CertifiedIssuer<'static, KeyPair>);

impl ClientCa {
    pub fn new() -> Self {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, "kubernetes");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    /// A certificate and its key, as PEM: the user is its common name.
    pub fn issue(&self, user: &str) -> [Vec<u8>; 2] {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, user);
        params.extended_key_usages = vec![rcgen::ExtendedKeyUsagePurpose::ClientAuth];
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.0).unwrap();
        let key = pem::encode("PRIVATE KEY", &key.serialize_der()).to_vec();
        [pem::of_certificates([certificate.der()]), key]
    }

    /// TLS as a server of 127.0.0.1, for HTTP of both versions, which takes client certificates.
    pub fn acceptor(&self, ca: &DevelopmentCa) -> TlsAcceptor {
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let mut roots = RootCertStore::empty();
        roots.add(self.0.der().clone()).unwrap();
        let clients = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider));
        let clients = clients.allow_unauthenticated().build().unwrap();
        let (chain, key) = ca.issue_server(&[], &[[127, 0, 0, 1].into()]).unwrap();
        let config =
            rustls::ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
        let config = config.unwrap().with_client_cert_verifier(clients);
        let mut config = config.with_single_cert(chain, key.der().clone_key()).unwrap();
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        TlsAcceptor::from(Arc::new(config))
    }
}
