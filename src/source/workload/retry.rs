//! How long a call to the CA may take, and how soon after a failure it is tried again.

use std::time::Duration;

use crate::backoff::Backoff;
use crate::ca::Class;

/// What there is to lose while the CA does not sign.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Validity {
    /// There never was a certificate.
    Nothing,
    /// The one that is served is valid for so long.
    Left(Duration),
    /// The one that was served ended so long ago.
    Past(Duration),
}

/// The share of the distance to a certificate's end that a delay may take.
const SHARE: u32 = 16;

/// How long to wait after the `failures`-th failed call in a row. The delay shrinks towards the end of the
/// certificate, so that none ends unrenewed for want of trying, and grows again after it, where the failure is one
/// that does not pass by itself. `draw` is random, from 0 to 1.
pub fn retry_delay(class: Class, failures: u32, validity: Validity, draw: f64) -> Duration {
    const BASE: Duration = Duration::from_millis(500);
    /// Near the end every class is tried at least every 2 s.
    const URGENT: Duration = Duration::from_millis(1500);
    let (cap, cap_without) = match class {
        Class::Transient => (Duration::from_secs(60), URGENT),
        Class::Lasting => (Duration::from_secs(300), Duration::from_secs(30)),
    };
    let cap = match validity {
        Validity::Left(left) => cap.min(URGENT.max(left / SHARE)),
        Validity::Past(past) => cap_without.min(URGENT.max(past / SHARE)),
        Validity::Nothing => cap_without,
    };
    Backoff { base: BASE, cap }.delay(failures, draw)
}

/// How long to wait where the CA asks to be left alone for `asked`: as long as that, unless it could cost the certificate.
pub(super) fn asked_delay(asked: Duration, validity: Validity) -> Duration {
    const LONGEST: Duration = Duration::from_secs(300);
    match validity {
        Validity::Left(left) => asked.min(LONGEST).min(left / SHARE),
        Validity::Past(_) | Validity::Nothing => asked.min(LONGEST),
    }
}

/// How long one call may take: as configured, but a call to a CA that hangs must not use up the last of a
/// certificate's life. After it nothing is left to lose, and a CA that is slow gets all its time.
pub(super) fn call_timeout(configured: Duration, validity: Validity) -> Duration {
    const SHORTEST: Duration = Duration::from_secs(2);
    match validity {
        Validity::Left(left) => configured.min(SHORTEST.max(left / 4)),
        Validity::Past(_) | Validity::Nothing => configured,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);
    const DAY: Duration = Duration::from_secs(24 * 3600);

    #[test]
    fn the_next_try_comes_the_sooner_the_less_is_left() {
        use Class::{Lasting, Transient};
        use Validity::{Left, Nothing, Past};
        let seconds = Duration::from_secs;
        // Class, failures, what is left; the longest delay in milliseconds.
        let cases = [
            (Transient, 1, Left(DAY), 500),
            (Transient, 2, Left(DAY), 1000),
            (Transient, 5, Left(DAY), 8000),
            (Transient, u32::MAX, Left(DAY), 60_000),
            (Lasting, u32::MAX, Left(DAY), 300_000),
            // A sixteenth of what is left.
            (Transient, u32::MAX, Left(seconds(480)), 30_000),
            (Lasting, u32::MAX, Left(seconds(480)), 30_000),
            // Near the end all are the same.
            (Transient, u32::MAX, Left(seconds(10)), 1500),
            (Lasting, u32::MAX, Left(seconds(10)), 1500),
            (Lasting, u32::MAX, Left(Duration::ZERO), 1500),
            // So they are when it has just ended; what does not pass by itself is asked for less and less.
            (Transient, u32::MAX, Past(Duration::ZERO), 1500),
            (Lasting, u32::MAX, Past(Duration::ZERO), 1500),
            (Lasting, u32::MAX, Past(seconds(160)), 10_000),
            (Lasting, u32::MAX, Past(DAY), 30_000),
            (Transient, u32::MAX, Past(DAY), 1500),
            // There never was one.
            (Transient, u32::MAX, Nothing, 1500),
            (Lasting, u32::MAX, Nothing, 30_000),
            (Lasting, 1, Nothing, 500),
            // No failure at all does not occur; it is not a tight loop even so.
            (Transient, 0, Left(DAY), 500),
        ];
        for (class, failures, validity, longest) in cases {
            let longest = Duration::from_millis(longest);
            let case = format!("{class:?} {failures} {validity:?}");
            assert_eq!(retry_delay(class, failures, validity, 1.0), longest, "{case}");
            assert_eq!(
                retry_delay(class, failures, validity, 0.0),
                longest / 2,
                "{case}: never 0, however it is drawn"
            );
        }
    }

    #[test]
    fn a_call_may_not_use_up_the_last_of_a_certificates_life() {
        use Validity::{Left, Nothing, Past};
        let seconds = Duration::from_secs;
        let cases = [
            (Nothing, 10),
            (Left(DAY), 10),
            (Left(seconds(20)), 5),
            (Left(seconds(8)), 2),
            (Left(seconds(1)), 2),
            (Past(seconds(1)), 10),
        ];
        for (validity, expected) in cases {
            assert_eq!(call_timeout(seconds(10), validity), seconds(expected), "{validity:?}");
        }
        assert_eq!(call_timeout(SECOND, Left(SECOND)), SECOND, "what is configured is not exceeded");
    }

    #[test]
    fn a_ca_that_asks_to_be_left_alone_is_unless_it_could_cost_the_certificate() {
        let seconds = Duration::from_secs;
        let cases = [
            (0, Validity::Nothing, seconds(0)),
            (30, Validity::Nothing, seconds(30)),
            (100_000, Validity::Past(seconds(1)), seconds(300)),
            (30, Validity::Left(seconds(3600)), seconds(30)),
            (30, Validity::Left(seconds(160)), seconds(10)),
            (100_000, Validity::Left(seconds(100_000)), seconds(300)),
        ];
        for (asked, validity, expected) in cases {
            assert_eq!(asked_delay(seconds(asked), validity), expected, "{asked} s, {validity:?}");
        }
    }
}
