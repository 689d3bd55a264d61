//! Fuzz target: CRLs.

use rustls::pki_types::CertificateRevocationListDer;
use webpki::BorrowedCertRevocationList;

use super::{Crl, from_pem, is_blank, strict, to_pem};
use crate::base::clock::rfc3339;
use crate::base::fuzzing::check_line;
use crate::base::limits;
use crate::pki::pem;

/// The public key of ECDSA P-256 whose private key is 1.
const KNOWN_KEY: [u8; 91] = *b"\x30\x59\x30\x13\x06\x07\x2a\x86\x48\xce\x3d\x02\x01\x06\x08\x2a\x86\x48\xce\x3d\x03\x01\x07\x03\x42\x00\x04\
\x6b\x17\xd1\xf2\xe1\x2c\x42\x47\xf8\xbc\xe6\xe5\x63\xa4\x40\xf2\x77\x03\x7d\x81\x2d\xeb\x33\xa0\xf4\xa1\x39\x45\xd8\x98\xc2\x96\
\x4f\xe3\x42\xe2\xfe\x1a\x7f\x9b\x8e\xe7\xeb\x4a\x7c\x0f\x9e\x16\x2b\xce\x33\x57\x6b\x31\x5e\xce\xcb\xb6\x40\x68\x37\xbf\x51\xf5";

/// CRLs: `D` and one as DER, or any other byte and a text. True if all are usable, and then Envoy's rules hold for each.
pub fn crls(bytes: &[u8]) -> bool {
    let text = match bytes {
        [] => return false,
        [b'D', der @ ..] => pem::encode("X509 CRL", der).to_vec(),
        [_, text @ ..] => text.to_vec(),
    };
    let found = match from_pem(&text) {
        Ok(found) => found,
        Err(error) => {
            check_line(&error.to_string());
            return false;
        }
    };
    assert!((1..=limits::CRLS).contains(&found.len()) && !is_blank(&text), "{}", found.len());
    assert_eq!(from_pem(&to_pem(&found)).as_ref(), Ok(&found), "written and read back");
    found.iter().for_each(check);
    true
}

fn check(crl: &Crl) {
    check_line(&crl.issuer);
    check_line(&rfc3339(crl.this_update).to_string());
    check_line(&crl.next_update.map(|at| rfc3339(at).to_string()).unwrap_or_default());
    assert!(strict::is_crl(crl.der()), "{crl:?} is not strict DER");
    assert!(crl.verify(&KNOWN_KEY).is_none(), "{crl:?} was not signed with this key");
    // A byte more, or less, is no CRL.
    let der = crl.der().as_ref();
    let is_crl = |der: Vec<u8>| Crl::parse(CertificateRevocationListDer::from(der)).is_ok();
    assert!(!is_crl([der, &[0]].concat()));
    assert!(!is_crl(der.split_last().map(|(_, most)| most.to_vec()).unwrap_or_default()));
    check_with_webpki(crl);
}

/// webpki reads CRLs by the same rules, if they have a number and their times are after 1970.
fn check_with_webpki(crl: &Crl) {
    if crl.number.is_none() {
        return;
    }
    let read = BorrowedCertRevocationList::from_der(crl.der());
    assert!(!matches!(read, Err(webpki::Error::BadDer)), "{read:?}");
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use super::*;
    use crate::base::fuzzing::{Shape, seeded};
    use crate::pki::crl::testing::Authority;

    #[test]
    fn almost_valid_crls_break_no_rule() {
        let ca = Authority::root("root");
        let until = UNIX_EPOCH + Duration::from_secs(3600);
        let empty = ca.crl(UNIX_EPOCH, until, &[]);
        let full = ca.crl(UNIX_EPOCH, until, &[1, 2, 1 << 40]);
        let old = ca.old_crl(UNIX_EPOCH, until);
        let der = |text: &str| [b"D", from_pem(text.as_bytes()).unwrap()[0].der().as_ref()].concat();
        let several = format!("-# all\n{empty}\n{old}text\n{full}");
        let samples = [der(&empty), der(&full), der(&old), several.into_bytes()];
        seeded("crls", Shape::Bytes, 6_000, &samples, crls);
    }
}
