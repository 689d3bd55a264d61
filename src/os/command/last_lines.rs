//! The last lines that a command printed.

use std::collections::VecDeque;

use crate::base::limits::{LAST_LINE_TEXT, LAST_LINES};

/// Bytes of a line that are kept until its end: a character has four at most.
const LINE_BYTES: usize = 4 * LAST_LINE_TEXT;
const KEY: &[u8] = b"PRIVATE KEY-----";
const HIDDEN: &str = "(a private key is not shown)";

/// The last [`LAST_LINES`] lines of a stream, cut to [`LAST_LINE_TEXT`] characters, without private keys.
#[derive(Debug, Default)]
pub(super) struct LastLines {
    lines: VecDeque<String>,
    /// The begin of the line that has no end yet.
    open: Vec<u8>,
    /// The last bytes of this line, where [`KEY`] may begin.
    tail: Vec<u8>,
    /// How many keys begin or end in this line.
    keys: usize,
    /// Lines up to the end of a key are not shown.
    is_within_key: bool,
}

impl LastLines {
    pub(super) fn add(&mut self, bytes: &[u8]) {
        for line in bytes.split_inclusive(|byte| *byte == b'\n') {
            let text = line.strip_suffix(b"\n").unwrap_or(line);
            self.extend(text);
            if text.len() < line.len() {
                self.end();
            }
        }
    }

    /// The lines so far, with the one that has no end yet.
    pub(super) fn shown(&self) -> Vec<String> {
        let mut lines: Vec<_> = self.lines.iter().cloned().chain(self.open_line()).collect();
        lines.drain(..lines.len().saturating_sub(LAST_LINES));
        lines
    }

    fn extend(&mut self, text: &[u8]) {
        let room = LINE_BYTES - self.open.len();
        self.open.extend(text.iter().take(room));
        // A key may be spread over two reads.
        self.tail.extend(text);
        self.keys += self.tail.windows(KEY.len()).filter(|window| *window == KEY).count();
        let extra = self.tail.len().saturating_sub(KEY.len() - 1);
        self.tail.drain(..extra);
    }

    fn end(&mut self) {
        if let Some(line) = self.open_line() {
            if self.lines.len() == LAST_LINES {
                self.lines.pop_front();
            }
            self.lines.push_back(line);
        }
        // One is the begin of a key, and the next one its end.
        self.is_within_key ^= self.keys % 2 == 1;
        self.keys = 0;
        self.open.clear();
        self.tail.clear();
    }

    /// The open line as it is shown; none within a key, or if it is empty.
    fn open_line(&self) -> Option<String> {
        if self.is_within_key {
            return None;
        }
        if self.keys > 0 {
            return Some(HIDDEN.to_owned());
        }
        let text = String::from_utf8_lossy(&self.open);
        let text = text.trim_end().chars().take(LAST_LINE_TEXT);
        let line: String = text.map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect();
        (!line.is_empty()).then_some(line)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(reads: &[&[u8]]) -> Vec<String> {
        let mut last = LastLines::default();
        reads.iter().for_each(|read| last.add(read));
        last.shown()
    }

    #[test]
    fn the_last_lines_are_kept_and_cut() {
        assert_eq!(shown(&[]), Vec::<String>::new());
        assert_eq!(shown(&[b"one\n\ntw", b"o\nthree"]), ["one", "two", "three"]);
        let many: Vec<u8> = (0..1000).flat_map(|line| format!("line {line}\n").into_bytes()).collect();
        let last = shown(&[&many, b"end"]);
        assert_eq!((last.len(), last.last().map(String::as_str)), (LAST_LINES, Some("end")));
        assert_eq!(last[0], format!("line {}", 1001 - LAST_LINES));
        let long = shown(&[&vec![b'x'; 100_000], b"y\n"]);
        assert_eq!(long, ["x".repeat(LAST_LINE_TEXT)]);
        assert_eq!(shown(&[b"bad\x1b[1m\xff\r\n"]), ["bad\u{fffd}[1m\u{fffd}"]);
    }

    #[test]
    fn no_part_of_a_private_key_is_shown_however_it_is_read() {
        let printed =
            b"before\n-----BEGIN PRIVATE KEY-----\nc2VjcmV0\nc2VjcmV0\n-----END PRIVATE KEY-----\nafter\n";
        for size in 1..printed.len() {
            let reads: Vec<_> = printed.chunks(size).collect();
            assert_eq!(shown(&reads), ["before", HIDDEN, "after"], "{size}");
            for end in 0..reads.len() {
                let lines = shown(&reads[..end]).concat();
                assert!(!lines.contains("c2V"), "{size} {end}: {lines}");
            }
        }
        // In one line, as in JSON.
        assert_eq!(shown(&[b"{\"key\":\"-----BEGIN PRIVATE KEY-----\\nc2V\"}\nafter"]), [HIDDEN]);
        let whole = b"-----BEGIN EC PRIVATE KEY-----\\nc2V\\n-----END EC PRIVATE KEY-----\nafter";
        assert_eq!(shown(&[whole]), [HIDDEN, "after"]);
    }
}
