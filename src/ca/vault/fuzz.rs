//! Fuzz target: the answers of Vault, and its refusals.

use std::time::{Duration, UNIX_EPOCH};

use super::access::{Need, Session};
use super::{
    Clock, IssuedChain, StatusCode, Token, TokenFile, Value, VaultRequest, refusal, sorted, text, texts,
};
use crate::auth::token::TokenSource;
use crate::base::fuzzing::check_line;
use crate::ca::fuzz::{check_invalid, check_refusal};
use crate::fs::disk::Disk;

const SECRET: &str = "hvs.CAESIJlWh3gQ-a-token-of-the-workload";

/// The status less 200 in a byte, and the body of an answer. True if it is a chain or a login.
pub fn answer(bytes: &[u8]) -> bool {
    let [status, body @ ..] = bytes else { return false };
    let status = StatusCode::from_u16(200 + u16::from(*status)).unwrap_or_default();
    if !status.is_success() {
        refused(status, body);
        return false;
    }
    let Ok(mut reply) = serde_json::from_slice::<Value>(body) else { return false };
    check_line(&text::sanitize_for_log(&texts(reply.get("warnings")).join("; ")));
    let is_chain = match sorted(reply.pointer_mut("/data").map(Value::take).unwrap_or_default()) {
        Ok(IssuedChain { chain, roots }) => {
            assert!((1..=IssuedChain::LONGEST).contains(&(chain.len() + roots.len())));
            true
        }
        Err(error) => {
            check_invalid(error);
            false
        }
    };
    let token = reply.pointer_mut("/auth/client_token");
    if let Some(token) = token.filter(|token| token.as_str().is_some_and(|text| !text.is_empty())) {
        *token = SECRET.into();
    }
    match Session::new(reply, UNIX_EPOCH) {
        Ok(session) => {
            assert!(!format!("{session:?}").contains(SECRET), "{session:?}");
            // Once a session is over, it stays so.
            let steps = [0, 1, 3600, 1 << 40].map(|at| session.need(UNIX_EPOCH + Duration::from_secs(at)));
            assert!(steps.windows(2).all(|two| two != [Need::Login, Need::Nothing]), "{steps:?}");
            true
        }
        Err(error) => {
            check_line(&error.to_string());
            is_chain
        }
    }
}

fn refused(status: StatusCode, body: &[u8]) {
    let file = TokenFile::new("/run/token");
    let jwt = TokenSource::new(file.clone().into(), Clock::system(), Disk::default());
    let requests = [
        VaultRequest::Sign { path: "pki/sign/web", token: None },
        VaultRequest::Sign { path: "pki/sign/web", token: Some(&file) },
        VaultRequest::Login { path: "auth/kubernetes/login", role: "web", jwt: &jwt },
        VaultRequest::Renewal,
    ];
    for request in requests {
        let message = refusal::explain(status, body, &request, &Token::new(SECRET));
        check_refusal(&message, SECRET);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::base::fuzzing::{Shape, seeded};
    use crate::ca::fuzz::testing;

    #[test]
    fn almost_valid_answers_break_no_rule() {
        let sample = |status: u8, body: Value| [&[status], body.to_string().as_bytes()].concat();
        let [leaf, intermediate, root] = testing::issued_pem();
        let data =
            json!({ "certificate": leaf, "issuing_ca": intermediate, "ca_chain": [intermediate, root] });
        let auth = json!({ "client_token": SECRET, "lease_duration": 3600, "renewable": true });
        let samples = [
            sample(0, json!({ "data": data, "warnings": ["TTL is capped\n", 7] })),
            sample(0, json!({ "auth": auth })),
            sample(4, json!({ "data": null, "auth": { "client_token": "x", "lease_duration": u64::MAX } })),
        ];
        seeded("vault", Shape::Bytes, 3_000, &samples, answer);
        for status in [100, 107, 200, 203, 212, 255] {
            let said = format!("permission denied for {SECRET}\u{1b}\n").repeat(50);
            assert!(!answer(&sample(status, json!({ "errors": [said, 7, null] }))));
            assert!(!answer(&[&[status], said.as_bytes()].concat()));
        }
    }
}
