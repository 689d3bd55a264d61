//! A Workload API that does what a test says, and CAs for its SVIDs.

use std::convert::Infallible;
use std::sync::Mutex;
use std::task::{Context, Poll};

use http::HeaderMap;
use http_body_util::StreamBody;
use hyper::body::{Frame, Incoming};
use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, CertifiedIssuer, DnType, IsCa,
    KeyUsagePurpose, SanType,
};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::watch;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::Status;
use tonic::body::Body;
use tower_service::Service;

use super::*;
use crate::net::endpoint::Io;
use crate::net::http2;
use crate::pki::key::{KeyType, SigningKey};
use crate::proto::X509svid;
use crate::source::spiffe::call::Dial;
use crate::source::spiffe::error::Cause;

pub(in crate::source::spiffe) struct Ca(CertifiedIssuer<'static, SigningKey>);

impl Ca {
    pub(in crate::source::spiffe) fn new(name: &str) -> Self {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        Self(CertifiedIssuer::self_signed(params, SigningKey::generate(KeyType::EcdsaP256).unwrap()).unwrap())
    }

    pub(in crate::source::spiffe) fn root(&self) -> Vec<u8> {
        self.0.as_ref().der().to_vec()
    }

    /// An SVID that is valid from `from` on for `HOUR`.
    pub(in crate::source::spiffe) fn svid(&self, id: &str, from: SystemTime) -> X509svid {
        let key = SigningKey::generate(KeyType::EcdsaP256).unwrap();
        let mut params = CertificateParams::default();
        params.subject_alt_names = vec![SanType::URI(id.try_into().unwrap())];
        (params.not_before, params.not_after) = (from.into(), (from + HOUR).into());
        let leaf = params.signed_by(&key, &self.0).unwrap();
        let rustls::pki_types::PrivateKeyDer::Pkcs8(key) = key.to_private_key().der().clone_key() else {
            panic!("not PKCS#8")
        };
        X509svid {
            spiffe_id: id.to_owned(),
            x509_svid: leaf.der().to_vec().into(),
            x509_svid_key: key.secret_pkcs8_der().to_vec().into(),
            bundle: self.root().into(),
            hint: String::new(),
        }
    }

    pub(in crate::source::spiffe) fn crl(&self, from: SystemTime, until: SystemTime) -> Bytes {
        let params = CertificateRevocationListParams {
            this_update: from.into(),
            next_update: until.into(),
            crl_number: 1.into(),
            issuing_distribution_point: None,
            revoked_certs: Vec::new(),
            key_identifier_method: rcgen::KeyIdMethod::Sha256,
        };
        params.signed_by(&self.0).unwrap().der().to_vec().into()
    }
}

pub(in crate::source::spiffe) fn answer(svids: impl Into<Vec<X509svid>>) -> X509svidResponse {
    X509svidResponse { svids: svids.into(), crl: Vec::new(), federated_bundles: HashMap::new() }
}

/// A call as the server sees it.
pub(super) struct Call {
    pub(super) path: String,
    pub(super) headers: HeaderMap,
    frames: UnboundedSender<Result<Frame<Bytes>, Infallible>>,
}

impl Call {
    pub(super) fn send(&self, answer: &X509svidResponse) {
        self.send_bytes(&answer.encode_to_vec());
    }

    pub(super) fn send_bytes(&self, message: &[u8]) {
        let length = u32::try_from(message.len()).unwrap().to_be_bytes();
        self.send_raw([&[0], length.as_slice(), message].concat());
    }

    pub(super) fn send_raw(&self, bytes: Vec<u8>) {
        self.frames.send(Ok(Frame::data(bytes.into()))).unwrap();
    }

    pub(super) fn end(self, status: Status) {
        let mut trailers = HeaderMap::new();
        status.add_header(&mut trailers).unwrap();
        self.frames.send(Ok(Frame::trailers(trailers))).unwrap();
    }

    /// Whether the client has left.
    pub(super) async fn left(&self) {
        self.frames.closed().await;
    }
}

/// Passes calls on to the test.
#[derive(Clone)]
struct Server(UnboundedSender<Call>);

impl Service<http::Request<Incoming>> for Server {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = std::future::Ready<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Incoming>) -> Self::Future {
        let (frames, body) = unbounded_channel();
        let (path, headers) = (request.uri().path().to_owned(), request.headers().clone());
        let _ = self.0.send(Call { path, headers, frames });
        let body = Body::new(StreamBody::new(UnboundedReceiverStream::new(body)));
        let mut response = http::Response::new(body);
        response.headers_mut().insert("content-type", "application/grpc".parse().unwrap());
        std::future::ready(Ok(response))
    }
}

/// How the endpoint behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mood {
    Serves,
    Down,
    /// Its process stands still.
    Frozen,
}

/// A way to the server.
#[derive(Debug)]
pub(super) struct FakeDial {
    calls: UnboundedSender<Call>,
    mood: watch::Receiver<Mood>,
    pub(super) dialled: Mutex<usize>,
}

#[tonic::async_trait]
impl Dial for FakeDial {
    async fn dial(&self) -> Result<Box<dyn Io>, Cause> {
        *self.dialled.lock().unwrap() += 1;
        if *self.mood.borrow() == Mood::Down {
            return Err(Cause::Unreachable(std::io::ErrorKind::ConnectionRefused.into()));
        }
        let (client, server) = tokio::io::duplex(64 << 10);
        let (calls, mut mood) = (self.calls.clone(), self.mood.clone());
        tokio::spawn(async move {
            let mut serving = Box::pin(http2::serve(server, Server(calls), CancellationToken::new()));
            loop {
                let now = *mood.borrow_and_update();
                tokio::select! {
                    () = &mut serving, if now == Mood::Serves => return,
                    changed = mood.changed() => {
                        if changed.is_err() || *mood.borrow() == Mood::Down {
                            return;
                        }
                    }
                }
            }
        });
        Ok(Box::new(client))
    }
}

/// An endpoint with the source that follows it.
pub(super) struct World {
    pub(super) cache: Cache,
    pub(super) workload: Workload,
    pub(super) clock: Clock,
    pub(super) metrics: Metrics,
    pub(super) mood: watch::Sender<Mood>,
    pub(super) dial: Arc<FakeDial>,
    calls: UnboundedReceiver<Call>,
    _running: tokio_util::task::AbortOnDropHandle<()>,
}

impl World {
    pub(super) fn new(wanted: Wanted, mood: Mood) -> Self {
        let (cache, workload) = Cache::with_workload("");
        let (clock, metrics) = (Clock::starting_at(start()), Metrics::default());
        let (calls_sender, calls) = unbounded_channel();
        let (mood, watched) = watch::channel(mood);
        let dial = Arc::new(FakeDial { calls: calls_sender, mood: watched, dialled: Mutex::default() });
        let timeout = Duration::from_secs(10);
        let settings = SpiffeSettings {
            socket: "/run/agent.sock".into(),
            wanted,
            key_format: KeyFormat::Pkcs8,
            timeout,
            drops_old_roots: false,
        };
        let endpoint =
            Endpoint { name: settings.name().into(), dial: Arc::clone(&dial) as Arc<dyn Dial>, timeout };
        let source = SpiffeSource::of(endpoint, settings, &cache, workload, clock.clone(), metrics.clone());
        let running = tokio::spawn(async { match source.run().await {} });
        let _running = tokio_util::task::AbortOnDropHandle::new(running);
        Self { cache, workload, clock, metrics, mood, dial, calls, _running }
    }

    pub(super) async fn call(&mut self) -> Call {
        self.calls.recv().await.unwrap()
    }

    pub(super) fn key(&self, name: SecretName) -> Key {
        Key { workload: self.workload, name }
    }

    pub(super) fn entry(&self, name: SecretName) -> crate::store::Entry {
        self.cache.watch(&self.key(name)).unwrap().borrow().clone()
    }

    /// Waits until the entry is as wanted.
    pub(super) async fn wait(
        &self,
        name: SecretName,
        is_wanted: impl FnMut(&crate::store::Entry) -> bool,
    ) -> crate::store::Entry {
        let mut entry = self.cache.follow(self.key(name));
        let waited = tokio::time::timeout(Duration::from_secs(24 * 3600), entry.wait_for(is_wanted)).await;
        waited.expect("in time").unwrap().clone()
    }

    pub(super) async fn wait_serial(&self, svid: &X509svid) {
        let leaf = svid.x509_svid.clone();
        self.wait(SecretName::Workload, |entry| match entry.good.as_deref().map(|good| &good.secret) {
            Some(Secret::KeyPair(pair)) => pair.chain()[0].as_ref() == &*leaf,
            _ => false,
        })
        .await;
    }

    /// Waits for a failure with these words.
    pub(super) async fn wait_failure(&self, words: &str) -> String {
        let has_words = |entry: &crate::store::Entry| entry.failure().is_some_and(|it| it.contains(words));
        self.wait(SecretName::Workload, has_words).await.failure().unwrap()
    }

    pub(super) fn roots(&self) -> Vec<Vec<u8>> {
        match &self.entry(SecretName::Roots).good.unwrap().secret {
            Secret::TrustBundle(bundle) => bundle.roots().iter().map(|root| root.to_vec()).collect(),
            Secret::KeyPair(_) => panic!("a key pair"),
        }
    }
}
