//! Health of the renewal: which CA issued, which ones fail and since when, and when the next try is.

use std::sync::Arc;
use std::time::SystemTime;

/// What the issuer reports of its CAs.
#[derive(Clone, Debug, Default)]
pub struct RenewalHealth {
    /// In the configured order.
    pub cas: Vec<CaHealth>,
    /// The CA that issued the newest certificate.
    pub issuer: Option<Arc<str>>,
    /// Rounds since the last certificate in which no CA has signed.
    pub failed_rounds: u32,
    /// After such a round: when the CAs are called again.
    pub next_try: Option<SystemTime>,
}

/// One CA as its last calls left it.
#[derive(Clone, Debug)]
pub struct CaHealth {
    /// The configured address, or the provider's name.
    pub name: Arc<str>,
    /// When it last issued a certificate.
    pub issued: Option<SystemTime>,
    /// None if the last call was successful, or there was none.
    pub failure: Option<CaFailure>,
}

/// Calls without a certificate since the last one with one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CaFailure {
    /// Of the last call, for people.
    pub reason: String,
    /// Of the last call, in one word.
    pub outcome: &'static str,
    /// When the first of these calls failed.
    pub since: SystemTime,
    /// When the last of these calls failed.
    pub last_call: SystemTime,
}

impl RenewalHealth {
    pub fn new(names: impl Iterator<Item = Arc<str>>) -> Self {
        let cas = names.map(|name| CaHealth { name, issued: None, failure: None }).collect();
        Self { cas, ..Self::default() }
    }

    /// The CA `name` issued a certificate at `at`.
    pub fn issued(&mut self, name: &Arc<str>, at: SystemTime) {
        self.issuer = Some(Arc::clone(name));
        if let Some(ca) = self.ca(name) {
            (ca.issued, ca.failure) = (Some(at), None);
        }
        self.round_ended();
    }

    /// A call to the CA `name` failed at `at`.
    pub fn call_failed(&mut self, name: &str, reason: String, outcome: &'static str, at: SystemTime) {
        if let Some(ca) = self.ca(name) {
            let since = ca.failure.as_ref().map_or(at, |failure| failure.since);
            ca.failure = Some(CaFailure { reason, outcome, since, last_call: at });
        }
    }

    /// No CA is called, or the call was successful: there is nothing to retry.
    pub fn round_ended(&mut self) {
        (self.failed_rounds, self.next_try) = (0, None);
    }

    pub fn round_failed(&mut self, rounds: u32, next_try: SystemTime) {
        (self.failed_rounds, self.next_try) = (rounds, Some(next_try));
    }

    fn ca(&mut self, name: &str) -> Option<&mut CaHealth> {
        self.cas.iter_mut().find(|ca| *ca.name == *name)
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use super::*;

    #[test]
    fn each_ca_is_known_by_its_last_calls() {
        let [a, b] = ["a", "b"].map(Arc::<str>::from);
        let mut health = RenewalHealth::new([&a, &b].into_iter().map(Arc::clone));
        let at = |seconds| UNIX_EPOCH + Duration::from_secs(seconds);
        health.call_failed(&a, "down".to_owned(), "unreachable", at(1));
        health.round_failed(1, at(2));
        health.call_failed(&a, "refused".to_owned(), "refused", at(2));
        health.issued(&b, at(3));
        assert_eq!((health.failed_rounds, health.next_try, health.issuer.as_ref()), (0, None, Some(&b)));
        let (reason, outcome) = ("refused".to_owned(), "refused");
        let failure = CaFailure { reason, outcome, since: at(1), last_call: at(2) };
        assert_eq!((&health.cas[0].failure, health.cas[0].issued), (&Some(failure), None));
        assert_eq!((&health.cas[1].failure, health.cas[1].issued), (&None, Some(at(3))));
        health.issued(&a, at(4));
        assert!(health.cas[0].failure.is_none() && health.issuer == Some(a));
    }
}
