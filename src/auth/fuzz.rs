//! Fuzz targets: tokens, and the answers of the services that issue them.

use std::time::{Duration, UNIX_EPOCH};

use http::{HeaderMap, StatusCode};

use super::exchange::{Exchange, GOOGLES_SCOPE, GOOGLES_URL};
use super::token::{Granted, parse_token};
use super::token_file::{Token, TokenFile};
use crate::base::fuzzing::check_line;
use crate::base::limits;
use crate::net::rest::Reply;
use crate::net::tls::Roots;

/// The text of a token file. True if it is a JWT.
pub fn token(bytes: &[u8]) -> bool {
    let token = match Token::parse(bytes.trim_ascii()) {
        Ok(token) => token,
        Err(error) => {
            check_line(error);
            return false;
        }
    };
    let secret = token.secret();
    assert_eq!(secret.as_bytes(), bytes.trim_ascii(), "another token");
    assert!(token.bearer_header().is_ok_and(|header| header.is_sensitive()), "a token that can't be sent");
    assert_eq!(format!("{token:?}"), "Token(hidden)");
    for now in [0, 1_700_000_000, 1 << 37] {
        let described = token.describe(UNIX_EPOCH + Duration::from_secs(now));
        check_line(&described);
        assert!(described.len() < 4_000, "{} bytes", described.len());
    }
    // A short token may be part of any message.
    if secret.len() >= 20 {
        // A server may quote it anywhere, also where a message is cut.
        for padding in [0, limits::FOREIGN_TEXT - 10] {
            let said = token.redact(&format!("{}{secret}", "\u{e9}".repeat(padding)));
            check_line(&said);
            assert!(!secret.starts_with(said.trim_start_matches('\u{e9}')), "a part of the token: {said}");
        }
    }
    let Some(claims) = token.claims() else { return false };
    if let Some(account) = token.service_account() {
        assert_eq!(claims.subject, format!("system:serviceaccount:{}:{}", account.namespace, account.name));
    }
    true
}

/// The status less 200 in a byte, and the body of an answer. True if it is a token.
pub fn token_answer(bytes: &[u8]) -> bool {
    const SECRET: &str = "eyJhbGciOiJub25lIn0.eyJzdWIiOiJ3ZWIifQ.c2lnbmF0dXJl";
    let [status, body @ ..] = bytes else { return false };
    let status = StatusCode::from_u16(200 + u16::from(*status)).unwrap_or_default();
    if status.is_success() {
        if let Err(reason) = parse_token(body) {
            check_line(&reason);
        }
        return match Granted::from_json(body, UNIX_EPOCH) {
            Ok(granted) => {
                assert!(format!("{granted:?}").contains("Token(hidden)"), "{granted:?}");
                true
            }
            Err(reason) => {
                check_line(&reason);
                false
            }
        };
    }
    let Ok(url) = GOOGLES_URL.parse() else { return false };
    let exchange = Exchange {
        url,
        roots: Roots::System,
        subject: TokenFile::new("/run/token"),
        audience: None,
        scope: Some(GOOGLES_SCOPE.to_owned()),
    };
    let reply = Reply { status, headers: HeaderMap::new(), body: body.to_vec().into(), retry_after: None };
    let failure = exchange.refused(&reply, &Token::new(SECRET), UNIX_EPOCH);
    check_line(&failure.reason);
    assert!(!failure.reason.contains(SECRET), "{}", failure.reason);
    assert!(failure.reason.len() < 4_000, "{} bytes", failure.reason.len());
    false
}

#[cfg(test)]
mod tests {
    use base64::Engine as _;
    use base64::engine::general_purpose::URL_SAFE_NO_PAD;
    use serde_json::json;

    use super::*;
    use crate::base::fuzzing::{Shape, seeded};

    fn jwt(payload: &str) -> String {
        format!(
            "{}.{}.c2lnbmF0dXJl",
            URL_SAFE_NO_PAD.encode("{\"alg\":\"none\"}"),
            URL_SAFE_NO_PAD.encode(payload)
        )
    }

    #[test]
    fn almost_valid_tokens_break_no_rule() {
        let payloads = [
            r#"{"sub":"system:serviceaccount:shop:cart","aud":["istio-ca","other"],"nbf":1e9,"exp":1700000000.5}"#,
            r#"{"sub":"\u0000\n","aud":"one","exp":253402300799}"#,
            r#"{"aud":[1,null],"exp":-1,"nbf":1e300}"#,
        ];
        let samples = payloads.map(|payload| format!("{}\n", jwt(payload)).into_bytes());
        seeded("token", Shape::Bytes, 6_000, &samples, token);
        assert!(!token(b"an-opaque-token-of-some-length") && !token(b"two words"));
        let long = json!({ "sub": "x".repeat(9_000), "aud": vec!["y"; 2_000] });
        assert!(token(jwt(&long.to_string()).as_bytes()));
    }

    #[test]
    fn almost_valid_answers_with_tokens_break_no_rule() {
        let sample = |status: u8, body: serde_json::Value| [&[status], body.to_string().as_bytes()].concat();
        let samples = [
            sample(0, json!({ "access_token": "ya29.opaque", "token_type": "Bearer", "expires_in": 3600 })),
            sample(1, json!({ "access_token": jwt("{\"exp\":1}"), "expires_in": "1e300" })),
        ];
        seeded("token_answer", Shape::Bytes, 6_000, &samples, token_answer);
        for error in ["invalid_grant", "invalid_target", "invalid_request", "\u{1b}\n"] {
            let said = "it is bad\n".repeat(500);
            assert!(!token_answer(&sample(200, json!({ "error": error, "error_description": said }))));
        }
    }
}
