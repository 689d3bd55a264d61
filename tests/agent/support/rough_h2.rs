//! What a client of gRPC meets that is not gRPC, or not whole: proxies, other servers, servers that break.

use std::time::Duration;

use bytes::Bytes;
use h2::Reason;
use h2::server::SendResponse;
use http::{HeaderMap, HeaderName, HeaderValue};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_util::sync::CancellationToken;

/// What is done on a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rough {
    /// Takes the connection, and neither reads nor writes.
    Silent,
    /// Ends it at once.
    Close,
    /// Says this, whatever it is asked.
    Bytes(&'static [u8]),
    /// HTTP/2 with a page of HTML.
    Html(u16),
    /// The start of an answer, and nothing more.
    HangInAnswer,
    /// The start of an answer, and a reset.
    ResetInAnswer(Reason),
    /// The start of an answer, and the end of the connection.
    CloseInAnswer,
    /// The start of an answer that says that it is longer, and its regular end.
    ShortAnswer,
    /// An answer whose first bytes are none that a message starts with.
    BadPrefix,
    /// An answer that says that it has 4 GB.
    GiantPrefix,
    /// An answer that is no protobuf.
    NotProtobuf,
    /// A whole answer without the trailers that say how it went.
    NoTrailers,
    /// A header that says that the answer is shorter than it is.
    WrongContentLength,
    /// Headers of a megabyte.
    HugeHeaders,
    /// A good end of a call without an answer.
    NoMessage,
}

/// SETTINGS, and a GOAWAY that says that no call was begun.
pub const GOAWAY: &[u8] = b"\0\0\0\x04\0\0\0\0\0\0\0\x08\x07\0\0\0\0\0\0\0\0\0\0\0\0\0";

/// Treats one connection so, until the client ends it.
pub async fn be_rough(mut io: TcpStream, rough: Rough) {
    match rough {
        Rough::Silent => std::future::pending().await,
        Rough::Close => {}
        Rough::Bytes(bytes) => {
            let _ = io.write_all(bytes).await;
            // A connection that is closed with something unread is reset, and what was written may be lost.
            while io.read(&mut [0; 1024]).await.is_ok_and(|read| read > 0) {}
        }
        _ => answer_calls(io, rough).await,
    }
}

async fn answer_calls(io: TcpStream, rough: Rough) {
    let Ok(mut connection) = h2::server::handshake(io).await else { return };
    let is_over = CancellationToken::new();
    loop {
        let call = tokio::select! {
            call = connection.accept() => call,
            () = is_over.cancelled() => return,
        };
        let Some(Ok((_, respond))) = call else { return };
        let is_over = is_over.clone();
        tokio::spawn(async move {
            answer(respond, rough, is_over).await;
        });
    }
}

/// A message with its prefix: 5 bytes of protobuf.
const MESSAGE: &[u8] = b"\0\0\0\0\x05\x0a\x03PEM";

async fn answer(mut respond: SendResponse<Bytes>, rough: Rough, is_over: CancellationToken) {
    let grpc = || http::Response::builder().header("content-type", "application/grpc");
    let head = match rough {
        Rough::Html(status) => {
            let head = http::Response::builder().status(status).header("content-type", "text/html");
            head.header("retry-after", "7")
        }
        Rough::WrongContentLength => grpc().header("content-length", "3"),
        Rough::HugeHeaders => {
            let names = (0..1000).map(|index| HeaderName::try_from(format!("x-{index}")).unwrap());
            names.fold(grpc(), |head, name| head.header(name, "x".repeat(1000)))
        }
        _ => grpc(),
    };
    let Ok(mut body) = respond.send_response(head.body(()).unwrap(), false) else { return };
    let data: &'static [u8] = match rough {
        Rough::Html(_) => b"<html>the upstream is not there</html>",
        Rough::HangInAnswer | Rough::ResetInAnswer(_) | Rough::CloseInAnswer | Rough::ShortAnswer => {
            b"\0\0\0\x03\xe8start"
        }
        Rough::BadPrefix => b"<html>",
        Rough::GiantPrefix => b"\0\xff\xff\xff\xffx",
        Rough::NotProtobuf => b"\0\0\0\0\x05\xff\xff\xff\xff\xff",
        Rough::NoMessage => b"",
        _ => MESSAGE,
    };
    let is_end = matches!(rough, Rough::Html(_) | Rough::NoTrailers);
    let _ = body.send_data(Bytes::from_static(data), is_end);
    match rough {
        Rough::HangInAnswer => return std::future::pending().await,
        Rough::ResetInAnswer(reason) => return body.send_reset(reason),
        Rough::CloseInAnswer => {
            // h2 writes the data when the runtime is idle, and does not report it: nothing can be awaited. Then the
            // connection closes in the middle of the answer.
            tokio::time::sleep(Duration::from_millis(50)).await;
            is_over.cancel();
            return std::future::pending().await;
        }
        _ if is_end => return,
        _ => {}
    }
    let trailers =
        HeaderMap::from_iter([(HeaderName::from_static("grpc-status"), HeaderValue::from_static("0"))]);
    let _ = body.send_trailers(trailers);
}
