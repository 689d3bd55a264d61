//! Checks that a CRL is strict DER with the structure of RFC 5280. Envoy requires it; the parser is more lenient.
//!
//! The rules were found by giving mutated CRLs to this module and to a real Envoy.

use crate::pki::der::{
    BIT_STRING, BOOLEAN, IA5_STRING, INTEGER, OCTET_STRING, OID, PRINTABLE_STRING, Part, SEQUENCE, SET,
    UTF8_STRING, is_der, is_time, parts, parts_of,
};

const EXTENSIONS: u8 = 0xa0;
const CRL_NUMBER: &[u8] = &[0x55, 0x1d, 20];
const AUTHORITY_KEY_IDENTIFIER: &[u8] = &[0x55, 0x1d, 35];

/// Whether `der` is a CRL in strict DER.
pub(super) fn is_crl(der: &[u8]) -> bool {
    let Some(outer) = parts(der) else { return false };
    let [(SEQUENCE, outer)] = outer.as_slice() else { return false };
    let Some(inner) = parts(outer) else { return false };
    let [(SEQUENCE, list), algorithm, (BIT_STRING, [0, ..])] = inner.as_slice() else { return false };
    is_der(der) && is_algorithm(*algorithm) && parts(list).is_some_and(|list| is_list(&list))
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
                is_der(value) && is_value_of(id, value)
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

fn is_sequence_of(part: Part<'_>, is_one: impl Fn(&Part<'_>) -> bool) -> bool {
    part.0 == SEQUENCE && parts_of(part.1, |parts| !parts.is_empty() && parts.iter().all(&is_one))
}
