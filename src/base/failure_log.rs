//! Which failures are news: a repeated one is logged once.

/// Remembers the last failure, so that its repetitions can be logged at a lower level.
#[derive(Debug, Default)]
pub struct FailureLog {
    last: Option<String>,
}

impl FailureLog {
    /// True if `failure` is another one than the last. Addresses, names, paths, options and status codes make a
    /// difference. Moments, durations, identifiers, process ids and our own ports don't: they change at each retry.
    pub fn is_new(&mut self, failure: &str) -> bool {
        let failure = Some(lasting_part(failure));
        let is_new = self.last != failure;
        self.last = failure;
        is_new
    }

    /// Notes a success; true if it ends a series of failures.
    pub fn recovered(&mut self) -> bool {
        self.last.take().is_some()
    }
}

/// Words before a number, or an identifier, that changes at each retry.
const LABELS: [&str; 7] = ["attempt", "id", "pid", "process", "request", "serial", "try"];
/// What a number of these is, is a duration.
const UNITS: [&str; 10] =
    ["seconds", "second", "secs", "sec", "minutes", "minute", "hours", "hour", "days", "day"];
/// HTTP and exit statuses, error numbers of the system and gRPC codes have no more digits. Longer numbers are
/// process ids, sizes, seconds since 1970.
const CODE_DIGITS: usize = 3;
/// From this length on a hexadecimal number is an identifier: of a request, a generation, a certificate.
const IDENTIFIER_DIGITS: usize = 8;

/// `failure` without what changes from one retry to the next.
fn lasting_part(failure: &str) -> String {
    let words: Vec<_> = failure.split_whitespace().collect();
    let cores: Vec<_> = words
        .iter()
        .map(|word| word.trim_matches(|c: char| !c.is_ascii_alphanumeric() && c != 'µ'))
        .collect();
    let mut lasting = Vec::with_capacity(words.len());
    for (index, (word, core)) in words.iter().zip(&cores).enumerate() {
        let before = index.checked_sub(1).and_then(|index| cores.get(index)).copied().unwrap_or_default();
        let after = cores.get(index + 1).copied().unwrap_or_default();
        if is_passing(before, core, after) {
            continue;
        }
        lasting.push(without_identifiers(without_own_port(word)));
    }
    lasting.join(" ")
}

/// Whether `word`, between the two others, changes at each retry as a whole.
fn is_passing(before: &str, word: &str, after: &str) -> bool {
    let is_number = !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_digit());
    let is_counted = LABELS.contains(&before)
        && word.bytes().any(|byte| byte.is_ascii_digit())
        && word.bytes().all(|byte| byte.is_ascii_alphanumeric());
    let is_large = is_number && word.len() > CODE_DIGITS;
    is_counted || is_large || is_number && UNITS.contains(&after) || is_moment(word) || is_duration(word)
}

/// A date, with a time or without (2026-06-21T07:20:00Z, 2026/06/21), or a time (07:20:00.123).
fn is_moment(word: &str) -> bool {
    let begins = |shape: &str| {
        let mut bytes = word.bytes();
        shape.bytes().all(|expected| match (expected, bytes.next()) {
            (b'0', Some(byte)) => byte.is_ascii_digit(),
            (b'-', Some(byte)) => byte == b'-' || byte == b'/',
            (_, byte) => byte == Some(expected),
        })
    };
    begins("0000-00-00") || begins("00:00:00")
}

/// What Rust, Go and people write: 10s, 2.5s, 200ms, 1m30s, 1h0m0s.
fn is_duration(word: &str) -> bool {
    let mut rest = word;
    while !rest.is_empty() {
        let unit = rest.trim_start_matches(|c: char| c.is_ascii_digit() || c == '.');
        let end = unit.find(|c: char| c.is_ascii_digit()).unwrap_or(unit.len());
        let (unit_name, next) = unit.split_at(end);
        let is_known = matches!(unit_name, "ns" | "us" | "µs" | "ms" | "s" | "m" | "h" | "d" | "min");
        if unit.len() == rest.len() || !is_known {
            return false;
        }
        rest = next;
    }
    !word.is_empty()
}

/// `10.0.0.5:48212->10.0.0.1:443`, as Go's programs write a connection, without the port at its own end.
fn without_own_port(word: &str) -> String {
    match word.split_once("->") {
        Some((own, peer)) => format!("{}->{peer}", own.rsplit_once(':').map_or(own, |(host, _)| host)),
        None => word.to_owned(),
    }
}

/// `word` without the hexadecimal numbers in it that are as long as an identifier.
fn without_identifiers(word: String) -> String {
    let is_identifier = |run: &str| {
        run.len() >= IDENTIFIER_DIGITS
            && run.bytes().all(|byte| byte.is_ascii_hexdigit())
            && run.bytes().any(|byte| byte.is_ascii_digit())
    };
    let runs = word.split_inclusive(|c: char| !c.is_ascii_alphanumeric());
    let kept = runs.map(|run| {
        let digits = run.trim_end_matches(|c: char| !c.is_ascii_alphanumeric());
        if is_identifier(digits) { run.get(digits.len()..).unwrap_or_default() } else { run }
    });
    kept.collect()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn only_a_different_failure_is_news() {
        let mut log = FailureLog::default();
        assert!(!log.recovered());
        assert!(log.is_new("refused"));
        assert!(!log.is_new("refused"));
        assert!(log.is_new("timed out after 1s"));
        assert!(!log.is_new("timed out after 2s"));
        assert!(log.recovered());
        assert!(log.is_new("timed out after 2s"));
    }

    fn is_news(before: &str, after: &str) -> bool {
        let mut log = FailureLog::default();
        log.is_new(before);
        log.is_new(after)
    }

    #[test]
    fn a_failure_that_moves_is_news() {
        let pairs = [
            // Addresses and names.
            (
                "connecting to the CA at https://10.0.0.1:15012 failed: Connection refused (os error 111)",
                "connecting to the CA at https://10.0.0.2:15012 failed: Connection refused (os error 111)",
            ),
            (
                "connecting to the CA at https://ca:15012 failed: Connection refused (os error 111)",
                "connecting to the CA at https://ca:15017 failed: Connection refused (os error 111)",
            ),
            (
                "the TLS handshake with the CA at https://ca-1:8200 failed: UnknownIssuer",
                "the TLS handshake with the CA at https://ca-2:8200 failed: UnknownIssuer",
            ),
            ("the CA at http://[fd00::1]:8888 answered", "the CA at http://[fd00::2]:8888 answered"),
            (
                "ca1: the CA gave no answer within 10s: it is overloaded",
                "ca2: the CA gave no answer within 10s: it is overloaded",
            ),
            (
                "the certificate names spiffe://td/ns/a/sa/web1, not spiffe://td/ns/a/sa/web",
                "the certificate names spiffe://td/ns/a/sa/web2, not spiffe://td/ns/a/sa/web",
            ),
            // One more, or one less.
            ("a1: timed out", "a1: timed out; b1: timed out"),
            // Paths and options.
            ("/etc/certs1/key.pem: Permission denied", "/etc/certs2/key.pem: Permission denied"),
            ("/run/secrets/2026/key.pem: it is empty", "/run/secrets/2027/key.pem: it is empty"),
            ("choose --key-type rsa-2048", "choose --key-type rsa-4096"),
            // Codes.
            ("the CA at https://ca answered 500: no", "the CA at https://ca answered 403: no"),
            ("the command ended with exit status: 1", "the command ended with exit status: 2"),
            ("replacing /state failed: os error 28", "replacing /state failed: os error 30"),
            // Places.
            ("CRL 1 of it can't be used", "CRL 2 of it can't be used"),
            ("it has the format 2", "it has the format 3"),
        ];
        for (before, after) in pairs {
            assert!(is_news(before, after), "not news: {after}");
            assert!(!is_news(after, after), "news again: {after}");
        }
    }

    #[test]
    fn what_changes_at_each_retry_is_no_news() {
        let pairs = [
            // Durations.
            ("the CA gave no answer within 10s: it is", "the CA gave no answer within 2.345678s: it is"),
            ("it did not end in 500ms and was killed", "it did not end in 1.5s and was killed"),
            ("retry in 1m30s", "retry in 1h0m0s"),
            ("not valid after (12 seconds ago)", "not valid after (15 seconds ago)"),
            // Moments: our own, rustls' and Go's.
            (
                "the certificate expired at 2026-06-21T07:20:00Z: the CA's clock is wrong",
                "the certificate expired at 2026-06-21T07:20:30Z: the CA's clock is wrong",
            ),
            (
                "certificate expired: verified at time 1782000000 (UNIX)",
                "certificate expired: verified at time 1782000030 (UNIX)",
            ),
            (
                "current time 2026-06-21T07:20:00+02:00 is after 2026-06-20T00:00:00Z",
                "current time 2026-06-21T07:20:30+02:00 is after 2026-06-20T00:00:00Z",
            ),
            ("2026/06/21 07:20:00 sealed", "2026/06/21 07:20:31.5 sealed"),
            ("2026-06-21 07:20:00.5 +0200 CEST sealed", "2026-06-21 07:21:00.5 +0200 CEST sealed"),
            // Identifiers.
            (
                "certificatesigningrequests/attache-4f1c2b3a5d6e7f80 waits for approval",
                "certificatesigningrequests/attache-99aa2b3a5d6e7f81 waits for approval",
            ),
            (
                "writing /out/..attache-4f1c2b3a/key.pem failed: No space left",
                "writing /out/..attache-0d1c2b3a/key.pem failed: No space left",
            ),
            (
                "request 3f2a9c1b-7d21-4f0e-9a43-0c6a1b2d3e4f failed",
                "request 9bca9c1b-7d21-4f0e-9a43-1c6a1b2d3e50 failed",
            ),
            (
                "does not fit the certificate of web (serial 7b)",
                "does not fit the certificate of web (serial 8c)",
            ),
            ("serial=57ec16b9131a527f784fd37bc5be311b", "serial=07ec16b9131a527f784fd37bc5be3110"),
            ("(process 4711)", "(process 12)"),
            ("sh: pid 57 was killed", "sh: pid 61 was killed"),
            // Go's servers name both ends of a connection.
            (
                "read udp 10.1.1.1:54321->10.96.0.10:53: i/o timeout",
                "read udp 10.1.1.1:60123->10.96.0.10:53: i/o timeout",
            ),
        ];
        for (before, after) in pairs {
            assert!(!is_news(before, after), "news: {after}");
        }
        let other_peer = "read udp 10.1.1.1:60123->10.96.0.11:53: i/o timeout";
        assert!(is_news("read udp 10.1.1.1:54321->10.96.0.10:53: i/o timeout", other_peer));
    }

    #[test]
    fn a_duration_is_recognized_as_rust_writes_it() {
        for duration in
            [Duration::ZERO, Duration::from_nanos(1500), Duration::from_micros(10_001), Duration::MAX]
        {
            assert!(is_duration(&format!("{duration:?}")), "{duration:?}");
        }
        for word in ["", "s", "10", "10x", "s10", "1.2.3.4", "10s-1", "m1", "3rd"] {
            assert!(!is_duration(word), "{word}");
        }
    }
}
