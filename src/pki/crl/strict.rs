//! Checks that a CRL is strict DER with the structure of RFC 5280. Envoy requires it; the parser is more lenient.
//!
//! The rules were found by giving mutated CRLs to this module and to a real Envoy.

/// The deepest nesting in a CRL.
const DEPTH: usize = 16;

const BOOLEAN: u8 = 0x01;
const INTEGER: u8 = 0x02;
const BIT_STRING: u8 = 0x03;
const OCTET_STRING: u8 = 0x04;
const OID: u8 = 0x06;
const ENUMERATED: u8 = 0x0a;
const UTF8_STRING: u8 = 0x0c;
const PRINTABLE_STRING: u8 = 0x13;
const IA5_STRING: u8 = 0x16;
const UTC_TIME: u8 = 0x17;
const GENERALIZED_TIME: u8 = 0x18;
const SEQUENCE: u8 = 0x30;
const SET: u8 = 0x31;
const EXTENSIONS: u8 = 0xa0;

const CRL_NUMBER: &[u8] = &[0x55, 0x1d, 20];
const AUTHORITY_KEY_IDENTIFIER: &[u8] = &[0x55, 0x1d, 35];

/// A tag and its content.
type Part<'a> = (u8, &'a [u8]);

/// Whether `der` is a CRL in strict DER.
pub(super) fn is_crl(der: &[u8]) -> bool {
    let Some(outer) = parts(der) else { return false };
    let [(SEQUENCE, outer)] = outer.as_slice() else { return false };
    let Some(inner) = parts(outer) else { return false };
    let [(SEQUENCE, list), algorithm, (BIT_STRING, [0, ..])] = inner.as_slice() else { return false };
    is_der(der, DEPTH) && is_algorithm(*algorithm) && parts(list).is_some_and(|list| is_list(&list))
}

fn is_list(parts: &[Part<'_>]) -> bool {
    let parts = if let [(INTEGER, _), rest @ ..] = parts { rest } else { parts };
    let [algorithm, name, begin, rest @ ..] = parts else { return false };
    let rest = if let [end, rest @ ..] = rest
        && is_time(*end)
    {
        rest
    } else {
        rest
    };
    let (entries, rest) =
        if let [entries @ (SEQUENCE, _), rest @ ..] = rest { (Some(entries), rest) } else { (None, rest) };
    let has_extensions = match rest {
        [] => true,
        [(EXTENSIONS, inner)] => {
            parts_of(inner, |extensions| matches!(extensions, [one] if is_sequence_of(*one, is_extension)))
        }
        _ => false,
    };
    is_algorithm(*algorithm)
        && is_sequence_of(*name, |set| set.0 == SET && parts_of(set.1, |names| names.iter().all(is_name)))
        && is_time(*begin)
        && entries.is_none_or(|entries| is_sequence_of(*entries, is_entry))
        && has_extensions
}

fn is_entry(part: &Part<'_>) -> bool {
    part.0 == SEQUENCE
        && parts_of(part.1, |parts| match parts {
            [(INTEGER, _), time] => is_time(*time),
            [(INTEGER, _), time, extensions] => is_time(*time) && is_sequence_of(*extensions, is_extension),
            _ => false,
        })
}

fn is_extension(part: &Part<'_>) -> bool {
    part.0 == SEQUENCE
        && parts_of(part.1, |parts| match parts {
            [(OID, id), (OCTET_STRING, value)] | [(OID, id), (BOOLEAN, [0xff]), (OCTET_STRING, value)] => {
                is_der(value, DEPTH) && is_value_of(id, value)
            }
            _ => false,
        })
}

/// Envoy parses these extensions when it loads the CRL, and others only when it needs them.
fn is_value_of(id: &[u8], value: &[u8]) -> bool {
    match id {
        CRL_NUMBER => parts_of(value, |parts| matches!(parts, [(INTEGER, _)])),
        AUTHORITY_KEY_IDENTIFIER => parts_of(value, |parts| {
            let [(SEQUENCE, inner)] = parts else { return false };
            let is_known = |parts: &[Part<'_>]| {
                matches!(parts, [] | [(0x80, _)] | [(0xa1, _), (0x82, _)] | [(0x80, _), (0xa1, _), (0x82, _)])
            };
            parts_of(inner, is_known)
        }),
        _ => true,
    }
}

fn is_name(part: &Part<'_>) -> bool {
    part.0 == SEQUENCE
        && parts_of(part.1, |parts| match parts {
            [(OID, _), (UTF8_STRING, text)] => std::str::from_utf8(text).is_ok(),
            [(OID, _), (PRINTABLE_STRING | IA5_STRING, text)] => text.is_ascii(),
            _ => false,
        })
}

fn is_algorithm(part: Part<'_>) -> bool {
    part.0 == SEQUENCE && parts_of(part.1, |parts| matches!(parts, [(OID, _)] | [(OID, _), _]))
}

fn is_time((tag, content): Part<'_>) -> bool {
    let digits = match (tag, content.len()) {
        (UTC_TIME, 13) | (GENERALIZED_TIME, 15) => content.split_last(),
        _ => None,
    };
    digits.is_some_and(|(last, digits)| *last == b'Z' && digits.iter().all(u8::is_ascii_digit))
}

fn is_sequence_of(part: Part<'_>, is_one: impl Fn(&Part<'_>) -> bool) -> bool {
    part.0 == SEQUENCE && parts_of(part.1, |parts| !parts.is_empty() && parts.iter().all(&is_one))
}

fn parts_of(bytes: &[u8], hold: impl Fn(&[Part<'_>]) -> bool) -> bool {
    parts(bytes).is_some_and(|parts| hold(&parts))
}

/// The values that are encoded in `bytes`, in order.
fn parts(bytes: &[u8]) -> Option<Vec<Part<'_>>> {
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
fn is_der(bytes: &[u8], depth: usize) -> bool {
    let is_one = |part: &Part<'_>| match *part {
        (BOOLEAN, content) => matches!(content, [0 | 0xff]),
        (INTEGER | ENUMERATED, content) => {
            !matches!(content, [] | [0, 0..=0x7f, ..] | [0xff, 0x80..=0xff, ..])
        }
        (OID, content) => is_oid(content),
        (UTC_TIME | GENERALIZED_TIME, _) => is_time(*part),
        // Sequences, sets, and the choices of an extension.
        (SEQUENCE | SET | 0xa0..=0xa4, content) => depth > 0 && is_der(content, depth - 1),
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
            assert!(is_der(bytes, DEPTH), "{bytes:?}");
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
            assert!(!is_der(bytes, DEPTH), "{bytes:?}");
        }
        assert!(!is_der(&[0x30; 4000], DEPTH), "the depth is bounded");
    }
}
