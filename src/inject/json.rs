//! JSON escapes that YAML doesn't have.
//!
//! JSON writes a character beyond the basic plane as two escapes (`"\ud83d\ude80"`), of which YAML takes neither.

/// A pair of escapes in a JSON string.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct EscapedPair {
    /// The position of the first backslash.
    pub(super) start: usize,
    pub(super) character: char,
}

impl EscapedPair {
    /// The bytes of a pair.
    pub(super) const LENGTH: usize = r"\ud83d\ude80".len();

    /// The same character as YAML escapes it.
    pub(super) fn in_yaml(self) -> String {
        format!("\\U{:08X}", u32::from(self.character))
    }
}

/// The pairs of escapes in `text`, in order; none if it isn't JSON.
pub(super) fn escaped_pairs(text: &str) -> Vec<EscapedPair> {
    let mut pairs = Vec::new();
    let may_hold_some = text.contains("\\ud") || text.contains("\\uD");
    if !may_hold_some || serde_json::from_str::<serde_json::Value>(text).is_err() {
        return pairs;
    }
    let mut from = 0;
    // In JSON a backslash stands only in a string, and the ASCII character after it belongs to it.
    while let Some(start) = text.get(from..).and_then(|rest| rest.find('\\')).map(|found| from + found) {
        let pair = text.get(start..start + EscapedPair::LENGTH).and_then(character);
        from = start + if pair.is_some() { EscapedPair::LENGTH } else { 2 };
        pairs.extend(pair.map(|character| EscapedPair { start, character }));
    }
    pairs
}

/// The character of two escapes that belong together.
fn character(pair: &str) -> Option<char> {
    let (high, low) = pair.split_at_checked(EscapedPair::LENGTH / 2)?;
    let decoded = char::decode_utf16([unit(high)?, unit(low)?]).next()?.ok()?;
    (decoded > '\u{ffff}').then_some(decoded)
}

fn unit(escape: &str) -> Option<u16> {
    u16::from_str_radix(escape.strip_prefix("\\u")?, 16).ok()
}
