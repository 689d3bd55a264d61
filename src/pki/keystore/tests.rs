//! The decisions; that Java and OpenSSL read the files is shown with them (`tests/agent/outputs.rs`).

use super::*;

const NOW: SystemTime = SystemTime::UNIX_EPOCH;

#[test]
fn a_password_is_one_line_of_printable_ascii() {
    let cases: [(&[u8], Result<&str, NotAPassword>); 9] = [
        (b"secret", Ok("secret")),
        (b"two words\n", Ok("two words")),
        (b"dos\r\n", Ok("dos")),
        (b"", Err(NotAPassword::Empty)),
        (b"\n", Err(NotAPassword::Empty)),
        (b"one\ntwo\n", Err(NotAPassword::SeveralLines)),
        (b"tab\t", Err(NotAPassword::Unprintable)),
        ("p\u{e4}ss".as_bytes(), Err(NotAPassword::Unprintable)),
        (&[b'x'; PASSWORD_LENGTH + 1], Err(NotAPassword::TooLong)),
    ];
    for (content, expected) in cases {
        let password = Password::from_file(content);
        let found = password.as_ref().map(|password| password.0.as_str()).map_err(|error| *error);
        assert_eq!(found, expected, "{content:?}");
    }
    assert_eq!(format!("{:?}", Password::default()), "Password(hidden)");
}

#[test]
fn a_keystore_depends_on_its_content_alone_and_shows_neither_key_nor_password() {
    let chain = [CertificateDer::from(vec![0x30; 40])];
    let roots = [CertificateDer::from(vec![0x31; 50])];
    let key = [0x32; 77];
    let entry = KeyEntry { alias: "default", pkcs8: &key, chain: &chain };
    let entries = Entries { key: Some(entry), roots: &roots, created: NOW };
    let trust = Entries { key: None, ..entries };
    let other_key = Entries { key: Some(KeyEntry { pkcs8: &[0x33; 77], ..entry }), ..entries };
    type Write = fn(&Entries<'_>, &Password) -> Result<Zeroizing<Vec<u8>>, KeystoreError>;
    for write in [pkcs12 as Write, jks] {
        let password = Password::from_file(b"s3cret").unwrap();
        let written = write(&entries, &password).unwrap();
        assert_eq!(write(&entries, &password).unwrap(), written);
        for hidden in [&key[..8], b"s3cret", b"s\x003\0c"] {
            assert!(!written.windows(hidden.len()).any(|bytes| bytes == hidden));
        }
        assert_ne!(write(&trust, &password).unwrap(), written);
        assert_ne!(write(&other_key, &password).unwrap(), written);
        assert_ne!(write(&entries, &Password::default()).unwrap(), written);
    }
    assert_eq!(format!("{entry:?}"), "KeyEntry { alias: \"default\", .. }");
    // No two uses share a salt.
    let [one, other]: [[u8; 20]; 2] = [entries.unique("one"), entries.unique("other")];
    assert_ne!(one, other);
    assert_ne!(one, other_key.unique("one"));
}
