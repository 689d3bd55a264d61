//! Several CAs that stand in for each other: in which order they are asked, and what is remembered of those that failed.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::CertificateAuthority;
use crate::base::backoff::Backoff;

/// How long a CA that failed comes last. Renewals are often hours apart, and then each begins with the first one.
const REST: Backoff = Backoff { base: Duration::from_secs(1), cap: Duration::from_secs(300) };

/// The CAs in the order in which they were configured, most often one.
#[derive(Debug)]
pub struct Failover {
    members: Vec<Member>,
}

/// One of them.
#[derive(Clone, Debug)]
pub struct Member {
    /// As it was configured: an address, or what the provider is called.
    pub name: Arc<str>,
    /// Its client.
    pub client: Arc<dyn CertificateAuthority>,
    health: Health,
}

#[derive(Clone, Copy, Debug, Default)]
struct Health {
    /// Calls in a row that gave nothing.
    failures: u32,
    retry_at: Option<Instant>,
}

impl Member {
    /// A CA of which nothing is known yet.
    pub fn new(name: &str, client: impl CertificateAuthority + 'static) -> Self {
        Self { name: name.into(), client: Arc::new(client), health: Health::default() }
    }
}

impl Failover {
    /// These, in this order.
    pub fn new(members: Vec<Member>) -> Self {
        Self { members }
    }

    /// Whether there is none at all.
    pub fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    /// Whether there is another one.
    pub fn has_several(&self) -> bool {
        self.members.len() > 1
    }

    /// Their names.
    pub fn names(&self) -> BTreeSet<String> {
        self.in_order().map(str::to_owned).collect()
    }

    /// Their names, in the configured order.
    pub fn in_order(&self) -> impl Iterator<Item = &str> {
        self.members.iter().map(|member| &*member.name)
    }

    /// What they are called as a whole: all are of one kind.
    pub fn provider(&self) -> &'static str {
        self.members.first().map_or("none", |member| member.client.name())
    }

    /// All of them, as they are to be asked at `now`, one after the other until one signs: in the configured order, but
    /// those that failed lately come last.
    pub fn in_turn(&self, now: Instant) -> Vec<Member> {
        let mut turns = self.members.clone();
        // Stable: otherwise the configured order.
        turns.sort_by_key(|member| member.health.retry_at.is_some_and(|until| until > now));
        turns
    }

    /// Notes that the CA of this name gave nothing, and asks to be left alone for so long. `draw` is random, from 0 to 1.
    pub fn failed(&mut self, name: &str, retry_after: Option<Duration>, now: Instant, draw: f64) {
        if let Some(health) = self.health(name) {
            health.failures = health.failures.saturating_add(1);
            let rest = REST.delay(health.failures, draw);
            health.retry_at = Some(now + rest.max(retry_after.unwrap_or_default().min(REST.cap)));
        }
    }

    /// Notes that all have failed, one after the other: none is better than another.
    pub fn all_failed(&mut self) {
        for member in &mut self.members {
            member.health.retry_at = None;
        }
    }

    /// Notes that the CA of this name has signed. True if it had failed before.
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
    struct Nobody;

    #[tonic::async_trait]
    impl CertificateAuthority for Nobody {
        fn name(&self) -> &'static str {
            "nobody"
        }

        async fn sign(&self, _: &SigningRequest) -> Result<IssuedChain, CaError> {
            Err(CaError::Local("nobody".to_owned()))
        }
    }

    fn turns(cas: &Failover, now: Instant) -> String {
        cas.in_turn(now).iter().map(|member| &*member.name).collect()
    }

    #[tokio::test]
    async fn who_failed_lately_comes_last_and_the_first_is_the_first_again() {
        let mut cas = Failover::new(["a", "b", "c"].map(|name| Member::new(name, Nobody)).to_vec());
        let start = Instant::now();
        let second = Duration::from_secs(1);
        assert_eq!(turns(&cas, start), "abc");
        cas.failed("a", None, start, 1.0);
        assert_eq!(turns(&cas, start), "bca");
        cas.failed("b", Some(20 * second), start, 1.0);
        assert_eq!(turns(&cas, start), "cab");
        // What it asks for is longer than its rest.
        assert_eq!(turns(&cas, start + second), "acb");
        assert_eq!(turns(&cas, start + 20 * second), "abc");
        // It rests the longer, the more often it failed, but not for ever.
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
