//! Fuzz target: the options file.

use std::path::Path;

use super::ConfigErrors;
use super::options_file::parse;
use crate::base::fuzzing::check_line;

/// The content of an options file. True if nothing is wrong with it, and it sets an option.
pub fn options_file(bytes: &[u8]) -> bool {
    let check = |mistakes: &[String]| {
        for mistake in mistakes {
            check_line(mistake);
            assert!(mistake.contains("line "), "without a line: {mistake}");
        }
    };
    let (file, mistakes) = match parse(Path::new("/etc/attache.toml"), bytes) {
        Ok(parsed) => parsed,
        Err(ConfigErrors(errors)) => {
            assert!(!errors.is_empty());
            check(&errors);
            return false;
        }
    };
    check(&mistakes);
    let lines = bytes.split(|byte| *byte == b'\n').count();
    let mut is_empty = true;
    for name in file.names() {
        is_empty = false;
        check_line(name);
        let is_sound = file.get(name).is_some_and(|option| {
            let is_set = !option.values.is_empty() && option.values.iter().all(|value| !value.is_empty());
            is_set && (1..=lines).contains(&option.line)
        });
        assert!(is_sound, "{name}: {:?}", file.get(name).map(|option| option.line));
    }
    assert!(file.differences(&file.clone()).is_empty());
    mistakes.is_empty() && !is_empty
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::fuzzing::{Shape, seeded};

    #[test]
    fn almost_valid_options_files_break_no_rule() {
        let samples = [
            "ca = \"embedded\"\nca-dir = '/var/lib/attache'\n",
            "# comment\nca-address = [\"a:1\", \"b:2\"] # more\nlandlock = true\ngrace-ratio = 0.25\n",
            "output-hook = \"\"\"\nsystemctl reload nginx\n\"\"\"\nallow-uid = [0, 1_000]\n",
            "ca-header = \"x-tenant=a\"\r\n\"socket\" = \"/run/\\u0061.sock\"\r\n",
        ];
        let samples = samples.map(|text| text.as_bytes().to_vec());
        seeded("options_file", Shape::Bytes, 1_500, &samples, options_file);
        for text in
            ["", "\u{feff}", "[run]\nca = \"none\"", "ca = { b = 1 }", "ca.b = 1", "[[ca]]", "= 1", "\0"]
        {
            assert!(!options_file(text.as_bytes()), "{text}");
        }
    }
}
