use std::process::{Command, Stdio};
use std::time::{Duration, UNIX_EPOCH};

use super::testing::{response, single, staple};
use super::*;

fn at(seconds: u64) -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(seconds)
}

#[test]
fn a_staple_is_for_one_certificate_and_for_a_time() {
    let (begin, end) = (at(1_800_000_000), at(1_800_003_600));
    let parsed = Staple::parse(&staple("ab01", begin, end)).unwrap();
    assert_eq!((&*parsed.serial, parsed.this_update, parsed.next_update), ("ab01", begin, end));
    assert_eq!(parsed.check_time(begin), Ok(()));
    assert_eq!(parsed.check_time(end), Err(NotAStaple::Expired(end)));
    let early = begin - Duration::from_secs(1);
    assert_eq!(parsed.check_time(early), Err(NotAStaple::NotYetValid(begin)));

    let one = single("01", begin, Some(end));
    let refused = |der: &[u8]| Staple::parse(der).unwrap_err();
    assert_eq!(refused(&response(begin, &[one.clone(), one.clone()])), NotAStaple::NotOne(2));
    assert_eq!(refused(&response(begin, &[])), NotAStaple::NotOne(0));
    assert_eq!(refused(&response(begin, &[single("01", begin, None)])), NotAStaple::Unlimited);
    assert_eq!(refused(&[0x30, 3, 0x0a, 1, 3]), NotAStaple::Unsuccessful("tryLater"));
    for malformed in [&b""[..], b"junk", &[0x30, 3, 0x0a, 1, 0], &[0x30, 3, 0x0a, 1, 4], &one] {
        assert_eq!(refused(malformed), NotAStaple::Malformed);
    }
    let size = limits::OCSP_STAPLE_BYTES + 1;
    assert_eq!(refused(&vec![0; size]), NotAStaple::TooLong { size });
}

/// Runs openssl in `directory`.
fn openssl(directory: &std::path::Path, arguments: &str) {
    let mut command = Command::new("openssl");
    command.args(arguments.split_whitespace()).current_dir(directory).stdin(Stdio::null());
    let output = command.output().unwrap();
    assert!(output.status.success(), "{arguments}: {}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn a_response_of_openssl_is_a_staple() {
    let directory = tempfile::tempdir().unwrap();
    let openssl = |arguments: &str| openssl(directory.path(), arguments);
    openssl(
        "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout ca.key -out ca.crt -days 30 -subj /CN=ca",
    );
    openssl(
        "req -new -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout key.pem -out leaf.csr -subj /CN=leaf",
    );
    openssl(
        "x509 -req -in leaf.csr -CA ca.crt -CAkey ca.key -set_serial 0xabcdef0123456789 -days 20 -out leaf.crt",
    );
    std::fs::write(
        directory.path().join("index.txt"),
        "V\t361231235959Z\t\tABCDEF0123456789\tunknown\t/CN=leaf\n",
    )
    .unwrap();
    openssl("ocsp -issuer ca.crt -cert leaf.crt -reqout request.der -no_nonce");
    openssl(
        "ocsp -index index.txt -CA ca.crt -rsigner ca.crt -rkey ca.key -reqin request.der -respout staple.der -ndays 7",
    );
    let parsed = Staple::parse(&std::fs::read(directory.path().join("staple.der")).unwrap()).unwrap();
    assert_eq!(parsed.serial, "abcdef0123456789");
    let days = parsed.next_update.duration_since(parsed.this_update).unwrap();
    assert_eq!(days, Duration::from_secs(7 * 24 * 3600));
    let leaf = std::fs::read(directory.path().join("leaf.crt")).unwrap();
    let leaf = crate::pki::pem::certificates(&leaf).unwrap().swap_remove(0);
    assert_eq!(parsed.check(&Certificate::parse(&leaf).unwrap()), Ok(()));
    let ca = std::fs::read(directory.path().join("ca.crt")).unwrap();
    let ca = crate::pki::pem::certificates(&ca).unwrap().swap_remove(0);
    let foreign = parsed.check(&Certificate::parse(&ca).unwrap()).unwrap_err();
    assert!(foreign.to_string().starts_with("it is for the certificate with serial abcdef0123456789"));
}
