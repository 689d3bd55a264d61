//! A JSON reader that skips what is not wanted, fast, and copies nothing.
//!
//! It is lenient: what it skips may break JSON's rules, as long as its strings and brackets end. It reads what an API
//! server writes, and finds out where that was cut off.

use std::borrow::Cow;

use memchr::memchr2;

/// The text is no JSON, ends early, or a value has another type than expected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("its JSON is damaged, or not of the expected shape, at byte {at}")]
pub(super) struct Invalid {
    at: usize,
}

/// Whether to read on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    Continue,
    /// All that is needed is known.
    Stop,
}

#[derive(Debug)]
pub(super) struct Reader<'a> {
    text: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    pub(super) fn new(text: &'a [u8]) -> Self {
        Self { text, at: 0 }
    }

    pub(super) fn invalid(&self) -> Invalid {
        Invalid { at: self.at }
    }

    /// The first byte of the next token.
    fn peek(&mut self) -> Result<u8, Invalid> {
        while let Some(&byte) = self.text.get(self.at) {
            if !matches!(byte, b' ' | b'\n' | b'\r' | b'\t') {
                return Ok(byte);
            }
            self.at += 1;
        }
        Err(self.invalid())
    }

    /// Takes `byte` if it comes next.
    fn takes(&mut self, byte: u8) -> Result<bool, Invalid> {
        let is_next = self.peek()? == byte;
        self.at += usize::from(is_next);
        Ok(is_next)
    }

    fn expect(&mut self, byte: u8) -> Result<(), Invalid> {
        if self.takes(byte)? { Ok(()) } else { Err(self.invalid()) }
    }

    /// Takes `null` if it comes next.
    fn takes_null(&mut self) -> Result<bool, Invalid> {
        let is_null =
            self.peek()? == b'n' && self.text.get(self.at..).is_some_and(|rest| rest.starts_with(b"null"));
        self.at += if is_null { 4 } else { 0 };
        Ok(is_null)
    }

    /// Nothing but blanks may follow.
    pub(super) fn end(mut self) -> Result<(), Invalid> {
        match self.peek() {
            Ok(_) => Err(self.invalid()),
            Err(_) => Ok(()),
        }
    }

    /// The bytes of a string, with its quotes, and whether it has escapes.
    fn quoted(&mut self) -> Result<(&'a [u8], bool), Invalid> {
        self.expect(b'"')?;
        let (start, mut has_escapes) = (self.at - 1, false);
        loop {
            let rest = self.text.get(self.at..).unwrap_or_default();
            let found = memchr2(b'"', b'\\', rest).ok_or(Invalid { at: self.text.len() })?;
            self.at += found + 1;
            if rest.get(found) == Some(&b'"') {
                return Ok((self.text.get(start..self.at).unwrap_or_default(), has_escapes));
            }
            has_escapes = true;
            self.at += 1;
        }
    }

    pub(super) fn string(&mut self) -> Result<Cow<'a, str>, Invalid> {
        let at = self.at;
        let (quoted, has_escapes) = self.quoted()?;
        if has_escapes {
            return serde_json::from_slice(quoted).map(Cow::Owned).map_err(|_| Invalid { at });
        }
        let text = quoted.get(1..quoted.len() - 1).unwrap_or_default();
        std::str::from_utf8(text).map(Cow::Borrowed).map_err(|_| Invalid { at })
    }

    /// A string; an empty one for `null`.
    pub(super) fn text(&mut self) -> Result<Cow<'a, str>, Invalid> {
        if self.takes_null()? { Ok(Cow::Borrowed("")) } else { self.string() }
    }

    /// Goes over a value of any type, and returns its bytes.
    pub(super) fn skip(&mut self) -> Result<&'a [u8], Invalid> {
        let first = self.peek()?;
        let start = self.at;
        match first {
            b'"' => drop(self.quoted()?),
            b'{' | b'[' => self.skip_nested()?,
            _ => {
                let rest = self.text.get(self.at..).unwrap_or_default();
                let is_part = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'+' | b'.');
                let length = rest.iter().take_while(|byte| is_part(byte)).count();
                if length == 0 {
                    return Err(self.invalid());
                }
                self.at += length;
            }
        }
        Ok(self.text.get(start..self.at).unwrap_or_default())
    }

    /// Goes over what is in brackets, at whatever depth.
    fn skip_nested(&mut self) -> Result<(), Invalid> {
        let mut depth = 0_usize;
        while let Some(&byte) = self.text.get(self.at) {
            match byte {
                b'"' => {
                    self.quoted()?;
                    continue;
                }
                b'{' | b'[' => depth += 1,
                b'}' | b']' => depth -= 1,
                _ => {}
            }
            self.at += 1;
            if depth == 0 {
                return Ok(());
            }
        }
        Err(self.invalid())
    }

    /// Calls `each` with the keys of an object; it must take the value. `null` is an empty object.
    pub(super) fn object(
        &mut self,
        mut each: impl FnMut(&str, &mut Self) -> Result<Next, Invalid>,
    ) -> Result<Next, Invalid> {
        if self.takes_null()? {
            return Ok(Next::Continue);
        }
        self.expect(b'{')?;
        if self.takes(b'}')? {
            return Ok(Next::Continue);
        }
        loop {
            self.peek()?;
            let key = self.string()?;
            self.expect(b':')?;
            if each(&key, self)? == Next::Stop {
                return Ok(Next::Stop);
            }
            if !self.takes(b',')? {
                self.expect(b'}')?;
                return Ok(Next::Continue);
            }
        }
    }

    /// Calls `each` for the elements of an array; it must take the element. `null` is an empty array.
    pub(super) fn array(
        &mut self,
        mut each: impl FnMut(&mut Self) -> Result<(), Invalid>,
    ) -> Result<(), Invalid> {
        if self.takes_null()? {
            return Ok(());
        }
        self.expect(b'[')?;
        if self.takes(b']')? {
            return Ok(());
        }
        loop {
            each(self)?;
            if !self.takes(b',')? {
                return self.expect(b']');
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_value_is_skipped_to_its_end() {
        let values = [
            "1",
            "-1.5e+3",
            "true",
            "null",
            r#""text""#,
            r#""a\"b\\""#,
            r#"{"a":[1,{"b":"]}"}]}"#,
            "[]",
            "{}",
        ];
        for value in values {
            let text = format!(" {value} ,");
            let mut reader = Reader::new(text.as_bytes());
            assert_eq!(reader.skip().unwrap(), value.as_bytes());
            assert!(reader.takes(b',').unwrap());
        }
        for cut in ["", "\"", "\"\\", "\"\\\"", "[", "{\"a\":", "[\"]", ","] {
            assert!(Reader::new(cut.as_bytes()).skip().is_err(), "{cut}");
        }
    }

    #[test]
    fn strings_are_decoded() {
        let mut reader = Reader::new(br#""plain" "\u003ca\n\ud83d\ude80\u003e" null"#);
        assert_eq!(reader.text().unwrap(), "plain");
        assert_eq!(reader.text().unwrap(), "<a\n\u{1f680}>");
        assert_eq!(reader.text().unwrap(), "");
        for bad in [&b"1"[..], b"\"\\x\"", b"\"\xff\"", b"\"open"] {
            assert!(Reader::new(bad).string().is_err());
        }
    }
}
