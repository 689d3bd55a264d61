//! Counters that components keep, and the text of `/metrics`. What each metric means is in `docs/metrics.md`.
//!
//! What the cache knows (expiry, streams, readiness), and what the kernel knows of the process, is read when somebody
//! asks, not kept twice.

mod process;
mod secrets;
mod text;

use std::fmt;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{
    DescriptorEncoder, EncodeGaugeValue, EncodeLabelSet, EncodeMetric, MetricEncoder,
};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Registry, Unit};
use tokio::sync::watch;

use self::process::Process;
use self::secrets::Secrets;
pub use self::text::Format;
use crate::fs::watch::WatchCount;
use crate::store::Cache;
use crate::store::health;

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

/// Every reason for which something is refused.
const REFUSALS: [&str; 7] =
    ["peer", "connections", "no_node", "foreign_type", "too_many_names", "unknown_name", "no_source"];

/// Something that works, or fails for a reason; none where it is not used.
pub type Health = watch::Sender<Option<Result<(), String>>>;

/// Every counter. Clones count together.
#[derive(Clone, Debug)]
pub struct Metrics {
    /// Secrets sent on streams.
    pub pushes: Family<ByName, Counter>,
    /// Secrets that a client accepted.
    pub acks: Family<ByName, Counter>,
    /// Secrets that a client rejected.
    pub nacks: Family<ByName, Counter>,
    /// Connections of Envoys that are open.
    pub connections: Gauge,
    /// Requests that ended their stream, and names that are not served.
    pub refusals: Family<ByReason, Counter>,
    /// The words of the last one.
    pub last_refusal: watch::Sender<Option<String>>,
    /// Calls to the CA.
    pub ca_requests: Family<ByOutcome, Counter>,
    /// How long they took.
    pub ca_durations: Family<ByOutcome, Histogram, fn() -> Histogram>,
    /// When the last of them ended.
    pub ca_last: Family<ByOutcome, Gauge<f64, AtomicU64>>,
    /// Rounds of CAs in which nobody has signed, since somebody did.
    pub failed_rounds: Gauge,
    /// How the last write to the state folder ended.
    pub state: Health,
    /// Whether mounted CRLs can be read, and be served.
    pub crls: Health,
    /// Mounted files that could not be used.
    pub source_failures: Family<BySource, Counter>,
    /// Generations written to the output folder.
    pub output_writes: Family<ByResult, Counter>,
    /// Runs of the output hook.
    pub output_hooks: Family<ByResult, Counter>,
    /// How it stands with the output folder; none where there is none.
    pub output: watch::Sender<Option<health::Output>>,
}

/// Durations of CA calls: from a CA in the next process to one that is nearly given up.
fn duration_histogram() -> Histogram {
    Histogram::new([0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0])
}

impl Default for Metrics {
    /// All counters at zero.
    fn default() -> Self {
        let refusals = Family::default();
        for reason in REFUSALS {
            // A counter that appears at 1 has not increased, as Prometheus sees it.
            drop(refusals.get_or_create(&ByReason { reason }));
        }
        Self {
            pushes: Family::default(),
            acks: Family::default(),
            nacks: Family::default(),
            connections: Gauge::default(),
            refusals,
            last_refusal: watch::Sender::default(),
            ca_requests: Family::default(),
            ca_durations: Family::new_with_constructor(duration_histogram),
            ca_last: Family::default(),
            failed_rounds: Gauge::default(),
            state: Health::default(),
            crls: Health::default(),
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

    /// Notes something that is not served, for this reason; `words` are for people.
    pub fn refuse(&self, reason: &'static str, words: &dyn fmt::Display) {
        debug_assert!(REFUSALS.contains(&reason), "{reason}");
        self.refusals.get_or_create(&ByReason { reason }).inc();
        self.last_refusal.send_replace(Some(words.to_string()));
    }

    /// Notes a call to the CA of `provider` that has ended `at`, and how.
    pub fn count_call(&self, provider: &'static str, outcome: &'static str, took: Duration, at: SystemTime) {
        let label = ByOutcome { provider, outcome };
        self.ca_requests.get_or_create(&label).inc();
        self.ca_durations.get_or_create(&label).observe(took.as_secs_f64());
        self.ca_last.get_or_create(&label).set(seconds(at));
    }

    /// Everything, in this format.
    pub fn encode(&self, cache: &Cache, agent: Agent, format: Format) -> String {
        let output = self.output.borrow().clone();
        let secrets = Secrets { snapshots: cache.snapshot(), output, now: agent.now };
        let mut registry = Registry::default();
        registry.register_collector(Box::new(Process { started: agent.started }));
        let own = registry.sub_registry_with_prefix("attache");
        own.register_collector(Box::new(Counted { metrics: self.clone(), watched: agent.watched }));
        own.register_collector(Box::new(secrets));
        let mut out = String::new();
        // Writing to a String does not fail.
        let _ = encode(&mut out, &registry);
        format.of_open_metrics(out)
    }
}

/// What is known of the agent at the moment of a scrape.
#[derive(Clone, Copy, Debug)]
pub struct Agent {
    /// When it started.
    pub started: SystemTime,
    /// The moment.
    pub now: SystemTime,
    /// How it notices that files change.
    pub watched: WatchCount,
}

/// What is counted. Each metric is described also where nothing is counted yet.
#[derive(Debug)]
struct Counted {
    metrics: Metrics,
    watched: WatchCount,
}

impl Collector for Counted {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let Self { metrics, watched } = self;
        let build = Info::new([("version", env!("CARGO_PKG_VERSION"))]);
        let metrics: [(&str, &str, &dyn EncodeMetric); 11] = [
            ("build", "The version that runs", &build),
            ("connections", "Connections to the SDS socket that are open", &metrics.connections),
            ("pushes", "Secrets sent on streams", &metrics.pushes),
            ("acks", "Secrets that a client accepted", &metrics.acks),
            ("nacks", "Secrets that a client rejected", &metrics.nacks),
            ("refusals", "Connections, requests and names that are not served", &metrics.refusals),
            ("ca_requests", "Calls to the CA by outcome", &metrics.ca_requests),
            (
                "renewal_consecutive_failures",
                "Times that no CA has signed, since one did",
                &metrics.failed_rounds,
            ),
            ("source_failures", "Times that mounted files could not be used", &metrics.source_failures),
            ("output_writes", "Generations written to the output folder by outcome", &metrics.output_writes),
            ("output_hooks", "Runs of the output hook by outcome", &metrics.output_hooks),
        ];
        for (name, help, metric) in metrics {
            describe(&mut encoder, name, help, None, metric)?;
        }
        let in_seconds: [(&str, &str, &dyn EncodeMetric); 2] = [
            ("ca_request_duration", "How long calls to the CA took by outcome", &self.metrics.ca_durations),
            (
                "ca_last_request_timestamp",
                "When the last call to the CA with this outcome ended",
                &self.metrics.ca_last,
            ),
        ];
        for (name, help, metric) in in_seconds {
            describe(&mut encoder, name, help, Some(&Unit::Seconds), metric)?;
        }
        let help = "Folders with files that are followed, by how changes are noticed";
        let mut family = encoder.encode_descriptor("watched_folders", help, None, MetricType::Gauge)?;
        for (mode, folders) in [("inotify", watched.inotify), ("polling", watched.polling)] {
            ConstGauge::new(whole(folders)).encode(family.encode_family(&[("mode", mode)])?)?;
        }
        let mut failing = |name: &str, help: &str, health: &Health| {
            let is_failing = health.borrow().as_ref().map(|health| i64::from(health.is_err()));
            describe(&mut encoder, name, help, None, &Known(is_failing))
        };
        let help = "1 while mounted CRLs can't be read, or are left out of the trust bundle";
        failing("crls_failing", help, &self.metrics.crls)?;
        failing("state_failing", "1 while the state folder can't be written", &self.metrics.state)
    }
}

/// A gauge without a sample where there is no value.
struct Known<N>(Option<N>);

impl<N: EncodeGaugeValue + Copy> EncodeMetric for Known<N> {
    fn encode(&self, encoder: MetricEncoder<'_>) -> Result<(), std::fmt::Error> {
        self.0.map_or(Ok(()), |value| ConstGauge::new(value).encode(encoder))
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Gauge
    }
}

/// One metric, whatever it holds.
fn describe(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    unit: Option<&Unit>,
    metric: &dyn EncodeMetric,
) -> Result<(), std::fmt::Error> {
    metric.encode(encoder.encode_descriptor(name, help, unit, metric.metric_type())?)
}

fn seconds(moment: SystemTime) -> f64 {
    moment.duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

fn whole(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}
