//! Text for messages and logs: lists and foreign strings, kept short.

use super::limits::{FOREIGN_TEXT, NAME_TEXT};

/// List items that one message shows.
const SHOWN: usize = 5;

/// The first `items`, joined with `separator`, and how many more there are.
pub fn listed<T: ToString>(items: impl IntoIterator<Item = T>, separator: &str) -> String {
    let mut items = items.into_iter();
    let shown: Vec<_> = items.by_ref().take(SHOWN).map(|item| item.to_string()).collect();
    let shown = shown.join(separator);
    match items.count() {
        0 => shown,
        more => format!("{shown}{separator}and {more} more"),
    }
}

/// The one of `candidates` that `word` probably was to be.
pub fn closest<'a>(word: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    /// Jaro's similarity: two of ten letters may be wrong.
    const NEAR: f64 = 0.85;
    let rated = candidates.into_iter().map(|candidate| (strsim::jaro(word, candidate), candidate));
    let best = rated.filter(|(rate, _)| *rate > NEAR).max_by(|(one, _), (other, _)| one.total_cmp(other));
    best.map(|(_, candidate)| candidate)
}

/// `text` cut to [`FOREIGN_TEXT`] characters, with control characters replaced: safe to log.
pub fn sanitize_for_log(text: &str) -> String {
    text.chars().take(FOREIGN_TEXT).map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

/// A name from a certificate, on one line: control characters are replaced, and what is longer than [`NAME_TEXT`] is cut.
pub fn one_line(text: &str) -> String {
    let mut chars = text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c });
    let mut line: String = chars.by_ref().take(NAME_TEXT).collect();
    if chars.next().is_some() {
        line.pop();
        line.push('\u{2026}');
    }
    line.shrink_to_fit();
    line
}

#[cfg(test)]
mod tests {
    #[test]
    fn long_lists_are_cut() {
        assert_eq!(super::listed([1, 2, 3, 4, 5], "; "), "1; 2; 3; 4; 5");
        assert_eq!(super::listed(1..=2300, "; "), "1; 2; 3; 4; 5; and 2295 more");
    }

    #[test]
    fn a_name_is_cut_to_one_line() {
        assert_eq!(super::one_line("a\nb\u{1b}c"), "a\u{fffd}b\u{fffd}c");
        let longest = "\u{e9}".repeat(super::NAME_TEXT);
        assert_eq!(super::one_line(&longest), longest);
        let cut = super::one_line(&format!("{longest}x"));
        assert!(cut.chars().count() == super::NAME_TEXT && cut.ends_with('\u{2026}'), "{cut}");
    }
}
