//! Fuzz target: what Envoy prints, writes and answers.

use serde_json::Value;

use super::{admin, log_lines, process, validate};
use crate::base::fuzzing::check_line;

/// Bytes of the longest line of the log that a line of the program may cause: each byte may become an escape of six.
const LONGEST: usize = 6 * log_lines::LINE_BYTES + 1024;

/// Anything of Envoy's. True if one of its readers makes something of it.
pub fn command_output(bytes: &[u8]) -> bool {
    let text = String::from_utf8_lossy(bytes);
    check_line(&validate::words_of(&text));
    let means_something = admin::read_all(&text);
    process::handles(&text, rustix::process::Signal::USR1);
    let whole = log_lines::of_bytes(bytes);
    // However it is read, the lines are the same.
    for size in [1, 7] {
        assert_eq!(log_lines::of_chunks(bytes.chunks(size)), whole, "{text:?}");
    }
    for line in &whole {
        let text = line.strip_suffix(b"\n").unwrap_or(line);
        assert!(!text.contains(&b'\n') && text.len() <= LONGEST);
        let object: Value = serde_json::from_slice(text).unwrap_or_default();
        assert!(object.is_object(), "no object: {}", String::from_utf8_lossy(text));
    }
    means_something
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::fuzzing::{Shape, seeded};

    #[test]
    fn almost_usual_output_breaks_no_rule() {
        let samples = [
            "[2026-01-01 00:00:00.000][7][warning][main] [f:1] text\n{\"a\": 1}\nno such field: 'x'\n",
            "listener.a.downstream_cx_active: 18446744073709551615\nlistener.b.downstream_cx_active: 7\n",
            "server.hot_restart_epoch: 1\n",
            "{\"configs\": [{\"bootstrap\": {\"node\": {\"id\": \"a\"}}}]}\n",
            "127.0.0.1:9901",
            "SigCgt:\t0000000000000a00\n",
        ];
        let samples = samples.map(|text| text.as_bytes().to_vec());
        seeded("command_output", Shape::Bytes, 4_000, &samples, command_output);
    }
}
