//! The store's contents as metrics: secrets, streams and health.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::SystemTime;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeGaugeValue, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Unit;

use super::node::Groups;
use super::{Known, command, describe, seconds, whole};
use crate::base::limits;
use crate::pki::crl::Crl;
use crate::secret::{Secret, SecretName, TrustBundle};
use crate::store::health::{CaHealth, ComponentHealth, OutputHealth, Reports};
use crate::store::{Cache, Counts, Snapshot, Totals};

/// The metric of expiries.
const NOT_AFTER: &str = "secret_not_after";

/// What the store holds at one moment.
#[derive(Debug)]
pub(super) struct Secrets {
    /// Of a sidecar. A node's secrets have no samples of their own.
    snapshots: Vec<Snapshot>,
    /// Of a node's workloads the worst.
    reports: Reports,
    /// The CAs that have issued what is served.
    issuers: BTreeSet<Arc<str>>,
    /// By their serial numbers: when the roots expire.
    roots: BTreeMap<String, SystemTime>,
    clients: Vec<Clients>,
    /// Of a node.
    groups: Groups,
    /// Of a node: when the trust bundle expires that does so first.
    roots_not_after: Option<SystemTime>,
    is_ready: bool,
    now: SystemTime,
}

/// The clients of all secrets of one name.
#[derive(Debug)]
struct Clients {
    name: String,
    streams: usize,
    counts: Counts,
}

impl Secrets {
    pub(super) fn new(cache: &Cache, now: SystemTime) -> Self {
        let (snapshots, workloads) = (cache.snapshot(), cache.workloads());
        let is_ready = cache.health(now).is_ready();
        let is_node = workloads.iter().all(|(_, name)| !name.is_empty());
        let mut secrets = Self {
            reports: Reports::default(),
            issuers: BTreeSet::new(),
            roots: roots(&snapshots),
            clients: if is_node {
                of_a_node(&snapshots, cache.removed_totals())
            } else {
                of_each(&snapshots)
            },
            groups: Groups::default(),
            roots_not_after: None,
            is_ready,
            now,
            snapshots: Vec::new(),
        };
        let key_pairs = snapshots.iter().filter(|one| one.key.name == SecretName::Workload);
        let key_pairs: HashMap<_, _> = key_pairs.map(|one| (one.key.workload, one)).collect();
        for (workload, name) in workloads {
            let reports = cache.components(workload).reports();
            let key_pair = key_pairs.get(&workload).copied();
            if is_node {
                secrets.groups.add(&name, cache.identity_of(workload), key_pair, &reports, now);
            }
            let good = key_pair.and_then(|one| one.entry.good.as_ref());
            if good.is_some_and(|good| good.origin.is_issued()) {
                secrets.issuers.extend(reports.renewal.issuer.clone());
            }
            secrets.add(reports);
        }
        if is_node {
            secrets.groups.bound();
            let bundles = snapshots.iter().filter(|one| one.key.name == SecretName::Roots);
            secrets.roots_not_after = bundles.filter_map(|one| one.entry.not_after()).min();
        } else {
            secrets.snapshots = snapshots;
        }
        secrets
    }

    /// Adds the reports of a workload: what fails for one fails, and what expires first counts.
    fn add(&mut self, reports: Reports) {
        fn worse(one: ComponentHealth, other: ComponentHealth) -> ComponentHealth {
            match (one, other) {
                (Some(Err(error)), _) | (_, Some(Err(error))) => Some(Err(error)),
                (one, other) => one.or(other),
            }
        }
        let all = &mut self.reports;
        all.state = worse(all.state.take(), reports.state);
        all.crls = worse(all.crls.take(), reports.crls);
        if let Some(output) = reports.output {
            let OutputHealth { directories, hook_failure, .. } = all.output.get_or_insert_default();
            directories.extend(output.directories);
            *hook_failure = hook_failure.take().or(output.hook_failure);
        }
        all.command = all.command.take().or(reports.command);
        all.renewal.failed_rounds = all.renewal.failed_rounds.max(reports.renewal.failed_rounds);
        for ca in reports.renewal.cas {
            let Some(known) = all.renewal.cas.iter_mut().find(|known| known.name == ca.name) else {
                all.renewal.cas.push(ca);
                continue;
            };
            known.issued = known.issued.max(ca.issued);
            let failures = known.failure.take().into_iter().chain(ca.failure);
            known.failure = failures.min_by_key(|failure| failure.since);
        }
    }
}

/// The clients of each secret.
fn of_each(snapshots: &[Snapshot]) -> Vec<Clients> {
    let of = |one: &Snapshot| {
        let verdicts = one.observed.verdicts();
        let counts = Counts { pushes: verdicts.pushes, acks: verdicts.acks, nacks: verdicts.nacks };
        Clients { name: one.key.name.as_str().to_owned(), streams: one.observed.streams, counts }
    };
    snapshots.iter().map(of).collect()
}

/// The clients of all key pairs, and of all trust bundles, with those of workloads that were `removed`.
fn of_a_node(snapshots: &[Snapshot], removed: Totals) -> Vec<Clients> {
    let (mut totals, mut streams) = (removed, HashMap::<_, usize>::new());
    for one in snapshots {
        totals.add(&one.key.name, one.observed.verdicts());
        *streams.entry(&one.key.name).or_default() += one.observed.streams;
    }
    let own = [(SecretName::Workload, totals.key_pairs), (SecretName::Roots, totals.trust_bundles)];
    let of = |(name, counts): (SecretName, Counts)| Clients {
        name: name.as_str().to_owned(),
        streams: streams.get(&name).copied().unwrap_or_default(),
        counts,
    };
    own.into_iter().map(of).collect()
}

/// When each root expires. Roots of two CAs may have one serial number, and two samples may not.
fn roots(snapshots: &[Snapshot]) -> BTreeMap<String, SystemTime> {
    let mut expiry = BTreeMap::new();
    for root in snapshots.iter().filter_map(trust_bundle).flat_map(TrustBundle::facts) {
        let at = expiry.entry(root.serial.clone()).or_insert(root.not_after);
        *at = root.not_after.min(*at);
    }
    expiry
}

impl Collector for Secrets {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        self.infos(&mut encoder)?;
        self.all_timestamps(&mut encoder)?;
        self.roots(&mut encoder)?;
        self.gauges(&mut encoder, "crls", "CRLs served with the trust bundle", |one| {
            Some(whole(crls(one)?.len()))
        })?;
        self.gauges(
            &mut encoder,
            "secret_failing",
            "1 while its source can't deliver a newer secret",
            |one| Some(i64::from(one.entry.failure().is_some())),
        )?;
        self.gauges(&mut encoder, "secret_rejected", "1 while a client rejects the newest secret", |one| {
            Some(i64::from(one.observed.verdicts().rejection.is_some()))
        })?;
        self.gauges(
            &mut encoder,
            "secret_expired",
            "1 while the secret that is served has expired",
            |one| Some(i64::from(one.entry.not_after()? <= self.now)),
        )?;
        let help = "1 while the renewal is late by more than a twentieth of the lifetime";
        self.gauges(&mut encoder, "secret_overdue", help, |one| {
            let good = one.entry.good.as_ref()?;
            good.renews.map(|_| i64::from(good.is_overdue(self.now)))
        })?;
        self.streams(&mut encoder)?;
        self.counters(&mut encoder, "pushes", "Secrets sent on streams", |it| it.pushes)?;
        self.counters(&mut encoder, "acks", "Secrets that a client acknowledged", |it| it.acks)?;
        self.counters(&mut encoder, "nacks", "Secrets that a client rejected", |it| it.nacks)?;
        self.all_reports(&mut encoder)?;
        self.cas(&mut encoder)?;
        command::encode(&mut encoder, &self.reports)?;
        self.groups.encode(&mut encoder)?;
        let help = "1 while every required secret and file is there and valid";
        describe(&mut encoder, "ready", help, None, &ConstGauge::new(i64::from(self.is_ready)))
    }
}

/// The workload's trust bundle.
fn trust_bundle(one: &Snapshot) -> Option<&TrustBundle> {
    match &one.entry.good.as_ref()?.secret {
        Secret::TrustBundle(bundle) if one.key.name == SecretName::Roots => Some(bundle),
        _ => None,
    }
}

/// The CRLs of the one trust bundle that may have some.
fn crls(one: &Snapshot) -> Option<&[Arc<Crl>]> {
    trust_bundle(one).map(TrustBundle::crls)
}

/// The CRL that expires first.
fn first_to_expire(one: &Snapshot) -> Option<&Crl> {
    let expiring = crls(one)?.iter().filter_map(|crl| Some((crl.next_update?, crl)));
    expiring.min_by_key(|(at, _)| *at).map(|(_, crl)| &**crl)
}

/// The labels of a secret.
fn labels(one: &Snapshot) -> [(&'static str, &str); 1] {
    [("name", one.key.name.as_str())]
}

impl Secrets {
    /// Serial numbers are not among the labels: each renewal would start a new series.
    fn infos(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let help = "Origin and identity of the secret that is served";
        let mut family = encoder.encode_descriptor("secret", help, None, MetricType::Info)?;
        for one in &self.snapshots {
            let Some(good) = &one.entry.good else { continue };
            let identity = match &good.secret {
                Secret::KeyPair(pair) => pair.spiffe_id().map(|id| id.to_string()),
                Secret::TrustBundle(_) => None,
            };
            let labels = (labels(one), [("origin", good.origin.to_string())]);
            let identity = Info::new([("identity", identity.unwrap_or_default())]);
            identity.encode(family.encode_family(&labels)?)?;
        }
        Ok(())
    }

    fn all_timestamps(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        self.timestamps(
            encoder,
            "secret_not_before",
            "Start of validity of the certificate that is served",
            |one| match &one.entry.good.as_ref()?.secret {
                Secret::KeyPair(pair) => Some(pair.leaf().not_before),
                Secret::TrustBundle(_) => None,
            },
        )?;
        self.timestamps(encoder, NOT_AFTER, "Expiry of the secret that is served", |one| {
            one.entry.not_after()
        })?;
        self.timestamps(encoder, "secret_received", "When the secret that is served was received", |one| {
            one.entry.good.as_ref().map(|good| good.received)
        })?;
        self.timestamps(
            encoder,
            "secret_renewal",
            "When the secret that is served is due for renewal",
            |one| one.entry.good.as_ref().and_then(|good| good.renews),
        )?;
        self.timestamps(encoder, "crl_next_update", "Expiry of the CRL that expires first", |one| {
            first_to_expire(one)?.next_update
        })?;
        self.timestamps(encoder, "crl_this_update", "When that CRL was issued", |one| {
            Some(first_to_expire(one)?.this_update)
        })
    }

    fn timestamps(
        &self,
        encoder: &mut DescriptorEncoder<'_>,
        name: &str,
        help: &str,
        moment: impl Fn(&Snapshot) -> Option<SystemTime>,
    ) -> Result<(), std::fmt::Error> {
        let shown = format!("{name}_timestamp");
        let mut family = encoder.encode_descriptor(&shown, help, Some(&Unit::Seconds), MetricType::Gauge)?;
        for one in &self.snapshots {
            if let Some(moment) = moment(one) {
                ConstGauge::new(seconds(moment)).encode(family.encode_family(&labels(one))?)?;
            }
        }
        if let Some(moment) = self.roots_not_after.filter(|_| name == NOT_AFTER) {
            let labels = [("name", SecretName::Roots.as_str())];
            ConstGauge::new(seconds(moment)).encode(family.encode_family(&labels)?)?;
        }
        Ok(())
    }

    /// A sample for each root, which shows which agents have a new root already, and which have an old one still.
    fn roots(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let (name, help) = ("trust_root_not_after_timestamp", "Expiry of a root of the trust bundle");
        let mut family = encoder.encode_descriptor(name, help, Some(&Unit::Seconds), MetricType::Gauge)?;
        for (serial, at) in &self.roots {
            let labels = [("serial", serial.as_str())];
            ConstGauge::new(seconds(*at)).encode(family.encode_family(&labels)?)?;
        }
        Ok(())
    }

    fn gauges(
        &self,
        encoder: &mut DescriptorEncoder<'_>,
        name: &str,
        help: &str,
        value: impl Fn(&Snapshot) -> Option<i64>,
    ) -> Result<(), std::fmt::Error> {
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for one in &self.snapshots {
            if let Some(value) = value(one) {
                ConstGauge::new(value).encode(family.encode_family(&labels(one))?)?;
            }
        }
        Ok(())
    }

    fn streams(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let help = "Streams subscribed to the secret";
        let mut family = encoder.encode_descriptor("streams", help, None, MetricType::Gauge)?;
        for Clients { name, streams, .. } in &self.clients {
            ConstGauge::new(whole(*streams)).encode(family.encode_family(&[("name", name.as_str())])?)?;
        }
        Ok(())
    }

    /// A sample for each secret, from zero on: Prometheus sees no increase in a counter that first appears at 1.
    fn counters(
        &self,
        encoder: &mut DescriptorEncoder<'_>,
        name: &str,
        help: &str,
        value: impl Fn(&Counts) -> u64,
    ) -> Result<(), std::fmt::Error> {
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
        for Clients { name, counts, .. } in &self.clients {
            ConstCounter::new(value(counts)).encode(family.encode_family(&[("name", name.as_str())])?)?;
        }
        Ok(())
    }

    fn all_reports(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let is_failing = |health: &ComponentHealth| health.as_ref().map(|health| i64::from(health.is_err()));
        let help = "Rounds in which no CA has signed, since the last certificate";
        self.reports(encoder, "renewal_consecutive_failures", help, None, |it| {
            Some(i64::from(it.renewal.failed_rounds))
        })?;
        let help = "1 while mounted CRLs can't be read, or are left out of the trust bundle";
        self.reports(encoder, "crls_failing", help, None, |it| is_failing(&it.crls))?;
        let help = "1 while the state directory can't be written";
        self.reports(encoder, "state_failing", help, None, |it| is_failing(&it.state))?;
        let help = "1 while the output directory can't be written, or the hook fails";
        self.reports(encoder, "output_failing", help, None, |it| {
            let output = it.output.as_ref()?;
            let is_written = output.failure().is_none() && !output.is_hanging();
            Some(i64::from(!is_written || output.hook_failure.is_some()))
        })?;
        let help = "Expiry of the files in the output directory";
        let unit = Some(&Unit::Seconds);
        self.reports(encoder, "output_not_after_timestamp", help, unit, |it| {
            it.output.as_ref()?.not_after().map(seconds)
        })?;
        self.directories(encoder)
    }

    /// A sample for each of several output directories. One alone has no series of its own.
    fn directories(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let help = "1 while this one of several output directories can't be written";
        let name = "output_directory_failing";
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        // A node has as many as its workloads have.
        let of_a_sidecar = self.reports.output.as_ref().filter(|_| !self.snapshots.is_empty());
        let several = of_a_sidecar.filter(|output| output.directories.len() > 1);
        for directory in several.iter().flat_map(|output| &output.directories) {
            let is_failing = directory.failure.is_some() || directory.is_hanging;
            let path = directory.path.display().to_string();
            let labels = [("directory", path.as_str())];
            ConstGauge::new(i64::from(is_failing)).encode(family.encode_family(&labels)?)?;
        }
        Ok(())
    }

    /// Samples for each address of a CA. There are as many as the options name, and no more than the limit.
    fn cas(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let help = "1 for the CA that issued the certificate that is served";
        self.each_ca(encoder, "ca_serving", help, None, |ca| {
            Some(i64::from(self.issuers.contains(&ca.name)))
        })?;
        let help = "1 while the CA's last call was without a certificate";
        self.each_ca(encoder, "ca_failing", help, None, |ca| Some(i64::from(ca.failure.is_some())))?;
        let (seconds_of, unit) = (|at: Option<SystemTime>| at.map(seconds), Some(&Unit::Seconds));
        let help = "When the first of these calls failed";
        self.each_ca(encoder, "ca_failing_since_timestamp", help, unit, |ca| {
            seconds_of(ca.failure.as_ref().map(|failure| failure.since))
        })?;
        let help = "When the CA last issued a certificate";
        self.each_ca(encoder, "ca_last_issued_timestamp", help, unit, |ca| seconds_of(ca.issued))
    }

    /// A sample for each CA that has a value.
    fn each_ca<N: EncodeGaugeValue>(
        &self,
        encoder: &mut DescriptorEncoder<'_>,
        name: &str,
        help: &str,
        unit: Option<&Unit>,
        value: impl Fn(&CaHealth) -> Option<N>,
    ) -> Result<(), std::fmt::Error> {
        let mut family = encoder.encode_descriptor(name, help, unit, MetricType::Gauge)?;
        for ca in self.reports.renewal.cas.iter().take(limits::CAS_MEASURED) {
            if let Some(value) = value(ca) {
                ConstGauge::new(value).encode(family.encode_family(&[("ca", &*ca.name)])?)?;
            }
        }
        Ok(())
    }

    /// A sample, if there is a value.
    fn reports<N: EncodeGaugeValue + Copy>(
        &self,
        encoder: &mut DescriptorEncoder<'_>,
        name: &str,
        help: &str,
        unit: Option<&Unit>,
        value: impl Fn(&Reports) -> Option<N>,
    ) -> Result<(), std::fmt::Error> {
        describe(encoder, name, help, unit, &Known(value(&self.reports)))
    }
}
