use std::time::{Duration, UNIX_EPOCH};

use super::testing::Authority;
use super::*;

const FROM: SystemTime = UNIX_EPOCH;

fn until() -> SystemTime {
    FROM + Duration::from_secs(3600)
}

#[test]
fn several_crls_are_read_from_one_file_with_comments_and_crlf() {
    let (one, two) = (Authority::root("one"), Authority::root("two"));
    let text = format!("# both\n{}text\n{}", one.crl(FROM, until(), &[7, 8]), two.old_crl(FROM, until()));
    let crls = from_pem(text.replace('\n', "\r\n").as_bytes()).unwrap();
    let [first, second] = crls.as_slice() else { panic!("{crls:?}") };
    assert!(first.issuer.contains("one") && second.issuer.contains("two"));
    assert_eq!((first.revoked, second.revoked), (2, 0));
    assert_eq!((first.this_update, first.next_update), (FROM, Some(until())));
    assert_eq!(second.next_update, Some(until()));
    assert_eq!(from_pem(&to_pem(&crls)).unwrap(), crls, "written and read back");
}

#[test]
fn a_crl_matches_its_issuer_by_key_id_and_signature() {
    let (one, namesake) = (Authority::root("one"), Authority::root("one"));
    let facts = |ca: &Authority| Certificate::parse(&ca.certificate).unwrap();
    let crl = &from_pem(one.crl(FROM, until(), &[]).as_bytes()).unwrap()[0];
    let old = &from_pem(one.old_crl(FROM, until()).as_bytes()).unwrap()[0];
    for (ca, is_issuer) in [(facts(&one), true), (facts(&namesake), false)] {
        assert_eq!((crl.may_be_of(&ca), old.may_be_of(&ca)), (is_issuer, true), "version 1 names no key");
        assert_eq!((crl.is_signed_by(&ca), old.is_signed_by(&ca)), (is_issuer, is_issuer));
    }
}

#[test]
fn the_error_says_why_a_text_has_no_crls() {
    let good = Authority::root("one").crl(FROM, until(), &[]);
    let der = from_pem(good.as_bytes()).unwrap()[0].der().to_vec();
    assert_eq!(from_pem(b""), Err(NotCrls::NoCrl));
    assert_eq!(from_pem(&der), Err(NotCrls::Der));
    assert!(matches!(from_pem(&good.as_bytes()[..good.len() / 2]), Err(NotCrls::Damaged(_))));
    assert_eq!(from_pem(good.repeat(limits::CRLS + 1).as_bytes()), Err(NotCrls::TooMany));
    let trailing = pem::encode("X509 CRL", &[der.as_slice(), &[0]].concat());
    let error = from_pem(&[good.as_bytes(), &trailing].concat()).unwrap_err().to_string();
    assert_eq!(error, "CRL 2 in it can't be used: 1 trailing bytes");
}

#[test]
fn only_comments_and_spaces_are_an_empty_list() {
    for (text, is_blank) in [("", true), ("\n \t\r\n", true), ("# none\n\n  # yet", true), ("none", false)] {
        assert_eq!(super::is_blank(text.as_bytes()), is_blank, "{text:?}");
    }
}

#[test]
fn a_partial_crl_is_refused() {
    let ca = Authority::root("one");
    let part = rcgen::CertificateRevocationListParams {
        this_update: FROM.into(),
        next_update: until().into(),
        crl_number: 1.into(),
        issuing_distribution_point: Some(rcgen::CrlIssuingDistributionPoint {
            distribution_point: rcgen::CrlDistributionPoint { uris: vec!["http://ca/crl".to_owned()] },
            scope: None,
        }),
        revoked_certs: Vec::new(),
        key_identifier_method: rcgen::KeyIdMethod::Sha256,
    };
    let part = part.signed_by(&ca.issuer()).unwrap();
    let error = from_pem(&pem::encode("X509 CRL", part.der())).unwrap_err();
    assert!(error.to_string().contains("not complete"), "{error}");
}
