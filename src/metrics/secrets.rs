//! The store's contents as metrics: secrets, streams and health.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::SystemTime;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeGaugeValue, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Unit;

use super::{Of, command, describe, seconds, whole};
use crate::base::limits;
use crate::pki::crl::Crl;
use crate::secret::{Secret, SecretName, TrustBundle};
use crate::store::health::{CaHealth, ComponentHealth, RenewalHealth, Reports};
use crate::store::{Cache, Snapshot, Verdicts};

/// What the store holds at one moment.
#[derive(Debug)]
pub(super) struct Secrets {
    snapshots: Vec<Snapshot>,
    /// By the workload's name.
    reports: Vec<(Arc<str>, Reports)>,
    is_ready: bool,
}

impl Secrets {
    pub(super) fn new(cache: &Cache, now: SystemTime) -> Self {
        let reports = |(workload, name)| (name, cache.components(workload).reports());
        Self {
            snapshots: cache.snapshot(),
            reports: cache.workloads().into_iter().map(reports).collect(),
            is_ready: cache.health(now).is_ready(),
        }
    }
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
        self.gauges(&mut encoder, "streams", "Streams subscribed to the secret", |one| {
            Some(whole(one.observed.streams))
        })?;
        self.counters(&mut encoder, "pushes", "Secrets sent on streams", |it| it.pushes)?;
        self.counters(&mut encoder, "acks", "Secrets that a client acknowledged", |it| it.acks)?;
        self.counters(&mut encoder, "nacks", "Secrets that a client rejected", |it| it.nacks)?;
        self.all_reports(&mut encoder)?;
        self.cas(&mut encoder)?;
        command::encode(&mut encoder, &self.reports)?;
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
fn labels(one: &Snapshot) -> (Of<'_>, [(&'static str, &str); 1]) {
    (Of(&one.workload), [("name", one.key.name.as_str())])
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
        self.timestamps(encoder, "secret_not_after", "Expiry of the secret that is served", |one| {
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
        let name = format!("{name}_timestamp");
        let mut family = encoder.encode_descriptor(&name, help, Some(&Unit::Seconds), MetricType::Gauge)?;
        for one in &self.snapshots {
            if let Some(moment) = moment(one) {
                ConstGauge::new(seconds(moment)).encode(family.encode_family(&labels(one))?)?;
            }
        }
        Ok(())
    }

    /// A sample for each root, which shows which agents have a new root already, and which have an old one still.
    fn roots(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let (name, help) = ("trust_root_not_after_timestamp", "Expiry of a root of the trust bundle");
        let mut family = encoder.encode_descriptor(name, help, Some(&Unit::Seconds), MetricType::Gauge)?;
        // Roots of two CAs may have one serial number, and two samples may not.
        let mut expiry = BTreeMap::new();
        let bundles = self.snapshots.iter().filter_map(|one| Some((&*one.workload, trust_bundle(one)?)));
        for (workload, root) in
            bundles.flat_map(|(workload, it)| it.facts().iter().map(move |root| (workload, root)))
        {
            let at = expiry.entry((workload, root.serial.as_str())).or_insert(root.not_after);
            *at = root.not_after.min(*at);
        }
        for ((workload, serial), at) in expiry {
            let labels = (Of(workload), [("serial", serial)]);
            ConstGauge::new(seconds(at)).encode(family.encode_family(&labels)?)?;
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

    /// A sample for each secret, from zero on: Prometheus sees no increase in a counter that first appears at 1.
    fn counters(
        &self,
        encoder: &mut DescriptorEncoder<'_>,
        name: &str,
        help: &str,
        value: impl Fn(&Verdicts) -> u64,
    ) -> Result<(), std::fmt::Error> {
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
        for one in &self.snapshots {
            ConstCounter::new(value(one.observed.verdicts())).encode(family.encode_family(&labels(one))?)?;
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
        for (workload, reports) in &self.reports {
            let Some(output) = reports.output.as_ref().filter(|it| it.directories.len() > 1) else {
                continue;
            };
            for directory in &output.directories {
                let is_failing = directory.failure.is_some() || directory.is_hanging;
                let path = directory.path.display().to_string();
                let labels = (Of(workload), [("directory", path.as_str())]);
                ConstGauge::new(i64::from(is_failing)).encode(family.encode_family(&labels)?)?;
            }
        }
        Ok(())
    }

    /// Samples for each address of a CA. There are as many as the options name, and no more than the limit.
    fn cas(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let issues = |one: &Snapshot| {
            let good = one.entry.good.as_ref();
            one.key.name == SecretName::Workload && good.is_some_and(|good| good.origin.is_issued())
        };
        let served: BTreeSet<_> =
            self.snapshots.iter().filter(|one| issues(one)).map(|one| &one.workload).collect();
        let help = "1 for the CA that issued the certificate that is served";
        self.each_ca(encoder, "ca_serving", help, None, |workload, renewal, ca| {
            let is_issuer = renewal.issuer.as_ref() == Some(&ca.name);
            Some(i64::from(is_issuer && served.contains(workload)))
        })?;
        let help = "1 while the CA's last call was without a certificate";
        self.each_ca(encoder, "ca_failing", help, None, |_, _, ca| Some(i64::from(ca.failure.is_some())))?;
        let (seconds_of, unit) = (|at: Option<SystemTime>| at.map(seconds), Some(&Unit::Seconds));
        let help = "When the first of these calls failed";
        self.each_ca(encoder, "ca_failing_since_timestamp", help, unit, |_, _, ca| {
            seconds_of(ca.failure.as_ref().map(|failure| failure.since))
        })?;
        let help = "When the CA last issued a certificate";
        self.each_ca(encoder, "ca_last_issued_timestamp", help, unit, |_, _, ca| seconds_of(ca.issued))
    }

    /// A sample for each CA that has a value.
    fn each_ca<N: EncodeGaugeValue>(
        &self,
        encoder: &mut DescriptorEncoder<'_>,
        name: &str,
        help: &str,
        unit: Option<&Unit>,
        value: impl Fn(&Arc<str>, &RenewalHealth, &CaHealth) -> Option<N>,
    ) -> Result<(), std::fmt::Error> {
        let mut family = encoder.encode_descriptor(name, help, unit, MetricType::Gauge)?;
        for (workload, reports) in &self.reports {
            for ca in reports.renewal.cas.iter().take(limits::CAS_MEASURED) {
                if let Some(value) = value(workload, &reports.renewal, ca) {
                    let labels = (Of(workload), [("ca", &*ca.name)]);
                    ConstGauge::new(value).encode(family.encode_family(&labels)?)?;
                }
            }
        }
        Ok(())
    }

    /// A sample for each workload that has a value.
    fn reports<N: EncodeGaugeValue>(
        &self,
        encoder: &mut DescriptorEncoder<'_>,
        name: &str,
        help: &str,
        unit: Option<&Unit>,
        value: impl Fn(&Reports) -> Option<N>,
    ) -> Result<(), std::fmt::Error> {
        let mut family = encoder.encode_descriptor(name, help, unit, MetricType::Gauge)?;
        let mut without_label = None;
        for (workload, reports) in &self.reports {
            let Some(value) = value(reports).map(ConstGauge::new) else { continue };
            if workload.is_empty() {
                without_label = Some(value);
            } else {
                value.encode(family.encode_family(&Of(workload))?)?;
            }
        }
        without_label.map_or(Ok(()), |value| value.encode(family))
    }
}
