//! The log: lines on standard error, for people or as JSON.

use tracing_subscriber::Layer as _;
use tracing_subscriber::layer::SubscriberExt as _;

use crate::config::LogConfig;

/// Sends every event from here on to standard error. Only the first call has an effect.
pub fn init(config: &LogConfig) {
    let format = tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_target(false);
    let registry = tracing_subscriber::registry();
    let filter = config.filter.clone();
    let installed = if config.json {
        tracing::subscriber::set_global_default(
            registry.with(format.json().flatten_event(true).with_filter(filter)),
        )
    } else {
        // Envoy's and Kubernetes' logs are read with tools that show colours as noise.
        tracing::subscriber::set_global_default(registry.with(format.with_ansi(false).with_filter(filter)))
    };
    drop(installed);
}
