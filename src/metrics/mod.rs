//! Counters that components keep, and the text of `/metrics`. `docs/metrics.md` says what each metric means.
//!
//! Metrics observe: nothing in the agent decides by them. What the store knows (expiry, streams, health) and what the
//! kernel knows of the process is read at each scrape, not kept twice.

mod command;
mod csi;
mod node;
mod process;
mod secrets;
mod text;

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

pub use self::csi::CsiCounts;
use self::process::Process;
use self::secrets::Secrets;
pub use self::text::Format;
use crate::base::clock::Clock;
use crate::fs::pending::Hanging;
use crate::fs::watch::WatchCount;
use crate::store::Cache;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{
    DescriptorEncoder, EncodeGaugeValue, EncodeLabelSet, EncodeMetric, MetricEncoder,
};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Registry, Unit};

/// The label of refusals.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ByReason {
    pub reason: &'static str,
}

/// The labels of calls to a CA.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ByOutcome {
    /// The CA client's name.
    pub provider: &'static str,
    /// `ok`, or one word for the cause of the failure.
    pub outcome: &'static str,
}

/// The labels of failures to read a source.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct BySource {
    /// `files` or `crl`.
    pub source: &'static str,
    /// One word for the cause.
    pub reason: &'static str,
}

/// The label of writes and hook runs for the output directory.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ByResult {
    /// `ok`, or one word for the cause of the failure.
    pub outcome: &'static str,
}

/// Every reason for a refusal.
const REFUSALS: [&str; 13] = [
    "peer",
    "connections",
    "no_memory",
    "no_node",
    "foreign_type",
    "too_many_names",
    "unknown_name",
    "no_source",
    "forbidden",
    "no_spiffe_header",
    "no_identity",
    "bad_token",
    "foreign_token",
];

/// Every counter. Clones count together.
#[derive(Clone, Debug)]
pub struct Metrics {
    /// Open connections of Envoys.
    pub connections: Gauge,
    /// Connections, requests and names that were refused.
    pub refusals: Family<ByReason, Counter>,
    /// Calls to the CA.
    pub ca_requests: Family<ByOutcome, Counter>,
    /// How long the calls took.
    pub ca_durations: Family<ByOutcome, Histogram, fn() -> Histogram>,
    /// When the last of the calls ended.
    pub ca_last: Family<ByOutcome, Gauge<f64, AtomicU64>>,
    /// Mounted files, and Secrets of Kubernetes, that could not be used.
    pub source_failures: Family<BySource, Counter>,
    /// Generations written to the output directory.
    pub output_writes: Family<ByResult, Counter>,
    /// Runs of the output hook.
    pub output_hooks: Family<ByResult, Counter>,
    /// Of the CSI driver, if there is one.
    csi: Arc<OnceLock<Box<CsiCounts>>>,
}

/// Buckets for CA calls: from a CA in the next process to one that nearly times out.
fn duration_histogram() -> Histogram {
    Histogram::new([0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0])
}

impl Default for Metrics {
    /// All counters at zero.
    fn default() -> Self {
        let refusals = Family::default();
        for reason in REFUSALS {
            // Prometheus sees no increase in a counter that first appears at 1.
            drop(refusals.get_or_create(&ByReason { reason }));
        }
        Self {
            connections: Gauge::default(),
            refusals,
            ca_requests: Family::default(),
            ca_durations: Family::new_with_constructor(duration_histogram),
            ca_last: Family::default(),
            source_failures: Family::default(),
            output_writes: Family::default(),
            output_hooks: Family::default(),
            csi: Arc::default(),
        }
    }
}

impl Metrics {
    /// Counts a refusal.
    pub fn refuse(&self, reason: &'static str) {
        debug_assert!(REFUSALS.contains(&reason), "{reason}");
        self.refusals.get_or_create(&ByReason { reason }).inc();
    }

    /// The counters of the CSI driver, which exist from the first call on.
    pub fn csi(&self) -> &CsiCounts {
        self.csi.get_or_init(Box::default)
    }

    /// Counts a call to the CA of `provider` that ended at `at` with `outcome`.
    pub fn count_call(&self, provider: &'static str, outcome: &'static str, took: Duration, at: SystemTime) {
        let label = ByOutcome { provider, outcome };
        self.ca_requests.get_or_create(&label).inc();
        self.ca_durations.get_or_create(&label).observe(took.as_secs_f64());
        self.ca_last.get_or_create(&label).set(seconds(at));
    }

    /// The text of `/metrics` in `format`.
    pub fn encode(&self, cache: &Cache, agent: Agent, format: Format) -> String {
        let secrets = Secrets::new(cache, agent.now);
        let mut registry = Registry::default();
        registry.register_collector(Box::new(Process { started: agent.started }));
        let own = registry.sub_registry_with_prefix("attache");
        own.register_collector(Box::new(Counted { metrics: self.clone(), agent }));
        own.register_collector(Box::new(secrets));
        let mut out = String::new();
        // Writing to a String does not fail.
        let _ = encode(&mut out, &registry);
        format.of_open_metrics(out)
    }
}

/// The agent at the moment of a scrape.
#[derive(Clone, Debug)]
pub struct Agent {
    pub started: SystemTime,
    pub now: SystemTime,
    /// How it notices that files change.
    pub watched: WatchCount,
    pub hanging: HangingPaths,
    /// Lines that are missing from the log, by reason.
    pub log_lines_dropped: [(&'static str, u64); 2],
    /// Where Secrets of Kubernetes are read.
    pub clusters: Vec<ClusterCounts>,
}

/// A cluster at the moment of a scrape.
#[derive(Clone, Debug)]
pub struct ClusterCounts {
    pub cluster: String,
    pub is_reachable: bool,
    /// Objects that are followed there.
    pub names: usize,
    pub calls: u64,
    pub errors: u64,
}

/// The paths whose file systems do not answer.
#[derive(Clone, Copy, Debug, Default)]
pub struct HangingPaths {
    count: usize,
    /// Of the oldest.
    since: Option<SystemTime>,
}

impl HangingPaths {
    /// The oldest of `hanging` comes first.
    pub fn of(hanging: &[Hanging], clock: &Clock) -> Self {
        Self { count: hanging.len(), since: hanging.first().map(|one| one.since(clock)) }
    }
}

/// The counters. Each metric is described even before its first sample.
#[derive(Debug)]
struct Counted {
    metrics: Metrics,
    agent: Agent,
}

impl Collector for Counted {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let Self { metrics, agent: Agent { watched, hanging, log_lines_dropped, .. } } = self;
        let hanging_paths = ConstGauge::new(whole(hanging.count));
        let hanging_since = Known(hanging.since.map(seconds));
        let build = Info::new([("version", env!("CARGO_PKG_VERSION"))]);
        let metrics: &[(&str, &str, &dyn EncodeMetric)] = &[
            ("build", "Version of the agent", &build),
            ("connections", "Open connections to the SDS socket", &metrics.connections),
            ("refusals", "Refused connections, requests and names", &metrics.refusals),
            ("ca_requests", "Calls to the CA by outcome", &metrics.ca_requests),
            (
                "source_failures",
                "Times that mounted files, or Secrets of Kubernetes, could not be used",
                &metrics.source_failures,
            ),
            (
                "output_writes",
                "Generations written to the output directory by outcome",
                &metrics.output_writes,
            ),
            ("output_hooks", "Runs of the output hook by outcome", &metrics.output_hooks),
            ("hanging_paths", "Paths whose file systems do not answer", &hanging_paths),
        ];
        for (name, help, metric) in metrics {
            describe(&mut encoder, name, help, None, *metric)?;
        }
        let in_seconds: &[(&str, &str, &dyn EncodeMetric)] = &[
            ("ca_request_duration", "Duration of calls to the CA by outcome", &self.metrics.ca_durations),
            (
                "ca_last_request_timestamp",
                "When the last call to the CA with this outcome ended",
                &self.metrics.ca_last,
            ),
            ("hanging_since_timestamp", "When the oldest operation on such a path began", &hanging_since),
        ];
        for (name, help, metric) in in_seconds {
            describe(&mut encoder, name, help, Some(&Unit::Seconds), *metric)?;
        }
        let help = "Watched directories, by how changes are noticed";
        let mut family = encoder.encode_descriptor("watched_folders", help, None, MetricType::Gauge)?;
        for (mode, directories) in [("inotify", watched.inotify), ("polling", watched.polling)] {
            ConstGauge::new(whole(directories)).encode(family.encode_family(&[("mode", mode)])?)?;
        }
        csi::encode(&mut encoder, self.metrics.csi.get().map(|counts| &**counts))?;
        self.encode_clusters(&mut encoder)?;
        let help = "Log lines that were not written, by reason";
        let mut family = encoder.encode_descriptor("log_lines_dropped", help, None, MetricType::Counter)?;
        for (reason, lines) in log_lines_dropped {
            ConstCounter::new(*lines).encode(family.encode_family(&[("reason", *reason)])?)?;
        }
        Ok(())
    }
}

impl Counted {
    fn encode_clusters(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        type Of = fn(&ClusterCounts) -> u64;
        let gauges: [(&str, &str, Of); 2] = [
            ("cluster_reachable", "Whether the API server of a cluster answers", |it| it.is_reachable.into()),
            ("cluster_names", "Secrets and ConfigMaps that are followed in a cluster", |it| it.names as u64),
        ];
        let counters: [(&str, &str, Of); 2] = [
            ("cluster_calls", "Calls to the API server of a cluster", |it| it.calls),
            ("cluster_errors", "Calls to the API server of a cluster that failed", |it| it.errors),
        ];
        for (name, help, value) in gauges {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            for it in &self.agent.clusters {
                let value = i64::try_from(value(it)).unwrap_or(i64::MAX);
                ConstGauge::new(value).encode(family.encode_family(&[("cluster", it.cluster.as_str())])?)?;
            }
        }
        for (name, help, value) in counters {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
            for it in &self.agent.clusters {
                ConstCounter::new(value(it))
                    .encode(family.encode_family(&[("cluster", it.cluster.as_str())])?)?;
            }
        }
        Ok(())
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

/// Encodes one metric, whatever it holds.
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
