//! Requests, and the meaning of refusals. `tests/agent/ca_cfssl.rs` uses servers.

use std::path::Path;
use std::time::Duration;

use super::*;
use crate::net::address::Address;
use crate::net::tls::Roots;

fn cfssl(auth_key: Option<PathBuf>) -> Cfssl {
    let address = Address::with_ports("http://127.0.0.1", PORT, PORT).unwrap();
    Cfssl {
        endpoint: Endpoint { address, roots: Roots::System, server_name: None },
        profile: Some("mesh".to_owned()),
        label: None,
        auth_key,
        bundle: None,
        headers: HeaderMap::new(),
        disk: Disk::default(),
    }
}

fn request(identity: Option<&str>) -> SigningRequest {
    let identity = identity.map(|identity| identity.parse().unwrap());
    SigningRequest {
        csr: vec![1, 2, 3],
        identity,
        names: csr::Names::default(),
        ttl: Duration::from_secs(60),
    }
}

fn key_file(directory: &Path, content: &str) -> PathBuf {
    let path = directory.join("key");
    std::fs::write(&path, content).unwrap();
    path
}

#[tokio::test]
async fn a_request_names_the_identity_and_never_an_empty_list() {
    let (path, body) = cfssl(None).request(&request(Some("spiffe://td/web"))).await.unwrap();
    let expected = json!({
        "label": "",
        "profile": "mesh",
        "certificate_request": csr::to_pem(&[1, 2, 3]),
        "hosts": ["spiffe://td/web"],
    });
    assert_eq!((path, Value::Object(body)), ("sign", expected));
    let dns = vec!["web.example".parse().unwrap(), "db.example".parse().unwrap()];
    let with_names =
        SigningRequest { names: csr::Names { dns, common_name: None }, ..request(Some("spiffe://td/web")) };
    let (_, body) = cfssl(None).request(&with_names).await.unwrap();
    assert_eq!(body["hosts"], json!(["spiffe://td/web", "web.example", "db.example"]));
    let (_, body) = cfssl(None).request(&request(None)).await.unwrap();
    assert!(!body.contains_key("hosts"), "{body:?}");
}

#[tokio::test]
async fn with_a_key_the_request_is_authenticated() {
    let directory = tempfile::tempdir().unwrap();
    let path = key_file(directory.path(), "0b0b0b0b0b0b0B0B0b0b0b0b0b0b0b0b0b0b0b0b\n");
    // RFC 4231, test case 1.
    let key = hmac::Key::new(hmac::HMAC_SHA256, &read_key(&path, &Disk::default()).await.unwrap());
    let token = STANDARD.encode(hmac::sign(&key, b"Hi There"));
    assert_eq!(token, "sDRMYdjbOFNcqK/OrwvxK4gdwgDJgz2nJuk3bC4yz/c=");
    let (path, body) = cfssl(Some(path)).request(&request(Some("spiffe://td/web"))).await.unwrap();
    assert_eq!((path, body.len()), ("authsign", 2));
    let bytes = |name: &str| STANDARD.decode(body[name].as_str().unwrap()).unwrap();
    assert_eq!(bytes("token"), hmac::sign(&key, &bytes("request")).as_ref());
    let inner: Value = serde_json::from_slice(&bytes("request")).unwrap();
    assert_eq!(inner["hosts"], json!(["spiffe://td/web"]));
}

#[tokio::test]
async fn a_bad_key_file_is_named_without_its_content() {
    let disk = Disk::default();
    let directory = tempfile::tempdir().unwrap();
    for (content, words) in
        [("", "empty"), (" \n", "empty"), ("abc", "even number"), ("s3cret", "hexadecimal")]
    {
        let error = read_key(&key_file(directory.path(), content), &disk).await.unwrap_err().to_string();
        assert!(error.contains(words) && error.contains("--cfssl-auth-key-file"), "{error}");
        assert!(!error.contains("s3cret"), "{error}");
    }
    let error = read_key(Path::new("/nowhere"), &disk).await.unwrap_err();
    assert!(error.to_string().contains("/nowhere") && error.class() == Class::Transient, "{error}");
}

#[test]
fn a_refusal_has_cfssls_message_a_remedy_and_a_class() {
    let cases = [
        (400, 400, "authentication required", Class::Permanent, "--cfssl-auth-key-file"),
        (400, 400, "invalid token", Class::Permanent, "is not the auth_key"),
        (400, 400, "no authentication provider", Class::Permanent, "drop --cfssl-auth-key-file"),
        (400, 5500, "Request does not match policy whitelist", Class::Permanent, "name_whitelist"),
        (400, 9300, "x509: cannot verify signature: algorithm unimplemented", Class::Permanent, "--key-type"),
        (400, 9002, "CSR Decode failed", Class::Permanent, "(code 9002)"),
        (400, 7500, "Server request failed", Class::Transient, "(code 7500)"),
        (400, 11000, "no data base", Class::Transient, "(code 11000)"),
        (500, 0, "whatever", Class::Transient, "500 Internal Server Error"),
    ];
    for (status, code, message, class, words) in cases {
        let envelope =
            json!({"success": false, "result": null, "errors": [{"code": code, "message": message}]});
        let error = cfssl(None).refused(StatusCode::from_u16(status).unwrap(), &envelope);
        let text = error.to_string();
        assert_eq!(error.class(), class, "{text}");
        assert!(text.contains(message) && text.contains(words), "{text}");
    }
    let odd = json!({"success": false, "errors": "none"});
    let error = cfssl(None).refused(StatusCode::BAD_REQUEST, &odd).to_string();
    assert!(error.ends_with("it gave no reason; see its log"), "{error}");
    let long = json!({"success": false, "errors": [{"code": 1, "message": "x\n".repeat(10_000)}]});
    let error = cfssl(None).refused(StatusCode::BAD_REQUEST, &long).to_string();
    assert!(error.len() < 1000 && !error.contains('\n'), "{error}");
}
