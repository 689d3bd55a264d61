//! Header blocks of requests (HPACK, RFC 7541) without the `:authority` fields that hyper's server refuses.
//!
//! A literal field may become an entry of the dynamic table, to which later fields refer by its age. The server's table
//! lacks the entries of removed fields, so references to older entries are lowered by one for each of them. It holds less
//! than the client's table, so it discards no entry earlier than the client does.

use std::collections::VecDeque;

use http::uri::Authority;

/// `:authority` without a value, in the static table.
const STATIC_AUTHORITY: u64 = 1;
/// Indices of the static table end here; the newest entry of the dynamic table comes next.
const LAST_STATIC: u64 = 61;
/// Entries that fit into the dynamic table: it has 4,096 bytes, as the server announces no other size, and an entry takes at
/// least 32.
const MAX_ENTRIES: u64 = 4096 / 32;

const NAME: &[u8] = b":authority";
const NAME_IN_HUFFMAN: &[u8] = b"\xb8\x3b\x53\x39\xec\x32\x7d\x7f";

/// The server fails the connection for such a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Malformed;

/// The header blocks of one connection.
#[derive(Debug, Default)]
pub(super) struct HeaderBlocks {
    /// Entries that the client has added to its dynamic table so far.
    added: u64,
    /// Those of them that are authorities, oldest first.
    authorities: VecDeque<Entry>,
}

#[derive(Debug)]
struct Entry {
    /// How many entries the client added before this one.
    number: u64,
    is_removed: bool,
}

impl HeaderBlocks {
    /// `block` without refused authorities, which is not longer; none if there is nothing to change.
    pub(super) fn rewrite(&mut self, block: &[u8]) -> Result<Option<Vec<u8>>, Malformed> {
        let mut edits = Edits { block, copied: 0, out: Vec::new() };
        let mut reader = Reader(block);
        while let Some(&first) = reader.0.first() {
            let start = block.len() - reader.0.len();
            let prefix = match first {
                0x80.. => Prefix { pattern: 0x80, bits: 7 },
                0x40.. => Prefix { pattern: 0x40, bits: 6 },
                0x20.. => Prefix { pattern: 0x20, bits: 5 },
                // Whether or not it may be indexed further on.
                _ => Prefix { pattern: first & 0x10, bits: 4 },
            };
            let integer = reader.integer(prefix.bits)?;
            let after_integer = block.len() - reader.0.len();
            match prefix.pattern {
                0x80 => match self.indexed(integer)? {
                    Reference::Same => {}
                    Reference::Removed => edits.replace(start, after_integer, &[]),
                    Reference::At(index) => edits.replace(start, after_integer, &prefix.encode(index)),
                },
                // The size of the table.
                0x20 => {}
                pattern => {
                    let name = self.name(integer, &mut reader)?;
                    let value = reader.string()?;
                    let is_refused = name.is_authority && !value.is_valid_authority()?;
                    match name.index {
                        _ if is_refused => edits.replace(start, block.len() - reader.0.len(), &[]),
                        Some(index) => edits.replace(start, after_integer, &prefix.encode(index)),
                        None => {}
                    }
                    if pattern == 0x40 {
                        self.add(name.is_authority, is_refused);
                    }
                }
            }
        }
        Ok(edits.finish())
    }

    /// What a whole field in a table is for the server.
    fn indexed(&self, index: u64) -> Result<Reference, Malformed> {
        match index {
            STATIC_AUTHORITY => Ok(Reference::Removed),
            ..=LAST_STATIC => Ok(Reference::Same),
            _ => {
                let entry = self.entry(index)?;
                Ok(match entry.is_removed {
                    true => Reference::Removed,
                    false if entry.index == index => Reference::Same,
                    false => Reference::At(entry.index),
                })
            }
        }
    }

    /// The name of a literal field: `index`, or a string.
    fn name(&self, index: u64, reader: &mut Reader<'_>) -> Result<Name, Malformed> {
        match index {
            0 => Ok(Name { is_authority: reader.string()?.is_authority_name(), index: None }),
            1..=LAST_STATIC => Ok(Name { is_authority: index == STATIC_AUTHORITY, index: None }),
            _ => {
                let entry = self.entry(index)?;
                let new = if entry.is_authority { STATIC_AUTHORITY } else { entry.index };
                Ok(Name { is_authority: entry.is_authority, index: (new != index).then_some(new) })
            }
        }
    }

    fn entry(&self, index: u64) -> Result<Found, Malformed> {
        let age = index - LAST_STATIC;
        let number = self.added.checked_sub(age).ok_or(Malformed)?;
        let mut found = Found { index, is_authority: false, is_removed: false };
        for entry in self.authorities.iter().rev().take_while(|entry| entry.number >= number) {
            if entry.number == number {
                found.is_authority = true;
                found.is_removed = entry.is_removed;
            } else if entry.is_removed {
                found.index -= 1;
            }
        }
        Ok(found)
    }

    fn add(&mut self, is_authority: bool, is_removed: bool) {
        if is_authority {
            let is_discarded = |entry: &Entry| entry.number + MAX_ENTRIES <= self.added;
            while self.authorities.front().is_some_and(is_discarded) {
                self.authorities.pop_front();
            }
            self.authorities.push_back(Entry { number: self.added, is_removed });
        }
        self.added += 1;
    }
}

/// How an index is to be written for the server.
enum Reference {
    Same,
    At(u64),
    Removed,
}

struct Name {
    is_authority: bool,
    /// Its index for the server, if that is another one.
    index: Option<u64>,
}

/// An entry of the dynamic table.
struct Found {
    /// Its index for the server.
    index: u64,
    is_authority: bool,
    is_removed: bool,
}

/// A block with changes, which come in order.
struct Edits<'a> {
    block: &'a [u8],
    /// So much of the block is in `out`, or replaced.
    copied: usize,
    out: Vec<u8>,
}

impl Edits<'_> {
    fn replace(&mut self, from: usize, to: usize, with: &[u8]) {
        self.out.extend_from_slice(self.block.get(self.copied..from).unwrap_or_default());
        self.out.extend_from_slice(with);
        self.copied = to;
    }

    fn finish(mut self) -> Option<Vec<u8>> {
        let end = self.block.len();
        (self.copied > 0).then(|| {
            self.replace(end, end, &[]);
            self.out
        })
    }
}

/// How the first byte of a field is divided.
#[derive(Clone, Copy)]
struct Prefix {
    pattern: u8,
    /// The low bits, in which an integer begins.
    bits: u32,
}

impl Prefix {
    fn encode(self, integer: u64) -> Vec<u8> {
        let max = (1 << self.bits) - 1;
        let byte = |integer: u64| integer.to_le_bytes()[0];
        if integer < max {
            return vec![self.pattern | byte(integer)];
        }
        let mut out = vec![self.pattern | byte(max)];
        let mut rest = integer - max;
        while rest >= 0x80 {
            out.push(0x80 | byte(rest & 0x7f));
            rest >>= 7;
        }
        out.push(byte(rest));
        out
    }
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn byte(&mut self) -> Result<u8, Malformed> {
        let (first, rest) = self.0.split_first().ok_or(Malformed)?;
        self.0 = rest;
        Ok(*first)
    }

    fn integer(&mut self, bits: u32) -> Result<u64, Malformed> {
        /// The server takes no more.
        const MAX_BYTES: u32 = 4;
        let max = (1_u64 << bits) - 1;
        let mut integer = u64::from(self.byte()?) & max;
        if integer < max {
            return Ok(integer);
        }
        for index in 0..MAX_BYTES {
            let byte = self.byte()?;
            integer += u64::from(byte & 0x7f) << (7 * index);
            if byte & 0x80 == 0 {
                return Ok(integer);
            }
        }
        Err(Malformed)
    }

    fn string(&mut self) -> Result<Text<'a>, Malformed> {
        let is_huffman = self.0.first().is_some_and(|first| first & 0x80 != 0);
        let length = self.integer(7)?;
        let length = usize::try_from(length).map_err(|_| Malformed)?;
        let (bytes, rest) = self.0.split_at_checked(length).ok_or(Malformed)?;
        self.0 = rest;
        Ok(Text { is_huffman, bytes })
    }
}

/// A string as it is in a block.
struct Text<'a> {
    is_huffman: bool,
    bytes: &'a [u8],
}

impl Text<'_> {
    fn is_authority_name(&self) -> bool {
        self.bytes == if self.is_huffman { NAME_IN_HUFFMAN } else { NAME }
    }

    fn is_valid_authority(&self) -> Result<bool, Malformed> {
        Ok(match self.is_huffman {
            true => Authority::try_from(huffman(self.bytes)?).is_ok(),
            false => Authority::try_from(self.bytes).is_ok(),
        })
    }
}

/// Huffman codes of each length in bits: how many there are, and what they stand for. Codes of one length are consecutive, and
/// go on where the shorter ones end.
pub(super) const CODES: [(u32, u32, &[u8]); 21] = [
    (5, 10, b"012aceiost"),
    (6, 26, b" %-./3456789=A_bdfghlmnpru"),
    (7, 32, b":BCDEFGHIJKLMNOPQRSTUVWYjkqvwxyz"),
    (8, 6, b"&*,;XZ"),
    (10, 5, b"!\"()?"),
    (11, 3, b"'+|"),
    (12, 2, b"#>"),
    (13, 6, b"\0$@[]~"),
    (14, 2, b""),
    (15, 3, b""),
    (19, 3, b""),
    (20, 8, b""),
    (21, 13, b""),
    (22, 26, b""),
    (23, 29, b""),
    (24, 12, b""),
    (25, 4, b""),
    (26, 15, b""),
    (27, 19, b""),
    (28, 29, b""),
    (30, 3, b""),
];

/// Decodes `bytes`. What has a code of more than 13 bits is in no authority, and becomes NUL.
fn huffman(bytes: &[u8]) -> Result<Vec<u8>, Malformed> {
    let mut out = Vec::with_capacity(bytes.len() * 8 / 5);
    let (mut bits, mut count) = (0_u64, 0_u32);
    let mut bytes = bytes.iter();
    loop {
        while count <= 32 {
            let Some(byte) = bytes.next() else { break };
            bits = bits << 8 | u64::from(*byte);
            count += 8;
        }
        let (mut first, mut last_length) = (0, 0);
        let found = CODES.iter().find_map(|&(length, codes, symbols)| {
            first <<= length - last_length;
            last_length = length;
            let code = bits >> count.checked_sub(length)?;
            let index = code.wrapping_sub(first);
            first += u64::from(codes);
            let symbol = || usize::try_from(index).ok().and_then(|index| symbols.get(index).copied());
            (index < u64::from(codes)).then(|| (length, symbol().unwrap_or(0)))
        });
        match found {
            Some((length, symbol)) => {
                out.push(symbol);
                count -= length;
                bits &= (1 << count) - 1;
            }
            // The rest is padding: ones.
            None if count < 8 && bits == (1 << count) - 1 => return Ok(out),
            None => return Err(Malformed),
        }
    }
}

#[cfg(test)]
mod tests;
