//! TLS of the fake servers.

use std::sync::Arc;

use attache::ca::embedded::DevelopmentCa;
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_util::either::Either;

/// A connection of a server with or without TLS.
pub type Connection = Either<TcpStream, TlsStream<TcpStream>>;

/// TLS as a server of 127.0.0.1, for HTTP of both versions.
pub fn acceptor(ca: &DevelopmentCa) -> TlsAcceptor {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let (chain, key) = ca.issue_server(&[], &[[127, 0, 0, 1].into()]).unwrap();
    let config = rustls::ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let config = config.unwrap().with_no_client_auth().with_single_cert(chain, key.der().clone_key());
    let mut config = config.unwrap();
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    TlsAcceptor::from(Arc::new(config))
}

/// Runs `serve` on every connection, each in a task of its own. Connections whose handshake fails are dropped.
pub async fn accept<S: Future<Output = ()> + Send + 'static>(
    listener: TcpListener,
    acceptor: Option<TlsAcceptor>,
    serve: impl Fn(Connection) -> S + Clone + Send + 'static,
) {
    while let Ok((io, _)) = listener.accept().await {
        let (acceptor, serve) = (acceptor.clone(), serve.clone());
        tokio::spawn(async move {
            match acceptor {
                None => serve(Either::Left(io)).await,
                Some(acceptor) => {
                    if let Ok(io) = acceptor.accept(io).await {
                        serve(Either::Right(io)).await;
                    }
                }
            }
        });
    }
}
