//! Fuzz target: durations and switches.

use super::{parse_duration, parse_switch};
use crate::base::fuzzing::check_line;

/// A duration. True if it is one.
pub fn duration(bytes: &[u8]) -> bool {
    let text = String::from_utf8_lossy(bytes);
    if let Err(error) = parse_switch(&text) {
        check_line(&error);
    }
    match parse_duration(&text) {
        Ok(duration) => {
            let written = humantime::format_duration(duration).to_string().replace(' ', "");
            assert_eq!(parse_duration(&written), Ok(duration), "{text:?} is written as {written:?}");
            // Every deadline and every moment can be computed.
            assert!(std::time::Instant::now().checked_add(duration * 2).is_some());
            assert!(std::time::UNIX_EPOCH.checked_add(duration * 2).is_some());
            true
        }
        Err(error) => {
            check_line(&error);
            false
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::fuzzing::{Shape, seeded};

    #[test]
    fn almost_valid_durations_break_no_rule() {
        let samples = ["24h", "90s", "100ms", "24h0m0s", "1.5h", "1h 30m", "99years", "0s"];
        let samples = samples.map(|text| text.as_bytes().to_vec());
        seeded("duration", Shape::Bytes, 8_000, &samples, duration);
        for text in ["101years", "18446744073709551615s", "-1s", "1e9s", "true", ""] {
            assert!(!duration(text.as_bytes()), "{text}");
        }
    }
}
