//! Answers to a gRPC client that are not gRPC, or incomplete: proxies, other servers, servers that break.

use std::time::Duration;

use bytes::Bytes;
use h2::Reason;
use h2::server::SendResponse;
use http::{HeaderMap, HeaderName, HeaderValue};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_util::sync::CancellationToken;

/// What happens on a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rough {
    /// Accepts the connection, and neither reads nor writes.
    Silent,
    /// Closes it at once.
    Close,
    /// Sends these bytes, whatever the request.
    Bytes(&'static [u8]),
    /// HTTP/2 with this status and an HTML page.
    Html(u16),
    /// The start of an answer, and nothing more.
    HangInAnswer,
    /// The start of an answer, then a reset.
    ResetInAnswer(Reason),
    /// The start of an answer, then the connection closes.
    CloseInAnswer,
    /// An answer shorter than its length prefix, with a regular end.
    ShortAnswer,
    /// An answer whose first bytes are no message prefix.
    BadPrefix,
    /// An answer with a prefix of 4 GB.
    GiantPrefix,
    /// An answer that is not protobuf.
    NotProtobuf,
    /// A whole answer without the trailers and their status.
    NoTrailers,
    /// A Content-Length below the answer's length.
    WrongContentLength,
    /// Headers of a megabyte.
    HugeHeaders,
    /// A successful end of a call without an answer.
    NoMessage,
}

/// SETTINGS, and a GOAWAY that says that no call was started.
pub const GOAWAY: &[u8] = b"\0\0\0\x04\0\0\0\0\0\0\0\x08\x07\0\0\0\0\0\0\0\0\0\0\0\0\0";

/// Treats one connection in this way, until the client closes it.
pub async fn be_rough(mut io: TcpStream, rough: Rough) {
    match rough {
        Rough::Silent => std::future::pending().await,
        Rough::Close => {}
        Rough::Bytes(bytes) => {
            let _ = io.write_all(bytes).await;
            // Closing a connection with unread data resets it, and written data may be lost.
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

/// A message of 5 bytes of protobuf, with its prefix.
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
