//! The requests of one stream, read from the body of its call.

use std::marker::PhantomData;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::{Buf as _, Bytes};
use hyper::body::Body;
use prost::Message;
use tokio_stream::Stream;
use tonic::Status;

use super::Peer;
use super::turns::Turn;
use crate::base::budget::Charge;
use crate::base::limits;

/// Bytes before each message of gRPC: whether it is compressed, and its length.
const PREFIX: usize = 5;

/// The requests of one stream. What was read of a request is kept only until the request is complete, and its charge until the
/// next one is asked for: an open stream needs no memory for requests.
#[derive(Debug)]
pub struct Requests<B, T> {
    body: B,
    /// What was received and not looked at yet.
    received: Bytes,
    /// The beginning of a request whose end was not received yet.
    begun: Option<Box<Begun>>,
    /// The memory of the last request, which may wait until it is handled.
    charge: Option<Charge>,
    peer: Arc<Peer>,
    turn: Turn,
    request: PhantomData<fn() -> T>,
}

/// Bytes of a request that takes long enough to need a turn.
const LARGE: usize = 32 << 10;

#[derive(Debug)]
struct Begun {
    bytes: Vec<u8>,
    charge: Charge,
}

impl<B, T: Message + Default> Requests<B, T> {
    /// Reads `body`. The memory of a request that is not complete is charged to `peer`.
    pub(in crate::serve) fn new(body: B, peer: Arc<Peer>) -> Self {
        let turn = Turn::new(peer.service.turns.clone());
        Self { body, received: Bytes::new(), begun: None, charge: None, peer, turn, request: PhantomData }
    }

    /// The next request in what was received, if it is complete.
    fn poll_received(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<T>, Status>> {
        if let Some(begun) = &mut self.begun {
            while let Some(missing) = begun.missing()?.filter(|_| !self.received.is_empty()) {
                let more = self.received.split_to(missing.min(self.received.len()));
                begun.charge.grow(more.len()).map_err(|full| self.peer.refuse(full))?;
                begun.bytes.extend_from_slice(&more);
            }
            if begun.missing()?.is_some() {
                return Poll::Ready(Ok(None));
            }
            if begun.bytes.len() > LARGE {
                ready!(self.turn.poll_take(cx));
            }
            let request = decode(begun.bytes.get(PREFIX..).unwrap_or_default());
            self.charge = self.begun.take().map(|begun| begun.charge);
            self.turn.end();
            return Poll::Ready(request.map(Some));
        }
        let length = length(&self.received)?;
        if let Some(request) = length.and_then(|length| self.received.get(PREFIX..PREFIX + length)) {
            let (request, end) = (decode(request)?, PREFIX + request.len());
            self.received.advance(end);
            if self.received.is_empty() {
                // What is left of it would keep the whole frame.
                self.received = Bytes::new();
            }
            return Poll::Ready(Ok(Some(request)));
        }
        if !self.received.is_empty() {
            let charge = self.peer.charge(size_of::<Begun>())?;
            self.begun = Some(Box::new(Begun { bytes: Vec::new(), charge }));
            return self.poll_received(cx);
        }
        Poll::Ready(Ok(None))
    }
}

impl Begun {
    /// How many bytes are known to be missing; none if the request is complete.
    fn missing(&self) -> Result<Option<usize>, Status> {
        let known = length(&self.bytes)?.map_or(PREFIX, |length| PREFIX + length);
        Ok(known.checked_sub(self.bytes.len()).filter(|missing| *missing > 0))
    }
}

/// The length of the request that `bytes` begin with, if they are enough to know it.
fn length(bytes: &[u8]) -> Result<Option<usize>, Status> {
    let [flag, length @ ..] = bytes else { return Ok(None) };
    match flag {
        0 => {}
        1 => return Err(Status::unimplemented("compressed requests are not supported")),
        _ => return Err(Status::internal(format!("invalid compression flag {flag} of a request"))),
    }
    let Some(length) = length.first_chunk::<4>() else { return Ok(None) };
    let length = u32::from_be_bytes(*length) as usize;
    if length > limits::REQUEST_BYTES {
        let max = limits::REQUEST_BYTES;
        return Err(Status::out_of_range(format!(
            "request too large: {length} bytes, at most {max} are allowed"
        )));
    }
    Ok(Some(length))
}

fn decode<T: Message + Default>(bytes: &[u8]) -> Result<T, Status> {
    T::decode(bytes).map_err(|error| Status::internal(format!("the request can't be decoded: {error}")))
}

impl<B, T> Stream for Requests<B, T>
where
    B: Body<Data = Bytes> + Unpin,
    T: Message + Default,
{
    type Item = Result<T, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        // Other streams get their turn between the requests of one that sends many.
        let coop = ready!(tokio::task::coop::poll_proceed(cx));
        this.charge = None;
        loop {
            if let Some(request) = ready!(this.poll_received(cx)).transpose() {
                coop.made_progress();
                return Poll::Ready(Some(request));
            }
            let frame = match ready!(Pin::new(&mut this.body).poll_frame(cx)) {
                Some(Ok(frame)) => frame,
                // The client reset the stream, or the connection broke: no answer would arrive.
                Some(Err(_)) => return Poll::Ready(None),
                None if this.begun.is_some() => {
                    return Poll::Ready(Some(Err(Status::internal("the stream ended within a request"))));
                }
                None => return Poll::Ready(None),
            };
            // Trailers mean nothing in requests.
            if let Ok(data) = frame.into_data() {
                this.received = data;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::StreamBody;
    use hyper::body::Frame;
    use tokio_stream::StreamExt as _;
    use tokio_util::sync::CancellationToken;
    use tonic::Code;

    use super::*;
    use crate::base::budget::Budget;
    use crate::base::clock::Clock;
    use crate::metrics::{ByReason, Metrics};
    use crate::proto::envoy::service::discovery::v3::DiscoveryRequest;
    use crate::serve::sds::{Capacity, SecretDiscovery};
    use crate::store::Cache;

    fn framed(request: &[u8]) -> Vec<u8> {
        [&[0], u32::try_from(request.len()).unwrap().to_be_bytes().as_slice(), request].concat()
    }

    fn request(names: usize) -> DiscoveryRequest {
        let resource_names = (0..names).map(|index| format!("name {index}")).collect();
        DiscoveryRequest { resource_names, ..DiscoveryRequest::default() }
    }

    /// A connection of an agent with `budget`.
    fn peer(budget: &Budget, metrics: &Metrics) -> Arc<Peer> {
        let (cache, workload) = Cache::with_workload("");
        let capacity = Capacity { budget: budget.clone(), ..Capacity::default() };
        let (clock, draining) = (Clock::system(), CancellationToken::new());
        SecretDiscovery::new(cache, workload, metrics.clone(), clock, draining, capacity)
            .connection()
            .unwrap()
            .0
    }

    async fn read(parts: Vec<Vec<u8>>, budget: &Budget) -> Vec<Result<DiscoveryRequest, Status>> {
        let frames = parts.into_iter().map(|part| Ok::<_, Status>(Frame::data(part.into())));
        let body = StreamBody::new(tokio_stream::iter(frames));
        let peer = peer(budget, &Metrics::default());
        Requests::<_, DiscoveryRequest>::new(body, peer).take(1_000).collect().await
    }

    #[tokio::test]
    async fn requests_are_read_however_they_are_cut() {
        let budget = Budget::new(1 << 30);
        let sent = [request(0), request(1), request(700), request(3)];
        let all: Vec<u8> = sent.iter().flat_map(|request| framed(&request.encode_to_vec())).collect();
        for size in [1, 4, 5, 6, 100, 4_096, all.len()] {
            let parts = all.chunks(size).map(<[u8]>::to_vec).collect();
            let read: Vec<_> = read(parts, &budget).await.into_iter().map(Result::unwrap).collect();
            assert_eq!(read, sent, "in parts of {size}");
            assert_eq!(budget.used(), 0, "nothing is kept");
        }
    }

    #[tokio::test]
    async fn a_request_takes_up_memory_until_the_next_one_is_read() {
        let budget = Budget::new(1 << 30);
        let sent = framed(&request(10_000).encode_to_vec());
        let frames = [&sent[..7], &sent[7..]].map(|part| Ok::<_, Status>(Frame::data(part.to_vec().into())));
        let body = StreamBody::new(tokio_stream::StreamExt::chain(
            tokio_stream::iter(frames),
            tokio_stream::pending(),
        ));
        let peer = peer(&budget, &Metrics::default());
        let unused = budget.used();
        let mut requests = Requests::<_, DiscoveryRequest>::new(body, peer);
        assert_eq!(requests.next().await.unwrap().unwrap(), request(10_000));
        assert!(budget.used() - unused >= sent.len());
        let next = std::future::poll_fn(|cx| Poll::Ready(Pin::new(&mut requests).poll_next(cx))).await;
        assert!(next.is_pending());
        assert_eq!(budget.used(), unused);
    }

    #[tokio::test]
    async fn what_is_no_request_ends_the_stream_with_the_reason() {
        let bad = framed(&[0xff; 9]);
        let long = [0, 0, 0x10, 0, 1];
        let cases = [
            (vec![1, 0, 0, 0, 0], Code::Unimplemented),
            (vec![7], Code::Internal),
            (long.to_vec(), Code::OutOfRange),
            (bad, Code::Internal),
            (vec![0, 0], Code::Internal),
            (framed(b"\x0a\x05ab"), Code::Internal),
        ];
        for (bytes, code) in cases {
            let read = read(vec![bytes.clone()], &Budget::new(1 << 30)).await;
            let status = read.first().unwrap().as_ref().unwrap_err();
            assert_eq!(status.code(), code, "{bytes:?}: {status:?}");
        }
    }

    #[tokio::test]
    async fn requests_that_are_not_complete_have_a_bounded_size_together() {
        let budget = Budget::new(1 << 20);
        let begun = || {
            let mut bytes = framed(&request(40_000).encode_to_vec());
            bytes.truncate(300_000);
            let endless = tokio_stream::StreamExt::chain(
                tokio_stream::once(Ok::<_, Status>(Frame::data(bytes.into()))),
                tokio_stream::pending(),
            );
            StreamBody::new(endless)
        };
        let metrics = Metrics::default();
        let peer = peer(&budget, &metrics);
        let mut open = Vec::new();
        let refused = loop {
            let mut requests = Box::pin(Requests::<_, DiscoveryRequest>::new(begun(), Arc::clone(&peer)));
            match std::future::poll_fn(|cx| Poll::Ready(requests.as_mut().poll_next(cx))).await {
                Poll::Ready(outcome) => break outcome.unwrap().unwrap_err(),
                Poll::Pending => open.push(requests),
            }
        };
        assert_eq!(refused.code(), Code::ResourceExhausted);
        assert!(!open.is_empty() && open.len() < 4);
        let refusals = metrics.refusals.get_or_create(&ByReason { reason: "no_memory" }).get();
        assert_eq!(refusals, 1);
        drop((open, peer));
        assert_eq!(budget.used(), 0);
    }
}
