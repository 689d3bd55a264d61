//! Failover between several CAs: their order, and the recent failures of each.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::CertificateAuthority;
use crate::base::backoff::Backoff;

/// How long a CA that failed is moved to the end. Renewals are often hours apart, and then each begins with the first CA.
const DEMOTION: Backoff = Backoff { base: Duration::from_secs(1), cap: Duration::from_secs(300) };

/// The CAs in the configured order, usually one.
#[derive(Debug)]
pub struct Failover {
    members: Vec<Member>,
}

/// One CA.
#[derive(Clone, Debug)]
pub struct Member {
    /// The configured address, or the provider's name.
    pub name: Arc<str>,
    pub client: Arc<dyn CertificateAuthority>,
    health: Health,
}

#[derive(Clone, Copy, Debug, Default)]
struct Health {
    /// Consecutive calls without a certificate.
    failures: u32,
    /// Until then it comes last.
    retry_at: Option<Instant>,
}

impl Member {
    pub fn new(name: &str, client: impl CertificateAuthority + 'static) -> Self {
        Self { name: name.into(), client: Arc::new(client), health: Health::default() }
    }
}

impl Failover {
    pub fn new(members: Vec<Member>) -> Self {
        Self { members }
    }

    /// The same CAs for another certificate, which may be requested at the same time.
    pub fn apart(&self) -> Self {
        let apart = |member: &Member| Member {
            name: Arc::clone(&member.name),
            client: member.client.apart().unwrap_or_else(|| Arc::clone(&member.client)),
            health: Health::default(),
        };
        Self { members: self.members.iter().map(apart).collect() }
    }

    pub fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    pub fn has_several(&self) -> bool {
        self.members.len() > 1
    }

    pub fn names(&self) -> BTreeSet<String> {
        self.in_order().map(|member| member.name.to_string()).collect()
    }

    /// The CAs in the configured order.
    pub fn in_order(&self) -> impl Iterator<Item = &Member> {
        self.members.iter()
    }

    /// The name of the provider: all are of one kind.
    pub fn provider(&self) -> &'static str {
        self.members.first().map_or("none", |member| member.client.name())
    }

    /// The order in which to call them at `now` until one signs: the configured order, with those that failed recently
    /// last.
    pub fn in_turn(&self, now: Instant) -> Vec<Member> {
        let mut turns = self.members.clone();
        // Stable: otherwise the configured order.
        turns.sort_by_key(|member| member.health.retry_at.is_some_and(|until| until > now));
        turns
    }

    /// Records that the CA `name` failed; `retry_after` is the delay that it asks for. `draw` is random, from 0 to 1.
    pub fn failed(&mut self, name: &str, retry_after: Option<Duration>, now: Instant, draw: f64) {
        if let Some(health) = self.health(name) {
            health.failures = health.failures.saturating_add(1);
            let demotion = DEMOTION.delay(health.failures, draw);
            health.retry_at = Some(now + demotion.max(retry_after.unwrap_or_default().min(DEMOTION.cap)));
        }
    }

    /// Records that all have failed, one after the other: none is better than another.
    pub fn all_failed(&mut self) {
        for member in &mut self.members {
            member.health.retry_at = None;
        }
    }

    /// Records that the CA `name` has signed. True if it had failed before.
    pub fn signed(&mut self, name: &str) -> bool {
        let before = self.health(name).map(std::mem::take);
        before.is_some_and(|health| health.failures > 0)
    }

    fn health(&mut self, name: &str) -> Option<&mut Health> {
        self.members.iter_mut().find(|member| *member.name == *name).map(|member| &mut member.health)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ca::{CaError, IssuedChain, SigningRequest};

    #[derive(Debug)]
    struct Unavailable;

    #[tonic::async_trait]
    impl CertificateAuthority for Unavailable {
        fn name(&self) -> &'static str {
            "unavailable"
        }

        async fn sign(&self, _: &SigningRequest) -> Result<IssuedChain, CaError> {
            Err(CaError::Local("unavailable".to_owned()))
        }
    }

    fn turns(cas: &Failover, now: Instant) -> String {
        cas.in_turn(now).iter().map(|member| &*member.name).collect()
    }

    #[tokio::test]
    async fn a_ca_that_failed_recently_comes_last_for_a_while() {
        let mut cas = Failover::new(["a", "b", "c"].map(|name| Member::new(name, Unavailable)).to_vec());
        let start = Instant::now();
        let second = Duration::from_secs(1);
        assert_eq!(turns(&cas, start), "abc");
        cas.failed("a", None, start, 1.0);
        assert_eq!(turns(&cas, start), "bca");
        cas.failed("b", Some(20 * second), start, 1.0);
        assert_eq!(turns(&cas, start), "cab");
        // The delay that it asks for is longer than its demotion.
        assert_eq!(turns(&cas, start + second), "acb");
        assert_eq!(turns(&cas, start + 20 * second), "abc");
        // The demotion grows with each failure, up to the cap.
        for _ in 0..100 {
            cas.failed("a", Some(3600 * second), start, 1.0);
        }
        assert_eq!(turns(&cas, start + 299 * second), "bca");
        assert_eq!(turns(&cas, start + 300 * second), "abc");
        cas.failed("b", None, start, 1.0);
        cas.all_failed();
        assert_eq!(turns(&cas, start), "abc");
        cas.failed("b", None, start, 1.0);
        assert!(cas.signed("a"));
        assert!(!cas.signed("a"));
        assert_eq!(turns(&cas, start), "acb");
    }
}
