//! Fuzz targets: certificates, keys and OCSP responses.

use rustls::pki_types::CertificateDer;

use super::certificate::Certificate;
use super::key::{KeyFormat, PrivateKey};
use super::ocsp::Staple;
use super::pem;
use crate::base::clock::rfc3339;
use crate::base::fuzzing::{check_hidden, check_line};
use crate::base::limits;

/// A certificate, DER: what is shown of it is safe for a log. True if it is one.
pub fn certificate(bytes: &[u8]) -> bool {
    let der = CertificateDer::from(bytes.to_vec());
    let facts = match Certificate::parse(&der) {
        Ok(facts) => facts,
        Err(error) => {
            check_line(&error.to_string());
            return false;
        }
    };
    let names = facts.names();
    let shown = [&facts.subject, &facts.issuer, &facts.serial, &facts.key_type, &names];
    shown.into_iter().chain(&facts.uris).chain(&facts.dns_names).for_each(|line| check_line(line));
    for moment in [facts.not_before, facts.not_after] {
        check_line(&rfc3339(moment).to_string());
    }
    if let Some(id) = facts.spiffe_id() {
        assert_eq!(facts.uris, [id.as_str()], "a SPIFFE ID has no name beside it");
    }
    assert!(facts.public_key.len() < bytes.len(), "the key is longer than its certificate");
    assert_eq!(pem::certificates(&pem::of_certificates([&der])), Ok(vec![der]));
    true
}

/// Certificates, PEM: what is read is read again once it is written. True if there are some.
pub fn certificates(text: &[u8]) -> bool {
    let readable = pem::readable_certificates(text);
    match pem::certificates(text) {
        Ok(all) => {
            assert!((1..=limits::CERTIFICATES).contains(&all.len()), "{}", all.len());
            assert_eq!(readable.as_ref(), Ok(&all), "the lenient reader reads something else");
            assert_eq!(pem::certificates(&pem::of_certificates(&all)), Ok(all));
            true
        }
        Err(error) => {
            check_line(&error.to_string());
            assert!(readable.is_err() || matches!(error, pem::NotPem::Damaged(_) | pem::NotPem::TooMany));
            false
        }
    }
}

/// A private key: a letter for the format, and DER or a text. True if it is one, which then stays the same in each format.
pub fn private_key(bytes: &[u8]) -> bool {
    let Some((format, content)) = bytes.split_first() else { return false };
    let text = match format {
        b'8' => pem::encode("PRIVATE KEY", content).to_vec(),
        b'1' => pem::encode("RSA PRIVATE KEY", content).to_vec(),
        b'E' => pem::encode("EC PRIVATE KEY", content).to_vec(),
        _ => content.to_vec(),
    };
    let key = match PrivateKey::from_pem(&text) {
        Ok(key) => key,
        Err(error) => {
            check_line(&error.to_string());
            return false;
        }
    };
    check_hidden(&format!("{key:?}"), &text);
    let public_key = match key.public_key() {
        Ok(public_key) => public_key,
        Err(error) => {
            check_line(&error.to_string());
            return false;
        }
    };
    for format in [KeyFormat::Pkcs8, KeyFormat::Traditional] {
        let Ok(again) = PrivateKey::from_pem(&key.to_pem()) else { unreachable!("it can't be read again") };
        assert_eq!(again.der(), key.der());
        if let Ok(written) = again.in_format(format) {
            assert_eq!(written.public_key(), Ok(public_key.clone()), "another key in {format:?}");
        }
    }
    true
}

/// An OCSP response, DER: there is one reading of it. True if it could be stapled.
pub fn ocsp_staple(bytes: &[u8]) -> bool {
    let staple = match Staple::parse(bytes) {
        Ok(staple) => staple,
        Err(error) => {
            check_line(&error.to_string());
            return false;
        }
    };
    assert_eq!(staple.der(), bytes);
    check_line(&format!("{staple:?}"));
    for now in [staple.this_update, staple.next_update] {
        if let Err(error) = staple.check_time(now) {
            check_line(&error.to_string());
        }
    }
    assert!(staple.check_time(staple.next_update).is_err());
    // A byte more, or less, is no response.
    assert!(Staple::parse(&[bytes, &[0]].concat()).is_err());
    assert!(bytes.split_last().is_none_or(|(_, most)| Staple::parse(most).is_err()));
    true
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use rcgen::{CertificateParams, DnType, SanType};

    use super::*;
    use crate::base::fuzzing::{Shape, seeded};
    use crate::pki::crl::testing::Authority;
    use crate::pki::key::{KeyType, SigningKey};
    use crate::pki::ocsp;

    fn leaf(key_type: KeyType) -> Vec<u8> {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, "web");
        params.distinguished_name.push(DnType::OrganizationName, "Example\u{e9}");
        params.subject_alt_names = vec![
            SanType::URI("spiffe://cluster.local/ns/default/sa/web".try_into().unwrap()),
            SanType::DnsName("web.example".try_into().unwrap()),
            SanType::IpAddress([127, 0, 0, 1].into()),
            SanType::IpAddress(std::net::Ipv6Addr::LOCALHOST.into()),
        ];
        let key = SigningKey::generate(key_type).unwrap();
        params.self_signed(&key).unwrap().der().to_vec()
    }

    #[test]
    fn almost_valid_certificates_break_no_rule() {
        let samples = [
            Authority::root("root").certificate.to_vec(),
            leaf(KeyType::EcdsaP384),
            leaf(KeyType::Ed25519),
            leaf(KeyType::Rsa2048),
        ];
        seeded("certificate", Shape::Bytes, 4_000, &samples, certificate);
    }

    #[test]
    fn almost_valid_pem_breaks_no_rule() {
        let der = |bytes: &[u8]| CertificateDer::from(bytes.to_vec());
        let two = pem::of_certificates([&der(&leaf(KeyType::EcdsaP256)), &der(b"short")]);
        let crlf = String::from_utf8(pem::of_certificates([&der(b"a")])).unwrap().replace('\n', "\r\n");
        let long = pem::of_certificates(&vec![der(b"a"); limits::CERTIFICATES]);
        let damaged = b"-----BEGIN CERTIFICATE-----\n!!\n-----END CERTIFICATE-----\n";
        assert!(!certificates(&[damaged, two.as_slice()].concat()));
        assert!(certificates(&long) && !certificates(&long.repeat(2)));
        let samples = [[b"# web\n", two.as_slice(), b"text"].concat(), crlf.into_bytes()];
        seeded("pem", Shape::Bytes, 3_000, &samples, certificates);
    }

    #[test]
    fn almost_valid_keys_break_no_rule() {
        let mut samples = Vec::new();
        for key_type in [KeyType::EcdsaP256, KeyType::EcdsaP384, KeyType::Ed25519, KeyType::Rsa2048] {
            let key = SigningKey::generate(key_type).unwrap();
            samples.push([b"8", key.to_private_key().der().secret_der()].concat());
            samples.push([b"-".as_slice(), &key.to_private_key().to_pem()].concat());
            let format = if key_type.is_rsa() { b"1" } else { b"E" };
            if let Ok(traditional) = key.to_private_key().in_format(KeyFormat::Traditional) {
                samples.push([format, traditional.der().secret_der()].concat());
            }
        }
        seeded("private_key", Shape::Bytes, 2_000, &samples, private_key);
    }

    #[test]
    fn almost_valid_staples_break_no_rule() {
        let until = UNIX_EPOCH + Duration::from_secs(3600);
        let serials = ["01", "ff00112233445566778899", "7fffffffffffffffffffffffffffffffffffffff"];
        let samples = serials.map(|serial| ocsp::testing::staple(serial, UNIX_EPOCH, until));
        seeded("ocsp_staple", Shape::Bytes, 8_000, &samples, ocsp_staple);
    }
}
