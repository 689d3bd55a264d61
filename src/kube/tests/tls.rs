use std::net::SocketAddr;
use std::sync::Arc;

use rcgen::{BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa, Issuer};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;

use super::{id, secret};
use crate::base::clock::Clock;
use crate::fs::disk::Disk;
use crate::kube::{Api as _, Cluster, ClusterConfig, Credential};
use crate::net::endpoint::Endpoint;
use crate::net::tls::{Roots, Trusted};
use crate::pki::key::PrivateKey;
use crate::pki::pem;
use crate::secret::KeyPair;

struct Ca {
    certificate: CertificateDer<'static>,
    issuer: Issuer<'static, rcgen::KeyPair>,
}

impl Ca {
    fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = rcgen::KeyPair::generate().unwrap();
        let certificate = params.self_signed(&key).unwrap().der().clone();
        Self { certificate, issuer: Issuer::new(params, key) }
    }

    /// A certificate for this machine, and its key.
    fn issue(&self) -> (CertificateDer<'static>, rcgen::KeyPair) {
        let mut params = CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        let key = rcgen::KeyPair::generate().unwrap();
        (params.signed_by(&key, &self.issuer).unwrap().der().clone(), key)
    }

    fn client(&self) -> Credential {
        let (certificate, key) = self.issue();
        let key = PrivateKey::from_pem(&pem::encode("PRIVATE KEY", &key.serialize_der())).unwrap();
        Credential::Certificate(KeyPair::new(vec![certificate], key).unwrap())
    }

    fn roots(&self) -> Roots {
        Roots::Given(Arc::new(Trusted::new(vec![self.certificate.clone()], "the test's root")))
    }
}

/// An API server with TLS, and the cluster's client of it.
async fn serve(ca: &Ca, clients: Option<&Ca>, alpn: &[u8]) -> SocketAddr {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = ServerConfig::builder_with_provider(Arc::clone(&provider));
    let config = config.with_safe_default_protocol_versions().unwrap();
    let config = match clients {
        None => config.with_no_client_auth(),
        Some(ca) => {
            let mut roots = RootCertStore::empty();
            roots.add(ca.certificate.clone()).unwrap();
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
            config.with_client_cert_verifier(verifier.build().unwrap())
        }
    };
    let (certificate, key) = ca.issue();
    let key = PrivateKeyDer::try_from(key.serialize_der()).unwrap();
    let mut config = config.with_single_cert(vec![certificate], key).unwrap();
    config.alpn_protocols = vec![alpn.to_vec()];
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        loop {
            let (tcp, _) = listener.accept().await.unwrap();
            let Ok(tls) = acceptor.accept(tcp).await else { continue };
            let mut connection = h2::server::handshake(tls).await.unwrap();
            while let Some(Ok((_, mut answer))) = connection.accept().await {
                let mut body = answer.send_response(http::Response::new(()), false).unwrap();
                body.send_data(secret("tls", "1", &[("k", "v")]).to_string().into(), true).unwrap();
            }
        }
    });
    address
}

/// Reads a Secret: none without an error.
async fn error_of(address: SocketAddr, roots: Roots, credential: Credential) -> Option<String> {
    let endpoint = Endpoint { address: address.to_string().parse().unwrap(), roots, server_name: None };
    let cluster = Cluster::new(ClusterConfig::new(endpoint, credential), Disk::default(), Clock::system());
    cluster.get(&id("tls")).await.map(|found| assert!(found.is_some())).err().map(|error| error.to_string())
}

#[tokio::test]
async fn a_server_is_verified_by_the_given_roots_unless_none_are_wanted() {
    let (ca, other) = (Ca::new(), Ca::new());
    let address = serve(&ca, None, b"h2").await;
    assert_eq!(error_of(address, ca.roots(), Credential::None).await, None);
    assert_eq!(error_of(address, Roots::Unverified, Credential::None).await, None);
    let error = error_of(address, other.roots(), Credential::None).await.unwrap();
    assert!(error.contains("not signed by the test's root"), "{error}");
}

#[tokio::test]
async fn a_client_certificate_is_presented_and_its_refusal_is_named() {
    let (ca, other) = (Ca::new(), Ca::new());
    let address = serve(&ca, Some(&ca), b"h2").await;
    assert_eq!(error_of(address, ca.roots(), ca.client()).await, None);
    let error = error_of(address, ca.roots(), other.client()).await.unwrap();
    assert!(error.contains("refuses the client certificate"), "{error}");
    let error = error_of(address, ca.roots(), Credential::None).await.unwrap();
    assert!(error.contains("wants a client certificate"), "{error}");
}

#[tokio::test]
async fn a_server_that_agrees_on_http1_only_is_named_as_such() {
    let ca = Ca::new();
    let address = serve(&ca, None, b"http/1.1").await;
    let error = error_of(address, ca.roots(), Credential::None).await.unwrap();
    assert!(error.contains("does not speak HTTP/2"), "{error}");
}
