//! Counters that components keep, and the text of `/metrics`.
//!
//! What the cache knows (expiry, streams, readiness) is read from it when somebody asks, not kept twice.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric, text};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Registry, Unit};
use tokio::sync::watch;

use crate::cache::{Cache, Snapshot};
use crate::clock::Clock;
use crate::pki::crl::Crl;
use crate::readiness;
use crate::secret::{Secret, SecretName, TrustBundle};

/// The label of everything that is counted for each secret.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ByName {
    /// The resource name.
    pub name: String,
}

/// The label of refusals.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ByReason {
    /// One word.
    pub reason: &'static str,
}

/// The labels of calls to a CA.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ByOutcome {
    /// The CA client's name.
    pub provider: &'static str,
    /// `ok`, or one word for what went wrong.
    pub outcome: &'static str,
}

/// The label of call durations.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ByProvider {
    /// The CA client's name.
    pub provider: &'static str,
}

/// The labels of failures to read a source.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct BySource {
    /// `files` or `crl`.
    pub source: &'static str,
    /// One word for what went wrong.
    pub reason: &'static str,
}

/// The label of what is done for the output folder.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ByResult {
    /// `ok`, or one word for what went wrong.
    pub outcome: &'static str,
}

/// Every counter. Clones count together.
#[derive(Clone, Debug)]
pub struct Metrics {
    /// Secrets sent on streams.
    pub pushes: Family<ByName, Counter>,
    /// Secrets that a client accepted.
    pub acks: Family<ByName, Counter>,
    /// Secrets that a client rejected.
    pub nacks: Family<ByName, Counter>,
    /// Requests that ended their stream, and names that are not served.
    pub refusals: Family<ByReason, Counter>,
    /// Calls to the CA.
    pub ca_requests: Family<ByOutcome, Counter>,
    /// How long they took.
    pub ca_durations: Family<ByProvider, Histogram, fn() -> Histogram>,
    /// Mounted files that could not be used.
    pub source_failures: Family<BySource, Counter>,
    /// Generations written to the output folder.
    pub output_writes: Family<ByResult, Counter>,
    /// Runs of the output hook.
    pub output_hooks: Family<ByResult, Counter>,
    /// How it stands with the output folder; none where there is none.
    pub output: watch::Sender<Option<readiness::Output>>,
}

/// Durations of CA calls: from a CA in the next process to one that is nearly given up.
fn duration_histogram() -> Histogram {
    Histogram::new([0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0])
}

impl Default for Metrics {
    /// All counters at zero.
    fn default() -> Self {
        Self {
            pushes: Family::default(),
            acks: Family::default(),
            nacks: Family::default(),
            refusals: Family::default(),
            ca_requests: Family::default(),
            ca_durations: Family::new_with_constructor(duration_histogram),
            source_failures: Family::default(),
            output_writes: Family::default(),
            output_hooks: Family::default(),
            output: watch::Sender::default(),
        }
    }
}

impl Metrics {
    /// Drops what was counted of a secret that is no longer served.
    pub fn forget(&self, name: &str) {
        let label = ByName { name: name.to_owned() };
        for counters in [&self.pushes, &self.acks, &self.nacks] {
            counters.remove(&label);
        }
    }

    /// Everything, in the OpenMetrics text format.
    pub fn encode(&self, cache: &Cache, clock: &Clock) -> String {
        let mut registry = Registry::with_prefix("attache");
        let version = Info::new([("version", env!("CARGO_PKG_VERSION"))]);
        registry.register("build", "The version that runs", version);
        registry.register("pushes", "Secrets sent on streams", self.pushes.clone());
        registry.register("acks", "Secrets that a client accepted", self.acks.clone());
        registry.register("nacks", "Secrets that a client rejected", self.nacks.clone());
        registry.register("refusals", "Requests and names that are not served", self.refusals.clone());
        registry.register("ca_requests", "Calls to the CA by outcome", self.ca_requests.clone());
        registry.register_with_unit(
            "ca_request_duration",
            "How long calls to the CA took",
            Unit::Seconds,
            self.ca_durations.clone(),
        );
        registry.register(
            "source_failures",
            "Times that mounted files could not be used",
            self.source_failures.clone(),
        );
        registry.register(
            "output_writes",
            "Generations written to the output folder by outcome",
            self.output_writes.clone(),
        );
        registry.register("output_hooks", "Runs of the output hook by outcome", self.output_hooks.clone());
        let output = self.output.borrow().clone();
        let entries = Entries { snapshots: cache.snapshot(), output, now: clock.now() };
        registry.register_collector(Box::new(entries));
        let mut out = String::new();
        // Writing to a String does not fail.
        let _ = text::encode(&mut out, &registry);
        out
    }
}

/// What the cache knows, at one moment.
#[derive(Debug)]
struct Entries {
    snapshots: Vec<Snapshot>,
    output: Option<readiness::Output>,
    now: SystemTime,
}

impl Collector for Entries {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
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
            |one| crls(one)?.iter().filter_map(|crl| crl.next_update).min(),
        )?;
        self.roots(&mut encoder)?;
        let count = |count: usize| Some(i64::try_from(count).unwrap_or(i64::MAX));
        self.gauges(&mut encoder, "crls", "CRLs that are served with the trust bundle", |one| {
            count(crls(one)?.len())
        })?;
        self.gauges(&mut encoder, "secret_failing", "1 while its source can't give a newer secret", |one| {
            Some(i64::from(one.entry.failure().is_some()))
        })?;
        self.gauges(&mut encoder, "secret_rejected", "1 while a client rejects the newest secret", |one| {
            Some(i64::from(one.observed.rejection.is_some()))
        })?;
        self.gauges(&mut encoder, "streams", "Streams subscribed to the secret", |one| {
            count(one.observed.streams)
        })?;
        if let Some(output) = &self.output {
            let is_failing = output.failure.is_some() || output.is_hanging || output.is_hook_failing;
            let failing = ConstGauge::new(i64::from(is_failing));
            let help = "1 while the output folder can't be written, or the hook fails";
            failing.encode(encoder.encode_descriptor(
                "output_failing",
                help,
                None,
                failing.metric_type(),
            )?)?;
        }
        if let Some(at) = self.output.as_ref().and_then(|output| output.not_after) {
            let gauge = ConstGauge::new(seconds(at));
            let (name, help) = ("output_not_after_timestamp", "When what lies in the output folder ends");
            let unit = Some(&Unit::Seconds);
            gauge.encode(encoder.encode_descriptor(name, help, unit, gauge.metric_type())?)?;
        }
        let missing = readiness::missing(&self.snapshots, self.output.as_ref(), self.now);
        let ready = ConstGauge::new(i64::from(missing.is_empty()));
        let help = "1 while every secret and file that is to be there is there and valid";
        ready.encode(encoder.encode_descriptor("ready", help, None, ready.metric_type())?)
    }
}

fn seconds(moment: SystemTime) -> f64 {
    moment.duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
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

impl Entries {
    fn moments(
        &self,
        encoder: &mut DescriptorEncoder<'_>,
        name: &str,
        help: &str,
        moment: impl Fn(&Snapshot) -> Option<SystemTime>,
    ) -> Result<(), std::fmt::Error> {
        let name = format!("{name}_timestamp");
        let gauge_type = ConstGauge::new(0.0).metric_type();
        let mut family = encoder.encode_descriptor(&name, help, Some(&Unit::Seconds), gauge_type)?;
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
        let gauge_type = ConstGauge::new(0.0).metric_type();
        let mut family = encoder.encode_descriptor(name, help, Some(&Unit::Seconds), gauge_type)?;
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
        let gauge_type = ConstGauge::new(0i64).metric_type();
        let mut family = encoder.encode_descriptor(name, help, None, gauge_type)?;
        for one in &self.snapshots {
            if let Some(value) = value(one) {
                let labels = [("name", one.key.name.as_str())];
                ConstGauge::new(value).encode(family.encode_family(&labels)?)?;
            }
        }
        Ok(())
    }
}
