//! Fuzz targets: addresses, and answers over HTTP/1.1.

use http::uri::Authority;
use http::{HeaderValue, Request, Uri};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::address::Address;
use super::error::status_class;
use super::rest::{Reply, exchange};
use super::tls::Alert;
use crate::base::fuzzing::check_line;
use crate::base::limits;

/// An address. True if it is one, which can then be called.
pub fn address(bytes: &[u8]) -> bool {
    let text = String::from_utf8_lossy(bytes);
    if let Ok(address) = Address::with_required_port(&text) {
        assert!(address.port() != 0 && !address.plaintext, "{text:?}");
        assert_eq!(Address::with_ports(&address.origin(), 1, 2).as_ref(), Ok(&address));
        assert_eq!(Address::with_required_port(&address.authority()).as_ref(), Ok(&address), "{text:?}");
    }
    let address = match Address::with_ports(&text, 443, 80) {
        Ok(address) => address,
        Err(error) => {
            check_line(&error);
            return false;
        }
    };
    check_line(&address.to_string());
    assert_eq!(address.origin().parse().as_ref(), Ok(&address), "{text:?}");
    assert!(!address.host().is_empty() && !address.host().contains(['[', ']', '@', '/']), "{address:?}");
    assert!(address.authority().parse::<Authority>().is_ok(), "{address:?}");
    assert!(address.origin().parse::<Uri>().is_ok(), "{address:?}");
    assert!(HeaderValue::from_str(&address.authority()).is_ok(), "{address:?}");
    true
}

/// The bytes with which a server answers a call. True if they are an answer.
pub fn http1_reply(bytes: &[u8]) -> bool {
    let Ok(runtime) = tokio::runtime::Builder::new_current_thread().build() else { return false };
    let (ours, mut theirs) = tokio::io::duplex(64 << 10);
    let server = async move {
        let mut request = [0; 1024];
        let _ = theirs.read(&mut request).await;
        let _ = theirs.write_all(bytes).await;
        let _ = theirs.shutdown().await;
        // The client closes the connection.
        while theirs.read(&mut request).await.is_ok_and(|length| length > 0) {}
    };
    let (request, alert) = (Request::default(), Alert::default());
    let call = async { tokio::join!(exchange(ours, request, &alert), server).0 };
    match runtime.block_on(call) {
        Ok(Reply { status, body, .. }) => {
            assert!(body.len() <= limits::ANSWER_BYTES, "{} bytes", body.len());
            let _ = status_class(status);
            true
        }
        Err(error) => {
            check_line(&error.to_string());
            false
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::fuzzing::{Shape, seeded};

    #[test]
    fn almost_valid_addresses_break_no_rule() {
        let samples = [
            "istiod.istio-system.svc:15012",
            "https://ca.example/",
            "http://127.0.0.1",
            "https://[::1]:15012",
            "[fe80::1%25eth0]:1",
            "a_b-c.:65535",
        ];
        let samples = samples.map(|text| text.as_bytes().to_vec());
        seeded("address", Shape::Bytes, 8_000, &samples, address);
        assert!(!address(b"1[fe80zsystem0zsystem.svh0]:1"));
    }

    #[test]
    fn almost_valid_answers_break_no_rule() {
        let samples = [
            &b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 4\r\n\r\nnull"[..],
            b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 18446744073709551615\r\n\r\nbusy\n",
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\nnull\r\n0\r\na: b\r\n\r\n",
            b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.0 404 \r\n\r\n",
        ];
        let samples = samples.map(<[u8]>::to_vec);
        seeded("http1_reply", Shape::Bytes, 3_000, &samples, http1_reply);
        let long = [&b"HTTP/1.1 200 OK\r\n\r\n"[..], &vec![b'x'; limits::ANSWER_BYTES + 1]].concat();
        assert!(!http1_reply(&long), "the body is bounded");
        assert!(http1_reply(long.split_last().unwrap().1));
    }
}
