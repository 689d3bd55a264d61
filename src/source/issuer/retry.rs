//! How long a call to the CA may take, and how soon after a failure it is retried.

use std::time::Duration;

use crate::base::backoff::Backoff;
use crate::ca::Class;

/// How long the served certificate is still valid: what is at stake while the CA does not sign.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Validity {
    /// There never was a certificate.
    Nothing,
    /// The served certificate is valid for this long.
    Left(Duration),
    /// The served certificate expired this long ago.
    Past(Duration),
}

/// A delay takes at most this fraction of what is left of the certificate.
const SHARE: u32 = 16;
/// After its expiry: of the time since then.
const SHARE_AFTER: u32 = 4;

/// How long to wait after the `failures`-th failed call in a row. The delay shrinks as the certificate nears its expiry,
/// so that none expires for want of retries, and grows again afterwards: a fleet without certificates must not
/// overload the CA that it waits for. `draw` is random, from 0 to 1.
pub fn retry_delay(class: Class, failures: u32, validity: Validity, draw: f64) -> Duration {
    const BASE: Duration = Duration::from_secs(1);
    /// Near expiry every class is retried at least every 2 s, and a call takes time too.
    const URGENT: Duration = Duration::from_millis(1800);
    /// Not a tight loop, however little is left: a fleet whose certificates expire together would call more and more.
    const SHORTEST: Duration = Duration::from_millis(500);
    let (with, without) = match class {
        Class::Transient => (Duration::from_secs(300), Duration::from_secs(15)),
        Class::Permanent => (Duration::from_secs(600), Duration::from_secs(30)),
    };
    let cap = match validity {
        Validity::Left(left) => with.min(URGENT.max(left / SHARE)).min(left),
        Validity::Past(past) => without.min(URGENT.max(past / SHARE_AFTER)),
        Validity::Nothing => without,
    };
    // Agents that failed together return over the whole of a long delay, and over the second half of a short one: two
    // calls in one second are of no use.
    let longest = Backoff { base: BASE, cap }.longest(failures);
    let least = (longest / 2).min(BASE);
    SHORTEST.max(least + (longest - least).mul_f64(draw.clamp(0.0, 1.0)))
}

/// How long to wait where the CA asks for a pause (Retry-After): from `asked` up to twice as long, since it may have
/// asked all its clients at the same moment, but not so long that the certificate could expire.
pub(super) fn asked_delay(asked: Duration, validity: Validity) -> Duration {
    asked_delay_drawn(asked, validity, fastrand::f64())
}

fn asked_delay_drawn(asked: Duration, validity: Validity, draw: f64) -> Duration {
    const LONGEST: Duration = Duration::from_secs(300);
    let asked = match validity {
        Validity::Left(left) => asked.min(LONGEST).min(left / SHARE / 2),
        Validity::Past(_) | Validity::Nothing => asked.min(LONGEST),
    };
    asked.mul_f64(1.0 + draw)
}

/// How long one call may take: as configured, but a call to a CA that hangs must not use up the last of a
/// certificate's life. After its expiry nothing is left to lose, and a slow CA gets all its time.
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
    const FLEET: usize = 3000;

    #[test]
    fn the_less_is_left_the_sooner_is_the_retry() {
        use Class::{Permanent, Transient};
        use Validity::{Left, Nothing, Past};
        let seconds = Duration::from_secs;
        // Class, failures, what is left; the longest delay in milliseconds.
        let cases = [
            (Transient, 1, Left(DAY), 1000),
            (Transient, 2, Left(DAY), 2000),
            (Transient, 5, Left(DAY), 16_000),
            (Transient, u32::MAX, Left(DAY), 300_000),
            (Permanent, 5, Left(DAY), 16_000),
            (Permanent, u32::MAX, Left(DAY), 600_000),
            // A sixteenth of what is left.
            (Transient, u32::MAX, Left(seconds(480)), 30_000),
            (Permanent, u32::MAX, Left(seconds(480)), 30_000),
            // Near expiry all classes are the same, and exceed it by half a second at most.
            (Transient, u32::MAX, Left(seconds(10)), 1800),
            (Permanent, u32::MAX, Left(seconds(10)), 1800),
            (Permanent, u32::MAX, Left(seconds(1)), 1000),
            // The same just after expiry; later the classes differ again.
            (Transient, u32::MAX, Past(Duration::ZERO), 1800),
            (Permanent, u32::MAX, Past(Duration::ZERO), 1800),
            (Transient, u32::MAX, Past(seconds(40)), 10_000),
            (Permanent, u32::MAX, Past(seconds(40)), 10_000),
            (Transient, u32::MAX, Past(DAY), 15_000),
            (Permanent, u32::MAX, Past(DAY), 30_000),
            // There never was a certificate.
            (Transient, 1, Nothing, 1000),
            (Transient, u32::MAX, Nothing, 15_000),
            (Permanent, u32::MAX, Nothing, 30_000),
            // Zero failures do not occur; a delay keeps even them from a tight loop.
            (Transient, 0, Left(DAY), 1000),
        ];
        for (class, failures, validity, longest) in cases {
            let longest = Duration::from_millis(longest);
            let shortest = SECOND.min(longest / 2);
            let case = format!("{class:?} {failures} {validity:?}");
            let drawn = [0.0, 0.5, 1.0].map(|draw| retry_delay(class, failures, validity, draw));
            assert_eq!(drawn, [shortest, (shortest + longest) / 2, longest], "{case}");
        }
        // At the very end it is not a tight loop either.
        assert_eq!(retry_delay(Permanent, u32::MAX, Left(Duration::ZERO), 1.0), Duration::from_millis(500));
    }

    /// Calls in each second of a fleet that was started within one second and whose CA is unreachable until `back`.
    /// `left` is the remaining life of the certificates at the start. An agent that reaches the CA calls no more.
    fn load(left: Option<Duration>, back: Duration) -> Vec<usize> {
        let mut random = fastrand::Rng::with_seed(1);
        let mut load = Vec::new();
        for agent in 0..FLEET {
            let (mut now, mut failures) = (SECOND.mul_f64(agent as f64 / FLEET as f64), 0);
            loop {
                let second = usize::try_from(now.as_secs()).unwrap();
                load.resize(load.len().max(second + 1), 0);
                load[second] += 1;
                if now >= back {
                    break;
                }
                failures += 1;
                let validity = left.map_or(Validity::Nothing, |left| match left.checked_sub(now) {
                    Some(left) => Validity::Left(left),
                    None => Validity::Past(now - left),
                });
                now += retry_delay(Class::Transient, failures, validity, random.f64());
            }
        }
        load
    }

    #[test]
    fn a_fleet_that_fails_together_spreads_out_during_and_after_an_outage() {
        let minutes = |minutes: u64| Duration::from_secs(60 * minutes);
        // What was left at the start of the outage, how long it took; the seconds within which all reach the CA again.
        let cases = [
            (None, minutes(1), 15),
            (None, minutes(10), 15),
            (Some(minutes(12 * 60)), minutes(10), 300),
            (Some(minutes(30)), minutes(10), 90),
            (Some(minutes(30)), minutes(35), 15),
        ];
        for (left, outage, within) in cases {
            let case = format!("{left:?} left, {outage:?} of outage");
            let load = load(left, outage);
            let (before, after) = load.split_at(usize::try_from(outage.as_secs()).unwrap());
            assert!(after.len() <= within + 1, "{case}: all have a certificate after {} s", after.len());
            let mean = FLEET / within;
            let peak = after.iter().max().unwrap();
            assert!(*peak <= 4 * mean, "{case}: {peak} calls in a second, {mean} in the mean");
            // All start in the same second, and their certificates expire in the same second.
            let peak = before.iter().max().unwrap();
            assert!(*peak <= 2 * FLEET, "{case}: {peak} calls in a second of the outage");
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
        assert_eq!(call_timeout(SECOND, Left(SECOND)), SECOND, "the configured time is not exceeded");
    }

    #[test]
    fn a_pause_that_the_ca_asks_for_is_kept_unless_it_could_cost_the_certificate() {
        let seconds = Duration::from_secs;
        let cases = [
            (0, Validity::Nothing, seconds(0)),
            (30, Validity::Nothing, seconds(30)),
            (100_000, Validity::Past(seconds(1)), seconds(300)),
            (30, Validity::Left(seconds(3600)), seconds(30)),
            // A sixteenth of what is left at most, whatever the draw.
            (30, Validity::Left(seconds(160)), seconds(5)),
            (100_000, Validity::Left(seconds(100_000)), seconds(300)),
        ];
        for (asked, validity, expected) in cases {
            let delay = |draw| asked_delay_drawn(seconds(asked), validity, draw);
            assert_eq!(delay(0.0), expected, "{asked} s, {validity:?}");
            // It may have asked all its clients at the same moment.
            assert_eq!(delay(1.0), 2 * expected, "{asked} s, {validity:?}");
        }
    }
}
