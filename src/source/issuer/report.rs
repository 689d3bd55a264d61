//! What is logged of a round, and how long until the retry.

use std::time::Duration;

use super::Issuer;
use super::retry::{asked_delay, retry_delay};
use super::round::Failed;
use crate::base::clock::{millis, rfc3339};
use crate::ca::Class;
use crate::ca::failover::Member;

impl Issuer {
    /// Notes that `ca` has signed, after those of this round that have `failed`.
    pub(super) fn note_success(&mut self, ca: &Member, failed: &[Failed]) {
        let had_failed = self.cas.signed(&ca.name);
        let now = self.clock.now();
        self.report_renewal(|renewal| renewal.issued(&ca.name, now));
        if had_failed {
            self.failovers.recovered();
        }
        if self.failures.recovered() || had_failed && failed.is_empty() {
            tracing::info!(
                name = self.logged_name(),
                provider = ca.client.name(),
                ca = self.cas.has_several().then_some(&*ca.name),
                "the CA signs again"
            );
        }
        if failed.is_empty() {
            return;
        }
        let reason = self.reasons(failed);
        if self.failovers.is_new(&reason) {
            tracing::warn!(name = self.logged_name(), reason, "failed over to the next CA");
        } else {
            tracing::debug!(name = self.logged_name(), reason, "failed over to the next CA");
        }
    }

    /// Why these did not sign. Each reason names its CA where there are several, or where the CA has an address.
    fn reasons(&self, failed: &[Failed]) -> String {
        let reasons: Vec<_> = failed
            .iter()
            .map(|Failed { ca, error }| {
                // A CA without an address has its provider's name.
                let is_anonymous = !self.cas.has_several() && *ca.name == *ca.client.name();
                if is_anonymous || error.names_its_ca() {
                    error.to_string()
                } else {
                    format!("{}: {error}", ca.name)
                }
            })
            .collect();
        reasons.join("; ")
    }

    /// How long to wait after the `failures`-th round in a row in which no CA signed.
    pub(super) fn delay(&self, failed: &[Failed], failures: u32) -> Duration {
        let is_transient = failed.iter().any(|failed| failed.error.class() == Class::Transient);
        let class = if is_transient { Class::Transient } else { Class::Permanent };
        let validity = self.validity();
        // As soon as one of them may be asked again.
        let asked = failed.iter().map(|failed| failed.error.retry_after().unwrap_or_default()).min();
        let delay = retry_delay(class, failures, validity, fastrand::f64());
        delay.max(asked_delay(asked.unwrap_or_default(), validity))
    }

    /// Logs the failed round, and notes it in the entries of both secrets.
    pub(super) fn report(&mut self, failed: &[Failed], delay: Duration) {
        let reason = self.reasons(failed);
        let served = self.key_pair.entry().good.map(|good| good.secret.not_after());
        let served = match served {
            Some(at) if at > self.clock.now() => {
                format!("the served certificate is valid until {}", rfc3339(at))
            }
            Some(at) => {
                format!("the served certificate EXPIRED at {}", rfc3339(at))
            }
            None => "there is no certificate yet".to_owned(),
        };
        let retry_in_ms = millis(delay);
        let provider = self.cas.provider();
        let is_new = self.failures.is_new(&reason);
        let name = self.logged_name();
        if is_new {
            tracing::warn!(name, provider, reason, served, retry_in_ms, "no new certificate");
        } else {
            tracing::debug!(name, provider, reason, served, retry_in_ms, "no new certificate");
        }
        self.key_pair.fail(reason.clone());
        if let Some(roots) = &self.roots {
            roots.fail(reason);
        }
    }
}
