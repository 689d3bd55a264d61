use serde_json::json;

use super::*;
use crate::net::error::{RootsError, TlsError};

const NOW: SystemTime = SystemTime::UNIX_EPOCH;

fn granted(answer: &Value) -> Result<Granted, String> {
    Granted::from_json(answer.to_string().as_bytes(), NOW)
}

#[test]
fn a_token_is_used_until_the_last_quarter_of_its_lifetime() {
    let answer =
        |expires_in: Value| json!({ "access_token": "a", "token_type": "Bearer", "expires_in": expires_in });
    let cases = [
        (json!(3600), 0, true),
        (json!(3600), 2699, true),
        (json!(3600), 2700, false),
        (json!(3600), 9999, false),
        (json!("3600"), 2699, true),
        (json!("3600"), 2700, false),
        (json!(3599.5), 2600, true),
        // Longer lifetimes are cut.
        (json!(1e300), 0, false),
        (json!(1u64 << 40), 64_799, true),
        (json!(1u64 << 40), 64_800, false),
        (json!(0), 0, false),
        (json!(-1), 0, false),
        (json!(null), 0, false),
    ];
    for (expires_in, at, expected) in cases {
        let granted = granted(&answer(expires_in.clone())).unwrap();
        assert_eq!(granted.is_fresh(NOW + Duration::from_secs(at)), expected, "{expires_in} at {at} s");
    }
    // Without expires_in, the expiry of a JWT counts.
    let jwt = "e30.eyJleHAiOjM2MDB9.c2ln";
    let granted = granted(&json!({ "access_token": jwt })).unwrap();
    assert!(
        granted.is_fresh(NOW + Duration::from_secs(2699))
            && !granted.is_fresh(NOW + Duration::from_secs(2700))
    );
}

#[test]
fn an_answer_without_a_bearer_token_is_refused_and_never_shown() {
    let cases = [
        (json!([]), "no access_token"),
        (json!({ "access_token": 7 }), "no access_token"),
        (json!({ "access_token": "" }), "holds no token"),
        (json!({ "access_token": "s3cr3t\nX-Header: 1" }), "one line of printable ASCII"),
        (json!({ "access_token": "s3cr3t", "token_type": "DPoP" }), "\"DPoP\""),
        (json!({ "access_token": "s3cr3t".repeat(20_000) }), "longer than 65536 bytes"),
    ];
    for (answer, words) in cases {
        let error = granted(&answer).unwrap_err();
        assert!(error.contains(words) && !error.contains("s3cr3t"), "{error}");
    }
    assert!(Granted::from_json(b"<html>", NOW).unwrap_err().contains("not JSON"));
    let good =
        granted(&json!({ "access_token": "s3cr3t", "token_type": "bearer", "expires_in": 9 })).unwrap();
    assert!(!format!("{good:?}").contains("s3cr3t"));
}

#[test]
fn a_failed_call_names_the_service_and_its_options() {
    const OPTIONS: &ConnectionOptions = &ConnectionOptions {
        address: "--other-url",
        roots: "--other-root",
        server_name: "use its name in --other-url",
        client_cert: "it needs none",
    };
    let refused = || std::io::Error::other("Connection refused");
    let cases: [(TransportError, &str, Class); 6] = [
        (
            TransportError::Unreachable(refused()),
            "connecting failed: Connection refused; is it on?",
            Class::Transient,
        ),
        (
            TransportError::Broken(refused()),
            "the connection broke before it had answered: Connection refused",
            Class::Transient,
        ),
        (
            TransportError::Handshake(refused()),
            "Connection refused in the TLS handshake; is this a TLS port? Plaintext needs http:// in --other-url",
            Class::Transient,
        ),
        (
            TlsError::UnknownIssuer { roots: "/root".to_owned() }.into(),
            "the TLS handshake failed: its certificate is not signed by /root; set --other-root to its root",
            Class::Permanent,
        ),
        (
            RootsError::NoSystemRoots.into(),
            "name the server's root with --other-root FILE, or --other-root system",
            Class::Permanent,
        ),
        (TransportError::TooLong { limit: 7 }, "it is longer than 7 bytes", Class::Permanent),
    ];
    for (error, words, class) in cases {
        let failure = Failure::of_call(&error, OPTIONS, "is it on?");
        assert!(failure.reason.ends_with(words), "{failure:?}");
        assert_eq!(failure.class, class, "{failure:?}");
    }
}
