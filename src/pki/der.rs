//! Reads strict DER: a length, a number and a time have one valid encoding each.

/// The deepest nesting.
const DEPTH: usize = 16;

pub(super) const BOOLEAN: u8 = 0x01;
pub(super) const INTEGER: u8 = 0x02;
pub(super) const BIT_STRING: u8 = 0x03;
pub(super) const OCTET_STRING: u8 = 0x04;
pub(super) const OID: u8 = 0x06;
pub(super) const ENUMERATED: u8 = 0x0a;
pub(super) const UTF8_STRING: u8 = 0x0c;
pub(super) const PRINTABLE_STRING: u8 = 0x13;
pub(super) const IA5_STRING: u8 = 0x16;
pub(super) const UTC_TIME: u8 = 0x17;
pub(super) const GENERALIZED_TIME: u8 = 0x18;
pub(super) const SEQUENCE: u8 = 0x30;
pub(super) const SET: u8 = 0x31;

/// A tag and its content.
pub(super) type Part<'a> = (u8, &'a [u8]);

/// Whether a value is a time in the only form that certificates and CRLs may have.
pub(super) fn is_time((tag, content): Part<'_>) -> bool {
    let digits = match (tag, content.len()) {
        (UTC_TIME, 13) | (GENERALIZED_TIME, 15) => content.split_last(),
        _ => None,
    };
    digits.is_some_and(|(last, digits)| *last == b'Z' && digits.iter().all(u8::is_ascii_digit))
}

pub(super) fn parts_of(bytes: &[u8], hold: impl Fn(&[Part<'_>]) -> bool) -> bool {
    parts(bytes).is_some_and(|parts| hold(&parts))
}

/// The values that are encoded in `bytes`, in order.
pub(super) fn parts(bytes: &[u8]) -> Option<Vec<Part<'_>>> {
    let (mut bytes, mut parts) = (bytes, Vec::new());
    while let [tag, rest @ ..] = bytes {
        let (content, after) = content(rest)?;
        parts.push((*tag, content));
        bytes = after;
    }
    Some(parts)
}

/// The content after a tag, and the bytes after the content. A length has only one valid encoding.
fn content(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (length, rest) = match bytes {
        [length @ ..=0x7f, rest @ ..] => (usize::from(*length), rest),
        [0x81, length @ 0x80..=0xff, rest @ ..] => (usize::from(*length), rest),
        [0x82, a @ 1..=0xff, b, rest @ ..] => (usize::from(*a) << 8 | usize::from(*b), rest),
        [0x83, a @ 1..=0xff, b, c, rest @ ..] => {
            (usize::from(*a) << 16 | usize::from(*b) << 8 | usize::from(*c), rest)
        }
        _ => return None,
    };
    rest.split_at_checked(length)
}

/// Whether every value in `bytes` has the only encoding that DER allows.
pub(super) fn is_der(bytes: &[u8]) -> bool {
    is_nested_der(bytes, DEPTH)
}

fn is_nested_der(bytes: &[u8], depth: usize) -> bool {
    let is_one = |part: &Part<'_>| match *part {
        (BOOLEAN, content) => matches!(content, [0 | 0xff]),
        (INTEGER | ENUMERATED, content) => {
            !matches!(content, [] | [0, 0..=0x7f, ..] | [0xff, 0x80..=0xff, ..])
        }
        (OID, content) => is_oid(content),
        (UTC_TIME | GENERALIZED_TIME, _) => is_time(*part),
        // Sequences, sets, and the choices of an extension.
        (SEQUENCE | SET | 0xa0..=0xa4, content) => depth > 0 && is_nested_der(content, depth - 1),
        (0x80..=0x88, _) => true,
        // Nothing else has parts, or is of a class of its own.
        (tag, _) => tag & 0xe0 == 0,
    };
    parts_of(bytes, |parts| parts.iter().all(&is_one))
}

/// Numbers in groups of seven bits; no number begins with a group of zeros.
fn is_oid(content: &[u8]) -> bool {
    let mut is_start = true;
    for byte in content {
        if is_start && *byte == 0x80 {
            return false;
        }
        is_start = byte & 0x80 == 0;
    }
    is_start && !content.is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_strict_der_is_accepted() {
        let strict: [&[u8]; 6] =
            [&[2, 1, 0], &[2, 2, 0, 0x80], &[1, 1, 0xff], &[0x30, 3, 2, 1, 5], &[6, 3, 0x55, 4, 3], &[5, 0]];
        for bytes in strict {
            assert!(is_der(bytes), "{bytes:?}");
        }
        let lax: [&[u8]; 11] = [
            &[2, 2, 0, 5],
            &[2, 0],
            &[1, 1, 1],
            &[0x30, 4, 2, 2, 0, 5],
            &[0x04, 0x81, 1, 0],
            &[0x30, 0x80, 0, 0],
            b"\x17\x0b2601010000Z",
            &[0x30, 3, 2, 1],
            &[6, 2, 0x55, 0x84],
            &[6, 3, 0x55, 0x80, 1],
            &[0x70, 0],
        ];
        for bytes in lax {
            assert!(!is_der(bytes), "{bytes:?}");
        }
        assert!(!is_der(&[0x30; 4000]), "the depth is bounded");
    }
}
