//! Calls that are answered with a stream of messages that may hold keys: each message is read into memory that is wiped.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::BodyExt as _;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::Instant;
use tonic::body::Body;
use tonic::{Code, Status};
use tower_service::Service as _;

use super::{Channel, describe};
use crate::net::buffer::{Buffer, wipe};
use crate::net::error::TransportError;
use crate::net::http2;
use crate::net::tls::Alert;

/// Before each message: whether it is compressed, and its length in four bytes.
const HEAD: usize = 5;

/// When a server that is silent during a call gets a ping.
#[derive(Clone, Copy, Debug)]
pub struct Pings {
    /// After this long without a byte. gRPC servers in Go close a connection with pings in less than five minutes of each
    /// other.
    pub interval: Duration,
    /// How long it may take to answer.
    pub patience: Duration,
}

/// An open call. Dropping it ends the call and its connection.
pub struct Messages {
    channel: Channel,
    body: Body,
    /// What was received and belongs to no message that was returned.
    buffer: Buffer,
    /// Bytes of the longest message.
    limit: usize,
}

impl Channel {
    /// A channel for one long call on `io`, which has no TLS.
    pub async fn over<IO>(io: IO, pings: Pings) -> Result<Self, TransportError>
    where
        IO: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let kept = http2::Kept::open_pinging(io, pings.interval, pings.patience).await;
        Ok(Self {
            kept: kept.map_err(|error| TransportError::broken(describe(&error)))?,
            has_presented: false,
            alert: Alert::default(),
            is_reused: false,
            opened: Instant::now(),
            trusted: None,
            client: None,
            is_refused: Arc::<AtomicBool>::default(),
        })
    }

    /// Makes a call, and returns once the head of its answer has arrived. No message may have more than `limit` bytes.
    pub async fn call(self, request: http::Request<Body>, limit: usize) -> Result<Messages, TransportError> {
        let mut calls = self.service();
        let answered = async {
            std::future::poll_fn(|cx| calls.poll_ready(cx)).await?;
            calls.call(request).await
        };
        let answer = answered.await.map_err(|error| self.explain(&Status::from_error(error)))?;
        // A call that fails at once has its outcome here.
        if let Some(status) = Status::from_header_map(answer.headers())
            && status.code() != Code::Ok
        {
            return Err(self.explain(&status));
        }
        Ok(Messages { body: answer.into_body(), channel: self, buffer: Buffer::default(), limit })
    }
}

impl Messages {
    /// The next message, whose memory is wiped when the last part of it is dropped; none if the server ended the call with
    /// OK. Nothing is lost if the future is dropped.
    pub async fn next(&mut self) -> Result<Option<Bytes>, TransportError> {
        loop {
            if let Some(message) = self.take()? {
                return Ok(Some(Bytes::from_owner(message)));
            }
            let Some(frame) = self.body.frame().await else {
                // The call has an outcome, unless something between here and the server has cut the answer off.
                return Err(self.channel.explain(&Status::unknown("")));
            };
            match frame.map_err(|status| self.channel.explain(&status))?.into_data() {
                Ok(data) => {
                    self.buffer.extend(&data);
                    wipe(data);
                }
                Err(frame) => {
                    let Ok(trailers) = frame.into_trailers() else { continue };
                    let status = Status::from_header_map(&trailers);
                    let status = status.unwrap_or_else(|| Status::unknown(""));
                    return match status.code() {
                        Code::Ok => Ok(None),
                        _ => Err(self.channel.explain(&status)),
                    };
                }
            }
        }
    }

    /// The first message in the buffer, if it is whole.
    fn take(&mut self) -> Result<Option<Buffer>, TransportError> {
        let received = self.buffer.as_slice();
        let Some(([compressed, length @ ..], rest)) = received.split_first_chunk::<HEAD>() else {
            return Ok(None);
        };
        if *compressed != 0 {
            let reason = "it is compressed, which the agent did not ask for";
            return Err(TransportError::Unreadable(reason.to_owned()));
        }
        let length = usize::try_from(u32::from_be_bytes(*length)).unwrap_or(usize::MAX);
        if length > self.limit {
            return Err(TransportError::TooLong { limit: self.limit });
        }
        let Some((message, after)) = rest.split_at_checked(length) else { return Ok(None) };
        let message = Buffer::copy_of(message);
        let after = Buffer::copy_of(after);
        self.buffer = after;
        Ok(Some(message))
    }
}

/// Messages may hold keys.
impl fmt::Debug for Messages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Messages").field("channel", &self.channel).finish_non_exhaustive()
    }
}
