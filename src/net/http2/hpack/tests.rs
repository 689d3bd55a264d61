use super::*;

const PATH: &[u8] = b"/run/sds/socket";

/// A string with its length before it.
fn text(text: &[u8]) -> Vec<u8> {
    [&[u8::try_from(text.len()).unwrap()], text].concat()
}

fn literal(first: u8, value: &[u8]) -> Vec<u8> {
    [vec![first], text(value)].concat()
}

fn rewritten(blocks: &mut HeaderBlocks, block: &[u8]) -> Vec<u8> {
    blocks.rewrite(block).unwrap().unwrap_or_else(|| block.to_vec())
}

#[test]
fn a_refused_authority_is_removed_in_each_form_and_an_accepted_one_stays() {
    // As an encoder of gRPC's C core, nghttp2 and others write it: the name by its index or in full, the field for the
    // table, not for it, or for none ever.
    let forms: [&[u8]; 8] = [
        b"\x41",
        b"\x01",
        b"\x11",
        b"\x40\x0a:authority",
        b"\x00\x0a:authority",
        b"\x10\x0a:authority",
        b"\x40\x88\xb8\x3b\x53\x39\xec\x32\x7d\x7f",
        b"\x10\x88\xb8\x3b\x53\x39\xec\x32\x7d\x7f",
    ];
    let refused: [&[u8]; 9] = [
        PATH,
        b"%2Frun%2Fsds%2Fsocket",
        b"",
        b"a/b",
        b"a|b",
        b"unix:///run/socket",
        "/run/\u{fc}/socket".as_bytes(),
        b"/run/\xff",
        b"a b",
    ];
    let accepted: [&[u8]; 5] =
        [b"localhost", b"xds-grpc", b"istiod.istio-system.svc:15012", b"[::1]:80", b"a@b"];
    for form in forms {
        for (value, is_refused) in
            refused.iter().map(|value| (value, true)).chain(accepted.iter().map(|value| (value, false)))
        {
            let block = [b"\x83\x86", form, &text(value), b"\x84"].concat();
            let expected = if is_refused { b"\x83\x86\x84".to_vec() } else { block.clone() };
            let case = format!("{} {}", form.escape_ascii(), value.escape_ascii());
            assert_eq!(rewritten(&mut HeaderBlocks::default(), &block), expected, "{case}");
        }
    }
    // Other fields with such values stay, and the empty authority of the static table does not.
    let path = literal(0x44, PATH);
    assert_eq!(HeaderBlocks::default().rewrite(&path), Ok(None));
    assert_eq!(rewritten(&mut HeaderBlocks::default(), b"\x83\x81\x86"), b"\x83\x86");
}

#[test]
fn an_authority_in_huffman_codes_is_judged_by_what_it_says() {
    let cases: [(&[u8], &[u8], bool); 6] = [
        (b"\xf1\xe3\xc2\xe5\xf2\x3a\x6b\xa0\xab\x90\xf4\xff", b"www.example.com", true),
        (b"\x1f", b"a", true),
        (b"\x63", b"/", false),
        (b"", b"", false),
        // Codes of 20 and of 30 bits.
        (b"\xff\xfe\x6f", b"\0", false),
        (b"\xff\xff\xff\xf3", b"\0", false),
    ];
    for (encoded, value, is_accepted) in cases {
        assert_eq!(huffman(encoded).as_deref(), Ok(value));
        let length = 0x80 | u8::try_from(encoded.len()).unwrap();
        let block = [&[0x41, length], encoded, b"\x84"].concat();
        let expected = if is_accepted { block.clone() } else { b"\x84".to_vec() };
        assert_eq!(rewritten(&mut HeaderBlocks::default(), &block), expected, "{}", value.escape_ascii());
    }
    // Padding that is not ones, too much padding, and the code for the end.
    for encoded in [&b"\x18"[..], b"\x1f\xff", b"\xff\xff\xff\xff"] {
        assert_eq!(huffman(encoded), Err(Malformed), "{}", encoded.escape_ascii());
    }
}

#[test]
fn references_to_older_entries_are_lowered_and_those_to_removed_ones_are_removed() {
    let mut blocks = HeaderBlocks::default();
    let older = literal(0x44, b"/older");
    let newer = literal(0x58, b"newer");
    // The table has then, with the newest first: 62 newer, 63 the authority, 64 older.
    let first = [&older[..], &literal(0x41, PATH), &newer].concat();
    assert_eq!(rewritten(&mut blocks, &first), [&older[..], &newer].concat());
    assert_eq!(rewritten(&mut blocks, b"\xbe\xbf\xc0"), b"\xbe\xbf");
    // Names of entries: older with another value, and the authority with a good and a refused one.
    let named = b"\x0f\x31\x01x\x0f\x30\x01y\x7f\x00\x01/";
    assert_eq!(rewritten(&mut blocks, named), b"\x0f\x30\x01x\x01\x01y");
    // Now 62 is the second authority, 63 newer, 64 the first authority, 65 older.
    assert_eq!(rewritten(&mut blocks, b"\xbe\xbf\xc0\xc1"), b"\xbe\xbf");
    assert_eq!(blocks.rewrite(b"\xc2"), Err(Malformed));
}

#[test]
fn only_what_the_client_can_refer_to_is_remembered() {
    let mut blocks = HeaderBlocks::default();
    for _ in 0..1000 {
        let block = [literal(0x41, b""), literal(0x58, b"")].concat();
        assert_eq!(rewritten(&mut blocks, &block), literal(0x58, b""));
        assert!(blocks.authorities.len() <= 65, "{}", blocks.authorities.len());
    }
}

#[test]
fn an_incomplete_block_is_malformed() {
    for block in
        [&b"\x41"[..], b"\x41\x05abcd", b"\x40\x0a:authorit", b"\x7f\x80\x80\x80\x80\x00", b"\x80", b"\x3f"]
    {
        // A zero as index is the server's to refuse.
        let is_zero = block == b"\x80";
        assert_eq!(HeaderBlocks::default().rewrite(block).is_err(), !is_zero, "{}", block.escape_ascii());
    }
}
