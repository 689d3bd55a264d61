//! Which roots are in the trust bundle, and for how long: those that the CAs name, and those that they named until
//! recently, because peers still hold leaves that chain to them.

use std::collections::BTreeSet;
use std::time::{Duration, SystemTime};

use rustls::pki_types::CertificateDer;

use crate::base::limits;
use crate::pki::certificate::Certificate;

/// Every root that a CA has named, as long as it counts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::source) struct Trust {
    anchors: Vec<Anchor>,
    /// A root stays only until an answer does not name it.
    drops_old: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Anchor {
    pub(super) root: CertificateDer<'static>,
    /// The CAs whose last answer contained it.
    pub(super) named_by: BTreeSet<String>,
    /// The lifetime of the last leaf that came with it. Peers hold leaves like ours.
    pub(super) lifetime: Duration,
    /// Until when it stays once no CA names it.
    pub(super) until: Option<SystemTime>,
}

impl Anchor {
    fn ends(&self) -> Option<SystemTime> {
        let own_end = || Certificate::parse(&self.root).ok().map(|facts| facts.not_after);
        // While a CA names it, it stays, expired or not: that is for the CA to decide.
        let until = self.until?;
        Some(own_end().map_or(until, |end| end.min(until)))
    }
}

impl Trust {
    /// No roots yet. With `drops_old` the bundle is what the last answer names, and no more.
    pub(in crate::source) fn new(drops_old: bool) -> Self {
        Self { anchors: Vec::new(), drops_old }
    }

    /// Takes over what an earlier run of the agent knew. Only roots named by one of `cas` still count as named.
    pub(super) fn restore(&mut self, anchors: Vec<Anchor>, cas: &BTreeSet<String>, now: SystemTime) {
        self.anchors = anchors;
        for anchor in &mut self.anchors {
            anchor.named_by.retain(|ca| cas.contains(ca));
        }
        self.settle(now);
    }

    /// Notes that `ca` has answered with a leaf of this `lifetime`, and names `roots` (all of them).
    pub(in crate::source) fn answered(
        &mut self,
        ca: &str,
        roots: &[CertificateDer<'static>],
        lifetime: Duration,
        now: SystemTime,
    ) {
        for anchor in &mut self.anchors {
            anchor.named_by.remove(ca);
            if self.drops_old {
                anchor.named_by.clear();
            }
        }
        for root in roots {
            let known = self.anchors.iter_mut().find(|anchor| anchor.root == *root);
            let anchor = match known {
                Some(known) => known,
                None => {
                    let named_by = BTreeSet::new();
                    self.anchors.push(Anchor { root: root.clone(), named_by, lifetime, until: None });
                    let Some(new) = self.anchors.last_mut() else { continue };
                    new
                }
            };
            anchor.named_by.insert(ca.to_owned());
            anchor.lifetime = lifetime;
        }
        self.settle(now);
    }

    /// Sets the time of roots that no CA names, and drops those whose time is over.
    pub(in crate::source) fn settle(&mut self, now: SystemTime) {
        for anchor in &mut self.anchors {
            anchor.until = match (anchor.named_by.is_empty(), anchor.until) {
                (false, _) => None,
                (true, _) if self.drops_old => Some(now),
                (true, Some(until)) => Some(until),
                // The moment of the switch.
                (true, None) => Some(now + anchor.lifetime),
            };
        }
        self.anchors.retain(|anchor| anchor.ends().is_none_or(|end| end > now));
        // A CA that names another root each time must not fill the memory: the oldest go first.
        while self.anchors.iter().filter(|anchor| anchor.until.is_some()).count() > limits::OLD_ROOTS {
            let first = self.anchors.iter().filter_map(|anchor| anchor.until).min();
            let Some(index) = self.anchors.iter().position(|anchor| anchor.until == first) else { return };
            self.anchors.remove(index);
        }
    }

    /// When the next root is dropped, if no CA names it meanwhile.
    pub(in crate::source) fn next_end(&self) -> Option<SystemTime> {
        self.anchors.iter().filter_map(Anchor::ends).min()
    }

    pub(in crate::source) fn roots(&self) -> Vec<CertificateDer<'static>> {
        self.anchors.iter().map(|anchor| anchor.root.clone()).collect()
    }

    /// Everything known about roots, for the state file.
    pub(super) fn anchors(&self) -> &[Anchor] {
        &self.anchors
    }
}

#[cfg(test)]
mod tests {
    use std::time::UNIX_EPOCH;

    use rcgen::CertificateParams;

    use super::*;
    use crate::pki::key::{KeyType, SigningKey};

    const HOUR: Duration = Duration::from_secs(3600);
    const DAY: Duration = Duration::from_secs(24 * 3600);

    fn start() -> SystemTime {
        UNIX_EPOCH + Duration::from_secs(1_782_000_000)
    }

    fn root_until(end: SystemTime) -> CertificateDer<'static> {
        let mut params = CertificateParams::default();
        params.not_before = UNIX_EPOCH.into();
        params.not_after = end.into();
        let key = SigningKey::generate(KeyType::EcdsaP256).unwrap();
        params.self_signed(&key).unwrap().der().clone()
    }

    fn roots<const N: usize>() -> [CertificateDer<'static>; N] {
        std::array::from_fn(|_| root_until(start() + 3650 * DAY))
    }

    fn sorted(mut roots: Vec<CertificateDer<'static>>) -> Vec<CertificateDer<'static>> {
        roots.sort_unstable_by(|a, b| a.as_ref().cmp(b.as_ref()));
        roots
    }

    #[track_caller]
    fn assert_holds(trust: &Trust, expected: &[&CertificateDer<'static>]) {
        assert_eq!(sorted(trust.roots()), sorted(expected.iter().map(|root| (*root).clone()).collect()));
    }

    #[test]
    fn an_old_root_stays_for_one_lifetime_of_the_last_leaf_that_came_with_it() {
        let [old, new] = roots();
        let mut trust = Trust::new(false);
        trust.answered("a", std::slice::from_ref(&old), DAY, start());
        trust.answered("a", std::slice::from_ref(&old), 2 * HOUR, start() + HOUR);
        assert_holds(&trust, &[&old]);
        assert_eq!(trust.next_end(), None);
        // The switch, with a leaf of a longer lifetime: that of the old root's leaf counts.
        let switch = start() + 2 * HOUR;
        trust.answered("a", std::slice::from_ref(&new), 5 * DAY, switch);
        assert_holds(&trust, &[&old, &new]);
        assert_eq!(trust.next_end(), Some(switch + 2 * HOUR));
        // Further answers don't prolong it.
        trust.answered("a", std::slice::from_ref(&new), 5 * DAY, switch + HOUR);
        assert_eq!(trust.next_end(), Some(switch + 2 * HOUR));
        trust.settle(switch + 2 * HOUR - Duration::from_millis(1));
        assert_holds(&trust, &[&old, &new]);
        trust.settle(switch + 2 * HOUR);
        assert_holds(&trust, &[&new]);
        assert_eq!(trust.next_end(), None);
    }

    #[test]
    fn an_announced_root_is_in_the_bundle_before_it_signs() {
        let [old, new] = roots();
        let mut trust = Trust::new(false);
        trust.answered("a", &[old.clone(), new.clone()], DAY, start());
        assert_holds(&trust, &[&old, &new]);
        trust.answered("a", std::slice::from_ref(&new), DAY, start() + HOUR);
        assert_eq!(trust.next_end(), Some(start() + HOUR + DAY));
        // Named again: it is no longer an old root.
        trust.answered("a", &[old.clone(), new.clone()], DAY, start() + 2 * HOUR);
        assert_eq!(trust.next_end(), None);
    }

    #[test]
    fn the_roots_of_several_cas_are_one_bundle() {
        let [a, b, next] = roots();
        let mut trust = Trust::new(false);
        trust.answered("a", std::slice::from_ref(&a), DAY, start());
        trust.answered("b", std::slice::from_ref(&b), DAY, start() + HOUR);
        trust.answered("a", std::slice::from_ref(&a), DAY, start() + 2 * HOUR);
        assert_holds(&trust, &[&a, &b]);
        assert_eq!(trust.next_end(), None, "peers may hold a leaf of either CA at any time");
        trust.answered("b", std::slice::from_ref(&next), DAY, start() + 3 * HOUR);
        assert_eq!(trust.next_end(), Some(start() + 3 * HOUR + DAY));
        // A root that both CAs name stays as long as one of them names it.
        trust.answered("a", std::slice::from_ref(&next), DAY, start() + 4 * HOUR);
        trust.answered("b", std::slice::from_ref(&b), DAY, start() + 5 * HOUR);
        trust.settle(start() + 30 * DAY);
        assert_holds(&trust, &[&b, &next]);
    }

    #[test]
    fn in_an_emergency_only_the_last_answer_counts() {
        let [a, b, new] = roots();
        let mut trust = Trust::new(true);
        trust.answered("a", std::slice::from_ref(&a), DAY, start());
        trust.answered("b", std::slice::from_ref(&b), DAY, start());
        assert_holds(&trust, &[&b]);
        trust.answered("b", std::slice::from_ref(&new), DAY, start());
        assert_holds(&trust, &[&new]);
    }

    #[test]
    fn an_old_root_is_dropped_when_it_expires() {
        let [new] = roots();
        let old = root_until(start() + HOUR);
        let mut trust = Trust::new(false);
        trust.answered("a", std::slice::from_ref(&old), DAY, start());
        trust.settle(start() + 2 * HOUR);
        assert_holds(&trust, &[&old]);
        trust.answered("a", std::slice::from_ref(&new), DAY, start() + HOUR / 2);
        assert_eq!(trust.next_end(), Some(start() + HOUR));
    }

    #[test]
    fn a_ca_that_names_another_root_each_time_does_not_fill_the_memory() {
        let mut trust = Trust::new(false);
        let all: [_; limits::OLD_ROOTS + 3] = roots();
        for (index, root) in (0_u32..).zip(&all) {
            trust.answered("a", std::slice::from_ref(root), DAY, start() + index * Duration::from_secs(1));
        }
        assert_holds(&trust, &all.iter().skip(2).collect::<Vec<_>>());
    }

    #[test]
    fn roots_survive_a_restart_and_a_ca_that_is_no_longer_configured_names_nothing() {
        let [a, b, gone] = roots();
        let mut before = Trust::new(false);
        before.answered("a", &[a.clone(), gone.clone()], DAY, start());
        before.answered("a", std::slice::from_ref(&a), DAY, start());
        before.answered("b", std::slice::from_ref(&b), HOUR, start());
        let restored = |drops_old, now| {
            let mut trust = Trust::new(drops_old);
            trust.restore(before.anchors().to_vec(), &BTreeSet::from(["a".to_owned()]), now);
            trust
        };
        let now = start() + HOUR;
        let trust = restored(false, now);
        assert_holds(&trust, &[&a, &b, &gone]);
        assert_eq!(trust.next_end(), Some(now + HOUR), "the root of the CA that is no longer configured");
        assert_holds(&restored(false, start() + DAY), &[&a, &b]);
        assert_holds(&restored(true, now), &[&a]);
    }
}
