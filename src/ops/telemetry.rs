//! The log: lines on standard error, for people or as JSON.

use std::sync::{Arc, Mutex, PoisonError};

use tracing_subscriber::Layer as _;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::reload;

/// Level and format of the log.
#[derive(Clone, Debug)]
pub struct LogConfig {
    /// Levels by target.
    pub filter: Targets,
    /// One JSON object a line, instead of text.
    pub json: bool,
}

/// The log level, which can be changed while the agent runs. Clones are the same level.
#[derive(Clone)]
pub struct LogLevel {
    current: Arc<Mutex<Targets>>,
    reload: Arc<dyn Fn(Targets) -> Result<(), reload::Error> + Send + Sync>,
}

/// Levels by target, as `--log-level` takes them.
pub fn parse_filter(text: &str) -> Result<Targets, String> {
    let wrong = || format!("{text:?} is not a log level; choose error, warn, info, debug or trace");
    // `Targets` takes any word for the name of a target.
    if !text.contains('=') && text.parse::<tracing::level_filters::LevelFilter>().is_err() {
        return Err(wrong());
    }
    text.parse().map_err(|_| wrong())
}

/// Sends every event from here on to standard error. Only the first call has an effect.
pub fn init(config: &LogConfig) -> LogLevel {
    let format = tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_target(false);
    let registry = tracing_subscriber::registry();
    let current = Arc::new(Mutex::new(config.filter.clone()));
    let (filter, handle) = reload::Layer::new(config.filter.clone());
    let (installed, reload): (_, Arc<dyn Fn(Targets) -> _ + Send + Sync>) = if config.json {
        let layer = format.json().flatten_event(true).with_filter(filter);
        let installed = tracing::subscriber::set_global_default(registry.with(layer));
        (installed, Arc::new(move |filter| handle.reload(filter)))
    } else {
        // Envoy's and Kubernetes' logs are read with tools that show colours as noise.
        let layer = format.with_ansi(false).with_filter(filter);
        let installed = tracing::subscriber::set_global_default(registry.with(layer));
        (installed, Arc::new(move |filter| handle.reload(filter)))
    };
    drop(installed);
    LogLevel { current, reload }
}

impl LogLevel {
    /// A level of no log.
    #[cfg(any(test, fuzzing))]
    pub(super) fn detached() -> Self {
        let reload = |_| Ok(());
        let current = Targets::new().with_default(tracing::level_filters::LevelFilter::INFO);
        Self { current: Arc::new(Mutex::new(current)), reload: Arc::new(reload) }
    }

    /// The current level, as `--log-level` takes it.
    pub fn get(&self) -> String {
        self.current.lock().unwrap_or_else(PoisonError::into_inner).to_string()
    }

    /// Sets the level.
    pub fn set(&self, level: &str) -> Result<(), String> {
        let filter = parse_filter(level)?;
        (self.reload)(filter.clone()).map_err(|error| error.to_string())?;
        *self.current.lock().unwrap_or_else(PoisonError::into_inner) = filter;
        Ok(())
    }
}

impl std::fmt::Debug for LogLevel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "LogLevel({})", self.get())
    }
}
