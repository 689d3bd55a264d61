//! gRPC clients of every kind, whatever they send as `:authority`.

use std::collections::BTreeMap;
use std::path::Path;

use prost::Message as _;
use serde_json::Value;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tokio::process::Command;
use tokio::time::timeout;

use crate::support::envoy::Envoy;
use crate::support::frames::{CONTINUATION, END_HEADERS, HEADERS, PADDED, PRIORITY, frame};
use crate::support::installed::installed;
use crate::support::mesh::bootstrap;
use crate::support::process::{Agent, PATIENCE};
use crate::support::sds::request;

async fn agent(directory: &Path) -> Agent {
    let ca = directory.join("ca");
    Agent::ready(directory, "agent", &["--ca", "embedded", "--ca-dir", ca.to_str().unwrap()]).await
}

#[tokio::test]
async fn grpcs_python_client_as_it_comes_gets_its_secrets() {
    const TALK: &str = r#"
import grpc, sys
channel = grpc.insecure_channel("unix:" + sys.argv[1])
request = bytes.fromhex(sys.argv[2])
service = "/envoy.service.secret.v3.SecretDiscoveryService/"
fetch = channel.unary_unary(service + "FetchSecrets")
stream = channel.stream_stream(service + "StreamSecrets")
for _ in range(3):
    print(fetch(request, timeout=50).hex())
    answers = stream(iter([request]), timeout=50)
    print(next(answers).hex())
    answers.cancel()
"#;
    let directory = tempfile::tempdir().unwrap();
    let agent = agent(directory.path()).await;
    let request: String =
        request(&["default"]).encode_to_vec().iter().map(|byte| format!("{byte:02x}")).collect();
    let mut python = Command::new(installed("get-grpcio", &[]).await);
    python.args(["-c", TALK]).arg(&agent.socket).arg(request).kill_on_drop(true);
    let output = timeout(PATIENCE, python.output()).await.expect("grpcio has no answer").unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let answers = String::from_utf8(output.stdout).unwrap();
    let (fetched, streamed): (Vec<_>, Vec<_>) =
        answers.lines().enumerate().partition(|(index, _)| index % 2 == 0);
    for (_, answer) in fetched.iter().chain(&streamed) {
        let name: String = b"default".iter().map(|byte| format!("{byte:02x}")).collect();
        assert!(answer.contains(&name), "{answer}");
    }
    assert_eq!((fetched.len(), streamed.len()), (3, 3));
}

#[tokio::test]
async fn an_envoy_whose_cluster_is_no_host_name_gets_its_secrets() {
    let directory = tempfile::tempdir().unwrap();
    let mut agent = agent(directory.path()).await;
    let plain = bootstrap(&agent.socket, &[]).await.to_string();
    for (file, name) in [("slash", "a/b"), ("bar", "a|b")] {
        let renamed = plain.replace("\"attache_sds\"", &format!("{name:?}"));
        assert_ne!(renamed, plain);
        let renamed: Value = serde_json::from_str(&renamed).unwrap();
        let envoy = Envoy::start(renamed, directory.path(), file).await;
        // It opens when its secrets are there.
        agent.wait_metric("attache_streams{name=\"default\"}", 1).await;
        envoy.wait_listeners(&["inbound"]).await;
        assert!(envoy.certs().await.to_string().contains("spiffe://"), "{name}");
        drop(envoy);
        agent.wait_metric("attache_streams{name=\"default\"}", 0).await;
    }
}

/// A header field with its name in full.
fn field(name: &str, value: &[u8]) -> Vec<u8> {
    let mut out = vec![0, u8::try_from(name.len()).unwrap()];
    out.extend_from_slice(name.as_bytes());
    let length = value.len();
    if length < 127 {
        out.push(u8::try_from(length).unwrap());
    } else {
        let rest = length - 127;
        let low = u8::try_from(rest & 0x7f).unwrap();
        out.extend([127, 0x80 | low, 0x80 | u8::try_from(rest >> 7 & 0x7f).unwrap()]);
        out.push(u8::try_from(rest >> 14).unwrap());
    }
    out.extend_from_slice(value);
    out
}

/// The header block of FetchSecrets, with this in the place of the authority.
fn block(authority: &[u8]) -> Vec<u8> {
    let path = b"/envoy.service.secret.v3.SecretDiscoveryService/FetchSecrets";
    let path = [&[0x04, u8::try_from(path.len()).unwrap()], path.as_slice()].concat();
    let content_type = b"\x0f\x10\x10application/grpc";
    [b"\x83\x86", authority, &path, content_type, &field("te", b"trailers")].concat()
}

/// A call's message, with the end of the request.
fn message(stream: u32) -> Vec<u8> {
    let request = request(&["ROOTCA"]).encode_to_vec();
    let prefix = [0, 0, 0, 0, u8::try_from(request.len()).unwrap()];
    frame(0, 1, stream, &[&prefix, &*request].concat())
}

fn call(stream: u32, authority: &[u8]) -> Vec<u8> {
    [frame(HEADERS, END_HEADERS, stream, &block(authority)), message(stream)].concat()
}

/// How each stream ended: `ok` with the secret, or what came instead. The connection's end has the number 0.
async fn talk(socket: &Path, frames: &[u8], streams: &[u8], piece: usize) -> BTreeMap<u8, String> {
    let mut connection = UnixStream::connect(socket).await.unwrap();
    connection.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").await.unwrap();
    for piece in frames.chunks(piece) {
        // The agent may close the connection at an error.
        if connection.write_all(piece).await.is_err() {
            break;
        }
    }
    let (mut outcomes, mut bodies) = (BTreeMap::new(), BTreeMap::<u8, Vec<u8>>::new());
    let read = async {
        while !streams.iter().all(|stream| outcomes.contains_key(stream)) {
            let mut head = [0; 9];
            if connection.read_exact(&mut head).await.is_err() {
                return outcomes.entry(0).or_insert("closed".to_owned()).clone();
            }
            let length = usize::from(head[0]) << 16 | usize::from(head[1]) << 8 | usize::from(head[2]);
            let mut payload = vec![0; length];
            connection.read_exact(&mut payload).await.unwrap();
            let (kind, flags, stream) = (head[3], head[4], head[8]);
            let body = bodies.entry(stream).or_default();
            match kind {
                0 => body.extend_from_slice(&payload),
                3 => drop(outcomes.insert(stream, format!("reset {}", payload[3]))),
                7 => drop(outcomes.insert(0, format!("goaway {}", payload[7]))),
                _ => {}
            }
            if kind < 2 && flags & 1 != 0 {
                let has_secret = body.windows(6).any(|window| window == b"ROOTCA");
                outcomes.insert(stream, if has_secret { "ok" } else { "no answer" }.to_owned());
            }
        }
        String::new()
    };
    let _ = timeout(PATIENCE, read).await.unwrap_or_else(|_| panic!("silence after {outcomes:?}"));
    outcomes
}

#[tokio::test]
async fn an_authority_in_any_form_is_accepted() {
    let directory = tempfile::tempdir().unwrap();
    let agent = agent(directory.path()).await;
    let literal = |first: &[u8], value: &[u8]| [first, &[u8::try_from(value.len()).unwrap()], value].concat();
    let path = agent.socket.to_str().unwrap();
    let encoded = path.replace('/', "%2F");
    // "/run/sds" in Huffman codes.
    let huffman = b"\x86\x62\xcb\x6a\x61\x12\x23".as_slice();
    let named = b"\x88\xb8\x3b\x53\x39\xec\x32\x7d\x7f".as_slice();
    let authorities: Vec<(&str, Vec<u8>)> = vec![
        ("none", Vec::new()),
        ("a host", literal(b"\x41", b"localhost")),
        ("percent-encoded, by Java and C core", literal(b"\x41", encoded.as_bytes())),
        ("percent-encoded, name in full", literal(b"\x40\x0a:authority", encoded.as_bytes())),
        ("the path", literal(b"\x41", path.as_bytes())),
        ("the path, not for the table", literal(b"\x01", path.as_bytes())),
        ("the path, never for the table", literal(b"\x11", path.as_bytes())),
        ("a path that is not ASCII", literal(b"\x41", "/run/\u{fc}".as_bytes())),
        ("Huffman codes", [b"\x41", huffman].concat()),
        ("Huffman codes, the name too", [b"\x40", named, huffman].concat()),
        ("a cluster", literal(b"\x41", b"a/b")),
        ("empty", literal(b"\x41", b"")),
        ("empty, not for the table", literal(b"\x01", b"")),
        ("empty, in the static table", b"\x81".to_vec()),
    ];
    for (what, authority) in authorities {
        let is_in_table = authority.first().is_some_and(|first| first & 0xc0 == 0x40);
        // An entry before it, which the third call refers to beside the authority itself.
        let before = b"\x40\x05x-one\x03two".as_slice();
        let first = [block(&authority), before.to_vec()].concat();
        let mut calls = [frame(HEADERS, END_HEADERS, 1, &first), message(1), call(3, &authority)].concat();
        let mut streams = vec![1, 3];
        if is_in_table {
            // 62 is the authority of the second call, 63 the other field, 64 the authority of the first one.
            let again = [block(b"\xc0"), vec![0xbf]].concat();
            calls.extend([frame(HEADERS, END_HEADERS, 5, &again), message(5), call(7, b"\xbe")].concat());
            streams.extend([5, 7]);
        }
        for piece in [usize::MAX, 3] {
            let outcomes = talk(&agent.socket, &calls, &streams, piece).await;
            let expected = streams.iter().map(|stream| (*stream, "ok".to_owned())).collect();
            assert_eq!(outcomes, expected, "{what}, in pieces of {piece}");
        }
    }
}

#[tokio::test]
async fn headers_with_padding_with_a_priority_and_in_several_frames_are_accepted() {
    let directory = tempfile::tempdir().unwrap();
    let agent = agent(directory.path()).await;
    let block = block(b"\x41\x05/a/b/");
    let priority = [0, 0, 0, 0, 9];
    let padded = [&[7_u8][..], &*block, &[0; 7]].concat();
    let both = [&[7_u8][..], &priority, &*block, &[0; 7]].concat();
    let (start, end) = block.split_at(5);
    let cases = [
        ("padding", frame(HEADERS, END_HEADERS | PADDED, 1, &padded)),
        ("a priority", frame(HEADERS, END_HEADERS | PRIORITY, 1, &[&priority[..], &*block].concat())),
        ("both", frame(HEADERS, END_HEADERS | PADDED | PRIORITY, 1, &both)),
        (
            "three frames, the last one empty",
            [
                frame(HEADERS, PRIORITY, 1, &[&priority[..], start].concat()),
                frame(CONTINUATION, 0, 1, end),
                frame(CONTINUATION, END_HEADERS, 1, b""),
            ]
            .concat(),
        ),
        (
            "frames of one byte",
            [
                frame(HEADERS, 0, 1, &block[..1]),
                frame(CONTINUATION, 0, 1, &block[1..2]),
                frame(CONTINUATION, 0, 1, &block[2..3]),
                frame(CONTINUATION, 0, 1, &block[3..4]),
                frame(CONTINUATION, END_HEADERS, 1, &block[4..]),
            ]
            .concat(),
        ),
    ];
    for (what, headers) in cases {
        for piece in [usize::MAX, 1] {
            let calls = [headers.clone(), message(1), call(3, b"\xbe")].concat();
            let outcomes = talk(&agent.socket, &calls, &[1, 3], piece).await;
            let expected = [(1, "ok".to_owned()), (3, "ok".to_owned())].into();
            assert_eq!(outcomes, expected, "{what}, in pieces of {piece}");
        }
    }
}

#[tokio::test]
async fn a_client_that_breaks_the_protocol_gets_the_error_for_it() {
    const PROTOCOL_ERROR: &str = "goaway 1";
    const FRAME_SIZE_ERROR: &str = "goaway 6";
    const ENHANCE_YOUR_CALM: &str = "goaway 11";
    let directory = tempfile::tempdir().unwrap();
    let agent = agent(directory.path()).await;
    let refused = b"\x41\x05/a/b/".as_slice();
    let headers = |flags, block: &[u8]| frame(HEADERS, flags, 3, block);
    let large = [block(refused), field("x-large", &[b'x'; 70_000])].concat();
    let large: Vec<_> = large.chunks(16 << 10).collect();
    let in_frames = |pieces: &[&[u8]]| -> Vec<u8> {
        let frames = pieces.iter().enumerate().map(|(index, piece)| {
            let flags = if index + 1 == pieces.len() { END_HEADERS } else { 0 };
            frame(if index == 0 { HEADERS } else { CONTINUATION }, flags, 3, piece)
        });
        frames.collect::<Vec<_>>().concat()
    };
    let cases = [
        ("an index behind the table", headers(END_HEADERS, &block(b"\xc5")), PROTOCOL_ERROR),
        ("index 0", headers(END_HEADERS, &block(b"\x80")), PROTOCOL_ERROR),
        ("a value behind the end", headers(END_HEADERS, b"\x83\x86\x41\x7f/a/b"), PROTOCOL_ERROR),
        ("a bad Huffman code", headers(END_HEADERS, &block(b"\x41\x84\xff\xff\xff\xff")), PROTOCOL_ERROR),
        ("an endless integer", headers(END_HEADERS, &block(b"\x7f\xff\xff\xff\xff\xff\x01")), PROTOCOL_ERROR),
        ("more padding than frame", headers(END_HEADERS | PADDED, b"\x09\x83"), PROTOCOL_ERROR),
        ("another frame in a block", [headers(0, refused), frame(6, 0, 0, &[0; 8])].concat(), PROTOCOL_ERROR),
        ("the end of no block", frame(CONTINUATION, END_HEADERS, 3, refused), PROTOCOL_ERROR),
        (
            "a server's frame",
            frame(5, END_HEADERS, 3, &[&[0, 0, 0, 2][..], refused].concat()),
            PROTOCOL_ERROR,
        ),
        ("too large a frame", headers(END_HEADERS, &[0; (16 << 10) + 1]), FRAME_SIZE_ERROR),
        ("too many frames", in_frames(&[refused, b"", b"", b"", b"", b"", b"", b""]), ENHANCE_YOUR_CALM),
        (
            "too many frames, not the last",
            [headers(0, b""), frame(9, 0, 3, b"").repeat(6)].concat(),
            ENHANCE_YOUR_CALM,
        ),
        ("70 kB of headers", in_frames(&large), ENHANCE_YOUR_CALM),
    ];
    for (what, frames, expected) in cases {
        for (before, streams) in [(Vec::new(), &[0][..]), (call(1, refused), &[0, 1])] {
            for piece in [usize::MAX, 7] {
                let frames = [&*before, &*frames].concat();
                let outcomes = talk(&agent.socket, &frames, &streams[..1], piece).await;
                assert_eq!(outcomes[&0], expected, "{what}, in pieces of {piece}: {outcomes:?}");
            }
        }
    }
    // 20 kB of headers are more than the agent takes in one request, but break nothing.
    for authority in [refused, b"\x41\x09localhost"] {
        let large = [block(authority), field("x-large", &[b'x'; 20_000])].concat();
        let large = in_frames(&large.chunks(16 << 10).collect::<Vec<_>>());
        let frames = [large, message(3), call(5, b"\xbe")].concat();
        let outcomes = talk(&agent.socket, &frames, &[3, 5], usize::MAX).await;
        assert_eq!(outcomes, [(3, "reset 1".to_owned()), (5, "ok".to_owned())].into());
    }
}
