//! Limits the log lines that a client can cause: of each kind so many in a minute, then one that says how many there were.

use std::collections::HashMap;
use std::fmt::{self, Debug};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;
use tokio::time::Instant;
use tracing::callsite::Identifier;
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::{Event, Level, Metadata};
use tracing_subscriber::layer::{Context, Filter};

use crate::base::log_limit::{INTERVAL, LogLimit};
use crate::secret::SecretName;

/// The rooms whose lines clients cause: by what they send and request, and by how they connect.
const CAUSED_BY_PEERS: [&str; 6] = [
    "attache::serve",
    "attache::source::files",
    "attache::source::kubernetes",
    "attache::source::mint",
    "attache::net",
    "attache::agent::sockets",
];

/// Decides which events are logged. Lines of one place in the code are one kind. Clones share the counts.
#[derive(Clone, Debug, Default)]
pub(super) struct PeerLimits(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    /// The first line of an interval was suppressed.
    suppressing: Notify,
}

#[derive(Debug, Default)]
struct State {
    kinds: HashMap<Identifier, Kind>,
    /// Lines of all kinds.
    suppressed: u64,
}

#[derive(Debug, Default)]
struct Kind {
    limit: LogLimit,
    /// What the first suppressed line says.
    message: String,
}

impl PeerLimits {
    pub(super) fn suppressed(&self) -> u64 {
        self.lock().suppressed
    }

    /// Logs a summary of each interval with suppressed lines. Does not return.
    pub(super) async fn summarize(&self) {
        loop {
            let due = self.lock().kinds.values().filter_map(|kind| kind.limit.due()).min();
            match due {
                Some(due) => tokio::time::sleep(due.duration_since(Instant::now())).await,
                None => self.0.suppressing.notified().await,
            }
            for (lines, like) in self.summaries(Instant::now()) {
                tracing::warn!(lines, like, within = ?INTERVAL, "log lines suppressed");
            }
        }
    }

    /// How many lines were suppressed in the intervals that are over, and what they say.
    fn summaries(&self, now: Instant) -> Vec<(u64, String)> {
        let mut state = self.lock();
        let over = state.kinds.values_mut().filter_map(|kind| {
            let lines = kind.limit.summary(now)?;
            Some((lines, std::mem::take(&mut kind.message)))
        });
        over.collect()
    }

    fn admits(&self, event: &Event<'_>, now: Instant) -> bool {
        let metadata = event.metadata();
        if *metadata.level() > Level::INFO
            || !CAUSED_BY_PEERS.iter().any(|it| metadata.target().starts_with(it))
        {
            return true;
        }
        let mut shown = Shown::default();
        event.record(&mut shown);
        if shown.is_own && metadata.target().starts_with("attache::source") {
            return true;
        }
        let mut state = self.lock();
        let kind = state.kinds.entry(metadata.callsite()).or_default();
        let was_due = kind.limit.due().is_some();
        if kind.limit.admits(now) {
            return true;
        }
        if !was_due {
            kind.message = shown.message;
            self.0.suppressing.notify_one();
        }
        state.suppressed += 1;
        false
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<S> Filter<S> for PeerLimits {
    fn enabled(&self, _: &Metadata<'_>, _: &Context<'_, S>) -> bool {
        true
    }

    /// Without it events below the log's level would cost more.
    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(LevelFilter::TRACE)
    }

    fn event_enabled(&self, event: &Event<'_>, _: &Context<'_, S>) -> bool {
        self.admits(event, Instant::now())
    }
}

/// What decides about an event.
#[derive(Default)]
struct Shown {
    message: String,
    /// It is about the workload's own secrets: no client causes it, whatever clients request.
    is_own: bool,
}

impl Visit for Shown {
    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == "name" {
            self.is_own = value.parse::<SecretName>().is_ok_and(|name| !name.is_on_demand());
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        if field.name() == "message" {
            // Writing to a String does not fail.
            let _ = fmt::write(&mut self.message, format_args!("{value:?}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use tracing_subscriber::Layer as _;
    use tracing_subscriber::filter::FilterExt;
    use tracing_subscriber::layer::SubscriberExt as _;

    use super::*;
    use crate::base::log_limit::LINES;

    /// Counts the events that reach the log.
    #[derive(Clone, Default)]
    struct Logged(Arc<Mutex<Vec<String>>>);

    impl<S: tracing::Subscriber> tracing_subscriber::Layer<S> for Logged {
        fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
            let mut shown = Shown::default();
            event.record(&mut shown);
            self.0.lock().unwrap().push(shown.message);
        }
    }

    impl Logged {
        fn take(&self) -> Vec<String> {
            std::mem::take(&mut self.0.lock().unwrap())
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_clients_cause_is_limited_by_kind_and_summarized() {
        let (limits, logged) = (PeerLimits::default(), Logged::default());
        let subscriber = tracing_subscriber::registry().with(logged.clone().with_filter(limits.clone()));
        let _guard = tracing::subscriber::set_default(subscriber);
        let summaries = limits.clone();
        let summarize = async move { summaries.summarize().await };
        let mut summarize = std::pin::pin!(summarize);
        let lines = LINES as usize;
        for number in 0..10 * lines {
            tracing::warn!(target: "attache::serve::sds::stream", number, "stream refused");
            tracing::info!(target: "attache::source::files::publisher", name = "file-root:/x", "served");
            tracing::warn!(target: "attache::source::kubernetes::served", name = "kubernetes://x", "absent");
            tracing::info!(target: "attache::source::kubernetes::served", name = "x.example", "served");
            tracing::warn!(target: "attache::source::mint", name = "mint://x", "no room");
        }
        let seen = logged.take();
        assert_eq!(seen.iter().filter(|line| *line == "stream refused").count(), lines);
        assert_eq!(seen.len(), 5 * lines);
        assert_eq!(limits.suppressed(), 45 * lines as u64);
        // The summaries, and no others afterwards.
        let hour = tokio::time::sleep(60 * INTERVAL);
        tokio::select! {
            () = &mut summarize => {}
            () = hour => {}
        }
        assert_eq!(logged.take(), ["log lines suppressed"; 5]);
        // No limit for debugging, for other rooms, and for the workload's own secrets.
        for _ in 0..10 * lines {
            tracing::debug!(target: "attache::serve::sds::stream", "sent");
            tracing::info!(target: "attache::source::issuer::publish", "certificate issued");
            tracing::info!(target: "attache::source::files::publisher", name = "default", "own");
        }
        assert_eq!(logged.take().len(), 30 * lines);
    }

    #[test]
    fn the_level_of_the_log_stays_the_level_of_the_process() {
        let level = tracing_subscriber::filter::Targets::new().with_default(Level::INFO);
        let both = FilterExt::<tracing_subscriber::Registry>::and(level, PeerLimits::default());
        assert_eq!(Filter::<tracing_subscriber::Registry>::max_level_hint(&both), Some(LevelFilter::INFO));
    }

    #[test]
    fn the_rooms_have_these_names() {
        let names = [
            std::any::type_name::<crate::serve::peer::Peers>(),
            std::any::type_name::<crate::source::files::FileSource>(),
            std::any::type_name::<crate::source::kubernetes::KubernetesSource>(),
            std::any::type_name::<crate::source::mint::MintSource>(),
            std::any::type_name::<crate::net::address::Address>(),
        ];
        for (name, room) in names.iter().zip(CAUSED_BY_PEERS) {
            assert!(name.starts_with(room), "{name} is not in {room}");
        }
    }
}
