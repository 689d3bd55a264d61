//! What the fuzz targets share, and how the tests run them on seeded bytes. Not part of the agent; `fuzz/README.md` lists the
//! targets.

/// Bytes of the longest line that foreign input may cause: a message with several names of certificates.
const LONGEST_LINE: usize = 64 << 10;

/// The sections of an input: each is a tag, a length in two bytes, big-endian, and that many bytes (the last may be shorter).
pub fn sections(mut bytes: &[u8]) -> Vec<(u8, &[u8])> {
    let mut sections = Vec::new();
    while let [tag, high, low, rest @ ..] = bytes {
        let length = usize::from(u16::from_be_bytes([*high, *low])).min(rest.len());
        let (section, rest) = rest.split_at(length);
        sections.push((*tag, section));
        bytes = rest;
    }
    sections
}

/// Seconds since 1970, from a section of up to eight bytes.
pub fn moment(bytes: &[u8]) -> std::time::SystemTime {
    // Up to a year after 9999, the last that a date can have.
    let seconds = bytes.iter().fold(0_u64, |sum, byte| (sum << 8 | u64::from(*byte)) % (1 << 39));
    std::time::UNIX_EPOCH + std::time::Duration::from_secs(seconds)
}

/// Panics if `text` would not be one line of a log, of bounded length.
pub fn check_line(text: &str) {
    assert!(!text.contains(char::is_control), "a control character: {text:?}");
    assert!(text.len() <= LONGEST_LINE, "{} bytes: {text}", text.len());
}

/// Panics if `text` shows a part of `secret`.
pub fn check_hidden(text: &str, secret: &[u8]) {
    const SHOWN: usize = 20;
    let is_shown = |part: &[u8]| text.as_bytes().windows(SHOWN).any(|window| window == part);
    assert!(!secret.windows(SHOWN).any(is_shown), "a part of a secret: {text}");
}

/// The same where `input` has the secret after `place` and no part of it elsewhere, from where it may be shown.
pub fn check_hidden_in_place(text: &str, input: &[u8], place: &[u8], secret: &[u8]) {
    const PART: usize = 8;
    let whole = [place, secret].concat();
    let Some(at) = input.windows(whole.len()).position(|window| window == whole) else { return };
    let (before, rest) = input.split_at(at + place.len());
    let others = [before, rest.get(secret.len()..).unwrap_or_default()];
    let has_part = |bytes: &[u8]| bytes.windows(PART).any(|part| secret.windows(PART).any(|one| one == part));
    if !others.into_iter().any(has_part) {
        check_hidden(text, secret);
    }
}

#[cfg(test)]
pub(crate) use self::seeded::{Shape, join, seeded};

#[cfg(test)]
mod seeded {
    use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
    use std::path::Path;

    use fastrand::Rng;

    use super::sections;

    /// The directory into which the tests write their samples, for the fuzzer.
    const CORPUS: &str = "ATTACHE_FUZZ_CORPUS";

    /// The form of a target's input.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(crate) enum Shape {
        Bytes,
        Sections,
    }

    /// The inverse of [`sections`].
    pub(crate) fn join<S: AsRef<[u8]>>(sections: impl IntoIterator<Item = (u8, S)>) -> Vec<u8> {
        let mut bytes = Vec::new();
        for (tag, section) in sections {
            let length = u16::try_from(section.as_ref().len()).unwrap().to_be_bytes();
            bytes.push(tag);
            bytes.extend_from_slice(&length);
            bytes.extend_from_slice(section.as_ref());
        }
        bytes
    }

    /// Runs the fuzz target `name` on `samples`, which it must accept, and on `cases` mutations of them, of which it must
    /// accept some and refuse some.
    pub(crate) fn seeded(
        name: &str,
        shape: Shape,
        cases: u64,
        samples: &[Vec<u8>],
        target: impl Fn(&[u8]) -> bool,
    ) {
        write_corpus(name, samples);
        for (index, sample) in samples.iter().enumerate() {
            assert!(target(sample), "{name}: sample {index} is refused: {}", sample.escape_ascii());
        }
        let mut accepted = 0;
        for seed in 0..cases {
            let bytes = mutated(&mut Rng::with_seed(seed), shape, samples);
            let outcome = catch_unwind(AssertUnwindSafe(|| target(&bytes)));
            accepted += u64::from(outcome.unwrap_or_else(|panic| {
                eprintln!("{name}, seed {seed}: {}", bytes.escape_ascii());
                resume_unwind(panic)
            }));
        }
        assert!(accepted > 0 && accepted < cases, "{name}: {accepted} of {cases} are accepted");
    }

    fn write_corpus(name: &str, samples: &[Vec<u8>]) {
        let Some(corpus) = std::env::var_os(CORPUS) else { return };
        let directory = Path::new(&corpus).join(name);
        std::fs::create_dir_all(&directory).unwrap();
        for (index, sample) in samples.iter().enumerate() {
            std::fs::write(directory.join(format!("sample-{index}")), sample).unwrap();
        }
    }

    fn mutated(random: &mut Rng, shape: Shape, samples: &[Vec<u8>]) -> Vec<u8> {
        let pick = |random: &mut Rng| samples[random.usize(..samples.len())].clone();
        let (mut bytes, other) = (pick(random), pick(random));
        if shape == Shape::Bytes || random.u8(..8) == 0 {
            change(random, &mut bytes, &other);
            return bytes;
        }
        let mut all: Vec<_> = sections(&bytes).into_iter().map(|(tag, one)| (tag, one.to_vec())).collect();
        let others = sections(&other);
        for _ in 0..random.usize(1..3) {
            let at = random.usize(..all.len().max(1));
            let Some((tag, section)) = all.get_mut(at) else { break };
            match random.u8(..10) {
                0 => drop(all.remove(at)),
                1 => all.extend_from_within(at..=at),
                2 => *tag = others[random.usize(..others.len())].0,
                3 => all.swap(at, 0),
                4 => {
                    let (tag, section) = others[random.usize(..others.len())];
                    all.insert(at, (tag, section.to_vec()));
                }
                _ => {
                    change(random, section, &other);
                    section.truncate(usize::from(u16::MAX));
                }
            }
        }
        join(all)
    }

    /// Changes, adds or removes some bytes.
    fn change(random: &mut Rng, bytes: &mut Vec<u8>, other: &[u8]) {
        const ODD: &[u8] = b"\0\x01\x7f\x80\xff\n\r \"\\{}[]:;,.~-_/%&=+*09aZ";
        for _ in 0..random.usize(1..5) {
            let at = random.usize(..=bytes.len());
            let end = (at + random.usize(..24)).min(bytes.len());
            match random.u8(..11) {
                0 => bytes.truncate(at),
                1 => bytes.insert(at, random.u8(..)),
                2 => drop(bytes.drain(at..end)),
                3 => bytes.extend_from_within(at..end),
                4 => drop(bytes.splice(at..end, bytes[at..end].repeat(random.usize(2..40)))),
                5 => {
                    let from = random.usize(..=other.len());
                    let to = (from + random.usize(..40)).min(other.len());
                    bytes.splice(at..end, other[from..to].iter().copied());
                }
                6 | 7 => {
                    bytes.iter_mut().skip(at).take(1).for_each(|byte| *byte = ODD[random.usize(..ODD.len())])
                }
                8 => bytes.insert(at, ODD[random.usize(..ODD.len())]),
                _ => bytes.iter_mut().skip(at).take(1).for_each(|byte| *byte ^= 1 << random.u8(..8)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::{Path, PathBuf};

    use super::*;

    #[test]
    fn sections_are_read_as_they_were_joined() {
        let all = [(b'a', &b"one"[..]), (b'b', &[]), (b'a', &[0; 300])];
        assert_eq!(sections(&join(all)), all);
        assert_eq!(sections(&[7, 0, 9, 1]), [(7, &[1][..])], "the last one is cut off");
    }

    #[test]
    #[should_panic(expected = "a part of a secret")]
    fn a_shown_secret_is_found() {
        check_hidden("token: abcdefghijklmnopqrstuvwxyz.", b"--abcdefghijklmnopqrstuvw--");
    }

    #[test]
    #[should_panic(expected = "a control character")]
    fn a_second_line_is_found() {
        check_line("one\ntwo");
    }

    fn sources(directory: &Path, found: &mut String) {
        let mut paths: Vec<PathBuf> =
            fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).collect();
        paths.sort();
        for path in paths {
            if path.is_dir() {
                sources(&path, found);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                found.push_str(&fs::read_to_string(path).unwrap());
            }
        }
    }

    #[test]
    fn each_target_is_built_by_the_fuzzer_listed_and_run_by_a_test() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let read = |path: &str| fs::read_to_string(root.join(path)).unwrap();
        let (manifest, readme, mut code) = (read("fuzz/Cargo.toml"), read("fuzz/README.md"), String::new());
        sources(&root.join("src"), &mut code);
        // Without the spaces between a call and its first argument.
        let code: String = code.split_whitespace().collect();
        let mut targets = 0;
        for file in fs::read_dir(root.join("fuzz/fuzz_targets")).unwrap() {
            let path = file.unwrap().path();
            let name = path.file_stem().unwrap().to_str().unwrap();
            targets += 1;
            assert!(manifest.contains(&format!("name = \"{name}\"\n")), "fuzz/Cargo.toml has no {name}");
            assert!(readme.contains(&format!("| `{name}` |")), "fuzz/README.md does not list {name}");
            // The input of `requests` is a conversation, which its own test makes up.
            let is_run = code.contains(&format!("seeded(\"{name}\","))
                || name == "requests" && code.contains("fnalmost_valid_requests_break_no_rule()");
            assert!(is_run, "no test runs {name}");
        }
        assert_eq!(manifest.matches("[[bin]]").count(), targets, "fuzz/Cargo.toml names other targets");
        assert_eq!(
            code.matches("seeded(\"").count(),
            targets - 1,
            "a test runs a target that the fuzzer does not have"
        );
    }
}
