use super::*;

fn object(status: Value) -> Value {
    json!({ "kind": "CertificateSigningRequest", "metadata": { "name": "attache-1" }, "status": status })
}

fn condition(kind: &str, status: &str) -> Value {
    json!({ "type": kind, "status": status, "reason": "Because", "message": "of\nthis" })
}

#[test]
fn the_status_of_a_request_is_read() {
    use Progress::{Rejected, Signed, Waits};
    let pem = STANDARD.encode("pem");
    let approved = condition("Approved", "True");
    let cases = [
        (json!({}), Waits(Stage::Approval)),
        (json!({ "conditions": [] }), Waits(Stage::Approval)),
        (json!({ "conditions": [condition("Approved", "False")] }), Waits(Stage::Approval)),
        (json!({ "conditions": [condition("Other", "True")] }), Waits(Stage::Approval)),
        (json!({ "conditions": [approved] }), Waits(Stage::Signature)),
        (json!({ "conditions": [approved], "certificate": "" }), Waits(Stage::Signature)),
        (json!({ "conditions": [{ "type": "Approved" }], "certificate": pem }), Signed(b"pem".to_vec())),
        // A certificate without an approval is ignored.
        (json!({ "certificate": pem }), Waits(Stage::Approval)),
        (
            json!({ "conditions": [condition("Denied", "True")] }),
            Rejected("it was denied (Because: of\u{fffd}this)".to_owned()),
        ),
        (
            json!({ "conditions": [approved, condition("Failed", "True")], "certificate": pem }),
            Rejected("the signer failed (Because: of\u{fffd}this)".to_owned()),
        ),
    ];
    for (status, expected) in cases {
        let object = object(status);
        assert_eq!(progress(&object, "attache-1").unwrap(), expected, "{object}");
    }
    let waits = Waits(Stage::Approval);
    assert_eq!(progress(&json!({ "metadata": { "name": "attache-1" } }), "attache-1").unwrap(), waits);
}

#[test]
fn another_object_is_not_read_as_the_request() {
    let junk = object(json!({ "conditions": [{ "type": "Approved" }], "certificate": "not base64" }));
    let odd =
        [json!(null), json!([]), json!({}), json!("text"), json!({ "metadata": 1 }), object(json!({})), junk];
    for (index, object) in odd.iter().enumerate() {
        let name = if index < 6 { "attache-2" } else { "attache-1" };
        assert!(matches!(progress(object, name), Err(InvalidResponse::Unreadable(_))), "{object}");
    }
}

#[test]
fn names_of_signers() {
    for good in
        ["example.com/spiffe", "clusterissuers.cert-manager.io/mesh-ca", "issuers.cert-manager.io/ns.ca"]
    {
        assert_eq!(good.parse(), Ok(SignerName(good.to_owned())));
    }
    for bad in ["", "/", "example.com", "example.com/", "/spiffe", "a/b/c", "a b/c", "a/b?x=1", "a/b%2F"] {
        assert!(bad.parse::<SignerName>().unwrap_err().contains("example.com/name"), "{bad}");
    }
}

#[test]
fn the_name_of_a_request_is_derived_from_the_csr_and_valid() {
    let name = name_of(b"one");
    assert_eq!(name, name_of(b"one"));
    assert_ne!(name, name_of(b"two"));
    assert!(
        name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-') && name.len() < 63
    );
}

#[test]
fn only_the_signers_own_bundles_are_its_roots() {
    let item = |signer: Value, text: &str| json!({ "spec": { "signerName": signer, "trustBundle": text } });
    let list = json!({ "items": [
        item(json!("example.com/spiffe"), "one"),
        item(json!("example.com/other"), "two"),
        item(json!(null), "three"),
        item(json!("example.com/spiffe"), "four"),
        { "spec": { "trustBundle": "five" } },
        7,
    ] });
    assert_eq!(bundles(&list, "example.com/spiffe"), ["one", "four"]);
    for odd in [json!({}), json!({ "items": null }), json!([]), json!({ "items": {} })] {
        assert!(bundles(&odd, "example.com/spiffe").is_empty(), "{odd}");
    }
}
