//! Requests in every form that HTTP/2 allows, for tests.

use std::collections::VecDeque;

use fastrand::Rng;

use super::authority::{CONTINUATION, END_HEADERS, HEADERS, Head, PADDED, PRIORITY};
use super::hpack::CODES;

pub(super) const ACCEPTED: [&str; 4] = ["localhost", "xds-grpc", "istiod.istio-system.svc:15012", "[::1]:80"];
pub(super) const REFUSED: [&str; 5] =
    ["%2Fvar%2Frun%2Fsds%2Fsocket", "/var/run/sds/socket", "", "a/b", "a|b"];

pub(super) type Field = (String, String);

/// A client that writes its headers in every way that HPACK allows.
pub(super) struct Writer {
    random: Rng,
    /// The newest first.
    table: VecDeque<Field>,
    max: usize,
}

impl Writer {
    pub(super) fn new(seed: u64) -> Self {
        Self { random: Rng::with_seed(seed), table: VecDeque::new(), max: 4096 }
    }

    fn integer(out: &mut Vec<u8>, pattern: u8, bits: u32, value: usize) {
        let max = (1 << bits) - 1;
        if value < max {
            return out.push(pattern | u8::try_from(value).unwrap());
        }
        out.push(pattern | u8::try_from(max).unwrap());
        let mut rest = value - max;
        while rest >= 0x80 {
            out.push(0x80 | u8::try_from(rest & 0x7f).unwrap());
            rest >>= 7;
        }
        out.push(u8::try_from(rest).unwrap());
    }

    fn string(&mut self, out: &mut Vec<u8>, text: &str) {
        if self.random.bool() {
            Self::integer(out, 0, 7, text.len());
            return out.extend_from_slice(text.as_bytes());
        }
        let mut bits = String::new();
        for byte in text.bytes() {
            let (mut first, mut last) = (0, 0);
            for (length, count, symbols) in CODES {
                first <<= length - last;
                last = length;
                if let Some(index) = symbols.iter().position(|symbol| *symbol == byte) {
                    let width = usize::try_from(length).unwrap();
                    bits += &format!("{:0width$b}", first + u32::try_from(index).unwrap());
                    break;
                }
                first += count;
            }
        }
        bits += &"1".repeat(bits.len().next_multiple_of(8) - bits.len());
        Self::integer(out, 0x80, 7, bits.len() / 8);
        out.extend(
            bits.as_bytes()
                .chunks(8)
                .map(|bits| u8::from_str_radix(std::str::from_utf8(bits).unwrap(), 2).unwrap()),
        );
    }

    fn static_name(name: &str) -> Option<usize> {
        let names = [(":authority", 1), (":method", 2), (":path", 4), (":scheme", 6), ("user-agent", 58)];
        names.into_iter().find_map(|(known, index)| (known == name).then_some(index))
    }

    fn field(&mut self, out: &mut Vec<u8>, name: &str, value: &str) {
        let statics = [(":authority", "", 1), (":method", "POST", 3), (":scheme", "http", 6)];
        let whole = statics.iter().find(|(known, text, _)| (*known, *text) == (name, value)).map(|it| it.2);
        let entry = self.table.iter().position(|(known, text)| known == name && text == value);
        if let Some(index) = entry.map(|at| at + 62).or(whole).filter(|_| self.random.u8(..8) > 0) {
            return Self::integer(out, 0x80, 7, index);
        }
        let (pattern, bits) = [(0x40, 6), (0x40, 6), (0, 4), (0x10, 4)][self.random.usize(..4)];
        let named = self.table.iter().rposition(|(known, _)| known == name).map(|at| at + 62);
        let indices = [named, Self::static_name(name), None];
        match indices[self.random.usize(..3)] {
            Some(index) => Self::integer(out, pattern, bits, index),
            None => {
                out.push(pattern);
                self.string(out, name);
            }
        }
        self.string(out, value);
        if pattern == 0x40 {
            self.table.push_front((name.to_owned(), value.to_owned()));
            self.evict();
        }
    }

    fn evict(&mut self) {
        let size = |table: &VecDeque<Field>| -> usize {
            table.iter().map(|(name, value)| name.len() + value.len() + 32).sum()
        };
        while size(&self.table) > self.max {
            self.table.pop_back();
        }
    }

    /// A header block of these fields.
    fn block(&mut self, fields: &[Field]) -> Vec<u8> {
        let mut out = Vec::new();
        if self.random.u8(..8) == 0 {
            self.max = self.random.usize(..=4096);
            Self::integer(&mut out, 0x20, 5, self.max);
            self.evict();
        }
        for (name, value) in fields {
            self.field(&mut out, name, value);
        }
        out
    }

    /// The frames of a request, some padded, with a priority, or in several pieces, between frames of other kinds.
    fn frames(&mut self, stream: u32, block: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        let frame = |out: &mut Vec<u8>, kind, flags, stream: u32, payload: &[u8]| {
            Head { length: payload.len(), kind, flags, stream: stream.to_be_bytes() }.write(out);
            out.extend_from_slice(payload);
        };
        if self.random.bool() {
            frame(&mut out, 6, 0, 0, b"12345678");
        }
        let pieces = self.random.usize(1..=3);
        let mut pieces: Vec<_> = block.chunks(block.len().div_ceil(pieces)).collect();
        let first = pieces.remove(0);
        let last = |is_last| if is_last { END_HEADERS } else { 0 };
        let (mut flags, mut payload) = (last(pieces.is_empty()), Vec::new());
        let padding = self.random.bool().then(|| self.random.u8(..100));
        flags |= padding.map_or(0, |_| PADDED);
        payload.extend(padding);
        if self.random.bool() {
            flags |= PRIORITY;
            payload.extend_from_slice(&[0, 0, 0, 0, 7]);
        }
        payload.extend_from_slice(first);
        payload.resize(payload.len() + usize::from(padding.unwrap_or(0)), 0);
        frame(&mut out, HEADERS, flags, stream, &payload);
        for (index, piece) in pieces.iter().enumerate() {
            frame(&mut out, CONTINUATION, last(index + 1 == pieces.len()), stream, piece);
        }
        frame(&mut out, 0, 1, stream, &vec![b'd'; self.random.usize(..300)]);
        out
    }

    /// The fields of a request, the authority anywhere among the first four.
    fn fields(&mut self, number: u32) -> Vec<Field> {
        let pick = |random: &mut Rng, from: &[&str]| from[random.usize(..from.len())].to_owned();
        let long = "/x".repeat(self.random.usize(1..1500));
        let authority = match self.random.u8(..8) {
            0 => long,
            1..4 => pick(&mut self.random, &ACCEPTED),
            _ => pick(&mut self.random, &REFUSED),
        };
        let field = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        let path = format!("/service/call-{}", number % 5);
        let mut fields = vec![
            field(":method", "POST"),
            field(":scheme", "http"),
            field(":path", &path),
            field(":authority", &authority),
        ];
        self.random.shuffle(&mut fields);
        for name in ["user-agent", "x-one", "x-two", "x-authority", "grpc-timeout"] {
            if self.random.bool() {
                let length = if self.random.u8(..6) == 0 { self.random.usize(..700) } else { 3 };
                fields.push((name.to_owned(), pick(&mut self.random, &["a", "b", "/"]).repeat(length)));
            }
        }
        fields
    }

    /// All that the client sends with so many requests, and their fields.
    pub(super) fn connection(mut self, requests: u32) -> (Vec<u8>, Vec<Vec<Field>>) {
        let mut out = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0".to_vec();
        let mut sent = Vec::new();
        for number in 0..requests {
            let fields = self.fields(number);
            let block = self.block(&fields);
            out.extend(self.frames(number * 2 + 1, &block));
            sent.push(fields);
        }
        (out, sent)
    }
}
