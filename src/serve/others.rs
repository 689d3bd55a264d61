//! The services beside SDS on its socket: each response is a stream of messages that one asynchronous function makes.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use hyper::body::Incoming;
use tokio_stream::Stream;
use tonic::Status;

use super::sds::Peer;
use super::sds::message::Message;
use super::{health, reflection, workload_api};

/// The messages of a call. It ends with OK at the end of the stream, else with its error.
pub(super) type Responses = Pin<Box<dyn Stream<Item = Result<Message, Status>> + Send>>;

/// A message and what makes the next one; none at the end.
pub(super) type Step<S> = Result<Option<(Message, S)>, Status>;

type Running<S> = Pin<Box<dyn Future<Output = Step<S>> + Send>>;

/// Answers a call of another service than SDS.
pub(super) fn open(peer: Arc<Peer>, request: http::Request<Incoming>) -> Result<Responses, Status> {
    let path = request.uri().path().to_owned();
    let Some((service, method)) = path.strip_prefix('/').and_then(|path| path.split_once('/')) else {
        return Err(unknown());
    };
    match service {
        workload_api::SERVICE => workload_api::open(peer, method, request),
        health::SERVICE => health::open(peer, method, request),
        _ if reflection::is_service(service) => reflection::open(peer, method, request),
        _ => Err(unknown()),
    }
}

fn unknown() -> Status {
    Status::unimplemented(
        "this socket serves SDS (StreamSecrets, DeltaSecrets, FetchSecrets), the SPIFFE Workload API, gRPC's health checks \
         and reflection",
    )
}

/// Calls `step` for one message after the other.
pub(super) fn responses<S, F>(state: S, step: fn(S) -> F) -> Responses
where
    S: Send + 'static,
    F: Future<Output = Step<S>> + Send + 'static,
{
    Box::pin(Steps { step, running: Some(Box::pin(step(state))) })
}

struct Steps<S, F> {
    step: fn(S) -> F,
    /// None after the end.
    running: Option<Running<S>>,
}

impl<S, F> Stream for Steps<S, F>
where
    S: Send + 'static,
    F: Future<Output = Step<S>> + Send + 'static,
{
    type Item = Result<Message, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let Some(running) = &mut self.running else { return Poll::Ready(None) };
        let outcome = ready!(running.as_mut().poll(cx)).transpose();
        self.running = None;
        Poll::Ready(outcome.map(|step| {
            step.map(|(message, next)| {
                self.running = Some(Box::pin((self.step)(next)));
                message
            })
        }))
    }
}
