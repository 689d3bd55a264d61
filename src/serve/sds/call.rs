//! The calls of one connection: which method, its requests, and the body of its response.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use http::header::{CONTENT_TYPE, HeaderMap, HeaderValue};
use hyper::body::{Body, Frame, Incoming};
use tokio_stream::{Stream, StreamExt as _};
use tonic::Status;
use tower_service::Service;

use super::Peer;
use super::dialect::{Delta, Dialect, StateOfTheWorld};
use super::fetch;
use super::message::Message;
use super::requests::Requests;
use super::stream::SecretStream;
use crate::base::limits;

/// The path of every method, up to its name.
const SERVICE: &str = "/envoy.service.secret.v3.SecretDiscoveryService/";

/// Serves one connection. Clones serve the same one.
#[derive(Clone, Debug)]
pub struct Calls(pub(super) Arc<Peer>);

impl Service<http::Request<Incoming>> for Calls {
    type Response = http::Response<ResponseBody>;
    type Error = Infallible;
    type Future = Answer;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Incoming>) -> Answer {
        let peer = Arc::clone(&self.0);
        let method = request.uri().path().strip_prefix(SERVICE);
        let body = match method {
            Some("StreamSecrets") => open(peer, request.into_body()).map(ResponseBody::StateOfTheWorld),
            Some("DeltaSecrets") => open(peer, request.into_body()).map(ResponseBody::Delta),
            Some("FetchSecrets") => return Answer::Later(Box::pin(fetch(peer, request))),
            _ => Err(Status::unimplemented(
                "this socket serves only SDS: StreamSecrets, DeltaSecrets, FetchSecrets",
            )),
        };
        Answer::Now(Some(respond(body)))
    }
}

type StreamOf<D> = SecretStream<D, Requests<Incoming, <D as Dialect>::Request>>;

fn open<D>(peer: Arc<Peer>, body: Incoming) -> Result<StreamOf<D>, Status>
where
    D: Dialect<Request: prost::Message + Default>,
{
    let charge = peer.charge(limits::STREAM_MEMORY)?;
    let requests = Requests::new(body, Arc::clone(&peer));
    Ok(SecretStream::new(peer, requests, charge))
}

async fn fetch(peer: Arc<Peer>, request: http::Request<Incoming>) -> http::Response<ResponseBody> {
    let deadline = client_timeout(request.headers());
    let requests = Requests::new(request.into_body(), Arc::clone(&peer));
    let response = async {
        let mut requests = std::pin::pin!(requests);
        let missing = || Err(Status::invalid_argument("the call has no request"));
        let request = requests.next().await.unwrap_or_else(missing)?;
        fetch::fetch(&peer, request, fetch::patience(deadline)).await
    };
    let response = tokio::select! {
        response = response => response,
        () = peer.service.draining.cancelled() => Err(peer.service.stopping()),
    };
    respond(response.map(|message| ResponseBody::One(Box::new(message))))
}

fn respond(body: Result<ResponseBody, Status>) -> http::Response<ResponseBody> {
    match body {
        Ok(body) => {
            let mut response = http::Response::new(body);
            response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
            response
        }
        Err(status) => status.into_http(),
    }
}

/// The client's deadline, from the header of the gRPC protocol: digits and a unit.
fn client_timeout(headers: &HeaderMap) -> Option<Duration> {
    let text = headers.get("grpc-timeout")?.to_str().ok()?;
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    let value: u64 = digits.parse().ok()?;
    match unit {
        "H" => Some(Duration::from_secs(value.saturating_mul(3600))),
        "M" => Some(Duration::from_secs(value.saturating_mul(60))),
        "S" => Some(Duration::from_secs(value)),
        "m" => Some(Duration::from_millis(value)),
        "u" => Some(Duration::from_micros(value)),
        "n" => Some(Duration::from_nanos(value)),
        _ => None,
    }
}

/// The response of a call.
#[expect(
    clippy::large_enum_variant,
    reason = "nearly all calls are of the large one, which moves on at once"
)]
pub enum Answer {
    Now(Option<http::Response<ResponseBody>>),
    Later(Pin<Box<dyn Future<Output = http::Response<ResponseBody>> + Send>>),
}

impl Future for Answer {
    type Output = Result<http::Response<ResponseBody>, Infallible>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match &mut *self {
            // Polled once only.
            Self::Now(response) => {
                response.take().map_or(Poll::Pending, |response| Poll::Ready(Ok(response)))
            }
            Self::Later(response) => response.as_mut().poll(cx).map(Ok),
        }
    }
}

/// The messages of a response, then how the call ended.
#[derive(Default)]
pub enum ResponseBody {
    StateOfTheWorld(StreamOf<StateOfTheWorld>),
    Delta(StreamOf<Delta>),
    One(Box<Message>),
    /// All but the outcome was sent.
    Sent,
    #[default]
    Ended,
}

impl Body for ResponseBody {
    type Data = Message;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Message>, Infallible>>> {
        let next = match &mut *self {
            Self::StateOfTheWorld(stream) => ready!(Pin::new(stream).poll_next(cx)),
            Self::Delta(stream) => ready!(Pin::new(stream).poll_next(cx)),
            Self::One(_) => match std::mem::replace(&mut *self, Self::Sent) {
                Self::One(message) => Some(Ok(*message)),
                _ => None,
            },
            Self::Sent => None,
            Self::Ended => return Poll::Ready(None),
        };
        let status = match next {
            Some(Ok(message)) => return Poll::Ready(Some(Ok(Frame::data(message)))),
            Some(Err(status)) => status,
            None => Status::ok(""),
        };
        *self = Self::Ended;
        let mut trailers = HeaderMap::new();
        // It fails for a text that can't be a header; ours is percent-encoded.
        let _ = status.add_header(&mut trailers);
        Poll::Ready(Some(Ok(Frame::trailers(trailers))))
    }

    fn is_end_stream(&self) -> bool {
        matches!(self, Self::Ended)
    }
}
