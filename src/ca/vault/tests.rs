use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa};
use rustls::pki_types::CertificateDer;

use super::*;
use crate::pki::key::{KeyType, SigningKey};

fn params(name: &str, is_ca: bool) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name.push(rcgen::DnType::CommonName, name);
    if is_ca {
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    }
    params
}

/// PEM like Vault's: without a newline at the end.
fn text(der: &CertificateDer<'static>) -> String {
    String::from_utf8(pem::of_certificates([der])).unwrap().trim_end().to_owned()
}

#[test]
fn the_chain_and_its_root_are_found_in_every_form_of_answer() {
    let key = || SigningKey::generate(KeyType::EcdsaP256).unwrap();
    let root = CertifiedIssuer::self_signed(params("root", true), key()).unwrap();
    let middle = CertifiedIssuer::signed_by(params("middle", true), key(), &root).unwrap();
    let under = |issuer: &CertifiedIssuer<'_, SigningKey>| {
        params("leaf", false).signed_by(&key(), issuer).unwrap().der().clone()
    };
    let (of_root, of_middle) = (under(&root), under(&middle));
    let [root, middle] = [&root, &middle].map(|issuer| issuer.as_ref().der().clone());
    let sorted = |leaf, issuer, chain: &[&CertificateDer<'static>]| {
        let chain: Vec<_> = chain.iter().map(|der| text(der)).collect();
        let mut data = json!({ "certificate": text(leaf), "issuing_ca": text(issuer), "expiration": 1 });
        if !chain.is_empty() {
            data["ca_chain"] = chain.into();
        }
        let IssuedChain { mut chain, mut roots } = sorted(data).unwrap();
        chain.dedup();
        roots.dedup();
        (chain, roots)
    };
    // An engine whose certificate is a root, with two versions of Vault.
    assert_eq!(sorted(&of_root, &root, &[]), (vec![of_root.clone()], vec![root.clone()]));
    assert_eq!(sorted(&of_root, &root, &[&root]), (vec![of_root.clone()], vec![root.clone()]));
    // An intermediate with its root, and without.
    let chain = vec![of_middle.clone(), middle.clone()];
    assert_eq!(sorted(&of_middle, &middle, &[&middle, &root]), (chain.clone(), vec![root.clone()]));
    assert_eq!(sorted(&of_middle, &middle, &[&middle]), (chain, vec![]));
}

#[test]
fn an_odd_answer_is_refused() {
    let many = vec!["-----BEGIN CERTIFICATE-----\nAQID\n-----END CERTIFICATE-----"; 65];
    let cases = [
        (json!(null), "data.certificate"),
        (json!([1]), "data.certificate"),
        (json!({ "certificate": 7 }), "data.certificate"),
        (json!({ "certificate": "<html>" }), "no PEM certificate"),
        (json!({ "certificate": many[0], "ca_chain": many }), "more than 64"),
        (json!({ "certificate": many[0] }), "not an X.509 certificate"),
    ];
    for (data, words) in cases {
        let error = sorted(data.clone()).unwrap_err().to_string();
        assert!(error.contains(words), "{data}: {error}");
    }
}

#[test]
fn paths_and_roles_that_vault_accepts() {
    let cases = [
        ("pki", Some("pki")),
        ("/teams/blue/pki/", Some("teams/blue/pki")),
        ("pki_int-2.x", Some("pki_int-2.x")),
        ("", None),
        ("/", None),
        ("a//b", None),
        ("..", None),
        ("a/./b", None),
        ("a?b", None),
        ("a b", None),
        ("a%2fb", None),
    ];
    for (text, expected) in cases {
        let parsed = text.parse::<MountPath>().map(|path| path.to_string()).ok();
        assert_eq!(parsed.as_deref(), expected, "{text:?}");
        assert!(!text.contains('/') || text.parse::<RoleName>().is_err(), "{text:?}");
    }
    assert_eq!("web.v2".parse::<RoleName>().unwrap().to_string(), "web.v2");
}
