//! What a client sends, without the `:authority` of its requests where hyper's server refuses that.
//!
//! Over a Unix socket, clients built on gRPC's C core send the percent-encoded path of the socket, those in Java the path
//! itself, and Envoy the name of its cluster. h2 resets each stream whose authority is not one for the `http` crate. No
//! service here uses the authority, and a request may come without one.

use std::borrow::Cow;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use tokio::io::{AsyncRead, ReadBuf};

use super::hpack::{HeaderBlocks, Malformed};

const PREFACE: usize = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".len();
const HEAD: usize = 9;
/// Bytes in a frame after its head; for more, the server fails the connection.
const MAX_PAYLOAD: usize = 16 << 10;
/// Bytes of a header block with the frames around it, which is held until it is complete: twice what the server takes.
const MAX_BLOCK: usize = 32 << 10;
/// CONTINUATION frames that are not the last of their block; for more, the server fails the connection.
const MAX_CONTINUATIONS: usize = 5;

pub(super) const HEADERS: u8 = 1;
const PUSH_PROMISE: u8 = 5;
pub(super) const CONTINUATION: u8 = 9;

pub(super) const END_HEADERS: u8 = 0x4;
pub(super) const PADDED: u8 = 0x8;
pub(super) const PRIORITY: u8 = 0x20;

/// Filters what is read from one connection. Only header blocks that need it are changed; they become shorter. A client that
/// breaks the protocol is the server's business: from there on everything passes.
#[derive(Debug)]
pub(super) struct AuthorityFilter {
    /// None for a client that broke the protocol.
    blocks: Option<HeaderBlocks>,
    /// Bytes up to the next frame.
    skip: usize,
    /// The start of a header block, or of a frame's head.
    held: Vec<u8>,
    /// Filtered bytes that are not read yet.
    ready: Bytes,
}

/// What became of some bytes.
struct Passed {
    /// At their start there are this many filtered bytes.
    ready: usize,
    /// From here on they are an incomplete header block or head.
    held: usize,
}

impl AuthorityFilter {
    pub(super) fn new() -> Self {
        let blocks = Some(HeaderBlocks::default());
        Self { blocks, skip: PREFACE, held: Vec::new(), ready: Bytes::new() }
    }

    /// Reads from `io` what the server is to see.
    pub(super) fn poll_read<IO: AsyncRead + Unpin>(
        &mut self,
        io: &mut IO,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let start = buffer.filled().len();
        loop {
            if buffer.remaining() == 0 {
                return Poll::Ready(Ok(()));
            }
            if !self.ready.is_empty() {
                let length = self.ready.len().min(buffer.remaining());
                buffer.put_slice(&self.ready.split_to(length));
                return Poll::Ready(Ok(()));
            }
            ready!(Pin::new(&mut *io).poll_read(cx, buffer))?;
            let read = buffer.filled_mut().get_mut(start..).unwrap_or_default();
            if read.is_empty() {
                // The client stopped in the middle.
                self.ready = std::mem::take(&mut self.held).into();
                if self.ready.is_empty() {
                    return Poll::Ready(Ok(()));
                }
            } else if self.held.is_empty() {
                let passed = self.pass(read);
                self.held.extend_from_slice(read.get(passed.held..).unwrap_or_default());
                buffer.set_filled(start + passed.ready);
                if passed.ready > 0 {
                    return Poll::Ready(Ok(()));
                }
            } else {
                self.held.extend_from_slice(read);
                buffer.set_filled(start);
                self.pass_held();
            }
        }
    }

    /// Makes of what is held what can be read.
    fn pass_held(&mut self) {
        let mut bytes = std::mem::take(&mut self.held);
        let passed = self.pass(&mut bytes);
        if passed.held == 0 {
            self.held = bytes;
            return;
        }
        self.held.extend_from_slice(bytes.get(passed.held..).unwrap_or_default());
        bytes.truncate(passed.ready);
        self.ready = bytes.into();
    }

    /// Filters `bytes`, which begin where those before ended.
    fn pass(&mut self, bytes: &mut [u8]) -> Passed {
        let end = bytes.len();
        let mut passed = Passed { ready: 0, held: 0 };
        loop {
            let whole =
                if self.blocks.is_some() { self.skip.min(end - passed.held) } else { end - passed.held };
            if passed.ready < passed.held {
                bytes.copy_within(passed.held..passed.held + whole, passed.ready);
            }
            self.skip = self.skip.saturating_sub(whole);
            passed = Passed { ready: passed.ready + whole, held: passed.held + whole };
            if passed.held == end {
                return passed;
            }
            match self.frame(bytes.get(passed.held..).unwrap_or_default()) {
                Ok(Some(Frame::Unchanged(length))) => self.skip = length,
                Ok(Some(Frame::Headers { length, frames })) => {
                    let place = bytes.get_mut(passed.ready..passed.ready + frames.len());
                    place.unwrap_or_default().copy_from_slice(&frames);
                    passed = Passed { ready: passed.ready + frames.len(), held: passed.held + length };
                }
                Ok(None) => return passed,
                Err(Malformed) => self.blocks = None,
            }
        }
    }

    /// The frame, or the frames of a header block, at the start of `bytes`; none if they are incomplete.
    fn frame(&mut self, bytes: &[u8]) -> Result<Option<Frame>, Malformed> {
        let Some((head, _)) = Head::parse(bytes) else { return Ok(None) };
        match (head.kind, &mut self.blocks) {
            (HEADERS, Some(blocks)) => {
                let Some(block) = HeaderFrames::parse(bytes)? else { return Ok(None) };
                Ok(Some(match blocks.rewrite(&block.fields)? {
                    None => Frame::Unchanged(block.length),
                    Some(fields) => Frame::Headers { length: block.length, frames: block.with(&fields) },
                }))
            }
            // They belong to a block, or come from servers only.
            (CONTINUATION | PUSH_PROMISE, _) => Err(Malformed),
            _ => Ok(Some(Frame::Unchanged(HEAD + head.length))),
        }
    }
}

enum Frame {
    /// So many bytes pass as they are.
    Unchanged(usize),
    /// So many bytes are replaced by these, which are not more.
    Headers { length: usize, frames: Vec<u8> },
}

#[derive(Clone, Copy)]
pub(super) struct Head {
    pub(super) length: usize,
    pub(super) kind: u8,
    pub(super) flags: u8,
    pub(super) stream: [u8; 4],
}

impl Head {
    fn parse(bytes: &[u8]) -> Option<(Self, &[u8])> {
        let (&[high, middle, low, kind, flags, s0, s1, s2, s3], rest) = bytes.split_first_chunk::<HEAD>()?;
        let length = usize::from(high) << 16 | usize::from(middle) << 8 | usize::from(low);
        Some((Self { length, kind, flags, stream: [s0, s1, s2, s3] }, rest))
    }

    pub(super) fn write(self, out: &mut Vec<u8>) {
        let length = self.length.to_le_bytes();
        out.extend([length[2], length[1], length[0], self.kind, self.flags]);
        out.extend(self.stream);
    }
}

/// A header block with the frames around it.
struct HeaderFrames<'a> {
    head: Head,
    priority: &'a [u8],
    fields: Cow<'a, [u8]>,
    /// Bytes of all the frames.
    length: usize,
}

impl<'a> HeaderFrames<'a> {
    /// The frames at the start of `bytes`, up to the end of the block; none if they are incomplete.
    fn parse(bytes: &'a [u8]) -> Result<Option<Self>, Malformed> {
        let Some((head, rest)) = Head::parse(bytes) else { return Ok(None) };
        if head.length > MAX_PAYLOAD {
            return Err(Malformed);
        }
        let Some((payload, mut rest)) = rest.split_at_checked(head.length) else { return Ok(None) };
        let (priority, fragment) = unpad(head.flags, payload).ok_or(Malformed)?;
        let mut is_last = head.flags & END_HEADERS != 0;
        let mut continued = Vec::new();
        let mut length = HEAD + head.length;
        while !is_last {
            let Some((next, after)) = Head::parse(rest) else { return Ok(None) };
            is_last = next.flags & END_HEADERS != 0;
            let is_continuation = next.kind == CONTINUATION && next.stream == head.stream;
            let is_over = continued.len() == MAX_CONTINUATIONS && !is_last;
            length += HEAD + next.length;
            if !is_continuation || next.length > MAX_PAYLOAD || is_over || length > MAX_BLOCK {
                return Err(Malformed);
            }
            let Some((fragment, after)) = after.split_at_checked(next.length) else { return Ok(None) };
            continued.push(fragment);
            rest = after;
        }
        // Copied only once the block is complete.
        let mut fields = Cow::Borrowed(fragment);
        for fragment in continued {
            fields.to_mut().extend_from_slice(fragment);
        }
        Ok(Some(Self { head, priority, fields, length }))
    }

    /// The frames with other fields, as few as possible.
    fn with(&self, fields: &[u8]) -> Vec<u8> {
        let (first, mut rest) = fields.split_at(fields.len().min(MAX_PAYLOAD - self.priority.len()));
        let last = |rest: &[u8]| if rest.is_empty() { END_HEADERS } else { 0 };
        let flags = self.head.flags & !(PADDED | END_HEADERS) | last(rest);
        let mut out = Vec::with_capacity(self.length);
        Head { length: self.priority.len() + first.len(), flags, ..self.head }.write(&mut out);
        out.extend_from_slice(self.priority);
        out.extend_from_slice(first);
        while !rest.is_empty() {
            let (next, after) = rest.split_at(rest.len().min(MAX_PAYLOAD));
            rest = after;
            let head = Head { length: next.len(), kind: CONTINUATION, flags: last(rest), ..self.head };
            head.write(&mut out);
            out.extend_from_slice(next);
        }
        out
    }
}

/// The priority and the fragment of a header block in the payload of a HEADERS frame.
fn unpad(flags: u8, payload: &[u8]) -> Option<(&[u8], &[u8])> {
    let (padding, payload) = match flags & PADDED {
        0 => (0, payload),
        _ => payload.split_first().map(|(length, rest)| (usize::from(*length), rest))?,
    };
    let (priority, payload) = payload.split_at_checked(if flags & PRIORITY == 0 { 0 } else { 5 })?;
    let fragment = payload.get(..payload.len().checked_sub(padding)?)?;
    Some((priority, fragment))
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt as _;

    use super::*;

    /// What passes of the bytes that a client sends one after the other, and how many were held at most.
    async fn read(bytes: &[u8]) -> (Vec<u8>, usize) {
        let (mut client, mut server) = tokio::io::duplex(100);
        let (mut filter, mut all, mut most) = (AuthorityFilter::new(), Vec::new(), 0);
        let send = async move { client.write_all(bytes).await };
        let read = async move {
            loop {
                let mut buffer = [0; 100];
                let mut buffer = ReadBuf::new(&mut buffer);
                let read = std::future::poll_fn(|cx| {
                    let read = filter.poll_read(&mut server, cx, &mut buffer);
                    most = most.max(filter.held.len());
                    read
                });
                read.await.unwrap();
                match buffer.filled() {
                    [] => return (all, most),
                    filled => all.extend_from_slice(filled),
                }
            }
        };
        tokio::join!(send, read).1
    }

    /// A header block in frames with payloads of these lengths.
    fn block(lengths: &[usize]) -> Vec<u8> {
        let mut out = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
        for (index, &length) in lengths.iter().enumerate() {
            let kind = if index == 0 { HEADERS } else { CONTINUATION };
            let flags = if index + 1 == lengths.len() { END_HEADERS } else { 0 };
            Head { length, kind, flags, stream: [0, 0, 0, 1] }.write(&mut out);
            // A field of the static table, again and again.
            out.resize(out.len() + length, 0x83);
        }
        out
    }

    #[tokio::test]
    async fn no_more_than_32_kilobytes_of_a_header_block_are_held() {
        let rest = MAX_BLOCK - 3 * HEAD - MAX_PAYLOAD;
        for lengths in
            [&[MAX_PAYLOAD, rest, 0][..], &[MAX_PAYLOAD, rest, 1], &[MAX_PAYLOAD; 6], &[6 << 10; 6]]
        {
            let sent = block(lengths);
            let (passed, most) = read(&sent).await;
            assert!(passed == sent && most <= MAX_BLOCK, "{most} bytes held of {lengths:?}");
        }
    }
}
