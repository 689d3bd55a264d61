//! Fuzz target: the objects of the certificates API, and its refusals.

use super::{
    BUNDLES, Clock, Endpoint, KeyType, Kubernetes, Progress, REQUESTS, SignerName, SignerRoots, StatusCode,
    TokenFile, Value, bundles, pem, progress,
};
use crate::auth::token_file::Token;
use crate::base::fuzzing::check_line;
use crate::ca::fuzz::{check_invalid, check_refusal};
use crate::fs::disk::Disk;
use crate::kube;
use crate::net::address::Address;
use crate::net::tls::Roots;

const NAME: &str = "attache-1";
const SIGNER: &str = "example.com/spiffe";
const SECRET: &str = "eyJhbGciOiJub25lIn0.eyJzdWIiOiJ3ZWIifQ.c2lnbmF0dXJl";

/// The status less 200 in a byte, and the body of an answer. True if it is the request's object with its certificate, or a
/// list with the signer's bundles.
pub fn answer(bytes: &[u8]) -> bool {
    let [status, body @ ..] = bytes else { return false };
    let status = StatusCode::from_u16(200 + u16::from(*status)).unwrap_or_default();
    if !status.is_success() {
        refusal(status, body);
        return false;
    }
    let Ok(object) = serde_json::from_slice::<Value>(body) else { return false };
    let texts = bundles(&object, SIGNER);
    let roots = pem::certificates(texts.join("\n").as_bytes());
    let is_signed = match progress(&object, NAME) {
        Ok(Progress::Signed(chain)) => pem::certificates(&chain).is_ok(),
        Ok(Progress::Rejected(reason)) => {
            check_line(&reason);
            assert!(reason.len() < 2_000, "{} bytes", reason.len());
            false
        }
        Ok(Progress::Waits(_)) => false,
        Err(error) => {
            check_invalid(error);
            false
        }
    };
    is_signed || roots.is_ok()
}

fn refusal(status: StatusCode, body: &[u8]) {
    let Ok(address) = Address::with_ports("http://127.0.0.1", 443, 80) else { return };
    let kubernetes = Kubernetes {
        endpoint: Endpoint { address, roots: Roots::System, server_name: None },
        token: TokenFile::new("/run/token"),
        signer: SignerName(SIGNER.to_owned()),
        roots: SignerRoots::Cluster,
        key_type: KeyType::default(),
        clock: Clock::system(),
        requests: Default::default(),
        disk: Disk::default(),
    };
    for resource in [&REQUESTS, &BUNDLES] {
        let error = kube::fuzz::refusal(kubernetes.endpoint.clone(), status, body, Token::new(SECRET));
        check_refusal(&kubernetes.failed(resource, error).to_string(), SECRET);
    }
}

#[cfg(test)]
mod tests {
    use base64::Engine as _;
    use base64::engine::general_purpose::STANDARD;
    use serde_json::json;

    use super::*;
    use crate::base::fuzzing::{Shape, seeded};
    use crate::ca::fuzz::testing;

    #[test]
    fn almost_valid_answers_break_no_rule() {
        let sample = |status: u8, body: Value| [&[status], body.to_string().as_bytes()].concat();
        let [leaf, intermediate, root] = testing::issued_pem();
        let signed = |pem: &str| {
            let approved = json!({ "type": "Approved", "status": "True", "reason": "By", "message": "hand" });
            let status = json!({ "conditions": [approved], "certificate": STANDARD.encode(pem) });
            json!({ "kind": "CertificateSigningRequest", "metadata": { "name": NAME }, "status": status })
        };
        let bundle = json!({ "spec": { "signerName": SIGNER, "trustBundle": root } });
        let samples = [
            sample(0, signed(&format!("{leaf}{intermediate}"))),
            sample(1, signed("-----BEGIN CERTIFICATE-----\nAQID\n-----END CERTIFICATE-----\n")),
            sample(0, json!({ "items": [bundle, { "spec": { "signerName": "example.com/other" } }] })),
        ];
        seeded("kubernetes", Shape::Bytes, 3_000, &samples, answer);
        let denied = json!({ "type": "Denied", "reason": "no\n".repeat(1_000), "message": "\u{1b}" });
        let denied = json!({ "metadata": { "name": NAME }, "status": { "conditions": [7, denied] } });
        assert!(!answer(&sample(0, denied)));
        for status in [201, 203, 204] {
            let said = format!("bad token {SECRET}, it cannot create\n").repeat(50);
            assert!(!answer(&sample(status, json!({ "kind": "Status", "message": said }))));
            assert!(!answer(&[&[status], said.as_bytes()].concat()));
        }
    }
}
