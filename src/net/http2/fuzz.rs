//! Fuzz target: what a client sends on an HTTP/2 connection.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};

use bytes::Bytes;
use http::request::Parts;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, ReadBuf};

use super::authority::AuthorityFilter;

/// All that a client sends. True if the server takes it as it is after the filter, with at least one request.
pub fn client(bytes: &[u8]) -> bool {
    let Ok(runtime) = tokio::runtime::Builder::new_current_thread().build() else { return false };
    runtime.block_on(async {
        let filtered = filter(Client::new(bytes, usize::MAX)).await;
        assert!(filtered.len() <= bytes.len());
        for piece in [1, 7, 100] {
            assert!(filter(Client::new(bytes, piece)).await == filtered, "differs in pieces of {piece}");
        }
        let now = Served::new(&filtered).await;
        // From a block on that breaks the protocol nothing is filtered, and h2 reads nothing.
        let is_done = now.is_refused || filter(Client::new(&filtered, usize::MAX)).await == filtered;
        assert!(is_done, "something is left to filter");
        let before = Served::new(bytes).await;
        if !before.is_refused {
            let now: Vec<_> = now.requests.iter().map(|request| format!("{request:?}")).collect();
            let mut before = before.requests.iter().map(|request| format!("{request:?}"));
            assert!(before.all(|request| now.contains(&request)), "a good request changes");
        }
        !now.is_refused && !now.requests.is_empty()
    })
}

/// What passes the filter.
async fn filter(io: Client) -> Vec<u8> {
    let mut all = Vec::new();
    let mut io = Filtered { io, filter: AuthorityFilter::new() };
    // Reading from memory does not fail.
    let _ = io.read_to_end(&mut all).await;
    all
}

/// What the server makes of a client's bytes.
pub(super) struct Served {
    pub(super) requests: Vec<Parts>,
    /// It reset a stream, or closed the connection.
    pub(super) is_refused: bool,
}

impl Served {
    pub(super) async fn new(bytes: &[u8]) -> Self {
        let io = Client { stays: true, ..Client::new(bytes, usize::MAX) };
        let answers = Arc::clone(&io.answers);
        let mut server = h2::server::Builder::new();
        // As hyper has it.
        server.max_header_list_size(16 << 10).max_frame_size(16 << 10);
        let (mut requests, mut open) = (Vec::new(), Vec::new());
        let served = async {
            let Ok(mut connection) = server.handshake::<_, Bytes>(io).await else { return };
            while let Some(Ok((request, answer))) = connection.accept().await {
                let (parts, body) = request.into_parts();
                requests.push(parts);
                // Dropping it would reset the stream.
                open.push((body, answer));
            }
        };
        // Nothing waits but for further bytes.
        let _ = poll_once(served).await;
        let answers = answers.lock().unwrap_or_else(PoisonError::into_inner);
        Self { requests, is_refused: is_refusal(&answers) }
    }
}

async fn poll_once(future: impl Future<Output = ()>) -> Poll<()> {
    let mut future = std::pin::pin!(future);
    std::future::poll_fn(|cx| Poll::Ready(future.as_mut().poll(cx))).await
}

/// Whether there is a frame among these that refuses something.
fn is_refusal(mut frames: &[u8]) -> bool {
    const RST_STREAM: u8 = 3;
    const GOAWAY: u8 = 7;
    while let Some((&[high, middle, low, kind, ..], rest)) = frames.split_first_chunk::<9>() {
        let length = usize::from(high) << 16 | usize::from(middle) << 8 | usize::from(low);
        let reason = match kind {
            RST_STREAM => rest.first_chunk::<4>(),
            GOAWAY => rest.get(4..).and_then(|rest| rest.first_chunk::<4>()),
            _ => None,
        };
        if reason.is_some_and(|reason| *reason != [0; 4]) {
            return true;
        }
        frames = rest.get(length..).unwrap_or_default();
    }
    false
}

/// A connection to a client that sends these bytes.
struct Client {
    bytes: Bytes,
    /// As many are read at once.
    piece: usize,
    /// It does not close the connection.
    stays: bool,
    answers: Arc<Mutex<Vec<u8>>>,
}

impl Client {
    fn new(bytes: &[u8], piece: usize) -> Self {
        Self { bytes: Bytes::copy_from_slice(bytes), piece, stays: false, answers: Arc::default() }
    }
}

impl AsyncRead for Client {
    fn poll_read(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.stays && self.bytes.is_empty() {
            return Poll::Pending;
        }
        let length = self.piece.min(buffer.remaining()).min(self.bytes.len());
        buffer.put_slice(&self.bytes.split_to(length));
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Client {
    fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.answers.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(bytes);
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

struct Filtered {
    io: Client,
    filter: AuthorityFilter,
}

impl AsyncRead for Filtered {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let Self { io, filter } = &mut *self;
        filter.poll_read(io, cx, buffer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::fuzzing::{Shape, seeded};
    use crate::net::http2::testing::{ACCEPTED, Writer};

    #[test]
    fn almost_valid_connections_break_no_rule() {
        let samples: Vec<_> = (0..20).map(|seed| Writer::new(seed).connection(2).0).collect();
        seeded("http2_client", Shape::Bytes, 1_000, &samples, client);
    }

    /// Each request that a client sends arrives with all its fields, but for an authority that h2 refuses.
    #[tokio::test]
    async fn requests_arrive_as_they_were_sent_whatever_their_authority() {
        let mut authorities = 0;
        for seed in 0..100 {
            let (bytes, sent) = Writer::new(seed).connection(40);
            let piece = [1, 5, 9, 300, usize::MAX][usize::try_from(seed).unwrap() % 5];
            let filtered = filter(Client::new(&bytes, piece)).await;
            let served = Served::new(&filtered).await;
            assert!(!served.is_refused, "seed {seed}");
            assert_eq!(served.requests.len(), sent.len(), "seed {seed}");
            for (request, fields) in served.requests.iter().zip(sent) {
                let uri = &request.uri;
                let authority = uri.authority().map_or("", |authority| authority.as_str());
                let field = |name: &str| &fields.iter().find(|(known, _)| known == name).unwrap().1;
                let is_accepted = ACCEPTED.contains(&field(":authority").as_str());
                authorities += usize::from(!is_accepted);
                assert_eq!(authority, if is_accepted { field(":authority") } else { "" }, "seed {seed}");
                assert_eq!(uri.path(), field(":path"), "seed {seed}");
                let headers = request.headers.iter();
                let headers =
                    headers.map(|(name, value)| (name.to_string(), value.to_str().unwrap().to_owned()));
                let sent = fields.into_iter().filter(|(name, _)| !name.starts_with(':'));
                assert!(headers.eq(sent), "seed {seed}: {:?}", request.headers);
            }
        }
        assert!(authorities > 1_000, "{authorities}");
    }
}
