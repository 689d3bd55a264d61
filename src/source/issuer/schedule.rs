//! When the CA is asked.

use std::time::{Duration, SystemTime};

use tokio::sync::watch;

use super::{Issued, Issuer, Validity};
use crate::secret::{KeyPair, Secret};
use crate::store::health::RenewalHealth;
use crate::store::{Entry, Origin, Publisher};

/// When a certificate is renewed: with `ratio` of its lifetime left, give or take `jitter`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Grace {
    /// 0.2 renews with 20 % left.
    pub ratio: f64,
    /// 0.01 spreads the moment over ±1 % of the lifetime.
    pub jitter: f64,
}

impl Grace {
    /// notAfter − (ratio ± jitter) × (notAfter − max(notBefore, received)): Istio's meaning, except that a
    /// certificate with an earlier notBefore counts from its arrival. `draw` is a random number from −1 to 1.
    pub fn renewal(
        self,
        not_before: SystemTime,
        not_after: SystemTime,
        received: SystemTime,
        draw: f64,
    ) -> SystemTime {
        let lifetime = not_after.duration_since(not_before.max(received)).unwrap_or_default();
        let share = (self.ratio + self.jitter * draw).clamp(0.0, 1.0);
        not_after - lifetime.mul_f64(share)
    }
}

/// When the CA is to be asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Due {
    At(SystemTime),
    /// Files hold both secrets.
    Never,
}

/// What the issuer publishes, whichever source writes it.
struct Entries {
    key_pair: watch::Receiver<Entry>,
    roots: Option<watch::Receiver<Entry>>,
}

impl Entries {
    async fn changed(&mut self) {
        let roots = async {
            match &mut self.roots {
                Some(roots) => roots.changed().await,
                None => std::future::pending().await,
            }
        };
        // The senders live as long as the issuer's publishers, so this does not fail.
        tokio::select! {
            _ = self.key_pair.changed() => {}
            _ = roots => {}
        }
    }
}

impl Issuer {
    /// When a key pair that came at `received` is to be renewed: another moment for each draw.
    pub(super) fn renewal(&self, pair: &KeyPair, received: SystemTime) -> SystemTime {
        let draw = fastrand::f64() * 2.0 - 1.0;
        self.settings.grace.renewal(pair.leaf().not_before, pair.not_after(), received, draw)
    }

    /// How long the served certificate is still valid.
    pub(super) fn validity(&self) -> Validity {
        let Some(good) = self.key_pair.entry().good else { return Validity::Nothing };
        match good.secret.not_after().duration_since(self.clock.now()) {
            Ok(left) => Validity::Left(left),
            Err(past) => Validity::Past(past.duration()),
        }
    }

    pub(super) async fn wait_until_due(&mut self) {
        let mut entries = self.entries();
        loop {
            let due = {
                // Files that are removed release both: the roots alone are no reason to request a certificate.
                let _together = self.key_pair.cache().together();
                self.due(&mut entries)
            };
            if due == Due::Never {
                self.report_renewal(RenewalHealth::round_ended);
                self.early.clear();
            }
            let renewal = match due {
                Due::At(moment) => Some(moment),
                Due::Never => None,
            };
            let next = renewal.into_iter().chain(self.trust.next_end()).min();
            // The senders live in `self`, so `changed` does not fail.
            tokio::select! {
                () = self.clock.sleep_until_any(next) => {
                    if next == renewal {
                        return;
                    }
                    self.drop_old_roots();
                }
                () = self.renewals.wanted(), if due != Due::Never => return,
                // These may change what is due.
                () = self.clock.jumped() => {}
                () = entries.changed() => {}
            }
        }
    }

    fn entries(&self) -> Entries {
        Entries { key_pair: self.key_pair.watch(), roots: self.roots.as_ref().map(Publisher::watch) }
    }

    /// The key pair's renewal decides; the roots' only where files hold the key pair.
    fn due(&self, entries: &mut Entries) -> Due {
        let key_pair = entries.key_pair.borrow_and_update();
        let roots = entries.roots.as_mut().map(watch::Receiver::borrow_and_update);
        let is_held = |entry: &Entry| entry.holder > Some(Origin::CA);
        let entry: &Entry = match (is_held(&key_pair), &roots) {
            (false, _) => &key_pair,
            (true, Some(roots)) if !is_held(roots) => roots,
            (true, _) => return Due::Never,
        };
        let Some(good) = &entry.good else { return Due::At(SystemTime::UNIX_EPOCH) };
        // The clocks of the agent and the CA were ahead when it came: peers refuse it, and its renewal may be years away.
        if let Secret::KeyPair(pair) = &good.secret
            && pair.leaf().not_before > self.clock.now()
        {
            return Due::At(SystemTime::UNIX_EPOCH);
        }
        match (good.renews, &good.secret) {
            (Some(moment), _) => Due::At(moment),
            // Left behind by files that are gone: the CA takes over when a certificate of its own would be renewed.
            (None, Secret::KeyPair(pair)) => Due::At(self.settings.grace.renewal(
                pair.leaf().not_before,
                pair.not_after(),
                good.received,
                0.0,
            )),
            (None, Secret::TrustBundle(_)) => Due::At(SystemTime::UNIX_EPOCH),
        }
    }

    /// Sleeps for `delay` after a round that failed, or until something makes the retry worthwhile, or needless.
    pub(super) async fn sleep_until_retry(&self, delay: Duration) {
        let begins = self.early.values().map(Issued::begins).min();
        tokio::select! {
            () = tokio::time::sleep(delay) => {}
            // The clock was set, or the machine slept: less may be left than the delay allows for.
            () = self.clock.jumped() => {}
            () = self.renewals.wanted() => {}
            () = self.files_take_over() => {}
            () = self.clock.sleep_until_any(begins) => {}
        }
    }

    /// Returns when files hold both secrets. Where they hold one of the two, the CA is still asked for the other, no
    /// sooner than before.
    pub(super) async fn files_take_over(&self) {
        let mut entries = self.entries();
        while self.due(&mut entries) != Due::Never {
            entries.changed().await;
        }
    }
}
