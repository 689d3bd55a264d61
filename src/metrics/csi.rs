//! The CSI driver's counters. They exist only where there is a driver.

use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Unit;

use super::{ByResult, describe};

/// What the kubelet has called, and was answered. Clones count together.
#[derive(Clone, Debug)]
pub struct CsiCounts {
    /// Calls to publish a volume.
    pub publishes: Calls,
    /// Calls to remove one.
    pub unpublishes: Calls,
    /// How long they waited for a volume's first certificate.
    pub publish_wait: Histogram,
    /// Volumes that are served, or being made.
    pub volumes: Gauge,
    /// 1 while the kubelet has the driver registered, as far as is known.
    pub registered: Gauge,
}

/// Calls by outcome.
#[derive(Clone, Debug)]
pub struct Calls(Family<ByResult, Counter>);

impl Calls {
    fn new() -> Self {
        let calls = Family::default();
        // Prometheus sees no increase in a counter that first appears at 1.
        for outcome in ["ok", "unavailable", "deadline_exceeded"] {
            drop(calls.get_or_create(&ByResult { outcome }));
        }
        Self(calls)
    }

    /// Counts a call that was answered with `outcome`.
    pub fn count(&self, outcome: &'static str) {
        self.0.get_or_create(&ByResult { outcome }).inc();
    }
}

impl Default for CsiCounts {
    fn default() -> Self {
        Self {
            publishes: Calls::new(),
            unpublishes: Calls::new(),
            publish_wait: Histogram::new([0.1, 1.0, 10.0]),
            volumes: Gauge::default(),
            registered: Gauge::default(),
        }
    }
}

/// Without a driver the metrics have no samples.
pub(super) fn encode(
    encoder: &mut DescriptorEncoder<'_>,
    counts: Option<&CsiCounts>,
) -> Result<(), std::fmt::Error> {
    let mut one = |name: &str, help: &str, unit: Option<&Unit>, metric: &dyn EncodeMetric| {
        if counts.is_some() {
            describe(encoder, name, help, unit, metric)
        } else {
            encoder.encode_descriptor(name, help, unit, metric.metric_type()).map(drop)
        }
    };
    let CsiCounts { publishes, unpublishes, publish_wait, volumes, registered } =
        counts.cloned().unwrap_or_default();
    one("csi_publishes", "Calls to publish a volume by outcome", None, &publishes.0)?;
    one("csi_unpublishes", "Calls to remove a volume by outcome", None, &unpublishes.0)?;
    let help = "How long calls to publish a volume waited for its first certificate";
    one("csi_publish_wait", help, Some(&Unit::Seconds), &publish_wait)?;
    one("csi_volumes", "Volumes that are served, or being made", None, &volumes)?;
    one("csi_registered", "1 while the kubelet has registered the driver", None, &registered)
}
