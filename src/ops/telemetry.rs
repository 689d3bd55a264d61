//! The log: lines on standard error, for people or as JSON.

mod filter;
mod limit;

use std::io;
use std::panic::PanicHookInfo;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tracing_subscriber::Layer as _;
use tracing_subscriber::filter::{FilterExt as _, Targets};
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::reload;

pub use self::filter::parse_filter;
use self::limit::PeerLimits;
use crate::os::stderr::LogOutput;

/// How long the agent waits at its end for a standard error that is blocked.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// Level and format of the log.
#[derive(Clone, Debug)]
pub struct LogConfig {
    /// Levels by target.
    pub filter: Targets,
    /// One JSON object a line, instead of text.
    pub json: bool,
}

/// The log: its level, which can be changed while the agent runs, and its output. Clones are the same log.
#[derive(Clone)]
pub struct Log {
    current: Arc<Mutex<Targets>>,
    reload: Arc<dyn Fn(Targets) -> Result<(), reload::Error> + Send + Sync>,
    limits: PeerLimits,
    output: LogOutput,
}

/// Sends every event from here on to standard error. Only the first call has an effect.
pub fn init(config: &LogConfig) -> Log {
    let (output, limits) = (LogOutput::stderr(), PeerLimits::default());
    let format = tracing_subscriber::fmt::layer().with_writer(output.clone()).with_target(false);
    let registry = tracing_subscriber::registry();
    let current = Arc::new(Mutex::new(config.filter.clone()));
    let (filter, handle) = reload::Layer::new(config.filter.clone());
    let filter = filter.and(limits.clone());
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
    let log = Log { current, reload, limits, output };
    std::panic::set_hook(Box::new({
        let log = log.clone();
        move |panic| log.panicked(panic)
    }));
    log
}

impl Log {
    /// The log of an agent that logs nothing.
    #[cfg(any(test, fuzzing))]
    pub(super) fn detached() -> Self {
        let reload = |_| Ok(());
        let current = Targets::new().with_default(tracing::level_filters::LevelFilter::INFO);
        let (output, limits) = (LogOutput::stderr(), PeerLimits::default());
        Self { current: Arc::new(Mutex::new(current)), reload: Arc::new(reload), limits, output }
    }

    /// Where its lines go.
    pub fn output(&self) -> LogOutput {
        self.output.clone()
    }

    /// The current level, as `--log-level` takes it.
    pub fn get(&self) -> String {
        self.current.lock().unwrap_or_else(PoisonError::into_inner).to_string()
    }

    /// Sets the level.
    pub fn set(&self, level: &str) -> Result<(), String> {
        self.set_filter(parse_filter(level)?)
    }

    /// Sets the levels by target.
    pub fn set_filter(&self, filter: Targets) -> Result<(), String> {
        (self.reload)(filter.clone()).map_err(|error| error.to_string())?;
        *self.current.lock().unwrap_or_else(PoisonError::into_inner) = filter;
        Ok(())
    }

    /// Keeps all lines back until [`Self::release`], because the thread that writes them would keep rights that the
    /// process is about to give up.
    pub fn hold(&self) {
        self.output.hold();
    }

    pub fn release(&self) {
        self.output.release();
    }

    /// Logs how many lines were suppressed, whenever some were. Does not return.
    pub async fn summarize(self) {
        self.limits.summarize().await;
    }

    /// Lines that are missing from the log: those that standard error did not take, and those that were suppressed because
    /// a client causes too many of them.
    pub fn missing_lines(&self) -> MissingLines {
        MissingLines { blocked: self.output.dropped(), suppressed: self.limits.suppressed() }
    }

    /// Has the last lines written, as far as that is possible in a moment. `last` is one more.
    pub fn close(&self, last: Option<&str>) {
        if let Some(last) = last {
            self.output.push(format!("{last}\n").as_bytes());
        }
        self.output.flush(LAST_WORDS);
    }

    fn panicked(&self, panic: &PanicHookInfo<'_>) {
        let thread = std::thread::current();
        let message = format!("thread '{}' {panic}", thread.name().unwrap_or("without a name"));
        self.close(Some(&message));
    }
}

/// How many lines are missing from the log, and why.
#[derive(Clone, Copy, Debug, Default)]
pub struct MissingLines {
    pub blocked: u64,
    pub suppressed: u64,
}

impl std::fmt::Debug for Log {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Log({})", self.get())
    }
}

impl<'a> MakeWriter<'a> for LogOutput {
    type Writer = Lines<'a>;

    fn make_writer(&'a self) -> Self::Writer {
        Lines(self)
    }
}

/// Takes whole lines: each event is written at once.
#[derive(Debug)]
pub struct Lines<'a>(&'a LogOutput);

impl io::Write for Lines<'_> {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.0.push(line);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
