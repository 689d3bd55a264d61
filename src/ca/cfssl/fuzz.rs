//! Fuzz target: the answers of cfssl.

use super::{Cfssl, HeaderMap, PORT, Reply, StatusCode};
use crate::base::fuzzing::check_line;
use crate::fs::disk::Disk;
use crate::net::address::Address;
use crate::net::endpoint::Endpoint;
use crate::net::tls::Roots;

/// The status less 200 in a byte, and the body of an answer. True if it holds certificates.
pub fn answer(bytes: &[u8]) -> bool {
    let [status, body @ ..] = bytes else { return false };
    let Ok(address) = Address::with_ports("http://127.0.0.1", PORT, PORT) else { return false };
    let cfssl = Cfssl {
        endpoint: Endpoint { address, roots: Roots::System, server_name: None },
        profile: None,
        label: None,
        auth_key: None,
        bundle: None,
        headers: HeaderMap::new(),
        disk: Disk::default(),
    };
    let reply = Reply {
        status: StatusCode::from_u16(200 + u16::from(*status)).unwrap_or_default(),
        headers: HeaderMap::new(),
        body: body.to_vec().into(),
        retry_after: None,
    };
    let mut is_complete = true;
    for path in ["info", "sign", "authsign"] {
        match cfssl.answered(path, &reply) {
            Ok(certificates) => assert!(!certificates.is_empty()),
            Err(error) => {
                let message = error.to_string();
                check_line(&message);
                assert!(message.len() < 4_000, "{} bytes", message.len());
                is_complete = false;
            }
        }
    }
    is_complete
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::base::fuzzing::{Shape, seeded};
    use crate::ca::fuzz::testing;

    #[test]
    fn almost_valid_answers_break_no_rule() {
        let [leaf, intermediate, _] = testing::issued_pem();
        let good = |text: &str| json!({ "success": true, "result": { "certificate": text }, "errors": [], "messages": [] });
        let sample = |status: u8, body: serde_json::Value| [&[status], body.to_string().as_bytes()].concat();
        let short = "-----BEGIN CERTIFICATE-----\nAQID\n-----END CERTIFICATE-----\n";
        let samples = [
            sample(0, good(&leaf)),
            sample(1, good(&format!("{leaf}{intermediate}"))),
            sample(0, good(short)),
        ];
        seeded("cfssl", Shape::Bytes, 3_000, &samples, answer);
        let said = "policy whitelist\u{1b}\n".repeat(100);
        for code in [json!(5100), json!(-1), json!("x"), json!(u64::MAX)] {
            let refusal = json!({ "success": false, "errors": [{ "code": code, "message": said }, 7, {}] });
            assert!(!answer(&sample(200, refusal)));
        }
    }
}
