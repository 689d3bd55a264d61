//! An inotify that refuses watches and loses events when a test says so.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use notify::event::Flag;
use notify::{ErrorKind, Event, EventHandler, EventKind};

use super::backend::Backend;
use super::index::SharedIndex;
use super::inotify::{Change, Inotify, Notifier, Outcomes, Report, Watching};
use super::{Watcher, lock};
use crate::fs::pending::PendingOperations;

/// The kernel's side of a [`Watcher`].
#[derive(Clone, Debug)]
pub(crate) struct Kernel {
    watcher: Watcher,
    switches: Switches,
}

#[derive(Clone, Debug, Default)]
struct Switches {
    refuses: Arc<AtomicBool>,
    loses: Arc<AtomicBool>,
}

/// A watcher, and its kernel's side. Without orders, that is the real inotify.
pub(crate) fn watcher() -> (Watcher, Kernel) {
    let switches = Switches::default();
    let notifier = |index| {
        let events = Events { index, loses: Arc::clone(&switches.loses) };
        Box::new(Limited { inotify: Inotify::new(events), refuses: Arc::clone(&switches.refuses) }) as Box<_>
    };
    let watcher = Watcher::with(PendingOperations::default(), Backend::default(), notifier);
    (watcher.clone(), Kernel { watcher, switches })
}

impl Kernel {
    /// From now on every new watch meets inotify's limit.
    pub(crate) fn refuse_watches(&self) {
        self.switches.refuses.store(true, Ordering::Relaxed);
    }

    /// From now on new watches are accepted again.
    pub(crate) fn accept_watches(&self) {
        self.switches.refuses.store(false, Ordering::Relaxed);
    }

    /// From now on all events are lost, as if inotify's queue were full.
    pub(crate) fn lose_events(&self) {
        self.switches.loses.store(true, Ordering::Relaxed);
    }

    /// Reports that events were lost, and reports events from now on.
    pub(crate) fn report_overflow(&self) {
        self.catch_up();
        let mut index = self.watcher.0.index.lock();
        self.switches.loses.store(false, Ordering::Relaxed);
        index.handle(Ok(Event::new(EventKind::Other).set_flag(Flag::Rescan)));
    }

    /// Returns once every watch is woken that events until now wake.
    pub(crate) fn catch_up(&self) {
        // Another thread may be changing what is watched.
        while !self.watcher.0.catch_up() {
            std::thread::yield_now();
        }
    }

    /// Whether `directory` is not watched for writes.
    pub(crate) fn is_noisy(&self, directory: &Path) -> bool {
        lock(&self.watcher.0.backend).is_noisy(directory)
    }

    /// How many directories and files are watched.
    pub(crate) fn watched(&self) -> usize {
        let count = self.watcher.count();
        count.inotify + count.polling
    }
}

/// Passes events on to the index while none are lost.
#[derive(Clone, Debug)]
struct Events {
    index: SharedIndex,
    loses: Arc<AtomicBool>,
}

impl EventHandler for Events {
    fn handle_event(&mut self, event: notify::Result<Event>) {
        let mut index = self.index.lock();
        if !self.loses.load(Ordering::Relaxed) {
            index.handle(event);
        }
    }
}

#[derive(Debug)]
struct Limited {
    inotify: Inotify<Events>,
    refuses: Arc<AtomicBool>,
}

impl Notifier for Limited {
    fn update(&mut self, report: Report, change: Change) -> Outcomes {
        if !self.refuses.load(Ordering::Relaxed) {
            return self.inotify.update(report, change);
        }
        let refused = || Watching::Limit(notify::Error::new(ErrorKind::MaxFilesWatch));
        let outcomes = change.watch.into_iter().take(1).map(|path| (path, refused())).collect();
        self.inotify.update(report, Change { unwatch: change.unwatch, watch: Vec::new() });
        outcomes
    }

    fn flush(&mut self) {
        self.inotify.flush();
    }
}
