//! The calls of one connection: which method, its requests, and the body of its response.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use http::header::{CONTENT_TYPE, HeaderMap, HeaderValue};
use hyper::body::{Body, Frame, Incoming};
use tokio::time::{Instant, timeout_at};
use tokio_stream::{Stream, StreamExt as _};
use tonic::Status;
use tower_service::Service;

use super::Peer;
use super::dialect::{Delta, Dialect, StateOfTheWorld};
use super::fetch;
use super::message::Message;
use super::requests::Requests;
use super::stream::SecretStream;
use crate::base::budget::Charge;
use crate::base::limits;
use crate::serve::others::{self, Responses};

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

    fn call(&mut self, mut request: http::Request<Incoming>) -> Answer {
        let peer = Arc::clone(&self.0);
        if let Some(bearer) = peer.service.bearer.get()
            && request.uri().path().starts_with(SERVICE)
            && let Err(status) = bearer.take(request.headers_mut(), &peer.service)
        {
            return Answer::Now(Some(respond(Err(status))));
        }
        let method = request.uri().path().strip_prefix(SERVICE);
        let body = match method {
            Some("StreamSecrets") => open(peer, request.into_body()).map(ResponseBody::StateOfTheWorld),
            Some("DeltaSecrets") => open(peer, request.into_body()).map(ResponseBody::Delta),
            Some("FetchSecrets") => return Answer::Later(Box::pin(fetch(peer, request))),
            Some(_) => Err(Status::unimplemented("SDS has StreamSecrets, DeltaSecrets and FetchSecrets")),
            None => others::open(peer, request).map(ResponseBody::Other),
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
    let deadline = Instant::now() + fetch::patience(client_timeout(request.headers()));
    let response = async {
        let charge = peer.charge(limits::STREAM_MEMORY)?;
        let mut requests = std::pin::pin!(Requests::new(request.into_body(), Arc::clone(&peer)));
        let late = |_| Status::deadline_exceeded("the request did not arrive in time");
        let missing = || Err(Status::invalid_argument("the call has no request"));
        let request = timeout_at(deadline, requests.next()).await.map_err(late)?.unwrap_or_else(missing)?;
        let message = fetch::fetch(&peer, request, deadline).await?;
        Ok(ResponseBody::One(Box::new(message), charge))
    };
    let response = tokio::select! {
        response = response => response,
        () = peer.service.draining.cancelled() => Err(peer.service.stopping()),
    };
    respond(response)
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
pub(in crate::serve) fn client_timeout(headers: &HeaderMap) -> Option<Duration> {
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
    /// Of another service than SDS.
    Other(Responses),
    /// With the memory of the call.
    One(Box<Message>, Charge),
    /// All but the outcome was sent.
    Sent(Charge),
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
            Self::Other(responses) => ready!(responses.as_mut().poll_next(cx)),
            Self::One(..) => match std::mem::take(&mut *self) {
                Self::One(message, charge) => {
                    *self = Self::Sent(charge);
                    Some(Ok(*message))
                }
                _ => None,
            },
            Self::Sent(_) => None,
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

#[cfg(test)]
mod tests {
    use http_body_util::{BodyExt as _, StreamBody};
    use tokio_util::sync::CancellationToken;

    use super::*;
    use crate::base::budget::Budget;
    use crate::base::clock::Clock;
    use crate::metrics::Metrics;
    use crate::net::http2;
    use crate::serve::sds::{Capacity, SecretDiscovery};
    use crate::store::Cache;

    #[tokio::test(start_paused = true)]
    async fn an_open_fetch_takes_up_memory_and_ends_at_its_deadline() {
        // One connection may use half of it: for two calls.
        let budget = Budget::new(2 * limits::CONNECTION_MEMORY + 5 * limits::STREAM_MEMORY);
        let (cache, workload) = Cache::with_workload("");
        let capacity = Capacity { budget: budget.clone(), ..Capacity::default() };
        let (clock, stop) = (Clock::system(), CancellationToken::new());
        let calls = SecretDiscovery::new(cache, workload, Metrics::default(), clock, stop.clone(), capacity)
            .connection()
            .unwrap();
        let (client, server) = tokio::io::duplex(64 << 10);
        tokio::spawn(http2::serve(server, calls, stop));
        let unused = budget.used();
        let call = |mut connection: http2::Connection, sent: Vec<u8>, timeout: &'static str| async move {
            let sent = tokio_stream::iter([Ok::<_, Status>(Frame::data(sent.into()))]);
            let body = StreamBody::new(tokio_stream::StreamExt::chain(sent, tokio_stream::pending()));
            let request = http::Request::post(format!("http://localhost{SERVICE}FetchSecrets"))
                .header("grpc-timeout", timeout)
                .body(tonic::body::Body::new(body))
                .unwrap();
            let response = connection.call(request).await.unwrap();
            let status = Status::from_header_map(response.headers());
            response.into_body().collect().await.unwrap();
            status.unwrap().code()
        };
        http2::with_connection(client, async |connection| {
            let began = Instant::now();
            let open = [Vec::new(), vec![0, 0, 0, 0, 9, 1]]
                .map(|sent| tokio::spawn(call(connection.clone(), sent, "2S")));
            tokio::time::sleep(Duration::from_secs(1)).await;
            assert!(budget.used() - unused >= open.len() * limits::STREAM_MEMORY);
            assert_eq!(call(connection.clone(), Vec::new(), "1H").await, tonic::Code::ResourceExhausted);
            for open in open {
                assert_eq!(open.await.unwrap(), tonic::Code::DeadlineExceeded);
            }
            assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
            assert_eq!(budget.used(), unused, "an ended call takes up nothing");
        })
        .await
        .unwrap();
    }
}
