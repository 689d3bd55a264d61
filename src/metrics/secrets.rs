//! What the cache knows, as metrics.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::SystemTime;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Unit;

use super::{Known, describe, seconds, whole};
use crate::pki::crl::Crl;
use crate::secret::{Secret, SecretName, TrustBundle};
use crate::store::Snapshot;
use crate::store::health;

/// What the cache knows, at one moment.
#[derive(Debug)]
pub(super) struct Secrets {
    pub(super) snapshots: Vec<Snapshot>,
    pub(super) output: Option<health::Output>,
    pub(super) now: SystemTime,
}

impl Collector for Secrets {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        self.infos(&mut encoder)?;
        self.moments(
            &mut encoder,
            "secret_not_before",
            "From when the certificate that is served is valid",
            |one| match &one.entry.good.as_ref()?.secret {
                Secret::KeyPair(pair) => Some(pair.leaf().not_before),
                Secret::TrustBundle(_) => None,
            },
        )?;
        self.moments(&mut encoder, "secret_not_after", "When the secret that is served ends", |one| {
            one.entry.good.as_ref().map(|good| good.secret.not_after())
        })?;
        self.moments(&mut encoder, "secret_received", "When the secret that is served came", |one| {
            one.entry.good.as_ref().map(|good| good.received)
        })?;
        self.moments(
            &mut encoder,
            "secret_renewal",
            "When the secret that is served is to be renewed",
            |one| one.entry.good.as_ref().and_then(|good| good.renews),
        )?;
        self.moments(
            &mut encoder,
            "crl_next_update",
            "When the first of its CRLs is to be replaced",
            |one| first_to_end(one)?.next_update,
        )?;
        self.moments(&mut encoder, "crl_this_update", "When that CRL was made", |one| {
            Some(first_to_end(one)?.this_update)
        })?;
        self.roots(&mut encoder)?;
        self.gauges(&mut encoder, "crls", "CRLs that are served with the trust bundle", |one| {
            Some(whole(crls(one)?.len()))
        })?;
        self.gauges(&mut encoder, "secret_failing", "1 while its source can't give a newer secret", |one| {
            Some(i64::from(one.entry.failure().is_some()))
        })?;
        self.gauges(&mut encoder, "secret_rejected", "1 while a client rejects the newest secret", |one| {
            Some(i64::from(one.observed.rejection.is_some()))
        })?;
        self.gauges(&mut encoder, "streams", "Streams subscribed to the secret", |one| {
            Some(whole(one.observed.streams))
        })?;
        let output = self.output.as_ref();
        let is_failing =
            output.map(|it| it.failure.is_some() || it.is_hanging || it.is_hook_failing).map(i64::from);
        let help = "1 while the output folder can't be written, or the hook fails";
        describe(&mut encoder, "output_failing", help, None, &Known(is_failing))?;
        let end = output.and_then(|output| output.not_after).map(seconds);
        let (name, help) = ("output_not_after_timestamp", "When what lies in the output folder ends");
        describe(&mut encoder, name, help, Some(&Unit::Seconds), &Known(end))?;
        let missing = health::missing(&self.snapshots, output, self.now);
        let help = "1 while every secret and file that is to be there is there and valid";
        describe(&mut encoder, "ready", help, None, &ConstGauge::new(i64::from(missing.is_empty())))
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

/// Of these the one that ends first.
fn first_to_end(one: &Snapshot) -> Option<&Crl> {
    let ending = crls(one)?.iter().filter_map(|crl| Some((crl.next_update?, crl)));
    ending.min_by_key(|(end, _)| *end).map(|(_, crl)| &**crl)
}

impl Secrets {
    /// Serial numbers are not in it: each renewal would begin another series.
    fn infos(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let help = "Where the secret that is served comes from, and whose it is";
        let mut family = encoder.encode_descriptor("secret", help, None, MetricType::Info)?;
        for one in &self.snapshots {
            let Some(good) = &one.entry.good else { continue };
            let identity = match &good.secret {
                Secret::KeyPair(pair) => pair.spiffe_id().map(|id| id.to_string()),
                Secret::TrustBundle(_) => None,
            };
            let labels = [("name", one.key.name.as_str().to_owned()), ("origin", good.origin.to_string())];
            let identity = Info::new([("identity", identity.unwrap_or_default())]);
            identity.encode(family.encode_family(&labels)?)?;
        }
        Ok(())
    }

    fn moments(
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
                let labels = [("name", one.key.name.as_str())];
                ConstGauge::new(seconds(moment)).encode(family.encode_family(&labels)?)?;
            }
        }
        Ok(())
    }

    /// A sample for each root, so that one can see who has a new one already, and who has an old one still.
    fn roots(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let (name, help) = ("trust_root_not_after_timestamp", "When a root of the trust bundle ends");
        let mut family = encoder.encode_descriptor(name, help, Some(&Unit::Seconds), MetricType::Gauge)?;
        // Roots of two CAs may have one serial number, and samples may not.
        let mut ends = BTreeMap::new();
        for root in self.snapshots.iter().filter_map(trust_bundle).flat_map(TrustBundle::facts) {
            let end = ends.entry(root.serial.as_str()).or_insert(root.not_after);
            *end = root.not_after.min(*end);
        }
        for (serial, end) in ends {
            ConstGauge::new(seconds(end)).encode(family.encode_family(&[("serial", serial)])?)?;
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
                let labels = [("name", one.key.name.as_str())];
                ConstGauge::new(value).encode(family.encode_family(&labels)?)?;
            }
        }
        Ok(())
    }
}
