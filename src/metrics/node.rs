//! A node's workloads as metrics: counts for each service account, since names of Pods come and go.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::SystemTime;

use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric, LabelSetEncoder};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Unit;

use super::{Known, describe, seconds, whole};
use crate::base::limits;
use crate::base::spiffe_id::{ServiceAccount, SpiffeId};
use crate::secret::Secret;
use crate::store::Snapshot;
use crate::store::health::Reports;

/// No service account of Kubernetes has such a name.
const OTHER: &str = "_other";

/// What workloads have in common.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Group {
    Account {
        namespace: String,
        service_account: String,
    },
    /// One whose identity is of another form, or not known yet.
    Workload(Arc<str>),
    /// All that are beyond the limit.
    Other,
}

impl Group {
    fn of(workload: &Arc<str>, identity: Option<&SpiffeId>) -> Self {
        match identity.and_then(SpiffeId::service_account) {
            Some(ServiceAccount { namespace, name }) => Self::Account { namespace, service_account: name },
            None => Self::Workload(Arc::clone(workload)),
        }
    }
}

impl EncodeLabelSet for &Group {
    fn encode(&self, encoder: &mut LabelSetEncoder<'_>) -> Result<(), std::fmt::Error> {
        let account = |namespace, account| [("namespace", namespace), ("service_account", account)];
        match self {
            Group::Account { namespace, service_account } => {
                account(namespace.as_str(), service_account.as_str()).encode(encoder)
            }
            Group::Workload(name) => [("workload", &**name)].encode(encoder),
            Group::Other => account(OTHER, OTHER).encode(encoder),
        }
    }
}

/// The workloads of a group.
#[derive(Clone, Debug, Default)]
struct Members {
    all: usize,
    without_certificate: usize,
    overdue: usize,
    expired: usize,
    rejected: usize,
    /// By the outcome of the last call to a CA.
    failing: BTreeMap<&'static str, usize>,
    /// The first expiry.
    not_after: Option<SystemTime>,
}

impl Members {
    fn add(&mut self, other: Self) {
        self.all += other.all;
        self.without_certificate += other.without_certificate;
        self.overdue += other.overdue;
        self.expired += other.expired;
        self.rejected += other.rejected;
        for (outcome, failing) in other.failing {
            *self.failing.entry(outcome).or_default() += failing;
        }
        self.not_after = self.not_after.into_iter().chain(other.not_after).min();
    }
}

/// All workloads of a node; none of a sidecar, whose metrics name its secrets.
#[derive(Debug, Default)]
pub(super) struct Groups {
    groups: BTreeMap<Group, Members>,
    /// How many have no samples of their own.
    left_out: Option<usize>,
}

impl Groups {
    /// Adds the workload `name`, for which `requested` is asked. `key_pair` is its entry, if it has one.
    pub(super) fn add(
        &mut self,
        name: &Arc<str>,
        requested: Option<SpiffeId>,
        key_pair: Option<&Snapshot>,
        reports: &Reports,
        now: SystemTime,
    ) {
        let good = key_pair.and_then(|one| one.entry.good.as_deref());
        let served = || match &good?.secret {
            Secret::KeyPair(pair) => pair.spiffe_id(),
            Secret::TrustBundle(_) => None,
        };
        let identity = requested.or_else(served);
        let is = usize::from;
        let failure = key_pair.and_then(|one| one.entry.failure());
        let last = reports.renewal.cas.iter().filter_map(|ca| ca.failure.as_ref());
        let outcome = last.max_by_key(|failure| failure.last_call).map_or("other", |last| last.outcome);
        let member = Members {
            all: 1,
            without_certificate: is(good.is_none()),
            overdue: is(good.is_some_and(|good| good.is_overdue(now))),
            expired: is(good.is_some_and(|good| good.secret.not_after() <= now)),
            rejected: is(key_pair.is_some_and(|one| one.observed.verdicts().rejection.is_some())),
            failing: failure.map(|_| (outcome, 1)).into_iter().collect(),
            not_after: good.map(|good| good.secret.not_after()),
        };
        self.groups.entry(Group::of(name, identity.as_ref())).or_default().add(member);
    }

    /// Puts what is beyond the limit together.
    pub(super) fn bound(&mut self) {
        let mut other = Members::default();
        let mut left_out = 0;
        while self.groups.len() > limits::WORKLOAD_GROUPS {
            let Some((_, members)) = self.groups.pop_last() else { break };
            left_out += 1;
            other.add(members);
        }
        if left_out > 0 {
            self.groups.insert(Group::Other, other);
        }
        self.left_out = Some(left_out);
    }

    pub(super) fn encode(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        type Count = fn(&Members) -> usize;
        let counts: [(&str, &str, Count); 5] = [
            ("workloads", "Workloads of the node", |it| it.all),
            ("workloads_without_certificate", "Workloads that never had a certificate", |it| {
                it.without_certificate
            }),
            ("workloads_overdue", "Workloads whose renewal is late by a twentieth of the lifetime", |it| {
                it.overdue
            }),
            ("workloads_expired", "Workloads whose certificate has expired", |it| it.expired),
            ("workloads_rejected", "Workloads of which a client rejects the newest certificate", |it| {
                it.rejected
            }),
        ];
        for (name, help, count) in counts {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            for (group, members) in &self.groups {
                ConstGauge::new(whole(count(members))).encode(family.encode_family(&group)?)?;
            }
        }
        let help = "Workloads that get no new certificate, by the outcome of the last call to a CA";
        let mut family = encoder.encode_descriptor("workloads_failing", help, None, MetricType::Gauge)?;
        for (group, members) in &self.groups {
            for (outcome, failing) in &members.failing {
                let labels = (group, [("outcome", *outcome)]);
                ConstGauge::new(whole(*failing)).encode(family.encode_family(&labels)?)?;
            }
        }
        let help = "Expiry of the certificate of these workloads that expires first";
        let (name, unit) = ("workloads_not_after_timestamp", Some(&Unit::Seconds));
        let mut family = encoder.encode_descriptor(name, help, unit, MetricType::Gauge)?;
        for (group, members) in &self.groups {
            if let Some(at) = members.not_after {
                ConstGauge::new(seconds(at)).encode(family.encode_family(&group)?)?;
            }
        }
        let help = "Service accounts and workloads that are counted together as _other";
        let left_out = Known(self.left_out.map(whole));
        describe(encoder, "workload_groups_left_out", help, None, &left_out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::clock::Clock;

    #[test]
    fn groups_are_bounded_and_what_is_beyond_is_counted_together() {
        let mut groups = Groups::default();
        let accounts = limits::WORKLOAD_GROUPS + 3;
        for number in 0..2 * accounts {
            let identity = format!("spiffe://td/ns/shop/sa/account-{:04}", number % accounts);
            let name = format!("shop/pod-{number}").into();
            groups.add(&name, identity.parse().ok(), None, &Reports::default(), Clock::system().now());
        }
        groups.bound();
        assert_eq!((groups.groups.len(), groups.left_out), (limits::WORKLOAD_GROUPS + 1, Some(3)));
        assert_eq!(groups.groups[&Group::Other].all, 6);
        let all: usize = groups.groups.values().map(|members| members.all).sum();
        assert_eq!(all, 2 * accounts);
    }

    #[test]
    fn an_identity_of_another_form_has_the_name_of_its_workload() {
        let name: Arc<str> = "web".into();
        let of = |id: &str| Group::of(&name, Some(&id.parse().unwrap()));
        assert_eq!(of("spiffe://td/web"), Group::Workload("web".into()));
        let (namespace, service_account) = ("shop".to_owned(), "cart".to_owned());
        assert_eq!(of("spiffe://td/ns/shop/sa/cart"), Group::Account { namespace, service_account });
    }
}
