use std::convert::Infallible;

use bytes::Bytes;
use http_body_util::Full;
use hyper::body::Incoming;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tonic::metadata::MetadataMap;

use super::*;
use crate::net::http2::GRPC_DETAILS;
use crate::net::tls::Roots;
use crate::proto::google::protobuf::{self, Any};
use crate::proto::istio::v1::auth::IstioCertificateRequest;
use crate::proto::istio::v1::auth::istio_certificate_service_client::IstioCertificateServiceClient;

/// Answers every call the same.
#[derive(Clone)]
struct Answering(fn() -> http::Response<Body>);

impl Service<http::Request<Incoming>> for Answering {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = std::future::Ready<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: http::Request<Incoming>) -> Self::Future {
        std::future::ready(Ok(self.0()))
    }
}

/// A server that refuses every call.
async fn server() -> Endpoint {
    serving(|| Status::unimplemented("nothing is").into_http()).await
}

async fn serving(answer: fn() -> http::Response<Body>) -> Endpoint {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap()).parse().unwrap();
    tokio::spawn(async move {
        while let Ok((io, _)) = listener.accept().await {
            tokio::spawn(http2::serve(io, Answering(answer), CancellationToken::new()));
        }
    });
    Endpoint { address, roots: Roots::System, server_name: None }
}

/// Advances the clock and lets sleeping tasks wake.
async fn pass(time: Duration) {
    tokio::time::pause();
    tokio::time::advance(time).await;
    for _ in 0..10 {
        tokio::task::yield_now().await;
    }
    tokio::time::resume();
}

#[tokio::test]
async fn a_connection_stays_open_only_while_calls_are_close_together() {
    let endpoint = server().await;
    let connections = Connections::new(Duration::from_secs(10), Disk::default());
    let channel = async || connections.channel(&endpoint, None).await.unwrap();
    let is_idle = || connections.idle.lock().unwrap().is_some();

    connections.keep(channel().await);
    assert!(!is_idle(), "there was only one call");
    pass(NEAR * 2).await;
    connections.keep(channel().await);
    assert!(!is_idle(), "the calls are far apart");
    connections.keep(channel().await);
    assert!(is_idle());
    pass(NEAR / 2).await;
    let again = channel().await;
    assert!(again.is_reused);
    pass(NEAR / 3).await;
    connections.keep(again);
    pass(NEAR / 2).await;
    assert!(is_idle(), "the timer of the previous idle period still runs");
    pass(NEAR).await;
    assert!(!is_idle(), "there was no next call");

    // However close the calls are, a connection is replaced at its maximum age.
    connections.keep(channel().await);
    connections.keep(channel().await);
    let mut reused = 0;
    for _ in 0..20 {
        pass(NEAR * 2 / 3).await;
        let next = channel().await;
        if !next.is_reused {
            break;
        }
        reused += 1;
        connections.keep(next);
    }
    assert_eq!(reused, 14, "five minutes end after the fifteenth call");
}

#[tokio::test]
async fn a_refusal_with_damaged_details_is_read_without_them() {
    fn in_headers() -> http::Response<Body> {
        let mut answer = Status::unavailable("busy").into_http();
        answer.headers_mut().insert(GRPC_DETAILS, "not base64".parse().unwrap());
        answer
    }
    fn in_trailers() -> http::Response<Body> {
        let (head, _) = in_headers().into_parts();
        let body = Full::<Bytes>::default().with_trailers(std::future::ready(Some(Ok(head.headers))));
        http::Response::builder().header(CONTENT_TYPE, "application/grpc").body(Body::new(body)).unwrap()
    }
    for answer in [in_headers, in_trailers] {
        let endpoint = serving(answer).await;
        let channel = Connections::new(Duration::from_secs(10), Disk::default())
            .channel(&endpoint, None)
            .await
            .unwrap();
        let origin = endpoint.address.origin().parse().unwrap();
        let mut client = IstioCertificateServiceClient::with_origin(channel.service(), origin);
        let status = client.create_certificate(IstioCertificateRequest::default()).await.unwrap_err();
        let error = channel.explain(&status);
        assert!(matches!(&error, TransportError::Refused { message, .. } if message == "busy"), "{error}");
    }
}

#[test]
fn a_server_may_set_the_delay_before_a_retry() {
    const TYPE: &str = "type.googleapis.com/google.rpc.RetryInfo";
    let delay = |seconds, nanos| RetryInfo { retry_delay: Some(protobuf::Duration { seconds, nanos }) };
    let status = |details: Vec<(&str, Vec<u8>)>, pushback: Option<&'static str>| {
        let details = details
            .into_iter()
            .map(|(type_url, value)| Any { type_url: type_url.to_owned(), value: value.into() });
        let details = Details { code: 14, message: String::new(), details: details.collect() };
        let mut metadata = MetadataMap::new();
        if let Some(pushback) = pushback {
            metadata.insert("grpc-retry-pushback-ms", pushback.parse().unwrap());
        }
        Status::with_details_and_metadata(Code::Unavailable, "", details.encode_to_vec().into(), metadata)
    };
    let with_info = |seconds, nanos| status(vec![(TYPE, delay(seconds, nanos).encode_to_vec())], None);
    let cases = [
        (with_info(3, 500_000_000), Some(Duration::from_millis(3500))),
        (
            with_info(i64::MAX, i32::MAX),
            Some(Duration::from_secs(i64::MAX as u64) + Duration::from_nanos(i32::MAX as u64)),
        ),
        (with_info(-3, 0), None),
        (with_info(3, -1), None),
        (status(vec![(TYPE, vec![0xff; 9])], None), None),
        (status(vec![("type.googleapis.com/google.rpc.Help", delay(3, 0).encode_to_vec())], None), None),
        (
            status(vec![("x", vec![]), (TYPE, delay(3, 0).encode_to_vec())], Some("10")),
            Some(Duration::from_secs(3)),
        ),
        (status(vec![], Some("250")), Some(Duration::from_millis(250))),
        (status(vec![], Some("-1")), None),
        (status(vec![], Some("soon")), None),
        (Status::with_details(Code::Unavailable, "", vec![0xff; 9].into()), None),
        (Status::unavailable(""), None),
    ];
    for (status, expected) in cases {
        assert_eq!(requested_delay(&status), expected, "{status:?}");
    }
}
