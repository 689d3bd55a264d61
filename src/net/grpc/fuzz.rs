//! Fuzz target: how a gRPC call ends.

use http::{HeaderName, HeaderValue};

use super::{CallError, Code, HeaderMap, NotGrpc, Status, StatusCode, requested_delay, text};
use crate::base::fuzzing::check_line;
use crate::net::error::code_class;
use crate::net::http2::remove_damaged_details;

/// Headers as lines of `name: value`, `status` among them. True if a server refuses the call with them.
pub fn status(bytes: &[u8]) -> bool {
    let mut headers = HeaderMap::new();
    // As many as HTTP/2 could bring.
    for line in bytes.split(|byte| *byte == b'\n').take(1_000) {
        let mut halves = line.splitn(2, |byte| *byte == b':');
        let (Some(name), Some(value)) = (halves.next(), halves.next()) else { continue };
        let (name, value) = (HeaderName::from_bytes(name), HeaderValue::from_bytes(value.trim_ascii()));
        if let (Ok(name), Ok(value)) = (name, value) {
            headers.append(name, value);
        }
    }
    remove_damaged_details(&mut headers);
    let http = headers.get("status").and_then(|status| StatusCode::from_bytes(status.as_bytes()).ok());
    if let Some(answer) = NotGrpc::new(http.unwrap_or_default(), &headers) {
        check_line(&CallError::NotGrpc(answer).to_string());
        return false;
    }
    let Some(status) = Status::from_header_map(&headers) else { return false };
    check_line(&text::sanitize_for_log(status.message()));
    // Used as it is, however long it is.
    let _ = (requested_delay(&status), code_class(status.code()));
    status.code() != Code::Ok
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use prost::Message as _;
    use tonic::metadata::MetadataMap;

    use super::*;
    use crate::base::fuzzing::{Shape, seeded};
    use crate::net::grpc::{Details, RetryInfo};
    use crate::proto::google::protobuf::{self, Any};

    #[test]
    fn almost_valid_headers_break_no_rule() {
        let delay = protobuf::Duration { seconds: 7, nanos: 500_000_000 };
        let info = RetryInfo { retry_delay: Some(delay) };
        let value = info.encode_to_vec().into();
        let details = vec![Any { type_url: "type.googleapis.com/google.rpc.RetryInfo".to_owned(), value }];
        let details = Details { details, ..Details::default() }.encode_to_vec();
        let status =
            Status::with_details_and_metadata(Code::Unavailable, "busy", details.into(), MetadataMap::new());
        let headers = status.into_http::<()>().into_parts().0.headers;
        let mut sample = Vec::new();
        for (name, value) in &headers {
            sample.extend_from_slice(&[name.as_str().as_bytes(), b": ", value.as_bytes(), b"\n"].concat());
        }
        assert_eq!(
            requested_delay(&Status::from_header_map(&headers).unwrap()),
            Some(Duration::from_millis(7_500))
        );
        let plain = "content-type: application/grpc+proto\ngrpc-status: 16\ngrpc-message: not%20this%0atoken\n\
                     grpc-retry-pushback-ms: 18446744073709551615";
        seeded("grpc_status", Shape::Bytes, 4_000, &[sample, plain.as_bytes().to_vec()], super::status);
        assert!(!super::status(
            b"status: 503\ncontent-type: text/html\xff\nretry-after: 18446744073709551615"
        ));
    }
}
