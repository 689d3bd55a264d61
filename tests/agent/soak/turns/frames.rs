//! Bytes that are not HTTP/2, or not what HTTP/2 is for.

use std::path::Path;
use std::time::Duration;

use fastrand::Rng;
use prost::Message;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tokio::time::timeout;

use crate::soak::stage::Stage;
use crate::support::frames::{
    CONTINUATION, DATA, END_HEADERS, HEADERS, PING, RST_STREAM, SETTINGS, WINDOW_UPDATE, frame,
};
use crate::support::sds::request;

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const PATH: &str = "/envoy.service.secret.v3.SecretDiscoveryService/StreamSecrets";

/// The headers of a call, as literals that no table keeps.
fn headers() -> Vec<u8> {
    let fields = [
        (":method", "POST"),
        (":scheme", "http"),
        (":authority", "attache"),
        (":path", PATH),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    ];
    let text = |text: &str| [&[u8::try_from(text.len()).unwrap()], text.as_bytes()].concat();
    fields.iter().flat_map(|(name, value)| [vec![0], text(name), text(value)].concat()).collect()
}

/// A client that reads nothing unless it is asked to.
pub struct RawClient(UnixStream);

impl RawClient {
    pub async fn connect(socket: &Path) -> Self {
        let mut io = UnixStream::connect(socket).await.unwrap();
        io.write_all(&[PREFACE, &frame(SETTINGS, 0, 0, &[])].concat()).await.unwrap();
        Self(io)
    }

    /// Opens a stream of this number with a first request. Whether the agent still reads.
    pub async fn open_stream(&mut self, number: u32, first: &impl Message) -> bool {
        let message = first.encode_to_vec();
        let length = u32::try_from(message.len()).unwrap().to_be_bytes();
        let data = [&[0], length.as_slice(), &message].concat();
        let frames =
            [frame(HEADERS, END_HEADERS, number, &headers()), frame(DATA, 0, number, &data)].concat();
        self.send(&frames).await
    }

    /// Writes, until the agent stops reading or closes the connection. Whether everything was written.
    async fn send(&mut self, bytes: &[u8]) -> bool {
        matches!(timeout(Duration::from_secs(1), self.0.write_all(bytes)).await, Ok(Ok(())))
    }

    /// Stops writing, and reads until the agent closes the connection, or answers no more.
    async fn finish(mut self) {
        let _ = self.0.shutdown().await;
        let _ = timeout(Duration::from_millis(500), self.0.read_to_end(&mut Vec::new())).await;
    }
}

/// Bytes at random, and what else speaks on sockets.
pub async fn garbage(stage: &Stage, random: &mut Rng) {
    for round in 0..200 {
        let mut junk = vec![0; random.usize(1..5000)];
        random.fill(&mut junk);
        let bytes = match round % 4 {
            0 => junk,
            1 => [b"GET / HTTP/1.1\r\nhost: x\r\n\r\n".as_slice(), &junk].concat(),
            2 => [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03".as_slice(), &junk].concat(),
            _ => [PREFACE, &frame(SETTINGS, 0, 0, &[]), &junk].concat(),
        };
        let mut client = RawClient(UnixStream::connect(&stage.socket).await.unwrap());
        client.send(&bytes).await;
        client.finish().await;
    }
}

/// Frames of every kind with random flags, streams and content, and messages that are no requests.
pub async fn broken_frames(stage: &Stage, random: &mut Rng) {
    for round in 0..100 {
        let mut client = RawClient::connect(&stage.socket).await;
        client.open_stream(1, &request(&["default"])).await;
        for _ in 0..random.usize(1..30) {
            let mut payload = vec![0; random.usize(0..200)];
            random.fill(&mut payload);
            let bytes = match round % 3 {
                0 => frame(random.u8(0..12), random.u8(..), random.u32(0..8), &payload),
                // A message that is not protobuf, or compressed, or longer than it says.
                1 => frame(DATA, 0, 1, &[&[random.u8(0..3), 0, 0, 0, random.u8(..)], &payload[..]].concat()),
                _ => frame(HEADERS, END_HEADERS, random.u32(0..4) * 2 + 3, &payload),
            };
            if !client.send(&bytes).await {
                break;
            }
        }
        client.finish().await;
    }
}

/// Floods of frames that cost the client nothing.
pub async fn floods(stage: &Stage) {
    let flood: [&dyn Fn(u32) -> Vec<u8>; 6] = [
        &|_| frame(PING, 0, 0, &[7; 8]),
        &|_| frame(SETTINGS, 0, 0, &[0, 4, 0, 1, 0, 0]),
        // Streams that are reset before they are answered.
        &|index| {
            let number = 2 * index + 1;
            let open = frame(HEADERS, END_HEADERS, number, &headers());
            [open, frame(RST_STREAM, 0, number, &[0, 0, 0, 8])].concat()
        },
        // Headers without an end.
        &|index| match index {
            0 => frame(HEADERS, 0, 1, &headers()),
            _ => frame(CONTINUATION, 0, 1, &[0, 1, b'x', 1, b'y'].repeat(20)),
        },
        &|_| frame(WINDOW_UPDATE, 0, 0, &[0, 0, 0, 1]),
        &|index| match index {
            0 => frame(HEADERS, END_HEADERS, 1, &headers()),
            _ => frame(DATA, 0, 1, &[]),
        },
    ];
    for of in flood {
        let mut client = RawClient::connect(&stage.socket).await;
        for chunk in 0..50 {
            let frames: Vec<_> = (chunk * 200..(chunk + 1) * 200).flat_map(of).collect();
            if !client.send(&frames).await {
                break;
            }
        }
        client.finish().await;
    }
}
